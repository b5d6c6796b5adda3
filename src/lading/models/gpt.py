"""GPT: learned positions, LayerNorm before each sublayer, GELU, biases, one fused QKV product.

Shapes: B batch, T tokens, D model width, N heads, H head width, V vocabulary.
Source: Radford et al. 2019 (GPT-2). Attention weights see no dropout, so attention stays one fused operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.models.common import DecoderConfig, check_positive_int, check_tokens, init_normal
from lading.models.loss import next_byte_loss


@dataclass(frozen=True, kw_only=True)
class GptConfig(DecoderConfig):
    """Sizes of a GPT.

    Attributes:
        head_size: Width of one head; None means ``dim / num_heads``.
        hidden_dim: Width inside the MLP; None means four times ``dim``.
        dropout: Probability with which embeddings and sublayer outputs are zeroed in training, in [0, 1).
        tied: The head is the token embedding.
    Raises:
        ConfigError: a size or the probability is out of range.
    """

    head_size: int | None = None
    hidden_dim: int | None = None
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("head_size", self.head_dim)
        check_positive_int("hidden_dim", self.mlp_dim)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be in [0, 1), got {self.dropout!r}")

    @property
    def head_dim(self) -> int:
        """Width of one head, resolved."""
        return super().head_dim if self.head_size is None else self.head_size

    @property
    def mlp_dim(self) -> int:
        """Width inside the MLP, resolved."""
        return 4 * self.dim if self.hidden_dim is None else self.hidden_dim


class GptBlock(nn.Module):
    """Block of a GPT: attention and a wider MLP, each normalised before and added to the stream after."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attn_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.num_heads * config.head_dim)
        self.attn_out = nn.Linear(config.num_heads * config.head_dim, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp_in = nn.Linear(config.dim, config.mlp_dim)
        self.mlp_out = nn.Linear(config.mlp_dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Apply attention and the MLP: x_BTD -> x_BTD."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attn_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD)))))

    def attention(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Causal self-attention: x_BTD -> y_BTD."""
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        q_BNTH, k_BNTH, v_BNTH = (y.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for y in (q_BTD, k_BTD, v_BTD))
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        return self.attn_out(y_BNTH.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Decoder of ``layers`` between embeddings and a head.

    Raises:
        ConfigError: on a batch longer than ``max_seq_len``.
    Shapes: tokens_BT (int64) -> logits_BTV.
    """

    Config = GptConfig
    loss = staticmethod(next_byte_loss)

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.max_seq_len, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(GptBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Tie the head again (``to_empty`` parts it) and draw all weights from torch's default generator."""
        if self.config.tied:
            self.head.weight = self.tokens.weight
        init_normal(self, self.config.num_layers, residual=("attn_out.weight", "mlp_out.weight"))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Compute next-token logits: tokens_BT -> logits_BTV."""
        check_tokens(tokens_BT, self.config.max_seq_len)
        positions_TD = self.positions.weight[: tokens_BT.shape[1]]
        x_BTD = self.dropout(self.tokens(tokens_BT) + positions_TD)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))
