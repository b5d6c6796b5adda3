"""Problems from tables of models: a chain of the model's blocks, with costs and memory as ``lading simulate`` has them.

Each block is a forward and a backward task of one group, with its parameters' update. What stands on a block's border
flows forward, its gradient as many bytes back. Weights that are tied are there once where both ends are on one device;
else on both (``lading.planner.placement.tied``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod

from lading.errors import ConfigError
from lading.ir.fleet import Fleet
from lading.ir.graph import Role
from lading.ir.layout import Layout
from lading.ir.machine import Device, Machine
from lading.ir.placement import PlacementProblem, Shared, Task, TaskFlow
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.ir.work import RankSegment
from lading.memory.rank_bytes import state_bytes
from lading.parallel.memory import segment_memory
from lading.parallel.ranks import rank_segment
from lading.planner.placement.tied import Holder, Weight, tie
from lading.sim.parts import span
from lading.sim.phases import Phases, phases
from lading.sim.prices import MachinePrices


@dataclass(frozen=True)
class _SegmentCosts:
    """Seconds of a segment's forward, backward and update by device, and its bytes."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    resident_bytes: int
    kept_bytes: int
    working_bytes: int
    border_bytes: int


def chain_of(
    table: ModelTable,
    fleet: Fleet,
    stack: Stack,
    *,
    seq_len: int,
    batch: int = 1,
    micro_batches: int = 1,
    training: bool = True,
) -> PlacementProblem:
    """State the placement of a model's blocks on a fleet as a problem.

    Args:
        stack: What is fused and kept in which dtype; a device that is not fitted launches as its machine file says.
        batch: Sequences of a micro-batch.
        training: Forward, backward and update; else one forward pass, with weights only.

    Raises:
        ConfigError: no device can run the model, or the fleet is not joined.
    """
    sizes = {**table.symbols, "s": seq_len}
    layout = Layout(micro_batch=batch)
    sentences: dict[str, None] = dict.fromkeys(table.assumed)
    blocks: list[_SegmentCosts] = []
    elements = _tied_elements(table, sizes)
    tied: Weight | None = None
    for number, segment in enumerate(table.segments):
        ranked = rank_segment(segment, sizes, layout)
        costs = [_phases(ranked, member.machine, layout, stack, sentences) for member in fleet.devices]
        if elements and number in (0, len(table.segments) - 1):
            tied = _tied(elements, costs, fleet, (layout, stack), training=training)
            ranked = dataclasses.replace(ranked, parameter_elements=_without_tied(ranked.parameter_elements, elements))
        blocks.append(_block(ranked, costs, fleet, (layout, stack), training=training))
    names = [_name(table, n) for n in range(len(table.segments))]
    chain = [(names[n].format(i), blocks[n]) for n, count in enumerate(table.counts) for i in range(count)]
    tasks, flows = _tasks(chain, training=training)
    shared = () if tied is None else (_tie(tied, tasks, flows, (chain[0][0], chain[-1][0]), training=training),)
    return PlacementProblem(
        table.name, tuple(tasks), tuple(flows), fleet.network(), micro_batches, tuple(sentences), shared
    )


def _tied_elements(table: ModelTable, sizes: Mapping[str, int]) -> int:
    """Number of weights that the first block and the last one have in common; 0 where nothing is tied."""
    tied = sorted({tuple(sorted((a[0], b[0]))) for a, b in table.tied})
    if tied not in ([], [(0, len(table.segments) - 1)]):
        raise ConfigError(f"{table.name}: expected tied weights in the first and the last block, got {tied}")
    tensors = {(n, t.name): t for n, segment in enumerate(table.segments) for t in segment.tensors}
    return sum(prod(dim.at({"b": 1, **sizes}) for dim in tensors[min(pair)].dims) for pair in table.tied)


def _without_tied(elements: Mapping[str, int], tied: int) -> dict[str, int]:
    """Count a block's parameters, by axis, without those that are tied."""
    return {axes: number - tied if axes == "dp" else number for axes, number in elements.items()}


def _tied(
    elements: int,
    costs: Sequence[tuple[Phases, MachinePrices, Stack] | None],
    fleet: Fleet,
    how: tuple[Layout, Stack],
    *,
    training: bool,
) -> Weight:
    states = state_bytes({"dp": elements}, *how)
    update = [
        inf if known is None else _update_s({"dp": elements}, member.machine.device, known[1])
        for known, member in zip(costs, fleet.devices, strict=True)
    ]
    resident = sum(states.values()) if training else states[Role.PARAMETER]
    return Weight(resident, states[Role.GRADIENT], tuple(update))


def _name(table: ModelTable, number: int) -> str:
    """Name a segment, with a place for its number where it stands more than once."""
    name = table.segments[number].name or f"segment {number}"
    return name if table.counts[number] == 1 else f"{name} {{}}"


