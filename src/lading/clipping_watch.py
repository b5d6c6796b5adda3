"""Watch over clipping: how many of a run's steps are clipped, and another plan where that is another share than it has.

A run whose updates need not wait for the norm of all gradients (``memory.clipped``) runs a clipped step twice. So what
is worth more depends on how many are, which changes as it trains: many at first, few later. They are counted, and where
their share differs from the plan's by more than chance, the run is planned again for it, in a process of its own, and
goes on by that plan if its step is expected to be shorter. Numbers stay the same, as those of any two plans do.
"""

from __future__ import annotations

import dataclasses
import time
from math import pi, sqrt

from lading import replanning
from lading.catalog.load import machine_from_dict
from lading.host_watch import HostWatch
from lading.ir.expand import CLIP_EPSILON
from lading.ir.guess import SPECULATES
from lading.ir.plan import Plan
from lading.run import Prepared
from lading.trainer import Trainer
from lading.units import format_seconds

#: Steps between two looks at how many were clipped, twice as many after each new plan that saved nothing.
_LOOK_STEPS = 32
#: Difference of the share from the plan's, beyond what chance makes, above which a run is planned again.
_DRIFT = 0.1
#: Seconds of training ahead below which it is not, as planning takes tens of them; share of a step that it has to save.
_WORTH_S, _SAVED = 300.0, 0.03


class ClippingWatch:
    """Comparison of the share of steps that are clipped with that which a run was planned for, and ``HostWatch``.

    Args:
        prepared: The run as it was planned, which has a share (``memory.clipped``).
        plans: Whether the run may be planned again: it was not given its plan, and this process has all of it.
    """

    def __init__(self, prepared: Prepared, trainer: Trainer, *, plans: bool) -> None:
        assert prepared.run.memory.clipped is not None, "a run without a share has nothing to compare"
        self._host, self._trainer, self._plans = HostWatch(prepared, trainer, plans=plans), trainer, plans
        self._share, self._look_steps = prepared.run.memory.clipped, _LOOK_STEPS
        self._again = 0
        self._look_from_here()

    @property
    def prepared(self) -> Prepared:
        """The run by its plan of now."""
        return self._host.prepared

    def look(self, step_s: float) -> None:
        """Count the step that has just ended; one that ran twice says nothing of the host."""
        norm, limit = self._trainer.gradient_norm, self.prepared.run.optimization.clip_norm
        assert norm is not None, "a step whose gradients are clipped has their norm"
        self._steps += 1
        self._clipped += not norm + CLIP_EPSILON <= limit  # and where it is no number
        counts = self._trainer.speculation
        num_repeated = 0 if counts is None else counts.again
        if num_repeated == self._again:
            self._host.look(step_s)
        self._again = num_repeated

    def advance(self, steps_left: int) -> str:
        """Compare after so many steps, and plan again where that pays; returns what to say, "" for nothing."""
        message = self._host.advance(steps_left)
        if message or not self._plans or self._steps < self._look_steps:
            return message
        steps, step_s = self._steps, (time.perf_counter() - self._began) / self._steps
        share = (self._clipped + 0.5) / (steps + 1)  # below 1 where all were
        self._look_from_here()
        if abs(share - self._share) - chance(share, self._share, steps) <= _DRIFT or step_s * steps_left <= _WORTH_S:
            return ""
        self._share = share
        message = f"{share:.0%} of the last {steps} steps were clipped; {self._planned_again(share)}"
        self._look_from_here()
        return message

    def _look_from_here(self) -> None:
        self._began, self._steps, self._clipped = time.perf_counter(), 0, 0

    def _planned_again(self, share: float) -> str:
        started, before = time.perf_counter(), self.prepared
        memory = dataclasses.replace(before.run.memory, clipped=share)
        changed = dataclasses.replace(before, run=dataclasses.replace(before.run, memory=memory))
        plan = replanning.plan_apart(
            changed, machine_from_dict(before.plan.request.machine_table, "the plan's machine")
        )
        took = format_seconds(time.perf_counter() - started)
        if isinstance(plan, str):
            return f"tried for {took} to plan again for that, in vain: {plan}; the run keeps its plan"
        now_s, then_s = expected_step_s(before.plan, share), expected_step_s(plan, share)
        steps = f"{format_seconds(now_s)} -> {format_seconds(then_s)}"
        if then_s > (1 - _SAVED) * now_s:
            self._look_steps *= 2
            return f"planned again for that in {took}, which saves nothing: {steps}"
        self._host.prepared = replanning.go_on_by(plan, before, self._trainer)
        self._look_steps, self._again = _LOOK_STEPS, 0  # a new plan counts from none
        return f"planned again for that in {took}, step expected {steps}"


def expected_step_s(plan: Plan, clipped: float) -> float:
    """Seconds that a step takes in the mean where a share of steps is clipped, and run twice by a plan that guesses."""
    return plan.step_s * (1 + clipped * (SPECULATES in plan.request.settings))


def chance(share: float, known: float, steps: int) -> float:
    """Mean difference of a share, counted in so many steps, from a known one that chance alone makes."""
    middle = (share + known) / 2
    return sqrt(2 / pi * middle * (1 - middle) / steps)
