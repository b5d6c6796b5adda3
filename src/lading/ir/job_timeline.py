"""Timelines of all ranks of a job for one step: who waited for whom, what that cost, and which rank is slow.

[Note: what a wait costs] Computing of a rank pauses where its next action waits for another stream. Such a pause is the
work of the action that ended last of those waited for, back to where that one began; what is left of the pause is the
work of what that one waited for, and so on. Where the action is a communication, the part of it before the last of its
ranks had come is waiting for that rank, and the rest is transfer. Time in which a rank computes costs nothing, however
long a communication beside it takes.

Collectives are matched by the ranks that they join and by their position among those of these ranks, which come to them
in one order; a receive has its send by both ranks, tag and position.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from lading.errors import ConfigError
from lading.files import read_json, write_text
from lading.ir.action import Action, ActionKind
from lading.ir.layout import Layout
from lading.ir.program import COMPUTE_STREAM, Program
from lading.ir.reading import read_as
from lading.ir.timeline import Event, SavedTimeline, Timeline
from lading.units import format_bytes, format_seconds

#: A rank is slow that computes so many times as long, against its prediction, as ranks with the same Program ...
SLOW_AMONG_EQUALS = 1.1
#: ... or, where it alone has its Program, as the others, whose predictions may be wrong by something else.
SLOW_AMONG_OTHERS = 1.25
#: Share of the steps in which it has to be the slowest.
SLOW_STEPS_SHARE = 0.8


class CommunicationKind(StrEnum):
    """Part of a rank in a communication."""

    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Communication:
    """Communication of a rank with others.

    Attributes:
        action: Number of its action.
        key: Text that is the same on all ranks that take part.
        came_s: Moment, on the rank's timeline, from which on it depends on the others.
    """

    action: int
    kind: CommunicationKind
    key: str
    came_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Time in which a rank computes nothing because of a communication. See [Note: what a wait costs]."""

    action: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """Timeline of one rank, and what it knows of its step.

    Attributes:
        start_s: Moment, on the clock of the job, at which its timeline begins.
        came_s: Moment on that clock at which the rank came to the step, to begin it as soon as all had come.
        clock_error_s: Most by which that may be wrong, where ranks have clocks of their own; 0.0 on the first's host.
        communications: Its communications, in order.
        stalls: Pauses of its computing.
        computing_s: Seconds in which it computed in each of the last steps, this one last.
        predicted_computing_s: Seconds that a step was predicted to compute.
        peak_bytes, predicted_bytes, budget_bytes: Highest memory in any step, its prediction, and its limit.
        base_bytes: Memory that the process had before, not counted in these.
    """

    rank: int
    timeline: Timeline
    start_s: float = 0.0
    came_s: float = 0.0
    clock_error_s: float = 0.0
    communications: tuple[Communication, ...] = ()
    stalls: tuple[Stall, ...] = ()
    computing_s: tuple[float, ...] = ()
    predicted_computing_s: float = 0.0
    peak_bytes: int = 0
    predicted_bytes: int = 0
    budget_bytes: int = 0
    base_bytes: int = 0

    @cached_property
    def busy_s(self) -> float:
        """Seconds in which this step computed."""
        return self.timeline.busy_s(COMPUTE_STREAM)

    def earlier(self, by_s: float) -> RankTimeline:
        """Copy of it on a clock that shows so many seconds less."""
        return dataclasses.replace(self, start_s=self.start_s - by_s, came_s=self.came_s - by_s)


