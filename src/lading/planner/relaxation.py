"""The planner's linear program.

Positions ``t`` are operations. Gap ``g`` of storage ``i`` (``s_i`` bytes) has options keep, recompute and the tiers;
``x[g, o]`` in [0, 1] is the share of option ``o``. ``w[i, v]`` is the share of version ``v`` of a storage that is
written to a lower tier. The step is cut into windows of equal compute time; a transfer belongs to the window of the
use it serves. Minimise ``sum_k T_k`` (seconds) plus a small price on all work moved, subject to

    one option per gap      sum_o x[g, o] = 1                                                        _add_gaps
    memory at t             base_t + sum_{g over t} s_i x[g, keep]
                                   + sum_{g, o held at t} s_i x[g, o] <= budget                     _add_memory
    bytes in a tier         sum_i s_i max_g x[g, tier] <= its budget                                 _add_capacity
    one write per version   w[i, v] >= x[g, tier]   for every gap g in version v                     _add_writes
    compute in window k     T_k >= sum_ops c + sum_g r_g x[g, recompute]                             _add_time
    network in window k     T_k >= sum_collectives n + sum_g n_g x[g, recompute]                     _add_time
    tiers in window k       T_k >= time its reads and writes take, alone and side by side            _add_tier
    wires in window k       as a tier's, of the bytes of all tiers on a shared wire                  _add_wire

``base_t`` is what operation ``t`` touches plus what is never a candidate. A recomputed storage comes back when the
backward pass enters its block, not only at its use, so it is "held" from there on. The bound leaves this out, has one
window, and counts in ``r_g`` what runs again in every plan that drops the storage (``_surely_recomputed``), shared by
the gaps that one run may serve (``_sharing``); with that every plan satisfies the constraints: its optimum is a lower
bound on the step time of any plan, as modelled. Memory rows are generated where they are needed.
A storage that moves takes its place until it has been written and from the moment on that it is read: plans count that
(``moving``), as "held" with the option of a tier; the bound does not, as compute could wait for it.

This file says what a step asks (``build``); the functions named above are in ``planner.linear``.

[Note: folding]
A model of 80 equal layers asks 80 times the same questions. Layers that follow one another make a group, and gaps that
lie between the same operations of the layers of one group make a class: the relaxation then chooses in how many layers
of the group an option is taken, and rounding spreads these layers evenly (``fold``). Classes only tie choices together,
so the result is a plan of the whole step; a bound on all plans must not be folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lading.cost.hosting import caller_seconds
from lading.ir.fold import block_items
from lading.ir.graph import Phase, Role, StepGraph
from lading.ir.machine import Machine, Tier, wire_of, wires
from lading.ir.plan import Option
from lading.ir.program import NETWORK_STREAM, slot_bytes, stream_of
from lading.ir.sharding import UNSHARD
from lading.memory.lifetime import Gap, Lifetimes, beside_host, can_recompute, gaps, is_movable
from lading.planner.emission import UNUSED
from lading.planner.lower import StepCosts


@dataclass(frozen=True, slots=True)
class Candidate:
    """Gap with a choice. ``recompute_s`` is 0 where recomputing is impossible (see ``options``).

    A bound counts ``own_recompute_s`` of it. ``network_s`` are the seconds of the network where recomputing unshards
    again. ``resident_ranges`` are the positions inside the gap, as inclusive ranges, at which an option other than keep
    takes the bytes. ``sources`` are storages made before that recomputing starts from (with ``across`` only), ``needs``
    those it reads that last over the step, such as weights (not for a bound).
    """

    gap: Gap
    size_bytes: int
    options: tuple[Option, ...]
    own_recompute_s: float
    recompute_s: float
    resident_ranges: dict[Option, tuple[tuple[int, int], ...]]
    version: tuple[int, int] | None
    network_s: float = 0.0
    sources: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Folding:
    """Candidates of alike blocks, decided together: each class has one share of every option.

    Attributes:
        class_of: The class of each candidate, numbered from 0.
        seat: The place of each candidate in its class, in an order that spreads any first part of it evenly.
        seats: Members of the class of each candidate.
    """

    class_of: np.ndarray
    seat: np.ndarray
    seats: np.ndarray


@dataclass(frozen=True)
class HostMoves:
    """Bytes of a tier that move whatever is chosen, as operations on the host make or need them; arrays of [position].

    Attributes:
        fetched, sent: Bytes that the device reads for this use, and writes after it.
        loaded, stored: Bytes that come from the tier to the host's memory for this use, and go back after it: past the
            device, so over no wire that the tier shares.
    """

    fetched: np.ndarray
    sent: np.ndarray
    loaded: np.ndarray
    stored: np.ndarray

    @classmethod
    def none(cls, num_ops: int) -> HostMoves:
        """Make one of no bytes."""
        return cls(*(np.zeros(num_ops) for _ in range(4)))


@dataclass(frozen=True)
class HostWork:
    """Operations that the host's processors run, one after another, beside those of the device.

    They take longer beside transfers, which take a part of the host's memory bandwidth (``lading.sim.device_step``).

    Attributes:
        ops: Their positions.
        seconds: [operation]: seconds of each while nothing moves.
        since: [operation]: position of the step whose operation has to end before it can begin; 0 for what works on
            values of the step before.
        until: [operation]: position of the step whose operation begins when it has ended; the last where none does.
        per_byte: Least seconds that they take longer for each byte that moves beside them, by tier.
    """

    ops: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    since: tuple[int, ...] = ()
    until: tuple[int, ...] = ()
    per_byte: dict[str, float] = field(default_factory=lambda: {})


@dataclass(frozen=True)
class ResidencyProblem:
    """Gaps of a step, their options and times: all that the relaxation needs, independent of the budget.

    Attributes:
        base: [position]: bytes that no choice can change.
        op_seconds: [position]: seconds of each operation on the device; 0 on the host.
        network_seconds: [position]: seconds of each operation on the network.
        capacity_bytes: Bytes that storages may take in each tier.
        folding: Which candidates are decided alike ([Note: folding]); None if each is on its own.
        host_moves: What operations on the host make and need, by tier.
        beside_host: Gaps of such storages, small ones left out, in which the device reads them (version None) or writes
            them.
        host_work: What the host's processors do.
        placed: Storages that have a place in a lower tier whatever is chosen, so that a move there takes no other one.
    """

    num_ops: int
    candidates: tuple[Candidate, ...]
    base: np.ndarray
    op_seconds: np.ndarray
    network_seconds: np.ndarray
    tiers: tuple[Tier, ...]
    capacity_bytes: dict[str, int] = field(default_factory=lambda: {})
    folding: Folding | None = None
    host_moves: dict[str, HostMoves] = field(default_factory=lambda: {})
    beside_host: tuple[Candidate, ...] = ()
    host_work: HostWork = field(default_factory=HostWork)
    placed: frozenset[int] = frozenset()

    def fixed_seconds(
        self, tier: Tier, per_byte: tuple[float, float], window: np.ndarray, count: int, *, on_wire: bool = False
    ) -> np.ndarray:
        """Seconds that what the host's operations make and need takes of a tier; an array of [window].

        Args:
            per_byte: Seconds for each byte read, and for each byte written.
            window: Window of each position, of ``count``.
            on_wire: Count no more than what goes over a wire that the tier shares: what the device reads and writes.
        """
        moves = self.host_moves.get(tier.name)
        if moves is None:
            return np.zeros(count)
        reads, writes = moves.fetched, moves.sent
        if not on_wire:
            reads, writes = reads + moves.loaded, writes + moves.stored
        read, written = (np.bincount(window, weights=size, minlength=count) for size in (reads, writes))
        return per_byte[0] * read + per_byte[1] * written

    def passes_device(self, tier: Tier) -> bool:
        """Whether anything moves between the host's memory and a tier behind it."""
        return tier.name in self.host_moves and bool(self.host_moves[tier.name].loaded.any())


