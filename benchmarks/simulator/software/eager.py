"""GPT blocks in stock PyTorch: eager, AdamW as it comes, DistributedDataParallel on several ranks."""

from torch import nn

from lading.models.gpt import GptBlock, GptConfig

framework = "PyTorch 2.13, eager"


def block(width: int) -> nn.Module:
    """Make a block with heads of 64."""
    return GptBlock(GptConfig(dim=width, num_heads=width // 64))
