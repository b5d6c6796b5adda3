"""Trips: choices of a plan changed one group after another, as a quick schedule says (``planner.timetable``).

A flow says what moves in which share of which window; rounded, repaired and lowered, a plan moves more than its flow,
for room that is short at a few moments only, and some of its trips wait in a queue behind others. With everything that
a plan moves, and memory without end, a step can still take most of what the plan takes: then its choices make it long,
and not addresses. So they are changed once more:

    minimise    seconds of the step by its timetable
    over        gaps that are kept instead, recomputed, or whose storages move to another tier, ``_TOGETHER`` of them,
                then fewer; those that computing waits for first, then the largest
    subject to  what is needed at once is no more than before, or a share of the arena          ``_TripSearch``
    until       no change helps, or so many were scheduled

All changes together are lowered, the first half of them, and the first one, as packing loses more than a change gains
in some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lading.ir.plan import Option
from lading.planner.emission import Residency
from lading.planner.lower import Lowering, paced_seconds
from lading.planner.pacing import is_paced
from lading.planner.residency import MOST_RETIMED, Found, good_enough
from lading.planner.schedule import stretch, wrapped
from lading.planner.single_changes import Choices
from lading.planner.timetable import Timetable, timetable

#: Share of the bound from which on a plan is worth the search.
_FAR = 0.05
#: Gaps that are changed together, in turn.
_TOGETHER = (16, 4, 1)
#: Operations scheduled in one search.
_WORK = 120_000
#: A change that makes a timetable shorter by less than this share is not taken.
_LEAST_GAIN = 1e-4
#: Shares of the arena up to which early reads may fill it, and that decide what crosses the step's boundary: of these,
#: those whose timetable is nearest to the plan.
_ROOMS, _CROSSING = (1.0, 0.95, 0.9, 0.85), (1.0, 0.9)
#: Share of the arena that what is needed at once may take: addresses need more.
_NEEDED = 0.88


@dataclass(frozen=True)
class _Timed:
    """Choices with their timetable, its residencies by number, and the most bytes needed at once."""

    choices: Choices
    table: Timetable
    stays: Sequence[Residency]
    needed_bytes: int


def changed_trips(found: Found, bound_s: float) -> list[Found]:
    """Improve a plan by changing what moves, as its timetable says; returns all versions, the fastest first.

    Args:
        bound_s: Seconds that no plan is below: near it there is nothing to gain.
    """
    step = found.step
    if good_enough(found, bound_s) or found.step_s <= (1 + _FAR) * bound_s or not is_paced(step):
        return [found]
    search = _TripSearch(found)
    search.run()
    return sorted((found, *search.lowered()), key=lambda made: made.step_s)


class _TripSearch:
    """Search of one plan; ``taken`` are its choices after each change that was taken."""

    def __init__(self, found: Found) -> None:
        self.step, self.found = found.step, found
        self.left = _WORK // len(self.step.graph.ops)
        self.options = {(c.gap.storage, c.gap.start): c.options for c in self.step.bound_problem.candidates}
        arena = self.step.arena_bytes
        settings = [(int(room * arena), int(share * arena)) for share in _CROSSING for room in _ROOMS]
        tried = [(self._timed(found.choices, *each), each) for each in settings]
        self.best, self.settings = min(tried, key=lambda row: abs(row[0].table.step_s - found.step_s))
        self.limit = max(self.best.needed_bytes, int(_NEEDED * arena))
        self.taken: list[Choices] = []

    def _timed(self, choices: Choices, room_bytes: int, crossing_bytes: int) -> _Timed:
        step, self.left = self.step, self.left - 1
        lowering = Lowering(step.graph, step.lives, step.machine, step.costs, choices)
        emission, computing_s = lowering.emission, lowering.seconds
        paced_s = paced_seconds(emission, computing_s, self.found.pace) if self.found.pace else computing_s
        room = stretch(step.graph, step.machine, emission, paced_s, crossing_bytes, both_ways=step.both_ways)
        emission, _ = wrapped(emission, room)
        table = timetable(step, emission, computing_s, room_bytes)
        return _Timed(choices, table, emission.residencies, lowering.peak_bytes)

    def run(self) -> None:
        """Change groups of gaps as long as that helps."""
        for count in _TOGETHER:
            keys = self._keys()
            for first in range(0, len(keys), count):
                for choices in self._changes(keys[first : first + count]):
                    if self.left <= 0:
                        return
                    if self._try(choices):
                        break

    def _try(self, choices: Choices) -> bool:
        """Take choices if their timetable is shorter than that of the ones so far."""
        made = self._timed(choices, *self.settings)
        if made.needed_bytes > self.limit or made.table.step_s >= (1 - _LEAST_GAIN) * self.best.table.step_s:
            return False
        self.best = made
        self.taken.append(choices)
        return True

    def lowered(self) -> Iterator[Found]:
        """Yield plans of all changes, of the first half of them and of the first one, where they fit."""
        for count in dict.fromkeys((len(self.taken), (len(self.taken) + 1) // 2, min(1, len(self.taken)))):
            choices = self.taken[count - 1] if count else self.found.choices
            program = self.step.lower(choices, pace=self.found.pace).program if count else None
            if program is not None:
                made = dataclasses.replace(self.found, choices=choices, program=program, retimed=0)
                yield self.step.retimed(made, 2 * MOST_RETIMED)

    def _keys(self) -> list[tuple[int, int]]:
        """List the gaps that are not kept: those that computing waits for first, then the largest."""
        waited: dict[int, float] = {}
        for stay, seconds in self.best.table.waited_s.items():
            storage = self.best.stays[stay].storage
            waited[storage] = waited.get(storage, 0.0) + seconds
        sizes = self.step.graph.storages
        keys = [key for key in self.best.choices if key in self.options]
        return sorted(keys, key=lambda key: (-waited.get(key[0], 0.0), -sizes[key[0]].size_bytes, key))

    def _changes(self, keys: Sequence[tuple[int, int]]) -> Iterator[Choices]:
        """Yield choices with some gaps kept, with their storages in another tier, and with some recomputed."""
        now = self.best.choices
        keys = [key for key in keys if key in now]
        if keys:
            yield {key: option for key, option in now.items() if key not in keys}
        storages = {storage for storage, _ in keys}
        away = [key for key in now if key[0] in storages and (now[key].tier or key in keys)]
        for tier in self.step.machine.tiers:
            yield from self._changed(away, Option(tier.name))
        yield from self._changed(keys, Option.RECOMPUTE)

    def _changed(self, keys: Sequence[tuple[int, int]], option: Option) -> Iterator[Choices]:
        now = self.best.choices
        changed = {key: option for key in keys if now[key] != option and option in self.options.get(key, ())}
        if changed:
            yield {**now, **changed}
