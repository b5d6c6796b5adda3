"""A run killed at any instant goes on with the same numbers, to the bit."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.config import load_run
from lading.ir.defer import updates
from lading.ir.plan import Plan
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.units import MiB
from tests.runs import num_lines, saved_plan, start, wait_until, write_run

STEPS = 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("run"))
    path.write_text(path.read_text().replace("steps = 40", f"steps = {STEPS}"))
    return path


@pytest.fixture(scope="module")
def made(run: Path) -> Plan:
    """The plan of the run."""
    threads = torch.get_num_threads()
    result = plan_run(load_run(run), cache=True).plan
    torch.set_num_threads(threads)
    return result


@pytest.fixture(scope="module")
def reference(run: Path, made: Plan) -> Path:
    """The out folder of the run, trained at one go."""
    out = run.parent / "reference"
    command_line(out.with_name("log"), "--plan", str(saved_plan(made, out)))
    return out


def command_line(log: Path, *argv: str) -> None:
    process = start(log, "train", *argv)
    process.join(120)
    assert process.exitcode == 0, log.read_text()


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


@pytest.mark.long
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_instants(run: Path, made: Plan, reference: Path, tmp_path: Path, kills: int) -> None:
    """Started by a plan and planned anew by turns."""
    chance, out, log = random.Random(kills), tmp_path / "out", tmp_path / "log"
    by_plan = ["--plan", str(saved_plan(made, out)), "--resume"]
    killed = 0
    for number in range(kills):
        process = start(log, "train", *([str(run), f"out={out}", "--resume"] if number % 2 else by_plan))
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
    command_line(log, *by_plan)
    assert_same_run(out, reference)
    assert (out / "report.html").exists()
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-00000095", "step-00000100"]


def killed_between_saves(log: Path, out: Path, plan: Path) -> int:
    """Run a plan and kill it; returns how many steps had ended since the newest checkpoint, at least one."""
    process = start(log, "train", "--plan", str(plan))
    assert wait_until(lambda: num_lines(out / "metrics.jsonl") >= 12, process), log.read_text()
    wait_until(lambda: num_lines(out / "metrics.jsonl") % 5 == 2, process)
    process.kill()
    process.join()
    assert process.exitcode == -9
    return num_lines(out / "metrics.jsonl") - state(out)[0]


def test_another_budget_goes_on_with_the_same_numbers(run: Path, made: Plan, reference: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    killed_between_saves(log, out, saved_plan(made, out))
    command_line(log, str(run), f"out={out}", "memory.budget=100%", "checkpoint.keep=1", "--resume")
    assert_same_run(out, reference)


@pytest.mark.long
def test_killed_while_updates_wait_for_the_next_step(
    run: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every update is deferred, so they wait whenever a step has ended: what was saved has them all."""
    monkeypatch.setattr("lading.planner.orders._counts", lambda step: (len(updates(step.graph)),))
    threads = torch.get_num_threads()
    prepared = plan_run(load_run(run))
    torch.set_num_threads(threads)
    assert prepared.plan.choices.deferred == len(prepared.step.captured.parameters)
    out, log = tmp_path / "out", tmp_path / "log"
    assert killed_between_saves(log, out, saved_plan(prepared.plan, out)) > 0
    command_line(log, "--plan", str(out / "plan.json"), "--resume")
    assert_same_run(out, reference)


def test_a_run_that_had_ended_is_reported_again(reference: Path, tmp_path: Path) -> None:
    before = state(reference), (reference / "metrics.jsonl").read_bytes(), (reference / "measured.json").read_bytes()
    (reference / "report.html").unlink()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    leftover = reference / "checkpoints" / f"step-00000090.tmp-{gone.pid}"  # killed while it deleted a checkpoint
    leftover.mkdir()
    command_line(tmp_path / "log", "--plan", str(reference / "plan.json"), "--resume")
    assert not leftover.exists()
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
    command_line(tmp_path / "log", str(run), f"out={tmp_path}/out", "optimization.steps=400", "data.source=stdlib")
    assert grown_bytes(tmp_path / "out") < MiB
