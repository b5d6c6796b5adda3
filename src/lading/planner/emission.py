"""Emission: choices for gaps -> the sequence of things that must happen, before any address or transfer time is fixed.

Walking the operations in order, each operation first gets its inputs back (moved in, or recomputed with whatever that
needs), runs, and then every storage it touched is kept, dropped, moved out or freed as its next gap was decided.
An operation on the host finds all it needs in the tier where the host's processors work: what it touches is there over
the gaps on both sides. What lies in a tier behind that (``Lifetimes.behind_host``) comes for the operation and goes
back after it, past the device: a ``HostStay``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lading.ir.action import CALLER, DEVICE, ActionKind
from lading.ir.graph import Role, StepGraph
from lading.ir.plan import Option
from lading.ir.program import action_kind
from lading.memory.lifetime import Lifetimes, beside_host, gaps, is_update

#: (storage, position of the use that opens the gap) -> what to do over the gap. KEEP where missing.
Choices = Mapping[tuple[int, int], Option]
#: Position, in choices, of a persistent storage that no operation of the step uses.
UNUSED = -1


@dataclass(slots=True)
class Item:
    """Entry of the compute stream: an operation, a recomputation, or a move from or to the caller."""

    kind: ActionKind
    op: int | None = None
    storage: int | None = None
    source: str = ""
    target: str = ""


@dataclass(slots=True)
class Residency:
    """Stay of a storage on the device, from item ``first`` to item ``last`` (inclusive).

    Attributes:
        tier: Lower tier it comes from ("" when an item creates it or it is there at the start).
        to_tier: Lower tier it is written to when it ends ("" when it just ends).
        initial, final: Whether it is there at the start, or stays at the end of the step.
        since: The first item at which the tier has what is fetched, as far as the host makes it.
    """

    storage: int
    first: int
    last: int = -1
    tier: str = ""
    to_tier: str = ""
    initial: bool = False
    final: bool = False
    since: int = 0


@dataclass(slots=True)
class HostStay:
    """Stay in the host's memory, to be worked on there, of what lies in a tier behind it.

    Attributes:
        first, last: Items of the first and of the last operation on the host that uses it.
        tier: Tier that it comes from, and goes back to if ``is_written``.
        since: The first item at which that tier has its value.
        loaded: Item before which it begins to come; a lowering decides it (``planner.host_staging``).
    """

    storage: int
    first: int
    tier: str
    since: int = 0
    last: int = -1
    is_written: bool = False
    loaded: int = -1


@dataclass(slots=True)
class Emission:
    """Items in compute order and every residency.

    Attributes:
        tiers: The lower tier of each storage that is ever in one.
        host_tier: The tier on which operations of the host work; "" where there is none.
        staged: What is on the host only to be worked on there: the item after which it comes, or that makes it, and the
            last item that uses it.
        host_stays: Stays on the host of what lies behind it, in order of ``first``.
    """

    items: list[Item] = field(default_factory=lambda: [])
    residencies: list[Residency] = field(default_factory=lambda: [])
    tiers: dict[int, str] = field(default_factory=lambda: {})
    host_tier: str = ""
    staged: dict[int, tuple[int, int]] = field(default_factory=lambda: {})
    host_stays: list[HostStay] = field(default_factory=lambda: [])


def emit(graph: StepGraph, lives: Lifetimes, choices: Choices, host_tier: str = "") -> Emission:
    """Emit the step; optimizer steps are delayed behind recomputations that still read the old value.

    Args:
        host_tier: Name of the tier on which the host's processors work; needed where operations are hosted.
    """
    choices = _with_host(graph, lives, choices, Option(host_tier))
    order = list(range(len(graph.ops)))
    for _ in range(len(graph.ops)):
        walker = _Walker(graph, lives, choices, order, host_tier)
        walker.walk()
        if not walker.late:
            return walker.out
        order = _delay(order, walker.late)
    raise AssertionError("optimizer steps can always be delayed to the end")


def _with_host(graph: StepGraph, lives: Lifetimes, choices: Choices, hosted: Option) -> Choices:
    """Add to choices what operations on the host imply: what they touch is where they work, or in its tier behind."""
    if not graph.hosted:
        return choices
    touched = dict.fromkeys(graph.host_storages, hosted) | {s: Option(t) for s, t in lives.behind_host.items()}
    implied = {(g.storage, g.start): touched[g.storage] for g in gaps(graph, lives) if beside_host(graph, g)}
    placed = {key: touched[key[0]] if key[0] in touched and o.tier else o for key, o in choices.items()}
    return {**placed, **implied}


def _delay(order: Sequence[int], late: Mapping[int, int]) -> list[int]:
    """Move each op of ``late`` in ``order`` behind the op it must follow."""
    behind: dict[int, list[int]] = {}
    for op, after in sorted(late.items()):
        behind.setdefault(after, []).append(op)
    on_time = [op for op in order if op not in late]
    return [new for op in on_time for new in (op, *behind.get(op, ()))]


def _inverse(order: Sequence[int]) -> list[int]:
    """Place of each op in ``order``: the inverse permutation."""
    rank = [0] * len(order)
    for place, op in enumerate(order):
        rank[op] = place
    return rank


def _places(lives: Lifetimes, order: Sequence[int], rank: Sequence[int]) -> Sequence[Sequence[int]]:
    """Places of the uses of each storage in an order, ascending."""
    if all(place == op for place, op in enumerate(order)):
        return lives.uses
    return [sorted([rank[use] for use in uses]) for uses in lives.uses]


class _Walker:
    """State of the walk that emits a step's actions: storages are ``live``, ``away`` in a tier, dropped or not made."""

    def __init__(
        self, graph: StepGraph, lives: Lifetimes, choices: Choices, order: Sequence[int], host_tier: str
    ) -> None:
        self.graph, self.lives, self.choices, self.order = graph, lives, choices, order
        self.out, self.host_tier = Emission(host_tier=host_tier), host_tier
        self.live: dict[int, Residency] = {}
        self.away: dict[int, str] = {}
        self.copies: dict[int, set[str]] = {}  # storage -> tiers that hold its current value
        self.transient: dict[int, int] = {}  # storage there for a recomputation only -> the last item that uses it
        self.stepped: dict[int, list[int]] = {}  # storage -> the updates that already changed it
        self.late: dict[int, int] = {}
        self.sent: dict[int, int] = {}  # storage -> the item after which it went to the host, or that made it there
        self.made: dict[int, int] = {}  # storage -> the first item after the host wrote it
        self.behind, self.on_host = lives.behind_host, dict[int, HostStay]()
        self.rank = _inverse(order)
        self.places = _places(lives, order, self.rank)

    def walk(self) -> None:
        self._start()
        for op_index in self.order:
            op = self.graph.ops[op_index]
            if op_index in self.graph.on_host:
                self._run_on_host(op_index)
                continue
            for storage in self.graph.op_reads[op_index]:
                self._ensure(storage, op_index)
            kind = action_kind(op)
            self._item(Item(kind, op=op_index))
            for tensor in op.outputs:
                self._arrive(self.graph.storage_of(tensor))
            for storage in self.graph.op_writes[op_index]:
                self.copies.pop(storage, None)
                if is_update(op):
                    self.stepped.setdefault(storage, []).append(op_index)
            self._settle_touched(op_index)
        for storage, stay in self.live.items():
            stay.final = True
            self._end(storage, keep=True)

    def _run_on_host(self, op_index: int) -> None:
        op, item = self.graph.ops[op_index], len(self.out.items)
        for storage in self.graph.op_reads[op_index]:
            tier = self.behind.get(storage, self.host_tier)
            if storage in self.live:  # brought back meanwhile, to recompute something
                self._send(storage, tier)
            assert self.away.get(storage) == tier, f"storage {storage} of op {op_index}, on the host, is not in {tier}"
            if storage in self.behind and storage not in self.on_host:
                self.on_host[storage] = HostStay(storage, item, tier, self.made.get(storage, 0))
                self.out.host_stays.append(self.on_host[storage])
        self._item(Item(action_kind(op), op=op_index))
        for storage in self.graph.op_writes[op_index]:
            tier = self.behind.get(storage, self.host_tier)
            self.away[storage] = self.out.tiers[storage] = tier
            self.copies[storage] = {tier}
            self.made[storage] = item + 1
            self.sent.setdefault(storage, item)
            if storage in self.on_host:
                self.on_host[storage].is_written = True
            if is_update(op):
                self.stepped.setdefault(storage, []).append(op_index)
        for storage in dict.fromkeys((*self.graph.op_reads[op_index], *self.graph.op_writes[op_index])):
            following = self._next_use(storage, op_index)
            if storage not in self.graph.persistent and following is None:
                del self.away[storage]
                self.out.staged[storage] = self.sent[storage], item
            if storage in self.on_host:
                self.on_host[storage].last = item
                if not self._stays_on_host(op_index, following):
                    del self.on_host[storage]

    def _stays_on_host(self, op_index: int, following: int | None) -> bool:
        """Whether the host runs all that comes up to the next use of what it has just worked on."""
        if following is None:
            return False
        between = self.order[self.rank[op_index] + 1 : self.rank[following] + 1]
        return all(op in self.graph.on_host for op in between)

    def _start(self) -> None:
        """Put persistent storages where the gap over the step's boundary leaves them."""
        for storage in sorted(self.graph.persistent):
            uses = self.lives.uses[storage]
            tier = self.choices.get((storage, uses[-1] if uses else UNUSED), Option.KEEP).tier
            if not tier:
                self.live[storage] = Residency(storage, 0, initial=True)
                self.out.residencies.append(self.live[storage])
            else:
                self.away[storage] = tier
                self.copies[storage] = {tier}
                self.out.tiers[storage] = tier

    def _item(self, item: Item) -> None:
        self.out.items.append(item)

    def _arrive(self, storage: int, tier: str = "") -> None:
        """Make a storage resident: with the last item, or, from a tier, for the next one."""
        if storage in self.live:
            return
        first = len(self.out.items) - (0 if tier else 1)
        self.live[storage] = Residency(storage, first, tier=tier, since=self.made.get(storage, 0))
        self.out.residencies.append(self.live[storage])

    def _end(self, storage: int, *, keep: bool = False) -> None:
        stay = self.live[storage] if keep else self.live.pop(storage)
        stay.last = len(self.out.items) - 1

    def _ensure(self, storage: int, op_index: int) -> None:
        """Make a storage resident for the next item."""
        if storage in self.live:
            return
        if storage in self.away:
            self._arrive(storage, self.away.pop(storage))
        elif self.graph.storages[storage].role is Role.INPUT:
            self._item(Item(ActionKind.MOVE, storage=storage, source=CALLER, target=DEVICE))
            self._arrive(storage)
        else:
            self._recompute(storage, op_index)

    def _recompute(self, storage: int, op_index: int) -> None:
        """Run the producers of a dropped storage again, deepest first (iterative: chains are long)."""
        stack = [storage]
        while stack:
            producer = self.lives.producer[stack[-1]]
            if stack[-1] in self.live or producer is None:
                stack.pop()
                continue
            missing = [s for s in self.graph.op_reads[producer] if s not in self.live]
            dropped = [s for s in missing if s not in self.away and self.lives.producer[s] is not None]
            if dropped:
                stack.extend(dropped)
                continue
            for source in missing:
                self._ensure(source, op_index)
            self._run_again(producer, op_index)
            stack.pop()

    def _run_again(self, producer: int, op_index: int) -> None:
        for source in self.graph.op_reads[producer]:
            for step in self.stepped.get(source, ()):
                if step > producer:
                    self.late[step] = max(self.late.get(step, op_index), op_index, key=self.rank.__getitem__)
            if source in self.transient or self._next_use(source, op_index, inclusive=True) is None:
                self.transient[source] = len(self.out.items)
        self._item(Item(ActionKind.RECOMPUTE, op=producer))
        for storage in self.graph.op_writes[producer]:
            wanted = storage not in self.away and self._next_use(storage, op_index, inclusive=True) is not None
            if storage not in self.live:
                self._arrive(storage)
                if not wanted:
                    self.transient[storage] = len(self.out.items) - 1

    def _next_use(self, storage: int, op_index: int, *, inclusive: bool = False) -> int | None:
        """Find the next op in this walk's order that uses the storage; None if there is none."""
        places, rank_now = self.places[storage], self.rank[op_index]
        index = bisect_left(places, rank_now) if inclusive else bisect_right(places, rank_now)
        return self.order[places[index]] if index < len(places) else None

    def _settle_touched(self, op_index: int) -> None:
        """Decide what becomes of every storage the operation touched, and drop what was recomputed on the way."""
        writes = self.graph.op_writes[op_index]
        touched = dict.fromkeys((*self.graph.op_reads[op_index], *writes))
        for storage in writes:
            if self.graph.result_writes.get(storage) == op_index:
                self._item(Item(ActionKind.MOVE, storage=storage, source=DEVICE, target=CALLER))
        for storage in touched:
            self._leave(storage, op_index)
        for storage in sorted(self.transient.keys() - touched.keys()):
            if storage not in self.live:
                continue
            stay = self.live[storage]
            if storage in self.graph.persistent:
                if stay.tier not in self.copies.get(storage, ()) or not self._leaves_the_step(storage):
                    continue
                self.away[storage] = stay.tier
            del self.live[storage]
            stay.last = self.transient[storage]
        self.transient.clear()

    def _leaves_the_step(self, storage: int) -> bool:
        """Whether a persistent storage is in a lower tier over the step's boundary."""
        uses = self.lives.uses[storage]
        return bool(self.choices.get((storage, uses[-1]), Option.KEEP).tier)

    def _leave(self, storage: int, op_index: int) -> None:
        following = self._next_use(storage, op_index)
        lasting = storage in self.graph.persistent if following is None else following != self.lives.producer[storage]
        if not lasting:
            self._end(storage)
            return
        option = self.choices.get((storage, op_index), Option.KEEP)
        if option == Option.KEEP:
            return
        if option == Option.RECOMPUTE:
            self._end(storage)
        else:
            self._send(storage, option.tier)

    def _send(self, storage: int, tier: str) -> None:
        stay = self.live[storage]
        self._end(storage)
        if tier not in self.copies.setdefault(storage, set()):
            stay.to_tier = tier
            self.copies[storage].add(tier)
            self.sent.setdefault(storage, stay.last)
            if storage in self.behind:
                self.made[storage] = stay.last + 1
        self.away[storage] = tier
        self.out.tiers[storage] = tier
