"""MoE: a Llama whose MLP is a choice of ``num_active`` out of ``num_experts`` SwiGLU experts for each token.

Every expert runs on every token and the router's weights, zero for experts not chosen, add up the results.
That is exact, drops no token and has the same shapes in every step, so the step is a known program; it costs
num_experts / num_active times the FLOP of a dispatching kernel (torch's ``grouped_mm`` traces in bf16 only).
Experts are separate modules, so each expert's weights can be placed on its own.

Shapes: B batch, T tokens, D model width, E experts, A experts active per token, V vocabulary.
Source: Jiang et al. 2024 (Mixtral): softmax over the chosen scores. No load-balancing loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lading.errors import ConfigError
from lading.models.common import check_positive_int, check_repeated
from lading.models.llama import LlamaConfig, RotaryDecoder, SwiGLU
from lading.models.loss import next_byte_loss


@dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """Sizes of an MoE.

    Attributes:
        num_experts: Experts in every block.
        num_active: Experts each token uses, at most ``num_experts``.
    Raises:
        ConfigError: a size is out of range or does not divide.
    """

    num_experts: int = 4
    num_active: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("num_experts", self.num_experts)
        check_repeated("num_experts", self.num_experts)
        check_positive_int("num_active", self.num_active)
        if self.num_active > self.num_experts:
            raise ConfigError(f"num_active must be at most num_experts={self.num_experts}, got {self.num_active}")


class RoutedExperts(nn.Module):
    """Weighted sum of the experts a router chooses for each token. Shapes: x_BTD -> y_BTD."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.num_active = config.num_active
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config.dim, config.mlp_dim) for _ in range(config.num_experts))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Route tokens to experts and add up the weighted results: x_BTD -> y_BTD."""
        weights = self.route(x_BTD).unsqueeze(-1).unbind(2)
        outputs = [weight_BT1 * expert(x_BTD) for weight_BT1, expert in zip(weights, self.experts, strict=True)]
        y_BTD = outputs[0]
        for output_BTD in outputs[1:]:
            y_BTD = y_BTD + output_BTD
        return y_BTD

    def route(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Weights of the experts, zero for those not chosen: x_BTD -> weights_BTE, each row summing to one."""
        scores_BTE = self.router(x_BTD)
        top_BTA, chosen_BTA = scores_BTE.topk(self.num_active, dim=-1)
        return torch.zeros_like(scores_BTE).scatter(-1, chosen_BTA, top_BTA.softmax(dim=-1))


class MoE(RotaryDecoder):
    """A RotaryDecoder with routed experts in each layer."""

    Config = MoeConfig
    loss = staticmethod(next_byte_loss)

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config, (RoutedExperts(config) for _ in range(config.num_layers)))
