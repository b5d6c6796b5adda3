"""A plan without a search, for steps too large for one: blocks recomputed, everything else streamed.

Every repeated block is recomputed in backward (``checkpoint_every_block``), and whatever is not used for a while, a
parameter, a gradient, a state or what a block starts from, is on a lower tier meanwhile: on the nearest that has room,
what comes back most often first. That is full activation checkpointing with ZeRO-Infinity's placement, lowered,
simulated and verified like any plan. Where the device then has room to spare, what moves most stays there instead.

``moving`` is its sister without recomputation, ZeRO-Infinity's placement alone: a few lowerings, so a search has its
plans as candidates too. Where transfers hide under compute they leave little to search for.
Updates whose states are in the host's memory run there as far as that makes the step shorter
(``planner.host_balance``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from math import inf

from lading.errors import PlanInfeasible
from lading.ir.graph import PERSISTENT, Role
from lading.ir.guess import speculated
from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES, slot_bytes
from lading.memory.lifetime import Gap, beside_host, gaps, is_movable
from lading.memory.verify import verify
from lading.planner.host_balance import with_host
from lading.planner.host_staging import staged_bytes
from lading.planner.linear import facets
from lading.planner.lower import Lowered
from lading.planner.policies import checkpoint_every_block
from lading.planner.residency import MOST_RETIMED, Found, StepProblem, infeasible
from lading.planner.schedule import base_profile

#: A gap of fewer operations is no time to go away.
_LEAST_OPS = 40
_LEAST_BYTES = 1 << 20
#: Share of the device left to transfers under way when storages are kept there after all.
_UNDER_WAY = 0.3
#: Less of the traffic than this is not worth another lowering.
_LEAST_GAIN = 0.05
_TRIES = 12
#: What ``moving`` takes for a while, in operations, and the operations that it lowers: of a larger step fewer are
#: tried, the first at least.
_WHILES, _LOWERED = (_LEAST_OPS, 10, 160), 4500
#: Least bytes that it moves: on a small step a small storage counts.
_LEAST_MOVED_SHARE = 1 / 4000

_Choices = dict[tuple[int, int], Option]


def streaming(step: StepProblem) -> Found:
    """Make the streaming plan, or a plainer one that fits and takes no more time.

    Raises:
        PlanInfeasible: it does not fit; the error's smallest budget is one that it was lowered for.
    """
    best = with_host(_streamed(step), _fitting)
    verify(best.program)
    return best


def _fitting(step: StepProblem) -> Found | None:
    try:
        return _streamed(step)
    except PlanInfeasible:
        return None


def _streamed(step: StepProblem) -> Found:
    """Make the streaming plan of a step whose operations have their places."""
    plans = [made for choices in _plainer(step) if (made := _found(step, choices)) is not None]
    if not plans:
        recomputed = checkpoint_every_block(step.graph, step.lives)
        away = _leaving(step, recomputed)
        streamed = _placed(step, recomputed, away, 0)
        lowered = step.lower(streamed)
        if lowered.program is None:
            raise _infeasible(step, streamed, lowered)
        plans.append(Found(streamed, lowered.program, step))
        room = int(step.arena_bytes * (1 - _UNDER_WAY)) - int(base_profile(step.graph, lowered.emission).max())
        if room > _LEAST_GAIN * sum(_size(step, storage) for storage in away):
            kept = _found(step, _placed(step, recomputed, away, room))
            plans += [] if kept is None else [kept]
    return min(plans, key=lambda made: made.step_s)


def moving(step: StepProblem, best_s: Callable[[], float] = lambda: inf) -> Iterator[Found]:
    """Yield plans that fit in which storages wait on lower tiers while they are unused; nothing is recomputed.

    Args:
        best_s: Gives the seconds that a plan must be below; asked before each.
    """
    if not step.machine.tiers:
        return
    least_bytes = max(PAGE_BYTES, int(_LEAST_MOVED_SHARE * step.arena_bytes))
    tried: set[frozenset[tuple[int, int]]] = set()
    for least_ops in _WHILES[: max(1, _LOWERED // len(step.graph.ops))]:
        choices = _placed(step, {}, _leaving(step, {}, least_ops, least_bytes), 0)
        if frozenset(choices) in tried or _transfers_s(step, choices) >= best_s():
            continue
        tried.add(frozenset(choices))
        if (found := _found(step, choices)) is not None:
            yield step.retimed(found, MOST_RETIMED)


def _transfers_s(step: StepProblem, choices: _Choices) -> float:
    """Least seconds that a tier takes for what choices move: all that is brought back, and what is not there yet.

    What the device writes in a step is another version in each, so a storage that moves is written once at least.
    """
    graph = step.graph
    written = {storage for op, each in enumerate(graph.op_writes) if op not in graph.on_host for storage in each}
    seconds = 0.0
    for tier in step.machine.tiers:
        moved = [storage for (storage, _), option in choices.items() if option == tier.name]
        back = sum(graph.storages[storage].size_bytes for storage in moved)
        away = sum(graph.storages[storage].size_bytes for storage in written.intersection(moved))
        rates = (1.0 / tier.read_bytes_per_s, 0.0), (0.0, 1.0 / tier.write_bytes_per_s), *facets(tier)
        seconds = max(seconds, *(read * back + write * away for read, write in rates))
    return seconds


def persistent_away(step: StepProblem) -> Iterator[_Choices]:
    """Yield choices by which optimizer states, or all that lasts over the step, wait on lower tiers."""
    least_bytes = max(PAGE_BYTES, int(_LEAST_MOVED_SHARE * step.arena_bytes))
    leaving = _leaving(step, {}, _LEAST_OPS, least_bytes) if step.machine.tiers else {}
    for roles in ((Role.OPTIMIZER_STATE,), PERSISTENT):
        yield _placed(step, {}, {s: gaps for s, gaps in leaving.items() if step.graph.storages[s].role in roles}, 0)


def _plainer(step: StepProblem) -> Iterable[_Choices]:
    """Yield the choices to try first, where they could fit: everything stays, or only activations are recomputed."""
    if _outlives(step) < step.arena_bytes:
        yield {}
        yield checkpoint_every_block(step.graph, step.lives)


def _outlives(step: StepProblem) -> int:
    """Bytes that are on the device all the time when nothing leaves it."""
    graph = step.graph
    wrapping = {gap.storage for gap in gaps(graph, step.lives) if gap.wraps and not beside_host(graph, gap)}
    return sum(_size(step, storage) for storage in wrapping)


def _found(step: StepProblem, choices: _Choices) -> Found | None:
    program = step.lower(choices).program
    return None if program is None else Found(choices, program, step)


def _size(step: StepProblem, storage: int) -> int:
    return slot_bytes(step.graph.storages[storage].size_bytes)


def _leaving(
    step: StepProblem, recomputed: _Choices, least_ops: int = _LEAST_OPS, least_bytes: int = _LEAST_BYTES
) -> dict[int, list[Gap]]:
    """List the gaps over which each storage can be away."""
    away: dict[int, list[Gap]] = {}
    num_ops = len(step.graph.ops)
    for gap in gaps(step.graph, step.lives):
        if beside_host(step.graph, gap):
            continue
        length = gap.end - gap.start + (num_ops if gap.wraps else 0)
        movable = _size(step, gap.storage) >= least_bytes and is_movable(step.graph, gap.storage, PAGE_BYTES)
        if movable and length >= least_ops and (gap.storage, gap.start) not in recomputed:
            away.setdefault(gap.storage, []).append(gap)
    return away


def _placed(step: StepProblem, recomputed: _Choices, away: dict[int, list[Gap]], room_bytes: int) -> _Choices:
    """Choose tiers: storages that come back most often stay while there is room, others go to the nearest with room."""
    choices = dict(recomputed)
    left = {tier.name: step.budgets[tier.name] for tier in step.machine.tiers if step.budgets[tier.name]}
    for tier, taken in _worked_on(step).items() if step.graph.hosted else ():
        left[tier] -= taken
    for storage in sorted(away, key=lambda storage: (-len(away[storage]), _size(step, storage), storage)):
        size = _size(step, storage)
        if size <= room_bytes:
            room_bytes -= size
            continue
        names = list(left)
        tier = next((name for name in names if size <= left[name]), names[-1] if names else None)
        if tier is None:
            continue
        if storage in step.graph.host_storages:  # it has its place
            tier = step.lives.behind_host.get(storage, step.machine.host_tier)
        else:
            left[tier] -= size
        for gap in away[storage]:
            choices[storage, gap.start] = Option(tier)
    return choices


def _worked_on(step: StepProblem) -> dict[str, int]:
    """Bytes of each lower tier that operands of the host's processors take."""
    graph, behind, host = step.graph, step.lives.behind_host, step.machine.host_tier
    guessed = speculated(graph)  # each has two places
    lasting = graph.host_storages & graph.persistent
    taken = {host: staged_bytes(graph, step.lives, step.budgets[host])}
    for storage in lasting:
        tier = behind.get(storage, host)
        taken[tier] = taken.get(tier, 0) + _size(step, storage) * (1 + (storage in guessed))
    return taken


def _infeasible(step: StepProblem, choices: _Choices, lowered: Lowered) -> PlanInfeasible:
    """Make the error of a plan that does not fit, with a device budget for which it does."""
    if not lowered.excess_bytes:
        return PlanInfeasible(
            f"no plan was found that fits the lower tiers of {step.machine.name}: enlarge the last one",
            missing_bytes=0,
            smallest_budget_bytes=step.budgets["device"],
        )
    size, last = step.budgets["device"], lowered
    for _ in range(_TRIES):
        size += last.excess_bytes + PAGE_BYTES
        last = dataclasses.replace(step, budgets={**step.budgets, "device": size}).lower(choices)
        if last.program is not None or not last.excess_bytes:
            break
    return infeasible(step, size, lowered)
