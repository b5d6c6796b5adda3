"""Simulate a StepRequest: cut its table for a rank, price the kernels, run the lists of ranks, and count memory.

>>> simulate(request).step.step_s
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from lading.catalog.architectures import architecture_table, with_precise_layers
from lading.catalog.load import load_machine
from lading.catalog.networks import node_size, with_network, with_node
from lading.catalog.stacks import evidence_on
from lading.cost.collective import assumed_of_links
from lading.cost.fusion import merge_siblings
from lading.cost.hosting import assumed_of_offload
from lading.cost.kernels import assumed_of_attention
from lading.cost.product import LOW_PRECISIONS, peak_flops
from lading.ir.graph import Role
from lading.ir.layout import Layout
from lading.ir.machine import Machine
from lading.ir.request import Prediction, StepRequest
from lading.ir.schedules import schedule_of
from lading.ir.stack import GUESSED, SWITCHES
from lading.ir.table import ModelTable
from lading.ir.work import RankSegment
from lading.parallel.adapters import adapted, adapters_of, packed
from lading.parallel.chunks import Chunk, chunks
from lading.parallel.ranks import rank_segment
from lading.parallel.recompute import has_parts
from lading.parallel.scores import with_dropout, with_scores
from lading.parallel.weight_passes import with_weight_passes
from lading.sim.interval import bounds, causes_of, either_way, half_width
from lading.sim.noise import waiting_share
from lading.sim.phases import Phases, groups_apart, phases, untied_if_apart
from lading.sim.prices import MachinePrices
from lading.sim.processes import processes_step
from lading.sim.rank_step import ListedStep
from lading.sim.step import DATA_PARALLEL, SimulatedStage, Step, stage_of
from lading.sim.storage import device_traces, listed_of, stored
from lading.sim.updates import Updated, updated
from lading.sim.variants import Parts, moved, parts_of

#: Cause of what a step takes longer because its devices are not equal.
WAITING = "waiting for the slowest"
MEMORY_SPREAD = 0.05
#: Seconds of a rank's process by a stack: longer where more processes than processors take turns.
_HOST_SECONDS = ("launch_s", "block_s", "module_s", "parameter_s", "step_s")


@dataclass(frozen=True)
class Simulated:
    """A simulated step of a cluster.

    Attributes:
        memory: For each pipeline rank, bytes of the device by role at the moment when their sum is largest.
        lower_tier_by_rank: For each pipeline rank, bytes by role in ``behind_tier``.
        segments: Work and memory of each segment, as of ``Priced``; runs of stages refer to their positions.
        updated: The update of matrices, if the request's optimizer has a rule for matrices.
    """

    request: StepRequest
    machine: Machine
    table: ModelTable
    step: Step
    memory: tuple[dict[Role, int], ...]
    lower_tier_by_rank: tuple[dict[Role, int], ...]
    segments: tuple[Phases, ...]
    updated: Updated | None = None

    @property
    def peak_bytes(self) -> int:
        """Largest bytes of the device that any rank needs."""
        return max(sum(roles.values()) for roles in self.memory)

    @property
    def behind_tier(self) -> str:
        """Name of the lower tier that the layout uses; "" if it uses none."""
        layout = self.request.layout
        return self.machine.offload_tier(layout.offload_to).name if layout.offload else ""

    @property
    def behind_bytes(self) -> int:
        """Largest bytes that any rank needs in ``behind_tier``."""
        return max(sum(roles.values()) for roles in self.lower_tier_by_rank)

    @property
    def model_flops(self) -> float:
        """FLOP of products and attention of one step on all devices, without recomputation."""
        return self.step.flops * self.request.layout.devices / self.request.layout.pp

    @property
    def peak_flops_per_s(self) -> float:
        """Dense peak of the device in the layout's precision."""
        return peak_flops(self.machine.device, self.request.layout.precision)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Sentences on what the prediction assumes."""
        return self.prediction.assumed

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage of the pipeline, in order of forward."""
        ends = (0, len(self.table.segments) - 1)
        return tuple(sum(n for i, n in run if i not in ends) for run in runs_of(self.request, self.table))

    @property
    def evidence(self) -> str:
        """Evidence for the software on the device's architecture, as of ``evidence_on``."""
        return evidence_on(self.request.stack, self.machine.device.architecture)

    @property
    def spread(self) -> float:
        """Half width of the interval of the step's seconds, in logarithms (``lading.sim.interval``)."""
        columns = self.request.model.symbols.get("h", 0)
        return half_width(self.evidence, self.causes, measured=self.measured, untold=self.untold, columns=columns)

    @property
    def measured(self) -> bool:
        """Whether kernels of the machine were measured, not read in a data sheet."""
        return self.machine.device.gpu is not None or self.machine.processes is not None

    @property
    def untold(self) -> int:
        """Number of words or fields of the source that were not understood, plus number of facts that it leaves out."""
        return len(self.request.unread) + len(self.request.unstated)

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the interval that holds nine of ten steps, as factors of the predicted seconds."""
        hosts = either_way(self.evidence, self.causes)
        request, untold = self.request, self.request.clocks_untold
        low, high = bounds(
            self.evidence, self.spread, either_way=hosts, clocks_untold=untold, first_reading=request.first_reading
        )
        return low * min(1.0, request.otherwise), high * max(1.0, request.otherwise)

    @property
    def causes(self) -> dict[str, float]:
        """Shares of the step by cause, as intervals know them."""
        shares = {cause: seconds / self.step.step_s for cause, seconds in self.step.shares_s.items()}
        return causes_of(shares, updates_on_host=self.request.layout.updates_on_host)

    @cached_property
    def prediction(self) -> Prediction:
        """The figures, with their intervals."""
        step_s, peak = self.step.step_s, self.peak_bytes
        high = int(peak * (1 + MEMORY_SPREAD))
        tier, lower_tier_bytes = self.machine.tier(self.behind_tier), self.behind_bytes
        return Prediction(
            step_s=step_s,
            low_s=step_s * self.interval[0],
            high_s=step_s * self.interval[1],
            peak_bytes=peak,
            rank_bytes=tuple(sum(roles.values()) for roles in self.memory),
            low_bytes=int(peak * (1 - MEMORY_SPREAD)),
            high_bytes=high,
            tier_bytes={tier.name: lower_tier_bytes} if tier else {},
            fits=high + self.machine.device.overhead_bytes <= self.machine.device.memory_bytes
            and (tier is None or lower_tier_bytes <= tier.capacity_bytes),
            shares={name: seconds / step_s for name, seconds in self.step.shares_s.items()},
            assumed=(
                *self.request.assumed,
                *self.table.assumed,
                *_not_simulated(self.request, self.table),
                *_not_fitted(self.request, self.machine),
                *(self.updated.assumed if self.updated else ()),
                *assumed_of_attention(self.request.stack.attention, self.machine.device),
                *assumed_of_links(self.request.layout, self.machine),
                *assumed_of_offload(self.request.layout, self.request.stack, self.machine),
            ),
        )


def _not_simulated(request: StepRequest, table: ModelTable) -> tuple[str, ...]:
    """Sentences on settings of the request that the simulated step does not have."""
    layout, stack, sentences = request.layout, request.stack, list[str]()
    if request.schedule_detail and layout.pp > 1:
        sentences.append(f"schedule {request.schedule_detail} simulated as {schedule_of(layout).kind}")
    if layout.is_pipeline and layout.zero >= 2 and not stack.cuts_in_pipeline:
        sentences.append(
            f"zero{layout.zero} in a pipeline simulated as PyTorch's FSDP2 has it: no such run of software stack "
            f"{stack.name} is known"
        )
    if table.tied and groups_apart(layout, stack):
        sentences.append(
            "tied weights simulated as one of each group that is gathered: a little more than one for both"
        )
    return tuple(sentences)


def _not_fitted(request: StepRequest, machine: Machine) -> tuple[str, ...]:
    """Sentences on what was not measured or fitted of the stack on these devices."""
    stack, gpu = request.stack, machine.device.gpu
    evidence = evidence_on(stack, machine.device.architecture)
    sentences: list[str] = []
    if evidence == GUESSED and stack.framework:
        sentences.append(
            f"software stack {stack.name} on {machine.device.name}: no step of any software was seen there, so its "
            "libraries are taken for unknown"
        )
    elif evidence == GUESSED:
        sentences.append(
            f"software that is not known: {stack.title}; what is not stated is the default of {stack.kind}"
        )
    if gpu is None:
        return tuple(sentences)
    if request.layout.precision == "fp32":
        tf32 = "half of the rate in 16 bits (TF32), which was not measured"
        products = tf32 if stack.tf32 else "the measured share of the peak"
        kernel = "attention is PyTorch's memory-efficient kernel, at a sixth of its rate in 16 bits"
        sentences.append(f"fp32: products take {products}; {kernel}")
    if evidence == SWITCHES:
        sentences.append(
            f"software stack {stack.name} on {gpu.architecture}: no step was seen, its kernels slow down as others' do "
            "there"
        )
    return tuple(sentences)


@dataclass(frozen=True)
class Priced:
    """Priced segments of a request: all that does not depend on ``stack.in_situ``.

    Attributes:
        segments: All variants, in the order of ``lading.sim.variants``.
    """

    machine: Machine
    table: ModelTable
    segments: tuple[Phases, ...]


def priced(request: StepRequest, table: ModelTable | None = None) -> Priced:
    """Cut and price the segments of a request; arguments and errors as ``simulate``."""
    machine, table = machine_of(request), table or table_of(request)
    return Priced(machine, table, tuple(_segments(request, table, prices_of(request, machine, table))))


def machine_of(request: StepRequest, devices: int = 0) -> Machine:
    """Make the machine of a request, on its network, as a rank has it.

    Args:
        devices: Ranks of the job, which share what belongs to a node; 0 for those of the request's layout.
    """
    machine, devices = load_machine(request.machine), devices or request.layout.devices
    if devices > 1:
        machine = machine.with_threads()
    if request.near or request.ranks_per_node:
        machine = with_node(machine, request.near, request.ranks_per_node)
    if request.network:
        machine = with_network(machine, request.network, request.ranks_per_node)
    return machine.with_job(min(devices, node_size(machine)))


def _on_host(request: StepRequest, machine: Machine) -> StepRequest:
    """Set a request's launch times: the measured ones if its stack has none, longer if processes take turns."""
    shared, stack, ranks = machine.processes, request.stack, request.layout.devices
    if shared is None:
        return request
    turns = shared.slower("products", ranks)
    seconds = {name: turns * getattr(stack, name) for name in _HOST_SECONDS}
    if not stack.launch_s:
        seconds["launch_s"] = shared.launch_s(ranks)
    return replace(request, stack=replace(stack, **seconds))


