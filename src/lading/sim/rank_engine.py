"""Rank engine: how the lists of all ranks meet, and what actions last beside each other, for ``lading.sim.engine``.

A RECV ends when the SEND of its peer does. An all-reduce of ranks that have lists of their own begins when all have
come to it. Computing lasts longer while collectives run beside it, as their kernels take some of the device's
processors; the network's stream of a rank is walked as far as it can be before its next region is, so what runs beside
a region is known when the region is timed. Same lists and seconds: same times, to the bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

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
from lading.ir.schedules import Schedule
from lading.sim.engine import Resources, StreamRun, deadlock

Ints = npt.NDArray[np.int64]
T = TypeVar("T", Region, ParameterGroup, Border, UnitStorage)

#: Share of an action that is left at its end for rounding's sake.
_DONE = 1e-12
#: Key of an action's seconds: its kind, its region or storage (None if it has neither; that of the first unit that is
#: like its own), and its group.
Priced = tuple[ActionKind, Region | UnitStorage | None, str]


@dataclass(frozen=True, eq=False)
class Wired:
    """Lists in the form that the engine takes; actions of all ranks are numbered one rank after the other.

    Attributes:
        queues: Actions of each stream, ``len(STREAMS)`` streams a rank.
        waits: For each action, the actions that must have ended before it starts.
        priced: Distinct keys of seconds.
        price: For each action, the position of its key in ``priced``.
        computing: For each action, whether it is a region that computes.
    """

    queues: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    priced: tuple[Priced, ...]
    price: tuple[int, ...]
    computing: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Times of the actions of all ranks, numbered one rank after the other.

    Attributes:
        start_s, end_s: Seconds, by action; 0 and -1 for a RESHARD or RECV, which no stream runs.
        slowed_s: For each rank, seconds by which regions lasted longer because collectives ran beside them.
        step_s: Seconds of the step; a listed micro-batch that stands for several counts as that many.
    """

    program: Program
    start_s: list[float]
    end_s: list[float]
    slowed_s: list[float]
    step_s: float

    def network_wait_s(self, rank: int) -> float:
        """Seconds that a rank's compute stream waited for the rank's own network stream and for nothing else."""
        wires, base, actions = wired(self.program), self.program.bounds[rank], self.program.ranks[rank]
        network = {base + number for number, stream in enumerate(actions.stream) if stream == NETWORK}
        waited = free_s = 0.0
        for action in wires.queues[len(STREAMS) * rank + COMPUTE]:
            waits = wires.waits[action]
            if not network.isdisjoint(waits):
                rest_s = max([free_s, *(self.end_s[wait] for wait in waits if wait not in network)])
                waited += max(0.0, self.start_s[action] - rest_s)
            free_s = self.end_s[action]
        return waited


def busiest_rank(times: RankTimes, schedule: Schedule) -> int:
    """Find the class of ranks of a pipeline that computes longest; actions run as one are counted once."""
    busy: list[float] = []
    for base, actions, order in zip(times.program.bounds, times.program.ranks, schedule.orders, strict=False):
        starts = [times.start_s[base + a] if a <= b else times.end_s[base + b] for a, b in actions.rows]
        spans = np.array([times.end_s[base + last] for _, last in actions.rows]) - np.array(starts)
        busy.append(float(np.sum(spans)) - float(np.sum(spans[order[:, 3] == 1])))
    return int(np.argmax(busy))


