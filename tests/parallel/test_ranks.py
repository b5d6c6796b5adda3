"""What a rank runs: shapes, collectives and parameters of GPT and Llama, cut in the known ways."""

from collections import Counter
from math import prod

import pytest

from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.graph import OpKind, Role
from lading.ir.layout import parse_layout
from lading.ir.work import Attention, Collective, Kernel, Product, RankSegment, Stage
from lading.parallel.ranks import rank_segment

B, S, H, N, K, D, F, V = 2, 256, 128, 8, 2, 16, 384, 1000


def table(family: str):
    sizes = {"h": H, "n": N, "v": V}
    return family_table(family, layers=2, **(sizes if family == "gpt" else {**sizes, "k": K, "d": D, "f": F}))


def segments(family: str, layout: str, **options: bool) -> list[RankSegment]:
    found = table(family)
    values = {**found.symbols, "s": S, "b": B}
    return [rank_segment(segment, values, parse_layout(layout), **options) for segment in found.segments]


def collectives(segment: RankSegment, stage: Stage | None = None) -> list[Collective]:
    kernels = [k for k in segment.kernels if stage is None or k.stage is stage]
    return [k.detail for k in kernels if isinstance(k.detail, Collective)]


def products(segment: RankSegment) -> list[Product]:
    return [k.detail for k in segment.kernels if isinstance(k.detail, Product)]


def flops(segment: RankSegment) -> int:
    return sum(2 * p.m * p.n * p.k * p.groups for p in products(segment))


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_one_rank_runs_what_the_table_says(family: str):
    for segment, whole in zip(table(family).segments, segments(family, "dp1"), strict=True):
        kernels = [op for op in segment.ops if op.kind is not OpKind.VIEW]
        assert [k.name for k in whole.kernels] == [op.name for op in kernels]
        values = {**table(family).symbols, "s": S, "b": B}
        for op, kernel in zip(kernels, whole.kernels, strict=True):
            expected = [tuple(d.at(values) for d in segment.tensors[t].dims) for t in op.inputs]
            assert [whole.tensors[t].shape for t in kernel.inputs] == expected


@pytest.mark.parametrize(
    ("family", "layout"), [("gpt", "tp4"), ("llama", "tp2"), ("llama", "tp2,sp"), ("gpt", "tp8,sp")]
)
def test_products_are_shared_out_in_full(family: str, layout: str):
    """Every product has a tp-th of its work on each rank: none is done twice."""
    tp = parse_layout(layout).tp
    for mine, whole in zip(segments(family, layout), segments(family, "dp1"), strict=True):
        assert flops(mine) * tp == flops(whole)


