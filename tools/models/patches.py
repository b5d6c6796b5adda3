"""Diffusion transformers on rows of patches: full attention, blocks steered by the time step, text by cross-attention.

``PatchDiT`` is DiT (each block has its own product for the modulation, a label is added to the time step); with
``text_dim`` it is Wan (one product for all blocks, to which each adds a learned part; norms of queries and keys; rotary
positions; attention to text).

Shapes: B batch, T patches, P numbers of a patch, D width, N heads, H head width, F hidden width, L tokens of text,
C width of text, S frequencies of the time step.
Source: Peebles and Xie 2023 (DiT, adaLN-Zero); Wan Team 2025 (Wan 2.1, arXiv 2503.20314; Wan-Video/Wan2.1
wan/modules/model.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.models.common import check_positive_int, init_normal
from lading.models.dit import StepEmbedding
from lading.models.llama import LlamaConfig, RMSNorm, Rope


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """Sizes of a diffusion transformer.

    Attributes:
        patch_dim: Numbers of a patch.
        num_patches: Patches of an input.
        num_layers: Repeated blocks.
        dim: Width of the stream.
        num_heads, head_size: Attention heads and their width.
        hidden_dim: Width inside the MLP.
        num_labels: Rows of the table of labels; 0 with text.
        text_dim: Width of the text that every block attends to; 0 means none.
    Raises:
        ConfigError: a size is no positive integer, or there is neither a label nor text.
    """

    patch_dim: int
    num_patches: int
    num_layers: int
    dim: int
    num_heads: int
    head_size: int
    hidden_dim: int
    num_labels: int = 0
    text_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("patch_dim", "num_patches", "num_layers", "dim", "num_heads", "head_size", "hidden_dim"):
            check_positive_int(name, getattr(self, name))
        if bool(self.num_labels) == bool(self.text_dim):
            raise ConfigError(
                f"expected either num_labels or text_dim above 0, got {self.num_labels} and {self.text_dim}"
            )


class PatchAttention(nn.Module):
    """Self-attention over all patches in one product for queries, keys and values. Shapes: x_BTD -> y_BTD."""

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.num_heads * config.head_size
        self.qkv = nn.Linear(config.dim, 3 * width)
        self.out = nn.Linear(width, config.dim)
        normed = bool(config.text_dim)
        self.q_norm = RMSNorm(width, 1e-6) if normed else nn.Identity()
        self.k_norm = RMSNorm(width, 1e-6) if normed else nn.Identity()

    def forward(self, x_BTD: torch.Tensor, rope: nn.Module) -> torch.Tensor:
        """Attend to every patch: x_BTD -> y_BTD."""
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        parts = (self.q_norm(q_BTD), self.k_norm(k_BTD), v_BTD)
        q_BNTH, k_BNTH, v_BNTH = (y.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for y in parts)
        y_BNTH = F.scaled_dot_product_attention(rope(q_BNTH), rope(k_BNTH), v_BNTH)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


class TextAttention(nn.Module):
    """Attention of patches to text. Shapes: x_BTD, text_BLD -> y_BTD."""

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.num_heads * config.head_size
        self.q = nn.Linear(config.dim, width)
        self.kv = nn.Linear(config.dim, 2 * width)
        self.out = nn.Linear(width, config.dim)
        self.q_norm, self.k_norm = RMSNorm(width, 1e-6), RMSNorm(width, 1e-6)

    def forward(self, x_BTD: torch.Tensor, text_BLD: torch.Tensor) -> torch.Tensor:
        """Attend to every token of the text: x_BTD, text_BLD -> y_BTD."""
        k_BLD, v_BLD = self.kv(text_BLD).chunk(2, dim=-1)
        parts = (self.q_norm(self.q(x_BTD)), self.k_norm(k_BLD), v_BLD)
        q_BNTH, k_BNLH, v_BNLH = (y.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for y in parts)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNLH, v_BNLH)
        return self.out(y_BNTH.transpose(1, 2).flatten(2))


class PatchBlock(nn.Module):
    """Attention, attention to text if there is one, and an MLP; the condition shifts, scales and gates."""

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)
        self.attn = PatchAttention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)
        self.mlp_in = nn.Linear(config.dim, config.hidden_dim)
        self.mlp_out = nn.Linear(config.hidden_dim, config.dim)
        if config.text_dim:
            self.added = nn.Parameter(torch.empty(1, 6 * config.dim))
            self.text_norm = nn.LayerNorm(config.dim, eps=1e-6)
            self.text_attn = TextAttention(config)
        else:
            self.modulation = nn.Linear(config.dim, 6 * config.dim)

    def forward(
        self, x_BTD: torch.Tensor, condition: torch.Tensor, text_BLD: torch.Tensor | None, rope: nn.Module
    ) -> torch.Tensor:
        """Apply the block: x_BTD -> x_BTD; the condition is (B, D), with text (B, 6 D)."""
        steered = self.modulation(F.silu(condition)) if text_BLD is None else condition + self.added
        parts = steered[:, None].chunk(6, dim=-1)
        attn_shift, attn_scale, attn_gate, mlp_shift, mlp_scale, mlp_gate = parts  # each (B, 1, D)
        x_BTD = x_BTD + attn_gate * self.attn(self.attn_norm(x_BTD) * (1 + attn_scale) + attn_shift, rope)
        if text_BLD is not None:
            x_BTD = x_BTD + self.text_attn(self.text_norm(x_BTD), text_BLD)
        normed_BTD = self.mlp_norm(x_BTD) * (1 + mlp_scale) + mlp_shift
        return x_BTD + mlp_gate * self.mlp_out(F.gelu(self.mlp_in(normed_BTD), approximate="tanh"))


class PatchDiT(nn.Module):
    """Diffusion transformer: ``layers`` between patches in and patches out.

    Shapes: patches_BTP, steps_B, labels_B (int64) or text_BLC -> patches_BTP.
    """

    positions_TD: torch.Tensor

    def __init__(self, config: PatchConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Linear(config.patch_dim, config.dim)
        self.steps = StepEmbedding(config.dim)
        if config.text_dim:
            self.text_in = nn.Linear(config.text_dim, config.dim)
            self.text_out = nn.Linear(config.dim, config.dim)
            self.shared_modulation = nn.Linear(config.dim, 6 * config.dim)
            self.head_added = nn.Parameter(torch.empty(1, 2, config.dim))
            heads = LlamaConfig(
                max_seq_len=config.num_patches, dim=config.head_size, num_heads=1, head_size=config.head_size
            )
            self.rope = Rope(heads)
        else:
            self.labels = nn.Embedding(config.num_labels, config.dim)
            self.modulation = nn.Linear(config.dim, 2 * config.dim)
            self.rope = nn.Identity()
            self.register_buffer("positions_TD", torch.zeros(config.num_patches, config.dim), persistent=False)
        self.layers = nn.ModuleList(PatchBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)
        self.head = nn.Linear(config.dim, config.patch_dim)
        self.steps.init_tables()
        init_normal(self, config.num_layers, residual=("out.weight", "mlp_out.weight"))

    def forward(self, patches_BTP: torch.Tensor, steps_B: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
        """Predict what was added to the patches, of their shape patches_BTP; ``told`` is labels_B or text_BLC."""
        x_BTD, steps_BD = self.patches(patches_BTP), self.steps(steps_B)
        if self.config.text_dim:
            text_BLD = self.text_out(F.gelu(self.text_in(told), approximate="tanh"))
            condition = self.shared_modulation(F.silu(steps_BD))
        else:
            x_BTD, text_BLD = x_BTD + self.positions_TD, None
            condition = steps_BD = steps_BD + self.labels(told)
        for layer in self.layers:
            x_BTD = layer(x_BTD, condition, text_BLD, self.rope)
        if self.config.text_dim:
            shift, scale = (self.head_added + steps_BD[:, None]).chunk(2, dim=1)
        else:
            shift, scale = self.modulation(F.silu(steps_BD))[:, None].chunk(2, dim=-1)
        return self.head(self.norm(x_BTD) * (1 + scale) + shift)


def patch_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error in float32; ``{"patches", "targets": (B, T, P), "steps": (B,), "told"}``."""
    predicted_BTP = model(batch["patches"], batch["steps"], batch["told"])
    return F.mse_loss(predicted_BTP.float(), batch["targets"].float())
