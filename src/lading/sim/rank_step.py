"""Rank step: a training step of a cluster from the lists of its ranks: each action priced, run, and summed by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lading.ir.action import ActionKind, Work
from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import Layout
from lading.ir.plan import UnitResidency
from lading.ir.program import ALL_UNITS, Border, ParameterGroup, Program, Region, UnitStorage
from lading.ir.request import StepRequest
from lading.ir.schedules import schedule, schedule_of
from lading.ir.work import Collective, Kernel
from lading.memory.rank_bytes import replicas
from lading.program.emit import COPIES as TIED
from lading.program.emit import ListShape, emit
from lading.program.rank_units import Unit, unit_shape
from lading.sim.parts import MEMORY, cause_of
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.rank_engine import Priced, RankTimes, action_seconds, busiest_rank, run_ranks
from lading.sim.step import (
    COPIES,
    DATA_PARALLEL,
    Run,
    SimulatedStage,
    Step,
    buckets_s,
    flops_of,
    host_s,
    shares_of,
    stage_of,
    trained_of,
)

#: Micro-batches of a list without a pipeline: the first, one that stands for all in the middle, and the last; where
#: parameters are sharded the last is like those in the middle.
_LISTED, _LISTED_SHARDED = 3, 2
_SHARDS = {0: "", 1: "optimizer", 2: "gradients", 3: "parameters"}


def units_of_runs(
    request: StepRequest, runs: Sequence[Run], segments: Sequence[Phases]
) -> list[list[tuple[Unit, int]]]:
    """(Unit, number of repeats) of each run of equal units, for each stage."""
    early_stop = request.stack.early_stop
    units = [Unit(s.segment, s.recomputed_parts, early_stop, not s.segment.leaves) for s in segments]
    return [[(units[variant], count) for variant, count in run] for run in runs]


def list_shape(
    request: StepRequest,
    stages: Sequence[Sequence[tuple[Unit, int]]],
    *,
    buckets: Sequence[int] = (),
    tied: bool = False,
    every: bool = False,
    keep: UnitResidency = UnitResidency.RELEASE,
    by_unit: bool = False,
) -> ListShape:
    """Collect the facts that determine the lists of a request.

    Args:
        stages: (unit, number of repeats) in a row, for each stage.
        buckets: Number of buckets of gradients of each stage; () for a layout without buckets.
        tied: Whether two pipeline ranks have a copy each of one weight.
        every: Whether every micro-batch is listed without a pipeline, though those in the middle are alike.
        keep: How long unsharded parameters stay, without a pipeline.
        by_unit: Whether each unit is a region of its own in forward and backward, even if nothing happens between.
    """
    layout, stack = request.layout, request.stack
    torch_order = not stack.megatron_order
    more, plan = 0, schedule_of(layout, rules="torch" if torch_order else "megatron")
    if not layout.is_pipeline:
        listed = _LISTED_SHARDED if layout.cuts_parameters else _LISTED
        more = 0 if every else max(0, layout.micro_batches - listed)
        plan = schedule("1f1b", 1, 1, layout.micro_batches - more)
    shape = {
        unit: unit_shape(unit, layout, stack, weights_forward=torch_order)
        for unit in dict.fromkeys(unit for units in stages for unit, _ in units)
    }
    shapes = list(shape.values())
    axes = {axes for shape in shapes for axes in shape.axes}
    return ListShape(
        plan=plan,
        stages=tuple(tuple((shape[unit], count) for unit, count in units) for units in stages),
        shards="parameters" if layout.cuts_parameters else _SHARDS[layout.zero],
        num_repeats=more,
        blocks_ahead=stack.blocks_ahead,
        pipelined=layout.is_pipeline,
        single_rank_axes=frozenset(name for name in axes if replicas(name, layout) == 1),
        keep=keep,
        # FSDP2 inside a pipeline always gathers beside computing, unless the host waits for every kernel.
        overlap_gather=stack.overlap_param_gather
        or (layout.cuts_parameters and layout.is_pipeline and not stack.launch_blocking),
        overlap_reduce=stack.overlap_grad_reduce,
        overlap_send=bool(stack.hidden.get("pp", 0.0)) or plan.chunks > 1,
        buckets=tuple(buckets),
        weights_forward=torch_order,
        whole_first=torch_order and layout.is_pipeline,
        sums=not layout.cuts_parameters and any(unit.segment.summed_parameters for unit in shape),
        tied=tied,
        by_unit=by_unit,
    )


@dataclass(frozen=True)
class ListedStep:
    """A step as lists of actions, and the seconds of each action.

    Attributes:
        stages: Chunks of the model in the order of forward.
        runs: (position in ``segments``, number of repeats) in a row, for each stage.
        segments: Work and memory of each segment.
        every_micro_batch: Whether every micro-batch is listed, though those in the middle are alike.
        keep: How long unsharded parameters stay, without a pipeline.
        by_unit: Whether each unit is a region of its own in forward and backward, even if nothing happens between.
    """

    request: StepRequest
    stages: Sequence[SimulatedStage]
    runs: Sequence[Run]
    segments: Sequence[Phases]
    prices: MachinePrices
    every_micro_batch: bool = False
    keep: UnitResidency = UnitResidency.RELEASE
    by_unit: bool = False

    @property
    def layout(self) -> Layout:
        """Layout of the step that is priced."""
        return self.request.layout

    @cached_property
    def shape(self) -> ListShape:
        """Facts that determine the ranks' lists: steps of equal shape share their lists, which are made once."""
        buckets = [self._num_buckets(stage) for stage in self.stages] if self.layout.bucket_bytes else ()
        stages = units_of_runs(self.request, self.runs, self.segments)
        return list_shape(
            self.request,
            stages,
            buckets=buckets,
            tied=self._tied > 0,
            every=self.every_micro_batch,
            keep=self.keep,
            by_unit=self.by_unit,
        )

    @cached_property
    def program(self) -> Program:
        """Program of the step: a list of actions for each class of ranks."""
        return emit(self.shape)

    @property
    def _copies_apart(self) -> bool:
        """Whether copies out of and into the buffers of collectives count with these, not with the regions beside."""
        return self.layout.is_pipeline or not self.request.stack.overlap_param_gather

    def _num_buckets(self, stage: SimulatedStage) -> int:
        size = sum(stage.trained.values()) * DTYPE_BYTES[self.request.stack.gradient_dtype]
        return max(1, -(-size // self.layout.bucket_bytes))

    @cached_property
    def _tied(self) -> int:
        """Elements of a weight of which two pipeline ranks have a copy ([Note: tied weights] in lading.sim.phases)."""
        if not self.layout.is_pipeline:
            return 0
        plan = schedule_of(self.layout, rules="megatron" if self.request.stack.megatron_order else "torch")
        away = [stage.tied for place, stage in enumerate(self.stages) if plan.rank_of(place) != plan.rank_of(0)]
        return max(away, default=0)

    @cached_property
    def ranks(self) -> list[list[SimulatedStage]]:
        """Stages of each rank of the pipeline."""
        plan = self.shape.plan
        return [[self.stages[stage] for stage in plan.stages_of(rank)] for rank in range(plan.ranks)]

    @cached_property
    def slowdowns(self) -> list[float]:
        """For each rank, share by which its regions take longer while the network is busy."""
        slower: list[float] = []
        for rank_stages in self.ranks:
            seconds = sum(stage.forward.seconds for stage in rank_stages)
            memory_s = sum(stage.forward.shares_s.get(MEMORY, 0.0) for stage in rank_stages)
            slower.append(self.prices.slowdown(min(1.0, memory_s / seconds) if seconds else 0.0))
        return slower

    def seconds(self, key: Priced) -> float:
        """Seconds of an action alone."""
        kind, what, group = key
        if isinstance(what, Region) or kind is ActionKind.UNSHARD or kind is ActionKind.REDUCE_GRAD:
            assert not isinstance(what, Border | None)
            return self._cached_seconds(kind, what)
        if kind is ActionKind.SEND:
            return self._send_s
        if kind is ActionKind.STEP:
            return self.optimizer_s + self.host_s
        if kind is ActionKind.ALL_REDUCE and group == "tp":
            return self._sums_s(what)
        if kind is ActionKind.ALL_REDUCE and group == TIED:
            return self.prices.copies_sum_s(self._tied)
        return 0.0

    @property
    def pipeline_s(self) -> float:
        """Seconds of stages and sends alone: a lower bound on the pipeline's step, however states are sharded."""
        shape, plan = self.shape, self.shape.plan
        bare = ListShape(
            plan, ((),) * plan.stages, pipelined=True, overlap_send=shape.overlap_send, whole_first=shape.whole_first
        )

        def seconds(key: Priced) -> float:
            if isinstance(region := key[1], Region):
                return _work_s(self.stages[region.stage], region.work)
            return self._send_s if key[0] is ActionKind.SEND else 0.0

        program = emit(bare)
        return run_ranks(program, action_seconds(program, seconds)).step_s

    def times(self) -> RankTimes:
        """Run the lists and return the times of every action."""
        return run_ranks(self.program, action_seconds(self.program, self.seconds), self.slowdowns)

    def _cached_seconds(self, kind: ActionKind, what: Region | ParameterGroup) -> float:
        """Seconds of a region, a gather or a reduction, computed once for units that are alike."""
        segment = self._order[what.stage][what.unit] if what.unit >= 0 else -1
        key = (kind, id(self.stages[what.stage]), segment, what[2:])
        if (seconds := self._prices.get(key)) is None:
            if isinstance(what, Region):
                seconds = self._region_s(what)
            else:
                seconds = self._unshard_s(what) if kind is ActionKind.UNSHARD else self._reduce_s(what)
            self._prices[key] = seconds
        return seconds

    @cached_property
    def _prices(self) -> dict[tuple[object, ...], float]:
        return {}

    @cached_property
    def _send_s(self) -> float:
        return self.prices.send_s(self.segments[0].sent_bytes)

    @cached_property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer on the rank that has most to update."""
        return max(self.prices.optimizer_s(trained_of(rank_stages)) for rank_stages in self.ranks)

    @cached_property
    def host_s(self) -> float:
        """Seconds that the host takes in a step beside micro-batches, on the rank where they are longest."""
        stack, prices, seconds = self.request.stack, self.prices, list[float]()
        for rank_stages in self.ranks:
            trained = trained_of(rank_stages)
            seconds.append(host_s(rank_stages, stack, prices.optimizer_s(trained)) + prices.gradient_copies_s(trained))
        return max(seconds)

    def _sums_s(self, group: Region | UnitStorage | None = None) -> float:
        if not isinstance(group, ParameterGroup):
            return max(sum(self.prices.sums_s(stage.summed) for stage in rank_stages) for rank_stages in self.ranks)
        return self.prices.sums_s(self._unit(group.stage, group.unit).summed)

    @cached_property
    def _order(self) -> list[list[int]]:
        """Segment of each unit of each stage."""
        return [[variant for variant, count in run for _ in range(count)] for run in self.runs]

    @cached_property
    def _stage_by_segment(self) -> dict[int, SimulatedStage]:
        """Sum up each distinct segment as a stage of its own."""
        distinct = {variant for run in self.runs for variant, _ in run}
        has_groups_apart = self.layout.is_pipeline
        segments = self.segments if has_groups_apart else [segment.without_tied for segment in self.segments]
        return {v: stage_of([(v, 1)], segments, self.prices, self.request.stack) for v in distinct}

    def _unit(self, stage: int, unit: int) -> SimulatedStage:
        return self._stage_by_segment[self._order[stage][unit]]

    def _region_s(self, region: Region) -> float:
        stage, copies = self.stages[region.stage], self.stages[region.stage].copies_s
        if region.unit == ALL_UNITS and region.stop:
            return self._buckets[region.stage][0][region.start]
        if region.unit == ALL_UNITS or not self.layout.cuts_parameters or self._copies_apart:
            whole = _work_s(stage, region.work) + (
                0.0 if region.work is Work.BACKWARD_WEIGHT else copies[region.work != 0]
            )
            if region.unit == ALL_UNITS:
                return whole
            share = _work_s(self._unit(region.stage, region.unit), region.work) / self._units_s(
                region.stage, region.work
            )
            return whole * share * self._part(region)
        unit, stack = self._unit(region.stage, region.unit), self.request.stack
        copied = self.prices.copies_s(unit.elements, stack.gather_copy_bytes)
        spread = copies[region.work is not Work.FORWARD] / len(self._order[region.stage])
        if region.work is Work.FORWARD:
            return (unit.forward.seconds + copied + spread) * self._part(region)
        gathers = stack.gathers - 1 if stage.recompute.seconds else 1
        reduced = self.prices.copies_s(unit.trained, stack.reduce_copy_bytes)
        return (unit.backward_s + gathers * copied + reduced + spread) * self._part(region)

    def _units_s(self, stage: int, work: Work) -> float:
        return sum(_work_s(self._stage_by_segment[variant], work) for variant in self._order[stage])

    def _part(self, region: Region) -> float:
        """Share of a region in the seconds of its unit's pass: 1 unless groups begin or end within the pass."""
        if not region.stop:
            return 1.0
        segment = self.segments[self._order[region.stage][region.unit]]
        key = (id(segment), region.work)
        if key not in self._kernel_ends_s:
            stack = self.request.stack
            unit = Unit(segment.segment, segment.recomputed_parts, stack.early_stop, not segment.segment.leaves)
            kernels = unit.in_order(region.work, weights_forward=not stack.megatron_order)
            self._kernel_ends_s[key] = np.cumsum([0.0, *(self._alone_s(kernel) for kernel in kernels)]).tolist()
        ends = self._kernel_ends_s[key]
        if region.stop - region.start in (0, len(ends) - 1) or not ends[-1]:
            return 1.0
        return (ends[region.stop] - ends[region.start]) / ends[-1]

    @cached_property
    def _kernel_ends_s(self) -> dict[tuple[int, Work], list[float]]:
        return {}

    def _alone_s(self, kernel: Kernel) -> float:
        if isinstance(kernel.detail, Collective):
            return self.prices.collective_s(kernel.detail)
        return self.prices.kernel_s(kernel) * self.prices.in_situ(cause_of(kernel, self.prices.precision))

    @cached_property
    def _buckets(self) -> list[tuple[list[float], list[float]]]:
        """Seconds of backward until each bucket is full, and of the bucket's reduction, by stage."""
        size = self.layout.bucket_bytes // DTYPE_BYTES[self.request.stack.gradient_dtype]
        bucket_times: list[tuple[list[float], list[float]]] = []
        for number, stage in enumerate(self.stages):
            units = [self._stage_by_segment[variant] for variant in reversed(self._order[number])]
            seconds, reduces = buckets_s(units, size, self.prices)
            scale = (_work_s(stage, Work.BACKWARD) + stage.copies_s[1]) / sum(seconds) if sum(seconds) else 0.0
            bucket_times.append(([scale * bucket_s for bucket_s in seconds], reduces))
        return bucket_times

    def _unshard_s(self, group: ParameterGroup) -> float:
        if group.unit == ALL_UNITS:
            return self.prices.gather_s(self.stages[group.stage].trained)
        unit, sharded = self._unit(group.stage, group.unit), self.layout.cuts_parameters
        if sharded and replicas(group.axes, self.layout) == 1:
            return 0.0
        elements = self._of_group(unit.elements if sharded else unit.trained, group.axes)
        seconds = self.prices.gather_s(elements)
        if sharded and self._copies_apart:
            seconds += self.prices.copies_s(elements, self.request.stack.gather_copy_bytes)
        return seconds

    def _reduce_s(self, group: ParameterGroup) -> float:
        if group.bucket >= 0:
            return self._buckets[group.stage][1][group.bucket]
        if group.unit == ALL_UNITS:
            return self.prices.reduce_s(self.stages[group.stage].trained)
        if self.layout.cuts_parameters and replicas(group.axes, self.layout) == 1:
            return 0.0
        elements = self.trained_of_group(group)
        seconds = self.prices.reduce_s(elements)
        if self.layout.cuts_parameters and self._copies_apart:
            seconds += self.prices.copies_s(elements, self.request.stack.reduce_copy_bytes)
        return seconds

    def trained_of_group(self, group: ParameterGroup) -> dict[str, int]:
        """Trained elements of a unit's group, by the axes over which they are replicated."""
        return self._of_group(self._unit(group.stage, group.unit).trained, group.axes)

    def _of_group(self, elements: Mapping[str, int], axes: str) -> dict[str, int]:
        """Parameters of a unit that belong to the group: those that are gathered over its axes."""
        ranks = replicas(axes, self.layout)
        return {name: count for name, count in elements.items() if replicas(name, self.layout) == ranks}

    def step(self, times: RankTimes) -> Step:
        """Sum up a run of the lists: seconds by cause of the rank that computes longest, for which the others wait."""
        layout = self.layout
        plan = self.shape.plan if layout.is_pipeline else None
        busiest = busiest_rank(times, plan) if plan else 0
        shares: dict[str, float] = {}
        for stage in self.ranks[busiest]:
            copies = {COPIES: sum(stage.copies_s) * layout.micro_batches} if any(stage.copies_s) else {}
            for name, value in shares_of(stage, layout.micro_batches, copies).items():
                shares[name] = shares.get(name, 0.0) + value
        computing = sum(shares.values())
        shares |= {"optimizer": self.optimizer_s, "host": self.host_s}
        if sums := self._all_sums_s(busiest):
            shares["tp communication"] = shares.get("tp communication", 0.0) + sums
        rest = times.step_s - computing - self.optimizer_s - self.host_s - sums
        exposed = rest if plan is None else min(rest, self._exposed_s(times, busiest))
        shares[DATA_PARALLEL] = exposed
        if plan is not None:
            shares["bubble"] = rest - exposed
        flops = flops_of(self.stages) * layout.micro_batches
        return Step(times.step_s, shares, tuple(self.stages), plan, busiest, flops, self)

    def _all_sums_s(self, rank: int) -> float:
        """Seconds of the sums over tp that a rank's computing waits for."""
        if not self.layout.cuts_parameters:
            return self._sums_s() if self.program.ranks and any(stage.summed for stage in self.stages) else 0.0
        times = 1 if self.layout.is_pipeline else self.layout.micro_batches
        units = [self._stage_by_segment[v] for stage in self.shape.plan.stages_of(rank) for v in self._order[stage]]
        return times * sum(self.prices.sums_s(unit.summed) for unit in units)

    def _exposed_s(self, times: RankTimes, rank: int) -> float:
        """Seconds by which gathers and reductions make a pipeline's step longer, on the busiest rank."""
        program, computed = self.program, 0.0
        for base, actions in zip(program.bounds, program.ranks, strict=False):
            computed = max(computed, times.end_s[base + actions.rows[-1][1]])
        waited = times.network_wait_s(rank) + times.slowed_s[rank]
        sums = self._all_sums_s(rank)
        return waited + max(0.0, times.step_s - self.optimizer_s - self.host_s - sums - computed)


def _work_s(stage: SimulatedStage, work: Work) -> float:
    if work is Work.FORWARD:
        return stage.forward.seconds
    if work is Work.BACKWARD:
        return stage.backward_s
    if work is Work.BACKWARD_INPUT:
        return stage.recompute.seconds + stage.backward_input.seconds
    return stage.backward_weight.seconds
