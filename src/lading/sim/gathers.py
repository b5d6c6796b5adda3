"""A step whose parameters are gathered in chosen groups: seconds and bytes of its list.

``lading.program.groups.emit_groups`` makes the list, the rank engine times it, and the memory trace counts its bytes;
this file gives the seconds of each action and the bytes of each storage. The compute stream copies gathered parameters
out of their buffer, which counts with the region behind, and gradients into theirs, which counts with the region
before. Activations and gradients of one piece ([Note: pieces of a block]) are counted together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lading.ir.action import ActionKind, Work
from lading.ir.graph import Role
from lading.ir.program import ParameterGroup, Program, Region
from lading.program.groups import emit_groups
from lading.program.memory_trace import GradientRules, MemoryTrace, Thing, What, memory_changes, memory_trace
from lading.sim.buckets import Bucket, Cost, Costs, Course, Run
from lading.sim.rank_engine import Priced, RankTimes, action_seconds, run_ranks

#: Micro-batches that are listed: from the second on they are alike, but for the last.
LISTED = 4
_ACTIVATIONS = (What.RUNS, What.LEAVES, What.SAVED, What.ENTERS)
_ROLES = {what: Role.ACTIVATION if what in _ACTIVATIONS else Role.WORKSPACE for what in What} | {
    What.SHARD: Role.GRADIENT
}


@dataclass(frozen=True)
class Gathered:
    """Seconds and bytes of a step.

    Attributes:
        program: List of a rank.
        step_s: Seconds of the whole step.
        exposed_s: Seconds of the step in which the device waits for the network.
        network_s: Seconds in which the network is busy.
        peak_bytes: Largest bytes at one moment.
        forward, backward: Number of gathers of each bucket in the forwards and the backwards of a step.
        peak: Memory at the moment of the peak.
    """

    program: Program
    step_s: float
    exposed_s: float
    network_s: float
    peak_bytes: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    peak: Moment


@dataclass(frozen=True)
class Moment:
    """Memory at one moment of a step.

    Attributes:
        micro_batch, is_backward, place: When it is; ``place`` is the block's position in the order of forward.
        gathered, coming, gradients, reduced: (bucket, bytes) of gathered parameters, of flat buffers of gathers, of
            gradients, and of gradients in the buffer that is reduced.
        activation_bytes, state_bytes: Bytes of activations, and of what stays all step, shards of gradients included.
    """

    micro_batch: int = 0
    is_backward: bool = False
    place: int = 0
    gathered: dict[int, int] = field(default_factory=lambda: {})
    coming: dict[int, int] = field(default_factory=lambda: {})
    gradients: dict[int, int] = field(default_factory=lambda: {})
    reduced: dict[int, int] = field(default_factory=lambda: {})
    activation_bytes: int = 0
    state_bytes: int = 0


def gathered_step(costs: Costs, buckets: Sequence[Bucket], *, listed: int = LISTED) -> Gathered:
    """Predict the seconds and the bytes of a step whose parameters are gathered in the given buckets.

    Args:
        costs: Costs of the model's buckets.
        buckets: Buckets that together hold every atom once, in the order of forward.
        listed: Most micro-batches that the list has one by one, the last among them; 4 or more.
    Raises:
        ConfigError: the buckets are not all atoms in order, each once.
    """
    modules, courses = costs.modules, costs.courses(buckets)
    program = emit_groups(costs.shape(buckets, courses, listed))
    priced = _Priced(costs, buckets, courses)
    times = run_ranks(program, priced.seconds(program), [modules.slowdown])
    rules = GradientRules(makes=True, to_host=modules.request.layout.updates_on_host)
    trace = memory_trace(memory_changes(program, 0, rules), priced.size_of, _ROLES, modules.states)
    return Gathered(
        program=program,
        step_s=times.step_s,
        exposed_s=times.step_s - rest_s(costs) - _sum_s(times, (ActionKind.COMPUTE,)),
        network_s=_sum_s(times, (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD)),
        peak_bytes=trace.peak_bytes,
        forward=_gathers(program, len(buckets), backward=False),
        backward=_gathers(program, len(buckets), backward=True),
        peak=_moment(program, trace, priced.runs),
    )


def rest_s(costs: Costs) -> float:
    """Seconds of a step after its last backward: the optimizer, the host, and waiting for slower devices."""
    modules = costs.modules
    count = modules.request.layout.micro_batches
    return modules.rest_s + (count * modules.computing_s + modules.rest_s) * modules.waits


class _Priced:
    """Seconds of the actions, and bytes of the storages, in the list of a step with the given buckets."""

    def __init__(self, costs: Costs, buckets: Sequence[Bucket], courses: tuple[Course, Course]) -> None:
        self.costs, self.modules = [costs.of(bucket) for bucket in buckets], costs.modules
        self.runs = {turn.run.region: turn.run for course in courses for turn in course}
        self.rest_s = rest_s(costs)

    def seconds(self, program: Program) -> list[float]:
        """Seconds of every action alone; copies out of a gathered buffer count with the next region."""
        seconds, actions = action_seconds(program, self._alone_s), program.ranks[0]
        coming: Counter[int] = Counter()
        for number, (kind, storage) in enumerate(zip(actions.kind, actions.storage, strict=True)):
            if kind is ActionKind.UNSHARD:
                coming[storage] += 1
            elif kind is ActionKind.COMPUTE and coming:
                for used in [used for used in coming if used in program.uses[actions.op[number]]]:
                    seconds[number] += coming.pop(used) * self._cost(program.storages[used]).copy_s
        return seconds

    def _alone_s(self, key: Priced) -> float:
        kind, what, _ = key
        if isinstance(what, Region):
            return self.runs[what].seconds
        if kind is ActionKind.STEP:
            return self.rest_s
        cost = self._cost(what)
        return cost.gather_s if kind is ActionKind.UNSHARD else cost.reduce_s if kind is ActionKind.REDUCE_GRAD else 0.0

    def _cost(self, group: object) -> Cost:
        assert isinstance(group, ParameterGroup)
        return self.costs[group.bucket]

    def size_of(self, thing: Thing) -> int:
        """Bytes of a storage that comes and goes."""
        what, of = thing
        if isinstance(of, ParameterGroup):
            cost = self.costs[of.bucket]
            return {
                What.MADE: cost.gradient_bytes, What.CAST: cost.cast, What.INPUT: cost.reduced, What.SHARD: cost.shard
            }.get(what, cost.gathered)  # fmt: skip
        block = self.modules.blocks[self.modules.order[of.unit][0]]
        if what in (What.SAVED, What.ENTERS, What.HANDED):
            return {What.SAVED: block.saved_bytes, What.ENTERS: block.enters_bytes}.get(what, 0)
        run = self.runs[of]
        if what is What.RUNS:
            return run.most_bytes - run.made_bytes
        return run.left_bytes if what is What.LEAVES else run.made_bytes


def _weights(program: Program) -> list[int]:
    """Number of micro-batches that each action stands for."""
    repeated, more = program.repeat
    return [1 + more if number == repeated else 1 for number in program.ranks[0].micro_batch]


def _sum_s(times: RankTimes, kinds: Sequence[ActionKind]) -> float:
    """Seconds of all actions of some kinds in a step."""
    spans = zip(times.program.ranks[0].kind, times.start_s, times.end_s, _weights(times.program), strict=True)
    return sum(weight * (end - start) for kind, start, end, weight in spans if kind in kinds)


def _gathers(program: Program, count: int, *, backward: bool) -> tuple[int, ...]:
    """Gathers of each bucket in the forwards or the backwards of a step."""
    actions = program.ranks[0]
    gathers = [0] * count
    rows = zip(actions.kind, actions.storage, actions.micro_batch, _weights(program), strict=True)
    for number, (kind, storage, micro_batch, weight) in enumerate(rows):
        if kind is ActionKind.UNSHARD and backward is (number > actions.rows[2 * micro_batch][1]):
            group = program.storages[storage]
            assert isinstance(group, ParameterGroup)
            gathers[group.bucket] += weight
    return tuple(gathers)


def _moment(program: Program, trace: MemoryTrace, runs: dict[Region, Run]) -> Moment:
    """Describe the moment of the peak."""
    changes, actions = trace.changes, program.ranks[0]
    until = int(trace.totals.argmax()) + 1
    live_counts: Counter[int] = Counter()
    for number, sign in zip(changes.number[:until].tolist(), changes.sign[:until].tolist(), strict=True):
        live_counts[number] += sign
    states: dict[What, dict[int, int]] = {what: {} for what in What}
    activation_bytes, state_bytes = 0, sum(trace.fixed.values())
    for number, times in sorted(live_counts.items()):
        thing, size = changes.things[number], times * int(trace.sizes[number])
        if not size:
            continue
        by_bucket = states[What.BUFFER if thing.what is What.CAST else thing.what]
        if isinstance(thing.of, ParameterGroup):
            by_bucket[thing.of.bucket] = by_bucket.get(thing.of.bucket, 0) + size
        elif thing.what in _ACTIVATIONS:
            activation_bytes += size
        else:
            for bucket, each in runs[thing.of].gradients:
                states[What.MADE][bucket] = states[What.MADE].get(bucket, 0) + times * each
    at = next(n for n in range(int(changes.action[until - 1]), -1, -1) if actions.kind[n] is ActionKind.COMPUTE)
    region = program.regions[actions.op[at]]
    return Moment(
        micro_batch=actions.micro_batch[at],
        is_backward=region.work is not Work.FORWARD,
        place=region.unit,
        gathered=states[What.WHOLE],
        coming=states[What.BUFFER],
        gradients={bucket: size for bucket, size in states[What.MADE].items() if size},
        reduced=states[What.INPUT],
        activation_bytes=activation_bytes,
        state_bytes=state_bytes + sum(states[What.SHARD].values()),
    )
