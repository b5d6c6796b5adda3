"""Lowering: choices -> a Program with every address and every wait fixed: ``emit``, ``stretch``, ``pack``, ``connect``.

Also what the process takes besides tensors (``overhead_bytes``).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lading.ir.action import CALLER, DEVICE, ActionKind
from lading.ir.graph import StepGraph
from lading.ir.machine import PACKED_COLUMNS, Machine, Tier
from lading.ir.plan import Option
from lading.ir.program import (
    COMPUTE_STREAM,
    HOST_STREAM,
    NETWORK_STREAM,
    PAGE_BYTES,
    ActionList,
    Homes,
    Program,
    read_stream,
    slot_bytes,
    slot_sizes,
    stream_of,
    write_stream,
)
from lading.memory.lifetime import Lifetimes
from lading.memory.packing import Buffer, pack
from lading.planner.emission import UNUSED, Choices, Emission, HostStay, Item, emit
from lading.planner.host_staging import staging
from lading.planner.roomier import LEAST_OPS, BufferPlaces, roomier
from lading.planner.schedule import Stretched, base_profile, stretch, wrapped


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
        self.sent: dict[int, list[int]] = {}  # actions that send a storage while others go on with it
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
        self.unsharded: set[int] = set()  # items that have run early
        self.loads: list[list[HostStay]] = [[] for _ in range(count)]
        self.returns: list[list[HostStay]] = [[] for _ in range(count)]
        for stay in emission.host_stays:
            self.loads[stay.loaded].append(stay)
            self.returns[stay.last].append(stay)
        self.behind = frozenset(stay.storage for stay in emission.host_stays)
        for index, stay in enumerate(emission.residencies):
            if stay.tier or (not stay.initial and stretched.first[index] < stay.first):
                insort(self.arrivals[stretched.first[index]], index, key=lambda i: (emission.residencies[i].first, i))
            if not stay.tier and not stay.initial:
                self.makes[stay.first].append(index)
            if not stay.final:
                self.leaves[stay.last].append(index)

    def write(self) -> None:
        for index, item in enumerate(self.emission.items):
            for stay in self.arrivals[index]:
                if self.emission.residencies[stay].tier:
                    self._fetch(stay)
                else:
                    early = self.emission.residencies[stay].first
                    self._run(early, self.emission.items[early])
                    self.unsharded.add(early)
            for host_stay in self.loads[index]:
                self._load_on_host(host_stay)
            if index not in self.unsharded:
                self._run(index, item)
            for host_stay in self.returns[index]:
                self._return(host_stay)
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
        waits += [self.fetched[s] for s in writes if s in self.fetched and s not in self.behind]
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

    def _load_on_host(self, stay: HostStay) -> None:
        """Bring what lies behind the host's memory to its place there, past the device."""
        storage = stay.storage
        waits = self.freed_on_host.take(*self._host_range(storage))
        waits += [self.written[storage]] if storage in self.written else []
        route = (stay.tier, self.emission.host_tier)
        self.written[storage] = self._add(ActionKind.MOVE, read_stream(stay.tier), waits, storage=storage, route=route)

    def _return(self, stay: HostStay) -> None:
        """Write back what the host changed, and free its place."""
        storage, host = stay.storage, self.emission.host_tier
        stream = write_stream(stay.tier) if stay.is_written else HOST_STREAM
        if stay.is_written:
            waits = [self.worked[storage], *([self.fetched[storage]] if storage in self.fetched else [])]
            self.written[storage] = self._add(ActionKind.MOVE, stream, waits, storage=storage, route=(host, stay.tier))
        freed = self._add(ActionKind.FREE, stream, (), storage=storage, route=(host, ""))
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
        written = () if item.op is None else self.graph.op_writes[item.op]
        waits += [sent for storage in written for sent in self.sent.get(storage, ())]
        stream = COMPUTE_STREAM if item.op is None else stream_of(self.graph, item.op)
        if stream != COMPUTE_STREAM:
            waits += [self.touched[s] for s in used if s in self.touched]
        places = tuple((self.emission.residencies[i].storage, self.offsets[i]) for i in made)
        action = self._add(
            item.kind,
            stream,
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
        if item.kind is ActionKind.SEND:
            for storage in used:
                self.sent.setdefault(storage, []).append(action)
        if stream != COMPUTE_STREAM and item.op is not None:
            self.ready.update(dict.fromkeys(self.graph.op_writes[item.op], action))

    def _uses(self, item: Item) -> tuple[int, ...]:
        if item.op is not None:
            return self.graph.op_reads[item.op]
        assert item.storage is not None
        return (item.storage,) if item.target == CALLER else ()

    def _leave(self, index: int) -> None:
        stay = self.emission.residencies[index]
        stream, op = COMPUTE_STREAM, self.emission.items[stay.last].op
        if op in self.graph.collectives:  # computing goes on beside it
            stream = stream_of(self.graph, op)
        if stay.to_tier:
            stream = write_stream(stay.to_tier)
            waits = [self.touched[stay.storage]] if stay.storage in self.touched else []
            if stay.to_tier == self.emission.host_tier:
                waits += self._take_on_host(stay.storage)
            if stay.to_tier == self.emission.host_tier or stay.storage in self.behind:
                waits += [self.worked[stay.storage]] if stay.storage in self.worked else []
            self.written[stay.storage] = self._add(
                ActionKind.MOVE, stream, waits, storage=stay.storage, route=(DEVICE, stay.to_tier)
            )
        waits = [a for a in (self.touched.get(stay.storage), self.ready.get(stay.storage)) if a is not None]
        waits += self.sent.pop(stay.storage, [])
        freed = self._add(ActionKind.FREE, stream, waits, storage=stay.storage, route=(DEVICE, ""))
        self.gone[stay.storage] = freed
        low = self.offsets[index]
        self.freed.give(low, low + self.sizes[stay.storage], freed)


@dataclass(frozen=True)
class StepCosts:
    """Seconds and bytes of a step's operations, as the lowering and the policies need them.

    Attributes:
        op_seconds: Seconds of each operation.
        workspace_bytes: Scratch of each operation outside the arena.
        columns: Columns of products that BLAS keeps memory for (``lading.cost.compute.packed_columns``).
        compiled: Products that a CPU's library compiles code for (``lading.cost.compute.compiled_products``).
        decomposes: Whether matrices are decomposed (``lading.cost.compute.decomposes``).
        save_bytes: Bytes of the device that saving between two steps takes beside what lies there.
        kept_bytes: Bytes that the step's kernels were measured to leave behind in the process; None where they were
            not, and they are worked out from the three before.
        spare_bytes: Part of the largest scratch that some of equal runs take and others do not.
        received_bytes: Bytes of a place for all that other stages send.
        reducing_bytes: Bytes that collectives take beside whatever computes, of which threads may keep some or all.
        other_ops: Operations of other steps that the process is ready to run too.
        output_bytes: Bytes of the outputs that a step gives the caller beside its scalars.
    """

    op_seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    columns: int = 0
    compiled: int = 0
    decomposes: bool = False
    save_bytes: int = 0
    kept_bytes: int | None = None
    spare_bytes: int = 0
    received_bytes: int = 0
    reducing_bytes: int = 0
    other_ops: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Lowered:
    """Result of a lowering: the Program, or how far it is from fitting.

    Attributes:
        program: Program; None when the arena does not fit.
        emission: Items and residencies, to say what is alive where.
        excess_bytes: Bytes above the arena's budget; 0 when it fits.
        peak_item: Number of the item at which most is resident.
    """

    program: Program | None
    emission: Emission
    excess_bytes: int
    peak_item: int
    arena_bytes: int


#: The room of a stretch first shrinks by one of so many parts of the arena at least, then by twice as much each time.
_STEPS = 200
#: How often a room is then looked for between the last two.
_HALVINGS = 2
#: Shares of the bytes that are needed without transfers up to which transfers may fill memory, where room is spared.
_SPARING = (0.9, 0.75, 0.5, 0.0)
#: More bytes than any device has.
_NO_LIMIT = 1 << 60
#: What the executor holds on the host for one operation: its actions, their calls and the views they work on.
#: Measured: 0.76 MiB for 422 operations of a mixture of experts, 1.37 for 725 of a Llama, torch 2.13.
_BYTES_PER_OP = 2048
#: The same where what kernels keep was measured and nothing else leaves room for a step that moves and recomputes,
#: which has more actions. Measured: 1.3 MiB for 485 operations of a diffusion transformer at a quarter of its memory.
_BYTES_PER_OP_MOVED = 3072
#: The first 16-bit product brings in the library's own code, as much as it keeps for this many. Measured: 4 MiB.
_LIBRARY_KERNELS = 8
#: What LAPACK keeps once it has decomposed a matrix; in a call it packs into buffers of its own, as large as those of
#: products. Measured: 6.6 to 10.2 MiB kept, up to 5.8 more in a call on one thread (2048 rows) and 7.9 on two (1024),
#: torch 2.13 with MKL.
_LAPACK_BYTES = 10 << 20
#: The allocator keeps temporaries up to a size (``lading.runtime.resident.reuse_pages``); those of different sizes come
#: to lie side by side. Measured: up to 5 MiB in all, torch 2.13 (benchmarks/predictions).
_LARGEST_KEPT_BYTES, _KEPT_BYTES = 4 << 20, 5 << 20
#: Equal runs differ by up to 3.7 MiB, of a process of 8.5 (torch 2.13, benchmarks/predictions): this share of it.
_VARIES = 0.36


def overhead_bytes(machine: Machine, costs: StepCosts) -> int:
    """Bytes that the running process needs besides tensors and scratch."""
    device = machine.device
    if device.kind != "cpu":
        return device.overhead_bytes
    if costs.kept_bytes is not None:
        calls = _BYTES_PER_OP_MOVED * (len(costs.op_seconds) + costs.other_ops)
        exchanged = costs.received_bytes + costs.reducing_bytes
        return costs.kept_bytes + exchanged + costs.output_bytes + calls
    calls = _BYTES_PER_OP * (len(costs.op_seconds) + costs.other_ops)
    packing = device.packing_bytes * costs.columns // PACKED_COLUMNS
    others = set(costs.workspace_bytes) - {max(costs.workspace_bytes, default=0)}  # the largest is the workspace
    allocator = min(_KEPT_BYTES, sum(size for size in others if size < _LARGEST_KEPT_BYTES))
    compiled = device.kernel_bytes * (costs.compiled + _LIBRARY_KERNELS) if costs.compiled else 0
    lapack = _LAPACK_BYTES + device.packing_bytes if costs.decomposes else 0
    causes = device.overhead_bytes + packing + compiled + lapack + calls + allocator + costs.output_bytes
    return causes + int(_VARIES * device.overhead_bytes)


def fixed_bytes(machine: Machine, costs: StepCosts) -> int:
    """Bytes of the device's budget that are not the arena's."""
    return overhead_bytes(machine, costs) + max(_saving_bytes(costs), *costs.workspace_bytes, 0)


def _saving_bytes(costs: StepCosts) -> int:
    """Bytes beside arena and overhead while saving: its buffers, and the step's largest scratch if that is kept."""
    if costs.kept_bytes is not None:  # saving then begins with giving freed scratch back
        return costs.save_bytes
    scratch = max(costs.workspace_bytes, default=0)
    return costs.save_bytes + (scratch if scratch < _LARGEST_KEPT_BYTES else 0) if costs.save_bytes else 0


class Lowering:
    """Choices of a step, emitted, to be packed into arenas of any size.

    Attributes:
        emission: Items and residencies.
        peak_bytes: Bytes resident at once if every transfer took no time: no arena is smaller.
        peak_item: Number of the item at which that is.
        both_ways: As of ``planner.schedule.stretch``.
    """

    def __init__(
        self,
        graph: StepGraph,
        lives: Lifetimes,
        machine: Machine,
        costs: StepCosts,
        choices: Choices,
        item_seconds: Sequence[float] | None = None,
        pace: Sequence[float] = (),
    ) -> None:
        """Emit choices; the arguments are those of ``lower``."""
        self.graph, self.machine, self.costs, self.homes = graph, machine, costs, lives.homes
        self.both_ways = False
        self.emission = emit(graph, lives, _one_tier(_at_home(lives, choices), machine), machine.host_tier)
        self.seconds = [_item_seconds(graph, machine, costs, item) for item in self.emission.items]
        if item_seconds:
            timed = iter(item_seconds)
            self.seconds = [0.0 if item.op in graph.off_compute_ops else next(timed) for item in self.emission.items]
        elif pace:
            self.seconds = paced_seconds(self.emission, self.seconds, pace)
        self._network = _network_seconds(graph, costs, self.emission)
        base = base_profile(graph, self.emission)
        self.peak_bytes, self.peak_item = int(base.max()), int(base.argmax())

    def placed(self, soft_bytes: int, arena_bytes: int) -> PackedEmission:
        """Give transfers ``soft_bytes`` of room, and find addresses: within the arena, or as low as they can be."""
        room = stretch(
            self.graph, self.machine, self.emission, self.seconds, soft_bytes,
            repeats=self.homes is None, both_ways=self.both_ways, network_seconds=self._network,
        )  # fmt: skip
        cut, stretched = wrapped(self.emission, room)
        return PackedEmission(cut, stretched, _pack(self.graph, cut, stretched, arena_bytes, self.homes))

    def _roomiest(self, attempt: PackedEmission, soft: int, above: int, arena: int) -> PackedEmission:
        """Halve the distance between a room of transfers that fits and a larger one that does not a few times."""
        for _ in range(_HALVINGS):
            middle = (soft + above) // 2
            roomier = self.placed(middle, arena)
            if roomier.size_bytes <= arena:
                attempt, soft = roomier, middle
            else:
                above = middle
        return attempt

    def pack_into(self, arena: int, *, sparing: bool) -> PackedEmission:
        """Find addresses in ``arena`` bytes, or as near to them as they can be, in the way that ``lower`` says."""
        peak = self.peak_bytes
        attempt, soft, step = self.placed(arena, arena), arena, max(1, arena // _STEPS)
        if attempt.size_bytes > arena > peak:
            tightest, above = self.placed(peak, arena), arena
            while attempt.size_bytes > arena and attempt is not tightest:
                above = soft
                soft -= max(attempt.size_bytes - arena, step)
                step *= 2
                attempt = self.placed(soft, arena) if soft > peak and tightest.size_bytes <= arena else tightest
            if attempt.size_bytes <= arena:
                attempt = self._roomiest(attempt, max(soft, peak), above, arena)
        for share in _SPARING if sparing else ():
            if attempt.size_bytes > arena:
                spared = self.placed(int(share * peak), arena)
                attempt = min(attempt, spared, key=lambda placed: placed.size_bytes)
        if attempt.size_bytes > arena:
            return attempt
        placed = attempt.placed if len(self.graph.ops) >= LEAST_OPS else attempt.placed.pinned
        return PackedEmission(attempt.emission, *roomier(attempt.emission, attempt.stretched, placed, arena))

    def smallest_arena_bytes(self) -> int:
        """Smallest arena, to within 2%, that ``within`` finds addresses in if it spares room."""
        low, high = self.peak_bytes, self.placed(0, self.peak_bytes).size_bytes
        while high - low > max(high // 50, PAGE_BYTES):
            middle = (low + high) // 2
            if self.pack_into(middle, sparing=True).size_bytes > middle:
                low = middle + 1
            else:
                high = middle
        return high


def lower(  # noqa: PLR0913  all that decides a Program
    graph: StepGraph,
    lives: Lifetimes,
    machine: Machine,
    costs: StepCosts,
    choices: Choices,
    budgets: dict[str, int],
    *,
    item_seconds: Sequence[float] | None = None,
    pace: Sequence[float] = (),
    sparing: bool = False,
    both_ways: bool = False,
) -> Lowered:
    """Lower choices to a Program: emit, stretch, pack and connect.

    The stretch is given all the arena, and less and less of it until what it leads to can be packed; what cannot even
    be packed without room for transfers is reported at once.

    Args:
        choices: Option of each gap, by (storage, position of the use that opens it); gaps left out are kept.
        budgets: Bytes by tier.
        item_seconds: Seconds that each item of the compute stream is expected to take, waiting for the next one
            included; None takes what it computes.
        pace: How many times longer than it computes each operation is expected to take where ``item_seconds`` says
            nothing, what is recomputed like the operation before it; () for once.
        sparing: Give transfers less room than is free, and none at last, if what they lead to cannot be packed: stays
            that end where nothing else begins leave holes. It takes several packings where nothing fits.
        both_ways: As of ``planner.schedule.stretch``.
    """
    lowering = Lowering(graph, lives, machine, costs, choices, item_seconds, pace)
    lowering.both_ways = both_ways
    arena, emission, peak_item = budgets[DEVICE] - fixed_bytes(machine, costs), lowering.emission, lowering.peak_item
    if lowering.peak_bytes > arena:
        return Lowered(None, emission, lowering.peak_bytes - arena, peak_item, lowering.peak_bytes)
    attempt = lowering.pack_into(arena, sparing=sparing)
    if attempt.size_bytes > arena:
        return Lowered(None, emission, attempt.size_bytes - arena, peak_item, attempt.size_bytes)
    program = _program(graph, attempt, budgets, machine, costs, lives.homes, lowering.seconds)
    return Lowered(program, emission, 0, peak_item, attempt.size_bytes)


@dataclass(frozen=True)
class PackedEmission:
    """Residencies with some room for their transfers, and their addresses."""

    emission: Emission
    stretched: Stretched
    placed: BufferPlaces

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena that they need."""
        return self.placed.size_bytes


def unlimited_bytes(graph: StepGraph, machine: Machine, costs: StepCosts, emission: Emission) -> int:
    """Bytes of the arena if every transfer gets all the time it takes."""
    seconds = [_item_seconds(graph, machine, costs, item) for item in emission.items]
    network = _network_seconds(graph, costs, emission)
    cut, stretched = wrapped(emission, stretch(graph, machine, emission, seconds, _NO_LIMIT, network_seconds=network))
    return _pack(graph, cut, stretched, _NO_LIMIT).size_bytes


def _one_tier(choices: Choices, machine: Machine) -> Choices:
    """Send a storage that is to go to several tiers to the farthest of them every time, as it has a slot in one."""
    tiers: dict[int, set[Option]] = {}
    for (storage, _), option in choices.items():
        if option.tier:
            tiers.setdefault(storage, set()).add(option)
    order = [Option(tier.name) for tier in machine.tiers]
    farthest = {storage: max(several, key=order.index) for storage, several in tiers.items() if len(several) > 1}
    if not farthest:
        return choices
    return {
        (storage, start): farthest.get(storage, option) if option.tier else option
        for (storage, start), option in choices.items()
    }


def _item_seconds(graph: StepGraph, machine: Machine, costs: StepCosts, item: Item) -> float:
    if item.op is not None:
        return 0.0 if item.op in graph.off_compute_ops else costs.op_seconds[item.op]
    assert item.storage is not None
    return graph.storages[item.storage].size_bytes / machine.device.memory_bandwidth_bytes_per_s


def paced_seconds(emission: Emission, seconds: Sequence[float], pace: Sequence[float]) -> list[float]:
    """Seconds of each item in a step whose operations take as many times longer as ``pace`` says."""
    paced: list[float] = []
    times = 1.0
    for item, computes_s in zip(emission.items, seconds, strict=True):
        if item.op is not None and item.kind is not ActionKind.RECOMPUTE:
            times = pace[item.op]
        paced.append(times * computes_s)
    return paced


def _network_seconds(graph: StepGraph, costs: StepCosts, emission: Emission) -> dict[int, float]:
    """Seconds of what the network carries, by item."""
    return {
        index: costs.op_seconds[item.op]
        for index, item in enumerate(emission.items)
        if item.op is not None and stream_of(graph, item.op) == NETWORK_STREAM
    }


def _at_home(lives: Lifetimes, choices: Choices) -> Choices:
    """Change choices so that what has a home is there over the step's boundary, and in no other lower tier."""
    homes = lives.homes
    if homes is None:
        return choices
    last = {s: uses[-1] if uses else UNUSED for s, uses in enumerate(lives.uses)}
    tiers = {storage: Option(tier) for tier, places in homes.slots.items() for storage in places}
    fixed = {key: tiers.get(key[0], o) if o.tier else o for key, o in choices.items()}
    for storage in homes.resident:
        fixed.pop((storage, last[storage]), None)
    return fixed | {(storage, last[storage]): tier for storage, tier in tiers.items()}


def _pack(
    graph: StepGraph, emission: Emission, stretched: Stretched, limit_bytes: int, homes: Homes | None = None
) -> BufferPlaces:
    """Find addresses; a storage that is there at both ends of the step is one buffer, as it comes back to its place."""
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
    items = [Buffer(size, tuple(span)) for size, span in zip(sizes, spans, strict=True)]
    fixed = {home[storage]: offset for storage, offset in homes.resident.items()} if homes is not None else {}
    runs = _runs(graph, emission, stretched, owners)
    packing = pack(items, limit_bytes, fixed, runs, by_fullness=len(graph.ops) >= LEAST_OPS)
    together = {buffer for run in runs for buffer in run}
    slots = tuple(map(slot_bytes, sizes))
    return BufferPlaces(packing.offsets, slots, tuple(owners), frozenset(together | fixed.keys()), packing.size_bytes)


def _runs(graph: StepGraph, emission: Emission, stretched: Stretched, owners: Sequence[int]) -> list[dict[int, int]]:
    """Buffers that lie one after another: pieces of a parameter that an operation reads together.

    Returns:
        Of each run its buffers, with the bytes of the parameter in front of each.
    """
    if not graph.runs:
        return []
    front = {piece: at for run in graph.runs for piece, at in zip(run, _starts(graph, run), strict=True)}
    stays: dict[int, list[int]] = {piece: [] for piece in front}
    for index, stay in enumerate(emission.residencies):
        if stay.storage in front:
            stays[stay.storage].append(index)
    group: dict[int, int] = {}

    def root(buffer: int) -> int:
        while group.setdefault(buffer, buffer) != buffer:
            buffer = group[buffer]
        return buffer

    at: dict[int, int] = {}
    for number, item in enumerate(emission.items):
        for pieces in graph.joined.get(item.op, ()) if item.op is not None else ():
            buffers: list[int] = []
            for piece in pieces:
                # Behind its last item a stay has its place to be written, while the next may have begun elsewhere.
                stay = next(i for i in stays[piece] if stretched.first[i] <= number <= emission.residencies[i].last)
                buffers.append(owners[stay])
                at[owners[stay]] = front[piece]
            for buffer in buffers[1:]:
                group[root(buffer)] = root(buffers[0])
    runs: dict[int, dict[int, int]] = {}
    for buffer, distance in at.items():
        runs.setdefault(root(buffer), {})[buffer] = distance
    return [{b: d - min(run.values()) for b, d in run.items()} for run in runs.values()]


def _starts(graph: StepGraph, run: Sequence[int]) -> list[int]:
    """Bytes of a parameter in front of each of its pieces."""
    return [0, *accumulate(graph.storages[piece].size_bytes for piece in run[:-1])]


def _program(
    graph: StepGraph,
    placed: PackedEmission,
    budgets: dict[str, int],
    machine: Machine,
    costs: StepCosts,
    homes: Homes | None,
    expected: Sequence[float],
) -> Program:
    emission, stretched = placed.emission, placed.stretched
    offsets = [placed.placed.offsets[owner] for owner in placed.placed.owners]
    seconds = expected if emission.host_stays else [_item_seconds(graph, machine, costs, i) for i in emission.items]
    slots = _tier_slots(graph, machine, emission, homes)
    if emission.staged or emission.host_stays:
        host = emission.host_tier
        end = _end_of(graph, machine.tiers, host, slots.get(host, ()))
        made = staging(graph, machine, costs.op_seconds, seconds, emission, budgets[host] - end)
        staged = ((storage, end + offset) for storage, offset in made.offsets.items())
        slots[host] = (*slots.get(host, ()), *staged)
        emission = dataclasses.replace(emission, host_stays=made.host_stays)
    return Program(
        graph=graph,
        ranks=(connect(graph, emission, stretched, offsets, dict(slots.get(emission.host_tier, ()))),),
        arena_bytes=placed.size_bytes,
        workspace_bytes=max(costs.workspace_bytes, default=0),
        resident=tuple(
            (r.storage, offset) for r, offset in zip(emission.residencies, offsets, strict=True) if r.initial
        ),
        slots=slots,
        budgets=budgets,
        overhead_bytes=overhead_bytes(machine, costs),
        save_bytes=_saving_bytes(costs),
        spare_bytes=costs.spare_bytes,
        reducing_bytes=costs.reducing_bytes if costs.kept_bytes is not None else 0,
        tiers=machine.tiers,
    )


def _tier_slots(
    graph: StepGraph, machine: Machine, emission: Emission, homes: Homes | None
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Give every storage that is ever in a lower tier a place there, one after another, but for what is staged."""
    sizes = slot_sizes(graph)
    units = {tier.name: tier.alignment_bytes for tier in machine.tiers}
    slots: dict[str, list[tuple[int, int]]] = {}
    ends: dict[str, int] = {}
    for tier, places in homes.slots.items() if homes is not None else ():
        slots[tier] = list(places.items())
        ends[tier] = _end_of(graph, machine.tiers, tier, slots[tier])
    fixed = {storage for rows in slots.values() for storage, _ in rows}
    for storage, tier in sorted(emission.tiers.items()):
        if storage in emission.staged or storage in fixed:
            continue
        slots.setdefault(tier, []).append((storage, ends.get(tier, 0)))
        ends[tier] = ends.get(tier, 0) + -(-sizes[storage] // units[tier]) * units[tier]
    return {tier: tuple(rows) for tier, rows in slots.items()}


def _end_of(graph: StepGraph, tiers: Sequence[Tier], name: str, slots: Sequence[tuple[int, int]]) -> int:
    """First byte behind all slots of a tier."""
    unit = next(tier.alignment_bytes for tier in tiers if tier.name == name)
    return max((offset + -(-slot_bytes(graph.storages[s].size_bytes) // unit) * unit for s, offset in slots), default=0)
