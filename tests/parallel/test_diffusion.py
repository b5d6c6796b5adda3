"""Diffusion transformers: conditions beside the tokens, attention to a text, norms over all heads."""

from collections import Counter

import pytest

from lading.catalog.tables import family_table, stored_table
from lading.ir.layout import parse_layout
from lading.ir.work import Attention, Collective, Product, RankSegment, Stage
from lading.parallel.ranks import rank_segment

B, S, T, H, N, F = 2, 256, 128, 128, 8, 512
SIZES = {"h": H, "n": N, "f": F, "d": H // N, "t": T}


def block(family: str, layout: str) -> RankSegment:
    names = [name for name in stored_table(family).symbols if name not in ("b", "s")]
    table = family_table(family, layers=4, **{name: SIZES.get(name, 4) for name in names})
    return rank_segment(table.segments[1], {**table.symbols, "s": S, "b": B}, parse_layout(layout))


def flops(segment: RankSegment, stage: Stage) -> int:
    found = [k.detail for k in segment.kernels if k.stage is stage]
    return sum(2 * p.m * p.n * p.k for p in found if isinstance(p, Product))


def counts(segment: RankSegment, stage: Stage) -> Counter[str]:
    found = [k.detail for k in segment.kernels if k.stage is stage]
    return Counter(c.op for c in found if isinstance(c, Collective) and c.size_bytes > B * S * 4)


@pytest.mark.parametrize("family", ["dit", "wan"])
def test_products_on_tokens_are_shared_out(family: str):
    whole, cut = block(family, "dp1"), block(family, "tp4")
    modulation = 2 * B * H * 6 * H if family == "dit" else 0  # on one vector a sequence: every rank does it
    assert (flops(cut, Stage.FORWARD) - modulation) * 4 == flops(whole, Stage.FORWARD) - modulation
    assert flops(block(family, "tp4,sp"), Stage.FORWARD) == flops(cut, Stage.FORWARD)


def test_each_part_of_a_block_gathers_and_scatters():
    for family, parts in (("dit", 2), ("wan", 3)):  # attention, attention to the text, MLP
        assert counts(block(family, "tp4"), Stage.FORWARD) == {"all_reduce": parts}
        assert counts(block(family, "tp4,sp"), Stage.FORWARD) == {"all_gather": parts, "reduce_scatter": parts}


def test_norms_over_all_heads_exchange_one_number_a_token():
    small = [
        k for k in block("wan", "tp4").kernels if isinstance(k.detail, Collective) and k.detail.size_bytes <= B * S * 4
    ]
    forward = [k.detail.size_bytes for k in small if k.stage is Stage.FORWARD and isinstance(k.detail, Collective)]
    assert forward == [B * S * 4, B * S * 4, B * S * 4, B * T * 4]
    backward = [k.detail.size_bytes for k in small if k.stage is not Stage.FORWARD and isinstance(k.detail, Collective)]
    assert sorted(backward) == sorted(forward)


def test_a_text_is_whole_on_every_rank_of_context_parallel():
    """Also where its length is that of a rank's part of the tokens."""
    for layout in ("cp2", "cp4"):
        cp = parse_layout(layout).cp
        layer = block("wan", layout)
        found = [k.detail for k in layer.kernels if isinstance(k.detail, Attention) and not k.detail.backward]
        assert [(a.query_tokens, a.key_tokens) for a in found] == [(S // cp, S // cp)] * cp + [(S // cp, T)]
        assert not any(a.causal for a in found)


def test_gradients_of_conditions_are_summed_over_ranks_that_cut_tokens():
    layer = block("dit", "tp4,sp")
    sums = [k.detail.size_bytes for k in layer.kernels if k.detail and getattr(k.detail, "op", "") == "all_reduce"]
    assert sums == [B * 6 * H * 2]
