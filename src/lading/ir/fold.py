"""Fold: find the runs of operations that repeat, such as the blocks of a transformer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from lading.ir.graph import Arg, Op, Phase, Ref, RepeatedBlock, StepGraph


def fold(graph: StepGraph) -> tuple[RepeatedBlock, ...]:
    """Find the distinct blocks of a graph and the places where each occurs.

    A block is a run of consecutive operations of one item of a module list (``layers.3``) in one phase. Two runs
    are the same block when they call the same operations on tensors of the same geometry, wired the same way.
    """
    starts_by_key: dict[tuple[str, Phase, tuple[object, ...]], list[int]] = {}
    for start, stop, module in _runs(graph.ops):
        key = (module, graph.ops[start].phase, _signature(graph, start, stop))
        starts_by_key.setdefault(key, []).append(start)
    blocks = [
        RepeatedBlock(module=module, phase=phase, num_ops=len(signature), starts=tuple(starts))
        for (module, phase, signature), starts in starts_by_key.items()
    ]
    return tuple(sorted(blocks, key=lambda block: block.starts))


def list_item(module: str) -> str:
    """Name the list item a module is in: ``'model.layers.3'`` for ``'model.layers.3.attn.q'``; '' for none."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def block_items(ops: Sequence[Op]) -> list[str]:
    """The list item each operation belongs to; what an item calls outside the list (a shared module) is its own."""
    items = [list_item(op.module) for op in ops]
    start = 0
    while start < len(items):
        stop = start + 1
        while stop < len(items) and not items[stop]:
            stop += 1
        if stop < len(items) and items[start] == items[stop] and ops[start].phase is ops[stop].phase:
            items[start:stop] = [items[start]] * (stop - start)
        start = stop
    return items


def _runs(ops: Sequence[Op]) -> Iterator[tuple[int, int, str]]:
    """Yield (start, stop, list name) of each maximal run of one list item and phase."""
    items = block_items(ops)
    for (item, _), group in groupby(range(len(ops)), key=lambda i: (items[i], ops[i].phase)):
        indices = list(group)
        if item:
            yield indices[0], indices[-1] + 1, item.rpartition(".")[0]


def _signature(graph: StepGraph, start: int, stop: int) -> tuple[object, ...]:
    """Key that is equal for equal runs: names, constants, geometry and local wiring."""
    local: dict[int, int] = {}

    def wire(arg: Arg) -> object:
        if isinstance(arg, Ref):
            tensor = graph.tensors[arg.tensor]
            seat = local.setdefault(tensor.storage, len(local))
            return (seat, tensor.dtype, tensor.shape, tensor.stride, tensor.offset)
        return tuple(wire(item) for item in arg) if isinstance(arg, tuple) else arg

    rows: list[object] = []
    for op in graph.ops[start:stop]:
        ins = tuple(wire(a) for a in op.args) + tuple((k, wire(a)) for k, a in op.kwargs)
        rows.append((op.name, ins, tuple(wire(Ref(t)) for t in op.outputs)))
    return tuple(rows)
