"""Schedule: how early each storage is fetched or unsharded, and how late each one may leave that is written or reduced.

A fetch should end just before its use and a write-back may take its time, as long as memory allows: both are
stretched into bytes that nothing else needs, never beyond ``soft_bytes`` at any item.

[Note: the network]
A whole parameter is unsharded as a tier's copy is fetched: so early that it has come when it is first read, behind what
the network carries before, as far as there is room for it. What is fetched from a tier to be unsharded comes that much
earlier. What a collective reads, a bucket of gradients say, stays until the network should be done with it, so that
computing does not wait for its place.

[Note: holes] Addresses are given once transfers have their room. What is freed where nothing of its size follows is a
hole, so the room that a stretch may take is less than the arena, and a transfer that had to wait for room by its bytes
may have had an address all along: stays are stretched again with their addresses known (``lading.planner.roomier``).

[Note: over the boundary] The step repeats, so time is a circle: what is needed first may be fetched while the step
before ends, and what is written last may leave while the next step begins. Such a storage is on the device when a step
starts and when it ends, at the same address; ``wrapped`` cuts its stay in two. A tier's copy counts for nothing when a
step starts (``memory.tier_layout.home_tiers``), so a fetch may only cross the boundary where the step writes the copy
before it reads it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from lading.cost.hosting import move_seconds
from lading.ir.action import ActionKind
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine, Tier, wire_of
from lading.ir.program import COMPUTE_STREAM, Program, slot_sizes
from lading.ir.sharding import UNSHARD
from lading.planner.emission import Emission, Residency

#: Fetches are planned to take this much longer than predicted, so that noise does not stall compute.
MARGIN = 1.25


@dataclass(frozen=True)
class Stretched:
    """First and last item of each residency with its transfers included, in the order of the emission.

    On the circle of the step: a first item below 0 is one of the step before, a last one of ``num_items`` or more one
    of the next.

    Attributes:
        early, late: Items from which and up to which each would be there if there was room; never over the boundary.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]


def base_profile(graph: StepGraph, emission: Emission) -> np.ndarray:
    """Bytes resident at each item if every transfer took no time: the least the emission can do with."""
    sizes = slot_sizes(graph)
    change = [0] * (len(emission.items) + 1)
    for stay in emission.residencies:
        size = sizes[stay.storage]
        change[stay.first] += size
        change[stay.last + 1] -= size
    return np.cumsum(np.asarray(change, dtype=np.int64))[:-1]


def stretch(
    graph: StepGraph,
    machine: Machine,
    emission: Emission,
    item_seconds: Sequence[float],
    soft_bytes: int,
    *,
    repeats: bool = True,
    both_ways: bool = False,
    network_seconds: Mapping[int, float] = MappingProxyType({}),
) -> Stretched:
    """Give every transfer as much of its time as ``soft_bytes`` of the arena leave room for.

    Args:
        both_ways: Whether each direction of a tier is taken to be busy while the other one moves.
        network_seconds: Seconds of what the network carries, by item.
        repeats: Whether the next step is this one again, so that transfers may cross the boundary.
    """
    worker = _Stretcher(graph, machine, emission, item_seconds, soft_bytes, repeats)
    worker.both_ways = both_ways
    if network_seconds:
        worker.network(network_seconds)
    worker.write_backs()
    worker.fetches()
    early = (max(0, min(wanted, first)) for wanted, first in zip(worker.early, worker.first, strict=True))
    late = (min(max(wanted, last), worker.count - 1) for wanted, last in zip(worker.late, worker.last, strict=True))
    return Stretched(tuple(worker.first), tuple(worker.last), tuple(early), tuple(late))


def wrapped(emission: Emission, stretched: Stretched) -> tuple[Emission, Stretched]:
    """Cut residencies that cross the step's boundary in two, so that all lie inside ([Note: over the boundary])."""
    count = len(emission.items)
    rows: list[tuple[Residency, int, int, int, int]] = []
    early: list[tuple[Residency, int, int]] = []
    times = zip(stretched.first, stretched.last, stretched.early, stretched.late, strict=True)
    for stay, (first, last, soonest, latest) in zip(emission.residencies, times, strict=True):
        if first < 0:
            rows.append((dataclasses.replace(stay, tier="", initial=True), 0, last, 0, last))
            again = Residency(stay.storage, count - 1, count - 1, tier=stay.tier, final=True)
            early.append((again, count + first, stay.first))
        elif last >= count:
            over = last - count
            rows.append((Residency(stay.storage, 0, 0, to_tier=stay.to_tier, initial=True), 0, over, 0, over))
            rows.append((dataclasses.replace(stay, to_tier="", final=True), first, count - 1, first, count - 1))
        else:
            rows.append((stay, first, last, soonest, latest))
    early.sort(key=lambda row: row[2])  # in the order of need
    rows += [(stay, first, count - 1, first, count - 1) for stay, first, _ in early]
    stays, *columns = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return dataclasses.replace(emission, residencies=list(stays)), Stretched(*columns)


