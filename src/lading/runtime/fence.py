"""Fence: values are copied while a step runs, and what would write over one waits until it is copied.

[Note: what may not be overwritten] A value lies between two steps at its home: in the arena, or in its slot of a lower
tier. Its bytes there are those of the last step until an action writes on any of them: an update in place, a move into
the slot, or another tensor that comes to lie there while the value is elsewhere. ``overwritten`` walks a Program as
binding does and finds, for each action, the homes that it writes on; it is all that a fence has to hold back.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from lading.ir.action import CALLER, DEVICE, Action, ActionKind
from lading.ir.program import RUNS_OP, Program, slot_bytes
from lading.memory.tier_layout import home_tiers
from lading.runtime.device import Lane
from lading.runtime.regions import FusibleRegion


class Fence:
    """Values on their way into host memory; each is held until its copy has ended.

    Args:
        copies: Call that copies a value, by storage, in the order in which they are made.
        lane: Lane of the device to copy on.
    """

    def __init__(self, copies: Mapping[int, Callable[[], object]], lane: Lane) -> None:
        self._copies, self._lane = copies, lane
        self._left = set(copies)
        self._changed = threading.Condition()

    @property
    def is_open(self) -> bool:
        """Whether every copy has ended."""
        return not self._left

    def run(self) -> None:
        """Make the copies, on a thread of its own; what fails ends all, and holds nothing back any more."""
        try:
            with torch.inference_mode(), self._lane.entered():
                for storage, copy in self._copies.items():
                    copy()
                    self._end([storage])
        finally:
            self.open()

    def open(self) -> None:
        """Hold nothing back any more, copied or not."""
        self._copies = {}  # whose places may go
        self._end([*self._left])

    def _end(self, storages: Sequence[int]) -> None:
        with self._changed:
            self._left.difference_update(storages)
            self._changed.notify_all()

    def wait(self, storages: Collection[int] | None = None) -> None:
        """Return once these values are copied; None waits for all."""
        with self._changed:
            while self._left if storages is None else not self._left.isdisjoint(storages):
                self._changed.wait()


def overwritten(program: Program, regions: Sequence[FusibleRegion] = ()) -> dict[int, frozenset[int]]:
    """Find the values whose homes each action writes on, by action id ([Note: what may not be overwritten]).

    Actions that write on none are left out.

    Args:
        regions: Regions that run as one call, at the first of their actions.
    """
    homes = _Homes(program)
    overwritten_by: defaultdict[int, set[int]] = defaultdict(set)
    first = {action: region.actions[0] for region in regions for action in (*region.actions, *region.freed)}
    places = dict(program.resident)
    for action in program.actions:
        places.update(action.places)
        for tier, storage in _written(program, action):
            place = places.get(storage) if tier == DEVICE else homes.slots[tier][storage]
            if place is not None:
                overwritten_by[first.get(action.id, action.id)] |= homes.values_overlapping(tier, place, storage)
        if action.kind is ActionKind.FREE and action.source == DEVICE and action.storage is not None:
            places.pop(action.storage, None)
    return {action: frozenset(storages) for action, storages in overwritten_by.items() if storages}


def _written(program: Program, action: Action) -> Iterator[tuple[str, int]]:
    """Tiers and storages that an action writes; freeing counts, as tests let it write."""
    graph = program.graph
    if action.kind in RUNS_OP and action.op is not None:
        tier = program.host_tier if action.op in graph.on_host else DEVICE
        for storage in graph.op_writes[action.op]:
            yield tier, storage
    elif action.storage is not None and action.kind is ActionKind.FREE:
        yield action.source, action.storage
    elif action.storage is not None and action.kind is ActionKind.MOVE and action.target != CALLER:
        yield action.target, action.storage


class _Homes:
    """Ranges of bytes in which values lie between steps, by tier."""

    def __init__(self, program: Program) -> None:
        self.slots = {tier: dict(slots) for tier, slots in program.slots.items()}
        self._sizes = [slot_bytes(storage.size_bytes) for storage in program.graph.storages]
        resident = dict(program.resident)
        places: dict[str, list[tuple[int, int]]] = {}
        for storage, tier in home_tiers(program).items():
            place = resident[storage] if tier == DEVICE else self.slots[tier][storage]
            places.setdefault(tier, []).append((place, storage))
        self._places = {tier: sorted(pairs) for tier, pairs in places.items()}
        self._longest = max(self._sizes, default=0)

    def values_overlapping(self, tier: str, place: int, storage: int) -> set[int]:
        """Values any byte of whose homes lies where ``storage`` lies at ``place`` of a tier."""
        pairs, end = self._places.get(tier, []), place + self._sizes[storage]
        row = bisect_right(pairs, (end - 1, len(self._sizes)))
        touched = set[int]()
        while row > 0 and pairs[row - 1][0] > place - self._longest:
            row -= 1
            start, value = pairs[row]
            if start + self._sizes[value] > place:
                touched.add(value)
        return touched
