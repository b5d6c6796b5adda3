"""AdamW as a rule: all of it elementwise, so that pieces of any shape give the bits of the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lading.optim.adamw import AdamWSettings
from lading.optim.rule import Held, State, States


class AdamWRule:
    """Bit-equal to ``torch.optim.AdamW(foreach=False)``. Not a ``Rule``: there is no direction of a whole."""

    def __init__(self, settings: AdamWSettings) -> None:
        self.settings = settings

    def states(self, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, State]:
        """Both moments."""
        moment = State(Held.ELEMENTWISE, shape, dtype)
        return {"exp_avg": moment, "exp_avg_sq": moment}

    def step(self, param: torch.Tensor, grad: torch.Tensor, held: States, *, lr: float, update: int) -> None:
        """Move a piece of the parameter; ``update`` counts from 1."""
        s = self.settings
        param.mul_(1 - lr * s.weight_decay)
        held["exp_avg"].lerp_(grad, 1 - s.beta1)
        held["exp_avg_sq"].mul_(s.beta2).addcmul_(grad, grad, value=1 - s.beta2)
        size = lr / (1 - s.beta1**update)
        root = (1 - s.beta2**update) ** 0.5
        denominator = (held["exp_avg_sq"].sqrt() / root).add_(s.eps)
        param.addcdiv_(held["exp_avg"], denominator, value=-size)
