"""Kernels of a rank and operations of a step have one price on a device; a processor's goes by its measured rates."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch

import lading
from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.compute import op_seconds
from lading.cost.kernels import kernel_s
from lading.cost.product import product_s
from lading.ir.graph import OpKind
from lading.ir.layout import Layout
from lading.ir.machine import Curve, Device
from lading.ir.work import Kernel, Product, Stage
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.parallel.ranks import rank_segment
from lading.tracing.tabulate import captured_table

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


@pytest.mark.parametrize(("columns", "times"), [(4096, 1.0), (4104, 1.0), (4097, 1.25), (1025, 1.0), (50257, 1.6)])
def test_a_product_takes_longer_where_its_rows_begin_at_no_whole_vector(columns: int, times: float) -> None:
    even, odd = (
        Curve(size=(1024, 4096, 16384), rate=(8e9,) * 3),
        Curve(size=(1024, 4096, 16384), rate=(9e9, 6.4e9, 5e9)),
    )
    known = dataclasses.replace(device(), rates={"matmul.even": even, "matmul.odd": odd})
    product = kernel("aten.mm.default", OpKind.MATMUL, detail=Product(256, columns, 768))
    plain = kernel_s(product, dataclasses.replace(known, rates={}), STACK)
    assert kernel_s(product, known, STACK) == pytest.approx(times * plain, rel=1e-3)


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype", "where"),
    [
        ("gpt", torch.float32, "cpu"),
        ("llama", torch.bfloat16, "cpu"),
        ("llama", torch.bfloat16, "rtx4090"),
        ("gpt", torch.float32, "a100"),
        ("llama", torch.bfloat16, "h100"),
    ],
)
def test_a_step_and_a_rank_pay_the_same_price(name: str, dtype: torch.dtype, where: str) -> None:
    """All classes but one: a kernel has no strides, so what runs against the order of memory is cheaper there."""
    with torch.device("meta"):
        model = build_model(name, num_layers=1, dim=64, num_heads=4, vocab_size=128, max_seq_len=64).to(dtype)
    batch, machine = {"tokens": torch.zeros(2, 65, dtype=torch.int64)}, load_machine(where).device
    graph, table = (
        lading.capture(model, batch, next_byte_loss),
        captured_table(model, batch, next_byte_loss, whole=False),
    )
    of_step: defaultdict[OpKind, float] = defaultdict(float)
    for op in graph.ops:
        of_step[op.kind] += op_seconds(graph, op, machine) - machine.op_overhead_s
    of_rank: defaultdict[OpKind, float] = defaultdict(float)
    for segment, count in zip(table.segments, table.counts, strict=True):
        for one in rank_segment(segment, {"b": 2, "s": 64}, Layout(micro_batch=2)).kernels:
            assert one.kind is not None
            of_rank[one.kind] += count * kernel_s(one, machine, STACK)
    assert of_step.keys() == of_rank.keys() > {OpKind.MATMUL, OpKind.ATTENTION, OpKind.SOFTMAX, OpKind.GATHER}
    assert of_rank[OpKind.ELEMENTWISE] <= of_step[OpKind.ELEMENTWISE] * (1 + 1e-12)
    del of_rank[OpKind.ELEMENTWISE], of_step[OpKind.ELEMENTWISE]
    assert of_rank == pytest.approx(of_step)


@pytest.mark.parametrize(
    ("name", "flops_per_s"), [("rtx4090", 54.7e12), ("rtxpro6000", 77.1e12), ("l40s", 46.9e12), ("v100s", 13.55e12)]
)
def test_products_of_float32_reach_what_boards_of_a_data_sheet_were_measured_to(name: str, flops_per_s: float) -> None:
    """On GPUs since 2020 they reach two thirds of the peak or less, a share that 16-bit products tell nothing of."""
    large, board = 1 << 20, load_machine(name).device
    product = Product(large, large, large)
    work = 2.0 * large**3
    wide = Kernel("aten.mm.default", OpKind.MATMUL, Stage.FORWARD, "", "float32", 0, 0, (), (), product)
    assert work / kernel_s(wide, board, STACK) == pytest.approx(flops_per_s, rel=5e-3)
    half = kernel_s(dataclasses.replace(wide, dtype="float16"), board, STACK)
    share = board.product_efficiency
    assert share is not None
    assert work / half == pytest.approx(board.peak_flops_per_s["float16"] * share.at(work), rel=1e-3)
