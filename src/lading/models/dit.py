"""DiT: a diffusion transformer. Latents are cut into patches; each block is steered by time step and class label.

Shapes: B batch, C channels, I image side, P patch side, T tokens = (I / P)^2, D model width, N heads, H head width,
S diffusion steps, F frequencies of the time step.
Source: Peebles and Xie 2023 (DiT, adaLN-Zero); Ho et al. 2020 (linear schedule, noise-prediction loss); Ho and
Salimans 2022 (labels dropped for classifier-free guidance). Only the noise is predicted, not its variance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.models.common import check_positive_int, check_repeated, init_normal

_FREQUENCIES = 256
_BETAS = (1e-4, 0.02)


@dataclass(frozen=True, kw_only=True)
class DitConfig:
    """Sizes of a DiT.

    Attributes:
        image_size: Side of the square latents; a multiple of ``patch_size``.
        channels: Channels of the latents.
        patch_size: Side of the square patch that is one token.
        num_classes: Labels; one more row of the table stands for "no label".
        label_dropout: Probability with which a label is dropped in training, in [0, 1).
        num_steps: Steps of the diffusion.
        num_layers: Repeated blocks.
        dim: Width of the residual stream; a multiple of ``num_heads`` and of 4.
        num_heads: Attention heads.
        dropout: Probability with which sublayer outputs are zeroed in training, in [0, 1).
    Raises:
        ConfigError: a size or a probability is out of range or does not divide.
    """

    image_size: int = 16
    channels: int = 4
    patch_size: int = 2
    num_classes: int = 10
    label_dropout: float = 0.1
    num_steps: int = 1000
    num_layers: int = 4
    dim: int = 128
    num_heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("image_size", "channels", "patch_size", "num_classes", "num_steps", "num_layers"):
            check_positive_int(name, getattr(self, name))
        check_repeated("num_layers", self.num_layers)
        check_positive_int("dim", self.dim)
        check_positive_int("num_heads", self.num_heads)
        if self.dim % self.num_heads or self.dim % 4:
            raise ConfigError(f"dim must be a multiple of num_heads and of 4, got {self.dim} and {self.num_heads}")
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size must be a multiple of patch_size, got {self.image_size} and {self.patch_size}"
            )
        for name in ("label_dropout", "dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)!r}")

    @property
    def patches_per_side(self) -> int:
        """Tokens along one side of the image."""
        return self.image_size // self.patch_size


class StepEmbedding(nn.Module):
    """A vector for each time step: sines and cosines, then an MLP. Shapes: steps_B -> y_BD."""

    frequencies_F: torch.Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies_F", torch.empty(_FREQUENCIES // 2, dtype=torch.float32), persistent=False)
        self.mlp_in = nn.Linear(_FREQUENCIES, dim)
        self.mlp_out = nn.Linear(dim, dim)

    def init_tables(self) -> None:
        """Fill the table; needed again only after ``to_empty``."""
        exponents_F = torch.arange(_FREQUENCIES // 2, dtype=torch.float64, device=self.frequencies_F.device)
        self.frequencies_F.copy_(10_000.0 ** (-exponents_F / (_FREQUENCIES // 2)))

    def forward(self, steps_B: torch.Tensor) -> torch.Tensor:
        """Embed each time step: steps_B -> y_BD."""
        angles_BF = steps_B[:, None].float() * self.frequencies_F
        waves_BF = torch.cat((angles_BF.cos(), angles_BF.sin()), dim=-1).to(self.mlp_in.weight.dtype)
        return self.mlp_out(F.silu(self.mlp_in(waves_BF)))


class DitBlock(nn.Module):
    """Block of a DiT: attention and a four times wider MLP; the condition shifts, scales and gates each.

    Source: adaLN-Zero of Peebles and Xie 2023.
    """

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attn_norm = nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.attn_out = nn.Linear(config.dim, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)
        self.mlp_in = nn.Linear(config.dim, 4 * config.dim)
        self.mlp_out = nn.Linear(4 * config.dim, config.dim)
        self.modulation = nn.Linear(config.dim, 6 * config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor, condition_BD: torch.Tensor) -> torch.Tensor:
        """Apply attention and the MLP under a condition: x_BTD, condition_BD -> x_BTD."""
        parts = self.modulation(F.silu(condition_BD))[:, None].chunk(6, dim=-1)
        attn_shift, attn_scale, attn_gate, mlp_shift, mlp_scale, mlp_gate = parts  # each (B, 1, D)
        attended_BTD = self.attention(self.attn_norm(x_BTD) * (1 + attn_scale) + attn_shift)
        x_BTD = x_BTD + attn_gate * self.dropout(attended_BTD)
        normed_BTD = self.mlp_norm(x_BTD) * (1 + mlp_scale) + mlp_shift
        return x_BTD + mlp_gate * self.dropout(self.mlp_out(F.gelu(self.mlp_in(normed_BTD), approximate="tanh")))

    def attention(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Self-attention over all patches: x_BTD -> y_BTD."""
        heads = (y.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x_BTD).chunk(3, dim=-1))
        q_BNTH, k_BNTH, v_BNTH = heads
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH)
        return self.attn_out(y_BNTH.transpose(1, 2).flatten(2))