@dataclass(frozen=True, slots=True)
class Wait:
    """Cost of one communication to one rank: seconds in which it computed nothing.

    Attributes:
        action: Number of the action; -1 for the wait before the step.
        label: What it does, for people.
        late: Rank that came last.
        waited_s: Seconds from this rank's coming to the last one's, whether it computed meanwhile or not.
        waiting_s: Seconds of pause before the last rank had come.
        transfer_s: Seconds of pause after it had.
    """

    rank: int
    action: int
    label: str
    late: int
    waited_s: float
    waiting_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """Seconds of a rank's step by what it did.

    Attributes:
        transfer_s: Exposed communication: nothing computes while bytes are under way.
        waiting_s: Nothing computes while another rank is waited for.
        waited_for: Rank that most of this was for; None where there was none.
    """

    rank: int
    step_s: float
    computing_s: float
    transfer_s: float
    waiting_s: float
    waited_for: int | None


@dataclass(frozen=True, slots=True)
class SlowRank:
    """Rank that computes longer than the others, step after step.

    Attributes:
        factor: How many times as long, against its prediction, as the others.
        steps: Number of steps in which it was the slowest, of ``of_steps``.
        cost_s: Seconds that the other ranks waited for it in the step of the timelines, all together.
    """

    rank: int
    factor: float
    steps: int
    of_steps: int
    cost_s: float


