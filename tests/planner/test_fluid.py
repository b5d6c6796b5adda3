"""The flow over windows: below every plan, above the bound that knows no windows."""

from __future__ import annotations

from random import Random

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
from lading.planner.fluid import flow
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