def prices_of(request: StepRequest, machine: Machine, table: ModelTable) -> MachinePrices:
    """Prices of kernels and collectives on the machine of a request."""
    return MachinePrices(machine, request.layout, request.stack, table.symbols.get("a", 1))


def simulate(request: StepRequest, table: ModelTable | None = None, parts: Priced | None = None) -> Simulated:
    """Simulate one step.

    Args:
        table: Table of a model that is in no catalog; None takes that of ``request.model``.
        parts: Result of ``priced`` for a request that differs only in ``stack.in_situ`` or in how states are sharded.
    Raises:
        ConfigError: the layout is impossible, or the model, machine or a constant is missing.
    """
    parts = parts or priced(request, table)
    machine, table, both = parts.machine, parts.table, untied_if_apart(parts.segments, request.layout, request.stack)
    request = _on_host(request, machine)
    stages, step = _timed(request, table, both, machine)
    program = step.program if step.listed is None else listed_of(request, step).program
    given = [trace.peak for trace in device_traces(request, both, stages, step, program)]
    on_device, on_lower_tier = zip(*stored(request, given, both, stages, step), strict=True)
    update = None
    if request.moves_matrices:
        update = updated(request, machine, table, step, on_device)
        step, on_device = update.step, update.memory
    return Simulated(request, machine, table, _waiting(step, request.layout), on_device, on_lower_tier, both, update)


