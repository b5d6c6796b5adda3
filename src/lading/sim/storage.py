"""Storage: bytes that each pipeline rank of a step holds by role, on the device and behind it.

``lading.program.memory_trace`` reads from the lists of the step what comes and goes; this file has the bytes of each
storage. Where FSDP2 gathers a unit at a time, its gradients are counted kernel by kernel as products make them. In a
pipeline whole gradients add up in the dtype of reductions ([Note: sharded in a pipeline] in ``lading.program.emit``).
Elsewhere gradients are added to permanent buffers, and a unit's peak has them while they are made.

[Note: stock PyTorch]
Gradients are made as backward goes and dropped after the update. DistributedDataParallel has permanent buckets; while
it is told not to reduce, gradients are separate tensors beside them. A stage of torch.distributed.pipelining has a
buffer for each micro-batch that it receives, and keeps each output until the micro-batch's backward (stage.py,
_prepare_forward_infra and fwd_cache, torch 2.13).

[Note: bytes in order]
The memory of a pipeline's rank follows from the order of its actions alone, not from their seconds: a forward's
activations stay until the gradients of its weights are made, whole gradients from the first backward of a stage to its
last. So a search knows a bound of the bytes before a list is written and timed. Buffers, and passes that exchange
something between their units, are not in the bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lading.cost.kernels import operand_share
from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.ir.plan import UnitResidency
from lading.ir.program import ALL_UNITS, ParameterGroup, Program, Region
from lading.ir.request import StepRequest
from lading.ir.schedules import Schedule
from lading.ir.stack import Stack
from lading.ir.work import RankSegment, Stage
from lading.memory.rank_bytes import (
    adapter_bytes,
    gathered_bytes,
    gathered_width,
    gradient_width,
    parameter_width,
    replicas,
    shards,
    split_offloaded,
    state_bytes,
)
from lading.parallel.memory import AliveBytes, alive_bytes
from lading.program.emit import DIRECT, gathering
from lading.program.memory_trace import GradientRules, MemoryTrace, Thing, What, memory_changes, memory_trace
from lading.program.rank_units import bounds, groups_of
from lading.sim.phases import Phases
from lading.sim.rank_step import ListedStep
from lading.sim.step import SimulatedStage, Step, elements_of, trained_of

Ints = npt.NDArray[np.int64]
#: Bytes by role on the device, and behind it.
Places = tuple[dict[Role, int], dict[Role, int]]
_ACTIVATIONS = (What.RUNS, What.ADDS, What.LEAVES, What.SAVED, What.ENTERS, What.HANDED)
_ROLES = {what: Role.ACTIVATION if what in _ACTIVATIONS else Role.WORKSPACE for what in What} | {
    What.SHARD: Role.GRADIENT
}
#: Stock PyTorch has no other gradients than those that backward makes.
_EAGER_ROLES = _ROLES | dict.fromkeys((What.GRADIENTS, What.MADE), Role.GRADIENT)


def stored(
    request: StepRequest,
    given: Sequence[dict[Role, int]],
    both: Sequence[Phases],
    stages: Sequence[SimulatedStage],
    step: Step,
) -> list[Places]:
    """Bytes by role of each pipeline rank, on the device and on the lower tier of the layout.

    Args:
        both: Variants of the segments, recomputed ones before plain ones (``lading.sim.variants``).
        given: Bytes by role if parameters, gradients and states were all on the device.
    Raises:
        ConfigError: activations are moved under stock PyTorch, which cannot do that.
    """
    layout, stack = request.layout, request.stack
    if "activations" in layout.offload and stack.drops_gradients:
        raise ConfigError(
            f"stack {stack.name}: stock PyTorch keeps activations on the device; expected another stack with "
            "offload=activations"
        )
    places: list[Places] = []
    for rank, (rank_stages, roles) in enumerate(zip(stages_of_ranks(stages, step), given, strict=True)):
        on_device, on_lower_tier = split_offloaded(
            roles, _updated(rank_stages, layout), _largest(rank_stages), layout, stack
        )
        moved = _moved_bytes(units_of(stages, both), step, rank) if any(s.moved_bytes for s in rank_stages) else 0
        places.append((on_device, {**on_lower_tier, Role.ACTIVATION: moved} if moved else on_lower_tier))
    return places


def device_traces(
    request: StepRequest, both: Sequence[Phases], stages: Sequence[SimulatedStage], step: Step, program: Program
) -> list[MemoryTrace]:
    """Bytes on the device of each pipeline rank over a step; moved activations are left out.

    Args:
        both: Variants of the segments, recomputed ones before plain ones (``lading.sim.variants``).
        stages: Chunks of the model in the order of forward.
        program: Lists of the step, at any grain.
    Raises:
        ConfigError: the layout has ZeRO-1 under stock PyTorch, which has no such optimizer.
    """
    stack, adapted = request.stack, request.task in ("lora", "qlora")
    if stack.drops_gradients and request.layout.zero == 1:
        raise ConfigError(f"stack {stack.name}: stock PyTorch cuts states with FSDP2; choose zero2 or zero3, got zero1")
    layout = _as_sharded(request)
    # Beside frozen weights, two of the largest units count as gathered all the time.
    fixed = adapted and layout.cuts_parameters and not layout.is_pipeline
    rules = GradientRules(
        makes=not fixed and (layout.cuts_parameters or stack.drops_gradients),
        in_buckets=stack.drops_gradients and layout.zero == 0 and layout.dp * layout.cp > 1,
        to_host=layout.updates_on_host,
    )
    sizes = _ThingBytes(layout, stack, units_of(stages, both), stages, program, fixed=fixed)
    traces: list[MemoryTrace] = []
    for rank, rank_stages in enumerate(stages_of_ranks(stages, step)):
        if adapted:
            frozen, trained = (
                sum(getattr(stage, name) for stage in rank_stages) for name in ("frozen_bytes", "trained_bytes")
            )
            roles = adapter_bytes(frozen, trained, layout, stack)
        else:
            roles = state_bytes(elements_of(rank_stages), layout, stack)
        placeholders = {shape: size for stage in rank_stages for shape, size in stage.placeholders.items()}
        roles[Role.WORKSPACE] = sum(placeholders.values())
        if fixed:
            roles[Role.WORKSPACE] += 2 * gathered_bytes(_largest(rank_stages), layout, stack)
        if rules.makes and not rules.in_buckets:
            roles[Role.GRADIENT] = 0
        if stack.drops_gradients:
            numbers = step.schedule.stages_of(rank) if step.schedule is not None else (0,)
            roles[Role.PARAMETER] += max(_tables_bytes(unit) for number in numbers for unit in sizes.units[number])
            if layout.pp > 1:
                roles[Role.ACTIVATION] = layout.micro_batches * sum(map(sizes.received, numbers))
        of_role = _EAGER_ROLES if stack.drops_gradients else _ROLES
        traces.append(memory_trace(memory_changes(program, rank, rules), sizes, of_role, roles))
    return traces


def least_bytes_in_order(listed: ListedStep) -> int:
    """Lower bound on the bytes of a pipeline's fullest rank, without writing its list ([Note: bytes in order])."""
    layout, stack, plan = listed.layout, listed.request.stack, listed.shape.plan
    max_bytes = 0
    for rank, rank_stages in enumerate(listed.ranks):
        roles = state_bytes(elements_of(rank_stages), layout, stack)
        gathered_bytes = np.zeros(len(plan.orders[rank]), np.int64)
        if layout.cuts_parameters:
            roles[Role.GRADIENT] = 0
            gathered_bytes = _whole_in_order(plan, rank, rank_stages, layout, stack)
        roles[Role.WORKSPACE] = sum(
            {shape: size for stage in rank_stages for shape, size in stage.placeholders.items()}.values()
        )
        roles[Role.ACTIVATION] = int(np.max(_activations_in_order(plan, rank, rank_stages) + gathered_bytes))
        on_device, _ = split_offloaded(roles, _updated(rank_stages, layout), _largest(rank_stages), layout, stack)
        max_bytes = max(max_bytes, sum(on_device.values()))
    return max_bytes


