"""The limit of a step by resource: below every plan and every sharper bound, and what a hand counts."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from tests.planner.steps import NO_LIMIT, captured, every_choice, in_blocks, needs, random_choices, tiny, within

from lading.ir.machine import Tier
from lading.ir.program import slot_bytes
from lading.planner.api import make_plan
from lading.planner.limit import COMPUTING, OPTIMIZER, resource_limits, rounded_bound_s
from lading.planner.lower import fixed_bytes
from lading.planner.orders import deferred_step
from lading.planner.residency import Found, StepProblem, lower_bound_s


def limits(*steps: StepProblem) -> dict[str, float]:
    return {each.resource: each.seconds for each in resource_limits(steps)}


def moved(step: StepProblem) -> dict[str, int]:
    return {each.resource: each.size_bytes for each in resource_limits([step])}


def assert_below(step: StepProblem, found: Found) -> None:
    """What a plan moves and takes is no less than the limit of each resource."""
    streams = {stream: found.timeline.busy_s(stream) for stream in found.program.streams}
    for resource, seconds in limits(step).items():
        assert seconds <= found.step_s * (1 + 1e-9), resource
    assert moved(step).get("reads from disk", 0) <= bytes_of(found, "disk", to="device")
    assert moved(step).get("writes to disk", 0) <= bytes_of(found, "device", to="disk")
    assert limits(step)[COMPUTING] <= streams["compute"] * (1 + 1e-9)


def bytes_of(found: Found, source: str, *, to: str) -> int:
    """Bytes that a step moves from one place to another, whole slots."""
    storages = found.step.graph.storages
    return sum(
        slot_bytes(storages[a.storage].size_bytes)
        for a in found.program.actions
        if a.storage is not None and (a.source, a.target) == (source, to)
    )


def beside(step: StepProblem, read: float, write: float) -> StepProblem:
    """The step on a machine whose operations take longer beside the disk's reads and writes."""
    slowdowns = {"read_slowdown": read, "write_slowdown": write, "write_slowdown_of_passes": write / 2}
    disk = dataclasses.replace(step.machine.tiers[0], **slowdowns)
    return dataclasses.replace(step, machine=dataclasses.replace(step.machine, tiers=(disk,)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("slower", "slowdowns"), [(1.0, (0.2, 0.6)), (1.0, (3.0, 0.0)), (8.0, (0.0, 0.0))])
def test_no_plan_of_a_small_step_is_below_the_limit(seed: int, slower: float, slowdowns: tuple[float, float]) -> None:
    step = beside(in_blocks(tiny(seed), slower), *slowdowns)
    for plan in every_choice(step):
        assert_below(step, plan)


@pytest.mark.parametrize("seed", range(20))
def test_no_random_plan_is_below_the_limit_in_the_memory_it_takes(seed: int) -> None:
    rng = Random(seed)
    step = tiny(seed, depth=rng.choice((1, 2, 3))) if seed % 2 else captured("llama", num_layers=1)
    step = beside(step, rng.choice((0.0, 0.2, 2.0)), rng.choice((0.0, 0.6)))
    choices = random_choices(step, rng)
    program = within(step, NO_LIMIT).lower(choices).program
    assert program is not None
    tight = within(step, program.peak_bytes)
    assert_below(tight, Found(choices, program, tight))


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.7, 0.5, 0.4, 0.3])
@pytest.mark.parametrize("model", ["gpt", "llama", "moe"])
def test_the_limit_is_below_the_bound_of_all_constraints_together(model: str, share: float) -> None:
    step = beside(captured(model, num_layers=2), 0.0, 0.0)  # which bounds do not know
    step = within(step, int(share * needs(step, {})))
    if bound_s := lower_bound_s(step):
        assert max(limits(step).values()) <= bound_s * (1 + 1e-6)