@dataclass(frozen=True)
class RelaxedResidency:
    """Solution of the relaxation: the share of each option for each candidate, and the seconds of the step."""

    shares: tuple[dict[Option, float], ...]
    step_s: float


def build(
    graph: StepGraph,
    lives: Lifetimes,
    machine: Machine,
    costs: StepCosts,
    min_bytes: int,
    *,
    every: bool = False,
    moving: float = 0.0,
    across: bool = False,
) -> ResidencyProblem:
    """Collect the candidate gaps of a step and the bytes that are there whatever is chosen.

    Args:
        min_bytes: Smaller storages are no candidates and always kept.
        every: Offer all that can be lowered, do not count small storages between uses, and count what passes between
            the step and its caller: what a bound needs.
        moving: Let a storage on its way to a tier or back take its place, as long as the transfer takes alone: how many
            times longer than its operations the step takes, >= 1, as fewer run meanwhile where others wait; 0 does not.
            A tier that it would be on its way to or from all the time is not offered: that would free nothing, but
            count as the write that a later gap needs.
        across: Offer to recompute from block to block too, as in checkpointing every few blocks.
    """
    homes = lives.homes
    offers = _Offers(graph, lives, machine, costs, min_bytes, _Offered(every, moving, across))
    for gap in gaps(graph, lives):
        if homes is None or not gap.wraps or gap.storage not in homes.resident:
            offers.add(gap)
    candidates = offers.candidates
    off_compute = np.isin(np.arange(len(graph.ops)), list(graph.off_compute_ops))
    seconds = np.where(off_compute, 0.0, costs.op_seconds)
    if every:
        candidates = _sharing(candidates, offers.reruns, seconds.tolist())
        seconds += _with_caller(graph, lives, machine)
    below = {storage for places in homes.slots.values() for storage in places} if homes is not None else set[int]()
    base = _base(graph, lives, offers.chosen | {(storage, UNUSED) for storage in below})
    versions = frozenset(each.version for each in candidates)
    moves, large = _host_moves(graph, lives, machine.host_tier, versions, min_bytes)
    return ResidencyProblem(
        len(graph.ops), tuple(candidates), base, seconds, offers.network_s, machine.tiers,
        host_moves=moves, beside_host=large, host_work=_host_work(graph, lives, machine, costs),
        placed=frozenset(graph.host_storages),
    )  # fmt: skip


