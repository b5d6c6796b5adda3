"""A run killed at any instant goes on with the same numbers, to the bit."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.report.metrics import read_metrics
from lading.units import MiB
from tests.runs import num_lines, start, wait_until, write_run

STEPS = 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("run"))
    path.write_text(path.read_text().replace("steps = 40", f"steps = {STEPS}"))
    return path


@pytest.fixture(scope="module")
def reference(run: Path) -> Path:
    """The out folder of the run, trained at one go by the real command line."""
    out = run.parent / "reference"
    command_line(str(run), f"out={out}")
    return out


def command_line(*argv: str) -> None:
    command = [sys.executable, "-m", "lading.cli.main", "train", *argv]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


def state(out: Path) -> tuple[int, bytes]:
    """Step and bytes of the newest checkpoint, all of which are checked."""
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    checkpoint = open_checkpoint(newest)
    checkpoint.verify()
    return checkpoint.step, (newest / "state.safetensors").read_bytes()


def assert_same_run(out: Path, reference: Path) -> None:
    records, wanted = read_metrics(out / "metrics.jsonl"), read_metrics(reference / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["loss"] for record in records] == [record["loss"] for record in wanted]
    assert [record["lr"] for record in records] == [record["lr"] for record in wanted]
    assert state(out) == state(reference)
    assert state(out)[0] == STEPS


def kill(process: BaseProcess, out: Path, kind: str, chance: random.Random) -> None:
    """SIGKILL while it trains, while it saves, or at any time since its start."""
    before = num_lines(out / "metrics.jsonl")
    if kind == "anywhere":
        time.sleep(chance.uniform(0, 1))
    elif kind == "training":
        wait_until(lambda: num_lines(out / "metrics.jsonl") != before, process)
        time.sleep(chance.uniform(0, 0.1))
    else:
        wait_until(lambda: any((out / "checkpoints").glob("*.tmp-*")), process)
        time.sleep(chance.uniform(0, 3e-3))
    process.kill()
    process.join()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_instants(run: Path, reference: Path, tmp_path: Path, kills: int) -> None:
    chance, out, log = random.Random(kills), tmp_path / "out", tmp_path / "log"
    arguments = ["train", str(run), f"out={out}", "--resume"]
    killed = 0
    for number in range(kills):
        by_plan = number % 2 == 1 and (out / "plan.json").exists()
        process = start(log, *(["train", "--plan", str(out / "plan.json"), "--resume"] if by_plan else arguments))
        kill(process, out, ("training", "saving", "anywhere")[number % 3], chance)
        killed += process.exitcode == -9
        if latest_checkpoint(out / "checkpoints") is not None:
            step, _ = state(out)
            steps = [record["step"] for record in read_metrics(out / "metrics.jsonl")]
            assert steps == list(range(len(steps)))
            assert len(steps) >= step
        assert not list(out.glob("lading-swap-*"))
    print(f"{killed} of {kills} were killed before they had ended")
    assert killed >= min(kills, 3)
    process = start(log, *arguments)
    process.join(120)
    assert process.exitcode == 0, log.read_text()
    assert_same_run(out, reference)
    assert (out / "report.html").exists()
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-00000095", "step-00000100"]


def test_another_budget_goes_on_with_the_same_numbers(run: Path, reference: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    process = start(log, "train", str(run), f"out={out}")
    assert wait_until(lambda: num_lines(out / "metrics.jsonl") >= 12, process)
    process.kill()
    process.join()
    process = start(log, "train", str(run), f"out={out}", "memory.budget=100%", "checkpoint.keep=1", "--resume")
    process.join(120)
    assert process.exitcode == 0, log.read_text()
    assert_same_run(out, reference)


def test_a_run_that_had_ended_is_reported_again(run: Path, reference: Path, tmp_path: Path) -> None:
    before = state(reference), (reference / "metrics.jsonl").read_bytes(), (reference / "measured.json").read_bytes()
    (reference / "report.html").unlink()
    process = start(tmp_path / "log", "train", "--plan", str(reference / "plan.json"), "--resume")
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert f"in {STEPS} steps" in (tmp_path / "log").read_text()
    assert (reference / "report.html").exists()
    assert (
        state(reference),
        (reference / "metrics.jsonl").read_bytes(),
        (reference / "measured.json").read_bytes(),
    ) == before


def grown_bytes(out: Path) -> int:
    """How much the highest resident set rose after the first ten steps."""
    sizes = [record["memory_bytes"] for record in read_metrics(out / "metrics.jsonl")]
    return sizes[-1] - sizes[9]


def test_memory_does_not_grow(reference: Path) -> None:
    assert grown_bytes(reference) < MiB


@pytest.mark.slow
def test_memory_does_not_grow_over_many_steps_of_a_large_text(run: Path, tmp_path: Path) -> None:
    command_line(str(run), f"out={tmp_path}/out", "optimization.steps=400", "data.source=stdlib")
    assert grown_bytes(tmp_path / "out") < MiB