@dataclass(frozen=True, kw_only=True)
class JobTimeline:
    """Timelines of all ranks of a job for one step.

    Attributes:
        plan: Fingerprint of the plan of the first rank, which has those of all.
        step: Number of the step, from 1.
        ranks: In order.
    """

    plan: str
    step: int
    ranks: tuple[RankTimeline, ...]

    def __post_init__(self) -> None:
        numbers = [timeline.rank for timeline in self.ranks]
        if numbers != list(range(len(numbers))) or not numbers:
            wrong = next((number for place, number in enumerate(numbers) if place != number), "none")
            raise ConfigError(f"expected timelines of ranks from 0 on, in order, found {wrong}")

    @cached_property
    def _arrivals(self) -> dict[str, list[tuple[float, int]]]:
        """When ranks came to each communication, on the job's clock, and which; a receiver is waited for by nobody."""
        arrivals: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for timeline in self.ranks:
            for communication in timeline.communications:
                if communication.kind is not CommunicationKind.RECEIVE:
                    arrivals[communication.key].append((timeline.start_s + communication.came_s, timeline.rank))
        return dict(arrivals)

    def last_to_come(self, rank: int, communication: Communication) -> tuple[int, float]:
        """Rank that came last to a communication, and when on the timeline of ``rank``, no earlier than that one came.

        Raises:
            ConfigError: nobody sends what is received.
        """
        if communication.key not in self._arrivals:
            raise ConfigError(
                f"expected a send for each receive, found none for that of rank {rank}: {communication.key[:40]}"
            )
        moment_s, late = max(self._arrivals[communication.key])
        return late, communication.came_s if late == rank else max(
            communication.came_s, moment_s - self.ranks[rank].start_s
        )

    def _costs(self, each: RankTimeline) -> list[Wait]:
        """Communications of a rank in which it computed nothing."""
        stalls: dict[int, list[Stall]] = defaultdict(list)
        for stall in each.stalls:
            stalls[stall.action].append(stall)
        waits: list[Wait] = []
        for communication in each.communications:
            if not (pauses := stalls[communication.action]):
                continue
            late, last_s = self.last_to_come(each.rank, communication)
            waiting_s = sum(max(0.0, min(stall.end_s, last_s) - stall.start_s) for stall in pauses)
            whole_s = sum(stall.end_s - stall.start_s for stall in pauses)
            label = each.timeline.labels.get(communication.action, f"action {communication.action}")
            waited_s = last_s - communication.came_s
            waits.append(Wait(each.rank, communication.action, label, late, waited_s, waiting_s, whole_s - waiting_s))
        return waits

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Communications that cost any rank something, the dearest first, and what ranks waited before the step."""
        last = max(self.ranks, key=lambda arrival: arrival.came_s)
        before = {arrival.rank: last.came_s - arrival.came_s for arrival in self.ranks if arrival.came_s < last.came_s}
        waits = [
            Wait(rank, -1, "before the step", last.rank, waited_s, waited_s, 0.0) for rank, waited_s in before.items()
        ]
        for timeline in self.ranks:
            waits += self._costs(timeline)
        return tuple(sorted(waits, key=lambda wait: -(wait.waiting_s + wait.transfer_s)))

    @cached_property
    def times(self) -> tuple[RankSeconds, ...]:
        """Seconds of each rank's step by what it did; what it waited before the step is not counted."""
        rows: list[RankSeconds] = []
        of_rank: list[list[Wait]] = [[] for _ in self.ranks]
        for wait in self.waits:
            if wait.action >= 0:
                of_rank[wait.rank].append(wait)
        for timeline, waits in zip(self.ranks, of_rank, strict=True):
            late: dict[int, float] = {}
            for wait in waits:
                if wait.waiting_s > 0:
                    late[wait.late] = late.get(wait.late, 0.0) + wait.waiting_s
            waited_for = max(late, key=lambda rank: late[rank], default=None)
            waiting_s, transfer_s = sum(wait.waiting_s for wait in waits), sum(wait.transfer_s for wait in waits)
            step_s = timeline.timeline.duration_s
            rows.append(RankSeconds(timeline.rank, step_s, timeline.busy_s, transfer_s, waiting_s, waited_for))
        return tuple(rows)

    @property
    def step_s(self) -> float:
        """Seconds from the first rank's start to the last one's end."""
        return max(r.start_s + r.timeline.duration_s for r in self.ranks) - min(r.start_s for r in self.ranks)

    @cached_property
    def slow(self) -> SlowRank | None:
        """Rank that computes longest against its prediction, if it is slower than others in most steps; else None."""
        steps = min(len(timeline.computing_s) for timeline in self.ranks)
        if len(self.ranks) < 2 or not steps:
            return None
        if any(min(timeline.predicted_computing_s, *timeline.computing_s) <= 0 for timeline in self.ranks):  # not timed
            return None
        shares = [
            [s / timeline.predicted_computing_s for s in timeline.computing_s[-steps:]] for timeline in self.ranks
        ]
        leads = [self._leads(rank, shares) for rank in range(len(shares))]
        rank = max(range(len(leads)), key=lambda rank: median(leads[rank][0]))
        lead, limit = leads[rank]
        slowest = sum(now >= max(lead_of_other[step] for lead_of_other, _ in leads) for step, now in enumerate(lead))
        if median(lead) < limit or slowest < SLOW_STEPS_SHARE * steps:
            return None
        cost_s = sum(wait.waiting_s for wait in self.waits if wait.late == rank and wait.action >= 0)
        return SlowRank(rank, median(lead), slowest, steps, cost_s)

    def _leads(self, rank: int, shares: Sequence[Sequence[float]]) -> tuple[list[float], float]:
        """Factor of a rank's computing over that of its like in each step, and from which factor on it is slow."""
        predicted_s = self.ranks[rank].predicted_computing_s
        equal = [
            r for r, timeline in enumerate(self.ranks) if r != rank and timeline.predicted_computing_s == predicted_s
        ]
        peers = equal or [r for r in range(len(shares)) if r != rank]
        lead = [now / median(shares[r][step] for r in peers) for step, now in enumerate(shares[rank])]
        return lead, SLOW_AMONG_EQUALS if equal else SLOW_AMONG_OTHERS

    def __str__(self) -> str:
        lines = [f"step {self.step} of {len(self.ranks)} ranks, {format_seconds(self.step_s)}"]
        for timeline, times in zip(self.ranks, self.times, strict=True):
            waited = "" if times.waited_for is None else f", most for rank {times.waited_for}"
            lines.append(f"{peak_words(timeline)}\n  {times_words(times)}{waited}")
        if self.slow is not None:
            lines.append(slow_words(self.slow))
        return "\n".join(lines)

    def save(self, path: Path | str) -> None:
        """Write as JSON, whole or not at all; ``load`` reads it back. Raises as ``lading.files.write_aside``."""
        ranks = [_saved(timeline) for timeline in self.ranks]
        write_text(Path(path), json.dumps({"plan": self.plan, "step": self.step, "ranks": ranks}))

    @staticmethod
    def load(path: Path | str) -> JobTimeline:
        """Read the timelines that ``save`` wrote.

        Raises:
            ConfigError: it is something else, or an action is named that a timeline lacks.
        """
        advice = "remove the file, or train again"
        saved: _SavedJob = read_as(_SavedJob, read_json(path, "timelines of ranks", advice), str(path), advice)
        ranks: list[RankTimeline] = []
        for saved_rank in saved.ranks:
            timeline = Timeline.from_saved(saved_rank.timeline)
            communications = tuple(Communication(*row) for row in saved_rank.communications)
            stalls = tuple(Stall(*row) for row in saved_rank.stalls)
            fields: dict[str, Any] = {"timeline": timeline, "communications": communications, "stalls": stalls}
            ranks.append(RankTimeline(**{**vars(saved_rank), **fields}))
            named = {row.action for row in (*communications, *stalls)}
            if missing := sorted(named - {event.action for event in timeline.events}):
                raise ConfigError(
                    f"{path}: expected an event of each action that rank {saved_rank.rank} communicates by, found none "
                    f"of action {missing[0]}; {advice}"
                )
        try:
            job = JobTimeline(plan=saved.plan, step=saved.step, ranks=tuple(ranks))
            assert all(wait.rank < len(ranks) for wait in job.waits), "each was found on a rank"
            return job
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}; {advice}") from error


