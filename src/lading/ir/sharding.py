"""Sharding: each rank keeps a shard of parameters, gradients and optimizer states, in units that are gathered together.

A unit is a few parameters of one dtype that are used one after another, side by side in one storage (``whole``), padded
to as many shards of equal length as there are ranks. Gradients of a unit are copied side by side in the same way,
reduced, and each rank keeps its shard; the optimizer moves a shard of the parameters, with states as long as that. So
a step of shards is the step of one device whose parameters are the units: ``lading.ir.expand`` accumulates, clips and
updates them as any others. Around it, two passes: ``shard_parameters`` makes the units of a captured micro-batch,
``unshard_parameters`` gets the whole parameters from the shards.

[Note: whole parameters] With ZeRO 1 and 2 the whole lasts from step to step: of each rank its part is copied out,
updated, and gathered back into the whole. With ZeRO 3 the shard lasts, and the whole is an ordinary storage that an
operation UNSHARD makes, one unit ahead of its first use, and that is gone after its last. Whether it stays between
forward and backward is a gap like others: kept, or dropped (resharded) and made again (unsharded again).

[Note: equal programs] Every shard is as long on every rank, so that ranks have one Program. What no parameter fills is
zeros. Parameters begin at whole cache lines, as they do alone, so that kernels give the same bits.

[Note: placed apart] With tensor parallel, a rank has its runs of some parameters, and all of others. A unit has
parameters of one kind: the norm of all gradients adds up the first over the ranks, and counts the second once.

[Note: sums over tokens] With context parallel, ranks that share a sequence cut parameters between them, too. The
gradient of a rank is then of its tokens: units are reduced to the sum over those ranks, the mean over replicas.

[Note: whole blocks] Where blocks of a parameter's elements share a number of a state (a scale), parameters and shards
begin at whole blocks: ranks have the blocks of one process. Parameters without are in other units.

[Note: owners] What a rule for matrices moves is in units of matrices of one shape, of which each rank has as many whole
ones: its shard is a stack of them, which that rule moves as any stack. Matrices that are missing in the last are zeros.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from types import MappingProxyType
from typing import cast

from lading.errors import ConfigError
from lading.ir.defer import moved_blocks
from lading.ir.graph import (
    DTYPE_BYTES,
    Arg,
    Literal,
    Op,
    OpKind,
    Parameter,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tensor,
    TensorPlacement,
    row_major,
)
from lading.ir.layout import SHARDED, Layout
from lading.ir.reduction import ALL_REDUCE, REDUCE_SCATTER, in_step_with_network

#: Gathers the shards of all ranks into a whole that it makes, or that it writes again.
UNSHARD, GATHER_INTO = "c10d.allgather.default", "c10d.allgather_.default"
GATHERS = frozenset((UNSHARD, GATHER_INTO))
#: Copies a rank's own shard out of a whole.
OWN_SHARD = "c10d.own_shard.default"
#: Elements at whose multiples parameters and shards begin: a cache line of float32, a vector of every CPU.
_ALIGNED = 16
_BLOCK = re.compile(r"(.*?\.\d+)\.")
#: A run of parameters outside the blocks that is smaller than this part of the largest run joins the one before.
_SMALL = 8


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """Parameters that are gathered together.

    Attributes:
        name: Name, for people.
        whole: Storage of its parameters side by side.
        shard: Tensor of a rank's part of it, one dim.
        ranks: Number of shards.
        over: Axes of the ranks that have them, as ``Layout.across`` joins them.
        lasts: Whether the whole lasts from step to step; else the shard does. See [Note: whole parameters].
    """

    name: str
    whole: int
    shard: int
    ranks: int
    over: str
    lasts: bool = False

    @property
    def parameter(self) -> str:
        """Name of the shard as a parameter, of which its states' names begin."""
        return f"{self.name}.shard"


#: Operations of a captured micro-batch behind which one of its sharded form stands: itself, or what a copy copies.
Origins = tuple[tuple[int, ...], ...]


