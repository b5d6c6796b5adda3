"""SGD with momentum (Sutskever et al., http://proceedings.mlr.press/v28/sutskever13.html), as ``torch.optim.SGD``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lading.errors import ConfigError, check_number
from lading.optim.rule import ParameterRule, States, StateSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class SGD(ParameterRule):
    """SGD; the meaning of every number is ``torch.optim.SGD``'s, and without momentum there is no state of its size."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    planned: ClassVar[tuple[str, ...]] = ("momentum",)
    temporaries: ClassVar[int] = 2
    counts: ClassVar[bool] = True  # the first momentum is the gradient, not dampened

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0)
        check_number("momentum", self.momentum, 0)
        check_number("dampening", self.dampening, 0)
        check_number("weight_decay", self.weight_decay, 0)
        if self.dampening and not self.momentum:
            raise ConfigError(
                f"dampening: expected momentum above 0 beside it, got dampening = {self.dampening}; leave it out"
            )
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ConfigError(
                f"nesterov: expected momentum above 0 and no dampening with it, got momentum {self.momentum} and "
                f"dampening {self.dampening}"
            )

    def moves(self, dtype: str) -> bool:
        """Whether it moves weights of a dtype: of every one, as it adds and scales."""
        return True

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """Shape of the momentum, if there is one."""
        return {"momentum_buffer": StateSpec(shape)} if self.momentum else {}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Run the operations of ``torch.optim.sgd._single_tensor_sgd``, in their order."""
        assert step is not None
        self._move(param, grad, states, lr=lr, is_first=step.item() <= 1)

    def update_piece(self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, update: int) -> None:
        """Move a piece of any shape, as ``update`` does."""
        self._move(param, grad, states, lr=lr, is_first=update <= 1)

    def _move(self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, is_first: bool) -> None:
        if self.weight_decay != 0:
            grad = grad.add(param, alpha=self.weight_decay)
        if self.momentum != 0:
            buffer = states["momentum_buffer"]
            if is_first:
                buffer.copy_(grad)
            else:
                buffer.mul_(self.momentum).add_(grad, alpha=1 - self.dampening)
            grad = grad.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        param.add_(grad, alpha=-lr)

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make ``torch.optim.SGD``, one parameter at a time.

        Its fused kernel moves nothing in bfloat16 on a CPU (2.13).
        """
        import torch

        return torch.optim.SGD(
            params, self.lr, self.momentum, self.dampening, self.weight_decay, self.nesterov, foreach=False
        )
