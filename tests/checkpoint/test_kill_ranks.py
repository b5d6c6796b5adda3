"""Ranks that step and save, killed at random instants: nothing saved is lost, nothing partial is loaded."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests import ranks
from tests.test_replicas import batch, build, captured, machine
from torch.multiprocessing.spawn import ProcessContext, start_processes

import lading
from lading.checkpoint.store import latest_checkpoint, open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def _step_and_save(rank: int, root: str, last: int) -> None:
    """Go on from the newest checkpoint, and save after every step, by turns while ranks wait and beside the next step.

    The first rank notes what is saved for sure.
    """
    folder, graph = Path(root), captured("llama", torch.float32, 1)
    (folder / f"rank {rank}").mkdir(exist_ok=True)
    newest = latest_checkpoint(folder / "saved")
    with lading.Trainer(folder / "plan.json", graph, build(), folder=folder / f"rank {rank}") as trainer:
        if newest is not None:
            trainer.load(newest)
        assert not trainer.staging_shortage()
        while trainer.steps < last:
            trainer.step(batch(trainer.steps, rank))
            waits = trainer.steps % 2 == 1
            trainer.save(folder / "saved", meta={"step": trainer.steps}, keep=1, keep_every_steps=10, wait=waits)
            if rank == 0 and waits:
                (folder / "reported").write_text(f"{trainer.steps}")


def started(root: Path, meet: str, last: int) -> ProcessContext:
    arguments = (2, meet, _step_and_save, (str(root), last))
    context = start_processes(ranks._run, arguments, nprocs=2, join=False, start_method="forkserver")
    assert context is not None
    return context


def end(context: ProcessContext) -> None:
    for process in context.processes:
        process.kill()
    for process in context.processes:
        process.join()


def kill_at_random(root: Path, chance: random.Random) -> bool:
    """Start the ranks, kill one or both once they save; returns whether a checkpoint was being written."""
    before = (root / "reported").read_text() if (root / "reported").exists() else ""
    with tempfile.TemporaryDirectory() as meet:
        context = started(root, meet, 1 << 30)
        try:
            until = time.monotonic() + 60
            while not (root / "reported").exists() or (root / "reported").read_text() in ("", before):
                assert time.monotonic() < until, "the ranks save nothing"
                assert all(process.is_alive() for process in context.processes)
                time.sleep(1e-3)
            time.sleep(chance.uniform(0, 0.15))
            for process in chance.choice((context.processes[:1], context.processes[1:], context.processes)):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(chance.choice((0, 0.02)))
        finally:
            end(context)
    return any((root / "saved").glob("*.tmp-*"))


@pytest.mark.slow  # one kill of ranks is a default test of tests/test_rank_faults.py
@pytest.mark.parametrize("kills", [5, 200])
def test_ranks_killed_while_they_save(kills: int, tmp_path: Path) -> None:
    graph, chance, writing = captured("llama", torch.float32, 1), random.Random(kills), 0
    plan = lading.plan(graph, machine(), layout="dp2,zero3", budget="1GB", cache=False)
    plan.save(tmp_path / "plan.json")
    last = 0
    for _ in range(kills):
        writing += kill_at_random(tmp_path, chance)
        newest = latest_checkpoint(tmp_path / "saved")
        assert newest is not None
        for path in (tmp_path / "saved").glob("step-*"):
            if ".tmp-" not in path.name:
                open_checkpoint(path).verify()
        last = open_checkpoint(newest).step
        assert last >= int((tmp_path / "reported").read_text() or 0)
        assert all((tmp_path / "saved" / f"step-{step:08d}").is_dir() for step in range(10, last, 10))
    print(f"{kills} kills, of which {writing} while a checkpoint was written; {last} steps")
    assert kills < 20 or 0 < writing < kills
    saved = []
    for folder in (
        tmp_path,
        tmp_path / "whole",
    ):  # the values are those to which nothing happened, after a few more steps
        folder.mkdir(exist_ok=True)
        plan.save(folder / "plan.json")
        with tempfile.TemporaryDirectory() as meet:
            context = started(folder, meet, last + 4)
            while not context.join():
                continue
        path = latest_checkpoint(folder / "saved")
        assert path is not None
        saved.append({name: tensor.digest for name, tensor in open_checkpoint(path).tensors.items()})
        assert not list((folder / "saved").glob("*.tmp-*"))
    assert saved[0] == saved[1]
