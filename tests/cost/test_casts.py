"""Casts of operands of 8 and 4 bits: bytes by scaling and by whose kernels they are, and what shares an input."""

import dataclasses

import pytest

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.casts import CastBytes, cast_bytes, product_casts
from lading.cost.fusion import launched
from lading.cost.kernels import kernel_s, memory_s
from lading.cost.libraries import LOOKED, QUANTIZED
from lading.cost.product import product_s
from lading.errors import ConfigError
from lading.ir.graph import OpKind, Role
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.work import Collective, Kernel, LocalTensor, Product, RankSegment, Stage
from lading.sim.simulate import simulate

LLAMA_8B = Architecture(
    family="llama", symbols={"h": 4096, "n": 32, "k": 8, "d": 128, "v": 128256, "f": 14336}, blocks=(("block", 32),)
)
TE = stack_by_name("megatron-like")
TORCHAO = stack_by_name("compiled-torch")


def scaled(stack, scaling):
    return dataclasses.replace(stack, low_scaling=scaling)


def test_bytes_of_one_kernel_both_ways():
    assert cast_bytes("fp8", TE) == CastBytes(4, 0, 4)  # 2 read, 1 + 1 written
    assert cast_bytes("fp8", scaled(TE, "tensorwise")) == CastBytes(6, 0, 6, looks=2)  # and 2 read to find the largest
    block = cast_bytes("fp8", scaled(TE, "block"))
    assert block.inputs == block.gradients == 2 + 2 * (1 + 4 / 128)
    assert cast_bytes("mxfp8", TE).inputs == 2 + 2 * (1 + 1 / 32)
    assert cast_bytes("nvfp4", TE).inputs == 4 + 2 * (0.5 + 1 / 16)


def test_bytes_of_a_pass_for_each_way():
    # the figures of torchao's own model: roofline_utils.py, get_tensor_memory_traffic_ovhd_s
    tensor, row = cast_bytes("fp8", TORCHAO), cast_bytes("fp8", scaled(TORCHAO, "rowwise"))
    assert (tensor.inputs + tensor.inputs_again, tensor.gradients, tensor.weights + tensor.weights_back) == (6, 6, 8)
    assert (row.inputs + row.inputs_again, row.gradients, row.weights + row.weights_back) == (8, 8, 10)
    block = cast_bytes("fp8", scaled(TORCHAO, "block"))
    assert block.gradients == 2 * (2 + 1 + 4 / 128)
    assert block.weights == block.weights_back == 3 + 4 / 128
    mx = cast_bytes("mxfp8", TORCHAO)
    assert mx.inputs + mx.inputs_again == 2 * (2 + 1 + 1 / 32)


def test_weights_gathered_in_8_bits_are_cast_before():
    gathered = dataclasses.replace(TORCHAO, gather_dtype="float8_e4m3fn")
    assert cast_bytes("fp8", gathered).weights == 0 < cast_bytes("fp8", TORCHAO).weights
    assert cast_bytes("fp8", gathered).inputs == cast_bytes("fp8", TORCHAO).inputs


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Stage.FORWARD, 3 * 64 * 32 + 3 * 16 * 32),  # inputs of (m, k), weights of (k, n)
        (Stage.BACKWARD_INPUT, 8 * 64 * 32 + 7 * 16 * 32),  # gradients of (m, k), weights of (k, n)
        (Stage.BACKWARD_WEIGHT, 5 * 16 * 32),  # inputs of (k, n)
    ],
)
def test_operands_of_each_product(stage, expected):
    product = Product(64, 16, 32)
    kernel = Kernel("aten.mm.default", OpKind.MATMUL, stage, "", "bfloat16", 0, 0, (), (), product)
    row = scaled(TORCHAO, "rowwise")
    assert product_casts(kernel, product, "fp8", row, was_cast=False) == expected
    weights = {Stage.FORWARD: 3, Stage.BACKWARD_INPUT: 7, Stage.BACKWARD_WEIGHT: 0}[stage] * 16 * 32
    assert product_casts(kernel, product, "fp8", row, was_cast=True) == weights
    gpu = load_machine("h100").device
    alone = product_s(product, "fp8", gpu, of_weight=stage is Stage.BACKWARD_WEIGHT)
    assert kernel_s(kernel, gpu, row, "fp8") == pytest.approx(alone + memory_s(expected, "elementwise.fused", gpu))
    assert kernel_s(kernel, gpu, row) == pytest.approx(
        product_s(product, "bfloat16", gpu, of_weight=stage is Stage.BACKWARD_WEIGHT)
    )


