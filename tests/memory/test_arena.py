"""Packing: nothing overlaps while alive, everything is aligned, and little is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.captured import captured_step

from lading.ir.program import LINE_BYTES, PAGE_BYTES, slot_bytes
from lading.memory.lifetime import lifetimes
from lading.memory.packing import Buffer, pack, peak_bytes, profile
from lading.planner.emission import emit

moments = st.integers(0, 30)
sizes = st.sampled_from([0, 1, 64, 100, 4095, 4096, 5000, 8192, 40_000]) | st.integers(1, 1 << 20)


@st.composite
def spans(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """One span, or two that do not meet."""
    points = sorted(draw(st.lists(moments, min_size=4, max_size=4, unique=True)))
    if draw(st.booleans()):
        return ((points[0], points[1]), (points[2], points[3]))
    return ((points[0], points[1]),)


items = st.lists(st.builds(Buffer, sizes, spans()), min_size=1, max_size=25)


def slot_pages(size_bytes: int) -> int:
    """As many bytes in whole pages, one at least."""
    return max(PAGE_BYTES, -(-size_bytes // PAGE_BYTES) * PAGE_BYTES)


def assert_packed(rows: list[Buffer], limit_bytes: int = 0, runs: Sequence[Mapping[int, int]] = ()) -> None:
    packing = pack(rows, limit_bytes, runs=runs)
    assert packing == pack(rows, limit_bytes, runs=runs)
    placed = [(o, o + slot_bytes(i.size_bytes), i.spans) for o, i in zip(packing.offsets, rows, strict=True)]
    assert 0 <= packing.size_bytes - max(end for _, end, _ in placed) < PAGE_BYTES
    assert packing.size_bytes >= peak_bytes(rows)
    for (offset, _, _), item in zip(placed, rows, strict=True):
        assert offset >= 0
        assert offset % (PAGE_BYTES if item.size_bytes >= PAGE_BYTES else LINE_BYTES) == 0
    for index, (low, high, times) in enumerate(placed):
        for other_low, other_high, other_times in placed[:index]:
            together = any(a <= d and c <= b for a, b in times for c, d in other_times)
            assert not (together and low < other_high and other_low < high)


@given(items)
def test_what_is_alive_together_does_not_overlap(rows: list[Buffer]) -> None:
    assert_packed(rows)
    assert_packed(rows, limit_bytes=2 * peak_bytes(rows))


@given(items, st.lists(st.lists(st.builds(Buffer, sizes.map(slot_pages), spans()), min_size=1, max_size=6), max_size=3))
def test_runs_lie_at_their_distances(rows: list[Buffer], others: list[list[Buffer]]) -> None:
    runs: list[dict[int, int]] = []
    for buffers in others:
        run, distance = dict[int, int](), 0
        for buffer in buffers:
            run[len(rows)] = distance
            distance += buffer.size_bytes
            rows = [*rows, buffer]
        runs.append(run)
    assert_packed(rows, runs=runs)
    packing = pack(rows, 2 * peak_bytes(rows), runs=runs)
    for run in runs:
        assert len({packing.offsets[index] - distance for index, distance in run.items()}) == 1


@given(items)
def test_the_profile_counts_every_moment(rows: list[Buffer]) -> None:
    alive = [sum(slot_bytes(i.size_bytes) for i in rows for a, b in i.spans if a <= t <= b) for t in range(31)]
    found = profile(rows).tolist()
    assert found == alive[: len(found)]
    assert not any(alive[len(found) :])
    assert peak_bytes(rows) == max(alive)


@given(st.lists(st.tuples(sizes, moments), min_size=1, max_size=10))
def test_what_is_never_alive_together_shares_one_address(rows: list[tuple[int, int]]) -> None:
    alone = [Buffer(size, ((2 * i, 2 * i),)) for i, (size, _) in enumerate(rows)]
    assert 0 <= pack(alone).size_bytes - max(slot_bytes(size) for size, _ in rows) < PAGE_BYTES


def test_nothing_to_pack() -> None:
    assert pack([]).size_bytes == 0
    assert peak_bytes([]) == 0


@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        *(("llama", 1), ("gpt", 2), ("moe", 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", 2), ("gpt", 1), ("moe", 2))),
    ],
)
def test_a_captured_step_loses_less_than_a_tenth(name: str, accumulation: int) -> None:
    graph = captured_step(name, accumulation=accumulation)
    emission = emit(graph, lifetimes(graph), {})
    rows = [Buffer(graph.storages[r.storage].size_bytes, ((r.first, r.last),)) for r in emission.residencies]
    assert_packed(rows)
    assert pack(rows).size_bytes <= 1.1 * peak_bytes(rows)


def test_what_is_alive_at_the_fullest_moments_is_placed_without_holes() -> None:
    """Of 20 buffers in pages; orders by size, span or first moment need 24 pages."""
    rng = Random(283)
    rows: list[Buffer] = []
    for _ in range(rng.choice((10, 14, 20))):
        first = rng.randrange(20)
        last = min(19, first + rng.choice((0, 1, 2, 4, 8)))
        rows.append(Buffer(PAGE_BYTES * rng.choice((1, 2, 3, 4, 8)), ((first, last),)))
    assert peak_bytes(rows) == 20 * PAGE_BYTES
    assert pack(rows, 20 * PAGE_BYTES).size_bytes == 20 * PAGE_BYTES
    assert_packed(rows)
