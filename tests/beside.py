"""A model in a Trainer beside the same model in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lading.optim.adamw import AdamW
from lading.prepare import plan
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import small_machine

LR = 1e-2


def assert_trains_as_plain(
    make: Callable[[], torch.nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[Any, Any], torch.Tensor],
    folder: Path,
    *,
    steps: int = 3,
) -> None:
    """Losses and final values of a run with everything in memory are those of plain PyTorch, to the bit.

    Args:
        make: The model, from torch's generator.
        batch: Of a step, by its number.
    """
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    model = make()
    graph = capture(model, batch(0), loss)
    with Trainer(
        plan(graph, small_machine(), budget="100%"), graph, model, optimizer=AdamW(lr=LR), folder=folder
    ) as trainer:
        torch.manual_seed(1)
        losses = [trainer.step(batch(step)) for step in range(steps)]
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=LR, fused=True)
    torch.manual_seed(1)
    wanted: list[float] = []
    for step in range(steps):
        value = loss(reference, batch(step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(value.item())
    assert losses == wanted
    values, others = model.state_dict(), reference.state_dict()
    assert values.keys() == others.keys()
    assert all(torch.equal(values[name], others[name]) for name in values)
