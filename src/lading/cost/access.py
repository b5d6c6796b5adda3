"""How an operation walks through memory: bytes it moves, and in how long stretches."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from lading.ir.graph import Op, OpKind, StepGraph, Tensor
from lading.ir.opkinds import base_name

#: Classes that take each element once, wherever it lies.
_POINTWISE = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL})
#: Operations that give a tensor memory and touch none of it.
ALLOCATIONS = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided"))
_FILLS = ("new_", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


class Walk(NamedTuple):
    """``runs`` two-dimensional pieces of contiguous rows, 1 for a dense tensor; ``strided`` if rows are scattered."""

    runs: int
    strided: bool


def op_bytes(graph: StepGraph, op: Op) -> int:
    """Bytes an operation moves between memory and the core.

    The captured bytes, except that a lookup reads only the rows it returns, an update in place of some rows touches
    only those, a copy or fill does not read what it overwrites, and ``zeros_like`` does not read its model.
    """

    def touched(tensor: int) -> int:
        return graph.tensors[tensor].touched_bytes

    written = sum(map(touched, op.outputs))
    base = base_name(op.name)
    if base in ALLOCATIONS:
        return 0
    if base.startswith(_FILLS):
        return written
    if op.kind is OpKind.GATHER and op.outputs:
        largest = max(touched(t) for t in op.outputs)
        return written + sum(min(touched(t), largest) for t in op.inputs)
    if op.kind is OpKind.SCATTER and op.mutates:
        return 3 * max((touched(t) for t in op.inputs if t not in op.mutates), default=0)
    if op.kind is OpKind.COPY and op.mutates:
        return sum(touched(t) for t in op.inputs if t not in op.mutates) + sum(map(touched, op.mutates))
    return op.bytes_read + op.bytes_written


def walk(graph: StepGraph, op: Op) -> Walk:
    """In how many pieces, and whether against the order of memory, an operation goes through its operands.

    Pointwise operations and copies are walked in the order of their result's memory, merging dims that are contiguous
    in every operand, as ATen's iterator does. A reduction over dims before the last, and any other operation that has
    an operand whose last dim is not contiguous, counts as strided.
    """
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outputs, *op.mutates)]
    if op.kind is OpKind.REDUCTION:
        return Walk(1, _keeps_last_dim(graph, op))
    result = next((graph.tensors[t] for t in (*op.outputs, *op.mutates)), None)
    pointwise = op.kind in _POINTWISE or (op.kind is OpKind.COPY and len(op.inputs) == 1)
    if result is None or not pointwise or any(len(t.shape) > len(result.shape) for t in tensors):
        return Walk(1, any(bool(t.shape) and t.shape[-1] > 1 and t.stride[-1] > 1 for t in tensors))
    return _iterate(result, [_broadcast(t, result.shape) for t in tensors])


def _broadcast(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor expanded to ``shape``."""
    missing = len(shape) - len(tensor.shape)
    strides = (s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride, strict=True))
    return (*(0,) * missing, *strides)


def _iterate(result: Tensor, strides: list[tuple[int, ...]]) -> Walk:
    dims = sorted((d for d, n in enumerate(result.shape) if n > 1), key=lambda d: result.stride[d])
    if not dims:
        return Walk(1, False)
    first = dims[0]
    steps = [s[first] for s in strides]
    if any(step > 1 for step in steps) or (all(step == 0 for step in steps[:-1]) and len(steps) > 1):
        return Walk(1, True)
    rest = _merge(result.shape, _merge(result.shape, dims, strides), strides)
    return Walk(prod(result.shape[d] for d in rest), False)


def _merge(shape: tuple[int, ...], dims: list[int], strides: list[tuple[int, ...]]) -> list[int]:
    """The dims left over once those around the innermost that continue it in every operand are merged into it."""
    for position, inner in enumerate(dims):
        outer = dims[position + 1] if position + 1 < len(dims) else None
        if outer is None or any(s[outer] != s[inner] * shape[inner] for s in strides):
            return dims[position + 1 :]
    return []


def _keeps_last_dim(graph: StepGraph, op: Op) -> bool:
    """Whether a reduction is over dims before the last, as a bias gradient is."""
    rank = len(graph.tensors[op.inputs[0]].shape) if op.inputs else 0
    dims = op.args[1] if len(op.args) > 1 else None
    dims = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    return (
        isinstance(dims, tuple)
        and bool(dims)
        and all(isinstance(d, int) and d % max(rank, 1) != rank - 1 for d in dims)
    )
