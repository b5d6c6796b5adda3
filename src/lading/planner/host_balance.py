"""Where operations run: on the device, or on the host's processors where the host's memory holds their operands.

Hosting a group (``lading.ir.host_ops``) spares the moves of its states and costs the host ``h`` seconds, which pass
beside the device's but in the order of the step. Moves and host both draw on the host's memory, so the best share of
the groups is seldom all of them: with share ``f`` on the host, a first guess balances

    max(read_s - f * saved_read_s, write_s - f * saved_write_s, f * host_s, compute_s)

over ``f`` in eighths (``_shares``), and shares next to it are planned as long as the simulated step gets shorter; and
the share that balances the others, as computing waits for them even where it takes longest. The groups hosted are
spread evenly over the step (``_spread``). The plan that hosts nothing is a candidate, so hosting never makes a step
slower as simulated. In a large step nothing is tried where another tier's transfers take longer than the host's
(``_waits_for_another``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lading.cost.compute import hosted_costs
from lading.ir.action import ActionKind
from lading.ir.graph import Role, StepGraph
from lading.ir.host_ops import hosted, light_groups
from lading.ir.program import COMPUTE_STREAM, Program, read_stream, slot_bytes, write_stream
from lading.memory.lifetime import lifetimes
from lading.planner.residency import Found, StepProblem

_PARTS = 8
#: Shares of the groups that are planned at most, the first guess included, and operations of these plans together.
_TRIES, _TRIED_OPS = 4, 20_000
#: Larger steps are only tried where the host's transfers are what takes longest.
_MANY_OPS = 4000
#: Less of the step than this is not worth another plan.
_LEAST_GAIN = 0.01


def hosted_step(step: StepProblem, ops: Iterable[int]) -> StepProblem:
    """Put operations of a step on the host.

    Raises:
        ConfigError: an operation may not run there, or the machine says nothing of its host.
    """
    chosen = tuple(sorted(ops))
    if not chosen:
        return step
    graph = hosted(step.graph, chosen)
    seconds, scratch = list(step.costs.op_seconds), list(step.costs.workspace_bytes)
    for op, on_host_s in hosted_costs(graph, chosen, step.machine).items():
        seconds[op], scratch[op] = on_host_s, 0
    costs = dataclasses.replace(step.costs, op_seconds=tuple(seconds), workspace_bytes=tuple(scratch))
    return dataclasses.replace(step, graph=graph, lives=lifetimes(graph), costs=costs)


def hosted_alike(form: StepProblem, step: StepProblem) -> StepProblem | None:
    """Form of a step with the same work on the host that another form has there; None where it has no such operation.

    Args:
        step: Other form, some of whose operations are on the host. Updates are told by the states that they write,
            which are cut alike in all forms.
    """
    of_form = {_written(form.graph, op): op for op in range(len(form.graph.ops))}
    wanted = [_written(step.graph, op) for op in sorted(step.graph.on_host)]
    if not all(key in of_form for key in wanted):
        return None
    return hosted_step(form, (of_form[key] for key in wanted))


def _written(graph: StepGraph, op: int) -> tuple[str, frozenset[str]]:
    """Name of an operation, and of the states that it writes; of all that it writes where these are none."""
    written = [graph.storages[storage] for storage in graph.op_writes[op]]
    states = [storage for storage in written if storage.role is Role.OPTIMIZER_STATE]
    return graph.ops[op].name, frozenset(storage.name for storage in states or written)


def with_host(found: Found, plan: Callable[[StepProblem], Found | None]) -> Found:
    """Try the plan with operations on the host; returns the faster of both.

    Args:
        found: A plan that hosts nothing.
        plan: Plans a step that hosts some; None where that does not fit.
    """
    machine = found.step.machine
    if machine.host_device is None or not machine.host_tier or machine.device.kind == "cpu":
        return found
    if len(found.step.graph.ops) > _MANY_OPS and _waits_for_another(found):
        return found
    best, known = found, 0
    for sums in (False, True):
        groups = _groups(found, sums=sums)
        count = sum(len(group.ops) for group in groups)
        if count != known and _spared_s(found, groups) > _LEAST_GAIN * found.step_s:
            best = min(best, _best_share(found, groups, plan), key=lambda made: made.step_s)
        known = count
    return best if best is found else dataclasses.replace(best, device_s=found.step_s)


def _spared_s(found: Found, groups: Sequence[_HostedOps]) -> float:
    """Seconds of transfers that hosting all of the groups spares."""
    return sum(_transfers_s(found, groups))


def _waits_for_another(found: Found) -> bool:
    """Whether transfers of another tier take longer than those of the host's memory."""
    busy, tier = _busy_s(found), found.step.machine.host_tier
    ours = max(busy.pop(stream, 0.0) for stream in (read_stream(tier), write_stream(tier)))
    busy.pop(COMPUTE_STREAM, None)
    return ours < max(busy.values(), default=0.0)


