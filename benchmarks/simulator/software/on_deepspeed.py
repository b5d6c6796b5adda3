"""GPT blocks on DeepSpeed: its engine and optimizer in fp32; gradients are reduced in its own buckets."""

from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
from torch import nn

from lading.models.gpt import GptBlock, GptConfig

framework = "DeepSpeed 0.19.8"
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def block(width: int) -> nn.Module:
    """Make a block with heads of 64."""
    return GptBlock(GptConfig(dim=width, num_heads=width // 64))


def prepare(model: nn.Module) -> Any:
    """Make DeepSpeed's engine, which has ``backward`` and ``step``."""
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=SETTINGS)[0]
