"""A run counts its clipped steps, and is planned again where they are more or fewer than it was told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lading import clipping_watch, prepare, replanning
from lading.cli.main import main
from lading.clipping_watch import ClippingWatch, chance
from lading.config import RunConfig, load_run
from lading.errors import ConfigError
from lading.ir.graph import StepGraph
from lading.ir.guess import SPECULATES
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.planner import speculating
from lading.planner.api import Planned
from lading.planner.speculating import GuessMaker
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.run import Prepared
from lading.train import train_run
from lading.trainer import Trainer
from tests.runs import write_run

SETTINGS = ("optimization.steps=7", "optimization.clip_norm=2.0", "memory.budget=98.5%", "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return load_run(write_run(tmp_path_factory.mktemp("run")), SETTINGS)


@pytest.fixture(autouse=True)
def _guesses_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of few clipped steps do not wait, whether that gains anything in a step so small or not."""

    def plan_here(make: GuessMaker, budget: str | float, step: StepGraph, clipped: float) -> Planned:
        waits = make(None, budget)
        made = speculating._on_a_guess(make, step, waits.plan.budgets["device"]) if clipped < 0.5 else waits
        assert made is not None, "some values of the step are in a lower tier"
        return made

    monkeypatch.setattr(prepare, "plan_speculating", plan_here)


def run_in(asked: RunConfig, out: Path, *, clipped: float | None, limit: float = 2.0, steps: int = 7) -> RunConfig:
    """The run in a folder, clipped by a limit; ``clipped`` is the share that it is told."""
    moved = dataclasses.replace(asked.optimization, clip_norm=limit, steps=steps)
    memory = dataclasses.replace(asked.memory, clipped=clipped)
    return dataclasses.replace(asked, out=str(out), memory=memory, optimization=moved)


def metrics(out: Path) -> tuple[list[float], list[str]]:
    """Losses, and the plan of each step."""
    records = list(read_metrics(out / "metrics.jsonl"))
    return [record["loss"] for record in records], [record["plan"] for record in records]