def _busy_s(found: Found) -> dict[str, float]:
    """Seconds that each stream of a plan is busy."""
    actions = found.program.actions
    busy: dict[str, float] = {}
    for event in found.timeline.events:
        stream = actions[event.action].stream
        busy[stream] = busy.get(stream, 0.0) + event.end_s - event.start_s
    return busy


def _transfers_s(found: Found, groups: Sequence[_HostedOps]) -> tuple[float, float]:
    tier = found.step.machine.tier(found.step.machine.host_tier)
    assert tier is not None
    read, write = sum(group.read_bytes for group in groups), sum(group.write_bytes for group in groups)
    return read / tier.mixed_read_bytes_per_s, write / tier.mixed_write_bytes_per_s


@dataclass(frozen=True)
class _HostedOps:
    """Operations hosted together, with their seconds on the host and the bytes read and written that this spares."""

    ops: tuple[int, ...]
    host_s: float
    read_bytes: int
    write_bytes: int


def _groups(found: Found, *, sums: bool = False) -> list[_HostedOps]:
    """List the groups whose operands are in no tier behind the host's memory, and that move less when hosted."""
    step, program = found.step, found.program
    graph = step.graph
    far = {storage for tier, slots in program.slots.items() if tier != program.host_tier for storage, _ in slots}
    up, down = _moved(program)
    rows: list[_HostedOps] = []
    groups = light_groups(graph, sums=sums)
    seconds = hosted_costs(graph, sorted(op for group in groups for op in group), step.machine)
    for ops in groups:
        touched = {s for i in ops for s in (*graph.op_reads[i], *graph.op_writes[i])}
        if touched & far:
            continue
        inside = set(ops)
        used = {s for s in touched if set(step.lives.uses[s]) <= inside}
        sent = sum(slot_bytes(graph.storages[s].size_bytes) for s in touched - used - graph.persistent)
        read = sum(up.get(s, 0) for s in used)
        write = sum(down.get(s, 0) for s in used) - sent
        total_s = sum(seconds[op] for op in ops)
        if read + write > 0:
            rows.append(_HostedOps(ops, total_s, read, write))
    return rows


def _moved(program: Program) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes of each storage that a program reads from the host, and that it writes there."""
    up: dict[int, int] = {}
    down: dict[int, int] = {}
    tier = program.host_tier
    for action in program.actions:
        if action.kind is not ActionKind.MOVE or action.storage is None or tier not in (action.source, action.target):
            continue
        way = up if action.source == tier else down
        way[action.storage] = way.get(action.storage, 0) + program.graph.storages[action.storage].size_bytes
    return up, down


def _best_share(found: Found, groups: Sequence[_HostedOps], plan: Callable[[StepProblem], Found | None]) -> Found:
    """Try a few shares of the groups, from the first guess on in the direction that gains; returns the fastest plan."""
    first = _shares(found, groups)
    best, tried = found, {0}

    def attempt(part: int) -> bool:
        nonlocal best
        tried.add(part)
        made = plan(hosted_step(found.step, (i for group in _spread(groups, part) for i in group.ops)))
        if made is None or made.step_s >= best.step_s:
            return False
        gained = made.step_s < (1 - _LEAST_GAIN) * best.step_s
        best = made
        return gained

    part, way = first, 1
    most = max(1, min(_TRIES, _TRIED_OPS // len(found.step.graph.ops)))
    attempt(first)
    while len(tried) <= most:
        following = part + way
        if 0 < following <= _PARTS and following not in tried and attempt(following):
            part = following
        elif way == 1:
            part, way = first, -1
            if first - 1 in tried or first <= 1:
                break
        else:
            break
    if (balanced := _shares(found, groups, beside_compute=True)) not in tried:
        attempt(balanced)
    return best


def _shares(found: Found, groups: Sequence[_HostedOps], *, beside_compute: bool = False) -> int:
    """Number of eighths of the groups that balances the streams, 1 at least.

    Args:
        beside_compute: Balance the streams beside computing, which waits for them though it takes longer than each.
    """
    busy, tier = _busy_s(found), found.step.machine.host_tier
    read, write = _transfers_s(found, groups)
    host = sum(group.host_s for group in groups)

    def longest(part: int) -> float:
        share = part / _PARTS
        up = busy.get(read_stream(tier), 0.0) - share * read
        down = busy.get(write_stream(tier), 0.0) - share * write
        return max(up, down, share * host, 0.0 if beside_compute else busy.get(COMPUTE_STREAM, 0.0))

    return min(range(1, _PARTS + 1), key=lambda part: (longest(part), part))


def _spread(groups: Sequence[_HostedOps], part: int) -> list[_HostedOps]:
    """Pick ``part`` eighths of the groups, by their seconds on the host, evenly over the step."""
    wanted, taken = 0.0, 0.0
    chosen: list[_HostedOps] = []
    for group in groups:
        wanted += group.host_s * part / _PARTS
        if taken + group.host_s / 2 <= wanted:
            chosen.append(group)
            taken += group.host_s
    return chosen
