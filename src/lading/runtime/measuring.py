"""Measurements of a step: when each of its actions ran, and what its operations took of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lading.ir.program import Program
from lading.ir.timeline import Event, Timeline
from lading.memory.staircase import memory_samples
from lading.runtime.device import Call, Meter
from lading.runtime.regions import FusibleRegion
from lading.runtime.streams import Entry
from lading.units import format_bytes


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
    scratch_bytes: Mapping[int, int],
    resident: tuple[tuple[float, int], ...],
    peak_bytes: int,
) -> Timeline:
    """Timeline of one step from the start and end of each action.

    Args:
        starts, ends: Seconds on one clock, by action id. The first start becomes zero.
        scratch_bytes: Bytes that an action takes beside the arena, by id.
        resident: Samples (seconds on that clock, bytes in use).
        peak_bytes: Highest memory of the step.
    """
    origin = min(starts, default=0.0)
    events = [
        Event(0, action.stream, action.id, starts[action.id] - origin, ends[action.id] - origin)
        for action in program.actions
    ]
    return Timeline(
        source="measured",
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.action))),
        memory=memory_samples(program, events, scratch_bytes),
        labels={action.id: program.label(action) for action in program.actions},
        resident=tuple((max(0.0, time - origin), size) for time, size in resident),
        peak_bytes=peak_bytes,
    )


def spread(region: FusibleRegion, starts: list[float], ends: list[float]) -> None:
    """Give each operation of a region an equal part of the region's time, which was measured as its first operation's.

    Changes ``starts`` and ``ends`` (seconds by action id) in place. Nothing more is known of times within a region.
    """
    first, count = region.actions[0], len(region.actions)
    start, part = starts[first], (ends[first] - starts[first]) / count
    done, operations = 0, frozenset(region.actions)
    for action in sorted((*region.actions, *region.freed)):
        starts[action] = start + done * part
        done += action in operations
        ends[action] = start + done * part
        if action not in operations:
            starts[action] = ends[action]
