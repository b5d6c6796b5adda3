"""Mamba-2: a state-space layer in chunks, so that all but what passes between chunks is products of matrices.

Shapes: B batch, T tokens, D width, G groups, R heads of a group, M = G * R heads, P head width, N state, Q tokens of a
chunk, C chunks, X = M * P inner width, Z = B * C * G pieces.
Source: Dao and Gu 2024 (Transformers are SSMs, arXiv 2405.21060), section 6 and listing 1; sizes as Megatron-Core's
MambaMixer names them (chunks of 128 tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.models.common import check_positive_int
from lading.models.llama import RMSNorm

#: Tokens of a chunk.
CHUNK = 128
#: Tokens that the convolution sees.
_KERNEL = 4


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes of a state-space layer.

    Attributes:
        dim: Width of the stream.
        groups: Groups of heads that share what they read from and write to the state.
        heads: Number of heads, a multiple of ``groups``.
        head_size: Width of a head.
        state: Numbers that each of a head's numbers remembers.
    Raises:
        ConfigError: a size is no positive integer, or heads do not divide.
    """

    dim: int
    groups: int
    heads: int
    head_size: int
    state: int

    def __post_init__(self) -> None:
        for name in ("dim", "groups", "heads", "head_size", "state"):
            check_positive_int(name, getattr(self, name))
        if self.heads % self.groups:
            raise ConfigError(f"heads must be a multiple of groups, got {self.heads} and {self.groups}")


class Mamba(nn.Module):
    """State-space layer. Shapes: x_BTD -> y_BTD, T a multiple of the chunk."""

    later_QQ: torch.Tensor

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("later_QQ", torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1), persistent=False)
        inner, both = config.heads * config.head_size, config.groups * config.state
        self.widths = [inner, inner + 2 * both, config.heads]
        self.inner_widths = [inner, both, both]
        self.into = nn.Linear(config.dim, sum(self.widths), bias=False)
        self.conv = nn.Conv1d(self.widths[1], self.widths[1], _KERNEL, groups=self.widths[1], padding=_KERNEL - 1)
        self.step_bias = nn.Parameter(torch.zeros(config.heads))
        self.log_decay = nn.Parameter(torch.zeros(config.heads))
        self.skip = nn.Parameter(torch.ones(config.heads))
        self.norm = RMSNorm(inner, 1e-5)
        self.out = nn.Linear(inner, config.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Convolve, scan and gate: x_BTD -> y_BTD."""
        tokens = x_BTD.shape[1]
        if tokens % CHUNK:
            raise ConfigError(f"expected a multiple of {CHUNK} tokens, got {tokens}")
        gate_BTX, mixed, steps_BTM = self.into(x_BTD).split(self.widths, dim=-1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :tokens]).transpose(1, 2)
        values_BTX, write, read = mixed.split(self.inner_widths, dim=-1)
        steps_BTM = F.softplus(steps_BTM.float() + self.step_bias)
        heads_BTMP = values_BTX.unflatten(2, (self.config.heads, -1))
        y_BTMP = self.scan(heads_BTMP, steps_BTM, write, read) + heads_BTMP * self.skip[:, None]
        return self.out(self.norm(y_BTMP.flatten(2) * F.silu(gate_BTX)))

    def scan(
        self, heads_BTMP: torch.Tensor, steps_BTM: torch.Tensor, write: torch.Tensor, read: torch.Tensor
    ) -> torch.Tensor:
        """State after each token, read: y_t = read_t (sum over u <= t of decay(u..t) write_u step_u x_u)."""
        config, dtype = self.config, heads_BTMP.dtype
        chunked_BCQMP = (heads_BTMP * steps_BTM[..., None].to(dtype)).unflatten(1, (-1, CHUNK))
        sums_BCQM = (steps_BTM * -self.log_decay.float().exp()).unflatten(1, (-1, CHUNK)).cumsum(2)
        write_ZQN, read_ZQN = (
            y.unflatten(2, (config.groups, -1)).unflatten(1, (-1, CHUNK)).transpose(2, 3).flatten(0, 2)
            for y in (write, read)
        )
        to_end_BCQM = (sums_BCQM[:, :, -1:] - sums_BCQM).exp().to(dtype)
        states_ZNX = torch.bmm(write_ZQN.transpose(1, 2), self._by_group(chunked_BCQMP * to_end_BCQM[..., None]))
        before_ZNX = self._passed(states_ZNX, sums_BCQM[:, :, -1])
        across = self._by_head(torch.bmm(read_ZQN, before_ZNX)) * self._by_token(sums_BCQM.exp().to(dtype))
        scores_ZQQ = torch.bmm(read_ZQN, write_ZQN.transpose(1, 2))
        weights = (
            scores_ZQQ.unflatten(0, (-1, config.groups))[:, :, None] * self._decays(sums_BCQM).to(dtype)
        ).flatten(0, 2)
        within = torch.bmm(weights, self._rows(chunked_BCQMP))
        shape = (heads_BTMP.shape[0], -1, config.groups, config.heads // config.groups, CHUNK, config.head_size)
        y = within.view(shape) + across.view(shape)  # B C G R Q P
        return y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)

    def _by_group(self, x_BCQMP: torch.Tensor) -> torch.Tensor:
        """B C Q M P -> Z Q (R P)."""
        return x_BCQMP.unflatten(3, (self.config.groups, -1)).transpose(2, 3).flatten(4).flatten(0, 2)

    def _by_head(self, x_ZQX: torch.Tensor) -> torch.Tensor:
        """Z Q (R P) -> (Z R) Q P."""
        return x_ZQX.unflatten(2, (-1, self.config.head_size)).transpose(1, 2).flatten(0, 1)

    def _by_token(self, x_BCQM: torch.Tensor) -> torch.Tensor:
        """B C Q M -> (B C M) Q 1."""
        return x_BCQM.transpose(2, 3).flatten(0, 2)[..., None]

    def _rows(self, x_BCQMP: torch.Tensor) -> torch.Tensor:
        """B C Q M P -> (B C M) Q P."""
        return x_BCQMP.transpose(2, 3).flatten(0, 2)

    def _decays(self, sums_BCQM: torch.Tensor) -> torch.Tensor:
        """Share that is left of each token at each later one of its chunk: (B C) G R Q Q."""
        sums = sums_BCQM.transpose(2, 3).unflatten(2, (self.config.groups, -1)).flatten(0, 1)
        return (sums[..., :, None] - sums[..., None, :]).masked_fill(self.later_QQ, float("-inf")).exp()

    def _passed(self, states_ZNX: torch.Tensor, ends_BCM: torch.Tensor) -> torch.Tensor:
        """State before each chunk, from what each chunk adds to it."""
        config, (batch, chunks, heads) = self.config, ends_BCM.shape
        total_BMC = ends_BCM.transpose(1, 2).cumsum(2)
        gaps_BMCC = (total_BMC - ends_BCM.transpose(1, 2))[..., :, None] - total_BMC[..., None, :]
        never = torch.ones(chunks, chunks, dtype=torch.bool, device=ends_BCM.device).triu()
        left_BMCC = gaps_BMCC.masked_fill(never, float("-inf")).exp().to(states_ZNX.dtype)
        split = states_ZNX.view(batch, chunks, config.groups, config.state, -1, config.head_size)  # B C G N R P
        rows = split.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(0, 2)  # (B M) C (N P)
        passed = torch.bmm(left_BMCC.flatten(0, 1), rows)
        shape = (batch, config.groups, heads // config.groups, chunks, config.state, config.head_size)
        return passed.view(shape).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(0, 2)
