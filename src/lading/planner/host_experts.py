"""Experts computed on the host: for how many tokens, and what a step then takes.

Fetching an expert takes its values over the link and back, and its operations on the device. Computing it on the host
takes, for n tokens, their rows over the link with a wait for each copy; products whose weights pass through the host's
memory whatever n is, and whose FLOP grow with n; and its update there:

    fetch_s = max(values / read, values / write) + device operations
    host_s(n) = sum of waits + n * row bytes / link + n * FLOP / rate(n) of each product + updates

The rate is that of products of n rows, as ``lading probe`` measures it beside a device. Where it is not known, the
longer of bytes at the memory's bandwidth and FLOP at ``THREAD_FLOPS_PER_S`` counts, and is said.

Alone, the host is seldom quicker in training: an update by AdamW passes 28 bytes of an element through its memory,
where the link takes 12 each way. But where experts wait for the link, the host computes some while others are fetched.
So an expert's limit is the largest n for which the host takes no longer than ``BESIDE`` times fetching; which parts of
such experts, and whether any, is for the simulator to say, with the expected tokens (``HostChoice.parts``): the host
computes while the device waits, which moves of others may hide, or not. A step then decides by the tokens that it gives
(``lading.memory.hosted_experts``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from lading.cost.compute import host_processors, op_costs, op_seconds
from lading.ir.expert_rows import ExpertRows, find_expert_rows
from lading.ir.experts import Expert, Router, find_experts
from lading.ir.graph import DTYPE_BYTES, StepGraph
from lading.ir.machine import MEMORY, Machine, Tier
from lading.ir.plan import NOT_ON_HOST
from lading.ir.program import Program
from lading.ir.update_ops import PREFIX
from lading.memory.guards import Guards, layer_names
from lading.memory.hosted_experts import (
    HostedExperts,
    find_hosted,
    host_bytes,
    host_limit,
    limits_by_expert,
    row_bytes,
)
from lading.units import format_bytes

#: FLOP/s of a thread of the host in products of a few rows, where they were not measured.
THREAD_FLOPS_PER_S = 2e10
#: Launches that a device is idle for, beside the latency of a copy, where its host waits for what it copied: of the
#: copy, of the mark behind it, and of the operation after it.
LAUNCHES = 3
#: Times that fetching an expert takes, up to which the host may compute it while others are fetched.
BESIDE = 2.0
#: Parts of the experts that the host may compute, of each router those with the fewest tokens, tried in turn.
_PARTS = (1.0, 0.5, 0.25)
#: Beginning of a plan's words on experts that the host does not compute.
REFUSED = "not computed on the host: "
#: Beginning of those on experts for which there is no room.
ROOM_REFUSED = f"{REFUSED}rows and gradients of "


def host_wait_s(machine: Machine) -> float:
    """Least seconds that a device is idle for where its host waits for what it computed; 0 where it is the host."""
    if machine.device.kind == "cpu":
        return 0.0
    latency_s = min((tier.latency_s for tier in machine.tiers if tier.kind == MEMORY), default=0.0)
    return latency_s + LAUNCHES * machine.device.op_overhead_s


@dataclass(frozen=True)
class HostChoice:
    """Experts that a plan may compute on the host.

    Attributes:
        tokens: Mean tokens of each expert in the steps that choose it, by the router's name.
        limits: Most tokens for which it is computed there, by the router's name and the expert.
        reasons: Why others are not, in words.
        others: Programs that run on the same values, whose tier has to fit the budget of the host's memory, too.
    """

    tokens: Mapping[str, tuple[float, ...]]
    limits: Mapping[str, Mapping[int, int]]
    reasons: tuple[str, ...] = ()
    others: tuple[Program, ...] = ()

    def parts(self) -> Iterator[HostChoice]:
        """Yield the choice, and those of parts of its experts."""
        for part in _PARTS:
            limits: dict[str, dict[int, int]] = {}
            for name, row in self.limits.items():
                order = sorted(row, key=lambda expert: (self.tokens[name][expert], expert))
                limits[name] = {expert: row[expert] for expert in order[: ceil(part * len(row))]}
            yield dataclasses.replace(self, limits=limits)

    def on_device(self, shares: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Shares of steps in which each expert is expected on the device."""
        return {
            name: [0.0 if expert in self.limits.get(name, {}) else share for expert, share in enumerate(row)]
            for name, row in shares.items()
        }

    def hosted(self, program: Program, guards: Guards) -> HostedExperts:
        """Experts among these that a Program can compute on the host, within its budget of the host's memory."""
        hosted = find_hosted(program, guards, limits_by_expert(guards, self.limits))
        names = layer_names(guards.routers)
        tokens = {e: self.tokens[names[guards.routers[e[0]].layer]][e[1]] for e in hosted.rows}
        return _within_budget(program, hosted, tokens, host_limit(program, self.others))

    def expected(self, guards: Guards, hosted: HostedExperts, used: frozenset[Expert]) -> dict[Expert, float]:
        """Mean tokens of the experts that the host computes in a step that uses some."""
        names = layer_names(guards.routers)
        counts = {e: self.tokens[names[guards.routers[e[0]].layer]][e[1]] for e in used if e in hosted.limits}
        return {e: count for e, count in counts.items() if count <= hosted.limits[e]}


