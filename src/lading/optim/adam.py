"""Adam: Kingma and Ba, https://arxiv.org/abs/1412.6980; as ``torch.optim.Adam(fused=True)``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lading.optim.moment_rule import MomentRule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Adam(MomentRule):
    """Adam, whose weight decay is a part of the gradient; the meaning of every number is ``torch.optim.Adam``'s."""

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

        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
            [param], [grad], [exp_avg], [exp_avg_sq], [], [step],
            lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make ``torch.optim.Adam``, fused, or an optimizer by this rule where states have a format of their own."""
        import torch

        from lading.optim.plain import PlainOptimizer

        if self.states != "auto":
            return PlainOptimizer(params, self)
        return torch.optim.Adam(params, self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay, fused=True)
