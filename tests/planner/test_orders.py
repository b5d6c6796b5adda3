"""Which orders and forms of a step are searched, and which of their bounds are made sharper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from tests.planner.steps import captured

from lading.errors import PlanInfeasible
from lading.ir.reporting import SILENT
from lading.planner import orders, residency
from lading.planner.orders import Ordered, sharpened
from lading.planner.relaxation import ResidencyProblem
from lading.planner.residency import Found, ResidencySearch, StepProblem


def step_with_bound(seconds: float) -> StepProblem:
    step = captured("gpt", num_layers=1)
    step = dataclasses.replace(step, budgets=dict(step.budgets))
    step.__dict__["bound_s"] = seconds
    return step


def found_in(step: StepProblem, seconds: float) -> Found:
    program = step.lower({}).program
    assert program is not None
    found = Found({}, program, step)
    found.__dict__["times"] = (seconds, ())
    return found


class Flows:
    """Bounds of flows with 2 and with 8 windows by step, None where nothing fits; what is asked is counted."""

    def __init__(self, *sharp: tuple[StepProblem, tuple[float | None, float]]) -> None:
        self.sharp = {id(step.bound_problem): (step, seconds) for step, seconds in sharp}
        self.asked: list[tuple[int, int]] = []

    def __call__(self, problem: ResidencyProblem, budget_bytes: int) -> Flow:
        return Flow(self, *self.sharp[id(problem)])


class Flow:
    def __init__(self, flows: Flows, step: StepProblem, sharp: tuple[float | None, float]) -> None:
        self.flows, self.step, self.sharp = flows, step, sharp
        self.seconds: float | None = 0.0
        self.next_windows = 2

    def sharpen(self) -> None:
        self.flows.asked.append((id(self.step), self.next_windows))
        self.seconds = self.sharp[self.next_windows > 2]
        self.next_windows = 8 if self.next_windows == 2 else 0


def test_only_the_order_with_the_least_bound_is_sharpened_until_another_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    low, middle, high = (step_with_bound(seconds) for seconds in (1.0, 1.2, 2.0))
    flows = Flows((low, (1.1, 1.5)), (middle, (1.3, 1.4)), (high, (9.0, 9.0)))
    monkeypatch.setattr(orders, "WindowedBound", flows)
    chosen = Ordered(0, low, found_in(low, 3.0), 1.0, (low, middle, high))
    assert sharpened(chosen).bound_s == 1.4
    assert flows.asked == [(id(low), 2), (id(low), 8), (id(middle), 2), (id(middle), 8)]


def test_an_order_in_which_nothing_fits_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = step_with_bound(1.0), step_with_bound(1.2)
    monkeypatch.setattr(orders, "WindowedBound", Flows((low, (None, 0.0)), (high, (1.3, 1.3))))
    assert sharpened(Ordered(0, high, found_in(high, 3.0), 1.0, (low, high))).bound_s == 1.3


def test_a_bound_is_as_sharp_as_its_work_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_with_bound(1.0)
    flows = Flows((step, (1.1, 1.5)))
    monkeypatch.setattr(orders, "WindowedBound", flows)
    chosen = Ordered(0, step, found_in(step, 3.0), 1.0, (step,))
    for windows, bound_s in ((1, 1.0), (9, 1.1), (10, 1.5)):
        monkeypatch.setattr(orders, "_SHARP_WORK", windows * int(len(step.graph.ops) ** 1.5))
        assert sharpened(chosen).bound_s == bound_s


def test_forms_within_reach_of_the_fastest_first_plan_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [step_with_bound(1.0 + i / 100) for i in range(4)]
    first_s = [2.03, 2.0, 2.5, float("inf")]
    plans = {id(forms[0]): 1.5, id(forms[1]): 1.6}
    number, searched = {id(form): at for at, form in enumerate(forms)}, list[int]()

    def best_order(form: StepProblem, others: object, progress: object) -> Ordered:
        searched.append(number[id(form)])
        return Ordered(0, form, found_in(form, plans[id(form)]), form.bound_s, (form,))

    monkeypatch.setattr(orders, "best_order", best_order)
    made = orders.searched_forms(forms, first_s, {}, SILENT)
    assert searched == [1, 0]
    best = orders.of_all_forms(made, forms, {})
    assert best.found.step_s == 1.5
    assert best.bound_s == 1.0
    assert sorted(number[id(step)] for step in best.orders) == [0, 1, 2, 3]


def test_a_form_without_a_plan_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [step_with_bound(1.0), step_with_bound(1.0)]

    def best_order(form: StepProblem, others: object, progress: object) -> Ordered:
        if form is forms[0]:
            raise PlanInfeasible("none", missing_bytes=1, smallest_budget_bytes=2)
        return Ordered(0, form, found_in(form, 3.0), 1.0, (form,))

    monkeypatch.setattr(orders, "best_order", best_order)
    (made,) = orders.searched_forms(forms, [float("inf"), float("inf")], {}, SILENT)
    assert made.found.step is forms[1]
    monkeypatch.setattr(orders, "best_order", lambda *_: best_order(forms[0], (), None))
    with pytest.raises(PlanInfeasible):
        orders.searched_forms(forms, [float("inf"), float("inf")], {}, SILENT)


def test_a_search_ends_when_plans_in_a_row_gain_little(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_with_bound(1.0)
    plans = [found_in(step, seconds) for seconds in (3.0, 2.9, 2.899, 2.898, 2.897, 2.0)]
    monkeypatch.setattr(residency, "_candidates", lambda _: iter(plans))
    patient, short = ResidencySearch(step, ()), ResidencySearch(step, ())
    assert short.searched(1.0, lambda share, doing: None, 3) is plans[4]
    assert patient.searched(1.0, lambda share, doing: None, float("inf")) is plans[5]


def flows_of_two_seconds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every form have a flow of 2 s and a plan of 3 s; returns the list of those whose flow is asked for."""
    asked = list[int]()

    def first_flow(step: StepProblem) -> tuple[None, SimpleNamespace]:
        asked.append(id(step))
        return None, SimpleNamespace(seconds=2.0)

    monkeypatch.setattr(orders, "is_paced", lambda _: True)
    monkeypatch.setattr(orders, "first_flow", first_flow)
    monkeypatch.setattr(orders, "best_paced", lambda step, flow, near_s: found_in(step, 3.0))
    return asked


