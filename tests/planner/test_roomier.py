"""Transfers get the room that their own addresses leave, and more where what is in their way can lie elsewhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from lading.ir.program import PAGE_BYTES
from lading.memory.packing import Buffer, pack
from lading.planner.emission import Emission, Residency
from lading.planner.roomier import BufferPlaces, roomier
from lading.planner.schedule import Stretched

#: Three stays, of which the first two lie at one address one after another.
BEFORE, AFTER, BESIDE = Residency(0, 0, 2), Residency(1, 6, 7), Residency(2, 0, 9)


def ends(stays: list[Residency], early: tuple[int, ...], late: tuple[int, ...]) -> list[tuple[int, int]]:
    stretched = Stretched(tuple(s.first for s in stays), tuple(s.last for s in stays), early, late)
    placed = BufferPlaces((0, 0, 100), (100, 100, 50), (0, 1, 2), frozenset(), 150)  # smaller than a page: none moves
    made, after = roomier(Emission(residencies=stays), stretched, placed, 150)
    assert after == placed
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


def stretched_by(stays: list[Residency], early: tuple[int, ...], late: tuple[int, ...]) -> Stretched:
    return Stretched(tuple(stay.first for stay in stays), tuple(stay.last for stay in stays), early, late)


@pytest.mark.parametrize(("fixed", "first", "place"), [((), 0, 1), ((0,), 0, 1), ((0, 1), 3, 0)])
def test_what_is_in_the_way_of_a_fetch_lies_elsewhere(fixed: tuple[int, ...], first: int, place: int) -> None:
    stays = [BEFORE, Residency(1, 6, 7, tier="host")]  # where the first one is fixed, the fetch itself moves
    placed = BufferPlaces((0, 0), (PAGE_BYTES, PAGE_BYTES), (0, 1), frozenset(fixed), PAGE_BYTES)
    made, after = roomier(Emission(residencies=stays), stretched_by(stays, (0, 0), (2, 7)), placed, 2 * PAGE_BYTES)
    assert (made.first, made.last) == ((0, first), (2, 7))
    assert abs(after.offsets[0] - after.offsets[1]) == place * PAGE_BYTES
    assert after.size_bytes == (1 + place) * PAGE_BYTES


def test_a_write_has_as_much_of_its_time_as_there_is_a_place_for() -> None:
    written = Residency(0, 0, 2, to_tier="host")
    stays = [written, Residency(1, 3, 9), Residency(2, 7, 9)]  # from item 7 on nothing is free
    placed = BufferPlaces((0, 0, PAGE_BYTES), (PAGE_BYTES,) * 3, (0, 1, 2), frozenset((1, 2)), 2 * PAGE_BYTES)
    made, after = roomier(Emission(residencies=stays), stretched_by(stays, (0, 3, 7), (9,) * 3), placed, 2 * PAGE_BYTES)
    assert (made.last[0], after.offsets[0]) == (6, PAGE_BYTES)


def random_stays(rng: np.random.Generator) -> tuple[list[Residency], Stretched, BufferPlaces]:
    """Stays of twenty storages over forty items, packed, each of which may want more time than it has."""
    stays: list[Residency] = []
    for storage in range(20):
        ends = np.sort(rng.choice(40, 4, replace=False)).tolist()
        stays.append(Residency(storage, *ends[:2], to_tier="host"))
        stays.append(Residency(storage, *ends[2:], tier="host", since=int(rng.integers(0, 5))))
    stays += [Residency(20, 0, 4, initial=True), Residency(20, 30, 39, final=True)]
    owners = (*range(40), 40, 40)
    sizes = tuple(int(size) * PAGE_BYTES for size in rng.integers(1, 5, 41))
    spans = [
        tuple((s.first, s.last) for s, o in zip(stays, owners, strict=True) if o == buffer) for buffer in range(41)
    ]
    packing = pack([Buffer(size, span) for size, span in zip(sizes, spans, strict=True)])
    early = tuple(int(rng.integers(0, stay.first + 1)) if stay.tier else stay.first for stay in stays)
    late = tuple(int(rng.integers(stay.last, 40)) if stay.to_tier else stay.last for stay in stays)
    fixed = frozenset(rng.choice(41, 5, replace=False).tolist())
    return (
        stays,
        stretched_by(stays, early, late),
        BufferPlaces(packing.offsets, sizes, owners, fixed, packing.size_bytes),
    )


@pytest.mark.parametrize("seed", range(8))
def test_stays_only_grow_and_never_meet(seed: int) -> None:
    stays, stretched, placed = random_stays(np.random.default_rng(seed))
    arena = placed.size_bytes + 2 * PAGE_BYTES
    made, after = roomier(Emission(residencies=stays), stretched, placed, arena)
    assert all(new <= old for new, old in zip(made.first, stretched.first, strict=True))
    assert all(new >= old for new, old in zip(made.last, stretched.last, strict=True))
    assert all(new >= stay.since for new, stay in zip(made.first, stays, strict=True) if new < stay.first)
    assert all(new >= early for new, early in zip(made.first, stretched.early, strict=True))
    assert all(new <= late for new, late in zip(made.last, stretched.late, strict=True))
    assert all(after.offsets[buffer] == placed.offsets[buffer] for buffer in placed.fixed)
    assert after.size_bytes <= arena
    for one, other in combinations(range(len(stays)), 2):
        together = made.first[one] <= made.last[other] and made.first[other] <= made.last[one]
        low = [after.offsets[after.owners[index]] for index in (one, other)]
        high = [begin + after.sizes[after.owners[index]] for begin, index in zip(low, (one, other), strict=True)]
        assert not (together and (low[0] < high[1] and low[1] < high[0]))
        assert not (together and stays[one].storage == stays[other].storage)
    grown = sum(b - a for a, b in zip(made.first, stretched.first, strict=True)) + sum(made.last) - sum(stretched.last)
    alone, _ = roomier(Emission(residencies=stays), stretched, replace(placed, fixed=frozenset(range(41))), arena)
    assert grown > sum(stretched.first) - sum(alone.first) + sum(alone.last) - sum(stretched.last)
