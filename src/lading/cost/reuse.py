"""Reuse: how many of the bytes that an operation touches come from memory, because they are no longer in cache.

[Note: cache] The last level of cache is assumed to keep the storages touched last, least recently used first out, over
one step after another. A result is a storage like others: memory last touched a step ago, fetched before it is written.
Bytes in cache cost what the probe measured with operands in cache. Other bytes cost what it measured after more than
the cache had been overwritten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from lading.ir.graph import Op, OpKind, StepGraph


def cold_bytes(graph: StepGraph, cache_bytes: int) -> list[int]:
    """Bytes that each operation touches and that are not in cache, in program order of the graph.

    Args:
        cache_bytes: Bytes that the cache keeps, > 0.
    Returns:
        [operation]: bytes of storages that the cache has dropped since their last use, if need be in the step before.
    Ignores: what else shares the cache, and how recomputation, moves and addresses of a plan change the order.
    """
    cache = _Cache(cache_bytes)
    touched = [touched_bytes(graph, op) for op in graph.ops]
    for operand in touched:  # the step before
        cache.touch(operand)
    return [cache.touch(operand) for operand in touched]


def touched_bytes(graph: StepGraph, op: Op) -> dict[int, int]:
    """Bytes of each storage that an operation reads or writes; of a table that it looks up, those of its result."""
    max_result_bytes = (
        max((graph.tensors[t].touched_bytes for t in op.outputs), default=0) if op.kind is OpKind.GATHER else None
    )
    sizes: dict[int, int] = {}
    for tensor in (*op.inputs, *op.mutates, *op.outputs):
        size, storage = graph.tensors[tensor].touched_bytes, graph.storage_of(tensor)
        sizes[storage] = max(sizes.get(storage, 0), size if max_result_bytes is None else min(size, max_result_bytes))
    return sizes


class _Cache:
    """Storages touched last, oldest first, of at most ``room`` bytes in all."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._taken = 0

    def touch(self, sizes: Mapping[int, int]) -> int:
        """Touch bytes of storages; returns how many of them were not in cache."""
        missed = 0
        for storage, size in sizes.items():
            cached_bytes = self._sizes.pop(storage, 0)
            missed += max(0, size - cached_bytes)
            left = min(max(size, cached_bytes), self._room)
            self._sizes[storage] = left
            self._taken += left - cached_bytes
        while self._taken > self._room:
            self._taken -= self._sizes.popitem(last=False)[1]
        return missed
