"""Fusing: which operations of a step may be parts of one compiled region, and which of their bytes such a region saves.

The executor finds its regions in a Program (``lading.runtime.regions``); a plan is made before there is one, and takes
the runs of such operations in the order of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from lading.ir.graph import PERSISTENT, Op, StepGraph

#: Operations that Inductor turns into loops of its own, without a call into a library or memory for one.
_NAMES = """
    abs add amax amin bitwise_and bitwise_not bitwise_or cat clamp clamp_min clone constant_pad_nd cos div eq erf exp
    fill full full_like ge gelu gelu_backward gt le leaky_relu log log_sigmoid_forward logical_and logical_not
    logical_or lt masked_fill maximum mean minimum mul native_layer_norm native_layer_norm_backward ne neg new_zeros
    ones_like pow reciprocal relu rsqrt rsub scalar_tensor select_backward sigmoid sigmoid_backward sign silu
    silu_backward sin slice_backward softplus sqrt stack sub sum tanh tanh_backward threshold_backward where zeros
    zeros_like _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _to_copy
    """
_FUSIBLE = frozenset(_NAMES.split())
#: Below this, all tensors of a region together, a call costs more than the memory traffic that fusing saves.
LEAST_BYTES = 1 << 16
FEWEST_OPS = 2


def fusible(graph: StepGraph, op: Op) -> bool:
    """Whether an operation may be part of a region."""
    if op.random or op.mutates or op.name.count(".") != 2 or not op.name.startswith("aten."):
        return False
    if op.name.split(".")[1] not in _FUSIBLE or any(r is None for r in op.results):
        return False
    outputs = (graph.tensors[t] for t in op.outputs)
    return all(tensor.is_dense and tensor.spans(graph.storages[tensor.storage].size_bytes) for tensor in outputs)


def runs(graph: StepGraph) -> list[range]:
    """Find the longest runs of such operations in the order of the step, those that are worth a call."""
    regions: list[range] = []
    start = 0
    for index, op in enumerate((*graph.ops, None)):
        if op is not None and fusible(graph, op):
            continue
        if index - start >= FEWEST_OPS and _touched(graph, graph.ops[start:index]) >= LEAST_BYTES:
            regions.append(range(start, index))
        start = index + 1
    return regions


def _touched(graph: StepGraph, ops: Sequence[Op]) -> int:
    return sum(graph.tensors[t].touched_bytes for t in {t for op in ops for t in (*op.inputs, *op.outputs)})


def remaining(graph: StepGraph, run: range, last_read: Sequence[int]) -> list[float]:
    """Share of each operation's bytes that is still read or written once a run of operations is one call.

    A tensor that the run makes and nobody reads behind it is never written; what it reads twice is read once.

    Args:
        last_read: Last operation that reads each storage (``last_reads``).
    """
    counted: set[int] = set()
    shares: list[float] = []
    for index in run:
        op = graph.ops[index]
        total = unread_bytes = 0
        for tensor in op.inputs:
            size, storage = graph.tensors[tensor].touched_bytes, graph.storage_of(tensor)
            total += size
            unread_bytes += size if storage not in counted else 0
            counted.add(storage)
        for tensor in op.outputs:
            size, storage = graph.tensors[tensor].touched_bytes, graph.storage_of(tensor)
            total += size
            unread_bytes += size if last_read[storage] >= run.stop else 0
            counted.add(storage)
        shares.append(unread_bytes / total if total else 1.0)
    return shares


def last_reads(graph: StepGraph) -> list[int]:
    """Last operation that reads each storage; the end of the step for what outlives it."""
    last = [len(graph.ops) if storage.role in PERSISTENT else -1 for storage in graph.storages]
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            storage = graph.storage_of(tensor)
            last[storage] = max(last[storage], index)
    for tensor in graph.results:
        last[graph.storage_of(tensor)] = len(graph.ops)
    return last
