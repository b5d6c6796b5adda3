"""Pipeline: when each action of a schedule runs, given the seconds of stages and of the sends between them.

A rank runs its actions in order. A forward waits for the output of the stage before it, a backward for the gradient
from the stage after it. A send leaves when its action ends; sends of one rank in one direction follow each other. With
``overlap`` they run beside computing (torch's schedules of several chunks, Megatron's ``overlap_p2p_comm``), without it
the sender computes nothing meanwhile (torch's and Megatron's plain 1F1B). Chunks that are neighbors on one rank hand
over without a send.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from lading.errors import SimulationError
from lading.program.schedules import Schedule, Work

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_NEVER = -1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSeconds:
    """Seconds of a micro-batch, each a number, one a stage, or an array of (stages, micro-batches).

    Attributes:
        backward: Of both gradients at once.
        backward_input, backward_weight: Of each alone; needed by schedules that split them.
        send_forward: Of what a stage hands to the next; of the last stage not used.
        send_backward: Of what a stage hands to the one before; of the first stage not used.
        joint: What a forward and a backward run as one take, as a share of their sum: 1.0 as torch runs them.
    """

    forward: npt.ArrayLike
    backward: npt.ArrayLike = np.nan
    backward_input: npt.ArrayLike = np.nan
    backward_weight: npt.ArrayLike = np.nan
    send_forward: npt.ArrayLike = 0.0
    send_backward: npt.ArrayLike = 0.0
    joint: float = 1.0

    def table(self, stages: int, micro_batches: int) -> Floats:
        """Seconds by (work, stage, micro-batch), and of sends forward and backward: six layers.

        Raises:
            SimulationError: a shape that fits neither, or a negative number.
        """
        values = (self.forward, self.backward, self.backward_input, self.backward_weight)
        layers = [_whole(value, stages, micro_batches) for value in (*values, self.send_forward, self.send_backward)]
        return np.stack(layers)


def _whole(value: npt.ArrayLike, stages: int, micro_batches: int) -> Floats:
    array = np.asarray(value, np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim > 2 or (array.ndim == 2 and (array.shape[0] != stages or array.shape[1] not in (1, micro_batches))):
        raise SimulationError(
            f"expected a number, one a stage ({stages}) or an array of ({stages}, {micro_batches}), got {array.shape}"
        )
    if np.any(array < 0) or np.any(np.isinf(array)):
        raise SimulationError(f"expected seconds >= 0, got {float(np.min(array))} to {float(np.max(array))}")
    return np.broadcast_to(array, (stages, micro_batches))


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """What a pipeline does when; tuples have an array for each rank, with a number for each of its actions.

    Attributes:
        start_s, end_s: Of computing.
        sent_s: When what the action sends leaves; nan if it sends nothing.
        arrived_s: When that is there.
        overlap: Whether ranks computed while they sent.
    """

    schedule: Schedule
    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]
    sent_s: tuple[Floats, ...]
    arrived_s: tuple[Floats, ...]
    overlap: bool = True

    @property
    def send_s(self) -> float:
        """Seconds of the longest send; 0 if there is none."""
        lasts = [arrived - sent for sent, arrived in zip(self.sent_s, self.arrived_s, strict=True)]
        return max((float(np.nanmax(values)) for values in lasts if not np.all(np.isnan(values))), default=0.0)

    @cached_property
    def makespan_s(self) -> float:
        """End of the last action."""
        return max(float(end[-1]) for end in self.end_s)

    @cached_property
    def busy_s(self) -> Floats:
        """Seconds that each rank computes. Actions run as one are counted once."""
        whole = [float(np.sum(end - start)) for start, end in zip(self.start_s, self.end_s, strict=True)]
        twice = [
            float(np.sum((end - start)[order[:, 3] == 1]))
            for start, end, order in zip(self.start_s, self.end_s, self.schedule.orders, strict=True)
        ]
        return np.array(whole) - np.array(twice)

    @property
    def bubble(self) -> Floats:
        """Share of the makespan in which each rank does not compute."""
        return 1.0 - self.busy_s / self.makespan_s

    @cached_property
    def gradients_ready_s(self) -> Floats:
        """When the last gradient of each stage's parameters is there: its data-parallel reduction may start."""
        ready = np.zeros(self.schedule.stages)
        for rank, order in enumerate(self.schedule.orders):
            last = (order[:, 0] == Work.BACKWARD) | (order[:, 0] == Work.BACKWARD_WEIGHT)
            stages = np.array(self.schedule.stages_of(rank))[order[last, 1]]
            np.maximum.at(ready, stages, self.end_s[rank][last])
        return ready

    def reductions(self, seconds: npt.ArrayLike) -> tuple[Floats, Floats]:
        """When each stage's gradients are reduced, if that runs beside computing: one after the other on a rank, in
        the order in which they are ready.

        Args:
            seconds: Of a stage's reduction; a number, or one a stage.
        Returns:
            Start and end by stage. What of it is exposed on a rank: the last end, less the rank's last ``end_s``.
        """
        lasts = np.broadcast_to(np.asarray(seconds, np.float64), (self.schedule.stages,))
        start, end = self.gradients_ready_s.copy(), np.zeros(self.schedule.stages)
        free = np.zeros(self.schedule.ranks)
        for stage in np.argsort(self.gradients_ready_s, kind="stable").tolist():
            rank = self.schedule.rank_of(stage)
            start[stage] = max(start[stage], free[rank])
            end[stage] = free[rank] = start[stage] + lasts[stage]
        return start, end

    def alive(self, rank: int) -> tuple[Floats, Ints]:
        """(seconds, micro-batches under way, counted by chunk) of a rank: a step after each start and end."""
        order = self.schedule.orders[rank]
        begins = order[:, 0] == Work.FORWARD
        ends = (order[:, 0] == Work.BACKWARD) | (order[:, 0] == Work.BACKWARD_WEIGHT)
        times = np.concatenate([self.start_s[rank][begins], self.end_s[rank][ends]])
        steps = np.concatenate([np.ones(int(begins.sum()), np.int64), -np.ones(int(ends.sum()), np.int64)])
        by_time = np.lexsort((steps, times))
        return times[by_time], np.cumsum(steps[by_time])