def _within_budget(program: Program, hosted: HostedExperts, tokens: Mapping[Expert, float], left: int) -> HostedExperts:
    """Find the experts for whose rows and gradients there is room, those with the fewest tokens first.

    Args:
        tokens: Mean tokens of each.
        left: Bytes of the host's memory that there are for them.
    """
    if not hosted.rows or (needed := host_bytes(program, hosted)) <= left:
        return hosted
    order = sorted(hosted.rows, key=lambda expert: (tokens[expert], expert))
    low, high = 0, len(order) - 1
    while low < high:  # the bytes grow with the experts
        middle = (low + high + 1) // 2
        fits = host_bytes(program, hosted.part(order[:middle])) <= left
        low, high = (middle, high) if fits else (low, middle - 1)
    words = (
        f"{ROOM_REFUSED}the {len(order)} experts that may be would take {format_bytes(needed)} of the host's memory at "
        f"once; its budget has {format_bytes(max(0, left))} beside what lies in {program.host_tier}, enough for {low}"
    )
    return dataclasses.replace(hosted.part(order[:low]), left_off=words)


def waiting(machine: Machine) -> tuple[str]:
    """Say why the host computes no expert where it is asked to, and nothing is known of tokens yet."""
    if _tier_of(machine) is None:
        return (f"{NOT_ON_HOST}: {machine.name} has no processors beside its device",)
    return (f"{NOT_ON_HOST} yet: it may be once the tokens that each gets are counted",)


def _tier_of(machine: Machine) -> Tier | None:
    """The host's memory, where its processors can compute beside the device; None where they cannot."""
    if machine.host_device is None or machine.device.kind == "cpu":
        return None
    return machine.tier(machine.host_tier) if machine.host_tier else None


def host_choice(graph: StepGraph, machine: Machine, tokens: Mapping[str, tuple[float, ...]]) -> HostChoice:
    """Find the experts of a step that the host may compute while others are fetched, and why not others.

    Args:
        tokens: Mean tokens of each expert in the steps that choose it, by the router's name.
    """
    tier = _tier_of(machine)
    if tier is None:
        return HostChoice(tokens, {}, waiting(machine))
    graph = _on_device_in_time(graph)
    routed = find_experts(graph)
    names, device_s = layer_names(routed.routers), op_costs(graph, machine.device)
    limits: dict[str, dict[int, int]] = {}
    refused: dict[Expert, str] = {}
    for (router, expert), rows in find_expert_rows(graph, routed).items():
        name = names[routed.routers[router].layer]
        if name not in tokens or not tokens[name][expert]:
            continue
        if isinstance(rows, str):
            refused[router, expert] = rows
            continue
        limit = _limit(graph, rows, machine, tier, sum(device_s[op] for op in rows.ops))
        if tokens[name][expert] <= limit:
            limits.setdefault(name, {})[expert] = limit
        else:
            refused[router, expert] = f"for more than {limit} tokens the host takes over {BESIDE:g} times its fetching"
    return HostChoice(tokens, limits, tuple(_refusals(refused, routed.routers)))


def _on_device_in_time(graph: StepGraph) -> StepGraph:
    """Step with every operation on the device and no update left to the next step, whatever a plan has chosen."""
    late = frozenset(graph.deferred)
    order = [i for i in range(len(graph.ops)) if i not in late] + sorted(late)
    ops = tuple(dataclasses.replace(graph.ops[i], on_host=False) for i in order)
    return dataclasses.replace(graph, ops=ops, blocks=())


def _refusals(refused: Mapping[Expert, str], routers: Sequence[Router]) -> Iterator[str]:
    """Say which experts the host does not compute, by reason."""
    names, by_reason = layer_names(routers), dict[str, list[str]]()
    for (router, expert), why in refused.items():
        by_reason.setdefault(why, []).append(f"{names[routers[router].layer]}.{expert}")
    for why, each in sorted(by_reason.items()):
        yield f"{REFUSED}{', '.join(each)}: {why}"


def _limit(graph: StepGraph, rows: ExpertRows, machine: Machine, tier: Tier, device_s: float) -> int:
    """Most tokens for which the host takes no longer to compute an expert than may pay beside fetching others."""
    values = sum(graph.storages[s].size_bytes for s in rows.weights)
    fetch_s = values / min(tier.mixed_read_bytes_per_s, tier.mixed_write_bytes_per_s) + device_s

    def host_s(tokens: int) -> float:
        return sum(_seconds(graph, rows, op, tokens, machine) for op in rows.ops)

    low, high = 0, rows.count
    while low < high:  # the seconds grow with the tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if host_s(middle) <= BESIDE * fetch_s else (low, middle - 1)
    return low


