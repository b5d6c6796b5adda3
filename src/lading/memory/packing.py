"""Arena: fixed addresses for storages whose lifetimes are known, so that little is lost between them.

Every item occupies one address over one or two spans of time (two when it lives over the step's boundary). Items that
live at the same moment must not overlap. This is dynamic storage allocation; first fit over items sorted by size is
within a few percent of the peak on training steps (Source: the greedy-by-size strategy of TensorFlow Lite's memory
planner, arXiv:2001.03288), and several sort orders are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from lading.ir.program import PAGE_BYTES, slot_bytes

#: Of more items than this only the first order of ``_orders`` is tried, and two of ``_by_fullness``.
_MANY, _OF_MANY = 3000, 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that need one address during each ``[first, last]`` of ``spans`` (moments, inclusive)."""

    size_bytes: int
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Packing:
    """Offsets of the buffers in bytes, in order, and the bytes of the arena they need."""

    offsets: tuple[int, ...]
    size_bytes: int


def peak_bytes(items: Sequence[Buffer]) -> int:
    """Largest sum of bytes alive at one moment, which no packing can be smaller than."""
    return int(profile(items).max(initial=0))


def profile(items: Sequence[Buffer]) -> np.ndarray:
    """Bytes alive; an array of [moment]."""
    last = max((span[1] for item in items for span in item.spans), default=-1)
    change = [0] * (last + 2)
    for item in items:
        size = slot_bytes(item.size_bytes)
        for first, end in item.spans:
            change[first] += size
            change[end + 1] -= size
    return np.cumsum(np.asarray(change, dtype=np.int64))[:-1]


