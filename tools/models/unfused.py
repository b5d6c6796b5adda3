"""GPT with attention in parts, as before FlashAttention: scores, mask, softmax, dropout and weighted sum.

Tokens are the first dim, as Megatron lays them out, so that heads are views and no operation copies them.

Shapes: T tokens, B batch, D model width, N heads, H head width, V vocabulary, M = B * N.
Source: Shoeybi et al. 2019 and Narayanan et al. 2021 (Megatron-LM); Press et al. 2022 (ALiBi); BigScience 2022 (BLOOM:
ALiBi and a norm of the embeddings).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lading.models.common import check_tokens, init_normal
from lading.models.gpt import GptConfig
from lading.models.loss import next_byte_loss


@dataclass(frozen=True, kw_only=True)
class UnfusedConfig(GptConfig):
    """Sizes of a GPT with attention in parts.

    Attributes:
        dropout: Probability, of attention weights too.
        alibi: Biases by distance stand for learned positions, and the embeddings are normalised (BLOOM).
    """

    alibi: bool = False


class UnfusedBlock(nn.Module):
    """Attention and a wider MLP, each normalised before and added to the stream after."""

    mask_TT: torch.Tensor
    distances_N1T: torch.Tensor

    def __init__(self, config: UnfusedConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        self.attn_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * width)
        self.attn_out = nn.Linear(width, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp_in = nn.Linear(config.dim, config.mlp_dim)
        self.mlp_out = nn.Linear(config.mlp_dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.attn_dropout = nn.Dropout(config.dropout)
        length = config.max_seq_len
        self.register_buffer("mask_TT", torch.empty(length, length, dtype=torch.bool), persistent=False)
        if config.alibi:
            self.register_buffer("distances_N1T", torch.empty(config.num_heads, 1, length), persistent=False)
        self.init_tables()

    def init_tables(self) -> None:
        """Fill mask and biases; needed again only after ``to_empty``."""
        self.mask_TT.fill_(True).triu_(1)
        if self.config.alibi:
            heads = torch.arange(1, self.config.num_heads + 1, device=self.mask_TT.device)
            slopes_N = 2.0 ** (-8.0 * heads / self.config.num_heads)
            positions_T = torch.arange(self.config.max_seq_len, device=self.mask_TT.device)
            self.distances_N1T.copy_(slopes_N[:, None, None] * positions_T)

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        """Apply attention and the MLP: x_TBD -> x_TBD."""
        x_TBD = x_TBD + self.dropout(self.attention(self.attn_norm(x_TBD)))
        return x_TBD + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_TBD)))))

    def attention(self, x_TBD: torch.Tensor) -> torch.Tensor:
        """Causal self-attention: x_TBD -> y_TBD."""
        length, batch, heads, width = *x_TBD.shape[:2], self.config.num_heads, self.config.head_dim
        parts = self.qkv(x_TBD).view(length, batch, heads, 3 * width).split(width, dim=-1)
        q_MTH, k_MTH, v_MTH = (part.view(length, batch * heads, width).transpose(0, 1) for part in parts)
        scores_MTT = self.scores(q_MTH, k_MTH, batch)
        masked_BNTT = scores_MTT.view(batch, heads, length, length).masked_fill(
            self.mask_TT[:length, :length], float("-inf")
        )
        weights_BNTT = self.attn_dropout(masked_BNTT.softmax(dim=-1))
        y_MTH = torch.bmm(weights_BNTT.view(batch * heads, length, length), v_MTH)
        y_TBNH = y_MTH.view(batch, heads, length, width).permute(2, 0, 1, 3).contiguous()
        return self.attn_out(y_TBNH.flatten(2))

    def scores(self, q_MTH: torch.Tensor, k_MTH: torch.Tensor, batch: int) -> torch.Tensor:
        """Scaled products of queries and keys, biased by distance with ALiBi: q_MTH, k_MTH -> scores_MTT."""
        scale, length = self.config.head_dim**-0.5, q_MTH.shape[1]
        if self.config.alibi:
            biases_M1T = self.distances_N1T[..., :length].repeat(batch, 1, 1)
            return torch.baddbmm(biases_M1T, q_MTH, k_MTH.transpose(1, 2), alpha=scale)
        unused_MTT = q_MTH.new_empty(1).expand(q_MTH.shape[0], length, length)
        return torch.baddbmm(unused_MTT, q_MTH, k_MTH.transpose(1, 2), beta=0, alpha=scale)


class UnfusedGPT(nn.Module):
    """Decoder of ``layers`` between embeddings and a head, tokens first inside.

    Raises:
        ConfigError: on a batch longer than ``max_seq_len``.
    Shapes: tokens_BT (int64) -> logits_TBV.
    """

    Config = UnfusedConfig
    loss = staticmethod(next_byte_loss)

    def __init__(self, config: UnfusedConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = None if config.alibi else nn.Embedding(config.max_seq_len, config.dim)
        self.token_norm = nn.LayerNorm(config.dim) if config.alibi else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(UnfusedBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        init_normal(self, config.num_layers, residual=("attn_out.weight", "mlp_out.weight"))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Compute next-token logits: tokens_BT -> logits_TBV."""
        check_tokens(tokens_BT, self.config.max_seq_len)
        x_BTD = self.tokens(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight[: tokens_BT.shape[1]]
        x_TBD = self.dropout(self.token_norm(x_BTD.transpose(0, 1).contiguous()))
        for layer in self.layers:
            x_TBD = layer(x_TBD)
        return self.head(self.norm(x_TBD)).transpose(0, 1)