def _saved(each: RankTimeline) -> dict[str, Any]:
    """JSON form of a rank."""
    facts = {f.name: getattr(each, f.name) for f in dataclasses.fields(each)}
    rows = {
        "timeline": each.timeline.to_dict(),
        "communications": [(m.action, m.kind.value, m.key, m.came_s) for m in each.communications],
        "stalls": [(s.action, s.start_s, s.end_s) for s in each.stalls],
    }
    return {**facts, **rows}


def peak_words(each: RankTimeline) -> str:
    """Say how much memory a rank took, beside its prediction and its budget."""
    return (
        f"rank {each.rank}: peak {format_bytes(each.peak_bytes)} of {format_bytes(each.budget_bytes)} (predicted "
        f"{format_bytes(each.predicted_bytes)})"
    )


def times_words(times: RankSeconds) -> str:
    """Say what a rank's step went into."""
    return (
        f"computes {format_seconds(times.computing_s)} of {format_seconds(times.step_s)}, communicates exposed "
        f"{format_seconds(times.transfer_s)}, waits for others {format_seconds(times.waiting_s)}"
    )


def slow_words(slow: SlowRank) -> str:
    """Say which rank is slow, by how much, and how sure that is."""
    return (
        f"rank {slow.rank} is slow: it computes {slow.factor:.2f} times as long as the others, against what was "
        f"predicted for each, and was the slowest in {slow.steps} of {slow.of_steps} steps; the others waited "
        f"{format_seconds(slow.cost_s)} for it in the last"
    )


def rank_timeline(program: Program, layout: Layout, rank: int, timeline: Timeline) -> RankTimeline:
    """Find what a rank's computing waited for in a step.

    Args:
        program: The rank's, at the grain of kernels.
        timeline: Predicted or measured, with an event of each of its actions.
    """
    return _PauseFinder(program, layout, rank, timeline).analysed()


