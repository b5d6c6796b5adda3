"""Addresses that leave transfers more of their time.

Packing gives each buffer the lowest place that is free while it is there, so what comes next often has the place of
what has just gone: a fetch waits for that to be written, though there is room elsewhere. Where one stay ends a
transfer's time because both have the same addresses, one of the two moves to a place that is free all along:

    for each transfer   its stay grows to what it would have if there was room (``Stretched.early``, ``late``)
    what is in its way  moves, with all of its stays, to the tightest hole that is free for them
    where it cannot     the transfer's own buffer moves to where its stay can grow the most, or grows as far as it may

What has some time already never gives any up. Pieces of a parameter that an operation reads together
(``lading.planner.lower``) stay where they are, as do small buffers and those whose place was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lading.ir.program import PAGE_BYTES
from lading.planner.emission import Emission
from lading.planner.schedule import Stretched

#: In steps of fewer operations nothing moves: their plans, whose single choices are changed, took up to 22% longer on a
#: disk, where a fetch that begins early delays others, and 8% less elsewhere (tests/golden). Nor are addresses looked
#: for by the fullest moments there (``lading.memory.packing``): 17% longer at most, and 19% less elsewhere.
LEAST_OPS = 200


@dataclass(frozen=True)
class BufferPlaces:
    """Addresses of buffers, and the residencies that each has.

    Attributes:
        offsets, sizes: Address and bytes of each buffer.
        owners: Buffer of each residency.
        fixed: Buffers that stay where they are; so do those that are smaller than a page.
        size_bytes: Bytes of the arena that they need.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    fixed: frozenset[int]
    size_bytes: int

    @property
    def pinned(self) -> BufferPlaces:
        """Places of which none may change."""
        return dataclasses.replace(self, fixed=frozenset(range(len(self.sizes))))


def roomier(
    emission: Emission, stretched: Stretched, placed: BufferPlaces, arena_bytes: int
) -> tuple[Stretched, BufferPlaces]:
    """Move buffers so that transfers get more of their time; returns the stays with it, and their addresses.

    Args:
        arena_bytes: Bytes within which everything lies, before and after.
    """
    worker = _Mover(emission, stretched, placed, arena_bytes)
    worker.leaving()
    worker.coming()
    return worker.result()


