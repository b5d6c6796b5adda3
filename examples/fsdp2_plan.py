"""A plan in your own FSDP2 script: one line where ``fully_shard`` was called block by block.

    PYTHONPATH=. lading plan --model fsdp2_plan:Model --machine h100 --devices 2 --global-batch 16 --seq 128 \
        --pin zero=3 --pin pp=1 --pin tp=1 --pin cp=1 --pin mb=4 --out plan.json
    torchrun --nproc-per-node 2 fsdp2_plan.py plan.json

The training loop is a plain one: what the plan says of micro-batches is set as they begin, and an optimizer that steps
too early is an error. Where to look: src/lading/planner/unshard.py, src/lading/runtime/apply.py (what is called).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import lading


class Block(nn.Module):
    """Attention of one head and an MLP; x_BTD -> x_BTD."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn_norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.attn_norm(x_BTD)).chunk(3, dim=-1))
        x_BTD = x_BTD + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x_BTD + self.mlp(x_BTD)


class Model(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def main(path: str) -> None:
    """Train eight steps on one rank of ``torchrun``."""
    dist.init_process_group("gloo")
    plan = lading.Plan.load(path)
    seq_len = plan.request.seq_len
    torch.manual_seed(0)
    model = lading.apply(plan, Model(), init_device_mesh("cpu", (dist.get_world_size(),)))  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(8):
        for _ in range(plan.micro_batches):
            starts = torch.randint(0, len(text) - seq_len - 1, (plan.micro_batch, 1), generator=draw)
            tokens_BT = text[starts + torch.arange(seq_len + 1)]
            logits_BTV = model(tokens_BT[:, :-1]).float()
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
            (loss / plan.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
