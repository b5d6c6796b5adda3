"""Shampoo of one matrix: the filtered gradient between inverse fourth roots of its factors, with another's norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from lading.optim.rule import (
    SMALL_BYTES,
    MatrixCase,
    MatrixRule,
    Rule,
    StatePlace,
    States,
    StateSpec,
    UpdateWork,
    WholeRule,
    check_choices,
    check_ranges,
    copied_elements,
    move,
)

if TYPE_CHECKING:
    import torch

#: Added to the norm that an update is divided by (Shi et al., arXiv:2309.06497, their code).
_TINY = 1e-16


@dataclass(frozen=True, kw_only=True)
class Shampoo(MatrixRule):
    """Gradients between inverse roots of their second moments by rows and columns (Gupta et al., arXiv:1802.09568).

    Factors, filtering, bias corrections and grafting are those of Shi et al., arXiv:2309.06497.

    Attributes:
        beta1, beta2: Decay of the filtered gradient and of both factors.
        eps: Added to the factors' eigenvalues.
        root: "eigen" by decomposition, or "newton" by coupled iteration.
        frequency: Updates between two times the roots are taken.
        start: The first update with roots; before it, what is grafted counts alone.
        grafting: Rule whose norm an update has: "adam", "sgd" (the filtered gradient's) or "none".
        grafting_eps: Epsilon of "adam".
        max_preconditioner_dim: Sides of a matrix above it have no factor. The root of the other is then the second, not
            the fourth, as in the code of Anil et al., arXiv:2002.09018 (two for each factor); with neither, what is
            grafted counts alone, as there (``skip_preconditioning_dim_size_gt``). Shi et al. cut what is larger into
            blocks, and call 8192 the pure method.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-12
    weight_decay: float = 0.0
    root: Literal["eigen", "newton"] = "eigen"
    frequency: int = 10
    start: int = 1
    grafting: Literal["adam", "sgd", "none"] = "adam"
    grafting_eps: float = 1e-8
    max_preconditioner_dim: int = 8192

    default_lr: ClassVar[float] = 1e-3
    usual_lr: ClassVar[float] = 1e-3
    due: ClassVar[tuple[str, ...]] = ("frequency", "start")
    #: Four for each of ``passes``, decay (8) and step (12).
    elementwise_bytes: ClassVar[float] = 52.0

    def __post_init__(self) -> None:
        check_ranges(
            "shampoo",
            {
                "beta1": (self.beta1, 0, 1 - 1e-12),
                "beta2": (self.beta2, 0, 1 - 1e-12),
                "eps": (self.eps, 0, 1),
                "weight_decay": (self.weight_decay, 0, math.inf),
                "frequency": (self.frequency, 1, math.inf),
                "start": (self.start, 1, math.inf),
                "max_preconditioner_dim": (self.max_preconditioner_dim, 1, math.inf),
            },
        )
        check_choices("shampoo", self, {"root": ("eigen", "newton"), "grafting": ("adam", "sgd", "none")})

    def sides(self, rows: int, columns: int) -> Mapping[str, int]:
        """Lengths of the sides of a matrix that have a factor: "left" of the rows, "right" of the columns."""
        lengths = {"left": rows, "right": columns}
        return {side: n for side, n in lengths.items() if n <= self.max_preconditioner_dim}

    def takes_roots(self, update: int, shift: int = 0) -> bool:
        """Whether the roots are taken at this update, counted from 1; ``shift`` staggers matrices."""
        return update == self.start or (update > self.start and (update + shift) % self.frequency == 0)

    def decomposes(self, update: int, shift: int = 0) -> bool:
        """Whether roots are taken, which may fail."""
        return self.takes_roots(update, shift)

    @property
    def product_dtype(self) -> str:
        """Number format of products: float32, that of the states."""
        return "float32"

    @property
    def travels(self) -> str:
        """Number format that gradients travel in: "" for the gradient's, as factors see it as it is."""
        return ""

    def state_specs(self, rows: int, columns: int) -> Mapping[str, StateSpec]:
        """Shapes of the filtered gradient, factors, their roots and the grafted method's second moment. None is cut."""
        sides = self.sides(rows, columns)
        sizes = {"filtered": (rows, columns)}
        sizes |= {f"{side}{kind}": (n, n) for kind in ("", "_root") for side, n in sides.items()}
        if self.grafting == "adam":
            sizes["grafted"] = (rows, columns)
        return {name: StateSpec(size, "float32", StatePlace.WHOLE) for name, size in sizes.items()}

    def work(self, rows: int, columns: int) -> UpdateWork:
        """Work of a direction, the mean over updates; roots by Newton count as decompositions."""
        sides = self.sides(rows, columns).values()
        factors = tuple((1.0, n, n, rows * columns // n) for n in sides)
        rooted = tuple((1.0, rows, columns, n) for n in sides)
        roots = tuple((1.0 / self.frequency, n) for n in sides)
        root_products = tuple((1.0 / self.frequency, n, n, n) for n in sides)
        return UpdateWork((*factors, *rooted, *root_products), roots, passes=8)

    def shared_work(self, part: int, short: int, long: int) -> tuple[int, UpdateWork] | None:
        """Work when several ranks share a matrix: None, as one rank computes it."""
        return None

    def workspace_elements(self, rows: int, columns: int) -> int:
        """Elements of the arena that it works in: 0, as it works in scratch."""
        return 0

    def scratch_bytes(self, case: MatrixCase) -> int:
        """Bytes of matrices, and of squares of the longest side with a factor, that live at once in ``direction``.

        All are float32. Counted by the profiler's memory events, torch 2.13 (tests/runtime/test_updates.py).
        """
        elements, side = case.rows * case.columns, max(self.sides(case.rows, case.columns).values(), default=0)
        squares = 9 if self.root == "newton" else 4
        return 4 * (copied_elements(case) + max(squares * side**2 + 16 * side, 4 * elements)) + SMALL_BYTES

    def maths(self, shift: int = 0, *, shared: bool = False) -> Rule:
        """Make the rule's arithmetic; ``shift`` staggers the updates at which matrices take roots."""
        return ShampooRule(self, shift)


class ShampooRule(WholeRule):
    """``lading.optim.rule.Rule`` of Shampoo. Factors see the raw gradient, so that every state is whole."""

    settings: Shampoo

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """Move the factors, take their roots if they are due, and send the filtered gradient through them."""
        from lading.optim.roots import eigen_root, newton_root

        s, grad = self.settings, matrix.float()
        sides = s.sides(matrix.shape[0], matrix.shape[1])
        for side in sides:
            # A name for the product would keep it alive while roots are taken.
            whole[side].lerp_(grad @ grad.T if side == "left" else grad.T @ grad, 1 - s.beta2)
        whole["filtered"].lerp_(grad, 1 - s.beta1)
        corrected = 1 - s.beta2**update
        if s.takes_roots(update, self.shift):
            take = eigen_root if s.root == "eigen" else newton_root
            for side in sides:
                whole[f"{side}_root"].copy_(take(whole[side] / corrected, 2 * len(sides), s.eps))
        filtered = whole["filtered"] / (1 - s.beta1**update)
        grafted = self._grafted(grad, filtered, whole, corrected)
        if update < s.start or not sides:
            return grafted if grafted is not None else filtered
        rooted = whole["left_root"] @ filtered if "left" in sides else filtered
        rooted = rooted @ whole["right_root"] if "right" in sides else rooted
        return rooted if grafted is None else rooted.mul_(grafted.norm() / (rooted.norm() + _TINY))

    def _grafted(
        self, grad: torch.Tensor, filtered: torch.Tensor, whole: States, corrected: float
    ) -> torch.Tensor | None:
        """Compute the update whose norm counts; None where there is none."""
        if self.settings.grafting != "adam":
            return filtered if self.settings.grafting == "sgd" else None
        second = whole["grafted"]
        second.mul_(self.settings.beta2).addcmul_(grad, grad, value=1 - self.settings.beta2)
        return filtered / ((second / corrected).sqrt_().add_(self.settings.grafting_eps))

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Decay the weights, then move them along the direction."""
        param.mul_(1 - lr * self.settings.weight_decay)
        move(param, direction, -lr)
