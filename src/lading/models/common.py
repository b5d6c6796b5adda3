"""Parts that the reference decoders share: sizes and their ranges, initial weights, and checks of inputs.

Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from lading.errors import ConfigError

#: Standard deviation of every initial weight; projections into the residual stream divide it by sqrt(2 num_layers).
INIT_STD = 0.02
#: Layers, experts or the like of a model at most: each is an object or several. Published models have some hundreds.
MOST_REPEATED = 10_000


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes every decoder has.

    Attributes:
        vocab_size: Token values; 256 reads bytes.
        max_seq_len: Longest input in tokens.
        num_layers: Repeated blocks.
        dim: Width of the residual stream; a multiple of ``num_heads``.
        num_heads: Query heads.
    Raises:
        ConfigError: a size is not a positive integer, or ``dim`` does not split into heads.
    """

    vocab_size: int = 256
    max_seq_len: int = 256
    num_layers: int = 4
    dim: int = 128
    num_heads: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(DecoderConfig):
            check_positive_int(field.name, getattr(self, field.name))
        check_repeated("num_layers", self.num_layers)
        if self.dim % self.num_heads:
            raise ConfigError(f"dim must be a multiple of num_heads, got {self.dim} and {self.num_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


def check_positive_int(name: str, value: object) -> None:
    """Refuse anything but an integer above zero.

    Raises:
        ConfigError: naming the size.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def check_repeated(name: str, value: object, most: int = MOST_REPEATED) -> None:
    """Refuse more layers, experts or the like than a model can be built of in reasonable time.

    Raises:
        ConfigError: naming the size.
    """
    if isinstance(value, int) and value > most:
        raise ConfigError(f"{name}: expected at most {most:,}, got {value:.6g}")


def check_tokens(tokens_BT: torch.Tensor, max_seq_len: int) -> None:
    """Refuse a batch that is not (B, T) or is longer than the model was built for.

    Raises:
        ConfigError: the shape and what to change.
    """
    if tokens_BT.dim() != 2:
        raise ConfigError(f"tokens must have shape (batch, tokens), got {tuple(tokens_BT.shape)}")
    if tokens_BT.shape[1] > max_seq_len:
        raise ConfigError(f"{tokens_BT.shape[1]} tokens exceed max_seq_len={max_seq_len}; build the model with more")


@torch.no_grad()
def init_normal(model: nn.Module, num_layers: int, residual: tuple[str, ...]) -> None:
    """Draw every weight matrix from torch's default generator, in the order of ``named_parameters``.

    Args:
        model: Module to fill; its biases become zero and its other vectors (norm weights) one.
        num_layers: Blocks that add to the residual stream, each of them twice.
        residual: Name endings of the matrices that do so; their deviation shrinks with depth.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() > 1:
            scale = (2 * num_layers) ** -0.5 if name.endswith(residual) else 1.0
            parameter.normal_(0.0, INIT_STD * scale)
        else:
            parameter.fill_(1.0)
