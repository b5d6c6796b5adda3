"""Transfers of a plan scheduled again and again: the fastest version is kept."""

from __future__ import annotations

import pytest
from tests.planner.steps import captured, within

from lading.memory.verify import verify
from lading.planner.rescheduling import rescheduled
from lading.planner.residency import Found
from lading.planner.streaming import moving


@pytest.fixture(scope="module")
def waiting() -> Found:
    """A plan in which whatever waits is on the disk, though there is room for a part of it."""
    step = captured("gpt", num_layers=4)
    step = within(step, int(0.7 * step.needs({})))
    choices = max(moving(step), key=lambda found: found.step_s).choices
    program = step.lower(choices).program
    assert program is not None
    return Found(choices, program, step)


def test_a_plan_gets_shorter_with_the_same_choices(waiting: Found) -> None:
    made = rescheduled([waiting], 0.5 * waiting.step_s)
    assert made.step_s < waiting.step_s
    assert made.choices == waiting.choices
    assert made.retimed > waiting.retimed
    verify(made.program)
    assert made.program.peak_bytes <= waiting.step.budgets["device"]
    assert rescheduled([waiting], 0.5 * waiting.step_s).program.text() == made.program.text()


def test_of_two_versions_the_one_that_gets_shortest_is_taken(waiting: Found) -> None:
    made = rescheduled([waiting], 0.5 * waiting.step_s)
    assert rescheduled([made, waiting], 0.5 * waiting.step_s).step_s <= made.step_s
    again = rescheduled([waiting, waiting, waiting], 0.5 * waiting.step_s)
    assert again.program.text() == made.program.text()


def test_a_plan_near_its_bound_stays(waiting: Found) -> None:
    assert rescheduled([waiting], waiting.step_s / 1.05) is waiting
