"""Bounds: least seconds and bytes of a step of every layout of one block, from the same costs that events take.

[Note: bound of replicas]
Without a pipeline the device computes for C seconds, the network is busy for N of them, and computing beside it is
slower by s. The first gather ends before anything is computed and the last reduction begins after all of it, so what
they take (e) is beside nothing: a micro-batch takes at least ``max(N, C + (N - e) s / (1 + s) + e)``.

[Note: kernel bounds]
``KernelBounds`` has the least costs of every block of a family, from the kernels of one of them. Blocks of a family are
cut alike and differ in the micro-batch and in the ways of expert parallel. The one with most of both leads. With a
share r of its micro-batch and more experts a rank, each kernel has at least a share r of its bytes and FLOP, as these
are sums of products of lengths of which at most one are tokens; so it takes at least what
``lading.cost.kernels.floor_of`` says. A collective has at least a share r of the bytes and is priced for the member's
own ranks; the host launches as many kernels. Who hides collectives under computing gains no more than where that is all
products, which loses least. A micro-batch keeps at least a share r of what the leader's keeps.

So the sum is below what the member takes, with no margin but what integers are rounded by. One thing is taken for
granted: that fewer tokens fuse no better (what is fused depends on which tensors are under 64 KiB). Tests compare all
members of families with their bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lading.catalog.kernel_rates import kernel_rates
from lading.cost.kernels import KernelFloor, floor_of, memory_s
from lading.ir.machine import Device
from lading.ir.stack import Stack
from lading.ir.work import Collective, Kernel
from lading.planner.exchanges import Exchanges
from lading.planner.pipes import Bools, PipeTable, activations, makespans
from lading.planner.prefilter import SegmentCosts, alone_of, exposed, host_of, saved_of
from lading.planner.space import LayoutBlock, RecomputeMode
from lading.planner.stages import Floats, Ints, StageCosts, stage_costs
from lading.sim.noise import waiting_share
from lading.sim.parts import MEMORY, cause_of
from lading.sim.phases import Phases, stretches
from lading.sim.prices import MachinePrices
from lading.sim.simulate import outside
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
    exchanges: Exchanges
    micro_batches: Floats
    alive: tuple[Floats, Ints]
    pipe: Ints
    number: Ints


def step_bounds(rows: Rows, priced: PricedBlock, stack: Stack, devices: int) -> tuple[Floats, Floats]:
    """Lower bounds of the step, and of its pipeline, in seconds by layout.

    A pipeline that turns out slower makes all layouts with it as much slower.
    """
    table, exchanged, costs = rows.table, rows.exchanges, priced.costs
    pipe, number = rows.pipe, rows.number
    spans, computed = (part[pipe] for part in makespans(table, costs, priced.send_s, rows.micro_batches, stack))
    after, working = _reduce_tail_s(rows, costs, stack), spans.copy()
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
    states = rows.exchanges.bytes[number] - np.where(forwards_first[:, None], rows.exchanges.gradients[number], 0.0)
    alive = activations(rows.table, priced.costs, rows.alive)
    return np.max(alive[rows.pipe] + states, axis=1)


def _reduce_tail_s(rows: Rows, costs: StageCosts, stack: Stack) -> Floats:
    """[layout]: seconds by which reducing gradients ends after the pipeline."""
    exchanged, table = rows.exchanges, rows.table
    split = table.split[rows.pipe]  # there the rank that ends last may be any, and has reduced one stage at least
    tail_s = np.where(split, exchanged.reduce_least_s[rows.number], exchanged.reduce_s[rows.number])
    cut = exchanged.zero[rows.number] >= 2
    if not stack.overlap_grad_reduce:
        return np.where(cut, tail_s, exchanged.reduce_all_s[rows.number])
    first = table.row[table.first][rows.pipe]
    # What backward makes last, the first segment's, is reduced behind it; and no reduction begins before backward does.
    exposed = np.maximum(
        exchanged.segment_reduce_s[rows.number][:, 0], exchanged.reduce_s[rows.number] - costs.backward[first]
    )
    return np.where(cut, tail_s, np.where(split, 0.0, exposed))


def _replicas(rows: Rows, flat: Bools, priced: PricedBlock, stack: Stack) -> Floats:
    """[layout without a pipeline]: least seconds of a step, optimizer apart ([Note: bound of replicas])."""
    table, exchanged, costs = rows.table, rows.exchanges, priced.costs
    number, pipe = rows.number[flat], rows.pipe[flat]
    row = table.row[table.first][pipe]
    times, zero = rows.micro_batches[pipe], exchanged.zero[number]
    forward, backward = costs.forward[row], costs.backward[row]
    gathers, reduces = exchanged.segment_gather_s[number], exchanged.segment_reduce_s[number]
    passes = np.where(costs.recompute[row] > 0, stack.gathers, 2)
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
    return _overlapped_min_s(computed + copied, network, alone, priced.slowdown) - computed


def _overlapped_min_s(computed: Floats, network: Floats, alone: Floats, slowdown: float) -> Floats:
    """Least seconds of a micro-batch that computes beside a busy network ([Note: bound of replicas])."""
    return np.maximum(network, computed + (network - alone) * (slowdown / (1 + slowdown)) + alone)


def _gathered(priced: PricedBlock, stack: Stack, of: tuple[Floats, Floats]) -> Floats:
    gathers, whole = of
    if not stack.overlap_param_gather:
        return whole
    # The last gather ends before the last unit computes; meanwhile computing waits, or is slower.
    return gathers[:, 0] + (whole - gathers[:, 0]) * (priced.slowdown / (1 + priced.slowdown))


#: What rounding bytes to integers may add to a kernel of a megabyte.
_WHOLE = 1 - 1e-6
#: (whether it is outside the blocks, collective).
_Sent = tuple[bool, Collective]


@dataclass(frozen=True, eq=False)
class _MovingKernels:
    """Kernels of one class that move bytes.

    Attributes:
        places: [kernel]: stretch that it is counted in.
        sizes: [kernel]: bytes.
        factors: [kernel]: how many times longer it takes in a running step.
    """

    places: Ints
    sizes: Floats
    factors: Floats


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Product of several groups, which takes at least as long as the host needs to launch them one by one."""

    place: int
    factor: float
    linear_s: float
    fixed_s: float
    groups: int


