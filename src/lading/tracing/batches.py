"""Batches: trees of dicts, lists, tuples, dataclasses and mappings whose tensors are the inputs of a step.

Every tensor must be found: one that is not would be taken for a constant, the same in every step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_map_with_path

from lading.errors import CaptureError

T = TypeVar("T")
Visit = Callable[[str, torch.Tensor], torch.Tensor]
Note = Callable[[str, object], None]
_PLAIN = (str, bytes, int, float, complex, type(None), Enum, torch.dtype, torch.device)


def input_leaves(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """Find the tensors of a batch: (name, tensor) in order, where a name is the key of a flat dict, else the path.

    Raises:
        CaptureError: the batch holds something in which tensors could hide, or two of them have one name.
    """
    leaves: dict[str, torch.Tensor] = {}

    def visit(name: str, tensor: torch.Tensor) -> torch.Tensor:
        _add_leaf(leaves, name, tensor)
        return tensor

    map_batch(batch, visit)
    return [*leaves.items()]


def plain_leaves(batch: Any) -> dict[str, object]:
    """Find what of a batch is no tensor, by name: numbers, texts, flags, None; of other objects type and attributes.

    Raises:
        CaptureError: as ``input_leaves``.
    """
    leaves: dict[str, object] = {}
    _mapped(batch, "", lambda _, tensor: tensor, lambda name, value: _add_leaf(leaves, name, value))
    return leaves


def _add_leaf(leaves: dict[str, T], name: str, value: T) -> None:
    """Add what a batch holds under a name.

    Raises:
        CaptureError: something else has that name, as ``{"a.b": x, "a": {"b": y}}`` and ``{0: x, "0": y}`` do.
    """
    if name in leaves:
        raise CaptureError(
            f"batch: expected entries whose paths of keys, joined by dots, differ, found two of {name!r}; rename one"
        )
    leaves[name] = value


def map_batch(batch: Any, visit: Visit) -> Any:
    """Copy the tree of a batch with each tensor exchanged for ``visit(name, tensor)``."""
    return _mapped(batch, "", visit, lambda _, value: None)


def _mapped(value: Any, path: str, visit: Visit, note: Note) -> Any:
    def inner(key: Any, item: Any) -> Any:
        return _mapped(item, f"{path}.{key}" if path else str(key), visit, note)

    if isinstance(value, torch.Tensor):
        return visit(path or "batch", value)
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        raise CaptureError(
            f"batch entry {path or 'batch'!r}: expected padded sequences, got a PackedSequence, whose lengths decide "
            "what runs; an RNN in one direction makes the same before the padding, and the loss leaves padding out"
        )
    if isinstance(value, (dict, UserDict, list, tuple)) and not value:
        note(path or "batch", f"empty {type(value).__name__}")
    if isinstance(value, (dict, UserDict)):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = inner(key, item)
        return mapped
    if fields := getattr(value, "_fields", ()) if isinstance(value, tuple) else ():
        return type(value)(*(inner(name, getattr(value, name)) for name in fields))
    if type(value) in (list, tuple):
        return type(value)(inner(index, item) for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(mapped, field.name, inner(field.name, getattr(value, field.name)))
        return mapped
    if type(value) in SUPPORTED_NODES:
        return tree_map_with_path(lambda keys, leaf: inner(_name(keys), leaf), value)
    _refuse_hidden(value, path)
    note(path or "batch", _plain(value))
    return value


def _plain(value: Any) -> object:
    """Form of a value that can be compared with that of another batch, whose objects are others."""
    if isinstance(value, _PLAIN):
        return value
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if type(value).__eq__ is not object.__eq__:
        return value
    attributes = getattr(value, "__dict__", {})
    return type(value).__qualname__, {key: item for key, item in attributes.items() if isinstance(item, _PLAIN)}


def _name(keys: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def _refuse_hidden(value: Any, path: str) -> None:
    """Raise for an array, or an object with tensors or arrays in its attributes."""
    parts = [value, *vars(value).values()] if hasattr(value, "__dict__") and not callable(value) else [value]
    for item in parts:
        if isinstance(item, torch.Tensor) or hasattr(item, "__array_interface__"):
            raise CaptureError(
                f"batch entry {path or 'batch'!r}: expected tensors in dicts, lists, tuples or dataclasses, got a "
                f"{type(value).__module__}.{type(value).__name__} that holds data; make it a tensor, so that each step "
                "can have another value"
            )
    if isinstance(value, Mapping):
        raise CaptureError(
            f"batch entry {path or 'batch'!r}: expected a dict, got a {type(value).__name__}; use dict(...)"
        )
