"""Prices of the lists' actions where ranks are processes of one host that run stock PyTorch over gloo.

[Note: processors]
Ranks share the host's processors, so how long a kernel takes depends on how many ranks compute at the moment: all of
them where they do the same, fewer in a pipeline, whose stages wait (``Processes.slowdown``). A collective is the work
of the same processors, so computing waits for it. Reductions of DistributedDataParallel run beside backward and take
from it the processors that they keep busy.

Beside kernels, PyTorch copies gradients and parameters: a gradient is added to that of the micro-batch before (12 bytes
an element in fp32); DDP divides it into its bucket (8: csrc/distributed/c10d/reducer.cpp, mark_variable_ready_dense);
FSDP2 copies gathered parameters out of their buffer (8) and gradients into another (8), of which gloo takes the mean
(fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lading.errors import ConfigError
from lading.ir.action import ActionKind, Work
from lading.ir.graph import DTYPE_BYTES
from lading.ir.machine import Machine, Processes
from lading.ir.plan import UnitResidency
from lading.ir.program import ALL_UNITS, ParameterGroup, Program
from lading.ir.request import StepRequest
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.rank_engine import Priced, RankTimes, action_seconds, run_sharing
from lading.sim.rank_step import ListedStep
from lading.sim.step import DATA_PARALLEL, Run, Step, flops_of, shares_of, stage_of

#: Bytes moved for each element of a gradient that is added to the micro-batch before's, or copied into DDP's bucket.
_ADD, _TO_BUCKET = 12, 8
#: DistributedDataParallel's ``bucket_cap_mb``.
_BUCKET_BYTES = 25 << 20
_MAKE_GRADIENTS = (Work.BACKWARD, Work.BACKWARD_WEIGHT)


def processes_step(request: StepRequest, machine: Machine, segments: Sequence[Phases], runs: Sequence[Run]) -> Step:
    """Simulate a step ([Note: processors]).

    Args:
        segments: Segments of one rank.
        runs: (segment, number of repeats) in a row, for each stage.
    Raises:
        ConfigError: nothing was measured of this host's processes, or the layout has ZeRO-1.
    """
    shared, layout = machine.processes, request.layout
    if shared is None:
        raise ConfigError(f"{machine.name}: expected what its processes share; measure it with lading probe --ranks N")
    if layout.bucket_bytes:
        raise ConfigError(f"processes of one host reduce in DistributedDataParallel's own buckets, got {layout}")
    if layout.zero == 1 or layout.offload:
        raise ConfigError(
            f"processes of one host run stock PyTorch: expected zero0, zero2 or zero3 and no offload, got {layout}"
        )
    keep = UnitResidency.RELEASE
    if layout.zero == 2:  # FSDP2 that does not reshard after forward
        keep, request = UnitResidency.BACKWARD, dataclasses.replace(request, layout=dataclasses.replace(layout, zero=3))
    return _HostStep(request, machine, shared, segments, runs, keep).step()


@dataclass(frozen=True)
class _HostStep:
    request: StepRequest
    machine: Machine
    shared: Processes
    segments: Sequence[Phases]
    runs: Sequence[Run]
    keep: UnitResidency

    @cached_property
    def listed(self) -> list[ListedStep]:
        """The step as it is priced while the processes of one, two, ... ranks of the pipeline compute."""
        request, layout = self.request, self.request.layout
        steps: list[ListedStep] = []
        for computing in range(1, layout.pp + 1):
            at_once = computing * (layout.devices // layout.pp)
            prices = MachinePrices(self.machine, layout, request.stack, computing=at_once)
            stages = [stage_of(run, self.segments, prices, request.stack) for run in self.runs]
            steps.append(
                ListedStep(request, stages, self.runs, self.segments, prices, every_micro_batch=True, keep=self.keep)
            )
        return steps

    @property
    def busiest(self) -> ListedStep:
        """The step as it is priced while all ranks compute."""
        return self.listed[-1]

    @property
    def program(self) -> Program:
        """The lists of all ranks."""
        return self.busiest.program

    def step(self) -> Step:
        """Run the lists, and sum up seconds by cause of the rank that computes longest."""
        layout, program, listed = self.request.layout, self.program, self.busiest
        times = run_sharing(program, [self._seconds(one) for one in self.listed])
        spent = [_spent_s(times, rank) for rank in range(len(program.ranks))]
        rank = int(np.argmax([causes[""] for causes in spent]))
        computed, exchanged = spent[rank].pop(""), spent[rank]
        kinds = program.ranks[rank].kind
        adds = sum((s for number, s in self._adds_s(rank).items() if kinds[number] is ActionKind.COMPUTE), 0.0)
        shares: dict[str, float] = {}
        for stage in listed.ranks[rank]:
            shares = shares_of(stage, layout.micro_batches, shares)
        scale = (computed - adds) / sum(shares.values())  # less where others waited meanwhile
        shares = {name: seconds * scale for name, seconds in shares.items()}
        for name, seconds in exchanged.items():
            shares[name] = shares.get(name, 0.0) + seconds
        shares |= {"gradients": adds, "optimizer": listed.optimizer_s, "host": listed.host_s + self.hooks_s}
        if layout.is_pipeline:
            shares["bubble"] = times.step_s - sum(shares.values())
        plan = listed.shape.plan if layout.is_pipeline else None
        flops = flops_of(listed.stages) * layout.micro_batches
        return Step(times.step_s, shares, tuple(listed.stages), plan, rank, flops, times=times)

    def _seconds(self, listed: ListedStep) -> list[float]:
        """Seconds of all actions, with the copies that PyTorch makes beside kernels ([Note: processors])."""
        seconds = action_seconds(self.program, lambda key: self._action_s(listed, key))
        for rank, base in enumerate(self.program.bounds[:-1]):
            for number, more in self._adds_s(rank).items():
                seconds[base + number] += more
        return seconds

    def _action_s(self, listed: ListedStep, key: Priced) -> float:
        kind, what, _ = key
        if kind is ActionKind.REDUCE_GRAD and isinstance(what, ParameterGroup) and what.unit == ALL_UNITS:
            return self._buckets_s(listed.stages[what.stage].trained)
        return listed.seconds(key) + (self.hooks_s if kind is ActionKind.STEP else 0.0)

    def _adds_s(self, rank: int) -> dict[int, float]:
        """{Action of the rank that makes gradients: seconds of adding them to those of earlier micro-batches}."""
        layout, actions = self.request.layout, self.program.ranks[rank]
        whole = layout.is_pipeline or not layout.cuts_parameters
        adds: dict[int, float] = {}
        for number, (kind, op, storage) in enumerate(zip(actions.kind, actions.op, actions.storage, strict=True)):
            if actions.micro_batch[number] <= 0:
                continue
            if whole and kind is ActionKind.COMPUTE and (region := self.program.regions[op]).work in _MAKE_GRADIENTS:
                adds[number] = self._added_s(self.busiest.stages[region.stage].trained)
            elif not whole and kind is ActionKind.REDUCE_GRAD:
                group = self.program.storages[storage]
                assert isinstance(group, ParameterGroup)
                adds[number] = self._added_s(self.busiest.trained_of_group(group)) / layout.sharding_ranks
        return adds

    def _added_s(self, elements: Mapping[str, int]) -> float:
        return self.busiest.prices.copies_s(elements, _ADD)

    def _buckets_s(self, elements: Mapping[str, int]) -> float:
        """Seconds by which DDP's reductions make backward longer; what they leave of the processors is hidden."""
        prices, seconds = self.busiest.prices, 0.0
        for axes, number in elements.items():
            buckets = max(1, round(number * DTYPE_BYTES[self.request.stack.gradient_dtype] / _BUCKET_BYTES))
            alone = buckets * prices.reduce_s({axes: number // buckets})
            seconds += alone * min(1.0, prices.processor_share("all_reduce", axes))
        return seconds + prices.copies_s(elements, _TO_BUCKET)

    @cached_property
    def hooks_s(self) -> float:
        """Seconds of a step that a rank's host spends on hooks of FSDP2 and DDP and on DTensors."""
        layout, each = self.request.layout, self.shared.overhead_s
        passes = 1 if layout.is_pipeline else layout.micro_batches
        longest = 0.0
        for rank_stages in self.busiest.ranks:
            run = [entry for stage in rank_stages for entry in stage.run]
            units = sum(count for _, count in run) if layout.zero else 0
            cut = sum(count * _cut_modules(self.segments[s], layout.sp) for s, count in run) if layout.tp > 1 else 0
            seconds = passes * (units * each.get("unit", 0.0) + cut * each.get("tensor-parallel", 0.0))
            if layout.dp > 1:
                seconds += sum(stage.parameters for stage in rank_stages) * self.request.stack.reduced_parameter_s
            longest = max(longest, seconds)
        return longest * self.shared.slower("products", layout.devices)


def _cut_modules(segment: Phases, sp: bool) -> int:
    """Number of modules on DTensors: those with a matrix; with sequence parallel also those with vectors (norms)."""
    tensors = segment.segment.tensors
    named = [tensors[t] for t, _ in segment.segment.parameters]
    return len({t.name.rpartition(".")[0] for t in named if sp or len(t.shape) > 1})


def _spent_s(times: RankTimes, rank: int) -> dict[str, float]:
    """Seconds of a rank's compute stream by cause, "" for regions; waits and other actions are left out."""
    base, actions = times.program.bounds[rank], times.program.ranks[rank]
    spent = {"": 0.0, DATA_PARALLEL: 0.0}
    for number, (kind, group) in enumerate(zip(actions.kind, actions.group, strict=True)):
        if kind in (ActionKind.COMPUTE, ActionKind.UNSHARD, ActionKind.REDUCE_GRAD, ActionKind.ALL_REDUCE):
            sums = kind is ActionKind.ALL_REDUCE and group == "tp"
            cause = "" if kind is ActionKind.COMPUTE else "tp communication" if sums else DATA_PARALLEL
            spent[cause] = spent.get(cause, 0.0) + times.end_s[base + number] - times.start_s[base + number]
    return spent
