"""Shampoo of one matrix: the filtered gradient between inverse fourth roots of its factors, with another's norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lading.optim.roots import eigen_root, newton_root
from lading.optim.rule import Held, State, States, WholeRule, move
from lading.rules import Shampoo

#: Added to the norm that an update is divided by (Shi et al., arXiv:2309.06497, their code).
_TINY = 1e-16


class ShampooRule(WholeRule):
    """``lading.optim.rule.Rule`` of Shampoo. Factors see the raw gradient, so that every state is whole."""

    settings: Shampoo

    def states(self, shape: tuple[int, int], dtype: torch.dtype) -> Mapping[str, State]:
        """Filtered gradient, factors and their roots; the grafted method's second moment."""
        rows, columns = shape
        sizes = {"filtered": shape, "left": (rows, rows), "right": (columns, columns)}
        sizes |= {"left_root": (rows, rows), "right_root": (columns, columns)}
        if self.settings.grafting == "adam":
            sizes["grafted"] = shape
        return {name: State(Held.WHOLE, size, torch.float32) for name, size in sizes.items()}

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """Factors move, then roots if they are due, then the filtered gradient goes through them."""
        s, grad = self.settings, matrix.float()
        whole["left"].lerp_(grad @ grad.T, 1 - s.beta2)
        whole["right"].lerp_(grad.T @ grad, 1 - s.beta2)
        whole["filtered"].lerp_(grad, 1 - s.beta1)
        corrected = 1 - s.beta2**update
        if s.takes_roots(update, self.shift):
            take = eigen_root if s.root == "eigen" else newton_root
            for side in ("left", "right"):
                whole[f"{side}_root"].copy_(take(whole[side] / corrected, 4, s.eps))
        filtered = whole["filtered"] / (1 - s.beta1**update)
        grafted = self._grafted(grad, filtered, whole, corrected)
        if update < s.start:
            return grafted if grafted is not None else filtered
        found = whole["left_root"] @ filtered @ whole["right_root"]
        return found if grafted is None else found.mul_(grafted.norm() / (found.norm() + _TINY))

    def _grafted(
        self, grad: torch.Tensor, filtered: torch.Tensor, whole: States, corrected: float
    ) -> torch.Tensor | None:
        """The update whose norm counts."""
        if self.settings.grafting != "adam":
            return filtered if self.settings.grafting == "sgd" else None
        second = whole["grafted"]
        second.mul_(self.settings.beta2).addcmul_(grad, grad, value=1 - self.settings.beta2)
        return filtered / ((second / corrected).sqrt_().add_(self.settings.grafting_eps))

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Weights decay, then move."""
        param.mul_(1 - lr * self.settings.weight_decay)
        move(param, direction, -lr)