def test_forms_whose_first_plans_are_far_behind_are_not_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    forms, asked = [step_with_bound(1.0) for _ in range(3)], flows_of_two_seconds(monkeypatch)
    assert list(orders.paced_forms(forms, [2.0, 3.1, 2.9])) == [0, 2]
    assert asked == [id(forms[0]), id(forms[2])]


def test_a_form_whose_bound_is_above_another_ones_flow_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    forms, asked = [step_with_bound(seconds) for seconds in (2.1, 1.0, 1.9)], flows_of_two_seconds(monkeypatch)
    assert list(orders.paced_forms(forms, [3.0, 3.0, 3.0])) == [1, 2]
    assert asked == [id(forms[1]), id(forms[2])]


@pytest.mark.parametrize(("plan_s", "planned"), [(2.2, [0, 1]), (2.1, [0])])
def test_a_form_is_planned_where_the_plan_of_a_better_flow_is_far_behind_its_own(
    monkeypatch: pytest.MonkeyPatch, plan_s: float, planned: list[int]
) -> None:
    forms = [step_with_bound(1.0) for _ in range(2)]
    seconds = dict(zip(map(id, forms), (2.0, 2.1), strict=True))
    monkeypatch.setattr(orders, "is_paced", lambda _: True)
    monkeypatch.setattr(orders, "first_flow", lambda step: (None, SimpleNamespace(seconds=seconds[id(step)])))
    monkeypatch.setattr(orders, "best_paced", lambda step, flow, near_s: found_in(step, plan_s))
    assert list(orders.paced_forms(forms, [3.0, 3.0])) == planned


@pytest.mark.parametrize("paced", [False, True])
def test_what_flows_lost_to_a_search_is_not_planned_by_more_of_them(
    monkeypatch: pytest.MonkeyPatch, *, paced: bool
) -> None:
    step, hosted = step_with_bound(1.0), step_with_bound(1.0)
    asked = list[str]()

    def with_paced(found: Found, bound_s: float, most: int) -> Found:
        asked.append("on the host")
        return found

    def weight_pieces(planned: StepProblem, step: StepProblem) -> list[StepProblem]:
        asked.append("in pieces")
        return []

    monkeypatch.setattr(orders, "is_paced", lambda _: True)
    monkeypatch.setattr(orders, "weight_pieces", weight_pieces)
    monkeypatch.setattr(orders, "with_paced", with_paced)
    monkeypatch.setattr(orders, "with_host", lambda found, plan: found_in(hosted, 2.0))
    chosen = Ordered(0, step, found_in(step, 3.0), 1.0, (step,), paced=paced)
    assert orders.with_weight_pieces_tried(chosen, step) is chosen
    assert orders.ordered_with_host(chosen).step is hosted
    assert asked == ([] if paced else ["in pieces", "on the host"])
    flowed = dataclasses.replace(chosen, found=dataclasses.replace(chosen.found, pace=(1.0,)))
    assert not flowed.outdoes_flows


