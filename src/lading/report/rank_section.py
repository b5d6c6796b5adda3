"""Ranks of a run in its report: memory and time of each beside its prediction, a chart of all, what waits cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lading.ir.job_timeline import Communication, CommunicationKind, JobTimeline, RankTimeline, SlowRank, slow_words
from lading.ir.program import COMPUTE_STREAM, Program
from lading.ir.timeline import Timeline
from lading.report.charts import LEFT, PHONE_WIDTH, RIGHT, WIDTH
from lading.report.figures import SliceKind
from lading.report.gantt import KIND_TITLES, gantt_figure, merge
from lading.report.promises import error_words
from lading.report.svg import Frame, el, figure, legend, second_ticks, svg, table, text, words, x_axis
from lading.units import format_bytes, format_seconds

#: Ranks that tables have, at most, and charts.
MOST_ROWS, MOST_CHARTS = 32, 8
#: Waits that are listed by themselves, at most.
MOST_WAITS = 12
_ROW, _GAP, _HEAD = 14.0, 3.0, 22.0
#: Class of the time in which a communication waits for another rank.
_WAIT = "k-wait"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Ranks of a run, measured and predicted.

    Attributes:
        programs: Program of each rank.
        slow_step_s: Predicted seconds of a step with a rank as slow as the one measured; None where none is, or that
            was not asked.
    """

    measured: JobTimeline
    predicted: JobTimeline
    programs: tuple[Program, ...]
    slow_step_s: float | None = None

    @cached_property
    def traced(self) -> list[Timeline]:
        """Timelines for a trace: what was predicted, of each Program once, and all measured ranks on one clock."""
        lines: list[Timeline] = []
        for job, kind in ((self.predicted, "predicted"), (self.measured, "measured")):
            programs_seen = set[int]()
            for timeline, program in zip(job.ranks, self.programs, strict=True):
                if kind == "predicted" and id(program) in programs_seen:
                    continue
                programs_seen.add(id(program))
                lines.append(_shifted(timeline, f"{kind}, rank {timeline.rank}"))
        return lines

    def shown(self, most: int) -> list[int]:
        """Ranks to show, in order: all, or the slow one, the first, and those that took most memory and time."""
        ranks = self.measured.ranks
        if len(ranks) <= most:
            return [timeline.rank for timeline in ranks]
        slow = [] if self.measured.slow is None else [self.measured.slow.rank]
        full = sorted(ranks, key=lambda timeline: -timeline.peak_bytes)
        long = sorted(ranks, key=lambda timeline: -timeline.busy_s)
        pairs = [timeline.rank for pair in zip(full, long, strict=True) for timeline in pair]
        return sorted([*dict.fromkeys((*slow, 0, *pairs))][:most])


def ranks_section(report: RankReport) -> str:
    """Write the part of a report about ranks."""
    job, rows = report.measured, report.shown(MOST_ROWS)
    left_out = len(job.ranks) - len(rows)
    note = f" The {len(rows)} ranks that took most memory or time; ranks.json has the other {left_out}, too."
    return "\n".join((
        el("h2", "Ranks"),
        _slow(report),
        _memory(report, rows),
        el("p", text("Peaks of all steps, saving included, above what the process had before." + note * bool(left_out)),
           class_="under"),
        _times(report, rows),
        el("p", text(_times_note(job)), class_="under"),
        _chart(report),
        _waits(report),
        *_streams(report),
    ))  # fmt: skip


def _slow(report: RankReport) -> str:
    """Name a slow rank, with what it was predicted to cost, or say that there is none."""
    slow, job = report.measured.slow, report.measured
    if slow is None:
        steps = min(len(timeline.computing_s) for timeline in job.ranks)
        return el("p", text(f"No rank computes longer than the others in most of the last {steps} steps."))
    mood, explanation = slow_words(slow).split(":", 1)
    inner = el("p", el("b", text(mood.capitalize())), text(f":{explanation}."))
    if report.slow_step_s is not None:
        inner += el("p", text(_slow_cost(report, slow, report.slow_step_s)), class_="muted")
    return el("div", inner, class_="verdict open")


def _slow_cost(report: RankReport, slow: SlowRank, slow_step_s: float) -> str:
    equal_s = report.predicted.step_s
    return (
        f"Predicted with a rank that computes {slow.factor:.2f} times as long: a step of "
        f"{format_seconds(slow_step_s)}, {slow_step_s / equal_s - 1:.1%} longer than the {format_seconds(equal_s)} of "
        f"equal ranks. Measured: {format_seconds(report.measured.step_s)}."
    )


