"""Limit of a step by resource: seconds that each of them takes at least, whatever is chosen inside the budget.

At position ``t`` of the step (an operation) ``need_t`` bytes are what the operation touches and all that waits between
two of its uses meanwhile. The arena has ``budget`` bytes, so storages of at least ``need_t - budget`` bytes are away.
What may be recomputed need not be moved, and what a lower tier always has need not be written again:

    away and read again     reads  >= R_t = need_t - budget - bytes over t that may be recomputed       _least_moved
    away and written        writes >= W_t = R_t - bytes over t that a lower tier always has             _least_moved
    at two positions        reads  >= R_s + R_t - bytes of gaps that lie over both s and t              _least_moved
    a stream                seconds of its operations, one after another                                _streams
    tiers, one direction    bytes / sum of the tiers' rates; what the nearer ones have no room for      _directions
    one tier both ways      a reads + b writes for each facet (a, b) of its rates                       _directions
    computing beside moves  seconds of operations + sum of s / (1 + all s) for each second of moving    _slowed

In the last line ``s`` is the share by which an operation takes longer beside a direction of a tier. Each second of
moving either runs beside an operation, which it makes that much longer, or while computing waits, which costs more.

Each line is satisfied by every plan, as modelled, so the largest of the seconds is a lower bound on the step. It is the
one that a person can check by hand; ``planner.linear`` and ``planner.fluid`` have sharper ones, of all lines together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lading.ir.graph import Phase
from lading.ir.machine import Tier, wires
from lading.ir.plan import Option, ResourceLimit
from lading.ir.program import HOST_STREAM, NETWORK_STREAM, stream_of
from lading.planner.linear import facets
from lading.planner.relaxation import Candidate, ResidencyProblem, spans
from lading.planner.residency import StepProblem

#: Names of resources that are no tiers.
COMPUTING, OPTIMIZER, HOST, NETWORK = "computing", "optimizer's updates", "host's processors", "network"
#: Positions of which each pair is tried for reads: the neediest one of each of so many parts of the step.
_POSITIONS = 32
#: Rounding of a bound by the solver of linear programs: this share of it, and so many seconds.
_ROUNDING = 1e-6


def resource_limits(steps: Sequence[StepProblem]) -> tuple[ResourceLimit, ...]:
    """List the least seconds and bytes of each resource over all plans of a step in any of its forms.

    Args:
        steps: Forms of one step, such as orders of its updates; at least one.

    Returns:
        Limits, the largest first; those of no seconds are left out.
    """
    min_limits: dict[str, ResourceLimit] = {}
    forms = [{each.resource: each for each in _of_form(step)} for step in steps]
    for resource, limit in forms[0].items():
        if all(resource in form for form in forms):
            min_limits[resource] = min((form[resource] for form in forms), key=lambda each: each.seconds, default=limit)
    return tuple(sorted((each for each in min_limits.values() if each.seconds > 0), key=lambda each: -each.seconds))


def rounded_bound_s(bound_s: float, step_s: float) -> float:
    """Bound that a plan reaches, without what rounding puts it above the plan; a wrong one stays for all to see."""
    return min(bound_s, step_s) if bound_s <= step_s * (1 + _ROUNDING) + _ROUNDING else bound_s


def rounded_limit(limit: ResourceLimit, step_s: float) -> ResourceLimit:
    """Limit that a plan reaches, likewise."""
    return dataclasses.replace(limit, seconds=step_s) if step_s < limit.seconds < step_s * (1 + 1e-9) else limit


def _of_form(step: StepProblem) -> list[ResourceLimit]:
    problem = step.bound_problem
    reads, writes, away = _least_moved(problem, step.arena_bytes)
    used = {option for candidate in problem.candidates for option in candidate.options}
    tiers = [tier for tier in problem.tiers if Option(tier.name) in used]
    if not tiers:
        return _streams(step)
    return [*_streams(step), *_directions(problem, tiers, reads, writes, away), _slowed(step, tiers, reads, writes)]


def _streams(step: StepProblem) -> list[ResourceLimit]:
    """Seconds of the operations of each stream, and of the updates among those on the device."""
    graph, seconds = step.graph, step.costs.op_seconds
    updating = sum(
        seconds[i] for i, op in enumerate(graph.ops) if op.phase is Phase.OPTIMIZER and i not in graph.off_compute_ops
    )
    sums = {COMPUTING: float(step.bound_problem.op_seconds.sum()), OPTIMIZER: updating, HOST: 0.0, NETWORK: 0.0}
    names = {HOST_STREAM: HOST, NETWORK_STREAM: NETWORK}
    for op in graph.off_compute_ops:
        if (name := names.get(stream_of(graph, op))) is not None:
            sums[name] += seconds[op]
    return [ResourceLimit(resource=name, seconds=total) for name, total in sums.items()]


def _least_moved(problem: ResidencyProblem, budget_bytes: int) -> tuple[int, int, int]:
    """Least bytes that a step reads from lower tiers, writes to them, and has there at once."""
    count = problem.num_ops
    need = problem.base.astype(np.float64) + _over(count, problem.candidates)
    again = [c for c in problem.candidates if Option.RECOMPUTE in c.options]
    moved = [c for c in problem.candidates if Option.RECOMPUTE not in c.options]
    reads = np.maximum(need - budget_bytes - _over(count, again), 0.0)
    writes = np.maximum(reads - _over(count, [c for c in moved if c.version is None]), 0.0)
    max_reads = float(reads.max(initial=0.0))
    return int(max(max_reads, _of_pairs(problem, moved, reads))), int(writes.max(initial=0.0)), int(max_reads)


def _over(count: int, candidates: Sequence[Candidate]) -> np.ndarray:
    """Bytes of gaps that lie over each position; an array of [position]."""
    change = np.zeros(count + 1)
    for candidate in candidates:
        for first, last in spans(candidate.gap, count):
            change[first] += candidate.size_bytes
            change[last + 1] -= candidate.size_bytes
    return np.cumsum(change)[:-1]


def _of_pairs(problem: ResidencyProblem, moved: Sequence[Candidate], reads: np.ndarray) -> float:
    """Most bytes that any two of some positions have read together, gaps over both of them counted once."""
    parts = np.array_split(np.arange(problem.num_ops), min(_POSITIONS, problem.num_ops))
    positions = [int(part[reads[part].argmax()]) for part in parts]
    over = np.zeros((len(positions), len(moved)))
    for column, candidate in enumerate(moved):
        for first, last in spans(candidate.gap, problem.num_ops):
            over[[row for row, t in enumerate(positions) if first <= t <= last], column] = 1.0
    sizes = np.array([float(c.size_bytes) for c in moved])
    both = (over * sizes) @ over.T
    at = reads[positions]
    return float(np.max(at[:, None] + at[None, :] - both, where=~np.eye(len(at), dtype=bool), initial=0.0))


def _directions(
    problem: ResidencyProblem, tiers: Sequence[Tier], reads: int, writes: int, away: int
) -> list[ResourceLimit]:
    """Limits of reading, of writing and of both at once."""
    names = _names(tiers)
    ways = [(f"reads from {names}", reads, "read_bytes_per_s"), (f"writes to {names}", writes, "write_bytes_per_s")]
    limits = [_limit(words, size, _rate(tiers, key)) for words, size, key in ways]
    for number, tier in enumerate(tiers[1:], 1):  # what all nearer tiers together have no room for
        room = sum(problem.capacity_bytes.get(each.name, each.capacity_bytes) for each in tiers[:number])
        limits.append(_limit(f"reads from {tier.name}", max(0, away - room), _rate(tiers[number:], "read_bytes_per_s")))
    if len(tiers) == 1:
        seconds = max(a * reads + b * writes for a, b in facets(tiers[0]))
        limits.append(ResourceLimit(resource=f"{names} both ways", seconds=seconds, size_bytes=reads + writes))
    return limits


def _slowed(step: StepProblem, tiers: Sequence[Tier], reads: int, writes: int) -> ResourceLimit:
    """Limit of operations that take longer while tiers move what has to move, each byte by the cheapest tier."""
    computing_s = sum(s for op, s in enumerate(step.costs.op_seconds) if op not in step.graph.off_compute_ops)
    read = min(min(_slowdowns(tier, read=True)) / tier.read_bytes_per_s for tier in tiers)
    write = min(min(_slowdowns(tier, read=False)) / tier.write_bytes_per_s for tier in tiers)
    max_slowdown = 1.0 + sum(max(_slowdowns(tier, read=way)) for tier in tiers for way in (True, False))
    longer_s = (read * reads + write * writes) / max_slowdown
    seconds = computing_s + longer_s if longer_s else 0.0
    return ResourceLimit(resource=f"{COMPUTING} beside {_names(tiers)}", seconds=seconds)


def _slowdowns(tier: Tier, *, read: bool) -> tuple[float, float]:
    """Shares by which operations take longer beside a tier: other ones, and products."""
    return tier.slowdown(read=read, product=False), tier.slowdown(read=read, product=True)


def _names(tiers: Sequence[Tier]) -> str:
    return " and ".join(tier.name for tier in tiers)


def _rate(tiers: Sequence[Tier], key: str) -> float:
    """Bytes a second of one direction of all tiers together; those on one wire have the fastest one's."""
    on_wires = [max(getattr(tier, key) for tier in group) for group in wires(tiers)]
    shared = {tier.name for group in wires(tiers) for tier in group}
    return sum(on_wires) + sum(getattr(tier, key) for tier in tiers if tier.name not in shared)


def _limit(resource: str, size_bytes: int, bytes_per_s: float) -> ResourceLimit:
    return ResourceLimit(resource=resource, seconds=size_bytes / bytes_per_s, size_bytes=size_bytes)