def test_a_layer_of_gpt_with_tensor_parallel_reduces_twice_forward_and_twice_backward():
    before, layer, after = segments("gpt", "tp4")
    hidden = B * S * H * 2
    assert [(c.op, c.axis, c.size_bytes) for c in collectives(layer)] == [("all_reduce", "tp", hidden)] * 4
    assert [k.stage for k in layer.kernels if k.kind is None] == [Stage.FORWARD] * 2 + [Stage.BACKWARD_INPUT] * 2
    assert [(c.op, c.size_bytes) for c in collectives(before)] == [("all_reduce", hidden)]
    small = B * S * 4
    assert [(c.op, c.size_bytes) for c in collectives(after)] == [("all_reduce", small)] * 3 + [("all_reduce", hidden)]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_sequence_parallel_gathers_and_scatters_instead(family: str):
    _, layer, _ = segments(family, "tp2,sp")
    ops = Counter(c.op for c in collectives(layer))
    assert ops == {"all_gather": 2 + 2 + 2, "reduce_scatter": 2 + 2}  # forward, backward, inputs gathered again
    kept = Counter(c.op for c in collectives(segments(family, "tp2,sp", regather=False)[1]))
    assert kept == {"all_gather": 2 + 2, "reduce_scatter": 2 + 2}
    assert {c.size_bytes for c in collectives(layer)} == {B * S * H * 2}
    norms = [k for k in layer.kernels if k.kind is OpKind.NORM and k.stage is Stage.FORWARD]
    assert all(layer.tensors[k.inputs[0]].shape == (B, S // 2, H) for k in norms)
    assert layer.tensors[layer.enters[0]].shape == layer.tensors[layer.leaves[0]].shape == (B, S // 2, H)


def test_gradients_of_norms_are_summed_over_ranks_that_cut_tokens():
    whole, cut = segments("llama", "tp2")[1], segments("llama", "tp2,sp")[1]
    assert (sum(whole.summed_parameters), sum(cut.summed_parameters)) == (0, 2 * H)
    assert sum(segments("gpt", "tp2,sp")[1].summed_parameters) == 2 * 2 * H + 2 * H  # norms; biases behind a sum


def test_heads_are_cut_before_the_head_size_and_key_heads_are_repeated():
    def attention(layout: str) -> Attention:
        return next(k.detail for k in segments("llama", layout)[1].kernels if isinstance(k.detail, Attention))

    assert (attention("tp2").heads, attention("tp2").kv_heads, attention("tp2").qk_dim) == (4, 1, D)
    assert (attention("tp8").heads, attention("tp8").kv_heads) == (1, 1)
    assert sum(segments("llama", "tp8")[1].summed_parameters) == 2 * H * D  # keys and values of a head on four ranks
    shapes = {t.name: t.shape for t in segments("llama", "tp8")[1].tensors if t.role is Role.PARAMETER and t.name}
    assert shapes["attn.wk.weight"] == (D, H)


@pytest.mark.parametrize(
    ("family", "layout", "said"),
    [
        ("gpt", "tp16", r"expected n = 8 heads to be a multiple of tp, got tp 16; the nearest that can be is 8"),
        ("llama", "tp3", r"n = 8 heads to be a multiple of tp, got tp 3; the nearest that can be is 2"),
        ("llama", "tp8,sp,cp64", r"s = 256 tokens to be a multiple of cp\*tp, got cp\*tp 512; .* is 256"),
        ("llama", "cp3", r"s = 256 tokens to be a multiple of cp, got cp 3; the nearest that can be is 2"),
        ("llama", "cp16,cp_comm=all_to_all", r"8 heads of a tp rank to be a multiple of cp, got cp 16"),
        ("llama", "cp2,cp_comm=gossip", r"cp_comm must be ring, all_gather or all_to_all, got 'gossip'"),
        ("llama", "sp", r"sequence parallel \(sp\) cuts tokens over tp ranks, got tp1"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error_naming_the_rule(family: str, layout: str, said: str):
    with pytest.raises(ConfigError, match=said):
        segments(family, layout)


def test_key_heads_that_do_not_fit():
    found = family_table("llama", layers=1, h=192, n=12, k=3, d=16, f=F, v=V)
    with pytest.raises(ConfigError, match="k = 3 key-value heads to be a multiple or a divisor of tp, got tp 4"):
        rank_segment(found.segments[1], {**found.symbols, "s": S}, parse_layout("tp4"))


def test_parameters_are_shared_out():
    for family in ("gpt", "llama"):
        whole = sum(s.parameter_elements["dp"] for s in segments(family, "dp1"))
        cut = segments(family, "tp2")
        replicated = 0
        for segment in cut:
            for t in segment.tensors:
                repeated = t.role is Role.PARAMETER and t.name.endswith(("norm.weight", "norm.bias", "out.bias"))
                replicated += prod(t.shape) * repeated
            replicated += S * H * (family == "gpt" and segment.name == "before")
        assert sum(s.parameter_elements["dp"] for s in cut) == (whole + replicated) // 2


def test_a_vocabulary_is_padded():
    assert segments("llama", "tp8")[0].parameter_elements == {"dp": 125 * H}
    found = family_table("llama", layers=1, h=H, n=N, k=K, d=D, f=F, v=1001)
    before = rank_segment(found.segments[0], {**found.symbols, "s": S}, parse_layout("tp8"))
    assert before.parameter_elements == {"dp": 126 * H}


def test_context_parallel_has_as_many_pairs_in_every_form():
    def pairs(layout: str) -> int:
        kernels: tuple[Kernel, ...] = segments("llama", layout)[1].kernels
        found = [k.detail for k in kernels if isinstance(k.detail, Attention) and not k.detail.backward]
        return sum(a.heads * a.query_tokens * a.key_tokens // (2 if a.causal else 1) for a in found)

    assert pairs("dp1") == 4 * pairs("cp4") == 4 * pairs("cp4,cp_comm=all_gather")
    assert pairs("dp1") == 2 * pairs("cp2,cp_comm=all_to_all")


def test_context_parallel_by_heads_takes_the_keys_of_its_own():
    def heads(layout: str) -> set[tuple[int, int]]:
        kernels = segments("llama", layout)[1].kernels
        return {(k.detail.heads, k.detail.kv_heads) for k in kernels if isinstance(k.detail, Attention)}

    assert heads("dp1") == {(N, K)}
    assert heads("cp2,cp_comm=all_to_all") == {(N // 2, K // 2)}
    assert heads("cp4,cp_comm=all_to_all") == {(N // 4, 1)}  # fewer heads of keys than ranks: one each


def test_context_parallel_sends_keys_and_values_on():
    layer = segments("llama", "cp4")[1]
    both = 2 * B * K * (S // 4) * D * 2
    forward, backward = (collectives(layer, stage) for stage in (Stage.FORWARD, Stage.BACKWARD_INPUT))
    assert forward == [Collective("send", "cp", both)] * 3
    assert backward == [Collective("send", "cp", both)] * (3 + 4)
    gathered = segments("llama", "cp4,cp_comm=all_gather")[1]
    assert [c.op for c in collectives(gathered)] == ["all_gather", "all_gather", "reduce_scatter"]
    assert {c.size_bytes for c in collectives(gathered)} == {4 * both}


def test_gradients_of_weights_are_told_from_those_of_inputs():
    layer = segments("llama", "tp2")[1]
    weights = [p for p, k in ((k.detail, k) for k in layer.kernels) if k.stage is Stage.BACKWARD_WEIGHT]
    assert len([p for p in weights if isinstance(p, Product)]) == 7
    names = {k.name for k in layer.kernels if k.stage is Stage.BACKWARD_WEIGHT}
    assert names == {"aten.mm.default"}
