"""Adafactor: a second moment by rows and columns (Shazeer and Stern, https://arxiv.org/abs/1804.04235)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lading.errors import ConfigError, check_number
from lading.optim.rule import ParameterRule, States, StateSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Adafactor(ParameterRule):
    """Adafactor, as ``torch.optim.Adafactor(foreach=False)``.

    Means over rows and columns, and norms of the parameter and of its update, need all of a parameter: it is not cut.

    Attributes:
        lr: The most by which a parameter moves, relative to its own size; it falls as 1 / sqrt(update).
        beta2_decay: Power of the update's number by which the second moment's decay nears 1; 0 or less.
        eps1: Least second moment's root; torch's own for float32.
        eps2: Least size of a parameter that its steps are relative to.
        d: Most root mean square of an update.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps1: float = 2**-23
    eps2: float = 1e-3
    d: float = 1.0
    weight_decay: float = 0.0

    counts: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    temporaries: ClassVar[int] = 1
    #: Norms of the parameter, of the gradient by rows and by columns, of the update; the estimate of the second moment
    #: written, divided, clamped and made a root (2 each), and multiplied with the gradient (3).
    passes: ClassVar[float] = 4 + 1 + 2 + 2 + 2 + 3

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0)
        check_number("eps1", self.eps1, 0)
        check_number("eps2", self.eps2, 0)
        check_number("d", self.d, 1)
        check_number("weight_decay", self.weight_decay, 0)
        if type(self.beta2_decay) not in (int, float) or not -100 < self.beta2_decay <= 0:
            raise ConfigError(f"beta2_decay: expected a number from -100 to 0, got {self.beta2_decay!r}")

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """Shapes of the second moments by rows and columns of the last two dims; a vector has one of its own size."""
        if len(shape) < 2:
            return {"variance": StateSpec(shape)}
        return {"row_var": StateSpec((*shape[:-1], 1)), "col_var": StateSpec((*shape[:-2], 1, shape[-1]))}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Run the operations of ``torch.optim._adafactor._single_tensor_adafactor``, in their order."""
        assert step is not None
        number = step.item()
        decay_base = number**self.beta2_decay
        rate = max(self.eps2, param.norm(2).item() / param.numel() ** 0.5) * min(lr, 1 / number**0.5)
        if self.weight_decay != 0:
            param.mul_(1 - lr * self.weight_decay)
        if grad.dim() > 1:
            rows, columns = states["row_var"], states["col_var"]
            rows.lerp_(grad.norm(dim=-1, keepdim=True).square_().div_(grad.size(-1)), decay_base)
            columns.lerp_(grad.norm(dim=-2, keepdim=True).square_().div_(grad.size(-2)), decay_base)
            estimate = rows @ columns
            estimate.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=self.eps1))
        else:
            states["variance"].lerp_(grad * grad, decay_base)
            estimate = states["variance"].clone()
        update = estimate.clamp_(min=self.eps1 * self.eps1).rsqrt_()
        update.mul_(grad)
        clipped = max(1.0, update.norm(2).item() / (update.numel() ** 0.5 * self.d))
        param.add_(update, alpha=-rate / clipped)

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make ``torch.optim.Adafactor``, one parameter at a time."""
        import torch

        return torch.optim.Adafactor(
            params, self.lr, self.beta2_decay, (self.eps1, self.eps2), self.d, self.weight_decay, foreach=False
        )
