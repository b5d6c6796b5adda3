"""AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; as ``torch.optim.AdamW(fused=True)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lading.errors import check_number
from lading.optim.rule import ParameterRule, States, StateSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AdamW(ParameterRule):
    """AdamW with decoupled weight decay; the meaning of every number is ``torch.optim.AdamW``'s."""

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0)
        check_number("beta1", self.beta1, 0, 1)
        check_number("beta2", self.beta2, 0, 1)
        check_number("eps", self.eps, 0, above=True)
        check_number("weight_decay", self.weight_decay, 0)

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """Shapes of both moments."""
        return {"exp_avg": StateSpec(shape), "exp_avg_sq": StateSpec(shape)}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Run torch's fused kernel, which walks memory, not indices.

        Parts give the bits of the whole where each begins at a whole vector of the CPU; 64 elements are that
        everywhere.
        """
        import torch

        assert step is not None
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            [param], [grad], [states["exp_avg"]], [states["exp_avg_sq"]], [], [step],
            lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def update_piece(self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, update: int) -> None:
        """Move a piece of any shape, bit-equal to ``torch.optim.AdamW(foreach=False)``."""
        param.mul_(1 - lr * self.weight_decay)
        states["exp_avg"].lerp_(grad, 1 - self.beta1)
        states["exp_avg_sq"].mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        size = lr / (1 - self.beta1**update)
        root = (1 - self.beta2**update) ** 0.5
        denominator = (states["exp_avg_sq"].sqrt() / root).add_(self.eps)
        param.addcdiv_(states["exp_avg"], denominator, value=-size)

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make ``torch.optim.AdamW``, fused."""
        import torch

        return torch.optim.AdamW(
            params, self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay, fused=True
        )  # fmt: skip
