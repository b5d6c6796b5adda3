"""Watch over routing: which experts a run's steps chose, and another plan where others are chosen than it was made for.

A run that leaves out experts without tokens (``memory.experts``) begins without knowing who will be chosen. After so
many steps the shares of steps in which each expert got tokens are compared with those of its plan. Where they differ,
the run is planned again for them, in a process of its own, and goes on by that plan if its step is expected to be
shorter: experts chosen often then stay in memory (``planner.routing``). All values pass from one plan to the next by a
file (``runtime.carried``), and numbers stay the same, as those of any two plans do.

Where the host may compute experts that get few tokens (``memory.experts_on_host``), tokens are compared, too, and the
run is planned for both. The first plan knows no tokens, so such a run is planned again once they are counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, pi, sqrt

from lading import replanning
from lading.catalog.load import machine_from_dict
from lading.ir.machine import Machine
from lading.ir.plan import NOT_ON_HOST, Plan
from lading.ir.program import Program
from lading.memory.guards import find_guards, find_routers_alone
from lading.run import Prepared
from lading.runtime.replays import ExpertCounts
from lading.trainer import Trainer
from lading.units import format_seconds

#: Steps between two looks at what routers chose, twice as many after each new plan that saved nothing.
_LOOK_STEPS = 32
#: Mean difference of an expert's share from the plan's, beyond what chance makes, above which a run is planned again.
_DRIFT = 0.1
#: Seconds of training ahead below which it is not, as planning takes tens of them; share of a step that it has to save.
_WORTH_S, _SAVED = 300.0, 0.03

#: Share of experts that get other numbers of tokens than planned for, above which a run is planned again for them; they
#: are others if twice as many or half, and by twice as much as chance makes.
_MOVED, _TIMES, _DEVIATIONS = 0.1, 2.0, 2.0

Shares = Mapping[str, Sequence[float]]
#: For each router, by its module, the share of steps in which each expert gets tokens, and the mean tokens in these.
Loads = Mapping[str, Sequence[tuple[float, float]]]


class RoutingWatch:
    """Comparison of the experts that a run's steps choose with those that it was planned for.

    Args:
        plans: Whether the run may be planned again: it was not given its plan, and this process has all of it.

    Attributes:
        prepared: The run by its plan of now.
    """

    def __init__(self, prepared: Prepared, trainer: Trainer, *, plans: bool) -> None:
        self.prepared, self._trainer, self._plans = prepared, trainer, plans
        self._hosts = prepared.run.memory.experts_on_host
        self._known: Shares = {}
        self._known_loads: Loads = {}
        self._known_steps, self._look_steps = inf, _LOOK_STEPS
        self._before, self._began = ExpertCounts(), time.perf_counter()

    def look(self, step_s: float) -> None:
        """Take nothing of the step that has just ended: the trainer counts what was chosen."""

    def advance(self, steps_left: int) -> str:
        """Compare after so many steps, and plan again where that pays; returns what to say, "" for nothing."""
        counts = self._trainer.experts
        if counts is None or not self._plans or counts.steps - self._before.steps < self._look_steps:
            return ""
        counts = counts.since(self._before)
        step_s, shares = (time.perf_counter() - self._began) / counts.steps, counts.shares()
        loads = counts.loads() if self._hosts else {}
        self._look_from_here()
        drift = difference(shares, self._known) - chance(shares, self._known, counts.steps, self._known_steps)
        moved = moved_loads(loads, self._known_loads, counts.steps, self._known_steps) if self._hosts else 0.0
        if (drift <= _DRIFT and moved <= _MOVED) or step_s * steps_left <= _WORTH_S:
            return ""
        self._known, self._known_loads, self._known_steps = shares, loads, counts.steps
        what = "other experts are chosen" if drift > _DRIFT else "experts get other numbers of tokens"
        told = self._planned_again(loads if self._hosts else shares, what)
        self._look_from_here()
        return told

    def _look_from_here(self) -> None:
        """Count from the step that has just ended; a new plan's counts begin at none."""
        counts = self._trainer.experts
        assert counts is not None, "a plan that leaves out experts counts them"
        self._began, self._before = time.perf_counter(), counts.since(ExpertCounts())

    def _planned_again(self, known: replanning.Loads, what: str) -> str:
        started, before = time.perf_counter(), self.prepared
        machine = machine_from_dict(before.plan.request.machine_table, "the plan's machine")
        plan = replanning.plan_apart(before, machine, known)
        took = format_seconds(time.perf_counter() - started)
        if isinstance(plan, str):
            return f"tried for {took} to plan again for the experts chosen, in vain: {plan}; the run keeps its plan"
        now_s = _expected_s(before.plan, self._trainer.program, machine, known)
        then_s = _expected_s(plan, replanning.restored(plan, before), machine, known)
        steps = f"{format_seconds(now_s)} -> {format_seconds(then_s)}"
        least = _SAVED if plan.leaves_out_experts else 0.0  # without waits is no worse whatever the machine does
        if then_s >= (1 - least) * now_s:
            self._look_steps *= 2
            return f"{what}; planned again for them in {took}, which saves nothing: {steps}{self._of_host(plan)}"
        self.prepared = replanning.go_on_by(plan, before, self._trainer)
        self._look_steps = _LOOK_STEPS
        return f"{what} than were planned for; planned again in {took}, step expected {steps}{self._of_host(plan)}"

    def _of_host(self, plan: Plan) -> str:
        """Say which experts the host computes by a plan, or why none, where it is asked to."""
        if not self._hosts:
            return ""
        if plan.host_tokens:
            count = sum(map(len, plan.host_tokens.values()))
            return f"; the host computes {count} experts where they get few tokens"
        return "".join(f"; {each}" for each in plan.assumptions if each.startswith(NOT_ON_HOST))


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


def moved_loads(loads: Loads, known: Loads, steps: float, known_steps: float) -> float:
    """Share of experts that get other numbers of tokens in the steps that choose them than was known.

    One that was chosen, and of which nothing was known, gets others. One that was not chosen says nothing of tokens.

    Args:
        steps, known_steps: Steps that the loads were counted in.
    """
    moved = [
        _has_moved(now, then, steps, known_steps)
        for name, row in loads.items()
        for now, then in zip(row, known.get(name, [None] * len(row)), strict=True)
    ]
    return _mean(moved)


def _has_moved(now: tuple[float, float], then: tuple[float, float] | None, steps: float, known_steps: float) -> bool:
    if not now[0] or then is None or not then[0]:
        return bool(now[0]) and then is None
    variances = (tokens / (share * count) for (share, tokens), count in ((now, steps), (then, known_steps)))
    low, high = sorted((now[1], then[1]))
    return high > _TIMES * low and high - low > _DEVIATIONS * sqrt(sum(variances))


def _expected_s(plan: Plan, program: Program, machine: Machine, known: replanning.Loads) -> float:
    # imported here, as a run with a plan of its own needs no planner
    from lading.planner.host_experts import HostChoice
    from lading.planner.routing import expected_step_s, shares_and_tokens

    shares, tokens = shares_and_tokens(known)
    host = HostChoice(tokens, plan.host_tokens) if plan.host_tokens else None
    guards = find_guards(program) if plan.leaves_out_experts else find_routers_alone(program)
    return expected_step_s(program, guards, machine, shares, host)
