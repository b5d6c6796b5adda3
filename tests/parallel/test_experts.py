"""Experts spread over ranks, and attention of low rank."""

from collections import Counter

import pytest

from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.graph import OpKind
from lading.ir.layout import parse_layout
from lading.ir.work import Attention, Collective, Product, RankSegment, Stage
from lading.parallel.ranks import rank_segment

B, S, H, N, E, A, G = 2, 256, 128, 8, 16, 2, 96
MOE = {"h": H, "n": N, "k": 4, "d": 16, "v": 1000, "e": E, "a": A, "g": G}
MLA = {
    "h": H,
    "n": N,
    "f": 384,
    "v": 1000,
    "e": E,
    "a": A,
    "g": G,
    "fs": 96,
    "kr": 64,
    "qr": 48,
    "dn": 16,
    "dr": 8,
    "dv": 16,
}
ROWS = B * S * A


def moe(layout: str) -> RankSegment:
    table = family_table("moe", layers=2, **MOE)
    return rank_segment(table.segments[1], {**table.symbols, "s": S, "b": B}, parse_layout(layout))


def latent(layout: str, segment: int = 1) -> RankSegment:
    table = family_table("mla-moe", layers=2, dense_layers=1, **MLA)
    return rank_segment(table.segments[segment], {**table.symbols, "s": S, "b": B}, parse_layout(layout))


def grouped(segment: RankSegment) -> list[Product]:
    return [k.detail for k in segment.kernels if isinstance(k.detail, Product) and "grouped" in k.name]


def on(segment: RankSegment, axis: str) -> list[tuple[str, int]]:
    found = [k.detail for k in segment.kernels if isinstance(k.detail, Collective)]
    return [(c.op, c.size_bytes) for c in found if c.axis == axis]


def test_rows_go_to_the_experts_and_come_back():
    layer = moe("dp8,ep8")
    row, weight = ROWS * H * 2, ROWS * 2
    forward = [("all_to_all", row), ("all_to_all", weight), ("all_to_all", row)]
    backward = [("all_to_all", row), ("all_to_all", weight), ("all_to_all", row)]
    assert on(layer, "ep") == forward + backward
    assert layer.parameter_elements["dp/ep"] == (E // 8) * (H * 2 * G + G * H)
    assert moe("dp8").parameter_elements["dp/ep"] == 8 * layer.parameter_elements["dp/ep"]


def test_a_rank_has_as_many_rows_of_fewer_experts():
    whole, cut = grouped(moe("dp8")), grouped(moe("dp8,ep8"))
    assert [p.groups for p in cut] == [E // 8] * 6
    assert [p.m * p.n * p.k * p.groups for p in cut] == [p.m * p.n * p.k * p.groups for p in whole]


def test_experts_of_few_tokens_have_a_row_each():
    table = family_table("moe", layers=2, **MOE)
    few = rank_segment(table.segments[1], {**table.symbols, "s": 4, "b": 1}, parse_layout("dp1"))
    assert 4 * A < E
    assert all(p.groups == E and min(p.m, p.n, p.k) >= 1 for p in grouped(few))


def test_experts_cut_within_gather_the_rows_of_tp_ranks():
    layer = moe("tp2,sp,dp4,ep4")
    half = ROWS * H * 2 // 2
    assert [size for op, size in on(layer, "ep") if size > ROWS * 8] == [half] * 4
    assert Counter(op for op, _ in on(layer, "etp")) == {"all_gather": 2 + 3, "reduce_scatter": 1 + 2}
    assert {p.n for p in grouped(layer)} | {p.k for p in grouped(layer)} >= {G // 2}
    assert sum(layer.summed_parameters) == 2 * H + E * H  # norms and the router, but no expert


def test_whole_experts_on_tp_ranks_see_cut_tokens():
    layer = moe("tp2,sp,dp4,ep8,etp1")
    assert on(layer, "etp") == []
    assert {p.groups for p in grouped(layer)} == {E // 8}
    assert sum(p.m * p.n * p.k * p.groups for p in grouped(layer)) * 2 == sum(
        p.m * p.n * p.k * p.groups for p in grouped(moe("dp8"))
    )


def test_layouts_of_experts_that_cannot_be():
    with pytest.raises(
        ConfigError, match="e = 16 experts to be a multiple of ep, got ep 32; the nearest that can be is 16"
    ):
        moe("dp32,ep32")
    with pytest.raises(ConfigError, match=r"experts that are not cut \(etp1\) need tp ranks of different tokens"):
        moe("tp2,dp4,ep8,etp1")
    with pytest.raises(ConfigError, match="etp must be 1 or as tp 4, got 2"):
        moe("tp4,dp4,ep4,etp2")


def test_products_of_low_rank_are_whole_and_gathered_behind_their_norm():
    layer = latent("tp2,sp")
    weights = {t.name: t.shape for t in layer.tensors if t.name.endswith("weight")}
    assert weights["attn.q_down.weight"] == (48, H)
    assert weights["attn.q_up.weight"] == (N // 2 * (16 + 8), 48)
    assert weights["attn.kv_up.weight"] == (N // 2 * (16 + 16), 64)
    gathered = [size for op, size in on(layer, "tp") if op == "all_gather"][:3]
    assert gathered == [
        B * S * 48 * 2,
        B * S * 64 * 2,
        B * S * 8 * 2,
    ]  # queries, latent, the part of keys that all share
    (attention,) = [k.detail for k in layer.kernels if isinstance(k.detail, Attention) and not k.detail.backward]
    assert (attention.heads, attention.qk_dim, attention.v_dim) == (N // 2, 24, 16)


def test_no_operation_mixes_cut_and_whole_tokens():
    """Inputs of one operation that have tokens have as many, whatever the layout."""
    for layout in ("tp2,sp", "tp2,sp,cp2", "tp2,sp,dp4,ep4", "tp2,sp,dp4,ep8,etp1"):
        for place in (1, 2):
            layer = latent(layout, place)
            for kernel in layer.kernels:
                if kernel.kind in (OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.NORM):
                    shapes = [layer.tensors[t].shape for t in (*kernel.inputs, *kernel.outputs)]
                    for dims in zip(*(reversed(shape) for shape in shapes), strict=False):
                        assert len(set(dims) - {1}) <= 1, kernel


def test_products_of_experts_are_told_apart_in_backward():
    stages = Counter(k.stage for k in moe("dp8,ep8").kernels if "grouped" in k.name)
    assert stages == {Stage.FORWARD: 2, Stage.BACKWARD_INPUT: 2, Stage.BACKWARD_WEIGHT: 2}
