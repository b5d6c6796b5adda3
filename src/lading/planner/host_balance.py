"""Where operations run: on the device, or on the host's processors where the host's memory holds their operands.

Hosting a group (``lading.ir.host_ops``) spares the moves of its states and costs the host ``h`` seconds, which pass
beside the device's but in the order of the step. Moves and host both draw on the host's memory, so the best share of
the groups is seldom all of them: with share ``f`` on the host, a first guess balances

    max(read_s - f * saved_read_s, write_s - f * saved_write_s, f * host_s, compute_s)

over ``f`` in eighths (``_shares``), and shares next to it are planned as long as the simulated step gets shorter; and
the share that balances the others, as computing waits for them even where it takes longest. The groups hosted are
spread evenly over the step (``_spread``). The plan that hosts nothing is a candidate, so hosting never makes a step
slower as simulated. In a large step none of these is tried where another tier's transfers take longer than the host's
(``_waits_for_another``).

[Note: behind the host] Where states lie on a tier behind the host's memory, a disk say, a group that is hosted moves as
many of the disk's bytes, and none of the states' over the device's link, which the two share. That is tried last, with
the groups whose states are in the host's memory (``_with_behind``). What passes through the host's memory needs a room
there: if what lies there leaves too little, states of hosted groups go to the tier behind, too (``_behind``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from lading.cost.compute import hosted_costs
from lading.ir.action import CALLER, DEVICE, ActionKind
from lading.ir.graph import PERSISTENT, Role, StepGraph
from lading.ir.guess import guess_of
from lading.ir.host_ops import hosted, light_groups
from lading.ir.machine import FILE
from lading.ir.plan import Option
from lading.ir.program import COMPUTE_STREAM, Program, read_stream, slot_bytes, slot_sizes, write_stream
from lading.memory.lifetime import lifetimes
from lading.memory.tier_layout import home_tiers
from lading.planner.host_staging import least_staged_bytes, staged_bytes, taken_by_host
from lading.planner.residency import Found, StepProblem

_PARTS = 8
#: Shares of the groups that are planned at most, the first guess included, and operations of these plans together.
_TRIES, _TRIED_OPS = 4, 20_000
#: Larger steps are only tried where the host's transfers are what takes longest.
_MANY_OPS = 4000
#: Less of the step than this is not worth another plan.
_LEAST_GAIN = 0.01


def hosted_step(step: StepProblem, ops: Iterable[int], behind: Mapping[int, str] = MappingProxyType({})) -> StepProblem:
    """Put operations of a step on the host.

    Args:
        behind: Tier behind the host's memory of what lies there between the operations, of all that they work on.

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
    touched = {s: tier for s, tier in behind.items() if s in graph.host_storages}
    return dataclasses.replace(step, graph=graph, lives=lifetimes(graph, behind_host=touched), costs=costs)


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
    behind = {step.graph.storages[storage].name: tier for storage, tier in step.lives.behind_host.items()}
    lying = {s: behind[item.name] for s, item in enumerate(form.graph.storages) if item.name in behind}
    return hosted_step(form, (of_form[key] for key in wanted), lying)


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
    best, known = found, 0
    is_waiting = len(found.step.graph.ops) > _MANY_OPS and _waits_for_another(found)
    for sums in () if is_waiting else (False, True):
        groups = _groups(found, sums=sums)
        count = sum(len(group.ops) for group in groups)
        if count != known and _spared_s(found, groups) > _LEAST_GAIN * found.step_s:
            best = min(best, _best_share(found, groups, plan), key=lambda made: made.step_s)
        known = count
    if guess_of(found.step.graph) is None:
        best = _with_behind(found, best, plan)
    return best if best is found else dataclasses.replace(best, device_s=found.step_s)


def _with_behind(found: Found, best: Found, plan: Callable[[StepProblem], Found | None]) -> Found:
    """Try groups whose states lie behind the host's memory, too; returns the fastest plan ([Note: behind the host]).

    Args:
        found: A plan that hosts nothing.
        best: The fastest plan that hosts none of these.
    """
    groups, near = _groups(found, behind=True), _groups(found)
    host_s, busy = sum(group.host_s for group in groups), max(_busy_s(found).values())
    if len(groups) == len(near):
        return best
    part, last_s = max(1, min(_PARTS, int(_PARTS * busy / host_s)) if host_s else _PARTS), inf
    while part:  # the half, as long as that is faster
        ops, behind = _behind(found, _spread(groups, part))
        made = plan(hosted_step(found.step, ops, behind)) if behind else None
        if made is not None and made.step_s >= last_s:
            break
        if made is not None and made.step_s < (1 - _LEAST_GAIN) * best.step_s:
            best = made
        part, last_s = part // 2, last_s if made is None else made.step_s
    return best


