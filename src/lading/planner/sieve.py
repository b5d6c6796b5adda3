"""Sieve: which pipelines of a block may fit and how fast these can be, before its layouts are bounded one by one.

[Note: sieve]
What a rank keeps of activations is linear in what each segment saves, and so is the work of all stages in what each
segment takes. With ``alive`` micro-batches of each of a rank's stages and m of a step on p ranks, every pipe has

    bytes   >= sum over the rank's stages of alive * saved + the least that any cut leaves it of states
    seconds >= m / p * work of all stages,  and  >= way to the last rank + m * its work + way back

Both left sides are matrices that all blocks with as many ranks and micro-batches share, so a block takes a few products
of small matrices. A stage takes no less than what its segments take summed up, whatever of it hides what
(``lading.planner.stages``): the way and the work are sums of segments. Who splits the backward may leave the
gradients of weights for the end, and the way back is then not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lading.planner.bounds import HIDDEN
from lading.planner.pipes import WATCHED, Bools, PipeTable
from lading.planner.stages import Floats, Ints, spans
from lading.sim.prices import MachinePrices


@dataclass(frozen=True, eq=False)
class Sieve:
    """Of all pipes of a table, what blocks share.

    Attributes:
        whole: (pipe, segment): how often all stages have it.
        ahead: (pipe, segment): how often the stages before the first one of the last rank have it.
        last: (pipe, segment): how often the last rank has it.
    """

    table: PipeTable
    weights: Floats
    whole: Floats
    ahead: Floats
    last: Floats

    @staticmethod
    def of(table: PipeTable, weights: Floats) -> Sieve:
        """Sum up stages.

        Args:
            weights: (row, segment) of ``StageRows.arrays``.
        """
        each = weights[table.row]
        before = np.cumsum(each, axis=0) - each
        begin = table.held_stage[table.held_first[:, WATCHED - 1]]
        last = _summed(each[table.held_stage], table.held_first)[:, WATCHED - 1]
        return Sieve(
            table,
            weights,
            whole=np.add.reduceat(each, table.first),
            ahead=before[begin] - before[table.first],
            last=last,
        )

    def kept(self, alive: Floats) -> Floats:
        """(pipe, watched rank, segment): how many are alive at a moment of the step.

        Args:
            alive: Of ``pipes.alive_of``.
        """
        each = self.weights[self.table.row[self.table.held_stage]]
        return _summed(alive[:, None] * each, self.table.held_first)

    def seconds(self, features: Sequence[Floats], prices: MachinePrices, micro_batches: Floats) -> Floats:
        """Least seconds of each pipe ([Note: sieve]).

        Args:
            features: Of ``stages.features_of``.
        """
        table, stack = self.table, prices.stack
        work = sum(spans(self.whole @ phase, prices, stack) for phase in features)
        last = sum(spans(self.last @ phase, prices, stack) for phase in features)
        ways = [spans(self.ahead @ phase, prices, stack) for phase in features]
        back = np.where(table.split, 0.0, ways[1] + ways[2] + ways[3])
        least = np.maximum(micro_batches * work / table.pp, ways[0] + micro_batches * last + back)
        return least * (HIDDEN if stack.hidden else 1.0)


@dataclass(frozen=True, slots=True)
class Sieved:
    """What is left of a block in a recompute mode.

    Attributes:
        pipes: Which may fit, and be.
        step_s: Least seconds of these; inf if there are none.
        over_s: Least seconds of those that are no more than a little too large; inf if there are none.
        peak_bytes: Least of all that can be; inf if there are none.
    """

    pipes: Bools
    step_s: float
    over_s: float
    peak_bytes: float


def _summed(each: Floats, firsts: Ints) -> Floats:
    """Sums of runs of rows that begin at ``firsts``."""
    return np.add.reduceat(each, firsts.reshape(-1)).reshape(*firsts.shape, each.shape[1])
