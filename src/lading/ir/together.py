"""Steps over one model and one optimizer: parameters, buffers, states and their views have one number in all of them.

A second step (an evaluation, another loss, a mask that the first has not) reads and writes the values of the first
where these are. So it is written down with the storages of the first in front of its own: of the first step's
temporaries it uses none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lading.errors import ConfigError
from lading.ir.graph import PERSISTENT, Role, State, StepGraph, rename_op

_LASTING = PERSISTENT - {Role.CONSTANT}
_VALUES = frozenset({Role.PARAMETER, Role.BUFFER})


def number_alike(steps: Sequence[StepGraph]) -> tuple[StepGraph, ...]:
    """Number the values of several steps alike.

    Args:
        steps: Whole steps, from ``lading.ir.expand.expand``. The first is the same again, with the optimizer states
            behind its own that only the others have.

    Raises:
        ConfigError: they are not of one model.
    """
    first = with_states(steps[0], steps[1:])
    return first, *(numbered_as(first, step) for step in steps[1:])


def one_after_another(steps: Sequence[StepGraph]) -> StepGraph:
    """Graph of the operations of all steps, from ``together``, for what is measured of all of them in one process."""
    joined = steps[0]
    for step in steps[1:]:
        renumbered = numbered_as(joined, step)
        joined = dataclasses.replace(renumbered, ops=(*joined.ops, *renumbered.ops))
    return joined


def with_states(step: StepGraph, others: Sequence[StepGraph]) -> StepGraph:
    """Copy of a step that has, unused, the optimizer states that other steps have and it has not."""
    storages, tensors, states = list(step.storages), list(step.tensors), list(step.states)
    state_names = {state.name for state in states}
    for graph in others:
        for state in graph.states:
            if state.name in state_names:
                continue
            state_names.add(state.name)
            parts = tuple(range(len(tensors), len(tensors) + len(state.parts)))
            for tensor in state.parts:
                view = graph.tensors[tensor]
                tensors.append(dataclasses.replace(view, storage=len(storages)))
                storages.append(graph.storages[view.storage])
            states.append(State(state.name, state.dtype, state.shape, parts))
    if len(states) == len(step.states):
        return step
    return dataclasses.replace(step, storages=tuple(storages), tensors=tuple(tensors), states=tuple(states))


def numbered_as(first: StepGraph, step: StepGraph) -> StepGraph:
    """Copy of a step whose values have the numbers that they have in another, and whose own storages come behind.

    Raises:
        ConfigError: it is of another model, or has states that the first step lacks.
    """
    lasting = {s.name: i for i, s in enumerate(first.storages) if s.role in _LASTING}
    constants = {s.data: i for i, s in enumerate(first.storages) if s.role is Role.CONSTANT}
    if missing := {s.name for s in first.storages if s.role in _VALUES} ^ {
        s.name for s in step.storages if s.role in _VALUES
    }:
        raise ConfigError(
            f"others: expected captures of one model, found {min(missing)!r} in one and not in another; "
            "a second model has a Trainer of its own"
        )
    storages, numbers = list(first.storages), list[int]()
    for storage in step.storages:
        number = lasting.get(storage.name) if storage.role in _LASTING else None
        number = constants.get(storage.data) if storage.role is Role.CONSTANT else number
        if number is None:
            number = len(storages)
            storages.append(storage)
        elif storages[number].size_bytes != storage.size_bytes:
            raise ConfigError(
                f"others: expected captures of one model, found {storage.name!r} of {storages[number].size_bytes} "
                f"bytes in one and of {storage.size_bytes} in another"
            )
        numbers.append(number)
    names = {tensor: len(first.tensors) + tensor for tensor in range(len(step.tensors))}
    tensors_of_step = (dataclasses.replace(tensor, storage=numbers[tensor.storage]) for tensor in step.tensors)
    return dataclasses.replace(
        step,
        storages=tuple(storages),
        tensors=(*first.tensors, *tensors_of_step),
        ops=tuple(rename_op(op, names) for op in step.ops),
        parameters=tuple(
            dataclasses.replace(p, tensor=names[p.tensor], gradient=None if p.gradient is None else names[p.gradient])
            for p in step.parameters
        ),
        buffers=first.buffers,
        inputs=tuple(tuple((name, names[t]) for name, t in inputs) for inputs in step.inputs),
        losses=tuple(names[t] for t in step.losses),
        gradient_norm=None if step.gradient_norm is None else names[step.gradient_norm],
        states=first.states,
    )
