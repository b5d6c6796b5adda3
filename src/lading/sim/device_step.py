"""Device step: a step of one device from its Program: each action priced, and run beside what shares its tiers.

Operations last what the cost model says, and longer while a tier transfers, in proportion to its rate
(``read_slowdown`` and ``write_slowdown`` of ``lading.ir.machine.Tier``), or prepares to (``latency_slowdown``). A move
waits for the tier's latency and then transfers its bytes; while a tier's two directions transfer at once each gets its
mixed rate, or less where its moves are smaller than a turn (``Tier.rates_together``), and tiers on one wire that
transfer in the same direction share it (``lading.ir.machine.fair_share``), so what remains of a transfer is timed again
whenever one of those starts or stops. Same Program, same Machine: same Timeline, to the bit.

[Note: processors of ranks] Where ranks are processes of one host, its processors are shared: computing and a collective
beside it take longer both (``lading.cost.compute.slower_beside``), and kernels take as long as they do among as many
processes as compute at the moment (``crowding``): all of them where ranks do the same, fewer along a pipeline.

Operations on the host run beside the device's, slower by as much as the transfers of the moment take of the memory
they share: a byte moved counts against the host's memory bandwidth once where the tier is that memory, or the move ends
or begins there, else twice, as its bytes go through it to the device. A move between the host's memory and a tier
behind it takes that tier's bandwidth and no wire of the device's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

from lading.catalog.load import as_machine
from lading.cost.compute import crowding, placed_costs, slower_beside
from lading.cost.hosting import caller_seconds
from lading.errors import SimulationError, check_type
from lading.ir.action import CALLER, DEVICE, ActionKind
from lading.ir.machine import Machine, Tier, fair_share, wire_of, wires
from lading.ir.opkinds import PRODUCT_KINDS
from lading.ir.program import (
    COMPUTE,
    COMPUTE_STREAM,
    HOST_STREAM,
    NETWORK,
    RUNS_OP,
    Program,
    operation_streams,
    transfer_of,
)
from lading.ir.timeline import Event, Timeline
from lading.memory.staircase import memory_samples
from lading.sim.engine import StreamRun, deadlock


def simulate(
    program: Program,
    machine: Machine | str | Path,
    *,
    op_seconds: Sequence[float] | None = None,
    left_out: Set[int] = frozenset(),
    longer_s: Mapping[int, float] = MappingProxyType({}),
) -> Timeline:
    """Predict what one step of ``program`` does on ``machine``, alone and from an idle start.

    Args:
        program: Verified (see ``lading.memory.verify``).
        machine: A name of the catalog ("h100"), the path of a machine file, or a ``lading.Machine``.
        op_seconds: Seconds of each operation of the graph; by default what ``placed_costs`` says of the machine.
        left_out: Actions that take no time, as experts got no token (``lading.memory.guards.Guards.left_out``).
        longer_s: Seconds that actions of operations take longer, as the host waits for what they make; of those left
            out, the seconds that the host computes in their place (``lading.memory.hosted_experts``).
    Returns:
        A "predicted" timeline with an event for every action (of no length for a FREE), one memory sample for each
        change of the device's bytes, by role, and one for each lower tier, whose slots are taken throughout.
    Raises:
        ConfigError: no such machine, or no Program.
        SimulationError: an action has no cost, no tier or can never start.
    Ignores: scratch of an operation in the samples (``peak_bytes`` has it).
    """
    check_type("program", program, Program, "a lading.Program, such as trainer.program")
    return _timeline(program, _run_tiers(program, _Costs(program, as_machine(machine), op_seconds, left_out, longer_s)))


def _timeline(program: Program, run: StreamRun, base: int = 0) -> Timeline:
    """Timeline of the device whose first action is numbered ``base`` in a run."""
    actions = program.ranks[0]
    by_id = [
        Event(0, actions.streams[stream], number, run.starts[base + number], run.ends[base + number])
        for number, stream in enumerate(actions.stream)
    ]
    return Timeline(
        source="predicted",
        events=tuple(sorted(by_id, key=lambda event: event.start_s)),
        memory=memory_samples(program, by_id, {}, overhead_bytes=program.overhead_bytes),
        labels={action.id: program.label(action) for action in program.actions},
        peak_bytes=program.predicted_bytes,
    )


def step_times(
    program: Program,
    machine: Machine,
    *,
    op_seconds: Sequence[float] | None = None,
    left_out: Set[int] = frozenset(),
    longer_s: Mapping[int, float] = MappingProxyType({}),
) -> tuple[float, Sequence[float]]:
    """``duration_s`` of what ``simulate`` says and when each action starts, without the timeline.

    Raises:
        SimulationError: as ``simulate``.
    """
    run = _run_tiers(program, _Costs(program, machine, op_seconds, left_out, longer_s))
    return max(run.ends, default=0.0), run.starts


def _run_tiers(program: Program, costs: _Costs) -> StreamRun:
    actions = program.ranks[0]
    queues: list[list[int]] = [[] for _ in actions.streams]
    for number, stream in enumerate(actions.stream):
        queues[stream].append(number)
    count = len(actions)
    if max(map(max, filter(None, actions.waits)), default=-1) >= count:
        raise deadlock(
            program, [number for number, waits in enumerate(actions.waits) if max(waits, default=-1) >= count]
        )
    seconds = [costs.fixed_s(number) for number in range(count)]
    run = StreamRun(queues, actions.waits, seconds, [kind is not ActionKind.FREE for kind in actions.kind])
    if stuck := run.run(_TierResources(costs, seconds)):
        raise deadlock(program, stuck)
    return run


def straggler_step_s(programs: Sequence[Program], machine: Machine, factor: float) -> list[float]:
    """Predict the seconds of a step of ranks of which one computes ``factor`` times as long, for each that it may be.

    Args:
        programs: Program of each rank that has one of its own; the only one where all ranks run the same, which wait
            for the slow one in every collective.
    """
    plain = [placed_costs(program.graph, machine) for program in programs]
    slow = [
        [seconds if op in program.graph.collectives else seconds * factor for op, seconds in enumerate(each)]
        for program, each in zip(programs, plain, strict=True)
    ]
    if len(programs) == 1:
        return [job_step_s(programs, machine, slow)]
    steps = [[*plain[:rank], slow[rank], *plain[rank + 1 :]] for rank in range(len(programs))]
    return [job_step_s(programs, machine, each) for each in steps]


def job_step_s(programs: Sequence[Program], machine: Machine, op_seconds: Sequence[Sequence[float]] = ()) -> float:
    """Predict the seconds of a step of all ranks.

    Args:
        programs: Program of each rank that has one of its own; the only one where all ranks run the same.
        op_seconds: As of ``simulate_ranks``.
    """
    if len(programs) == 1:
        return simulate(programs[0], machine, op_seconds=op_seconds[0] if op_seconds else None).duration_s
    return max(timeline.duration_s for timeline in simulate_ranks(programs, machine, op_seconds))


def simulate_ranks(
    programs: Sequence[Program], machine: Machine, op_seconds: Sequence[Sequence[float]] = ()
) -> list[Timeline]:
    """Predict one step of ranks that send to each other, each on a device of its own.

    Args:
        programs: Program of each rank, at the grain of kernels.
        op_seconds: Seconds of the operations of each; by default what ``placed_costs`` says of the machine.
    Returns:
        Timeline of each, as ``simulate``; the last end is that of the step.
    Raises:
        SimulationError: as ``simulate``; or a rank receives what no other sends.
    """
    each_s = op_seconds or [None] * len(programs)
    costs = [_Costs(program, machine, seconds) for program, seconds in zip(programs, each_s, strict=True)]
    bases = [0, *accumulate(len(cost.actions) for cost in costs)]
    queues: list[list[int]] = []
    firsts: list[int] = []
    for cost, base in zip(costs, bases, strict=False):
        firsts.append(len(queues))
        queues += [[] for _ in cost.actions.streams]
        for number, stream in enumerate(cost.actions.stream):
            queues[firsts[-1] + stream].append(base + number)
    waits = [
        tuple(base + wait for wait in each)
        for cost, base in zip(costs, bases, strict=False)
        for each in cost.actions.waits
    ]
    seconds = [cost.fixed_s(number) for cost in costs for number in range(len(cost.actions))]
    for received, sent in _pairs(costs, bases):
        waits[received], seconds[received] = (*waits[received], sent), 0.0
    shared = [kind is not ActionKind.FREE for cost in costs for kind in cost.actions.kind]
    run = StreamRun(queues, waits, seconds, shared)
    parts = [_TierResources(cost, seconds[base:]) for cost, base in zip(costs, bases, strict=False)]
    if stuck := run.run(_Devices(parts, bases, firsts, costs[0].processes)):
        first = min(stuck)
        rank = bisect_right(bases, first) - 1
        raise deadlock(programs[rank], [first - bases[rank]])
    return [_timeline(program, run, base) for program, base in zip(programs, bases, strict=False)]


def _pairs(costs: Sequence[_Costs], bases: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each RECV with the SEND of its peer, numbered over all ranks."""
    boxes: dict[tuple[object, ...], deque[int]] = {}
    received: list[tuple[int, tuple[object, ...]]] = []
    for rank, (cost, base) in enumerate(zip(costs, bases, strict=False)):
        for number, kind in enumerate(cost.actions.kind):
            if kind in (ActionKind.SEND, ActionKind.RECV):
                facts = dict(cost.graph.ops[cost.actions.op[number]].kwargs)
                if kind is ActionKind.SEND:
                    boxes.setdefault((rank, facts["peer"], facts["tag"]), deque()).append(base + number)
                else:
                    received.append((base + number, (facts["peer"], rank, facts["tag"])))
    for action, key in received:
        if not boxes.get(key):
            raise SimulationError(f"rank {key[1]}: no rank sends what action {action} receives from rank {key[0]}")
        yield action, boxes[key].popleft()