@dataclass(frozen=True)
class _Offered:
    """Offers that ``build`` was asked for."""

    every_gap: bool
    moving: float
    across: bool


#: Most of the seconds of a recomputation that lie in other blocks, in shares of all.
_LED_ON = 0.2


class _Offers:
    """Candidates of a step, collected one gap after another.

    Attributes:
        reruns: Operations that run again for each candidate.
        chosen: Gaps of candidates, and of what is never on the device.
        network_s: [position]: seconds of each operation on the network.
    """

    def __init__(
        self, graph: StepGraph, lives: Lifetimes, machine: Machine, costs: StepCosts, min_bytes: int, offered: _Offered
    ) -> None:
        self.graph, self.lives, self.machine, self.costs = graph, lives, machine, costs
        self.min_bytes, self.offered = min_bytes, offered
        self.candidates: list[Candidate] = []
        self.reruns: list[Sequence[int]] = []
        self.chosen: set[tuple[int, int]] = set()
        self.left: set[tuple[int, int] | None] = {(s, 0) for s in graph.persistent}  # versions that left before
        self.items = block_items(graph.ops)
        self.enters = _block_entries(graph, self.items)
        on_network = [stream_of(graph, op) == NETWORK_STREAM for op in range(len(graph.ops))]
        self.network_s = np.where(np.array(on_network, dtype=bool), costs.op_seconds, 0.0)
        self.clock = np.concatenate([[0.0], np.cumsum(costs.op_seconds)]) * offered.moving
        self.updates: dict[int, list[int]] = {}  # of what lasts over the step
        for op, written in enumerate(graph.op_writes):
            for storage in graph.persistent.intersection(written):
                self.updates.setdefault(storage, []).append(op)
        self.tiers = tuple(Option(tier.name) for tier in machine.tiers)

    def add(self, gap: Gap) -> None:
        """Add the candidate of a gap, if there is a choice."""
        graph, lives, every, across = self.graph, self.lives, self.offered.every_gap, self.offered.across
        size = slot_bytes(graph.storages[gap.storage].size_bytes)
        inner, hosted = gap.wraps or gap.end - gap.start > 1, beside_host(graph, gap)
        if hosted or (size < self.min_bytes and inner and every):
            self.chosen.add((gap.storage, gap.start))
        if hosted or size < self.min_bytes or not inner:
            return
        version = _version(graph, lives, gap)
        away, resident_ranges = self._away(gap, size, version)
        recompute_ranges = resident_ranges[Option.RECOMPUTE]
        back = recompute_ranges[0][0] if recompute_ranges else gap.end
        again = self._recomputed(gap, back)
        if not every and away and self._holds_up(again, gap):
            again = ()
        options = (Option.KEEP, *((Option.RECOMPUTE,) if again else ()), *away)
        if len(options) == 1:
            return
        again_s = [0.0 if op in graph.off_compute_ops else self.costs.op_seconds[op] for op in again]
        network_s = sum(float(self.network_s[op]) for op in (again[:1] if every else again))
        own_s = again_s[0] if again_s else 0.0
        sources = _sources(graph, lives, again) if across else ()
        needs = () if every else tuple({s: None for op in again for s in graph.op_reads[op] if s in graph.persistent})
        self.candidates.append(
            Candidate(gap, size, options, own_s, sum(again_s), resident_ranges, version, network_s, sources, needs)
        )
        self.chosen.add((gap.storage, gap.start))
        self.reruns.append(again)

    def _recomputed(self, gap: Gap, back: int) -> Sequence[int]:
        """Operations that run again if a storage is dropped over a gap, its producer first; () if that is not offered.

        These are all ancestors in its block that nothing else brings back; with ``every`` the producer alone. Where
        they lead to another block it is offered with ``across`` only. What they start from there and is still used is a
        choice of its own; what is not, such as a bias that all blocks share, is made again too if that takes little.

        Args:
            back: Position at which the storage is made again.
        """
        graph, lives, items, across = self.graph, self.lives, self.items, self.offered.across
        if not can_recompute(graph, lives, gap):
            return ()
        producer = lives.producer[gap.storage]
        assert producer is not None
        if graph.ops[producer].name == UNSHARD:  # the shard is always there
            return (producer,)
        if self.offered.every_gap:
            return _surely_recomputed(graph, lives, gap, producer)
        if not across and not _stays_inside(graph, lives, items, gap.storage):
            return ()
        again = [producer]
        seen = {producer}
        for op in again:  # grows
            if items[op] != items[producer] and not across:
                return ()
            for source in graph.op_reads[op]:
                made = lives.producer[source]
                if made is None or made in seen or lives.uses[source][-1] >= gap.end:
                    continue
                if across and items[made] not in ("", items[producer]):
                    if lives.uses[source][-1] >= back:
                        continue
                    if graph.ops[producer].phase is Phase.BACKWARD:  # would lead through blocks behind this one
                        return ()
                seen.add(made)
                again.append(made)
        seconds = self.costs.op_seconds
        led_s = sum(seconds[op] for op in again if items[op] not in ("", items[producer]))
        return () if across and led_s > _LED_ON * sum(seconds[op] for op in again) else again

    def _holds_up(self, again: Sequence[int], gap: Gap) -> bool:
        """Whether updates would have to wait for what runs again at a gap's end, as it reads values from before them.

        Their gradients would wait with them, of which the program knows nothing.
        """
        read = ((op, storage) for op in again for storage in self.graph.op_reads[op])
        return any(op < update < gap.end for op, storage in read for update in self.updates.get(storage, ()))

    def _away(
        self, gap: Gap, size: int, version: tuple[int, int] | None
    ) -> tuple[tuple[Option, ...], dict[Option, tuple[tuple[int, int], ...]]]:
        """Tiers that a storage may be in over a gap, and the positions at which each option takes its bytes."""
        away = self.tiers if is_movable(self.graph, gap.storage, self.min_bytes) else ()
        if away and gap.storage in self.lives.behind_host:  # it has its place
            away = (Option(self.lives.behind_host[gap.storage]),)
        resident_ranges = {Option.RECOMPUTE: _held_again(self.lives, self.enters, gap)}
        if self.offered.moving and away:
            written = version is not None and (gap.wraps or version not in self.left)
            for tier in self.machine.tiers:
                resident_ranges[Option(tier.name)] = _on_the_way(gap, size, tier, self.clock, written=written)
            away = tuple(option for option in away if resident_ranges[option] != spans(gap, len(self.graph.ops)))
        if away:
            self.left.add(version)
        return away, resident_ranges


