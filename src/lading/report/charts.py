"""Drawings of memory and of a run's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, isfinite

from lading.ir.timeline import Timeline
from lading.report.figures import ROLE_ORDER, coarse, role_names, role_title, tier_samples
from lading.report.promises import RunSummary
from lading.report.svg import (
    Frame,
    byte_ticks,
    el,
    figure,
    legend,
    level,
    polyline,
    round_step,
    second_ticks,
    staircase,
    svg,
    text,
    ticks,
    x_axis,
    y_axis,
)
from lading.units import format_bytes

WIDTH, LEFT, RIGHT = 1040.0, 78.0, 14.0
PLOT = WIDTH - LEFT - RIGHT
#: Width of what a phone shows, of 360 pixels less margins: text is drawn at its size there.
PHONE_WIDTH = 340.0
#: A budget this many times higher than everything drawn is named, not drawn.
FAR_ABOVE = 2.5


def role_class(role: str) -> str:
    """CSS class of a role's colour; names that are no role share one."""
    return f"r-{role}" if role in {r.value for r in ROLE_ORDER} else "r-other"


def memory_bars(summary: RunSummary) -> str:
    """Draw bars of the few peaks that matter, against the budget."""
    rows = [("Keep everything, predicted", summary.keep_all_bytes, "b-plain")]
    if summary.plain_peak_bytes is not None:
        rows.append(("Plain PyTorch, measured", summary.plain_peak_bytes, "b-plain"))
    rows.append(("This plan, predicted", summary.predicted_peak_bytes, "b-predicted"))
    if summary.measured_peak_bytes is not None:
        over = summary.measured_peak_bytes > summary.budget_bytes
        rows.append(("This plan, measured", summary.measured_peak_bytes, "b-over" if over else "b-measured"))
    high = max(summary.budget_bytes, *(size for _, size, _ in rows))
    budget = f"left:{summary.budget_bytes / high:.2%}"
    side = "flag left" if summary.budget_bytes > 0.5 * high else "flag"
    flag = el("span", text(f"budget {format_bytes(summary.budget_bytes)}"), class_=side, style=budget)
    cells = [el("div", flag, class_="track head")]
    for label, size, class_ in rows:
        bar = el("i", class_=f"bar {class_}", style=f"width:{size / high:.2%}") + el("i", class_="mark", style=budget)
        cells += [el("span", text(label)), el("b", format_bytes(size)), el("div", bar, class_="track")]
    return figure("Peak device memory", el("div", *cells, class_="bars"), wide=False)


def memory_figure(
    tier: str, duration_s: float, budget_bytes: int | None, lines: Sequence[Timeline], *, limit: str = "budget"
) -> str:
    """Draw one tier over time: the first timeline stacked by role, of a second the total and the resident set as lines.

    Args:
        limit: Name of ``budget_bytes``.
    """
    peaks = [line.peak_of_tier(tier) for line in lines]
    device = tier == "device"
    if device:
        peaks += [line.peak_bytes for line in lines]
    high = max(*peaks, 1)
    shows_budget = budget_bytes is not None and budget_bytes <= FAR_ABOVE * high
    if shows_budget and budget_bytes is not None:
        high = max(high, budget_bytes)
    budget = budget_bytes if shows_budget else None
    drawn: list[str] = []
    keys: list[tuple[str, str]] = []
    for width, right, class_ in ((WIDTH, RIGHT, "wide"), (PHONE_WIDTH, 26.0, "phone")):
        height = 270 if device else 130
        frame = Frame(
            left=LEFT, top=16, width=width - LEFT - right, height=height, x_high=duration_s or 1.0, y_high=high * 1.08
        )
        body, keys = _memory_drawing(frame, tier, budget, lines, limit)
        body.append(x_axis(frame, second_ticks(frame.x_high, 10 if class_ == "wide" else 4)))
        drawn.append(svg(width, frame.bottom + 24, el("g", *body), f"Memory of {tier} over one step", class_))
    note = "" if budget_bytes is None or shows_budget else f"{limit} {format_bytes(budget_bytes)}, far above"
    cross = el("div", *drawn, class_="timed both")
    title = f"{tier.capitalize()} {'memory' if device else 'use'} over one step"
    return figure(title, cross + legend(keys), note=note)


def _memory_drawing(
    frame: Frame, tier: str, budget_bytes: int | None, lines: Sequence[Timeline], limit: str
) -> tuple[list[str], list[tuple[str, str]]]:
    """Draw one tier into a frame, without its time axis; returns the legend too."""
    predicted, measured = lines[0], lines[1] if len(lines) > 1 else None
    device = tier == "device"
    stack, roles = _stack(frame, predicted, tier)
    body = [y_axis(frame, byte_ticks(frame.y_high, 7 if device else 4)), stack]
    keys = [(role_class(role), role_title(role)) for role in reversed(roles)]
    if device and predicted.peak_bytes:
        body.append(level(frame, predicted.peak_bytes, "", "forecast"))
        keys.append(("forecast", f"predicted peak {format_bytes(predicted.peak_bytes)}"))
    if measured is not None:
        keys += _measured_lines(frame, measured, tier, body)
    if budget_bytes is not None:
        body.append(level(frame, budget_bytes, f"{limit} {format_bytes(budget_bytes)}", "budget"))
    return body, keys


