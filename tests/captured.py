"""Captured steps of small models, which tests and their ranks share: each is captured once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
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


def shared_capture(make: Callable[[], StepGraph], *key: object) -> StepGraph:
    """Capture once for all processes of the tests: the first writes the graph to the tests' cache, others read it.

    An optimizer of torch with groups is planned with the graph of its own model, which is captured in its process.

    Args:
        key: What tells this step from all others; its ``repr`` is that of every process.
    """
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "captures"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / hashlib.sha256(repr(key).encode()).hexdigest()).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # who comes second waits for the first
        file.seek(0)
        if written := file.read():
            return pickle.loads(written)
        graph = make()
        file.write(pickle.dumps(graph))
        file.flush()
        return graph
