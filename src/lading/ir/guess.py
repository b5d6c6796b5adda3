"""Speculation: updates that do not wait for the norm of all gradients, as if nothing were clipped.

Clipping by the global norm makes every update wait for the last gradient. All gradients are then there at once, and
what the updates move has only the rest of the step to pass beside. Most steps of a run that has settled are not
clipped: the coefficient is 1, and a gradient times 1 is the gradient, to the bit.

So an update may multiply its gradient by a guess, a constant of 1, and run as soon as the gradient is final, which is
then needed no longer. The norm is still taken, gradient by gradient. A lower tier keeps the value from before the
update until the norm is known: what is written there after it goes to a second place, and if the coefficient is what
was guessed, one flip makes that the value's place. Else the step is run again from the values of before, with the
coefficient that came out in the place of the guess (``lading.runtime.speculation``).

Only values that a plan moves to a lower tier are kept there. Other parameters wait for the norm, as ever.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence, Set
from typing import NamedTuple

from lading.errors import ConfigError
from lading.ir.action import DEVICE, Action, ActionKind
from lading.ir.defer import moved_blocks, updates
from lading.ir.graph import DTYPE_BYTES, PERSISTENT, Op, Phase, Role, StepGraph, Storage, Tensor, rename_op

#: Name of the constant by which updates that do not wait multiply their gradients.
GUESS = "clip.guessed coefficient"
#: Setting of a plan whose updates do not wait, but for those of the parameters in its ``Choices.waiting``.
SPECULATES = "speculates"
_COEFFICIENT = "aten.clamp.default"
#: The number 1 in each format of gradients.
_ONE = {
    "float64": struct.pack("<d", 1.0),
    "float32": struct.pack("<f", 1.0),
    "float16": struct.pack("<e", 1.0),
    "bfloat16": struct.pack("<f", 1.0)[2:],
}


def guess_of(graph: StepGraph) -> int | None:
    """Storage of the guessed coefficient; None in a step that does not speculate."""
    guess_storages = (
        n for n, storage in enumerate(graph.storages) if storage.name == GUESS and storage.role is Role.CONSTANT
    )
    return next(guess_storages, None)


def coefficient_op(graph: StepGraph) -> int | None:
    """Operation that makes the coefficient from the norm of all gradients; None where nothing is clipped."""
    if graph.gradient_norm is None:
        return None
    norm_storages = {graph.storage_of(graph.gradient_norm)}
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.OPTIMIZER and op.outputs and not norm_storages.isdisjoint(graph.op_reads[index]):
            norm_storages.update(graph.op_writes[index])
            if op.name == _COEFFICIENT:
                return index
    return None


def speculated(graph: StepGraph) -> frozenset[int]:
    """Parameters and states, by storage, that updates by the guess write."""
    guess, guessed, speculated_storages = guess_of(graph), set[int](), set[int]()
    for index, op in enumerate(graph.ops) if guess is not None else ():
        if op.phase is Phase.OPTIMIZER and (
            guess in graph.op_reads[index] or not guessed.isdisjoint(graph.op_reads[index])
        ):
            written = graph.op_writes[index]
            lasting = {s for s in written if graph.storages[s].role in PERSISTENT}
            speculated_storages |= lasting
            if not lasting:  # the gradient, times the guess
                guessed.update(written)
    return frozenset(speculated_storages)


def is_update(graph: StepGraph, op: int) -> bool:
    """Whether an operation changes parameters or states, as the optimizer does."""
    return graph.ops[op].phase is Phase.OPTIMIZER and bool(graph.persistent & set(graph.op_writes[op]))


def update_actions(graph: StepGraph, actions: Sequence[Action]) -> dict[int, int]:
    """First action that changes each parameter or state on a guess, by storage."""
    guessed, first_actions = speculated(graph), dict[int, int]()
    for action in actions if guessed else ():
        if action.op is not None and graph.ops[action.op].phase is Phase.OPTIMIZER:
            for storage in guessed.intersection(graph.op_writes[action.op]):
                first_actions.setdefault(storage, action.id)
    return first_actions


class NextValues(NamedTuple):
    """Moves and places of values that were changed on a guess, and come to count once that turns out right.

    Attributes:
        moves: Moves of such values to a lower tier, and of what is there then.
        places: Pairs (tier, storage) of what moves and the host's processors put there.
    """

    moves: frozenset[int]
    places: frozenset[tuple[str, int]]


def next_values(graph: StepGraph, actions: Sequence[Action], host_tier: str) -> NextValues:
    """Find the moves and places in lower tiers of values that were changed on a guess.

    Args:
        host_tier: Name of the tier on which the host's processors work; "" where there is none.
    """
    changed, places, moves = update_actions(graph, actions), set[tuple[str, int]](), set[int]()
    for action in actions if changed else ():
        storage = action.storage
        if action.op in graph.on_host:
            places.update((host_tier, s) for s in changed.keys() & set(graph.op_writes[action.op or 0]))
        if action.kind is not ActionKind.MOVE or storage not in changed or action.id < changed[storage]:
            continue
        if action.source == DEVICE:
            places.add((action.target, storage))
            moves.add(action.id)
        elif (action.source, storage) in places:
            moves.add(action.id)
    return NextValues(frozenset(moves), frozenset(places))


def update_names(graph: StepGraph) -> dict[str, frozenset[int]]:
    """Parameters and states that the update of each parameter writes, by the parameter's first name."""
    names = {graph.storage_of(p.tensor): p.names[0] for p in graph.parameters}
    storages_by_name: dict[str, frozenset[int]] = {}
    for group in updates(graph):
        lasting = {s for i in group for s in graph.op_writes[i] if graph.storages[s].role in PERSISTENT}
        for storage in lasting & names.keys():
            storages_by_name[names[storage]] = storages_by_name.get(names[storage], frozenset()) | lasting
    return storages_by_name


