"""The HTML page of a simulated step of a cluster: verdict, where the time goes, ranks over time, memory, growth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lading.files import write_text
from lading.ir.timeline import Event, Timeline
from lading.report.charts import LEFT, PHONE_WIDTH, PLOT, WIDTH, memory_figure, role_class
from lading.report.figures import role_names, role_title
from lading.report.gantt import GAP, HEAD, ROW
from lading.report.html import page
from lading.report.promises import sentence_of
from lading.report.svg import (
    Frame,
    el,
    figure,
    legend,
    polyline,
    second_ticks,
    svg,
    table,
    text,
    ticks,
    unbroken_options,
    words,
    x_axis,
    y_axis,
)
from lading.units import format_bytes, format_seconds

#: How a label begins, class of its colour, and its words in the legend.
_KINDS = (
    ("forward", "k-forward", "forward"),
    ("backward", "k-backward", "backward"),
    ("input gradient", "k-backward", "backward"),
    ("weight gradient", "k-read", "weight gradients"),
    ("send", "k-communication", "sends and reductions"),
    ("reduce", "k-communication", "sends and reductions"),
    ("unshard", "k-communication", "sends and reductions"),
    ("all reduce", "k-communication", "sends and reductions"),
    ("optimizer", "k-step", "optimizer"),
    ("waiting", "k-free", "waiting"),
)
#: What fits beside a row.
_SHORT = {
    "data-parallel network": "reductions",
    "send to the next stage": "send on",
    "send to the stage before": "send back",
}
_CAUSES = ("k-forward", "k-backward", "k-recompute", "k-communication", "k-step", "k-read", "k-write", "k-free")
_OTHER = ("k-free", "other")


@dataclass(frozen=True, kw_only=True)
class ClusterPage:
    """Contents of the page of a simulated cluster.

    Attributes:
        title, subtitle: Model and devices; layout and software.
        fits: Whether the memory suffices, with the sentence that says so.
        tiles: (name, figure, remark) of the numbers at the top.
        shares_s: Seconds of the slowest rank by cause.
        memory: Bytes by role of each pipeline rank.
        lower_tier_by_rank: Bytes by role of each rank in ``behind_tier``, if anything does.
        device_bytes: Memory of a device.
        timeline: Representative ranks; a tier of its memory for each, "rank 0".
        growth: (devices, seconds of a step, tokens a second of a device).
        sentences: Answers to further questions: unequal ranks, failures.
        assumed: Assumptions, a sentence each.
    """

    title: str
    subtitle: str
    fits: tuple[bool, str]
    tiles: Sequence[tuple[str, str, str]]
    shares_s: Mapping[str, float]
    memory: Sequence[Mapping[str, int]]
    device_bytes: int
    timeline: Timeline
    growth: Sequence[tuple[int, float, float]] = ()
    lower_tier_by_rank: Sequence[Mapping[str, int]] = ()
    behind_tier: str = ""
    sentences: Sequence[str] = ()
    assumed: Sequence[str] = ()


def write_cluster_page(path: Path, shown: ClusterPage) -> None:
    """Write the page; one file, no network."""
    duration_s = shown.timeline.duration_s
    tiers = list(dict.fromkeys(sample.tier for sample in shown.timeline.memory))
    sections = [
        _heading(shown),
        el("h2", "Time"),
        _shares(shown.shares_s),
        ranks_figure(shown.timeline),
        el("h2", "Memory"),
        _memory_table(shown),
        *(memory_figure(tier, duration_s, shown.device_bytes, [shown.timeline], limit="device") for tier in tiers),
        el("h2", "Growth") + growth_figure(shown.growth) if len(shown.growth) > 1 else "",
        el("h2", "Assumptions") + el("ul", *(el("li", text(line)) for line in shown.assumed)) if shown.assumed else "",
    ]
    write_text(path, page(shown.title, "\n".join(filter(None, sections))))


def _heading(shown: ClusterPage) -> str:
    good, sentence = shown.fits
    tiles = [
        el("div", el("span", text(name)), el("b", text(value)), el("span", text(remark)), class_="tile")
        for name, value, remark in shown.tiles
    ]
    more = [el("p", unbroken_options(sentence_of(line))) for line in shown.sentences]
    verdict = el("div", el("p", el("b", text(sentence))), *more, class_=f"verdict {'kept' if good else 'broken'}")
    head = el("h1", text(shown.title)) + el("p", text(shown.subtitle), class_="subtitle")
    return head + verdict + el("div", *tiles, class_="tiles")


def _shares(shares_s: Mapping[str, float]) -> str:
    """Draw one bar of all causes, and a table of them."""
    order = sorted(((name, s) for name, s in shares_s.items() if s > 0), key=lambda row: -row[1])
    total = sum(seconds for _, seconds in order) or 1.0
    classes = [_CAUSES[min(i, len(_CAUSES) - 1)] for i in range(len(order))]
    drawn: list[str] = []
    for width, most, class_ in ((WIDTH, 10, "wide"), (PHONE_WIDTH, 4, "phone")):
        frame = Frame(left=14, top=4, width=width - 28, height=ROW, x_high=total, y_high=1.0)
        body: list[str] = []
        at = 0.0
        for (_, seconds), cause in zip(order, classes, strict=True):
            length = max(0.5, frame.x(seconds) - frame.left - 0.5)
            body.append(el("rect", x=frame.x(at), y=frame.top, width=length, height=ROW, class_=cause))
            at += seconds
        body.append(x_axis(frame, second_ticks(total, most)))
        drawn.append(svg(width, frame.bottom + 24, "".join(body), "Seconds by cause", class_))
    rows = [[name, format_seconds(seconds), f"{seconds / total:.1%}"] for name, seconds in order]
    note = "Of the pipeline rank that ends last."
    return figure("Where the step goes", el("div", *drawn, class_="both"), note=note) + table(
        ("cause", "seconds", "share"), rows, swatches=classes
    )


def ranks_figure(timeline: Timeline) -> str:
    """Draw rows of the ranks' streams; slices shorter than a pixel are merged with their neighbors."""
    rows = sorted({(event.rank_class, event.stream) for event in timeline.events})
    height = sum(ROW + GAP for _ in rows) + HEAD * len({rank for rank, _ in rows})
    frame = Frame(left=LEFT, top=2, width=PLOT, height=height + 4, x_high=timeline.duration_s or 1.0, y_high=1.0)
    body: list[str] = []
    shown: dict[int, list[object]] = {}
    kinds: dict[str, str] = {}
    y, before = frame.top, -1
    for rank, stream in rows:
        if rank != before:
            body.append(words(f"rank {rank}", LEFT, y + 17, "strong label"))
            y, before = y + HEAD, rank
        body.append(words(_SHORT.get(stream, stream), LEFT - 8, y + 15, "tick end"))
        body.append(el("rect", x=LEFT, y=y, width=PLOT, height=ROW, class_="lane"))
        mine = [e for e in timeline.events if (e.rank_class, e.stream) == (rank, stream) and e.end_s > e.start_s]
        for event, until_s, count in _merged(mine, frame.x_high / frame.width):
            label = timeline.labels.get(event.action, f"action {event.action}")
            class_, word = _kind(label)
            kinds[class_] = word
            shown[event.action] = [label, event.end_s - event.start_s]
            body.append(_slice(frame, event, until_s, count, y, class_))
        y += ROW + GAP
    body.append(x_axis(frame, second_ticks(frame.x_high, 10)))
    drawing = el("div", svg(WIDTH, frame.bottom + 24, "".join(body), "Ranks over one step"), class_="timed")
    data = json.dumps({"sources": [timeline.source], "actions": shown}, separators=(",", ":")).replace("<", "\\u003c")
    script = el("script", data, type="application/json", class_="actions")
    note = "Representative ranks. Point at a slice for its action; the trace file has them all."
    return figure("Ranks over one step", drawing + legend(list(kinds.items())), note=note) + script