def _beside_host(
    graph: StepGraph, lives: Lifetimes, chosen: frozenset[tuple[int, int] | None]
) -> Iterator[tuple[Gap, tuple[int, int] | None]]:
    """Yield gaps in which the device reads what was on the host (None), or writes what the host works on (its version).

    Args:
        chosen: Versions of which a choice decides whether they are written.
    """
    written = set[tuple[int, int] | None]((None, *chosen))
    for gap in gaps(graph, lives) if graph.hosted else ():
        on_host = gap.start in graph.on_host
        if on_host and gap.end not in graph.on_host:
            yield gap, None
        if on_host or gap.end not in graph.on_host:
            continue
        version = _version(graph, lives, gap)
        made = max(
            (u for u in lives.uses[gap.storage] if u <= gap.start and gap.storage in graph.op_writes[u]), default=-1
        )
        if version not in written and made >= 0 and made not in graph.on_host:
            written.add(version)
            yield gap, version


def _host_moves(
    graph: StepGraph,
    lives: Lifetimes,
    host_tier: str,
    chosen: frozenset[tuple[int, int] | None],
    min_bytes: int,
) -> tuple[dict[str, HostMoves], tuple[Candidate, ...]]:
    """Bytes that move as operations on the host make or need them, by tier, and the gaps of large ones.

    Args:
        chosen: Versions of which a choice decides whether they are written.
        min_bytes: Smaller storages are left out of the gaps.
    """
    moves = _past_device(graph, lives)
    large: list[Candidate] = []
    for gap, version in _beside_host(graph, lives, chosen):
        size = slot_bytes(graph.storages[gap.storage].size_bytes)
        tier = lives.behind_host.get(gap.storage, host_tier)
        of_tier = moves.setdefault(tier, HostMoves.none(len(graph.ops)))
        if version is None:
            of_tier.fetched[gap.end] += size
        else:
            of_tier.sent[gap.start] += size
        if size >= min_bytes:
            large.append(Candidate(gap, size, (Option(tier),), 0.0, 0.0, {}, version))
    return moves, tuple(large)


