"""Sequence: what one rank issues in a step, in order: kernels, collectives of its blocks, gathers, reductions, sends.

Times are elsewhere; this is the order that a host asks in, which is also the order in which memory is taken.

[Note: groups]
Where parameters are cut (zero 3) the parameters of a unit (a block, what is before, what is after) are a group, and
experts spread over ranks of their own a second one within. As PyTorch's FSDP2 issues them (torch 2.13,
distributed/fsdp/_fully_shard: _fsdp_state.py, _fsdp_param_group.py): a group is gathered when its forward begins and
released when it ends. When its backward begins it is gathered if it is not there, and the group whose forward ended
before its own is asked for; when its backward ends it is released and its gradients are reduced. The last unit's groups
stay from forward to backward. In a pipeline all groups stay from the first forward on, and gradients are reduced once,
in the order of forward, when the last backward of a stage has ended (distributed/pipelining/stage.py).
Where parameters are whole, gradients are reduced a unit at a time in the last micro-batch, or in each where they are
cut (zero 2: DeepSpeed's runtime/zero/stage_1_and_2.py, reduce_ready_partitions_and_remove_grads), and what an optimizer
updated in parts is gathered in the first. Sums over tp ([Note: sums] in lading.sim.step) come last.

>>> [issued.collective for issued in sequence_of(request) if issued.collective]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lading.ir.clusterplan import Keep
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.ir.request import Request
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.ir.work import Collective, Kernel, RankSegment, Stage
from lading.memory.ranks import gathered_width, gradient_width, replicas
from lading.parallel.ranks import EXPERTS
from lading.parallel.recompute import Recomputed, recomputed
from lading.program.schedules import Work, schedule_of
from lading.sim.gathered import bounds, groups_of
from lading.sim.phases import groups_apart, less
from lading.sim.simulate import runs_of, segments_of, table_of


@dataclass(frozen=True, slots=True)
class Issued:
    """What a rank issues.

    Attributes:
        unit: Which unit of the model it belongs to, in the order of forward; -1 for what belongs to all.
        micro_batch: Which one of the step; -1 for what belongs to all.
        kernel: Of a block; a collective inside a block is one too.
        collective: Between ranks; None for a kernel that computes.
        peer: Pipeline rank to which a send goes, or from which ("receive") it comes.
        releases: Gathered parameters of a group go; nothing is run.
    """

    unit: int
    micro_batch: int
    kernel: Kernel | None = None
    collective: Collective | None = None
    peer: int = -1
    releases: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A block of a rank, or what is before or after the blocks.

    Attributes:
        again: What of it runs again in backward.
        lazy: It runs again when backward first reads what was kept, as torch's checkpoint; else before all.
        ends: It is the last of the model.
    """

    segment: RankSegment
    again: Recomputed
    lazy: bool = True
    ends: bool = False

    def kernels(self, work: Work) -> list[Kernel]:
        """What an action of a schedule runs of it, in order."""
        found = [k for k in self.segment.kernels if (k.stage is Stage.FORWARD) == (work is Work.FORWARD)]
        if work is Work.BACKWARD_WEIGHT:
            return [k for k in found if k.stage is Stage.BACKWARD_WEIGHT]
        if work is Work.BACKWARD_INPUT:
            found = [k for k in found if k.stage is Stage.BACKWARD_INPUT]
        if work is Work.FORWARD or not self.again.kernels:
            return found
        looks = (at for at, kernel in enumerate(found) if self._looks_back(kernel))
        first = next(looks, len(found)) if self.lazy else 0
        return [*found[:first], *(self.segment.kernels[place] for place in self.again.kernels), *found[first:]]

    def _looks_back(self, kernel: Kernel) -> bool:
        """Whether a kernel of backward reads what forward kept: before it the forward is run again."""
        kept = {self.segment.tensors[t].storage for t in self.segment.saved}
        read = [self.segment.tensors[t] for t in kernel.inputs]
        return any(t.storage in kept or t.role is Role.PARAMETER for t in read)


