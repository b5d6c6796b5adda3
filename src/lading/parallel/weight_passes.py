"""Passes over a rank's weights in each micro-batch, beside the products that use them.

[Note: passes over weights] Where parameters are kept in fp32 and products run in 16 bits, autocast makes a copy of each
weight in 16 bits in forward, and its gradient comes in 16 bits and is made fp32 (PyTorch aten/src/ATen/
autocast_mode.cpp, ``cached_cast``). From the second micro-batch on autograd adds a gradient to what is there
(torch/csrc/autograd/functions/accumulate_grad.h), where no product adds to it itself as Megatron's do. Neither depends
on tokens, so they matter where a micro-batch has few. Where gradients or parameters are cut over ranks nothing is added
up whole, and FSDP, which cuts parameters at either stage, casts shards.
Software with sums of its own (``Stack.own_sums``) leaves them to autograd at stage 1 of ZeRO only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from lading.ir.graph import DTYPE_BYTES, OpKind
from lading.ir.layout import Layout
from lading.ir.stack import Stack
from lading.ir.work import Kernel, Product, RankSegment, Stage
from lading.parallel.autocast import with_autocast

#: Stage of ZeRO from which on gradients or parameters are cut, and nothing passes over whole ones.
CUT = 2
#: Bytes of an element that products read.
_HALF = 2


def weight_passes(layout: Layout, stack: Stack) -> tuple[bool, bool]:
    """Whether weights are cast, and whether gradients are added up, in a micro-batch ([Note: passes over weights])."""
    if layout.zero >= CUT:
        return False, False
    wide = stack.parameters_dtype == "float32" and layout.precision != "fp32"
    sums_by_itself = stack.own_sums and layout.zero != 1
    sums_apart = stack.fusion != "fused" or "gradients" in stack.unfused
    return wide, sums_apart and layout.micro_batches > 1 and not sums_by_itself


def with_weight_passes(segment: RankSegment, layout: Layout, stack: Stack) -> RankSegment:
    """Segment with what its software moves of whole weights in a micro-batch ([Note: passes over weights])."""
    wide, adds = weight_passes(layout, stack)
    if not (wide or adds) or segment.trained_elements is not None or not segment.kernels:
        return segment
    if wide and stack.autocast and layout.tp == layout.cp == layout.ep == 1:
        segment = with_autocast(segment)
    before = tuple(_casts(segment, Stage.FORWARD, 4, _HALF)) if wide else ()
    after = tuple(_casts(segment, Stage.BACKWARD_WEIGHT, _HALF, 4)) if wide else ()
    if adds:
        gradient_bytes = 4 if wide or layout.precision == "fp32" else _HALF
        gradient_width = 4 if wide else DTYPE_BYTES[stack.gradient_dtype]
        after = (*after, *_sums(segment, gradient_bytes + gradient_width, gradient_width))
    backward = any(kernel.stage is not Stage.FORWARD for kernel in segment.kernels)
    return replace(segment, kernels=(*before, *segment.kernels, *(after if backward else ())))


def _casts(segment: RankSegment, stage: Stage, read: int, written: int) -> Iterator[Kernel]:
    """Yield a copy for each weight of a product."""
    used = {t for k in segment.kernels if isinstance(k.detail, Product) for t in k.inputs}
    for tensor, _ in segment.parameters:
        if tensor in used:
            yield _pass(segment, tensor, "weight_cast", OpKind.COPY, stage, (read, written))


def _sums(segment: RankSegment, read: int, written: int) -> Iterator[Kernel]:
    """Yield an addition for each parameter's gradient."""
    for tensor, _ in segment.parameters:
        yield _pass(segment, tensor, "accumulate", OpKind.ELEMENTWISE, Stage.BACKWARD_WEIGHT, (read, written))


def _pass(segment: RankSegment, tensor: int, name: str, kind: OpKind, stage: Stage, moved: tuple[int, int]) -> Kernel:
    elements = prod(segment.tensors[tensor].shape)
    read, written = (elements * size for size in moved)
    dtype = segment.tensors[tensor].dtype
    return Kernel(name, kind, stage, "weights", dtype, read, written, (tensor,), ())