def _slice(frame: Frame, event: Event, until_s: float, count: int, y: float, class_: str) -> str:
    x = frame.x(event.start_s)
    width = max(frame.x(until_s) - x - 0.3, 0.6)
    many = f' data-n="{count}" data-s="{until_s - event.start_s:.3g}"' if count > 1 else ""
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{ROW:g}" class="{class_}" '
        f'data-a="{event.action}"{many}/>'
    )


def _kind(label: str) -> tuple[str, str]:
    return next(((class_, word) for start, class_, word in _KINDS if label.startswith(start)), _OTHER)


def _merged(events: Sequence[Event], pixel_s: float) -> list[tuple[Event, float, int]]:
    """Merge runs of events that begin in one pixel: (first, end, how many) of each."""
    runs: list[tuple[Event, float, int]] = []
    for event in sorted(events, key=lambda e: e.start_s):
        if runs and int(event.start_s / pixel_s) == int(runs[-1][0].start_s / pixel_s):
            first, until_s, count = runs[-1]
            runs[-1] = (first, max(until_s, event.end_s), count + 1)
        else:
            runs.append((event, event.end_s, 1))
    return runs


def _memory_table(shown: ClusterPage) -> str:
    """Table of the bytes of the first, the fullest and the last pipeline rank."""
    totals = [sum(roles.values()) for roles in shown.memory]
    ranks = sorted({0, totals.index(max(totals)), len(totals) - 1})
    roles = role_names({role for rank in ranks for role, size in shown.memory[rank].items() if size})
    rows = [[role_title(role), *(format_bytes(shown.memory[rank].get(role, 0)) for rank in ranks)] for role in roles]
    total = ["sum", *(format_bytes(totals[rank]) for rank in ranks)]
    head = ["role", *(f"pipeline rank {rank}" for rank in ranks)]
    under = el("p", text(f"A device has {format_bytes(shown.device_bytes)}."), class_="under")
    return (
        table(head, rows, total=total, swatches=[role_class(role) for role in roles])
        + under
        + _lower_tier_table(shown, ranks)
    )


