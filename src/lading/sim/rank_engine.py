"""Rank engine: when every action of the lists of all ranks runs, given the seconds of each.

A stream takes its actions in order; an action starts when its stream is free and all it waits for has ended. A RECV
ends when the SEND of its peer does. An all-reduce of ranks that have lists of their own begins when all have come to
it. Computing lasts longer while collectives run beside it, as their kernels take some of the device's processors; the
network's stream of a rank is timed as far as it can be before its next region is, so what runs beside a region is known
when the region is timed. Same lists and seconds: same times, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from lading.errors import SimulationError
from lading.ir.action import ActionKind
from lading.ir.program import (
    COMPUTE,
    NETWORK,
    STREAMS,
    Border,
    ParameterGroup,
    Program,
    Region,
    UnitStorage,
)

T = TypeVar("T", Region, ParameterGroup, Border, UnitStorage)

#: Share of an action that is left at its end for rounding's sake.
_DONE = 1e-12
#: What an action's seconds follow from: its kind, its region or storage, of the first unit that is like its own (None
#: for neither), and its group.
Priced = tuple[ActionKind, Region | UnitStorage | None, str]


@dataclass(frozen=True, eq=False)
class Wired:
    """Lists as the engine takes them; actions of all ranks are numbered one rank after the other.

    Attributes:
        queues: Actions of each stream, ``len(STREAMS)`` streams a rank.
        waits: For each action those that must have ended.
        priced: Distinct keys of seconds; ``price`` has the number of each action's.
        computing: Whether an action is a region that computes.
    """

    queues: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    priced: tuple[Priced, ...]
    price: tuple[int, ...]
    computing: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class RankTimes:
    """When the actions of all ranks run, numbered one rank after the other.

    Attributes:
        start_s, end_s: By action; of a RESHARD or RECV, which no stream runs, both are 0.
        network_wait_s: By rank, seconds that its compute stream waited for its own network's alone.
        slowed_s: By rank, seconds that regions lasted longer as collectives ran beside them.
        end: Seconds of the step, with micro-batches that stand for others counted as often.
    """

    program: Program
    start_s: list[float]
    end_s: list[float]
    network_wait_s: list[float]
    slowed_s: list[float]
    step_s: float


@lru_cache(maxsize=256)
def wired(program: Program) -> Wired:
    """The lists of a program, wired up once.

    Raises:
        SimulationError: a RECV without the SEND of its peer.
    """
    bounds = program.bounds
    queues: list[list[int]] = [[] for _ in range(len(STREAMS) * len(program.ranks))]
    waits: list[tuple[int, ...]] = []
    keys: dict[Priced, int] = {}
    price: list[int] = []
    computing: list[bool] = []
    sends = _sends(program)
    regions = [_first_alike(region, program.alike) for region in program.regions]
    storages = [_first_alike(storage, program.alike) for storage in program.storages]
    for rank, actions in enumerate(program.ranks):
        base = bounds[rank]
        received: dict[int, int] = {}
        rows = zip(actions.kind, actions.stream, actions.op, actions.storage, actions.group, strict=True)
        for number, (kind, stream, op, storage, group) in enumerate(rows):
            if kind is ActionKind.RECV:
                key = (storage, actions.micro_batch[number])
                if key not in sends:
                    raise SimulationError(f"rank {rank}: no rank sends what action {actions.action(number)} receives")
                received[number] = sends[key]
            elif kind is not ActionKind.RESHARD:
                queues[len(STREAMS) * rank + stream].append(base + number)
            waits.append(tuple([received[w] if w in received else base + w for w in actions.waits[number]]))
            what = regions[op] if op >= 0 else storages[storage] if storage >= 0 else None
            price.append(keys.setdefault((kind, what, group), len(keys)))
            computing.append(kind is ActionKind.COMPUTE)
    for meeting in _meetings(program):
        _meet(meeting, queues, waits, program)
    return Wired(tuple(map(tuple, queues)), tuple(waits), tuple(keys), tuple(price), tuple(computing))


def _first_alike(what: T, alike: Sequence[Sequence[int]]) -> T:
    """A region or storage with the first unit of its stage that is like its own."""
    if isinstance(what, Border) or what.unit < 0:
        return what
    return what._replace(unit=alike[what.stage][what.unit])


def _sends(program: Program) -> dict[tuple[int, int], int]:
    """Every SEND by the storage and micro-batch that it hands on."""
    return {
        (actions.storage[number], actions.micro_batch[number]): base + number
        for base, actions in zip(program.bounds, program.ranks, strict=False)
        for number, kind in enumerate(actions.kind)
        if kind is ActionKind.SEND
    }


def _meetings(program: Program) -> list[list[tuple[int, int]]]:
    """All-reduces that ranks with lists of their own take part in: (rank, number) of each, by group."""
    found: dict[str, list[tuple[int, int]]] = {}
    if len(program.ranks) > 1:
        for rank, actions in enumerate(program.ranks):
            for number, kind in enumerate(actions.kind):
                if kind is ActionKind.ALL_REDUCE and actions.storage[number] < 0 and actions.group[number] != "tp":
                    found.setdefault(actions.group[number], []).append((rank, number))
    return list(found.values())


def _meet(
    meeting: Sequence[tuple[int, int]],
    queues: Sequence[Sequence[int]],
    waits: list[tuple[int, ...]],
    program: Program,
) -> None:
    """Let each of an all-reduce's ranks wait for what the others wait for."""
    before: list[int] = []
    for rank, number in meeting:
        action = program.bounds[rank] + number
        queue = queues[len(STREAMS) * rank + COMPUTE]
        place = queue.index(action)
        before += [*queue[max(0, place - 1) : place], *waits[action]]
    for rank, number in meeting:
        waits[program.bounds[rank] + number] = tuple(before)


