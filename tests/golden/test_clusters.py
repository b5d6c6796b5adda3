"""Clusters: steps, what ranks issue, groups, published rows and searches are what they were as goldens were written."""

from __future__ import annotations

import pytest
from tests.golden import layouts, published, ranks
from tests.golden.store import check, read_json, read_text

from lading.ir.layout import SCHEDULES, parse_layout


@pytest.mark.long
@pytest.mark.parametrize("name", layouts.CASES)
def test_a_layout(name: str) -> None:
    check(read_json("layouts.json")[name], layouts.figures(name))


def test_every_schedule_and_stage_is_among_the_layouts() -> None:
    asked = [parse_layout(case.layout) for case in layouts.CASES.values()]
    assert read_json("layouts.json").keys() == layouts.CASES.keys()
    assert {layout.schedule for layout in asked if layout.pp > 1} == set(SCHEDULES)
    assert {layout.zero for layout in asked} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ranks.SEQUENCES)
def test_what_a_rank_issues(name: str) -> None:
    check(read_text(f"sequences/{name}.txt").splitlines(), ranks.SEQUENCES[name].text().splitlines())


@pytest.mark.parametrize("name", ranks.PIPELINES)
def test_when_a_pipeline_runs(name: str) -> None:
    check(read_json("pipelines.json")[name], ranks.pipeline(name))


@pytest.mark.parametrize("name", ranks.UNSHARDED)
def test_what_stays_gathered(name: str) -> None:
    check(read_json("gathered.json")[name], ranks.gathered(name))


@pytest.mark.long
def test_some_rows_of_each_source() -> None:
    check(read_json("rows.json"), published.some_rows())


@pytest.mark.long
@pytest.mark.parametrize("name", published.SEARCHES)
def test_a_search(name: str) -> None:
    check(read_json("searches.json")[name], published.searched(*published.SEARCHES[name]))


@pytest.mark.slow
def test_errors_by_source() -> None:
    check(read_json("leaderboard.json"), published.leaderboard())


@pytest.mark.slow
@pytest.mark.parametrize("name", published.LARGE_SEARCHES)
def test_a_large_search(name: str) -> None:
    check(read_json("large_searches.json")[name], published.searched(*published.LARGE_SEARCHES[name]))