@lru_cache(maxsize=256)
def wired(program: Program) -> Wired:
    """Connect the lists of a program: queues, waits and keys of seconds; cached.

    Raises:
        SimulationError: a RECV without the SEND of its peer.
    """
    kind, stream, op, storage, group = _columns(program)
    rank = np.repeat(np.arange(len(program.ranks)), np.diff(program.bounds))
    runs = (kind != _KIND[ActionKind.RECV]) & (kind != _KIND[ActionKind.RESHARD])
    of_stream = np.where(runs, len(STREAMS) * rank + stream, -1)
    order = np.argsort(of_stream, kind="stable")
    counts = np.bincount(of_stream + 1, minlength=len(STREAMS) * len(program.ranks) + 1)
    queues: list[list[int]] = [queue.tolist() for queue in np.split(order, np.cumsum(counts)[:-1])[1:]]
    waits = _waits(program, kind, storage, rank)
    priced, price = _prices(program, (kind, op, storage, group))
    for meeting in _meetings(program, kind, rank):
        _meet(meeting, queues, waits, program)
    computing = (kind == _KIND[ActionKind.COMPUTE]).tolist()
    return Wired(tuple(map(tuple, queues)), tuple(waits), priced, price, tuple(computing))


#: Number of each kind of action, and of each by the identity of its object.
_KIND = {kind: number for number, kind in enumerate(ActionKind)}
_KIND_BY_ID = {id(kind): number for kind, number in _KIND.items()}


