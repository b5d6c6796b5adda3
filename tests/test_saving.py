"""Checkpoints written beside training are those that training would have waited for."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.checkpoint.saver import SaveOrder, Saver
from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.config import load_run
from lading.errors import BudgetWarning, ConfigError, StorageError
from lading.hosts import machine_of
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan
from lading.memory.restore import programs_of, restore_program
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.prepare import plan, plan_run
from lading.runtime.resident import UNSEEN_BYTES
from lading.staging_layout import planned_staging_bytes
from lading.tracing.trace import capture
from lading.train import train_run
from lading.trainer import Trainer
from lading.units import MiB
from tests.machines import small_machine
from tests.ranks import run_ranks
from tests.runs import OVERHEAD_BYTES, write_run
from tests.test_pipelines import connected

SIZES: dict[str, Any] = {"dim": 64, "num_layers": 2, "num_heads": 2, "dropout": 0.1}


pytestmark = pytest.mark.usefixtures("one_thread")


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model("gpt", **SIZES)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(0, 256, (4, 33), generator=generator)}


@cache
def graph_of() -> StepGraph:
    return capture(model_of(), batch_of(0), next_byte_loss)


def trainer_of(folder: Path, budget: str | int = "1GB", **settings: Any) -> Trainer:
    made = plan(graph_of(), small_machine(), budget=budget, **settings)
    return Trainer(made, graph_of(), model_of(), folder=folder, threads=1)


def contents(path: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(path)
    return {name: b"".join(map(bytes, checkpoint.chunks(name))) for name in checkpoint.tensors}


def test_a_checkpoint_beside_training_is_that_of_its_step_to_the_bit(tmp_path: Path) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        waited = trainer.save(tmp_path / "waited", meta={"a": 1})
        beside = trainer.save(tmp_path / "beside", meta={"a": 1}, wait=False)
        losses = [trainer.step(batch_of(step)) for step in (1, 2)]
        trainer.wait_saved()
        assert beside.name == waited.name == "step-00000001"
        assert contents(beside) == contents(waited)
        assert open_checkpoint(beside).meta == {"a": 1}
        later = trainer.save(tmp_path / "beside", wait=False)
        third = trainer.step(batch_of(3))
    with trainer_of(tmp_path) as trainer:
        trainer.load(beside)
        assert [trainer.step(batch_of(step)) for step in (1, 2)] == losses
        trainer.load(later)  # which the end of the trainer has waited for
        assert trainer.step(batch_of(3)) == third


def test_one_save_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    save = Saver.save

    def slow(self: Saver, wanted: SaveOrder) -> list[str]:
        time.sleep(0.2)
        told = save(self, wanted)
        order.append(f"{wanted.step}")
        return told

    monkeypatch.setattr(Saver, "save", slow)
    with trainer_of(tmp_path) as trainer:
        for step in range(3):
            trainer.step(batch_of(step))
            trainer.save(tmp_path / "saved", wait=step == 2)
            order.append(f"asked {step + 1}")
    assert order == ["asked 1", "1", "asked 2", "2", "asked 3"]


def test_without_room_in_the_budget_training_waits_and_says_so(tmp_path: Path) -> None:
    with trainer_of(tmp_path, "100%") as trainer:
        trainer.step(batch_of(0))
        with pytest.warns(BudgetWarning, match="written while training waits: .* the memory budget leaves .* raise it"):
            path = trainer.save(tmp_path / "saved", wait=False)
        assert open_checkpoint(path).step == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.save(tmp_path / "saved", wait=False)  # said once


def test_staging_memory_is_in_the_budget(tmp_path: Path) -> None:
    """One byte less than what is needed is too little; what is measured is the plan's peak and that."""
    with trainer_of(tmp_path, "100%") as trainer:
        peak, shortage = trainer.program.peak_bytes, trainer.staging_shortage()
        needed = sum(value.nbytes for value in map(trainer.value, trainer._values))
    assert "of memory would stage them" in shortage
    with trainer_of(tmp_path, peak + needed) as trainer:  # lines are rounded up, and the generator's state comes beside
        assert trainer.staging_shortage()
    with trainer_of(tmp_path, peak + needed + (1 << 16)) as trainer:
        assert not trainer.staging_shortage()


