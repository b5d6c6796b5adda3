"""Orders of a step: its updates where the gradients become final, or deferred into the next forward.

A deferred update finds a forward to hide its transfers under, and its gradient stays over the step's boundary in
exchange (``lading.ir.defer``). With n the updates deferred, the last ones of the step, and x the choices of a plan,

    minimise    T(n, x)   seconds of the step as simulated
    subject to  n of 0, the updates that find no cover, all                     ``_counts``
                x a plan of the step in that order, within all budgets          ``deferred_step``, ``ResidencySearch``

Which order pays depends on the step, the machine and the budget. Each is planned once; those whose first plan stays
within reach of the best are searched to the end (``_finished``), and the fastest plan wins (``best_order``). The bound
that is printed is the least over the orders that were planned, however far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.defer import defer, updates
from lading.ir.graph import Phase
from lading.ir.reporting import SILENT, PlanProgress
from lading.memory.lifetime import beside_host, gaps, lifetimes
from lading.planner.greedy import evicting
from lading.planner.host_balance import with_host
from lading.planner.residency import (
    Found,
    ResidencySearch,
    StepProblem,
    Tell,
    flow_bound_s,
    good_enough,
    lower_bound_s,
    polished,
    smallest_budget_bytes,
)
from lading.planner.streaming import moving

#: Where updates come during the backward, this share of them, the last ones, is what may be left without cover.
_LAST_SHARE = 1 / 3
#: Operations planned in all orders together, but for the first order.
_ORDERED = 8000
#: An order whose first plan takes this share longer than another's is not searched further.
_REACH = 0.03
#: Most operations of a step whose bound is sharpened where the plan is not within reach of it.
_SHARP_OPS = 2500


@dataclass(frozen=True)
class Ordered:
    """Best plan over the orders that were tried.

    Attributes:
        deferred: Number of updates that are deferred, the last ones of the step.
        step: Step in that order.
        bound_s: Seconds that no plan in any of the orders is below, every operation where it is; 0 where none is known.
    """

    deferred: int
    step: StepProblem
    found: Found
    bound_s: float


def deferred_step(step: StepProblem, count: int) -> StepProblem:
    """Defer the last ``count`` updates of a step."""
    if not count:
        return step
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
        if not plan.choices:  # each operation once and nothing moved: no plan in any order takes less
            return Ordered(0, step, plan, plan.step_s)
    bound_s = float("inf")
    searches: list[tuple[int, ResidencySearch]] = []
    counts = _counts(step)
    for index, count in enumerate(counts):
        ordered, tell = (
            deferred_step(step, count),
            _within(progress, index / len(counts) / 3, 1 / len(counts) / 3, count),
        )
        tell(0.0, "a time that no plan can beat")
        bound_s = min(bound_s, lower_bound_s(ordered))
        search = ResidencySearch(ordered, () if count else others)
        tell(0.3, "a first plan")
        search.advance()
        tell(0.6, "plans that only move, or only evict")
        evicted = () if count else evicting(ordered, search.best_s)
        for plan in chain([search.best], moving(ordered), evicted):
            search.offer(plan)
            if search.best is not None and good_enough(search.best, bound_s):
                return Ordered(count, ordered, search.best, bound_s)
        searches.append((count, search))
    count, plan = _finished(searches, bound_s, progress)
    progress.update(0.9, "the fastest plan with single choices changed")
    plan = polished(plan, bound_s)
    if not good_enough(plan, bound_s):
        progress.update(0.95, "a sharper time that no plan can beat")
        bound_s = _sharper(step, bound_s)
    return Ordered(count, plan.step, plan, bound_s)


def ordered_with_host(chosen: Ordered) -> Ordered:
    """Try the best plan with operations on the host; returns whichever is faster, its bound for the same places."""
    retimed = chosen.found.retimed

    def plan(step: StepProblem) -> Found | None:
        forced = {(gap.storage, gap.start) for gap in gaps(step.graph, step.lives) if beside_host(step.graph, gap)}
        choices = {key: option for key, option in chosen.found.choices.items() if key not in forced}
        program = step.lower(choices, retimed).program
        return None if program is None else Found(choices, program, step, retimed)

    hosted = with_host(chosen.found, plan)
    if hosted is chosen.found:
        return chosen
    search = ResidencySearch(hosted.step, [hosted])
    search.advance()
    assert search.best is not None, "the plan it started with"
    best = dataclasses.replace(search.best, device_s=hosted.device_s)
    return dataclasses.replace(chosen, step=best.step, found=best, bound_s=lower_bound_s(best.step))


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
    reach = (1 + _REACH) * min(firsts, default=float("inf"))
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


def _sharper(step: StepProblem, bound_s: float) -> float:
    """Sharpen a bound by when bytes have to move, where that is not too much work; ``bound_s`` elsewhere.

    An order in which it is no sharper ends the matter, as the least over the orders counts.
    """
    if not bound_s or len(step.graph.ops) > _SHARP_OPS:
        return bound_s
    least = float("inf")
    for count in _counts(step):
        sharp = flow_bound_s(deferred_step(step, count))
        least = min(least, sharp) if sharp else least
        if least <= (1 + 1e-9) * bound_s:
            return bound_s
    return least if least < float("inf") else bound_s


def _counts(step: StepProblem) -> tuple[int, ...]:
    """Numbers of deferred updates worth a plan, the likeliest first; for a large step only the first of them."""
    if step.lives.homes is not None or not step.defers:
        return (0,)
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
