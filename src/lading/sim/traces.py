"""Traces: what a pipeline does, as a Timeline of the ranks that are worth looking at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import isnan

import numpy as np

from lading.errors import ConfigError
from lading.ir.timeline import Event, Timeline
from lading.program.schedules import Work
from lading.sim.cluster import ClusterRun, Job, simulate_cluster
from lading.sim.jobs import job_of
from lading.sim.noise import Noise
from lading.sim.occupancy import occupancy
from lading.sim.pipeline import Floats, PipelineRun
from lading.sim.simulate import WAITING, Simulated

COMPUTE, COLLECTIVE, NETWORK = "compute", "collective", "data-parallel network"
SEND_DOWN, SEND_UP = "send to the next stage", "send to the stage before"


def pipeline_timeline(run: PipelineRun, *, ranks: Sequence[int] | None = None) -> Timeline:
    """Events of some ranks of a pipeline, with a flow from each send to the action that takes what it brings.

    Args:
        ranks: Pipeline ranks to show; all by default.
    Returns:
        A "predicted" timeline; ``rank_class`` of an event is its pipeline rank, and action ids are the same whichever
        ranks are shown.
    Raises:
        ConfigError: a rank that the pipeline has not.
    """
    plan = run.schedule
    shown = list(range(plan.ranks)) if ranks is None else sorted(set(ranks))
    if bad := [rank for rank in shown if not 0 <= rank < plan.ranks]:
        raise ConfigError(f"expected pipeline ranks from 0 to {plan.ranks - 1}, got {bad}")
    bounds: list[int] = np.cumsum([0, *(len(order) for order in plan.orders)]).tolist()
    events: list[Event] = []
    labels: dict[int, str] = {}
    takers: dict[tuple[bool, int, int], int] = {}
    sends: list[tuple[int, tuple[bool, int, int]]] = []
    names: dict[tuple[int, int, int, int], tuple[str, str]] = {}
    for rank in shown:
        _Rank(run, rank, bounds, names).write(events, labels, takers, sends)
    events.sort(key=lambda event: event.start_s)
    flows = tuple((send, takers[taker]) for send, taker in sends if taker in takers)
    return Timeline("predicted", tuple(events), (), labels, flows=flows)


class _Rank:
    """One rank being written: the id of an action is its place among those of all ranks, of its send so much more."""

    def __init__(
        self,
        run: PipelineRun,
        rank: int,
        bounds: Sequence[int],
        names: dict[tuple[int, int, int, int], tuple[str, str]],
    ) -> None:
        self._run, self._rank, self._bounds, self._names = run, rank, bounds, names

    def write(
        self,
        events: list[Event],
        labels: dict[int, str],
        takers: dict[tuple[bool, int, int], int],
        sends: list[tuple[int, tuple[bool, int, int]]],
    ) -> None:
        run, rank = self._run, self._rank
        plan, first, total = run.schedule, self._bounds[rank], self._bounds[-1]
        stages = plan.stages_of(rank)
        times = (run.start_s[rank], run.end_s[rank], run.sent_s[rank], run.arrived_s[rank])
        starts, ends, leaves, arrivals = (column.tolist() for column in times)
        rows: list[tuple[int, int, int, int]] = list(map(tuple, plan.orders[rank].tolist()))
        for action, (row, start, end, sent, arrived) in enumerate(
            zip(rows, starts, ends, leaves, arrivals, strict=True), first
        ):
            work, chunk, micro_batch, _ = row
            if (names := self._names.get(row)) is None:
                names = self._names[row] = _names(row)
            labels[action] = names[0]
            events.append(Event(rank, COMPUTE, action, start, end))
            if work != Work.BACKWARD_WEIGHT:
                takers[work == Work.FORWARD, stages[chunk], micro_batch] = action
            if not isnan(sent):
                labels[total + action] = names[1]
                forward = work == Work.FORWARD
                events.append(Event(rank, SEND_DOWN if forward else SEND_UP, total + action, sent, arrived))
                sends.append((total + action, (forward, stages[chunk] + (1 if forward else -1), micro_batch)))


def _names(row: tuple[int, int, int, int]) -> tuple[str, str]:
    """What an action and its send are called, on any rank."""
    work, chunk, micro_batch, joint = row
    name = f"{_NAMES[work]} of micro-batch {micro_batch}, chunk {chunk}"
    return f"{name}, with the next" if joint else name, f"send {name}"


def cluster_timeline(run: ClusterRun) -> Timeline:
    """Events of the watched ranks of a cluster, all steps one after the other.

    Returns:
        A "predicted" timeline; ``rank_class`` of an event is its rank, and labels name its action.
    """
    plan, events, labels = run.job.plan, list[Event](), dict[int, str]()
    bounds: list[int] = np.cumsum([0, *(len(order) for order in plan.orders)]).tolist()
    for rank, rows in run.watched.items():
        place = rank // (run.job.replicas * run.job.group)
        order: list[list[int]] = plan.orders[place].tolist()
        before = (-1.0, -1.0)
        found: list[list[float]] = rows.tolist()
        for start, end, action, stretch in found:
            stream = COLLECTIVE if (action, stretch) == before else COMPUTE
            before = (action, stretch)
            work, chunk, micro_batch, _ = order[int(action) - bounds[place]]
            labels[int(action)] = _names((work, chunk, micro_batch, 0))[0]
            events.append(Event(rank, stream, int(action), start, end))
    events.sort(key=lambda event: event.start_s)
    return Timeline("predicted", tuple(events), (), labels)


def step_timeline(simulated: Simulated, *, ranks: Sequence[int] | None = None) -> Timeline:
    """A simulated step: pipeline ranks with their sends, what they reduce beside computing, and what follows.

    Args:
        ranks: Pipeline ranks to show; by default the first two, one in the middle and the last. Without a pipeline,
            stretches of computing and collectives of one rank are shown.
    Raises:
        ConfigError: a rank that the pipeline has not.
    """
    job, run = job_of(simulated), simulated.step.pipeline
    if run is None:
        shown = [0]
        drawn = cluster_timeline(simulate_cluster(dataclasses.replace(job, group=1, replicas=1), Noise(), watch=shown))
    else:
        last = run.schedule.ranks - 1
        shown = sorted({0, min(1, last), last // 2, last}) if ranks is None else sorted(set(ranks))
        drawn = pipeline_timeline(run, ranks=shown)
    held = [occupancy(simulated, rank, _spans(drawn) if run is None else None) for rank in shown]
    ready = run.gradients_ready_s if run else np.array([drawn.duration_s])
    events, labels = list(drawn.events), dict(drawn.labels)
    number = 2 * sum(len(order) for order in job.plan.orders)
    step_s = simulated.step.step_s
    equal_s = step_s - simulated.step.shares_s[WAITING]
    for rank in shown:
        free = 0.0
        for stage in sorted(job.plan.stages_of(rank), key=lambda s: float(ready[s])):
            whole, ahead, tail = (float(np.broadcast_to(v, ready.shape)[stage]) for v in _reduction(job))
            begin = max(free, float(ready[stage]) - ahead)
            free = max(begin + whole, float(ready[stage]) + tail)
            if whole:
                number += 1
                labels[number] = f"reduce the gradients of stage {stage}"
                events.append(Event(rank, NETWORK, number, begin, free))
        for name, start, end in (
            ("optimizer and gathering of parameters", equal_s - job.end_s, equal_s),
            (WAITING, equal_s, step_s),
        ):
            number += 1
            labels[number] = name
            events.append(Event(rank, COMPUTE, number, start, end))
    events.sort(key=lambda event: event.start_s)
    memory = tuple(sample for one in held for sample in one.samples(f"rank {one.rank}"))
    peak = max(one.peak_bytes for one in held)
    return dataclasses.replace(drawn, events=tuple(events), labels=labels, memory=memory, peak_bytes=peak)


def _spans(drawn: Timeline) -> list[tuple[float, float]]:
    """From the first event of each action to its last."""
    found: dict[int, tuple[float, float]] = {}
    for event in drawn.events:
        start_s, end_s = found.get(event.action, (event.start_s, event.end_s))
        found[event.action] = min(start_s, event.start_s), max(end_s, event.end_s)
    return [found[action] for action in sorted(found)]


def _reduction(job: Job) -> tuple[Floats, Floats, Floats]:
    return np.asarray(job.reduce_s, np.float64), np.asarray(job.ahead_s, np.float64), np.asarray(job.tail_s, np.float64)


_NAMES = ("forward", "backward", "input gradient", "weight gradient")
