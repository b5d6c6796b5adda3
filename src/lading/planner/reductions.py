"""Reductions: how many bytes of gradients are reduced together, chosen for a layout that the search has found.

The optimisation. Gradients of G bytes come evenly while the last backward runs for B seconds, and t(x) is what reducing
x bytes takes, latency included. In n buckets the step is longer by

    E(n) = max(t(G / n), n t(G / n) - (1 - 1 / n) B)

as the last bucket waits for the last gradient, or all buckets for the network: few are late, many cost latency. ``E``
is convex in n but for steps of t and for how full the last bucket is, so sizes a factor of two apart are tried, then
quarters of that around the best; each is simulated (``best_bucket``), with the units as they are (``lading.sim.step``)
or the stages (``lading.program.emit``). A size is taken if it saves a share worth having of the step; else a block is a
bucket, as the stacks have it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lading.ir.graph import DTYPE_BYTES
from lading.sim.simulate import Priced, Simulated, simulate
from lading.units import format_capacity

#: Sizes that are tried: so many bytes, and twice as many again and again; of more buckets the latencies add up. Less of
#: a step than the share is not taken.
_LEAST_BYTES, _MOST_BUCKETS, _WORTH = 1 << 20, 512, 1e-3


@dataclass(frozen=True)
class BucketComparison:
    """What a size of buckets does for a layout.

    Attributes:
        block_bytes: Of the gradients of the largest block, as stacks reduce them.
        best_bytes: The best of other sizes.
        simulated: With it.
        saves_s: Of a step; negative where none is better than a block each.
        is_worth: Whether that is a share worth having.
    """

    block_bytes: int
    best_bytes: int
    simulated: Simulated
    saves_s: float
    is_worth: bool

    def __str__(self) -> str:
        said = f"gradients: reduced a block at a time, up to {format_capacity(self.block_bytes)}"
        share = self.saves_s / (self.simulated.step.step_s + self.saves_s)
        size = f"buckets of {format_capacity(self.best_bytes)}"
        if self.is_worth:
            return f"gradients: reduced in {size}, which saves {share:.1%} of the step against a block at a time"
        return f"{said}; {size}, the best of other sizes, would change the step by {-share:+.2%}"


def best_bucket(found: Simulated) -> BucketComparison | None:
    """The best size of buckets for a simulated layout; None where nothing is reduced beside backward."""
    layout, stack = found.request.layout, found.request.stack
    alone = layout.dp * layout.cp == 1 or layout.zero >= (2 if layout.is_pipeline else 3)
    if alone or not stack.overlap_grad_reduce or found.machine.processes is not None:
        return None
    width = DTYPE_BYTES[stack.gradient_dtype]
    priced = Priced(found.machine, found.table, found.segments)
    whole = width * max(sum(stage.trained.values()) for stage in found.step.stages)
    blocks = [each for each in found.segments if each.segment.enters and each.segment.leaves]
    block = width * max(sum(each.trained.values()) for each in blocks or found.segments)
    tried: dict[int, Simulated] = {}

    def step_s(size: int) -> float:
        if size not in tried:
            request = replace(found.request, layout=replace(layout, bucket_bytes=size))
            tried[size] = simulate(request, found.table, priced)
        return tried[size].step.step_s

    size = _LEAST_BYTES
    while size * _MOST_BUCKETS < whole:
        size *= 2
    octaves = [size]
    while octaves[-1] < whole:
        octaves.append(2 * octaves[-1])
    first = min(octaves, key=step_s)
    size = min((round(first * 2 ** (quarter / 4)) for quarter in range(-3, 4)), key=step_s)
    saves_s = found.step.step_s - step_s(size)
    return BucketComparison(block, size, tried[size], saves_s, saves_s > _WORTH * found.step.step_s)
