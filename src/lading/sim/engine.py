"""Engine: runs a Program on a model of a Machine and writes down what would happen when.

Every stream takes its actions in order; an action starts when its stream is free and all it waits for has ended.
Operations last what the cost model says, and longer while a tier transfers, in proportion to its rate
(``read_slowdown`` and ``write_slowdown`` of ``lading.ir.machine.Tier``). A move waits for the tier's latency and then
transfers its bytes; while a tier's two directions transfer at once each gets its mixed rate, and tiers on one wire that
transfer in the same direction share it evenly, so what remains of a transfer is timed again whenever one of those
starts or stops. Same Program, same Machine: same Timeline, to the bit.

Operations on the host run beside the device's, slower by as much as the transfers of the moment take of the memory
they share: a byte moved counts against the host's memory bandwidth once where the tier is that memory, else twice, as
its bytes go through it to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from lading.catalog.load import as_machine
from lading.cost.compute import placed_costs
from lading.cost.transfer import caller_seconds
from lading.errors import SimulationError, check_type
from lading.ir.action import CALLER, DEVICE, Action, ActionKind
from lading.ir.machine import Machine, Tier
from lading.ir.program import COMPUTE_STREAM, HOST_STREAM, Program
from lading.ir.timeline import Event, Timeline
from lading.memory.staircase import memory_samples

_RUNS_OP = (ActionKind.COMPUTE, ActionKind.RECOMPUTE, ActionKind.STEP)


def simulate(program: Program, machine: Machine | str | Path, *, op_seconds: Sequence[float] | None = None) -> Timeline:
    """Predict what one step of ``program`` does on ``machine``, alone and from an idle start.

    Args:
        program: Verified (see ``lading.memory.verify``).
        machine: A name of the catalog ("h100"), the path of a machine file, or a ``lading.Machine``.
        op_seconds: Seconds of each operation of the graph; by default what ``placed_costs`` says of the machine.
    Returns:
        A "predicted" timeline with an event for every action (of no length for a FREE), one memory sample for each
        change of the device's bytes, by role, and one for each lower tier, whose slots are taken throughout.
    Raises:
        ConfigError: no such machine, or no Program.
        SimulationError: an action has no cost, no tier or can never start.
    Ignores: scratch of an operation in the samples (``peak_bytes`` has it).
    """
    check_type("program", program, Program, "a lading.Program, such as trainer.program")
    engine = _Engine(program, _Costs(program, as_machine(machine), op_seconds))
    engine.run()
    return engine.timeline()


def step_times(
    program: Program, machine: Machine, *, op_seconds: Sequence[float] | None = None
) -> tuple[float, Sequence[float]]:
    """``duration_s`` of what ``simulate`` says and when each action starts, without the timeline.

    Raises:
        SimulationError: as ``simulate``.
    """
    engine = _Engine(program, _Costs(program, machine, op_seconds))
    return engine.run(), engine.starts


def critical_path_s(program: Program, machine: Machine, *, op_seconds: Sequence[float] | None = None) -> float:
    """Seconds of the longest chain of actions, each following the one before on its stream or by a wait.

    A lower bound on the simulated step: every move has its tier's direction to itself.

    Raises:
        SimulationError: an action has no cost or no tier.
    """
    costs = _Costs(program, machine, op_seconds)
    ends: list[float] = []
    free_at: dict[str, float] = {}
    for action in program.actions:
        ready = max((ends[w] for w in action.waits), default=0.0)
        free_at[action.stream] = max(ready, free_at.get(action.stream, 0.0)) + costs.alone_s(action)
        ends.append(free_at[action.stream])
    return max(ends, default=0.0)


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

    def __init__(self, program: Program, machine: Machine, op_seconds: Sequence[float] | None) -> None:
        self._machine = machine
        self._tiers = {tier.name: tier for tier in machine.tiers}
        self._storages = program.graph.storages
        self._ops = placed_costs(program.graph, machine) if op_seconds is None else op_seconds
        if len(self._ops) != len(program.graph.ops):
            raise SimulationError(f"expected {len(program.graph.ops)} op_seconds, one an op, got {len(self._ops)}")
        if bad := [i for i, seconds in enumerate(self._ops) if not 0 <= seconds < float("inf")]:
            raise SimulationError(f"expected finite op_seconds >= 0, got {self._ops[bad[0]]} for op {bad[0]}")

    def fixed_s(self, action: Action) -> float:
        """Seconds of an action that shares nothing; of a move on a tier, its latency only."""
        if action.kind in _RUNS_OP and action.op is not None:
            return self._ops[action.op]
        if action.kind is ActionKind.FREE:
            return 0.0
        if action.kind is ActionKind.MOVE and action.storage is not None:
            if CALLER not in (action.source, action.target):
                return self.tier(action).latency_s
            return caller_seconds(self.size_bytes(action), self._machine.device)
        raise SimulationError(f"action {action.id} [{action}] has no cost; expected an op, a MOVE or a FREE")

    def alone_s(self, action: Action) -> float:
        """Least seconds of an action, with no other beside it."""
        if not _on_tier(action):
            return self.fixed_s(action)
        return self.fixed_s(action) + self.size_bytes(action) / max(self.rates(action))

    def size_bytes(self, action: Action) -> int:
        """Bytes a MOVE carries."""
        assert action.storage is not None
        return self._storages[action.storage].size_bytes

    def tier(self, action: Action) -> Tier:
        """The lower tier of a MOVE."""
        name = action.target if action.source == DEVICE else action.source
        tier = self._tiers.get(name)
        if tier is None:
            raise SimulationError(
                f"action {action.id} [{action}] needs tier {name!r}, which machine {self._machine.name!r} has not; "
                f"plan for this machine or add the tier to it"
            )
        return tier

    def slowdowns(self, action: Action) -> tuple[float, float]:
        """By how much longer an operation takes beside a MOVE alone on its tier, and while the other direction runs."""
        tier, (alone, shared) = self.tier(action), self.rates(action)
        most = tier.read_slowdown if action.target == DEVICE else tier.write_slowdown
        return most, most * shared / alone

    def wired(self, tier: str) -> tuple[str, ...]:
        """Tiers on the wire of a tier, itself included."""
        wire = self._tiers[tier].wire
        return tuple(name for name, other in self._tiers.items() if other.wire == wire) if wire else (tier,)

    def host_share(self, tier: str) -> float:
        """What a byte/s moved from or to a tier takes of the host's memory, as a share of all it can do."""
        host = self._machine.host_device
        if host is None:
            return 0.0
        return (1 if self._tiers[tier].host_computes else 2) / host.memory_bandwidth_bytes_per_s

    def rates(self, action: Action) -> tuple[float, float]:
        """Bytes/s of a MOVE on a tier alone, and while the other direction transfers."""
        tier = self.tier(action)
        if action.target == DEVICE:
            return tier.read_bytes_per_s, tier.mixed_read_bytes_per_s
        return tier.write_bytes_per_s, tier.mixed_write_bytes_per_s


