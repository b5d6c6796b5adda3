"""GPT blocks in stock PyTorch: each compiled, fused AdamW, DistributedDataParallel on several ranks."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lading.models.gpt import GptBlock, GptConfig

framework = "PyTorch 2.13, blocks compiled"
like = "torch-eager-cpu,fusion=compiled"


def block(width: int) -> nn.Module:
    """Make a block with heads of 64."""
    return GptBlock(GptConfig(dim=width, num_heads=width // 64))


def prepare(model: Any) -> nn.Module:
    """Compile the blocks."""
    for layer in model.layers:
        layer.compile()
    return DistributedDataParallel(model) if dist.get_world_size() > 1 else model


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make one kernel's AdamW."""
    return torch.optim.AdamW(parameters, fused=True)