class _Devices:
    """Tiers of several devices; actions and streams are numbered one device after another.

    ``processes``: Of one host, all that these devices stand for; 1 where devices are no such processes.
    """

    def __init__(
        self, parts: Sequence[_TierResources], bases: Sequence[int], firsts: Sequence[int], processes: int
    ) -> None:
        self._parts, self._bases, self._firsts, self._processes = parts, bases, firsts, processes

    def begin(self, action: int, stream: int, start_s: float) -> None:
        """Start an action on its device."""
        device = bisect_right(self._firsts, stream) - 1
        self._parts[device].begin(action - self._bases[device], stream - self._firsts[device], start_s)
        self._count_computing(start_s)

    def advance(self) -> Sequence[tuple[int, float]]:
        """Go on to the next end on any device."""
        while (next_s := min(part.next_s() for part in self._parts)) < float("inf"):
            device = next(d for d, part in enumerate(self._parts) if part.next_s() == next_s)
            if ended := self._parts[device].go_on():
                self._count_computing(next_s)
                return [(self._firsts[device] + stream, end_s) for stream, end_s in ended]
        return ()

    def _count_computing(self, now_s: float) -> None:
        """Let all operations under way take as long as among the devices that compute now."""
        if self._processes > 1:
            computing = sum(part.computes for part in self._parts) * self._processes // len(self._parts)
            for part in self._parts:
                part.among(max(1, computing), now_s)


