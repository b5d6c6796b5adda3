"""Hosting: operations that the host's processors run, where the host's memory holds their operands.

An update reads and writes every state of its parameter and computes next to nothing. Where those states live in the
host's memory, taking them to the device and back costs more than the update; run on the host, only the gradient goes
down and the new parameter up. The same holds for what else is done to gradients between backward and update: sums over
micro-batches, casts, norms, clipping.

A hosted operation is one of the graph like any other, with a ``place`` of its own. Its operands are in their slots of
the host tier before it starts, and what it writes is written there; whoever needs the value on the device moves it up.
It is never run again on the device, whose kernels give other bits. Which operations do run there is decided in
``lading.planner.host_balance``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lading.errors import ConfigError
from lading.ir.graph import Op, OpKind, Phase, Role, StepGraph
from lading.ir.program import PAGE_BYTES

_LIGHT = frozenset({OpKind.STEP, OpKind.ELEMENTWISE, OpKind.COPY, OpKind.REDUCTION, OpKind.NORM})
_HELD = frozenset({Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE, Role.WORKSPACE})


def light_groups(graph: StepGraph, *, sums: bool = False) -> list[tuple[int, ...]]:
    """Group the operations that may run on the host, each group as a whole, in program order.

    A group is what updates the same parameter: all that writes in place, in the optimizer's phase, storages they share.

    Args:
        sums: With what else is done to the group's gradients: sums, casts and norms. Such groups are larger, as the
            first micro-batch's gradient then goes down too.
    """
    groups: dict[int, list[int]] = {}  # by first operation
    owner: dict[int, int] = {}  # storage written -> its group
    for index, op in enumerate(graph.ops):
        in_phase = op.phase is Phase.OPTIMIZER and op.mutates
        if not (in_phase or (sums and _is_sum(graph, op))) or not _is_light(graph, op):
            continue
        about = {s for s in (*graph.op_reads[index], *graph.op_writes[index]) if _joins(graph, s)}
        owners = {owner[s] for s in about if s in owner}
        first = min(owners, default=index)
        groups[first] = sorted({index, *(i for f in owners for i in groups.pop(f, ()))})
        for member in groups[first]:
            touched = (*graph.op_reads[member], *graph.op_writes[member])
            owner.update(dict.fromkeys((s for s in touched if _joins(graph, s)), first))
    return [tuple(group) for group in groups.values() if any(graph.ops[i].kind is OpKind.STEP for i in group)]


def _is_sum(graph: StepGraph, op: Op) -> bool:
    """Whether all that an operation touches are gradients, and numbers made of them."""
    touched = (*graph.reads(op), *graph.writes(op))
    return any(graph.storages[s].role is Role.GRADIENT for s in graph.reads(op)) and all(
        graph.storages[s].role is Role.GRADIENT or graph.storages[s].size_bytes < PAGE_BYTES for s in touched
    )


def _joins(graph: StepGraph, storage: int) -> bool:
    """Whether two operations on a storage belong together; all updates share the coefficient of clipping."""
    return graph.storages[storage].role in _HELD - {Role.WORKSPACE}


def _is_light(graph: StepGraph, op: Op) -> bool:
    touched = (*graph.reads(op), *graph.writes(op))
    """Products of an update of matrices belong on the device."""
    return (
        op.kind in _LIGHT and not op.random and not op.flops and all(graph.storages[s].role in _HELD for s in touched)
    )


def hosted(graph: StepGraph, ops: Iterable[int]) -> StepGraph:
    """Put these operations of a step on the host instead of those that were.

    Raises:
        ConfigError: one of them is no operation that may run there.
    """
    chosen = tuple(sorted(set(ops)))
    bad = [i for i in chosen if not 0 <= i < len(graph.ops) or not _is_light(graph, graph.ops[i])]
    if bad:
        raise ConfigError(
            f"expected operations on gradients, parameters and states to run on the host, got operation {bad[0]}; "
            "plan again"
        )
    inside = frozenset(chosen)
    placed = (dataclasses.replace(op, on_host=i in inside) for i, op in enumerate(graph.ops))
    return dataclasses.replace(graph, ops=tuple(placed))
