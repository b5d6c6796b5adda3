"""What runs again, and what is kept: against the formulas of Korthikanti et al. 2022 (arXiv 2205.05198)."""

import pytest

from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.work import Product, RankSegment
from lading.parallel.memory import kept_sizes, saved_bytes, segment_memory
from lading.parallel.ranks import rank_segment
from lading.parallel.recompute import recomputed

B, S, H, N = 2, 256, 128, 8
SBH = S * B * H


def layer(family: str = "gpt", layout: str = "dp1", **sizes: int) -> RankSegment:
    table = family_table(family, layers=1, **({"h": H, "n": N, "v": 1000} | sizes))
    return rank_segment(table.segments[1], {**table.symbols, "s": S, "b": B}, parse_layout(layout))


def flops(segment: RankSegment, places: tuple[int, ...] | None = None) -> int:
    chosen = segment.kernels if places is None else [segment.kernels[p] for p in places]
    return sum(
        2 * k.detail.m * k.detail.n * k.detail.k * k.detail.groups for k in chosen if isinstance(k.detail, Product)
    )


def statistics(tp: int = 1) -> int:
    """Bytes the paper leaves out: mean and deviation of two norms, log-sums of attention, in fp32."""
    return 4 * S * B * 4 // tp


def test_products_of_a_layer():
    assert flops(layer()) == 72 * B * S * H * H


def test_activations_of_a_layer_without_dropout():
    """34 sbh less two dropout masks; fused attention keeps a log-sum for each row and head."""
    sums = 4 * S * B * N
    assert saved_bytes(layer()) == 32 * SBH + statistics() + sums
    assert saved_bytes(layer(layout="tp4")) == 8 * SBH + 24 * SBH // 4 + statistics() + sums // 4
    assert saved_bytes(layer(layout="tp4,sp")) == 32 * SBH // 4 + statistics(4) + sums // 4


def test_activations_of_a_layer_with_dropout_and_unfused_attention():
    """The formulas of the paper's table 2 to the byte, but for the norms' statistics."""
    pairs = 5 * N * S * S * B
    for family in ("gpt-unfused", "gpt-dropout"):
        assert saved_bytes(layer(family)) == 34 * SBH + pairs + statistics()
        assert saved_bytes(layer(family, "tp4")) == 10 * SBH + (24 * SBH + pairs) // 4 + statistics()
        assert saved_bytes(layer(family, "tp4,sp")) == (34 * SBH + pairs) // 4 + statistics(4)
        cut = layer(family, "tp4,sp")
        again = recomputed(cut, "selective")
        slopes = 2 * B * N * S // 4 if family == "gpt-unfused" else 0  # ALiBi's, which the core takes
        mask = 0 if family == "gpt-unfused" else 2  # the number that masked scores get
        assert saved_bytes(cut, again) == 34 * SBH // 4 + statistics(4) + slopes + mask
        assert flops(cut, again.kernels) * 4 == 4 * B * S * S * H  # the scores and the values: 4 b s^2 h


def test_products_of_a_layer_with_unfused_attention():
    """72 b s h^2 (1 + s / 6h), as the paper counts."""
    for family in ("gpt-unfused", "gpt-dropout"):
        assert flops(layer(family)) == 72 * B * S * H * H + 12 * B * S * S * H
    with pytest.raises(ConfigError, match=r"context parallel needs fused attention, got aten.b"):
        layer("gpt-unfused", "cp2")


def test_full_recompute_keeps_what_enters():
    for layout, share in (("dp1", 1), ("tp4", 1), ("tp4,sp", 4)):
        segment = layer(layout=layout)
        full = recomputed(segment, "full")
        assert saved_bytes(segment, full) == 2 * SBH // share
        assert [segment.kernels[p].name for p in full.kernels] == [
            k.name for k in segment.kernels if k.stage.value == "forward"
        ]
    assert flops(layer(), recomputed(layer(), "full").kernels) == 24 * B * S * H * H


def test_torch_stops_early():
    segment = layer(layout="tp4")
    again = recomputed(segment, "full", early_stop=True).kernels
    names = [segment.kernels[p].name for p in again]
    assert names.count("all_reduce") == 1  # that of the MLP is read by nobody in backward
    assert flops(segment, again) * 4 == (24 - 8) * B * S * H * H


