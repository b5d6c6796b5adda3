"""Scores and masks: what attention that is not fused, and dropout, make and keep in blocks whose tables have neither.

Tables of most families have attention as one operation and no dropout; GPT's come in both forms. For the others the
squares of scores, and the masks of dropout, are put beside the operations here. Seconds of attention in parts are those
of ``lading.cost.fusion.unfused``.

[Note: what attention in parts keeps] Softmax keeps its result, in the products' format, or in fp32 and as a copy where
it is computed in fp32 (transformers, ``eager_attention_forward``: softmax in float32, then ``.to(query.dtype)``).
Dropout of scores keeps a mask of a byte and the scores that are left.
"""

from __future__ import annotations

from dataclasses import replace

from lading.ir.graph import DTYPE_BYTES, OpKind, Role
from lading.ir.work import Attention, Kernel, LocalTensor, RankSegment, Stage

#: Dropouts of a block behind attention and behind the MLP.
_DROPOUTS = 2


def with_scores(segment: RankSegment, *, wide: bool, dropout: float) -> RankSegment:
    """Segment whose attention keeps its squares of scores ([Note: what attention in parts keeps]).

    Args:
        wide: Softmax is computed in fp32 by operations of its own.
        dropout: Probability that a score is dropped; 0 for none.
    """
    tensors, kernels, saved = list(segment.tensors), list(segment.kernels), list(segment.saved)
    pending: list[tuple[int, ...]] = []
    for place, kernel in enumerate(kernels):
        work = kernel.detail
        if not isinstance(work, Attention):
            continue
        if not work.backward:
            shape = work.batch, work.heads, work.query_tokens, work.key_tokens
            dtypes = (*(("float32",) if wide else ()), kernel.dtype, *(("bool", kernel.dtype) if dropout else ()))
            scores = tuple(_added(tensors, dtype, shape) for dtype in dtypes)
            kernels[place] = replace(kernel, outputs=(*kernel.outputs, *scores))
            pending.append(scores)
            saved += scores
        elif pending:
            kernels[place] = replace(kernel, inputs=(*kernel.inputs, *pending.pop()))
    return replace(segment, tensors=tuple(tensors), kernels=tuple(kernels), saved=tuple(saved))


def with_dropout(segment: RankSegment) -> RankSegment:
    """Block that drops out what attention and the MLP add to the stream: masks of a byte, drawn and read again."""
    if not (segment.enters and segment.leaves):
        return segment
    stream = segment.tensors[segment.leaves[0]]
    forward = [place for place, kernel in enumerate(segment.kernels) if kernel.stage is Stage.FORWARD]
    if not forward or len(forward) == len(segment.kernels):
        return segment
    tensors = list(segment.tensors)
    masks = [_added(tensors, "bool", stream.shape) for _ in range(_DROPOUTS)]
    elements = stream.size_bytes // DTYPE_BYTES[stream.dtype]
    like, size = segment.kernels[forward[-1]], stream.size_bytes
    drawn = [_mask_kernel(like, "dropout", OpKind.RANDOM, size, size + elements, (), (mask,)) for mask in masks]
    back = [k for k in segment.kernels if k.stage is not Stage.FORWARD]
    read = [
        _mask_kernel(back[0], "dropout_back", OpKind.ELEMENTWISE, size + elements, size, (mask,), ()) for mask in masks
    ]
    end = forward[-1]
    kernels = (*segment.kernels[:end], *drawn, *segment.kernels[end : end + 1], *read, *segment.kernels[end + 1 :])
    return replace(segment, tensors=tuple(tensors), kernels=kernels, saved=(*segment.saved, *masks))


def _added(tensors: list[LocalTensor], dtype: str, shape: tuple[int, ...]) -> int:
    """Add an activation with a storage of its own; returns its place."""
    size = DTYPE_BYTES[dtype]
    for length in shape:
        size *= length
    storage = 1 + max(tensor.storage for tensor in tensors)
    tensors.append(LocalTensor(storage, dtype, shape, size, Role.ACTIVATION))
    return len(tensors) - 1


def _mask_kernel(
    like: Kernel, name: str, kind: OpKind, read: int, written: int, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> Kernel:
    """Kernel of one dropout in the stage and format of another kernel of its block."""
    return replace(
        like,
        name=name,
        kind=kind,
        module="dropout",
        bytes_read=read,
        bytes_written=written,
        inputs=inputs,
        outputs=outputs,
        detail=None,
    )
