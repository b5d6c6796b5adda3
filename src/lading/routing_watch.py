"""Watch over routing: which experts a run's steps chose, and another plan where others are chosen than it was made for.

A run that leaves out experts without tokens (``memory.experts``) begins without knowing who will be chosen. After so
many steps the shares of steps in which each expert got tokens are compared with those of its plan. Where they differ,
the run is planned again for them, in a process of its own, and goes on by that plan if its step is expected to be
shorter: experts chosen often then stay in memory (``planner.routing``). All values pass from one plan to the next by a
file (``runtime.carried``), and numbers stay the same, as those of any two plans do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, pi, sqrt

from lading import replanning
from lading.catalog.load import machine_from_dict
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.memory.guards import find_guards, find_routers_alone
from lading.run import Prepared
from lading.trainer import Trainer
from lading.units import format_seconds

#: Steps between two looks at what routers chose, twice as many after each new plan that saved nothing.
_LOOK_STEPS = 32
#: Mean difference of an expert's share from the plan's, beyond what chance makes, above which a run is planned again.
_DRIFT = 0.1
#: Seconds of training ahead below which it is not, as planning takes tens of them; share of a step that it has to save.
_WORTH_S, _SAVED = 300.0, 0.03

Shares = Mapping[str, Sequence[float]]


class RoutingWatch:
    """Comparison of the experts that a run's steps choose with those that it was planned for.

    Args:
        plans: Whether the run may be planned again: it was not given its plan, and this process has all of it.

    Attributes:
        prepared: The run by its plan of now.
    """

    def __init__(self, prepared: Prepared, trainer: Trainer, *, plans: bool) -> None:
        self.prepared, self._trainer, self._plans = prepared, trainer, plans
        self._known: Shares = {}
        self._known_steps, self._look_steps = inf, _LOOK_STEPS
        self._began, self._chosen, self._steps = time.perf_counter(), dict[str, list[int]](), 0

    def look(self, step_s: float) -> None:
        """Take nothing of the step that has just ended: the trainer counts what was chosen."""

    def advance(self, steps_left: int) -> str:
        """Compare after so many steps, and plan again where that pays; returns what to say, "" for nothing."""
        counts = self._trainer.experts
        if counts is None or not self._plans or counts.steps - self._steps < self._look_steps:
            return ""
        steps, step_s = counts.steps - self._steps, (time.perf_counter() - self._began) / (counts.steps - self._steps)
        before = self._chosen or {name: [0] * len(row) for name, row in counts.chosen.items()}
        shares = {
            name: [(now - then) / steps for now, then in zip(row, before[name], strict=True)]
            for name, row in counts.chosen.items()
        }
        self._look_from_here()
        drift = difference(shares, self._known) - chance(shares, self._known, steps, self._known_steps)
        if drift <= _DRIFT or step_s * steps_left <= _WORTH_S:
            return ""
        self._known, self._known_steps = shares, steps
        told = self._planned_again(shares)
        self._look_from_here()
        return told

    def _look_from_here(self) -> None:
        """Count from the step that has just ended; a new plan's counts begin at none."""
        counts = self._trainer.experts
        assert counts is not None, "a plan that leaves out experts counts them"
        self._began, self._steps = time.perf_counter(), counts.steps
        self._chosen = {name: [*row] for name, row in counts.chosen.items()}

    def _planned_again(self, shares: Shares) -> str:
        started, before = time.perf_counter(), self.prepared
        machine = machine_from_dict(before.plan.request.machine_table, "the plan's machine")
        plan = replanning.plan_apart(before, machine, shares)
        took = format_seconds(time.perf_counter() - started)
        if isinstance(plan, str):
            return f"tried for {took} to plan again for the experts chosen, in vain: {plan}; the run keeps its plan"
        now_s = _expected_s(before.plan, self._trainer.program, machine, shares)
        then_s = _expected_s(plan, replanning.restored(plan, before), machine, shares)
        steps = f"{format_seconds(now_s)} -> {format_seconds(then_s)}"
        least = _SAVED if plan.leaves_out_experts else 0.0  # without waits is no worse whatever the machine does
        if then_s >= (1 - least) * now_s:
            self._look_steps *= 2
            return f"other experts are chosen; planned again for them in {took}, which saves nothing: {steps}"
        self.prepared = replanning.go_on_by(plan, before, self._trainer)
        self._look_steps = _LOOK_STEPS
        return f"other experts are chosen than were planned for; planned again in {took}, step expected {steps}"


def difference(shares: Shares, known: Shares) -> float:
    """Mean difference of the share of an expert; one of which nothing is known was planned for as always chosen."""
    return _mean(abs(share - planned) for share, planned in _pairs(shares, known))


def chance(shares: Shares, known: Shares, steps: float, known_steps: float) -> float:
    """Mean difference that chance alone makes: the mean of the absolute value of a normal number of as much variance.

    Args:
        steps, known_steps: Steps that the shares were counted in, each of which chooses an expert or not.
    """
    middles = ((share + planned) / 2 for share, planned in _pairs(shares, known))
    return _mean(sqrt(2 / pi * p * (1 - p) * (1 / steps + 1 / known_steps)) for p in middles)


def _pairs(shares: Shares, known: Shares) -> Iterator[tuple[float, float]]:
    for name, row in shares.items():
        yield from zip(row, known.get(name, [1.0] * len(row)), strict=True)


def _mean(values: Iterable[float]) -> float:
    each = [*values]
    return sum(each) / len(each) if each else 0.0


def _expected_s(plan: Plan, program: Program, machine: Machine, shares: Shares) -> float:
    from lading.planner.routing import expected_step_s  # a run with a plan of its own needs no planner

    guards = find_guards(program) if plan.leaves_out_experts else find_routers_alone(program)
    return expected_step_s(program, guards, machine, shares)
