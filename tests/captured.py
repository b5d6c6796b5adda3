"""Captured steps that the tests of the planner share: small models, captured once."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lading.ir.expand import expand
from lading.ir.graph import StepGraph
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.trace import capture

#: Few bytes in the logits, so that weights and activations decide.
SIZES: dict[str, Any] = {"vocab_size": 32, "max_seq_len": 64, "dim": 64, "num_heads": 2, "num_layers": 2}


@cache
def captured_step(name: str = "llama", *, accumulation: int = 1, clip_norm: float = 0.0, **sizes: Any) -> StepGraph:
    """The whole step of a small model."""
    dropout = {"dropout": 0.1} if name == "gpt" else {}
    torch.manual_seed(0)
    model = build_model(name, **SIZES | dropout | sizes)
    batch = {"tokens": torch.zeros(4, 33, dtype=torch.int64)}
    return expand(capture(model, batch, next_byte_loss, accumulation=accumulation), clip_norm=clip_norm)
