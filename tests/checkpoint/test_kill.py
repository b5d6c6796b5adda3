"""A saver killed at any instant leaves a complete checkpoint."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from lading.checkpoint.store import latest_checkpoint, open_checkpoint, save_checkpoint

#: Calls into the file system before which a saver may die.
CALLS = ("write", "fsync", "rename", "rmdir", "unlink", "mkdir")


def data_of(step: int) -> bytes:
    return step.to_bytes(4, "little") * 700_000


def save(folder: Path, steps: range, die_at: int, said: TextIO) -> None:
    """Save steps, and tell of each; die by SIGKILL before the ``die_at``-th call into the file system if that is > 0.

    In a process of its own: the module ``os`` is changed.
    """
    calls = 0

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in CALLS if die_at else ():
        setattr(os, name, deadly(getattr(os, name)))
    for step in steps:
        data = data_of(step)
        save_checkpoint(folder, step, [("w", "uint8", [len(data)], [memoryview(data)])], {"step": step}, 1)
        said.write(f"{step}\n")
        said.flush()


class Saver:
    """Process that saves; forked, as one that is started anew takes a quarter of a second to import what it needs."""

    def __init__(self, folder: Path, steps: range, die_at: int = 0) -> None:
        told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with open(tell, "w") as said:
                    save(folder, steps, die_at, said)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(tell)
        self.told = os.fdopen(told)

    def ended(self) -> tuple[list[int], int]:
        """Wait for the end; returns the steps that were told of, and the exit status, negative for a signal."""
        with self.told:
            steps = [int(line) for line in self.told]
        return steps, os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def assert_complete(folder: Path, reported: int) -> None:
    """The newest checkpoint is not older than the last one the saver reported, and all that are there are whole."""
    for path in folder.glob("step-*"):
        if ".tmp-" not in path.name:
            open_checkpoint(path).verify()
    latest = latest_checkpoint(folder)
    if latest is None:
        assert reported == 0
        return
    checkpoint = open_checkpoint(latest)
    assert checkpoint.step >= reported
    assert checkpoint.meta == {"step": checkpoint.step}
    expected = hashlib.sha256(data_of(checkpoint.step)).hexdigest()
    assert hashlib.sha256(b"".join(checkpoint.chunks("w"))).hexdigest() == expected


@pytest.mark.long
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path: Path, kills: int) -> None:
    chance = random.Random(0)
    saved = 0
    for _ in range(kills):
        saver = Saver(tmp_path, range(saved + 1, 1_000_000))
        first = int(saver.told.readline())  # it is at work
        time.sleep(chance.uniform(0, 0.1))
        os.kill(saver.pid, signal.SIGKILL)
        steps, status = saver.ended()
        assert status == -signal.SIGKILL
        assert_complete(tmp_path, max([first, *steps]))
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        saved = open_checkpoint(latest).step
    assert saved >= kills
    save_checkpoint(tmp_path, saved + 1, [], {}, 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{saved + 1:08d}"]


@pytest.mark.long
@pytest.mark.parametrize("first", [5, 4])
def test_killed_before_every_call_into_the_file_system(tmp_path: Path, first: int) -> None:
    """``first`` 4 saves step 4 again, so that the replacement of a checkpoint is interrupted too."""
    die_at = status = 0
    for die_at in range(1, 60):
        folder = tmp_path / str(die_at)
        data = data_of(4)
        save_checkpoint(folder, 4, [("w", "uint8", [len(data)], [memoryview(data)])], {"step": 4}, 1)
        steps, status = Saver(folder, range(first, first + 1), die_at).ended()
        assert_complete(folder, max(steps, default=4))
        save_checkpoint(folder, 6, [], {}, 1)
        assert [path.name for path in folder.iterdir()] == ["step-00000006"]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert die_at > 8
    assert status == 0