def _past_device(graph: StepGraph, lives: Lifetimes) -> dict[str, HostMoves]:
    """Bytes that come to the host's memory from tiers behind it and go back, once a step at least, by tier."""
    moves: dict[str, HostMoves] = {}
    for storage, tier in lives.behind_host.items():
        of_tier = moves.setdefault(tier, HostMoves.none(len(graph.ops)))
        uses = [use for use in lives.uses[storage] if use in graph.on_host]
        of_tier.loaded[uses[0]] += (size := slot_bytes(graph.storages[storage].size_bytes))
        of_tier.stored[uses[-1]] += size if any(storage in graph.op_writes[use] for use in uses) else 0
    return moves


def _host_work(graph: StepGraph, lives: Lifetimes, machine: Machine, costs: StepCosts) -> HostWork:
    """Collect what the host's processors do, and between which operations of the device they have to."""
    if not graph.hosted or machine.host_device is None:
        return HostWork()
    last = len(graph.ops) - 1
    since, until = dict.fromkeys(graph.hosted, 0), dict.fromkeys(graph.hosted, last)
    for op in graph.hosted:
        for storage in graph.op_reads[op]:
            made = max((u for u in lives.uses[storage] if u < op and storage in graph.op_writes[u]), default=0)
            since[op] = max(since[op], since.get(made, made))
        for storage in graph.op_writes[op]:
            following = next((u for u in lives.uses[storage] if u > op), last)
            until[op] = min(until[op], last if following in graph.on_host else following)
    bandwidth = machine.host_device.memory_bandwidth_bytes_per_s
    shares = {tier.name: (1 if tier.host_computes else 2) / bandwidth for tier in machine.tiers}
    shared = {tier.name for group in wires(machine.tiers) for tier in group}
    groups = (*wires(machine.tiers), *((tier,) for tier in machine.tiers if tier.name not in shared))
    # Beside moves that take a share r of the bandwidth, work takes 1 + r times as long: a byte costs least at most r.
    most = 1.0 + sum(_fastest(wire_of(group)) * max(shares[tier.name] for tier in group) for group in groups)
    behind = set(lives.behind_host.values())  # moves past the device take no wire
    most += sum(_fastest(tier) / bandwidth for tier in machine.tiers if tier.name in behind)
    return HostWork(
        graph.hosted,
        tuple(costs.op_seconds[op] for op in graph.hosted),
        tuple(since.values()),
        tuple(until.values()),
        {name: share / most for name, share in shares.items()},
    )


