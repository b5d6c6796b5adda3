"""A rule of one's own: this file is all that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from lading.optim.plain import PlainOptimizer
from lading.optim.rule import ParameterRule, States, StateSpec


@dataclass(frozen=True, kw_only=True)
class Toy(ParameterRule):
    """Steps by the gradient over its running largest size, and remembers where a parameter has been on average."""

    lr: float = 1e-3
    decay: float = 0.9

    temporaries: ClassVar[int] = 1

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """Largest size of each element's gradient, and the mean of each element, in 16 bits."""
        return {"largest": StateSpec(shape), "mean": StateSpec(shape, "bfloat16")}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Move."""
        torch.maximum(states["largest"].mul_(self.decay), grad.abs(), out=states["largest"])
        param.addcdiv_(grad, states["largest"] + 1e-8, value=-lr)
        states["mean"].lerp_(param.to(torch.bfloat16), 1 - self.decay)

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """The same on whole parameters."""
        return PlainOptimizer(params, self)
