"""A model of your own: any nn.Module and any function that gives a scalar loss.

    python examples/own_model.py

Nothing of Lading is in the model: ``lading.capture`` runs it once on fake tensors and writes down what it did. What a
plan then does to it (move, recompute, update) it does to those operations, so new layers need no code in Lading.
``lading train --trust`` takes such a model too: ``model.name = "own_model:build"`` in the run's TOML, for byte data.

Where to look: src/lading/tracing/trace.py (what is written down), src/lading/ir/graph.py (how).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import lading


class Mixer(torch.nn.Module):
    """Mixes positions by a convolution that sees only the past, then channels; x_BTC -> logits_BTV."""

    def __init__(self, vocab_size: int = 256, channels: int = 128, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, channels)
        torch.nn.init.normal_(self.embed.weight, std=0.02)
        self.convs = torch.nn.ModuleList(
            torch.nn.Conv1d(channels, channels, 5, groups=channels) for _ in range(num_layers)
        )
        self.mixes = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(channels),
                torch.nn.Linear(channels, 4 * channels),
                torch.nn.GELU(),
                torch.nn.Linear(4 * channels, channels),
            )
            for _ in range(num_layers)
        )
        self.head = torch.nn.Linear(channels, vocab_size, bias=False)
        self.head.weight = self.embed.weight  # tied weights are one storage with two names

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Next-byte logits."""
        x_BTC = self.embed(tokens_BT)
        for conv, mix in zip(self.convs, self.mixes, strict=True):
            x_BTC = x_BTC + conv(torch.nn.functional.pad(x_BTC.mT, (4, 0))).mT
            x_BTC = x_BTC + mix(x_BTC)
        return self.head(x_BTC)


def build(num_layers: int = 4) -> torch.nn.Module:
    """Build the module; a run's TOML names this function."""
    return Mixer(num_layers=num_layers)


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next byte."""
    tokens_BT = batch["tokens"]
    return torch.nn.functional.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def main() -> None:
    """Train a little at half the memory, and the same in plain PyTorch: equal to the bit."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    batches = [{"tokens": text[100 * i : 100 * i + 2064].view(16, 129)} for i in range(8)]
    torch.manual_seed(0)
    model, plain = build(), build()
    plain.load_state_dict(model.state_dict())

    graph = lading.capture(model, batches[0], loss)
    machine = lading.load_machine(Path(__file__).parent / "own_machine.toml")
    plan = lading.plan(graph, machine, budget="50%")
    with tempfile.TemporaryDirectory() as folder, lading.Trainer(plan, graph, model, folder=folder) as trainer:
        planned = [trainer.step(batch) for batch in batches]

    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    for batch, ours in zip(batches, planned, strict=True):
        value = loss(plain, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert value.item() == ours, f"expected {value.item()}, got {ours}"
    print(f"loss {planned[0]:.4f} -> {planned[-1]:.4f} at half the memory, every bit as in plain PyTorch")


if __name__ == "__main__":
    main()