def shard_parameters(
    captured: StepGraph,
    layout: Layout,
    unit_keys: Mapping[str, object] = MappingProxyType({}),
    matrices: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    blocks: Mapping[str, int] = MappingProxyType({}),
) -> tuple[StepGraph, tuple[GatheredUnit, ...], Origins]:
    """Put the parameters of a captured micro-batch side by side in units, whose shards are trained in their place.

    ``parameters`` of the graph are then the shards, each with the unit's gradients side by side, not reduced yet.

    Args:
        unit_keys: Parameters in which this differs, by first name, are in units of their own.
        matrices: Rows of the parts of each parameter that is moved as a whole, by its tensor. See [Note: owners].
        blocks: Elements that share a number of a state, by a parameter's first name. See [Note: whole blocks].

    Returns:
        The graph, its units, and for each of its operations the captured ones behind which it stands.

    Raises:
        ConfigError: a parameter does not lie in memory row by row, or shares memory with another.
    """
    return _Sharder(captured, layout, unit_keys, matrices, blocks).sharded()


def unshard_parameters(
    step: StepGraph, captured: StepGraph, units: Sequence[GatheredUnit], layout: Layout
) -> StepGraph:
    """Add what gathers the whole parameters to the step of their shards; parameters are again those ``captured``.

    Args:
        step: ``lading.ir.expand.expand`` of what ``shard_parameters`` returned.
        captured: What was given to ``shard_parameters``.
    """
    return _Unsharder(step, units, layout).unsharded(captured)


def units_of(graph: StepGraph) -> dict[int, GatheredUnit]:
    """List the units of a step by the storage of the whole; empty where nothing is sharded."""
    units: dict[int, GatheredUnit] = {}
    for op in graph.ops:
        if op.name not in (UNSHARD, OWN_SHARD):
            continue
        lasts = op.name == OWN_SHARD
        source, output = op.inputs[0], op.outputs[0]
        unsharded, shard = (graph.storage_of(source), output) if lasts else (graph.storage_of(output), source)
        facts = dict(op.kwargs)
        ranks, over = cast("int", facts["ranks"]), cast("str", facts["over"])
        units.setdefault(unsharded, GatheredUnit(op.module, unsharded, shard, ranks, over, lasts))
    return units


@dataclass(frozen=True, slots=True)
class _Members:
    """Parameters of a unit by number, the element of the whole where each begins, and the shape of a shard."""

    numbers: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def shard_elements(self) -> int:
        """Number of elements of a shard."""
        return prod(self.shape)