def sequence_of(
    request: Request, table: ModelTable | None = None, *, rank: int = 0, keep: Keep = Keep.RELEASE
) -> list[Issued]:
    """What a rank issues in one step.

    Args:
        table: Of a model that is in no catalog.
        rank: Of the pipeline; those of other axes do the same.
        keep: How long gathered parameters stay where they are cut (zero 3); in a pipeline always for the step.
    Raises:
        ConfigError: the layout cannot be.
    """
    layout = request.layout
    table = table or table_of(request)
    units = _units(request, table)
    if not layout.is_pipeline:
        (stage,) = units
        writer = _Writer(stage, layout, request.stack, keep)
        for micro_batch in range(layout.micro_batches):
            writer.forward(micro_batch)
            writer.backward(micro_batch)
        return [*writer.issued, *writer.sums()]
    return _in_pipeline(request, units, rank)


def collectives_of(request: Request, table: ModelTable | None = None, *, rank: int = 0) -> list[Collective]:
    """Collectives of a rank's step in order; arguments and errors as ``sequence_of``."""
    return [issued.collective for issued in sequence_of(request, table, rank=rank) if issued.collective]


def _units(request: Request, table: ModelTable) -> list[list[Unit]]:
    """The units of each stage, in order of forward."""
    layout, stack = request.layout, request.stack
    plain: list[Unit] = []
    again: list[Unit] = []
    apart = layout.is_pipeline or groups_apart(layout, stack)
    for own in segments_of(request, table):
        once = less(own.parameter_elements, 0 if apart else own.tied_elements)  # [Note: tied weights] in sim.phases
        segment = replace(own, parameter_elements=once)
        block = bool(segment.enters and segment.leaves)
        mode = layout.recompute if block else "none"
        ends = not segment.leaves
        plain.append(Unit(segment, recomputed(segment, "none"), ends=ends))
        kept = recomputed(segment, mode, layout.recompute_modules, early_stop=stack.early_stop)
        again.append(Unit(segment, kept, stack.early_stop, ends))
    left = layout.recompute_layers if layout.recompute_layers >= 0 else sum(table.counts)
    stages: list[list[Unit]] = []
    for run in runs_of(request, table):
        found: list[Unit] = []
        first = left
        for place, count in run:
            blocks = table.segments[place].enters and table.segments[place].leaves
            runs_again = min(count, first) if blocks else 0
            first -= runs_again
            found += [again[place]] * runs_again + [plain[place]] * (count - runs_again)
        stages.append(found)
    return stages


def _in_pipeline(request: Request, stages: Sequence[Sequence[Unit]], rank: int) -> list[Issued]:
    layout, stack = request.layout, request.stack
    plan = schedule_of(layout, rules="megatron" if stack.megatron_order else "torch")
    first = [sum(len(s) for s in stages[:stage]) for stage in range(plan.stages)]
    held = {
        s: _Writer(stages[s], layout, stack, Keep.STEP, first[s], True, whole_last=not (s or stack.megatron_order))
        for s in plan.stages_of(rank)
    }
    found: list[Issued] = []
    for work, chunk, micro_batch, _ in plan.orders[rank].tolist():
        stage = plan.stage(rank, chunk)
        writer = held[stage]
        forward = work == Work.FORWARD
        before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        border = writer.entering if forward else writer.leaving
        if work != Work.BACKWARD_WEIGHT and 0 <= before < plan.stages and plan.rank_of(before) != rank:
            found.append(_between("receive", border, plan.rank_of(before), micro_batch))
        start = len(writer.issued)
        writer.run(Work(work), micro_batch)
        found += writer.issued[start:]
        border = writer.leaving if forward else writer.entering
        if work != Work.BACKWARD_WEIGHT and 0 <= after < plan.stages and plan.rank_of(after) != rank:
            found.append(_between("send", border, plan.rank_of(after), micro_batch))
        if not (forward or writer.left):
            start = len(writer.issued)
            writer.finish()
            found += writer.issued[start:]
    return [*found, *(issued for writer in held.values() for issued in writer.sums())]


