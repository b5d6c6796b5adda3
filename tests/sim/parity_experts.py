"""Experts of a decoder spread over ranks as torchtitan does it: a module of their own, cut over ranks of their own.

Tokens go to experts and back by ``all_to_all_single_autograd`` inside that module, so FSDP2 gathers before they go.
Rows are as many for every expert; the counts that ranks tell each other are left out, as Lading leaves them out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.sim.parity import POLICY, SIZES, H, N, S, V
from tools.models.decoder import DispatchedExperts, PartsConfig, PartsDecoder, activated
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

EXPERTS, ACTIVE, WIDTH = 8, 2, 96
SIZES["moe"] = {"h": H, "n": N, "v": V, "k": 4, "d": H // N, "e": EXPERTS, "a": ACTIVE, "g": WIDTH}


class LocalExperts(nn.Module):
    """The experts of one rank, to which rows of all ranks come."""

    def __init__(self, config: PartsConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.config, self.group = config, group
        self.count = config.num_experts // (group.size() if group else 1)
        self.up_EDG = nn.Parameter(torch.zeros(self.count, config.dim, 2 * config.expert_dim))
        self.down_EGD = nn.Parameter(torch.zeros(self.count, config.expert_dim, config.dim))

    def forward(self, rows_RD: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, with their weights, to what their experts make of them, weighted."""
        rows_RD, weights_R = self.travel(rows_RD), self.travel(weights_R)
        each = rows_RD.shape[0] // self.count
        ends_E = torch.arange(each, rows_RD.shape[0] + 1, each, dtype=torch.int32)
        hidden_RG = activated(functional.grouped_mm(rows_RD, self.up_EDG, offs=ends_E), self.config.mlp)
        hidden_RG = hidden_RG * weights_R[:, None]
        return self.travel(functional.grouped_mm(hidden_RG, self.down_EGD, offs=ends_E))

    def travel(self, rows: torch.Tensor) -> torch.Tensor:
        """To the ranks of the experts, or back."""
        if self.group is None:
            return rows
        splits = [rows.shape[0] // self.group.size()] * self.group.size()
        return all_to_all_single_autograd(rows.contiguous(), splits, splits, self.group)


class SpreadExperts(nn.Module):
    """``DispatchedExperts`` with its experts elsewhere."""

    def __init__(self, of: DispatchedExperts, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.config, self.router = of.config, of.router
        self.experts = LocalExperts(of.config, group)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Route, dispatch, compute and add up."""
        x_SD = x_BTD.flatten(0, 1)
        logits_SE = self.router(x_SD).float()
        top_SA, chosen_SA = logits_SE.topk(self.config.num_active, dim=-1)
        weights_SA = top_SA.softmax(dim=-1)
        order_R = chosen_SA.flatten().argsort(stable=True)
        tokens_R = order_R // self.config.num_active
        weights_R = weights_SA.flatten()[order_R].to(x_SD.dtype)
        y_RD = self.experts(x_SD[tokens_R], weights_R)
        # As torchtitan adds up; index_add would keep the rows for their shape.
        places_RD = tokens_R[:, None].expand(-1, x_SD.shape[1])
        return torch.zeros_like(x_SD).scatter_add(0, places_RD, y_RD).unflatten(0, x_BTD.shape[:2])


def experts_model(layers: int, group: dist.ProcessGroup | None) -> nn.Module:
    """The small model, its experts over a group."""
    sizes: dict[str, Any] = {"dim": H, "num_heads": N, "num_kv_heads": 4, "vocab_size": V, "max_seq_len": S}
    sizes |= {"num_experts": EXPERTS, "num_active": ACTIVE, "expert_dim": WIDTH, "hidden_dim": 4}
    model = PartsDecoder(PartsConfig(**sizes, num_layers=layers, parts=("attention", "experts"), tied=False))
    for module in model.modules():
        for name, table in module.named_buffers(recurse=False):
            setattr(module, name, table.to(torch.bfloat16))
    for layer in model.layers:
        layer.experts = SpreadExperts(layer.experts, group)  # type: ignore[union-attr]
    return model


def shard_experts(model: Any, whole: DeviceMesh, apart: DeviceMesh) -> nn.Module:
    """Experts over the ranks that hold the same ones, the rest over all; then as ``fully_sharded``."""
    for layer in model.layers:
        fully_shard(layer.experts.experts, mesh=apart, mp_policy=POLICY)
        fully_shard(layer, mesh=whole, mp_policy=POLICY)
    fully_shard(model.tokens, mesh=whole, mp_policy=POLICY)
    fully_shard([model.norm, model.head], mesh=whole, mp_policy=POLICY, reshard_after_forward=False)
    return fully_shard(model, mesh=whole, mp_policy=POLICY)