def simulate_pipeline(plan: Schedule, seconds: PipelineSeconds, *, overlap: bool = True) -> PipelineRun:
    """Events of a pipeline.

    Args:
        plan: Of ``lading.program.schedules``.
        overlap: Whether ranks compute while they send.
    Raises:
        SimulationError: seconds that the schedule needs are missing or negative, or its orders wait for each other.
    """
    entries = entries_of(plan, seconds)
    starts, ends, leaves, arrived = time_entries(entries, overlap)
    late = np.flatnonzero(np.isnan(ends))
    if len(late):
        first = int(late[0])
        rank = bisect_right(entries.bounds, first) - 1
        _, chunk, micro_batch, _ = plan.orders[rank][first - entries.bounds[rank]].tolist()
        raise SimulationError(
            f"schedule {plan.kind}: rank {rank} waits forever at chunk {chunk}, micro-batch {micro_batch}; what sends "
            "its input waits for it: check the orders"
        )
    seconds_of_pair = np.flatnonzero(entries.joint) + 1
    starts[seconds_of_pair] = starts[seconds_of_pair - 1]
    ends[seconds_of_pair] = ends[seconds_of_pair - 1]
    leaves[~entries.sending] = np.nan
    arrivals = np.where(entries.sending, arrived[entries.posts], np.nan)
    cuts = entries.bounds[1:-1]
    split = [tuple(np.split(values, cuts)) for values in (starts, ends, leaves, arrivals)]
    return PipelineRun(plan, split[0], split[1], split[2], split[3], overlap)


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Actions of all ranks, rank after rank, as the loop that times them takes them.

    What is handed over has a slot: stage and micro-batch, forward then backward, and one more that is always there.

    Attributes:
        bounds: Where each rank begins, and the end.
        lasts: Seconds; of a pair all in its first action, none in its second.
        needs, also: Slots to wait for; the second for what the other of a pair needs.
        posts: Slot that it fills, or the last slot.
        sends: Seconds of the send; 0 where the other chunk is on the same rank.
        links: Of the sender: down, up, and within it.
        sending, joint: Whether it sends to another rank; whether it is the first of a pair.
        wires: ``needs``, ``also``, ``posts`` and ``links`` as lists, where they are known.
    """

    bounds: list[int]
    lasts: Floats
    needs: Ints
    also: Ints
    posts: Ints
    sends: Floats
    links: Ints
    sending: Bools
    joint: Bools
    wires: tuple[list[int], list[int], list[int], list[int]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Wiring:
    """What of Entries follows from the schedule alone; work, stage and micro-batch are each action's."""

    bounds: list[int]
    work: Ints
    stage: Ints
    micro_batch: Ints
    needs: Ints
    also: Ints
    posts: Ints
    links: Ints
    sending: Bools
    pairs: Bools
    wires: tuple[list[int], list[int], list[int], list[int]]


