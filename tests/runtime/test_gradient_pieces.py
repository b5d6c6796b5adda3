"""Gradients in pieces: the same numbers to the bit, and no large gradient is ever whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.machines import small_machine
from tests.runtime.cases import (
    OPTIMIZER,
    Batch,
    assert_equals_eager,
    at_random,
    batches_of,
    disk_always,
    loss_fn,
    model_of,
    program_of,
)

from lading.errors import ConfigError
from lading.ir.defer import defer, updates
from lading.ir.expand import expand
from lading.ir.gradient_pieces import pieced_gradients, with_gradient_pieces
from lading.ir.graph import Role, StepGraph
from lading.ir.loss_parts import with_loss_parts
from lading.ir.plan import Plan
from lading.memory.restore import restore_program
from lading.planner.api import make_plan
from lading.runtime.executor import Executor
from lading.tracing.trace import capture

RATES = [1e-3, 5e-4, 2e-3]
#: A vocabulary that is not a whole number of vectors.
WIDE = {"vocab_size": 1003}
#: Elements of the parts of updates: 16 rows of 64.
PART = 1024


def stepped(name: str, *, micro: int = 1, clip: float = 0.0, **sizes: int) -> StepGraph:
    """Whole step of a model, its updates in small parts."""
    batch: Batch = batches_of(1, 1)[0][0]
    captured = capture(model_of(name, **sizes), batch, loss_fn, accumulation=micro)
    return expand(captured, clip_norm=clip, part_elements=PART)


@pytest.mark.parametrize(
    ("name", "micro", "clip", "loss_parts", "share", "evict"),
    [
        ("gpt", 1, 0.0, 0, 0.0, None),
        ("gpt", 1, 1.0, 0, 0.5, "half"),
        ("llama", 2, 1.0, 5, 0.5, "half"),
        ("llama", 1, 0.0, 0, 0.3, "all"),
        ("moe", 2, 0.0, 4, 1.0, "all"),
    ],
)  # fmt: skip
def test_equals_plain_pytorch(
    tmp_path: Path, name: str, micro: int, clip: float, loss_parts: int, share: float, evict: str | None
) -> None:
    whole, _ = with_loss_parts(stepped(name, micro=micro, clip=clip, **WIDE), loss_parts)
    graph, origins = with_gradient_pieces(whole, 4 * 64 * 160)
    cut = {gradient.name for gradient in pieced_gradients(whole, 4 * 64 * 160)}
    assert cut == ({"tokens.weight"} if name == "gpt" else {"tokens.weight", "head.weight"})
    assert sorted(set(origins)) == list(range(len(whole.ops)))
    graph.validate()
    later = defer(graph, int(share * len(updates(graph))))[0] if share else graph
    program = program_of(later, {None: None, "half": at_random(0), "all": disk_always}[evict])
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES, **WIDE)
