"""Pipelines of which nothing is known but the seconds of their stages: when each action of a schedule runs.

A rank runs its actions in order. A forward waits for the output of the stage before it, a backward for the gradient
from the stage after it. A send leaves when its action ends; sends of one rank in one direction follow each other. With
``overlap`` they run beside computing (torch's schedules of several chunks, Megatron's ``overlap_p2p_comm``), without it
the sender computes nothing meanwhile (torch's and Megatron's plain 1F1B). Chunks that are neighbors on one rank hand
over without a send. The lists are those of ``lading.program.emit``, of stages without units. Tests and benchmarks
compare them with closed forms, other engines and published figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lading.errors import SimulationError
from lading.ir.action import ActionKind, Work
from lading.ir.program import ActionList, Border
from lading.ir.schedules import Schedule
from lading.program.emit import ListShape, emit
from lading.sim.rank_engine import RankTimes, run_ranks
from lading.sim.step import Step

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSeconds:
    """Seconds of a micro-batch, each a number, one a stage, or an array of (stages, micro-batches).

    Attributes:
        backward: Seconds of both gradients at once.
        backward_input, backward_weight: Seconds of each alone; needed by schedules that split them.
        send_forward: Seconds of sending to the next stage; of the last stage not used.
        send_backward: Seconds of sending to the stage before; of the first stage not used.
        joint: Seconds of a forward and a backward run as one, as a share of their sum: 1.0 as torch runs them.
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
    """Times of a simulated pipeline; tuples have an array for each rank, with a number for each of its actions.

    Attributes:
        start_s, end_s: Start and end of computing.
        sent_s: Time at which what the action sends leaves; nan if it sends nothing.
        arrived_s: Time at which that is there.
        times: Times of the lists that were run.
        overlap: Whether ranks computed while they sent.
    """

    schedule: Schedule
    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]
    sent_s: tuple[Floats, ...]
    arrived_s: tuple[Floats, ...]
    times: RankTimes
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
            seconds: Seconds of a stage's reduction; a number, or one a stage.
        Returns:
            Start and end by stage. Exposed on a rank is: the last end, less the rank's last ``end_s``.
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
    """Simulate a pipeline of which nothing is known but the seconds of its stages.

    Args:
        plan: Schedule of ``lading.ir.schedules``.
        overlap: Whether ranks compute while they send.
    Raises:
        SimulationError: seconds that the schedule needs are missing or negative, or its orders wait for each other.
    """
    program = emit(ListShape(plan, ((),) * plan.stages, overlap_send=overlap, whole_first=False))
    layers: list[list[list[float]]] = seconds.table(plan.stages, plan.micro_batches).tolist()
    needed = {Work(work) for order in plan.orders for work in np.unique(order[:, 0]).tolist()}
    if missing := [work for work in needed if np.isnan(layers[work]).any()]:
        raise SimulationError(
            f"schedule {plan.kind} needs the seconds of {missing[0].name.lower()}, which are not given"
        )
    lasts: list[float] = []
    for actions in program.ranks:
        joint = _joint(actions)
        for number, kind in enumerate(actions.kind):
            place, micro_batch = actions.storage[number], actions.micro_batch[number]
            if kind is ActionKind.COMPUTE:
                region = program.regions[actions.op[number]]
                factor = seconds.joint if number in joint else 1.0
                lasts.append(factor * layers[region.work][region.stage][micro_batch])
            elif kind is ActionKind.SEND and isinstance(border := program.storages[place], Border):
                sender = border.stage - 1 if border.forward else border.stage + 1
                lasts.append(layers[4 if border.forward else 5][sender][micro_batch])
            else:
                lasts.append(0.0)
    return pipeline_run(plan, run_ranks(program, lasts), overlap=overlap)


def _joint(actions: ActionList) -> set[int]:
    """Regions that run as one with another."""
    pairs = [(first, last) for first, last in actions.rows if last > first]
    return {number for first, last in pairs for number in range(first, last + 1)}


def pipeline_run(plan: Schedule, times: RankTimes, *, overlap: bool) -> PipelineRun:
    """Times of the actions of a pipeline's schedule, of the lists that stand for it."""
    program = times.program
    columns: list[tuple[list[float], ...]] = []
    for base, actions in zip(program.bounds, program.ranks, strict=False):
        sends = [base + send if send >= 0 else -1 for send in actions.sends]
        columns.append(
            (
                [times.start_s[base + a] if a <= b else times.end_s[base + b] for a, b in actions.rows],
                [times.end_s[base + last] for _, last in actions.rows],
                [times.start_s[send] if send >= 0 else np.nan for send in sends],
                [times.end_s[send] if send >= 0 else np.nan for send in sends],
            )
        )
    starts, ends, leaves, arrivals = (tuple(np.array(rank[at]) for rank in columns) for at in range(4))
    return PipelineRun(plan, starts, ends, leaves, arrivals, times, overlap)


def pipeline_of(step: Step) -> PipelineRun:
    """Times of the pipeline of a simulated step, whose ranks have a device each."""
    assert step.schedule is not None
    assert step.listed is not None
    return pipeline_run(step.schedule, step.listed.times(), overlap=True)
