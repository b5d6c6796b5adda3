"""Deferral: updates that run in the next step's forward, right before their parameter is read again.

At the end of a step nothing is left to compute, so what an update moves there is waited for. Deferred, an update of
step k stands in the Program of step k + 1, in front of the first operation that touches its parameter, and its
transfers hide under that forward. The gradient (and the coefficient of clipping) is then *carried* over the step's
boundary: its last value of step k is read early in step k + 1, and an operation of the backward makes it anew. The
operations and their order on every tensor stay as they were, so the numbers do too, to the bit.

The first step has nothing to catch up and skips the deferred operations; whoever wants the values after a step runs
only these (``Executor.flush``).
"""

from __future__ import annotations

import dataclasses

from lading.ir.graph import Phase, RepeatedBlock, StepGraph


def updates(graph: StepGraph) -> list[tuple[int, ...]]:
    """Operations of each update that can be deferred, the last update of the step first.

    An update is what writes in place in the optimizer's phase; those that share what they write go together. One that
    other ranks take part in stays: who reads a value between two steps would have to ask them.
    """
    groups: dict[int, list[int]] = {}  # by first operation
    owner: dict[int, int] = {}  # storage written -> its group
    for index, op in enumerate(graph.ops):
        if op.phase is not Phase.OPTIMIZER or not op.mutates:
            continue
        owners = {owner[s] for s in graph.reads(op) if s in owner}
        first = min(owners, default=index)
        groups[first] = sorted({index, *(i for f in owners for i in groups.pop(f, ()))})
        for member in groups[first]:
            owner.update(dict.fromkeys((graph.storage_of(t) for t in graph.ops[member].mutates), first))
    members = {i for group in groups.values() for i in group}
    last = {s: i for i, op in enumerate(graph.ops) if i not in members for s in graph.reads(op)}
    free = [
        tuple(group)
        for group in groups.values()
        if graph.collectives.isdisjoint(group)
        and all(last.get(s, -1) < group[0] for i in group for s in graph.writes(graph.ops[i]))
    ]
    return sorted(free, key=lambda group: (-group[-1], group))


def defer(graph: StepGraph, count: int) -> tuple[StepGraph, tuple[int, ...]]:
    """Defer the last ``count`` updates of a step.

    Also returns the index in ``graph`` of each operation of the result.
    """
    group_of_op = {op: group for group in updates(graph)[:count] for op in group}
    first: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        if index not in group_of_op:
            for storage in (*graph.reads(op), *graph.writes(op)):
                first.setdefault(storage, index)
    before: dict[int, list[int]] = {}
    for group in sorted(set(group_of_op.values())):
        touched = {s for i in group for s in graph.reads(graph.ops[i])}
        before.setdefault(min(first[s] for s in touched if s in first), []).extend(group)
    order = [i for index in range(len(graph.ops)) if index not in group_of_op for i in (*before.get(index, ()), index)]
    place = {old: new for new, old in enumerate(order)}
    result = dataclasses.replace(graph, ops=tuple(graph.ops[i] for i in order), blocks=moved_blocks(graph, place))
    assert result.deferred == tuple(sorted(place[i] for i in group_of_op)), (
        "its gradient shows that an update was moved"
    )
    return result, tuple(order)


def moved_blocks(graph: StepGraph, place: dict[int, int]) -> tuple[RepeatedBlock, ...]:
    """Find the blocks of a graph whose operations moved to ``place``, with what now stands inside them.

    Instances of unlike length become blocks of their own.
    """
    runs: dict[tuple[str, Phase, int], list[int]] = {}
    for block in graph.blocks:
        for start in block.starts:
            length = place[start + block.num_ops - 1] - place[start] + 1
            runs.setdefault((block.module, block.phase, length), []).append(place[start])
    return tuple(
        RepeatedBlock(module, phase, length, tuple(starts)) for (module, phase, length), starts in runs.items()
    )
