"""Merged products do the same work; those of a Llama become the matrices that Megatron has."""

from __future__ import annotations

from collections import Counter

import pytest

from lading.catalog.tables import family_table
from lading.cost.fusion import merge_siblings
from lading.ir.layout import parse_layout
from lading.ir.work import Product, RankSegment, Stage
from lading.parallel.ranks import rank_segment


def block(layout: str) -> RankSegment:
    table = family_table("llama", layers=2, h=512, n=8, k=4, d=64, f=1408, v=1000)
    return rank_segment(table.segments[1], {**table.symbols, "s": 64}, parse_layout(layout))


def products(segment: RankSegment, stage: Stage) -> list[Product]:
    return [k.detail for k in segment.kernels if k.stage is stage and isinstance(k.detail, Product)]


@pytest.mark.parametrize("layout", ["mb2", "tp2,mb2", "tp4,sp,mb1"])
def test_flops_stay(layout: str) -> None:
    apart = block(layout)
    merged = merge_siblings(apart)
    for stage in Stage:
        assert sum(p.flops for p in products(merged, stage)) == sum(p.flops for p in products(apart, stage))
        assert Counter(k.kind for k in merged.kernels if not k.detail) <= Counter(k.kind for k in apart.kernels)


def test_matrices_of_a_llama() -> None:
    merged = merge_siblings(block("tp2,mb1"))
    qkv, rows = 512 // 2 + 2 * 256 // 2, 64
    forward = products(merged, Stage.FORWARD)
    assert [(p.m, p.n, p.k) for p in forward] == [
        (rows, qkv, 512), (rows, 512, 256), (rows, 1408, 512), (rows, 512, 704),
    ]  # fmt: skip
    inputs = products(merged, Stage.BACKWARD_INPUT)
    assert [(p.m, p.n, p.k) for p in inputs] == [
        (rows, 704, 512), (rows, 512, 1408), (rows, 256, 512), (rows, 512, qkv),
    ]  # fmt: skip
    weights = products(merged, Stage.BACKWARD_WEIGHT)
    assert sorted((p.m, p.n, p.k) for p in weights) == sorted(
        [(512, 704, rows), (1408, 512, rows), (512, 256, rows), (qkv, 512, rows)]
    )
