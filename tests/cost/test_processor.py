"""Kernels on a processor go by the most specific rate that was measured."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.kernels import kernel_s
from lading.cost.product import product_s
from lading.ir.graph import OpKind
from lading.ir.machine import Curve, Device
from lading.ir.work import Kernel, Product, Stage

STACK = stack_by_name("torch-eager-cpu")


def flat(rate: float) -> Curve:
    return Curve(size=(1e3, 1e9), rate=(rate, rate))


def device() -> Device:
    rates = {"elementwise": 1e9, "gelu": 2e9, "norm": 4e9, "reduction": 5e9, "reduction.strided": 6e9, "bmm": 7e9}
    return dataclasses.replace(load_machine("cpu").device, rates={name: flat(rate) for name, rate in rates.items()})


def kernel(name: str, kind: OpKind, stage: Stage = Stage.FORWARD, detail: Product | None = None) -> Kernel:
    return Kernel(name, kind, stage, "", "float32", 6_000_000, 2_000_000, (), (), detail)


@pytest.mark.parametrize(
    ("name", "kind", "stage", "seconds"),
    [
        ("aten.mul.Tensor", OpKind.ELEMENTWISE, Stage.FORWARD, 8e-3),
        ("aten.gelu.default", OpKind.TRANSCENDENTAL, Stage.FORWARD, 4e-3),
        ("aten.native_layer_norm_backward.default", OpKind.NORM, Stage.BACKWARD_INPUT, 2e-3),
        ("aten.sum.dim_IntList", OpKind.REDUCTION, Stage.BACKWARD_INPUT, 1.6e-3),
        ("aten.sum.dim_IntList", OpKind.REDUCTION, Stage.BACKWARD_WEIGHT, 8e6 / 6e9),
        ("aten.zeros_like.default", OpKind.ELEMENTWISE, Stage.FORWARD, 2e-3),
    ],
)
def test_bytes_go_at_the_rate_of_the_operation(name: str, kind: OpKind, stage: Stage, seconds: float) -> None:
    assert kernel_s(kernel(name, kind, stage), device(), STACK) == pytest.approx(seconds)


def test_what_has_no_rate_goes_at_the_memory_bandwidth() -> None:
    found = kernel_s(kernel("aten.sort.default", OpKind.SORT), device(), STACK)
    assert found == pytest.approx(8e6 / device().memory_bandwidth_bytes_per_s)


def test_products_go_by_shape_and_many_small_ones_by_their_own_rate() -> None:
    one, many = Product(512, 256, 128), Product(64, 64, 64, groups=10)
    assert kernel_s(kernel("aten.mm.default", OpKind.MATMUL, detail=one), device(), STACK) == product_s(
        one, "float32", device()
    )
    found = kernel_s(kernel("aten.bmm.default", OpKind.MATMUL, detail=many), device(), STACK)
    assert found == pytest.approx(many.flops / 7e9)
