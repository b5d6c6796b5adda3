"""Measurements of a step: when each of its actions ran, and what its operations took of memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.job_timeline import JobTimeline, RankTimeline, rank_timeline
from lading.ir.plan import Plan
from lading.ir.program import COMPUTE_STREAM, Program
from lading.ir.timeline import Event, Timeline
from lading.memory.restore import predicted_timeline
from lading.memory.staircase import memory_samples
from lading.runtime.device import Call, Meter
from lading.runtime.host import clock_id
from lading.runtime.regions import FusibleRegion
from lading.runtime.streams import Entry
from lading.units import format_bytes

if TYPE_CHECKING:
    from lading.runtime.executor import Executor
    from lading.runtime.job import Replicas

#: Steps of which ranks remember how long they computed.
_STEPS_NOTED = 50


class OperationPeaks:
    """Memory before and during each operation of one step; looking costs some 50 us an operation.

    Args:
        meter: Reset before each operation, so that it no longer has the peak of the step: ``peak_bytes`` does.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._rows: list[tuple[int, int, int]] = []  # action, bytes before it, highest while it ran

    def watched(self, entry: Entry) -> Call:
        """Wrap an action's call so that memory is read before it and its peak after it."""
        run: Callable[[], object] = entry.run

        def watch() -> None:
            before = self._meter.now_bytes()
            self._meter.reset()
            run()
            self._rows.append((entry.action, before, self._meter.peak_bytes()))

        return watch

    @property
    def peak_bytes(self) -> int:
        """Highest bytes in use while any of the operations ran."""
        return max((peak for _, _, peak in self._rows), default=0)

    def cause(self, program: Program, baseline_bytes: int) -> str:
        """Say in a sentence what took memory that was not predicted, at the operation with the highest peak.

        Args:
            baseline_bytes: Bytes in use before anything of the run.
        """
        action, before, peak = max(self._rows, key=lambda row: row[2], default=(0, 0, 0))
        scratch, beside = peak - before, before - baseline_bytes - program.arena_bytes
        name = program.label(program.actions[action])
        parts: list[str] = []
        if scratch > program.workspace_bytes:
            parts.append(
                f"{name} took {format_bytes(scratch)} while it ran, where {format_bytes(program.workspace_bytes)} were "
                "planned for any operation"
            )
        if beside > program.overhead_bytes:
            parts.append(
                f"before {name} the process held {format_bytes(beside)} beside the tensors, where "
                f"{format_bytes(program.overhead_bytes)} were planned"
            )
        return " and ".join(parts) or "no operation took it: another thread did, or the caller between two steps"


def measured_timeline(
    program: Program,
    starts: list[float],
    ends: list[float],
    *,
    began_s: float,
    scratch_bytes: Mapping[int, int],
    resident: tuple[tuple[float, int], ...],
    peak_bytes: int,
) -> Timeline:
    """Timeline of one step from the start and end of each action.

    Args:
        starts, ends: Seconds on one clock, by action id.
        began_s: Moment on that clock that becomes zero: that of the first start.
        scratch_bytes: Bytes that an action takes beside the arena, by id.
        resident: Samples (seconds on that clock, bytes in use).
        peak_bytes: Highest memory of the step.
    """
    events = [
        Event(0, action.stream, action.id, starts[action.id] - began_s, ends[action.id] - began_s)
        for action in program.actions
    ]
    return Timeline(
        source="measured",
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.action))),
        memory=memory_samples(program, events, scratch_bytes),
        labels={action.id: program.label(action) for action in program.actions},
        resident=tuple((max(0.0, time - began_s), size) for time, size in resident),
        peak_bytes=peak_bytes,
    )


def spread(region: FusibleRegion, starts: list[float], ends: list[float]) -> None:
    """Give each operation of a region an equal part of the region's time, which was measured as its first operation's.

    Changes ``starts`` and ``ends`` (seconds by action id) in place. Nothing more is known of times within a region.
    """
    first, count = region.actions[0], len(region.actions)
    start, part = starts[first], (ends[first] - starts[first]) / count
    operations_before, operations = 0, frozenset(region.actions)
    for action in sorted((*region.actions, *region.freed)):
        starts[action] = start + operations_before * part
        operations_before += action in operations
        ends[action] = start + operations_before * part
        if action not in operations:
            starts[action] = ends[action]


class StepNotes:
    """Notes of a rank on its steps, for the timelines of all ranks.

    Args:
        replicas: The ranks; None for one alone.

    Attributes:
        came_s: Moment at which this rank came to the last step, on the clock of this process.
    """

    def __init__(self, replicas: Replicas | None) -> None:
        self._replicas, self.came_s = replicas, 0.0
        self._computing_s = deque[float](maxlen=_STEPS_NOTED)

    def stepped(self, executor: Executor) -> None:
        """Note how long a step computed, where several ranks are compared and looking at all actions is cheap."""
        if self._replicas is not None and executor.kind == "cpu":
            self._computing_s.append(executor.computing_s())

    def rank_timeline(self, plan: Plan, program: Program, executor: Executor) -> RankTimeline:
        """Timeline of this rank's last step, on the clock of this process.

        Raises:
            ConfigError: none has completed, or something else ran since.
        """
        timeline = executor.timeline()
        if not executor.ran_step:
            raise ConfigError("expected a step to have run last, found an evaluation; call this right after step()")
        rank = 0 if self._replicas is None else self._replicas.rank
        return replace(
            rank_timeline(executor.program, plan.parsed_layout, rank, timeline),
            start_s=executor.began_s,
            came_s=self.came_s,
            computing_s=tuple(self._computing_s) or (timeline.busy_s(COMPUTE_STREAM),),
            predicted_computing_s=predicted_timeline(plan, program).busy_s(COMPUTE_STREAM),
            predicted_bytes=program.predicted_bytes,
            budget_bytes=plan.budgets[DEVICE],
            base_bytes=executor.base_bytes,
        )

    def of_all_ranks(self, mine: RankTimeline, peak_bytes: int, plan: str, step: int) -> JobTimeline | None:
        """Collect the timelines of all ranks on the first, on one clock; None on the others. All ranks call this.

        Args:
            mine: This rank's, on the clock of this process.
            peak_bytes: Highest memory of this rank by now.
            plan: Fingerprint of the plan.
            step: Number of the step.
        """
        ahead_s, error_s = 0.0, 0.0
        if self._replicas is not None:
            ahead_s, error_s = self._replicas.clock_ahead_s(clock_id(), time.perf_counter)
        mine = replace(mine.earlier(ahead_s), peak_bytes=peak_bytes, clock_error_s=error_s)
        ranks = [mine] if self._replicas is None else self._replicas.gather(mine)
        if ranks is None:
            return None
        first_s = min(timeline.start_s for timeline in ranks)
        return JobTimeline(plan=plan, step=step, ranks=tuple(timeline.earlier(first_s) for timeline in ranks))
