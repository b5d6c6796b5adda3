"""Matrices of a model's blocks, as an optimizer of whole matrices sees them: parts of fused ones and experts apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lading.ir.graph import OpKind, Role
from lading.ir.sizes import Size
from lading.ir.table import ModelTable, Segment, SegmentTensor

#: Parameters that hold several projections one after another: q, k and v; gate and up; as a stack, up_EDG.
_FUSED = re.compile(r"(?:qkv|kv|up)(?:_[A-Z]+)?")


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Equal matrices of a block.

    Attributes:
        name: Name of the parameter within its block.
        count: Parts of a fused parameter of this shape, times the experts of a stack.
        is_expert: One of a stack of experts.
    """

    name: str
    rows: int
    columns: int
    count: int = 1
    is_expert: bool = False

    @property
    def elements(self) -> int:
        """Elements of all of them."""
        return self.rows * self.columns * self.count


def matrices_of(segment: Segment, symbols: Mapping[str, int]) -> tuple[BlockMatrix, ...]:
    """Weights of products of a block, each as one matrix or as its parts; none of what is before or after the blocks.

    Norms, biases, embeddings and the head are left to an optimizer of elements.

    Args:
        symbols: Value of each symbol of the segment's weights.
    """
    if not (segment.enters and segment.leaves):
        return ()
    storages = {segment.tensors[t].storage for op in segment.ops if op.kind is OpKind.MATMUL for t in op.inputs}
    named = {t.name: t for t in segment.tensors if t.role is Role.PARAMETER and t.name and t.storage in storages}
    return tuple(matrix for tensor in named.values() for matrix in _matrices(tensor, symbols))


def _matrices(tensor: SegmentTensor[Size], symbols: Mapping[str, int]) -> list[BlockMatrix]:
    lengths = [int(dim.at(symbols)) for dim in tensor.dims]
    if len(lengths) not in (2, 3) or min(lengths[-2:]) < 2:
        return []
    experts = lengths[0] if len(lengths) == 3 else 1
    # A stack of experts has its outputs last (E, in, out), a projection first (out, in).
    out, inner = (lengths[-1], lengths[-2]) if len(lengths) == 3 else (lengths[-2], lengths[-1])
    dim = tensor.dims[-1] if len(lengths) == 3 else tensor.dims[-2]
    fused = any(_FUSED.fullmatch(part) for part in tensor.name.split("."))
    parts: dict[int, int] = {}
    if fused and dim.divisor == 1:
        for monomial, times in dim.terms:
            size = int(type(dim)(((monomial, 1),)).at(symbols))
            parts[size] = parts.get(size, 0) + times
    if sum(size * times for size, times in parts.items()) != out:
        parts = {out: 1}
    return [BlockMatrix(tensor.name, rows, inner, times * experts, len(lengths) == 3) for rows, times in parts.items()]


def projections(table: ModelTable) -> list[tuple[int, str, int, int]]:
    """(layer, name, rows, columns) of every matrix of every block, in order."""
    layer, matrices_by_layer = 0, list[tuple[int, str, int, int]]()
    for segment, times in zip(table.segments, table.counts, strict=True):
        matrices = matrices_of(segment, table.symbols)
        if not (segment.enters and segment.leaves):
            continue
        for _ in range(times):
            matrices_by_layer += [(layer, m.name, m.rows, m.columns) for m in matrices for _ in range(m.count)]
            layer += 1
    return matrices_by_layer