def _memory(report: RankReport, rows: Sequence[int]) -> str:
    body: list[list[str]] = []
    for timeline in (report.measured.ranks[rank] for rank in rows):
        peak, predicted, budget = timeline.peak_bytes, timeline.predicted_bytes, timeline.budget_bytes
        sizes = [format_bytes(size) for size in (peak, predicted, budget, timeline.base_bytes)]
        margin = f"{1 - peak / budget:.1%}" if peak <= budget else f"{format_bytes(peak - budget)} above"
        body.append([f"rank {timeline.rank}", *sizes[:2], error_words(predicted, peak), sizes[2], margin, sizes[3]])
    return table(
        ("peak memory", "measured", "predicted", "prediction", "budget", "left of it", "before training"), body
    )


def _times(report: RankReport, rows: Sequence[int]) -> str:
    body: list[list[str]] = []
    for measured, predicted in ((report.measured.times[rank], report.predicted.times[rank]) for rank in rows):
        cells = [f"rank {measured.rank}"]
        for key in ("step_s", "computing_s", "transfer_s", "waiting_s"):
            cells += [_seconds(getattr(measured, key)), _seconds(getattr(predicted, key))]
        cells.append("-" if measured.waited_for is None else f"rank {measured.waited_for}")
        body.append(cells)
    head = ["last step", "measured", "predicted"]
    for heading in ("computing", "exposed communication", "waiting for others"):
        head += [heading, "predicted"]
    return table((*head, "most for"), body)


def _times_note(job: JobTimeline) -> str:
    note = (
        "Exposed communication: nothing computes while bytes are under way. Waiting: nothing computes because another "
        "rank has not come. What is left of the step is moves between tiers and the host's own time."
    )
    if (error_s := max(timeline.clock_error_s for timeline in job.ranks)) > 0:
        note += (
            f" Ranks of several hosts have clocks of their own, compared to within {format_seconds(error_s)}: waits of "
            "that size mean nothing."
        )
    return note


def _seconds(seconds: float) -> str:
    return "0 us" if seconds == 0 else format_seconds(seconds)


def _waits(report: RankReport) -> str:
    """Table of the communications that cost most, with who was late."""
    waits, predicted = report.measured.waits, {(w.rank, w.action): w for w in report.predicted.waits}
    body: list[list[str]] = []
    for wait in waits[:MOST_WAITS]:
        expected = predicted.get((wait.rank, wait.action))
        label = wait.label if wait.action < 0 else f"{wait.label}, action {wait.action}"
        costs = [
            wait.waiting_s + wait.transfer_s,
            0.0 if expected is None else expected.waiting_s + expected.transfer_s,
        ]
        late = "-" if wait.waited_s <= 0 else f"rank {wait.late}, by {format_seconds(wait.waited_s)}"
        body.append([label, f"rank {wait.rank}", late, *map(_seconds, (wait.waiting_s, wait.transfer_s, *costs))])
    if not body:
        return el("p", "No rank's computing paused for a communication.", class_="under")
    hidden = waits[MOST_WAITS:]
    if hidden:
        sums = [sum(w.waiting_s for w in hidden), sum(w.transfer_s for w in hidden)]
        body.append([f"{len(hidden)} more", "", "", *map(_seconds, (*sums, sum(sums))), ""])
    head = ("communication", "of", "last to come", "waiting", "transfer", "cost", "predicted")
    note = (
        "The dearest pauses of computing in the last step. Of a pause, waiting is what passed before the last rank had "
        "come, transfer what passed after. A wait before the step is for a rank that was not ready to begin it."
    )
    return table(head, body, left=(0, 2)) + el("p", text(note), class_="under")


