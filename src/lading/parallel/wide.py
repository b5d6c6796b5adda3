"""Wide: a segment that was captured in 16 bits as it runs in fp32: every 16-bit tensor has 32, and no cast is left."""

from __future__ import annotations

from dataclasses import replace

from lading.ir.graph import Op, OpKind
from lading.ir.table import Segment, TableTensor

_HALF = ("bfloat16", "float16")
_CAST = "aten._to_copy."


def widened(segment: Segment) -> Segment:
    """The segment in fp32.

    A cast between 16 and 32 bits is a view there, as PyTorch's ``to`` gives back what it is given; one of which either
    side is written in place stays a copy.
    """
    tensors = [replace(t, dtype="float32") if t.dtype in _HALF else t for t in segment.tensors]
    written = {tensors[t].storage for op in segment.ops for t in op.mutates}
    moved: dict[int, int] = {}
    ops: list[Op] = []
    for op in segment.ops:
        if not _is_idle(op, tensors):
            ops.append(op)
            continue
        source, made = (_last(moved, tensors[t].storage) for t in (op.inputs[0], op.outputs[0]))
        if written & {source, made} or source == made:
            ops.append(op)
            continue
        moved[made] = source
        ops.append(replace(op, kind=OpKind.VIEW))
    roles = {t.storage: t.role for t in tensors}
    homes = [_last(moved, t.storage) for t in tensors]
    found = tuple(replace(t, storage=home, role=roles[home]) for t, home in zip(tensors, homes, strict=True))
    return replace(segment, tensors=found, ops=tuple(ops))


def _is_idle(op: Op, tensors: list[TableTensor]) -> bool:
    """Whether a cast has nothing left to cast."""
    if not op.name.startswith(_CAST) or len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    return tensors[op.inputs[0]].dtype == tensors[op.outputs[0]].dtype


def _last(moved: dict[int, int], storage: int) -> int:
    while storage in moved:
        storage = moved[storage]
    return storage