def _between(op: str, size_bytes: int, peer: int, micro_batch: int) -> Issued:
    return Issued(-1, micro_batch, None, Collective(op, "pp", size_bytes), peer)


@dataclass
class _Group:
    """Parameters that are gathered together ([Note: groups])."""

    unit: int
    axes: str
    elements: int
    keep: Keep
    present: bool = False
    asked: bool = False


@dataclass
class _Writer:
    """The stage of a rank, being written.

    Attributes:
        first: Number of its first unit in the model.
        once: Gradients are reduced once a step.
        whole_last: Both gradients are computed where those of the weights are due, as torch does for the first stage.
    """

    units: Sequence[Unit]
    layout: Layout
    stack: Stack
    keep: Keep
    first: int = 0
    once: bool = False
    whole_last: bool = False
    issued: list[Issued] = field(default_factory=lambda: [])

    def __post_init__(self) -> None:
        self.groups = [self._groups(number, unit) for number, unit in enumerate(self.units)]
        self.ended = [group for groups in self.groups for group in reversed(groups)]
        self.left = self.layout.micro_batches

    def _groups(self, number: int, unit: Unit) -> list[_Group]:
        """The group of a unit, and that of its experts if they are spread over other ranks."""
        keep = Keep.BACKWARD if unit.ends and self.keep is Keep.RELEASE else self.keep
        return [_Group(number, axes, elements, keep) for axes, elements in groups_of(unit.segment, self.layout)]

    @property
    def entering(self) -> int:
        """Bytes of what enters the stage."""
        segment = self.units[0].segment
        return sum(segment.tensors[t].size_bytes for t in segment.enters)

    @property
    def leaving(self) -> int:
        """Bytes of what leaves it."""
        segment = self.units[-1].segment
        return sum(segment.tensors[t].size_bytes for t in segment.leaves)

    def run(self, work: Work, micro_batch: int) -> None:
        """One action of a schedule."""
        if work is Work.FORWARD:
            self.forward(micro_batch)
        elif work is Work.BACKWARD or not self.whole_last:
            self.backward(micro_batch, work)
        elif work is Work.BACKWARD_WEIGHT:
            self.backward(micro_batch)
        self.left -= work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)

    def forward(self, micro_batch: int) -> None:
        """Forward of all units."""
        for number, unit in enumerate(self.units):
            groups = self.groups[number]
            if self.layout.zero and not self.layout.cuts_parameters and micro_batch == 0:
                for group in groups:
                    self._gather(group, micro_batch)
            self._spans(number, unit.kernels(Work.FORWARD), micro_batch, forward=True)

    def backward(self, micro_batch: int, work: Work = Work.BACKWARD) -> None:
        """Backward of all units; torch goes through parameters in their own order where their gradients come apart."""
        forward = work is Work.BACKWARD_WEIGHT and not self.stack.megatron_order
        for number in range(len(self.units)) if forward else reversed(range(len(self.units))):
            kernels = self.units[number].kernels(work)
            if forward and not any(isinstance(kernel.detail, Collective) for kernel in kernels):
                kernels.reverse()
            self._spans(number, kernels, micro_batch, forward=False)
            if not self.layout.cuts_parameters and not self.once and self._reduces(micro_batch):
                for group in reversed(self.groups[number]):
                    self._reduce(group, micro_batch)

    def _reduces(self, micro_batch: int) -> bool:
        return self.layout.zero >= 2 or micro_batch == self.layout.micro_batches - 1

    def _spans(self, number: int, kernels: Sequence[Kernel], micro_batch: int, *, forward: bool) -> None:
        """Kernels of a unit, with what its groups do when theirs begin and end."""
        groups = self.groups[number] if self.layout.cuts_parameters else []
        spans = bounds(self.units[number].segment, kernels, [(group.axes, group.elements) for group in groups])
        for place in range(len(kernels) + 1):
            for at, group in enumerate(groups):
                if spans[at][1] == place:
                    self._end(group, micro_batch, forward)
            for at, group in enumerate(groups):
                if spans[at][0] == place:
                    self._begin(group, micro_batch, forward)
            if place < len(kernels):
                kernel = kernels[place]
                collective = kernel.detail if isinstance(kernel.detail, Collective) else None
                self.issued.append(Issued(self.first + number, micro_batch, kernel, collective))

    def _begin(self, group: _Group, micro_batch: int, forward: bool) -> None:
        self._gather(group, micro_batch)
        if forward or self.once:
            return
        place = self.ended.index(group)
        if place:
            self._gather(self.ended[place - 1], micro_batch)

    def _end(self, group: _Group, micro_batch: int, forward: bool) -> None:
        more = self.once or micro_batch < self.layout.micro_batches - 1
        stays = group.keep.until_backward if forward else group.keep.until_forward and more
        if not stays:
            group.present = False
            self.issued.append(Issued(self.first + group.unit, micro_batch, releases=True))
        if not forward and not self.once:
            self._reduce(group, micro_batch)

    def _gather(self, group: _Group, micro_batch: int) -> None:
        if group.present or self._ranks(group) == 1:
            return
        group.present = True
        width = gathered_width(self.layout, self.stack)
        self._collect("all_gather", self._shard_axis(group.axes), group.elements * width, group.unit, micro_batch)

    def _reduce(self, group: _Group, micro_batch: int) -> None:
        """Sums over tp of what each rank has a part of go first, a parameter at a time, in the gradient's own dtype."""
        segment = self.units[group.unit].segment
        if self.layout.cuts_parameters and group.axes != EXPERTS:
            width = gradient_width(self.layout, self.stack)
            for elements in segment.summed_parameters:
                self._collect("all_reduce", "tp", elements * width, group.unit, micro_batch)
        if self._ranks(group) == 1:
            return
        size = group.elements * DTYPE_BYTES[self.stack.gradient_dtype]
        if self.layout.zero == 0:
            self._collect("all_reduce", group.axes, size, group.unit, micro_batch)
            return
        shard = self._shard_axis(group.axes)
        self._collect("reduce_scatter", shard, size, group.unit, micro_batch)
        if shard == "shard":
            whole = size // self.layout.sharding_ranks
            self._collect("all_reduce", "replicate", whole, group.unit, micro_batch)

    def finish(self) -> None:
        """After the last backward of a stage in a pipeline."""
        last = self.layout.micro_batches - 1
        for groups in self.groups:
            for group in groups:
                if self.layout.cuts_parameters:
                    group.present = False
                    self.issued.append(Issued(self.first + group.unit, last, releases=True))
                self._reduce(group, last)

    def sums(self) -> Iterator[Issued]:
        """Sums over tp of gradients of what is whole on all ranks, in one, where parameters are not cut."""
        elements = sum(unit.segment.summed_elements for unit in self.units)
        if elements and not self.layout.cuts_parameters:
            size = elements * DTYPE_BYTES[self.stack.gradient_dtype]
            yield Issued(-1, -1, None, Collective("all_reduce", "tp", size))

    def _collect(self, op: str, axis: str, size_bytes: int, unit: int, micro_batch: int) -> None:
        self.issued.append(Issued(self.first + unit, micro_batch, None, Collective(op, axis, size_bytes)))

    def _ranks(self, group: _Group) -> int:
        return replicas(group.axes, self.layout)

    def _shard_axis(self, axes: str) -> str:
        hybrid = 0 < self.layout.shard < self.layout.dp * self.layout.cp
        return "shard" if hybrid and axes == "dp" else axes