def stall_s(timeline: Timeline, program: Program) -> float:
    """Seconds of the step, to the end of its last action, in which the compute stream runs nothing.

    Args:
        timeline: Predicted or measured, of ``program``.
    """
    actions = program.actions
    busy = sum(e.end_s - e.start_s for e in timeline.events if actions[e.action].stream == COMPUTE_STREAM)
    return max(0.0, timeline.duration_s - busy)


class _Costs:
    """Seconds of actions, and rates of those that share a tier."""

    def __init__(
        self,
        program: Program,
        machine: Machine,
        op_seconds: Sequence[float] | None,
        left_out: Set[int] = frozenset(),
        longer_s: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self._left_out, self._longer_s = left_out, longer_s
        if len(program.ranks) != 1 or not program.graph.storages:
            raise SimulationError(f"expected a Program of one device at the grain of kernels, got {program}")
        self.actions, self.graph = program.ranks[0], program.graph
        self._machine, self._host_tier = machine, machine.host_tier
        self._tiers = {tier.name: tier for tier in machine.tiers}
        self._wires = {tier.name: wire_of(shared) for shared in wires(machine.tiers) for tier in shared}
        self._storages = program.graph.storages
        #: Share by which computing, and each collective of the same processors, take longer beside each other.
        self.beside_collective = slower_beside(program.graph, machine)
        self.crowded = crowding(machine)
        self.skew_s = machine.processes.skew_s if machine.processes is not None else None
        self._ops = placed_costs(program.graph, machine) if op_seconds is None else op_seconds
        if len(self._ops) != len(program.graph.ops):
            raise SimulationError(f"expected {len(program.graph.ops)} op_seconds, one an op, got {len(self._ops)}")
        if bad := [i for i, seconds in enumerate(self._ops) if not 0 <= seconds < float("inf")]:
            raise SimulationError(f"expected finite op_seconds >= 0, got {self._ops[bad[0]]} for op {bad[0]}")

    def fixed_s(self, number: int) -> float:
        """Seconds of an action that shares nothing; of a move on a tier, its latency only."""
        kind, op = self.actions.kind[number], self.actions.op[number]
        if number in self._left_out:
            return self._longer_s.get(number, 0.0)
        if kind in RUNS_OP and op >= 0:
            return self._ops[op] + self._longer_s.get(number, 0.0)
        if kind is ActionKind.FREE:
            return 0.0
        if kind is ActionKind.MOVE and self.actions.storage[number] >= 0:
            if self.on_tier(number):
                return self.tier(number).latency_s
            return caller_seconds(self.size_bytes(number), self._machine.device)
        line = self.actions.action(number)
        raise SimulationError(f"action {number} [{line}] has no cost; expected an op, a MOVE or a FREE")

    def slower_beside(self, number: int) -> float:
        """Share by which computing and an action of the network take longer beside each other."""
        return self.beside_collective.get(self.actions.op[number], 0.0)

    def crowding(self, number: int) -> tuple[float, ...]:
        """Factors on an operation's seconds while 1, 2, ... processes of the host compute; () where that is unknown."""
        op = self.actions.op[number]
        return self.crowded[self.is_product(number)] if self.crowded and op >= 0 else ()

    def is_product(self, number: int) -> bool:
        """Whether an action runs a product."""
        op = self.actions.op[number]
        return op >= 0 and self.graph.ops[op].kind in PRODUCT_KINDS

    @property
    def processes(self) -> int:
        """Number of processes of the host among which operations are priced; 1 where that does not matter."""
        return len(self.crowded.get(True, (1.0,)))

    def on_tier(self, number: int) -> bool:
        """Whether an action is a move between the device and a lower tier."""
        return self.actions.kind[number] is ActionKind.MOVE and CALLER not in self.actions.routes[number]

    def size_bytes(self, number: int) -> int:
        """Bytes that a MOVE carries."""
        return 0 if number in self._left_out else self._storages[self.actions.storage[number]].size_bytes

    def reads(self, number: int) -> bool:
        """Whether a MOVE reads a tier's bytes, for the device or for the host's memory."""
        return transfer_of(self.actions.routes[number], self._host_tier)[1]

    def passes_device(self, number: int) -> bool:
        """Whether a MOVE goes between the host's memory and a tier behind it: over no link of the device."""
        return DEVICE not in self.actions.routes[number]

    def tier(self, number: int) -> Tier:
        """The lower tier of a MOVE, of two the one behind the host's memory."""
        name, _ = transfer_of(self.actions.routes[number], self._host_tier)
        tier = self._tiers.get(name)
        if tier is None:
            raise SimulationError(
                f"action {number} [{self.actions.action(number)}] needs tier {name!r}, which machine "
                f"{self._machine.name!r} has not; plan for this machine or add the tier to it"
            )
        return tier

    def wired(self, tier: str) -> tuple[str, ...]:
        """Tiers on the wire of a tier, itself included."""
        wire = self._tiers[tier].wire
        return tuple(name for name, other in self._tiers.items() if other.wire == wire) if wire else (tier,)

    def wire_bytes_per_s(self, tier: str, *, read: bool, both: bool) -> float:
        """Bytes/s that the wire of a tier carries in a direction, alone or beside the other direction."""
        wire = self._wires[tier]
        mixed = wire.mixed_read_bytes_per_s if read else wire.mixed_write_bytes_per_s
        return min(mixed, wire.alone_bytes_per_s(read=read)) if both else wire.alone_bytes_per_s(read=read)

    def host_share(self, number: int) -> float:
        """Share of the host's memory bandwidth that a byte/s of a MOVE takes."""
        host = self._machine.host_device
        if host is None:
            return 0.0
        once = self.tier(number).host_computes or self.passes_device(number)
        return (1 if once else 2) / host.memory_bandwidth_bytes_per_s

    def rate_beside(self, tier: str, size_bytes: int, other_bytes: int, *, read: bool) -> float:
        """Bytes/s of a move of ``size_bytes`` while one of ``other_bytes`` goes the other way on its tier."""
        served = self._tiers[tier]
        if read:
            return served.rates_together(size_bytes, other_bytes)[0]
        return served.rates_together(other_bytes, size_bytes)[1]


@dataclass(slots=True)
class _Transfer:
    """A move past its latency, and what remained of it at ``since_s``.

    ``alone_rate``: Bytes/s while nothing else transfers; ``rate`` at this moment. ``slowdown``: share by which other
    operations, and products, take longer beside it at its rate alone. ``wired``: the tiers on the wire of its tier,
    that included; ``passes_device``: whether it does not take that wire. ``host_share``: share of the host's memory
    bandwidth that a byte/s of it takes.
    """

    stream: int
    size_bytes: int
    remaining_bytes: float
    alone_rate: float
    slowdown: tuple[float, float]
    since_s: float
    wired: tuple[str, ...]
    passes_device: bool
    host_share: float
    rate: float = 0.0


@dataclass(slots=True)
class _Work:
    """An operation under way: seconds it still needs at full speed, and how much slower it runs since ``since_s``.

    ``product``: whether it is one. ``crowding``: as ``_Costs.crowding``.
    """

    remaining_s: float
    since_s: float
    slowdown: float
    product: bool
    crowding: tuple[float, ...] = ()


class _TierResources:
    """Tiers and the operations beside their transfers.

    A heap has (time, ticket, stream), tickets in order of issue; of a stream only the latest is expected, as what runs
    on it is timed again when others begin or end.
    """

    def __init__(self, costs: _Costs, seconds: Sequence[float]) -> None:
        self._costs, self._seconds = costs, seconds
        streams = costs.actions.streams
        operations = operation_streams(costs.graph)
        self._computing = [name in operations for name in streams]
        self._host = streams.index(HOST_STREAM) if HOST_STREAM in streams else -1
        self._heap: list[tuple[float, int, int]] = []
        self._tickets = 0
        self._expected: dict[int, int] = {}  # by stream, a ticket
        self._now_s = 0.0
        self._latency: dict[int, int] = {}  # by stream, the move that waits for its tier
        self._late: int | None = None  # the network's action that waits for the last rank
        self._met_s = 0.0  # when the network's last action ended
        self._moving: dict[int, tuple[str, bool]] = {}  # by stream
        self._transfers: dict[tuple[str, bool], _Transfer] = {}
        self._work: dict[int, _Work] = {}  # by stream
        self._beside = 0.0  # share that computing and the collective under way take longer beside each other
        self._crowd = 0  # processes that compute, where that is known; 0: as many as the operations are priced at

    def begin(self, action: int, stream: int, start_s: float) -> None:
        """Start an operation, or the latency of a move."""
        self._now_s = max(self._now_s, start_s)  # what it waited for may have ended on another device
        skew_s = self._costs.skew_s
        if stream == NETWORK and skew_s is not None and (late_s := skew_s(start_s - self._met_s)):
            self._late = action
            self._expect(start_s + late_s, stream)
        elif self._computing[stream]:
            self._begin_work(action, stream)
        else:
            self._latency[stream] = action
            self._expect(start_s + self._seconds[action], stream)
            if self._preparing(action):
                self._retime_work()

    def _begin_work(self, action: int, stream: int) -> None:
        if stream == NETWORK:
            self._beside = self._costs.slower_beside(action)
        crowding = self._costs.crowding(action) if stream == COMPUTE else ()
        product = self._costs.is_product(action)
        self._work[stream] = work = _Work(self._seconds[action], self._now_s, 0.0, product, crowding)
        work.slowdown = self._slowdown(stream)
        self._expect_work(stream, work)
        self._retime_beside_network(stream)

    def advance(self) -> Sequence[tuple[int, float]]:
        """Go on to the next end."""
        while self.next_s() < float("inf"):
            if ended := self.go_on():
                return ended
        return ()

    def next_s(self) -> float:
        """When something begins or ends next; infinite if nothing runs."""
        while self._heap and self._expected[self._heap[0][2]] != self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def go_on(self) -> Sequence[tuple[int, float]]:
        """Go on to when something begins or ends next; the stream whose action ends then, and when."""
        time_s, _, stream = heappop(self._heap)
        self._now_s = time_s
        if stream in self._latency:
            self._begin_transfer(stream, self._latency.pop(stream))
            return ()
        if stream == NETWORK and self._late is not None:
            action, self._late = self._late, None
            self._begin_work(action, stream)
            return ()
        if stream in self._moving:
            self._end_transfer(stream)
        else:
            del self._work[stream]
            self._retime_beside_network(stream)
            if stream == NETWORK:
                self._beside, self._met_s = 0.0, time_s
        return ((stream, time_s),)

    @property
    def computes(self) -> bool:
        """Whether the compute stream runs an operation."""
        return COMPUTE in self._work

    def among(self, crowd: int, now_s: float) -> None:
        """Let operations take as long as while so many processes compute, from now on."""
        self._now_s = max(self._now_s, now_s)
        if crowd != self._crowd:
            self._crowd = crowd
            self._retime_work()

    def _slowdown(self, stream: int) -> float:
        """Share by which an operation takes longer beside what else runs at this moment."""
        running = self._transfers
        if stream == self._host:
            return sum(moving.rate * moving.host_share for moving in running.values())
        other = {COMPUTE: NETWORK, NETWORK: COMPUTE}.get(stream, -1)
        extra_share = self._beside if other in self._work else 0.0
        if stream == NETWORK:
            return extra_share
        product = self._work[stream].product
        extra_share += sum(moving.slowdown[product] * moving.rate / moving.alone_rate for moving in running.values())
        extra_share += sum(map(self._preparing, self._latency.values()))
        crowding = self._work[stream].crowding
        return (1.0 + extra_share) * crowding[self._crowd - 1] - 1.0 if crowding and self._crowd else extra_share

    def _preparing(self, action: int) -> float:
        """Share by which computing takes longer while a move waits for its tier; 0 for one on no tier."""
        return self._costs.tier(action).latency_slowdown if self._costs.on_tier(action) else 0.0

    def _expect_work(self, stream: int, work: _Work) -> None:
        self._expect(self._now_s + work.remaining_s * (1.0 + work.slowdown), stream)

    def _retime_beside_network(self, stream: int) -> None:
        """Time again a collective, or what it runs beside, as the other of them began or ended on ``stream``."""
        other = {COMPUTE: NETWORK, NETWORK: COMPUTE}.get(stream, -1)
        if self._beside and other in self._work:
            self._retime(other, self._work[other])

    def _retime_work(self) -> None:
        """Time operations under way again, as what runs beside them has changed."""
        for stream, work in self._work.items():
            self._retime(stream, work)

    def _retime(self, stream: int, work: _Work) -> None:
        slowdown = self._slowdown(stream)
        if work.slowdown == slowdown:
            return
        done_s = (self._now_s - work.since_s) / (1.0 + work.slowdown)
        work.remaining_s, work.since_s, work.slowdown = max(0.0, work.remaining_s - done_s), self._now_s, slowdown
        self._expect_work(stream, work)

    def _expect(self, time_s: float, stream: int) -> None:
        self._tickets += 1
        self._expected[stream] = self._tickets
        heappush(self._heap, (time_s, self._tickets, stream))

    def _begin_transfer(self, stream: int, action: int) -> None:
        costs = self._costs
        served, read, size_bytes = costs.tier(action), costs.reads(action), costs.size_bytes(action)
        tier = served.name
        alone = served.alone_bytes_per_s(read=read)
        slowdown = served.slowdown(read=read, product=False), served.slowdown(read=read, product=True)
        past, share = costs.passes_device(action), costs.host_share(action)
        transfer = _Transfer(
            stream, size_bytes, size_bytes, alone, slowdown, self._now_s, costs.wired(tier), past, share
        )
        self._transfers[tier, read], self._moving[stream] = transfer, (tier, read)
        transfer.rate = self._rate(tier, read)
        self._expect_transfer(transfer)
        self._retime_beside(tier, read, transfer)
        self._retime_work()

    def _end_transfer(self, stream: int) -> None:
        tier, read = self._moving.pop(stream)
        self._retime_beside(tier, read, self._transfers.pop((tier, read)))
        self._retime_work()

    def _rate(self, tier: str, read: bool) -> float:
        """Bytes/s of a transfer beside the others of this moment."""
        rate = self._rate_of_tier(tier, read)
        transfer = self._transfers[tier, read]
        wired = transfer.wired
        if len(wired) == 1 or transfer.passes_device:
            return rate
        others = [self._rate_of_tier(name, read) for name in wired if name != tier and self._on_wire(name, read)]
        both = any(self._on_wire(name, not read) for name in wired)
        return fair_share(rate, others, self._costs.wire_bytes_per_s(tier, read=read, both=both))

    def _on_wire(self, tier: str, read: bool) -> bool:
        """Whether a tier transfers in a direction over the wire that it shares with others."""
        transfer = self._transfers.get((tier, read))
        return transfer is not None and not transfer.passes_device

    def _rate_of_tier(self, tier: str, read: bool) -> float:
        """Bytes/s of a transfer beside the other direction of its tier."""
        transfer, other = self._transfers[tier, read], self._transfers.get((tier, not read))
        if other is None:
            return transfer.alone_rate
        return self._costs.rate_beside(tier, transfer.size_bytes, other.size_bytes, read=read)

    def _retime_beside(self, tier: str, read: bool, transfer: _Transfer) -> None:
        """Time again what a transfer that began or ended shares its tier or its wire with."""
        for key in ((name, way) for name in transfer.wired for way in (not read, read)):
            if key != (tier, read) and key in self._transfers:
                self._retime_transfer(*key)

    def _retime_transfer(self, tier: str, read: bool) -> None:
        transfer = self._transfers[tier, read]
        done_bytes = (self._now_s - transfer.since_s) * transfer.rate
        transfer.remaining_bytes = max(0.0, transfer.remaining_bytes - done_bytes)
        transfer.since_s, transfer.rate = self._now_s, self._rate(tier, read)
        self._expect_transfer(transfer)

    def _expect_transfer(self, transfer: _Transfer) -> None:
        self._expect(self._now_s + transfer.remaining_bytes / transfer.rate, transfer.stream)
