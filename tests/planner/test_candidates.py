"""Plans that move or evict whatever waits: within the budget, and never faster than what the search returns."""

from __future__ import annotations

from tests.planner.steps import captured, tiny, within

from lading.ir.plan import Option
from lading.memory.verify import verify
from lading.planner.orders import best_order, evicting
from lading.planner.residency import Relaxations
from lading.planner.streaming import moving


def test_the_search_is_never_slower_than_a_plain_rule() -> None:
    step = captured("gpt", num_layers=1)
    step = within(step, int(0.7 * step.needs({})))
    found = [*moving(step), *evicting(step, lambda: float("inf"))]
    assert {Option.RECOMPUTE, Option("disk")} <= {option for one in found for option in one.choices.values()}
    for one in found:
        verify(one.program)
        assert one.program.peak_bytes <= step.budgets["device"]
    assert best_order(step, ()).found.step_s <= min(one.step_s for one in found)


def test_the_same_choices_are_lowered_once() -> None:
    step = tiny(0)
    relaxations = Relaxations(step)
    first = relaxations.lowered({})
    assert relaxations.lowered({}) is first
