"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no bias, a head of its own or tied.

Shapes: B batch, T tokens, D model width, N query heads, K key-value heads, H head width, V vocabulary.
Source: Touvron et al. 2023 (Llama), Su et al. 2021 (RoPE, on the two halves of a head, as Hugging Face stores weights),
Yang et al. 2025 (Qwen3: norms of queries and keys).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.models.common import DecoderConfig, check_positive_int, check_tokens, init_normal
from lading.models.loss import next_byte_loss


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a Llama.

    Attributes:
        num_kv_heads: Key-value heads, a divisor of ``num_heads``; None means as many as query heads.
        head_size: Width of one head; None means ``dim / num_heads``.
        hidden_dim: Width inside the MLP; None means 8/3 of ``dim``, rounded up to a multiple of 32.
        qk_norm: Normalise each head's queries and keys before they are turned (Qwen3).
        tied: The head is the token embedding.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
    Raises:
        ConfigError: a size is out of range or does not divide.
    """

    num_kv_heads: int | None = None
    head_size: int | None = None
    hidden_dim: int | None = None
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_int("num_kv_heads", self.kv_heads)
        check_positive_int("hidden_dim", self.mlp_dim)
        check_positive_int("head_size", self.head_dim)
        if self.num_heads % self.kv_heads:
            raise ConfigError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"the width of a head must be even for rotary positions, got {self.head_dim}")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ConfigError(f"rope_theta and norm_eps must be positive, got {self.rope_theta} and {self.norm_eps}")

    @property
    def kv_heads(self) -> int:
        """Key-value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head, resolved."""
        return super().head_dim if self.head_size is None else self.head_size

    @property
    def mlp_dim(self) -> int:
        """Width inside the MLP, resolved."""
        return -(-8 * self.dim // 96) * 32 if self.hidden_dim is None else self.hidden_dim


class RMSNorm(nn.Module):
    """Scale to unit mean square, then by a learned weight. Shapes: x_...D -> y_...D."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dim: x_...D -> y_...D."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SwiGLU(nn.Module):
    """Gated MLP ``down(silu(gate(x)) * up(x))``. Shapes: x_...D -> y_...D."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the gated MLP over the last dim: x_...D -> y_...D."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Rope(nn.Module):
    """Tables of cosines and sines, one row per position, as buffers that checkpoints leave out."""

    cos_TH: torch.Tensor
    sin_TH: torch.Tensor

    def __init__(self, config: LlamaConfig, width: int | None = None) -> None:
        """Make the tables for heads of ``width`` elements that are turned; None means all of a head."""
        super().__init__()
        self.theta = config.rope_theta
        shape = (config.max_seq_len, width or config.head_dim)
        self.register_buffer("cos_TH", torch.empty(shape), persistent=False)
        self.register_buffer("sin_TH", torch.empty(shape), persistent=False)
        self.init_tables()

    def init_tables(self) -> None:
        """Fill the tables; needed again only after ``to_empty``."""
        num_tokens, head_dim = self.cos_TH.shape
        on_device = {"dtype": torch.float64, "device": self.cos_TH.device}
        frequencies = self.theta ** -(torch.arange(0, head_dim, 2, **on_device) / head_dim)
        angles_TH = torch.outer(torch.arange(num_tokens, **on_device), frequencies).repeat(1, 2)
        self.cos_TH.copy_(angles_TH.cos())
        self.sin_TH.copy_(angles_TH.sin())

    def forward(self, x_BNTH: torch.Tensor) -> torch.Tensor:
        """Turn each pair (i, i + H/2) by its position's angle: x_BNTH -> x_BNTH."""
        num_tokens = x_BNTH.shape[2]
        low, high = x_BNTH.chunk(2, dim=-1)
        turned_BNTH = torch.cat((-high, low), dim=-1)
        return x_BNTH * self.cos_TH[:num_tokens] + turned_BNTH * self.sin_TH[:num_tokens]


class LlamaAttention(nn.Module):
    """Causal grouped-query self-attention. Shapes: x_BTD -> y_BTD."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.kv_heads != config.num_heads
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Attend to this token and those before: x_BTD -> y_BTD."""
        q_BNTH = rope(self.q_norm(self.heads(self.wq(x_BTD))))
        k_BKTH = rope(self.k_norm(self.heads(self.wk(x_BTD))))
        v_BKTH = self.heads(self.wv(x_BTD))
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=self.grouped)
        return self.wo(y_BNTH.transpose(1, 2).flatten(2))

    def heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Split the last dim into heads: x_BTD -> x_BNTH."""
        return x_BTD.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class LlamaBlock(nn.Module):
    """Block of a Llama: attention and an MLP (dense or routed), each normalised before and added afterwards."""

    def __init__(self, config: LlamaConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = LlamaAttention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = mlp

    def forward(self, x_BTD: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Apply attention and the MLP: x_BTD -> x_BTD."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), rope)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class RotaryDecoder(nn.Module):
    """Abstract: ``layers`` between an embedding and a head; a subclass says which MLP each layer has.

    Raises:
        ConfigError: on a batch longer than ``max_seq_len``.
    Shapes: tokens_BT (int64) -> logits_BTV.
    """

    def __init__(self, config: LlamaConfig, mlps: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.rope = Rope(config)
        self.layers = nn.ModuleList(LlamaBlock(config, mlp) for mlp in mlps)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Tie the head again if it is (``to_empty`` parts it); draw all weights from torch's default generator."""
        if self.config.tied:
            self.head.weight = self.tokens.weight
        self.rope.init_tables()
        init_normal(self, self.config.num_layers, residual=("wo.weight", "down.weight"))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Compute next-token logits: tokens_BT -> logits_BTV."""
        check_tokens(tokens_BT, self.config.max_seq_len)
        x_BTD = self.tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.rope)
        return self.head(self.norm(x_BTD))


class Llama(RotaryDecoder):
    """A RotaryDecoder with one SwiGLU in each layer."""

    Config = LlamaConfig
    loss = staticmethod(next_byte_loss)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, (SwiGLU(config.dim, config.mlp_dim) for _ in range(config.num_layers)))
