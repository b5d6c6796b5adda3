"""What Megatron's libraries run in the place of captured operations: permutes, experts' products, biases, scans."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.architectures import architecture_table
from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.fusion import launched
from lading.cost.kernels import kernel_s, runs_low
from lading.ir.graph import OpKind
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture
from lading.ir.stack import Stack
from lading.ir.work import Kernel, Stage
from lading.parallel.ranks import rank_segment

SIZES = {"h": 512, "n": 8, "k": 2, "d": 64, "v": 1024, "e": 8, "a": 2, "g": 256}
ROWS = 2 * 256 * 2  # of two sequences of 256 tokens, to two experts each
PLAIN = dataclasses.replace(stack_by_name("megatron-bridge"), fused_permute=False)


def _kernels(stack: Stack, **more: int) -> tuple[Kernel, ...]:
    model = Architecture(family="moe", symbols={**SIZES, **more}, blocks=(("moe", 2),))
    table = architecture_table(model)
    layout = parse_layout("dp2,ep2,etp1,mb2,gb4")
    return launched(rank_segment(table.segments[1], {**table.symbols, "s": 256}, layout), stack)


def _moved(kernels: tuple[Kernel, ...]) -> int:
    return sum(k.bytes_read + k.bytes_written for k in kernels)


def test_fused_permutes_clear_nothing_and_scatter_nothing_large() -> None:
    fused = _kernels(dataclasses.replace(PLAIN, fused_permute=True))
    large = [k for k in fused if k.kind is OpKind.SCATTER and k.bytes_written > 1 << 18]
    assert not large
    sums = [k for k in fused if "index_add" in k.name]
    assert [(k.kind, k.bytes_written) for k in sums] == [(OpKind.GATHER, 2 * 256 * 512 * 2)]
    assert sums[0].bytes_read >= ROWS * 512 * 2
    assert _moved(fused) < _moved(_kernels(PLAIN))


def test_between_fused_products_nothing_is_left_and_their_second_casts_nothing() -> None:
    plain, fused = _kernels(PLAIN), _kernels(dataclasses.replace(PLAIN, fused_experts=True))
    gone = {k.name for k in plain} - {k.name for k in fused}
    assert any("silu" in name for name in gone)
    assert not any("silu" in k.name and k.module.endswith("experts") for k in fused)
    second = [k for k in fused if k.name.endswith(".quantized") and k.stage is not Stage.BACKWARD_WEIGHT]
    assert len(second) == 2  # the second product of forward, and the gradient of the first one's input
    device = load_machine("gb200").device
    same = [dataclasses.replace(k, name=k.name.removesuffix(".quantized")) for k in second]
    assert all(
        kernel_s(a, device, PLAIN, "mxfp8") < kernel_s(b, device, PLAIN, "mxfp8")
        for a, b in zip(second, same, strict=True)
    )


def test_biased_experts_pass_over_their_rows_unless_products_do_it() -> None:
    plain, biased = _kernels(PLAIN), _kernels(PLAIN, biased=1)
    extra = [k for k in biased if k.name.startswith("strided.") and k.module.endswith("experts")]
    forward = sum(k.bytes_read + k.bytes_written for k in extra if k.stage is Stage.FORWARD)
    assert forward == ROWS * (512 * 8 + 512 * 28)  # both clamps and a concatenation; the bias in fp32
    turned = tuple(k for k in biased if k.module == "rope")
    one = tuple(k for k in plain if k.module == "rope")
    assert _moved(turned) > 3 * _moved(one)
    assert _moved(biased) - _moved(plain) == _moved(tuple(extra)) + _moved(turned) - _moved(one)
    inside = _kernels(dataclasses.replace(PLAIN, fused_experts=True), biased=1)
    assert not any(k.name.startswith("strided.") and k.module.endswith("experts") for k in inside)


@pytest.mark.parametrize(("machine", "ratio"), [("gb200", 2.0), ("h100", 1.0)])
def test_scans_take_as_long_for_a_multiprocessor(machine: str, ratio: float) -> None:
    sizes = {"h": 512, "n": 8, "k": 8, "d": 64, "v": 1024, "f": 1024, "ms": 64, "mh": 16, "md": 64, "mg": 4}
    table = architecture_table(Architecture(family="mamba2", symbols=sizes, blocks=(("mamba", 2),)))
    segment = rank_segment(table.segments[1], {**table.symbols, "s": 1024}, parse_layout("dp1,mb2,gb2"))
    scans = [k for k in launched(segment, PLAIN) if k.name.startswith("scan.")]
    assert len(scans) > 5
    assert not any(runs_low(k, "mxfp8") for k in scans)
    device = load_machine(machine).device
    copies = [dataclasses.replace(k, name="copy", kind=OpKind.COPY, detail=None) for k in scans]
    seconds = [sum(kernel_s(k, device, PLAIN) for k in kernels) for kernels in (scans, copies)]
    assert seconds[0] / seconds[1] == pytest.approx(ratio, rel=0.02)
