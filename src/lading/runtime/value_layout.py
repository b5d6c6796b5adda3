"""Layout of values: parameters, buffers and states by name, and which storages of which ranks hold each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from lading.ir.graph import DTYPE_BYTES, Parameter, StepGraph, TensorPlacement
from lading.ir.sharding import units_of
from lading.ir.update_ops import matrix_rule_of, rule_of
from lading.optim.rule import ParameterRule

#: Axis of a layout along which the stages of a pipeline lie.
STAGES = "pp"


@dataclass(frozen=True, slots=True)
class Value:
    """Parameter, buffer or state by name: ``storages`` hold its elements one after another.

    Attributes:
        start: Element of what the storages hold at which it begins, where they hold other values too; None where they
            hold nothing else.
        ranks: Number of ranks whose storages, one rank after another, hold it; 1 where a rank has all of it.
        over: Axes of the layout along which these ranks lie.
        owner: Rank that updates it, whose storages hold it; None where no rank but this is asked.
        owners: Axes of the layout along which that rank is numbered.
        placement: Dim of which ranks along "tp" have runs; None where a rank has all elements.
    """

    dtype: str
    shape: tuple[int, ...]
    storages: tuple[int, ...]
    start: int | None = None
    ranks: int = 1
    over: str = ""
    owner: int | None = None
    owners: str = STAGES
    placement: TensorPlacement | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part in reading it."""
        return self.ranks > 1 or self.owner is not None or self.placement is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of all its elements."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class NumberedRank(Protocol):
    """Rank that knows its numbers among others."""

    def number(self, over: str) -> int:
        """Number of this one among the ranks that lie along some axes."""
        ...