def stopped(trainer: Trainer) -> int:
    """Number of the process that saves, which writes nothing until it is killed."""
    saver = trainer._saves._background.saver
    assert saver is not None
    assert saver.pid is not None
    os.kill(saver.pid, signal.SIGSTOP)
    return saver.pid


def kill(pid: int) -> None:
    """Kill a process that saves, when it has been told what."""
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("told_by", ["save", "wait_saved", "check_saved", "end"])
def test_a_saver_that_dies_is_told_by_whatever_comes_next(told_by: str, tmp_path: Path) -> None:
    folder, words = tmp_path / "saved", r"the checkpoint of step 2, saved beside training, is not written: .*SIGKILL"
    trainer = trainer_of(tmp_path)
    trainer.step(batch_of(0))
    trainer.save(folder, wait=False)
    trainer.wait_saved()
    pid = stopped(trainer)
    trainer.step(batch_of(1))
    trainer.save(folder, wait=False)
    trainer.check_saved()  # nothing is known yet
    loss = trainer.step(batch_of(2))
    kill(pid)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: trainer.save(folder),
        "wait_saved": trainer.wait_saved,
        "check_saved": lambda: checked_until(trainer),
        "end": trainer.close,
    }
    with pytest.raises(StorageError, match=words):
        calls[told_by]()
    assert latest_checkpoint(folder) == folder / "step-00000001"
    if told_by != "end":
        path = trainer.save(folder, wait=False)  # the next may be tried
        trainer.close()
        assert latest_checkpoint(folder) == path
        assert [each for each in folder.iterdir() if ".tmp-" in each.name] == []  # what the dead one left
    with trainer_of(tmp_path) as again:
        again.load(folder / "step-00000001")
        assert [again.step(batch_of(step)) for step in (1, 2)][1] == loss


def checked_until(trainer: Trainer) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        trainer.check_saved()
        time.sleep(0.01)


def failing_loop(tmp_path: Path, error: BaseException, *, dies: bool = False) -> None:
    with trainer_of(tmp_path) as trainer:
        trainer.step(batch_of(0))
        trainer.save(tmp_path / "saved", wait=False)
        if dies:
            trainer.wait_saved()
            trainer.step(batch_of(1))
            pid = stopped(trainer)
            trainer.save(tmp_path / "saved", wait=False)
            kill(pid)
        raise error


def test_a_loop_that_fails_waits_for_its_save_and_keeps_its_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        failing_loop(tmp_path, KeyboardInterrupt())
    assert latest_checkpoint(tmp_path / "saved") == tmp_path / "saved" / "step-00000001"
    with pytest.raises(ValueError, match="mine") as caught:
        failing_loop(tmp_path, ValueError("mine"), dies=True)
    assert any("step 2, saved beside training" in note for note in caught.value.__notes__)
    assert latest_checkpoint(tmp_path / "saved") == tmp_path / "saved" / "step-00000001"


def test_meta_is_refused_before_anything_is_staged(tmp_path: Path) -> None:
    with trainer_of(tmp_path) as trainer:
        with pytest.raises(ConfigError, match="JSON"):
            trainer.save(tmp_path / "saved", meta={"a": object()}, wait=False)
        assert trainer._saves._background.memory is None