def _timed(
    request: StepRequest, table: ModelTable, both: Sequence[Phases], machine: Machine
) -> tuple[list[SimulatedStage], Step]:
    """Time a step whose ranks are all equally fast, and its stages."""
    if machine.processes is not None:
        parts_of_stages = parts_of(runs_of(request, table), request, table)
        stages = _stages(parts_of_stages, both, request, prices_of(request, machine, table))
        return stages, processes_step(request, machine, both, parts_of_stages)
    listed = _listed(request, table, both, machine)
    return list(listed.stages), listed.step(listed.times())


def listed_step(request: StepRequest, parts: Priced) -> ListedStep:
    """Make a step of a layout as lists of actions; the lists are written when they are first read."""
    both = untied_if_apart(parts.segments, request.layout, request.stack)
    return _listed(request, parts.table, both, parts.machine)


def _listed(request: StepRequest, table: ModelTable, both: Sequence[Phases], machine: Machine) -> ListedStep:
    prices = prices_of(request, machine, table)
    parts_of_stages = parts_of(runs_of(request, table), request, table)
    return ListedStep(request, _stages(parts_of_stages, both, request, prices), parts_of_stages, both, prices)


def seconds_until_reduced(simulated: Simulated, layout: Layout) -> float:
    """Seconds of a step with another layout's buckets, in a pipeline with few micro-batches.

    Buckets are reduced beside the last backwards, which are alike behind two rounds of micro-batches or more. So these
    seconds say which bucket size is better, not what a step takes.
    """
    rounds, rest = divmod(layout.micro_batches, layout.pp)
    if layout.is_pipeline and rounds > 2 and not rest:
        layout = replace(layout, global_batch=2 * layout.pp * layout.dp * layout.micro_batch)
    request = replace(simulated.request, layout=layout)
    return _timed(request, simulated.table, simulated.segments, simulated.machine)[1].step_s


