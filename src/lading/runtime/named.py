"""Named values: parameters, buffers and states by their names, wherever their parts lie."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lading.errors import ConfigError, StorageError, check_type, did_you_mean
from lading.ir.graph import DTYPE_BYTES, StepGraph
from lading.optim.registry import optimizers_with
from lading.runtime.executor import Executor
from lading.runtime.gathering import Gathering, read_value
from lading.runtime.shard_reads import ByteRange, own_runs, read_range, read_runs
from lading.runtime.value_layout import STAGES, Value, is_here, local_value
from lading.units import MiB

if TYPE_CHECKING:
    from lading.runtime.job import Replicas


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
            ConfigError: no such name, no tensor, or another shape or dtype.
        """
        target = self.find(name)
        check_type(name, value, torch.Tensor, "a tensor")
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
        for value_name in (name, f"{name}.master"):
            if value_name in self._values:
                self.fill(value_name, bytes_as(self._values[value_name].dtype))

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

    def gathering(self, names: Iterable[str] | None = None) -> Gathering:
        """Begin to read values that ranks share; all of them do, in this order.

        Args:
            names: Those among which they are; None for all, in the order in which a checkpoint is written.
        """
        if names is None:
            names = sorted(self._values, key=lambda name: -DTYPE_BYTES[self._values[name].dtype])
        shared = [name for name in names if self._values[name].is_shared]
        return Gathering(self._executor, self._values, shared, self._ranks)

    def chunks(self, name: str, gathering: Gathering) -> Iterator[memoryview]:
        """Read the bytes of a value in order; one that ranks share is the next of ``gathering``.

        A chunk is valid until the next is asked for.
        """
        value = self._values[name]
        if value.start is None and not value.is_shared:
            yield from chain.from_iterable(map(self._executor.chunks, value.storages))
            return
        for piece in gathering.pieces(name):
            yield piece.numpy().data

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
        norm_of = {name: norms[self[name].storages[0]][order - 1] for name in mine}
        if self._ranks is None or len(mine) == len(parameters):
            return norm_of
        totals = self._ranks.sum([norm_of.get(name, 0.0) for name in parameters])
        return {name: total / alike for name, total in zip(parameters, totals, strict=True)}

    def unfinished(self, step: int) -> dict[str, str]:
        """Values that a step, the ``step``-th from 1, has changed in part or lost when it failed, by name."""
        changed, lost, parts = self._executor.changed, self._executor.lost, dict[str, str]()
        for name, value in self._values.items():
            done_parts = [changed.get(storage, (0, 1)) for storage in value.storages]
            if lost & set(value.storages):
                parts[name] = "lost"
            elif any(part for part, _ in done_parts):
                parts[name] = (
                    f"{'' if all(part == num_parts for part, num_parts in done_parts) else 'part of '}step {step}"
                )
        return parts


def _check_like(name: str, target: Value, value: torch.Tensor) -> None:
    actual = (dtype_of(value), tuple(value.shape))
    if actual != (target.dtype, target.shape):
        raise ConfigError(f"expected {name!r} as {target.dtype} {target.shape}, got {actual[0]} {actual[1]}")


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
        first_name, usual = first.setdefault(value.storages, (name, number))
        if number != usual:
            raise ConfigError(
                f"layout: expected parameters that share shards to have had as many updates, found {usual:g} "
                f"({first_name}) and {number:g} ({name}), as of layers that were frozen for a while; train replicas, "
                "or, with an optimizer of torch, plan again with it as it is now"
            )


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


def _other_formats(
    saved: Mapping[str, tuple[str, tuple[int, ...]]], wanted: Mapping[str, tuple[str, tuple[int, ...]]]
) -> str | None:
    """Say which state was saved in another dtype, of a parameter that was not; None if there is none."""
    common = saved.keys() & wanted.keys()
    for name in sorted(common):
        of, (was, shape), (dtype_now, planned) = name.rpartition(".")[0], saved[name], wanted[name]
        if was != dtype_now and shape == planned and of in common and saved[of] == wanted[of]:
            return f"has {name} in {was}, this plan keeps it in {dtype_now}"
    return None


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
    expected = {name: (value.dtype, value.shape) for name, value in values.items()}
    if not (differing := differences(saved, expected)):
        return
    if (formats := _other_formats(saved, expected)) is not None:
        raise StorageError(f"{path}: {formats}; load it with the optimizer's states= of then")
    writer, planned = optimizers_with(saved, usual), optimizers_with(expected, usual)
    if writer != planned:
        raise StorageError(
            f"{path}: written by {writer}, this plan moves parameters by {planned}; load it with that optimizer"
        )
    raise StorageError(f"{path}: expected a checkpoint of this model, these tensors differ: {differing}")
