"""A model in parts on unlike computers: planned, then trained by stock PyTorch, a process on each.

    PYTHONPATH=. lading place --machine two_boxes.toml --model placed:Model --seq 128 --batch 2 --micro-batches 4 \
        --units 8 --policy chain --out placement.json
    torchrun --nproc-per-node 2 placed.py placement.json

Here both processes run on one computer. On two, start rank 0 on the device of the first part and rank 1 on that of the
second (the table says which), with torchrun's --nnodes 2. Where to look: src/lading/planner/placement (who gets what),
src/lading/runtime/place.py (what is called).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
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
    """Bytes in, the next byte out; the head is the embedding, so its weight is in the first part and in the last."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def loss_of(logits_BTV: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
    """Mean over a micro-batch."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), next_BT.flatten())


def main(path: str) -> None:
    """Train eight steps on one rank of ``torchrun``."""
    dist.init_process_group("gloo")
    plan = lading.Plan.load(path)
    seq_len = plan.request.seq_len
    torch.manual_seed(0)
    example = torch.zeros(plan.micro_batch, seq_len, dtype=torch.int64)
    part = lading.place(plan, Model(), (example,), loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(0)
    for step in range(8):
        starts = torch.randint(0, len(text) - seq_len - 1, (plan.micro_batch * plan.micro_batches, 1), generator=draw)
        tokens_BT = text[starts + torch.arange(seq_len + 1)]
        losses = part.step(tokens_BT[:, :-1], target=tokens_BT[:, 1:])  # of each micro-batch, on the last part
        optimizer.step()
        optimizer.zero_grad()
        if part.is_last:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
