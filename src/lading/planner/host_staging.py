"""Staging: when what the host's processors work on comes to the host's memory, and where it lies meanwhile.

Behind the slots of what is at home in the host's memory there is a room that storages share: gradients that the device
sends down, and what lies in a tier behind the host, such as states on a disk, which comes for an operation and goes
back after it (``lading.planner.emission.HostStay``). A load begins so early that it ends before its operation, behind
what the tier reads before, as far as the room has place for it: then the place of an operation before it is taken,
once that has been written back.

[Note: room] Bytes of stays are counted against a part of the room, and are then given addresses, which may leave holes:
smaller parts are tried in turn, at last one operation after another.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lading.cost.hosting import move_seconds
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.program import slot_sizes
from lading.memory.lifetime import Lifetimes
from lading.memory.packing import Buffer, pack, peak_bytes
from lading.planner.emission import Emission, HostStay
from lading.planner.schedule import MARGIN

#: Parts of the room that stays may fill, in turn.
_PARTS = (1.0, 0.85, 0.7, 0.5, 0.3, 0.0)
#: Share of the host's memory left to what passes through it.
_STAGED = 0.05


@dataclass(frozen=True)
class Staging:
    """Places of what is staged for the host's processors.

    Attributes:
        offsets: Offset of each storage behind the slots that last.
        host_stays: Stays of an emission, each with the item before which it begins to come.
        size_bytes: Bytes of all.
    """

    offsets: dict[int, int]
    host_stays: list[HostStay]
    size_bytes: int


def staging(
    graph: StepGraph,
    machine: Machine,
    op_seconds: Sequence[float],
    seconds: Sequence[float],
    emission: Emission,
    room_bytes: int,
) -> Staging:
    """Find when storages that are staged for the host's processors come, and addresses within ``room_bytes``.

    Args:
        op_seconds: Seconds of each operation.
        seconds: Seconds of each item.
        room_bytes: Bytes of the host's memory behind what lasts there; more are taken where nothing fits.
    """
    stager = _Stager(graph, machine, emission, op_seconds, seconds)
    made = stager.made(stager.passing(lasting=True), room_bytes, 1.0)
    for part in _PARTS[1:] if emission.host_stays else ():
        if made.size_bytes <= room_bytes:
            return made
        made = stager.made(stager.passing(lasting=True), room_bytes, part)
    return made if made.size_bytes <= room_bytes else stager.made(stager.passing(lasting=False), room_bytes, 0.0)


class _Stager:
    """Times and sizes of what is staged for the host, which takes its operations in order, each when it is free."""

    def __init__(
        self,
        graph: StepGraph,
        machine: Machine,
        emission: Emission,
        op_seconds: Sequence[float],
        seconds: Sequence[float],
    ) -> None:
        self.graph, self.emission, self.op_seconds = graph, emission, op_seconds
        self.tiers = {tier.name: tier for tier in machine.tiers}
        unit = self.tiers[emission.host_tier].alignment_bytes
        staged = (*emission.staged, *(stay.storage for stay in emission.host_stays))
        self.sizes = {s: -(-graph.storages[s].size_bytes // unit) * unit for s in staged}
        self.start = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])
        self.count = len(emission.items)

    def passing(self, *, lasting: bool) -> list[Buffer]:
        """Buffers of what the device sends down, or the host makes, until it is or must have been used.

        Args:
            lasting: Until it should have been used, by the times of the host's operations.
        """
        free_s, ended = 0.0, [0] * self.count
        for index, op in self._ops() if lasting else ():
            free_s = max(free_s, float(self.start[index])) + self.op_seconds[op]
            ended[index] = self._item_at(free_s)
        spans = ((s, first, max(last, ended[last])) for s, (first, last) in self.emission.staged.items())
        return [Buffer(self.sizes[s], ((first, last),)) for s, first, last in spans]

    def made(self, passing: Sequence[Buffer], room_bytes: int, part: float) -> Staging:
        """Give stays the part of the room that what passes leaves, and all of it addresses."""
        window = int(part * max(0, room_bytes - peak_bytes(passing))) if self.emission.host_stays else 0
        stays, spans = self._spans(window, early=part > 0.0)
        buffers = [*passing, *(Buffer(self.sizes[storage], tuple(each)) for storage, each in spans.items())]
        packing = pack(buffers, room_bytes)
        offsets = dict(zip((*self.emission.staged, *spans), packing.offsets, strict=True))
        return Staging(offsets, stays, packing.size_bytes)

    def _ops(self) -> Iterator[tuple[int, int]]:
        """Yield the operations on the host, each with its item."""
        for index, item in enumerate(self.emission.items):
            if item.op is not None and item.op in self.graph.on_host:
                yield index, item.op

    def _item_at(self, time_s: float) -> int:
        """Item at whose start so many seconds have passed; the last one where none has."""
        return min(int(np.searchsorted(self.start, time_s, side="left")), self.count - 1)

    def _spans(self, window: int, *, early: bool) -> tuple[list[HostStay], dict[int, list[tuple[int, int]]]]:
        """Stays with the items before which they come, and the items in which each storage has its place.

        Args:
            window: Bytes that stays may take together; the operation that is next has what it needs, all the same.
            early: Whether they come ahead of their operations.
        """
        wanted = self._wanted() if early else [stay.first for stay in self.emission.host_stays]
        ended = self._ended()
        stays: list[HostStay] = []
        last: list[int] = []
        under_way: deque[int] = deque()
        used = latest = 0
        for stay, at in zip(self.emission.host_stays, wanted, strict=True):
            first, size = min(max(latest, at), stay.first), self.sizes[stay.storage]
            while under_way and last[under_way[0]] < first:
                used -= self.sizes[stays[under_way.popleft()].storage]
            while under_way and used + size > window and stays[under_way[0]].last < stay.first:
                out = under_way.popleft()
                used -= self.sizes[stays[out].storage]
                last[out] = min(last[out], stay.first - 1)
                first = max(first, last[out] + 1)
            latest, used = first, used + size
            under_way.append(len(stays))
            stays.append(dataclasses.replace(stay, loaded=first))
            last.append(max(stay.last, ended[stay.last]))
        spans: dict[int, list[tuple[int, int]]] = {}
        for stay, end in zip(stays, last, strict=True):
            spans.setdefault(stay.storage, []).append((stay.loaded, end))
        return stays, spans

    def _wanted(self) -> list[int]:
        """Item at which each stay should begin to come, so that it is there when its operation is next."""
        latest: dict[str, float] = {}
        wanted: list[int] = []
        for stay in reversed(self.emission.host_stays):
            took_s = MARGIN * move_seconds(self.sizes[stay.storage], self.tiers[stay.tier], "read")
            begin = min(latest.get(stay.tier, np.inf), float(self.start[stay.first])) - took_s
            latest[stay.tier] = begin
            item = max(int(np.searchsorted(self.start, max(begin, 0.0), side="right")) - 1, stay.since, 0)
            wanted.append(min(item, stay.first))
        return wanted[::-1]

    def _ended(self) -> dict[int, int]:
        """Item by which what the last operation of a stay wrote should have gone back, by that operation's item."""
        leaving: dict[int, list[HostStay]] = {}
        for stay in self.emission.host_stays:
            leaving.setdefault(stay.last, []).append(stay)
        free_s, ended = 0.0, dict[int, int]()
        free_at = dict.fromkeys(self.tiers, 0.0)
        for index, op in self._ops():
            free_s = max(free_s, float(self.start[index])) + self.op_seconds[op]
            gone_s = free_s
            for stay in leaving.get(index, ()):
                if stay.is_written:
                    took_s = MARGIN * move_seconds(self.sizes[stay.storage], self.tiers[stay.tier], "write")
                    free_at[stay.tier] = max(free_at[stay.tier], free_s) + took_s
                    gone_s = max(gone_s, free_at[stay.tier])
            ended[index] = self._item_at(gone_s)
        return ended