@pytest.mark.long
def test_a_run_saves_beside_training_and_predicts_its_peak_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    short = ("optimization.steps=11", 'memory.budget="1GB"', "checkpoint.keep=9")
    beside = plan_run(load_run(path, short))
    waits = plan_run(load_run(path, (*short, "checkpoint.wait=true")))
    staged = beside.program.staging_bytes
    assert staged > 0 == waits.program.staging_bytes
    assert beside.plan.peak_bytes["device"] == waits.plan.peak_bytes["device"] + staged
    assert restore_program(beside.plan, beside.step.graph, machine_of(beside.run)).staging_bytes == staged
    result = train_run(beside.plan)
    checkpoints = tmp_path / "out" / "checkpoints"
    assert [each.name for each in sorted(checkpoints.glob("step-*"))] == [f"step-{n:08d}" for n in (5, 10, 11)]
    assert result.peak_bytes <= beside.plan.peak_bytes["device"]
    assert "while training waits" not in capsys.readouterr().out
    other = tmp_path / "other"
    assert (
        train_run(plan_run(load_run(path, (*short, "checkpoint.wait=true", f"out={other}"))).plan).losses
        == result.losses
    )
    for each in checkpoints.glob("step-*"):
        assert contents(each) == contents(other / "checkpoints" / each.name)
    train_run(load_run(path, ("optimization.steps=1", f"out={tmp_path / 'tight'}")))
    told = " ".join(capsys.readouterr().out.split())
    assert "checkpoints are written while training waits" in told
    assert "(checkpoint.wait = true in a run)" in told


SCRIPT = """
import sys
from pathlib import Path
from tests.test_saving import batch_of, trainer_of
folder = Path(sys.argv[1])
trainer = trainer_of(folder)
trainer.step(batch_of(0))
trainer.save(folder / "saved", wait=False)
"""


@pytest.mark.slow
def test_a_process_that_ends_without_closing_waits_for_its_save(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, check=True, timeout=100)
    assert latest_checkpoint(tmp_path / "saved") == tmp_path / "saved" / "step-00000001"


#: Number of ranks beside the first that have something of a checkpoint, by layout.
OTHERS = {"dp2": 0, "dp2,zero3": 1, "dp2,pp2": 1, "dp4,zero1": 3}


def staged_of(made: Plan, graph: StepGraph | None = None) -> list[int]:
    """Bytes that each rank stages, as a plan counts them."""
    programs = [programs_of(each, graph or graph_of(), ())[0] for each in (made, *made.peers)]
    return planned_staging_bytes(programs, made.parsed_layout, [("random", torch.get_rng_state().numel())])


def _on_ranks(rank: int, layouts: list[str], out: str) -> None:
    for number, layout in enumerate(layouts):
        folder = Path(out) / f"{number}"
        made = plan(graph_of(), connected(), budget="1GB", layout=layout, cache=False)
        with Trainer(made, graph_of(), model_of(), folder=folder / f"{rank}", threads=1) as trainer:
            trainer.step(batch_of(made.replica(rank)))
            waited = trainer.save(folder / "waited")
            beside = trainer.save(folder / "beside", wait=False)
            trainer.step(batch_of(2 + made.replica(rank)))
            trainer.wait_saved()
            assert contents(beside) == contents(waited)
            share = trainer._saves._share
            assert share is not None
            assert share.gathered == []
            assert len(share.watched_ranks) == (OTHERS[layout] if rank == 0 else 0)
            assert share.staging.size_bytes == staged_of(made)[rank]
            again = trainer.save(folder / "beside", wait=False)
            trainer.wait_saved()
            assert contents(again) == contents(trainer.save(folder / "waited"))
            pid = stopped(trainer) if rank == 0 else 0
            trainer.save(folder / "beside", wait=False)
            if pid:
                kill(pid)
            with pytest.raises((StorageError, ConfigError), match="the checkpoint of step 2, saved beside training"):
                trainer.wait_saved()


@pytest.mark.parametrize(
    ("ranks", "layouts"), [(2, ["dp2", "dp2,zero3"]), pytest.param(4, ["dp2,pp2", "dp4,zero1"], marks=pytest.mark.slow)]
)
def test_ranks_save_beside_training(ranks: int, layouts: list[str], tmp_path: Path) -> None:
    run_ranks(_on_ranks, ranks, layouts, str(tmp_path))


#: A state of some 40 MB.
LARGE: dict[str, Any] = {"dim": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 10_000, "tied": False}


