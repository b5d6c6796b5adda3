"""Plans of steps whose updates do not wait for the norm of all gradients (``lading.ir.guess``).

Such a step takes as long as one without clipping, and is run twice where it is clipped. So it pays where few steps are,
and where what is gained is more: with a share p of clipped steps it takes 1 + p times its seconds in the mean.

Which updates cannot do so is known of a plan alone: a value from before the step has to be in a lower tier. So a plan
is made in which all may, and made again with those waiting whose values it kept on the device, until none is.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from lading.errors import ConfigError, PlanInfeasible, check_number
from lading.ir.action import DEVICE
from lading.ir.graph import StepGraph
from lading.ir.guess import update_names
from lading.ir.plan import Plan
from lading.ir.program import LINE_BYTES, Program
from lading.memory.values_before import on_device_alone
from lading.planner.api import Planned
from lading.planner.residency import smallest_bytes
from lading.planner.routing import Loads, check_experts
from lading.units import format_seconds

#: Plans that are made until every value that changes on a guess is in a lower tier before.
_TRIES = 4


class GuessMaker(Protocol):
    """Plans a step within a budget of the device; all updates wait, or those of the parameters named."""

    def __call__(self, waiting: frozenset[str] | None, budget: str | float) -> Planned: ...


def check_clipped(
    clipped: float | None, clip_norm: float, ranks: int, *, compile: bool, others: bool, experts: bool
) -> None:
    """Refuse a step that cannot speculate, before anything is planned.

    Raises:
        ConfigError: says why.
    """
    if clipped is None:
        return
    check_number("clipped", clipped, 0, 1)
    obstacles = {
        "clip_norm=0": not clip_norm,
        "several ranks": ranks > 1,
        "compile=True": compile,
        "further steps (others=, or validation)": others,
        "experts that are left out (experts=)": experts,
    }
    for name, is_there in obstacles.items():
        if is_there:
            raise ConfigError(
                f"clipped: expected one rank and one step, whose gradients are clipped, without compiled regions, got "
                f"{name}; leave clipped out"
            )


def check_alone(
    captured: StepGraph,
    ranks: int,
    experts: bool | Loads,
    clipped: tuple[float | None, float],
    *,
    compile: bool,
    others: bool,
) -> None:
    """Refuse a step that leaves out experts, or speculates, where it cannot.

    Args:
        clipped: Share of steps that are clipped, and the limit of the norm.
    Raises:
        ConfigError: says why.
    """
    check_experts(experts, captured, ranks, compile=compile)
    check_clipped(*clipped, ranks, compile=compile, others=others, experts=experts is not False)


def plan_speculating(make: GuessMaker, budget: str | float, step: StepGraph, clipped: float) -> Planned:
    """Plan a step whose gradients are clipped: with updates that wait for the norm of all gradients, or that do not.

    Args:
        make: Plans the step.
        step: Whole step, all of whose updates wait.
        clipped: Share of steps that are expected to be clipped.

    Raises:
        PlanInfeasible, ConfigError: as ``make``.
    """
    waits = make(None, budget)
    guesses = _on_a_guess(make, step, waits.plan.budgets[DEVICE])
    if guesses is None or (1 + clipped) * guesses.plan.step_s >= waits.plan.step_s:
        return dataclasses.replace(waits, plan=_saying(waits.plan, _kept_waiting(guesses, clipped)))
    return dataclasses.replace(guesses, plan=_saying(guesses.plan, _gained(guesses, waits, clipped)))


def _on_a_guess(make: GuessMaker, step: StepGraph, budget_bytes: int) -> Planned | None:
    """Plan in which as many updates as can do not wait; None where none is found."""
    names, sizes = update_names(step), [storage.size_bytes for storage in step.storages]
    smallest = smallest_bytes(budget_bytes)  # smaller parameters are not moved, so their updates wait
    waiting = frozenset(
        name for name, storages in names.items() if any(LINE_BYTES < sizes[s] < smallest for s in storages)
    )
    for _ in range(_TRIES):
        if waiting >= names.keys():
            return None
        try:
            made = make(waiting, budget_bytes)
        except PlanInfeasible:
            return None
        stuck = _stuck(made.program) - waiting
        if not stuck:
            return made
        waiting |= stuck
    return None


def _stuck(program: Program) -> frozenset[str]:
    """Parameters that a plan keeps on the device alone."""
    alone = on_device_alone(program)
    return frozenset(name for name, storages in update_names(program.graph).items() if not alone.isdisjoint(storages))


def with_waiting(planned: Planned, waiting: frozenset[str]) -> Planned:
    """Write down the parameters whose updates wait for the norm of all gradients where others do not."""
    choices = dataclasses.replace(planned.plan.choices, waiting=tuple(sorted(waiting)))
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, choices=choices))


def _saying(plan: Plan, sentence: str) -> Plan:
    return dataclasses.replace(plan, assumptions=(*plan.assumptions, sentence))


def _gained(guesses: Planned, waits: Planned, clipped: float) -> str:
    count = len(guesses.program.graph.parameters)
    return (
        f"updates of {count - len(guesses.plan.choices.waiting)} of {count} parameters do not wait for the norm of all "
        f"gradients; a step that is clipped is run twice: with {clipped:.0%} of them a step is expected to take "
        f"{format_seconds((1 + clipped) * guesses.plan.step_s)}, where it takes {format_seconds(waits.plan.step_s)} if "
        "all wait"
    )


def _kept_waiting(guesses: Planned | None, clipped: float) -> str:
    if guesses is None:
        return "updates wait for the norm of all gradients: no plan was found in which some do not"
    return (
        f"updates wait for the norm of all gradients: without that a step is expected to take "
        f"{format_seconds((1 + clipped) * guesses.plan.step_s)}, with {clipped:.0%} of them clipped and run twice"
    )