def item_seconds(program: Program, duration_s: float, starts: Sequence[float]) -> list[float]:
    """Seconds from the start of each action of the compute stream but FREE to that of the next one.

    Args:
        duration_s: Seconds of the step.
        starts: When each action starts, in seconds.
    """
    begin = [starts[a.id] for a in program.actions if a.stream == COMPUTE_STREAM and a.kind is not ActionKind.FREE]
    return [after - start for start, after in zip(begin, [*begin[1:], duration_s], strict=True)]


class _Stretcher:
    def __init__(
        self,
        graph: StepGraph,
        machine: Machine,
        emission: Emission,
        item_seconds: Sequence[float],
        soft_bytes: int,
        repeats: bool,
    ) -> None:
        self.graph, self.items, self.stays, self.repeats = graph, emission.items, emission.residencies, repeats
        self.tiers = {tier.name: tier for tier in machine.tiers}
        ways = ((tier, read) for tier in machine.tiers for read in (True, False))
        self.wires = {(tier.name, read): _wire(tier, machine.tiers, read) for tier, read in ways}
        sizes = slot_sizes(graph)
        self.sizes = [sizes[stay.storage] for stay in self.stays]
        self.start = np.concatenate([[0.0], np.cumsum(np.asarray(item_seconds, dtype=np.float64))])
        self.count, self.end = len(emission.items), float(self.start[-1])
        self.profile = base_profile(graph, emission)
        self.soft, self.both_ways = soft_bytes, False
        self.first = [stay.first for stay in self.stays]
        self.last = [stay.last for stay in self.stays]
        self.early, self.late = list(self.first), list(self.last)
        self.of_storage: dict[int, list[int]] = {}
        for index, stay in enumerate(self.stays):
            self.of_storage.setdefault(stay.storage, []).append(index)

    def network(self, seconds: Mapping[int, float]) -> None:
        """Unshard early, and keep what collectives read until they are over ([Note: the network])."""
        made, read = self._network_stays(seconds)
        free_s = 0.0
        for item in sorted(seconds):
            free_s = max(free_s, float(self.start[item + 1])) + MARGIN * seconds[item]
            wanted = int(np.searchsorted(self.start, free_s, side="left")) - 1
            for index in read.get(item, ()):
                self.last[index] = self._extend(index, item + 1, min(wanted, self._next_begins(index) - 1))
        taken_s = np.inf
        for item in sorted(seconds, reverse=True):
            if item not in made:
                taken_s = min(taken_s - MARGIN * seconds[item], float(self.start[item]))
                continue
            taken_s = min(taken_s, self._first_read_s(made[item])) - MARGIN * seconds[item]
            wanted = int(np.searchsorted(self.start, max(taken_s, 0.0), side="right")) - 1
            self._begin_early(item, made[item], wanted)

    def _network_stays(self, seconds: Mapping[int, float]) -> tuple[dict[int, int], dict[int, list[int]]]:
        """Find the stay that each unsharding makes, and those that only end with a collective, by item."""
        made: dict[int, int] = {}
        read: dict[int, list[int]] = {}
        for index, stay in enumerate(self.stays):
            if stay.last in seconds and not stay.final and not stay.to_tier:
                read.setdefault(stay.last, []).append(index)
            op = self.items[stay.first].op if stay.first in seconds and not stay.initial and not stay.tier else None
            if op is not None and self.graph.ops[op].name == UNSHARD:
                made[stay.first] = index
        return made, read

    def _next_begins(self, index: int) -> int:
        """Item with which the next stay of a stay's storage begins, or behind the last item."""
        indices = self.of_storage[self.stays[index].storage]
        after = indices.index(index) + 1
        return self.stays[indices[after]].first if after < len(indices) else self.count

    def _first_read_s(self, index: int) -> float:
        """Seconds at which what an unsharding makes is first read."""
        stay = self.stays[index]
        for item in range(stay.first + 1, stay.last + 1):
            op = self.items[item].op
            if op is not None and stay.storage in self.graph.op_reads[op]:
                return float(self.start[item])
        return float(self.start[stay.last])

    def _begin_early(self, item: int, index: int, wanted: int) -> None:
        """Begin an unsharding up to so many items early, and what is fetched for it alone too, as far as both fit."""
        op = self.items[item].op
        assert op is not None, "an unsharding is an operation"
        together, low = [index], max(wanted, self._over_before(index))
        for storage in self.graph.op_reads[op]:
            for i in self.of_storage[storage]:
                stay = self.stays[i]
                if stay.tier and stay.first == item:
                    together.append(i)
                    low = max(low, self._over_before(i), stay.since)
                elif stay.first <= item <= stay.last and not stay.initial:
                    low = max(low, stay.first + 1)
        shard = frozenset(self.graph.op_reads[op])
        for earlier in range(low, item):  # not before the last update of the shard: those of its parts write it, too
            other = self.items[earlier].op
            if other is not None and not shard.isdisjoint(self.graph.op_writes[other]):
                low = earlier + 1
        if low >= item:
            return
        size = sum(self.sizes[i] for i in together)
        full = (self.profile[low:item] > self.soft - size).nonzero()[0]
        low += int(full[-1]) + 1 if len(full) else 0
        self.profile[low:item] += size
        for i in together:
            self.first[i] = low

    def _over_before(self, index: int) -> int:
        """First item at which the stay of the same storage before this one is over."""
        indices = self.of_storage[self.stays[index].storage]
        at = indices.index(index)
        return self.last[indices[at - 1]] + 1 if at else 0

    def _duration(self, index: int, tier: str, direction: Literal["read", "write"]) -> float:
        """Seconds that a move is given: with a margin, and no less than beside the other direction if that is busy.

        A disk that serves one direction after another writes at a third of its rate while it reads.
        """
        size, served = self.sizes[index], self.tiers[tier]
        if not self.both_ways:
            return MARGIN * move_seconds(size, served, direction)
        both = served.mixed_read_bytes_per_s if direction == "read" else served.mixed_write_bytes_per_s
        return max(MARGIN * move_seconds(size, served, direction), served.latency_s + size / both)

    def _comes_early(self, index: int) -> bool:
        """Whether the fetch of a residency may begin in the step before."""
        indices = self.of_storage[self.stays[index].storage]
        first, last = self.stays[indices[0]], self.stays[indices[-1]]
        if not self.repeats or first.storage in self.graph.host_storages:  # the host works on the copy, its home then
            return False
        if index != indices[0] or last.to_tier != first.tier:
            return False
        made_anew = len(indices) > 1 and not self.stays[indices[1]].tier
        return first.to_tier == first.tier or made_anew

    def _leaves_late(self, index: int) -> bool:
        """Whether the write-back of a residency may end in the next step."""
        indices = self.of_storage[self.stays[index].storage]
        stay, first = self.stays[index], self.stays[indices[0]]
        if not self.repeats or stay.storage in self.graph.host_storages:
            return False
        return index == indices[-1] and stay.storage in self.graph.persistent and first.tier == stay.to_tier

    def write_backs(self) -> None:
        """Keep each storage that is written out until the write should have ended."""
        ending = sorted((i for i, s in enumerate(self.stays) if s.to_tier), key=lambda i: (self.stays[i].last, i))
        free_at: dict[str, float] = {}
        for index in ending:
            self._write(index, free_at)
        free_at = {wire: max(0.0, finish - self.end) for wire, finish in free_at.items()}
        for index in ending:
            stay, finish = self.stays[index], self._write(index, free_at)
            wanted = self.count - 1
            if finish <= self.end:
                wanted = min(wanted, int(np.searchsorted(self.start, finish, side="left")) - 1)
            elif self._leaves_late(index):
                wanted = self.count + int(np.searchsorted(self.start, finish - self.end, side="left")) - 1
                wanted = min(wanted, self.count + self.first[self.of_storage[stay.storage][0]] - 1)
            self.last[index], self.late[index] = self._extend(index, stay.last + 1, wanted), wanted

    def _write(self, index: int, free_at: dict[str, float]) -> float:
        """Seconds at which a residency's write-back should have ended; moves the time from which its tier is free."""
        stay = self.stays[index]
        wire, share = self.wires[stay.to_tier, False]
        duration = self._duration(index, stay.to_tier, "write")
        wired = max(free_at.get(wire, 0.0), float(self.start[stay.last + 1]))
        begin = max(wired, free_at.get(stay.to_tier, 0.0))
        free_at[wire] = wired + share * duration  # while it waits for its tier, the wire has room for others
        free_at[stay.to_tier] = begin + duration
        return begin + duration

    def fetches(self) -> None:
        """Begin each fetch early enough to end before its use, the last one first."""
        coming = sorted((i for i, s in enumerate(self.stays) if s.tier), key=lambda i: (-self.first[i], i))
        latest: dict[str, float] = {}
        for index in coming:
            self._fetch(index, latest)
        latest = {wire: self.end + min(0.0, begin) for wire, begin in latest.items()}
        left = self._left_at()
        for index in coming:
            begin = self._fetch(index, latest)
            wanted = max(int(np.searchsorted(self.start, max(begin, 0.0), side="right")) - 1, 0)
            if begin < 0.0 and self._comes_early(index):
                wanted = int(np.searchsorted(self.start, begin + self.end, side="right")) - 1 - self.count
            first = self.first[index]
            self.early[index] = min(max(wanted, left[index]), first)
            self.first[index] = self._extend_back(index, min(max(wanted, left[index]), first), first - 1)

    def _fetch(self, index: int, latest: dict[str, float]) -> float:
        """Seconds at which a residency's fetch should begin; moves the time from which its tier is taken."""
        stay = self.stays[index]
        wire, share = self.wires[stay.tier, True]
        duration = self._duration(index, stay.tier, "read")
        wired = min(float(self.start[self.first[index]]), latest.get(wire, np.inf))
        begin = min(wired, latest.get(stay.tier, np.inf)) - duration
        is_whole = begin >= 0.0 or self._comes_early(index)
        latest[wire] = wired - share * duration if is_whole else 0.0
        latest[stay.tier] = begin if is_whole else 0.0
        return begin

    def _left_at(self) -> list[int]:
        """First item at which the storage's previous residency is over; an array of [residency]."""
        left = [0] * len(self.stays)
        for indices in self.of_storage.values():
            for before, index in zip((indices[-1], *indices), indices, strict=False):
                left[index] = self.last[before] + 1 - (self.count if index == indices[0] else 0)
                left[index] = max(left[index], self.stays[index].since)
        return left

    def _extend(self, index: int, low: int, high: int) -> int:
        """Take items low..high, over the boundary too, as far as they fit from ``low`` on; returns the last taken."""
        reached = self._fill(index, low, min(high, self.count - 1), forward=True)
        if high < self.count or reached < self.count - 1:
            return reached
        return self.count + self._fill(index, 0, high - self.count, forward=True)

    def _extend_back(self, index: int, low: int, high: int) -> int:
        """Take items high..low, over the boundary too, as far as they fit from ``high`` down; returns the lowest."""
        reached = self._fill(index, max(low, 0), high, forward=False)
        if low >= 0 or reached > 0:
            return reached
        return self._fill(index, low + self.count, self.count - 1, forward=False) - self.count

    def _fill(self, index: int, low: int, high: int, *, forward: bool) -> int:
        """Take items low..high for a residency if they fit, else as many as do next to it; returns its new end."""
        if low > high:
            return high if forward else low
        size = self.sizes[index]
        full = (self.profile[low : high + 1] > self.soft - size).nonzero()[0]
        if len(full) and forward:
            high = low + int(full[0]) - 1
        elif len(full):
            low = low + int(full[-1]) + 1
        self.profile[low : high + 1] += size
        return high if forward else low


def _wire(tier: Tier, tiers: Sequence[Tier], read: bool) -> tuple[str, float]:
    """Name the wire of a tier, itself where it has none, and the share of the wire's rate that the tier reaches."""
    if not tier.wire:
        return tier.name, 1.0
    wire = wire_of([each for each in tiers if each.wire == tier.wire])
    return tier.wire, tier.alone_bytes_per_s(read=read) / wire.alone_bytes_per_s(read=read)
