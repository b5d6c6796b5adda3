"""Forms of a step that a planned one leads to."""

from __future__ import annotations

import pytest
from tests.machines import small_machine
from tests.planner.steps import captured, within

from lading.ir.graph import Role
from lading.planner.forms import late_forms, lesser_forms, weight_pieces
from lading.planner.residency import StepProblem


def tight() -> StepProblem:
    """A GPT whose tied weight and logits are most of what there is, in less than twice that weight."""
    step = captured("gpt", machine=small_machine(), vocab_size=8192, dim=512, num_layers=2, tied=True)
    largest = max(s.size_bytes for s in step.graph.storages if s.role is Role.PARAMETER)
    return within(step, largest * 3)


@pytest.mark.long
def test_a_planned_form_is_tried_with_weights_in_pieces_and_with_late_products_too() -> None:
    step = tight()
    forms = lesser_forms(step)
    early = next(form for form in forms if form.gradient_pieces and not form.late_products)
    late = next(form for form in forms if form.late_products)
    assert [form.late_products for form in weight_pieces(early, step)] == [False, True]
    assert [form.late_products for form in weight_pieces(late, step)] == [True]
    for form in weight_pieces(early, step):
        assert form.weight_pieces
        assert form.gradient_pieces
        assert any(len(run) > 1 for run in form.graph.runs)
    assert weight_pieces(early, step)[1].loss_parts == max(form.loss_parts for form in forms), "which needs least"


def test_updates_with_cover_are_a_form_that_defers_some_of_them() -> None:
    step = tight()
    forms = late_forms(step)
    assert sum(form.deferrals > 0 for form in forms) == 2, "paced around the step, and those with cover"