def _waiting(step: Step, layout: Layout) -> Step:
    """Add to a step the time that ranks wait for the slowest of them, a share of their computing."""
    working = step.step_s - max(0.0, step.shares_s.get(DATA_PARALLEL, 0.0))
    waited = working * waiting_share(layout.devices, every_block=layout.zero >= 2 and not layout.is_pipeline)
    return dataclasses.replace(step, step_s=step.step_s + waited, shares_s={**step.shares_s, WAITING: waited})


def table_of(request: StepRequest) -> ModelTable:
    """Load the table of a request's model: of its family, in the variant that stack and dropout need.

    Raises:
        ConfigError: no table of that family and variant.
    """
    unfused = request.stack.attention == "unfused"
    table = architecture_table(
        request.model, unfused=unfused, dropout=request.dropout, alibi=request.alibi, name=request.name
    )
    num_precise, layers = request.high_precision_layers, request.model.layers
    if not num_precise or request.layout.precision not in LOW_PRECISIONS:
        return table
    # Megatron's recipes keep the first block and the others at the end; torchtitan's all at the end.
    first = int(request.stack.megatron_order)
    return with_precise_layers(table, first, min(num_precise, layers) - first, layers)


def _segments(request: StepRequest, table: ModelTable, prices: MachinePrices) -> list[Phases]:
    """Price all variants of each segment, in the order of ``lading.sim.variants``."""
    mode = request.layout.recompute
    ranked = rank_segments(request, table, prices)
    priced = _by_mode(ranked, request, [(mode, request.layout.recompute_modules)])[0]
    if "activations" not in request.layout.offload:
        return list(priced)
    blocks = [bool(segment.enters and segment.leaves) for segment, _ in ranked] * 2
    return [*priced, *(moved(segment) if block else segment for segment, block in zip(priced, blocks, strict=True))]


