"""A loop as it is: an optimizer of torch with parameter groups, a scheduler, a DataLoader.

    python examples/own_loop.py

Biases and norms do not decay, the head learns faster than the backbone, which thaws half-way. Each step takes the
numbers that the groups have then, whoever changed them. Where the ``with`` block ends, values and states are back in
the model and in the optimizer, so plain PyTorch can go on from there, or another plan. Any optimizer serves whose
update treats elements alone; ``lading.plan`` refuses another. The last batch is shorter and runs by the same plan.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import lading

STEPS, BATCH, WIDTH = 8, 512, 512


class Classifier(torch.nn.Module):
    """Backbone and head."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU()) for _ in range(4)]
        self.backbone = torch.nn.Sequential(*(part for layer in layers for part in layer))
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        """Logits of each sample, (B, 10)."""
        return self.head(self.backbone(x_BF))


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of a batch of the loader: a list of samples and classes."""
    x_BF, classes_B = batch
    return torch.nn.functional.cross_entropy(model(x_BF), classes_B)


def make() -> tuple[Classifier, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Model, optimizer and schedule, the same each time."""
    torch.manual_seed(0)
    model = Classifier()
    backbone = list(model.backbone.parameters())
    groups = [
        {"params": [p for p in backbone if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in backbone if p.dim() < 2], "weight_decay": 0.0},
        {"params": list(model.head.parameters()), "lr": 3e-3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-3, 3e-3], total_steps=STEPS)


def main() -> None:
    """Train half with a frozen backbone, half without; compare with plain PyTorch."""
    samples = STEPS // 2 * BATCH - 100
    x = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(samples) % 10
    loader = DataLoader(TensorDataset(x, classes), batch_size=BATCH)
    machine = lading.load_machine(Path(__file__).parent / "own_machine.toml")

    model, optimizer, scheduler = make()
    losses: list[float] = []
    for frozen in (True, False):
        model.backbone.requires_grad_(not frozen)
        first, *_, last = loader
        graph, shorter = (lading.capture(model, batch, loss) for batch in (first, last))
        plan = lading.plan(graph, machine, budget="90%", optimizer=optimizer)
        with lading.Trainer(plan, graph, model, optimizer=optimizer, shapes=[shorter]) as trainer:
            for batch in loader:
                losses.append(trainer.step(batch))
                scheduler.step()

    plain, optimizer, scheduler = make()
    expected: list[float] = []
    for frozen in (True, False):
        plain.backbone.requires_grad_(not frozen)
        for batch in loader:
            optimizer.zero_grad()
            value = loss(plain, batch)
            value.backward()
            optimizer.step()
            scheduler.step()
            expected.append(value.item())
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}; all {STEPS} and all weights identical to plain PyTorch's")


if __name__ == "__main__":
    main()
