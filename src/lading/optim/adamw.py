"""AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; as ``torch.optim.AdamW(fused=True)``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lading.errors import ConfigError
from lading.optim.moment_rule import MomentRule
from lading.optim.rule import States

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AdamW(MomentRule):
    """AdamW with decoupled weight decay; the meaning of every number is ``torch.optim.AdamW``'s."""

    lr: float = 3e-4
    weight_decay: float = 0.01

    def move(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        *,
        lr: float,
        step: torch.Tensor,
    ) -> None:
        """Run torch's fused kernel."""
        import torch

        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [param], [grad], [exp_avg], [exp_avg_sq], [], [step],
            lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def update_piece(self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, update: int) -> None:
        """Move a piece of any shape, bit-equal to ``torch.optim.AdamW(foreach=False)``.

        Raises:
            ConfigError: states are in a format of their own.
        """
        if self.states != "auto":
            raise ConfigError(
                f'expected AdamW with states "auto" on pieces of parameters that ranks have, got {self.states!r}; '
                "leave states out"
            )
        param.mul_(1 - lr * self.weight_decay)
        states["exp_avg"].lerp_(grad, 1 - self.beta1)
        states["exp_avg_sq"].mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        size = lr / (1 - self.beta1**update)
        root = (1 - self.beta2**update) ** 0.5
        denominator = (states["exp_avg_sq"].sqrt() / root).add_(self.eps)
        param.addcdiv_(states["exp_avg"], denominator, value=-size)

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make ``torch.optim.AdamW``, fused, or an optimizer by this rule where states have a format of their own."""
        import torch

        from lading.optim.plain import PlainOptimizer

        if self.states != "auto":
            return PlainOptimizer(params, self)
        return torch.optim.AdamW(
            params, self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay, fused=True
        )  # fmt: skip
