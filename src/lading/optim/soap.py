"""SOAP of one matrix: Adam in the eigenbasis of Shampoo's factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
    check_ranges,
    copied_elements,
    move,
)

if TYPE_CHECKING:
    import torch

_SIDES = ("left", "right")


@dataclass(frozen=True, kw_only=True)
class SOAP(MatrixRule):
    """Adam in the eigenbasis of Shampoo's factors (Vyas et al., https://arxiv.org/abs/2409.11321).

    Attributes:
        beta1, beta2: Decay of Adam's moments, in the eigenbasis.
        factor_beta: Decay of both factors.
        frequency: Updates between two power iterations of the bases.
    """

    beta1: float = 0.95
    beta2: float = 0.95
    factor_beta: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    frequency: int = 10

    default_lr: ClassVar[float] = 3e-3
    usual_lr: ClassVar[float] = 3e-3
    due: ClassVar[tuple[str, ...]] = ("frequency",)
    #: Four for each of ``passes``, decay (8) and step (12).
    elementwise_bytes: ClassVar[float] = 60.0

    def __post_init__(self) -> None:
        check_ranges(
            "soap",
            {
                "beta1": (self.beta1, 0, 1 - 1e-12),
                "beta2": (self.beta2, 0, 1 - 1e-12),
                "factor_beta": (self.factor_beta, 0, 1 - 1e-12),
                "eps": (self.eps, 0, 1),
                "weight_decay": (self.weight_decay, 0, math.inf),
                "frequency": (self.frequency, 1, math.inf),
            },
        )

    def turns_bases(self, update: int, shift: int = 0) -> bool:
        """Whether the bases are turned after this update, counted from 1; ``shift`` staggers matrices."""
        return (update + shift) % self.frequency == 0

    def decomposes(self, update: int, shift: int = 0) -> bool:
        """Whether bases are made or turned, which may fail."""
        return update == 1 or self.turns_bases(update - 1, shift)

    @property
    def product_dtype(self) -> str:
        """Number format of products: float32, that of the states."""
        return "float32"

    @property
    def travels(self) -> str:
        """Number format that gradients travel in: "" for the gradient's, as factors see it as it is."""
        return ""

    def state_specs(self, rows: int, columns: int) -> Mapping[str, StateSpec]:
        """Shapes of the moments in the eigenbasis, the factors and their bases. None is cut."""
        shape, left, right = (rows, columns), (rows, rows), (columns, columns)
        sizes = {"exp_avg": shape, "exp_avg_sq": shape, "left": left, "right": right}
        sizes |= {"left_basis": left, "right_basis": right}
        return {name: StateSpec(size, "float32", StatePlace.WHOLE) for name, size in sizes.items()}

    def work(self, rows: int, columns: int) -> UpdateWork:
        """Work of a direction, the mean over updates: into and out of the basis, factors, QR now and then."""
        times = 2 + 2 / self.frequency
        sides = ((times, rows, columns, rows), (times, rows, columns, columns))
        factors = ((1.0, rows, rows, columns), (1.0, columns, columns, rows))
        turned = tuple((1.0 / self.frequency, n, n, n) for n in (rows, columns))
        return UpdateWork(
            (*sides, *factors, *turned), tuple((0.15 / self.frequency, n) for n in (rows, columns)), passes=10
        )

    def shared_work(self, part: int, short: int, long: int) -> tuple[int, UpdateWork] | None:
        """Work when several ranks share a matrix: None, as one rank computes it."""
        return None

    def workspace_elements(self, rows: int, columns: int) -> int:
        """Elements of the arena that it works in: 0, as it works in scratch."""
        return 0

    def scratch_bytes(self, case: MatrixCase) -> int:
        """Bytes of the squares of the longer side and matrices that live at once in ``direction``, all float32.

        Counted by the profiler's memory events, torch 2.13 (tests/runtime/test_updates.py).
        """
        elements, side = case.rows * case.columns, max(case.rows, case.columns)
        return 4 * (copied_elements(case) + 4 * side**2 + 128 * side + 3 * elements) + SMALL_BYTES

    def maths(self, shift: int = 0, *, shared: bool = False) -> Rule:
        """Make the rule's arithmetic; ``shift`` staggers the updates at which bases turn."""
        return SOAPRule(self, shift)


class SOAPRule(WholeRule):
    """``lading.optim.rule.Rule`` of SOAP, as its authors' code: the first update makes the bases and moves nothing."""

    settings: SOAP

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """Compute Adam's update in the bases of the update before and turn it back; bases then turn if they are due."""
        grad, s = matrix.float(), self.settings
        if update == 1:
            self._factors(grad, whole)
            for side in _SIDES:
                whole[f"{side}_basis"].copy_(_eigenbasis(whole[side]))
            return matrix.new_zeros(matrix.shape)
        left, right = whole["left_basis"], whole["right_basis"]
        projected = left.T @ grad @ right
        whole["exp_avg"].mul_(s.beta1).add_(projected, alpha=1 - s.beta1)
        whole["exp_avg_sq"].mul_(s.beta2).addcmul_(projected, projected, value=1 - s.beta2)
        turned = left @ (whole["exp_avg"] / whole["exp_avg_sq"].sqrt().add_(s.eps)) @ right.T
        self._turn(grad, whole, due=s.turns_bases(update - 1, self.shift))
        return turned

    def _factors(self, grad: torch.Tensor, whole: States) -> None:
        whole["left"].lerp_(grad @ grad.T, 1 - self.settings.factor_beta)
        whole["right"].lerp_(grad.T @ grad, 1 - self.settings.factor_beta)

    def _turn(self, grad: torch.Tensor, whole: States, *, due: bool) -> None:
        """Move the factors; if it is due, turn the bases by one power iteration, and the first moment with them."""
        self._factors(grad, whole)
        if not due:
            return
        import torch

        moment = whole["left_basis"] @ whole["exp_avg"] @ whole["right_basis"].T
        for axis, side in enumerate(_SIDES):
            basis = whole[f"{side}_basis"]
            product = whole[side] @ basis
            order = torch.argsort((basis * product).sum(0), descending=True)
            whole["exp_avg_sq"].copy_(whole["exp_avg_sq"].index_select(axis, order))
            basis.copy_(torch.linalg.qr(product.index_select(1, order)).Q)
        whole["exp_avg"].copy_(whole["left_basis"].T @ moment @ whole["right_basis"])

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Move the weights, then decay them; not at the first update."""
        if update == 1:
            return
        s, num_updates = self.settings, update - 1
        rate = lr * (1 - s.beta2**num_updates) ** 0.5 / (1 - s.beta1**num_updates)
        move(param, direction, -rate)
        if s.weight_decay > 0:
            move(param, param, -lr * s.weight_decay)


def _eigenbasis(factor: torch.Tensor) -> torch.Tensor:
    """Find the eigenvectors of a factor as columns, the largest eigenvalue's first."""
    import torch

    shifted = factor + 1e-30 * torch.eye(factor.shape[0], dtype=factor.dtype, device=factor.device)
    return torch.linalg.eigh(shifted).eigenvectors.flip(1)
