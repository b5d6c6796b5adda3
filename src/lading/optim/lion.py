"""Lion: the sign of a momentum (Chen et al., https://arxiv.org/abs/2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lading.errors import check_number
from lading.optim.rule import ParameterRule, States, StateSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Lion(ParameterRule):
    """Lion with decoupled weight decay, the operations of its authors' code (google/automl, ``lion_pytorch.py``).

    Attributes:
        beta1: Share of the momentum in the direction.
        beta2: Decay of the momentum.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    temporaries: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0)
        check_number("beta1", self.beta1, 0, 1)
        check_number("beta2", self.beta2, 0, 1)
        check_number("weight_decay", self.weight_decay, 0)

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """Shape of the momentum."""
        return {"exp_avg": StateSpec(shape)}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Decay the weights, move them by the sign, then move the momentum."""
        average = states["exp_avg"]
        param.mul_(1 - lr * self.weight_decay)
        direction = average.mul(self.beta1).add_(grad.mul(1 - self.beta1)).sign_()
        param.add_(direction, alpha=-lr)
        average.mul_(self.beta2).add_(grad, alpha=1 - self.beta2)

    def update_piece(self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, update: int) -> None:
        """Move a piece of any shape, as ``update`` does."""
        self.update(param, grad, states, lr=lr, step=None)

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make an optimizer of whole parameters by this rule, as torch has no Lion."""
        from lading.optim.plain import PlainOptimizer

        return PlainOptimizer(params, self)
