"""Scratch: bytes that a kernel allocates inside, beside its arguments and results.

Told by the profiler's memory events on torch 2.13 CPU kernels; a test compares. Buffers of the BLAS library are not
seen there: they belong to the overhead that the probe measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import torch

from lading.ir.graph import Arg, Op, Ref, StepGraph, Tensor

_T = TypeVar("_T")
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"})
#: Elementwise kernels that compute in the type their inputs have in common.
_PROMOTING = frozenset(
    {
        "add", "addcdiv", "addcmul", "div", "eq", "ge", "gt", "le", "lerp", "lt", "maximum", "minimum", "mul", "ne",
        "pow", "sub", "where",
    }
)  # fmt: skip
#: Kernels without inner scratch, but for a contiguous copy of what is not contiguous.
_PLAIN = frozenset(
    {
        "native_layer_norm", "_fused_rms_norm", "embedding", "embedding_dense_backward", "arange", "constant_pad_nd",
        "stack", "split_with_sizes_copy", "sum", "mean", "cumsum",
    }
)  # fmt: skip
_CHANNEL_BLOCK = 16


def bytes_of(tensors: Sequence[torch.Tensor | None]) -> int:
    """Total bytes of the elements of tensors, as if dense."""
    return sum(t.element_size() * prod(t.shape) for t in tensors if t is not None)


def inner_bytes(operation: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]) -> int:
    """Upper bound of the bytes that the functional kernel of ``operation`` allocates inside.

    Args:
        operation: Name without namespace and overload. One that is not known counts a copy of every input.
    """
    threads = torch.get_num_threads()
    loose = bytes_of([t for t in inputs if not t.is_contiguous()])
    match operation:
        case "_scaled_dot_product_flash_attention_for_cpu":
            rows, columns, width = _attention_tile(inputs)
            # In 16 bits k and v may be packed, and a tile is rounded.
            narrow = bytes_of(inputs[1:3]) + threads * rows * columns * 2 if _is_half(inputs) else 0
            return narrow + threads * (rows * columns + 2 * rows + rows * width) * 4
        case "_scaled_dot_product_flash_attention_for_cpu_backward":
            rows, columns, width = _attention_tile(inputs[1:])
            grad = 0 if inputs[0].transpose(1, 2).is_contiguous() else bytes_of(inputs[:1]) + 64
            product = rows * -(-columns // 128) * 128 * 8  # what oneDNN takes for one
            narrow = threads * (2 * rows * columns * 2 + product) if _is_half(inputs) else 0
            return grad + narrow + threads * (2 * rows * columns + rows + 64) * 4
        case "native_layer_norm_backward" | "_fused_rms_norm_backward":
            return loose + threads * 8 * inputs[1].shape[-1] + 4096
        case "convolution" | "convolution_backward":
            return sum(_blocked_bytes(t) for t in (*inputs, *outputs) if t is not None)
        case "_scaled_dot_product_flash_attention" | "_scaled_dot_product_efficient_attention":
            return 0
        case "_scaled_dot_product_flash_attention_backward":
            return _flash_backward_bytes(inputs)
        case _ if operation in _PLAIN:
            return loose
        case _:
            return bytes_of(inputs)


def out_bytes(operation: str, inputs: Sequence[torch.Tensor]) -> int:
    """Upper bound of the bytes that an out= or in-place kernel allocates inside: copies of inputs it cannot read."""
    if operation in _PRODUCTS:
        return bytes_of([t for t in inputs if t.dim() >= 2 and not _blas_can_read(t)])
    if operation in _SOFTMAXES:
        return bytes_of([t for t in inputs if not t.is_contiguous()])
    if operation.removesuffix("_") in _PROMOTING:
        return _cast_bytes(inputs)
    return 0


def wide_bytes(operation: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]) -> int:
    """Upper bound of the bytes that a CPU's product of 16-bit numbers takes: its result in 32 bits, operands packed.

    Measured on processors with matrix units (AMX), torch 2.13: 16 to 20 MiB where this says 25.
    """
    if operation not in _PRODUCTS or not _is_half(inputs):
        return 0
    return bytes_of(inputs) + 2 * bytes_of(outputs)


def _cast_bytes(inputs: Sequence[torch.Tensor]) -> int:
    """Bytes of the inputs that an elementwise kernel first casts to the dtype all inputs have in common."""
    if not inputs:
        return 0
    common = inputs[0].dtype
    for t in inputs[1:]:
        common = torch.promote_types(common, t.dtype)
    return sum(prod(t.shape) for t in inputs if t.dtype is not common) * common.itemsize


def _blas_can_read(t: torch.Tensor) -> bool:
    rows, columns = t.shape[-2:]
    step, unit = t.stride()[-2:]
    return (unit == 1 and step >= max(1, columns)) or (step == 1 and unit >= max(1, rows))


def _flash_backward_bytes(inputs: Sequence[torch.Tensor]) -> int:
    """Bytes that the backward of a GPU's flash attention allocates inside.

    Sums of q's gradient and of rows in float32, in whole tiles; k's and v's gradients for every query head.

    Source: ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    batch, heads, length, width = inputs[1].shape
    rows, columns = -(-length // 128) * 128, -(-width // 32) * 32
    spread = 2 * bytes_of(inputs[2:3]) * heads // inputs[2].shape[1] if inputs[2].shape[1] != heads else 0
    return 4 * batch * heads * rows * (columns + 1) + spread


def _is_half(inputs: Sequence[torch.Tensor]) -> bool:
    return inputs[0].dtype in (torch.bfloat16, torch.float16)


def _attention_tile(inputs: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Size (rows of q, rows of k, width of a head) of the tile that one thread of a CPU's attention works on.

    Source: ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    queries, keys, width = inputs[0].shape[2], inputs[1].shape[2], inputs[0].shape[3]
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys), width


def _blocked_bytes(t: torch.Tensor) -> int:
    """Bytes of a tensor in oneDNN's blocked layout: channels in whole blocks."""
    channels = -(-t.shape[1] // _CHANNEL_BLOCK) * _CHANNEL_BLOCK if t.dim() > 1 else 1
    return t.element_size() * prod(t.shape) // max(1, t.shape[1] if t.dim() > 1 else 1) * channels


def by_signature(graph: StepGraph, scratch: Callable[[Op], _T]) -> list[_T]:
    """Apply ``scratch`` to each operation of a graph, once for those that differ only in which tensors they work on."""
    by_key: dict[object, _T] = {}
    results: list[_T] = []
    for op in graph.ops:
        key = signature(graph, op)
        if key not in by_key:
            by_key[key] = scratch(op)
        results.append(by_key[key])
    return results


def signature(graph: StepGraph, op: Op) -> object:
    """Key of an operation: all but which tensors it works on; its text is the same in every process."""
    return (
        op.name, _geometry(graph, op.args), tuple((name, _geometry(graph, arg)) for name, arg in op.kwargs),
        tuple(None if r is None else _geometry(graph, Ref(r)) for r in op.results), bool(op.mutates),
    )  # fmt: skip


def _geometry(graph: StepGraph, arg: Arg) -> object:
    """Replace tensors in an argument by (dtype, shape, stride), and numbers by (type, number), as True is no 1."""
    if isinstance(arg, Ref):
        t = graph.tensors[arg.tensor]
        return t.dtype, t.shape, t.stride
    return tuple(_geometry(graph, item) for item in arg) if isinstance(arg, tuple) else (type(arg).__name__, arg)


def extent(t: Tensor) -> int:
    """Number of elements in memory from the first to the last of a tensor, gaps between them counted."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True)) if 0 not in t.shape else 0
