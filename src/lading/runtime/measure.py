"""Measured timeline: times from the clock, memory by adding up what the Program says was placed and freed."""

from __future__ import annotations

from collections.abc import Mapping

from lading.ir.program import Program
from lading.ir.timeline import Event, Timeline
from lading.memory.staircase import memory_samples
from lading.runtime.regions import Region


def measured_timeline(
    program: Program,
    starts: list[float],
    ends: list[float],
    *,
    scratch_bytes: Mapping[int, int],
    resident: tuple[tuple[float, int], ...],
    peak_bytes: int,
) -> Timeline:
    """Timeline of one step from the start and end of each action (seconds, by id; the first start is zero)."""
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


def spread(region: Region, starts: list[float], ends: list[float]) -> None:
    """Give each operation of a region an equal part of its time, measured as its first's: more is not known."""
    first, count = region.actions[0], len(region.actions)
    start, part = starts[first], (ends[first] - starts[first]) / count
    done, operations = 0, frozenset(region.actions)
    for action in sorted((*region.actions, *region.freed)):
        starts[action] = start + done * part
        done += action in operations
        ends[action] = start + done * part
        if action not in operations:
            starts[action] = ends[action]