def _activations_in_order(plan: Schedule, rank: int, rank_stages: Sequence[SimulatedStage]) -> Ints:
    """[action of the schedule]: bytes of activations while it runs, or after it if those are more."""
    work, chunk, micro_batch, _ = plan.orders[rank].T
    saved = np.array([stage.saved_bytes for stage in rank_stages], np.int64)[chunk]
    transients = np.array([stage.transients for stage in rank_stages], np.int64)[chunk]
    forward, ends = work == Work.FORWARD, (work == Work.BACKWARD) | (work == Work.BACKWARD_WEIGHT)
    change = np.where(forward, saved, np.where(ends, -saved, 0))
    after: Ints = np.cumsum(change)
    whole = (micro_batch > 0) & (forward | ends)  # a region of a whole stage; torch's first has no BACKWARD_INPUT
    whole[[np.flatnonzero(ends & (chunk == number))[-1] for number in range(plan.chunks)]] = False
    running = np.where(forward, after + transients[:, 0], after - change + transients[:, 1])
    return np.maximum(after, np.where(whole, running, 0))


def _whole_in_order(
    plan: Schedule, rank: int, rank_stages: Sequence[SimulatedStage], layout: Layout, stack: Stack
) -> Ints:
    """[action of the schedule]: bytes of unsharded parameters and whole gradients while it runs and after it."""
    work, chunk, _, _ = plan.orders[rank].T
    places, sizes = np.arange(len(work)), np.zeros(len(work), np.int64)
    released = np.full((plan.chunks, len(work)), -1)
    if plan.chunks > 1 or plan.kind not in DIRECT:
        numbers = {stage: number for number, stage in enumerate(plan.stages_of(rank))}
        for place, (released_stages, _) in enumerate(gathering(plan, rank)):
            for stage in released_stages:
                released[numbers[stage], place] = place
    for number, stage in enumerate(rank_stages):
        parameters, gradients = (
            sum(count for axes, count in counts.items() if replicas(axes, layout) > 1) * width
            for counts, width in (
                (stage.elements, gathered_width(layout, stack)),
                (stage.trained, DTYPE_BYTES[stack.gradient_dtype]),
            )
        )
        of_stage = chunk == number
        made = np.flatnonzero(of_stage & ((work == Work.BACKWARD) | (work == Work.BACKWARD_WEIGHT)))
        used = np.maximum.accumulate(np.where(of_stage, places, -1))
        whole = (used >= 0) & (used >= np.maximum.accumulate(released[number]))
        until = places < made[-1]
        sizes += (whole & until) * parameters + ((places > made[0]) & until) * gradients
    return sizes


