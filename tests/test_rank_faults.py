"""Ranks of a job that are killed at random instants go on with the numbers of one process, in any layout."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.cli.main import main
from lading.config import load_run
from lading.report.metrics import read_metrics
from lading.train import train_run
from tests.runs import num_lines, set_up
from tests.test_train_ranks import written

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 24
SETTINGS = (
    "model.sizes={dim=64, num_layers=2, num_heads=2}",
    "memory={policy='keep-all', budget='100%'}",
    "checkpoint={every_steps=3}",
)


def asked(path: Path, layout: str, ranks: int, out: Path, micro: int = 2) -> list[str]:
    """Arguments of ``lading`` that train the run, on ``micro`` micro-batches a step whatever the layout."""
    accumulation = micro // (1 if layout.startswith("pp") else ranks)
    moved = f"optimization={{steps={STEPS}, accumulation={accumulation}}}"
    return ["train", str(path), "--no-cache", *SETTINGS, moved, f"layout='{layout}'", f"out={out}"]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The run's file; torchrun leaves handlers of signals behind, which are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    before |= {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)}
    yield written(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


def _work(log: Path, argv: list[str]) -> None:
    set_up(log)
    log.with_name(f"pid {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['RANK']}").write_text(str(os.getpid()))
    if code := main(argv):
        sys.exit(code)


def run_job(log: Path, argv: list[str], ranks: int, restarts: int, disturb: Callable[[int], None]) -> bool:
    """Train on ranks that torchrun starts, while ``disturb(start)`` goes on beside it for each start of the job.

    Returns:
        Whether it ended well.
    """
    for old in log.parent.glob("pid *"):
        old.unlink()

    def beside() -> None:
        for number in range(restarts + 1):
            disturb(number)

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="faults",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    try:
        elastic_launch(config, _work)(log, argv)
    except ChildFailedError:
        return False
    finally:
        thread.join(60)
    return True


def until(done: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not done() and time.monotonic() < end:
        time.sleep(1e-3)


def kill_one(log: Path, out: Path, number: int, ranks: int, chance: random.Random) -> None:
    """SIGKILL a rank of a start of the job while it trains, while it saves, or at any time."""
    victim, kind = log.with_name(f"pid {number} {chance.randrange(ranks)}"), chance.choice(("train", "save", "any"))
    before = num_lines(out / "metrics.jsonl")
    until(victim.exists)
    if kind == "any":
        time.sleep(chance.uniform(0, 2))
    elif kind == "train":
        until(lambda: num_lines(out / "metrics.jsonl") != before)
        time.sleep(chance.uniform(0, 0.2))
    else:
        until(lambda: any((out / "checkpoints").glob("*.tmp-*")), 10)
        time.sleep(chance.uniform(0, 3e-3))
    with suppress(ProcessLookupError):  # it had ended
        os.kill(int(victim.read_text()), signal.SIGKILL)


def curve(out: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(out / "metrics.jsonl")]


def reference(path: Path, micro: int) -> list[tuple[int, float]]:
    """The curve of one process to which nothing happens."""
    out = path.parent / "whole"
    train_run(load_run(path, asked(path, "", 1, out, micro)[3:]))
    return curve(out)


def assert_went_on(out: Path, path: Path, micro: int = 2, rel: float = 0.0) -> None:
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    assert open_checkpoint(newest).step == STEPS
    open_checkpoint(newest).verify()
    assert not list((out / "checkpoints").glob("*.tmp-*"))
    whole = reference(path, micro)
    assert [step for step, _ in curve(out)] == [step for step, _ in whole]
    assert [loss for _, loss in curve(out)] == pytest.approx([loss for _, loss in whole], rel=rel, abs=0.0)


def test_ranks_killed_at_random_are_started_again_by_torchrun(path: Path, tmp_path: Path) -> None:
    out, log, chance = tmp_path / "out", tmp_path / "log", random.Random(1)

    def disturb(number: int) -> None:
        if number < 2:
            kill_one(log, out, number, 2, chance)

    assert run_job(log, asked(path, "dp2,zero3", 2, out), 2, 2, disturb), log.read_text()
    assert_went_on(out, path)


#: Layouts in which a run goes on, one after another, with their ranks; the micro-batches of a step; and how far losses
#: may be off where four ranks add in another order: a rounding of float32 a step, and what becomes of it.
WAYS = [
    pytest.param([("dp2,zero3", 2), ("pp2", 2), ("", 1)], 2, 0.0, id="two ranks"),
    pytest.param([("dp4,zero3", 4), ("pp2", 2), ("", 1)], 4, 1e-5, id="four ranks", marks=pytest.mark.slow),
    pytest.param([("pp4", 4), ("dp2", 2), ("dp4", 4), ("", 1)], 4, 1e-5, id="more", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize(("ways", "micro", "rel"), WAYS)
def test_killed_and_resumed_in_another_layout(
    path: Path, tmp_path: Path, ways: list[tuple[str, int]], micro: int, rel: float, seed: int
) -> None:
    out, log, chance = tmp_path / "out", tmp_path / "log", random.Random(seed)
    for layout, ranks in ways[:-1]:
        argv = [*asked(path, layout, ranks, out, micro), "--resume"]
        run_job(log, argv, ranks, 0, lambda number, ranks=ranks: kill_one(log, out, number, ranks, chance))
    train_run(load_run(path, asked(path, "", 1, out, micro)[3:]), resume=True)
    assert_went_on(out, path, micro, rel)