def with_guess(graph: StepGraph, waiting: Set[str]) -> StepGraph:
    """Let updates run as soon as their gradients are final, by a guess of the coefficient of clipping.

    Args:
        graph: Whole step of one device, whose gradients are clipped by their norm.
        waiting: First names of the parameters whose updates wait for the norm all the same.

    Raises:
        ConfigError: nothing is clipped, or the step changes buffers, so that it cannot be run again.
    """
    coefficient = coefficient_op(graph)
    if coefficient is None:
        raise ConfigError(
            "clipped: expected a step whose gradients are clipped, found none; give clip_norm, or leave it out"
        )
    _check_buffers(graph)
    scalar = graph.tensors[graph.ops[coefficient].outputs[0]]
    guessing = dataclasses.replace(
        graph,
        storages=(*graph.storages, Storage(GUESS, DTYPE_BYTES[scalar.dtype], Role.CONSTANT, _ONE[scalar.dtype])),
        tensors=(*graph.tensors, Tensor(len(graph.storages), scalar.dtype, scalar.shape, scalar.stride)),
    )
    early = _early(guessing, coefficient, waiting)
    guess = {t: t for t in range(len(guessing.tensors))} | {graph.ops[coefficient].outputs[0]: len(graph.tensors)}
    ops = [rename_op(op, guess) if index in early else op for index, op in enumerate(guessing.ops)]
    return _reordered(dataclasses.replace(guessing, ops=tuple(ops)), early)


def _check_buffers(graph: StepGraph) -> None:
    """Refuse a step that changes what it could not take back.

    Raises:
        ConfigError: naming a buffer.
    """
    buffers = {graph.storage_of(tensor): name for name, tensor in graph.buffers}
    for writes in graph.op_writes:
        if changed := buffers.keys() & set(writes):
            raise ConfigError(
                f"clipped: expected a step that changes parameters and states alone, as a step that is clipped is run "
                f"again, found that it changes the buffer {buffers[min(changed)]}; leave clipped out"
            )


def _early(graph: StepGraph, coefficient: int, waiting: Set[str]) -> dict[int, tuple[int, ...]]:
    """Operations of the updates that do not wait, each with all of its update."""
    names = {graph.storage_of(p.tensor): p.names[0] for p in graph.parameters}
    clip = graph.storage_of(graph.ops[coefficient].outputs[0])
    early: dict[int, tuple[int, ...]] = {}
    for group in updates(graph):
        updated_names = {names[s] for i in group for s in graph.op_writes[i] if s in names}
        if updated_names.isdisjoint(waiting) and any(clip in graph.op_reads[i] for i in group):
            early.update(dict.fromkeys(group, group))
    return early


def _reordered(graph: StepGraph, early: dict[int, tuple[int, ...]]) -> StepGraph:
    """Run each update that does not wait behind the last operation on what it reads and writes."""
    last: dict[int, int] = {}
    for index in range(len(graph.ops)):
        if index not in early:
            last.update(dict.fromkeys((*graph.op_reads[index], *graph.op_writes[index]), index))
    behind: dict[int, list[int]] = {}
    for group in sorted(set(early.values())):
        touched = {s for i in group for s in (*graph.op_reads[i], *graph.op_writes[i])}
        behind.setdefault(max(last[s] for s in touched if s in last), []).extend(group)
    order = [new for old in range(len(graph.ops)) if old not in early for new in (old, *behind.get(old, ()))]
    place = {old: new for new, old in enumerate(order)}
    ops: tuple[Op, ...] = tuple(graph.ops[i] for i in order)
    return dataclasses.replace(graph, ops=ops, blocks=moved_blocks(graph, place))
