"""Timetable: when everything of a step would run if memory were bytes and not addresses.

A lowering finds addresses, which takes most of its time, and a search can afford few of them. This schedule takes a
fiftieth of it and comes within a few percent of what the program then takes, so it tells which of many choices are
worth a lowering (``planner.trips``). It plays the emission of choices as the program would run:

    computing       items in order, each when all that it reads has come and there is room for what it makes
    reads           of each tier in the order of need, each when its copy is written and there is room for it, now and
                    beside all that is needed until its use
    writes          of each tier in the order in which storages leave; their places are free when they have gone
    the host        its operations in order, each when what it works on has gone down, slower beside all that moves

Rates are those of the tiers, lower while both directions are busy, and beside others on their wire. What transfers take
from computing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lading.ir.machine import Tier, fair_share, wire_of, wires
from lading.ir.program import slot_sizes
from lading.planner.emission import Emission
from lading.planner.residency import StepProblem
from lading.planner.schedule import base_profile

_TINY_S, _TINY_BYTES = 1e-12, 1e-3


@dataclass
class Timetable:
    """Result of a schedule.

    Attributes:
        step_s: Seconds of the step; infinite where it comes to a stop, as there is no room.
        waited_s: Seconds that computing waits for each residency to come, by its number in the emission.
    """

    step_s: float = float("inf")
    waited_s: dict[int, float] = field(default_factory=lambda: {})


@dataclass
class _Lane:
    """Direction of a tier: the residencies that it moves in turn, and the one that it moves now.

    Attributes:
        rate, mixed_rate: Bytes a second alone, and while the other direction moves.
        left_s, left_bytes: Latency and bytes that are left of what it moves.
        host_share: Share of the host's memory bandwidth that each byte/s takes.
    """

    rate: float
    mixed_rate: float
    latency_s: float
    queue: list[int] = field(default_factory=lambda: [])
    at: int = 0
    moving: int = -1
    left_s: float = 0.0
    left_bytes: float = 0.0
    host_share: float = 0.0

    def start(self, stay: int, size_bytes: int) -> None:
        self.moving, self.left_s, self.left_bytes, self.at = stay, self.latency_s, float(size_bytes), self.at + 1

    @property
    def transfers(self) -> bool:
        """Whether bytes move at the moment."""
        return self.moving >= 0 and self.left_s <= 0.0

    def pass_time(self, seconds: float, rate: float) -> int:
        """Let time pass; returns what has been moved by then, or -1."""
        if self.left_s > 0.0:
            self.left_s -= seconds
            self.left_s = 0.0 if self.left_s < _TINY_S else self.left_s
        else:
            self.left_bytes -= rate * seconds
        if self.left_s > 0.0 or self.left_bytes > _TINY_BYTES:
            return -1
        moved, self.moving = self.moving, -1
        return moved


@dataclass(frozen=True)
class _Wire:
    """Wire that several tiers share, and their directions."""

    tier: Tier
    reads: list[_Lane]
    writes: list[_Lane]

    @classmethod
    def of(cls, tiers: Sequence[Tier], reads: Mapping[str, _Lane], writes: Mapping[str, _Lane]) -> _Wire:
        return cls(wire_of(tiers), [reads[tier.name] for tier in tiers], [writes[tier.name] for tier in tiers])

    def totals(self) -> Iterator[tuple[list[_Lane], float]]:
        """Yield each way's directions, with the bytes a second that it carries at the moment."""
        tier, ways = self.tier, [any(lane.transfers for lane in lanes) for lanes in (self.reads, self.writes)]
        read, write = tier.read_bytes_per_s, tier.write_bytes_per_s
        both = all(ways)
        yield self.reads, min(read, tier.mixed_read_bytes_per_s) if both else read
        yield self.writes, min(write, tier.mixed_write_bytes_per_s) if both else write


def timetable(step: StepProblem, emission: Emission, seconds: Sequence[float], room_bytes: int) -> Timetable:
    """Schedule an emission.

    Args:
        emission: With stays that cross the step's boundary cut in two (``planner.schedule.wrapped``).
        seconds: Seconds of each item.
        room_bytes: Bytes of the arena up to which reads that come early may fill it; what is needed has all of it.
    """
    return _Player(step, emission, seconds, room_bytes).play()


