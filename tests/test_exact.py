"""The spine: a planned run computes the numbers of plain PyTorch, to the bit, at any budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lading.capture.trace import capture
from lading.config import AdamW
from lading.models.loss import next_byte_loss
from lading.models.registry import build_model
from lading.prepare import lowered, plan
from lading.trainer import Trainer
from tests.machines import small_machine

STEPS = 50
SIZES = {
    "llama": {"dim": 96, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    "gpt": {"dim": 96, "num_layers": 4, "num_heads": 4, "dropout": 0.1},
    "moe": {"dim": 64, "num_layers": 3, "num_heads": 2},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(name, **SIZES[name])


def _batches(step: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{"tokens": torch.randint(0, 256, (8, 65), generator=generator)} for _ in range(accumulation)]


def _plain(name: str, accumulation: int, clip_norm: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[float] = []
    for step in range(STEPS):
        total = 0.0
        for batch in _batches(step, accumulation):
            loss = next_byte_loss(model, batch)
            if accumulation > 1:
                loss = loss / accumulation
            loss.backward()
            total += loss.item()
        losses.append(total)
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _planned(
    name: str, accumulation: int, clip_norm: float, share: float, folder: Path
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train with ``share`` of the tensor bytes that keeping all needs (a small process is mostly its fixed part)."""
    model = _model(name)
    graph = capture(model, _batches(0, 1)[0], next_byte_loss, accumulation=accumulation)
    made = plan(graph, small_machine(), budget="100%", clip_norm=clip_norm)
    if share < 1:
        arena = lowered(made, graph).arena_bytes
        made = plan(
            graph, small_machine(), budget=made.peak_bytes["device"] - int((1 - share) * arena), clip_norm=clip_norm
        )
    with Trainer(made, graph, model, optimizer=AdamW(lr=1e-3), folder=folder) as trainer:
        losses = [trainer.step(_batches(step, accumulation)) for step in range(STEPS)]
    return losses, {name: p.detach() for name, p in model.named_parameters()}, made


@pytest.mark.parametrize(
    ("name", "accumulation", "clip_norm"),
    [
        ("llama", 1, 0.0),
        ("gpt", 2, 0.5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", 1, 0.5), ("llama", 2, 0.0), ("llama", 2, 0.5), ("moe", 1, 0.5), ("moe", 2, 0.0))
        ),
    ],
)
def test_planned_equals_plain_to_the_bit(name: str, accumulation: int, clip_norm: float, tmp_path: Path) -> None:
    losses, weights = _plain(name, accumulation, clip_norm)
    for share in (1.0, 0.5, 0.25):
        got, values, made = _planned(name, accumulation, clip_norm, share, tmp_path)
        assert got == losses, f"{name} at {share}"
        assert values.keys() == weights.keys()
        assert all(torch.equal(values[key], weights[key]) for key in weights), f"{name} at {share}"
        assert (len(made.choices) > 0) == (share < 1)
