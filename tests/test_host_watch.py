"""A run compares its first steps with their prediction, and is planned again for the host as it is now."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lading import host_watch, replanning
from lading.config import RunConfig, crowded_words, load_run
from lading.host_watch import HostWatch, load_words, memory_words, speed_words
from lading.ir.machine import HostSpeed, Machine
from lading.ir.plan import Plan
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.run import Prepared
from lading.summary import write_run_report
from lading.train import train_run
from lading.units import GiB, KiB, MiB
from tests.runs import write_run

STEPS = 14


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return load_run(write_run(tmp_path_factory.mktemp("run")), (f"optimization.steps={STEPS}",))


def metrics(out: Path) -> tuple[list[float], list[str]]:
    """Losses, and the plan of each step."""
    records = list(read_metrics(out / "metrics.jsonl"))
    return [record["loss"] for record in records], [record["plan"] for record in records]


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.long
def test_a_run_says_what_takes_another_time_than_its_machine_file_says(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The machine of the tests is made up, so this host differs from it.
    train_run(dataclasses.replace(asked, out=str(tmp_path / "out")))
    said = one_line("".join(capsys.readouterr()))
    assert said.count("were predicted: beside the machine file,") == 1
    assert "other operations" in said
    assert "planned again" not in said  # seconds of training are left


@pytest.mark.long
def test_a_run_is_planned_again_between_two_steps_and_keeps_its_numbers(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, again = (dataclasses.replace(asked, out=str(tmp_path / name)) for name in ("plain", "again"))
    train_run(plain)

    def plan_here(before: Prepared, machine: Machine) -> Plan:
        smaller = dataclasses.replace(before.run.memory, budget=before.plan.budgets["device"] - 256 * KiB)
        return plan_run(dataclasses.replace(before.run, memory=smaller), machine).plan

    monkeypatch.setattr(host_watch, "_WORTH_S", 0.0)
    monkeypatch.setattr(host_watch, "_SAVED", -1e9)
    monkeypatch.setattr(replanning, "plan_apart", plan_here)
    capsys.readouterr()
    result = train_run(again)
    losses, plans = metrics(tmp_path / "again")
    assert losses == metrics(tmp_path / "plain")[0]
    assert plans[:9] == plans[:1] * 9
    assert len(set(plans[9:])) == 1
    assert plans[9] != plans[8]
    assert "planned again for this speed" in one_line("".join(capsys.readouterr()))
    saved = Plan.load(tmp_path / "again" / "plan.json")
    assert saved.fingerprint == plans[9]
    assert result.predicted_step_s == saved.step_s
    write_run_report(tmp_path / "again")  # of the plan that ran last


@pytest.mark.slow
def test_a_plan_is_made_apart_and_taken_where_it_saves_time(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_watch, "_WORTH_S", 0.0)
    train_run(dataclasses.replace(asked, out=str(tmp_path / "out")))
    said = one_line("".join(capsys.readouterr()))
    assert "planned again for this speed in" in said
    assert ("saves nothing: " in said) != ("step predicted" in said)


@pytest.mark.long
def test_why_no_other_plan_was_made_is_said(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_watch, "_WORTH_S", 0.0)
    monkeypatch.setattr(replanning, "_PLAN", "import sys; sys.exit('no plan today')")
    train_run(dataclasses.replace(asked, out=str(tmp_path / "out")))
    said = one_line("".join(capsys.readouterr()))
    assert "in vain: no plan today; the run keeps its plan" in said
    assert len(set(metrics(tmp_path / "out")[1])) == 1


def test_a_saved_plan_is_kept(
    asked: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_watch, "_WORTH_S", 0.0)
    train_run(plan_run(dataclasses.replace(asked, out=str(tmp_path / "out")), cache=True).plan)
    said = one_line("".join(capsys.readouterr()))
    assert "beside the machine file" in said
    assert "planned again" not in said


def watched(monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> list[str]:
    """What a watch says after each step, of a run whose steps take so long where 0.1 s were predicted."""
    plan = SimpleNamespace(step_s=0.1, choices=SimpleNamespace(gaps=(), deferred=(), hosted=()), fingerprint="a")
    prepared: Any = SimpleNamespace(plan=plan, predicted=None, run=SimpleNamespace(num_threads=1))
    trainer: Any = SimpleNamespace(plan=plan, program=None)
    monkeypatch.setattr(host_watch, "measured_speed", lambda *_: HostSpeed(tiers={"disk.read": timelines[-1] / 0.1}))
    monkeypatch.setattr(host_watch, "load_words", lambda *_: "")
    watch, said, timelines = HostWatch(prepared, trainer, plans=False), list[str](), list[float]()

    def timeline_of(step_s: float) -> Any:
        timelines.append(step_s)
        return SimpleNamespace(timeline=SimpleNamespace(duration_s=step_s))

    for step_s in seconds:
        trainer.rank_timeline = partial(timeline_of, step_s)
        watch.look(step_s)
        said.append(watch.advance(10))
    return said


def test_a_disk_that_is_busy_later_is_told_within_ten_steps_and_once_it_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = watched(monkeypatch, [0.1] * 40 + [0.5] * 40 + [0.1] * 20)
    told = {number: words for number, words in enumerate(said) if words}
    assert len(told) == 2
    first, second = told
    assert 40 < first < 50
    assert told[first] == (
        "steps take 500.0 ms now, 100.0 ms before, 100.0 ms were predicted: beside the machine file, reads of the disk "
        "5.00 times as long"
    )
    assert 80 < second < 90
    assert told[second] == "steps take 100.0 ms now, 500.0 ms before, 100.0 ms were predicted"


def test_a_few_slow_steps_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(watched(monkeypatch, ([0.1] * 10 + [0.5, 0.5]) * 5))
    assert not any(watched(monkeypatch, [0.1] * 20 + [0.12] * 20))


def test_more_threads_than_processors_are_told(asked: RunConfig) -> None:
    assert not crowded_words(dataclasses.replace(asked, threads=1))
    assert f"threads = {10_000}, but this process may use" in crowded_words(dataclasses.replace(asked, threads=10_000))


def test_memory_that_others_have_is_told() -> None:
    assert memory_words(100 * MiB, 8 * GiB) == "; other processes leave 100.00 MiB of 8.00 GiB of memory: end some"
    assert not memory_words(GiB, 8 * GiB)
    assert not memory_words(None, 8 * GiB)


def test_words_name_what_differs() -> None:
    speed = HostSpeed(products=1.1, others=2.0, tiers={"disk.read": 0.5, "disk.write": 1.0, "host.write": 3.0})
    assert speed_words(speed) == (
        "beside the machine file, other operations 2.00, reads of the disk 0.50, writes of the host 3.00 times as long"
    )
    assert not speed_words(HostSpeed())


@pytest.mark.parametrize(
    ("share", "threads", "words"),
    [
        (None, 2, ""),
        (0.1, 2, ""),
        (0.4, 1, "; meanwhile other processes took 40% of the processors"),
        (
            0.4,
            2,
            "; meanwhile other processes took 40% of the processors; with 2 threads each waits for the slowest: try "
            "threads = 1",
        ),
    ],
)
def test_what_others_take_of_the_processors_is_said(share: float | None, threads: int, words: str) -> None:
    assert load_words(share, threads) == words
