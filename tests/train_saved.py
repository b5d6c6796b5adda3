"""Trains from saved plans, as a script in whose process planner, simulator and costs cannot be imported.

``python tests/train_saved.py FOLDER`` reads FOLDER/run.json, the plan of a run, and FOLDER/loop.json, that of ``Net``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

THINKING = ("lading.planner", "lading.sim", "lading.cost", "lading.prepare")


class Refusing(MetaPathFinder):
    """Refuses every import of a module that thinks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(THINKING):
            raise ImportError(f"{fullname} is not needed to train from a saved plan")
        return None


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BF = torch.relu(layer(x_BF))
        return x_BF


def mean_square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(step))


def loop_losses(path: Path) -> list[float]:
    """Losses of three steps of a loop of the user's own, under the plan saved at ``path``."""
    import lading

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    graph = lading.capture(model, batch(0), mean_square)
    with lading.Trainer(path, graph, model, folder=path.parent) as trainer:
        return [trainer.step(batch(step)) for step in range(3)]


def run_losses(path: Path) -> list[float]:
    """Losses of the run whose plan is saved at ``path``."""
    from lading.ir.plan import Plan
    from lading.train import train_run

    return list(train_run(Plan.load(path)).losses)


def main(folder: Path) -> None:
    sys.meta_path.insert(0, Refusing())
    losses = {"loop": loop_losses(folder / "loop.json"), "run": run_losses(folder / "run.json")}
    assert not [name for name in sys.modules if name.startswith(THINKING)]
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