def _stack(frame: Frame, timeline: Timeline, tier: str) -> tuple[str, list[str]]:
    """Draw areas of each role, from the highest sum down so that each covers what lies under it; returns roles too."""
    samples = tier_samples(timeline, tier)
    shown = coarse([(s.time_s, s.total_bytes) for s in samples], frame.x_high, round(frame.width))
    roles = role_names({role for s in samples for role, size in s.bytes_by_role.items() if size})
    until = frame.x(min(timeline.duration_s, frame.x_high))
    areas: list[str] = []
    sums = [0] * len(shown)
    for role in roles:
        sums = [below + samples[i].bytes_by_role.get(role, 0) for below, (_, i) in zip(sums, shown, strict=True)]
        steps = [(frame.left + column, float(size)) for (column, _), size in zip(shown, sums, strict=True)]
        points = staircase(steps, until, frame.y)
        corners = "".join(_corner(before, point) for before, point in zip([None, *points], points, strict=False))
        areas.append(el("path", d=f"{corners}V{frame.bottom:g}H{points[0][0]:g}Z", class_=role_class(role)))
    return "".join(reversed(areas)), roles


def _corner(before: tuple[float, float] | None, point: tuple[float, float]) -> str:
    """Shortest path command from one corner of a staircase to the next."""
    if before is None:
        return f"M{point[0]:g} {point[1]:g}"
    return f"V{point[1]:g}" if before[0] == point[0] else f"H{point[0]:g}"


def _measured_lines(frame: Frame, measured: Timeline, tier: str, body: list[str]) -> list[tuple[str, str]]:
    """Add the measured lines to ``body``; returns their legend."""
    device = tier == "device"
    drawn = [
        (
            "measured, tensors" if device else "measured",
            "tracked",
            [(s.time_s, s.total_bytes) for s in tier_samples(measured, tier)],
        )
    ]
    if device:
        drawn.append(("measured, resident set of the process", "resident", sorted(measured.resident)))
    keys: list[tuple[str, str]] = []
    for label, class_, samples in drawn:
        shown = coarse(samples, frame.x_high, round(frame.width))
        steps = [(frame.left + column, float(samples[i][1])) for column, i in shown]
        if steps and max(value for _, value in steps) > 0:
            until = frame.x(min(max(measured.duration_s, samples[-1][0]), frame.x_high))
            body.append(polyline(staircase(steps, max(until, steps[-1][0]), frame.y), class_, halo=True))
            keys.append((class_, label))
    return keys


def metric_figure(
    title: str, points: Sequence[tuple[float, float]], *, unit: str, behind: Sequence[tuple[float, float]] = (),
    mark: tuple[float, str, str] | None = None,
) -> str:  # fmt: skip
    """Draw a metric against the step.

    Args:
        points: (step, value); a value that is not finite breaks the line and is marked on the axis.
        unit: "bytes", "seconds" or "" for a plain number.
        behind: A second series, a pale band (the plain run).
        mark: (value, words, CSS class) of a horizontal line, explained in the legend.
    """
    finite = [(x, y) for x, y in (*points, *behind) if isfinite(y)]
    if not finite:
        return figure(title, el("p", "No finite value."), wide=False)
    low, high = _range([y for _, y in finite] + ([mark[0]] if mark else []), from_zero=unit != "")
    steps = [x for x, _ in (*points, *behind)]
    frame = Frame(
        left=70, top=14, width=PHONE_WIDTH - 96, height=170, x_low=min(steps), x_high=max(steps), y_low=low, y_high=high
    )
    marks = {
        "bytes": lambda: byte_ticks(high, 5),
        "seconds": lambda: second_ticks(high, 5),
        "": lambda: [(value, f"{value:,g}") for value in ticks(low, high, 5)],
    }[unit]()
    body = [y_axis(frame, marks)]
    body += [_run(run, "behind", 4) for run in _runs(frame, behind)]
    body += [_run(run, "series", 2.5) for run in _runs(frame, points)]
    body += [level(frame, mark[0], "", mark[2])] if mark else []
    bad = [x for x, y in points if not isfinite(y)]
    body += [el("circle", cx=frame.x(x), cy=frame.top + 4, r=3, class_="bad") for x in bad]
    integer_ticks = [value for value in ticks(frame.x_low, frame.x_high, 4) if value % 1 == 0]
    body.append(x_axis(frame, [(value, f"{value:g}") for value in integer_ticks]))
    drawing = svg(PHONE_WIDTH, frame.bottom + 24, "".join(body), title, "half")
    keys = ([("behind", "plain PyTorch")] if behind else []) + ([(mark[2], mark[1])] if mark else [])
    note = f"{len(bad)} of {len(points)} values are not finite (dots)" if bad else ""
    return figure(title, drawing + legend([("series", "this run, by step"), *keys]), note=note, wide=False)


def _run(run: list[tuple[float, float]], class_: str, radius: float) -> str:
    """Draw a line through pixels, or a dot where there is one point only."""
    if len(run) > 1:
        return polyline(run, class_)
    return el("circle", cx=run[0][0], cy=run[0][1], r=radius, class_=class_)


def _range(values: list[float], *, from_zero: bool) -> tuple[float, float]:
    """Choose the ends of a vertical axis: from zero with headroom, or round values around the data."""
    low, high = min(values), max(values)
    if from_zero:
        return 0.0, (high or 1.0) * 1.12
    step = round_step((high - low) or abs(high) or 1.0, 4)
    return floor(low / step) * step, max(ceil(high / step), floor(low / step) + 1) * step


def _runs(frame: Frame, points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Cut points into finite stretches in pixels; a pixel column has its first, lowest, highest and last point only."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if isfinite(y):
            runs[-1].append((frame.x(x), frame.y(y)))
        elif runs[-1]:
            runs.append([])
    return [_thin(run) for run in runs if run]


def _thin(run: list[tuple[float, float]]) -> list[tuple[float, float]]:
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in run:
        columns.setdefault(floor(point[0]), []).append(point)
    drawn: list[tuple[float, float]] = []
    for column in columns.values():
        ends = {column[0], column[-1], min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])}
        drawn += [point for point in column if point in ends]
    return drawn
