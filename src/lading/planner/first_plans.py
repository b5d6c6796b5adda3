"""First plans of the forms of a step, by which those are picked that are planned further.

What picks them leaves out each form whose first plan takes ``BEHIND`` times as long as the fastest one, so no more has
to be known of it:

- A relaxation takes no longer than the plans that are made of it, or little longer. So it is not repaired any further
  once it takes ``BEHIND`` times as long as the fastest first plan at hand.
- Aims that reserve nothing are for steps that have no plan with a reserve. They are tried where no form has one: of a
  form that needs more at once than another which fits, such a plan would have the least room of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from lading.planner.orders import BEHIND, deferred_step
from lading.planner.residency import StepProblem, first_plan


def first_plan_s(step: StepProblem) -> float:
    """Seconds of the first plan of a search that reserves memory; infinite where none fits."""
    return _plan_s(step, float("inf"), tight=False)


def first_plans_s(forms: Sequence[StepProblem], known_s: float = float("inf")) -> list[float]:
    """Seconds of the first plan of each form; infinite where none fits, or none that is near the fastest one.

    The first form is planned first, then those that need least at once, which are the last ones.

    Args:
        known_s: Seconds of the fastest first plan of other forms of the step; infinite where there is none.
    """
    made_s = [float("inf")] * len(forms)
    for tight in (False, True):
        for at in sorted(range(len(forms)), key=lambda at: -at if at else -len(forms)):
            made_s[at] = _plan_s(forms[at], BEHIND * min([known_s, *made_s]), tight=tight)
        if min([known_s, *made_s]) < float("inf"):
            break
    return made_s


def _plan_s(form: StepProblem, below_s: float, *, tight: bool) -> float:
    made = first_plan(deferred_step(form, form.deferrals), below_s, tight=tight)
    return float("inf") if made is None else made.step_s
