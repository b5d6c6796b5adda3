"""Values between two plans: those of a plan that uses a disk stay out of memory, keep their bits, and leave no file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from tests.machines import small_machine
from torch import nn

import lading
from lading.errors import StorageError
from lading.ir.graph import StepGraph
from lading.runtime.resident import files_at, mapped_bytes
from lading.units import MiB

STEPS = 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((4, 1024), 0.1 * (step + 1))}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def plain_losses() -> list[float]:
    model, losses = build(), list[float]()
    optimizer = lading.AdamW().plain(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch(step))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def planned(graph: StepGraph, budget: str) -> lading.Plan:
    return lading.plan(graph, small_machine(), budget=budget, cache=False)


def files_of(trainer: lading.Trainer) -> list[str | None]:
    """Files that a paused trainer's large values lie in."""
    assert trainer._paused is not None
    return files_at([tensor.data_ptr() for tensor in trainer._paused.tensors.values() if tensor.dim() > 1])


@pytest.mark.long
@pytest.mark.parametrize("budget", ["40%", "100%"])
def test_values_of_a_plan_with_a_disk_stay_out_of_memory(tmp_path: Path, budget: str) -> None:
    model = build()
    graph = lading.capture(model, batch(0), loss)
    with lading.Trainer(planned(graph, budget), graph, model, folder=tmp_path) as trainer:
        losses = [trainer.step(batch(step)) for step in range(2)]
        trainer.pause()
        files = files_of(trainer)
        assert len(files) == 8  # two states of each of four matrices
        assert [file is not None for file in files] == [budget != "100%"] * 8
        assert mapped_bytes({file for file in files if file is not None}) < MiB
        assert list(tmp_path.iterdir()) == []
        trainer.resume(planned(graph, "60%"), graph)
        losses += [trainer.step(batch(step)) for step in range(2, STEPS)]
    assert losses == plain_losses()


def test_a_full_disk_leaves_the_trainer_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = build()
    graph = lading.capture(model, batch(0), loss)
    with lading.Trainer(planned(graph, "40%"), graph, model, folder=tmp_path) as trainer:
        losses = [trainer.step(batch(0))]
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageError, match="No space left"):
                trainer.pause()
        losses += [trainer.step(batch(step)) for step in range(1, STEPS)]
    assert losses == plain_losses()
