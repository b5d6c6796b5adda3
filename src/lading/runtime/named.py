"""Named values: parameters, buffers and states by their names, wherever their parts lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lading.errors import ConfigError, StorageError, did_you_mean
from lading.ir.graph import DTYPE_BYTES, Parameter, StepGraph, TensorPlacement
from lading.ir.sharding import units_of
from lading.ir.update_ops import matrix_rule_of
from lading.optim.registry import optimizers_with
from lading.runtime.binding import Reducer
from lading.runtime.executor import Executor
from lading.runtime.shard_reads import ByteRange, own_runs, read_range, read_runs
from lading.units import MiB

if TYPE_CHECKING:
    from lading.runtime.job import Replicas


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
    values = {name: Value(tensor.dtype, tensor.shape, (tensor.storage,)) for name, tensor in single}
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
                each = state.shape if count == 1 else (*shape[:-2], *state.shape[1:])
                shape, start = each, start // prod(shape) * prod(each)
            value = Value(state.dtype, shape, storages, start, unit.ranks, unit.over)
            values |= _placed(f"{name}.{suffix}", value, placed.get(name, (None, ()))[0])
    return values


def _placed(name: str, value: Value, placement: TensorPlacement | None) -> dict[str, Value]:
    """Values by name that lie in the place of one: of all ranks those that each has alone, else runs of one."""
    if placement is None:
        return {name: value}
    if not placement.names:
        return {name: dataclasses.replace(value, shape=placement.shape, placement=placement)}
    state = name.removeprefix(placement.names[0])
    return {
        f"{each}{state}": dataclasses.replace(value, owner=rank, owners=placement.over)
        for rank, each in enumerate(placement.names)
    }


def is_here(value: Value, ranks: NumberedRank | None) -> bool:
    """Whether this rank has a value, or a shard of it, in its storages."""
    return value.owner is None or (ranks is not None and ranks.number(value.owners) == value.owner)


def values_here(values: Mapping[str, Value], ranks: NumberedRank | None) -> dict[str, Value]:
    """Leave out the storages of values that this rank has not, where another value is in their place.

    A stage that reads a weight which another updates has a copy of it.
    """
    here = {name for name, value in values.items() if value.owners == STAGES or is_here(value, ranks)}
    return {n: v if n in here else dataclasses.replace(v, storages=()) for n, v in values.items()}


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


def _from_runs(executor: Executor, value: Value, placement: TensorPlacement, ranks: Reducer | None) -> torch.Tensor:
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
    """Value by itself of the part that this rank has of one of which ranks have runs."""
    assert value.placement is not None
    shape = list(value.shape)
    shape[value.placement.dim] //= value.placement.ranks
    return dataclasses.replace(value, shape=tuple(shape), placement=None)


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
    trained = [{n for p in graph.parameters if p.gradient is not None for n in _slot_names(p)} for graph in graphs]
    placements = (p.placement for graph in graphs for p in graph.parameters)
    counts = {placement.over: placement.ranks for placement in placements if placement is not None}
    values: dict[str, Value] = {}
    for name in dict.fromkeys(name for held in each for name in held):
        having = [number for number, held in enumerate(each) if name in held]
        stage = next((number for number in having if name in trained[number]), having[0])
        value = each[rank][name] if rank in having else dataclasses.replace(each[stage][name], storages=())
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


def write_value(executor: Executor, value: Value, tensor: torch.Tensor, rank: int = 0) -> None:
    """Set what this rank holds of a value that lies between others."""
    assert value.start is not None
    flat, end = tensor.detach().reshape(-1), value.start + prod(value.shape)
    counts = [executor.program.graph.storages[s].size_bytes // flat.element_size() for s in value.storages]
    begin = rank * sum(counts) if value.ranks > 1 else 0
    for storage, count in zip(value.storages, counts, strict=True):
        low, high = max(begin, value.start), min(begin + count, end)
        if low < high:
            part = flat[low - value.start : high - value.start]
            executor.write_part(storage, (low - begin) * flat.element_size(), part.view(torch.uint8))
        begin += count


class SavedValues(Protocol):
    """Values by name that were saved whole."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a value that are read together, as they have one checksum."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Read a whole value into memory of its own."""
        ...

    def chunks(self, name: str, start: int, end: int) -> Iterable[memoryview]:
        """Read the bytes of a value from ``start`` up to ``end``."""
        ...


class NamedValues(Mapping[str, Value]):
    """Values of a step by name, read and written where they lie.

    Args:
        values: Where each lies.
        first_names: Maps each name of a parameter to its first.
        graph: Graph of the step, which has the storages.
        executor: Executor that has their bytes.
        ranks: Ranks that have some of the values, or shards of them; None alone.
    """

    def __init__(
        self,
        values: Mapping[str, Value],
        first_names: Mapping[str, str],
        graph: StepGraph,
        executor: Executor,
        ranks: Replicas | None,
    ) -> None:
        self._values, self._first_names, self._graph = values, first_names, graph
        self._executor, self._ranks = executor, ranks

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def find(self, name: str) -> Value:
        """Look up a value by its name, or by another name of its parameter.

        Raises:
            ConfigError: no such name.
        """
        name = self._first_names.get(name, name)
        if name not in self._values:
            raise ConfigError(
                f"expected a parameter, buffer or optimizer state, got {name!r}{did_you_mean(name, self._values)}"
            )
        return self._values[name]

    def read(self, name: str) -> torch.Tensor:
        """Copy a value; what is shared is gathered, so that all ranks call this."""
        return read_value(self._executor, self.find(name), self._ranks)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Set a value, as far as this rank has it; with a parameter its master, which would overwrite it.

        Raises:
            ConfigError: no such name, or another shape or dtype.
        """
        target = self.find(name)
        if not target.storages:  # another rank has it
            _check_like(name, target, value)
        elif target.placement is not None:
            _check_like(name, target, value)
            assert self._ranks is not None, "a plan for one process has no shards"
            runs = own_runs(value, target.placement, self._ranks.number(target.placement.over))
            self._write_here(name, local_value(target), runs)
        else:
            self._write_here(name, target, value)
        master = f"{self._first_names.get(name, name)}.master"
        if name in self._first_names and master in self._values:
            self.write(master, value.float())

    def _write_here(self, name: str, target: Value, value: torch.Tensor) -> None:
        """Set a value of which this rank has all, or a shard between others."""
        if target.start is not None:
            _check_like(name, target, value)
            number = 0 if self._ranks is None or target.ranks == 1 else self._ranks.number(target.over)
            return write_value(self._executor, target, value, number)
        return self._write_whole(name, target, value)

    def _write_whole(self, name: str, target: Value, value: torch.Tensor) -> None:
        """Set a value that fills its storages."""
        if len(target.storages) == 1:
            self._executor.write_storage(target.storages[0], value)
            return
        _check_like(name, target, value)
        flat = value.detach().reshape(-1)
        counts = [self._graph.storages[s].size_bytes // flat.element_size() for s in target.storages]
        for storage, part in zip(target.storages, flat.split(counts), strict=True):
            self._executor.write_storage(storage, part)

    def fill(self, name: str, chunks: ByteRange, chunk_bytes: int = MiB) -> None:
        """Set a value from the bytes of the whole one, of which only those are asked for that this rank has.

        Its master is left as it is. Of values that share a storage all are to be set so.

        Args:
            chunk_bytes: Bytes that are read together, whichever of them are asked for.
        """
        value = self._values[name]
        if not value.storages:  # another rank has it
            return
        takes = value.start is not None or all(map(self._executor.takes_chunks, value.storages))
        if takes and value.start is None and value.placement is None:
            self._executor.write_chunks(value.storages, chunks(0, value.size_bytes))
            return
        local = value if value.placement is None else local_value(value)
        low, high = self._own_range(local) if takes else (0, local.size_bytes)
        if value.placement is None:
            pieces = read_range(low, high, chunks)
        else:
            number, item_bytes = self._number(value.placement.over), DTYPE_BYTES[value.dtype]
            pieces = read_runs(value.placement, number, item_bytes, low, high, chunks, chunk_bytes)
        if takes:
            for at, piece in pieces:
                self._write_bytes(local, at, piece)
            return
        flat = torch.empty(local.size_bytes, dtype=torch.uint8)  # to be laid out anew
        for at, piece in pieces:
            flat[at : at + piece.numel()] = piece
        self._write_whole(name, local, flat.view(getattr(torch, value.dtype)).view(local.shape))

    def fill_first(self, name: str, bytes_as: Callable[[str], ByteRange]) -> None:
        """Set a parameter or buffer, and its master, which begins as the parameter is.

        Args:
            bytes_as: Gives the bytes of the value as numbers of a dtype.
        """
        for each in (name, f"{name}.master"):
            if each in self._values:
                self.fill(each, bytes_as(self._values[each].dtype))

    def load(self, saved: SavedValues, begun: Container[str]) -> None:
        """Set all values from saved ones, but for states that begin anew."""
        for name in self._values:  # masters come after their parameters
            if name in begun:
                self.begin(name, saved.read)
            else:
                self.fill(name, partial(saved.chunks, name), saved.chunk_bytes)

    def _number(self, over: str) -> int:
        return 0 if self._ranks is None else self._ranks.number(over)

    def _own_range(self, value: Value) -> tuple[int, int]:
        """First byte and end of what this rank's storages have of a value without placement."""
        if value.start is None:
            return 0, value.size_bytes
        shift = self._shift_bytes(value)
        return max(0, -shift), min(value.size_bytes, sum(self._sizes(value)) - shift)

    def _shift_bytes(self, value: Value) -> int:
        """Byte of this rank's storages, one after another, at which a value begins; below 0 on an earlier rank."""
        if value.start is None:
            return 0
        earlier = self._number(value.over) * sum(self._sizes(value)) if value.ranks > 1 else 0
        return value.start * DTYPE_BYTES[value.dtype] - earlier

    def _sizes(self, value: Value) -> list[int]:
        return [self._graph.storages[storage].size_bytes for storage in value.storages]

    def _write_bytes(self, value: Value, at: int, piece: torch.Tensor) -> None:
        """Set the bytes of a value from byte ``at`` on, all of which this rank has."""
        begin = self._shift_bytes(value) + at
        for storage, size in zip(value.storages, self._sizes(value), strict=True):
            low, high = max(0, begin), min(size, begin + piece.numel())
            if low < high:
                self._executor.write_part(storage, low, piece[low - begin : high - begin], anew=True)
            begin -= size

    def states_of(self, parameters: Iterable[str]) -> list[str]:
        """Names of the optimizer states of these parameters."""
        first = tuple(f"{name}." for name in parameters)
        return [name for name in self._values if first and name.startswith(first)]

    def begin(self, state: str, read: Callable[[str], torch.Tensor]) -> None:
        """Set a state as training begins with it: a master to its parameter, which ``read`` gives, others to zero."""
        value, (parameter, _, last) = self._values[state], state.rpartition(".")
        if not value.storages:  # another rank has it
            return
        zeros = torch.zeros(value.shape, dtype=getattr(torch, value.dtype))
        self.write(state, read(parameter).to(zeros.dtype) if last == "master" else zeros)

    def shared(self) -> list[str]:
        """Names of the values that ranks have together, in the order in which a checkpoint is written."""
        named = sorted(self._values.items(), key=lambda row: -DTYPE_BYTES[row[1].dtype])
        return [name for name, value in named if value.is_shared]

    def give(self, names: Iterable[str]) -> None:
        """Take part in the gathering of values that another rank reads."""
        for name in names:
            self.read(name)

    def chunks(self, name: str, left: list[str]) -> Iterator[memoryview]:
        """Read the bytes of a value in order; ``left`` are the names of the shared values not yet read."""
        value = self._values[name]
        if value.start is None and not value.is_shared:
            yield from chain.from_iterable(map(self._executor.chunks, value.storages))
            return
        if value.is_shared:
            left.remove(name)
        yield self.read(name).flatten().view(torch.uint8).numpy().data

    def check_whole_gradients(self, parameters: Iterable[str]) -> None:
        """Refuse parameters of whose gradients a rank has a shard.

        Raises:
            ConfigError: there are some.
        """
        values = {name: self[name] for name in parameters}
        cut = [n for n, v in values.items() if v.start is not None or v.placement is not None or v.owners != STAGES]
        if cut:
            raise ConfigError(
                f"gradient_norms: expected ranks that have whole gradients, found shards of {first_few(cut)}; plan "
                "without zero, tp or ep in layout="
            )

    def gradient_norms(self, parameters: Sequence[str], order: int, alike: int) -> dict[str, float]:
        """Norms of the gradients of the last step by parameter; all ranks call this.

        Args:
            order: 1 for the sum of absolute values, 2 for the root of the sum of squares.
            alike: Number of ranks that have the same parameter.

        Raises:
            ConfigError: the last step did not take them.
        """
        norms = self._executor.gradient_norms()
        mine = [name for name in parameters if is_here(self[name], self._ranks)]
        if missing := [name for name in mine if self[name].storages[0] not in norms]:
            raise ConfigError(
                f"gradient_norms: expected a step that takes them, found none of {first_few(missing)}; call "
                "step(..., norms=True)"
            )
        told = {name: norms[self[name].storages[0]][order - 1] for name in mine}
        if self._ranks is None or len(mine) == len(parameters):
            return told
        totals = self._ranks.sum([told.get(name, 0.0) for name in parameters])
        return {name: total / alike for name, total in zip(parameters, totals, strict=True)}

    def unfinished(self, step: int) -> dict[str, str]:
        """Values that a step, the ``step``-th from 1, has changed in part or lost when it failed, by name."""
        changed, lost, parts = self._executor.changed, self._executor.lost, dict[str, str]()
        for name, value in self._values.items():
            done = [changed.get(storage, (0, 1)) for storage in value.storages]
            if lost & set(value.storages):
                parts[name] = "lost"
            elif any(part for part, _ in done):
                parts[name] = f"{'' if all(part == whole for part, whole in done) else 'part of '}step {step}"
        return parts


def _check_like(name: str, target: Value, value: torch.Tensor) -> None:
    got = (dtype_of(value), tuple(value.shape))
    if got != (target.dtype, target.shape):
        raise ConfigError(f"expected {name!r} as {target.dtype} {target.shape}, got {got[0]} {got[1]}")


def check_numbers(values: Mapping[str, Value], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse unlike numbers of updates of parameters in one unit of shards, which keeps one for all.

    Args:
        values: All values of the step by name.
        tensors: Those that are to be set; numbers that are not begin at zero.

    Raises:
        ConfigError: they differ; says whose.
    """
    first: dict[tuple[int, ...], tuple[str, float]] = {}
    for name, value in values.items():
        if value.shape or value.start is not None or not value.storages:
            continue
        number = float(tensors[name]) if name in tensors else 0.0
        other, usual = first.setdefault(value.storages, (name, number))
        if number != usual:
            raise ConfigError(
                f"layout: expected parameters that share shards to have had as many updates, found {usual:g} ({other}) "
                f"and {number:g} ({name}), as of layers that were frozen for a while; train replicas, or, with an "
                "optimizer of torch, plan again with it as it is now"
            )


class CarriedValues:
    """Values in ordinary memory, on the way from one plan of a step to the next.

    Args:
        executor: Executor that has them.
        values: All values of the step.
        beside: Names of those that others take care of.
        ranks: Ranks that hold them together, all of which make this at the same time.

    Attributes:
        tensors: Those that this rank brings along, by name: all where each rank has all, of a pipeline its own, and
            the numbers of all.
    """

    def __init__(
        self, executor: Executor, values: Mapping[str, Value], beside: Iterable[str], ranks: Replicas | None
    ) -> None:
        left_out = {*beside}
        self._values = {name: value for name, value in values.items() if name not in left_out}
        self._sources = {} if ranks is None else {n: ranks.first_of(v.owner, v.owners) for n, v in self._values.items()}
        self.tensors = {
            name: read_value(executor, dataclasses.replace(value, owner=None) if value.shape else value, ranks)
            for name, value in self._values.items()
            if not value.shape or is_here(value, ranks)
        }

    def check(self, values: Mapping[str, Value]) -> None:
        """Refuse a step that keeps other states of a parameter; it may keep none.

        Args:
            values: All values of the step by name.

        Raises:
            ConfigError: it does, or keeps one number of updates of parameters that had several; says which.
        """
        check_numbers(values, self.tensors)
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


def dtype_of(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype, as graphs have it: ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def differences(got: Mapping[str, object], wanted: Mapping[str, object]) -> str:
    """The first few names whose shape or dtype differ, as text; "" if all agree."""
    names = sorted(name for name in got.keys() | wanted.keys() if got.get(name) != wanted.get(name))
    texts = [f"{name} (expected {wanted.get(name, 'none')}, found {got.get(name, 'none')})" for name in names[:3]]
    return ", ".join([*texts, f"{len(names) - 3} more"] if len(names) > 3 else texts)


def check_saved(
    path: str | Path, saved: Mapping[str, tuple[str, tuple[int, ...]]], values: Mapping[str, Value], usual: str
) -> None:
    """Refuse a checkpoint whose tensors are not the values of a step.

    Args:
        saved: Dtype and shape of each tensor of the checkpoint.
        usual: Rule that moves parameters, to name where several keep the same states.

    Raises:
        StorageError: they are not; says whether another optimizer wrote it, else which differ.
    """
    wanted = {name: (value.dtype, value.shape) for name, value in values.items()}
    if not (differing := differences(saved, wanted)):
        return
    writer, planned = optimizers_with(saved, usual), optimizers_with(wanted, usual)
    if writer != planned:
        raise StorageError(
            f"{path}: written by {writer}, this plan moves parameters by {planned}; load it with that optimizer"
        )
    raise StorageError(f"{path}: expected a checkpoint of this model, these tensors differ: {differing}")