def _as_sharded(request: StepRequest) -> Layout:
    """Layout of a request, where stock PyTorch's zero 2 becomes zero 3: FSDP2 that does not reshard after forward."""
    layout = request.layout
    return dataclasses.replace(layout, zero=3) if request.stack.drops_gradients and layout.zero == 2 else layout


def listed_of(request: StepRequest, step: Step) -> ListedStep:
    """Step whose bytes are counted: the one that is timed, except for zero 2 of stock PyTorch.

    Raises:
        ConfigError: ranks are processes of one host; their lists are those of ``step.times``.
    """
    if step.listed is None:
        raise ConfigError("expected a step whose ranks have devices of their own, got processes of one host")
    layout = _as_sharded(request)
    if layout == request.layout or layout.is_pipeline:
        return step.listed
    sharded = dataclasses.replace(request, layout=layout)
    return dataclasses.replace(step.listed, request=sharded, keep=UnitResidency.BACKWARD)


def stages_of_ranks(stages: Sequence[SimulatedStage], step: Step) -> list[list[SimulatedStage]]:
    """List the stages of each class of ranks."""
    plan = step.schedule
    if plan is None:
        return [[stages[0]]]
    return [[stages[s] for s in plan.stages_of(rank)] for rank in range(plan.ranks)]


def units_of(stages: Sequence[SimulatedStage], both: Sequence[Phases]) -> list[list[Phases]]:
    """Units of each stage in order of forward."""
    return [[both[variant] for variant, count in stage.run for _ in range(count)] for stage in stages]