class _Player:
    """State of a schedule at a moment."""

    def __init__(self, step: StepProblem, emission: Emission, seconds: Sequence[float], room_bytes: int) -> None:
        self.graph, self.arena, self.room = step.graph, step.arena_bytes, room_bytes
        self.items, self.stays, self.seconds = emission.items, emission.residencies, seconds
        sizes = slot_sizes(step.graph)
        self.size = [sizes[stay.storage] for stay in self.stays]
        self.profile = base_profile(step.graph, emission)
        count = len(emission.items)
        self.coming: list[list[int]] = [[] for _ in range(count)]
        self.made: list[list[int]] = [[] for _ in range(count)]
        self.leaving: list[list[int]] = [[] for _ in range(count)]
        tiers = step.machine.tiers
        self.reads = {t.name: _Lane(t.read_bytes_per_s, t.mixed_read_bytes_per_s, t.latency_s) for t in tiers}
        self.writes = {t.name: _Lane(t.write_bytes_per_s, t.mixed_write_bytes_per_s, t.latency_s) for t in tiers}
        if step.machine.host_device is not None:
            bandwidth = step.machine.host_device.memory_bandwidth_bytes_per_s
            for tier in tiers:
                share = (1 if tier.host_computes else 2) / bandwidth
                self.reads[tier.name].host_share = self.writes[tier.name].host_share = share
        self.wires = [_Wire.of(shared, self.reads, self.writes) for shared in wires(tiers)]
        self.before: dict[int, int] = {}  # the stay of the same storage before each
        self.there = [stay.initial for stay in self.stays]
        self.gone = [False] * len(self.stays)
        self.going: dict[int, int] = {}  # by storage, the writes and work of the host that its copy waits for
        self.used, self.now_s, self.item, self.ends_s = 0, 0.0, 0, -1.0
        self.host_seconds = step.costs.op_seconds
        self.host_queue: list[int] = []
        self.host_at, self.host_left_s = 0, -1.0  # seconds that the host's operation still takes if nothing moves
        self._queue()

    def _queue(self) -> None:
        last: dict[int, int] = {}
        for index in sorted(range(len(self.stays)), key=lambda i: (self.stays[i].first, i)):
            stay = self.stays[index]
            if stay.initial:
                self.used += self.size[index]
            elif stay.tier:
                if not stay.final:  # else the next step needs it
                    self.coming[stay.first].append(index)
                self.reads[stay.tier].queue.append(index)
                if stay.storage in last:
                    self.before[index] = last[stay.storage]
            else:
                self.made[stay.first].append(index)
            if not stay.final:
                self.leaving[stay.last].append(index)
            last[stay.storage] = index

    def play(self) -> Timetable:
        """Play the step to its end."""
        result = Timetable()
        while True:
            waits = self._begin()
            rates = self._rates()
            passing = [lane.left_s or lane.left_bytes / rate for lane, rate in rates]
            slower = 1.0 + sum(lane.host_share * rate for lane, rate in rates if lane.transfers)
            passing += [self.ends_s - self.now_s] if self.ends_s >= 0.0 else []
            passing += [self.host_left_s * slower] if self.host_left_s >= 0.0 else []
            if not passing:
                break
            seconds = max(min(passing), _TINY_S)
            for stay in waits[:1]:
                result.waited_s[stay] = result.waited_s.get(stay, 0.0) + seconds
            self._pass_time(seconds, rates, slower)
        if self.item == len(self.items):
            result.step_s = self.now_s
        return result

    def _begin(self) -> list[int]:
        """Begin all that can begin; returns what computing waits for to come."""
        waits: list[int] = []
        begun = True
        while begun:
            begun = False
            if self.ends_s < 0.0 and self.item < len(self.items):
                waits = [stay for stay in self.coming[self.item] if not self.there[stay]]
                begun = not waits and self._compute()
            begun = self._host() or begun
            for lane in self.reads.values():
                begun = self._read(lane) or begun
            for lane in self.writes.values():
                if lane.moving < 0 and lane.at < len(lane.queue):
                    stay = lane.queue[lane.at]
                    lane.start(stay, self.size[stay])
                    begun = True
        return waits if self.ends_s < 0.0 else []

    def _compute(self) -> bool:
        """Begin the next item if there is room for what it makes; the host's items only join its queue."""
        op = self.items[self.item].op
        if op is not None and op in self.graph.on_host:
            self.host_queue.append(op)
            for storage in self.graph.op_writes[op]:
                self.going[storage] = self.going.get(storage, 0) + 1
            self.item += 1
            return True
        made = self.made[self.item]
        size = sum(self.size[stay] for stay in made)
        if self.used + size > self.arena:
            return False
        self.used += size
        for stay in made:
            self.there[stay] = True
        self.ends_s = self.now_s + self.seconds[self.item]
        return True

    def _host(self) -> bool:
        if self.host_left_s >= 0.0 or self.host_at == len(self.host_queue):
            return False
        op = self.host_queue[self.host_at]
        written = self.graph.op_writes[op]
        if any(self.going.get(storage, 0) > (storage in written) for storage in self.graph.op_reads[op]):
            return False
        self.host_left_s = self.host_seconds[op]
        return True

    def _read(self, lane: _Lane) -> bool:
        """Begin the next read of a tier if its copy is there and there is room for it."""
        if lane.moving >= 0 or lane.at == len(lane.queue):
            return False
        index = lane.queue[lane.at]
        stay, size = self.stays[index], self.size[index]
        before = self.before.get(index, -1)
        if (before >= 0 and not self.gone[before]) or self.going.get(stay.storage) or stay.since > self.item:
            return False
        if self.used + size > self.arena:
            return False
        if stay.first > self.item:
            if int(self.profile[self.item : stay.first].max()) + size > self.room:
                return False
            self.profile[self.item : stay.first] += size
        self.used += size
        lane.start(index, size)
        return True

    def _rates(self) -> list[tuple[_Lane, float]]:
        """Directions that move something, with the rate of each."""
        rates: list[tuple[_Lane, float]] = []
        for name, read in self.reads.items():
            write = self.writes[name]
            both = read.transfers and write.transfers
            rates += [(lane, lane.mixed_rate if both else lane.rate) for lane in (read, write) if lane.moving >= 0]
        return self._on_wires(rates) if self.wires else rates

    def _on_wires(self, rates: list[tuple[_Lane, float]]) -> list[tuple[_Lane, float]]:
        """Lower the rates of directions that share a wire."""
        own = {id(lane): rate for lane, rate in rates if lane.transfers}
        shared = dict(own)
        for wire in self.wires:
            for lanes, total in wire.totals():
                for lane in lanes:
                    others = [own[id(each)] for each in lanes if each is not lane and id(each) in own]
                    if id(lane) in own:
                        shared[id(lane)] = fair_share(own[id(lane)], others, total)
        return [(lane, shared.get(id(lane), rate)) for lane, rate in rates]

    def _pass_time(self, seconds: float, rates: Sequence[tuple[_Lane, float]], slower: float) -> None:
        """Let time pass, in which the host's operation takes ``slower`` times as long."""
        self.now_s += seconds
        reads = {id(lane) for lane in self.reads.values()}
        for lane, rate in rates:
            moved = lane.pass_time(seconds, rate)
            if moved >= 0 and id(lane) in reads:
                self.there[moved] = True
            elif moved >= 0:
                self._goes(moved)
                self.going[self.stays[moved].storage] -= 1
        if 0.0 <= self.ends_s <= self.now_s + _TINY_S:
            self.ends_s = -1.0
            for stay in self.leaving[self.item]:
                self._leave(stay)
            self.item += 1
        if self.host_left_s >= 0.0:
            self.host_left_s -= seconds / slower
            if self.host_left_s > _TINY_S:
                return
            self.host_left_s = -1.0
            for storage in self.graph.op_writes[self.host_queue[self.host_at]]:
                self.going[storage] -= 1
            self.host_at += 1

    def _leave(self, stay: int) -> None:
        tier, storage = self.stays[stay].to_tier, self.stays[stay].storage
        if tier:
            self.writes[tier].queue.append(stay)
            self.going[storage] = self.going.get(storage, 0) + 1
        else:
            self._goes(stay)

    def _goes(self, stay: int) -> None:
        self.gone[stay] = True
        self.used -= self.size[stay]
