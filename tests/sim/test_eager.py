"""Bytes on ranks of stock PyTorch: the most of a step against what a recorder of live tensors saw on gloo ranks.

Measured by benchmarks/simulator/ranks.py with torch 2.13 on one to four gloo ranks; bytes do not depend on the host.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.golden.layouts import HOST
from tools.batches import random_batch

from lading.catalog.stacks import stack_by_name
from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.table import ModelTable
from lading.models.reference import build_model, model_class
from lading.sim.simulate import simulate
from lading.tracing.tabulate import module_table

GPT = {"num_layers": 4, "dim": 512, "num_heads": 8, "vocab_size": 4096, "max_seq_len": 256, "tied": False}
LLAMA = {
    "num_layers": 4, "dim": 512, "num_heads": 8, "num_kv_heads": 4, "hidden_dim": 1408, "vocab_size": 4096,
    "max_seq_len": 256,
}  # fmt: skip
NARROW = {**LLAMA, "dim": 384, "num_heads": 6, "num_kv_heads": 2, "hidden_dim": 1024}


@cache
def table_of(model: str, sizes: tuple[tuple[str, Any], ...]) -> ModelTable:
    batch = random_batch(model, dict(sizes), rows=3, tokens=256, seed=0)
    return module_table(
        build_model(model, **dict(sizes)), batch, model_class(model).loss, model, tokens=256, whole=False
    )


def request_of(model: str, sizes: dict[str, Any], layout: str) -> tuple[StepRequest, ModelTable]:
    request = StepRequest(
        name=model,
        model=Architecture(family=model, symbols={}, blocks=(("block", 4),)),
        seq_len=256,
        machine=str(HOST),
        layout=parse_layout(f"fp32,{layout}"),
        stack=stack_by_name("torch-eager-cpu"),
    )
    return request, table_of(model, tuple(sizes.items()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "sizes", "layout", "measured"),
    [
        pytest.param("gpt", GPT, "mb2,gb2", 297_709_808, marks=pytest.mark.slow),
        ("llama", LLAMA, "mb2,gb4,recompute=full", 288_573_640),
        pytest.param("gpt", {**GPT, "num_layers": 3}, "dp2,mb1,gb4", 315_035_844, marks=pytest.mark.slow),
        ("llama", LLAMA, "dp2,zero3,mb2,gb4", 225_962_172),
        pytest.param(
            "gpt", {**GPT, "dim": 384, "num_heads": 6}, "dp4,zero2,mb2,gb8", 149_559_292, marks=pytest.mark.slow
        ),
        pytest.param("llama", LLAMA, "tp2,mb2,gb2", 171_705_024, marks=pytest.mark.slow),
        ("gpt", {**GPT, "vocab_size": 16384, "tied": True}, "mb2,gb2", 423_538_712),  # torch.profiler, one process
        ("llama", {**LLAMA, "num_layers": 3}, "tp4,sp,mb2,gb2", 70_011_044),
        pytest.param("gpt", GPT, "pp2,mb1,gb4", 180_103_312, marks=pytest.mark.slow),
        ("llama", NARROW, "pp2,dp2,zero2,gpipe,mb1,gb8", 154_893_216),
    ],
)
def test_the_peak_is_what_torch_holds(model: str, sizes: dict[str, Any], layout: str, measured: int) -> None:
    request, table = request_of(model, sizes, layout)

    assert simulate(request, table).peak_bytes == pytest.approx(measured, rel=0.0065)


def test_states_cut_without_fsdp_are_refused() -> None:
    request, table = request_of("gpt", {**GPT, "num_layers": 1}, "dp2,zero1,gb2")
    with pytest.raises(ConfigError, match="zero2 or zero3"):
        simulate(request, table)


def test_states_of_adapters_only():
    """A rank-8 adapter has 8 (in + out) elements beside each of the seven matrices of a block; AdamW keeps 8 bytes."""
    request, table = request_of("llama", LLAMA, "mb1,gb1")
    request = replace(request, task="lora", lora_rank=8)
    (roles,) = simulate(request, table).memory
    trained = 4 * 8 * (2 * (512 + 512) + 2 * (512 + 256) + 3 * (512 + 1408))
    frozen = 4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408 + 2 * 512) + 2 * 4096 * 512 + 512
    assert roles[Role.OPTIMIZER_STATE] == 2 * 4 * trained
    assert roles[Role.GRADIENT] <= 4 * trained
    assert 4 * (trained + frozen) <= roles[Role.PARAMETER] < 4.1 * (trained + frozen)
