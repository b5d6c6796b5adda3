"""Layouts: the fastest way to spread a training step over devices, found in the whole joint space.

The optimisation. A layout x = (block, pipe, cut) has a block (tp, cp, ep, etp, sp, micro-batch, how keys and values
meet, precision, recompute mode), a pipe (pp, vpp, schedule, layers recomputed) and a cut (zero, shard); dp follows.
With T(x) the seconds of a step by events and M_k(x) the bytes at moment k,

    minimize    T(x)
    subject to  tp cp pp dp = devices                              Space.meshes, Space.pipes, pipes.valid
                dp * micro-batch divides the global batch          pipes.valid
                micro-batches and chunks as the schedule wants     pipes.valid
                lengths divide as the model's cut needs            parallel.ranks.rank_segment, of each block
                M_k(x) <= budget, k over the five moments          moments.moments_of, refine.refined
                pinned choices                                     Space
                precisions that stack and device have              space.precisions_of

How it is solved. T and M are bounded from below by closed forms on the same table of costs (``bounds.step_bounds``,
``bounds.peak_bounds``): a block is priced once by the simulator's own code, its pipes and cuts are arrays. In the order
of their bounds the layouts are then simulated by events (``refine.refined``) until ``top`` fit and no bound of what is
left is below the slowest of these: the best is then proven within the model, with a bucket of gradients a block. Of
equally fast layouts what needs least memory comes first, then the first by name (``Refined.order``): every process
finds the same.

[Note: size of buckets]
Of the fastest layout other sizes of gradient buckets are tried last (``best_bucket``). Gradients of G bytes come evenly
while the last backward runs for B seconds, and t(x) is what reducing x bytes takes, latency included. In n buckets the
step is longer by

    E(n) = max(t(G / n), n t(G / n) - (1 - 1 / n) B)

as the last bucket waits for the last gradient, or all buckets for the network: few are late, many cost latency. ``E``
is convex in n but for steps of t and for how full the last bucket is, so sizes a factor of two apart are tried from the
middle on as long as the next one is better, then quarters of that around the best (``best_bucket``). Each is timed with
the units as they are (``lading.sim.step``) or the stages (``lading.program.emit``); in a pipeline with two rounds of
micro-batches, as more before them change nothing. The best is simulated. A size is taken if it saves a share worth
having of the step; else a block is a bucket, as the stacks have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.graph import DTYPE_BYTES
from lading.ir.plan import Choices, Plan, Predictions
from lading.memory.verify import verify
from lading.planner.nearest import hopeless, impossible, infeasible
from lading.planner.peaks import room_of
from lading.planner.refine import Proof, Refined, refine, refined
from lading.planner.search import LayoutSearch, Tell
from lading.planner.space import Space
from lading.sim.simulate import Priced, Simulated, seconds_until_reduced, simulate
from lading.units import format_capacity

#: Actions of the longest Program that is saved; a longer one is emitted again from the layout.
_MOST_ACTIONS = 20_000
#: Faster layouts that do not fit, shown beside those that do.
_OVER = 4


@dataclass(frozen=True)
class Layouts:
    """Result of a search for layouts.

    Attributes:
        best: Layouts that fit, the fastest first.
        over: Layouts faster than the best that do not fit.
        counted: Number of layouts of the space.
        evaluated: Number of these that were bounded one by one.
        left_out: Layouts that were not searched, in words.
        bucket: Effect of other sizes of the winner's buckets; None where it has none.
    """

    space: Space
    best: tuple[Refined, ...]
    over: tuple[Refined, ...]
    counted: int
    evaluated: int
    proof: Proof
    left_out: tuple[str, ...]
    bucket: BucketComparison | None = None

    @property
    def chosen(self) -> Simulated:
        """Fastest layout, simulated with the size of its buckets."""
        return self.bucket.simulated if self.bucket and self.bucket.is_worth else self.winner.simulated

    @property
    def winner(self) -> Refined:
        """Fastest layout that fits."""
        return self.best[0]

    @property
    def proven(self) -> int:
        """Number of the best layouts that no other layout of the space comes before."""
        return sum(one.step_s <= self.proof.rest_s for one in self.best)

    @property
    def bound_s(self) -> float:
        """Seconds that no layout of the space that fits is below."""
        return min(self.winner.step_s, self.proof.rest_s)


def find_layouts(space: Space, tell: Tell = lambda done, of, what: None) -> Layouts:
    """Find the fastest layouts: search, bound and simulate.

    Args:
        tell: Called with the number done, of how many, and what they are.
    Raises:
        ConfigError: no layout can be.
        PlanInfeasible: none fits; it names the binding moment, by how much, and the nearest plans that fit.
    """
    search, room = LayoutSearch(space), room_of(space)
    if hopeless(space):
        raise infeasible(search, [], None, tell)
    try:
        best, over, proof = refined(search, room, tell)
    except ConfigError as error:
        raise impossible(space, str(error), tell) from error
    if not best:
        raise infeasible(search, over, proof, tell)
    faster = [refine(search, bounded, room) for bounded in search.nearly(2 * _OVER, best[0].step_s, room[DEVICE])]
    beside = sorted((one for one in (*over, *faster) if one.step_s < best[0].step_s), key=lambda one: one.order)
    return Layouts(
        space,
        tuple(best[: space.asked.top]),
        tuple(beside[:_OVER]),
        search.counted,
        search.evaluated,
        proof,
        space.left_out(),
        best_bucket(best[0].simulated),
    )


def cluster_plan(found: Layouts, version: str) -> Plan:
    """Make the plan of the winning layout, to be saved, and prove its lists.

    Raises:
        ProgramError: ranks would wait for each other, or use what is not gathered: a fault of Lading's own.
    """
    winner, space = found.winner, found.space
    if (listed := found.chosen.step.listed) is not None:
        verify(listed.program)
    request = replace(
        space.asked,
        machine_fingerprint=space.machine.fingerprint,
        seq_len=space.request.seq_len,
        budgets={DEVICE: space.asked.budget_bytes or space.machine.device.memory_bytes},
        policy="layout search",
    )
    step_s = found.chosen.step.step_s
    return Plan(
        version=version,
        request=request,
        layout=str(found.chosen.request.layout),
        choices=Choices(),
        program=_program_lines(found.chosen),
        predictions=Predictions(step_s=step_s, lower_bound_s=min(found.bound_s, step_s), peaks=winner.peaks),
        assumptions=winner.simulated.assumed,
    )


def _program_lines(simulated: Simulated) -> tuple[str, ...]:
    """Write the Program of a step as text, line by line; () where it is too long to be saved."""
    listed = simulated.step.listed
    if listed is None or sum(map(len, listed.program.ranks)) > _MOST_ACTIONS:
        return ()
    return tuple(listed.program.text().splitlines())


#: Sizes that are tried: so many bytes, and twice as many again and again; of more buckets the latencies add up. Less of
#: a step than the share is not taken.
_LEAST_BYTES, _MOST_BUCKETS, _WORTH = 1 << 20, 512, 1e-3


@dataclass(frozen=True)
class BucketComparison:
    """Effect of the size of gradient buckets on a layout.

    Attributes:
        block_bytes: Bytes of the gradients of the largest block, as stacks reduce them.
        best_bytes: Best of the other sizes.
        simulated: Step with that size.
        saves_s: Seconds it saves of a step; negative where none is better than a block each.
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
    """Find the best size of gradient buckets for a simulated layout; None where nothing is reduced beside backward."""
    layout, stack = found.request.layout, found.request.stack
    alone = layout.dp * layout.cp == 1 or layout.zero >= (2 if layout.is_pipeline else 3)
    if alone or not stack.overlap_grad_reduce or found.machine.processes is not None:
        return None
    width = DTYPE_BYTES[stack.gradient_dtype]
    priced = Priced(found.machine, found.table, found.segments)
    whole = width * max(sum(stage.trained.values()) for stage in found.step.stages)
    blocks = [each for each in found.segments if each.segment.enters and each.segment.leaves]
    block = width * max(sum(each.trained.values()) for each in blocks or found.segments)
    tried: dict[int, float] = {}

    def step_s(size: int) -> float:
        if size not in tried:
            tried[size] = seconds_until_reduced(found, replace(layout, bucket_bytes=size))
        return tried[size]

    size = _LEAST_BYTES
    while size * _MOST_BUCKETS < whole:
        size *= 2
    octaves = [size]
    while octaves[-1] < whole:
        octaves.append(2 * octaves[-1])
    first = _descend(octaves, len(octaves) // 2, step_s)
    size = _descend([round(first * 2 ** (quarter / 4)) for quarter in range(-3, 4)], 3, step_s)
    best = simulate(replace(found.request, layout=replace(layout, bucket_bytes=size)), found.table, priced)
    saves_s = found.step.step_s - best.step.step_s
    return BucketComparison(block, size, best, saves_s, saves_s > _WORTH * found.step.step_s)


def _descend(sizes: Sequence[int], start: int, step_s: Callable[[int], float]) -> int:
    """Go from a size to the next as long as that is better, or smaller and as good; returns the last."""
    at = start
    while at > 0 and step_s(sizes[at - 1]) <= step_s(sizes[at]):
        at -= 1
    if at == start:
        while at < len(sizes) - 1 and step_s(sizes[at + 1]) < step_s(sizes[at]):
            at += 1
    return sizes[at]