def _moved_bytes(units: Sequence[Sequence[Phases]], step: Step, rank: int) -> int:
    """Largest bytes of a rank's activations on the lower tier."""

    def size_of(thing: Thing) -> int:
        if thing.what is not What.SAVED:
            return 0
        stage = units[thing.of.stage]
        whole = stage if thing.of.unit == ALL_UNITS else (stage[thing.of.unit],)
        return sum(unit.moved_bytes for unit in whole)

    changes = memory_changes(step.program, rank, GradientRules(makes=False))
    return memory_trace(changes, size_of, _ROLES, {}).peak_bytes


def _updated(rank_stages: Sequence[SimulatedStage], layout: Layout) -> float:
    return sum(number / shards(axes, layout) for axes, number in trained_of(rank_stages).items())


def _largest(rank_stages: Sequence[SimulatedStage]) -> dict[str, int]:
    return max((stage.largest_unit for stage in rank_stages), key=lambda unit: sum(unit.values()))


@dataclass(frozen=True, slots=True)
class RegionBytes:
    """Bytes of a region: consecutive kernels of a unit between which none of its groups begins or ends.

    Attributes:
        peak_bytes: Bytes of activations at the region's peak of activations and gradients together.
        gradients: Bytes of the gradients that it has made by that moment.
        end_bytes: Bytes of activations while its last kernel runs.
        made: Bytes of the gradients that it makes, by group.
    """

    peak_bytes: int
    gradients: int
    end_bytes: int
    made: Mapping[int, int]


