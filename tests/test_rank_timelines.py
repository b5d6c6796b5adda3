"""Timelines of all ranks after a step: who waited for whom, what each took, and which rank is slow."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lading
from lading import trainer as trainers
from lading.ir.action import Action, ActionKind
from lading.ir.job_timeline import JobTimeline
from lading.models.loss import next_byte_loss
from lading.runtime import measuring
from lading.runtime.executor import Executor
from tests.ranks import run_ranks
from tests.test_pipelines import connected
from tests.test_replicas import batch, build

#: Seconds that an operation of the slow rank sleeps.
SLEEP_S = 0.001
LAYOUTS = ("dp2", "dp2,zero3", "pp2")


def train(rank: int, layout: str, folder: Path, steps: int = 3) -> JobTimeline | None:
    """Train a small Llama; returns the timelines of its last step."""
    model = build("llama")
    graph = lading.capture(model, batch(0, 0), next_byte_loss, accumulation=2)
    plan = lading.plan(graph, connected(), layout=layout, budget="100%", cache=False, policy="keep-all")
    with lading.Trainer(plan, graph, model, folder=folder) as trainer:
        for step in range(steps):
            trainer.step([batch(step, 2 * plan.replica(rank) + number) for number in range(2)])
        mine = trainer.rank_timeline()
        trainer.evaluate([batch(9, number) for number in range(2)])
        with pytest.raises(lading.ConfigError, match="found an evaluation"):
            trainer.rank_timeline()
        job = trainer.timelines(mine)
    assert (job is None) == (rank > 0)
    return job


def _sleep(action: Action) -> None:
    if action.kind is ActionKind.COMPUTE and action.stream == "compute":
        time.sleep(SLEEP_S)


def _each_layout(rank: int, root: str) -> None:
    for layout in LAYOUTS:
        if (job := train(rank, layout, Path(root))) is not None:
            job.save(Path(root) / f"{layout}.json")


def _one_slow(rank: int, root: str) -> None:
    """Train two replicas, of which the second sleeps in each operation, and has a clock of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(trainers, "Executor", partial(Executor, jitter=_sleep))
            patch.setattr(measuring, "clock_id", lambda: "another host's")
            patch.setattr(measuring.time, "perf_counter", partial(_ahead, time.perf_counter))
            patch.setattr(measuring.StepNotes, "rank_timeline", _on_its_clock(measuring.StepNotes.rank_timeline))
        if (job := train(rank, "dp2", Path(root))) is not None:
            job.save(Path(root) / "slow.json")


def _ahead(clock: Any) -> float:
    return clock() + 3600.0


def _on_its_clock(made: Any) -> Any:
    """Shift what a rank measured as its clock is."""

    def shifted(*args: Any) -> Any:
        line = made(*args)
        return measuring.replace(line, start_s=line.start_s + 3600.0)

    return shifted


def check(job: JobTimeline) -> None:
    """Compare what a job's ranks say with each other."""
    assert [each.rank for each in job.ranks] == [0, 1]
    assert {communication.key for communication in job.ranks[0].communications} == {
        communication.key for communication in job.ranks[1].communications
    }
    for each, times in zip(job.ranks, job.times, strict=True):
        assert each.communications
        assert each.peak_bytes > 0
        assert 0 < each.predicted_bytes <= each.budget_bytes
        assert len(each.computing_s) == 3
        assert each.computing_s[-1] == pytest.approx(each.busy_s, rel=1e-6)
        whole_s = times.computing_s + times.transfer_s + times.waiting_s
        assert 0.2 * times.step_s < whole_s <= times.step_s * (1 + 1e-9)
        assert 0 <= each.start_s < 10.0  # where clocks were not compared, an hour
        assert each.came_s < each.start_s


def test_a_rank_that_sleeps_is_named_whatever_its_clock(tmp_path: Path) -> None:
    run_ranks(_one_slow, 2, str(tmp_path))
    job = JobTimeline.load(tmp_path / "slow.json")
    check(job)
    first, second = job.ranks
    assert first.clock_error_s == 0.0 < second.clock_error_s
    assert job.slow is not None
    assert job.slow.rank == 1
    assert job.slow.factor > 2  # it sleeps far longer than it computes
    assert (job.slow.steps, job.slow.of_steps) == (3, 3)
    slept_s = SLEEP_S * sum(event.stream == "compute" for event in second.timeline.events) / 3
    assert second.busy_s > first.busy_s + slept_s
    assert job.times[0].waited_for == 1
    assert job.times[0].waiting_s > 0.5 * (second.busy_s - first.busy_s)
    assert job.slow.cost_s == pytest.approx(job.times[0].waiting_s, rel=1e-6)
    assert job.times[1].waiting_s < 0.1 * job.times[0].waiting_s


@pytest.mark.slow
def test_ranks_of_every_layout_are_measured(tmp_path: Path) -> None:
    run_ranks(_each_layout, 2, str(tmp_path))
    for layout in LAYOUTS:
        job = JobTimeline.load(tmp_path / f"{layout}.json")
        check(job)
        assert [each.clock_error_s for each in job.ranks] == [0.0, 0.0]
