"""Schedule: how early each storage is fetched and how late each written one may leave.

A fetch should end just before its use and a write-back may take its time, as long as memory allows: both are
stretched into bytes that nothing else needs, never beyond ``soft_bytes`` at any item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lading.cost.transfer import move_seconds
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.program import slot_sizes
from lading.planner.emit import Emission

#: Fetches are planned to take this much longer than predicted, so that noise does not stall compute.
MARGIN = 1.25


@dataclass(frozen=True)
class Stretched:
    """First and last item of each residency with its transfers included, in the order of the emission."""

    first: tuple[int, ...]
    last: tuple[int, ...]


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
    graph: StepGraph, machine: Machine, emission: Emission, item_seconds: Sequence[float], soft_bytes: int
) -> Stretched:
    """Give every transfer as much of its time as ``soft_bytes`` leaves room for."""
    worker = _Stretcher(graph, machine, emission, item_seconds, soft_bytes)
    worker.write_backs()
    worker.fetches()
    return Stretched(tuple(worker.first), tuple(worker.last))


class _Stretcher:
    def __init__(
        self, graph: StepGraph, machine: Machine, emission: Emission, item_seconds: Sequence[float], soft_bytes: int
    ) -> None:
        self.machine, self.stays = machine, emission.residencies
        sizes = slot_sizes(graph)
        self.sizes = [sizes[stay.storage] for stay in self.stays]
        self.start = np.concatenate([[0.0], np.cumsum(np.asarray(item_seconds, dtype=np.float64))])
        self.profile = base_profile(graph, emission)
        self.soft = soft_bytes
        self.first = [stay.first for stay in self.stays]
        self.last = [stay.last for stay in self.stays]

    def _duration(self, index: int, tier: str, direction: Literal["read", "write"]) -> float:
        found = self.machine.tier(tier)
        assert found is not None, f"plan uses tier {tier!r} that {self.machine.name} lacks"
        return MARGIN * move_seconds(self.sizes[index], found, direction)

    def write_backs(self) -> None:
        """Keep each storage that is written out until the write should have ended."""
        free_at: dict[str, float] = {}
        ending = (i for i, stay in enumerate(self.stays) if stay.to_tier)
        for index in sorted(ending, key=lambda i: (self.stays[i].last, i)):
            stay = self.stays[index]
            begin = max(free_at.get(stay.to_tier, 0.0), float(self.start[stay.last + 1]))
            finish = begin + self._duration(index, stay.to_tier, "write")
            free_at[stay.to_tier] = finish
            wanted = int(np.searchsorted(self.start, finish, side="left")) - 1
            self.last[index] = self._extend(index, stay.last + 1, min(wanted, len(self.profile) - 1), forward=True)

    def fetches(self) -> None:
        """Begin each fetch early enough to end before its use, the last one first."""
        latest: dict[str, float] = {}
        left = self._left_at()
        coming = (i for i, stay in enumerate(self.stays) if stay.tier)
        for index in sorted(coming, key=lambda i: (-self.stays[i].first, i)):
            stay = self.stays[index]
            finish = min(float(self.start[stay.first]), latest.get(stay.tier, np.inf))
            begin = finish - self._duration(index, stay.tier, "read")
            latest[stay.tier] = begin
            wanted = max(int(np.searchsorted(self.start, begin, side="right")) - 1, left[index], 0)
            self.first[index] = self._extend(index, min(wanted, stay.first), stay.first - 1, forward=False)

    def _left_at(self) -> list[int]:
        """For each residency, the first item at which the storage's previous stay is over."""
        over: dict[int, int] = {}
        left: list[int] = []
        for index, stay in enumerate(self.stays):
            left.append(over.get(stay.storage, 0))
            over[stay.storage] = self.last[index] + 1
        return left

    def _extend(self, index: int, low: int, high: int, *, forward: bool) -> int:
        """Take items low..high if they fit, else as many as do next to the stay; returns its new last or first item."""
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
