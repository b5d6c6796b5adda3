"""Late updates: updates that wait inside their step, so that what they move passes beside computing.

A captured step runs the update of a parameter as soon as its gradient is final. Where optimizer states wait on a lower
tier, the updates of a large parameter then come all at once, and what computes next waits behind them for bytes that
it does not need. Run a few at a time between the operations of the backward that follow, they cost nothing but the
place of the gradient for longer. What is done to every tensor, and in which order, stays as it was, so the numbers do
too, to the bit. (``lading.ir.defer`` moves updates over the step's boundary.)

[Note: updates all around the step] A step repeats, so what moves for updates has the next forward to pass beside as
well. With B the seconds from the first final gradient to the end, and F those in which all parameters are read again,
gradients are final at an even pace over B and parameters are read at an even pace over F, those of the first layers
first. To run as many updates in each second of both, F / (B + F) of the updates of every layer have to wait for the
next forward, and the others run evenly over B. So ``paced_moves`` picks parameters of about that share of the bytes,
evenly, and puts their updates behind all others, where ``lading.ir.defer`` takes them from.

[Note: updates with cover] What is read again at once has no time to wait: the states of an embedding, updated last and
read first, would all move at the beginning of the forward. ``covered_moves`` defers a share of those updates alone
whose parameters are read again so late that, one after another at the pace of all updates around the step, they are
done by then. The others run as soon as their gradients are final, so that these take no place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from itertools import accumulate

from lading.errors import ConfigError
from lading.ir.defer import moved_blocks, updates
from lading.ir.graph import StepGraph

#: An operation, and the later one behind which it runs.
Move = tuple[int, int]


def with_late_updates(graph: StepGraph, moves: Sequence[Move]) -> tuple[StepGraph, tuple[int, ...]]:
    """Run updates of a step behind later operations.

    Args:
        moves: Updates and the operations they run behind, by their numbers in ``graph``; those behind one operation
            keep their order.

    Returns:
        The step, and the index in ``graph`` of each of its operations.

    Raises:
        ConfigError: what is moved is no update, would run earlier, or would see or leave another value.
    """
    if not moves:
        return graph, tuple(range(len(graph.ops)))
    free = {op for group in updates(graph) for op in group}
    moved_behind: dict[int, list[int]] = {}
    for op, after in sorted(moves):
        if op not in free or not op < after < len(graph.ops):
            raise ConfigError(
                f"the plan runs operation {op} behind {after}: expected an update and a later one of the step's "
                f"{len(graph.ops)} operations; plan again"
            )
        moved_behind.setdefault(after, []).append(op)
    moved_ops = {op for op, _ in moves}
    if len(moved_ops) < len(moves) or moved_ops & moved_behind.keys():
        raise ConfigError("the plan moves an update twice, or behind one that it moves; plan again")
    order = [new for op in range(len(graph.ops)) if op not in moved_ops for new in (op, *moved_behind.get(op, ()))]
    _check_values(graph, order)
    place = {old: new for new, old in enumerate(order)}
    ops = tuple(graph.ops[i] for i in order)
    return dataclasses.replace(graph, ops=ops, blocks=moved_blocks(graph, place)), tuple(order)


def _check_values(graph: StepGraph, order: Sequence[int]) -> None:
    """Refuse an order in which two operations on a storage, one of which writes it, change places.

    Raises:
        ConfigError: naming the storage.
    """
    wrote: dict[int, int] = {}
    used: dict[int, int] = {}
    for op in order:
        writes = set(graph.op_writes[op])
        for storage in {*graph.op_reads[op], *writes}:
            before = used if storage in writes else wrote
            if before.get(storage, -1) > op:
                raise ConfigError(
                    f"the plan changes the order in which {graph.storages[storage].name} is used: expected operation "
                    f"{op} before {before[storage]}; plan again"
                )
            used[storage] = max(used.get(storage, -1), op)
            if storage in writes:
                wrote[storage] = max(wrote.get(storage, -1), op)


def even_moves(
    graph: StepGraph, op_seconds: Sequence[float], hurry: float = 1.0, *, left_out: Set[int] = frozenset()
) -> tuple[Move, ...]:
    """Spread updates evenly, by the bytes they write, over what computes from the first of them on.

    Args:
        op_seconds: Seconds of each operation.
        hurry: How many times faster than evenly they run; they never run before their gradients are final.
        left_out: Operations of updates that are not spread.

    Returns:
        Moves for ``with_late_updates``; () where there is nothing to spread.
    """
    free = {op for group in updates(graph) for op in group}
    last = max((i for i in range(len(graph.ops)) if i not in free), default=-1)
    early = [i for i in sorted(free - left_out) if i < last]
    if not early:
        return ()
    size = {op: graph.ops[op].bytes_written for op in early}
    rest_s = sum(op_seconds[i] for i in range(early[0], last + 1) if i not in free)
    per_byte = rest_s / max(1, sum(size.values())) / hurry
    moves: list[Move] = []
    waiting: list[int] = []
    spare_s = 0.0
    for op in range(last + 1):
        if op in size:
            waiting.append(op)
        if op in free:
            continue
        spare_s = spare_s + op_seconds[op] if waiting else 0.0
        while waiting and (spare_s >= per_byte * size[waiting[0]] or op == last):
            spare_s -= per_byte * size[waiting[0]]
            moves.append((waiting.pop(0), op))
    return tuple((op, after) for op, after in moves if any(between not in free for between in range(op + 1, after + 1)))


def paced_moves(graph: StepGraph, op_seconds: Sequence[float]) -> tuple[tuple[Move, ...], int]:
    """Spread updates evenly over the whole step, the next forward included ([Note: updates all around the step]).

    Args:
        op_seconds: Seconds of each operation.

    Returns:
        Moves for ``with_late_updates``, and how many updates, then the last ones, are to be deferred
        (``lading.ir.defer``); ((), 0) where no update comes before the end of the backward, or none is to wait.
    """
    groups = sorted(updates(graph), key=lambda group: group[0])
    free = {op for group in groups for op in group}
    last = max((i for i in range(len(graph.ops)) if i not in free), default=-1)
    if not groups or groups[0][0] > last:
        return (), 0
    behind_s = sum(seconds for op, seconds in enumerate(op_seconds) if op > groups[0][0] and op not in free)
    again_s = sum(op_seconds[: _all_read(graph, groups, free)])
    share = again_s / max(again_s + behind_s, 1e-12)
    due_bytes = waiting_bytes = 0.0
    waiting: list[tuple[int, ...]] = []
    for group in groups:
        size = sum(graph.ops[op].bytes_written for op in group)
        due_bytes += share * size
        if waiting_bytes + size / 2 <= due_bytes:
            waiting.append(group)
            waiting_bytes += size
    deferred = frozenset(op for group in waiting for op in group)
    end = max(i for i in range(len(graph.ops)) if i not in deferred)
    moves = [*even_moves(graph, op_seconds, left_out=deferred), *((op, end) for op in deferred if op < end)]
    return (tuple(sorted(moves)), len(waiting)) if waiting else ((), 0)


def covered_moves(graph: StepGraph, op_seconds: Sequence[float], part: float = 1.0) -> tuple[tuple[Move, ...], int]:
    """Put a share of the updates that have time to run in the next forward behind all others.

    [Note: updates with cover] says which.

    Args:
        op_seconds: Seconds of each operation.
        part: Part of the share by which all updates would run evenly over the whole step.

    Returns:
        Moves for ``with_late_updates``, and how many updates, then the last ones, are to be deferred; ((), 0) where
        none has the time or is to wait.
    """
    groups = updates(graph)
    free = {op for group in groups for op in group}
    began_s = [0.0, *accumulate(0.0 if op in free else seconds for op, seconds in enumerate(op_seconds))]
    again_s = began_s[_all_read(graph, groups, free)]
    around_s = max(again_s + began_s[-1] - began_s[min(free, default=-1)], 1e-12)
    size = {group: sum(graph.ops[op].bytes_written for op in group) for group in groups}
    share, pace = part * again_s / around_s, sum(size.values()) / around_s
    first = _first_read(graph, free)
    until_s = {
        group: min((began_s[first[s]] for s in _written(graph, group) if s in first), default=0.0) for group in groups
    }
    due_bytes = waiting_bytes = 0.0
    waiting: list[tuple[int, ...]] = []
    for group in sorted(groups, key=lambda group: (until_s[group], group)):
        if waiting_bytes + size[group] > pace * until_s[group]:
            continue
        due_bytes += share * size[group]
        if waiting_bytes + size[group] / 2 <= due_bytes:
            waiting.append(group)
            waiting_bytes += size[group]
    deferred = {op for group in waiting for op in group}
    end = max((i for i in range(len(graph.ops)) if i not in deferred), default=-1)
    return tuple((op, end) for op in sorted(deferred) if op < end), len(waiting)


def _written(graph: StepGraph, group: Sequence[int]) -> set[int]:
    return {storage for op in group for storage in graph.op_writes[op]}


def _first_read(graph: StepGraph, free: Set[int]) -> dict[int, int]:
    """First operation but updates that reads each storage."""
    first: dict[int, int] = {}
    for index, reads in enumerate(graph.op_reads):
        for storage in reads if index not in free else ():
            first.setdefault(storage, index)
    return first


def _all_read(graph: StepGraph, groups: Sequence[Sequence[int]], free: Set[int]) -> int:
    """First operation at which everything that the updates write has been read again."""
    first = _first_read(graph, free)
    touched = ({s for op in group for s in graph.op_reads[op] if s in first} for group in groups)
    return max((min(first[s] for s in storages) for storages in touched if storages), default=-1) + 1
