"""Rule: an optimizer as pure functions of one parameter, so that anyone may run its parts anywhere.

An update is ``pre`` (elementwise: on any piece of the gradient), ``direction`` (on the whole matrix that ``pre`` gave)
and ``post`` (elementwise again). A state is held with the pieces of its parameter, or whole with whoever runs
``direction``. Functions read and write their arguments, nothing else: pieces give the bits of the whole.

>>> held, whole = fresh(rule, grad.shape, grad.device)
>>> update_matrix(rule, param, grad, held, whole, lr=0.02, update=1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from lading.rules import Work

States = dict[str, torch.Tensor]


class Held(StrEnum):
    """Where a state lives: cut like its parameter, or whole with the matrix's owner."""

    ELEMENTWISE = "elementwise"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class State:
    """A state of one matrix, zero before the first update.

    Attributes:
        shape: Of a matrix as given to ``Rule.states``; that of the matrix itself if it is elementwise.
    """

    held: Held
    shape: tuple[int, ...]
    dtype: torch.dtype


class Rule(Protocol):
    """How a matrix moves. ``update`` counts the matrix's own updates from 1.

    Attributes:
        settings: Of ``lading.rules``; those that no state's shape follows from may be exchanged between updates.
    """

    settings: Any

    @property
    def travels(self) -> torch.dtype | None:
        """Of what ``pre`` gives, where no bit is lost by sending it in that dtype; None for the gradient's."""
        ...

    def states(self, shape: tuple[int, int], dtype: torch.dtype) -> Mapping[str, State]:
        """Of a matrix (rows, columns) with gradients of ``dtype``."""
        ...

    def pre(self, grad: torch.Tensor, held: States, update: int) -> torch.Tensor:
        """What ``direction`` sees of a piece of the gradient, any shape; elementwise states are of that shape."""
        ...

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """Of the whole matrix (rows, columns), contiguous; whole states move."""
        ...

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Move a piece of the parameter along the same piece of the direction; ``shape`` is the whole matrix's."""
        ...

    def work(self, rows: int, columns: int) -> Work:
        """Of ``direction``."""
        ...


class WholeRule:
    """What rules have in common whose states all lie with the owner, as their factors see the raw gradient."""

    def __init__(self, settings: Any, shift: int = 0) -> None:
        """A rule; ``shift`` staggers the updates at which decompositions are due."""
        self.settings = settings
        self.shift = shift

    @property
    def travels(self) -> torch.dtype | None:
        """As the gradient is."""
        return None

    def pre(self, grad: torch.Tensor, held: States, update: int) -> torch.Tensor:
        """The gradient itself."""
        return grad

    def work(self, rows: int, columns: int) -> Work:
        """Mean over updates."""
        return self.settings.work(rows, columns)


def move(param: torch.Tensor, direction: torch.Tensor, factor: float) -> None:
    """``param += factor * direction``, each element rounded once.

    In 16 bits torch's own kernel rounds an element otherwise where it is one of the last few, so that pieces would
    differ from the whole; in 32 bits it does not.
    """
    param.add_(direction.float() if param.itemsize < 4 else direction, alpha=factor)


def fresh(
    rule: Rule, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[States, States]:
    """States before the first update: those held elementwise, and whole ones."""
    found: dict[Held, States] = {Held.ELEMENTWISE: {}, Held.WHOLE: {}}
    for name, state in rule.states(shape, dtype).items():
        found[state.held][name] = torch.zeros(state.shape, dtype=state.dtype, device=device)
    return found[Held.ELEMENTWISE], found[Held.WHOLE]


def update_matrix(
    rule: Rule, param: torch.Tensor, grad: torch.Tensor, held: States, whole: States, *, lr: float, update: int
) -> None:
    """One update of a matrix in one place: what every other way of running a rule must equal, bit for bit.

    Args:
        param, grad: (rows, columns).
        held, whole: From ``fresh``.
        update: From 1.
    """
    shape = (param.shape[0], param.shape[1])
    travels = rule.pre(grad, held, update)
    matrix = travels.to(rule.travels or travels.dtype).contiguous()
    rule.post(param, rule.direction(matrix, whole, update).to(matrix.dtype), shape, lr=lr, update=update)