@dataclass(frozen=True, eq=False)
class _Terms:
    """Sums over the kernels of some stretches, each stretch with a place (``lading.cost.kernels.KernelFloor``).

    Attributes:
        linear_s: [stretch]: seconds that shrink with the tokens.
        fixed_s: [stretch]: seconds that do not.
        moved: Kernels that move bytes, by class.
        collective_counts: [stretch]: how often each collective runs.
    """

    linear_s: Floats
    fixed_s: Floats
    moved: dict[str, _MovingKernels]
    grouped: tuple[_Grouped, ...]
    collective_counts: dict[_Sent, Floats]

    def seconds(self, share: float, device: Device) -> Floats:
        """Least seconds with a share of the tokens, ``grouped`` and ``sent`` left out; an array of [stretch]."""
        total = share * self.linear_s + self.fixed_s
        for kind, moved in self.moved.items():
            sizes: Any = moved.sizes * share
            each: Any = memory_s(sizes, kind, device)
            total += np.bincount(moved.places, weights=each * moved.factors, minlength=len(total))
        return total


def _terms(kernels: Sequence[Sequence[Kernel]], prices: Sequence[MachinePrices], outer: Sequence[bool]) -> _Terms:
    """Sum up the kernels of stretches.

    Args:
        kernels: Kernels of each stretch.
        prices: Prices of each stretch.
        outer: Whether each stretch is outside the blocks.
    """
    linear, fixed = np.zeros(len(kernels)), np.zeros(len(kernels))
    moved: dict[str, list[tuple[int, float, float]]] = {}
    grouped: list[_Grouped] = []
    sent: dict[_Sent, Counter[int]] = {}
    for place, (stretch, stretch_prices, out) in enumerate(zip(kernels, prices, outer, strict=True)):
        for kernel in stretch:
            if isinstance(kernel.detail, Collective):
                sent.setdefault((out, kernel.detail), Counter())[place] += 1
                continue
            floor, factor = _floor(kernel, stretch_prices)
            if floor.groups > 1:
                grouped.append(_Grouped(place, factor, floor.linear_s, floor.fixed_s, floor.groups))
            else:
                linear[place] += factor * floor.linear_s
                fixed[place] += factor * floor.fixed_s
            for kind, size in floor.moved:
                moved.setdefault(kind, []).append((place, size, factor))
    arrays = {kind: _MovingKernels(*map(np.array, zip(*rows, strict=True))) for kind, rows in moved.items()}
    counts = {key: np.array([float(count[place]) for place in range(len(kernels))]) for key, count in sent.items()}
    return _Terms(linear, fixed, arrays, tuple(grouped), counts)


def _floor(kernel: Kernel, prices: MachinePrices) -> tuple[KernelFloor, float]:
    """Least seconds of a kernel by part, and how many times longer it takes in a running step."""
    factor = prices.in_situ(cause_of(kernel, prices.precision))
    floor = floor_of(kernel, prices.machine.device, prices.stack, prices.precision)
    return floor, factor * (prices.stack.imbalance if kernel.is_experts else 1.0)


