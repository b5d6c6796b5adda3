"""Single changes: a plan of the ``residency`` policy with one choice changed after another, while that helps.

Rounding and the room left to transfers make a relaxation's plan a little slower than it has to be. ``improve`` changes
one choice of the plan at a time, or two, while lowering and simulating says that this makes the step shorter. The work
is limited, so that it matters on small steps and costs little on large ones; on chains that can be enumerated it brings
the plan to within a few percent of the best (tests/planner/test_enumerate.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations

from lading.ir.plan import Option
from lading.planner.relaxation import ResidencyProblem

Choices = dict[tuple[int, int], Option]
#: Choices tried times operations of the step.
_WORK = 10_000
#: Where fewer tries than this are left by that, none is made.
_FEWEST = 20


def tries(num_ops: int) -> int:
    """Number of choices that may be tried in a step of so many operations; 0 where they would be too few to matter."""
    allowed = _WORK // num_ops
    return allowed if allowed >= _FEWEST else 0


def improve(
    choices: Choices, step_s: float, problem: ResidencyProblem, seconds_of: Callable[[Choices], float | None]
) -> Choices:
    """Improve choices by changing single ones, largest storage first, while the step gets shorter.

    Where none is left that helps, two are changed at once, if there are few enough pairs to try them all: what makes
    room and what uses it may help together only.

    Args:
        choices: Choices to start from.
        step_s: Seconds that they take.
        seconds_of: Predicted step time of choices; None where they do not fit.
    """
    left = tries(problem.num_ops)
    candidates = sorted(problem.candidates, key=lambda c: (-c.size_bytes, c.gap.storage, c.gap.start))
    singles = [((c.gap.storage, c.gap.start), option) for c in candidates for option in c.options]
    pairs = list(combinations(singles, 2)) if len(singles) * (len(singles) - 1) // 2 <= left else []
    tried = {_key(choices)}
    changed = True
    while changed:
        changed = False
        for changes in chain(((single,) for single in singles), pairs):
            if changed and len(changes) > 1:
                break  # single ones may help again
            made = choices
            for key, option in changes:
                made = _changed(made, key, option)
            if _key(made) in tried:
                continue
            if left <= 0:
                return choices
            tried.add(_key(made))
            left -= 1
            seconds = seconds_of(made)
            if seconds is not None and seconds < step_s * (1 - 1e-9):
                choices, step_s, changed = made, seconds, True
    return choices


def _key(choices: Choices) -> frozenset[tuple[tuple[int, int], Option]]:
    return frozenset((key, option) for key, option in choices.items() if option != Option.KEEP)


def _changed(choices: Choices, key: tuple[int, int], option: Option) -> Choices:
    """Copy choices with one changed; a storage has a place in one tier only, so its other gaps follow to a new one."""
    changed = {**choices, key: option}
    on_device = (Option.KEEP, Option.RECOMPUTE)
    if option in on_device:
        return changed
    return {k: option if k[0] == key[0] and o not in on_device else o for k, o in changed.items()}
