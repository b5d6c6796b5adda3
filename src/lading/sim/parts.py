"""Parts: seconds of a stretch of kernels on one rank, by cause, before and after what overlaps.

[Note: one stretch of kernels]
The device runs the kernels of a stretch one after another while the host issues them. The host runs ahead within a
stretch, so the stretch takes the longer of both, plus the time for which both wait. Collectives inside a block stand
between kernels that need each other. A stack hides a share of them under computing, which is slowed meanwhile because
they take some of the device's processors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from lading.cost.kernels import runs_low
from lading.ir.graph import OpKind
from lading.ir.stack import Stack
from lading.ir.work import Collective, Kernel

#: What kernels are summed up as.
PRODUCTS, LOW, ATTENTION, MEMORY = "products", "low-precision products", "attention", "memory-bound"
#: Cause of what the device waits inside blocks though the host is ahead.
WAITS = "waiting in blocks"
#: What the host issues.
_KERNELS, _COLLECTIVES, _BLOCKS, _EXPERTS, _LATE = "kernels", "collectives", "blocks", "experts", "late"
_MODULES = "modules"
_CAUSES = {OpKind.MATMUL: PRODUCTS, OpKind.CONVOLUTION: PRODUCTS, OpKind.ATTENTION: ATTENTION}


class Prices(Protocol):
    """Seconds on one machine under one stack and layout."""

    @property
    def precision(self) -> str:
        """Number format of products, such as "bf16"."""
        ...

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds of a kernel alone, without its launch."""
        ...

    def in_situ(self, cause: str) -> float:
        """Factor by which kernels of a cause take longer in a running step than alone."""
        ...

    def collective_s(self, collective: Collective) -> float:
        """Seconds of a collective among the ranks of its axis."""
        ...

    def lateness(self, axis: str) -> float:
        """Lateness of the last of an axis' ranks at a collective, in standard deviations of one rank."""
        ...

    def lost_beside(self, axis: str, memory_bound: float) -> float:
        """Seconds that computing loses for each second of a collective of this axis beside it.

        Args:
            memory_bound: Share of the computing that is bound by memory, 0 to 1.
        """
        ...


@dataclass(frozen=True)
class Part:
    """A stretch of work of one rank.

    Attributes:
        busy_s: Seconds of the device by cause, of kernels alone.
        comm_s: Seconds of collectives by axis, alone.
        issued: Counts of what the host does for it (kernels, collectives, modules, passes of blocks, of experts), and
            the sum of how late the last rank comes to its collectives.
        flops: FLOP of products and attention.
    """

    busy_s: dict[str, float] = field(default_factory=lambda: {})
    comm_s: dict[str, float] = field(default_factory=lambda: {})
    issued: dict[str, float] = field(default_factory=lambda: {})
    flops: float = 0.0

    def host_s(self, stack: Stack) -> float:
        """Seconds that the host takes to issue the part's kernels, collectives and modules; 0 with CUDA graphs."""
        each = {
            _KERNELS: stack.launch_s,
            _COLLECTIVES: stack.collective_launch_s,
            _BLOCKS: stack.block_s,
            _EXPERTS: stack.experts_s,
            _MODULES: stack.module_s,
        }
        return 0.0 if stack.cuda_graphs else sum(seconds * self.issued.get(what, 0.0) for what, seconds in each.items())

    def waits_s(self, stack: Stack) -> float:
        """Seconds in which the device stands still though the host is ahead."""
        blocks, late = self.issued.get(_BLOCKS, 0.0), self.issued.get(_LATE, 0.0)
        return 0.0 if stack.cuda_graphs else stack.block_wait_s * blocks + stack.collective_wait_s * late


def total(parts: Iterable[tuple[Part, float]]) -> Part:
    """Sum parts up, each as often as its count says."""
    sums: tuple[dict[str, float], dict[str, float], dict[str, float]] = ({}, {}, {})
    flops = 0.0
    for part, count in parts:
        for into, of in zip(sums, (part.busy_s, part.comm_s, part.issued), strict=True):
            for key, value in of.items():
                into[key] = into.get(key, 0.0) + count * value
        flops += count * part.flops
    return Part(*sums, flops)


def cause_of(kernel: Kernel, precision: str) -> str:
    """Cause under which a computing kernel's seconds are summed up, if products are to run in ``precision``."""
    cause = _CAUSES.get(kernel.kind, MEMORY) if kernel.kind else MEMORY
    return LOW if cause == PRODUCTS and runs_low(kernel, precision) else cause


def part_of(kernels: Iterable[Kernel], prices: Prices) -> Part:
    """Sum up the costs of a stretch of kernels: one pass of a block."""
    busy: dict[str, float] = {}
    comm: dict[str, float] = {}
    issued: dict[str, float] = {}
    flops = 0.0
    for kernel in kernels:
        issued[_BLOCKS] = 1.0
        if isinstance(kernel.detail, Collective):
            axis = kernel.detail.axis
            comm[axis] = comm.get(axis, 0.0) + prices.collective_s(kernel.detail)
            issued[_COLLECTIVES] = issued.get(_COLLECTIVES, 0.0) + 1
            issued[_LATE] = issued.get(_LATE, 0.0) + prices.lateness(axis)
            continue
        if kernel.is_experts:
            issued[_EXPERTS] = 1.0
        elif kernel.kind in _CAUSES:
            issued[_MODULES] = issued.get(_MODULES, 0.0) + 1
        issued[_KERNELS] = issued.get(_KERNELS, 0.0) + 1
        cause = cause_of(kernel, prices.precision)
        busy[cause] = busy.get(cause, 0.0) + prices.kernel_s(kernel)
        flops += kernel.flops
    return Part(busy, comm, issued, flops)


@dataclass(frozen=True)
class Span:
    """Seconds that a part takes, and what they are spent on.

    Attributes:
        shares_s: Seconds by cause; they add up to ``seconds``.
    """

    seconds: float
    shares_s: dict[str, float]


def span(part: Part, prices: Prices, stack: Stack) -> Span:
    """Seconds of a part under what the stack hides ([Note: one stretch of kernels])."""
    shares = {cause: seconds * prices.in_situ(cause) for cause, seconds in part.busy_s.items()}
    device = sum(shares.values())
    for axis, seconds in part.comm_s.items():
        hidden = 0.0 if stack.launch_blocking else min(seconds * stack.hidden.get(axis, 0.0), device)
        slowed = hidden * prices.lost_beside(axis, shares.get(MEMORY, 0.0) / device) if hidden else 0.0
        shares[f"{axis} communication"] = seconds - hidden + slowed
    seconds = sum(shares.values())
    host = part.host_s(stack)
    exposed = host if stack.launch_blocking else max(0.0, host - seconds)
    if exposed:
        shares["launches"] = exposed
    waits = part.waits_s(stack)
    if waits:
        shares[WAITS] = waits
    return Span(seconds + exposed + waits, shares)