def test_many_clipped_steps_make_updates_wait_and_numbers_stay(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, guesses = (run_in(asked, tmp_path / name, clipped=c) for name, c in (("waits", None), ("guesses", 0.0)))
    train_run(waits, cache=True)
    told: list[float | None] = []

    def plan_here(before: Prepared, machine: Machine) -> Plan:
        told.append(before.run.memory.clipped)
        return plan_run(before.run, machine, cache=True).plan

    monkeypatch.setattr(clipping_watch, "_LOOK_STEPS", 4)
    monkeypatch.setattr(clipping_watch, "_WORTH_S", 0.0)
    monkeypatch.setattr(replanning, "plan_apart", plan_here)
    capsys.readouterr()
    train_run(guesses, cache=True)
    said = " ".join("".join(capsys.readouterr()).split())
    losses, plans = metrics(tmp_path / "guesses")
    assert losses == metrics(tmp_path / "waits")[0]
    assert plans[:4] == plans[:1] * 4
    assert plans[4:] == [metrics(tmp_path / "waits")[1][0]] * 3, said
    assert "90% of the last 4 steps were clipped; planned again for that in" in said
    assert told == [0.9]
    saved = Plan.load(tmp_path / "guesses" / "plan.json")
    assert saved.fingerprint == plans[-1]
    assert SPECULATES not in saved.request.settings


def test_a_run_goes_on_and_its_saved_plan_runs(
    asked: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps are clipped and some are not; a plan file has what waits."""
    limit, norms, step = 2.6, list[float | None](), Trainer.step

    def noting(trainer: Trainer, *args: Any, **named: Any) -> float:
        loss = step(trainer, *args, **named)
        norms.append(trainer.gradient_norm)
        return loss

    monkeypatch.setattr(Trainer, "step", noting)
    train_run(run_in(asked, tmp_path / "waits", clipped=None, limit=limit), cache=True)
    assert 0 < sum(norm is not None and norm > limit for norm in norms) < len(norms)
    first = run_in(asked, tmp_path / "first", clipped=0.0, limit=limit, steps=4)
    train_run(first, cache=True)
    train_run(run_in(asked, tmp_path / "first", clipped=0.0, limit=limit), resume=True, cache=True)
    plan = plan_run(run_in(asked, tmp_path / "saved", clipped=0.0, limit=limit), cache=True).plan
    assert SPECULATES in plan.request.settings
    plan.save(tmp_path / "plan.json")
    train_run(Plan.load(tmp_path / "plan.json"))
    losses = metrics(tmp_path / "waits")[0]
    assert metrics(tmp_path / "first")[0] == losses
    assert metrics(tmp_path / "saved")[0] == losses


def watch_of(share: float, monkeypatch: pytest.MonkeyPatch) -> tuple[ClippingWatch, Any, list[float]]:
    """A watch over a trainer that runs no step, and the shares that it planned for."""
    planned: list[float] = []
    memory, moved = SimpleNamespace(clipped=share), SimpleNamespace(clip_norm=1.0)
    prepared: Any = SimpleNamespace(run=SimpleNamespace(memory=memory, optimization=moved))
    trainer: Any = SimpleNamespace(gradient_norm=0.0, speculation=None)
    host = SimpleNamespace(look=lambda _: None, advance=lambda _: "", prepared=prepared)
    monkeypatch.setattr(clipping_watch, "HostWatch", lambda *_, **__: host)

    def in_vain(self: Any, share: float) -> str:
        planned.append(share)
        return "in vain"

    monkeypatch.setattr(ClippingWatch, "_planned_again", in_vain)
    return ClippingWatch(prepared, trainer, plans=True), trainer, planned


def look(watch: ClippingWatch, trainer: Any, norms: list[float]) -> str:
    for norm in norms:
        trainer.gradient_norm = norm
        watch.look(0.1)
    return watch.advance(10**12)


def test_a_run_is_planned_again_only_where_the_share_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, trainer, planned = watch_of(0.02, monkeypatch)
    assert not look(watch, trainer, [0.5] * 31 + [2.0])
    assert not look(watch, trainer, [2.0] * 31)  # before as many steps as are looked at
    assert look(watch, trainer, [float("nan")]) == "98% of the last 32 steps were clipped; in vain"
    assert not look(watch, trainer, [2.0] * 32)  # as before
    assert look(watch, trainer, [1.0 - 1e-5] * 32) == "2% of the last 32 steps were clipped; in vain"
    assert planned == [32.5 / 33, 0.5 / 33]
    trainer.gradient_norm = 2.0
    for _ in range(32):
        watch.look(0.1)
    assert not watch.advance(0)  # nothing left to train


def test_a_step_that_ran_twice_says_nothing_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, trainer, _ = watch_of(0.02, monkeypatch)
    looks: list[int] = []
    host: Any = watch._host
    trainer.speculation = SimpleNamespace(again=0)
    host.look = lambda _: looks.append(trainer.speculation.again)
    for again in (0, 1, 1, 2):
        trainer.speculation.again = again
        watch.look(0.1)
    assert looks == [0, 1]


def test_chance_is_that_of_a_counted_share() -> None:
    assert chance(0.5, 0.5, 25) == pytest.approx(0.0797885)
    assert chance(0.0, 0.0, 25) == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["memory.clipped=1.5"], "clipped: expected a number >= 0 and < 1, got 1.5"),
        (["memory.clipped=0.1", "optimization.clip_norm=0"], "got clip_norm=0; leave clipped out"),
        (["memory.clipped=0.1", "optimization.compile=true"], "got compile=True; leave clipped out"),
        (["memory.clipped=0.1", "validation.share=0.1"], r"got further steps \(others=, or validation\)"),
    ],
)
def test_what_cannot_run_on_a_guess_is_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    file = write_run(tmp_path)
    with pytest.raises(ConfigError, match=words):
        plan_run(load_run(file, (*SETTINGS, *settings)))
    assert main(["train", str(file), *SETTINGS, *settings]) == 2