class _Sharder:
    """Builder of a micro-batch whose parameters lie in units.

    Attributes:
        place: Whole, and the element of it where a parameter begins, by the parameter's own storage.
        after: Copies of gradients that come behind an operation, by its number, each with all that it comes behind.
    """

    def __init__(
        self,
        captured: StepGraph,
        layout: Layout,
        unit_keys: Mapping[str, object],
        matrices: Mapping[int, tuple[int, ...]],
        blocks: Mapping[str, int],
    ) -> None:
        self.unit_keys, self.matrices, self.blocks = unit_keys, matrices, blocks
        self.graph, self.ranks, self.layout = captured, layout.shards, layout
        self.storages, self.tensors = list(captured.storages), list(captured.tensors)
        self.place: dict[int, tuple[int, int]] = {}
        self.after: dict[int, list[tuple[Op, tuple[int, ...]]]] = {}
        self.zeros: dict[str, int] = {}
        self.final = {
            captured.storage_of(t): index for index, op in enumerate(captured.ops) for t in (*op.outputs, *op.mutates)
        }

    def sharded(self) -> tuple[StepGraph, tuple[GatheredUnit, ...], Origins]:
        self._check()
        units: list[GatheredUnit] = []
        parameters: list[Parameter] = []
        runs = [*map(self._aligned, self._runs()), *map(self._stacked, self._runs_of_matrices())]
        for members in runs:
            unit = self._unit(f"unit {len(units)}", members)
            units.append(unit)
            flat = self.tensors[unit.shard]
            shard = self._tensor(dataclasses.replace(flat, shape=members.shape, stride=row_major(members.shape)))
            first, gradients = self.graph.parameters[members.numbers[0]], self._gradients(unit, members)
            placement = _unit_placement(first.placement, flat.shape[0])
            parameters.append(Parameter((unit.parameter,), shard, gradients, placement, first.gradient_terms))
        captured = enumerate(self.graph.ops)
        rows = [row for index, op in captured for row in ((op, (index,)), *self.after.get(index, ()))]
        cut = {n for n, p in enumerate(self.graph.parameters) if self.graph.storage_of(p.tensor) in self.place}
        uncut = [p for n, p in enumerate(self.graph.parameters) if n not in cut]
        for index, tensor in enumerate(self.tensors):
            if tensor.storage in self.place:
                unit_storage, start = self.place[tensor.storage]
                self.tensors[index] = dataclasses.replace(tensor, storage=unit_storage, offset=tensor.offset + start)
        for storage in self.place:  # nothing lies there any more
            self.storages[storage] = dataclasses.replace(self.storages[storage], size_bytes=0, role=Role.WORKSPACE)
        graph = dataclasses.replace(
            self.graph,
            storages=tuple(self.storages),
            tensors=tuple(self.tensors),
            ops=tuple(op for op, _ in rows),
            parameters=(*parameters, *uncut),
        )
        return graph, tuple(units), tuple(behind for _, behind in rows)

    def _check(self) -> None:
        """Refuse parameters that cannot be laid side by side."""
        owners: dict[int, str] = {}
        for parameter in self.graph.parameters:
            tensor, name = self.graph.tensors[parameter.tensor], parameter.names[0]
            owner = owners.setdefault(tensor.storage, name)
            if owner != name or not tensor.is_row_major or not tensor.spans(self.storages[tensor.storage].size_bytes):
                reason = f"memory shared with {owner}" if owner != name else f"strides {tensor.stride}"
                raise ConfigError(
                    f"layout: expected parameters that lie in memory row by row, to be cut into shards, found {name} "
                    f'with {reason}; make it contiguous, or train replicas (layout="dp{self.layout.dp}")'
                )

    def _used(self) -> list[int]:
        """List the parameters that are cut, by number, in the order in which forward first uses them."""
        graph = self.graph
        first: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            for tensor in op.inputs:
                first.setdefault(graph.storage_of(tensor), index)
        used = [
            (first[graph.storage_of(p.tensor)], n)
            for n, p in enumerate(graph.parameters)
            if graph.storage_of(p.tensor) in first
            and not p.is_on_one_rank
            and (p.gradient is not None or self.layout.cuts_parameters)
        ]
        return [number for _, number in sorted(used)]

    def _kind(self, parameter: Parameter) -> tuple[object, ...]:
        """Say what parameters of one unit have in common, whatever their shapes. See [Note: placed apart]."""
        name = parameter.names[0]
        return (
            parameter.placement is not None,
            parameter.gradient_terms,
            self.unit_keys.get(name),
            self.blocks.get(name),
        )

    def _runs_of_matrices(self) -> Iterator[list[int]]:
        """Yield the matrices of each unit, by number. See [Note: owners]."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number in self._used():
            parameter = self.graph.parameters[number]
            if parameter.tensor in self.matrices:
                view, parts = self.graph.tensors[parameter.tensor], self.matrices[parameter.tensor]
                kinds.setdefault((view.dtype, view.shape, parts, *self._kind(parameter)), []).append(number)
        for numbers in kinds.values():
            round_bytes = self.ranks * self._size_bytes(numbers[:1])
            rounds = 1 if self.layout.cuts_parameters else max(1, -(-self.layout.bucket_bytes // round_bytes))
            for start in range(0, len(numbers), rounds * self.ranks):
                yield numbers[start : start + rounds * self.ranks]

    def _stacked(self, numbers: Sequence[int]) -> _Members:
        """Lay matrices of one shape side by side, as many whole ones on each rank."""
        shape = self.graph.tensors[self.graph.parameters[numbers[0]].tensor].shape
        matrices_per_rank = -(-len(numbers) // self.ranks)
        stack = shape if matrices_per_rank == 1 else (matrices_per_rank * prod(shape[:-2]), *shape[-2:])
        return _Members(tuple(numbers), tuple(prod(shape) * place for place in range(len(numbers))), stack)

    def _runs(self) -> Iterator[list[int]]:
        """Yield the parameters of each unit of elements, by number, in the order in which forward first uses them."""
        graph = self.graph
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number in self._used():
            parameter = graph.parameters[number]
            if parameter.tensor in self.matrices:
                continue
            dtype, trained = graph.tensors[parameter.tensor].dtype, parameter.gradient is not None
            kinds.setdefault((dtype, trained, *self._kind(parameter)), []).append(number)
        if self.layout.cuts_parameters:
            runs = [self._blocks(numbers) for numbers in kinds.values()]
            largest = max((self._size_bytes(run) for group in runs for run in group), default=0)
            for group in runs:
                yield from self._joined(group, largest)
        else:
            for numbers in kinds.values():
                yield from self._by_bytes(numbers)

    def _by_bytes(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Cut a run of parameters into units of at least ``bucket_bytes``."""
        unit: list[int] = []
        for number in numbers:
            unit.append(number)
            if self._size_bytes(unit) >= self.layout.bucket_bytes:
                yield unit
                unit = []
        if unit:
            yield unit

    def _blocks(self, numbers: Sequence[int]) -> list[list[int]]:
        """Cut a run of parameters where one block of the model ends and the next begins."""
        runs: list[list[int]] = []
        last: str | None = None
        for number in numbers:
            match = _BLOCK.match(self.graph.parameters[number].names[0])
            block = match[1] if match else ""
            if block != last:
                runs.append([])
            runs[-1].append(number)
            last = block
        return runs

    def _joined(self, runs: Sequence[Sequence[int]], largest_bytes: int) -> Iterator[list[int]]:
        """Yield runs of parameters, small ones with the run before."""
        unit: list[int] = []
        for run in runs:
            if unit and self._size_bytes(run) * _SMALL >= largest_bytes:
                yield unit
                unit = []
            unit = [*unit, *run]
        yield unit

    def _size_bytes(self, numbers: Sequence[int]) -> int:
        return sum(self.graph.tensors[self.graph.parameters[number].tensor].size_bytes for number in numbers)

    def _aligned(self, numbers: Sequence[int]) -> _Members:
        """Lay parameters side by side. See [Note: equal programs] and [Note: whole blocks]."""
        unit = lcm(_ALIGNED, self.blocks.get(self.graph.parameters[numbers[0]].names[0], 1))
        starts: list[int] = []
        end = 0
        for number in numbers:
            starts.append(end)
            end += _up(prod(self.graph.tensors[self.graph.parameters[number].tensor].shape), unit)
        return _Members(tuple(numbers), tuple(starts), (_up(-(-end // self.ranks), unit),))

    def _unit(self, name: str, members: _Members) -> GatheredUnit:
        """Make the storages of a unit, both lasting as yet; its parameters move into the whole."""
        dtype = self.graph.tensors[self.graph.parameters[members.numbers[0]].tensor].dtype
        size = members.shard_elements * DTYPE_BYTES[dtype]
        unsharded = self._storage(name, size * self.ranks, Role.PARAMETER)
        shard = self._flat(self._storage(f"{name}.shard", size, Role.PARAMETER), dtype, members.shard_elements)
        for number, start in zip(members.numbers, members.starts, strict=True):
            self.place[self.graph.storage_of(self.graph.parameters[number].tensor)] = unsharded, start
        over = cast("str", dict(self.layout.across(*SHARDED))["over"])
        return GatheredUnit(name, unsharded, shard, self.ranks, over, not self.layout.cuts_parameters)

    def _gradients(self, unit: GatheredUnit, members: _Members) -> int | None:
        """Copy the gradients of a unit side by side behind the last one's last write; None without gradients."""
        parameters = [self.graph.parameters[number] for number in members.numbers]
        gradients = [p.gradient for p in parameters if p.gradient is not None]
        if not gradients:
            return None
        ops = list[Op]()
        dtype, count = self.graph.tensors[gradients[0]].dtype, members.shard_elements * self.ranks
        pieces: list[int] = []
        ends = (*members.starts[1:], count)
        for gradient, start, end in zip(gradients, members.starts, ends, strict=True):
            elements = prod(self.graph.tensors[gradient].shape)
            pieces.append(self._row_by_row(gradient, unit.name, ops))
            if padding := end - start - elements:
                pieces.append(self._tensor(Tensor(self._zeros(dtype), dtype, (padding,), (0,))))
        flat = pieces[0]
        if len(pieces) > 1:
            size = count * DTYPE_BYTES[dtype]
            flat = self._flat(self._storage(f"{unit.name} gradients", size, Role.GRADIENT), dtype, count)
            ops.append(_copy("aten.cat.default", (tuple(map(Ref, pieces)),), (), tuple(pieces), flat, unit.name, size))
        last_writes = tuple(sorted({self.final[self.graph.storage_of(gradient)] for gradient in gradients}))
        self.after.setdefault(last_writes[-1], []).extend((op, last_writes) for op in ops)
        return flat

    def _row_by_row(self, gradient: int, module: str, ops: list[Op]) -> int:
        """Make the view of a gradient in which its elements lie row by row; of a copy where they do not."""
        tensor = self.tensors[gradient]
        count = prod(tensor.shape)
        if tensor.is_row_major:
            return self._tensor(dataclasses.replace(tensor, shape=(count,), stride=(1,)))
        size = count * DTYPE_BYTES[tensor.dtype]
        storage = self._storage(f"{self.graph.storages[tensor.storage].name}.dense", size, Role.GRADIENT)
        copy = self._tensor(Tensor(storage, tensor.dtype, tensor.shape, row_major(tensor.shape)))
        layout = (("memory_format", Literal("memory_format", "contiguous_format")),)
        ops.append(_copy("aten.clone.default", (Ref(gradient),), layout, (gradient,), copy, module, size))
        return self._flat(storage, tensor.dtype, count)

    def _zeros(self, dtype: str) -> int:
        """Storage of a zero, which fills what no parameter does."""
        if dtype not in self.zeros:
            size = DTYPE_BYTES[dtype]
            self.storages.append(Storage("zero", size, Role.CONSTANT, bytes(size)))
            self.zeros[dtype] = len(self.storages) - 1
        return self.zeros[dtype]

    def _storage(self, name: str, size_bytes: int, role: Role) -> int:
        self.storages.append(Storage(name, size_bytes, role))
        return len(self.storages) - 1

    def _flat(self, storage: int, dtype: str, elements: int) -> int:
        return self._tensor(Tensor(storage, dtype, (elements,), (1,)))

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _unit_placement(placement: TensorPlacement | None, elements: int) -> TensorPlacement | None:
    """Make the placement of a unit's shard, of so many elements, whose parameters have this one; None as they have.

    A norm then adds up what those ranks have. See [Note: placed apart].
    """
    if placement is None:
        return None
    count = elements * placement.ranks
    return TensorPlacement((count,), 0, (count,), placement.over, placement.ranks)


class _Unsharder:
    """Builder of the step in which whole parameters are made from shards. See [Note: whole parameters]."""

    def __init__(self, step: StepGraph, units: Sequence[GatheredUnit], layout: Layout) -> None:
        self.step, self.units, self.layout = step, units, layout
        self.tensors = list(step.tensors)
        self.before: dict[int, list[Op]] = {}
        self.after: dict[int, list[Op]] = {}

    def unsharded(self, captured: StepGraph) -> StepGraph:
        step, storages = self.step, list(self.step.storages)
        temporary = [step.storage_of(u.shard) if u.lasts else u.whole for u in self.units]
        for storage in temporary:
            storages[storage] = dataclasses.replace(storages[storage], role=Role.WORKSPACE)
        if self.layout.cuts_parameters:
            self._unshard_ahead()
        else:
            for unit in self.units:
                self._gather_back(unit)
        rows: list[tuple[Op, int | None]] = []
        for index, op in enumerate(step.ops):
            rows += [(new, None) for new in self.before.get(index, ())]
            rows.append((op, index))
            rows += [(new, None) for new in self.after.get(index, ())]
        for name in (REDUCE_SCATTER, ALL_REDUCE):
            rows = in_step_with_network(rows, self.tensors, name)
        place = {old: new for new, (_, old) in enumerate(rows) if old is not None}
        graph = dataclasses.replace(
            step,
            storages=tuple(storages),
            tensors=tuple(self.tensors),
            ops=tuple(op for op, _ in rows),
            parameters=captured.parameters,
            blocks=moved_blocks(step, place),
        )
        graph.validate()
        return graph

    def _unshard_ahead(self) -> None:
        """Make each whole where the unit before it is first used, to be gathered beside that one's computing."""
        first: dict[int, int] = {}
        for index, reads in enumerate(self.step.op_reads):
            for storage in reads:
                first.setdefault(storage, index)
        order = sorted(self.units, key=lambda unit: first[unit.whole])
        starts = [first[unit.whole] for unit in order]
        for unit, start in zip(order, [0, *starts][: len(order)], strict=True):
            unsharded = self._add_gathered_tensor(unit)
            self.before.setdefault(start, []).append(self._gathering(UNSHARD, unit, Phase.FORWARD, (unsharded,), ()))

    def _gather_back(self, unit: GatheredUnit) -> None:
        """Copy a rank's part of a whole out before its update, and gather it back behind what still reads the old."""
        step, shard = self.step, self.step.storage_of(unit.shard)
        updates = [i for i, op in enumerate(step.ops) if op.kind is OpKind.STEP and shard in step.op_writes[i]]
        readers = [i for i, reads in enumerate(step.op_reads) if unit.whole in reads]
        unsharded = self._add_gathered_tensor(unit)
        size = self.tensors[unit.shard].size_bytes
        copy = _copy(
            OWN_SHARD, (Ref(unsharded),), self.layout.across(*SHARDED), (unsharded,), unit.shard, unit.name, size
        )
        self.before.setdefault(updates[0], []).append(dataclasses.replace(copy, phase=Phase.OPTIMIZER))
        gather = self._gathering(GATHER_INTO, unit, Phase.OPTIMIZER, (), (unsharded,))
        self.after.setdefault(max(*updates, *readers), []).append(gather)

    def _add_gathered_tensor(self, unit: GatheredUnit) -> int:
        """Make the tensor of all elements of a unit."""
        shard = self.tensors[unit.shard]
        self.tensors.append(Tensor(unit.whole, shard.dtype, (shard.shape[0] * unit.ranks,), (1,)))
        return len(self.tensors) - 1

    def _gathering(
        self, name: str, unit: GatheredUnit, phase: Phase, outputs: tuple[int, ...], mutates: tuple[int, ...]
    ) -> Op:
        size = self.tensors[unit.shard].size_bytes
        refs = (Ref(unit.shard), *map(Ref, mutates))
        return Op(
            name=name, phase=phase, args=refs, kwargs=self.layout.across(*SHARDED), inputs=(unit.shard, *mutates),
            outputs=outputs, results=outputs or (None,), mutates=mutates, module=unit.name, kind=OpKind.COLLECTIVE,
            bytes_read=size, bytes_written=size * unit.ranks,
        )  # fmt: skip


def _copy(
    name: str,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    inputs: tuple[int, ...],
    output: int,
    module: str,
    size_bytes: int,
) -> Op:
    return Op(
        name=name, phase=Phase.BACKWARD, args=args, kwargs=kwargs, inputs=inputs, outputs=(output,), results=(output,),
        mutates=(), module=module, kind=OpKind.COPY, bytes_read=size_bytes, bytes_written=size_bytes,
    )  # fmt: skip


def _up(elements: int, unit: int) -> int:
    return -(-elements // unit) * unit
