"""Bounds: least seconds and bytes of a step of every layout of one block, from the same costs that events take.

[Note: bound of replicas]
Without a pipeline the device computes for C seconds, the network is busy for N of them, and computing beside it is
slower by s. The first gather ends before anything is computed and the last reduction begins after all of it, so what
they take (e) is beside nothing: a micro-batch takes at least ``max(N, C + (N - e) s / (1 + s) + e)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lading.ir.stack import Stack
from lading.planner.exchanges import Exchanges
from lading.planner.pipes import Bools, PipeTable, activations, makespans
from lading.planner.stages import Floats, Ints, StageCosts, stage_costs
from lading.sim.noise import waiting_share
from lading.sim.parts import MEMORY
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.step import stage_of

#: What computing loses beside hidden collectives goes by its mix, so a stage may take this much more than its units.
HIDDEN = 0.995


@dataclass(frozen=True, eq=False)
class PricedBlock:
    """Costs of a block in one recompute mode.

    Attributes:
        counts: [segment]: how often it stands in the model.
        send_s: Seconds of handing a micro-batch from one stage to the next.
        slowdown: Share by which computing is slower beside exchanges, where there is no pipeline.
        copy_gather_s, copy_reduce_s: [segment]: seconds of copies within the device for a gather, and for a reduction.
    """

    costs: StageCosts
    counts: Floats
    send_s: float
    slowdown: float
    copy_gather_s: Floats
    copy_reduce_s: Floats


def priced_block(
    segments: Sequence[Phases],
    rows: tuple[Ints, Floats, Floats],
    counts: Sequence[int],
    both: tuple[MachinePrices, MachinePrices],
) -> PricedBlock:
    """Sum up a block's segments for all stages.

    Args:
        both: Prices of the block without a pipeline, and in one.
    """
    prices, piped = both
    stack, plain = prices.stack, segments[len(segments) // 2 :]
    run = list(enumerate(counts))
    forward = stage_of(run, plain, prices, stack).forward
    share = min(1.0, forward.shares_s.get(MEMORY, 0.0) / forward.seconds) if forward.seconds else 0.0
    return PricedBlock(
        costs=stage_costs(rows, segments, prices, stack),
        counts=np.array(counts, np.float64),
        send_s=piped.send_s(segments[0].sent_bytes),
        slowdown=prices.slowdown(share),
        copy_gather_s=np.array([prices.copies_s(s.without_tied.elements, stack.gather_copy_bytes) for s in plain]),
        copy_reduce_s=np.array([prices.copies_s(s.without_tied.trained, stack.reduce_copy_bytes) for s in plain]),
    )


@dataclass(frozen=True, eq=False)
class Rows:
    """Layouts of one block, each a (pipe, number in ``Exchanges``).

    Attributes:
        micro_batches: [pipe]: of a step.
        alive: Micro-batches alive on watched ranks, and the stages that run (``pipes.alive_of``).
        pipe, number: [layout]: its pipe, and its place in the exchanges.
    """

    table: PipeTable
    found: Exchanges
    micro_batches: Floats
    alive: tuple[Floats, Ints]
    pipe: Ints
    number: Ints


def step_bounds(rows: Rows, priced: PricedBlock, stack: Stack, devices: int) -> tuple[Floats, Floats]:
    """Lower bounds of the step, and of its pipeline, in seconds by layout.

    A pipeline that turns out slower makes all layouts with it as much slower.
    """
    table, exchanged, costs = rows.table, rows.found, priced.costs
    pipe, number = rows.pipe, rows.number
    spans, computed = (part[pipe] for part in makespans(table, costs, priced.send_s, rows.micro_batches, stack))
    after, working = _after(rows, costs, stack), spans.copy()
    cut = exchanged.zero[number] >= 2  # a rank computes, and reduces what each stage has before it goes on
    reduced = np.max(computed[cut] + exchanged.reduce_ranks_s[number[cut]], axis=1)
    spans[cut] = np.maximum(spans[cut], reduced - after[cut])
    steps = spans + after + exchanged.gather_s[number]
    flat = table.flat[pipe]
    if np.any(flat):
        steps[flat] = _replicas(rows, flat, priced, stack) * (HIDDEN if stack.hidden else 1.0)
        row = table.row[table.first][pipe[flat]]
        working[flat] = rows.micro_batches[pipe[flat]] * (costs.forward[row] + costs.backward[row])
    rest = exchanged.optimizer_s[number] + stack.step_s
    waits = np.array([waiting_share(devices, every_block=zero >= 2) for zero in range(4)])
    waited = np.where(flat, waits[exchanged.zero[number]], waits[0])  # in a pipeline replicas meet once a step
    return steps + rest + (working + rest) * waited, spans


def peak_bounds(rows: Rows, priced: PricedBlock) -> Floats:
    """[layout]: lower bound of the bytes of its fullest rank."""
    number, forwards_first = rows.number, rows.table.gpipe[rows.pipe]
    # Gradients come behind the forwards.
    states = rows.found.bytes[number] - np.where(forwards_first[:, None], rows.found.gradients[number], 0.0)
    alive = activations(rows.table, priced.costs, rows.alive)
    return np.max(alive[rows.pipe] + states, axis=1)


def _after(rows: Rows, costs: StageCosts, stack: Stack) -> Floats:
    """[layout]: seconds by which reducing gradients ends after the pipeline."""
    exchanged, table = rows.found, rows.table
    split = table.split[rows.pipe]  # there the rank that ends last may be any, and has reduced one stage at least
    behind = np.where(split, exchanged.reduce_least_s[rows.number], exchanged.reduce_s[rows.number])
    cut = exchanged.zero[rows.number] >= 2
    if not stack.overlap_grad_reduce:
        return np.where(cut, behind, exchanged.reduce_all_s[rows.number])
    first = table.row[table.first][rows.pipe]
    # What backward makes last, the first segment's, is reduced behind it; and no reduction begins before backward does.
    exposed = np.maximum(
        exchanged.segment_reduce_s[rows.number][:, 0], exchanged.reduce_s[rows.number] - costs.backward[first]
    )
    return np.where(cut, behind, np.where(split, 0.0, exposed))


def _replicas(rows: Rows, flat: Bools, priced: PricedBlock, stack: Stack) -> Floats:
    """[layout without a pipeline]: least seconds of a step, optimizer apart ([Note: bound of replicas])."""
    table, exchanged, costs = rows.table, rows.found, priced.costs
    number, pipe = rows.number[flat], rows.pipe[flat]
    row = table.row[table.first][pipe]
    times, zero = rows.micro_batches[pipe], exchanged.zero[number]
    forward, backward = costs.forward[row], costs.backward[row]
    gathers, reduces = exchanged.segment_gather_s[number], exchanged.segment_reduce_s[number]
    passes = np.where(costs.again[row] > 0, stack.gathers, 2)
    cut = _cut(priced, stack, (gathers, reduces), forward + backward, passes)
    alone = reduces[:, 0] if stack.overlap_grad_reduce else exchanged.reduce_all_s[number]  # the last is beside nothing
    reduced = alone * np.where(zero == 2, times, 1.0)
    whole = gathers @ priced.counts if stack.overlap_param_gather else exchanged.gather_s[number]
    once = reduced + _gathered(priced, stack, (gathers, whole))
    return times * (forward + backward) + np.where(zero == 3, times * cut, once)


def _cut(priced: PricedBlock, stack: Stack, of: tuple[Floats, Floats], computed: Floats, passes: Ints) -> Floats:
    """Seconds by which gathering cut parameters and reducing their gradients makes a micro-batch longer.

    Args:
        of: [layout, segment]: seconds of its gather, and of its reduction.
        computed: [layout]: seconds of computing.
        passes: [layout]: gathers of each segment in a micro-batch.
    """
    gathers, reduces = of
    every, reduced = gathers @ priced.counts, reduces @ priced.counts
    if not stack.overlap_param_gather:
        return passes * every + reduced - gathers[:, -1]
    network = every + (passes - 1) * (every - gathers[:, -1]) + reduced
    copied = passes * float(priced.counts @ priced.copy_gather_s) + float(priced.counts @ priced.copy_reduce_s)
    alone = gathers[:, 0] + reduces[:, 0]
    return _beside(computed + copied, network, alone, priced.slowdown) - computed


def _beside(computed: Floats, network: Floats, alone: Floats, slowdown: float) -> Floats:
    """Least seconds of a micro-batch that computes beside a busy network ([Note: bound of replicas])."""
    return np.maximum(network, computed + (network - alone) * (slowdown / (1 + slowdown)) + alone)


def _gathered(priced: PricedBlock, stack: Stack, of: tuple[Floats, Floats]) -> Floats:
    gathers, whole = of
    if not stack.overlap_param_gather:
        return whole
    # The last gather ends before the last unit computes; meanwhile computing waits, or is slower.
    return gathers[:, 0] + (whole - gathers[:, 0]) * (priced.slowdown / (1 + priced.slowdown))
