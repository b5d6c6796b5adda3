"""Settings of a table's operations: how each dim of a result comes from the dims of what it was made from.

Views come in four forms: dims regrouped (``groups``), permuted (``dims``), repeated (``expands``), or cut (``dim`` with
``start`` or ``sizes``). See [Note: settings of an operation] in lading.ir.table for every key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from lading.ir.graph import Arg, Op, Tensor
from lading.ir.sizes import Size

Settings = tuple[tuple[str, object], ...]
Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

_REGROUP = frozenset(
    {
        "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten", "alias",
        "detach", "view_as",
    }
)  # fmt: skip
_PERMUTE = frozenset({"t", "transpose", "permute", "numpy_T", "mT", "movedim", "swapaxes"})
_CUT = frozenset({"slice", "select", "slice_backward", "select_backward", "narrow"})
_SPLIT = frozenset({"split", "split_with_sizes", "chunk", "unbind", "tensor_split"})
#: Of these the dims that ``dim`` names are summed (or the like) away.
_REDUCE = frozenset(
    {
        "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "std_mean", "logsumexp",
        "linalg_vector_norm", "any", "all", "argmax", "argmin", "nansum",
    }
)  # fmt: skip


def settings_of(op: Op, tensors: list[Tensor] | tuple[Tensor, ...]) -> Settings:
    """Settings of an operation of a graph; ``tensors`` are the graph's."""
    base, named = op.name.split(".")[1], _named(op)
    shapes = [tensors[t].shape for t in op.inputs]
    first = shapes[0] if shapes else tuple[int, ...]()
    result_shapes: list[tuple[int, ...]] = [tensors[t].shape for t in op.results if t is not None]
    if base in _REGROUP:
        return (("groups", regrouped(first, result_shapes[0])),)
    if base in _PERMUTE:
        return (("dims", _permutation(base, named, len(first))),)
    if base == "expand":
        return _expanded(first, result_shapes[0])
    if base in _CUT:
        uncut_shape = result_shapes[0] if base.endswith("_backward") else first
        dim, start = named["dim"] % len(uncut_shape), int(named.get("start", named.get("index", 0)) or 0)
        return (("dim", dim), ("start", Size.of(start + uncut_shape[dim] if start < 0 else start)))
    if base in _SPLIT:
        dim = (named.get("dim") or 0) % len(first)
        sizes = [1] * len(result_shapes) if base == "unbind" else [shape[dim] for shape in result_shapes]
        return (("dim", dim), ("sizes", tuple(map(Size.of, sizes))))
    if base in _REDUCE:
        return _reduced(named, len(first))
    return _remaining_settings(base, named, len(first))


def _remaining_settings(base: str, named: dict[str, Any], rank: int) -> Settings:
    others: list[tuple[str, object]] = []
    if "normalized_shape" in named or base.startswith("_fused_rms_norm"):
        count = len(named.get("normalized_shape") or named["shape"])
        return (("normalizes", tuple(range(rank - count, rank))),)
    if isinstance(named.get("dim"), int):
        ranks = rank + 1 if base == "stack" else max(rank, 1)
        others.append(("dim", named["dim"] % ranks))
    if isinstance(named.get("indices"), tuple):
        others.append(("indexes", tuple(i for i, at in enumerate(named["indices"]) if at is not None)))
    others.extend((key, named[key]) for key in ("is_causal", "p", "num_groups") if key in named)
    return tuple(others)


def _named(op: Op) -> dict[str, Any]:
    """Arguments of an operation by their schema names."""
    names = _argument_names(op.name)
    named: dict[str, Any] = dict(zip(names, op.args, strict=False))
    named.update(op.kwargs)
    defaults = _defaults(op.name)
    return {**defaults, **named}


