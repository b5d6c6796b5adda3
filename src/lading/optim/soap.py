"""SOAP of one matrix: Adam in the eigenbasis of Shampoo's factors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lading.optim.rule import Held, State, States, WholeRule, move
from lading.rules import SOAP

_SIDES = ("left", "right")


class SOAPRule(WholeRule):
    """``lading.optim.rule.Rule`` of SOAP, as its authors' code: the first update makes the bases and moves nothing."""

    settings: SOAP

    def states(self, shape: tuple[int, int], dtype: torch.dtype) -> Mapping[str, State]:
        """Moments in the eigenbasis, factors and their bases."""
        rows, columns = shape
        sizes = {"exp_avg": shape, "exp_avg_sq": shape, "left": (rows, rows), "right": (columns, columns)}
        sizes |= {"left_basis": (rows, rows), "right_basis": (columns, columns)}
        return {name: State(Held.WHOLE, size, torch.float32) for name, size in sizes.items()}

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """Adam's update in the bases of the update before, turned back; bases then turn if they are due."""
        grad, s = matrix.float(), self.settings
        if update == 1:
            self._factors(grad, whole)
            for side in _SIDES:
                whole[f"{side}_basis"].copy_(_eigenbasis(whole[side]))
            return torch.zeros_like(matrix)
        left, right = whole["left_basis"], whole["right_basis"]
        projected = left.T @ grad @ right
        whole["exp_avg"].mul_(s.beta1).add_(projected, alpha=1 - s.beta1)
        whole["exp_avg_sq"].mul_(s.beta2).addcmul_(projected, projected, value=1 - s.beta2)
        found = left @ (whole["exp_avg"] / whole["exp_avg_sq"].sqrt().add_(s.eps)) @ right.T
        self._turn(grad, whole, due=s.turns_bases(update - 1, self.shift))
        return found

    def _factors(self, grad: torch.Tensor, whole: States) -> None:
        whole["left"].lerp_(grad @ grad.T, 1 - self.settings.factor_beta)
        whole["right"].lerp_(grad.T @ grad, 1 - self.settings.factor_beta)

    def _turn(self, grad: torch.Tensor, whole: States, *, due: bool) -> None:
        """Move the factors; if it is due, turn the bases by one power iteration, and the first moment with them."""
        self._factors(grad, whole)
        if not due:
            return
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
        """Move, then decay; not at the first update."""
        if update == 1:
            return
        s, taken = self.settings, update - 1
        rate = lr * (1 - s.beta2**taken) ** 0.5 / (1 - s.beta1**taken)
        move(param, direction, -rate)
        if s.weight_decay > 0:
            move(param, param, -lr * s.weight_decay)


def _eigenbasis(factor: torch.Tensor) -> torch.Tensor:
    """Eigenvectors as columns, the largest eigenvalue's first."""
    shifted = factor + 1e-30 * torch.eye(factor.shape[0], dtype=factor.dtype, device=factor.device)
    return torch.linalg.eigh(shifted).eigenvectors.flip(1)