def action_seconds(program: Program, seconds_of: Callable[[Priced], float]) -> list[float]:
    """Seconds of every action, from those of each distinct kind of action."""
    wires = wired(program)
    prices = [seconds_of(key) for key in wires.priced]
    return [prices[key] for key in wires.price]


def run_ranks(program: Program, seconds: Sequence[float], slowdown: Sequence[float] = ()) -> RankTimes:
    """Times of every action.

    Args:
        seconds: Seconds of every action alone, of all ranks one after the other.
        slowdown: By rank, by how much longer its regions take while its network is busy; () for not at all.
    Raises:
        SimulationError: actions wait for each other.
    """
    run = _Run(program, wired(program), seconds, slowdown or [0.0] * len(program.ranks))
    run.run()
    return run.times()


def run_sharing(program: Program, levels: Sequence[Sequence[float]]) -> RankTimes:
    """Times of every action of ranks that share processors: regions last the longer the more ranks compute.

    Args:
        levels: Seconds of every action, of all ranks one after the other, while 1, 2, ... ranks compute; of actions
            that are no region the last count.
    Raises:
        SimulationError: actions wait for each other.
    """
    run = _Run(program, wired(program), levels[-1], ())
    run.run_sharing(levels)
    return run.times()


class _Run:
    """One run of the lists: where each stream stands."""

    def __init__(self, program: Program, wires: Wired, seconds: Sequence[float], slowdown: Sequence[float]) -> None:
        self.program, self.wires, self.seconds = program, wires, seconds
        self.slowdown = slowdown
        count, streams = len(seconds), len(wires.queues)
        self.starts, self.ends = [0.0] * count, [-1.0] * count
        self.free, self.at = [0.0] * streams, [0] * streams
        self.waiting: dict[int, list[int]] = {}
        ranks = len(program.ranks)
        self.spans: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
        self.network_wait, self.slowed = [0.0] * ranks, [0.0] * ranks

    def run(self) -> None:
        """Run every stream as far as it can, and again when what it waits for has ended."""
        number = len(STREAMS)
        todo = [stream for stream, queue in enumerate(self.wires.queues) if queue and stream % number != NETWORK]
        todo += [stream for stream, queue in enumerate(self.wires.queues) if queue and stream % number == NETWORK]
        while todo:
            stream = todo.pop()
            rank, kind = divmod(stream, number)
            woken = self._compute(stream, rank) if kind == COMPUTE else self._plain(stream, rank, kind == NETWORK)
            if woken:
                todo += woken
        self._check_all_ended()

    def run_sharing(self, levels: Sequence[Sequence[float]]) -> None:
        """Run all streams in the order of time: whenever a region begins or ends, the others get slower or faster."""
        queues, computing, now = self.wires.queues, self.wires.computing, 0.0
        running: dict[int, tuple[int, float]] = {}  # stream -> its action, and the share of it that is left
        while True:
            for stream, queue in enumerate(queues):
                if stream not in running and self.at[stream] < len(queue):
                    action = queue[self.at[stream]]
                    if all(self.ends[wait] >= 0.0 for wait in self.wires.waits[action]):
                        self.starts[action], running[stream] = now, (action, 1.0)
            if not running:
                return self._check_all_ended()
            at_once = max(1, sum(computing[action] for action, _ in running.values()))
            takes = {s: (levels[at_once - 1] if computing[a] else levels[-1])[a] for s, (a, _) in running.items()}
            step = min(left * takes[stream] for stream, (_, left) in running.items())
            now += step
            for stream, (action, left) in list(running.items()):
                rest = left - step / takes[stream] if takes[stream] else 0.0
                running[stream] = action, rest
                if rest <= _DONE:
                    self.ends[action] = self.free[stream] = now
                    self.at[stream] += 1
                    del running[stream]

    def _check_all_ended(self) -> None:
        for stream, queue in enumerate(self.wires.queues):
            if self.at[stream] < len(queue):
                self._stuck(stream, queue[self.at[stream]])

    def _plain(self, stream: int, rank: int, network: bool) -> list[int]:
        """Run a stream that nothing slows; returns the streams that may go on."""
        queue, first, now = self.wires.queues[stream], self.at[stream], self.free[stream]
        waits, ends, starts, seconds, waiting = self.wires.waits, self.ends, self.starts, self.seconds, self.waiting
        woken: list[int] = []
        for place in range(first, len(queue)):
            action = queue[place]
            for wait in waits[action]:
                end = ends[wait]
                if end > now:
                    now = end
                elif end < 0.0:
                    break
            else:
                starts[action] = now
                ends[action] = end = now + seconds[action]
                if network and end > now:
                    self._busy(self.spans[rank], now, end)
                now = end
                if action in waiting:
                    woken += waiting.pop(action)
                continue
            waiting.setdefault(wait, []).append(stream)
            self.free[stream], self.at[stream] = self._last_end(queue, place), place
            return woken
        self.free[stream], self.at[stream] = now, len(queue)
        return woken

    def _last_end(self, queue: Sequence[int], place: int) -> float:
        """End of the action before this place of a stream."""
        return self.ends[queue[place - 1]] if place else 0.0

    def _busy(self, spans: list[tuple[float, float]], start: float, end: float) -> None:
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))

    def _compute(self, stream: int, rank: int) -> list[int]:
        """Run a compute stream until what its own network waits for has ended; then the network goes first."""
        queue, first, now = self.wires.queues[stream], self.at[stream], self.free[stream]
        waits, ends, starts, seconds, waiting = self.wires.waits, self.ends, self.starts, self.seconds, self.waiting
        spans, slower, network = self.spans[rank], self.slowdown[rank], stream - COMPUTE + NETWORK
        woken: list[int] = []
        for place in range(first, len(queue)):
            action = queue[place]
            start, binding = now, -1
            for wait in waits[action]:
                end = ends[wait]
                if end > start:
                    start, binding = end, wait
                elif end < 0.0:
                    break
            else:
                starts[action] = start
                if binding >= 0 and spans and self._is_network(binding, rank):
                    others = [ends[wait] for wait in waits[action] if not self._is_network(wait, rank)]
                    self.network_wait[rank] += start - max([now, *others])
                if spans and slower and spans[-1][1] > start and self.wires.computing[action]:
                    now = self._beside(spans, start, seconds[action], slower)
                    self.slowed[rank] += now - start - seconds[action]
                else:
                    now = start + seconds[action]
                ends[action] = now
                if action in waiting:
                    streams = waiting.pop(action)
                    if network in streams:
                        self.free[stream], self.at[stream] = now, place + 1
                        return [*woken, *(one for one in streams if one != network), stream, network]
                    woken += streams
                continue
            waiting.setdefault(wait, []).append(stream)
            self.free[stream], self.at[stream] = now, place
            return woken
        self.free[stream], self.at[stream] = now, len(queue)
        return woken

    def _is_network(self, action: int, rank: int) -> bool:
        base = self.program.bounds[rank]
        actions = self.program.ranks[rank]
        return 0 <= action - base < len(actions) and actions.stream[action - base] == NETWORK

    def _beside(self, spans: list[tuple[float, float]], start: float, seconds: float, slowdown: float) -> float:
        """When computing of so many seconds that begins now ends, slower while the network is busy."""
        now, left, factor = start, seconds, 1 + slowdown
        if spans[0][1] <= now:
            spans[:] = [span for span in spans if span[1] > now]
        for begin, end in spans:
            alone = min(left, max(0.0, begin - now))
            now, left = now + alone, left - alone
            beside = max(0.0, min(left * factor, end - now))
            now, left = now + beside, max(0.0, left - beside / factor)
        return now + left

    def _stuck(self, stream: int, action: int) -> None:
        rank = stream // len(STREAMS)
        stuck = self.program.ranks[rank].action(action - self.program.bounds[rank])
        raise SimulationError(
            f"schedule {self.program.schedule}: rank {rank} waits forever at {self.program.label(stuck)}; what "
            "it waits for waits for it: check the orders"
        )

    def times(self) -> RankTimes:
        """What was found."""
        end = max(self.free, default=0.0)
        micro_batch, times = self.program.repeat
        if times:
            end += times * self._micro_batch_s(micro_batch)
        return RankTimes(self.program, self.starts, self.ends, self.network_wait, self.slowed, end)

    def _micro_batch_s(self, micro_batch: int) -> float:
        """Seconds from the end of one micro-batch's computing to that of the next."""
        ends = [self.ends[self.program.ranks[0].rows[2 * number + 1][1]] for number in (micro_batch - 1, micro_batch)]
        return next(after - before for before, after in pairwise(ends))