class _Mover:
    """State of the moves: arrays of [residency] with first and last item, lowest and highest byte and buffer."""

    def __init__(self, emission: Emission, stretched: Stretched, placed: BufferPlaces, arena_bytes: int) -> None:
        self.stays, self.stretched, self.arena = emission.residencies, stretched, arena_bytes // PAGE_BYTES * PAGE_BYTES
        self.placed, self.sizes = placed, placed.sizes
        self.owner = np.asarray(placed.owners, dtype=np.int64)
        self.low = np.asarray(placed.offsets, dtype=np.int64)[self.owner]
        self.high = self.low + np.asarray(placed.sizes, dtype=np.int64)[self.owner]
        self.first = np.asarray(stretched.first, dtype=np.int64)
        self.last = np.asarray(stretched.last, dtype=np.int64)
        self.storage = np.asarray([stay.storage for stay in self.stays], dtype=np.int64)
        self.of_buffer: dict[int, list[int]] = {}
        for index, owner in enumerate(placed.owners):
            self.of_buffer.setdefault(owner, []).append(index)

    def result(self) -> tuple[Stretched, BufferPlaces]:
        """Stays, and addresses of all buffers."""
        offsets = list(self.placed.offsets)
        for buffer, stays in self.of_buffer.items():
            offsets[buffer] = int(self.low[stays[0]])
        size = max(map(sum, zip(offsets, self.sizes, strict=True)), default=0)
        placed = dataclasses.replace(self.placed, offsets=tuple(offsets), size_bytes=size)
        first, last = tuple(self.first.tolist()), tuple(self.last.tolist())
        return dataclasses.replace(self.stretched, first=first, last=last), placed

    def _inside(self) -> list[int]:
        return [i for i, stay in enumerate(self.stays) if not (stay.initial or stay.final)]

    def leaving(self) -> None:
        """Let what is written stay until the write should have ended."""
        late = self.stretched.late
        wanting = [i for i in self._inside() if self.stays[i].to_tier and late[i] > self.last[i]]
        for index in sorted(wanting, key=lambda i: (self.stays[i].last, i)):
            same = self.first[(self.storage == self.storage[index]) & (self.first > self.last[index])]
            until = min(int(same.min(initial=late[index] + 1)) - 1, late[index])
            self._grow(index, int(self.first[index]), until)

    def coming(self) -> None:
        """Let what is fetched come as early as its fetch should begin."""
        early = self.stretched.early
        wanting = [i for i in self._inside() if self.stays[i].tier and early[i] < self.first[i]]
        for index in sorted(wanting, key=lambda i: (self.stays[i].first, i)):
            same = self.last[(self.storage == self.storage[index]) & (self.last < self.first[index])]
            since = max(int(same.max(initial=-1)) + 1, early[index], self.stays[index].since)
            self._grow(index, since, int(self.last[index]))

    def _grow(self, index: int, first: int, last: int) -> None:
        """Give a stay the items first..last, or as many of them next to its own as there is a place for."""
        while True:
            begin, end = self._free(index, first, last)
            self.first[index], self.last[index] = begin, end
            if begin <= first and end >= last:
                return
            if not self._cleared(index, begin - 1 if begin > first else end + 1, first, last):
                break
        self._moved_to_grow(index, first, last)

    def _free(self, index: int, first: int, last: int) -> tuple[int, int]:
        """First and last item, of first..last, between which nothing else has the addresses of a stay."""
        conflicts = (self.low < self.high[index]) & (self.high > self.low[index])
        conflicts[index] = False
        before = self.last[conflicts & (self.last < self.first[index])]
        after = self.first[conflicts & (self.first > self.last[index])]
        begin = max(first, int(before.max(initial=-1)) + 1)
        return begin, min(last, int(after.min(initial=last + 1)) - 1)

    def _cleared(self, index: int, item: int, first: int, last: int) -> bool:
        """Move what has the addresses of a stay at an item elsewhere; False where one of these has to stay."""
        conflicts = (self.low < self.high[index]) & (self.high > self.low[index])
        conflicts &= (self.first <= item) & (self.last >= item)
        old_items = int(self.first[index]), int(self.last[index])
        self.first[index], self.last[index] = first, last  # what moves, moves out of the way of all of it
        moved = all(self._moved(owner) for owner in dict.fromkeys(self.owner[conflicts].tolist()))
        self.first[index], self.last[index] = old_items
        return moved

    def _stays_put(self, buffer: int) -> bool:
        return buffer in self.placed.fixed or self.sizes[buffer] < PAGE_BYTES

    def _moved(self, buffer: int) -> bool:
        """Move a buffer to another place that is free for all of its stays, if there is one."""
        if self._stays_put(buffer):
            return False
        stays = self.of_buffer[buffer]
        place = self._place(buffer, [(int(self.first[i]), int(self.last[i])) for i in stays])
        if place < 0:
            return False
        self._place_buffer(buffer, place)
        return True

    def _place_buffer(self, buffer: int, place: int) -> None:
        stays = self.of_buffer[buffer]
        self.low[stays], self.high[stays] = place, place + self.sizes[buffer]

    def _moved_to_grow(self, index: int, first: int, last: int) -> None:
        """Move a stay's own buffer to where the stay can grow the most, by halving what it does not get."""
        buffer = int(self.owner[index])
        if self._stays_put(buffer):
            return
        others = [(int(self.first[i]), int(self.last[i])) for i in self.of_buffer[buffer] if i != index]
        begin, end = int(self.first[index]), int(self.last[index])
        max_growth = max(begin - first, last - end)
        grown, low = 0, -1
        while grown < max_growth:  # by items next to its own; most stays cannot grow by a single one
            more = (grown + max_growth + 1) // 2 if grown else 1
            place = self._place(buffer, [(max(first, begin - more), min(last, end + more)), *others])
            grown, max_growth, low = (more, max_growth, place) if place >= 0 else (grown, more - 1, low)
        if grown:
            self._place_buffer(buffer, low)
            self.first[index], self.last[index] = max(first, begin - grown), min(last, end + grown)

    def _place(self, buffer: int, spans: Sequence[tuple[int, int]]) -> int:
        """Lowest byte of the tightest hole that is free for a buffer over spans of items; -1 where there is none."""
        clash = np.zeros(len(self.low), dtype=bool)
        for begin, end in spans:
            clash |= (self.first <= end) & (self.last >= begin)
        clash &= self.owner != buffer
        low = self.low[clash] // PAGE_BYTES * PAGE_BYTES
        high = -(-self.high[clash] // PAGE_BYTES) * PAGE_BYTES
        order = low.argsort()
        begins = np.append(low[order], self.arena)
        ends = np.maximum.accumulate(np.concatenate([[0], high[order]]))
        room = begins - ends
        fits = (room >= self.sizes[buffer]).nonzero()[0]
        return int(ends[fits[room[fits].argmin()]]) if len(fits) else -1
