"""The streams of one step, predicted above measured, on one time axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lading.ir.program import Program
from lading.ir.timeline import Event, Timeline
from lading.report.charts import LEFT, PLOT, WIDTH
from lading.report.figures import SliceKind, kind_of
from lading.report.svg import Frame, el, figure, legend, second_ticks, svg, words, x_axis

ROW, GAP, HEAD = 22.0, 4.0, 24.0

KIND_TITLES = {
    SliceKind.FORWARD: "forward",
    SliceKind.BACKWARD: "backward",
    SliceKind.RECOMPUTE: "recompute",
    SliceKind.STEP: "optimizer step",
    SliceKind.READ: "read to device",
    SliceKind.WRITE: "write from device",
    SliceKind.COMMUNICATION: "communication",
    SliceKind.FREE: "free",
}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Rectangle of a chart: an action, or actions too short to see apart.

    Attributes:
        action: The action, or the longest of them.
        count: How many actions; ``busy_s`` is their sum.
    """

    action: int
    kind: SliceKind
    start_s: float
    end_s: float
    count: int
    busy_s: float


def merge(program: Program, events: Sequence[Event], pixel_s: float) -> list[Slice]:
    """Merge the events of one stream into slices: those shorter than a pixel that start in one pixel become one.

    Events without duration are not shown.
    """
    slices: list[Slice] = []
    bucket: list[Event] = []

    def close() -> None:
        if bucket:
            slices.append(_merged(program, bucket))
            bucket.clear()

    for event in sorted(events, key=lambda e: e.start_s):
        if event.end_s <= event.start_s:
            continue
        if event.end_s - event.start_s >= pixel_s:
            close()
            slices.append(_merged(program, [event]))
            continue
        if bucket and int(event.start_s / pixel_s) != int(bucket[0].start_s / pixel_s):
            close()
        bucket.append(event)
    close()
    return slices


def _merged(program: Program, events: Sequence[Event]) -> Slice:
    seconds: dict[SliceKind, float] = {}
    for event in events:
        kind = kind_of(program, program.actions[event.action])
        seconds[kind] = seconds.get(kind, 0.0) + event.end_s - event.start_s
    return Slice(
        action=max(events, key=lambda e: e.end_s - e.start_s).action,
        kind=max(seconds, key=lambda kind: seconds[kind]),
        start_s=events[0].start_s,
        end_s=max(event.end_s for event in events),
        count=len(events),
        busy_s=sum(seconds.values()),
    )


def gantt_figure(program: Program, lines: Sequence[Timeline], duration_s: float, *, rank: int | None = None) -> str:
    """Draw a pair of rows for each stream, with the data that the tooltips need.

    Args:
        rank: Number of the rank that these are the streams of, where there are several.
    """
    prefix = f"{rank}:" if rank else ""
    streams = list(dict.fromkeys(event.stream for line in lines for event in line.events))
    height = len(streams) * (HEAD + len(lines) * (ROW + GAP))
    frame = Frame(left=LEFT, top=2, width=PLOT, height=height + 4, x_high=duration_s or 1.0, y_high=1.0)
    marks = second_ticks(frame.x_high, 10)
    body = [
        el("line", x1=frame.x(value), x2=frame.x(value), y1=frame.top, y2=frame.bottom, class_="grid")
        for value, _ in marks
    ]
    shown: set[int] = set()
    kinds: set[SliceKind] = set()
    y = frame.top
    for stream in streams:
        body.append(words(stream.replace("_", " "), LEFT, y + 17, "strong label"))
        y += HEAD
        for line in lines:
            slices = merge(program, [e for e in line.events if e.stream == stream], frame.x_high / frame.width)
            body.append(words(line.source, LEFT - 8, y + 15, "tick end"))
            body.append(el("rect", x=LEFT, y=y, width=PLOT, height=ROW, class_="lane"))
            body.append(el("g", *(_rect(frame, s, y, prefix) for s in slices)))
            shown.update(s.action for s in slices)
            kinds.update(s.kind for s in slices)
            y += ROW + GAP
    body.append(x_axis(frame, marks))
    drawing = svg(WIDTH, frame.bottom + 24, "".join(body), "Timeline of one step")
    keys = [(f"k-{kind.value}", KIND_TITLES[kind]) for kind in SliceKind if kind in kinds]
    note = "Point at a slice for its action; slices under a pixel are merged. The trace file holds every action."
    table = _tooltip_data(program, lines, sorted(shown), prefix)
    data = el("script", table, type="application/json", class_="actions")
    title = "Streams over one step" if rank is None else f"Streams of rank {rank} over one step"
    return figure(title, el("div", drawing, class_="timed") + legend(keys), note=note) + data


def _rect(frame: Frame, piece: Slice, y: float, prefix: str) -> str:
    x = frame.x(piece.start_s)
    width = max(frame.x(piece.end_s) - x, 0.8)
    width -= 0.5 if width > 3 else 0.0
    many = f' data-n="{piece.count}" data-s="{piece.busy_s:.3g}"' if piece.count > 1 else ""
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{ROW:g}" class="k-{piece.kind.value}" '
        f'data-a="{prefix}{piece.action}"{many}/>'
    )


def _tooltip_data(program: Program, lines: Sequence[Timeline], actions: Sequence[int], prefix: str) -> str:
    """Write the tooltips' JSON: each action's label and its seconds in each timeline; "<" is escaped."""
    seconds = [{e.action: e.end_s - e.start_s for e in line.events} for line in lines]
    table: dict[str, list[object]] = {}
    for action in actions:
        label = lines[0].labels.get(action) or program.label(program.actions[action])
        times = [float(f"{s[action]:.4g}") if action in s else None for s in seconds]
        table[f"{prefix}{action}"] = [label, *times]
    data = {"sources": [line.source for line in lines], "actions": table}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
