"""The loss of the reference models: predict each byte from those before it.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from lading.errors import ConfigError


def next_byte_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next token, in float32 where the logits are in less.

    Args:
        model: tokens_BT (int64) -> logits_BTV.
        batch: ``{"tokens": (B, T + 1) int64}``; the first T are inputs, the last T targets.
    Returns:
        A scalar in nats per token.
    Raises:
        ConfigError: no "tokens", or they are not (B, T + 1) with T >= 1.
    """
    tokens = batch.get("tokens")
    if tokens is None or tokens.dim() != 2 or tokens.shape[1] < 2:
        actual = sorted(batch) if tokens is None else tuple(tokens.shape)
        raise ConfigError(f"expected a batch with 'tokens' of shape (batch, tokens + 1), got {actual}")
    logits_BTV = model(tokens[:, :-1])
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens[:, 1:].flatten())
