"""Muon of one matrix: momentum, made orthogonal by an iteration of products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from lading.optim.rule import Held, State, States, move
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


def row_blocks(rows: int) -> list[slice]:
    """Blocks of a matrix's rows, for products that ranks share: multiples of 64, sixteen at most."""
    size = 64 * max(1, -(-rows // (64 * 16)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class MuonRule:
    """``lading.optim.rule.Rule`` of Muon, bit-equal to ``torch.optim.Muon`` with its settings.

    With ``shared``, products are taken by blocks of rows on one rank, too; each has the bits of its own, which need not
    be those of the product as a whole.
    """

    def __init__(self, settings: Muon, *, shared: bool = False) -> None:
        self.settings, self.shared = settings, shared
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
        if self.shared:
            return self.by_blocks(matrix, self.blocks(min(matrix.shape)), lambda product: product)
        return orthogonal(matrix, self.settings.iteration, self.settings.eps, self._dtype)

    def blocks(self, rows: int) -> list[slice]:
        """That ranks may share, of the short side's rows."""
        return row_blocks(rows)

    def by_blocks(
        self, matrix: torch.Tensor, own: Sequence[slice], meet: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The iteration, of which this rank computes some rows of each product.

        Args:
            matrix: (rows, columns), the same on all that share it.
            own: Blocks of rows.
            meet: From a product with these rows, the product with all.
        """
        tall = matrix.size(0) > matrix.size(1)
        x = (matrix.T if tall else matrix).to(self._dtype, copy=True).contiguous()
        x.div_(x.norm().clamp(min=self.settings.eps))
        for a, b, c in self.settings.iteration:
            gram = x.new_empty(x.size(0), x.size(0))
            for rows in own:
                torch.mm(x[rows], x.T, out=gram[rows])
            gram = meet(gram)
            following = torch.empty_like(x)
            for rows in own:
                factor = torch.addmm(gram[rows], gram[rows], gram, beta=b, alpha=c)
                torch.addmm(x[rows], factor, x, beta=a, out=following[rows])
            x = meet(following)
        return x.T if tall else x

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Weights decay, then move."""
        param.mul_(1 - lr * self.settings.weight_decay)
        move(param, direction, -lr * self.settings.scaled(*shape))

    def work(self, rows: int, columns: int) -> Work:
        """Of the iteration."""
        return self.settings.work(rows, columns)
