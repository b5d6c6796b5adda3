"""Random batches of the reference models, for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lading.models.reference import model_class


def random_batch(model: str, sizes: Mapping[str, Any], *, rows: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Draw tokens, or latents and labels for a diffusion transformer; the same for the same seed.

    Args:
        model: Name of a reference model.
        sizes: Arguments of its configuration.
        rows: Rows of the batch.
        tokens: Tokens that the model reads of a row; one more is there to be predicted. An image's follow from its
            size.
    """
    draw = torch.Generator().manual_seed(seed)
    if model == "dit":
        config = model_class("dit").Config(**sizes)
        shape = (rows, config.channels, config.image_size, config.image_size)
        labels = torch.randint(config.num_classes, (rows,), generator=draw)
        return {"latents": torch.randn(shape, generator=draw), "labels": labels}
    return {"tokens": torch.randint(int(sizes["vocab_size"]), (rows, tokens + 1), generator=draw)}
