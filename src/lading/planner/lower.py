"""Lowering: choices -> a Program with every address and every wait fixed."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from lading.ir.action import CALLER, Action, ActionKind
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.program import COMPUTE_STREAM, Program, slot_bytes
from lading.memory.arena import Item as ArenaItem
from lading.memory.arena import Packing, pack
from lading.memory.lifetime import Lifetimes
from lading.planner.emit import Choices, Emission, Item, emit
from lading.planner.schedule import Stretched, base_profile, stretch


@dataclass(frozen=True)
class Costs:
    """What the lowering and the policies know of the step's operations.

    Attributes:
        op_seconds: Time of each operation.
        workspace_bytes: Scratch of each operation outside the arena.
    """

    op_seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """A lowering: the Program, or how far it is from fitting.

    Attributes:
        program: None when the arena does not fit.
        emission: The items, to say what is alive where.
        excess_bytes: Bytes above the arena's budget; 0 when it fits.
        peak_item: The item where most is resident.
    """

    program: Program | None
    emission: Emission
    excess_bytes: int
    peak_item: int
    arena_bytes: int


#: What the executor holds for one operation: its actions, their calls and the views they work on.
#: Measured: 3.7 MB for 1053 operations (3147 actions) of a Llama at a 30% budget, torch 2.13.
_BYTES_PER_OP = 4096
#: Room for what the allocator holds between temporaries of changing sizes.
_ALLOCATOR_SLACK_BYTES = 2 << 20


def overhead_bytes(machine: Machine, costs: Costs) -> int:
    """What the running process needs besides tensors and scratch."""
    scratch = _ALLOCATOR_SLACK_BYTES if any(costs.workspace_bytes) else 0
    return machine.device.overhead_bytes + scratch + _BYTES_PER_OP * len(costs.op_seconds)


def fixed_bytes(machine: Machine, costs: Costs) -> int:
    """Bytes of the device's budget that are not the arena's."""
    return overhead_bytes(machine, costs) + max(costs.workspace_bytes, default=0)


def lower(
    graph: StepGraph, lives: Lifetimes, machine: Machine, costs: Costs, choices: Choices, budgets: dict[str, int]
) -> Lowered:
    """Emit, stretch, pack and connect.

    The stretch is given less and less room until the packed arena fits; with none left, what is missing is reported.
    """
    emission = emit(graph, lives, choices)
    seconds = [_item_seconds(graph, machine, costs, item) for item in emission.items]
    arena = budgets["device"] - fixed_bytes(machine, costs)
    base = base_profile(graph, emission)
    peak = int(base.max())
    peak_item = int(base.argmax())
    if peak > arena:
        return Lowered(None, emission, peak - arena, peak_item, peak)
    soft = arena
    while True:
        stretched = stretch(graph, machine, emission, seconds, soft)
        packing, owners = _pack(graph, emission, stretched, arena)
        if packing.size_bytes <= arena:
            program = _connect(graph, emission, stretched, packing, owners, budgets, machine, costs)
            return Lowered(program, emission, 0, peak_item, packing.size_bytes)
        if soft <= peak:
            return Lowered(None, emission, packing.size_bytes - arena, peak_item, packing.size_bytes)
        soft = max(peak, soft - max(packing.size_bytes - arena, arena // 200))


def _item_seconds(graph: StepGraph, machine: Machine, costs: Costs, item: Item) -> float:
    if item.op is not None:
        return costs.op_seconds[item.op]
    assert item.storage is not None
    return graph.storages[item.storage].size_bytes / machine.device.memory_bandwidth_bytes_per_s


def _pack(graph: StepGraph, emission: Emission, stretched: Stretched, limit_bytes: int) -> tuple[Packing, list[int]]:
    """Addresses; a storage that is there at both ends of the step is one item, as it must come back to its place."""
    spans: list[list[tuple[int, int]]] = []
    sizes: list[int] = []
    owners: list[int] = []
    home: dict[int, int] = {}
    for stay, first, last in zip(emission.residencies, stretched.first, stretched.last, strict=True):
        at_home = stay.initial or stay.final
        if at_home and stay.storage in home:
            owners.append(home[stay.storage])
            spans[home[stay.storage]].append((first, last))
            continue
        if at_home:
            home[stay.storage] = len(spans)
        owners.append(len(spans))
        spans.append([(first, last)])
        sizes.append(graph.storages[stay.storage].size_bytes)
    items = [ArenaItem(size, tuple(span)) for size, span in zip(sizes, spans, strict=True)]
    return pack(items, limit_bytes), owners


def _connect(
    graph: StepGraph,
    emission: Emission,
    stretched: Stretched,
    packing: Packing,
    owners: Sequence[int],
    budgets: dict[str, int],
    machine: Machine,
    costs: Costs,
) -> Program:
    """Write the actions and the waits between their streams."""
    offsets = [packing.offsets[owner] for owner in owners]
    slots = _tier_slots(graph, emission)
    writer = _Writer(graph, emission, stretched, offsets)
    writer.write()
    return Program(
        graph=graph,
        actions=tuple(writer.actions),
        arena_bytes=packing.size_bytes,
        workspace_bytes=max(costs.workspace_bytes, default=0),
        resident=tuple(
            (r.storage, offset) for r, offset in zip(emission.residencies, offsets, strict=True) if r.initial
        ),
        slots=slots,
        budgets=budgets,
        overhead_bytes=overhead_bytes(machine, costs),
    )


def _tier_slots(graph: StepGraph, emission: Emission) -> dict[str, tuple[tuple[int, int], ...]]:
    """A place in its lower tier for every storage that is ever there, one after another."""
    slots: dict[str, list[tuple[int, int]]] = {}
    ends: dict[str, int] = {}
    for storage, tier in sorted(emission.tiers.items()):
        slots.setdefault(tier, []).append((storage, ends.get(tier, 0)))
        ends[tier] = ends.get(tier, 0) + slot_bytes(graph.storages[storage].size_bytes)
    return {tier: tuple(rows) for tier, rows in slots.items()}


class _Writer:
    """Turns items and residencies into actions.

    Per storage it knows the action that made it resident and the last one that touched it; per address range, the
    action that freed it. Waits are added only across streams and only when no earlier wait covers them.
    """

    def __init__(self, graph: StepGraph, emission: Emission, stretched: Stretched, offsets: Sequence[int]) -> None:
        self.graph, self.emission = graph, emission
        self.actions: list[Action] = []
        self.known: dict[tuple[str, str], int] = {}
        self.ready: dict[int, int] = {}  # storage -> the action after which it can be read
        self.touched: dict[int, int] = {}
        self.written: dict[int, int] = {}  # storage -> the action that wrote its tier copy
        self.gone: dict[int, int] = {}  # storage -> the FREE that ended its last stay
        self.freed: list[tuple[int, int, int]] = []  # (low, high, FREE action) of ranges nobody has taken since
        self.offsets = offsets
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

    def _range(self, index: int) -> tuple[int, int]:
        size = slot_bytes(self.graph.storages[self.emission.residencies[index].storage].size_bytes)
        return self.offsets[index], self.offsets[index] + size

    def _take(self, index: int) -> list[int]:
        """Claim the address range of a residency; returns the FREE actions that gave it up."""
        low, high = self._range(index)
        waits: list[int] = []
        rest: list[tuple[int, int, int]] = []
        for left, right, action in self.freed:
            if right <= low or left >= high:
                rest.append((left, right, action))
                continue
            waits.append(action)
            if left < low:
                rest.append((left, low, action))
            if right > high:
                rest.append((high, right, action))
        self.freed = rest
        return waits

    def _last_stay(self, storage: int) -> tuple[int, ...]:
        return (self.gone[storage],) if storage in self.gone else ()

    def _add(self, kind: ActionKind, stream: str, waits: Sequence[int], **fields: object) -> int:
        action_id = len(self.actions)
        needed: dict[str, int] = {}
        for wait in waits:
            other = self.actions[wait].stream
            if other != stream and wait > self.known.get((stream, other), -1):
                needed[other] = max(needed.get(other, -1), wait)
        for other, wait in needed.items():
            self.known[stream, other] = wait
        self.actions.append(
            Action(action_id, kind, stream, waits=tuple(sorted(needed.values())), **fields)  # pyright: ignore[reportArgumentType]
        )
        return action_id

    def _fetch(self, index: int) -> None:
        stay = self.emission.residencies[index]
        waits = [*self._take(index), *self._last_stay(stay.storage)]
        if stay.storage in self.written:
            waits.append(self.written[stay.storage])
        self.ready[stay.storage] = self._add(
            ActionKind.MOVE,
            f"{stay.tier}_read",
            waits,
            storage=stay.storage,
            source=stay.tier,
            target="device",
            places=((stay.storage, self.offsets[index]),),
        )

    def _run(self, index: int, item: Item) -> None:
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
            source=item.source,
            target=item.target,
            places=places,
        )
        for storage in (*used, *(s for s, _ in places)):
            self.touched[storage] = action
        for storage, _ in places:
            self.ready[storage] = action

    def _uses(self, item: Item) -> tuple[int, ...]:
        if item.op is not None:
            return self.graph.reads(self.graph.ops[item.op])
        assert item.storage is not None
        return (item.storage,) if item.target == CALLER else ()

    def _leave(self, index: int) -> None:
        stay = self.emission.residencies[index]
        stream = COMPUTE_STREAM
        if stay.to_tier:
            stream = f"{stay.to_tier}_write"
            waits = [self.touched[stay.storage]] if stay.storage in self.touched else []
            self.written[stay.storage] = self._add(
                ActionKind.MOVE, stream, waits, storage=stay.storage, source="device", target=stay.to_tier
            )
        waits = [a for a in (self.touched.get(stay.storage), self.ready.get(stay.storage)) if a is not None]
        freed = self._add(ActionKind.FREE, stream, waits, storage=stay.storage, source="device")
        self.gone[stay.storage] = freed
        self.freed.append((*self._range(index), freed))
