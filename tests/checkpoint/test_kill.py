"""A saver killed at any instant leaves a complete checkpoint."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lading.checkpoint.store import latest_checkpoint, open_checkpoint, save_checkpoint

# Saves steps 1, 2, ... whose bytes follow from the step. It dies by SIGKILL before its n-th call into the file
# system when n > 0. The store itself needs no torch, so this starts in a tenth of a second.
SAVER = """
import os, shutil, signal, sys
from pathlib import Path
from lading.checkpoint.store import save_checkpoint
folder, first, last, die_at = Path(sys.argv[1]), *map(int, sys.argv[2:5])
assert "torch" not in sys.modules
calls = 0
def deadly(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
if die_at:
    for name in ("write", "fsync", "rename", "rmdir", "unlink", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))
for step in range(first, last):
    data = step.to_bytes(4, "little") * 700_000
    save_checkpoint(folder, step, [("w", "uint8", [len(data)], [memoryview(data)])], {"step": step}, 1)
    print(step, flush=True)
"""


def start(folder: Path, first: int, last: int, die_at: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SAVER, str(folder), str(first), str(last), str(die_at)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


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
    expected = hashlib.sha256(checkpoint.step.to_bytes(4, "little") * 700_000).hexdigest()
    assert hashlib.sha256(b"".join(checkpoint.chunks("w"))).hexdigest() == expected


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path: Path, kills: int) -> None:
    chance = random.Random(0)
    saved = 0
    for _ in range(kills):
        saver = start(tmp_path, saved + 1, 1_000_000, 0)
        assert saver.stdout is not None
        saver.stdout.readline()  # it is at work
        time.sleep(chance.uniform(0, 0.1))
        saver.send_signal(signal.SIGKILL)
        lines = saver.communicate(timeout=20)[0].split()
        assert_complete(tmp_path, max(map(int, lines), default=saved))
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        saved = open_checkpoint(latest).step
    assert saved >= kills
    save_checkpoint(tmp_path, saved + 1, [], {}, 1)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{saved + 1:08d}"]


@pytest.mark.parametrize("first", [5, 4])
def test_killed_before_every_call_into_the_file_system(tmp_path: Path, first: int) -> None:
    """``first`` 4 saves step 4 again, so that the replacement of a checkpoint is interrupted too."""
    for die_at in range(1, 60):
        folder = tmp_path / str(die_at)
        data = (4).to_bytes(4, "little") * 700_000
        save_checkpoint(folder, 4, [("w", "uint8", [len(data)], [memoryview(data)])], {"step": 4}, 1)
        saver = start(folder, first, first + 1, die_at)
        lines = saver.communicate(timeout=20)[0].split()
        assert_complete(folder, max(map(int, lines), default=4))
        save_checkpoint(folder, 6, [], {}, 1)
        assert [path.name for path in folder.iterdir()] == ["step-00000006"]
        if saver.returncode == 0:
            break
        assert saver.returncode == -signal.SIGKILL
    assert die_at > 8
    assert saver.returncode == 0
