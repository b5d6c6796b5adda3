"""The part of the report about ranks shows the numbers it was given, and names a slow rank."""

from __future__ import annotations

import dataclasses

from tests.rank_steps import job_of, program_of, replica, rows_of_replica
from tests.report.test_html import Page

from lading.ir.job_timeline import JobTimeline
from lading.report.rank_section import MOST_CHARTS, RankReport, ranks_section
from lading.units import MiB


def report_of(measured: JobTimeline, slow_step_s: float | None = None) -> RankReport:
    """Report beside a prediction in which all ranks compute for a second and reduce until 2.5."""
    program = program_of("dp2", rows_of_replica(1.0, 2.5))
    predicted = [dataclasses.replace(replica(0, 1.0, 2.5), rank=each.rank) for each in measured.ranks]
    count = len(measured.ranks)
    return RankReport(
        measured=measured, predicted=job_of(*predicted), programs=(program,) * count, slow_step_s=slow_step_s
    )


def measured(*computing_s: float, waited_s: float = 0.0) -> JobTimeline:
    """Replicas of which each computes so long, and all end to reduce together."""
    end_s = max(computing_s) + 1.5
    facts = {"predicted_computing_s": 1.0, "predicted_bytes": 4 * MiB, "budget_bytes": 8 * MiB, "base_bytes": 90 * MiB}
    return job_of(
        *(
            dataclasses.replace(
                replica(0, seconds, end_s), rank=rank, computing_s=(seconds,) * 5, peak_bytes=(5 + 4 * rank) * MiB,
                came_s=-waited_s * (rank == 0), **facts,
            )
            for rank, seconds in enumerate(computing_s)
        )
    )  # fmt: skip


def shown(report: RankReport) -> Page:
    return Page(f"<main>{ranks_section(report)}</main>")


def test_every_rank_stands_beside_its_own_prediction() -> None:
    page = shown(report_of(measured(1.0, 1.0)))
    rows = [row for row in page.rows if row[0] == "rank 0"]
    assert rows[0] == ["rank 0", "5.00 MiB", "4.00 MiB", "20.0% too low", "8.00 MiB", "37.5%", "90.00 MiB"]
    assert rows[1][1:] == ["3.500 s", "3.500 s", "3.000 s", "3.000 s", "500.0 ms", "500.0 ms", "0 us", "0 us", "-"]
    assert next(row for row in page.rows if row[0] == "rank 1")[5] == "1.00 MiB above"
    assert "No rank computes longer than the others in most of the last 5 steps." in page.text
    assert "Streams of rank 1, action by action" in page.text
    assert "Streams of rank 0, action by action" not in page.text  # drawn above


def test_a_wait_says_who_was_late_and_what_it_cost() -> None:
    page = shown(report_of(measured(1.0, 3.0, waited_s=0.25)))
    first, second, third = [row for row in page.rows if "made_up" in row[0] or "before" in row[0]]
    assert first == [
        "made_up layers.0, action 1", "rank 0", "rank 1, by 2.000 s", "1.000 s", "1.500 s", "2.500 s", "500.0 ms",
    ]  # fmt: skip
    assert second[1:4] == ["rank 1", "-", "0 us"]
    assert third == ["before the step", "rank 0", "rank 1, by 250.0 ms", "250.0 ms", "0 us", "250.0 ms", "0 us"]
    assert next(row for row in page.rows if row[0] == "rank 0" and row[-1] == "rank 1")


def test_a_slow_rank_is_named_with_what_it_was_predicted_to_cost() -> None:
    page = shown(report_of(measured(1.0, 3.0), slow_step_s=5.25))
    assert "Rank 1 is slow. Rank 1 is slow" not in page.text
    assert "computes 3.00 times as long as the others" in page.text
    assert "slowest in 5 of 5 steps" in page.text
    assert "a step of 5.250 s, 50.0% longer than the 3.500 s of equal ranks. Measured: 5.500 s." in page.text
    assert "a step of" not in shown(report_of(measured(1.0, 3.0))).text


def test_of_many_ranks_the_slow_one_is_among_those_drawn() -> None:
    report = report_of(measured(*[1.0] * 38, 2.0, 1.0))
    assert len(report.shown(MOST_CHARTS)) == MOST_CHARTS
    assert {0, 38, 39} <= set(report.shown(MOST_CHARTS))
    text = shown(report).text
    assert f"{MOST_CHARTS} of 40 ranks." in text
    assert "The 32 ranks that took most memory or time; ranks.json has the other 8, too." in text
    assert [line.source for line in report.traced[:3]] == ["predicted, rank 0", "measured, rank 0", "measured, rank 1"]
