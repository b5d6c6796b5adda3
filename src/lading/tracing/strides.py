"""Strides that a kernel really gives, where torch's fake rule says others.

A few rules guess the memory order of a result wrongly when inputs are transposed: a sum over it would then run in
another order than eager's. So where an input is not contiguous, the kernel is run once on small stand-ins of the same
memory order, and its result's order is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from lading.ir.graph import OpKind
from lading.ir.opkinds import kind_of

_SMALL = 1 << 16
#: Kinds whose kernels accept any values; of the first, a result's memory order does not depend on sizes.
_ANY_SIZE = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.NORM, OpKind.SOFTMAX})
_SAME_SIZE = frozenset({OpKind.REDUCTION, OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.COPY})


def real_strides(func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[tuple[int, ...]] | None:
    """Strides of the results ``outs`` as the CPU kernel gives them; None where that cannot be found or is not needed.

    To be called with no mode active; only the geometry of tensors is read.

    Raises:
        RuntimeError: the kernel refuses the stand-ins. No other strides are guessed: over the 219 families of
            ``benchmarks/capture`` that is one model whose own step fails in the same way.
    """
    kind = kind_of(str(func))
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    if kind not in _ANY_SIZE | _SAME_SIZE or "grouped" in func._schema.name or all(map(_is_plain, inputs)):
        return None
    small = sum(t.numel() for t in (*inputs, *outs)) <= _SMALL
    if not small and (kind not in _ANY_SIZE or "group_norm" in func._schema.name):
        return None
    made = func(*(_stand_in(a, small) for a in args), **{k: _stand_in(a, small) for k, a in kwargs.items()})
    flat = [t for t in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(t, torch.Tensor)]
    if len(flat) != len(outs):
        return None
    return [_as_ordered(t, tuple(out.shape), tuple(out.stride())) for t, out in zip(flat, outs, strict=True)]


def real_view(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the view ``out`` as torch's own view gives them on memory that is not there; None if they are right.

    The fake rule of a view keeps other strides for dims of size 1. To be called with no mode active.
    """
    if 1 not in out.shape:
        return None
    made = func(*map(_no_memory, args), **{k: _no_memory(a) for k, a in kwargs.items()})
    stride = tuple(made.stride())
    return None if stride == tuple(out.stride()) else stride


def _no_memory(arg: Any) -> Any:
    """The same geometry on the meta device."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(tuple(arg.shape), tuple(arg.stride()), dtype=arg.dtype, device="meta")


def _is_plain(t: torch.Tensor) -> bool:
    """Row by row; dims of size 1 count too, as convolutions look at them to tell channels-last memory."""
    return t.dim() < 2 or (
        t.is_contiguous() and tuple(t.stride()) == _dense(tuple(t.shape), tuple(range(t.dim(), 0, -1)))
    )


def _size(n: int, small: bool) -> int:
    """A size for stand-ins: equal sizes stay equal, 1 stays 1."""
    return n if small or n <= 16 else 16 + n % 13


def _stand_in(arg: Any, small: bool) -> Any:
    if isinstance(arg, torch.Tensor):
        return _tensor(arg, small)
    if type(arg) in (list, tuple) and all(type(n) is int for n in arg):
        return [_size(n, small) for n in arg]  # of the operations here only layer norm has sizes
    if isinstance(arg, (list, tuple)):
        return [_stand_in(item, small) for item in arg]
    return arg


def _tensor(t: torch.Tensor, small: bool) -> torch.Tensor:
    """Zeros in the memory order of ``t``: dims in the same order, stride 0 and gaps kept."""
    shape = tuple(_size(n, small) for n in t.shape)
    stride = tuple(t.stride()) if small else _dense(shape, tuple(t.stride()))
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    if span > 16 * _SMALL:
        stride, span = _dense(shape, stride), prod(shape)
    return torch.zeros(span, dtype=t.dtype).as_strided(shape, stride)


def _dense(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps for a shape, in the order of other strides; 0 stays 0."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], shape[d] != 1, -d)):
        if like[dim]:
            stride[dim] = step
            step *= shape[dim]
    return tuple(stride)


def _as_ordered(made: torch.Tensor, shape: tuple[int, ...], stated: tuple[int, ...]) -> tuple[int, ...]:
    """Strides for ``shape`` in the memory order of a stand-in's result; those stated by the rule if they agree."""
    if tuple(made.shape) == shape:
        return tuple(made.stride())
    whole = all(s for n, s in zip(made.shape, made.stride(), strict=True) if n > 1)
    return _dense(shape, tuple(made.stride())) if whole else stated
