"""Named values: parameters, buffers and states by their names, wherever their parts lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Placement, StepGraph
from lading.ir.sharding import units_of
from lading.ir.update_ops import matrix_rule_of
from lading.runtime.binding import Reducer
from lading.runtime.executor import Executor

if TYPE_CHECKING:
    from lading.runtime.job import Replicas


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
    owners: str = "pp"
    placement: Placement | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part in reading it."""
        return self.ranks > 1 or self.owner is not None or self.placement is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of all its elements."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def values_of(graph: StepGraph) -> dict[str, Value]:
    """Values that last from step to step, by name: parameters, buffers, then states."""
    named = [*((p.names[0], p.tensor) for p in graph.parameters), *graph.buffers]
    single = [(name, graph.tensors[tensor]) for name, tensor in named]
    values = {name: Value(tensor.dtype, tensor.shape, (tensor.storage,)) for name, tensor in single}
    placed = {p.names[0]: (p.placement, graph.tensors[p.tensor].shape) for p in graph.parameters if p.placement}
    for name, (placement, _) in placed.items():
        values |= _placed(name, values[name], placement)
    units = units_of(graph)
    members: dict[str, list[str]] = {}
    for parameter in graph.parameters:
        tensor, name = graph.tensors[parameter.tensor], parameter.names[0]
        if (unit := units.get(tensor.storage)) is None:
            continue
        members.setdefault(unit.parameter, []).append(name)
        storage, ranks = (unit.whole, 1) if unit.lasts else (graph.storage_of(unit.shard), unit.ranks)
        values[name] = Value(tensor.dtype, tensor.shape, (storage,), tensor.offset, ranks, unit.over)
    by_name = {unit.parameter: unit for unit in units.values()}
    starts = {p.names[0]: graph.tensors[p.tensor].offset for p in graph.parameters}
    stacks = {graph.storage_of(op.inputs[0]) for op in graph.ops if matrix_rule_of(op) is not None}
    for state in graph.states:
        storages = tuple(map(graph.storage_of, state.parts))
        unit = by_name.get(".".join(state.name.split(".")[:2]))
        if unit is None:
            placement, shape = placed.get(state.name.rpartition(".")[0], (None, ()))
            value = Value(state.dtype, state.shape, storages)
            if placement is not None and (placement.names or state.shape == shape):
                values |= _placed(state.name, value, placement)
            else:
                values[state.name] = value
            continue
        suffix = state.name.removeprefix(f"{unit.parameter}.")
        for name in members[unit.parameter]:
            shape, start = values[name].shape, starts[name]
            if not state.shape:
                values[f"{name}.{suffix}"] = Value(state.dtype, (), storages)
                continue
            if graph.storage_of(unit.shard) in stacks and suffix != "master":
                count = graph.tensors[unit.shard].shape[0] // prod(shape[-2:])
                each = state.shape if count == 1 else (*shape[:-2], *state.shape[1:])
                shape, start = each, start // prod(shape) * prod(each)
            values[f"{name}.{suffix}"] = Value(state.dtype, shape, storages, start, unit.ranks, unit.over)
    return values


def _placed(name: str, value: Value, placement: Placement) -> dict[str, Value]:
    """Values by name that lie in the place of one: of all ranks those that each has alone, else runs of one."""
    if not placement.names:
        return {name: dataclasses.replace(value, shape=placement.shape, placement=placement)}
    state = name.removeprefix(placement.names[0])
    return {
        f"{each}{state}": dataclasses.replace(value, owner=rank, owners=placement.over)
        for rank, each in enumerate(placement.names)
    }


def is_here(value: Value, ranks: Reducer | None) -> bool:
    """Whether this rank has a value, or a shard of it, in its storages."""
    return value.owner is None or (ranks is not None and ranks.number(value.owners) == value.owner)


def values_here(values: Mapping[str, Value], ranks: Reducer | None) -> dict[str, Value]:
    """Leave out the storages of values that this rank has not, where another value is in their place."""
    return {n: v if is_here(v, ranks) else dataclasses.replace(v, storages=()) for n, v in values.items()}