def _peaks(rank: int, model: str, layouts: list[str], out: str) -> None:
    sizes = {**LARGE, "num_experts": 4} if model == "moe" else LARGE
    graph = capture(build_model(model, **sizes), batch_of(0), next_byte_loss)
    machine = dataclasses.replace(small_machine(overhead_bytes=OVERHEAD_BYTES), collectives=connected().collectives)
    for layout in layouts:
        made, waits = (
            plan(graph, machine, budget="1GB", layout=layout, cache=False, stage_saves=stages)
            for stages in (True, False)
        )
        staged, stage, folder = staged_of(made, graph), made.parsed_layout.place(rank)["pp"], Path(out) / layout
        most = max(size for other, size in enumerate(staged) if made.parsed_layout.place(other)["pp"] == stage)
        assert made.of_rank(rank).peak_bytes["device"] == waits.of_rank(rank).peak_bytes["device"] + most
        with Trainer(made, graph, build_model(model, **sizes), folder=folder / f"{rank}", threads=1) as trainer:
            for step in range(3):
                trainer.step(batch_of(2 * step + made.replica(rank)))
            before, settled = trainer.peak_bytes, trainer._executor.step_peak_bytes
            trainer.save(folder / "saved", wait=False)
            trainer.step(batch_of(6 + made.replica(rank)))
            trainer.wait_saved()
            share = trainer._saves._share
            assert share is not None
            assert share.staging.size_bytes == staged[rank]
            assert bool(share.gathered) is ("tp" in layout)
            grown = trainer._executor.step_peak_bytes - settled - staged[rank]
            # Less by up to two buffers of gathers, which gloo has or has not at the peak of an earlier step.
            assert -4 * UNSEEN_BYTES <= grown <= 2 * UNSEEN_BYTES, f"{layout}, rank {rank}: {grown / MiB:+.2f} MiB"
            assert most > 12 * UNSEEN_BYTES
            trainer.save(folder / "waited")  # which gathers all that ranks share
            grown = trainer.peak_bytes - before - staged[rank]
            saving = max(0, trainer.program.save_bytes - trainer.program.workspace_bytes)
            assert saving < 6 * MiB  # of which gathering has 3; the largest tensor, gathered whole, would take 12
            assert grown <= 2 * UNSEEN_BYTES + saving, f"{layout}, rank {rank}, waited: {grown / MiB:+.2f} MiB"
            assert trainer.peak_bytes <= made.of_rank(rank).peak_bytes["device"]
            assert trainer.program.staging_bytes == most


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("gpt", ["dp2,zero3", "tp2"]),
        pytest.param("gpt", ["dp2", "pp2", "dp2,zero1", "cp2"], marks=pytest.mark.slow),
        pytest.param("moe", ["dp2,ep2"], marks=pytest.mark.slow),
    ],
)
def test_ranks_take_the_staging_memory_that_their_plan_predicts(model: str, layouts: list[str], tmp_path: Path) -> None:
    """The peak of each rank grows by what it stages; that of the busiest rank is the plan's."""
    run_ranks(_peaks, 2, model, layouts, str(tmp_path))


def test_a_plan_for_ranks_says_where_training_has_to_wait(tmp_path: Path) -> None:
    settings = {"layout": "dp2,zero3", "cache": False, "stage_saves": True}
    tight = plan(graph_of(), connected(), budget="100%", policy="keep-all", **settings)
    words = next(each for each in tight.assumptions if "written while training waits" in each)
    assert programs_of(tight, graph_of(), ())[0].staging_bytes == 0
    missing = int(tight.budgets["device"] + max(staged_of(tight)))
    for budget, fits in ((missing - 1, False), (missing, True)):
        made = plan(graph_of(), connected(), budget=budget, policy="keep-all", **settings)
        assert (programs_of(made, graph_of(), ())[0].staging_bytes > 0) is fits
    assert "raise it by" in words
    run = load_run(write_run(tmp_path), ["layout=dp2", 'memory.budget="1GB"'])
    machine = dataclasses.replace(small_machine(overhead_bytes=OVERHEAD_BYTES), collectives=connected().collectives)
    assert plan_run(run, machine, devices=2).program.staging_bytes > 0
    waits = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, wait=True))
    assert plan_run(waits, machine, devices=2).program.staging_bytes == 0
