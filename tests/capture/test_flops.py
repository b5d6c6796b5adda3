"""FLOP of attention are those of the products it stands for, also where heads share keys and values."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import bmm_flop

from lading.tracing.trace import capture


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_attention_counts_its_products_for_every_query_head(kv_heads: int) -> None:
    batch, heads, length, width = 2, 6, 8, 16
    made = torch.nn.Linear(width, width)  # gives the step something to train
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
    tensors = {name: torch.randn(batch, count, length, width) for name, count in shapes.items()}

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        q, k, v = (model(batch[name]) for name in "qkv")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum()

    graph = capture(made, tensors, loss)
    scores = bmm_flop((batch * heads, length, width), (batch * heads, width, length))
    forward, backward = (op.flops for op in graph.ops if "scaled_dot_product" in op.name)
    assert (forward, backward) == (2 * scores, 5 * scores)
