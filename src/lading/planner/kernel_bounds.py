"""Kernel bounds: least costs of every block of a family, from the kernels of one of them.

[Note: kernel bounds]
Blocks of a family are cut alike and differ in the micro-batch and in the ways of expert parallel. The one with most of
both leads. With a share r of its micro-batch and more experts a rank, each kernel has at least a share r of its bytes
and FLOP, as these are sums of products of lengths of which at most one are tokens; so it takes at least what
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
from lading.ir.work import Collective, Kernel
from lading.planner.prefilter import SegmentCosts, alone_of, exposed, host_of, saved_of
from lading.planner.space import LayoutBlock, RecomputeMode
from lading.planner.stages import Floats, Ints
from lading.sim.parts import cause_of
from lading.sim.phases import Phases, stretches
from lading.sim.prices import MachinePrices
from lading.sim.simulate import outside

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
        sent: [stretch]: how often each collective runs.
    """

    linear_s: Floats
    fixed_s: Floats
    moved: dict[str, _MovingKernels]
    grouped: tuple[_Grouped, ...]
    sent: dict[_Sent, Floats]

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
        kernels = [stretches(s.segment, s.kept, prices.stack) for s in plain]
        self._own = _terms([each[phase] for phase in range(4) for each in kernels], *self._priced(4))
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
        again = [stretches(s.segment, s.kept, stack)[1] if s.kept.kernels else [] for s in segments]
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
        return self._of(self._own, None, block, prices)

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
        return total + self._sent_s(terms.sent, block, prices)

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
