"""Structure: what of a segment does not depend on how it is cut."""

from __future__ import annotations

from lading.ir.graph import Phase
from lading.ir.sizes import Size
from lading.ir.table import Segment, TableTensor


def elements(tensor: TableTensor) -> Size:
    """How many there are in memory."""
    total = Size.of(1)
    for dim, size in enumerate(tensor.dims):
        total = total if dim in tensor.repeats else total * size
    return total


def makers(segment: Segment) -> dict[int, int]:
    """Of each storage the tensor that is there first: an operation's result, or what its first reader takes."""
    found: dict[int, int] = {}
    for op in segment.ops:
        for t in (*op.inputs, *op.outputs):
            found.setdefault(segment.tensors[t].storage, t)
    for t, tensor in enumerate(segment.tensors):
        found.setdefault(tensor.storage, t)
    return found


def leading_to(segment: Segment) -> frozenset[int]:
    """Operations of backward on whose results the gradients of what entered depend."""
    needed, found = set(segment.leaves_back), set[int]()
    for index in range(len(segment.ops) - 1, -1, -1):
        op = segment.ops[index]
        if op.phase is Phase.BACKWARD and needed & {*op.outputs, *op.mutates}:
            needed.update(op.inputs)
            found.add(index)
    return frozenset(found)
