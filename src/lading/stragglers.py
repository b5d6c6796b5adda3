"""Stragglers: what a slow rank costs the step of a planned run, as the simulator says."""

from __future__ import annotations

from lading.catalog.load import machine_from_dict
from lading.run import Prepared, programs_of_ranks
from lading.sim.device_step import straggler_step_s


def straggler_steps_s(prepared: Prepared, factor: float) -> list[float]:
    """Predict the seconds of a step of which one rank computes ``factor`` times as long, for each that it may be.

    Returns:
        Seconds by rank, or along a pipeline by stage: replicas of a stage cost the same. One where all ranks are alike.

    Raises:
        ConfigError: as ``lading.run.programs_of_ranks``.
    """
    machine = machine_from_dict(prepared.plan.request.machine_table, "the plan's machine")
    return straggler_step_s(programs_of_ranks(prepared), machine, factor)


def slow_step_s(prepared: Prepared, rank: int, factor: float) -> float:
    """Predict the seconds of a step of which this rank computes ``factor`` times as long; raises as above."""
    seconds = straggler_steps_s(prepared, factor)
    return seconds[prepared.plan.parsed_layout.place(rank)["pp"] if len(seconds) > 1 else 0]
