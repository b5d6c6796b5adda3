"""What large steps are planned with: alike layers decided together, and a bound from prices."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from tests.planner.steps import captured, needs, searched, within

from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES
from lading.memory.verify import verify
from lading.planner import residency as policy
from lading.planner.linear import _split, dual_bound_s, solve  # pyright: ignore[reportPrivateUsage]
from lading.planner.lower import fixed_bytes
from lading.planner.relaxation import Folding, RelaxedResidency, ResidencyProblem, build, fold
from lading.planner.residency import StepProblem, rounded

LAYERS = 8


@cache
def step_at(share: float) -> StepProblem:
    """Eight layers in a share of what keep-all needs."""
    step = captured("llama", num_layers=LAYERS)
    fixed = fixed_bytes(step.machine, step.costs)
    return within(step, fixed + int(share * (needs(step, {}) - fixed)))


def folded(step: StepProblem, *, every: bool = False, most: int = 100) -> tuple[ResidencyProblem, Folding]:
    problem = build(step.graph, step.lives, step.machine, step.costs, PAGE_BYTES, every=every)
    folding = fold(step.graph, problem.candidates, most)
    assert folding is not None
    return problem, folding


def test_a_class_has_alike_gaps_of_layers_that_follow_one_another() -> None:
    step = step_at(0.5)
    problem, folding = folded(step)
    assert len(set(folding.class_of.tolist())) < len(problem.candidates) / 2
    for number in range(int(folding.class_of.max()) + 1):
        members = [c for c, k in zip(problem.candidates, folding.class_of, strict=True) if k == number]
        assert len({(c.size_bytes, c.options, c.gap.wraps) for c in members}) == 1
        starts = {step.graph.ops[c.gap.start].name for c in members}
        assert len(starts) == 1
        seats = sorted(s for s, k in zip(folding.seat.tolist(), folding.class_of, strict=True) if k == number)
        assert seats == list(range(len(members)))
    assert fold(step.graph, problem.candidates, len(problem.candidates)) is None


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_folding_costs_little_and_never_gains(share: float) -> None:
    step = step_at(share)
    problem, folding = folded(step)
    whole = solve(problem, step.arena_bytes, windows=1)
    alike = solve(dataclasses.replace(problem, folding=folding), step.arena_bytes, windows=1)
    assert whole is not None
    assert alike is not None
    assert whole.step_s * (1 - 1e-9) <= alike.step_s <= 1.1 * whole.step_s


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4])
def test_the_bound_from_prices_is_below_the_whole_program_and_near_it(share: float) -> None:
    step = step_at(share)
    problem, folding = folded(step, every=True)
    problem = dataclasses.replace(problem, capacity_bytes={**step.budgets, "disk": 3 * step.arena_bytes})
    whole = solve(problem, step.arena_bytes)
    priced = dual_bound_s(problem, folding, step.arena_bytes)
    if whole is None:
        assert priced == 0.0
        return
    assert 0.9 * whole.step_s <= priced <= whole.step_s * (1 + 1e-9)


def test_a_write_is_paid_once_however_many_gaps_it_serves() -> None:
    """Three gaps of one version, of which one saves nothing, and one of another."""
    owner, saved = np.array([0, 0, 0, 1]), np.array([1.0, 3.0, 0.0, 2.0])
    paid = _split(np.array([4.0, 4.0, 4.0, 5.0]), owner, saved)
    assert paid.tolist() == [1.0, 3.0, 0.0, 5.0]
    assert _split(np.array([4.0]), np.array([0]), np.array([0.0])).tolist() == [0.0]


def test_rounding_gives_as_many_layers_an_option_as_the_shares_say() -> None:
    step = step_at(0.5)
    problem, folding = folded(step)
    problem = dataclasses.replace(problem, folding=folding, capacity_bytes=step.budgets)
    shares = tuple(
        {o: 0.5 if o == Option.KEEP else 0.5 / (len(c.options) - 1) for o in c.options} for c in problem.candidates
    )
    choices = rounded(problem, RelaxedResidency(shares, 0.0))
    moved = np.array([(c.gap.storage, c.gap.start) in choices for c in problem.candidates])
    for number, size in enumerate(np.bincount(folding.class_of)):
        assert moved[folding.class_of == number].sum() == size - size // 2


@pytest.mark.long
def test_a_plan_of_alike_layers_keeps_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_at(0.7)
    monkeypatch.setattr(policy, "_CLASSES", 100)
    found = searched(step)
    verify(found.program)
    assert found.program.peak_bytes <= step.budgets["device"]
    assert found.step_s == found.timeline.duration_s
    monkeypatch.undo()
    assert found.step_s <= 1.2 * searched(step).step_s