def host_seconds(
    program: Program, hosted: HostedExperts, tokens: Mapping[Expert, float], machine: Machine
) -> dict[int, float]:
    """Seconds of the actions that the host does in a step, by action.

    Args:
        tokens: Tokens of each expert that it computes.
    """
    seconds: dict[int, float] = {}
    done: set[int] = set()
    for action, expert in sorted(hosted.by_action.items()):
        op = program.actions[action].op
        if expert not in tokens or op is None:
            continue
        rows = hosted.rows[expert]
        again_s = _results_s(program.graph, rows, op, tokens[expert], machine)
        seconds[action] = again_s if op in done else _seconds(program.graph, rows, op, tokens[expert], machine)
        done.add(op)
    return seconds


def _seconds(graph: StepGraph, rows: ExpertRows, op: int, tokens: float, machine: Machine) -> float:
    """Seconds of one operation on rows on the host, with the copies of what it reads and of what others read."""
    tier, host = machine.tier(machine.host_tier), host_processors(machine)
    assert tier is not None, "the host computes in it"
    copied = [row_bytes(graph, rows, s) * tokens if s in rows.widths else 0.0 for s in rows.inputs.get(op, ())]
    seconds = sum(host_wait_s(machine) + size / tier.write_bytes_per_s for size in copied)
    if graph.ops[op].name.startswith(PREFIX):  # and the number of updates comes from the device, and goes back
        seconds += 2 * host_wait_s(machine) + op_seconds(graph, graph.ops[op], host)
    else:
        seconds += _kernel_s(graph, rows, op, tokens, machine)
    return seconds + _results_s(graph, rows, op, tokens, machine)


def _results_s(graph: StepGraph, rows: ExpertRows, op: int, tokens: float, machine: Machine) -> float:
    tier = machine.tier(machine.host_tier)
    assert tier is not None, "the host computes in it"
    sizes = [row_bytes(graph, rows, s) * tokens if s in rows.widths else 0.0 for s in rows.results.get(op, ())]
    return sum(host_wait_s(machine) + size / tier.read_bytes_per_s for size in sizes)


def _kernel_s(graph: StepGraph, rows: ExpertRows, op: int, tokens: float, machine: Machine) -> float:
    """Seconds of an operation: a product as products of rows were measured, where they were."""
    part, share, host = graph.ops[op], tokens / rows.count, host_processors(machine)
    moved, has_rows = 0.0, False
    for tensor in (*part.inputs, *part.outputs):
        view = graph.tensors[tensor]
        size = prod(view.shape) * DTYPE_BYTES[view.dtype]
        has_rows |= view.storage in rows.widths
        moved += size * share if view.storage in rows.widths else size
    flops = part.flops * (share if has_rows else 1.0)
    measured, by_memory_s = machine.host_device, moved / host.memory_bandwidth_bytes_per_s
    if not flops or measured is None or measured.row_flops_per_s is None:
        return host.op_overhead_s + max(by_memory_s, flops / (THREAD_FLOPS_PER_S * host.num_threads))
    return host.op_overhead_s + flops / measured.row_flops_per_s.at(tokens)


def sentences(program: Program, hosted: HostedExperts, guards: Guards, machine: Machine) -> list[str]:
    """Say which experts the host computes, which it cannot and why, and what was assumed."""
    lines: list[str] = []
    if hosted.rows:
        limits = sorted({hosted.limits[e] for e in hosted.rows})
        most = f"{limits[0]}" if len(limits) == 1 else f"{limits[0]} to {limits[-1]}"
        lines.append(
            f"{len(hosted.rows)} experts are computed on the host, where they lie, in steps that give them at most "
            f"{most} tokens, in {format_bytes(host_bytes(program, hosted))} of its budget beside what lies in "
            f"{program.host_tier}; their numbers differ from plain PyTorch's as sums over fewer rows do"
        )
        wait = f"a wait of {host_wait_s(machine) * 1e6:.3g} us for each copy of rows"
        host = machine.host_device
        assert host is not None, "it computes"
        if host.row_flops_per_s is not None:
            lines.append(f"host: {wait} is assumed, not measured")
            if others := _other_dtypes(program.graph, hosted):
                lines.append(
                    f"host: products of rows in {others} are assumed to be as fast as the measured float32 ones"
                )
        else:
            rate = f"{THREAD_FLOPS_PER_S / 1e9:g} GFLOP/s a thread in products of a few rows"
            lines.append(f"host: {rate}, and {wait}, are assumed, not measured")
    lines += [*_refusals(hosted.refused, guards.routers), *([hosted.left_off] if hosted.left_off else [])]
    return lines


def _other_dtypes(graph: StepGraph, hosted: HostedExperts) -> str:
    """Name the dtypes of experts' products that are not float32."""
    products = (graph.ops[op] for rows in hosted.rows.values() for op in rows.ops if graph.ops[op].flops)
    return " and ".join(sorted({graph.tensors[part.outputs[0]].dtype for part in products} - {"float32"}))