def _fastest(tier: Tier) -> float:
    """Most bytes/s that a tier moves, in one direction or both."""
    read, write = tier.read_bytes_per_s, tier.write_bytes_per_s
    return max(read, write, min(read, tier.mixed_read_bytes_per_s) + min(write, tier.mixed_write_bytes_per_s))


def _with_caller(graph: StepGraph, lives: Lifetimes, machine: Machine) -> np.ndarray:
    """Seconds of taking batches and handing results over, which every plan spends once; an array of [position]."""
    seconds = np.zeros(len(graph.ops))
    for storage, uses in enumerate(lives.uses):
        if uses and graph.storages[storage].role is Role.INPUT:
            seconds[uses[0]] += caller_seconds(graph.storages[storage].size_bytes, machine.device)
    for storage, use in graph.result_writes.items():
        seconds[use] += caller_seconds(graph.storages[storage].size_bytes, machine.device)
    return seconds


def _base(graph: StepGraph, lives: Lifetimes, chosen: set[tuple[int, int]]) -> np.ndarray:
    """Bytes that no choice can change; an array of [position]."""
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)

    def add(size: int, first: int, last: int) -> None:
        change[first] += size
        change[last + 1] -= size

    for storage, positions in enumerate(lives.uses):
        size = slot_bytes(graph.storages[storage].size_bytes)
        for use in positions:
            if use not in graph.on_host:
                add(size, use, use)
        if not positions and storage in graph.persistent and (storage, UNUSED) not in chosen:
            add(size, 0, len(graph.ops) - 1)
    for gap in gaps(graph, lives):
        if (gap.storage, gap.start) not in chosen:
            size = slot_bytes(graph.storages[gap.storage].size_bytes)
            for first, last in spans(gap, len(graph.ops)):
                add(size, first, last)
    return np.cumsum(change)[:-1]


def spans(gap: Gap, num_ops: int) -> tuple[tuple[int, int], ...]:
    """Positions strictly inside the gap, as inclusive ranges."""
    ranges = ((gap.start + 1, num_ops - 1), (0, gap.end - 1)) if gap.wraps else ((gap.start + 1, gap.end - 1),)
    return tuple((first, last) for first, last in ranges if first <= last)


