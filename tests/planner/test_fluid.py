"""The flow over windows: below every plan, above the bound that knows no windows."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests.machines import small_machine
from tests.planner.steps import (
    NO_LIMIT,
    captured,
    every_choice,
    in_blocks,
    needs,
    random_choices,
    slower_disk,
    tiny,
    within,
)

from lading.ir.defer import updates
from lading.ir.program import PAGE_BYTES
from lading.planner.fluid import FlowProgram, flow
from lading.planner.lower import fixed_bytes
from lading.planner.orders import deferred_step
from lading.planner.relaxation import RelaxedResidency, build
from lading.planner.residency import StepProblem, lower_bound_s


def flowing(step: StepProblem, windows: int) -> RelaxedResidency | None:
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, every=True)
    return flow(problem, step.arena_bytes, windows)


@pytest.mark.parametrize(
    ("seed", "windows"),
    [
        *((seed, 2 + 3 * (seed // 2 % 2)) for seed in range(6)),
        *(pytest.param(seed, 5 - 3 * (seed // 2 % 2), marks=pytest.mark.slow) for seed in range(6)),
    ],
)
def test_below_all_plans_of_a_chain(seed: int, windows: int) -> None:
    step = tiny(seed) if seed % 2 else in_blocks(tiny(seed), slower=20.0)
    best = min(found.timeline.duration_s for found in every_choice(step))
    bound = flowing(step, windows)
    assert bound is not None
    assert lower_bound_s(step) * (1 - 1e-6) <= bound.step_s <= best * (1 + 1e-6)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_below_random_plans_of_a_captured_step(seed: int, share: float) -> None:
    step = captured("llama", num_layers=1, clip_norm=1.0)
    step = within(deferred_step(step, int(share * len(updates(step.graph)))), NO_LIMIT)
    program = step.lower(random_choices(step, Random(seed))).program
    assert program is not None
    bound = flowing(within(step, program.peak_bytes), 4)
    assert bound is not None
    assert bound.step_s <= step.simulate(program).duration_s * (1 + 1e-6)


def test_one_window_is_the_bound_without_windows_and_more_say_more() -> None:
    step = captured("llama", num_layers=2, clip_norm=1.0, machine=slower_disk(small_machine(), 5))
    fixed = fixed_bytes(step.machine, step.costs)
    step = within(step, fixed + (needs(step, {}) - fixed) // 2)
    one, four = flowing(step, 1), flowing(step, 4)
    assert one is not None
    assert four is not None
    assert one.step_s == pytest.approx(lower_bound_s(step), rel=1e-4)
    assert four.step_s > 1.05 * one.step_s


def test_a_flow_for_plans_is_above_the_bound_and_can_be_solved_again() -> None:
    step = captured("llama", num_layers=2, clip_norm=1.0, machine=slower_disk(small_machine(), 5))
    fixed = fixed_bytes(step.machine, step.costs)
    whole = needs(step, {}) - fixed
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    kept = FlowProgram(problem, 4, bound=False)
    wide, narrow = kept.solve(int(0.8 * whole)), kept.solve(int(0.6 * whole))
    anew = FlowProgram(problem, 4, bound=False).solve(int(0.6 * whole))
    bound = flow(problem, int(0.6 * whole), 4)
    assert wide is not None
    assert narrow is not None
    assert anew is not None
    assert bound is not None
    assert wide.step_s < narrow.step_s == pytest.approx(anew.step_s, rel=1e-6)
    assert bound.step_s <= narrow.step_s * (1 + 1e-6)
    reserved = kept.solve(int(0.8 * whole), np.full(problem.num_ops, int(0.8 * whole) - int(0.6 * whole)))
    assert reserved is not None
    assert reserved.step_s == pytest.approx(narrow.step_s, rel=1e-6)


def test_settled_flows_split_less_and_leave_the_program_as_it_was() -> None:
    step = captured("llama", num_layers=2)
    fixed = fixed_bytes(step.machine, step.costs)
    budget = int(0.6 * (needs(step, {}) - fixed))
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES)
    flows = FlowProgram(problem, 4, bound=False)
    relaxed = flows.solve(budget)
    assert relaxed is not None
    settled = flows.settled(relaxed)

    def split_bytes(found: RelaxedResidency) -> int:
        rows = zip(problem.candidates, found.shares, strict=True)
        return sum(c.size_bytes for c, shares in rows if max(shares.values()) < 1 - 1e-6)

    assert split_bytes(settled) < split_bytes(relaxed)
    assert settled.step_s >= relaxed.step_s * (1 - 1e-6)
    again = flows.solve(budget)
    assert again is not None
    assert again.step_s == pytest.approx(relaxed.step_s, rel=1e-6)
