"""A tier of your own: where tensors wait while the device does not need them.

    python examples/own_tier.py

A tier is an entry ``[[tiers]]`` of the machine file: its name, capacity, rates, latency, and its ``kind``, which says
what serves it. Lading serves "memory" and "file"; any other kind is "module:function", which is called with the bytes
that a plan needs of it and its ``location``, and returns an object with ``read``, ``write`` and ``close``. Here a tier
that compresses what it is given, before the disk: slow, but it needs no disk, and what comes back is what went in, so
the numbers stay. Nothing else has to know of it: plans, predictions and reports name it as they name the disk, and
`lading train` finds it where Python can import the module.

Where to look: src/lading/ir/machine.py (what a tier says of itself), src/lading/runtime/tiers.py (what serves it).
"""

from __future__ import annotations

import dataclasses
import tempfile
import zlib
from pathlib import Path

import torch

import lading

BLOCK_BYTES = 4096  # every storage begins at a whole page; the last page of one may be a part


class CompressedTier:
    """Bytes at offsets, each page compressed in this process's memory."""

    def __init__(self, size_bytes: int, location: str) -> None:
        del size_bytes, location  # a tier in a file would reserve its space there, now
        self._blocks: dict[int, bytes] = {}

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8) with what was last written at ``offset``, with zeros where nothing was."""
        for start in range(0, len(into), BLOCK_BYTES):
            piece = into[start : start + BLOCK_BYTES]
            block = self._blocks.get(offset + start)
            page = zlib.decompress(block) if block else bytes(BLOCK_BYTES)
            piece.copy_(torch.frombuffer(bytearray(page[: len(piece)]), dtype=torch.uint8))

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Keep ``data`` (uint8); it has left the tensor on return."""
        for start in range(0, len(data), BLOCK_BYTES):
            self._blocks[offset + start] = zlib.compress(data[start : start + BLOCK_BYTES].numpy().tobytes(), level=1)

    def close(self) -> None:
        """Give everything back."""
        self._blocks.clear()


def main() -> None:
    """Train with the compressing tier before the disk, and with the disk alone: the losses are the same."""
    batch = {"x": torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))}

    def build() -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(4)]
        return torch.nn.Sequential(*(part for layer in layers for part in layer))

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["x"])

    graph = lading.capture(build(), batch, loss)
    desk = lading.load_machine(Path(__file__).parent / "own_machine.toml")
    packed = dataclasses.replace(desk.tiers[0], name="packed", kind="own_tier:CompressedTier", persistent=False)
    both = dataclasses.replace(desk, tiers=(packed, *desk.tiers))
    losses: list[list[float]] = []
    for machine in (both, desk):
        plan = lading.plan(graph, machine, budget="60%", budgets={"disk": "1GB"})
        with tempfile.TemporaryDirectory() as folder, lading.Trainer(plan, graph, build(), folder=folder) as trainer:
            losses.append([trainer.step(batch) for _ in range(3)])
        print(f"{plan!r}\n  losses {losses[-1]}")
        moved_bytes = plan.peak_bytes.get(machine.tiers[0].name, 0)
        assert moved_bytes > 0, "the plan moved nothing"
    assert losses[0] == losses[1], losses


if __name__ == "__main__":
    main()
