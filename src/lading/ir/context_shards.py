"""Context parallel: each rank has a run of the tokens of every sequence, and all parameters."""

from __future__ import annotations

import dataclasses

from lading.ir.defer import moved_blocks
from lading.ir.graph import PERSISTENT, Literal, OpKind, Role, StepGraph, rename_op
from lading.ir.graph_writer import GraphWriter
from lading.ir.layout import Layout
from lading.ir.tensor_shards import shard_tensors


def shard_context(captured: StepGraph, layout: Layout) -> StepGraph:
    """Rewrite a captured micro-batch into that of each rank along "cp".

    Raises:
        ConfigError: ranks do not divide the tokens, or the model looks none up.
    """
    return shard_tensors(_dense_inputs(captured), layout, "cp")


def _dense_inputs(captured: StepGraph) -> StepGraph:
    """Copy what a step views of inputs, or adds of a parameter's rows, where that is not all, to be cut from there."""
    writer = GraphWriter(captured)
    copies: dict[int, int] = {}
    spans: list[tuple[int, int]] = []
    for op in captured.ops:
        start = len(writer.ops)
        for tensor in op.inputs:
            view = captured.tensors[tensor]
            storage = captured.storages[view.storage]
            adds = storage.role in PERSISTENT and op.kind is OpKind.ELEMENTWISE
            if tensor in copies or view.spans(storage.size_bytes) or not (adds or storage.role is Role.INPUT):
                continue
            copies[tensor] = writer.fresh(f"{storage.name} used", view.dtype, view.shape)
            dense = (("memory_format", Literal("memory_format", "contiguous_format")),)
            writer.add("aten.clone.default", (tensor,), (copies[tensor],), op, OpKind.COPY, kwargs=dense)
        op_tensors = (*op.inputs, *op.outputs, *op.mutates, *(t for t in op.results if t is not None))
        writer.ops.append(op if op.mutates else rename_op(op, {t: copies.get(t, t) for t in op_tensors}))
        spans.append((start, len(writer.ops)))
    place = {index: end - 1 for index, (_, end) in enumerate(spans)}
    return dataclasses.replace(writer.written(captured), blocks=moved_blocks(captured, place))
