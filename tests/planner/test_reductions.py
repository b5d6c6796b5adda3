"""Sizes of the buckets in which gradients are reduced: times by hand, and the best size found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lading.clusters import space_of, step_of
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.request import Request
from lading.planner.layouts import best_bucket, cluster_plan, find_layouts
from lading.sim.prices import MachinePrices
from lading.sim.simulate import WAITING, Priced, Simulated, seconds_until_reduced, simulate
from lading.sim.step import DATA_PARALLEL


def step(layout: str, model: str = "llama3-8b", devices: int = 64) -> Simulated:
    return simulate(*step_of(Request(model=model, machine="h100", seq_len=4096, devices=devices, layout=layout)))


def test_a_layout_says_its_buckets() -> None:
    assert str(parse_layout("dp8,bucket_bytes=1048576")) == "dp8,bucket_bytes=1048576"
    for text in ("dp8,zero3,bucket_bytes=1", "dp4,pp2,zero2,bucket_bytes=1", "dp8,bucket_bytes=-1"):
        with pytest.raises(ConfigError, match="bucket_bytes must be >= 0, and 0 where parameters are cut"):
            parse_layout(text)


def test_one_bucket_waits_for_all_of_backward() -> None:
    kept, late = step("tp2,sp,zero0,gb128"), step("tp2,sp,zero0,gb128,bucket_bytes=1000000000000")
    prices = MachinePrices(late.machine, late.request.layout, late.request.stack)
    whole = prices.reduce_s(late.step.stages[0].trained)
    assert late.step.shares_s[DATA_PARALLEL] == pytest.approx(whole, rel=1e-3)
    assert kept.step.shares_s[DATA_PARALLEL] < whole


def test_buckets_of_a_stage_are_reduced_as_they_fill() -> None:
    """n equal ones: the last one behind backward, or all of them behind the first, whichever ends later."""
    size = 64 << 20
    found = step(f"tp4,pp4,vpp2,sp,zero0,gb512,bucket_bytes={size}", "llama3-70b", 256)
    prices = MachinePrices(found.machine, found.request.layout, found.request.stack)
    stage = found.step.stages[0]
    number = -(-4 * sum(stage.trained.values()) // size)
    each = prices.reduce_s({axes: count // number for axes, count in stage.trained.items()})
    expected = max(each, number * each - stage.backward_s * (1 - 1 / number))
    assert expected < found.step.shares_s[DATA_PARALLEL] < 1.15 * expected  # computing beside them is slower


@pytest.mark.parametrize(("layout", "model"), [("dp64,zero1,gb128", "gpt2-xl"), ("tp4,pp4,zero1,gb512", "llama3-8b")])
def test_no_other_size_is_much_better(layout: str, model: str) -> None:
    kept = step(layout, model)
    bucket = best_bucket(kept)
    assert bucket is not None
    assert bucket.saves_s == kept.step.step_s - bucket.simulated.step.step_s
    assert bucket.is_worth == (bucket.saves_s > 1e-3 * kept.step.step_s)
    others = [
        simulate(replace(kept.request, layout=replace(kept.request.layout, bucket_bytes=round(2**power))), kept.table)
        for power in (23.5, 25.5, 27.4, 28.6, 30.5)
    ]
    assert min(other.step.step_s for other in others) > 0.997 * bucket.simulated.step.step_s


@pytest.mark.parametrize(
    "layout", ["tp4,pp4,zero1,gb512", "tp4,pp4,vpp2,zero0,gb512", "tp4,pp4,zero1,gb512,zero-bubble"]
)
def test_two_rounds_of_micro_batches_tell_sizes_apart_as_all_do(layout: str) -> None:
    """Buckets are reduced beside the last backwards, so a size saves the same behind 2 rounds as behind 32."""
    kept = step(layout, "llama3-8b")
    layouts = [replace(kept.request.layout, bucket_bytes=1 << power) for power in (25, 27, 29, 31)]
    few = np.array([seconds_until_reduced(kept, one) for one in layouts])
    parts = Priced(kept.machine, kept.table, kept.segments)
    steps = [simulate(replace(kept.request, layout=one), kept.table, parts).step for one in layouts]
    whole = np.array([one.step_s - one.shares_s[WAITING] for one in steps])
    assert few.max() < 0.2 * whole.min()
    assert np.diff(few) == pytest.approx(np.diff(whole), rel=1e-6)


def test_cut_parameters_and_one_replica_have_none() -> None:
    assert best_bucket(step("tp8,zero3,gb128")) is None
    assert best_bucket(step("tp8,pp8,gb128")) is None
    assert best_bucket(step("tp4,pp4,zero3,gb512")) is None


def test_a_plan_has_the_size_that_is_worth_it() -> None:
    space = space_of(Request(model="gpt2", machine="h100", seq_len=1024, devices=8, global_batch=64, top=2))
    found = find_layouts(space)
    assert found.bucket is not None
    assert found.bucket.is_worth
    plan = cluster_plan(found, "0")
    layout = parse_layout(plan.layout)
    assert layout == replace(found.winner.layout, bucket_bytes=found.bucket.best_bytes)
    assert simulate(replace(space.request, layout=layout), space.table).step.step_s == plan.step_s < found.winner.step_s