def test_what_several_products_read_is_cast_once():
    tensors = tuple(
        LocalTensor(number, "bfloat16", (64, 64), 8192, Role.PARAMETER if number < 2 else Role.ACTIVATION)
        for number in range(6)
    )

    def product(stage, inputs, output):
        return Kernel(
            "aten.mm.default", OpKind.MATMUL, stage, "", "bfloat16", 1, 1, inputs, (output,), Product(64, 64, 64)
        )

    kernels = (
        product(Stage.FORWARD, (2, 0), 3),
        product(Stage.FORWARD, (2, 1), 4),  # of the same input
        product(Stage.FORWARD, (4, 1), 5),  # of the same weight alone
        product(Stage.BACKWARD_WEIGHT, (3, 2), 5),
        product(Stage.BACKWARD_WEIGHT, (4, 2), 5),
    )
    segment = RankSegment("block", kernels, tensors, (), (), (), parameters=((0, "dp"), (1, "dp")))
    cast = [kernel.name.endswith(QUANTIZED) for kernel in launched(segment, TORCHAO)]
    assert cast == [False, True, False, False, True]
    assert not any(kernel.name.endswith(QUANTIZED) for kernel in launched(segment, TE))


def test_the_largest_element_is_found_by_the_kernel_before():
    tensors = tuple(
        LocalTensor(number, "bfloat16", (64, 64), 8192, Role.PARAMETER if number == 0 else Role.ACTIVATION)
        for number in range(6)
    )

    def made(kind, inputs, output, detail=None, stage=Stage.FORWARD):
        return Kernel("aten.op.default", kind, stage, "", "bfloat16", 1, 1, inputs, (output,), detail)

    product, gather = Product(64, 64, 64), Collective("all_gather", "tp", 8192)
    kernels = (
        made(OpKind.NORM, (1,), 2),
        made(None, (2,), 3, gather),
        made(OpKind.MATMUL, (3, 0), 4, product),  # of what a norm made, gathered
        made(OpKind.MATMUL, (4, 0), 5, product),  # of what a product made
        made(OpKind.ELEMENTWISE, (5,), 2, stage=Stage.BACKWARD_INPUT),
        made(OpKind.MATMUL, (2, 0), 1, product, Stage.BACKWARD_INPUT),  # a compiler alone adds a sum to what it writes
    )
    segment = RankSegment("block", kernels, tensors, (), (), (), parameters=((0, "dp"),))

    def looked(stack):
        return [k.name.endswith(LOOKED) for k in launched(segment, stack) if isinstance(k.detail, Product)]

    assert looked(scaled(TE, "tensorwise")) == [True, False, False]
    assert looked(TORCHAO) == [True, False, True]
    assert not any(looked(TE))
    kernel, found = kernels[2], scaled(TE, "tensorwise")
    casts = [product_casts(kernel, product, "fp8", found, was_cast=False, looked=which) for which in (False, True)]
    assert casts == [6 * 64 * 64, 4 * 64 * 64]


def test_a_step_with_rows_scaled_takes_longer():
    def step_s(stack, scaling=""):
        request = StepRequest(
            name="",
            model=LLAMA_8B,
            seq_len=8192,
            machine="h100",
            layout=parse_layout("dp8,zero3,mb1,gb8,fp8"),
            stack=stack,
            linear_dtype=scaling,
        )
        return simulate(request).prediction.step_s

    assert step_s(TORCHAO) == step_s(TORCHAO, "tensorwise") < step_s(TORCHAO, "rowwise")
    assert step_s(TE) == step_s(TE, "delayed") < step_s(TE, "block") < step_s(TE, "tensorwise")


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ConfigError, match="low_scaling must be one of delayed, tensorwise, rowwise, block"):
        scaled(TE, "columnwise")