@pytest.mark.parametrize(("bounds", "flow_s", "plan_s", "planned", "taken"), [
    ((3.0, 4.0), 2.0, 3.2, True, True),  # no plan of the forms takes much less
    ((3.0, 4.0), 2.0, 3.4, True, False),
    ((3.0, 4.0), 3.1, 2.9, False, False),
    ((0.0, 3.0), 2.0, 2.9, True, True),  # the first form has no plan
])  # fmt: skip
def test_forms_that_cannot_beat_weights_in_pieces_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
    bounds: tuple[float, ...],
    flow_s: float,
    plan_s: float,
    *,
    planned: bool,
    taken: bool,
) -> None:
    forms, pieces = [step_with_bound(seconds) for seconds in bounds], step_with_bound(1.5)
    asked = list[StepProblem]()

    def best_paced(step: StepProblem, flow: object, below_s: float) -> Found:
        asked.append(step)
        assert below_s == pytest.approx(3.3)
        return found_in(step, plan_s)

    monkeypatch.setattr(orders, "is_paced", lambda _: True)
    monkeypatch.setattr(orders, "weight_pieces", lambda planned, step: [pieces] if planned is forms[0] else [])
    monkeypatch.setattr(orders, "first_flow", lambda _: (None, SimpleNamespace(seconds=flow_s)))
    monkeypatch.setattr(orders, "best_paced", best_paced)
    made = orders.ahead_of_forms(forms, forms[0])
    assert asked == ([pieces] if planned else [])
    assert (made is not None) == taken
    if made is not None:
        assert (made.found.step_s, made.bound_s, made.paced) == (plan_s, 1.5, True)
        assert [id(step) for step in made.orders] == [id(step) for step in (pieces, *forms)]


def test_weights_in_pieces_are_planned_where_their_flow_is_well_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    step, pieces, limits = step_with_bound(1.0), step_with_bound(0.9), list[float]()

    def best_paced(form: StepProblem, below_s: float) -> Found:
        assert form is pieces
        limits.append(below_s)
        return found_in(form, 2.0)

    monkeypatch.setattr(orders, "is_paced", lambda _: True)
    monkeypatch.setattr(orders, "weight_pieces", lambda planned, step: [pieces])
    monkeypatch.setattr(orders, "best_paced", best_paced)
    made = orders.with_weight_pieces_tried(Ordered(0, step, found_in(step, 2.06), 1.0, (step,)), step)
    assert limits == [pytest.approx(2.0)]
    assert (made.found.step_s, made.bound_s, made.paced) == (2.0, 0.9, True)


def test_an_order_that_is_beyond_reach_of_another_is_left_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    step = dataclasses.replace(step_with_bound(1.0), defers=True)
    asked, limits = list[tuple[bool, float]](), list[float]()

    def first_plan(ordered: StepProblem, below_s: float, *, tight: bool) -> Found | None:
        asked.append((tight, below_s))
        return None

    def moving(ordered: StepProblem, best_s: Callable[[], float]) -> list[Found]:
        limits.append(best_s())
        return []

    monkeypatch.setattr(orders, "_counts", lambda _: (0, 1))
    monkeypatch.setattr(residency, "_candidates", lambda each: iter([found_in(each, 2.0)] * 5))
    monkeypatch.setattr(orders, "first_plan", first_plan)
    monkeypatch.setattr(orders, "moving", moving)
    monkeypatch.setattr(orders, "evicting", lambda *_: [])
    monkeypatch.setattr(orders, "polished", lambda plan, bound_s: plan)
    chosen = orders.best_order(step, ())
    assert (chosen.deferred, chosen.found.step_s) == (0, 2.0)
    assert asked == [(False, pytest.approx(2.06))]
    assert limits == [2.0, pytest.approx(2.06)]
