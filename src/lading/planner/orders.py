"""Orders of a step: its updates where the gradients become final, or deferred into the next forward.

A deferred update finds a forward to hide its transfers under, and its gradient stays over the step's boundary in
exchange (``lading.ir.defer``). Which pays depends on the step, the machine and the budget, so each order is planned as
a step of its own and the faster plan wins. The bound that is printed is the least over the orders that were planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.defer import defer, updates
from lading.ir.graph import Phase
from lading.memory.lifetime import lifetimes
from lading.planner.lower import Costs
from lading.planner.residency import (
    GOOD_ENOUGH,
    Found,
    Step,
    flow_bound_s,
    lower_bound_s,
    residency,
    smallest_budget_bytes,
)

#: Where updates come during the backward, this share of them, the last ones, is what may be left without cover.
_LAST_SHARE = 1 / 3
#: Operations planned in all orders together, but for the first order.
_ORDERED = 8000
#: Most operations of a step whose bound is sharpened where the plan is not within reach of it.
_SHARP_OPS = 2500


@dataclass(frozen=True)
class Ordered:
    """The best plan over the orders tried.

    Attributes:
        deferred: How many updates are deferred, the last ones of the step.
        step: The step in that order.
        bound_s: No plan in any of the orders takes less; 0 where none is known.
    """

    deferred: int
    step: Step
    found: Found
    bound_s: float


def deferred_step(step: Step, count: int) -> Step:
    """The step with its last ``count`` updates deferred."""
    if not count:
        return step
    graph, order = defer(step.graph, count)
    seconds, scratch = step.costs.op_seconds, step.costs.workspace_bytes
    costs = Costs(tuple(seconds[i] for i in order), tuple(scratch[i] for i in order), step.costs.columns)
    return dataclasses.replace(step, graph=graph, lives=lifetimes(graph), costs=costs)


def smallest_order_bytes(step: Step) -> int:
    """The smallest device budget that a plan was found for in any of the orders."""
    return min(smallest_budget_bytes(deferred_step(step, count))[0] for count in _counts(step))


def best_order(step: Step, others: Iterable[Found]) -> Ordered:
    """Plan the orders of a step until one is as good as its bound.

    Args:
        others: Plans of ``step`` itself that are candidates too.

    Raises:
        PlanInfeasible, ConfigError: no order has a plan; says it of the order that needs least.
    """
    best: Ordered | None = None
    failure: PlanInfeasible | ConfigError | None = None
    for count in _counts(step):
        ordered = deferred_step(step, count)
        bound_s = lower_bound_s(ordered)
        bound_s = min(bound_s, best.bound_s) if best is not None else bound_s
        try:
            found = residency(ordered, others if not count else (), bound_s)
        except (PlanInfeasible, ConfigError) as error:
            failure = _easier(failure, error)
            continue
        if best is None or found.step_s < best.found.step_s:
            best = Ordered(count, ordered, found, bound_s)
        best = dataclasses.replace(best, bound_s=bound_s)
        if best.found.step_s <= (1 + GOOD_ENOUGH) * bound_s:
            return best
    if best is None:
        assert failure is not None
        raise failure
    return dataclasses.replace(best, bound_s=_sharper(step, best.bound_s))


def _sharper(step: Step, bound_s: float) -> float:
    """The bound that knows when bytes have to move, where that is not too much work; ``bound_s`` elsewhere."""
    if not bound_s or len(step.graph.ops) > _SHARP_OPS:
        return bound_s
    sharp = [flow_bound_s(deferred_step(step, count)) for count in _counts(step)]
    return max(bound_s, min((s for s in sharp if s), default=bound_s))


def _counts(step: Step) -> tuple[int, ...]:
    """Numbers of deferred updates worth a plan, the likeliest first; of a large step only the first of them."""
    total = len(updates(step.graph))
    last = max((i for i, op in enumerate(step.graph.ops) if op.phase is Phase.BACKWARD), default=0)
    behind = sum(group[-1] > last for group in updates(step.graph))
    # With clipping all wait for the last gradient.
    counts = (0, behind) if behind > total / 2 else (0, round(total * _LAST_SHARE), total)
    return tuple(dict.fromkeys(counts))[: max(1, _ORDERED // len(step.graph.ops))]


def _easier(
    first: PlanInfeasible | ConfigError | None, second: PlanInfeasible | ConfigError
) -> PlanInfeasible | ConfigError:
    """Of two refusals, the one that asks for less; a plan that only lacks room in a tier asks for least."""
    if isinstance(first, PlanInfeasible) and isinstance(second, PlanInfeasible):
        return min(first, second, key=lambda error: error.smallest_budget_bytes)
    return second if first is None or isinstance(first, PlanInfeasible) else first
