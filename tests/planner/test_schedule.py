"""Transfers get the room that their own addresses leave, and no more."""

from __future__ import annotations

import pytest

from lading.planner.emission import Emission, Residency
from lading.planner.schedule import Stretched, filled

#: Three stays, of which the first two lie at one address one after another.
BEFORE, AFTER, BESIDE = Residency(0, 0, 2), Residency(1, 6, 7), Residency(2, 0, 9)


def ends(stays: list[Residency], early: tuple[int, ...], late: tuple[int, ...]) -> list[tuple[int, int]]:
    stretched = Stretched(tuple(s.first for s in stays), tuple(s.last for s in stays), early, late)
    made = filled(Emission(residencies=stays), stretched, [0, 0, 100], [100, 100, 50])
    return list(zip(made.first, made.last, strict=True))


@pytest.mark.parametrize(("early", "first"), [(5, 5), (3, 3), (1, 3), (6, 6)])
def test_a_fetch_begins_when_its_place_is_free(early: int, first: int) -> None:
    fetched = Residency(1, 6, 7, tier="host")
    assert ends([BEFORE, fetched, BESIDE], (0, early, 0), (2, 7, 9)) == [(0, 2), (first, 7), (0, 9)]


@pytest.mark.parametrize(("late", "last"), [(2, 2), (4, 4), (9, 5)])
def test_a_write_back_has_its_place_until_that_is_needed(late: int, last: int) -> None:
    written = Residency(0, 0, 2, to_tier="host")
    assert ends([written, AFTER, BESIDE], (0, 6, 0), (late, 7, 9)) == [(0, last), (6, 7), (0, 9)]


def test_a_fetch_waits_for_what_the_host_makes_and_for_the_stay_before() -> None:
    made_late = Residency(1, 6, 7, tier="host", since=4)
    assert ends([BEFORE, made_late, BESIDE], (0, 0, 0), (2, 7, 9))[1] == (4, 7)
    again = Residency(2, 6, 7, tier="host")  # of a storage that was elsewhere until item 5
    stays = [BEFORE, again, Residency(2, 0, 5, to_tier="host")]
    assert ends(stays, (0, 0, 0), (2, 7, 5))[1] == (6, 7)


def test_what_is_there_at_an_end_of_the_step_stays_as_it_is() -> None:
    first = Residency(1, 6, 7, tier="host", final=True)
    assert ends([BEFORE, first, BESIDE], (0, 0, 0), (2, 7, 9))[1] == (6, 7)