def segments_by_mode(
    request: StepRequest,
    table: ModelTable,
    prices: MachinePrices,
    modes: Sequence[tuple[str, tuple[str, ...]]],
    plain: Sequence[Phases] = (),
) -> list[tuple[Phases, ...]]:
    """Price, for each recompute mode, every segment with recomputation and then every segment without.

    Args:
        modes: Recompute modes, each with the parts that "selective" recomputes; () for the core of attention.
        plain: Prices of the segments without recomputation, if they are known.
    """
    if plain:
        return _by_mode(_with_prices([s.segment for s in plain], table, prices), request, modes, plain)
    return _by_mode(rank_segments(request, table, prices), request, modes)


def _by_mode(
    ranked: Sequence[tuple[RankSegment, MachinePrices]],
    request: StepRequest,
    modes: Sequence[tuple[str, tuple[str, ...]]],
    plain: Sequence[Phases] = (),
) -> list[tuple[Phases, ...]]:
    stack = request.stack
    plain = plain or [phases(segment, "none", (), prices, stack) for segment, prices in ranked]
    by_mode: list[tuple[Phases, ...]] = []
    blocks = [segment for segment, _ in ranked if segment.enters and segment.leaves]
    for mode, modules in modes:
        parts_by_block = _parts_wanted(blocks, modules if mode == "selective" else ())
        again = [
            phases(segment, mode, parts_by_block.get(id(segment), ()), own, stack)
            if mode != "none" and id(segment) in parts_by_block
            else before
            for (segment, own), before in zip(ranked, plain, strict=True)
        ]
        by_mode.append((*again, *plain))
    return by_mode


