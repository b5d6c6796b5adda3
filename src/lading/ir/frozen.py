"""Frozen: what a captured step takes for the same in every step, as plain values by path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ValueKind(str):
    """Kind of a value that is no number, text or flag, in words: "function relu", "a list"."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class ReadTensor:
    """Tensor that a captured step read as a constant.

    Attributes:
        tensor: Weak reference to it.
        version: How often it had been written in place by then, as torch counts; None where torch does not.
        sample: Bytes of some of its elements by then (``lading.tracing.attributes.sample_of``).
        said: What it is and who reads it, in words.
    """

    tensor: Any
    version: int | None
    sample: bytes
    said: str


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Numbers, texts and flags that a step was captured with.

    Attributes:
        batch: Values of the batch, by key path (``"w"``, ``"sizes.0"``).
        modules: Each module's type, training flag, hooks, numbers, functions and dtypes, and for each parameter whether
            it is trained and its hooks: what another instance of the model must have too.
        others: Everything else in reach of the model: texts, containers, objects, variables of its code; of what is no
            number or text its ``ValueKind``.
        loss: Likewise, in reach of the loss.
        autocast: What torch's autocast made of products, in words: "bfloat16 on cpu"; "" where it was off.
        tensors: Constants of the step that others hold, too; a copy through pickle has none.
        model, loss_function: The objects themselves (the model weakly); a copy through pickle has none.
    """

    batch: Mapping[str, object]
    modules: Mapping[str, object]
    others: Mapping[str, object]
    loss: Mapping[str, object]
    autocast: str = ""
    tensors: tuple[ReadTensor, ...] = field(default=(), repr=False, compare=False)
    model: Any = field(default=None, repr=False, compare=False)
    loss_function: Any = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle: values only, as functions and weak references are of this process."""
        return {**vars(self), "tensors": (), "model": None, "loss_function": None}
