"""Adam: Kingma and Ba, https://arxiv.org/abs/1412.6980; as ``torch.optim.Adam(fused=True)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lading.errors import check_number
from lading.optim.rule import ParameterRule, States, StateSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Adam(ParameterRule):
    """Adam, whose weight decay is a part of the gradient; the meaning of every number is ``torch.optim.Adam``'s."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

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
        """Run torch's fused kernel; parts that begin at whole vectors give the bits of the whole."""
        import torch

        assert step is not None
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage]
            [param], [grad], [states["exp_avg"]], [states["exp_avg_sq"]], [], [step],
            lr=lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make ``torch.optim.Adam``, fused."""
        import torch

        return torch.optim.Adam(params, self.lr, (self.beta1, self.beta2), self.eps, self.weight_decay, fused=True)
