"""Batches: trees of dicts, lists, tuples, dataclasses and mappings whose tensors are the inputs of a step.

Every tensor must be found: one that is not would be taken for a constant, the same in every step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten_with_path, tree_map

from lading.errors import CaptureError

Visit = Callable[[str, torch.Tensor], torch.Tensor]


def input_leaves(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a batch by name, in order: the key itself for a flat dict, else the path.

    Raises:
        CaptureError: the batch holds something in which tensors could hide.
    """
    leaves: list[tuple[str, torch.Tensor]] = []

    def visit(name: str, tensor: torch.Tensor) -> torch.Tensor:
        leaves.append((name, tensor))
        return tensor

    map_batch(batch, visit)
    return leaves


def map_batch(batch: Any, visit: Visit) -> Any:
    """The same tree with each tensor exchanged for ``visit(name, tensor)``; the batch itself is left as it is."""
    return _mapped(batch, "", visit)


def _mapped(value: Any, path: str, visit: Visit) -> Any:
    def inner(key: Any, item: Any) -> Any:
        return _mapped(item, f"{path}.{key}" if path else str(key), visit)

    if isinstance(value, torch.Tensor):
        return visit(path or "batch", value)
    if isinstance(value, (dict, UserDict)):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = inner(key, item)
        return made
    if fields := getattr(value, "_fields", ()) if isinstance(value, tuple) else ():
        return type(value)(*(inner(name, getattr(value, name)) for name in fields))
    if type(value) in (list, tuple):
        return type(value)(inner(index, item) for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, inner(field.name, getattr(value, field.name)))
        return made
    if type(value) in SUPPORTED_NODES:
        named = {id(leaf): _name(keys) for keys, leaf in tree_flatten_with_path(value)[0]}
        return tree_map(lambda leaf: inner(named[id(leaf)], leaf), value)
    _refuse_hidden(value, path)
    return value


def _name(keys: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def _refuse_hidden(value: Any, path: str) -> None:
    """Raise for an array, or an object with tensors or arrays in its attributes."""
    held = [value, *vars(value).values()] if hasattr(value, "__dict__") and not callable(value) else [value]
    for item in held:
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
