"""Plans that move or evict whatever waits: within the budget, and never faster than what the search returns."""

from __future__ import annotations

import pytest
from tests.planner.steps import captured, tiny, within

from lading.ir.plan import Option
from lading.memory.verify import verify
from lading.planner.orders import best_order, deferred_step, evicting
from lading.planner.residency import Relaxations, ResidencySearch, residency_problem, smallest_bytes
from lading.planner.streaming import _transfers_s, moving  # pyright: ignore[reportPrivateUsage]


@pytest.mark.long
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


def test_a_second_search_of_a_step_plans_nothing_again() -> None:
    step = captured("gpt", num_layers=1)
    step = within(step, int(0.7 * step.needs({})))
    assert deferred_step(step, 2) is deferred_step(step, 2)
    first, second = ResidencySearch(step, ()), ResidencySearch(step, ())
    assert first.advance()
    assert second.advance()
    assert first.best is second.best


def test_moving_whatever_waits_is_left_out_where_reading_alone_takes_too_long() -> None:
    step = captured("gpt", num_layers=1)
    step = within(step, int(0.7 * step.needs({})))
    (slowest, *_) = sorted(moving(step), key=lambda found: -found.step_s)
    assert not list(moving(step, lambda: 1e-9))
    assert list(moving(step, lambda: 2 * slowest.step_s))


def test_small_storages_may_move_where_what_is_alive_anyway_leaves_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lading.planner.residency._SMALLEST_SHARE", 0.04)
    step = captured("gpt", num_layers=1)
    most = step.needs({})
    for size in range(most, 0, -most // 200):
        tight = within(step, size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lading.planner.residency._LITTLE_ROOM", -1.0)
            usual = residency_problem(tight)
        if usual.base.max() > 0.98 * tight.arena_bytes:
            break
    smallest = smallest_bytes(tight.arena_bytes)
    assert min(candidate.size_bytes for candidate in usual.candidates) >= smallest
    assert min(candidate.size_bytes for candidate in residency_problem(tight).candidates) < smallest
    roomy = within(step, most)
    assert min(c.size_bytes for c in residency_problem(roomy).candidates) >= smallest_bytes(roomy.arena_bytes)


def test_moving_whatever_waits_takes_no_less_than_its_transfers() -> None:
    """And what it writes counts too: reading alone would be done sooner."""
    step = captured("gpt", num_layers=1)
    step = within(step, int(0.7 * step.needs({})))
    plans = list(moving(step))
    assert plans
    (disk,) = step.machine.tiers
    for found in plans:
        least_s = _transfers_s(step, found.choices)
        back = sum(step.graph.storages[storage].size_bytes for storage, _ in found.choices)
        assert back / disk.read_bytes_per_s < least_s <= found.step_s * (1 + 1e-9)
