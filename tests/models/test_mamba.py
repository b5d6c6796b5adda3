"""A state-space layer in chunks gives what the recurrence gives token by token."""

from __future__ import annotations

import pytest
import torch
from tools.models.mamba import CHUNK, Mamba, MambaConfig

from lading.errors import ConfigError


def test_chunks_are_the_recurrence() -> None:
    torch.manual_seed(0)
    config = MambaConfig(dim=8, groups=2, heads=6, head_size=4, state=5)
    layer = Mamba(config)
    with torch.no_grad():
        layer.log_decay.normal_(-3.0, 0.5)
    tokens = 3 * CHUNK
    heads = torch.randn(2, tokens, 6, 4, dtype=torch.float64)
    steps = torch.rand(2, tokens, 6, dtype=torch.float64)
    write, read = torch.randn(2, 2, tokens, 10, dtype=torch.float64)
    decay = -layer.log_decay.double().exp()
    state = torch.zeros(2, 6, 5, 4, dtype=torch.float64)
    expected = []
    for t in range(tokens):
        by_group = [y[:, t].unflatten(1, (2, 5)).repeat_interleave(3, 1) for y in (write, read)]
        added = by_group[0][..., None] * (steps[:, t, :, None] * heads[:, t])[:, :, None]
        state = state * (steps[:, t] * decay).exp()[..., None, None] + added
        expected.append((by_group[1][..., None] * state).sum(2))
    torch.testing.assert_close(
        layer.double().scan(heads, steps, write, read), torch.stack(expected, 1), rtol=1e-5, atol=1e-6
    )


def test_it_is_causal_and_every_parameter_learns() -> None:
    torch.manual_seed(0)
    layer = Mamba(MambaConfig(dim=8, groups=1, heads=2, head_size=4, state=3))
    x = torch.randn(1, 2 * CHUNK, 8)
    later = x.clone()
    later[:, 200:] += 1
    before, after = layer(x), layer(later)
    torch.testing.assert_close(before[:, :200], after[:, :200])
    assert not torch.allclose(before[:, 200:], after[:, 200:])
    before.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_lengths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="128 tokens, got 100"):
        Mamba(MambaConfig(dim=8, groups=1, heads=2, head_size=4, state=3))(torch.zeros(1, 100, 8))
    with pytest.raises(ConfigError, match="multiple of groups"):
        MambaConfig(dim=8, groups=2, heads=3, head_size=4, state=3)