def test_selective_recompute_of_fused_attention_runs_it_again_and_keeps_its_result():
    segment = layer()
    again = recomputed(segment, "selective")
    assert ["attention" in segment.kernels[p].name for p in again.kernels] == [True]
    assert saved_bytes(segment, again) == saved_bytes(segment) - 4 * S * B * N


def test_selective_recompute_of_ring_attention_sends_again():
    segment = layer(layout="cp4")
    names = [segment.kernels[p].name for p in recomputed(segment, "selective").kernels]
    assert names.count("send") == 3
    assert len(names) == 7


def test_modules_by_name():
    segment = layer("llama", k=2, d=16, f=384)
    mlp = recomputed(segment, "selective", ["mlp"])
    assert flops(segment, mlp.kernels) == 3 * 2 * B * S * H * 384
    early = recomputed(segment, "selective", ["mlp"], early_stop=True)
    assert flops(segment, early.kernels) == 2 * 2 * B * S * H * 384  # the last product is read by nobody in backward
    assert early.saved == mlp.saved
    assert saved_bytes(segment) - saved_bytes(segment, mlp) == 4 * 2 * B * S * 384
    segment = layer()
    norms = recomputed(segment, "selective", ["layernorm"])
    assert saved_bytes(segment) - saved_bytes(segment, norms) == 4 * SBH + statistics()
    acts = recomputed(segment, "selective", ["act"])
    assert [segment.kernels[p].name for p in acts.kernels] == ["aten.gelu.default"]
    assert saved_bytes(segment) - saved_bytes(segment, acts) == 8 * SBH
    with pytest.raises(ConfigError, match=r"expected parts of segment 'layers' \(core_attn, .*mlp_in.*\), got 'moon'"):
        recomputed(segment, "selective", ["moon"])
    with pytest.raises(ConfigError, match="none, selective or full, got 'some'"):
        recomputed(segment, "some")


def test_by_operation_every_other_product_runs_again():
    segment = layer("llama", k=2, d=16, f=384)
    again = recomputed(segment, "selective", ["op"])
    products = [p for p in again.kernels if isinstance(segment.kernels[p].detail, Product)]
    assert [segment.kernels[p].module for p in products] == ["attn.wk", "attn.wo", "mlp.up"]
    assert saved_bytes(segment, again) < saved_bytes(segment)


def test_fusing_keeps_less():
    f = 384
    segment = layer("llama", k=2, d=16, f=f)
    eager, fused, compiled = (saved_bytes(segment, fusion=fusion) for fusion in ("eager", "fused", "compiled"))
    assert eager - fused == 2 * S * B * f  # silu of the gate, made again from the gate
    assert fused - compiled >= 2 * S * B * f + 4 * SBH  # the product of gate and up, and both norms' results
    with pytest.raises(ConfigError, match="expected eager, fused or compiled, got 'much'"):
        saved_bytes(segment, fusion="much")


def test_operands_of_products_are_kept_in_half_of_their_bytes():
    f = 384
    segment = layer("llama", k=2, d=16, f=f)
    again = recomputed(segment, "selective", ["layernorm", "act"])
    whole, low = (kept_sizes(segment, again, operand_share=share) for share in (1.0, 0.5))
    halved = {storage for storage in whole if low[storage] != whole[storage]}
    assert all(2 * low[storage] == whole[storage] for storage in halved)
    assert {whole[storage] for storage in halved} == {2 * S * B * f}  # gate and up, from which the activation is made
    kept = saved_bytes(segment, again, operand_share=0.5)
    assert kept == saved_bytes(segment, again) - 2 * S * B * f
    memory = segment_memory(segment, again, operand_share=0.5)
    assert memory.saved == kept
    assert memory.forward_peak == segment_memory(segment, again).forward_peak
    everything = kept_sizes(segment), kept_sizes(segment, operand_share=0.5)
    assert sum(everything[1].values()) < sum(everything[0].values())


def test_peaks_hold_what_is_kept():
    for family, sizes in (("gpt", {}), ("llama", {"k": 2, "d": 16, "f": 384})):
        segment = layer(family, **sizes)
        for mode in ("none", "selective", "full"):
            memory = segment_memory(segment, recomputed(segment, mode))
            assert memory.forward_peak >= memory.saved
            assert memory.backward_peak >= memory.saved + 2 * SBH
    whole, full = (segment_memory(layer(), recomputed(layer(), mode)) for mode in ("none", "full"))
    assert full.saved < whole.saved
    assert full.backward_peak > 30 * SBH  # all of the layer is there again
