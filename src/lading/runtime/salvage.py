"""Salvage: find where every value lies after a step that stopped half-way, from how far its streams came.

A step changes values in few of its actions. Which have run is known, and so is every address, so one walk over the
actions that ended tells where the newest copy of each value is, and how many of the step's changes are in it. An
operation or a move that was cut short spoils what it was writing, and no more.

[Note: a step that did not happen] Updates deferred from the step before are part of that step: those that ended stay,
the others still wait. Where no other change has been made, the values are those of the last whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from lading.ir.action import CALLER, DEVICE, Action, ActionKind
from lading.ir.graph import StepGraph
from lading.ir.program import Program, slot_bytes
from lading.memory.tier_layout import Location
from lading.runtime.binding import Bound
from lading.runtime.streams import Reached


@dataclass(frozen=True)
class Salvage:
    """Values that survive a step that stopped, by storage.

    Attributes:
        places: Place of the newest copy of each storage that has one.
        changed: Pairs (changes of the step that the value has, changes of a whole step), of values that have some.
        lost: Storages without a copy.
        caught_up: Deferred operations that need not, or can not, run any more.
    """

    places: dict[int, Location]
    changed: dict[int, tuple[int, int]]
    lost: frozenset[int]
    caught_up: frozenset[int]

    def with_lost(self, lost: Set[int], graph: StepGraph) -> Salvage:
        """Copy in which more storages are lost: a deferred update that would read one loses what it would move, too."""
        lost_storages, caught_up = self.lost | lost, self.caught_up
        while blocked := {op for op in graph.deferred if op not in caught_up and lost_storages & {*graph.op_reads[op]}}:
            caught_up |= blocked
            lost_storages |= {s for op in blocked for s in graph.op_writes[op]}
        needed_storages = {s for op in graph.deferred if op not in caught_up for s in graph.op_reads[op]}
        lost_storages -= graph.carried - needed_storages
        places = {s: place for s, place in self.places.items() if s not in lost_storages}
        changed = {s: change for s, change in self.changed.items() if s not in lost_storages}
        return Salvage(places, changed, lost_storages, caught_up)


@dataclass(slots=True)
class _Copies:
    """Copies of one storage, by tier, each with the number of changes that are in it.

    Attributes:
        by_tier: Pairs (changes, place).
        changes: Changes made so far.
        deferred: Changes among them that were deferred from the step before.
    """

    by_tier: dict[str, tuple[int, Location]]
    changes: int = 0
    deferred: int = 0

    def newest(self) -> tuple[int, Location] | None:
        """Newest copy, as (changes, place); None without one."""
        return max(self.by_tier.values(), key=lambda copy: copy[0], default=None)


@dataclass
class _SalvageWalk:
    """Follows the copies of persistent storages over actions that have ended, or were cut short."""

    program: Program
    copies: dict[int, _Copies]
    slots: dict[str, dict[int, int]]
    skipped: Set[int]
    at: dict[int, int] = field(default_factory=dict[int, int])
    run: set[int] = field(default_factory=set[int])

    def ended(self, action: Action) -> None:
        """Account for an action that came to its end."""
        self._placed(action)
        graph = self.program.graph
        if action.op is not None:
            if action.id in self.skipped:
                return
            self.run.add(action.op)
            tier = self.program.host_tier if action.op in graph.on_host else DEVICE
            outputs = {graph.storage_of(t) for t in graph.ops[action.op].outputs}
            for storage in graph.op_writes[action.op]:
                if storage in self.copies:
                    self._changed(storage, tier, deferred=action.op in graph.deferred, anew=storage in outputs)
        elif action.storage in self.copies and not (action.kind is ActionKind.MOVE and action.id in self.skipped):
            copies = self.copies[action.storage]
            source = copies.by_tier.get(action.source)
            if action.kind is ActionKind.FREE:
                copies.by_tier.pop(action.source, None)
            elif action.target != CALLER:
                self._set_copy(action.storage, action.target, None if source is None else source[0])

    def cut(self, action: Action) -> None:
        """Account for an action that may have done a part of its work: what it was writing is spoilt."""
        self._placed(action)
        graph = self.program.graph
        if action.op is not None and action.id not in self.skipped:
            tier = self.program.host_tier if action.op in graph.on_host else DEVICE
            for storage in graph.op_writes[action.op]:
                if storage in self.copies:
                    self.copies[storage].by_tier.pop(tier, None)
        elif action.storage in self.copies and action.id not in self.skipped:
            self.copies[action.storage].by_tier.pop(action.target or action.source, None)

    def _placed(self, action: Action) -> None:
        """Drop the copies that lay where an action places its storages."""
        sizes = self.program.graph.storages
        for storage, offset in action.places:
            end = offset + slot_bytes(sizes[storage].size_bytes)
            for neighbor, copies in self.copies.items():
                copy = copies.by_tier.get(DEVICE)
                if copy is not None and neighbor != storage:
                    start = copy[1].offset
                    if start < end and offset < start + slot_bytes(sizes[neighbor].size_bytes):
                        del copies.by_tier[DEVICE]
            self.at[storage] = offset
            if storage in self.copies:
                self.copies[storage].by_tier.pop(DEVICE, None)

    def _changed(self, storage: int, tier: str, *, deferred: bool, anew: bool) -> None:
        copies = self.copies[storage]
        before = copies.by_tier.get(tier)
        good = anew or (before is not None and before[0] == copies.changes)
        copies.changes += 1
        copies.deferred += deferred
        self._set_copy(storage, tier, copies.changes if good else None)

    def _set_copy(self, storage: int, tier: str, changes: int | None) -> None:
        if changes is None:
            self.copies[storage].by_tier.pop(tier, None)
        else:
            offset = self.at[storage] if tier == DEVICE else self.slots[tier][storage]
            self.copies[storage].by_tier[tier] = (changes, Location(tier, offset))


def salvage(
    program: Program, homes: Mapping[int, str], bound: Bound, reached: Iterable[Reached], skipped: Set[int]
) -> Salvage:
    """Find where the values are after a step that stopped.

    Args:
        homes: Tier of each persistent storage between steps (``lading.memory.tier_layout.home_tiers``).
        bound: The queues that ran; ``reached`` is how far each of its streams came.
        skipped: Actions that did nothing in this run.
    """
    graph, slots = program.graph, {tier: dict(places) for tier, places in program.slots.items()}
    slots[DEVICE] = dict(program.resident)
    start = {s: _Copies({tier: (0, Location(tier, slots[tier][s]))}) for s, tier in homes.items()}
    walk = _SalvageWalk(program, start, slots, skipped, at=dict(program.resident))
    ended, cut = _actions(bound, reached)
    for action in program.actions:
        if action.id in ended:
            walk.ended(action)
        elif action.id in cut:
            walk.cut(action)
    newest = {storage: copies.newest() for storage, copies in walk.copies.items()}
    lost = {s for s, copy in newest.items() if copy is None or copy[0] < walk.copies[s].deferred}
    not_pending = {a.op for a in program.actions if a.op in graph.deferred and a.id in skipped}
    caught_up = {op for op in graph.deferred if op in walk.run or op in not_pending}
    total = _changes(program)
    changed = {
        s: (copy[0] - walk.copies[s].deferred, total.get(s, 0))
        for s, copy in newest.items()
        if copy is not None and s not in graph.carried and copy[0] > walk.copies[s].deferred
    }
    places = {s: copy[1] for s, copy in newest.items() if copy is not None}
    return Salvage(places, changed, frozenset(), frozenset(caught_up)).with_lost(lost, graph)


def ended_actions(bound: Bound, reached: Iterable[Reached]) -> set[int]:
    """Ids of the actions that came to their end in a step that stopped."""
    return _actions(bound, reached)[0]


def _actions(bound: Bound, reached: Iterable[Reached]) -> tuple[set[int], set[int]]:
    """Find the ids of the actions that have ended, and of those that were cut short."""
    ended: set[int] = set()
    cut: set[int] = set()
    regions = {region.actions[0]: region.actions for region in bound.regions}
    for actions, queue, far in zip(bound.actions, bound.entries, reached, strict=True):
        count = queue[far.ended - 1].count if far.ended else 0
        ended.update(actions[:count])
        if far.cut:
            action = queue[far.ended].action
            cut.update(regions.get(action, (action,)))
    return ended, cut


def _changes(program: Program) -> dict[int, int]:
    """Number of times that a whole step changes each storage, deferred updates left out."""
    graph, counts = program.graph, dict[int, int]()
    for action in program.actions:
        if action.op is not None and action.op not in graph.deferred:
            for storage in graph.op_writes[action.op]:
                counts[storage] = counts.get(storage, 0) + 1
    return counts


def bring_home(
    program: Program, homes: Mapping[int, str], salvaged: Salvage, copy: Callable[[int, Location, Location], None]
) -> Salvage:
    """Take every value to where it is between steps, by calls of ``copy(storage, source, target)``.

    First everything on the device that is not at home there goes down, into the slot that is its own in a lower tier:
    nothing is written over. Then what is at home on the device comes up, into a place that is its own too.

    Returns:
        What is there: a value that cannot be copied, as a tier failed, maybe the one that stopped the step, is lost.
    """
    slots = {tier: dict(places) for tier, places in program.slots.items()}
    slots[DEVICE] = dict(program.resident)
    failed = set[int]()

    def copy_or_note_failure(storage: int, source: Location, target: Location) -> None:
        try:
            copy(storage, source, target)
        except OSError:
            failed.add(storage)

    place_now = dict(salvaged.places)
    goals = {storage: Location(tier, slots[tier][storage]) for storage, tier in homes.items()}
    for storage, place in salvaged.places.items():
        if place.tier == DEVICE and place != goals[storage]:
            tiers = (homes[storage], *program.slots)
            tier = next(t for t in tiers if t != DEVICE and storage in slots[t])
            place_now[storage] = Location(tier, slots[tier][storage])
            copy_or_note_failure(storage, place, place_now[storage])
    for storage, place in place_now.items():
        if place != goals[storage]:
            copy_or_note_failure(storage, place, goals[storage])
    return salvaged.with_lost(failed, program.graph)
