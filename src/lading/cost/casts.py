"""Casts: bytes moved to convert 16-bit operands to 8 and 4 bits, by scaling and by implementation.

[Note: casts of operands]
Each operand of the three products of a matrix is read along its rows in one product and along its columns in another:
inputs in forward and for the weight's gradient, gradients of outputs for both backward products, weights in forward
and backward. A scale has to be known before an element is cast.

    delayed      one scale a tensor, from the steps before: the tensor is not read for it
    tensorwise   one scale a tensor, from its own largest element: the tensor is read once more before the cast, unless
                 the kernel that made it found that element
    rowwise      one scale a row or column: each of the two casts finds its own
    block        one scale for 128 elements of a row or column (weights: for 128 x 128), found during the cast
    (mxfp8 and nvfp4 have blocks of 32 and 16, whatever the scaling; nvfp4 also has a scale of the tensor)

Dedicated kernels (Transformer Engine: cast and transpose) read an operand once and write it both ways. They cast
weights in a step's first micro-batch alone, or the weights are kept cast, so weights count nothing. Kernels of
torch.compile (torchao) are one pass for each way, and weights are cast in every use, on each rank, unless they were
gathered in 8 bits. Bytes of an element are those of torchao's own model (pytorch/ao
torchao/testing/training/roofline_utils.py @05980129: get_tensor_memory_traffic_ovhd_s), where two bytes are a 16-bit
read or write:

    tensorwise   inputs, gradients 2 + (2 + 1 + 1); weights 2 + (2 + 1) forward, 2 + 1 backward
    rowwise      inputs (2 + 1) forward, (2 + 2 + 1) for the weight's gradient; gradients (2 + 1 + 2) + (2 + 1);
                 weights (2 + 1) forward, (2 + 2) + (2 + 1) backward
    block        inputs (2 + 1) and (2 + 1); gradients likewise; weights (2 + 1) and (2 + 1), and scales
                 (torchao/prototype/blockwise_fp8_training: a kernel for each)

Sources of the fused ones: NVIDIA/TransformerEngine transformer_engine/common/cast (cast_transpose, current scaling,
block scaling); block scaling of 1 x 128 and 128 x 128: arXiv 2412.19437, 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lading.cost.product import OPERAND_BYTES
from lading.ir.stack import Stack
from lading.ir.work import Kernel, Product, Stage

#: Bytes of a 16-bit element, and of a scale in fp32 for each of the 128 elements that share it.
_HALF, _BLOCK_SCALE = 2.0, 4.0 / 128


@dataclass(frozen=True, slots=True)
class CastBytes:
    """Bytes moved to cast an element of each operand of a product.

    Attributes:
        inputs, inputs_again: Bytes for the input, in forward and for the gradient of the weight.
        gradients: Bytes for the gradient of the output, for both backward products.
        weights, weights_back: Bytes for the weight, in forward and for the gradient of the input.
        looks: Bytes among these that are read to find the largest element of inputs and gradients.
    """

    inputs: float
    inputs_again: float
    gradients: float
    weights: float = 0.0
    weights_back: float = 0.0
    looks: float = 0.0


def cast_bytes(precision: str, stack: Stack) -> CastBytes:
    """Bytes moved for each element of operands that run in ``precision`` ([Note: casts of operands]).

    Args:
        precision: "fp8", "mxfp8" or "nvfp4".
    """
    scaling = stack.low_scaling if precision == "fp8" else precision
    written = OPERAND_BYTES[precision] + (_BLOCK_SCALE if scaling == "block" else 0.0)
    looks = _HALF if scaling in ("tensorwise", "rowwise", "nvfp4") else 0.0
    separate_looks = looks if scaling == "tensorwise" else 0.0
    if stack.fused_casts:
        both = looks + _HALF + 2 * written
        return CastBytes(both, 0.0, both, looks=separate_looks)
    rewrite = _HALF + written
    if scaling in ("delayed", "tensorwise"):
        both = looks + rewrite + written
        return _where_weights_are_cast(CastBytes(both, 0.0, both, looks + rewrite, rewrite, separate_looks), stack)
    if scaling == "rowwise":
        return CastBytes(rewrite, rewrite + _HALF, 2 * rewrite + _HALF, rewrite, rewrite + 2 * _HALF)
    look_and_rewrite = rewrite + looks
    return CastBytes(look_and_rewrite, look_and_rewrite, 2 * look_and_rewrite, look_and_rewrite, look_and_rewrite)


def _where_weights_are_cast(moved: CastBytes, stack: Stack) -> CastBytes:
    """Drop the casts of weights if these are gathered in 8 bits: each rank has cast its shard, which is not counted."""
    if not stack.gather_dtype.startswith("float8"):
        return moved
    return replace(moved, weights=0.0, weights_back=0.0)


def product_casts(
    kernel: Kernel, product: Product, precision: str, stack: Stack, *, was_cast: bool, looked: bool = False
) -> float:
    """Bytes moved to cast the operands of one product.

    Args:
        was_cast: Whether its input was cast by the kernel before, or for another product of the stretch.
        looked: Whether the kernel that made its operand found the largest element.
    """
    cast_rows = cast_bytes(precision, stack)
    saved_looks = cast_rows.looks if looked else 0.0
    rows = float(product.groups * product.m * product.k)
    columns = float(product.groups * product.n * product.k)
    if kernel.stage is Stage.BACKWARD_WEIGHT:  # (outputs, tokens) by (tokens, inputs)
        return 0.0 if was_cast else cast_rows.inputs_again * columns
    if kernel.stage is Stage.BACKWARD_INPUT:
        return (0.0 if was_cast else (cast_rows.gradients - saved_looks) * rows) + cast_rows.weights_back * columns
    return (0.0 if was_cast else (cast_rows.inputs - saved_looks) * rows) + cast_rows.weights * columns
