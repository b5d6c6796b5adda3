"""Program: the actions of every class of ranks for one step. One type for one device and for ten thousand ranks.

A class of ranks does the same thing: one device, or the ranks of one pipeline stage group. Its actions are a list,
kept in columns, as it may have a hundred thousand of them; ``ActionList.action`` shows one as an ``Action``.

[Note: grain] What ``op`` and ``storage`` of an action number depends on the grain of the Program:

    kernel   operations and storages of ``graph``; one device has also addresses, tiers and budgets
    unit     ``regions``, runs of kernels of what FSDP gathers at once; ``storages``, parameters or borders of stages
    chunk    ``regions`` that are whole stages

Streams are in-order queues. Nothing orders two streams but ``waits``. The streams of a class of ranks:

    compute         operations or regions, in program order, the optimizer, and collectives that computing waits for
    network         UNSHARD and REDUCE_GRAD beside computing, one at a time in the order asked
    send_next       what goes to the stage behind        send_previous   what goes to the stage before
    receive         RECV: each ends when the SEND of its peer does; they do not wait for each other
    <tier>_read     moves from a tier to the device      <tier>_write    moves from the device to a tier
                    or, from a tier behind the host's memory, to that, and likewise back: its one reader, and writer
    host_compute    operations that the host's processors run where a tier of the host's memory holds their operands
    send_<number>   what a stage sends of one kind of storage, at the grain of kernels; receive_<number> what it gets.
                    Each has a stream of its own, as its two ranks may come to several in unlike orders

One step starts when every action of the step before has ended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from lading.errors import ProgramError
from lading.ir.action import DEVICE, Action, ActionKind, Work, pairs_text, parse_action, parse_pairs
from lading.ir.graph import Op, OpKind, StepGraph
from lading.ir.guess import guess_of, next_values
from lading.ir.machine import TIER_ALIGNMENT_BYTES, Tier, host_tier
from lading.ir.reduction import RECEIVE as RECEIVE_OP
from lading.ir.reduction import SEND as SEND_OP
from lading.ir.sharding import GATHERS
from lading.units import format_bytes

#: Streams that every list numbers alike; those of tiers and of the host come behind them as they are first used.
COMPUTE, NETWORK, SEND_NEXT, SEND_PREVIOUS, RECEIVE = range(5)
STREAMS = ("compute", "network", "send_next", "send_previous", "receive")
COMPUTE_STREAM, NETWORK_STREAM = STREAMS[COMPUTE], STREAMS[NETWORK]
HOST_STREAM = "host_compute"
#: Streams on which operations of the graph run, beside those of sends and receives.
OPERATION_STREAMS = (COMPUTE_STREAM, NETWORK_STREAM, HOST_STREAM)
#: Alignment of every storage that may be moved, so that its bytes go by O_DIRECT and DMA.
PAGE_BYTES = TIER_ALIGNMENT_BYTES
#: Alignment of smaller storages.
LINE_BYTES = 64
#: Unit of a region that is all units of its stage.
ALL_UNITS = -1
_KINDS = {OpKind.STEP: ActionKind.STEP, OpKind.COLLECTIVE: ActionKind.REDUCE_GRAD}
_DIRECTIONS = {ActionKind.SEND: "send", ActionKind.RECV: "receive"}
_TRANSFERS = {SEND_OP: ActionKind.SEND, RECEIVE_OP: ActionKind.RECV}
#: Kinds of actions that run an operation of the graph.
RUNS_OP = (
    ActionKind.COMPUTE,
    ActionKind.RECOMPUTE,
    ActionKind.STEP,
    ActionKind.REDUCE_GRAD,
    ActionKind.UNSHARD,
    ActionKind.SEND,
    ActionKind.RECV,
)
#: Graph of a Program that is not at the grain of kernels.
NO_GRAPH = StepGraph((), (), (), (), (), (), ())


def read_stream(tier: str) -> str:
    """Name of the stream of moves from a tier, to the device or to the host's memory."""
    return f"{tier}_read"


def write_stream(tier: str) -> str:
    """Name of the stream of moves to a tier, from the device or from the host's memory."""
    return f"{tier}_write"


def transfer_of(route: tuple[str, str], host_tier: str) -> tuple[str, bool]:
    """Tier whose bytes a move reads or writes, and whether it reads them; of two lower tiers the one behind the host.

    Args:
        route: Source and target of a MOVE; the caller counts as a tier.
        host_tier: Name of the tier on whose bytes the host's processors work; "" where there is none.
    """
    source, target = route
    if source == DEVICE:
        return target, False
    return (target, False) if source == host_tier != "" and target != DEVICE else (source, True)