def noise_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error of the predicted noise at random steps.

    Steps, noise and dropped labels are drawn from torch's default generator, in this order.

    Args:
        model: A ``DiT``.
        batch: ``{"latents": (B, C, I, I), "labels": (B,) int64}``.
    Returns:
        A scalar.
    Raises:
        ConfigError: the batch has no such entries.
    """
    if not {"latents", "labels"} <= batch.keys():
        raise ConfigError(f"expected a batch with 'latents' and 'labels', got {sorted(batch)}")
    latents_BCII, signal_S = batch["latents"], model.get_buffer("signal_S")
    steps_B = torch.randint(len(signal_S), latents_BCII.shape[:1], device=latents_BCII.device)
    noise_BCII = torch.randn_like(latents_BCII)
    signal_B111 = signal_S[steps_B][:, None, None, None]
    noisy_BCII = signal_B111.sqrt() * latents_BCII + (1 - signal_B111).sqrt() * noise_BCII
    predicted_BCII = model(noisy_BCII, steps_B, batch["labels"])
    return F.mse_loss(predicted_BCII.to(noise_BCII.dtype), noise_BCII)


class DiT(nn.Module):
    """Diffusion transformer: ``layers`` between patches in and patches out; predicts the noise in noisy latents.

    Raises:
        ConfigError: on latents of another shape than the configuration's.
    Shapes: noisy_BCII, steps_B (int64), labels_B (int64) -> noise_BCII.
    """

    Config = DitConfig
    loss = staticmethod(noise_loss)
    positions_TD: torch.Tensor
    signal_S: torch.Tensor

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.config = config
        patch_dim = config.channels * config.patch_size**2
        self.patches = nn.Linear(patch_dim, config.dim)
        self.steps = StepEmbedding(config.dim)
        self.labels = nn.Embedding(config.num_classes + 1, config.dim)
        self.layers = nn.ModuleList(DitBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(config.dim, 2 * config.dim)
        self.head = nn.Linear(config.dim, patch_dim)
        self.register_buffer("positions_TD", torch.empty(config.patches_per_side**2, config.dim), persistent=False)
        self.register_buffer("signal_S", torch.empty(config.num_steps, dtype=torch.float32), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights again from torch's default generator; each block starts as the identity."""
        self.init_tables()
        init_normal(self, self.config.num_layers, residual=("attn_out.weight", "mlp_out.weight"))
        for name, parameter in self.named_parameters():
            if name.endswith(("modulation.weight", "head.weight")):
                parameter.zero_()

    def init_tables(self) -> None:
        """Fill position and schedule tables; needed again only after ``to_empty``."""
        self.steps.init_tables()
        side, quarter = self.config.patches_per_side, self.config.dim // 4
        on_device = {"dtype": torch.float64, "device": self.positions_TD.device}
        frequencies = 10_000.0 ** (-torch.arange(quarter, **on_device) / quarter)
        angles = torch.outer(torch.arange(side, **on_device), frequencies)
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)  # (side, D / 2)
        rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
        self.positions_TD.copy_(torch.cat((rows, columns), dim=-1).flatten(0, 1))
        betas_S = torch.linspace(*_BETAS, self.config.num_steps, **on_device)
        self.signal_S.copy_((1 - betas_S).cumprod(0))

    def forward(self, noisy_BCII: torch.Tensor, steps_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Predict the noise: noisy_BCII, steps_B, labels_B -> noise_BCII."""
        config, expected = self.config, (self.config.channels, self.config.image_size, self.config.image_size)
        if noisy_BCII.shape[1:] != expected:
            raise ConfigError(f"latents must have shape (batch, {expected}), got {tuple(noisy_BCII.shape)}")
        if self.training and config.label_dropout:
            dropped_B = torch.rand(labels_B.shape, device=labels_B.device) < config.label_dropout
            labels_B = torch.where(dropped_B, config.num_classes, labels_B)
        x_BTD = self.patches(self.patchify(noisy_BCII).to(self.patches.weight.dtype)) + self.positions_TD
        condition_BD = self.steps(steps_B) + self.labels(labels_B)
        for layer in self.layers:
            x_BTD = layer(x_BTD, condition_BD)
        shift, scale = self.modulation(F.silu(condition_BD))[:, None].chunk(2, dim=-1)
        return self.unpatchify(self.head(self.norm(x_BTD) * (1 + scale) + shift))

    def patchify(self, x_BCII: torch.Tensor) -> torch.Tensor:
        """Cut into patches, row by row: x_BCII -> x_BT(CPP)."""
        size = self.config.patch_size
        split = x_BCII.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # B C row P column P
        return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def unpatchify(self, x_BTP: torch.Tensor) -> torch.Tensor:
        """Put patches together, inverse to ``patchify``: x_BT(CPP) -> x_BCII."""
        config, side = self.config, self.config.patches_per_side
        split = x_BTP.unflatten(2, (config.channels, config.patch_size, config.patch_size)).unflatten(1, (side, side))
        return split.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
