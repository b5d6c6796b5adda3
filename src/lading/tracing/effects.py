"""What an operation does besides computing, as its schema and its tags say: it writes, draws, or moves a view."""

from __future__ import annotations

from typing import Any

import torch

from lading.tracing.fakes import flat_tensors

#: Batch norms that update their running statistics (arguments 3 and 4) though their schema does not say so, and the
#: position of the flag that makes them.
_HIDDEN_BUFFERS = {"native_batch_norm": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5}


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors among the arguments that the operation writes, as its schema says or hides."""
    name = func._schema.name.removeprefix("aten::")
    if name in _HIDDEN_BUFFERS and args[_HIDDEN_BUFFERS[name]]:
        return [t for t in args[3:5] if t is not None]
    if not func._schema.is_mutable or moves_view(func):
        return []
    values: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return list(flat_tensors(values))


def moves_view(func: Any) -> bool:
    """Whether the operation gives its first argument another geometry and writes no element (``transpose_``)."""
    return torch.Tag.inplace_view in func.tags


def out_of_place(func: Any) -> str:
    """Name of the operation that gives a new view where this one changes its argument."""
    name = func.overloadpacket.__name__.removesuffix("_")
    return f"aten.{name}.{'int' if name == 'transpose' else func._overloadname}"
