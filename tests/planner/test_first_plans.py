"""First plans of forms: which aims they are made of, and when one that is far behind the fastest is given up."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.planner.steps import captured, needs, tiny, within

from lading.planner import first_plans
from lading.planner.first_plans import first_plan_s, first_plans_s
from lading.planner.lower import fixed_bytes
from lading.planner.residency import Relaxations, StepProblem, aims, first_plan

NONE = float("inf")


class Plans:
    """Seconds of the first plans of some forms, by roomy and by tight aims; each call is kept."""

    def __init__(self, forms: list[StepProblem], seconds: Mapping[bool, list[float]]) -> None:
        self.number = {id(form): at for at, form in enumerate(forms)}
        self.seconds, self.asked = seconds, list[tuple[int, float, bool]]()

    def __call__(self, form: StepProblem, below_s: float, *, tight: bool) -> float:
        at = self.number[id(form)]
        self.asked.append((at, below_s, tight))
        return self.seconds[tight][at]


def test_forms_behind_the_fastest_are_given_up_and_tight_aims_are_for_steps_without_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forms = [tiny(seed) for seed in range(3)]
    plans = Plans(forms, {False: [NONE, 3.0, 4.0], True: [1.0, 1.0, 1.0]})
    monkeypatch.setattr(first_plans, "_plan_s", plans)
    assert first_plans_s(forms) == [NONE, 3.0, 4.0]
    assert plans.asked == [(0, NONE, False), (2, NONE, False), (1, 6.0, False)]
    plans.seconds, plans.asked = {False: [NONE] * 3, True: [NONE, 2.0, 5.0]}, []
    assert first_plans_s(forms) == [NONE, 2.0, 5.0]
    assert plans.asked[3:] == [(0, NONE, True), (2, NONE, True), (1, 7.5, True)]
    plans.asked = []
    assert first_plans_s(forms, 1.0) == [NONE] * 3, "another form has a plan"
    assert plans.asked == [(at, 1.5, False) for at in (0, 2, 1)]
    assert first_plans_s([], 1.0) == []


def half() -> StepProblem:
    step = captured("llama", num_layers=2, clip_norm=1.0)
    fixed = fixed_bytes(step.machine, step.costs)
    return within(step, fixed + (needs(step, {}) - fixed) // 2)


def test_a_first_plan_is_that_of_the_first_aim_which_has_one() -> None:
    step = half()
    made = [step.relaxations.repaired(aim)[0] for aim in aims(len(step.graph.ops))[0]]
    plan = next(found for found in made if found is not None)
    assert first_plan_s(step) == plan.step_s
    assert first_plan(step, tight=False) is plan
    tight = [step.relaxations.repaired(aim)[0] for aim in aims(len(step.graph.ops))[1]]
    assert first_plan(step, tight=True) is next(found for found in tight if found is not None)
    assert first_plan_s(within(step, fixed_bytes(step.machine, step.costs))) == NONE, "nothing fits"


def test_a_relaxation_that_takes_too_long_is_not_repaired_but_may_be_later() -> None:
    step = half()
    relaxations, aim = Relaxations(step), next(aim for aim in aims(len(step.graph.ops))[0] if not aim.careful)
    assert relaxations.repaired(aim, 1e-9) == (None, 0)
    made, tried = relaxations.repaired(aim)
    assert made is not None
    assert tried > 0
    assert relaxations.repaired(aim, 1e-9) == (made, tried), "what is known already is not given up"
    sharing = next(each for each in aims(len(step.graph.ops))[0] if each.careful)
    assert Relaxations(step).repaired(sharing, 1e-9)[1] > 0, "with lower rates its plan may be faster than it"