def test_computing_beside_a_disk_takes_what_the_disk_takes_of_it() -> None:
    step = within(plain := captured("gpt", num_layers=4), int(0.3 * needs(plain, {})))
    slowed = beside(step, 0.5, 0.25)
    disk, sizes = slowed.machine.tiers[0], moved(slowed)
    longer = 0.5 * sizes["reads from disk"] / disk.read_bytes_per_s
    longer += 0.125 * sizes["writes to disk"] / disk.write_bytes_per_s
    computing = sum(slowed.costs.op_seconds)
    assert limits(slowed)["computing beside disk"] == pytest.approx(computing + longer / 1.75)
    assert "computing beside disk" not in limits(beside(step, 0.0, 0.0))


def test_with_all_in_memory_nothing_moves_and_computing_is_the_limit() -> None:
    step = captured("gpt", num_layers=1)
    found = limits(step)
    assert found.keys() == {COMPUTING, OPTIMIZER}
    assert found[COMPUTING] == pytest.approx(lower_bound_s(step))
    assert 0 < found[OPTIMIZER] < found[COMPUTING]


def test_states_that_do_not_fit_go_both_ways_once() -> None:
    """In a budget near the least, all states are away between updates: read once and written once each."""
    step = captured("gpt", num_layers=4)
    small = within(step, int(0.2 * (needs(step, {}) - fixed_bytes(step.machine, step.costs))))
    states = sum(slot_bytes(step.graph.storages[s].size_bytes) for s in step.graph.persistent)
    found = moved(small)
    over = states - small.arena_bytes
    assert over > 0
    assert found["writes to disk"] >= over * 0.95  # but for small ones, which no plan moves
    assert found["reads from disk"] >= found["writes to disk"], "weights are read for forward and for backward"
    assert found["disk both ways"] == found["reads from disk"] + found["writes to disk"]


def test_less_memory_moves_no_less() -> None:
    step = captured("llama", num_layers=2)
    whole = needs(step, {})
    reads = [moved(within(step, int(share * whole))).get("reads from disk", 0) for share in (1.0, 0.8, 0.6, 0.4, 0.3)]
    assert reads == sorted(reads)
    assert reads[0] == 0 < reads[-1]


def test_a_second_tier_takes_what_the_nearer_one_has_no_room_for() -> None:
    step = captured("gpt", num_layers=2)
    disk = step.machine.tiers[0]
    near: Tier = dataclasses.replace(disk, name="near", location="near", read_bytes_per_s=1e12, write_bytes_per_s=1e12)
    both = dataclasses.replace(step, machine=dataclasses.replace(step.machine, tiers=(near, disk)))
    both = within(both, int(0.3 * needs(step, {})))
    roomy = dataclasses.replace(both, budgets={**both.budgets, "near": NO_LIMIT})
    full = dataclasses.replace(both, budgets={**both.budgets, "near": 4096})
    assert "reads from disk" not in limits(roomy)
    assert limits(full)["reads from disk"] > 10 * limits(full)["reads from near and disk"] > 0
    assert moved(full)["reads from disk"] <= moved(within(step, both.budgets["device"]))["reads from disk"]


def test_the_least_over_orders_counts() -> None:
    step = captured("gpt", num_layers=2)
    step = within(step, int(0.4 * needs(step, {})))
    late = deferred_step(step, 4)
    both, one, other = limits(step, late), limits(step), limits(late)
    assert both == {name: min(one[name], other[name]) for name in both}


@pytest.mark.long
def test_a_plan_says_its_limit() -> None:
    step = captured("gpt", num_layers=2)
    plan = make_plan(step.graph, step.machine, budget="40%").plan
    first = plan.predictions.limits[0]
    assert [each.seconds for each in plan.predictions.limits] == sorted(
        (each.seconds for each in plan.predictions.limits), reverse=True
    )
    assert first.seconds <= plan.lower_bound_s <= plan.step_s


def test_a_bound_above_its_plan_shows_but_for_rounding() -> None:
    assert rounded_bound_s(0.5, 1.0) == 0.5
    assert rounded_bound_s(1.0 + 1e-7, 1.0) == 1.0
    assert rounded_bound_s(1e-3 + 5e-7, 1e-3) == 1e-3, "the solver rounds seconds, not shares"
    assert rounded_bound_s(1.01, 1.0) == 1.01