def _behind(found: Found, groups: Sequence[_HostedOps]) -> tuple[list[int], dict[int, str]]:
    """Operations of groups for which the host's memory has room, and the tiers behind it of what they work on.

    That is where it lies in a plan that hosts nothing. What lies on the device there comes to lie in the host's memory.
    If that has too little room beside what passes through it, states there go where others lie, the last updated
    first, then what no hosted operation works on (``with_room``). If it has none for one operation's operands even
    then, the groups that bring most to it are left out.
    """
    program, host, graph = found.program, found.program.host_tier, found.step.graph
    homes = {s: tier for s, tier in home_tiers(program).items() if graph.storages[s].role in PERSISTENT}
    sizes, names = slot_sizes(graph), [tier.name for tier in program.tiers]
    touched = {
        group: dict.fromkeys(s for op in group.ops for s in graph.op_reads[op] if s in homes) for group in groups
    }
    of_all = [s for group in groups for s in touched[group]]
    files = {t.name for t in program.tiers[names.index(host) + 1 :] if t.kind == FILE}
    behind = {s: homes[s] for s in of_all if homes[s] in files}
    if not behind:
        return [], {}
    near = [s for s in of_all if homes[s] == host and graph.storages[s].role is Role.OPTIMIZER_STATE]
    farthest = max(behind.values(), key=names.index)
    ops = [op for group in groups for op in group.ops]
    step = hosted_step(found.step, ops, behind | dict.fromkeys(near, farthest))
    staged = staged_bytes(step.graph, step.lives, step.budgets[host])
    lasting = {s for s, _ in program.slots.get(host, ())} - (step.graph.host_storages - step.graph.persistent)
    left = step.budgets[host] - staged - sum(sizes[s] for s in lasting - behind.keys())
    brought = {group: sum(sizes[s] for s in touched[group] if homes[s] == DEVICE) for group in groups}
    left -= sum(brought.values())
    while left < 0 and near:
        behind[near[-1]] = farthest
        left += sizes[near.pop()]
    left += staged - least_staged_bytes(step.graph, step.lives)
    left += sum(sizes[s] for s in lasting - step.graph.host_storages)
    fitting = sorted(groups, key=brought.__getitem__)
    while left < 0 and fitting:
        left += brought[fitting.pop()]
    ops = sorted(op for group in fitting for op in group.ops)
    return ops, {s: tier for s, tier in behind.items() if any(s in touched[group] for group in fitting)}


def with_room(step: StepProblem, choices: Mapping[tuple[int, int], Option]) -> dict[tuple[int, int], Option]:
    """Change choices so that the host's memory has room for what passes through it from tiers behind it.

    What else lies there goes to the last tier, what is there over fewest gaps first.
    """
    host, last = step.machine.host_tier, step.machine.tiers[-1].name
    if not step.lives.behind_host:
        return dict(choices)
    sizes, gaps_of = slot_sizes(step.graph), dict[int, int]()
    for (storage, _), option in choices.items():
        if option == host and storage not in step.graph.host_storages:
            gaps_of[storage] = gaps_of.get(storage, 0) + 1
    taken = taken_by_host(step.graph, step.lives, step.budgets, host)[host]
    left = step.budgets[host] - taken - sum(map(sizes.__getitem__, gaps_of))
    away = set[int]()
    for storage in sorted(gaps_of, key=lambda s: (gaps_of[s], -sizes[s], s)):
        if left >= 0:
            break
        away.add(storage)
        left += sizes[storage]
    return {key: Option(last) if key[0] in away and option == host else option for key, option in choices.items()}


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


def _groups(found: Found, *, sums: bool = False, behind: bool = False) -> list[_HostedOps]:
    """List the groups that move less between the device and lower tiers when hosted.

    Args:
        behind: With those some of whose operands are in a tier behind the host's memory.
    """
    step, program = found.step, found.program
    graph = step.graph
    far = {storage for tier, slots in program.slots.items() if tier != program.host_tier for storage, _ in slots}
    up, down = _moved(program)
    rows: list[_HostedOps] = []
    groups = light_groups(graph, sums=sums)
    seconds = hosted_costs(graph, sorted(op for group in groups for op in group), step.machine)
    for ops in groups:
        touched = {s for i in ops for s in (*graph.op_reads[i], *graph.op_writes[i])}
        if touched & far and not behind:
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
    """Bytes of each storage that a program reads from lower tiers to the device, and that it writes there."""
    up: dict[int, int] = {}
    down: dict[int, int] = {}
    for action in program.actions:
        if action.kind is not ActionKind.MOVE or action.storage is None or CALLER in (action.source, action.target):
            continue
        way = down if action.source == DEVICE else up
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