def _columns(program: Program) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Kind, stream, region, storage and group of the actions of all ranks, as numbers."""
    ranks = program.ranks
    groups: dict[str, int] = {}
    for name in {name for actions in ranks for name in set(actions.group)}:
        groups[name] = len(groups)
    return (
        _numbers([map(_KIND_BY_ID.__getitem__, map(id, actions.kind)) for actions in ranks]),
        _numbers([actions.stream for actions in ranks]),
        _numbers([actions.op for actions in ranks]),
        _numbers([actions.storage for actions in ranks]),
        _numbers([map(groups.__getitem__, actions.group) for actions in ranks]),
    )


def _numbers(lists: Iterable[Iterable[int]]) -> Ints:
    return np.fromiter(chain.from_iterable(lists), np.int64)


def _prices(program: Program, columns: tuple[Ints, Ints, Ints, Ints]) -> tuple[tuple[Priced, ...], tuple[int, ...]]:
    """Distinct keys of seconds, and for each action the position of its key."""
    regions = [_first_alike(region, program.alike) for region in program.regions]
    storages = [_first_alike(storage, program.alike) for storage in program.storages]
    code = np.zeros_like(columns[0])
    for column in columns:
        code = code * (int(column.max(initial=0)) + 2) + column + 1
    codes: list[int] = code.tolist()
    keys: dict[Priced, int] = {}
    key_of: dict[int, int] = {}
    firsts: list[int] = np.sort(np.unique(code, return_index=True)[1]).tolist()
    for action in firsts:
        rank = bisect_right(program.bounds, action) - 1
        actions, number = program.ranks[rank], action - program.bounds[rank]
        op, storage = actions.op[number], actions.storage[number]
        what = regions[op] if op >= 0 else storages[storage] if storage >= 0 else None
        key_of[codes[action]] = keys.setdefault((actions.kind[number], what, actions.group[number]), len(keys))
    return tuple(keys), tuple(map(key_of.__getitem__, codes))


def _waits(program: Program, kind: Ints, storage: Ints, rank: Ints) -> list[tuple[int, ...]]:
    """List for each action the actions that must have ended before it; for a RECV, the SEND of its peer among them.

    Raises:
        SimulationError: a RECV without the SEND of its peer.
    """
    micro_batch = _numbers(actions.micro_batch for actions in program.ranks)
    handed = storage * (int(micro_batch.max(initial=0)) + 2) + micro_batch + 1
    sends = np.flatnonzero(kind == _KIND[ActionKind.SEND])
    sends = sends[np.argsort(handed[sends], kind="stable")]
    receives = np.flatnonzero(kind == _KIND[ActionKind.RECV])
    for number in receives[~np.isin(handed[receives], handed[sends])].tolist():
        action = program.ranks[rank[number]].action(number - program.bounds[rank[number]])
        raise SimulationError(f"rank {rank[number]}: no rank sends what action {action} receives")
    stands_for = np.arange(len(kind))
    stands_for[receives] = sends[np.searchsorted(handed[sends], handed[receives], side="right") - 1]
    each = [waits for actions in program.ranks for waits in actions.waits]
    counts = np.fromiter(map(len, each), np.int64, len(each))
    first = np.repeat(np.array(program.bounds)[rank], counts)
    flat = iter(stands_for[np.fromiter(chain.from_iterable(each), np.int64) + first].tolist())
    return [(next(flat),) if count == 1 else tuple(islice(flat, count)) for count in counts.tolist()]


def _first_alike(what: T, run_starts: Sequence[Sequence[int]]) -> T:
    """Replace the unit of a region or storage by the first unit of its stage that is like it, if there is one."""
    if isinstance(what, Border) or what.unit < 0 or not run_starts:
        return what
    return what._replace(unit=run_starts[what.stage][what.unit])


def _meetings(program: Program, kind: Ints, rank: Ints) -> list[list[tuple[int, int]]]:
    """Find all-reduces between ranks that have lists of their own: (rank, action) of each participant."""
    meetings: dict[str, list[tuple[int, int]]] = {}
    for action in np.flatnonzero(kind == _KIND[ActionKind.ALL_REDUCE]).tolist() if len(program.ranks) > 1 else ():
        member = int(rank[action])
        actions, number = program.ranks[member], action - program.bounds[member]
        if actions.storage[number] < 0 and actions.group[number] != "tp":
            meetings.setdefault(actions.group[number], []).append((member, number))
    return list(meetings.values())


def _meet(
    meeting: Sequence[tuple[int, int]],
    queues: Sequence[Sequence[int]],
    waits: list[tuple[int, ...]],
    program: Program,
) -> None:
    """Let each participant of an all-reduce wait for all that the others wait for."""
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
    return list(map(prices.__getitem__, wires.price))


def run_ranks(program: Program, seconds: Sequence[float], slowdown: Sequence[float] = ()) -> RankTimes:
    """Run the lists of ranks that have a device each.

    Args:
        seconds: Seconds of every action alone, of all ranks one after the other.
        slowdown: For each rank, share by which regions take longer while its network is busy; () for none.
    Raises:
        SimulationError: actions wait for each other.
    """
    wires, ahead = wired(program), [-1] * len(STREAMS) * len(program.ranks)
    for rank in range(len(program.ranks)):
        ahead[len(STREAMS) * rank + COMPUTE] = len(STREAMS) * rank + NETWORK
    run = StreamRun(wires.queues, wires.waits, seconds, wires.computing, ahead)
    shared_run = _BesideNetwork(run, slowdown or [0.0] * len(program.ranks))
    return _times(program, run, shared_run, shared_run.slowed_s)


def run_order(program: Program) -> list[tuple[int, int]]:
    """Order the actions of all streams so that each comes behind what it waits for, as (stream, action).

    It is the order in which the engine ends them if each takes one second.

    Raises:
        SimulationError: actions wait for each other.
    """
    ends = run_ranks(program, [1.0] * program.bounds[-1]).end_s
    queued = [(stream, action) for stream, queue in enumerate(wired(program).queues) for action in queue]
    return sorted(queued, key=lambda each: ends[each[1]])


def run_sharing(program: Program, levels: Sequence[Sequence[float]]) -> RankTimes:
    """Run the lists of ranks that share processors: the more ranks compute, the longer regions last.

    Args:
        levels: Seconds of every action, of all ranks one after the other, while 1, 2, ... ranks compute; actions other
            than regions take those of the last level.
    Raises:
        SimulationError: actions wait for each other.
    """
    wires = wired(program)
    run = StreamRun(wires.queues, wires.waits, levels[-1], [True] * len(wires.waits))
    return _times(program, run, _SharedProcessors(levels, wires.computing), [0.0] * len(program.ranks))


def _times(program: Program, run: StreamRun, resources: Resources, slowed_s: list[float]) -> RankTimes:
    if stuck := run.run(resources):
        raise deadlock(program, stuck)
    step_s = max(run.free, default=0.0)
    micro_batch, times = program.repeat
    if times:
        rows = program.ranks[0].rows
        before, after = (run.ends[rows[2 * number + 1][1]] for number in (micro_batch - 1, micro_batch))
        step_s += times * (after - before)
    return RankTimes(program, run.starts, run.ends, slowed_s, step_s)


class _BesideNetwork:
    """Ranks whose regions last longer while their own network is busy."""

    def __init__(self, run: StreamRun, slowdown: Sequence[float]) -> None:
        self._run, self._slowdown = run, slowdown
        self._spans: list[list[tuple[float, float]]] = [[] for _ in slowdown]  # when the network is busy
        self._seen = [0] * len(slowdown)  # actions of the network that are in them
        self.slowed_s = [0.0] * len(slowdown)

    def begin(self, action: int, stream: int, start_s: float) -> float:
        """Time at which a region that starts now ends, beside the collectives that run then."""
        rank, seconds = stream // len(STREAMS), self._run.seconds[action]
        if not (slower := self._slowdown[rank]):
            return start_s + seconds
        spans = self._spans[rank]
        self._see(spans, rank)
        if not spans or spans[-1][1] <= start_s:
            return start_s + seconds
        end_s = end_beside(spans, start_s, seconds, slower)
        self.slowed_s[rank] += end_s - start_s - seconds
        return end_s

    def advance(self) -> Sequence[tuple[int, float]]:
        """Return (): the end of every action under way is known."""
        return ()

    def _see(self, spans: list[tuple[float, float]], rank: int) -> None:
        """Add the spans of the collectives that the network has run since the last call."""
        run, network = self._run, len(STREAMS) * rank + NETWORK
        queue, seen, at = run.queues[network], self._seen[rank], run.at[network]
        for place in range(seen, at):
            start, end = run.starts[queue[place]], run.ends[queue[place]]
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            elif end > start:
                spans.append((start, end))
        self._seen[rank] = at


def end_beside(spans: list[tuple[float, float]], start_s: float, seconds: float, slowdown: float) -> float:
    """End of a region that takes ``seconds`` alone and longer beside the network; drops spans that are over.

    Args:
        spans: Times in which the network is busy, as (start, end) in ascending order; at least one.
    """
    clock_s, remaining_s, factor = start_s, seconds, 1 + slowdown
    if spans[0][1] <= clock_s:
        spans[:] = [span for span in spans if span[1] > clock_s]
    for begin, end in spans:
        unshared_s = min(remaining_s, max(0.0, begin - clock_s))
        clock_s, remaining_s = clock_s + unshared_s, remaining_s - unshared_s
        shared_s = max(0.0, min(remaining_s * factor, end - clock_s))
        clock_s, remaining_s = clock_s + shared_s, max(0.0, remaining_s - shared_s / factor)
    return clock_s + remaining_s


class _SharedProcessors:
    """Ranks on the processors of one host: whenever a region begins or ends, the others get slower or faster."""

    def __init__(self, levels: Sequence[Sequence[float]], computing: Sequence[bool]) -> None:
        self._levels, self._computing = levels, computing
        self._now_s = 0.0
        self._running: dict[int, tuple[int, float]] = {}  # stream -> its action, and the share of it that is left

    def begin(self, action: int, stream: int, start_s: float) -> None:
        """Start an action."""
        self._running[stream] = action, 1.0

    def advance(self) -> Sequence[tuple[int, float]]:
        """Go on to the next end."""
        running, computing, levels = self._running, self._computing, self._levels
        ended: list[tuple[int, float]] = []
        while running and not ended:
            at_once = max(1, sum(computing[action] for action, _ in running.values()))
            takes = {s: (levels[at_once - 1] if computing[a] else levels[-1])[a] for s, (a, _) in running.items()}
            step = min(left * takes[stream] for stream, (_, left) in running.items())
            self._now_s += step
            for stream, (action, left) in list(running.items()):
                rest = left - step / takes[stream] if takes[stream] else 0.0
                running[stream] = action, rest
                if rest <= _DONE:
                    del running[stream]
                    ended.append((stream, self._now_s))
        return ended
