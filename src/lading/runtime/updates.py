"""Kernels that move whole matrices: ``lading.muon``, ``lading.shampoo``, ``lading.soap`` (``lading.ir.updates``).

What is elementwise goes a few rows at a time, so that copies in another dtype stay small; the bits are those of
``lading.optim.rule.update_matrix``, and for Muon those of ``torch.optim.Muon``. Muon's iteration works in the arena:
its products write where the workspace of the operation lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from lading.ir.graph import Op
from lading.ir.updates import rule_of, state_shapes
from lading.optim.muon import MuonRule
from lading.optim.shampoo import ShampooRule
from lading.optim.soap import SOAPRule
from lading.rules import MatrixRule, Muon, Shampoo
from lading.runtime.resident import give_back

#: Elements that are worked on at once: few enough for a cache, many enough to hide launches on a GPU.
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
#: What oneDNN takes for a product of 16-bit numbers on one thread. Measured: 132100 bytes at most, torch 2.13.
_PRODUCT_BYTES = 136 << 10
#: Norms, orders, and what LAPACK takes whatever the size.
_SMALL_BYTES = 4 << 10
#: What torch turns a matrix through that does not lie row by row: 60 by 60 elements.
_TURNED_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class _Update:
    """Decoded arguments; a leading dim counts matrices."""

    rule: MatrixRule
    param: torch.Tensor
    grad: torch.Tensor
    states: dict[str, torch.Tensor]
    step: torch.Tensor | None
    counts: bool
    master: torch.Tensor | None
    coefficient: torch.Tensor | None
    workspace: torch.Tensor | None

    @property
    def moved(self) -> torch.Tensor:
        """What the rule moves: the master, where there is one."""
        return self.param if self.master is None else self.master

    @property
    def rounds(self) -> bool:
        """Whether what moves has fewer than 32 bits: copies of it are widened and rounded again."""
        return self.moved.itemsize < 4

    @property
    def widens(self) -> bool:
        """Whether gradients are cast, and clipped, on their way to the master."""
        return self.master is not None and self.grad.dtype is not torch.float32

    def rows_at_once(self, kind: str) -> int:
        """Rows of about as many elements as are worked on at once."""
        return max(1, _AT_ONCE[kind] // self.param.shape[-1])


def matrix_kernel(
    op: Op, args: list[Any], kwargs: dict[str, Any], out: torch.Tensor | None, kind: str, rate: Callable[[], float]
) -> tuple[Callable[[], None], int]:
    """The call, and the bytes it allocates beside its tensors.

    Args:
        args, kwargs: Of the operation, with tensors where they lie.
        out: The workspace.
        rate: Learning rate of the step.
    """
    rule = rule_of(op)
    assert rule is not None
    param, grad, *others = args
    names = list(state_shapes(rule, *param.shape[-2:]))
    states = {name: _stacked(t) for name, t in zip(names, others, strict=False)}
    step = others[len(names)] if len(others) > len(names) else None
    master = kwargs.get("master")
    update = _Update(
        rule=rule, param=_stacked(param), grad=_stacked(grad), states=states, step=step,
        counts=bool(kwargs.get("first", True)), master=None if master is None else _stacked(master),
        coefficient=kwargs.get("coefficient"), workspace=out,
    )  # fmt: skip
    if isinstance(rule, Muon):
        return _muon(update, rule, kind, rate), _muon_scratch(update, kind)
    return _whole(update, kind, rate), _whole_scratch(update, kind)


def _stacked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


def _muon(update: _Update, settings: Muon, kind: str, rate: Callable[[], float]) -> Callable[[], None]:
    rule, rows = MuonRule(settings), update.rows_at_once(kind)
    momentum = update.states["momentum"]

    def run() -> None:
        lr = rate()
        for index in range(update.param.shape[0]):
            assert update.workspace is not None
            shape = (update.param.shape[1], update.param.shape[2])
            x = update.workspace[: prod(shape)].view(shape)
            for part in _parts(shape[0], rows):
                held = {"momentum": momentum[index, part]}
                x[part].copy_(rule.pre(_gradient(update, index, part), held, 0))
            direction = _orthogonal(x, update.workspace[prod(shape) :], settings)
            for part in _parts(shape[0], rows):
                rule.post(update.moved[index, part], direction[part], shape, lr=lr, update=0)
                if update.master is not None:
                    update.param[index, part].copy_(update.master[index, part])

    return run


def _orthogonal(x: torch.Tensor, room: torch.Tensor, settings: Muon) -> torch.Tensor:
    """``lading.optim.muon.orthogonal`` of a matrix that may be overwritten, with room for another and two squares."""
    tall = x.shape[0] > x.shape[1]
    a, b = min(x.shape), max(x.shape)
    places = (room[: a * b].view(a, b), x.reshape(-1).view(a, b))
    gram, mixed = (room[a * b + n * a * a :][: a * a].view(a, a) for n in (0, 1))
    now = x.T if tall else x
    now.div_(now.norm().clamp(min=settings.eps))
    for turn, (ca, cb, cc) in enumerate(settings.iteration):
        torch.mm(now, now.T, out=gram)
        torch.addmm(gram, gram, gram, beta=cb, alpha=cc, out=mixed)
        now = torch.addmm(now, mixed, now, beta=ca, out=places[turn % 2])
    return now.T if tall else now


def _muon_scratch(update: _Update, kind: str) -> int:
    """The look-ahead of some rows and its rounding, beside what is widened; or what a product takes."""
    rows, columns = update.param.shape[1:]
    assert isinstance(update.rule, Muon)
    low = update.rule.dtype == "bfloat16"
    bytes_each = 8 + 4 * low if update.rounds else 4 + 2 * low + 4 * update.widens
    elementwise = min(rows, update.rows_at_once(kind)) * columns * bytes_each
    elementwise += 0 if update.grad.is_contiguous() else _TURNED_BYTES
    copied = 2 * rows * columns if rows > columns else 0  # an operand that is not row by row
    return max(elementwise, copied + torch.get_num_threads() * _PRODUCT_BYTES if low else 0)


def _whole(update: _Update, kind: str, rate: Callable[[], float]) -> Callable[[], None]:
    """Shampoo and SOAP, whose states see the whole gradient."""
    settings = update.rule
    assert not isinstance(settings, Muon)
    rule: ShampooRule | SOAPRule = ShampooRule(settings) if isinstance(settings, Shampoo) else SOAPRule(settings)
    rows, shape = update.rows_at_once(kind), (update.param.shape[1], update.param.shape[2])

    def run() -> None:
        assert update.step is not None
        if update.counts:
            update.step.add_(1)
        number, lr = int(update.step), rate()
        for index in range(update.param.shape[0]):
            states = {name: state[index] for name, state in update.states.items()}
            matrix = _gradient(update, index, slice(None)).contiguous()
            direction = rule.direction(matrix, states, number).to(matrix.dtype)
            for part in _parts(shape[0], rows):
                rule.post(update.moved[index, part], direction[part], shape, lr=lr, update=number)
                if update.master is not None:
                    update.param[index, part].copy_(update.master[index, part])
            del matrix, direction  # else they would live on beside those of the next matrix
        if kind == "cpu":  # temporaries of every size would stay side by side
            give_back()

    return run


def _whole_scratch(update: _Update, kind: str) -> int:
    """Squares of the longer side and matrices that live at once in ``direction``, all float32.

    Counted by the profiler's memory events, torch 2.13 (tests/runtime/test_updates.py).
    """
    rows, columns = update.param.shape[1:]
    own, side = rows * columns, max(rows, columns)
    wide, turned = update.grad.dtype is torch.float32, not update.grad.is_contiguous()
    copied = own * (not wide or turned) + -(-own // 2) * (update.rounds and turned)
    if isinstance(update.rule, Shampoo):
        squares = 9 if update.rule.root == "newton" else 4
        return 4 * (copied + max(squares * side**2 + 16 * side, 4 * own)) + _SMALL_BYTES
    return 4 * (copied + 4 * side**2 + 128 * side + 3 * own) + _SMALL_BYTES


def _gradient(update: _Update, index: int, part: slice) -> torch.Tensor:
    """Some rows of a gradient as the rule sees them."""
    given = update.grad[index, part]
    if not update.widens:
        return given
    wide = given.float()
    return wide if update.coefficient is None else wide.mul_(update.coefficient)


def _parts(rows: int, at_once: int) -> Iterator[slice]:
    return (slice(start, min(rows, start + at_once)) for start in range(0, rows, at_once))