@cache
def _schema(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema


def _argument_names(name: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in _schema(name).arguments)


def _defaults(name: str) -> dict[str, Any]:
    setting_names = ("dim", "start", "is_causal", "keepdim")
    return {
        a.name: a.default_value for a in _schema(name).arguments if a.name in setting_names and a.has_default_value()
    }


def regrouped(before: tuple[int, ...], after: tuple[int, ...]) -> Groups:
    """Groups of dims of one shape that make groups of dims of another, in order.

    A dim of length 1 may come from, or go to, none.
    """
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left = before[i] if i < len(before) else None
        right = after[j] if j < len(after) else None
        if left == right:
            groups.append(((i,), (j,)))
            i, j = i + 1, j + 1
        elif left == 1 or right is None:
            groups.append(((i,), ()))
            i += 1
        elif right == 1 or left is None:
            groups.append(((), (j,)))
            j += 1
        else:
            i, j = _merged(before, after, (i, j), groups)
    return tuple(groups)


def _merged(before: tuple[int, ...], after: tuple[int, ...], at: tuple[int, int], groups: list[Any]) -> tuple[int, int]:
    """Add the smallest group of dims from ``at`` on that hold equally many elements; returns where it ends."""
    i, j = at[0] + 1, at[1] + 1
    left, right = before[at[0]], after[at[1]]
    while left != right:
        if left < right:
            left, i = left * before[i], i + 1
        else:
            right, j = right * after[j], j + 1
    groups.append((tuple(range(at[0], i)), tuple(range(at[1], j))))
    return i, j


def _permutation(base: str, named: dict[str, Any], rank: int) -> tuple[int, ...]:
    if base == "permute":
        return tuple(d % rank for d in named["dims"])
    dims = list(range(rank))
    if base in ("t", "numpy_T"):
        return tuple(reversed(dims))
    first, second = (-2, -1) if base == "mT" else [v for k, v in named.items() if k.startswith(("dim", "axis"))][-2:]
    dims[first % rank], dims[second % rank] = dims[second % rank], dims[first % rank]
    return tuple(dims)


def _expanded(before: tuple[int, ...], after: tuple[int, ...]) -> Settings:
    new = len(after) - len(before)
    groups = (*(((), (j,)) for j in range(new)), *(((i,), (i + new,)) for i in range(len(before))))
    repeats = tuple(j for j in range(len(after)) if j < new or before[j - new] != after[j])
    return (("groups", groups), ("expands", repeats))


def _reduced(named: dict[str, Any], rank: int) -> Settings:
    dim = named.get("dim")
    dims = (dim,) if isinstance(dim, int) else dim or tuple(range(rank))
    return (("reduces", tuple(d % rank for d in dims)), ("keepdim", bool(named.get("keepdim"))))


def number_settings(settings: Settings) -> list[Size]:
    """Lengths among settings, in order: they may depend on sizes."""
    lengths: list[Size] = []
    for _, value in settings:
        if isinstance(value, Size):
            lengths.append(value)
        elif isinstance(value, tuple):
            lengths.extend(item for item in value if isinstance(item, Size))
    return lengths


def with_numbers(settings: Settings, numbers: list[Size]) -> Settings:
    """Copy of settings with other lengths, in the order of ``number_settings``."""
    remaining = iter(numbers)
    return tuple(
        (
            key,
            next(remaining)
            if isinstance(value, Size)
            else tuple(next(remaining) if isinstance(item, Size) else item for item in value)
            if isinstance(value, tuple)
            else value,
        )
        for key, value in settings
    )


def number_args(op: Op) -> list[int | float]:
    """Numbers among the arguments of an operation, in order: they may depend on sizes."""
    return [number for arg in (*op.args, *(arg for _, arg in op.kwargs)) for number in _numbers(arg)]


def _numbers(arg: Arg) -> Iterator[int | float]:
    if isinstance(arg, tuple):
        for item in arg:
            yield from _numbers(item)
    elif isinstance(arg, (int, float)) and not isinstance(arg, bool):
        yield arg


def with_number_args(op: Op, numbers: list[Arg]) -> Op:
    """Copy of an operation with other numbers among its arguments, in the order of ``number_args``."""
    remaining = iter(numbers)

    def exchanged(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(exchanged, arg))
        return next(remaining) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else arg

    args = tuple(map(exchanged, op.args))
    return dataclasses.replace(op, args=args, kwargs=tuple((key, exchanged(arg)) for key, arg in op.kwargs))