def read_value(executor: Executor, value: Value, ranks: Reducer | None = None) -> torch.Tensor:
    """Copy all parts of a value into one tensor of the value's shape.

    Args:
        ranks: This rank and the others, some of which hold it or a shard of it; all call this.
    """
    if value.owner is not None:
        return _from_owner(executor, value, ranks)
    if value.placement is not None:
        return _from_runs(executor, value, value.placement, ranks)
    parts = [executor.read_storage(storage) for storage in value.storages]
    if value.start is None:
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts]).view(value.shape)
    flat = torch.cat([part.view(getattr(torch, value.dtype)).flatten() for part in parts])
    if value.ranks > 1:
        assert ranks is not None
        shard, flat = flat, flat.new_empty(flat.numel() * value.ranks)
        ranks.all_gather(flat, shard, value.over)
    return flat[value.start : value.start + prod(value.shape)].view(value.shape).clone()


def _from_runs(executor: Executor, value: Value, placement: Placement, ranks: Reducer | None) -> torch.Tensor:
    """Gather the runs of all ranks, and lay them in order."""
    assert ranks is not None
    own = local_value(value)
    mine = read_value(executor, own, ranks).contiguous()
    flat = mine.new_empty(mine.numel() * placement.ranks)
    ranks.all_gather(flat, mine.flatten(), placement.over)
    shards = flat.view(placement.ranks, *own.shape).unbind()
    each = [shard.split([part // placement.ranks for part in placement.lengths], placement.dim) for shard in shards]
    return torch.cat([run for part in zip(*each, strict=True) for run in part], placement.dim)


def local_value(value: Value) -> Value:
    """What this rank has of a value of which ranks have runs, as a value by itself."""
    assert value.placement is not None
    shape = list(value.shape)
    shape[value.placement.dim] //= value.placement.ranks
    return dataclasses.replace(value, shape=tuple(shape), placement=None)


def own_runs(tensor: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """Copy the runs of a rank out of a whole tensor.

    Args:
        rank: Number of the rank among those along ``placement.over``.
    """
    parts = tensor.detach().split(placement.lengths, placement.dim)
    return torch.cat([part.chunk(placement.ranks, placement.dim)[rank] for part in parts], placement.dim)


def _from_owner(executor: Executor, value: Value, ranks: Reducer | None) -> torch.Tensor:
    """Copy a value that a rank of a pipeline holds to all ranks."""
    assert ranks is not None
    assert value.owner is not None
    if is_here(value, ranks):
        held = read_value(executor, dataclasses.replace(value, owner=None), ranks).contiguous()
    else:
        held = torch.empty(value.shape, dtype=getattr(torch, value.dtype))
    ranks.broadcast(held, value.owner, value.owners)
    return held


def values_of_ranks(graphs: Sequence[StepGraph], rank: int) -> dict[str, Value]:
    """All values of a pipeline by name, as one rank has them: its own, and whose the others are.

    Args:
        graphs: Whole step of each rank.
    """
    each = [values_of(graph) for graph in graphs]
    trained = [{p.names[0] for p in graph.parameters if p.gradient is not None} for graph in graphs]
    values: dict[str, Value] = {}
    for name in dict.fromkeys(name for held in each for name in held):
        having = [number for number, held in enumerate(each) if name in held]
        owner = next((number for number in having if name in trained[number]), having[0])
        if rank in having:
            values[name] = dataclasses.replace(each[rank][name], owner=owner)
        else:
            values[name] = dataclasses.replace(each[owner][name], storages=(), owner=owner)
    return values


def write_value(executor: Executor, value: Value, tensor: torch.Tensor, rank: int = 0) -> None:
    """Set what this rank holds of a value that lies between others."""
    assert value.start is not None
    flat, end = tensor.detach().reshape(-1), value.start + prod(value.shape)
    parts = [executor.read_storage(storage).view(flat.dtype).flatten() for storage in value.storages]
    begin = rank * sum(part.numel() for part in parts) if value.ranks > 1 else 0
    for storage, part in zip(value.storages, parts, strict=True):
        low, high = max(begin, value.start), min(begin + part.numel(), end)
        if low < high:
            part[low - begin : high - begin] = flat[low - value.start : high - value.start]
            executor.write_storage(storage, part.view(torch.uint8))
        begin += part.numel()


class CarriedValues:
    """Values in ordinary memory, on the way from one plan of a step to the next.

    Args:
        executor: Executor that has them.
        values: All values of the step.
        beside: Names of those that others take care of.
        ranks: Ranks that hold them together, all of which make this at the same time.

    Attributes:
        tensors: Those that this rank brings along, by name: all where each rank has all, of a pipeline its own.
    """

    def __init__(
        self, executor: Executor, values: Mapping[str, Value], beside: Iterable[str], ranks: Replicas | None
    ) -> None:
        left_out = {*beside}
        self._values = {name: value for name, value in values.items() if name not in left_out}
        self._sources = {} if ranks is None else {n: ranks.first_of(v.owner, v.owners) for n, v in self._values.items()}
        self.tensors = {
            name: read_value(executor, dataclasses.replace(value, owner=None), ranks)
            for name, value in self._values.items()
            if is_here(value, ranks)
        }

    def check(self, values: Iterable[str]) -> None:
        """Refuse a step that keeps other states of a parameter; it may keep none.

        Args:
            values: Names of all values of the step.

        Raises:
            ConfigError: it does; says which.
        """
        before, after = _suffixes(self._values), _suffixes(values)
        for name, states in before.items():
            if after.get(name, states) != states:
                raise ConfigError(
                    f"resume: expected a plan that keeps {', '.join(sorted(states))} of {name}, as before, found one "
                    f"that keeps {', '.join(sorted(after[name]))}; plan with the same optimizer and master_weights"
                )

    def spread(self, ranks: Replicas | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Give every rank each value in turn, whoever brought it.

        Args:
            ranks: Ranks that go on together: those that were before, in any layout.
        """
        for name, value in self._values.items():
            tensor = self.tensors.pop(name, None)
            if value.owner is not None and ranks is not None:
                tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype)) if tensor is None else tensor
                ranks.share(tensor, self._sources[name])
            assert tensor is not None, "a plan for one process is refused where there are several ranks"
            yield name, tensor


def _suffixes(names: Iterable[str]) -> dict[str, set[str]]:
    """Last parts of dotted names, by what stands before them."""
    suffixes: dict[str, set[str]] = {}
    for name in names:
        before, _, last = name.rpartition(".")
        suffixes.setdefault(before, set()).add(last)
    return suffixes


class Reader(Protocol):
    """Anything that reads values by name."""

    def value(self, name: str) -> torch.Tensor:
        """Copy the value of this name."""
        ...


class StateDict(Mapping[str, torch.Tensor]):
    """State dict of a trainer whose values are read one at a time, as they are asked for.

    Args:
        keys: Maps each name of the state dict to the trainer's name.
    """

    def __init__(self, reader: Reader, keys: Mapping[str, str]) -> None:
        self._reader, self._keys = reader, keys

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._reader.value(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __reduce__(self) -> Any:
        raise ConfigError(
            "expected a dict to save, got a view of a trainer's values; use dict(trainer.state_dict()), which has "
            "all of them in memory at once, or trainer.save(folder)"
        )


def state_keys(model: torch.nn.Module | None, buffers: Iterable[str], first_name: Mapping[str, str]) -> dict[str, str]:
    """Map each entry of a model's state dict, or without a model each parameter and buffer, to the trainer's name."""
    if model is None:
        return {**first_name, **{name: name for name in buffers}}
    names = {id(tensor): name for name, tensor in tensors_of(model)}
    keys = {key: names[id(t)] for key, t in model.state_dict(keep_vars=True).items() if id(t) in names}
    missing = {alias: name for alias, name in first_name.items() if name not in keys.values()}
    return {**keys, **missing}


def tensors_of(model: torch.nn.Module, *, tied: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, under all names when ``tied``."""
    return [*model.named_parameters(remove_duplicate=not tied), *model.named_buffers(remove_duplicate=not tied)]


def first_few(names: Sequence[str]) -> str:
    """List the first three names, and say how many there are besides."""
    return ", ".join([*names[:3], *([f"{len(names) - 3} more"] if len(names) > 3 else [])])