class _ThingBytes:
    """Bytes of all storages that come and go in a list.

    Args:
        fixed: Whether gathered parameters and gradients are counted elsewhere, as bytes of the whole step.
    """

    def __init__(
        self,
        layout: Layout,
        stack: Stack,
        units: Sequence[Sequence[Phases]],
        stages: Sequence[SimulatedStage],
        program: Program,
        *,
        fixed: bool,
    ) -> None:
        self.layout, self.stack, self.units, self.stages, self.fixed = layout, stack, units, stages, fixed
        self.by_unit = self.layout.zero == 3 and not self.layout.is_pipeline and not fixed
        self.gradient = DTYPE_BYTES[self.stack.gradient_dtype]
        self.regions: dict[tuple[int, int, Work], dict[int, RegionBytes]] = {}
        self.peaks: dict[int, tuple[int, int, int]] = {}
        starts: dict[tuple[int, int, Work], list[int]] = {}
        for region in program.regions if self.by_unit else ():
            starts.setdefault((region.stage, region.unit, region.work), []).append(region.start)
        self.starts = starts

    def __call__(self, thing: Thing) -> int:
        if isinstance(thing.of, ParameterGroup):
            return 0 if self.fixed else self._of_group(thing.what, thing.of)
        if self.by_unit:
            return self._of_region(thing.what, thing.of)
        stage, unit, work, *_ = thing.of
        if self.stack.drops_gradients:
            return self._of_eager(thing.what, stage, unit, work)
        return self._of_whole(thing.what, self.stages[stage] if unit == ALL_UNITS else self.units[stage][unit], work)

    def _of_group(self, what: What, group: ParameterGroup) -> int:
        unit, layout = self.units[group.stage][group.unit], self.layout
        elements, trained = (self._elements(counts, group.axes) for counts in (unit.elements, unit.trained))
        if what is What.MADE:
            return self._made_gradient_bytes(group, unit) if self.by_unit else trained * self.gradient
        if what in (What.INPUT, What.SHARD):
            return trained * self.gradient // (shards(group.axes, layout) if what is What.SHARD else 1)
        if what is not What.WHOLE and layout.is_pipeline and not self.stack.drops_gradients:
            return 0  # the buffers of gathers are small beside what a stage has gathered
        width = gathered_width(layout, self.stack)
        if what is What.CAST:  # only where it travels in another dtype
            return elements * width // shards(group.axes, layout) if width != parameter_width(layout, self.stack) else 0
        return elements * width

    def _elements(self, counts: Mapping[str, int], axes: str) -> int:
        ranks = replicas(axes, self.layout)
        return sum(count for name, count in counts.items() if replicas(name, self.layout) == ranks)

    def _made_gradient_bytes(self, group: ParameterGroup, unit: Phases) -> int:
        """Bytes of the gradients of a group as backward makes them."""
        number = [axes for axes, _ in groups_of(unit.segment, self.layout)].index(group.axes)
        pieces = self._pieces(Region(group.stage, group.unit, Work.BACKWARD))
        return sum(piece.made.get(number, 0) for piece in pieces.values())

    def _of_whole(self, what: What, of: Phases | SimulatedStage, work: Work) -> int:
        """Bytes of a storage of a unit, or of a whole stage."""
        if what in (What.RUNS, What.ADDS):
            return of.saved_bytes + of.transients[work is not Work.FORWARD]
        if what is What.MADE:
            return sum(of.trained.values()) * self.gradient
        return of.saved_bytes if what is What.SAVED else 0

    def _of_eager(self, what: What, stage: int, unit: int, work: Work) -> int:
        """Bytes of a storage of a unit, or of a whole stage, whose backward makes gradients one after another."""
        places = range(len(self.units[stage])) if unit == ALL_UNITS else range(unit, unit + 1)
        units = [self.units[stage][place] for place in places]
        if what is What.HANDED:
            return _leaves_bytes(units[-1]) - _enters_bytes(self.units[stage][0]) if self.layout.pp > 1 else 0
        made = [self._trained_bytes(stage, place) for place in places]
        if what is What.MADE:
            return sum(made)
        if what is What.SAVED:
            return sum(unit.saved_bytes for unit in units)
        peak_bytes = saved_bytes = 0
        for place, one in enumerate(units):
            forward, keeping, adding = self._peaks(one)
            later = sum(made[place + 1 :])
            top = forward if work is Work.FORWARD else adding if what is What.ADDS else keeping + later
            peak_bytes, saved_bytes = max(peak_bytes, saved_bytes + top), saved_bytes + one.saved_bytes
        return peak_bytes if what in (What.RUNS, What.ADDS) else 0

    def received(self, stage: int) -> int:
        """Bytes of a stage's receive buffers for one micro-batch, forward and backward."""
        last = stage == len(self.units) - 1
        return _enters_bytes(self.units[stage][0]) + (0 if last else _leaves_bytes(self.units[stage][-1]))

    def _trained_bytes(self, stage: int, place: int) -> int:
        """Bytes of the gradients of a unit; the last unit that has a tied weight makes its gradient."""
        unit, width = self.units[stage][place], DTYPE_BYTES[self.stack.parameters_dtype or "float32"]
        tied = 0 if place or self.layout.is_pipeline else max(unit.tied for unit in self.units[stage])
        return unit.trained_bytes or (sum(unit.trained.values()) - tied) * width

    def _peaks(self, unit: Phases) -> tuple[int, int, int]:
        """Peak bytes of a unit in forward, in backward if its gradients stay, and in backward if they are added up."""
        if id(unit) not in self.peaks:
            walked = _alive(unit, self.layout, self.stack)
            made: dict[int, int] = {}
            for tensor, place in walked.gradients.items():
                made[place] = made.get(place, 0) + unit.segment.tensors[tensor].size_bytes
            peak_kept = peak_summed = gradients_so_far = 0
            for place, size in walked.backward:
                gradients_so_far += made.get(place, 0)
                peak_kept, peak_summed = (
                    max(peak_kept, size + gradients_so_far),
                    max(peak_summed, size + made.get(place, 0)),
                )
            self.peaks[id(unit)] = max((size for _, size in walked.forward), default=0), peak_kept, peak_summed
        return self.peaks[id(unit)]

    def _of_region(self, what: What, region: Region) -> int:
        unit = self.units[region.stage][region.unit]
        if what is What.SAVED:
            return unit.saved_bytes
        if what is What.ENTERS:
            return _enters_bytes(unit)
        if what is What.HANDED:
            return 0
        piece = self._pieces(region)[region.start]
        if what is What.MADE:
            return sum(piece.made.values())
        if what is What.GRADIENTS:
            return piece.gradients
        # Where its activations are moved, two units' are there while it runs (``lading.sim.variants.moved``).
        return (piece.end_bytes if what is What.LEAVES else piece.peak_bytes) + 2 * unit.moved_bytes

    def _pieces(self, region: Region) -> dict[int, RegionBytes]:
        """Regions of one pass of a unit, by their first kernel."""
        key = (region.stage, region.unit, region.work)
        if key not in self.regions:
            unit = self.units[region.stage][region.unit]
            pieces = _region_bytes(unit, self.layout, self.stack, backward=region.work is not Work.FORWARD)
            self.regions[key] = dict(zip(sorted(self.starts[key]), pieces, strict=True))
        return self.regions[key]


