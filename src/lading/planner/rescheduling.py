"""Rescheduling: transfers of the best plan scheduled for steps like the one simulated before, the fastest kept.

Transfers are scheduled for the times at which a step is expected to need them; once lowered, each takes addresses and a
place in a queue from others, so the step that is simulated has other times. Scheduling again for those, one time after
another, does not settle: steps get longer and shorter by some percent. So it goes on beyond the first that is longer
(``StepProblem.retimed`` ends there), for times that change by half of what was simulated, and for a step that waits a
little less than that one: an early transfer fills memory that others have a use for. It gains more in some plans than
others are behind, so the two fastest versions of a plan are scheduled on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lading.ir.action import ActionKind
from lading.ir.program import COMPUTE_STREAM
from lading.planner.lower import lower
from lading.planner.pacing import is_paced
from lading.planner.residency import Found
from lading.planner.schedule import item_seconds

#: Share of the bound from which on a plan is worth it.
_FAR = 0.05
#: Operations scheduled in all, but for the first time; most times for a version, and versions.
_WORK, _MOST, _VERSIONS = 30_000, 8, 2
#: Part of what was simulated last in the times that are expected, and of the waiting in these.
_NEW, _WAITING = 0.5, 0.85


def rescheduled(plans: Sequence[Found], bound_s: float) -> Found:
    """Schedule the transfers of plans again and again; returns the fastest version of all.

    Args:
        plans: Versions of a plan, the fastest first.
        bound_s: Seconds that no plan is below: near it there is nothing to gain.
    """
    if plans[0].step_s <= (1 + _FAR) * bound_s or not is_paced(plans[0].step):
        return plans[0]
    times = max(1, _WORK // len(plans[0].step.graph.ops))
    made = [plans[0]]
    for found in plans[:_VERSIONS]:
        made.append(_scheduled_on(found, min(_MOST, times)))
        times = max(0, times - _MOST)
    return min(made, key=lambda each: each.step_s)


def _scheduled_on(found: Found, times: int) -> Found:
    """Fastest of a plan and of so many schedules of it, one after another."""
    step = found.step
    best = last = found
    expected: Sequence[float] = ()
    for _ in range(times):
        took = item_seconds(last.program, *last.times)
        expected = [_NEW * s + (1 - _NEW) * e for s, e in zip(took, expected or took, strict=True)]
        seconds = [max(c, c + _WAITING * (s - c)) for c, s in zip(_computing(last), expected, strict=True)]
        again = step.within_tiers(lower(
            step.graph, step.lives, step.machine, step.costs, found.choices, step.budgets,
            item_seconds=seconds, sparing=step.sparing, both_ways=step.both_ways,
        )).program  # fmt: skip
        if again is None:
            break
        last = dataclasses.replace(last, program=again, retimed=last.retimed + 1)
        best = min(best, last, key=lambda made: made.step_s)
    return best


def _computing(found: Found) -> list[float]:
    """Seconds that each action of the compute stream but FREE computes."""
    actions = (a for a in found.program.actions if a.stream == COMPUTE_STREAM and a.kind is not ActionKind.FREE)
    return [found.step.costs.op_seconds[a.op] if a.op is not None else 0.0 for a in actions]
