"""Sequence: a rank's list at the grain of kernels: every kernel and collective it issues in a step, in order.

The list is the one that is timed (``lading.sim.rank_step``); here each region is the kernels that it stands for, and
each gather or reduction the collectives that it is.

>>> [issued.collective for issued in sequence_of(request) if issued.collective]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lading.ir.action import ActionKind, Work
from lading.ir.graph import DTYPE_BYTES
from lading.ir.plan import UnitResidency
from lading.ir.program import ALL_UNITS, Border, ParameterGroup, Program, Region
from lading.ir.request import StepRequest
from lading.ir.table import ModelTable
from lading.ir.work import Collective, Kernel
from lading.memory.rank_bytes import gathered_width, gradient_width, replicas
from lading.parallel.recompute import recomputed
from lading.program.emit import ListShape, emit
from lading.program.rank_units import Unit, groups_of, without_tied
from lading.sim.phases import groups_apart
from lading.sim.rank_step import list_shape
from lading.sim.simulate import runs_of, segments_of, table_of


@dataclass(frozen=True, slots=True)
class Issued:
    """One thing that a rank issues: a kernel or a collective.

    Attributes:
        unit: Number of the unit of the model it belongs to, in the order of forward; -1 for what belongs to all.
        micro_batch: Number within the step; -1 for what belongs to all.
        kernel: A kernel of a block; a collective inside a block is one too.
        collective: The collective between ranks; None for a kernel that computes.
        peer: Pipeline rank to which a send goes, or from which ("receive") it comes.
        releases: Whether gathered parameters of a group go; nothing is run.
    """

    unit: int
    micro_batch: int
    kernel: Kernel | None = None
    collective: Collective | None = None
    peer: int = -1
    releases: bool = False


def sequence_of(
    request: StepRequest, table: ModelTable | None = None, *, rank: int = 0, keep: UnitResidency = UnitResidency.RELEASE
) -> list[Issued]:
    """List what a rank issues in one step.

    Args:
        table: Table of a model that is in no catalog.
        rank: Rank of the pipeline; those of other axes do the same.
        keep: How long gathered parameters stay where they are sharded (zero 3); in a pipeline always for the step.
    Raises:
        ConfigError: the layout cannot be.
    """
    return list(_Kernels(request, table or table_of(request), keep).of_rank(rank))


def collectives_of(request: StepRequest, table: ModelTable | None = None, *, rank: int = 0) -> list[Collective]:
    """Collectives of a rank's step in order; arguments and errors as ``sequence_of``."""
    return [issued.collective for issued in sequence_of(request, table, rank=rank) if issued.collective]


