"""Effects of the switches of software: the same step simulated with one switch set to another value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lading.errors import LadingError
from lading.ir.request import StepRequest
from lading.ir.stack import ATTENTIONS, DISPATCHERS, FUSIONS, PARTS, SCALINGS, Stack
from lading.ir.table import ModelTable
from lading.sim.simulate import simulate

#: Switches that are words, with the words they may be.
_WORDS: dict[str, tuple[str, ...]] = {
    "fusion": FUSIONS,
    "attention": ATTENTIONS,
    "dispatcher": DISPATCHERS,
    "low_scaling": SCALINGS,
    "gradient_dtype": ("float32", "bfloat16"),
    "gather_dtype": ("", "float8_e4m3fn"),
    "parameters_dtype": ("", "float32"),
    "moments_dtype": ("float32", "bfloat16"),
}
#: Switches that a step does not depend on: who it is, what a search may choose, and what a run states by itself.
_NOT_PRICED = {
    *("name", "title", "kind", "framework", "fitted", "sources", "zeros", "recompute_choices", "low_precisions"),
    *("cuts_in_pipeline", "vocabulary_padding", "dropout", "packed_tokens", "sequence_parallel"),
}
#: Axes whose transfers may run beside computing.
_AXES = ("tp", "cp", "ep", "pp")


@dataclass(frozen=True)
class Effect:
    """Effect of one switch on a step.

    Attributes:
        switch: Key of a stack's file; with the axis for ``hidden``.
        value: Value that the software has.
        other_value: Value that was simulated instead.
        change: Seconds of the step with the other value over those with the software's, less 1; None where the step
            cannot be simulated so.
        reason: Reason why it cannot.
    """

    switch: str
    value: Any
    other_value: Any
    change: float | None
    reason: str = ""


def effects_of(request: StepRequest, table: ModelTable | None = None) -> list[Effect]:
    """List what each switch of a request's software does to its step, the largest first.

    Args:
        table: Table of a model that is in no catalog; None takes that of ``request.model``.
    Raises:
        ConfigError: the request itself cannot be simulated.
    """
    base = simulate(request, table).step.step_s
    effects = [_effect(request, table, base, *other) for other in _alternatives(request.stack)]
    return sorted(effects, key=lambda effect: (-abs(effect.change or 0.0), effect.switch, str(effect.other_value)))


def _effect(
    request: StepRequest, table: ModelTable | None, base: float, switch: str, value: Any, other: Any, stack: Stack
) -> Effect:
    try:
        step_s = simulate(dataclasses.replace(request, stack=stack), table).step.step_s
    except LadingError as error:
        return Effect(switch, value, other, None, str(error))
    return Effect(switch, value, other, step_s / base - 1)


def _alternatives(stack: Stack) -> Iterator[tuple[str, Any, Any, Stack]]:
    """Yield switch, value, another value, and the software with that other value."""
    for field in dataclasses.fields(Stack):
        value = getattr(stack, field.name)
        if field.name in _NOT_PRICED:
            continue
        for other in _values(field.name, value):
            yield field.name, value, other, dataclasses.replace(stack, **{field.name: other})
    for axis in _AXES:
        share = stack.hidden.get(axis, 0.0)
        other = 0.0 if share else 1.0
        yield f"hidden.{axis}", share, other, dataclasses.replace(stack, hidden={**stack.hidden, axis: other})


def _values(name: str, value: Any) -> tuple[Any, ...]:
    """Other values of a switch: words, the other of two, none of the seconds."""
    if name in _WORDS:
        return tuple(word for word in _WORDS[name] if word != value)
    if isinstance(value, bool):
        return (not value,)
    if name == "gathers":
        return tuple(times for times in (2, 3) if times != value)
    if name == "unfused":
        return tuple((*value, part) for part in PARTS if part not in value)
    return (0.0,) if isinstance(value, float) and value and name.endswith(("_s", "_bytes", "_copies")) else ()
