"""Models and losses that torch.compile wrapped: captured as they were written, and trained in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import small_machine
from torch import nn

from lading.optim.adamw import AdamW
from lading.prepare import plan
from lading.tracing.trace import capture
from lading.trainer import Trainer

B, F = 4, 8
#: Without Inductor, which takes seconds to load: no compiler is to be called.
compiled = partial(torch.compile, backend="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(F, F)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x).relu()


def model_of(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    """Two blocks, the second wrapped."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), wrap(Block()))


def squares(model: nn.Module, given: Any) -> torch.Tensor:
    return model(given["x"]).square().mean()


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.ones(B, F)}


def same(module: nn.Module) -> nn.Module:
    return module


@pytest.mark.parametrize(
    ("wrap", "outer", "loss"),
    [
        (same, compiled, same),
        (same, in_place, same),
        (compiled, same, same),
        (in_place, same, same),
        (same, same, compiled),
    ],
    ids=["model", "model_in_place", "block", "block_in_place", "loss"],
)
def test_the_step_is_that_of_what_was_compiled(wrap: Any, outer: Any, loss: Any) -> None:
    plain = capture(model_of(same), batch(), squares)
    graph = capture(outer(model_of(wrap)), batch(), loss(squares))
    assert [(op.name, op.inputs, op.outputs) for op in graph.ops] == [
        (op.name, op.inputs, op.outputs) for op in plain.ops
    ]
    names = [name for p in graph.parameters for name in p.names]
    assert names[:2] == ["0.line.weight", "0.line.bias"]


def test_a_compiled_model_is_trained_in_the_module_that_it_wraps(tmp_path: Path) -> None:
    written, reference = model_of(same), model_of(same)
    model: Any = compiled(written)
    graph = capture(model, batch(), squares)
    made = plan(graph, small_machine(), budget="100%")
    with Trainer(made, graph, model, optimizer=AdamW(lr=1e-2), folder=tmp_path) as trainer:
        trainer.step(batch())
        assert trainer.value("1.line.weight").shape == (F, F)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    squares(reference, batch()).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(written.parameters(), reference.parameters(), strict=True))
    assert model._orig_mod is written