def _phases(
    ranked: RankSegment, machine: Machine, layout: Layout, stack: Stack, sentences: dict[str, None]
) -> tuple[Phases, MachinePrices, Stack] | None:
    """Price a segment on a device; None where it cannot run it."""
    device = machine.device
    if device.gpu is None:
        stack = dataclasses.replace(stack, launch_s=device.op_overhead_s, launch_blocking=device.kind == "cpu")
    if "bfloat16" not in device.peak_flops_per_s and "float16" in device.peak_flops_per_s:
        layout = dataclasses.replace(layout, precision="fp16")
        sentences[f"{device.name} computes in float16, as it has no bfloat16"] = None
    prices = MachinePrices(machine, layout, stack)
    try:
        return phases(ranked, "none", (), prices, stack), prices, stack
    except ConfigError as error:
        sentences[f"{device.name} is left out: {error}"] = None
        return None


def _block(
    ranked: RankSegment,
    costs: Sequence[tuple[Phases, MachinePrices, Stack] | None],
    fleet: Fleet,
    how: tuple[Layout, Stack],
    *,
    training: bool,
) -> _SegmentCosts:
    forward: list[float] = []
    backward: list[float] = []
    update: list[float] = []
    for known, member in zip(costs, fleet.devices, strict=True):
        if known is None:
            update.append(inf)
            forward.append(inf)
            backward.append(inf)
            continue
        segment_phases, prices, stack = known
        update.append(_update_s(ranked.parameter_elements, member.machine.device, prices))
        forward.append(span(segment_phases.forward, prices, stack).seconds)
        back = (
            span(part, prices, stack).seconds
            for part in (segment_phases.backward_input, segment_phases.backward_weight)
        )
        backward.append(sum(back))
    states = state_bytes(ranked.parameter_elements, *how)
    memory = segment_memory(ranked, None, how[1].fusion, fused_loss=how[1].fused_loss)
    peak = max(memory.forward_peak, memory.backward_peak) if training else memory.forward_peak
    return _SegmentCosts(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        update_s=tuple(update),
        resident_bytes=sum(states.values()) if training else states[Role.PARAMETER],
        kept_bytes=memory.saved if training else 0,
        working_bytes=max(0, peak - memory.saved) if training else _passing(ranked, memory.forward_peak, memory.saved),
        border_bytes=sum(ranked.tensors[t].size_bytes for t in ranked.leaves),
    )


def _update_s(elements: Mapping[str, int], device: Device, prices: MachinePrices) -> float:
    """Seconds of AdamW on all parameters of a block."""
    if not (number := sum(elements.values())):
        return 0.0
    return (
        prices.optimizer_s(elements) if device.gpu else device.op_overhead_s + number / device.optimizer_elements_per_s
    )


def _passing(ranked: RankSegment, peak: int, saved: int) -> int:
    """Bytes of a forward pass that keeps nothing: at most training's, at least its largest tensor."""
    activations = [t.size_bytes for t in ranked.tensors if t.role is Role.ACTIVATION]
    return max(peak - saved, max(activations, default=0))


def _tasks(chain: Sequence[tuple[str, _SegmentCosts]], *, training: bool) -> tuple[list[Task], list[TaskFlow]]:
    """Make tasks: forward in order, backward in reverse, then updates in order; and the flows between them."""
    last = len(chain) - 1
    tasks = [
        Task(name, b.forward_s, b.resident_bytes, 0, b.working_bytes, name if training else "") for name, b in chain
    ]
    flows = [TaskFlow(n, (n + 1,), chain[n][1].border_bytes) for n in range(last)]
    if not training:
        return tasks, flows
    for number in range(last, -1, -1):
        name, block = chain[number]
        tasks.append(Task(f"{name} backward", block.backward_s, 0, 0, block.working_bytes, name, backward=True))
    for number, (_, block) in enumerate(chain):
        back = 2 * last + 1 - number
        flows.append(TaskFlow(number, (back,), block.kept_bytes))
        tasks[number] = dataclasses.replace(tasks[number], kept_bytes=block.kept_bytes)
        if number:
            flows.append(TaskFlow(back, (back + 1,), chain[number - 1][1].border_bytes))
    for number, (name, block) in enumerate(chain):
        if any(block.update_s):
            flows.append(TaskFlow(2 * last + 1 - number, (len(tasks),), 0))
            tasks.append(Task(f"update of {name}", block.update_s, group=name, once_per_step=True))
    return tasks, flows


def _tie(tied: Weight, tasks: list[Task], flows: list[TaskFlow], ends: tuple[str, str], *, training: bool) -> Shared:
    """Tie weights of the first block and the last: an update at each end, from the gradients of both."""
    count = sum(not (task.backward or task.once_per_step) for task in tasks)
    if not training:
        return Shared((0, count - 1), tied.resident_bytes)
    first, last = ends
    return tie(tasks, flows, (Holder(first, (2 * count - 1,)), Holder(last, (count,))), tied)
