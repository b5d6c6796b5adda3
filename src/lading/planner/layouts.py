r"""Layouts: the fastest way to spread a training step over devices, found in the whole joint space.

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
left is below the slowest of these: the best is then proven within the model, with a bucket of gradients a block. Other
sizes of its buckets are tried then (``reductions.best_bucket``). Of equally fast
layouts what needs least memory comes first, then the first by name (``Refined.order``): every process finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from lading.errors import ConfigError
from lading.ir.clusterplan import ClusterPlan
from lading.planner.nearest import hopeless, impossible, infeasible
from lading.planner.peaks import room_of
from lading.planner.reductions import BucketComparison, best_bucket
from lading.planner.refine import Proof, Refined, refine, refined
from lading.planner.search import LayoutSearch, Tell
from lading.planner.space import Space
from lading.sim.simulate import Simulated

#: Faster layouts that do not fit, shown beside those that do.
_OVER = 4


@dataclass(frozen=True)
class Layouts:
    """What was found.

    Attributes:
        best: That fit, the fastest first.
        over: Faster than the best, but they do not fit.
        counted: Layouts of the space; ``evaluated``: of them, those bounded one by one.
        left_out: Of the space.
        bucket: What other sizes of the winner's buckets would do; None where it has none.
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
        """The fastest, with the size of its buckets."""
        return self.bucket.simulated if self.bucket and self.bucket.is_worth else self.winner.simulated

    @property
    def winner(self) -> Refined:
        """The fastest."""
        return self.best[0]

    @property
    def proven(self) -> int:
        """How many of the best no other layout of the space comes before."""
        return sum(one.step_s <= self.proof.rest_s for one in self.best)

    @property
    def bound_s(self) -> float:
        """No layout of the space that fits takes less."""
        return min(self.winner.step_s, self.proof.rest_s)


def find_layouts(space: Space, tell: Tell = lambda done, of, what: None) -> Layouts:
    """Search, bound and simulate.

    Args:
        tell: Called with what is done, of how many, and what it is.
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
    faster = [refine(search, found, room) for found in search.nearly(_OVER, best[0].step_s, room.device_bytes)]
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


def cluster_plan(found: Layouts, version: str) -> ClusterPlan:
    """The winner, to be saved."""
    winner, space = found.winner, found.space
    return ClusterPlan(
        version=version,
        model=space.request.name,
        machine=space.machine.name,
        machine_fingerprint=space.machine.fingerprint,
        stack=space.request.stack.name,
        devices=space.asked.devices,
        seq_len=space.request.seq_len,
        layout=str(found.chosen.request.layout),
        step_s=found.chosen.step.step_s,
        bound_s=min(found.bound_s, found.chosen.step.step_s),
        peaks=winner.peaks,
        budget_bytes=space.asked.budget_bytes or space.machine.device.memory_bytes,
        policy="layout search",
        assumptions=winner.simulated.assumed,
    )
