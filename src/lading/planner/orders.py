"""Orders of a step: its updates where the gradients become final, or deferred into the next forward.

A deferred update finds a forward to hide its transfers under, and its gradient stays over the step's boundary in
exchange (``lading.ir.defer``). With n the updates deferred, the last ones of the step, and x the choices of a plan,

    minimise    T(n, x)   seconds of the step as simulated
    subject to  n of 0, the updates that find no cover, all                     ``_counts``
                x a plan of the step in that order, within all budgets          ``deferred_step``, ``ResidencySearch``

Which order pays depends on the step, the machine and the budget. Each is planned once; those whose first plan stays
within reach of the best are searched to the end (``_finished``), and the fastest plan wins (``best_order``). The bound
that is printed is the least over the orders that were planned, however far.

Forms of a step, with its loss in parts or with late updates, are searched likewise: those whose first plans are within
reach of the fastest (``searched_forms``), and the bound is below plans of all of them (``of_all_forms``).

[Note: greedy] Other choices to start from evict what is cheap to make again: dynamic tensor rematerialization (Kirisame
et al., ICLR 2021). The program runs in order. Where an allocation finds no room, the resident storage with the least
``h = cost / (bytes * staleness)`` is evicted, until there is room; an evicted storage that is read is made again from
its producer's inputs, which may have to be made again first. ``cost`` is the producer's time and that of the evicted
neighborhood: every evicted storage that would have to be made before it, or after it, as in the paper's h_DTR.
Storages go when nothing reads them any more (the paper's eager eviction), and can be made again too.

It decides about recomputation only, on top of choices that say what waits on lower tiers (``evicting``). Its own time
counts neither transfers nor fragmentation, so a run that is not faster than a plan at hand need not be lowered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.action import DEVICE
from lading.ir.defer import defer, updates
from lading.ir.graph import Phase, Role
from lading.ir.plan import Option
from lading.ir.reporting import SILENT, PlanProgress
from lading.memory.lifetime import Gap, beside_host, can_recompute, gaps, is_pure, lifetimes
from lading.planner.fluid import WindowedBound
from lading.planner.forms import weight_pieces
from lading.planner.host_balance import hosted_alike, with_host, with_room
from lading.planner.pacing import Pace, PacedFlow, best_paced, first_flow, is_paced, with_paced
from lading.planner.residency import (
    GOOD_ENOUGH,
    MOST_RETIMED,
    Found,
    ResidencySearch,
    StepProblem,
    Tell,
    first_plan,
    good_enough,
    lower_bound_s,
    polished,
    smallest_budget_bytes,
)
from lading.planner.single_changes import Choices, tries
from lading.planner.streaming import moving, persistent_away

_TINY_S = 1e-9
#: A run that takes this many times the step without a budget is given up: it makes the same again and again.
_THRASHING = 20
#: Shares of the arena that it is given in turn, how often it looks at a storage in all before a run is given up, and
#: operations of its plans that are lowered.
_ROOMS, _LOOKS, _LOWERED = (1.0, 0.95, 0.9, 0.8), 1_000_000, 12_000


@dataclass
class Greedy:
    """Result of one run of the greedy.

    Attributes:
        choices: RECOMPUTE for every gap over which a storage was evicted.
        step_s: Seconds of operations and of what was made again; None where the run was given up.
        looks: How often it looked at a storage, one that could go or one of its neighborhood.
    """

    choices: Choices = field(default_factory=lambda: {})
    step_s: float | None = None
    looks: int = 0


def evicting(step: StepProblem, best_s: Callable[[], float]) -> Iterator[Found]:
    """Yield plans that fit in which persistent storages wait on lower tiers, and the greedy evicts activations.

    Args:
        best_s: Gives the seconds that a plan must be below; asked before each.
    """
    looks, left = _LOOKS, _LOWERED // len(step.graph.ops)
    for away in persistent_away(step):
        for share in _ROOMS:
            if left <= 0:
                return
            greedy = evict(step, away, int(share * step.arena_bytes), best_s(), looks)
            looks -= greedy.looks
            if greedy.step_s is None:
                break
            choices, left = {**greedy.choices, **away}, left - 1
            program = step.lower(choices).program
            if program is not None:
                yield step.retimed(Found(choices, program, step), MOST_RETIMED)


def evict(
    step: StepProblem, away: Choices, room_bytes: int, below_s: float = float("inf"), looks: float = float("inf")
) -> Greedy:
    """Run a step within ``room_bytes``, evicting what is cheap to make again.

    Args:
        away: Gaps of persistent storages, which are there only when used.
        below_s: Seconds; the run is given up as soon as it cannot take less.
        looks: Most looks at storages, after which the run is given up.
    """
    return _GreedyRun(step, away, room_bytes, below_s, looks).run()


class _GivenUp(Exception):
    pass


class _GreedyRun:
    """State of one run. ``live`` holds what is resident, ``gone`` what was evicted or freed and can be made again."""

    def __init__(self, step: StepProblem, away: Choices, room_bytes: int, below_s: float, looks: float) -> None:
        self.graph, self.lives, self.seconds = step.graph, step.lives, step.costs.op_seconds
        self.away, self.room, self.most_looks, self.result = away, room_bytes, looks, Greedy()
        self.computing_s = [0.0 if op in self.graph.off_compute_ops else took for op, took in enumerate(self.seconds)]
        self.whole_s = sum(self.computing_s)
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
        self.clock += self.computing_s[position]
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
            self.clock += self.computing_s[producer]
            self.again_s += self.computing_s[producer]
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
        if not victims or self.result.looks > self.most_looks:
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
        neighborhood = self._neighborhood(storage)
        self.result.looks += 1 + len(neighborhood)
        cost = sum(self._seconds_of(s) for s in (storage, *neighborhood))
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


#: Where updates come during the backward, this share of them, the last ones, is what may be left without cover.
_LAST_SHARE = 1 / 3
#: Operations planned in all orders together, but for the first order.
_ORDERED = 10_000
#: An order whose first plan takes this share longer than another's is not searched further, nor is a step with
#: operations on the host that takes no more than this share less, and whose bound does not either.
REACH = 0.03
#: Operations of plans that are searched where some run on the host and that pays.
_HOSTED_OPS = 12_000
#: Most forms of a step that are searched, of those whose first plans are within reach of the fastest, and the
#: operations that they have together, but for the first form.
_SEARCHED, _SEARCHED_OPS = 2, 12_000
#: Most forms whose paced flows are planned, of those that take this share longer than the least.
_PACED_FORMS, _PACED_REACH = 2, 0.01
#: A form whose first plan takes so many times the fastest form's has no room for what its flow says.
BEHIND = 1.5
#: Nothing is searched where paced flows are further ahead of all first plans than this, as a search gains less; but for
#: steps so small that single choices are changed.
_OVERTAKEN = 0.1
#: Share of its bound above which a plan is tried with its largest weights in pieces, and within which these are taken.
_FAR_FROM_BOUND = 0.1
#: Work of the flows that sharpen a bound: windows times the operations to the power of 1.5.
_SHARP_WORK = 4_000_000
#: Operations of a step beyond which no bound is made sharper: two windows say 0.2% more of a Llama of 70 billion
#: parameters (9,166 operations), for 18 s of a processor.
_SHARP_OPS = 6_300


@dataclass(frozen=True)
class Ordered:
    """Best plan over the orders that were tried.

    Attributes:
        deferred: Number of updates that are deferred, the last ones of the step.
        step: Step in that order.
        bound_s: Seconds that no plan in any of the orders is below, every operation where it is; 0 where none is known.
        orders: Orders that it is a bound of, as steps of their own; () where it is not to be made sharper.
        paced: Whether paced flows of the step were planned.
    """

    deferred: int
    step: StepProblem
    found: Found
    bound_s: float
    orders: tuple[StepProblem, ...] = ()
    paced: bool = False

    @property
    def outdoes_flows(self) -> bool:
        """Whether a search found a faster plan than the step's paced flows: these are of no more use to it."""
        return self.paced and not self.found.pace