@dataclass(frozen=True)
class _Kernels:
    """The lists of a request, and the units that they name."""

    request: StepRequest
    table: ModelTable
    keep: UnitResidency

    @cached_property
    def stages(self) -> list[list[Unit]]:
        """Units of each stage, in order of forward."""
        request, layout = self.request, self.request.layout
        apart = layout.is_pipeline or groups_apart(layout, request.stack)
        segments = [without_tied(segment, apart=apart) for segment in segments_of(request, self.table)]
        left = layout.recompute_layers if layout.recompute_layers >= 0 else sum(self.table.counts)
        stages: list[list[Unit]] = []
        for run in runs_of(request, self.table):
            units: list[Unit] = []
            first = left
            for place, count in run:
                segment = segments[place]
                again = min(count, first) if segment.enters and segment.leaves else 0
                first -= again
                mode, modules, stack = layout.recompute, layout.recompute_modules, request.stack
                kept = recomputed(segment, mode, modules, early_stop=stack.early_stop) if again else None
                ends = not segment.leaves
                if kept is not None:
                    units += [Unit(segment, kept, stack.early_stop, ends)] * again
                units += [Unit(segment, recomputed(segment, "none"), stack.early_stop, ends)] * (count - again)
            stages.append(units)
        return stages

    @cached_property
    def shape(self) -> ListShape:
        """Everything that the lists follow from, with every micro-batch."""
        shape = list_shape(self.request, [[(unit, 1) for unit in units] for units in self.stages], every=True)
        return replace(shape, keep=self.keep)

    @cached_property
    def program(self) -> Program:
        """Lists of all ranks."""
        return emit(self.shape)

    @cached_property
    def first(self) -> list[int]:
        """Number in the model of the first unit of each stage."""
        return [sum(map(len, self.stages[:stage])) for stage in range(len(self.stages))]

    def of_rank(self, rank: int) -> Iterator[Issued]:
        """Yield what a rank issues, in order."""
        actions = self.program.ranks[rank]
        for number, kind in enumerate(actions.kind):
            op, storage, micro_batch = actions.op[number], actions.storage[number], actions.micro_batch[number]
            if op >= 0:
                yield from self._region(self.program.regions[op], micro_batch)
            elif storage < 0:
                yield from self._sums(rank) if kind is ActionKind.ALL_REDUCE and actions.group[number] == "tp" else ()
            elif isinstance(border := self.program.storages[storage], Border):
                op = "send" if kind is ActionKind.SEND else "receive"
                size = self._border_bytes(border)
                yield Issued(-1, micro_batch, None, Collective(op, "pp", size), actions.peer[number])
            else:
                for group in self._groups(border):
                    yield from self._group(kind, group, actions.group[number], micro_batch)

    def _groups(self, group: ParameterGroup) -> list[ParameterGroup]:
        """The groups that stand for all of a stage's, in the order of backward."""
        if group.unit != ALL_UNITS:
            return [group]
        layout, alone = self.request.layout, self._alone
        groups = [
            ParameterGroup(group.stage, number, axes)
            for number, unit in enumerate(self.stages[group.stage])
            for axes, _ in groups_of(unit.segment, layout)
            if axes not in alone
        ]
        return groups[::-1]

    @cached_property
    def _alone(self) -> frozenset[str]:

        axes = {
            axes for units in self.stages for unit in units for axes, _ in groups_of(unit.segment, self.request.layout)
        }
        return frozenset(name for name in axes if replicas(name, self.request.layout) == 1)

    def _region(self, region: Region, micro_batch: int) -> Iterator[Issued]:
        """Kernels of a region; backward goes through its units from the last to the first."""
        stack = self.request.stack
        units, work = self.stages[region.stage], region.work
        onward = work is Work.FORWARD or (work is Work.BACKWARD_WEIGHT and not stack.megatron_order)
        numbers = range(len(units)) if onward else range(len(units) - 1, -1, -1)
        for number in numbers if region.unit == ALL_UNITS else (region.unit,):
            kernels = units[number].in_order(work, weights_forward=not stack.megatron_order)
            for kernel in kernels[region.start : region.stop] if region.stop else kernels:
                collective = kernel.detail if isinstance(kernel.detail, Collective) else None
                yield Issued(self.first[region.stage] + number, micro_batch, kernel, collective)

    def _border_bytes(self, border: Border) -> int:
        """Bytes that the stage of a border takes: what enters it, or the gradient of what leaves it."""
        units = self.stages[border.stage]
        segment = units[0].segment if border.forward else units[-1].segment
        tensors = segment.enters if border.forward else segment.leaves
        return sum(segment.tensors[t].size_bytes for t in tensors)

    def _group(self, kind: ActionKind, group: ParameterGroup, axis: str, micro_batch: int) -> Iterator[Issued]:
        """The collectives of a gather or reduction."""
        layout, stack = self.request.layout, self.request.stack
        unit, number = self.stages[group.stage][group.unit], self.first[group.stage] + group.unit
        elements = dict(groups_of(unit.segment, layout))[group.axes]
        if kind is ActionKind.RESHARD:
            yield Issued(number, micro_batch, releases=True)
            return
        found: list[Collective] = []
        if axis != "tp" and replicas(group.axes, layout) == 1:
            return
        if kind is ActionKind.UNSHARD:
            found = [Collective("all_gather", self._shard(group.axes), elements * gathered_width(layout, stack))]
        elif axis == "tp":
            width = gradient_width(layout, stack)
            found = [Collective("all_reduce", "tp", count * width) for count in unit.segment.summed_parameters]
        else:
            found = self._reductions(group.axes, elements * DTYPE_BYTES[stack.gradient_dtype])
        for collective in found:
            yield Issued(number, micro_batch, None, collective)

    def _reductions(self, axes: str, size: int) -> list[Collective]:
        layout = self.request.layout
        if layout.zero == 0:
            return [Collective("all_reduce", axes, size)]
        shard = self._shard(axes)
        whole = [Collective("all_reduce", "replicate", size // layout.sharding_ranks)] if shard == "shard" else []
        return [Collective("reduce_scatter", shard, size), *whole]

    def _shard(self, axes: str) -> str:
        layout = self.request.layout
        return "shard" if 0 < layout.shard < layout.dp * layout.cp and axes == "dp" else axes

    def _sums(self, rank: int) -> Iterator[Issued]:
        """The sum over tp of gradients of what is whole on all ranks, in one, where parameters are not sharded."""
        units = [unit for stage in self.shape.plan.stages_of(rank) for unit in self.stages[stage]]
        size = (
            sum(sum(unit.segment.summed_parameters) for unit in units) * DTYPE_BYTES[self.request.stack.gradient_dtype]
        )
        if size:
            yield Issued(-1, -1, None, Collective("all_reduce", "tp", size))
