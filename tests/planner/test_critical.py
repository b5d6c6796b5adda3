"""The critical path of a plan, and plans improved along it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.planner.steps import captured, within

from lading.ir.plan import Option
from lading.memory.verify import verify
from lading.planner.critical import critical_path, critical_seconds, relieved
from lading.planner.residency import Found, StepProblem
from lading.planner.streaming import moving


def moved(share: float = 0.7) -> Found:
    """The slowest plan in which whatever waits is on the disk, though there is room for a part of it."""
    step = captured("gpt", num_layers=2)
    step = within(step, int(share * step.needs({})))
    return max(moving(step), key=lambda found: found.step_s)


def test_the_path_leads_from_the_first_action_to_the_last_without_a_break() -> None:
    found = moved()
    path = critical_path(found)
    events = {event.action: event for event in found.timeline.events}
    assert events[path[0][0]].end_s == max(event.end_s for event in events.values())
    assert events[path[-1][0]].start_s == 0.0
    for (later, _), (earlier, _) in pairwise(path):
        assert events[earlier].end_s == pytest.approx(events[later].start_s, abs=1e-12)
    assert sum(seconds for _, seconds in path) == pytest.approx(found.step_s)


def test_seconds_of_gaps_are_those_of_their_own_actions() -> None:
    found = moved()
    seconds = critical_seconds(found)
    assert seconds
    assert all(found.choices[key] in (Option.RECOMPUTE, Option("disk")) for key in seconds)
    assert sum(seconds.values()) <= found.step_s * (1 + 1e-9)
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)


@pytest.mark.long
def test_what_lies_on_the_path_is_changed_while_that_makes_the_step_shorter() -> None:
    found = moved()
    better = relieved(found, 0.0)
    assert better.step_s < 0.9 * found.step_s
    assert better.program.peak_bytes <= found.step.budgets["device"]
    verify(better.program)
    assert relieved(moved(), 0.0).choices == better.choices


def test_a_plan_near_its_bound_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = moved()
    monkeypatch.setattr(StepProblem, "lower", lambda *_: pytest.fail("nothing is to be tried"))
    assert relieved(found, found.step_s) is found