def action_kind(op: Op) -> ActionKind:
    """Kind of the action that runs an operation for the first time in a step."""
    if op.name in GATHERS:
        return ActionKind.UNSHARD
    return _TRANSFERS.get(op.name) or _KINDS.get(op.kind, ActionKind.COMPUTE)


def stream_of(graph: StepGraph, op: int) -> str:
    """Name of the stream on which an operation of a graph runs."""
    if op in graph.collectives:
        kind = _TRANSFERS.get(graph.ops[op].name)
        return NETWORK_STREAM if kind is None else f"{_DIRECTIONS[kind]}_{dict(graph.ops[op].kwargs)['tag']}"
    return HOST_STREAM if op in graph.on_host else COMPUTE_STREAM


def operation_streams(graph: StepGraph) -> tuple[str, ...]:
    """Names of the streams on which operations of a graph run."""
    transfers = (stream_of(graph, op) for op in sorted(graph.collectives) if graph.ops[op].name in _TRANSFERS)
    return tuple(dict.fromkeys((*OPERATION_STREAMS, *transfers)))


@lru_cache(maxsize=1 << 16)
def whole_pages(size_bytes: int) -> int:
    """Bytes of the pages that so many bytes take."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def slot_bytes(size_bytes: int) -> int:
    """Bytes a storage takes in an arena: whole pages, or whole cache lines when smaller than a page."""
    unit = PAGE_BYTES if size_bytes >= PAGE_BYTES else LINE_BYTES
    return max(unit, -(-size_bytes // unit) * unit)


def slot_sizes(graph: StepGraph) -> list[int]:
    """Bytes each storage takes in an arena."""
    return [slot_bytes(storage.size_bytes) for storage in graph.storages]


class Region(NamedTuple):
    """Kernels ``start`` to ``stop`` of one pass of a unit, in its order; all units of the stage for ``ALL_UNITS``.

    With ``ALL_UNITS`` and ``stop`` > 0, ``start`` is a bucket: what backward runs until that bucket is full.
    """

    stage: int
    unit: int
    work: Work
    start: int = 0
    stop: int = 0


class ParameterGroup(NamedTuple):
    """Parameters of a unit that are gathered and reduced together; ``axes``: over which they are replicated.

    ``ALL_UNITS`` stands for all of a stage's; ``bucket`` counts buckets of gradients, and is -1 for no bucket.
    """

    stage: int
    unit: int
    axes: str
    bucket: int = -1


class Border(NamedTuple):
    """Tensor that ``stage`` takes from the stage before it, or, not ``forward``, from the one behind it."""

    stage: int
    forward: bool


#: A storage at the grain of units or chunks.
UnitStorage = ParameterGroup | Border


@dataclass
class ActionList:
    """Actions of one class of ranks, in an order in which every wait points backward.

    Attributes:
        op: Operation or region by number, -1 for none.
        storage: Storage by number, -1 for none.
        micro_batch: -1 for what belongs to the whole step.
        peer: Class of ranks of a SEND or RECV, else -1.
        group: Axis of the ranks of a collective.
        waits: Earlier actions of this list that must have ended.
        streams: Names of what ``stream`` numbers; the first five are ``STREAMS``.
        routes: (source, target) of each MOVE and FREE, by action.
        places: (storage, byte offset in the device arena) of what an action makes resident, by action.
        rows: For each action of the schedule, the first and the last COMPUTE that stand for it; where there is none,
            the one before it is the last and the first is behind that.
        sends: For each action of the schedule, the SEND of what it made, or -1.
    """

    kind: list[ActionKind] = field(default_factory=lambda: [])
    stream: list[int] = field(default_factory=lambda: [])
    op: list[int] = field(default_factory=lambda: [])
    storage: list[int] = field(default_factory=lambda: [])
    micro_batch: list[int] = field(default_factory=lambda: [])
    peer: list[int] = field(default_factory=lambda: [])
    group: list[str] = field(default_factory=lambda: [])
    waits: list[tuple[int, ...]] = field(default_factory=lambda: [])
    streams: list[str] = field(default_factory=lambda: [*STREAMS])
    routes: dict[int, tuple[str, str]] = field(default_factory=lambda: {})
    places: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=lambda: {})
    rows: list[tuple[int, int]] = field(default_factory=lambda: [])
    sends: list[int] = field(default_factory=lambda: [])

    def __len__(self) -> int:
        return len(self.kind)

    def __iter__(self) -> Iterator[Action]:
        return map(self.action, range(len(self.kind)))

    def add(
        self,
        kind: ActionKind,
        stream: int,
        waits: tuple[int, ...] = (),
        *,
        op: int = -1,
        storage: int = -1,
        micro_batch: int = -1,
        peer: int = -1,
        group: str = "",
    ) -> int:
        """Append an action; returns its id."""
        self.kind.append(kind)
        self.stream.append(stream)
        self.op.append(op)
        self.storage.append(storage)
        self.micro_batch.append(micro_batch)
        self.peer.append(peer)
        self.group.append(group)
        self.waits.append(waits)
        return len(self.kind) - 1

    def extend(self, actions: Iterable[Action]) -> ActionList:
        """Append actions that are numbered on from the last one; returns the list.

        Raises:
            ProgramError: an action has another number.
        """
        for action in actions:
            if action.id != len(self.kind):
                expectation = f"expected action {len(self.kind)}, got [{action}]; number actions from 0"
                raise ProgramError(expectation, action_id=action.id)
            self.add(
                action.kind,
                self.stream_number(action.stream),
                action.waits,
                op=-1 if action.op is None else action.op,
                storage=-1 if action.storage is None else action.storage,
                micro_batch=-1 if action.micro_batch is None else action.micro_batch,
                peer=-1 if action.peer is None else action.peer,
                group=action.group,
            )
            if action.source or action.target:
                self.routes[action.id] = action.source, action.target
            if action.places:
                self.places[action.id] = action.places
        return self

    def stream_number(self, name: str) -> int:
        """Number of a stream, which is given one if it has none."""
        if name not in self.streams:
            self.streams.append(name)
        return self.streams.index(name)

    def action(self, number: int) -> Action:
        """Build one action as an object that prints."""
        source, target = self.routes.get(number, ("", ""))
        return Action(
            number,
            self.kind[number],
            self.streams[self.stream[number]],
            op=_known(self.op[number]),
            storage=_known(self.storage[number]),
            source=source,
            target=target,
            micro_batch=_known(self.micro_batch[number]),
            group=self.group[number],
            peer=_known(self.peer[number]),
            places=self.places.get(number, ()),
            waits=self.waits[number],
        )


def _known(number: int) -> int | None:
    return None if number < 0 else number


class Homes(NamedTuple):
    """Places that values have between steps: storages by offset in the device arena, and in each lower tier."""

    resident: Mapping[int, int]
    slots: Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, eq=False)
class Program:
    """Program of one step of every class of ranks. See [Note: grain].

    Attributes:
        ranks: List of each class, numbered from 0; of each rank of a pipeline.
        graph: Graph that op and storage ids refer to at the grain of kernels; ``NO_GRAPH`` at a coarser one.
        regions, storages: Likewise at the grain of units or chunks; empty at that of kernels.
        uses: For each region the sharded storages that it reads, by number.
        alike: First unit that is like each unit of each stage.
        repeat: (micro-batch, times): the actions of this micro-batch stand for so many micro-batches more, each as
            long as itself. Only where there is one class of ranks.
        schedule: Kind of the pipeline's schedule that the lists stand for, of ``lading.ir.schedules``.
        arena_bytes: Size of the device arena that ``places`` index; this and what follows is of one device.
        workspace_bytes: Largest scratch any operation needs outside the arena.
        resident: (storage, arena offset) of what lies on the device at the start and again at the end of a step.
        slots: For each lower tier, (storage, offset) of every storage that is ever there; offsets are multiples of the
            tier's alignment.
        budgets: Bytes allowed in each tier; the device's covers arena, workspace and overhead. Empty where nothing has
            an address.
        overhead_bytes: Bytes that the running process needs besides.
        save_bytes: Bytes that saving takes between two steps beside arena and overhead; 0 where nothing is saved.
        staging_bytes: Bytes in which checkpoints are staged beside training; 0 where that waits for them.
        spare_bytes: Part of the workspace that some of equal runs take and others do not.
        reducing_bytes: Part of the overhead that threads which reduce may keep, each if it ever served a large tensor.
        tiers: The machine's tiers, nearest first; ``slots`` are in some of them.
    """

    ranks: tuple[ActionList, ...]
    graph: StepGraph = NO_GRAPH
    regions: tuple[Region, ...] = ()
    storages: tuple[UnitStorage, ...] = ()
    uses: tuple[frozenset[int], ...] = ()
    alike: tuple[tuple[int, ...], ...] = ()
    repeat: tuple[int, int] = (0, 0)
    schedule: str = ""
    arena_bytes: int = 0
    workspace_bytes: int = 0
    resident: tuple[tuple[int, int], ...] = ()
    slots: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=lambda: {})
    budgets: dict[str, int] = field(default_factory=lambda: {})
    overhead_bytes: int = 0
    save_bytes: int = 0
    staging_bytes: int = 0
    spare_bytes: int = 0
    reducing_bytes: int = 0
    tiers: tuple[Tier, ...] = ()

    def __repr__(self) -> str:
        actions = f"{self.bounds[-1]} actions on {', '.join(self.streams)}"
        if not self.budgets:
            return f"Program({actions}, of {len(self.ranks)} classes of ranks)"
        lower = "".join(f", {tier} {format_bytes(self.tier_bytes(tier))}" for tier in self.slots)
        memory = f"device {format_bytes(self.peak_bytes)} of {format_bytes(self.budgets['device'])}{lower}"
        return f"Program({actions}; {memory})"

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Actions of the only class of ranks.

        Raises:
            ProgramError: there are several classes, each with actions of its own.
        """
        if len(self.ranks) != 1:
            raise ProgramError(f"expected a Program of one class of ranks, got {len(self.ranks)}; ask one of `ranks`")
        return tuple(self.ranks[0])

    @cached_property
    def bounds(self) -> list[int]:
        """Numbers at which the actions of each class of ranks begin among those of all, and their end."""
        ends = [0]
        for rank in self.ranks:
            ends.append(ends[-1] + len(rank))
        return ends

    @property
    def step_bytes(self) -> int:
        """Highest device peak of a step: arena, workspace and overhead."""
        return self.arena_bytes + self.workspace_bytes + self.overhead_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest device peak, of a step or of saving after it: what the budget has to cover."""
        return max(self.step_bytes, self.arena_bytes + self.overhead_bytes + self.save_bytes) + self.staging_bytes

    @property
    def predicted_bytes(self) -> int:
        """Device peak to be expected: as ``peak_bytes``, with a quarter of what equal runs vary by.

        Measured: runs of a dozen models took about a fifth of ``spare_bytes`` on average, from none to all
        (benchmarks/predictions); of ``reducing_bytes`` 0 to 2 MiB of 8 in four (benchmarks/ranks).
        """
        step, saving = self.step_bytes - self.spare_bytes * 3 // 4, self.overhead_bytes + self.save_bytes
        return max(step, self.arena_bytes + saving) - self.reducing_bytes * 3 // 4 + self.staging_bytes

    def tier_bytes(self, tier: str) -> int:
        """Bytes of a lower tier's file or arena."""
        sizes = self.graph.storages
        places = (*self.slots.get(tier, ()), *self.second_places.get(tier, {}).items())
        return max((offset + slot_bytes(sizes[s].size_bytes) for s, offset in places), default=0)

    @cached_property
    def second_places(self) -> dict[str, dict[int, int]]:
        """For each lower tier the offset of a second place, behind all slots, of what is put there on a guess.

        By storage. See ``lading.ir.guess``.
        """
        if guess_of(self.graph) is None:
            return {}
        changed = next_values(self.graph, self.actions, self.host_tier).places
        places: dict[str, dict[int, int]] = {}
        for tier in self.tiers:
            unit, sizes = tier.alignment_bytes, self.graph.storages
            slots = self.slots.get(tier.name, ())
            end = max((offset + slot_bytes(sizes[s].size_bytes) for s, offset in slots), default=0)
            for storage in sorted(s for s, _ in slots if (tier.name, s) in changed):
                offset = -(-end // unit) * unit
                places.setdefault(tier.name, {})[storage] = offset
                end = offset + slot_bytes(sizes[storage].size_bytes)
        return places

    @property
    def host_tier(self) -> str:
        """Name of the tier on whose bytes the host's processors work; "" where there is none."""
        return host_tier(self.tiers)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of first use."""
        return tuple(dict.fromkeys(rank.streams[stream] for rank in self.ranks for stream in rank.stream))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the Program's text."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def label(self, action: Action) -> str:
        """Text for people: ``'mm layers.0.mlp'``, ``'disk -> device layers.0.attn.wq'``, ``'forward of stage 2'``."""
        if not self.graph.storages:
            return self._unit_label(action)
        if action.op is not None:
            op = self.graph.ops[action.op]
            name = op.name.split(".")[1] if op.name.count(".") else op.name
            prefix = "recompute " if action.kind is ActionKind.RECOMPUTE else ""
            return f"{prefix}{name} {op.module}".rstrip()
        name = self.graph.storages[action.storage].name if action.storage is not None else ""
        if action.kind is ActionKind.MOVE:
            return f"{action.source} -> {action.target} {name}"
        return f"free {name}"

    def _unit_label(self, action: Action) -> str:
        text = "optimizer" if action.kind is ActionKind.STEP else action.kind.value.lower().replace("_", " ")
        if action.op is not None:
            region = self.regions[action.op]
            text = f"{_WORDS[region.work]} of stage {region.stage}"
            text += f", unit {region.unit}" if region.unit >= 0 else ""
        elif action.storage is not None:
            text += f" {_storage_label(self.storages[action.storage])}"
        return text + (f", micro-batch {action.micro_batch}" if action.micro_batch is not None else "")

    def text(self) -> str:
        """Write what actions number, sizes, budgets and addresses, then a line an action; ``parse_program`` reads it.

        Lists of ranks but the first begin with a line ``rank NUMBER``.
        """
        lines = [*self._unit_lines(), *self._memory_lines()]
        for rank, actions in enumerate(self.ranks):
            lines += [f"rank {rank}"] if rank else []
            lines += map(str, actions)
        return "\n".join(lines) + "\n"

    def _unit_lines(self) -> Iterator[str]:
        if self.schedule:
            yield f"schedule {self.schedule}"
        for number, region in enumerate(self.regions):
            used = ",".join(map(str, sorted(self.uses[number]))) if self.uses else ""
            yield f"op {number} {' '.join(str(int(value)) for value in region)}{f' uses={used}' if used else ''}"
        for number, storage in enumerate(self.storages):
            yield f"storage {number} {_storage_line(storage)}"
        if self.repeat[1]:
            yield f"repeat mb={self.repeat[0]} times={self.repeat[1]}"

    def _memory_lines(self) -> Iterator[str]:
        if not self.graph.storages:
            return
        for name, size in _SIZES.items():
            yield f"{name} {getattr(self, size)}"
        for name, size in _VARYING.items():
            if getattr(self, size):
                yield f"{name} {getattr(self, size)}"
        for tier, size_bytes in self.budgets.items():
            yield f"budget {tier} {size_bytes}"
        yield f"resident {pairs_text(self.resident)}"
        for tier, pairs in self.slots.items():
            yield f"slots {tier} {pairs_text(pairs)}"


_WORDS = MappingProxyType(
    {
        Work.FORWARD: "forward",
        Work.BACKWARD: "backward",
        Work.BACKWARD_INPUT: "input gradient",
        Work.BACKWARD_WEIGHT: "weight gradient",
    }
)


def _storage_line(storage: UnitStorage) -> str:
    if isinstance(storage, Border):
        return f"border {storage.stage} {'forward' if storage.forward else 'backward'}"
    return f"parameters {storage.stage} {storage.unit} {storage.axes} {storage.bucket}"


def _storage_label(storage: UnitStorage) -> str:
    if isinstance(storage, Border):
        return f"{'activation' if storage.forward else 'gradient'} of stage {storage.stage}"
    unit = f", unit {storage.unit}" if storage.unit >= 0 else ""
    bucket = f", bucket {storage.bucket}" if storage.bucket >= 0 else ""
    return f"parameters of stage {storage.stage}{unit}{bucket} ({storage.axes})"


#: Sizes at the head of a Program's text.
_SIZES = MappingProxyType(
    {"arena": "arena_bytes", "workspace": "workspace_bytes", "overhead": "overhead_bytes", "save": "save_bytes"}
)
#: Those of them that are there where they are not 0.
_VARYING = MappingProxyType({"staging": "staging_bytes", "spare": "spare_bytes", "reducing": "reducing_bytes"})
_SIZE = re.compile(r"(arena|workspace|overhead|save|staging|spare|reducing|budget \w+) (\d{1,18})\Z")
_PLACES = re.compile(r"(resident|slots \w+) ([\d@,]*)\Z")


def parse_program(lines: Iterable[str], graph: StepGraph = NO_GRAPH, tiers: tuple[Tier, ...] = ()) -> Program:
    """Parse the lines of ``Program.text``, without what only a maker knows: rows of a schedule, what is alike.

    Args:
        graph: Graph that operations and storages are numbered in, at the grain of kernels.
        tiers: Tiers of the machine that it is for.

    Raises:
        ProgramError: a line is not what ``Program.text`` writes, or one of a device's head is missing or there twice.
    """
    reader = _ProgramReader(graph, tiers)
    for line in lines:
        try:
            reader.read(line)
        except (ValueError, IndexError, KeyError) as error:
            raise ProgramError(f"expected a line of a program's text, got {line[:80]!r}: {error}") from error
    numbers, places = reader.numbers, reader.places
    needed_lines = {*_SIZES, "budget device", "resident"} if graph.storages else set[str]()
    if missing := needed_lines - numbers.keys() - places.keys():
        raise ProgramError(
            f"expected lines {', '.join(map(repr, sorted(missing)))} at the head of a Program, found none"
        )
    return Program(
        ranks=tuple(reader.ranks),
        graph=graph,
        regions=tuple(reader.regions),
        storages=tuple(reader.storages),
        uses=tuple(reader.uses),
        alike=(),
        repeat=reader.repeat,
        schedule=reader.schedule,
        **{size: numbers.get(name, 0) for name, size in _VARYING.items()},
        resident=places.pop("resident", ()),
        slots={key.split()[1]: pairs for key, pairs in places.items()},
        budgets={key.split()[1]: size for key, size in numbers.items() if key.startswith("budget ")},
        tiers=tiers,
        **{field: numbers.get(name, 0) for name, field in _SIZES.items()},
    )


class _ProgramReader:
    """State of reading a Program's text: what its lines have said so far."""

    def __init__(self, graph: StepGraph, tiers: Iterable[Tier]) -> None:
        moves = [stream(tier.name) for tier in tiers for stream in (read_stream, write_stream)]
        self.streams = frozenset((*STREAMS, *operation_streams(graph), *moves))
        self.ranks = [ActionList()]
        self.regions: list[Region] = []
        self.storages: list[UnitStorage] = []
        self.uses: list[frozenset[int]] = []
        self.repeat, self.schedule = (0, 0), ""
        self.numbers: dict[str, int] = {}
        self.places: dict[str, tuple[tuple[int, int], ...]] = {}

    def read(self, line: str) -> None:
        """Take in a line; raises ValueError, IndexError, KeyError or ProgramError for one that is none."""
        if line[:1].isdecimal():
            action = parse_action(line)
            if action.stream not in self.streams:
                raise ProgramError(f"expected a stream among {sorted(self.streams)}, got {line[:80]!r}")
            self.ranks[-1].extend((action,))
        elif not self._read_head(line.split()):
            self._read_memory(line)

    def _read_head(self, words: list[str]) -> bool:
        """Take in what actions number, and where a list begins; returns whether the line is one of these."""
        if words[0] == "op":
            stage, unit, work, start, stop = map(int, words[2:7])
            self.regions.append(Region(stage, unit, Work(work), start, stop))
            used = words[7].removeprefix("uses=").split(",") if words[7:] else ()
            self.uses.append(frozenset(map(int, used)))
        elif words[0] == "storage":
            self.storages.append(_parse_storage(words[2:]))
        elif words[0] == "repeat":
            self.repeat = int(words[1].removeprefix("mb=")), int(words[2].removeprefix("times="))
        elif words[0] == "schedule":
            self.schedule = words[1]
        elif words[0] == "rank":
            if int(words[1]) != len(self.ranks):
                raise ProgramError(f"expected the list of rank {len(self.ranks)}, got that of {words[1]}")
            self.ranks.append(ActionList())
        else:
            return False
        return True

    def _read_memory(self, line: str) -> None:
        size, places = _SIZE.match(line), _PLACES.match(line)
        match = size or places
        if match is None or match[1] in self.numbers or match[1] in self.places:
            raise ProgramError(f"expected an action, or a size, budget or list of addresses once, got {line[:80]!r}")
        if size:
            self.numbers[size[1]] = int(size[2])
        else:
            self.places[match[1]] = parse_pairs(match[2])


def _parse_storage(words: list[str]) -> UnitStorage:
    if words[0] == "border":
        return Border(int(words[1]), {"forward": True, "backward": False}[words[2]])
    return ParameterGroup(int(words[1]), int(words[2]), words[3], int(words[4]))
