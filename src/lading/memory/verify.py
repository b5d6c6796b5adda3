"""Verifier: proves before anything runs that a Program is safe in every timing of its streams.

[Note: one pass proves all timings] The actions are walked once, in program order, which is one legal execution.
Each is checked twice: that it does the right thing in that execution (what it reads is resident, with the version the
graph asks for), and that every pair of actions that use the same memory, one of them writing, is ordered by
happens-before and not only by its place in the list. "Memory" is a residency on the device, the bytes of the arena
under it, or a tier's copy of a storage. Where no pair races, every timing gives each read the value of that one
execution. FREE counts as a write, so it comes after all uses, and what is placed over it comes after it.

[Note: order] A stream is an in-order queue and an action starts after the actions it waits for, so one number a stream
says it all: the highest id on that stream known to have ended (a vector clock). ``Order`` holds one such clock an
action.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from lading.errors import ProgramError
from lading.ir.action import CALLER, DEVICE, Action, ActionKind
from lading.ir.graph import Op, Role, StepGraph
from lading.ir.guess import guess_of
from lading.ir.program import (
    COMPUTE_STREAM,
    PAGE_BYTES,
    RUNS_OP,
    ActionList,
    Program,
    action_kind,
    operation_streams,
    read_stream,
    slot_bytes,
    stream_of,
    write_stream,
)
from lading.memory.lifetime import is_pure
from lading.memory.tier_layout import alignment_of, check_layout, home_tiers, passing_on_host
from lading.memory.verify_ranks import verify_ranks

#: Stands for what was done before the step began.
START = -1


@dataclass(slots=True)
class Uses:
    """Accesses of a piece of memory: its last write, and for each stream the last read since."""

    written: int = START
    reads: dict[int, int] = field(default_factory=lambda: {})


class Order:
    """Happens-before relation of the actions appended so far."""

    def __init__(self, streams: Sequence[str]) -> None:
        self._index = {stream: i for i, stream in enumerate(streams)}
        self._last = [START] * len(streams)
        self._stream_of: list[int] = []
        self._clocks: list[list[int]] = []

    def append(self, action: Action) -> None:
        """Add the next action; its waits must point backward."""
        stream = self._index[action.stream]
        previous = self._last[stream]
        clock = list(self._clocks[previous]) if previous != START else [START] * len(self._last)
        clock[stream] = previous
        for wait in action.waits:
            clock = [a if a > b else b for a, b in zip(clock, self._clocks[wait], strict=True)]
            clock[self._stream_of[wait]] = max(clock[self._stream_of[wait]], wait)
        self._clocks.append(clock)
        self._stream_of.append(stream)
        self._last[stream] = action.id

    def before(self, first: int, second: int) -> bool:
        """Whether ``first`` has ended when ``second`` starts, in every execution."""
        return first == START or self._clocks[second][self._stream_of[first]] >= first

    def read(self, uses: Uses, action: int) -> int | None:
        """Record a read; returns a write it races with, or None."""
        if not self.before(uses.written, action):
            return uses.written
        uses.reads[self._stream_of[action]] = action
        return None

    def write(self, uses: Uses, action: int) -> int | None:
        """Record a write (or the end of the memory's use); returns an earlier use it races with, or None."""
        for earlier in (uses.written, *uses.reads.values()):
            if earlier != action and not self.before(earlier, action):
                return earlier
        uses.written = action
        uses.reads.clear()
        return None


@dataclass(slots=True, eq=False)
class AddressedResidency:
    """Stay of a storage on the device, at one address, from the action that places it to its FREE.

    Attributes:
        version: How many writes of the step the storage's value has seen.
        placed, freed: Ids of the actions; ``freed`` is None while it lasts.
    """

    storage: int
    offset: int
    version: int
    placed: int = START
    freed: int | None = None
    uses: Uses = field(default_factory=Uses)


class AddressMap:
    """Map of the arena: disjoint segments, sorted, each with the last residency that lay there.

    Only the last one matters: it was placed after the one before it was freed, which was checked then.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[AddressedResidency] = []

    def place(self, residency: AddressedResidency, size_bytes: int) -> list[AddressedResidency]:
        """Put ``residency`` at its offset; returns the residencies that it covers, wholly or in part."""
        start, end = residency.offset, residency.offset + size_bytes
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        covered = self._owners[low:high]
        pieces = [(start, end, residency)]
        if covered and self._starts[low] < start:
            pieces.insert(0, (self._starts[low], start, covered[0]))
        if covered and self._ends[high - 1] > end:
            pieces.append((end, self._ends[high - 1], covered[-1]))
        self._starts[low:high] = [piece[0] for piece in pieces]
        self._ends[low:high] = [piece[1] for piece in pieces]
        self._owners[low:high] = [piece[2] for piece in pieces]
        return covered


def verify(program: Program) -> None:
    """Prove of a Program, in every timing, all that it says enough for.

    At every grain, actions wait for earlier ones only. At that of kernels, on one device, every read finds its value,
    no two residencies collide and no budget is exceeded. At that of units or chunks, ranks do not wait for each other,
    sends match receives, collectives come in one order, and regions find gathered what they use (``verify_ranks``).

    Raises:
        ProgramError: with the id and the line of the first offending action where there is one, and why.
    Ignores: scratch inside an operation, which ``workspace_bytes`` is trusted to cover.
    """
    for rank, actions in enumerate(program.ranks):
        _check_waits(rank, actions)
    if program.graph.storages:
        check_layout(program)
        _Verifier(program).run()
    else:
        verify_ranks(program)


def _check_waits(rank: int, actions: ActionList) -> None:
    for number, waits in enumerate(actions.waits):
        if waits and not 0 <= min(waits) <= max(waits) < number:
            line = f"rank {rank}, action {number} [{actions.action(number)}]"
            why = f"expected waits on ids in 0..{number - 1}, got {waits}; a wait points backward"
            raise ProgramError(f"{line}: {why}", action_id=number)


@dataclass(slots=True)
class _Copy:
    """Copy of a storage in a lower tier's slot, and who used it."""

    version: int
    uses: Uses = field(default_factory=Uses)


def _versions(graph: StepGraph) -> tuple[list[dict[int, int]], list[dict[int, int]], list[int]]:
    """Number the versions of storages: those each op reads, those it writes, and the last of each storage."""
    count = [0] * len(graph.storages)
    reads: list[dict[int, int]] = []
    writes: list[dict[int, int]] = []
    for op in graph.ops:
        reads.append({s: count[s] for s in graph.reads(op)})
        for storage in graph.writes(op):
            count[storage] += 1
        writes.append({s: count[s] for s in graph.writes(op)})
    return reads, writes, count


def _fail(action: Action, why: str) -> NoReturn:
    raise ProgramError(f"action {action.id} [{action}]: {why}", action_id=action.id)


class _Verifier:
    """State of the verifier's walk. See [Note: one pass proves all timings]."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = program.graph
        self.streams_of: dict[tuple[str, str], str] = {
            (CALLER, DEVICE): COMPUTE_STREAM,
            (DEVICE, CALLER): COMPUTE_STREAM,
        }
        for tier in program.tiers:
            self.streams_of[tier.name, DEVICE] = read_stream(tier.name)
            self.streams_of[DEVICE, tier.name] = write_stream(tier.name)
            if program.host_tier not in ("", tier.name):
                self.streams_of[tier.name, program.host_tier] = read_stream(tier.name)
                self.streams_of[program.host_tier, tier.name] = write_stream(tier.name)
        self.streams = tuple(dict.fromkeys((*operation_streams(self.graph), *self.streams_of.values())))
        self.order = Order(self.streams)
        self.host_tier, self.passing = program.host_tier, passing_on_host(program)
        self.arena = AddressMap()
        self.live: dict[int, AddressedResidency] = {}
        self.last: dict[int, AddressedResidency] = {}
        self.homes = home_tiers(program)
        self.copies = {(home, s): _Copy(0) for s, home in self.homes.items() if home != DEVICE}
        self.slots = {tier: dict(slots) for tier, slots in program.slots.items()}
        self.host = AddressMap()
        self.on_host: dict[int, AddressedResidency] = {}
        self.reads, self.writes, self.final = _versions(self.graph)
        self.version = [0] * len(self.graph.storages)
        self.changed: dict[int, int] = {}  # storage -> the last operation on the host that wrote it
        self.done: dict[int, int] = {}
        self.results_due = {self.graph.storage_of(t) for t in self.graph.results}
        self.all_results = frozenset(self.results_due)

    def run(self) -> None:
        for storage, offset in self.program.resident:
            residency = AddressedResidency(storage, offset, version=0)
            if why := self._misplaced(residency):
                raise ProgramError(f"`resident`: {why}")
            self.live[storage] = self.last[storage] = residency
        for storage, home in self.homes.items():
            if home == self.host_tier:
                self._take_slot(None, storage)
        for action in self.program.actions:
            self._check_form(action)
            self.order.append(action)
            if action.kind is ActionKind.FREE:
                self._free(action)
            elif action.kind is ActionKind.MOVE:
                self._move(action)
            elif action.kind is ActionKind.RECOMPUTE:
                self._recompute(action)
            else:
                self._compute(action)
        self._finish()

    def _name(self, storage: int) -> str:
        return f"storage {storage} ({self.graph.storages[storage].name})"

    # What an action must look like.

    def _check_form(self, action: Action) -> None:
        if action.stream not in self.streams:
            _fail(action, f"expected a stream among {self.streams}, got {action.stream!r}")
        if action.kind in RUNS_OP:
            self._check_op_form(action)
        elif action.kind in (ActionKind.MOVE, ActionKind.FREE):
            self._check_storage_form(action)
        else:
            known = ", ".join(kind.value for kind in RUNS_OP)
            _fail(action, f"expected {known}, MOVE or FREE; others are of coarser grain")
        for storage, _ in action.places:
            if not 0 <= storage < len(self.graph.storages):
                _fail(action, f"expected storage ids in 0..{len(self.graph.storages) - 1}, got {storage} in at=")

    def _check_op_form(self, action: Action) -> None:
        if action.op is None or not 0 <= action.op < len(self.graph.ops):
            _fail(action, f"expected an op in 0..{len(self.graph.ops) - 1}, got {action.op}")
        if action.storage is not None or action.source or action.target:
            _fail(action, "expected no storage=, from= or to= on an action that runs an op; remove them")
        if action.op in self.graph.on_host and not self.host_tier:
            _fail(action, "expected a tier on which the host's processors can work, the program has none")
        stream = stream_of(self.graph, action.op)
        if action.stream != stream:
            _fail(action, f"expected stream {stream!r} for an op, got {action.stream!r}")

    def _check_storage_form(self, action: Action) -> None:
        if action.op is not None:
            _fail(action, f"expected no op= on a {action.kind}, got {action.op}; remove it")
        if action.storage is None or not 0 <= action.storage < len(self.graph.storages):
            _fail(action, f"expected a storage in 0..{len(self.graph.storages) - 1}, got {action.storage}")
        if action.kind is ActionKind.FREE:
            staged = action.source == self.host_tier and action.storage in self.passing
            if not (action.source == DEVICE or staged) or action.target:
                keeps = "lower tiers keep all but what passes through the host to be worked on there"
                _fail(action, f"expected from={DEVICE} and no to= on a FREE; {keeps}")
        else:
            self._check_route(action)
        placed = [s for s, _ in action.places]
        expected = [action.storage] if action.target == DEVICE else []
        if placed != expected:
            _fail(action, f"expected places for storages {expected}, got {placed}")

    def _check_route(self, action: Action) -> None:
        stream = self.streams_of.get((action.source, action.target))
        if stream is None:
            _fail(
                action, f"expected from= and to= among {sorted(self.streams_of)}, got {(action.source, action.target)}"
            )
        if action.stream != stream:
            _fail(action, f"expected stream {stream!r} for this move, got {action.stream!r}")

    # Residencies on the device.

    def _misplaced(self, residency: AddressedResidency) -> str:
        """Place a residency; returns why it may not lie there, or ''."""
        storage, offset, placed = residency.storage, residency.offset, residency.placed
        size_bytes = slot_bytes(self.graph.storages[storage].size_bytes)
        if offset % (unit := alignment_of(self.graph.storages[storage].size_bytes)):
            return f"expected {self._name(storage)} at a multiple of {unit} B, got offset {offset}"
        if offset < 0 or offset + size_bytes > self.program.arena_bytes:
            end, arena = offset + size_bytes, self.program.arena_bytes
            return f"{self._name(storage)} at {offset}..{end} does not lie within the arena of {arena} bytes"
        for other in self.arena.place(residency, size_bytes):
            where = f"{self._name(storage)} at {offset} overlaps {self._name(other.storage)} at {other.offset}"
            if other.freed is None:
                return f"{where}, which is still resident; free that first or use another address"
            if not self.order.before(other.freed, placed):
                return f"{where}, whose FREE (action {other.freed}) need not have ended; wait for it"
        return ""

    def _place(self, action: Action, storage: int, offset: int, version: int) -> None:
        previous = self.last.get(storage)
        if previous is not None and previous.freed is None:
            _fail(action, f"{self._name(storage)} is already resident (since {_who(previous.placed)}); do not place it")
        residency = AddressedResidency(storage, offset, version, placed=action.id, uses=Uses(action.id))
        if previous is not None and previous.freed is not None and not self.order.before(previous.freed, action.id):
            _fail(
                action, f"the FREE (action {previous.freed}) of {self._name(storage)} need not have ended; wait for it"
            )
        if why := self._misplaced(residency):
            _fail(action, why)
        self.live[storage] = self.last[storage] = residency

    def _residency(self, action: Action, storage: int) -> AddressedResidency:
        residency = self.live.get(storage)
        if residency is None:
            past = self.last.get(storage)
            gone = "never placed" if past is None or past.freed is None else f"freed by action {past.freed}"
            _fail(action, f"expected {self._name(storage)} resident, found it {gone}; bring it to the device before")
        return residency

    def _read(self, action: Action, storage: int, version: int | None = None) -> AddressedResidency:
        """Record that an action reads a storage.

        Returns its residency, which must hold ``version`` if that is given.
        """
        residency = self._residency(action, storage)
        if (racing := self.order.read(residency.uses, action.id)) is not None:
            what = "placing" if racing == residency.placed else "write"
            _fail(
                action, f"reads {self._name(storage)}, whose {what} (action {racing}) need not have ended; wait for it"
            )
        if version is not None and residency.version != version:
            _fail(
                action,
                f"expected {self._name(storage)} after {version} writes of this step, found it after "
                f"{residency.version}; move the action or bring back the right version",
            )
        return residency

    # The five kinds.

    def _compute(self, action: Action) -> None:
        index, op = self._op(action)
        kind = action_kind(op)
        if action.kind is not kind:
            _fail(action, f"expected {kind} for op {index}, whose kind is {op.kind}, got {action.kind}")
        if index in self.done:
            _fail(action, f"op {index} already ran in action {self.done[index]}; use RECOMPUTE or drop one")
        self.done[index] = action.id
        if index in self.graph.on_host:
            self._compute_on_host(action, index)
            return
        for storage, version in self.reads[index].items():
            self._read(action, storage, version)
        self._check_joined(action, index)
        mutated = {self.graph.storage_of(t) for t in op.mutates}
        self._check_places(action, [s for s in self.writes[index] if s not in mutated])
        offsets = dict(action.places)
        for storage, version in self.writes[index].items():
            if self.version[storage] != version - 1:
                _fail(
                    action,
                    f"expected {version - 1} writes of {self._name(storage)} before, found {self.version[storage]}",
                )
            if storage in mutated:
                self._mutate(action, storage, version)
            else:
                self._place(action, storage, offsets[storage], version)
            self.version[storage] = version

    def _check_joined(self, action: Action, index: int) -> None:
        """Check that pieces of a parameter that are read as one tensor lie one after another, as it would lie whole."""
        for pieces in self.graph.joined.get(index, ()):
            expected = self.live[pieces[0]].offset
            for piece in pieces:
                if (offset := self.live[piece].offset) != expected:
                    _fail(
                        action,
                        f"expected {self._name(piece)} at {expected}, behind the piece of the parameter in front of "
                        f"it, found it at {offset}; place them one after another",
                    )
                expected += self.graph.storages[piece].size_bytes

    def _compute_on_host(self, action: Action, index: int) -> None:
        if index in self.graph.joined:
            _fail(action, f"op {index} reads several pieces of a parameter at once; run it on the device")
        self._check_places(action, [])
        for storage, version in self.reads[index].items():
            copy = self._copy(action, self.host_tier, storage)
            if (racing := self.order.read(copy.uses, action.id)) is not None:
                _fail(action, f"reads the {self.host_tier} copy that action {racing} may still be writing; wait for it")
            if copy.version != version:
                _fail(
                    action,
                    f"expected {self._name(storage)} in {self.host_tier} after {version} writes, found it after "
                    f"{copy.version}",
                )
        for storage, version in self.writes[index].items():
            if self.version[storage] != version - 1:
                _fail(action, f"expected {version - 1} writes of {self._name(storage)}, found {self.version[storage]}")
            self._write_copy(action, self.host_tier, storage, version)
            self.version[storage], self.changed[storage] = version, action.id

    def _copy(self, action: Action, tier: str, storage: int) -> _Copy:
        copy = self.copies.get((tier, storage))
        if copy is None:
            _fail(action, f"expected a copy of {self._name(storage)} in {tier}, found none; store it before")
        return copy

    def _write_copy(self, action: Action, tier: str, storage: int, version: int) -> None:
        """Give the slot of a lower tier a value."""
        if storage not in self.slots.get(tier, ()):
            _fail(action, f"expected a slot for {self._name(storage)} in {tier}, found none; add one to `slots`")
        if tier == self.host_tier and storage not in self.on_host:
            self._take_slot(action, storage)
        copy = self.copies.setdefault((tier, storage), _Copy(version))
        if (racing := self.order.write(copy.uses, action.id)) is not None:
            _fail(action, f"overwrites the {tier} copy that action {racing} may still be using; wait for it")
        copy.version = version

    def _take_slot(self, action: Action | None, storage: int) -> None:
        """Put a storage in its slot of the host's memory, where others may have been."""
        placed = START if action is None else action.id
        residency = AddressedResidency(storage, self.slots[self.host_tier][storage], version=0, placed=placed)
        size = -(-self.graph.storages[storage].size_bytes // PAGE_BYTES) * PAGE_BYTES
        for other in self.host.place(residency, size):
            if action is not None and (other.freed is None or not self.order.before(other.freed, placed)):
                _fail(
                    action,
                    f"the {self.host_tier} slot of {self._name(storage)} overlaps that of {self._name(other.storage)}, "
                    f"whose FREE ({other.freed}) need not have ended; wait for it, or move the slot",
                )
        self.on_host[storage] = residency

    def _free_on_host(self, action: Action, storage: int) -> None:
        copy = self._copy(action, self.host_tier, storage)
        if (racing := self.order.write(copy.uses, action.id)) is not None:
            _fail(action, f"frees the {self.host_tier} copy that action {racing} may still be using; wait for it")
        self.on_host.pop(storage).freed = action.id
        del self.copies[self.host_tier, storage]

    def _mutate(self, action: Action, storage: int, version: int) -> None:
        residency = self.live[storage]
        if (racing := self.order.write(residency.uses, action.id)) is not None:
            _fail(
                action, f"writes {self._name(storage)} in place, which action {racing} may still be using; wait for it"
            )
        residency.version = version

    def _recompute(self, action: Action) -> None:
        index, op = self._op(action)
        if index in self.graph.on_host:
            _fail(action, f"op {index} ({op.name}) runs on the host, which gives other bits; keep its output")
        if not is_pure(op):
            why = "is random" if op.random else "writes in place" if op.mutates else "takes what a peer sends once"
            _fail(
                action, f"expected an op that gives the same again, but op {index} ({op.name}) {why}; keep its output"
            )
        if index not in self.done:
            _fail(action, f"op {index} has not run yet; RECOMPUTE repeats an earlier COMPUTE")
        for storage, version in self.reads[index].items():
            self._read(action, storage, version)
        self._check_joined(action, index)
        placed = {s for s, _ in action.places}
        gone = [s for s in self.writes[index] if s not in self.live]
        self._check_places(action, [s for s in gone if s in placed or self._surely_gone(s, action)])
        for storage, offset in action.places:
            self._place(action, storage, offset, self.writes[index][storage])

    def _surely_gone(self, storage: int, action: Action) -> bool:
        """Whether a storage that was freed, by list order, is so in every timing; else it may be left to scratch."""
        past = self.last.get(storage)
        return past is None or past.freed is None or self.order.before(past.freed, action.id)

    def _op(self, action: Action) -> tuple[int, Op]:
        assert action.op is not None
        return action.op, self.graph.ops[action.op]

    def _check_places(self, action: Action, expected: list[int]) -> None:
        addressed = sorted(s for s, _ in action.places)
        if addressed != sorted(expected):
            _fail(action, f"expected an address for exactly the storages {sorted(expected)}, got {addressed} in at=")

    def _move(self, action: Action) -> None:
        storage = action.storage
        assert storage is not None
        if action.source == CALLER:
            self._move_in(action, storage)
        elif action.target == CALLER:
            self._move_out(action, storage)
        elif action.target == DEVICE:
            self._load(action, storage)
        elif action.source != DEVICE:
            self._move_below(action, storage)
        else:
            self._store(action, storage)

    def _move_in(self, action: Action, storage: int) -> None:
        if self.graph.storages[storage].role is not Role.INPUT:
            _fail(
                action, f"expected an input from the caller, got {self._name(storage)}; the caller has only the batch"
            )
        if self.version[storage]:
            _fail(action, f"{self._name(storage)} was written since, the caller's value is old; keep it or store it")
        self._place(action, storage, action.places[0][1], version=0)

    def _move_out(self, action: Action, storage: int) -> None:
        if storage not in self.all_results:
            _fail(
                action, f"expected a loss to go to the caller, got {self._name(storage)}; nothing else leaves the step"
            )
        self._read(action, storage, self.final[storage])
        self.results_due.discard(storage)

    def _load(self, action: Action, storage: int) -> None:
        copy = self._copy(action, action.source, storage)
        if (racing := self.order.read(copy.uses, action.id)) is not None:
            _fail(action, f"reads the {action.source} copy that action {racing} may still be writing; wait for it")
        if copy.version != self.version[storage]:
            _fail(
                action,
                f"expected the current value of {self._name(storage)} ({self.version[storage]} writes), found the one "
                f"after {copy.version} in {action.source}; store it again before it is freed",
            )
        self._place(action, storage, action.places[0][1], copy.version)

    def _move_below(self, action: Action, storage: int) -> None:
        """Move a storage between the host's memory and a tier behind it, past the device."""
        if guess_of(self.graph) is not None:
            _fail(
                action,
                f"expected moves from and to the device in a step whose updates run on a guess, got one between "
                f"{action.source} and {action.target}; plan again",
            )
        copy = self._copy(action, action.source, storage)
        if (racing := self.order.read(copy.uses, action.id)) is not None:
            _fail(action, f"reads the {action.source} copy that action {racing} may still be writing; wait for it")
        self._write_copy(action, action.target, storage, copy.version)

    def _store(self, action: Action, storage: int) -> None:
        residency = self._read(action, storage)
        self._write_copy(action, action.target, storage, residency.version)

    def _free(self, action: Action) -> None:
        storage = action.storage
        assert storage is not None
        if action.source == self.host_tier:
            self._free_on_host(action, storage)
            return
        past = self.last.get(storage)
        if past is not None and past.freed is not None:
            _fail(action, f"{self._name(storage)} was already freed by action {past.freed}; drop one FREE")
        residency = self._residency(action, storage)
        if (racing := self.order.write(residency.uses, action.id)) is not None:
            _fail(action, f"frees {self._name(storage)} while action {racing} may still use it; wait for that action")
        residency.freed = action.id
        del self.live[storage]

    # The end of the step.

    def _finish(self) -> None:
        missing = [i for i in range(len(self.graph.ops)) if i not in self.done]
        if missing:
            raise ProgramError(f"expected every op to run once, ops {missing[:10]} never do; add their COMPUTE or STEP")
        if self.results_due:
            names = ", ".join(map(self._name, sorted(self.results_due)))
            raise ProgramError(f"expected every loss to go to the caller, {names} does not; add a MOVE to={CALLER}")
        for storage, offset in self.program.resident:
            self._check_resident(storage, offset)
        for storage, residency in self.live.items():
            if self.homes.get(storage) != DEVICE:
                where = f"home is {self.homes[storage]}" if storage in self.homes else "value does not outlive the step"
                self._fail_end(
                    residency.placed, f"{self._name(storage)} is left on the device but its {where}; free it"
                )
        for storage, home in self.homes.items():
            if home != DEVICE and self.copies[home, storage].version != self.version[storage]:
                past = self.last.get(storage)  # None where the host alone had it
                self._fail_end(
                    past.uses.written if past is not None else self.changed[storage],
                    f"the value of {self._name(storage)} in {home}, its home, is old at the end of the step; "
                    f"store it after its last write",
                )

    def _check_resident(self, storage: int, offset: int) -> None:
        """Check that each storage resident at the start is there again, at the same place, with the current value."""
        residency = self.last[storage]
        if residency.freed is not None:
            self._fail_end(
                residency.freed, f"{self._name(storage)} is in `resident` but gone at the end; bring it back"
            )
        if residency.offset != offset:
            at = residency.offset
            self._fail_end(residency.placed, f"{self._name(storage)} ends the step at {at}, expected {offset}; move it")
        if residency.version != self.version[storage]:
            self._fail_end(
                residency.placed, f"{self._name(storage)} ends the step with an old value; bring the current"
            )

    def _fail_end(self, action: int, why: str) -> NoReturn:
        """Raise the error that blames the action that left things so."""
        _fail(self.program.actions[action], f"at the end of the step, {why}")


def _who(action: int) -> str:
    return "the start of the step" if action == START else f"action {action}"
