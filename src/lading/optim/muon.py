"""Muon of one matrix: momentum, made orthogonal by an iteration of products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lading.optim.rule import Held, State, States
from lading.rules import Muon, Work


def orthogonal(
    matrix: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """About U V^T of a matrix U S V^T, by Newton-Schulz iteration in ``dtype``.

    Args:
        matrix: (rows, columns).
        coefficients: (a, b, c) of each step X <- a X + (b A + c A^2) X, with A = X X^T.
        eps: Least norm to divide by.
    Source: Jordan, https://kellerjordan.github.io/posts/muon/; the same kernels in the same order as
    ``torch.optim.Muon`` where ``dtype`` is bfloat16.
    """
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=eps))
    for a, b, c in coefficients:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonRule:
    """``lading.optim.rule.Rule`` of Muon, bit-equal to ``torch.optim.Muon`` with its settings."""

    def __init__(self, settings: Muon) -> None:
        self.settings = settings
        self._dtype: torch.dtype = getattr(torch, settings.dtype)

    @property
    def travels(self) -> torch.dtype | None:
        """The iteration begins by rounding to its dtype, so that nothing is lost on the way."""
        return self._dtype

    def states(self, shape: tuple[int, int], dtype: torch.dtype) -> Mapping[str, State]:
        """Momentum."""
        return {"momentum": State(Held.ELEMENTWISE, shape, dtype)}

    def pre(self, grad: torch.Tensor, held: States, update: int) -> torch.Tensor:
        """Momentum, a step ahead with Nesterov."""
        momentum = held["momentum"]
        momentum.lerp_(grad, 1 - self.settings.momentum)
        ahead = grad.lerp(momentum, self.settings.momentum) if self.settings.nesterov else momentum
        return ahead.to(self._dtype)

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """The iteration."""
        return orthogonal(matrix, self.settings.iteration, self.settings.eps, self._dtype)

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Weights decay, then move."""
        param.mul_(1 - lr * self.settings.weight_decay)
        param.add_(direction, alpha=-lr * self.settings.scaled(*shape))

    def work(self, rows: int, columns: int) -> Work:
        """Of the iteration."""
        return self.settings.work(rows, columns)
