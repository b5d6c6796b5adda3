"""A fresh process that runs the kernels of a training step once and prints by how many bytes it grew."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

from lading.runtime.resident import resident_bytes


def one_pass() -> None:
    """Forward, loss, backward and update of a small decoder layer, with one product large enough for every thread."""
    x = torch.rand(1, 64, 64)
    weight = torch.nn.Parameter(torch.rand(64, 64) / 64)
    table = torch.nn.Parameter(torch.rand(64, 64))
    x = x + F.embedding(torch.arange(64).view(1, 64), table)
    heads = F.linear(F.layer_norm(x, (64,)), weight).view(1, 64, 4, 16).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
    hidden = F.silu(mixed) * F.gelu(mixed) + F.rms_norm(mixed, (64,))
    F.cross_entropy(hidden.flatten(0, 1), torch.arange(64)).backward()
    torch.optim.AdamW([weight, table], fused=True).step()
    side = torch.rand(1024, 512)
    torch.mm(side, side.t())


def main() -> None:
    """``python -m lading.runtime.probe_scratch THREADS``"""
    torch.set_num_threads(int(sys.argv[1]))
    before = resident_bytes()
    one_pass()
    print(max(0, resident_bytes() - before))


if __name__ == "__main__":
    main()
