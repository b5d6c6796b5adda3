"""Weights in pieces: a large parameter whose bytes move, and lie in tiers, piece by piece.

A parameter is one storage: it has to be wholly there before its use starts, its place is free only when all of it has
been written, and either all of it is moved over a gap or nothing. Here it becomes a run of storages, its pieces, each
of which a plan treats as any other: some of them may stay while others move, each takes its place when its own bytes
come and gives it up when they have gone, and the update of a part needs the piece of that part alone. What
reads the weight whole, a product or a look-up, finds the pieces one after another in memory, as it would find the
whole: no operation, kernel or number changes. So packing gives pieces that such an operation reads together addresses
that follow each other (``lading.planner.lower``), and the verifier refuses a Program in which one of them is missing or
lies elsewhere.

Cuts lie where a part of the update begins, at whole pages. The first piece keeps the parameter's storage number, the
others come behind all storages; tensors keep their numbers, and one that reaches over a cut begins in its first piece
(``StepGraph.storages_of``).
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from math import prod

from lading.ir.graph import DTYPE_BYTES, OpKind, StepGraph, Storage, Tensor
from lading.ir.machine import TIER_ALIGNMENT_BYTES


def with_weight_pieces(graph: StepGraph, piece_bytes: int) -> StepGraph:
    """Cut the large parameters of a step in pieces; operations stay as they are.

    Args:
        piece_bytes: Least bytes of a piece, but for what is left for the last one; 0 leaves the step as it is, and so
            does a size of which no parameter has two pieces.
    """
    cuts = _cuts(graph, piece_bytes) if piece_bytes and not graph.runs else {}
    if not cuts:
        return graph
    storages, runs = list(graph.storages), dict[int, tuple[int, ...]]()
    for storage, starts in cuts.items():
        uncut = storages[storage]
        run = (storage, *range(len(storages), len(storages) + len(starts) - 2))
        storages += [uncut] * (len(run) - 1)
        for piece, (first, end) in zip(run, pairwise(starts), strict=True):
            storages[piece] = Storage(f"{uncut.name}[{first}:{end}]", end - first, uncut.role)
        runs[storage] = run
    tensors = tuple(_in_piece(t, cuts[t.storage], runs[t.storage]) if t.storage in cuts else t for t in graph.tensors)
    return dataclasses.replace(graph, storages=tuple(storages), tensors=tensors, runs=tuple(runs.values()))


def _cuts(graph: StepGraph, piece_bytes: int) -> dict[int, tuple[int, ...]]:
    """Bytes at which the pieces of each parameter begin and the last one ends, by storage; of two pieces or more."""
    parameter_tensors = {
        graph.storage_of(p.tensor): graph.tensors[p.tensor] for p in graph.parameters if p.placement is None
    }
    others = {graph.storage_of(t) for op in graph.ops if op.kind is not OpKind.STEP for t in (*op.outputs, *op.mutates)}
    large = {
        storage
        for storage, tensor in parameter_tensors.items()
        if storage not in others
        and graph.storages[storage].size_bytes >= 2 * piece_bytes
        and tensor.is_row_major
        and tensor.spans(graph.storages[storage].size_bytes)
    }
    parts: dict[int, set[int]] = {storage: set() for storage in large}
    for op in graph.ops:
        for number in op.mutates if op.kind is OpKind.STEP else ():
            tensor = graph.tensors[number]
            if tensor.storage in large:
                parts[tensor.storage].add(tensor.offset * DTYPE_BYTES[tensor.dtype])
    bounds_of: dict[int, tuple[int, ...]] = {}
    for storage in sorted(large):
        starts, size = [0], graph.storages[storage].size_bytes
        for start in sorted(parts[storage]):
            is_page = start % TIER_ALIGNMENT_BYTES == 0 and size - start >= TIER_ALIGNMENT_BYTES
            if is_page and start - starts[-1] >= piece_bytes:
                starts.append(start)
        if len(starts) > 1:
            bounds_of[storage] = (*starts, size)
    return bounds_of


def _in_piece(tensor: Tensor, starts: tuple[int, ...], run: tuple[int, ...]) -> Tensor:
    """View of pieces that a view of the whole becomes: counted from the piece in which it begins."""
    width = DTYPE_BYTES[tensor.dtype]
    index = max(i for i, start in enumerate(starts[:-1]) if start <= tensor.offset * width)
    return dataclasses.replace(tensor, storage=run[index], offset=tensor.offset - starts[index] // width)


def piece_tensors(graph: StepGraph, tensor: int) -> tuple[Tensor, ...]:
    """Flat view of each piece of a parameter; the parameter's own tensor where it is whole."""
    view = graph.tensors[tensor]
    run = graph.run_of(view.storage)
    if len(run) == 1:
        return (view,)
    counts = [graph.storages[piece].size_bytes // DTYPE_BYTES[view.dtype] for piece in run]
    assert sum(counts) == prod(view.shape), "only whole parameters are cut"
    return tuple(Tensor(piece, view.dtype, (count,), (1,)) for piece, count in zip(run, counts, strict=True))
