"""Named values: parameters, buffers and states by their names, wherever their parts lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, StepGraph
from lading.runtime.executor import Executor


@dataclass(frozen=True, slots=True)
class Value:
    """Parameter, buffer or state by name: ``storages`` hold its elements one after another."""

    dtype: str
    shape: tuple[int, ...]
    storages: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its elements."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def values_of(graph: StepGraph) -> dict[str, Value]:
    """Values that last from step to step, by name: parameters, buffers, then states."""
    named = [*((p.names[0], p.tensor) for p in graph.parameters), *graph.buffers]
    single = [(name, graph.tensors[tensor]) for name, tensor in named]
    values = {name: Value(tensor.dtype, tensor.shape, (tensor.storage,)) for name, tensor in single}
    for state in graph.states:
        values[state.name] = Value(state.dtype, state.shape, tuple(map(graph.storage_of, state.parts)))
    return values


def read_value(executor: Executor, value: Value) -> torch.Tensor:
    """Copy all parts of a value into one tensor of the value's shape."""
    parts = [executor.read_storage(storage) for storage in value.storages]
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts]).view(value.shape)


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