@lru_cache(maxsize=64)
def _wiring(plan: Schedule) -> _Wiring:
    stages, count = plan.stages, plan.micro_batches
    bounds: Ints = np.cumsum([0, *(len(order) for order in plan.orders)])
    rank = np.repeat(np.arange(plan.ranks), np.diff(bounds))
    work, chunk, micro_batch, joint = np.concatenate(plan.orders).astype(np.int64).T
    stage = np.array([plan.stages_of(r) for r in range(plan.ranks)])[rank, chunk]
    forward = work == Work.FORWARD
    backward = (work == Work.BACKWARD) | (work == Work.BACKWARD_INPUT)
    slot, nothing, half = stage * count + micro_batch, 2 * stages * count, stages * count
    needs = np.where(forward & (stage > 0), slot, nothing)
    needs = np.where(backward & (stage < stages - 1), slot + half, needs)
    posts = np.where(forward & (stage < stages - 1), slot + count, nothing)
    posts = np.where(backward & (stage > 0), slot + half - count, posts)
    other = np.array([plan.rank_of(s) for s in range(stages)])[np.clip(stage + np.where(forward, 1, -1), 0, stages - 1)]
    sending = (posts < nothing) & (other != rank)
    links = 3 * rank + np.where(other == rank, 2, np.where(forward, 0, 1))
    pairs = joint == 1
    also = np.full(len(work), nothing)
    also[pairs] = np.roll(needs, -1)[pairs]
    wires = needs.tolist(), also.tolist(), posts.tolist(), links.tolist()
    return _Wiring(bounds.tolist(), work, stage, micro_batch, needs, also, posts, links, sending, pairs, wires)


def entries_of(plan: Schedule, seconds: PipelineSeconds) -> Entries:
    w = _wiring(plan)
    layers = seconds.table(plan.stages, plan.micro_batches)
    lasts = layers[w.work, w.stage, w.micro_batch]
    if np.any(np.isnan(lasts)):
        missing = Work(int(w.work[np.isnan(lasts)][0])).name.lower()
        raise SimulationError(f"schedule {plan.kind} needs the seconds of {missing}, which are not given")
    sends = np.where(w.sending, layers[np.where(w.work == Work.FORWARD, 4, 5), w.stage, w.micro_batch], 0.0)
    lasts[w.pairs] = seconds.joint * (lasts + np.roll(lasts, -1))[w.pairs]
    lasts[np.flatnonzero(w.pairs) + 1] = 0.0
    return Entries(w.bounds, lasts, w.needs, w.also, w.posts, sends, w.links, w.sending, w.pairs, w.wires)


def time_entries(entries: Entries, overlap: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """Start and end of each entry, when its send leaves, and when each slot is filled; nan for what never happens.

    Every rank runs as far as it can, and again when what it waits for has been sent. About 0.4 us an action.
    """
    lasts: list[float] = entries.lasts.tolist()
    sends: list[float] = entries.sends.tolist()
    needs, also, posts, links = entries.wires or (
        entries.needs.tolist(),
        entries.also.tolist(),
        entries.posts.tolist(),
        entries.links.tolist(),
    )
    bounds = entries.bounds
    total, slots = bounds[-1], max(int(entries.posts.max()), int(entries.needs.max())) + 1
    nothing = slots - 1
    starts, ends, leaves = [np.nan] * total, [np.nan] * total, [np.nan] * total
    arrived, waiting = [_NEVER] * nothing + [0.0], [-1] * slots
    free, link_free, at = [0.0] * len(bounds), [0.0] * (3 * len(bounds)), list(bounds[:-1])
    todo = list(range(len(at)))[::-1]
    while todo:
        rank = todo.pop()
        now = free[rank]
        for index in range(at[rank], bounds[rank + 1]):
            ready, other = arrived[needs[index]], arrived[also[index]]
            if ready < 0.0 or other < 0.0:
                waiting[needs[index] if ready < 0.0 else also[index]] = rank
                at[rank] = index
                break
            ready = other if other > ready else ready
            now = ready if ready > now else now
            starts[index] = now
            now += lasts[index]
            ends[index] = now
            if (post := posts[index]) == nothing:
                continue
            link = links[index]
            leave = link_free[link] if link_free[link] > now else now
            leaves[index] = leave
            there = arrived[post] = link_free[link] = leave + sends[index]
            now = now if overlap else there
            if waiting[post] >= 0:
                todo.append(waiting[post])
        free[rank] = now
    return np.array(starts), np.array(ends), np.array(leaves), np.array(arrived)