def _lower_tier_table(shown: ClusterPage, ranks: Sequence[int]) -> str:
    """Table of the bytes of those ranks behind the device."""
    if not shown.behind_tier:
        return ""
    roles = role_names({role for rank in ranks for role in shown.lower_tier_by_rank[rank]})
    rows = [
        [role_title(role), *(format_bytes(shown.lower_tier_by_rank[rank].get(role, 0)) for rank in ranks)]
        for role in roles
    ]
    total = ["sum", *(format_bytes(sum(shown.lower_tier_by_rank[rank].values())) for rank in ranks)]
    head = [f"on tier {shown.behind_tier}"]
    return table([*head, *(f"pipeline rank {rank}" for rank in ranks)], rows, total=total)


def growth_figure(growth: Sequence[tuple[int, float, float]]) -> str:
    """Draw tokens a second of a device as replicas are added, with the first point's as the level to keep."""
    high = max(rate for _, _, rate in growth) * 1.12
    places = {devices: float(place) for place, (devices, _, _) in enumerate(growth)}
    frame = Frame(left=LEFT, top=14, width=PLOT - 24, height=200, x_high=max(places.values()) or 1.0, y_high=high)
    points = [(frame.x(places[devices]), frame.y(rate)) for devices, _, rate in growth]
    level_y = frame.y(growth[0][2])
    body = [
        y_axis(frame, [(value, f"{value:,.0f}") for value in ticks(0, high, 5)]),
        polyline([(frame.left, level_y), (frame.right, level_y)], "behind"),
        polyline(points, "series"),
        x_axis(frame, [(place, f"{devices:,}") for devices, place in places.items()]),
    ]
    drawing = svg(WIDTH, frame.bottom + 24, "".join(body), "Tokens a second of a device by devices")
    first = growth[0][2]
    rows = [
        [f"{devices:,}", format_seconds(step_s), f"{rate:,.0f}", f"{rate / first:.1%}"]
        for devices, step_s, rate in growth
    ]
    head = ("devices", "step", "tokens/s a device", "of the fewest")
    keys = legend([("series", "tokens/s a device"), ("behind", "as with the fewest devices")])
    return figure("Tokens a second of a device", drawing + keys, note="The batch grows with the replicas.") + table(
        head, rows
    )
