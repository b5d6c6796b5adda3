"""Trial: what a placement would do, and whether it fits; every policy is judged by the same simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from lading.ir.placement import Placement, PlacementProblem
from lading.planner.placement.list_scheduling import PlacedSimulator, PlacedStep
from lading.planner.placement.micro_peaks import peaks

#: Tasks and flows, each as often as there are micro-batches, that an effort of 1 simulates.
WORK = 100_000
#: Plans with less and less memory.
_ROUNDS = 6


class Trial:
    """Simulator of placements of one problem, which counts what it simulates.

    Attributes:
        runs: Placements simulated so far.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.simulator = PlacedSimulator(problem)
        self.runs = 0
        self._known: dict[tuple[int, ...], Placement] = {}

    def of(self, devices: Sequence[int], policy: str = "", note: str = "") -> Placement:
        """Simulate the placement of every group on its device of ``devices``.

        Raises:
            SimulationError: a task cannot run where it is placed.
        """
        key = tuple(devices)
        placement = self._known.get(key)
        if placement is None:
            run = self.run(key)
            memory = self.problem.network.memory_bytes
            fits = all(peak <= size for peak, size in zip(run.peak_bytes, memory, strict=True))
            windows = windows_of(self.problem, key)
            placement = Placement("", key, windows, run.step_s, run.busy_s, run.channel_s, run.peak_bytes, fits=fits)
            self._known[key] = placement
        return dataclasses.replace(placement, policy=policy, note=note)

    def run(self, devices: Sequence[int], *, record: bool = False) -> PlacedStep:
        """Simulate a placement; with its events where ``record``."""
        self.runs += 1
        return self.simulator.run(devices, windows_of(self.problem, devices), record=record)

    def fitting(
        self, plan: Callable[[Sequence[int]], Sequence[int] | None], policy: str, rounds: int = _ROUNDS
    ) -> Placement | None:
        """Plan with so many bytes of each device, and with fewer while a simulated peak is above them.

        Returns:
            The first that fits; else the last, or None where there is none.
        """
        memory, placement = list(self.problem.network.memory_bytes), None
        for _ in range(rounds):
            devices = plan(memory)
            if devices is None:
                return placement
            placement = self.of(devices, policy)
            if placement.fits:
                return placement
            pairs = zip(placement.peak_bytes, self.problem.network.memory_bytes, strict=True)
            memory = [
                size - max(0, peak - device_bytes) for size, (peak, device_bytes) in zip(memory, pairs, strict=True)
            ]
        return placement

    @cached_property
    def peaks(self) -> np.ndarray:
        """Bytes of a device that one micro-batch takes beside what is resident (``micro_peaks``)."""
        return peaks(self.problem)

    def affordable(self, effort: float) -> int:
        """Number of simulations in an effort, which counts in units of ``WORK`` tasks and flows."""
        size = (len(self.problem.tasks) + len(self.problem.flows)) * self.problem.micro_batches
        return int(effort * WORK // size)

    def can_run(self, devices: Sequence[int]) -> bool:
        """Whether every group can run where it is placed."""
        groups = self.problem.groups
        return all(g.seconds[d] + g.once_s[d] < inf for g, d in zip(groups, devices, strict=True))


def windows_of(problem: PlacementProblem, devices: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches under way on each device: as many as there are devices from it to the end, if they fit.

    That is one-forward-one-backward: the last of K parts holds one, the first K. None holds more than the one before,
    whose micro-batches they are, nor more than one beyond the one behind it, which would not take them: torch's
    schedule waits with a backward until the forward before is taken.
    """
    order: dict[int, int] = {}
    for device in devices:
        order.setdefault(device, len(order))
    windows, resident = [1] * len(problem.network.devices), problem.resident_on(devices)
    for device, place in order.items():
        device_groups = [g for g, d in zip(problem.groups, devices, strict=True) if d == device]
        kept_bytes = sum(g.kept_bytes for g in device_groups)
        free = problem.network.memory_bytes[device] - resident[device] - max(g.working_bytes for g in device_groups)
        most = min(problem.micro_batches, len(order) - place)
        windows[device] = max(1, min(most, free // kept_bytes if kept_bytes else most))
    parts = list(order)
    for before, behind in reversed(list(pairwise(parts))):
        windows[before] = min(windows[before], windows[behind] + 1)
    for before, behind in pairwise(parts):
        windows[behind] = min(windows[behind], windows[before])
    return tuple(windows)


def key_of(placement: Placement, memory_bytes: Sequence[int]) -> tuple[int, float]:
    """Sort key of a placement: first by bytes missing of memory, then by seconds."""
    pairs = zip(placement.peak_bytes, memory_bytes, strict=True)
    return sum(max(0, peak - size) for peak, size in pairs), placement.step_s
