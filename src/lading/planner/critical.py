"""Critical path of a plan, and choices changed along it.

A step ends as late as the last of a chain of actions, each of which begins when the one before it ends: what it waited
for, or what its stream did before (``critical_path``). Only what lies on this chain makes the step longer, so a plan of
a step that is too large to change every choice is improved by changing those of gaps whose transfers and
recomputations lie there (``relieved``):

    minimise    seconds of the step as simulated
    over        choices in which gaps that are next to each other by their seconds on the chain take another option,
                ``_TOGETHER`` of them, then fewer
    until       no change helps, or so many choices were lowered
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from lading.ir.action import ActionKind
from lading.ir.plan import Option
from lading.ir.program import COMPUTE_STREAM
from lading.planner.residency import GOOD_ENOUGH, Found
from lading.planner.single_changes import Choices

#: Gaps that are changed together, in turn.
_TOGETHER = (32, 8, 2)
#: A change that makes the step shorter by less than this share is not taken.
_LEAST_GAIN = 2e-4
#: Operations lowered in one improvement.
_WORK = 15_000


def critical_path(found: Found) -> list[tuple[int, float]]:
    """List the actions of a plan's longest chain with the seconds of each, the last one first."""
    program = found.program
    actions = program.actions
    ends = [0.0] * len(actions)
    starts = [0.0] * len(actions)
    for event in found.timeline.events:
        starts[event.action], ends[event.action] = event.start_s, event.end_s
    before: list[int] = []
    last: dict[str, int] = {}
    for action in actions:
        before.append(last.get(action.stream, -1))
        last[action.stream] = action.id
    path: list[tuple[int, float]] = []
    at = max(range(len(actions)), key=lambda i: (ends[i], i), default=-1)
    while at >= 0:
        path.append((at, ends[at] - starts[at]))
        causes = [*actions[at].waits, *((before[at],) if before[at] >= 0 else ())]
        at = max(causes, key=lambda i: (ends[i], i), default=-1)
    return path


def critical_seconds(found: Found) -> dict[tuple[int, int], float]:
    """Seconds of the longest chain by gap, for gaps whose transfer or recomputation lies on it; the most first."""
    actions, lives = found.program.actions, found.step.lives
    position = _positions(found)
    starts: dict[int, list[int]] = {}
    for storage, start in sorted(found.choices):
        starts.setdefault(storage, []).append(start)
    seconds: dict[tuple[int, int], float] = {}
    for action, took_s in critical_path(found):
        one = actions[action]
        if one.kind is ActionKind.RECOMPUTE and one.op is not None:
            touched: Sequence[int] = found.step.graph.op_writes[one.op]
        elif one.kind is ActionKind.MOVE and one.storage is not None and one.stream != COMPUTE_STREAM:
            touched = (one.storage,)
        else:
            continue
        for storage in touched:
            if storage not in starts or not lives.uses[storage]:
                continue
            of_storage = starts[storage]
            key = storage, of_storage[bisect_right(of_storage, position[action]) - 1]  # before the first: over the end
            seconds[key] = seconds.get(key, 0.0) + took_s
    return dict(sorted(seconds.items(), key=lambda row: (-row[1], row[0])))


def _positions(found: Found) -> list[int]:
    """Operation of the step that ran last in a program's order before each action; -1 before the first."""
    at, positions = -1, list[int]()
    for action in found.program.actions:
        positions.append(at)
        if action.op is not None and action.kind is not ActionKind.RECOMPUTE:
            at = max(at, action.op)
    return positions


def relieved(found: Found, bound_s: float) -> Found:
    """Improve a plan by changing choices on its critical path; returns the fastest version.

    Args:
        bound_s: Seconds that no plan is below: near it there is nothing to gain.
    """
    step, left = found.step, _WORK // len(found.step.graph.ops)
    options = {(c.gap.storage, c.gap.start): c.options for c in step.bound_problem.candidates}
    tried = {frozenset(found.choices.items())}
    changed = True
    while changed and left > 0 and found.step_s > (1 + GOOD_ENOUGH) * bound_s:
        changed = False
        for choices in _changes(found, options):
            key = frozenset(choices.items())
            if key in tried:
                continue
            tried.add(key)
            left -= 1 + found.retimed
            program = step.lower(choices, found.retimed, found.pace).program
            made = None if program is None else Found(choices, program, step, found.retimed, pace=found.pace)
            if made is not None and made.step_s < (1 - _LEAST_GAIN) * found.step_s:
                found, changed = made, True
                break
            if left <= 0:
                break
    return found


def _changes(found: Found, options: dict[tuple[int, int], tuple[Option, ...]]) -> Iterator[Choices]:
    """Yield choices with some gaps on the critical path changed, those of most seconds and in large groups first."""
    on_path = [key for key in critical_seconds(found) if key in options]
    for count in _TOGETHER:
        for first in range(0, len(on_path), count):
            keys = on_path[first : first + count]
            every = dict.fromkeys(option for key in keys for option in options[key])
            for option in every:
                changed = {key: option for key in keys if option in options[key]}
                choices = {**found.choices, **changed}
                yield {key: option for key, option in choices.items() if option != Option.KEEP}