def pack(
    items: Sequence[Buffer],
    limit_bytes: int = 0,
    fixed: Mapping[int, int] = MappingProxyType({}),
    runs: Sequence[Mapping[int, int]] = (),
    *,
    by_fullness: bool = True,
) -> Packing:
    """Place every buffer, by the first of several orders that needs at most ``limit_bytes``, else by the first of all.

    Without a limit it is the order that needs least.

    What lives all the time goes to the bottom, one after another; only the rest needs a search. Of that, what is
    smaller than a page comes after the pages, so that all that lies below a page is whole pages.

    Args:
        fixed: Offset of each buffer, by its index, that has one already; then every other one is searched for.
        runs: Buffers that lie at given distances behind one place, which is searched for: bytes by index. Of buffers
            of one run none is in another, and none is fixed.
        by_fullness: Try orders in which what is alive at the fullest moments comes first, after all others.
    """
    sizes = [slot_bytes(item.size_bytes) for item in items]
    end = max((last for item in items for _, last in item.spans), default=0)
    offsets = [fixed.get(index, 0) for index in range(len(items))]
    floor = 0
    run_of = {index: run for run in runs for index in run}
    lasting = {i for i, item in enumerate(items) if item.spans == ((0, end),)} if not fixed else set[int]()
    always = {i for i in lasting if i not in run_of}
    for index in sorted(always, key=lambda i: -sizes[i]):
        offsets[index] = floor
        floor += sizes[index]
    floor = -(-floor // PAGE_BYTES) * PAGE_BYTES
    alone = (i for i in range(len(items)) if i not in always and i not in fixed and i not in run_of)
    moving = [(i, sizes[i], items[i].spans) for i in alone] + [_run_row(run, sizes, items) for run in runs]
    shapes = {min(run): [(low, low + sizes[i], items[i].spans) for i, low in run.items()] for run in runs}
    taken = [_Taken(offset, offset + sizes[i], items[i].spans) for i, offset in fixed.items()]
    best: tuple[int, dict[int, int]] | None = None
    enough = max(peak_bytes(items), limit_bytes) - floor
    for order in _orders(moving, by_fullness=by_fullness):
        below = None if best is None else min(best[0], enough + 1) if limit_bytes else best[0]
        placed = _first_fit(order, below, taken, shapes)
        best = placed or best
        if best is not None and best[0] <= enough:
            break
    assert best is not None
    for index, offset in best[1].items():
        for each, distance in run_of.get(index, {index: 0}).items():
            offsets[each] = floor + offset + distance
    return Packing(tuple(offsets), floor + best[0])


#: Steps of ``_by_fullness`` in shares of the peak, and whether the longest span comes first in a step.
_FULLNESS = ((0.03, False), (0.01, True), (0.1, False))
#: Index, bytes and spans of something to place.
_Row = tuple[int, int, tuple[tuple[int, int], ...]]


#: What lies behind one place: first byte, byte behind the last one and spans of each buffer.
_Shape = Sequence[tuple[int, int, tuple[tuple[int, int], ...]]]


def _run_row(run: Mapping[int, int], sizes: Sequence[int], items: Sequence[Buffer]) -> _Row:
    """Row of a run, as one buffer of all its bytes and moments, by which it is put in order."""
    first = min(span[0] for index in run for span in items[index].spans)
    last = max(span[1] for index in run for span in items[index].spans)
    return min(run), max(low + sizes[index] for index, low in run.items()), ((first, last),)


def _orders(rows: Sequence[_Row], *, by_fullness: bool) -> Iterable[list[_Row]]:
    """Yield orders to place rows in.

    By most bytes; by two spans, then most bytes, then most moments; by most bytes, then the first moment; by most bytes
    times moments; by longest span. Many rows are equally large, and how these follow one another decides on the holes.
    Then by the fullest moments.
    """
    yield sorted(rows, key=lambda row: (-row[1], row[0]))
    if len(rows) <= _MANY:
        yield sorted(rows, key=lambda row: (row[1] < PAGE_BYTES, -len(row[2]), -row[1], -_length(row), row[0]))
        yield sorted(rows, key=lambda row: (row[1] < PAGE_BYTES, -row[1], row[2][0][0], row[0]))
        yield sorted(rows, key=lambda row: (row[1] < PAGE_BYTES, -row[1] * _length(row), row[0]))
        yield sorted(rows, key=lambda row: (row[1] < PAGE_BYTES, -len(row[2]) * _length(row), -row[1], row[0]))
    if by_fullness:
        yield from islice(_by_fullness(rows), None if len(rows) <= _MANY else _OF_MANY)


def _by_fullness(rows: Sequence[_Row]) -> Iterable[list[_Row]]:
    """Yield orders in which what is alive at the fullest moments comes first, so that no holes are left there.

    How full the fullest moment of a row is counts by steps, of these shares of the peak; rows of one step are placed by
    most bytes, or by longest span.
    """
    change = np.zeros(max((last for row in rows for _, last in row[2]), default=-1) + 2, dtype=np.int64)
    for _, size, spans in rows:
        for first, last in spans:
            change[first] += size
            change[last + 1] -= size
    alive = np.cumsum(change)
    fullest = {row[0]: max(int(alive[first : last + 1].max()) for first, last in row[2]) for row in rows}
    for share, longest in _FULLNESS:
        step = max(1, int(share * int(alive.max())))

        def rank(row: _Row, step: int = step, longest: bool = longest) -> tuple[bool, int, int, int, int]:
            size, length = row[1], _length(row)
            full = fullest[row[0]] // step
            return size < PAGE_BYTES, -full, *((-length, -size) if longest else (-size, -length)), row[0]

        yield sorted(rows, key=rank)


def _length(row: _Row) -> int:
    """Moments that a row is alive."""
    return sum(last - first + 1 for first, last in row[2])


class _Taken(NamedTuple):
    """Bytes ``low`` to ``high`` that something has over ``spans``."""

    low: int
    high: int
    spans: tuple[tuple[int, int], ...]


def _first_fit(
    rows: Sequence[_Row],
    below_bytes: int | None,
    taken: Sequence[_Taken] = (),
    shapes: Mapping[int, _Shape] = MappingProxyType({}),
) -> tuple[int, dict[int, int]] | None:
    """Place ``rows`` in order, each at the lowest offset where it meets nothing alive at the same moment.

    Returns the bytes needed and the offset of each index; None as soon as it needs ``below_bytes`` or more.

    Args:
        taken: What has its place already. It counts as whole pages, as small and large buffers lie there in any order.
        shapes: What lies behind the place of a row that is a run, by its index.
    """
    count = sum(len(spans) for _, _, spans in rows) + sum(len(spans) for _, _, spans in taken)
    count += sum(len(spans) for shape in shapes.values() for _, _, spans in shape)
    low, high = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    first, last = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    offsets: dict[int, int] = {}
    top = placed = 0
    for start, stop, spans in taken:
        top = max(top, stop)
        for begin, end in spans:
            low[placed], high[placed] = start // PAGE_BYTES * PAGE_BYTES, -(-stop // PAGE_BYTES) * PAGE_BYTES
            first[placed], last[placed] = begin, end
            placed += 1
    for index, size, spans in rows:
        if index in shapes:
            shape = shapes[index]
            offsets[index] = offset = _place_of_run(shape, low[:placed], high[:placed], first[:placed], last[:placed])
            top = max(top, offset + size)
            if below_bytes is not None and top >= below_bytes:
                return None
            for start, end, times in shape:
                for begin, stop in times:
                    low[placed], high[placed], first[placed], last[placed] = offset + start, offset + end, begin, stop
                    placed += 1
            continue
        begin, stop = spans[0]
        clash = (first[:placed] <= stop) & (last[:placed] >= begin)
        for begin, stop in spans[1:]:
            clash |= (first[:placed] <= stop) & (last[:placed] >= begin)
        met = clash.nonzero()[0]
        offset = _lowest_hole(low[met], high[met], size) if len(met) else 0
        top = max(top, offset + size)
        if below_bytes is not None and top >= below_bytes:
            return None
        offsets[index] = offset
        for begin, stop in spans:
            low[placed], high[placed], first[placed], last[placed] = offset, offset + size, begin, stop
            placed += 1
    return top, offsets


def _place_of_run(shape: _Shape, low: np.ndarray, high: np.ndarray, first: np.ndarray, last: np.ndarray) -> int:
    """Find the lowest place, at a page, behind which no buffer of a run meets anything alive at the same moment."""
    begins, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for start, end, spans in shape:
        clash = np.zeros(len(low), dtype=bool)
        for begin, stop in spans:
            clash |= (first <= stop) & (last >= begin)
        begins.append(low[clash] - end)  # a place strictly between the two is taken
        ends.append(high[clash] - start)
    begin, end = np.concatenate(begins), np.concatenate(ends)
    order = begin.argsort(kind="stable")
    place = 0
    for lower, upper in zip(begin[order].tolist(), end[order].tolist(), strict=True):
        if lower >= place:
            break
        if upper > place:
            place = -(-upper // PAGE_BYTES) * PAGE_BYTES
    return place


def _lowest_hole(low: np.ndarray, high: np.ndarray, size: int) -> int:
    """Find the lowest offset with ``size`` free bytes between the taken ranges."""
    by_low = low.argsort()
    low = low[by_low]
    if low[0] >= size:
        return 0
    until = np.maximum.accumulate(high[by_low])
    room = low[1:] - until[:-1] >= size
    hole = int(room.argmax()) if len(room) else 0
    return int(until[hole] if len(room) and room[hole] else until[-1])
