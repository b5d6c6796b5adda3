"""Connecting: items, residencies and addresses -> the actions of a Program, and the waits between their streams."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence

from lading.ir.action import CALLER, DEVICE, ActionKind
from lading.ir.graph import StepGraph
from lading.ir.program import (
    COMPUTE_STREAM,
    HOST_STREAM,
    PAGE_BYTES,
    ActionList,
    read_stream,
    slot_sizes,
    write_stream,
)
from lading.planner.emit import Emission, Item
from lading.planner.schedule import Stretched


def connect(
    graph: StepGraph,
    emission: Emission,
    stretched: Stretched,
    offsets: Sequence[int],
    host_slots: Mapping[int, int] | None = None,
) -> ActionList:
    """Write the actions of an emission whose residency ``i`` lies at ``offsets[i]``, and what is staged in its slot."""
    writer = _ActionWriter(graph, emission, stretched, offsets, host_slots or {})
    writer.write()
    return writer.actions


class _Freed:
    """Disjoint ranges of addresses that were freed and not taken since, each with the FREE that did it."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._actions: list[int] = []

    def give(self, low: int, high: int, action: int) -> None:
        """Add a range of addresses that nothing else has."""
        index = bisect_left(self._lows, low)
        self._lows.insert(index, low)
        self._highs.insert(index, high)
        self._actions.insert(index, action)

    def take(self, low: int, high: int) -> list[int]:
        """Claim a range; returns the FREE actions that gave it up."""
        first, last = bisect_right(self._highs, low), bisect_left(self._lows, high)
        if first >= last:
            return []
        waits = self._actions[first:last]
        rest: list[tuple[int, int, int]] = []
        if self._lows[first] < low:
            rest.append((self._lows[first], low, waits[0]))
        if self._highs[last - 1] > high:
            rest.append((high, self._highs[last - 1], waits[-1]))
        self._lows[first:last] = [row[0] for row in rest]
        self._highs[first:last] = [row[1] for row in rest]
        self._actions[first:last] = [row[2] for row in rest]
        return waits


