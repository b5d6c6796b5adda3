"""Sharded graphs run: all ranks of a layout, in one process, have the loss and the gradients of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from tests.parallel.player import Played, Step
from tools.models.decoder import PartsConfig, PartsDecoder
from tools.rank_graphs import rank_graph

from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import Layout, parse_layout
from lading.ir.table import ModelTable
from lading.ir.work import Collective
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.parallel.ranks import rank_segment
from lading.tracing.tabulate import module_table

TOKENS, VOCAB = 16, 64
_SIZES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"num_kv_heads": 2},
    "moe": {"num_kv_heads": 2, "num_experts": 4, "num_active": 2},
}
_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "max_seq_len": TOKENS, "num_layers": 2, "dim": 32, "num_heads": 4}
#: Sums are added up in another order: in float64 by 1e-15 or so of the largest, in float32 by 1e-7.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


@cache
def captured(name: str) -> tuple[torch.nn.Module, ModelTable]:
    """A small model whose weights are not those it starts with (norms of one, biases of zero), and its table."""
    torch.manual_seed(0)
    if name == "dispatched":  # grouped products take no float64
        config = PartsConfig(
            **_COMMON, num_kv_heads=2, parts=("attention", "experts"), num_experts=4, num_active=2, expert_dim=16
        )
        model: torch.nn.Module = PartsDecoder(config)
    else:
        model = build_model(name, **_COMMON, **_SIZES[name]).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    batch = {"tokens": torch.zeros(4, TOKENS + 1, dtype=torch.int64)}
    return model, module_table(model, batch, next_byte_loss, name, tokens=TOKENS)


def batches_of(layout: Layout) -> list[list[dict[str, torch.Tensor]]]:
    """By micro-batch and replica."""
    draw = torch.Generator().manual_seed(1)
    shape = (layout.micro_batch, TOKENS + 1)
    return [
        [{"tokens": torch.randint(0, VOCAB, shape, generator=draw)} for _ in range(layout.dp)]
        for _ in range(layout.micro_batches)
    ]


def check_equal(model: torch.nn.Module, batches: list[list[dict[str, torch.Tensor]]], played: Played) -> None:
    """Loss and gradients of plain PyTorch on all of the batch."""
    model.zero_grad()
    tokens = torch.cat([replica["tokens"] for replicas in batches for replica in replicas])
    loss = next_byte_loss(model, {"tokens": tokens})
    loss.backward()
    tolerance = _TOLERANCE[loss.dtype]
    torch.testing.assert_close(played.loss, loss.detach(), rtol=tolerance, atol=0)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        ours = [played.gradients[alias] for alias in names[id(parameter)] if alias in played.gradients]
        error = (sum(ours) - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error <= tolerance, f"gradient of {name} is off by {error:.1e}"


def counted(table: ModelTable, layout: Layout) -> Counter[tuple[str, str]]:
    """Elements that each kind of collective moves, as costs count them."""
    elements_of: Counter[tuple[str, str]] = Counter()
    for segment, count in zip(table.segments, table.counts, strict=True):
        for kernel in rank_segment(segment, {**table.symbols, "s": TOKENS}, layout).kernels:
            if isinstance(kernel.detail, Collective):
                elements = kernel.detail.size_bytes // DTYPE_BYTES[kernel.dtype]
                elements_of[kernel.detail.op, kernel.detail.axis] += count * elements
    return elements_of


_DENSE = (
    "mb2", "mb2,tp2", "mb2,tp4", "mb2,tp2,sp", "mb2,tp4,sp", "mb2,cp2,cp_comm=all_gather", "mb2,pp2,gb4",
    "mb2,tp2,sp,cp2,pp2,dp2,gb8,cp_comm=all_gather",
)  # fmt: skip
_ROUTED = (
    "mb2,tp2", "mb2,tp2,sp", "mb2,dp2,ep2", "mb2,dp4,ep2,pp2,gb16", "mb2,dp2,tp2,sp,ep2", "mb2,dp2,tp2,sp,ep4,etp1",
    "mb2,cp2,ep2,cp_comm=all_gather",
)  # fmt: skip
#: Each way of sharding is run every time with one model; the rest is slow.
_QUICK = {
    ("llama", "mb2,tp2"), ("gpt", "mb2,tp4"), ("llama", "mb2,tp2,sp"), ("gpt", "mb2,pp2,gb4"),
    ("llama", "mb2,cp2,cp_comm=all_gather"), ("dispatched", "mb2,dp2,ep2"), ("dispatched", "mb2,dp2,tp2,sp,ep2"),
}  # fmt: skip
_EVERY = [*((name, layout) for name in _SIZES for layout in _DENSE), *(("dispatched", layout) for layout in _ROUTED)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "layout"),
    [pair if pair in _QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in _EVERY],
)
def test_ranks_compute_what_the_model_does(name: str, layout: str) -> None:
    """Also: collectives move as many elements as costs count, rows of routed tokens as many as a router sends."""
    model, table = captured(name)
    asked = parse_layout(layout)
    batches = batches_of(asked)
    played = Step(table, model, asked, TOKENS).run(batches)
    check_equal(model, batches, played)
    moved: Counter[tuple[str, str]] = Counter()
    for op, axis, elements in played.moved:
        moved[op, axis] += elements
    sends = moved.pop(("send", "pp"), 0)
    assert bool(sends) == asked.is_pipeline
    expected = {key: count * asked.micro_batches for key, count in counted(table, asked).items()}
    for key, elements in expected.items():
        if "ep" in key or "etp" in key:  # as many as there are where all experts are as busy
            assert moved[key] == pytest.approx(elements, rel=0.5), key
        else:
            assert moved[key] == elements, key
    assert moved.keys() == expected.keys()


def test_gradients_that_ranks_have_in_part_are_counted() -> None:
    """Those that the player has to sum over tp ranks to be right: biases, norms and learned positions."""
    _, table = captured("gpt")
    layout, sizes = parse_layout("mb2,tp2,sp"), {**table.symbols, "s": TOKENS}
    names: set[str] = set()
    for segment in table.segments:
        graph, ranked = rank_graph(segment, sizes, layout), rank_segment(segment, sizes, layout)
        summed = [graph.tensors[p.tensor] for p in graph.parameters if p.summed]
        assert sum(ranked.summed_parameters) == sum(prod(dim.length for dim in t.dims) for t in summed)
        names.update(t.name for t in summed)
    assert names == {
        "positions.weight", "attn_norm.weight", "attn_norm.bias", "attn_out.bias", "mlp_norm.weight", "mlp_norm.bias",
        "mlp_out.bias", "norm.weight", "norm.bias",
    }  # fmt: skip


def test_learned_positions_of_cut_tokens_are_summed() -> None:
    """In a table whose positions are as many as its tokens, their gradient's tokens are cut; ranks have zeros else."""
    table = family_table("gpt", layers=2, h=32, n=4, d=8, f=64, v=VOCAB)
    sizes = {**table.symbols, "s": TOKENS}
    assert sum(rank_segment(table.segments[0], sizes, parse_layout("tp2,sp")).summed_parameters) == TOKENS * 32
    assert sum(rank_segment(table.segments[0], sizes, parse_layout("tp2")).summed_parameters) == 0