class KernelBounds:
    """Least costs of the blocks of a family ([Note: kernel bounds])."""

    def __init__(
        self, leader: LayoutBlock, plain: Sequence[Phases], prices: MachinePrices, outer: Sequence[bool]
    ) -> None:
        """Sum up the kernels of the leader.

        Args:
            plain: Segments of the leader of which nothing is recomputed.
            outer: Which of them are outside the blocks.
        """
        self.leader, self._plain, self._prices, self._outer = leader, plain, prices, tuple(outer)
        kernels = [stretches(s.segment, s.recomputed_parts, prices.stack) for s in plain]
        self._compute_s = _terms([each[phase] for phase in range(4) for each in kernels], *self._priced(4))
        self._again: dict[RecomputeMode, tuple[_Terms, Sequence[Phases]]] = {}
        self._elements = alone_of(plain)
        self._seconds: dict[tuple[RecomputeMode | None, int], Floats] = {}
        self._sent: dict[tuple[_Sent, int, int], float] = {}

    def _priced(self, phases: int) -> tuple[list[MachinePrices], list[bool]]:
        pair = self._prices, outside(self._prices)
        return [pair[out] for out in self._outer] * phases, [*self._outer] * phases

    def knows(self, mode: RecomputeMode) -> bool:
        """Whether ``learn`` was given the segments of a recompute mode."""
        return mode in self._again

    def learn(self, mode: RecomputeMode, segments: Sequence[Phases]) -> None:
        """Take in the leader's segments of a recompute mode."""
        stack = self._prices.stack
        again = [
            stretches(s.segment, s.recomputed_parts, stack)[1] if s.recomputed_parts.kernels else [] for s in segments
        ]
        self._again[mode] = _terms(again, *self._priced(1)), segments

    def plain(self, block: LayoutBlock, prices: MachinePrices) -> SegmentCosts:
        """Least costs of a member of which nothing is recomputed.

        Args:
            prices: Prices of the member.
        """
        return self._costs(block, prices, self._own_s(block, prices).reshape(4, -1), self._plain)

    def costs(self, block: LayoutBlock, mode: RecomputeMode, prices: MachinePrices) -> SegmentCosts:
        """Least costs of a family's member in a recompute mode: segments as it recomputes them, then plain ones."""
        terms, segments = self._again[mode]
        plain_s = self._own_s(block, prices).reshape(4, -1)
        first = plain_s.copy()
        first[1] = self._of(terms, mode, block, prices)
        both = np.concatenate([first, plain_s], axis=1)
        return self._costs(block, prices, both, [*segments, *self._plain])

    def _costs(
        self, block: LayoutBlock, prices: MachinePrices, device: Floats, segments: Sequence[Phases]
    ) -> SegmentCosts:
        share = block.micro_batch / self.leader.micro_batch
        fewer = self.leader.mesh.ep / block.mesh.ep
        saved: Floats = saved_of(segments) * share
        elements = self._elements * np.array([1.0, fewer])
        return SegmentCosts(device * _WHOLE, host_of(segments, prices.stack), saved * _WHOLE, elements)

    def _own_s(self, block: LayoutBlock, prices: MachinePrices) -> Floats:
        return self._of(self._compute_s, None, block, prices)

    def _of(self, terms: _Terms, mode: RecomputeMode | None, block: LayoutBlock, prices: MachinePrices) -> Floats:
        """Least seconds of a member; an array of [stretch]."""
        share, device = block.micro_batch / self.leader.micro_batch, prices.machine.device
        known = mode, block.micro_batch
        if known not in self._seconds:
            self._seconds[known] = terms.seconds(share, device)
        total: Floats = self._seconds[known].copy()
        if terms.grouped:
            assert device.gpu is not None
            each_s = kernel_rates(device.gpu.architecture).product.group_s
            for one in terms.grouped:
                groups = one.groups * self.leader.mesh.ep // block.mesh.ep
                launches = groups * each_s if groups > 1 else 0.0
                total[one.place] += one.factor * max(share * one.linear_s + one.fixed_s, launches)
        return total + self._sent_s(terms.collective_counts, block, prices)

    def _sent_s(self, sent: Mapping[_Sent, Floats], block: LayoutBlock, prices: MachinePrices) -> Floats | float:
        """Seconds of collectives, less what computing may hide; an array of [stretch]."""
        share = block.micro_batch / self.leader.micro_batch
        total: Floats | float = 0.0
        for (out, collective), counts in sent.items():
            ways = block.mesh.ep if collective.axis == "ep" else 0
            key = (out, collective), block.micro_batch, ways
            if key not in self._sent:
                sender = outside(prices) if out else prices
                part = replace(collective, size_bytes=int(collective.size_bytes * share))
                self._sent[key] = sender.collective_s(part) * exposed(collective.axis, sender)
            total = total + self._sent[key] * counts
        return total