def _on_tier(action: Action) -> bool:
    """Whether an action is a move between the device and a lower tier."""
    return action.kind is ActionKind.MOVE and CALLER not in (action.source, action.target)


@dataclass(slots=True)
class _Transfer:
    """A move past its latency: what remained at ``since_s``, and the ticket of its latest expected end.

    ``rates`` and ``slowdowns``: alone, and while the other direction of its tier runs. ``wired``: the tiers it shares
    its wire with, its own included.
    """

    action: int
    remaining_bytes: float
    rates: tuple[float, float]
    slowdowns: tuple[float, float]
    since_s: float
    wired: tuple[str, ...]
    rate: float = 0.0
    ticket: int = -1


@dataclass(slots=True)
class _Work:
    """An operation under way: seconds it still needs at full speed, and how much slower it runs since ``since_s``."""

    action: int
    remaining_s: float
    since_s: float
    slowdown: float
    ticket: int = -1


class _Engine:
    """The state of one run: a heap of (time, ticket, action), tickets in order of issue breaking ties."""

    def __init__(self, program: Program, costs: _Costs) -> None:
        self._program = program
        self._costs = costs
        self._actions = program.actions
        self._streams = program.streams
        self._host = self._streams.index(HOST_STREAM) if HOST_STREAM in self._streams else -1
        self._computing = {i for i, stream in enumerate(self._streams) if stream in (COMPUTE_STREAM, HOST_STREAM)}
        number = {stream: index for index, stream in enumerate(self._streams)}
        self._stream_of = [number[action.stream] for action in self._actions]
        self._queues: list[list[int]] = [[] for _ in self._streams]
        for action, stream in zip(self._actions, self._stream_of, strict=True):
            self._queues[stream].append(action.id)
        self._next = [0] * len(self._streams)
        self._busy = [False] * len(self._streams)
        self._heap: list[tuple[float, int, int]] = []
        self._tickets = 0
        self._now_s = 0.0
        self._started: list[int] = []
        self.starts = [0.0] * len(self._actions)
        self._ends: list[float | None] = [None] * len(self._actions)
        self._latency: set[int] = set()
        self._transfers: dict[tuple[str, bool], _Transfer] = {}
        self._work: dict[int, _Work] = {}  # by stream

    def run(self) -> float:
        """Run to the end; returns when the last action ended."""
        self._start_all()
        while self._heap:
            self._now_s, ticket, action = heappop(self._heap)
            if action in self._latency:
                self._latency.remove(action)
                self._begin_transfer(action)
            elif self._has_ended(action, ticket):
                self._end(action)
                self._start_all()
        self._check_all_ended()
        return max((end for end in self._ends if end is not None), default=0.0)

    def _start_all(self) -> None:
        """Start what can start now; an action of no length ends at once and may let others start."""
        ends, busy, following, actions = self._ends, self._busy, self._next, self._actions
        count = len(ends)
        progress = True
        while progress:
            progress = False
            for stream, queue in enumerate(self._queues):
                while not busy[stream] and following[stream] < len(queue):
                    action = actions[queue[following[stream]]]
                    for wait in action.waits:
                        if not 0 <= wait < count or ends[wait] is None:
                            break
                    else:
                        self._start(action, stream)
                        progress = True
                        continue
                    break

    def _start(self, action: Action, stream: int) -> None:
        self._next[stream] += 1
        self.starts[action.id] = self._now_s
        self._started.append(action.id)
        if action.kind is ActionKind.FREE:
            self._ends[action.id] = self._now_s
            return
        self._busy[stream] = True
        if stream in self._computing:
            work = _Work(action.id, self._costs.fixed_s(action), self._now_s, self._slowdown(stream))
            self._work[stream] = work
            self._expect_work(work)
            return
        self._latency.add(action.id)
        self._push(self._now_s + self._costs.fixed_s(action), action.id)

    def _slowdown(self, stream: int) -> float:
        """How much longer an operation takes beside the transfers of this moment."""
        if not self._transfers:
            return 0.0
        running = self._transfers
        if stream == self._host:
            return sum(moving.rate * self._costs.host_share(tier) for (tier, _), moving in running.items())
        return sum(
            moving.slowdowns[(tier, not read) in running] / self._sharing(moving, read)
            for (tier, read), moving in running.items()
        )

    def _sharing(self, transfer: _Transfer, read: bool) -> int:
        """How many tiers transfer over its wire in its direction now."""
        return sum((tier, read) in self._transfers for tier in transfer.wired) if len(transfer.wired) > 1 else 1

    def _expect_work(self, work: _Work) -> None:
        work.ticket = self._push(self._now_s + work.remaining_s * (1.0 + work.slowdown), work.action)

    def _retime_work(self) -> None:
        """The set of transfers has changed: the operations under way get faster or slower."""
        for stream, work in self._work.items():
            slowdown = self._slowdown(stream)
            if work.slowdown == slowdown:
                continue
            done_s = (self._now_s - work.since_s) / (1.0 + work.slowdown)
            work.remaining_s, work.since_s, work.slowdown = max(0.0, work.remaining_s - done_s), self._now_s, slowdown
            self._expect_work(work)

    def _has_ended(self, action: int, ticket: int) -> bool:
        """Whether this expectation still holds: what was timed again since ends another time."""
        stream = self._stream_of[action]
        if stream not in self._computing:
            return self._end_transfer(self._actions[action], ticket)
        work = self._work.get(stream)
        if work is None or work.ticket != ticket:
            return False
        del self._work[stream]
        return True

    def _push(self, time_s: float, action: int) -> int:
        self._tickets += 1
        heappush(self._heap, (time_s, self._tickets, action))
        return self._tickets

    def _end(self, action: int) -> None:
        self._busy[self._stream_of[action]] = False
        self._ends[action] = self._now_s

    def _begin_transfer(self, action_id: int) -> None:
        action = self._actions[action_id]
        tier, read = self._costs.tier(action).name, action.target == DEVICE
        rates, slowdowns = self._costs.rates(action), self._costs.slowdowns(action)
        transfer = _Transfer(
            action_id, self._costs.size_bytes(action), rates, slowdowns, self._now_s, self._costs.wired(tier)
        )
        self._transfers[tier, read] = transfer
        transfer.rate = self._rate(tier, read)
        self._expect(transfer)
        self._retime_beside(tier, read, transfer)
        self._retime_work()

    def _end_transfer(self, action: Action, ticket: int) -> bool:
        """End a transfer unless it was timed again since ``ticket``."""
        tier, read = self._costs.tier(action).name, action.target == DEVICE
        transfer = self._transfers.get((tier, read))
        if transfer is None or transfer.ticket != ticket:
            return False
        del self._transfers[tier, read]
        self._retime_beside(tier, read, transfer)
        self._retime_work()
        return True

    def _rate(self, tier: str, read: bool) -> float:
        """Bytes/s of a transfer beside the others of this moment."""
        transfer = self._transfers[tier, read]
        return transfer.rates[(tier, not read) in self._transfers] / self._sharing(transfer, read)

    def _retime_beside(self, tier: str, read: bool, transfer: _Transfer) -> None:
        """Time again what a transfer that began or ended shares its tier or its wire with."""
        for key in ((tier, not read), *((other, read) for other in transfer.wired if other != tier)):
            if key in self._transfers:
                self._retime(*key)

    def _retime(self, tier: str, read: bool) -> None:
        transfer = self._transfers[tier, read]
        done_bytes = (self._now_s - transfer.since_s) * transfer.rate
        transfer.remaining_bytes = max(0.0, transfer.remaining_bytes - done_bytes)
        transfer.since_s, transfer.rate = self._now_s, self._rate(tier, read)
        self._expect(transfer)

    def _expect(self, transfer: _Transfer) -> None:
        transfer.ticket = self._push(self._now_s + transfer.remaining_bytes / transfer.rate, transfer.action)

    def _check_all_ended(self) -> None:
        waiting = [(q, n) for q, n in zip(self._queues, self._next, strict=True) if n < len(q)]
        stuck = [self._actions[queue[position]] for queue, position in waiting]
        if stuck:
            lines = "; ".join(f"action {a.id} [{a}]" for a in stuck)
            raise SimulationError(f"deadlock at {self._now_s} s: none of these can start: {lines}; verify the Program")

    def timeline(self) -> Timeline:
        """What the run did."""
        events: list[Event] = []
        for index in self._started:
            end_s = self._ends[index]
            assert end_s is not None
            events.append(Event(0, self._actions[index].stream, index, self.starts[index], end_s))
        by_id = sorted(events, key=lambda event: event.action)
        return Timeline(
            source="predicted",
            events=tuple(events),
            memory=memory_samples(self._program, by_id, {}, overhead_bytes=self._program.overhead_bytes),
            labels={action.id: self._program.label(action) for action in self._actions},
            peak_bytes=self._program.predicted_bytes,
        )
