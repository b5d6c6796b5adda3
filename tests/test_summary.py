"""Summary of a run on ranks: the peak that counts is that of the rank nearest to its own budget."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from lading.errors import BudgetExceeded
from lading.ir.job_timeline import JobTimeline
from lading.summary import MOST_RANKS_TOLD, Peak, RunResult, nearest_its_budget
from lading.train import _checked
from lading.units import MiB
from tests.rank_steps import job_of, replica


def job_with(*peaks: tuple[int, int, int]) -> JobTimeline:
    """Ranks by peak, prediction and budget in MiB."""
    names = ("peak_bytes", "predicted_bytes", "budget_bytes")
    facts = [dict(zip(names, (size * MiB for size in each), strict=True)) for each in peaks]
    return job_of(*(dataclasses.replace(replica(rank, 1.0, 2.0), **each) for rank, each in enumerate(facts)))


def plan_of(predicted: int, budget: int, *peers: Any) -> Any:
    return SimpleNamespace(peak_bytes={"device": predicted * MiB}, budgets={"device": budget * MiB}, peers=peers)


PREPARED: Any = SimpleNamespace(plan=plan_of(80, 100, plan_of(40, 50)))


def result(job: JobTimeline, largest: int) -> RunResult:
    fullest = nearest_its_budget(PREPARED, job, largest * MiB)
    sizes = (fullest.peak_bytes, fullest.predicted_bytes, fullest.budget_bytes)
    facts: Any = dict(zip(("peak_bytes", "predicted_peak_bytes", "budget_bytes"), sizes, strict=True))
    peaks = tuple(map(Peak.of_rank, job.ranks))
    return RunResult(
        out="out", losses=(1.0,), step_s=1.0, spread_s=0.0, predicted_step_s=1.0, rank_peaks=peaks, **facts
    )


def test_a_small_rank_above_its_own_budget_breaks_the_promise() -> None:
    """The larger peak of the other rank, within a larger budget, does not hide it."""
    told = result(job_with((90, 80, 100), (51, 40, 50)), 90)
    assert "peak memory 51.00 MiB of 50.00 MiB (predicted 40.00 MiB)" in str(told)
    assert "  rank 0: 90.00 MiB of 100.00 MiB (predicted 80.00 MiB)" in str(told)
    with pytest.raises(BudgetExceeded, match=r"measured peak 51\.00 MiB of rank 1 is above the budget of 50\.00 MiB"):
        _checked(told)
    assert _checked(result(job_with((90, 80, 100), (49, 40, 50)), 90)).budget_bytes == 50 * MiB


def test_a_peak_of_before_is_compared_with_the_rank_that_was_to_take_most() -> None:
    with pytest.raises(BudgetExceeded, match=r"measured peak 101\.00 MiB is above the budget of 100\.00 MiB"):
        _checked(result(job_with((90, 80, 100), (49, 40, 50)), 101))
    peak = nearest_its_budget(PREPARED, None, 70 * MiB)
    assert str(peak) == "70.00 MiB of 100.00 MiB (predicted 80.00 MiB)"


def test_a_container_holds_all_ranks_of_a_host() -> None:
    """Of each the process before training, and its budget, or its peak where that was more."""
    ranks = job_with((90, 80, 100), (51, 40, 50)).ranks
    local = tuple(dataclasses.replace(each, base_bytes=300 * MiB) for each in ranks)
    told = dataclasses.replace(result(job_of(*local), 90), base_bytes=300 * MiB)
    assert "2 ranks together had 600.00 MiB before training" in str(told)
    assert "741.00 MiB at their peaks" in str(told)
    assert "--memory=768m" in str(told)  # 600, 100 and 51
    elsewhere = local[0], dataclasses.replace(local[1], clock_error_s=1e-5)
    alone = dataclasses.replace(result(job_of(*elsewhere), 90), base_bytes=300 * MiB)
    assert "the process had 300.00 MiB before training" in str(alone)


def test_of_many_ranks_the_fullest_are_told() -> None:
    ranks = [(50 + rank, 80, 100) for rank in range(MOST_RANKS_TOLD + 2)]
    text = str(result(job_with(*ranks), 50 + MOST_RANKS_TOLD + 1))
    assert "rank 2: " in text
    assert "rank 1: " not in text
    assert "2 more ranks have more of their budgets left; ranks.json has them" in text
