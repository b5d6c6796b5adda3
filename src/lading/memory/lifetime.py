"""Lifetimes: when each storage of a step is used, and the gaps between uses that a plan decides about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from lading.ir.graph import PERSISTENT, Op, OpKind, Phase, Role, StepGraph
from lading.ir.program import Homes
from lading.ir.reduction import TRANSFERS

#: ``available_until`` of what can be had at any position.
FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Gap:
    """Span between two consecutive uses of a storage, at op positions ``start`` and ``end``.

    ``wraps`` marks the gap of a persistent storage from its last use over the step's boundary to its first.
    """

    storage: int
    start: int
    end: int
    wraps: bool


@dataclass(frozen=True)
class Lifetimes:
    """Uses of every storage, by position in ``graph.ops``.

    Attributes:
        uses: Positions that read or write each storage, ascending.
        producer: The operation that creates each storage; None for what exists before the step.
        mutated: Whether anything but an optimizer step writes the storage in place.
        available_until: The last position at which the storage can be had by keeping or recomputing.
        homes: Where values are over the step's boundary, as the step that takes turns with this one has them; None
            where a plan decides it.
        behind_host: Tier behind the host's memory in which storages lie that operations on the host work on; the others
            lie in the host's memory.
    """

    uses: tuple[tuple[int, ...], ...]
    producer: tuple[int | None, ...]
    mutated: tuple[bool, ...]
    available_until: tuple[int, ...]
    homes: Homes | None = None
    behind_host: Mapping[int, str] = field(default_factory=lambda: {})


def lifetimes(
    graph: StepGraph, homes: Homes | None = None, behind_host: Mapping[int, str] = MappingProxyType({})
) -> Lifetimes:
    """Collect the uses of every storage."""
    uses: list[list[int]] = [[] for _ in graph.storages]
    producer: list[int | None] = [None] * len(graph.storages)
    mutated = [False] * len(graph.storages)
    for position, op in enumerate(graph.ops):
        for storage in dict.fromkeys((*graph.op_reads[position], *graph.op_writes[position])):
            uses[storage].append(position)
        for tensor in op.outputs:
            producer[graph.storage_of(tensor)] = position
        if not is_update(op):
            for tensor in op.mutates:
                mutated[graph.storage_of(tensor)] = True
    until = _available_until(graph, uses, mutated)
    return Lifetimes(tuple(map(tuple, uses)), tuple(producer), tuple(mutated), tuple(until), homes, behind_host)


def is_update(op: Op) -> bool:
    """Whether what the operation writes in place are values of the next step: an update, or what gathers one back."""
    return op.kind is OpKind.STEP or (op.kind is OpKind.COLLECTIVE and op.phase is Phase.OPTIMIZER)


def is_pure(op: Op) -> bool:
    """Whether running the operation again on the same inputs gives the same outputs and changes nothing else.

    What a peer sends comes once: to receive again would take what it sends next.
    """
    return not op.random and not op.mutates and op.name not in TRANSFERS


def _available_until(graph: StepGraph, uses: Sequence[Sequence[int]], mutated: Sequence[bool]) -> list[int]:
    until = [FOREVER if s.role in PERSISTENT and not m else 0 for s, m in zip(graph.storages, mutated, strict=True)]
    for storage, positions in enumerate(uses):
        if until[storage] != FOREVER:
            until[storage] = positions[-1] if positions else -1
    for index, (op, reads, writes) in enumerate(zip(graph.ops, graph.op_reads, graph.op_writes, strict=True)):
        if not is_pure(op) or index in graph.on_host or any(mutated[s] for s in reads):
            continue
        reach = min((until[s] for s in reads), default=FOREVER)
        for storage in writes:
            if not mutated[storage]:
                until[storage] = max(until[storage], reach)
    return until


def gaps(graph: StepGraph, lives: Lifetimes) -> list[Gap]:
    """List every gap of every storage that is used, by storage and start."""
    spans: list[Gap] = []
    for storage, positions in enumerate(lives.uses):
        made = lives.producer[storage] if storage in graph.carried else None  # before it, the value of the step before
        spans.extend(Gap(storage, a, b, False) for a, b in pairwise(positions) if b != made)
        if positions and storage in graph.persistent:
            spans.append(Gap(storage, positions[-1], positions[0], True))
    return spans


def beside_host(graph: StepGraph, gap: Gap) -> bool:
    """Whether the storage must be on the host at an end of the gap, and so over all of it."""
    return gap.start in graph.on_host or gap.end in graph.on_host


def can_recompute(graph: StepGraph, lives: Lifetimes, gap: Gap) -> bool:
    """Whether the storage may be dropped over the gap and computed again at its end.

    Nothing is recomputed for an optimizer step: the steps before it have changed what that would read. Nor is what the
    host made: the device would not give the same bits.
    """
    producer = lives.producer[gap.storage]
    if producer is None or gap.wraps or lives.mutated[gap.storage] or not is_pure(graph.ops[producer]):
        return False
    if producer in graph.on_host or beside_host(graph, gap):
        return False
    if graph.ops[gap.end].phase is Phase.OPTIMIZER:
        return False
    sources = graph.op_reads[producer]
    return all(not lives.mutated[s] and lives.available_until[s] >= gap.end for s in sources)


def is_movable(graph: StepGraph, storage: int, min_bytes: int) -> bool:
    """Whether a storage may be put into a lower tier: whole pages, and worth a transfer."""
    item = graph.storages[storage]
    return item.size_bytes >= min_bytes and item.role not in (Role.INPUT, Role.CONSTANT)