def _on_the_way(gap: Gap, size: int, tier: Tier, clock: np.ndarray, *, written: bool) -> tuple[tuple[int, int], ...]:
    """Positions inside a gap, as inclusive ranges, at which a storage leaves for a tier or comes back from it.

    Args:
        clock: When each operation starts if none waits, and the end of the last.
        written: Whether it has to be written first.
    """
    count, whole = len(clock) - 1, float(clock[-1])
    circle = np.concatenate([clock, clock[1:] + whole])
    end = gap.end + (count if gap.wraps else 0)
    gone_s = float(circle[gap.start + 1]) + (size / tier.write_bytes_per_s if written else 0.0)
    needed_s = float(circle[end]) - size / tier.read_bytes_per_s
    gone_at = int(np.searchsorted(circle, gone_s, side="left"))  # the first position without it
    coming = int(np.searchsorted(circle, needed_s, side="right")) - 1
    if gone_at >= coming:
        return spans(gap, count)
    ranges: list[tuple[int, int]] = []
    for first, last in ((gap.start + 1, gone_at - 1), (coming, end - 1)):
        ranges += [(first, min(last, count - 1)), (max(first, count) - count, last - count)]
    return tuple((first, last) for first, last in ranges if first <= last and last >= 0)


def _stays_inside(graph: StepGraph, lives: Lifetimes, items: Sequence[str], storage: int) -> bool:
    """Whether forward makes a storage and uses it only in the block that makes it.

    What leads from block to block, or backward, is not recomputed: it would need all that came before.
    """
    uses = [u for u in lives.uses[storage] if graph.ops[u].phase in (Phase.FORWARD, Phase.LOSS)]
    return bool(uses) and uses[0] == lives.producer[storage] and len({items[u] for u in uses}) == 1


def _block_entries(graph: StepGraph, items: Sequence[str]) -> list[int]:
    """First backward position of its block (-1 outside blocks), per micro-batch; an array of [forward op]."""
    entry = [-1] * len(graph.ops)
    first_backward: dict[str, int] = {}
    for position in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[position]
        if op.phase is Phase.BACKWARD and items[position]:
            first_backward[items[position]] = position
        elif op.phase in (Phase.FORWARD, Phase.LOSS):
            entry[position] = first_backward.get(items[position], -1)
    return entry


def _held_again(lives: Lifetimes, enters: Sequence[int], gap: Gap) -> tuple[tuple[int, int], ...]:
    """Positions, as inclusive ranges, at which a recomputed storage is back before its use.

    It comes back when backward enters a block that used it.
    """
    entries = [enters[use] for use in lives.uses[gap.storage] if use <= gap.start]
    entry = min((entry for entry in entries if gap.start < entry < gap.end), default=gap.end)
    return ((entry, gap.end - 1),) if entry < gap.end else ()


def _sources(graph: StepGraph, lives: Lifetimes, again: Sequence[int]) -> tuple[int, ...]:
    """Storages that operations which run again read and do not make."""
    inside = set(again)
    read = dict.fromkeys(source for op in again for source in graph.op_reads[op])
    made = ((source, lives.producer[source]) for source in read)
    return tuple(source for source, op in made if op is not None and op not in inside)


def _surely_recomputed(graph: StepGraph, lives: Lifetimes, gap: Gap, producer: int) -> list[int]:
    """Operations that run again in every plan that drops a storage over a gap, its producer first.

    What nothing uses behind the gap's start is gone then, and is there again only while the storage is recomputed.
    """
    again = [producer]
    seen = {producer}
    for op in again:  # grows
        for source in graph.op_reads[op]:
            made = lives.producer[source]
            if made is not None and made not in seen and lives.uses[source][-1] <= gap.start:
                seen.add(made)
                again.append(made)
    return again


def _sharing(
    candidates: Sequence[Candidate], reruns: Sequence[Sequence[int]], seconds: Sequence[float]
) -> list[Candidate]:
    """Candidates with the seconds that recomputing each takes at least, however many are recomputed together.

    One run of an operation may serve all gaps that have a moment in common: each bears a part of its seconds, and all
    together no more than the whole.

    Args:
        reruns: Operations that run again for each candidate.
        seconds: Seconds of each operation.
    """
    users: dict[int, list[int]] = {}
    for index, again in enumerate(reruns):
        for op in again:
            users.setdefault(op, []).append(index)
    starts = np.array([each.gap.start for each in candidates], dtype=np.int64)
    ends = np.array([each.gap.end for each in candidates], dtype=np.int64)
    least_s = np.zeros(len(candidates))
    for op, indices in users.items():
        start, end = starts[indices], ends[indices]
        begun, over = np.sort(start).searchsorted(end, "left"), np.sort(end).searchsorted(start, "right")
        least_s[indices] += seconds[op] / (begun - over)  # of those begun before its end, but over by its start
    return [replace(each, own_recompute_s=own_s) for each, own_s in zip(candidates, least_s.tolist(), strict=True)]


