"""Charts of what ranks of a cluster hold over time: on the terminal, and as torch's memory viewer reads it."""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lading.files import write_aside
from lading.ir.program import slot_bytes
from lading.ir.timeline import MemorySample, MemorySpan
from lading.memory.packing import Buffer, pack
from lading.report.figures import role_names, role_title
from lading.report.snapshot import Change, entry, frames, segment
from lading.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.text import Text

_BASE = 1 << 40
_WIDTH, _HEIGHT = 64, 10
#: Colour of a role on the terminal; its letter is the first of its name.
_STYLES = {
    "parameter": "blue", "optimizer_state": "magenta", "gradient": "yellow", "activation": "green", "workspace": "cyan",
}  # fmt: skip


def write_held_snapshot(path: Path, ranks: Mapping[str, Sequence[MemorySpan]]) -> None:
    """Write what ranks hold as a snapshot for pytorch.org/memory_viz, each rank a device of it."""
    with write_aside(path) as file:
        pickle.dump(held_snapshot(ranks), file, protocol=4)


def held_snapshot(ranks: Mapping[str, Sequence[MemorySpan]]) -> dict[str, Any]:
    """Build the snapshot of what ranks hold, as plain data.

    What is there all the time is there at the end. Addresses are those of a good layout of one segment
    (``lading.memory.packing``), not of torch's allocator. The first frame of an allocation is what it is and its role,
    the second the rank.
    """
    traces: list[list[dict[str, Any]]] = []
    segments: list[dict[str, Any]] = []
    for device, (rank, spans) in enumerate(ranks.items()):
        lasting = [stay for stay in spans if stay.size_bytes and stay.end_s > stay.start_s]
        changes, size = _changes(rank, lasting)
        trace = [entry("segment_alloc", _BASE, size, 0.0, [])]
        for time_s, _, freed, address, slot, _, *names in changes:
            for action in ("free_requested", "free_completed") if freed else ("alloc",):
                trace.append(entry(action, address, slot, time_s, frames(names)))
        traces.append(trace)
        segments.append(segment(device, _BASE, size, changes))
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def _changes(rank: str, held_spans: Sequence[MemorySpan]) -> tuple[list[Change], int]:
    """List what comes and goes, in order, and the bytes that its layout takes."""
    moments = sorted({time_s for stay in held_spans for time_s in (stay.start_s, stay.end_s)})
    spans = [(bisect_left(moments, stay.start_s), bisect_left(moments, stay.end_s) - 1) for stay in held_spans]
    packing = pack([Buffer(stay.size_bytes, (span,)) for stay, span in zip(held_spans, spans, strict=True)])
    changes: list[Change] = []
    for stay, offset in zip(held_spans, packing.offsets, strict=True):
        name = f"{stay.name} ({stay.role.value})"
        facts = (_BASE + offset, slot_bytes(stay.size_bytes), stay.size_bytes, name, rank)
        changes.append((stay.start_s, 1, False, *facts))
        if (stay.start_s, stay.end_s) != (moments[0], moments[-1]):
            changes.append((stay.end_s, 0, True, *facts))
    changes.sort(key=lambda change: change[:2])
    return changes, packing.size_bytes


def memory_chart(samples: Sequence[MemorySample], duration_s: float, title: str) -> Text:
    """Draw memory over time as letters: a column is the fullest moment of its share of the step, rows are bytes.

    Args:
        samples: Samples of one tier, by time.
    """
    from rich.text import Text

    high = max(sample.total_bytes for sample in samples)
    at = next(sample.time_s for sample in samples if sample.total_bytes == high)
    roles = role_names({role for sample in samples for role, size in sample.bytes_by_role.items() if size})
    columns = [_column(sample, roles, high) for sample in _fullest(samples, duration_s)]
    chart = Text(f"{title}: {format_bytes(high)} at {format_seconds(at)}\n", style="bold")
    for row in reversed(range(_HEIGHT)):
        label = format_bytes(high * (row + 1) / _HEIGHT) if row % 3 == 0 else ""
        chart.append(f"{label:>10} |", style="not bold")
        for column in columns:
            role = column[row]
            chart.append(role[:1] if role else " ", style=f"not bold {_STYLES.get(role, 'white')}" if role else None)
        chart.append("\n")
    end = format_seconds(duration_s)
    chart.append(f"{'':>10} +0{end:>{_WIDTH - 1}}\n{'':>12}", style="not bold")
    for role in roles:
        chart.append(f"{role[:1]} ", style=_STYLES.get(role, "white"))
        chart.append(f"{role_title(role)}  ", style="not bold")
    return chart


def _fullest(samples: Sequence[MemorySample], duration_s: float) -> list[MemorySample]:
    """Pick the sample with most bytes in each column's time, the one before it counted as long as it lasts."""
    times = [sample.time_s for sample in samples]
    fullest: list[MemorySample] = []
    for column in range(_WIDTH):
        first = max(0, bisect_right(times, duration_s * column / _WIDTH) - 1)
        until = max(first + 1, bisect_left(times, duration_s * (column + 1) / _WIDTH))
        fullest.append(max(samples[first:until], key=lambda sample: sample.total_bytes))
    return fullest


def _column(sample: MemorySample, roles: Sequence[str], high: int) -> list[str]:
    """Role at the middle of each row of a column, from below; "" above all."""
    tops: list[int] = []
    for role in roles:
        tops.append((tops[-1] if tops else 0) + sample.bytes_by_role.get(role, 0))
    column: list[str] = []
    for row in range(_HEIGHT):
        middle = high * (row + 0.5) / _HEIGHT
        column.append(next((role for role, top in zip(roles, tops, strict=True) if middle < top), ""))
    return column