def values_of(graph: StepGraph) -> dict[str, Value]:
    """Values that last from step to step, by name: parameters, buffers, then states."""
    named = [*((p.names[0], p.tensor) for p in graph.parameters), *graph.buffers]
    single = [(name, graph.tensors[tensor]) for name, tensor in named]
    values = {name: Value(tensor.dtype, tensor.shape, graph.run_of(tensor.storage)) for name, tensor in single}
    placed = {p.names[0]: (p.placement, graph.tensors[p.tensor].shape) for p in graph.parameters if p.placement}
    units = units_of(graph)
    members: dict[str, list[str]] = {}
    for parameter in graph.parameters:
        tensor, name = graph.tensors[parameter.tensor], parameter.names[0]
        if (unit := units.get(tensor.storage)) is None:
            continue
        members.setdefault(unit.parameter, []).append(name)
        storage, ranks = (unit.whole, 1) if unit.lasts else (graph.storage_of(unit.shard), unit.ranks)
        values[name] = Value(tensor.dtype, tensor.shape, (storage,), tensor.offset, ranks, unit.over)
    local = dict(values)
    for name, (placement, _) in placed.items():
        values |= _placed(name, values[name], placement)
    by_name = {unit.parameter: unit for unit in units.values()}
    starts = {p.names[0]: graph.tensors[p.tensor].offset for p in graph.parameters}
    stacks = {graph.storage_of(op.inputs[0]) for op in graph.ops if matrix_rule_of(op) is not None}
    blocks = dict(_blocks(graph)) if units else {}
    for state in graph.states:
        storages = tuple(map(graph.storage_of, state.parts))
        unit = by_name.get(".".join(state.name.split(".")[:2]))
        if unit is None:
            placement, shape = placed.get(state.name.rpartition(".")[0], (None, ()))
            value = Value(state.dtype, state.shape, storages)
            is_whole = placement is not None and not placement.names and state.shape != shape  # a number
            values |= _placed(state.name, value, None if is_whole else placement)
            continue
        suffix = state.name.removeprefix(f"{unit.parameter}.")
        for name in members[unit.parameter]:
            shape, start = local[name].shape, starts[name]
            if not state.shape:
                values[f"{name}.{suffix}"] = Value(state.dtype, (), storages)
                continue
            if graph.storage_of(unit.shard) in stacks and suffix != "master":
                count = graph.tensors[unit.shard].shape[0] // prod(shape[-2:])
                piece_shape = state.shape if count == 1 else (*shape[:-2], *state.shape[1:])
                shape, start = piece_shape, start // prod(shape) * prod(piece_shape)
            elif (block := blocks.get((graph.storage_of(unit.shard), suffix), 1)) > 1:
                shape, start = (-(-prod(shape) // block),), start // block
            value = Value(state.dtype, shape, storages, start, unit.ranks, unit.over)
            values |= _placed(f"{name}.{suffix}", value, placed.get(name, (None, ()))[0])
    return values


def _blocks(graph: StepGraph) -> Iterator[tuple[tuple[int, str], int]]:
    """Yield the elements of a parameter that share a number of a state, by its storage and the state's last name."""
    for op in graph.ops:
        if isinstance(rule := rule_of(op), ParameterRule):
            for suffix, spec in rule.state_specs((1,)).items():
                yield (graph.storage_of(op.inputs[0]), suffix), spec.block


def _placed(name: str, value: Value, placement: TensorPlacement | None) -> dict[str, Value]:
    """Values by name that lie in the place of one: of all ranks those that each has alone, else runs of one."""
    if placement is None:
        return {name: value}
    if not placement.names:
        return {name: dataclasses.replace(value, shape=placement.shape, placement=placement)}
    state = name.removeprefix(placement.names[0])
    return {
        f"{rank_name}{state}": dataclasses.replace(value, owner=rank, owners=placement.over)
        for rank, rank_name in enumerate(placement.names)
    }


def is_here(value: Value, ranks: NumberedRank | None) -> bool:
    """Whether this rank has a value, or a shard of it, in its storages."""
    return value.owner is None or (ranks is not None and ranks.number(value.owners) == value.owner)


def values_here(values: Mapping[str, Value], ranks: NumberedRank | None) -> dict[str, Value]:
    """Leave out the storages of values that this rank has not, where another value is in their place.

    A stage that reads a weight which another updates has a copy of it.
    """
    local_names = {name for name, value in values.items() if value.owners == STAGES or is_here(value, ranks)}
    return {n: v if n in local_names else dataclasses.replace(v, storages=()) for n, v in values.items()}


def local_value(value: Value) -> Value:
    """Value by itself of the part that this rank has of one of which ranks have runs."""
    assert value.placement is not None
    shape = list(value.shape)
    shape[value.placement.dim] //= value.placement.ranks
    return dataclasses.replace(value, shape=tuple(shape), placement=None)


def values_of_ranks(graphs: Sequence[StepGraph], rank: int) -> dict[str, Value]:
    """All values of a pipeline by name, as one rank has them: its own, and whose the others are.

    Args:
        graphs: Whole step of each rank.
    """
    values_by_rank = [values_of(graph) for graph in graphs]
    trained = [{n for p in graph.parameters if p.gradient is not None for n in _slot_names(p)} for graph in graphs]
    placements = (p.placement for graph in graphs for p in graph.parameters)
    counts = {placement.over: placement.ranks for placement in placements if placement is not None}
    values: dict[str, Value] = {}
    for name in dict.fromkeys(name for rank_values in values_by_rank for name in rank_values):
        having = [number for number, rank_values in enumerate(values_by_rank) if name in rank_values]
        stage = next((number for number in having if name in trained[number]), having[0])
        value = (
            values_by_rank[rank][name]
            if rank in having
            else dataclasses.replace(values_by_rank[stage][name], storages=())
        )
        if value.owner is None:
            values[name] = dataclasses.replace(value, owner=stage)
        else:  # one rank's of a stage: stages lie the farthest apart
            number, owners = stage * counts[value.owners] + value.owner, f"{STAGES}/{value.owners}"
            values[name] = dataclasses.replace(value, owner=number, owners=owners)
    return values


def _slot_names(parameter: Parameter) -> tuple[str, ...]:
    """First names of the parameters that ranks have in one's place."""
    placed = () if parameter.placement is None else parameter.placement.names
    return placed or parameter.names[:1]
