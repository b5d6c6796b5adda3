"""Rivals that need no search: what people write by hand, as choices for the gaps of a step."""

from __future__ import annotations

from lading.ir.graph import Role
from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES, slot_bytes
from lading.memory.lifetime import Gap, gaps, is_movable
from lading.planner.residency import StepProblem

Choices = dict[tuple[int, int], Option]
#: Storages smaller than this stay: a transfer would cost more than it frees.
LEAST_BYTES = 64 << 10


def states_away(step: StepProblem) -> Choices:
    """ZeRO-Offload without its CPU update: optimizer states wait on the nearest tier that has room for all of them."""
    states = [g for g in gaps(step.graph, step.lives) if step.graph.storages[g.storage].role is Role.OPTIMIZER_STATE]
    return _placed(step, [g for g in states if step.graph.storages[g.storage].size_bytes >= LEAST_BYTES])


def everything_moved(step: StepProblem, least_ops: int) -> Choices:
    """ZeRO-Infinity's placement: what is not used for ``least_ops`` operations waits on a lower tier."""
    num_ops = len(step.graph.ops)
    away: list[Gap] = []
    for gap in gaps(step.graph, step.lives):
        length = gap.end - gap.start + (num_ops if gap.wraps else 0)
        size = step.graph.storages[gap.storage].size_bytes
        if length >= least_ops and size >= LEAST_BYTES and is_movable(step.graph, gap.storage, PAGE_BYTES):
            away.append(gap)
    return _placed(step, away)


def _placed(step: StepProblem, away: list[Gap]) -> Choices:
    """Each storage on the nearest tier with room, in the order of their first gaps."""
    left = {tier.name: step.budgets[tier.name] for tier in step.machine.tiers}
    tier_of: dict[int, str] = {}
    for gap in away:
        if gap.storage not in tier_of:
            size = slot_bytes(step.graph.storages[gap.storage].size_bytes)
            names = list(left)
            tier = next((name for name in names if size <= left[name]), names[-1])
            tier_of[gap.storage] = tier
            left[tier] -= size
    return {(gap.storage, gap.start): Option(tier_of[gap.storage]) for gap in away}
