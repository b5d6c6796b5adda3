"""The flow over windows: below every plan, above the bound that knows no windows."""

from __future__ import annotations

import dataclasses
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
    searched,
    slower_disk,
    step_of,
    tiny,
    within,
)
from tests.programs import chain

from lading.ir.defer import updates
from lading.ir.program import PAGE_BYTES
from lading.planner import fluid
from lading.planner.fluid import FlowProgram, WindowedBound, cut_windows
from lading.planner.lower import StepCosts, fixed_bytes
from lading.planner.orders import deferred_step
from lading.planner.relaxation import RelaxedResidency, build
from lading.planner.residency import StepProblem, lower_bound_s


def flowing(step: StepProblem, windows: int) -> RelaxedResidency | None:
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, every=True)
    return FlowProgram(problem, step.arena_bytes, windows).solve()


@pytest.mark.long
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


def test_what_forward_makes_is_written_before_backward_begins_or_stays() -> None:
    """Eight activations of 1 ms of writing each, a forward of less than 1 ms and room for three of them."""
    graph = chain(8).graph
    large = 256 * PAGE_BYTES
    sizes = [large if s.name.startswith("a") else min(s.size_bytes, PAGE_BYTES) for s in graph.storages]
    graph = dataclasses.replace(
        graph,
        storages=tuple(dataclasses.replace(s, size_bytes=n) for s, n in zip(graph.storages, sizes, strict=True)),
        tensors=tuple(dataclasses.replace(t, shape=(n,)) for t, n in zip(graph.tensors, sizes, strict=True)),
        ops=tuple(dataclasses.replace(op, random=True) if op.name == "f" else op for op in graph.ops),
    )
    seconds = tuple({"f": 1e-4, "backward": 2e-3}.get(op.name, 1e-6) for op in graph.ops)
    step = step_of(graph, small_machine(), StepCosts(seconds, (0,) * len(graph.ops)), 3 * large + 64 * PAGE_BYTES)
    write_s = large / step.machine.tiers[0].write_bytes_per_s
    bound, plan = flowing(step, 4), searched(step)
    assert bound is not None
    assert bound.step_s > 8 * 2e-3 + 4 * write_s
    assert lower_bound_s(step) < 8 * 2e-3 + 2 * write_s
    assert bound.step_s <= plan.step_s * (1 + 1e-6)


@pytest.mark.parametrize("windows", [1, 2, 5])
def test_gaps_classed_by_the_few_operations_they_begin_and_end_at_bound_no_more(
    windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = captured("llama", num_layers=2, clip_norm=1.0, machine=slower_disk(small_machine(), 5))
    fixed = fixed_bytes(step.machine, step.costs)
    step = within(step, fixed + (needs(step, {}) - fixed) // 2)
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, every=True)
    exact = FlowProgram(problem, step.arena_bytes, windows)
    monkeypatch.setattr(fluid, "_PLACES", problem.num_ops * len(problem.candidates) // 40)
    classed = FlowProgram(problem, step.arena_bytes, windows)
    assert len(classed.classes) < 0.9 * len(exact.classes) < len(problem.candidates)
    bounds = exact.solve(), classed.solve()
    assert bounds[0] is not None
    assert bounds[1] is not None
    assert 0.8 * bounds[0].step_s <= bounds[1].step_s <= bounds[0].step_s * (1 + 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_classed_flows_are_below_all_plans_of_a_chain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fluid, "_PLACES", 1)
    step = tiny(seed) if seed % 2 else in_blocks(tiny(seed), slower=20.0)
    best = min(found.timeline.duration_s for found in every_choice(step))
    bound = flowing(step, 2)
    assert bound is not None
    assert bound.step_s <= best * (1 + 1e-6)


def sharpest(step: StepProblem) -> list[float]:
    """Bounds of one flow after another, each with more windows."""
    bound, seconds, windows = WindowedBound(step.bound_problem, step.arena_bytes), list[float](), list[int]()
    while bound.next_windows:
        windows.append(bound.next_windows)
        bound.sharpen()
        assert bound.seconds is not None
        seconds.append(bound.seconds)
    assert windows == sorted(windows)
    return seconds


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_windows_cut_where_memory_has_a_price_bound_more_and_no_plan_is_below(seed: int) -> None:
    step = tiny(seed) if seed % 2 else in_blocks(tiny(seed), slower=20.0)
    bounds = sharpest(step)
    assert bounds == sorted(bounds)
    assert lower_bound_s(step) * (1 - 1e-6) <= bounds[0]
    assert bounds[-1] <= min(found.timeline.duration_s for found in every_choice(step)) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_windows_cut_where_memory_has_a_price_are_below_random_plans_of_a_captured_step(seed: int) -> None:
    step = captured("llama", num_layers=1, clip_norm=1.0, machine=slower_disk(small_machine(), 5))
    step = within(deferred_step(step, seed * len(updates(step.graph)) // 2), NO_LIMIT)
    program = step.lower(random_choices(step, Random(seed))).program
    assert program is not None
    step = within(step, program.peak_bytes)
    assert sharpest(step)[-1] <= step.simulate(program).duration_s * (1 + 1e-6)


def test_few_windows_cut_where_memory_has_a_price_say_what_many_equal_ones_do() -> None:
    step = captured("llama", num_layers=2, clip_norm=1.0, machine=slower_disk(small_machine(), 5))
    fixed = fixed_bytes(step.machine, step.costs)
    step = within(step, fixed + (needs(step, {}) - fixed) // 3)
    bounds = sharpest(step)
    many = flowing(step, 64)
    assert many is not None
    assert len(bounds) > 2
    assert bounds[-1] >= 0.98 * many.step_s
    assert bounds[-1] > bounds[1]


def test_a_step_that_no_plan_fits_has_no_windowed_bound() -> None:
    step = captured("llama", num_layers=1)
    bound = WindowedBound(step.bound_problem, 1)
    bound.sharpen()
    assert bound.seconds is None
    assert not bound.next_windows


@pytest.mark.long
def test_windows_end_at_the_moment_that_leaves_least_room() -> None:
    """What is read for its next operation cannot have come before it; in one window with it, it could."""
    step = in_blocks(tiny(13), slower=5.0)

    class Plain(FlowProgram):
        def cut_windows(self, count: int) -> np.ndarray:
            return cut_windows(self.problem, count)

    plain, cut = (made(step.bound_problem, step.arena_bytes, 2).solve() for made in (Plain, FlowProgram))
    assert plain is not None
    assert cut is not None
    best = min(found.timeline.duration_s for found in every_choice(step))
    assert 1.03 * plain.step_s < cut.step_s <= best * (1 + 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("seed", [13, 15])
def test_nothing_has_been_written_in_a_window_as_it_begins(seed: int) -> None:
    step = in_blocks(tiny(seed), slower=5.0)

    class Plain(FlowProgram):
        def terms_at(self, number: int, window: int, *, begins: bool = False) -> tuple[list[int], list[float]]:
            return super().terms_at(number, window)

    plain, exact = (made(step.bound_problem, step.arena_bytes, 5).solve() for made in (Plain, FlowProgram))
    assert plain is not None
    assert exact is not None
    best = min(found.timeline.duration_s for found in every_choice(step))
    assert 1.03 * plain.step_s < exact.step_s <= best * (1 + 1e-6)
