"""Plans that move whatever waits: within the budget, and never faster than what the search returns."""

from __future__ import annotations

import pytest
from tests.planner.steps import captured, within

from lading.memory.verify import verify
from lading.planner.orders import best_order
from lading.planner.streaming import moving


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_the_search_is_never_slower_than_moving_everything(share: float) -> None:
    step = captured("llama")
    step = within(step, int(share * step.needs({})))
    found = list(moving(step))
    assert found
    for one in found:
        verify(one.program)
        assert one.program.peak_bytes <= step.budgets["device"]
    assert best_order(step, ()).found.step_s <= min(one.step_s for one in found)