def _chart(report: RankReport) -> str:
    """Draw computing and communication of each rank, predicted above measured, on one clock."""
    shown = report.shown(MOST_CHARTS)
    jobs = (report.predicted, report.measured)
    high_s = max(job.ranks[rank].start_s + job.ranks[rank].timeline.duration_s for job in jobs for rank in shown)
    drawn: list[str] = []
    kinds = set[str]()
    for width, right, class_, most in ((WIDTH, RIGHT, "wide", 10), (PHONE_WIDTH, 26.0, "phone", 4)):
        height = len(shown) * 2 * (_HEAD + 2 * (_ROW + _GAP))
        frame = Frame(left=LEFT, top=2, width=width - LEFT - right, height=height + 4, x_high=high_s or 1.0, y_high=1.0)
        marks = second_ticks(frame.x_high, most)
        body = [
            el("line", x1=frame.x(value), x2=frame.x(value), y1=frame.top, y2=frame.bottom, class_="grid")
            for value, _ in marks
        ]
        y = frame.top
        for rank in shown:
            for lane in ("computing", "communication"):
                body.append(words(f"rank {rank}, {lane}", LEFT, y + 15, "strong label"))
                y += _HEAD
                for job, source in zip(jobs, ("predicted", "measured"), strict=True):
                    body.append(words(source, LEFT - 8, y + 11, "tick end"))
                    body.append(el("rect", x=LEFT, y=y, width=frame.width, height=_ROW, class_="lane"))
                    for kind, path in _lane(frame, y, job, report.programs[rank], rank, lane):
                        kinds.add(kind)
                        body.append(el("path", d=path, class_=kind))
                    y += _ROW + _GAP
        body.append(x_axis(frame, marks))
        drawn.append(svg(width, frame.bottom + 24, "".join(body), "All ranks over one step", class_))
    titles = {f"k-{kind.value}": title for kind, title in KIND_TITLES.items()} | {_WAIT: "waiting for another rank"}
    keys = [(kind, title) for kind, title in titles.items() if kind in kinds]
    count = len(report.measured.ranks)
    note = f"{len(shown)} of {count} ranks. " * (len(shown) < count) + "All ranks are on one clock."
    return figure("All ranks over one step", el("div", *drawn, class_="both") + legend(keys), note=note)


def _lane(
    frame: Frame, y: float, job: JobTimeline, program: Program, rank: int, what: str
) -> Iterator[tuple[str, str]]:
    """Yield class and path of each kind of slice in a row of the chart."""
    timeline, pixel_s = job.ranks[rank], frame.x_high / frame.width
    spans: dict[str, list[tuple[float, float]]] = {}
    if what == "computing":
        for piece in merge(program, [e for e in timeline.timeline.events if e.stream == COMPUTE_STREAM], pixel_s):
            spans.setdefault(f"k-{piece.kind.value}", []).append((piece.start_s, piece.end_s))
    else:
        ends = {event.action: event.end_s for event in timeline.timeline.events}
        for communication in timeline.communications:
            last_s = min(_last_s(job, rank, communication), ends[communication.action])
            spans.setdefault(_WAIT, []).append((communication.came_s, last_s))
            spans.setdefault(f"k-{SliceKind.COMMUNICATION}", []).append((last_s, ends[communication.action]))
    for kind, pairs in spans.items():
        if path := _path(frame, y, [(timeline.start_s + start, timeline.start_s + end) for start, end in pairs]):
            yield kind, path


def _last_s(job: JobTimeline, rank: int, communication: Communication) -> float:
    """Moment on a rank's timeline at which the last has come to a communication; a sender waits for nobody."""
    return (
        communication.came_s
        if communication.kind is CommunicationKind.SEND
        else job.last_to_come(rank, communication)[1]
    )


def _path(frame: Frame, y: float, spans: Sequence[tuple[float, float]]) -> str:
    """Path of rectangles for spans of seconds; those that touch are one, those of no length none."""
    joined: list[list[float]] = []
    for start, end in sorted((frame.x(start), frame.x(end)) for start, end in spans if end > start):
        if joined and start - joined[-1][1] < 0.3:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, max(end, start + 0.6)])
    return "".join(f"M{start:.1f} {y:g}H{end:.1f}V{y + _ROW:g}H{start:.1f}Z" for start, end in joined)


def _streams(report: RankReport) -> Iterator[str]:
    """Yield the streams of each shown rank but the first, folded."""
    for rank in report.shown(MOST_CHARTS):
        if rank:
            lines = [report.predicted.ranks[rank].timeline, report.measured.ranks[rank].timeline]
            duration_s = max(line.duration_s for line in lines)
            drawn = gantt_figure(report.programs[rank], lines, duration_s, rank=rank)
            yield el("details", el("summary", f"Streams of rank {rank}, action by action"), drawn)


def _shifted(each: RankTimeline, source: str) -> Timeline:
    """Timeline of a rank on the clock of its job, under a name of its own."""
    line, by_s = each.timeline, each.start_s
    return replace(
        line,
        source=source,
        events=tuple(replace(e, start_s=e.start_s + by_s, end_s=e.end_s + by_s) for e in line.events),
        memory=tuple(replace(s, time_s=s.time_s + by_s) for s in line.memory),
        resident=tuple((time_s + by_s, size) for time_s, size in line.resident),
    )
