"""Reference interpreter: runs a Program in one interleaving, cell by cell, on symbolic values, and looks for faults.

A cell is the bytes between two neighbouring ends of the ranges that the program names in a memory. Slots of a lower
tier are whole pages at multiples of the tier's alignment, within its budget, each of one storage; only those of what is
staged for the host's processors may lie over each other, and their cells then show who wrote last.

Every action has a start and an end with others between. A value is the tag (storage, writes so far); a write leaves
garbage at its start and the tag at its end; a read must find its tag at the start and the same cells untouched at the
end; a FREE poisons. Nothing here is shared with the verifier.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from random import Random

from lading.ir.action import CALLER, Action, ActionKind
from lading.ir.graph import PERSISTENT
from lading.ir.program import Program, slot_bytes

LINE, PAGE = 64, 4096
#: Bytes of an element of tensors that are pieces of a parameter.
WIDTHS = {"uint8": 1, "float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}
Event = tuple[str, int]
Cell = tuple[object, int]


class Fault(Exception):
    """An execution that reads, overwrites or leaves something wrong."""


class Execution:
    """One run. ``choose`` picks which of the possible (start|end, action id) events comes next."""

    def __init__(self, program: Program, choose: Callable[[list[Event]], Event]) -> None:
        self.program, self.graph, self.choose = program, program.graph, choose
        self.clock = 0
        self.cells: dict[object, Cell] = {}
        self.owner: dict[int, int] = {}
        self.table: dict[int, int] = {}
        self.reading: dict[int, list[tuple[object, Cell]]] = {}
        self.writing: dict[int, list[tuple[object, Cell, object]]] = {}
        self.given: dict[int, object] = {}
        self.ran: list[int] = []
        count = [0] * len(self.graph.storages)
        self.read_tags: list[dict[int, object]] = []
        self.write_tags: list[dict[int, object]] = []
        for op in self.graph.ops:
            self.read_tags.append({s: (s, count[s]) for s in self.graph.reads(op)})
            for storage in self.graph.writes(op):
                count[storage] += 1
            self.write_tags.append({s: (s, count[s]) for s in self.graph.writes(op)})
        self.final: dict[int, object] = {s: (s, n) for s, n in enumerate(count)}
        placed = [*program.resident, *(place for action in program.actions for place in action.places)]
        self.lines = _ends((offset // LINE, self._line_after(storage, offset)) for storage, offset in placed)
        self.pages = {
            tier: _ends((offset // PAGE, self._page_after(storage, offset)) for storage, offset in slots)
            for tier, slots in program.slots.items()
        }

    def run(self) -> None:
        for tier in self.program.tiers:
            self._check_slots(tier.name, tier.alignment_bytes)
        resident = dict(self.program.resident)
        for storage, offset in resident.items():
            self._own(storage, offset)
            for line in self._lines(storage):
                self._set(line, (storage, 0))
        homes = self._homes(resident)
        for storage, home in homes.items():
            for page in self._slot(home, storage):
                self._set(page, (storage, 0))
        self._run_events()
        if self.table != resident:
            raise Fault(f"device holds {self.table} at the end")
        for storage in resident:
            self._expect(self._lines(storage), self.final[storage], f"end value of {storage}")
        for storage, home in homes.items():
            self._expect(self._slot(home, storage), self.final[storage], f"home of {storage}")
        if sorted(self.ran) != list(range(len(self.graph.ops))):
            raise Fault("an op did not run exactly once")
        for storage in map(self.graph.storage_of, self.graph.losses):
            if self.given.get(storage) != self.final[storage]:
                raise Fault("the caller did not get the loss")

    def _homes(self, resident: dict[int, int]) -> dict[int, str]:
        """Each persistent storage that is not resident, and its farthest slot."""
        homes: dict[int, str] = {}
        for tier in [tier.name for tier in self.program.tiers]:
            for storage, _ in self.program.slots.get(tier, ()):
                if storage not in resident and self.graph.storages[storage].role in PERSISTENT:
                    homes[storage] = tier
        return homes

    def _run_events(self) -> None:
        queues: dict[str, list[Action]] = {}
        for action in self.program.actions:
            queues.setdefault(action.stream, []).append(action)
        ended: set[int] = set()
        running: dict[str, Action] = {}
        while len(ended) < len(self.program.actions):
            events: list[Event] = [("end", a.id) for a in running.values()]
            for stream, queue in queues.items():
                if queue and stream not in running and ended.issuperset(queue[0].waits):
                    events.append(("start", queue[0].id))
            if not events:
                raise Fault("deadlock")
            what, index = self.choose(events)
            action = self.program.actions[index]
            self.clock += 1
            if what == "start":
                running[action.stream] = queues[action.stream].pop(0)
                self._start(action)
            else:
                del running[action.stream]
                ended.add(index)
                self._end(action)

    def _check_slots(self, tier: str, alignment: int) -> None:
        """Every page of a tier is of one storage, unless all that have it pass through for the host."""
        owners: dict[int, int] = {}
        passing = self._passing(tier)
        for storage, offset in self.program.slots.get(tier, ()):
            pages = range(offset // PAGE, self._page_after(storage, offset))
            end = offset + slot_bytes(self.graph.storages[storage].size_bytes)
            if offset < 0 or offset % alignment or end > self.program.budgets.get(tier, 0):
                raise Fault(f"slot of {storage} at {offset} of {tier} is outside or not aligned")
            for page in pages:
                other = owners.setdefault(page, storage)
                if other != storage and not {other, storage} <= passing:
                    raise Fault(f"slots of {other} and {storage} share page {page} of {tier}")

    def _passing(self, tier: str) -> set[int]:
        """Storages that are on the host only to be worked on, and go again before the step ends."""
        if not any(one.name == tier and one.host_computes for one in self.program.tiers):
            return set()
        used = {self.graph.storage_of(t) for op in self.graph.hosted for t in (*self.graph.ops[op].inputs,
                *self.graph.ops[op].outputs, *self.graph.ops[op].mutates)}  # fmt: skip
        homes = self._homes(dict(self.program.resident))
        return {s for s in used if self.graph.storages[s].role not in PERSISTENT or homes.get(s, tier) != tier}

    def _slot(self, tier: str, storage: int) -> list[object]:
        """Cells of a lower tier; slots of what passes through may overlap."""
        offset = dict(self.program.slots.get(tier, ()))[storage]
        pages = self.pages[tier]
        cells = range(bisect_left(pages, offset // PAGE), bisect_left(pages, self._page_after(storage, offset)))
        return [(tier, cell) for cell in cells]

    def _line_after(self, storage: int, offset: int) -> int:
        return (offset + slot_bytes(self.graph.storages[storage].size_bytes)) // LINE

    def _page_after(self, storage: int, offset: int) -> int:
        return offset // PAGE + -(-self.graph.storages[storage].size_bytes // PAGE)

    def _lines(self, storage: int) -> list[object]:
        if storage not in self.table:
            raise Fault(f"{storage} is not resident")
        return self._range(storage, self.table[storage])

    def _range(self, storage: int, offset: int) -> list[object]:
        end = offset + slot_bytes(self.graph.storages[storage].size_bytes)
        if offset < 0 or end > self.program.arena_bytes or offset % LINE:
            raise Fault(f"{storage} at {offset} is outside the arena or not aligned")
        return list(range(bisect_left(self.lines, offset // LINE), bisect_left(self.lines, end // LINE)))

    def _set(self, cell: object, value: object) -> None:
        self.clock += 1
        self.cells[cell] = (value, self.clock)

    def _expect(self, cells: list[object], tag: object, what: str) -> None:
        for cell in cells:
            found = self.cells.get(cell, ("nothing", 0))[0]
            if found != tag:
                raise Fault(f"{what}: expected {tag}, found {found}")

    def _own(self, storage: int, offset: int) -> None:
        if storage in self.table:
            raise Fault(f"{storage} is placed while resident")
        for line in self._range(storage, offset):
            if line in self.owner:
                raise Fault(f"{storage} is placed over {self.owner[line]}")  # type: ignore[index]
            self.owner[line] = storage  # type: ignore[index]
        self.table[storage] = offset

    def _read(self, action: Action, cells: list[object], tag: object) -> None:
        self._expect(cells, tag, f"action {action.id}")
        self.reading.setdefault(action.id, []).extend((cell, self.cells[cell]) for cell in cells)

    def _write(self, action: Action, cells: list[object], tag: object) -> None:
        for cell in cells:
            self._set(cell, "garbage")
            self.writing.setdefault(action.id, []).append((cell, self.cells[cell], tag))

    def _tag_in(self, cells: list[object]) -> object:
        tag = self.cells.get(cells[0], ("nothing", 0))[0]
        if not isinstance(tag, tuple):
            raise Fault(f"moves {tag}")
        return tag

    def _start(self, action: Action) -> None:
        if action.kind is ActionKind.FREE:
            assert action.storage is not None
            if action.source != "device":
                for page in self._slot(action.source, action.storage):
                    self._set(page, "poison")
                return
            for line in self._lines(action.storage):
                self._set(line, "poison")
                del self.owner[line]  # type: ignore[arg-type]
            del self.table[action.storage]
        elif action.kind is ActionKind.MOVE:
            self._start_move(action)
        else:
            self._start_op(action)

    def _start_move(self, action: Action) -> None:
        storage = action.storage
        assert storage is not None
        tag: object = (storage, 0)
        if action.source == CALLER:
            self._own(*action.places[0])
            self._write(action, self._lines(storage), tag)
            return
        if action.target == "device":
            source = self._slot(action.source, storage)
            self._own(*action.places[0])
            target = self._lines(storage)
        elif action.source != "device":
            source, target = self._slot(action.source, storage), self._slot(action.target, storage)
        else:
            source = self._lines(storage)
            target = self._slot(action.target, storage) if action.target != CALLER else []
        tag = self._tag_in(source)
        if tag[0] != storage:  # type: ignore[index]
            raise Fault(f"action {action.id} moves {tag}")
        self._read(action, source, tag)
        if action.target == CALLER:
            self.given[storage] = tag
        else:
            self._write(action, target, tag)

    def _start_op(self, action: Action) -> None:
        assert action.op is not None
        op = self.graph.ops[action.op]
        if action.op in self.graph.hosted:
            self._start_on_host(action, action.op)
            return
        for tensor in (*op.inputs, *op.mutates):
            self._check_whole(action, tensor)
        mutated = {self.graph.storage_of(t) for t in op.mutates}
        for storage, tag in self.read_tags[action.op].items():
            if storage in mutated:
                self._expect(self._lines(storage), tag, f"action {action.id}")
            else:
                self._read(action, self._lines(storage), tag)
        for storage, offset in action.places:
            self._own(storage, offset)
        again = action.kind is ActionKind.RECOMPUTE
        placed = {s for s, _ in action.places}
        for storage, tag in self.write_tags[action.op].items():
            if not again or storage in placed:
                self._write(action, self._lines(storage), tag)
        if not again:
            self.ran.append(action.op)
        elif op.random or op.mutates or action.op not in self.ran:
            raise Fault(f"action {action.id} cannot be repeated")

    def _check_whole(self, action: Action, tensor: int) -> None:
        """A tensor's bytes lie in a row, over as many pieces of a parameter as they need."""
        view, sizes = self.graph.tensors[tensor], [s.size_bytes for s in self.graph.storages]
        run = next((run for run in self.graph.runs if view.storage in run), (view.storage,))
        last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
        left = (last + 1) * WIDTHS[view.dtype]
        at = self.table.get(view.storage)
        for piece in run[run.index(view.storage) :]:
            if left <= 0:
                return
            if at is None or self.table.get(piece) != at:
                raise Fault(f"action {action.id}: {piece} is at {self.table.get(piece)}, not {at}")
            left, at = left - sizes[piece], at + sizes[piece]

    def _start_on_host(self, action: Action, op: int) -> None:
        for storage, tag in self.read_tags[op].items():
            if storage in self.write_tags[op]:
                self._expect(self._slot("host", storage), tag, f"action {action.id}")
            else:
                self._read(action, self._slot("host", storage), tag)
        for storage, tag in self.write_tags[op].items():
            self._write(action, self._slot("host", storage), tag)
        self.ran.append(op)

    def _end(self, action: Action) -> None:
        for cell, seen in self.reading.pop(action.id, []):
            if self.cells[cell] != seen:
                raise Fault(f"action {action.id}: {cell} changed under a read")
        for cell, seen, tag in self.writing.pop(action.id, []):
            if self.cells[cell] != seen:
                raise Fault(f"action {action.id}: {cell} changed under a write")
            self._set(cell, tag)


def _ends(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Sort the first and last ends of ranges, each once."""
    return sorted({end for both in ranges for end in both})


def run_random(program: Program, rng: Random) -> None:
    """One random legal interleaving."""
    Execution(program, rng.choice).run()


def run_delayed(program: Program, delayed: Event) -> None:
    """The interleaving that puts off one start or end as long as anything else can happen."""
    Execution(program, lambda events: next((e for e in events if e != delayed), events[0])).run()


def find_fault(program: Program, rng: Random, *, num_random: int) -> str:
    """What went wrong in the first bad interleaving, or '': every delay of one event, then random ones."""
    try:
        for action in program.actions:
            run_delayed(program, ("start", action.id))
            run_delayed(program, ("end", action.id))
        for _ in range(num_random):
            run_random(program, rng)
    except Fault as fault:
        return str(fault)
    return ""
