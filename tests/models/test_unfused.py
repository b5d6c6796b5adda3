"""Attention in parts gives what attention in one operation gives."""

from __future__ import annotations

import pytest
import torch
from tools.models.unfused import UnfusedConfig, UnfusedGPT

from lading.models.gpt import GPT, GptConfig


def _of_parts(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a product whose heads are outermost, as those of one whose queries, keys and values are."""
    rest = qkv.shape[1:]
    return qkv.unflatten(0, (3, heads, -1)).transpose(0, 1).reshape(-1, *rest)


def test_it_is_gpt_with_another_order_of_heads() -> None:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "dim": 24, "num_heads": 4, "max_seq_len": 12}
    whole, parts = GPT(GptConfig(**sizes)), UnfusedGPT(UnfusedConfig(**sizes))
    state = whole.state_dict()
    for name in list(state):
        if ".qkv." in name:
            state[name] = _of_parts(state[name], 4)
    parts.load_state_dict(state)
    tokens = torch.randint(256, (3, 11))
    assert parts(tokens).shape == (3, 11, 256)
    torch.testing.assert_close(parts(tokens), whole(tokens), rtol=1e-4, atol=1e-5)


def test_distance_counts_and_the_future_does_not() -> None:
    torch.manual_seed(0)
    model = UnfusedGPT(UnfusedConfig(num_layers=2, dim=24, num_heads=4, max_seq_len=12, alibi=True))
    tokens = torch.randint(256, (2, 12))
    later = tokens.clone()
    later[:, 8:] = torch.randint(256, (2, 4))
    before, after = model(tokens), model(later)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])
    block = model.layers[0]
    q = torch.zeros(8, 5, 6)
    biases = block.scores(q, q, 2)  # type: ignore[operator]
    assert biases[0, 0, 4] - biases[0, 0, 3] == pytest.approx(2.0 ** (-8 / 4))
