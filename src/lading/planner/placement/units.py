"""Units: runs of a graph's operations that are placed as one: modules at some depth, or single operations.

Runs are neighbors in program order, so a graph of units has no cycle. What a module does itself between its children
goes with the child before it (in backward, where order is reversed, with the one after it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lading.ir.graph import Op, Phase, StepGraph

LOSS = "loss"


@dataclass(slots=True)
class Unit:
    """Operations ``first`` to ``last`` of the graph.

    Attributes:
        key: What its parts have in common: a module's path, or the operation's number.
    """

    key: str
    phase: Phase
    first: int
    last: int


def modules(graph: StepGraph, most: int, *, training: bool) -> list[Unit]:
    """Units by module, at the greatest depth that has at most ``most`` modules in forward; at least depth 1.

    A module that runs several times, such as a cell over time, is a unit each time.
    """
    best = _cut(graph, _at_depth(1), training=training)
    depth = 2
    while True:
        found = _cut(graph, _at_depth(depth), training=training)
        if len({u.key for u in found if u.phase is Phase.FORWARD}) > most:
            return best
        deepest = max((op.module.count(".") + 1 for op in graph.ops if op.module), default=1)
        best, depth = found, depth + 1
        if depth > deepest:
            return best


def operations(graph: StepGraph, *, training: bool) -> list[Unit]:
    """A unit for each operation."""
    ops = _chosen(graph, training=training)
    return [Unit(f"{i} {graph.ops[i].module or LOSS}", _phase(graph.ops[i]), i, i) for i in ops]


def like(graph: StepGraph, units: Sequence[Unit], most: int, *, training: bool) -> list[Unit] | None:
    """Units of another graph of the same model, one for each of ``units``; None where they differ."""
    found = modules(graph, most, training=training)
    same = [(u.key, u.phase) for u in found] == [(u.key, u.phase) for u in units]
    return found if same else None


def _at_depth(depth: int) -> Callable[[str], str]:
    return lambda module: ".".join(module.split(".")[:depth])


def _phase(op: Op) -> Phase:
    return Phase.BACKWARD if op.phase is Phase.BACKWARD else Phase.LOSS if op.phase is Phase.LOSS else Phase.FORWARD


def _chosen(graph: StepGraph, *, training: bool) -> list[int]:
    wanted = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) if training else (Phase.FORWARD,)
    return [i for i, op in enumerate(graph.ops) if op.phase in wanted]


def _cut(graph: StepGraph, name: Callable[[str], str], *, training: bool) -> list[Unit]:
    runs: list[Unit] = []
    for index in _chosen(graph, training=training):
        op = graph.ops[index]
        key, phase = (LOSS if op.phase is Phase.LOSS else name(op.module)), _phase(op)
        if runs and runs[-1].key == key and runs[-1].phase is phase and runs[-1].last == index - 1:
            runs[-1].last = index
        else:
            runs.append(Unit(key, phase, index, index))
    return _absorbed(_absorbed(runs, Phase.FORWARD), Phase.BACKWARD)


def _absorbed(runs: list[Unit], phase: Phase) -> list[Unit]:
    """Runs of a module between those of its children put to a child's; what is left of the model, to the loss."""
    if phase is Phase.BACKWARD:
        runs = [Unit(u.key, u.phase, -u.last, -u.first) for u in reversed(runs)]
    found: list[Unit] = []
    for run in runs:
        before = found[-1] if found and found[-1].phase is phase else None
        inside = before is not None and (before.key == run.key or _is_inside(before.key, run.key))
        if run.phase is phase and before is not None and inside and before.last == run.first - 1:
            before.last = run.last
        else:
            found.append(Unit(run.key, run.phase, run.first, run.last))
    if phase is Phase.BACKWARD:
        found = [Unit(u.key, u.phase, -u.last, -u.first) for u in reversed(found)]
        for unit in found:
            unit.key = unit.key or LOSS
    return found


def _is_inside(module: str, other: str) -> bool:
    return module != LOSS and (not other or module.startswith(f"{other}."))