class _PauseFinder:
    """Step of one rank, looked at backwards from where its computing pauses."""

    def __init__(self, program: Program, layout: Layout, rank: int, timeline: Timeline) -> None:
        self._program, self._layout, self._rank, self._timeline = program, layout, rank, timeline
        self._actions: dict[int, Action] = {action.id: action for action in program.actions}
        self._events: dict[int, Event] = {event.action: event for event in timeline.events}
        self._before: dict[int, int] = {}
        last: dict[str, int] = {}
        for action in program.actions:
            if action.stream in last:
                self._before[action.id] = last[action.stream]
            last[action.stream] = action.id
        self._last = tuple(last.values())

    def analysed(self) -> RankTimeline:
        """The rank's timeline with its communications and stalls."""
        communications = self._communications()
        came = {communication.action: communication.came_s for communication in communications}
        stalls: list[Stall] = []
        reached_s = 0.0
        for action in self._program.actions:
            if action.stream != COMPUTE_STREAM:
                continue
            event = self._events[action.id]
            self._blame(action.waits, reached_s, event.start_s, came, stalls)
            reached_s = max(reached_s, event.end_s)
        self._blame(self._last, reached_s, self._timeline.duration_s, came, stalls)
        return RankTimeline(
            rank=self._rank, timeline=self._timeline, communications=tuple(communications), stalls=tuple(stalls)
        )

    def _blame(
        self, waits: Sequence[int], start_s: float, end_s: float, came: dict[int, float], stalls: list[Stall]
    ) -> None:
        """Say which communications a pause of computing was for, from its end back to its start."""
        while waits and end_s > start_s:
            latest = max(waits, key=lambda wait: self._events[wait].end_s)
            until_s = min(end_s, self._events[latest].end_s)
            since_s = max(start_s, came.get(latest, self._events[latest].start_s))
            if until_s <= start_s:
                return
            if latest in came and since_s < until_s:
                stalls.append(Stall(latest, since_s, until_s))
            end_s, waits = min(since_s, until_s), self._waited(latest)

    def _waited(self, action: int) -> tuple[int, ...]:
        """Actions that have to end before this one begins."""
        before = (self._before[action],) if action in self._before else ()
        return (*self._actions[action].waits, *before)

    def _communications(self) -> list[Communication]:
        """Communications of the rank, in order."""
        graph, occurrences, communications = self._program.graph, Counter[str](), list[Communication]()
        for action in self._program.actions:
            if action.op is None or action.op not in graph.collectives:
                continue
            facts = dict(graph.ops[action.op].kwargs)
            over = str(facts["over"])
            group, kind = self._layout.group(self._rank, over), CommunicationKind.COLLECTIVE
            came_s, key = self._events[action.id].start_s, f"{over} of {group[0]}"
            if action.kind in (ActionKind.SEND, ActionKind.RECV):
                peer = group[int(facts["peer"])]  # pyright: ignore[reportArgumentType]
                kind = CommunicationKind.SEND if action.kind is ActionKind.SEND else CommunicationKind.RECEIVE
                ends = (self._rank, peer) if kind is CommunicationKind.SEND else (peer, self._rank)
                key = f"{ends[0]} to {ends[1]} by {facts['tag']}"
            if kind is CommunicationKind.RECEIVE:  # simulated as over when the send is: it waits since it could begin
                ready = [self._events[wait].end_s for wait in self._waited(action.id)]
                came_s = min(came_s, max(ready, default=0.0))
            communications.append(Communication(action.id, kind, f"{key}, {occurrences[key]}", came_s))
            occurrences[key] += 1
        return communications


@dataclass(frozen=True)
class _SavedRank:
    """The JSON form of a rank: rows for what is many."""

    rank: int
    timeline: SavedTimeline
    start_s: float
    came_s: float
    clock_error_s: float
    communications: tuple[tuple[int, CommunicationKind, str, float], ...]
    stalls: tuple[tuple[int, float, float], ...]
    computing_s: tuple[float, ...]
    predicted_computing_s: float
    peak_bytes: int
    predicted_bytes: int
    budget_bytes: int
    base_bytes: int


@dataclass(frozen=True)
class _SavedJob:
    """The JSON form of the timelines of a job."""

    plan: str
    step: int
    ranks: tuple[_SavedRank, ...]