def deferred_step(step: StepProblem, count: int) -> StepProblem:
    """Defer the last ``count`` updates of a step."""
    if count and count not in step.orders:
        step.orders[count] = _deferred(step, count)
    return step.orders[count] if count else step


def _deferred(step: StepProblem, count: int) -> StepProblem:
    graph, order = defer(step.graph, count)
    seconds, scratch = step.costs.op_seconds, step.costs.workspace_bytes
    costs = dataclasses.replace(
        step.costs,
        op_seconds=tuple(seconds[i] for i in order),
        workspace_bytes=tuple(scratch[i] for i in order),
    )
    return dataclasses.replace(step, graph=graph, lives=lifetimes(graph), costs=costs)


def smallest_order_bytes(step: StepProblem) -> int:
    """Smallest device budget in bytes that a plan is found for in any of the orders."""
    return min(smallest_budget_bytes(deferred_step(step, count))[0] for count in _counts(step))


def best_order(step: StepProblem, others: Iterable[Found], progress: PlanProgress = SILENT) -> Ordered:
    """Plan a step in several orders: a first plan of each, then the whole search in those within reach of the best.

    Args:
        others: Plans of ``step`` itself that are candidates too.
        progress: Is told what is being done.

    Raises:
        PlanInfeasible, ConfigError: no order has a plan; says it of the order that needs least.
    """
    others = tuple(others)
    for plan in others:
        roomy = not step.graph.collectives or step.needs({}) <= step.budgets[DEVICE]
        if not plan.choices and roomy:  # each operation once, none waits for room: no plan takes less
            return Ordered(0, step, plan, plan.step_s)
    bound_s = float("inf")
    searches: list[tuple[int, ResidencySearch]] = []
    counts = _counts(step)
    for index, count in enumerate(counts):
        ordered, tell = (
            deferred_step(step, count),
            _within(progress, index / len(counts) / 3, 1 / len(counts) / 3, count),
        )
        search = ResidencySearch(ordered, () if count else others)
        searches.append((count, search))
        if search.best is None and ordered.is_hopeless:
            continue
        tell(0.0, "a time that no plan can beat")
        bound_s = min(bound_s, lower_bound_s(ordered))
        tell(0.3, "a first plan")
        reach_s = (1 + REACH) * min(search.best_s() for _, search in searches)  # beyond it this order is left out
        if reach_s == float("inf") or first_plan(ordered, reach_s, tight=False) is not None:
            search.advance()
        tell(0.6, "plans that only move, or only evict")
        evicted = () if count else evicting(ordered, search.best_s)
        moved = moving(ordered, lambda reach_s=reach_s, search=search: min(reach_s, search.best_s()))
        for plan in chain([search.best], moved, evicted):
            search.offer(plan)
            if search.best is not None and good_enough(search.best, bound_s):
                return Ordered(count, ordered, search.best, bound_s)
    bound_s = bound_s if bound_s < float("inf") else 0.0
    count, plan = _finished(searches, bound_s, progress)
    progress.update(0.9, "the fastest plan with single choices changed")
    plan = polished(plan, bound_s)
    return Ordered(count, plan.step, plan, bound_s, tuple(search.step for _, search in searches))


