"""A rule as an optimizer of plain PyTorch, everything in memory: the reference for rules that torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lading.optim.rule import ParameterRule, dtype_of


class PlainOptimizer(torch.optim.Optimizer):
    """Optimizer of whole parameters by a ``ParameterRule``, one after another."""

    def __init__(self, params: Iterable[torch.Tensor], rule: ParameterRule) -> None:
        super().__init__(params, {"lr": rule.lr})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, group["lr"])
        return loss

    def _move(self, param: torch.Tensor, lr: float) -> None:
        param_state, rule = self.state[param], self.rule.of_size(param.numel())
        if not param_state:
            param_state["step"] = torch.zeros(())
            for name, state in rule.state_specs(tuple(param.shape)).items():
                dtype = dtype_of(state, param.dtype)
                is_like = state.shape == tuple(param.shape)
                param_state[name] = (
                    torch.zeros_like(param, dtype=dtype)
                    if is_like
                    else torch.zeros(state.shape, dtype=dtype, device=param.device)
                )
        param_state["step"] += 1
        states = {name: value for name, value in param_state.items() if name != "step"}
        assert param.grad is not None
        rule.update(param, param.grad, states, lr=lr, step=param_state["step"] if rule.counts else None)
