"""Engine: runs a Program on a model of a Machine and writes down what would happen when.

Every stream takes its actions in order; an action starts when its stream is free and all it waits for has ended.
Operations last what the cost model says. A move waits for the tier's latency and then transfers its bytes; while a
tier's two directions transfer at once each gets its mixed rate, so what remains of a transfer is timed again whenever
the other direction starts or stops. Same Program, same Machine: same Timeline, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from lading.cost.compute import op_costs
from lading.errors import SimulationError
from lading.ir.action import CALLER, Action, ActionKind
from lading.ir.machine import Machine, Tier
from lading.ir.program import COMPUTE_STREAM, Program
from lading.ir.timeline import Event, Timeline
from lading.memory.staircase import memory_samples

_DEVICE = "device"
_RUNS_OP = (ActionKind.COMPUTE, ActionKind.RECOMPUTE, ActionKind.STEP)


def simulate(program: Program, machine: Machine, *, op_seconds: Sequence[float] | None = None) -> Timeline:
    """What one step of ``program`` does on ``machine``, alone and from an idle start.

    Args:
        program: Verified (see ``lading.memory.verify``).
        op_seconds: Seconds of each operation of the graph; by default what ``op_costs`` says of the machine's device.
    Returns:
        A "predicted" timeline with an event for every action (of no length for a FREE), one memory sample for each
        change of the device's bytes, by role, and one for each lower tier, whose slots are taken throughout.
    Raises:
        SimulationError: an action has no cost, no tier or can never start.
    Ignores: scratch of an operation in the samples (``peak_bytes`` has it).
    """
    return _Engine(program, _Costs(program, machine, op_seconds)).run()


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
        self._storages = program.graph.storages
        self._ops = op_costs(program.graph, machine.device) if op_seconds is None else op_seconds
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
            device = self._machine.device
            return device.op_overhead_s + self.size_bytes(action) / device.memory_bandwidth_bytes_per_s
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
        name = action.target if action.source == _DEVICE else action.source
        tier = self._machine.tier(name)
        if tier is None:
            raise SimulationError(
                f"action {action.id} [{action}] needs tier {name!r}, which machine {self._machine.name!r} has not; "
                f"plan for this machine or add the tier to it"
            )
        return tier

    def slowdown(self, tier: str) -> float:
        """By how much longer an operation takes while the tier is busy."""
        found = self._machine.tier(tier)
        return 0.0 if found is None else found.compute_slowdown

    def rates(self, action: Action) -> tuple[float, float]:
        """Bytes/s of a MOVE on a tier alone, and while the other direction transfers."""
        tier = self.tier(action)
        if action.target == _DEVICE:
            return tier.read_bytes_per_s, tier.mixed_read_bytes_per_s
        return tier.write_bytes_per_s, tier.mixed_write_bytes_per_s


def _on_tier(action: Action) -> bool:
    """Whether an action is a move between the device and a lower tier."""
    return action.kind is ActionKind.MOVE and CALLER not in (action.source, action.target)


@dataclass(slots=True)
class _Transfer:
    """A move past its latency: what remained at ``since_s``, and the ticket of its latest expected end."""

    action: Action
    remaining_bytes: float
    rates: tuple[float, float]
    since_s: float
    rate: float
    ticket: int = -1


@dataclass(slots=True)
class _Work:
    """An operation under way: seconds it still needs at full speed, and how much slower it runs since ``since_s``."""

    action: Action
    remaining_s: float
    since_s: float
    slowdown: float
    ticket: int = -1


class _Engine:
    """The state of one run: a heap of (time, ticket, action), tickets in order of issue breaking ties."""

    def __init__(self, program: Program, costs: _Costs) -> None:
        self._program = program
        self._costs = costs
        self._queues: dict[str, list[Action]] = {stream: [] for stream in program.streams}
        for action in program.actions:
            self._queues[action.stream].append(action)
        self._next = dict.fromkeys(self._queues, 0)
        self._busy = dict.fromkeys(self._queues, False)
        self._heap: list[tuple[float, int, int]] = []
        self._tickets = 0
        self._now_s = 0.0
        self._started: list[int] = []
        self._starts = [0.0] * len(program.actions)
        self._ends: list[float | None] = [None] * len(program.actions)
        self._latency: set[int] = set()
        self._transfers: dict[tuple[str, bool], _Transfer] = {}
        self._work: _Work | None = None

    def run(self) -> Timeline:
        self._start_all()
        while self._heap:
            self._now_s, ticket, action_id = heappop(self._heap)
            action = self._program.actions[action_id]
            if action_id in self._latency:
                self._latency.remove(action_id)
                self._begin_transfer(action)
            elif self._has_ended(action, ticket):
                self._end(action)
                self._start_all()
        self._check_all_ended()
        return self._timeline()

    def _start_all(self) -> None:
        """Start what can start now; an action of no length ends at once and may let others start."""
        progress = True
        while progress:
            progress = False
            for stream, queue in self._queues.items():
                while not self._busy[stream] and self._next[stream] < len(queue):
                    action = queue[self._next[stream]]
                    if not self._ready(action):
                        break
                    self._start(action)
                    progress = True

    def _ready(self, action: Action) -> bool:
        return all(0 <= w < len(self._ends) and self._ends[w] is not None for w in action.waits)

    def _start(self, action: Action) -> None:
        self._busy[action.stream] = True
        self._next[action.stream] += 1
        self._starts[action.id] = self._now_s
        self._started.append(action.id)
        if action.kind is ActionKind.FREE:
            self._end(action)
            return
        if action.stream == COMPUTE_STREAM:
            self._work = _Work(action, self._costs.fixed_s(action), self._now_s, self._slowdown())
            self._expect_work(self._work)
            return
        self._latency.add(action.id)
        self._push(self._now_s + self._costs.fixed_s(action), action)

    def _slowdown(self) -> float:
        """How much longer an operation takes beside the transfers of this moment."""
        return sum(self._costs.slowdown(tier) for tier in {tier for tier, _ in self._transfers})

    def _expect_work(self, work: _Work) -> None:
        work.ticket = self._push(self._now_s + work.remaining_s * (1.0 + work.slowdown), work.action)

    def _retime_work(self) -> None:
        """The set of transfers has changed: the operation under way gets faster or slower."""
        work, slowdown = self._work, self._slowdown()
        if work is None or work.slowdown == slowdown:
            return
        done_s = (self._now_s - work.since_s) / (1.0 + work.slowdown)
        work.remaining_s, work.since_s, work.slowdown = max(0.0, work.remaining_s - done_s), self._now_s, slowdown
        self._expect_work(work)

    def _has_ended(self, action: Action, ticket: int) -> bool:
        """Whether this expectation still holds: what was timed again since ends another time."""
        if action.stream != COMPUTE_STREAM:
            return self._end_transfer(action, ticket)
        if self._work is None or self._work.ticket != ticket:
            return False
        self._work = None
        return True

    def _push(self, time_s: float, action: Action) -> int:
        self._tickets += 1
        heappush(self._heap, (time_s, self._tickets, action.id))
        return self._tickets

    def _end(self, action: Action) -> None:
        self._busy[action.stream] = False
        self._ends[action.id] = self._now_s

    def _begin_transfer(self, action: Action) -> None:
        tier, read = self._costs.tier(action).name, action.target == _DEVICE
        other = self._transfers.get((tier, not read))
        rates = self._costs.rates(action)
        transfer = _Transfer(action, self._costs.size_bytes(action), rates, self._now_s, rates[other is not None])
        self._transfers[tier, read] = transfer
        self._expect(transfer)
        if other is not None:
            self._retime(other, shared=True)
        self._retime_work()

    def _end_transfer(self, action: Action, ticket: int) -> bool:
        """End a transfer unless it was timed again since ``ticket``."""
        tier, read = self._costs.tier(action).name, action.target == _DEVICE
        transfer = self._transfers.get((tier, read))
        if transfer is None or transfer.ticket != ticket:
            return False
        del self._transfers[tier, read]
        if (other := self._transfers.get((tier, not read))) is not None:
            self._retime(other, shared=False)
        self._retime_work()
        return True

    def _retime(self, transfer: _Transfer, *, shared: bool) -> None:
        done_bytes = (self._now_s - transfer.since_s) * transfer.rate
        transfer.remaining_bytes = max(0.0, transfer.remaining_bytes - done_bytes)
        transfer.since_s, transfer.rate = self._now_s, transfer.rates[shared]
        self._expect(transfer)

    def _expect(self, transfer: _Transfer) -> None:
        transfer.ticket = self._push(self._now_s + transfer.remaining_bytes / transfer.rate, transfer.action)

    def _check_all_ended(self) -> None:
        stuck = [queue[self._next[s]] for s, queue in self._queues.items() if self._next[s] < len(queue)]
        if stuck:
            lines = "; ".join(f"action {a.id} [{a}]" for a in stuck)
            raise SimulationError(f"deadlock at {self._now_s} s: none of these can start: {lines}; verify the Program")

    def _timeline(self) -> Timeline:
        actions = self._program.actions
        events: list[Event] = []
        for index in self._started:
            end_s = self._ends[index]
            assert end_s is not None
            events.append(Event(0, actions[index].stream, index, self._starts[index], end_s))
        by_id = sorted(events, key=lambda event: event.action)
        return Timeline(
            source="predicted",
            events=tuple(events),
            memory=memory_samples(self._program, by_id, {}, overhead_bytes=self._program.overhead_bytes),
            labels={action.id: self._program.label(action) for action in actions},
            peak_bytes=self._program.peak_bytes,
        )