def taken_by_host(
    graph: StepGraph, lives: Lifetimes, budgets: Mapping[str, int], host_tier: str, *, least: bool = False
) -> dict[str, int]:
    """Bytes of each lower tier that operands of operations on the host take.

    Where some lie behind the host's memory, what passes through it shares a room there (``staged_bytes``); elsewhere
    each is given its own.

    Args:
        budgets: Bytes by tier.
        least: Count no more than what every plan takes: what lasts.
    """
    sizes, behind = slot_sizes(graph), lives.behind_host
    near = graph.host_storages - behind.keys()
    passing = near - graph.persistent
    taken = {host_tier: sum(sizes[s] for s in near - passing)} if near or behind else dict[str, int]()
    for storage, tier in behind.items():
        taken[tier] = taken.get(tier, 0) + sizes[storage]
    if taken and not least:
        alone = sum(sizes[s] for s in passing)
        taken[host_tier] += staged_bytes(graph, lives, budgets[host_tier]) if behind else alone
    return taken


def staged_bytes(graph: StepGraph, lives: Lifetimes, host_bytes: int) -> int:
    """Bytes of the host's memory left to what passes through it for its processors, no more than all of it takes.

    That is room for two gradients, the largest, or a share of the memory if that is more. What lies behind the host's
    memory comes with all of its operation's operands, of which two operations have room: one is worked on while those
    of the next come.
    """
    passing = (graph.host_storages - graph.persistent) | lives.behind_host.keys()
    sizes = slot_sizes(graph)
    largest = max((sizes[s] for s in passing), default=0)
    if lives.behind_host:
        largest = least_staged_bytes(graph, lives)
    return min(sum(sizes[s] for s in passing), max(2 * largest, int(_STAGED * host_bytes)))


def least_staged_bytes(graph: StepGraph, lives: Lifetimes) -> int:
    """Bytes of the operands of one operation on the host that pass through its memory, of that with most."""
    passing, sizes = (graph.host_storages - graph.persistent) | lives.behind_host.keys(), slot_sizes(graph)
    return max((sum(sizes[s] for s in passing.intersection(graph.op_reads[op])) for op in graph.hosted), default=0)