class _ActionWriter:
    """Writer of actions from items and residencies.

    Per storage it knows the action that made it resident and the last one that touched it; per address range, the
    action that freed it. Waits are added only across streams and only when no earlier wait covers them.
    """

    def __init__(
        self,
        graph: StepGraph,
        emission: Emission,
        stretched: Stretched,
        offsets: Sequence[int],
        host_slots: Mapping[int, int],
    ) -> None:
        self.graph, self.emission = graph, emission
        self.actions = ActionList()
        self.known: dict[tuple[int, int], int] = {}
        self.ready: dict[int, int] = {}  # storage -> the action after which it can be read
        self.touched: dict[int, int] = {}
        self.written: dict[int, int] = {}  # storage -> the action that wrote its tier copy
        self.gone: dict[int, int] = {}  # storage -> the FREE that ended its last stay
        self.fetched: dict[int, int] = {}  # storage -> the last move that reads its tier copy
        self.worked: dict[int, int] = {}  # storage -> the last operation on the host that reads or writes its copy
        self.freed, self.freed_on_host, self.host_slots = _Freed(), _Freed(), host_slots
        self.offsets, self.sizes = offsets, slot_sizes(graph)
        count = len(emission.items)
        self.arrivals: list[list[int]] = [[] for _ in range(count)]
        self.makes: list[list[int]] = [[] for _ in range(count)]
        self.leaves: list[list[int]] = [[] for _ in range(count)]
        for index, stay in enumerate(emission.residencies):
            if stay.tier:
                insort(self.arrivals[stretched.first[index]], index, key=lambda i: (emission.residencies[i].first, i))
            elif not stay.initial:
                self.makes[stay.first].append(index)
            if not stay.final:
                self.leaves[stay.last].append(index)

    def write(self) -> None:
        for index, item in enumerate(self.emission.items):
            for stay in self.arrivals[index]:
                self._fetch(stay)
            self._run(index, item)
            for stay in self.leaves[index]:
                self._leave(stay)

    def _take(self, index: int) -> list[int]:
        """Claim the addresses of a residency; returns the FREE actions that gave them up."""
        low = self.offsets[index]
        return self.freed.take(low, low + self.sizes[self.emission.residencies[index].storage])

    def _last_stay(self, storage: int) -> tuple[int, ...]:
        return (self.gone[storage],) if storage in self.gone else ()

    def _add(
        self,
        kind: ActionKind,
        stream_name: str,
        waits: Sequence[int],
        *,
        op: int | None = None,
        storage: int | None = None,
        route: tuple[str, str] = ("", ""),
        places: tuple[tuple[int, int], ...] = (),
    ) -> int:
        actions, needed = self.actions, dict[int, int]()
        stream = actions.stream_number(stream_name)
        for wait in waits:
            other = actions.stream[wait]
            if other != stream and wait > self.known.get((stream, other), -1):
                needed[other] = max(needed.get(other, -1), wait)
        for other, wait in needed.items():
            self.known[stream, other] = wait
        action = actions.add(
            kind,
            stream,
            tuple(sorted(needed.values())),
            op=-1 if op is None else op,
            storage=-1 if storage is None else storage,
        )
        if any(route):
            actions.routes[action] = route
        if places:
            actions.places[action] = places
        return action

    def _fetch(self, index: int) -> None:
        stay = self.emission.residencies[index]
        waits = [*self._take(index), *self._last_stay(stay.storage)]
        if stay.storage in self.written:
            waits.append(self.written[stay.storage])
        self.ready[stay.storage] = self.fetched[stay.storage] = self._add(
            ActionKind.MOVE,
            read_stream(stay.tier),
            waits,
            storage=stay.storage,
            route=(stay.tier, DEVICE),
            places=((stay.storage, self.offsets[index]),),
        )

    def _run_on_host(self, index: int, op: int, kind: ActionKind) -> None:
        reads, writes = self.graph.op_reads[op], self.graph.op_writes[op]
        waits = [self.written[s] for s in (*reads, *writes) if s in self.written]
        waits += [self.fetched[s] for s in writes if s in self.fetched]
        waits += [wait for s in writes if s not in reads for wait in self._take_on_host(s)]
        action = self._add(kind, HOST_STREAM, waits, op=op)
        self.written.update(dict.fromkeys(writes, action))
        self.worked.update(dict.fromkeys((*reads, *writes), action))
        for storage in dict.fromkeys((*reads, *writes)):
            if self.emission.staged.get(storage, (0, -1))[1] == index:
                waits = [self.fetched[storage]] if storage in self.fetched else []
                freed = self._add(
                    ActionKind.FREE, HOST_STREAM, waits, storage=storage, route=(self.emission.host_tier, "")
                )
                self.freed_on_host.give(*self._host_range(storage), freed)

    def _host_range(self, storage: int) -> tuple[int, int]:
        low = self.host_slots[storage]
        return low, low + -(-self.sizes[storage] // PAGE_BYTES) * PAGE_BYTES

    def _take_on_host(self, storage: int) -> list[int]:
        """Claim the slot of what is staged; returns the FREE actions that gave it up."""
        return self.freed_on_host.take(*self._host_range(storage)) if storage in self.emission.staged else []

    def _run(self, index: int, item: Item) -> None:
        if item.op is not None and item.op in self.graph.on_host:
            self._run_on_host(index, item.op, item.kind)
            return
        made = self.makes[index]
        waits = [wait for stay in made for wait in self._take(stay)]
        waits += [wait for stay in made for wait in self._last_stay(self.emission.residencies[stay].storage)]
        used = self._uses(item)
        waits += [self.ready[s] for s in used if s in self.ready]
        places = tuple((self.emission.residencies[i].storage, self.offsets[i]) for i in made)
        action = self._add(
            item.kind,
            COMPUTE_STREAM,
            waits,
            op=item.op,
            storage=item.storage,
            route=(item.source, item.target),
            places=places,
        )
        for storage in (*used, *(s for s, _ in places)):
            self.touched[storage] = action
        for storage, _ in places:
            self.ready[storage] = action

    def _uses(self, item: Item) -> tuple[int, ...]:
        if item.op is not None:
            return self.graph.op_reads[item.op]
        assert item.storage is not None
        return (item.storage,) if item.target == CALLER else ()

    def _leave(self, index: int) -> None:
        stay = self.emission.residencies[index]
        stream = COMPUTE_STREAM
        if stay.to_tier:
            stream = write_stream(stay.to_tier)
            waits = [self.touched[stay.storage]] if stay.storage in self.touched else []
            if stay.to_tier == self.emission.host_tier:
                waits += self._take_on_host(stay.storage)
                waits += [self.worked[stay.storage]] if stay.storage in self.worked else []
            self.written[stay.storage] = self._add(
                ActionKind.MOVE, stream, waits, storage=stay.storage, route=(DEVICE, stay.to_tier)
            )
        waits = [a for a in (self.touched.get(stay.storage), self.ready.get(stay.storage)) if a is not None]
        freed = self._add(ActionKind.FREE, stream, waits, storage=stay.storage, route=(DEVICE, ""))
        self.gone[stay.storage] = freed
        low = self.offsets[index]
        self.freed.give(low, low + self.sizes[stay.storage], freed)
