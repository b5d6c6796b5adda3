"""Prefilter: which pipelines of a block may fit and how fast these can be, before its layouts are bounded one by one.

[Note: prefilter]
What a rank keeps of activations is linear in what each segment saves, and so is the work of all stages in what each
segment takes. With ``alive`` micro-batches of each of a rank's stages and m of a step on p ranks, every pipe has

    bytes   >= sum over the rank's stages of alive * saved + the least that any cut leaves it of states
    seconds >= m / p * work of all stages,  and  >= way to the last rank + m * its work + way back

Both left sides are matrices that all blocks with as many ranks and micro-batches share, so a block takes a few products
of small matrices. A stretch of kernels takes no less than its device and its host each take summed up, where computing
hides a collective's whole share and loses least by it (``exposed``): so the way and the work are sums of segments. Who
splits the backward may leave the gradients of weights for the end, and the way back is then not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lading.cost.contention import MOST_LOST
from lading.ir.stack import Stack
from lading.planner.exchanges import alone_of
from lading.planner.pipes import WATCHED, Bools, PipeTable
from lading.planner.stages import Floats, Ints
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices


@dataclass(frozen=True, eq=False)
class Prefilter:
    """Matrices over all pipes of a table, which blocks share.

    Attributes:
        weights: [row, segment]: counts of ``StageRows.arrays``.
        whole: [pipe, segment]: how often all stages have it.
        ahead: [pipe, segment]: how often the stages before the first one of the last rank have it.
        last: [pipe, segment]: how often the last rank has it.
    """

    table: PipeTable
    weights: Floats
    whole: Floats
    ahead: Floats
    last: Floats

    @staticmethod
    def of(table: PipeTable, weights: Floats) -> Prefilter:
        """Sum up the stages of all pipes.

        Args:
            weights: [row, segment]: counts of ``StageRows.arrays``.
        """
        each = weights[table.row]
        before = np.cumsum(each, axis=0) - each
        begin = table.held_stage[table.held_first[:, WATCHED - 1]]
        last = _summed(each[table.held_stage], table.held_first)[:, WATCHED - 1]
        return Prefilter(
            table,
            weights,
            whole=np.add.reduceat(each, table.first),
            ahead=before[begin] - before[table.first],
            last=last,
        )

    def kept_activation_counts(self, alive: Floats) -> Floats:
        """Count how often each watched rank keeps each segment's activations at a moment of the step.

        The result is an array of [pipe, watched rank, segment].

        Args:
            alive: Micro-batches alive on each watched rank, from ``pipes.alive_of``.
        """
        each = self.weights[self.table.row[self.table.held_stage]]
        return _summed(alive[:, None] * each, self.table.held_first)

    def seconds(self, costs: SegmentCosts, micro_batches: Floats, *, blocking: bool) -> Floats:
        """Least seconds of the pipeline ([Note: prefilter]); an array of [pipe].

        Args:
            micro_batches: [pipe]: of a step.
            blocking: The host waits for each kernel.
        """
        table = self.table
        work = np.sum(costs.spans(self.whole, blocking=blocking), axis=1)
        last = np.sum(costs.spans(self.last, blocking=blocking), axis=1)
        ways = costs.spans(self.ahead, blocking=blocking)
        back = np.where(table.split, 0.0, np.sum(ways[:, 1:], axis=1))
        return np.maximum(micro_batches * work / table.pp, ways[:, 0] + micro_batches * last + back)


@dataclass(frozen=True, eq=False)
class SegmentCosts:
    """Least costs of a block's segments, as it recomputes them and then plain.

    Attributes:
        device, host: [phase, segment]: seconds of the device, with collectives as far as they are not hidden, and of
            the host; phases are forward, what runs again, gradients of activations and of weights.
        saved: [segment]: bytes that a micro-batch keeps.
        elements: [segment of the model, kind]: parameters.
    """

    device: Floats
    host: Floats
    saved: Floats
    elements: Floats

    def spans(self, counts: Floats, *, blocking: bool) -> Floats:
        """Seconds of stretches of ``counts`` ([stretch, segment]) segments each; an array of [stretch, phase]."""
        device, host = counts @ self.device.T, counts @ self.host.T
        return device + host if blocking else np.maximum(device, host)


def costs_of(segments: Sequence[Phases], prices: MachinePrices, plain: int) -> SegmentCosts:
    """Sum up a priced block; the last ``plain`` of its segments are those of the model."""
    shown = {
        axis: exposed(axis, prices) for axis in {axis for s in segments for part in s.parts for axis in part.comm_s}
    }
    device = [
        [
            sum(seconds * prices.in_situ(cause) for cause, seconds in part.busy_s.items())
            + sum(seconds * shown[axis] for axis, seconds in part.comm_s.items())
            for part in s.parts
        ]
        for s in segments
    ]
    elements = alone_of(segments[-plain:])
    return SegmentCosts(np.array(device).T, host_of(segments, prices.stack), saved_of(segments), elements)


def exposed(axis: str, prices: MachinePrices) -> float:
    """Least share of a collective inside a block that makes it longer: what is not hidden, and what hiding it costs."""
    stack = prices.stack
    share = 0.0 if stack.launch_blocking else stack.hidden.get(axis, 0.0)
    if not share:
        return 1.0
    products, _, collective = prices.rates_beside(axis)
    return 1 - share * (1 - min(MOST_LOST, (1 - min(1.0, products)) / collective))


def host_of(segments: Sequence[Phases], stack: Stack) -> Floats:
    """Seconds that the host needs to launch a micro-batch's kernels; an array of [phase, segment]."""
    return np.array([[part.host_s(stack) for part in s.parts] for s in segments]).T


def saved_of(segments: Sequence[Phases]) -> Floats:
    """Bytes that one micro-batch keeps from forward to backward in each segment, an array of [segment]."""
    return np.array([float(s.saved_bytes) for s in segments])


@dataclass(frozen=True, slots=True)
class Prefiltered:
    """Pipes of a block that the prefilter leaves in a recompute mode.

    Attributes:
        pipes: [pipe]: whether it can be and may fit.
        step_s: Least seconds of these; inf if there are none.
        over_s: Least seconds of those that are no more than a little too large; inf if there are none.
        peak_bytes: Least bytes of all that can be; inf if there are none.
    """

    pipes: Bools
    step_s: float
    over_s: float
    peak_bytes: float


def _summed(each: Floats, firsts: Ints) -> Floats:
    """Sums of the rows of ``each`` ([row, column]), in runs that begin at ``firsts``; an array of [run, column]."""
    return np.add.reduceat(each, firsts.reshape(-1)).reshape(*firsts.shape, each.shape[1])