def _parts_wanted(blocks: Sequence[RankSegment], modules: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """{id of a block: the parts asked for that it has}; a block with none of them is left out.

    Blocks differ: MLPs of the few dense blocks of a mixture of experts, state-space layers without attention. A part
    that no block has is asked of the first block, whose error names the parts that it has.
    """
    if not modules:
        return {id(block): () for block in blocks}
    known = [word for word in modules if any(has_parts(block, (word,)) for block in blocks)]
    if len(known) < len(modules):
        return {id(block): modules for block in blocks}
    parts_by_block = {id(block): tuple(word for word in modules if has_parts(block, (word,))) for block in blocks}
    return {key: words for key, words in parts_by_block.items() if words}


def outside(prices: MachinePrices) -> MachinePrices:
    """Layout for embeddings, the head and the loss, which stay in 16 bits if the blocks' products have fewer."""
    layout = prices.layout
    high = replace(layout, precision="bf16") if layout.precision in LOW_PRECISIONS else layout
    return MachinePrices(prices.machine, high, prices.stack, prices.active, prices.computing)


def rank_segments(
    request: StepRequest, table: ModelTable, prices: MachinePrices
) -> list[tuple[RankSegment, MachinePrices]]:
    """List each segment of a model as one rank runs it, with the prices of its operations, in order of forward."""
    return _with_prices(segments_of(request, table), table, prices)


def _with_prices(
    segments: Sequence[RankSegment], table: ModelTable, prices: MachinePrices
) -> list[tuple[RankSegment, MachinePrices]]:
    other = outside(prices)
    return [
        (ranked, prices if ranked.enters and ranked.leaves and not segment.precise else other)
        for segment, ranked in zip(table.segments, segments, strict=True)
    ]


def segments_of(request: StepRequest, table: ModelTable) -> list[RankSegment]:
    """Cut each segment of the table to what one rank of the layout runs."""
    layout, stack = request.layout, request.stack
    sizes = {**table.symbols, "s": request.seq_len}
    adapters = adapters_of(request)
    ranked_segments: list[RankSegment] = []
    for number, segment in enumerate(table.segments):
        ranked = rank_segment(segment, sizes, layout, regather=stack.regathers, fp32_rings=stack.fp32_rings)
        if stack.fusion == "fused" or stack.merges:
            ranked = merge_siblings(ranked, stack.merges)
        if stack.attention == "unfused":
            ranked = with_scores(ranked, wide=stack.fusion == "eager", dropout=request.dropout)
        if request.dropout and request.model.family != "gpt":
            ranked = with_dropout(ranked)
        if adapters:
            ranked = adapted(ranked, adapters, layout)
        ranked = with_weight_passes(ranked, layout, stack)
        if request.packed_tokens:
            ranked = packed(ranked, request.packed_tokens)
        if tied := _tied_elements(ranked, table, number):
            ranked = replace(ranked, tied_elements=tied)
        ranked_segments.append(ranked)
    return ranked_segments


def _tied_elements(ranked: RankSegment, table: ModelTable, number: int) -> int:
    """Elements on a rank of the parameters that a segment shares with the first one."""
    names = {name for (home, _), (place, name) in table.tied if home == 0 and place == number != 0}
    parameters = (ranked.tensors[tensor] for tensor, _ in ranked.parameters)
    return sum(prod(tensor.shape) for tensor in parameters if tensor.name in names)


def runs_of(request: StepRequest, table: ModelTable) -> list[Chunk]:
    """Chunks of each stage, in order of forward."""
    layout = request.layout
    ranks = chunks(table, layout, uneven_layers(request, sum(table.counts[1:-1])))
    plan = schedule_of(layout, rules="megatron" if request.stack.megatron_order else "torch")
    runs: dict[int, Chunk] = {}
    for rank, rank_runs in enumerate(ranks):
        runs.update(zip(plan.stages_of(rank), rank_runs, strict=True))
    return [runs[stage] for stage in range(plan.stages)]


def uneven_layers(request: StepRequest, layers: int) -> tuple[int, ...]:
    """Layers of each stage if the source gives the first and the last fewer, or if Megatron fills stages in order.

    Megatron-Bridge's recipes of DeepSeek-V3 (recipes/deepseek/deepseek_v3.py, layout_map) give every stage as many of
    the 61 blocks but the last, which has what is left, what predicts further ahead and the loss.
    """
    stages, fewer = request.layout.pp * request.layout.vpp, request.edge_layers_fewer
    blocks = request.model.layers
    if request.stage_layers:
        return (*request.stage_layers[:-1], request.stage_layers[-1] + layers - blocks)
    divides = request.embedding_is_layer or not (blocks + 2) % stages
    if not fewer and stages > 1 and request.stack.megatron_order and not divides:
        each, ahead = -(-blocks // stages), layers - blocks
        last = blocks - each * (stages - 1)
        return (*(each for _ in range(stages - 1)), last + ahead) if last > 0 and last + ahead != each else ()
    if not fewer or stages == 1:
        return ()
    each = (layers + 2 * fewer) // stages
    return (each - fewer, *(each for _ in range(stages - 2)), each - fewer)


def _stages(
    parts: Sequence[Parts], both: Sequence[Phases], request: StepRequest, prices: MachinePrices
) -> list[SimulatedStage]:
    """Sum up the chunks of the model, each distinct one once."""
    each = {run: stage_of(run, both, prices, request.stack) for run in set(parts)}
    return [_copied(each[run], prices) for run in parts]


def _copied(stage: SimulatedStage, prices: MachinePrices) -> SimulatedStage:
    """Add the seconds by which copies of activations last longer than the computing they run beside."""
    if not stage.moved_bytes:
        return stage
    out, back = prices.copies_beside_s(stage.moved_bytes)
    copies = max(0.0, out - stage.forward.seconds), max(0.0, back - stage.backward_s)
    return dataclasses.replace(stage, copies_s=copies)
