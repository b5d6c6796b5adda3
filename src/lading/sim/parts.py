"""Parts: seconds of a stretch of kernels on one rank, by cause, before and after what overlaps.

[Note: one stretch of kernels]
The device runs the kernels of a stretch one after another while the host issues them; the stretch takes the longer of
both, as the host runs ahead within it. Collectives inside a block stand between kernels that need each other; a stack
hides a share of them under computing, which is slowed meanwhile as they take some of the device's processors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from lading.ir.graph import OpKind
from lading.ir.stack import Stack
from lading.ir.work import Collective, Kernel

#: What kernels are summed up as.
PRODUCTS, ATTENTION, MEMORY = "products", "attention", "memory-bound"
_CAUSES = {OpKind.MATMUL: PRODUCTS, OpKind.CONVOLUTION: PRODUCTS, OpKind.ATTENTION: ATTENTION}


class Prices(Protocol):
    """Seconds on one machine under one stack and layout."""

    def kernel_s(self, kernel: Kernel) -> float:
        """Of a kernel in a running step, without its launch."""
        ...

    def collective_s(self, collective: Collective) -> float:
        """Of a collective among the ranks of its axis."""
        ...

    def slowdown_beside(self, axis: str) -> float:
        """By how much longer computing takes while a collective of this axis runs beside it (0.1: 10%)."""
        ...


@dataclass(frozen=True)
class Part:
    """A stretch of work of one rank.

    Attributes:
        busy_s: Seconds of the device by cause.
        comm_s: Seconds of collectives by axis, alone.
        launches: Kernels that the host issues.
        collectives: Collectives that it issues.
        passes: Passes of blocks that it goes through.
        flops: Of products and attention.
    """

    busy_s: dict[str, float] = field(default_factory=lambda: {})
    comm_s: dict[str, float] = field(default_factory=lambda: {})
    launches: float = 0.0
    collectives: float = 0.0
    passes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Part) -> Part:
        return total([(self, 1.0), (other, 1.0)])


def total(parts: Iterable[tuple[Part, float]]) -> Part:
    """Sum of parts, each so many times."""
    busy: dict[str, float] = {}
    comm: dict[str, float] = {}
    launches = collectives = passes = flops = 0.0
    for part, count in parts:
        for cause, seconds in part.busy_s.items():
            busy[cause] = busy.get(cause, 0.0) + count * seconds
        for axis, seconds in part.comm_s.items():
            comm[axis] = comm.get(axis, 0.0) + count * seconds
        launches += count * part.launches
        collectives += count * part.collectives
        passes += count * part.passes
        flops += count * part.flops
    return Part(busy, comm, launches, collectives, passes, flops)


def cause_of(kernel: Kernel) -> str:
    """What a kernel that computes is summed up as."""
    return _CAUSES.get(kernel.kind, MEMORY) if kernel.kind else MEMORY


def part_of(kernels: Iterable[Kernel], prices: Prices) -> Part:
    """What a stretch of kernels costs."""
    busy: dict[str, float] = {}
    comm: dict[str, float] = {}
    launches = collectives = flops = 0.0
    for kernel in kernels:
        if isinstance(kernel.detail, Collective):
            axis = kernel.detail.axis
            comm[axis] = comm.get(axis, 0.0) + prices.collective_s(kernel.detail)
            collectives += 1
            continue
        launches += 1
        cause = cause_of(kernel)
        busy[cause] = busy.get(cause, 0.0) + prices.kernel_s(kernel)
        flops += kernel.flops
    return Part(busy, comm, launches, collectives, 1.0 if launches or collectives else 0.0, flops)


@dataclass(frozen=True)
class Span:
    """Seconds that a part takes, and of what.

    Attributes:
        shares_s: Seconds by cause; they add up to ``seconds``.
    """

    seconds: float
    shares_s: dict[str, float]


def span(part: Part, prices: Prices, stack: Stack) -> Span:
    """How long the part takes under what the stack hides ([Note: one stretch of kernels])."""
    shares = dict(part.busy_s)
    device = sum(shares.values())
    for axis, seconds in part.comm_s.items():
        hidden = 0.0 if stack.launch_blocking else min(seconds * stack.hidden.get(axis, 0.0), device)
        slowed = hidden * prices.slowdown_beside(axis)
        shares[f"{axis} communication"] = seconds - hidden + slowed
    seconds = sum(shares.values())
    host = 0.0
    if not stack.cuda_graphs:
        host = part.launches * stack.launch_s + part.collectives * stack.collective_launch_s
        host += part.passes * stack.block_s
    exposed = host if stack.launch_blocking else max(0.0, host - seconds)
    if exposed:
        shares["launches"] = exposed
    return Span(seconds + exposed, shares)
