"""Contractions: how dims go through matrix products and attention."""

from __future__ import annotations

from lading.ir.graph import Op
from lading.ir.opkinds import base_name
from lading.parallel.atoms import Dims, Lineage

PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "linear", "_grouped_mm"])


def product_operands(op: Op, ranks: list[int]) -> tuple[int, int]:
    """Places among the inputs of the two factors; ``ranks`` are of the inputs."""
    base = base_name(op.name)
    if base in ("addmm", "baddbmm"):
        return (1, 2) if len(ranks) > 2 else (0, 0)
    return (0, 1) if len(ranks) > 1 else (0, 0)


def product(lineage: Lineage, op: Op) -> None:
    """Align a product: rows of the first factor and columns of the second run on, contracted dims run along."""
    base, tensors = base_name(op.name), op.inputs
    first, second = product_operands(op, [len(lineage.dims[t]) for t in tensors])
    a, b, c = lineage.dims[tensors[first]], lineage.dims[tensors[second]], lineage.dims[op.outputs[0]]
    align = lineage.atoms.align
    if base == "linear":
        align(a[-1], b[1])
        align(c[-1], b[0])
        for mine, dim_of_c in zip(a[:-1], c[:-1], strict=True):
            align(mine, dim_of_c)
        for bias in tensors[2:]:
            align(lineage.dims[bias][0], c[-1])
        return None
    if base == "_grouped_mm":
        return _grouped(lineage, a, b, c)
    align(a[-1], b[-2])
    align(a[-2], c[-2])
    align(b[-1], c[-1])
    if len(c) == 3:
        align(a[0], c[0])
        align(b[0], c[0])
    if first:
        bias = lineage.dims[tensors[0]]
        for mine, dim_of_c in zip(reversed(bias), reversed(c), strict=False):
            if mine and dim_of_c:
                align(mine, dim_of_c)
    return None


def _grouped(lineage: Lineage, a: Dims, b: Dims, c: Dims) -> None:
    """Rows by expert: (R, k) by (e, k, n) -> (R, n), or (k, R) by (R, n) -> (e, k, n)."""
    align = lineage.atoms.align
    if len(b) == 3:
        align(a[-1], b[1])
        align(b[2], c[-1])
        align(a[-2], c[-2])
    else:
        align(a[-1], b[-2])
        align(a[-2], c[-2])
        align(b[-1], c[-1])


def attention(lineage: Lineage, op: Op) -> None:
    """(B, N, S, H) each; queries along the result, keys along values; the head size stays whole."""
    backward = "backward" in op.name
    q, k, v = (lineage.dims[t] for t in op.inputs[1 if backward else 0 :][:3])
    like_query = [*op.outputs[:1], *(op.inputs[:1] if backward else ())]
    align = lineage.atoms.align
    for operand in (k, v):
        align(q[0], operand[0])
    align(k[1], v[1])
    align(k[2], v[2])
    align(q[3], k[3])
    for dims in (q, k, v):
        lineage.atoms.keep_whole(dims[3])
    if backward:
        for output, source in zip(op.outputs[:3], (q, k, v), strict=False):
            for a, b in zip(lineage.dims[output], source, strict=True):
                align(a, b)
        like_query = [op.inputs[0]]
        extra = op.inputs[4:]
    else:
        extra = op.outputs[1:]
    for tensor in like_query:
        dims = lineage.dims[tensor]
        for a, b in zip(dims[:3], q[:3], strict=True):
            align(a, b)
        align(dims[3], v[3])
    _attention_rest(lineage, extra, (q, v))


def _attention_rest(lineage: Lineage, rest: tuple[int, ...], frames: tuple[Dims, Dims]) -> None:
    """The result as backward reads it, (B, N, S, H), and the log of the sum of each row, (B, N, S)."""
    q, v = frames
    for tensor in rest:
        dims, sizes = lineage.dims[tensor], lineage.segment.tensors[tensor].dims
        if len(dims) < 3:
            continue
        for a, b in zip(dims[:3], q[:3], strict=True):
            if a and b and lineage.segment.tensors[tensor].dims:
                lineage.atoms.align(a, b)
        if len(sizes) == 4:
            lineage.atoms.align(dims[3], v[3])