def test_a_table_of_the_catalog_runs() -> None:
    """Captured at other sizes, without weights and in bfloat16."""
    torch.manual_seed(0)
    model = build_model("llama", **_COMMON, num_kv_heads=2, hidden_dim=64).to(torch.bfloat16)
    table = family_table("llama", layers=2, h=32, n=4, k=2, d=8, f=64, v=VOCAB)
    tokens = torch.randint(0, VOCAB, (2, TOKENS + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    played = Step(table, model, parse_layout("mb2,tp2"), TOKENS).run([[batch]])
    torch.testing.assert_close(played.loss, next_byte_loss(model, {"tokens": tokens}).detach(), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("layout", "sizes", "said"),
    [
        ("cp2", {}, "expected cp_comm=all_gather, got ring"),
        ("tp2", {"v": 63}, "expected a vocabulary that is a multiple of tp 2"),
    ],
)
def test_what_only_costs_know_is_refused(layout: str, sizes: Mapping[str, Any], said: str) -> None:
    table = family_table("llama", layers=2, **{"h": 32, "n": 4, "k": 2, "d": 8, "f": 64, "v": VOCAB, **sizes})
    with pytest.raises(ConfigError, match=said):
        rank_graph(table.segments[0], {**table.symbols, "s": TOKENS}, parse_layout(layout))