def best_of_forms(
    forms: Sequence[StepProblem], first_s: Sequence[float], fitting: Mapping[str, Found], progress: PlanProgress
) -> Ordered:
    """Plan the forms whose paced flows take least, and search those whose first plans are not far behind.

    Args:
        forms: Forms of the step, which is the first of them.
        first_s: Seconds of the first plan of each; infinite where it does not fit.
        fitting: Plans of the step itself that are candidates too.
        progress: Is told what is being done.

    Returns:
        The fastest plan, with a bound that is below plans of all forms.

    Raises:
        PlanInfeasible: no form has a plan.
    """
    flowing = paced_forms(forms, first_s)
    least_s = min((ordered.found.step_s for ordered in flowing.values()), default=float("inf"))
    searched = list[Ordered]()
    if tries(len(forms[0].graph.ops)) or min(first_s) <= (1 + _OVERTAKEN) * least_s:
        both_s = [min(s, flowing[at].found.step_s) if at in flowing else s for at, s in enumerate(first_s)]
        most = 1 if least_s < min(first_s) else _SEARCHED
        searched = searched_forms(forms, both_s, fitting, progress, most)
    return of_all_forms([*searched, *flowing.values()], forms, fitting)


def searched_forms(
    forms: Sequence[StepProblem],
    first_s: Sequence[float],
    fitting: Mapping[str, Found],
    progress: PlanProgress,
    most: int = _SEARCHED,
) -> list[Ordered]:
    """Search the form whose first plan is the fastest, and others whose first plans are within reach of it.

    Args:
        forms: Forms of the step, which is the first of them.
        first_s: Seconds of the first plan of each; infinite where it does not fit.
        fitting: Plans of the step itself that are candidates too.
        progress: Is told what is being done.
        most: Most forms that are searched: one where paced flows are ahead of all first plans.

    Raises:
        PlanInfeasible: no form has a plan; says it of the form that needs least.
    """
    most = max(1, min(most, _SEARCHED_OPS // len(forms[0].graph.ops)))
    made: list[Ordered] = []
    failure: PlanInfeasible | None = None
    for form_s, at in sorted(zip(first_s, range(len(forms)), strict=True)):
        if len(made) == most or (made and form_s > (1 + REACH) * min(first_s)):
            break
        try:
            made.append(best_order(forms[at], () if at else fitting.values(), progress))
        except PlanInfeasible as error:
            failure = min(failure or error, error, key=lambda each: each.smallest_budget_bytes)
    if not made:
        assert failure is not None, "no form has a plan"
        raise failure
    return made


def paced_forms(forms: Sequence[StepProblem], first_s: Sequence[float]) -> dict[int, Ordered]:
    """Plan the forms whose paced flows take least (``planner.pacing``); returns the fastest plan of each by number.

    A form whose flow takes longer is planned where the plans at hand are further behind it: some flows leave their
    plans little, as addresses leave holes.

    Args:
        first_s: Seconds of the first plan of each: those far behind the fastest are left out.
    """
    steps = [deferred_step(form, form.deferrals) for form in forms]
    near = [is_paced(step) and s <= BEHIND * min(first_s) for step, s in zip(steps, first_s, strict=True)]
    able = [at for at, step in enumerate(steps) if near[at] and not step.is_hopeless]
    flows: dict[int, tuple[Pace, PacedFlow]] = {}
    least_s = float("inf")
    for at in sorted(able, key=lambda at: (lower_bound_s(steps[at]), at)):
        if lower_bound_s(steps[at]) > (1 + _PACED_REACH) * least_s:
            break  # a flow takes no less than the bound
        flows[at] = first_flow(steps[at])
        least_s = min(least_s, flows[at][1].seconds)
    made: dict[int, Ordered] = {}
    for flow_s, at in sorted((flow[1].seconds, at) for at, flow in flows.items())[:_PACED_FORMS]:
        made_s = min((ordered.found.step_s for ordered in made.values()), default=float("inf"))
        if flow_s == float("inf") or (flow_s > (1 + _PACED_REACH) * least_s and made_s <= (1 + REACH) * flow_s):
            break
        best = best_paced(steps[at], flows[at], near_s=(1 + REACH) * min(first_s))
        if best is not None:
            orders = (steps[at],)
            made[at] = Ordered(forms[at].deferrals, steps[at], best, lower_bound_s(steps[at]), orders, paced=True)
    return made


def of_all_forms(made: Sequence[Ordered], forms: Sequence[StepProblem], fitting: Mapping[str, Found]) -> Ordered:
    """Pick the fastest plan, with a bound that is below plans of all forms.

    Args:
        made: Plans of some forms.
        forms: All of them, the step as it is first.
        fitting: Plans of that by plain policies.
    """
    best = min(made, key=lambda ordered: ordered.found.step_s)
    tried = {id(step) for ordered in made for step in ordered.orders}
    others = [deferred_step(form, form.deferrals) for form in forms]
    others = [step for step in others if id(step) not in tried]
    bounds = [*(ordered.bound_s for ordered in made), *filter(None, map(lower_bound_s, others))]
    known = all(ordered.orders for ordered in made)
    every = {id(step): step for step in (*(step for ordered in made for step in ordered.orders), *others)}
    flowed = any(ordered.paced and ordered.step is best.step for ordered in made)
    best = dataclasses.replace(best, bound_s=min(bounds), orders=tuple(every.values()) if known else (), paced=flowed)
    plain = min(fitting.values(), key=lambda found: found.step_s, default=best.found)
    return (
        dataclasses.replace(best, deferred=0, step=forms[0], found=plain) if plain.step_s < best.found.step_s else best
    )


def with_weight_pieces_tried(chosen: Ordered, step: StepProblem, progress: PlanProgress = SILENT) -> Ordered:
    """Try the form that was chosen with large weights in pieces, where the plan is far from its bound.

    Args:
        step: Step as it is.

    Returns:
        The faster plan, with a bound that is below those of both forms.
    """
    planned = chosen.found.step
    near = chosen.found.step_s <= (1 + _FAR_FROM_BOUND) * chosen.bound_s
    if near or planned.weight_pieces or not is_paced(planned) or chosen.outdoes_flows:
        return chosen
    progress.update(0.9, "plans with the largest weights in pieces")
    for form in weight_pieces(planned, step):
        bound_s = min(chosen.bound_s, lower_bound_s(form) or chosen.bound_s)
        chosen = dataclasses.replace(chosen, bound_s=bound_s, orders=(*chosen.orders, form) if chosen.orders else ())
        made = best_paced(form, below_s=chosen.found.step_s / (1 + REACH))  # its flow: plans mostly take longer
        if made is not None and made.step_s < chosen.found.step_s:
            again = form.head_parts or form.late_products != planned.late_products  # made of the step as it is
            deferred = 0 if again else chosen.deferred
            chosen = dataclasses.replace(chosen, step=form, found=made, deferred=deferred, paced=True)
    return chosen


def ahead_of_forms(forms: Sequence[StepProblem], step: StepProblem) -> Ordered | None:
    """Plan the first form that may fit with large weights in pieces; None where plans of the forms may be much faster.

    Of a form whose bound is near such a plan, or above it, all that is tried would be in vain, or nearly so.

    Args:
        forms: Forms of ``step``.
    """
    open_ = [form for form in forms if not form.is_hopeless]
    bound_s = min((lower_bound_s(form) or float("inf") for form in open_), default=0.0)
    near_s = (1 + _FAR_FROM_BOUND) * bound_s
    for form in weight_pieces(open_[0], step) if bound_s and is_paced(open_[0]) else []:
        flow = first_flow(form)
        made = best_paced(form, flow, below_s=near_s) if flow[1].seconds < bound_s else None
        if made is not None and made.step_s <= near_s:
            least_s = min(bound_s, lower_bound_s(form) or bound_s)
            return Ordered(0, form, made, least_s, (form, *open_), paced=True)
    return None


def ordered_with_host(chosen: Ordered) -> Ordered:
    """Try the best plan with operations on the host; returns whichever is faster, its bound for the same places."""
    retimed, pace = chosen.found.retimed, chosen.found.pace

    def plan(step: StepProblem) -> Found | None:
        forced = {(gap.storage, gap.start) for gap in gaps(step.graph, step.lives) if beside_host(step.graph, gap)}
        choices = with_room(step, {k: option for k, option in chosen.found.choices.items() if k not in forced})
        program = step.lower(choices, retimed, pace).program
        return None if program is None else Found(choices, program, step, retimed, pace=pace)

    hosted = with_host(chosen.found, plan)
    if hosted is chosen.found:
        return chosen
    bound_s = lower_bound_s(hosted.step)
    search = ResidencySearch(hosted.step, [hosted])
    pays = hosted.step_s < (1 - REACH) * hosted.device_s or bound_s < (1 - REACH) * lower_bound_s(chosen.step)
    most = _HOSTED_OPS // len(hosted.step.graph.ops) if pays else 1
    for _ in range(most):
        if good_enough(search.best or hosted, bound_s) or not search.advance():
            break
    assert search.best is not None, "the plan it started with"
    best = search.best if chosen.outdoes_flows else with_paced(search.best, bound_s, 1)
    best = dataclasses.replace(best, device_s=hosted.device_s)
    return dataclasses.replace(chosen, step=best.step, found=best, bound_s=bound_s, orders=(best.step,))


def sharpened_with_host(hosted: Ordered, planned: StepProblem, forms: Sequence[StepProblem]) -> Ordered:
    """Sharpen the bound of a plan with operations on the host, below forms that compute less and may have a plan, too.

    A form in parts or pieces can do what one that computes less does, in the seconds that it computes more; and the
    lesser form has a bound of its own with the same work on the host.

    Args:
        planned: Form that was planned, with nothing on the host.
        forms: Forms of the step, with nothing on the host.
    """
    sharp = sharpened(hosted)
    bound_s, steps, bounds = sharp.bound_s, list[StepProblem](), list[float]()
    for form in forms:
        more_s = sum(planned.costs.op_seconds) - sum(form.costs.op_seconds)
        least_s = max(0.0, sharp.bound_s - more_s)
        if more_s <= _TINY_S or form.is_hopeless or least_s >= sharp.bound_s:
            continue
        alike = hosted_alike(form, hosted.step)
        if alike is None:
            bound_s = min(bound_s, least_s)
        elif alike.bound_s:  # else nothing of it fits
            steps.append(alike)
            bounds.append(max(least_s, alike.bound_s))
    return dataclasses.replace(sharp, bound_s=min(bound_s, _sharpest(steps, bounds, bound_s)))


def _within(progress: PlanProgress, start: float, length: float, deferred: int) -> Tell:
    """Make a function that reports progress on one part of the search: an order with so many updates deferred."""
    order = f"{deferred} updates deferred to the next step" if deferred else "no update deferred"

    def tell(share: float, doing: str) -> None:
        progress.update(start + length * share, f"{doing} ({order})")

    return tell


def _finished(
    searches: Sequence[tuple[int, ResidencySearch]], bound_s: float, progress: PlanProgress
) -> tuple[int, Found]:
    """Finish the searches that are worth it; returns the best plan and its number of deferred updates."""
    firsts = [search.best.step_s for _, search in searches if search.best is not None]
    reach = (1 + REACH) * min(firsts, default=float("inf"))
    best: tuple[int, Found] | None = None
    failure: PlanInfeasible | ConfigError | None = None
    for index, (count, search) in enumerate(searches):
        if firsts and (search.best is None or search.best.step_s > reach):
            continue
        part = 0.55 / len(searches)
        try:
            plan = search.finish(bound_s, _within(progress, 1 / 3 + index * part, part, count))
        except (PlanInfeasible, ConfigError) as error:
            failure = _easier(failure, error)
            continue
        if best is None or plan.step_s < best[1].step_s:
            best = count, plan
    if best is None:
        assert failure is not None
        raise failure
    return best


def sharpened(chosen: Ordered) -> Ordered:
    """Sharpen the bound of a plan that is not near it by when bytes have to move."""
    if not chosen.bound_s or good_enough(chosen.found, chosen.bound_s):
        return chosen
    steps = [step for step in chosen.orders if step.bound_s]
    enough_s = chosen.found.step_s / (1 + GOOD_ENOUGH)
    bound_s = _sharpest(steps, [step.bound_s for step in steps], enough_s)
    return dataclasses.replace(chosen, bound_s=max(chosen.bound_s, bound_s)) if bound_s < float("inf") else chosen


def _sharpest(steps: Sequence[StepProblem], known_s: Sequence[float], enough_s: float) -> float:
    """Least bound of several steps, made sharper; infinite where none of them fits.

    The least of them counts, so the step that has it is sharpened, with more windows each time, until the least is as
    sharp as it gets, enough, or the work is done.

    Args:
        known_s: Bound of each that is known.
    """
    bounds = dict(enumerate(known_s))
    if any(len(step.graph.ops) > _SHARP_OPS for step in steps):
        return min(known_s)
    flows = {at: WindowedBound(step.bound_problem, step.arena_bytes) for at, step in enumerate(steps)}
    work = _SHARP_WORK
    while bounds:
        at = min(bounds, key=lambda each: (bounds[each], each))
        flow = flows[at]
        work -= flow.next_windows * int(len(steps[at].graph.ops) ** 1.5)
        if not flow.next_windows or work < 0 or bounds[at] >= enough_s:
            return bounds[at]
        flow.sharpen()
        if flow.seconds is None:  # nothing of this step fits
            del bounds[at]
        else:
            bounds[at] = max(bounds[at], flow.seconds)
    return float("inf")


def _counts(step: StepProblem) -> tuple[int, ...]:
    """Numbers of deferred updates worth a plan, the likeliest first; for a large step only the first of them."""
    if step.lives.homes is not None or not step.defers:
        return (0,)
    if step.deferrals:
        return (step.deferrals,)
    total = len(updates(step.graph))
    last = max((i for i, op in enumerate(step.graph.ops) if op.phase is Phase.BACKWARD), default=0)
    behind = sum(group[-1] > last for group in updates(step.graph))
    # With clipping all wait for the last gradient.
    counts = (0, behind) if behind > total / 2 else (0, round(total * _LAST_SHARE), total)
    return tuple(dict.fromkeys(counts))[: max(1, _ORDERED // len(step.graph.ops))]


def _easier(
    first: PlanInfeasible | ConfigError | None, second: PlanInfeasible | ConfigError
) -> PlanInfeasible | ConfigError:
    """Pick the refusal that asks for less; a plan that only lacks room in a tier asks for least."""
    if isinstance(first, PlanInfeasible) and isinstance(second, PlanInfeasible):
        return min(first, second, key=lambda error: error.smallest_budget_bytes)
    return second if first is None or isinstance(first, PlanInfeasible) else first
