"""Whole steps of clusters: laws that hold for every layout, and published steps at a stated tolerance."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lading.catalog.stacks import stack_by_name
from lading.clusters import step_of, summary
from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.ir.request import Request
from lading.sim.simulate import Simulated, simulate

GPT = {"model": "gpt3-175b", "machine": "a100", "seq_len": 2048, "stack": "megatron-2022"}


def step(layout: str, **others: Any) -> Simulated:
    request, table = step_of(Request(**{**GPT, "layout": layout, **others}))
    return simulate(request, table)


LAYOUTS = [
    "tp8,pp8,gb16",
    "tp8,pp8,vpp3,gb16",
    "tp8,sp,dp2,zero1,gb8",
    "dp64,zero3,gb64,recompute=full",
    "tp4,cp2,pp4,gb8",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_add_up(layout: str) -> None:
    found = step(layout, stack="megatron-core").step
    assert sum(found.shares_s.values()) == pytest.approx(found.step_s)
    assert min(found.shares_s.values()) >= -1e-9


@pytest.mark.parametrize("layout", ["tp8", "tp8,pp4"])
def test_a_reduction_that_nothing_overlaps_makes_the_step_longer(layout: str) -> None:
    """Four replicas take longer than one by the reduction of all that a rank has trained, and by what noise adds."""
    one, four = (
        step(f"{layout},gb8", stack="megatron-core").step,
        step(f"{layout},dp4,gb32", stack="megatron-core").step,
    )
    assert four.listed is not None
    held, prices = four.listed.ranks, four.listed.prices
    reductions = [sum(prices.reduce_s(stage.trained) for stage in stages) for stages in held]
    longer = four.step_s - one.step_s
    assert min(reductions) > 0.01 * one.step_s
    assert min(reductions) * (1 - 1e-6) <= longer < 1.15 * max(reductions)
    assert min(reductions) * (1 - 1e-6) <= four.shares_s["data-parallel communication"] < 1.15 * max(reductions)


def test_the_same_twice() -> None:
    assert step(LAYOUTS[1]).prediction == step(LAYOUTS[1]).prediction


def test_more_micro_batches_take_longer_and_have_less_bubble() -> None:
    few, many = step("tp8,pp8,gb16").step, step("tp8,pp8,gb64").step
    assert many.step_s > few.step_s
    assert many.shares_s["bubble"] / many.step_s < few.shares_s["bubble"] / few.step_s


def test_recomputing_trades_memory_for_time() -> None:
    none, full = step("tp8,pp8,sp,gb16"), step("tp8,pp8,sp,gb16,recompute=full")
    assert full.step.step_s > 1.15 * none.step.step_s
    assert full.memory[0][Role.ACTIVATION] < 0.5 * none.memory[0][Role.ACTIVATION]
    assert full.memory[0][Role.OPTIMIZER_STATE] == none.memory[0][Role.OPTIMIZER_STATE]
    assert full.model_flops == none.model_flops


def test_flops_of_a_step() -> None:
    """72 B l s h^2 (1 + s / 6h + v / 12lh), Korthikanti et al. 2022, equation 7."""
    layers, width, tokens, vocabulary, batch = 96, 12288, 2048, 51200, 16
    whole = 72 * batch * layers * tokens * width**2
    whole *= 1 + tokens / (6 * width) + vocabulary / (12 * layers * width)
    assert step("tp8,pp8,gb16").model_flops == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "published_s"),
    [
        ("tp8,pp8,vpp3,gb64,recompute=full,fp16", 18.13),
        ("tp8,pp8,vpp3,sp,gb64,recompute=selective,fp16", 13.75),
    ],
)
def test_korthikanti_table_5(layout: str, published_s: float) -> None:
    """GPT-3 175B on 64 A100: within a tenth, with no factor fitted on these rows."""
    request, table = step_of(Request(**{**GPT, "layout": layout}))
    plain = dataclasses.replace(stack_by_name("megatron-2022"), in_situ={})
    found = simulate(dataclasses.replace(request, stack=plain), table)
    assert found.step.step_s == pytest.approx(published_s, rel=0.1)


def test_devices_beyond_the_layout_are_replicas() -> None:
    request, _ = step_of(Request(**{**GPT, "layout": "tp8,pp8", "devices": 256}))
    assert request.layout.dp == 4
    with pytest.raises(ConfigError, match="expected a layout of 100 devices"):
        step_of(Request(**{**GPT, "layout": "tp8,pp8", "devices": 100}))


def test_summary_has_a_price() -> None:
    figures = summary(step("tp8,pp8,gb16"), price_per_hour=2.0)
    tokens_per_hour = figures["tokens_per_s"] * 3600
    assert figures["price_per_billion_tokens"] == pytest.approx(2.0 * 64 / tokens_per_hour * 1e9)


def test_busy_experts_are_waited_for() -> None:
    """Twice the tokens on the busiest rank: its products and dispatches take longer, attention does not."""
    request, table = step_of(Request(model="mixtral-8x7b", machine="h100", layout="dp8,ep8,zero1,gb8", seq_len=4096))
    graphs = dataclasses.replace(request.stack, cuda_graphs=True, in_situ={})
    even, skewed = (
        simulate(dataclasses.replace(request, stack=dataclasses.replace(graphs, imbalance=share)), table).step.shares_s
        for share in (1.0, 2.0)
    )
    assert skewed["ep communication"] > 1.5 * even["ep communication"]
    assert skewed["products"] > 1.3 * even["products"]
    assert skewed["attention"] == pytest.approx(even["attention"])


def test_what_is_not_simulated_is_said() -> None:
    request, table = step_of(Request(**{**GPT, "layout": "tp8,pp8,gb16"}))
    other = dataclasses.replace(request, schedule_detail="ZB-2p")
    said = set(simulate(other, table).prediction.assumed) - set(simulate(request, table).prediction.assumed)
    assert said == {"schedule ZB-2p simulated as 1f1b"}
