"""A greedy that evicts what is cheap to make again: dynamic tensor rematerialization (Kirisame et al., ICLR 2021).

The program runs in order. Where an allocation finds no room, the resident storage with the least
``h = cost / (bytes * staleness)`` is evicted, until there is room; an evicted storage that is read is made again from
its producer's inputs, which may have to be made again first. ``cost`` is the producer's time and that of the evicted
neighborhood: every evicted storage that would have to be made before it, or after it, as in the paper's h_DTR.
Storages go when nothing reads them any more (the paper's eager eviction), and can be made again too.

It decides about recomputation only, on top of choices that say what waits on lower tiers (``evicting``). Its own time
counts neither transfers nor fragmentation, so a run that is not faster than a plan at hand need not be lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lading.ir.graph import Role
from lading.ir.plan import Option
from lading.memory.lifetime import Gap, can_recompute, is_pure
from lading.planner.residency import MOST_RETIMED, Found, StepProblem
from lading.planner.streaming import persistent_away

Choices = dict[tuple[int, int], Option]
_TINY_S = 1e-9
#: A run that takes this many times the step without a budget is given up: it makes the same again and again.
_THRASHING = 20
#: Most operations of a step that it is tried on, and the shares of the arena it is given in turn.
_OPS, _ROOMS = 1500, (1.0, 0.95, 0.9, 0.8)


@dataclass
class Greedy:
    """Result of one run of the greedy.

    Attributes:
        choices: RECOMPUTE for every gap over which a storage was evicted.
        step_s: Seconds of operations and of what was made again; None where the run was given up.
    """

    choices: Choices = field(default_factory=lambda: {})
    step_s: float | None = None


def evicting(step: StepProblem, best_s: Callable[[], float]) -> Iterator[Found]:
    """Yield plans that fit in which persistent storages wait on lower tiers, and the greedy evicts activations.

    Args:
        best_s: Gives the seconds that a plan must be below; asked before each.
    """
    if len(step.graph.ops) > _OPS:
        return
    for away in persistent_away(step):
        for share in _ROOMS:
            greedy = run(step, away, int(share * step.arena_bytes), best_s())
            if greedy.step_s is None:
                break
            choices = {**greedy.choices, **away}
            program = step.lower(choices).program
            if program is not None:
                yield step.retimed(Found(choices, program, step), MOST_RETIMED)


def run(step: StepProblem, away: Choices, room_bytes: int, below_s: float = float("inf")) -> Greedy:
    """Run a step within ``room_bytes``, evicting what is cheap to make again.

    Args:
        away: Gaps of persistent storages, which are there only when used.
        below_s: Seconds; the run is given up as soon as it cannot take less.
    """
    return _GreedyRun(step, away, room_bytes, below_s).run()


class _GivenUp(Exception):
    pass


class _GreedyRun:
    """State of one run. ``live`` holds what is resident, ``gone`` what was evicted or freed and can be made again."""

    def __init__(self, step: StepProblem, away: Choices, room_bytes: int, below_s: float) -> None:
        self.graph, self.lives, self.seconds = step.graph, step.lives, step.costs.op_seconds
        self.away, self.room, self.result = away, room_bytes, Greedy()
        self.whole_s = sum(self.seconds)
        self.spare_s = below_s - self.whole_s  # what may be made again in all
        self.again_s = 0.0
        self.sizes = [s.size_bytes for s in self.graph.storages]
        self.live: set[int] = set()
        self.gone: set[int] = set()
        self.touched = [0.0] * len(self.sizes)
        self.used, self.clock = 0, 0.0
        self.next_use = [0] * len(self.sizes)  # index into lives.uses
        self.readers: dict[int, set[int]] = {}  # storages that a producer makes of a storage
        for op, reads, writes in zip(self.graph.ops, self.graph.op_reads, self.graph.op_writes, strict=True):
            if is_pure(op):
                for source in reads:
                    self.readers.setdefault(source, set()).update(writes)
        self.steady = {s for s in self.graph.persistent if not self._is_away(s)}

    def run(self) -> Greedy:
        for storage in self.steady:
            self._take(storage)
        try:
            for position in range(len(self.graph.ops)):
                self._step(position)
        except _GivenUp:
            return self.result
        self.result.step_s = self.clock
        return self.result

    def _is_away(self, storage: int) -> bool:
        uses = self.lives.uses[storage]
        return bool(uses) and (storage, uses[-1]) in self.away

    def _step(self, position: int) -> None:
        reads, writes = self.graph.op_reads[position], self.graph.op_writes[position]
        locked = {*reads, *writes}
        for storage in reads:
            self._ensure(storage, locked)
        for storage in writes:
            self._allocate(storage, locked)
        self.clock += self.seconds[position]
        for storage in locked:
            self.touched[storage] = self.clock
            uses = self.lives.uses[storage]
            while self.next_use[storage] < len(uses) and uses[self.next_use[storage]] <= position:
                self.next_use[storage] += 1
            over = self.next_use[storage] == len(uses) and storage not in self.steady
            if over or (storage, position) in self.away:
                self._free(storage)

    def _ensure(self, storage: int, locked: set[int]) -> None:
        """Make a storage resident; the storages needed for that are locked meanwhile."""
        stack = [storage]
        while stack:
            wanted = stack[-1]
            producer = self.lives.producer[wanted]
            if wanted in self.live:
                stack.pop()
                continue
            if wanted not in self.gone or producer is None:  # from the caller, or a lower tier
                self._allocate(wanted, locked)
                continue
            sources = self.graph.op_reads[producer]
            locked.update(sources)
            missing = [s for s in sources if s not in self.live]
            if missing:
                stack.extend(missing)
                continue
            for made in self.graph.op_writes[producer]:
                self._allocate(made, locked)
            self.clock += self.seconds[producer]
            self.again_s += self.seconds[producer]
            if self.again_s >= self.spare_s:
                raise _GivenUp
            for touched in (*sources, *self.graph.op_writes[producer]):
                self.touched[touched] = self.clock
            for made in self.graph.op_writes[producer]:
                if made != wanted and self.next_use[made] == len(self.lives.uses[made]):
                    self._free(made)
            stack.pop()
            for source in sources:  # what was made only for this
                if self.next_use[source] == len(self.lives.uses[source]) and source not in self.steady:
                    self._free(source)

    def _take(self, storage: int) -> None:
        self.live.add(storage)
        self.gone.discard(storage)
        self.used += self.sizes[storage]

    def _free(self, storage: int) -> None:
        if storage in self.live:
            self.live.remove(storage)
            self.used -= self.sizes[storage]
            if self.lives.producer[storage] is not None:
                self.gone.add(storage)

    def _allocate(self, storage: int, locked: set[int]) -> None:
        if storage in self.live:
            return
        while self.used + self.sizes[storage] > self.room:
            self._evict(locked)
        self._take(storage)

    def _evict(self, locked: set[int]) -> None:
        if self.clock > _THRASHING * self.whole_s:
            raise _GivenUp
        victims = [s for s in self.live - locked - self.steady if self._can_go(s)]
        if not victims:
            raise _GivenUp
        victim = min(victims, key=lambda s: (self._h(s), s))
        uses, following = self.lives.uses[victim], self.next_use[victim]
        if following < len(uses):
            self.result.choices[victim, uses[following - 1]] = Option.RECOMPUTE
        self._free(victim)

    def _can_go(self, storage: int) -> bool:
        uses, following = self.lives.uses[storage], self.next_use[storage]
        role = self.graph.storages[storage].role
        if storage in self.graph.persistent or role is Role.INPUT or not self.sizes[storage]:
            return False
        if following == len(uses):
            return True
        return following > 0 and can_recompute(
            self.graph, self.lives, Gap(storage, uses[following - 1], uses[following], False)
        )

    def _h(self, storage: int) -> float:
        cost = sum(self._seconds_of(s) for s in (storage, *self._neighborhood(storage)))
        staleness = max(self.clock - self.touched[storage], _TINY_S)
        return cost / (self.sizes[storage] * staleness)

    def _seconds_of(self, storage: int) -> float:
        producer = self.lives.producer[storage]
        return 0.0 if producer is None else self.seconds[producer]

    def _neighborhood(self, storage: int) -> set[int]:
        """Evicted storages that making this one needs, and that need this one, without another resident between."""
        evicted: set[int] = set()
        for neighbors in (self._sources, self._results):
            stack = [storage]
            while stack:
                for other in neighbors(stack.pop()):
                    if other in self.gone and other not in evicted:
                        evicted.add(other)
                        stack.append(other)
        return evicted

    def _sources(self, storage: int) -> tuple[int, ...]:
        producer = self.lives.producer[storage]
        return () if producer is None else self.graph.op_reads[producer]

    def _results(self, storage: int) -> list[int]:
        """Storages made from this one that are still to be used."""
        made = self.readers.get(storage, ())
        return [s for s in made if 0 < self.next_use[s] < len(self.lives.uses[s])]