def _enters_bytes(unit: Phases) -> int:
    return sum(unit.segment.tensors[t].size_bytes for t in unit.segment.enters)


def _leaves_bytes(unit: Phases) -> int:
    """Bytes of the outputs of a unit; for the last unit, of the logits."""
    return sum(unit.segment.tensors[t].size_bytes for t in unit.segment.leaves) or _logits_bytes(unit.segment)


def _logits_bytes(segment: RankSegment) -> int:
    """Bytes of the logits that a cross-entropy reads; 0 if there is none."""
    losses = (k for k in segment.kernels if "_log_softmax." in k.name and k.stage is Stage.FORWARD)
    return next((segment.tensors[k.inputs[0]].size_bytes for k in losses), 0)


def _tables_bytes(unit: Phases) -> int:
    """Bytes of buffers and constants."""
    fixed = {t.storage: t.size_bytes for t in unit.segment.tensors if t.role in (Role.BUFFER, Role.CONSTANT)}
    return sum(fixed.values())


def _alive(unit: Phases, layout: Layout, stack: Stack) -> AliveBytes:
    """Bytes alive while each kernel of a unit runs.

    A cross-entropy of stock PyTorch over sharded logits makes one tensor of their size more in backward
    (tensor/parallel/loss.py, torch 2.13).
    """
    share = operand_share(layout.precision, stack)
    alive = alive_bytes(
        unit.segment, unit.recomputed_parts, stack.fusion, fused_loss=stack.fused_loss, operand_share=share
    )
    if not stack.drops_gradients or layout.tp == 1 or not (logits := _logits_bytes(unit.segment)):
        return alive
    kernels = unit.segment.kernels
    backward = ((p, s + (logits if "_log_softmax_backward" in kernels[p].name else 0)) for p, s in alive.backward)
    return dataclasses.replace(alive, backward=tuple(backward))


def _region_bytes(unit: Phases, layout: Layout, stack: Stack, *, backward: bool) -> list[RegionBytes]:
    """Bytes of the regions of one pass of a unit: its kernels are cut where groups of parameters begin and end."""
    segment = unit.segment
    alive = _alive(unit, layout, stack)
    walked = alive.backward if backward else alive.forward
    kernels = [segment.kernels[place] for place, _ in walked]
    if not kernels:
        return []
    groups = groups_of(segment, layout)
    made = _gradients_made(segment, alive.gradients, [axes for axes, _ in groups], gradient_width(layout, stack))
    spans = bounds(segment, kernels, groups)
    cuts = sorted({0, len(kernels), *(at for span in spans for at in span)})
    regions: list[RegionBytes] = []
    for start, stop in pairwise(cuts):
        peak_bytes = gradients = end_bytes = 0
        of_group: dict[int, int] = {}
        for place, size in walked[start:stop]:
            for group, gradient in made.get(place, ()) if backward else ():
                of_group[group] = of_group.get(group, 0) + gradient
            end_bytes = size
            if end_bytes + sum(of_group.values()) > peak_bytes + gradients:
                peak_bytes, gradients = end_bytes, sum(of_group.values())
        regions.append(RegionBytes(peak_bytes, gradients, end_bytes, of_group))
    return regions


def _gradients_made(
    segment: RankSegment, makers: Mapping[int, int], names: Sequence[str], width: int
) -> dict[int, list[tuple[int, int]]]:
    """[kernel]: groups and bytes of the gradients that it makes.

    Args:
        makers: Kernel that makes the gradient of each parameter.
        names: Axes of each group.
        width: Bytes of an element of a gradient.
    """
    made: dict[int, list[tuple[int, int]]] = {}
    for tensor, axes in segment.parameters:
        if tensor in makers:
            local = segment.tensors[tensor]
            group = names.index(axes if axes in names else names[0])
            size = local.size_bytes // DTYPE_BYTES[local.dtype] * width
            made.setdefault(makers[tensor], []).append((group, size))
    return made
