"""Host speed: how many times longer a step's work takes on a host now than its machine file says.

A host that others share is faster now and slower then, its caches more than its products. What a step takes is compared
with what was predicted by cause, as one number for all would be wrong for a step with another mix.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from lading.ir.action import CALLER, ActionKind
from lading.ir.machine import HostSpeed
from lading.ir.opkinds import PRODUCT_KINDS
from lading.ir.program import COMPUTE_STREAM, RUNS_OP, Program, transfer_of
from lading.ir.timeline import Timeline

#: Causes of seconds: products, all other operations, and each direction of a tier ("disk.read").
PRODUCTS, OTHERS, READ, WRITE = "products", "others", "read", "write"
#: Share of the predicted step below which a cause says too little of the host to be a factor of its own.
_LEAST_SHARE = 0.02


def measured_speed(program: Program, predicted: Timeline, measured: Sequence[Timeline]) -> HostSpeed:
    """Compare what steps took with what was predicted for them, by cause.

    Args:
        program: Program of the steps.
        predicted: Its timeline as predicted.
        measured: Timelines of steps, >= 1; their median counts.
    Returns:
        Factors; a kind of operation of which a step has little has the factor of all operations together.
    """
    causes = [_cause(program, number) for number in range(len(program.actions))]
    expected_s, steps_s = _seconds(causes, predicted), [_seconds(causes, step) for step in measured]
    taken_s = {cause: statistics.median(step.get(cause, 0.0) for step in steps_s) for cause in expected_s}
    least_s = _LEAST_SHARE * predicted.duration_s
    operations = [cause for cause in (PRODUCTS, OTHERS) if expected_s.get(cause)]
    together = 1.0
    if operations:
        together = sum(taken_s[cause] for cause in operations) / sum(expected_s[cause] for cause in operations)

    def factor(cause: str, otherwise: float) -> float:
        return taken_s[cause] / expected_s[cause] if expected_s.get(cause, 0.0) > least_s else otherwise

    tiers = {cause: factor(cause, 1.0) for cause in expected_s if cause not in (PRODUCTS, OTHERS)}
    return HostSpeed(products=factor(PRODUCTS, together), others=factor(OTHERS, together), tiers=tiers)


def seconds_by_cause(program: Program, timeline: Timeline) -> dict[str, float]:
    """Seconds of a step's work by cause, as one timeline of it has them."""
    return _seconds([_cause(program, number) for number in range(len(program.actions))], timeline)


def factors_by_cause(speed: HostSpeed) -> dict[str, float]:
    """How many times as long each cause takes as the machine file says."""
    return {PRODUCTS: speed.products, OTHERS: speed.others, **speed.tiers}


def cause_words(cause: str) -> str:
    """Name a cause as people call it."""
    tier, _, way = cause.rpartition(".")
    if not tier:
        return "products" if cause == PRODUCTS else "other operations"
    return f"{'reads' if way == READ else 'writes'} of the {tier}"


def _cause(program: Program, number: int) -> str:
    """Name what an action's seconds depend on; "" for what says nothing of the host's speed."""
    action = program.actions[number]
    if action.stream == COMPUTE_STREAM and action.kind in RUNS_OP and action.op is not None:
        return PRODUCTS if program.graph.ops[action.op].kind in PRODUCT_KINDS else OTHERS
    if action.kind is not ActionKind.MOVE:
        return ""
    route = program.ranks[0].routes[number]
    if CALLER in route:
        return ""
    tier, reads = transfer_of(route, program.host_tier)
    return f"{tier}.{READ if reads else WRITE}"


def _seconds(causes: Sequence[str], timeline: Timeline) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in timeline.events:
        if causes[event.action]:
            seconds[causes[event.action]] += event.end_s - event.start_s
    return seconds