def _version(graph: StepGraph, lives: Lifetimes, gap: Gap) -> tuple[int, int] | None:
    """Version of the storage that crosses the gap; None if a lower tier always has it: nothing writes it, or the host.

    What the host works on is in no tier but its memory.
    """
    writes = [u for u in lives.uses[gap.storage] if gap.storage in graph.op_writes[u]]
    count = sum(u <= gap.start for u in writes)
    lasting = gap.storage in graph.persistent
    if writes and (count or lasting) and writes[count - 1] in graph.on_host:
        return None
    if lasting:
        return (gap.storage, count % len(writes)) if writes else None
    return gap.storage, count


_GOLDEN = 0.6180339887498949


def fold(graph: StepGraph, candidates: Sequence[Candidate], most: int) -> Folding | None:
    """Group candidates into about ``most`` classes that are decided together.

    None if there are no more than ``most``.
    """
    if len(candidates) <= most:
        return None
    places, layers = _places(graph)
    keys: list[tuple[object, ...]] = []
    of: list[int] = []
    for candidate in candidates:
        gap = candidate.gap
        layer = layers[gap.start] if layers[gap.start] >= 0 else layers[gap.end]
        identity = gap.storage if layer < 0 else layers[gap.end] - layer
        version = None if candidate.version is None else candidate.version[1]
        keys.append(
            (places[gap.start], places[gap.end], identity, layer < 0, candidate.size_bytes, candidate.options, version)
        )
        of.append(layer)
    per_group = _layers_per_group(keys, of, most)
    numbers: dict[object, int] = {}
    class_of = [
        numbers.setdefault((key, layer // per_group), len(numbers)) for key, layer in zip(keys, of, strict=True)
    ]
    return seated(np.array(class_of), np.array(of))


def _layers_per_group(keys: Sequence[object], layers: Sequence[int], max_classes: int) -> int:
    """Layers in a group, so that classes are few enough; at least two, as there are too many candidates."""
    repeats = Counter(keys)
    alone = sum(count == 1 for count in repeats.values())
    shared = len(repeats) - alone
    groups = max(1, (max_classes - alone) // max(shared, 1))
    return max(2, -(-(max(layers) + 1) // groups))


def seated(class_of: np.ndarray, layers: np.ndarray) -> Folding:
    """Seat the members of each class by multiples of the golden ratio, so that any first part is spread evenly.

    Args:
        class_of: [candidate]: its class, numbered from 0.
        layers: [candidate]: number by which the members of a class follow one another.
    """
    order = np.lexsort((layers, (layers * _GOLDEN) % 1.0, class_of))
    sizes = np.bincount(class_of)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    seat = np.empty(len(class_of), dtype=np.int64)
    seat[order] = np.arange(len(order)) - first[class_of[order]]
    return Folding(class_of, seat, sizes[class_of])


def _places(graph: StepGraph) -> tuple[list[tuple[str, Phase, int]], list[int]]:
    """Place each operation: its list of blocks, phase and number within its block.

    And its block's number (-1: none).
    """
    counts: Counter[tuple[str, Phase]] = Counter()
    places: list[tuple[str, Phase, int]] = []
    layers: list[int] = []
    for op, item in zip(graph.ops, block_items(graph.ops), strict=True):
        name, _, layer = item.rpartition(".")
        places.append((name, op.phase, counts[item, op.phase]))
        counts[item, op.phase] += 1
        layers.append(int(layer) if item else -1)
    return places, layers
