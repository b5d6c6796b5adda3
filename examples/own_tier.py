"""A tier of your own in place of the disk: where tensors wait while the device does not need them.

    python examples/own_tier.py

A tier is two things. For the planner and the simulator it is an entry ``[[tiers]]`` of the machine file: capacity,
rates, latency. For the executor it is an object with ``read``, ``write`` and ``close``. Here a disk tier that
compresses what it is given: slow, but it needs no disk, and what comes back is what went in, so the numbers stay. It
takes the name of a tier there is, and is handed over in Python: `lading train` has the usual ones.

Where to look: src/lading/runtime/tiers.py (the tiers there are), src/lading/runtime/device.py (who makes them).
"""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

import torch

import lading
from lading.runtime.device import CpuDevice

BLOCK_BYTES = 4096  # every storage begins at a whole page; the last page of one may be a part


class CompressedTier:
    """Bytes at offsets, each page compressed in this process's memory."""

    def __init__(self, capacity_bytes: int, folder: Path) -> None:
        del capacity_bytes, folder  # a tier in a file would reserve its space there, now
        self._blocks: dict[int, bytes] = {}

    @property
    def given_bytes(self) -> int:
        """What was written, pages counted once."""
        return BLOCK_BYTES * len(self._blocks)

    @property
    def stored_bytes(self) -> int:
        """What it takes."""
        return sum(map(len, self._blocks.values()))

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
    """Train with the compressing tier, and with the usual disk: the losses are the same."""
    batch = {"x": torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))}

    def build() -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(4)]
        return torch.nn.Sequential(*(part for layer in layers for part in layer))

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["x"])

    graph = lading.capture(build(), batch, loss)
    plan = lading.plan(graph, lading.load_machine(Path(__file__).parent / "own_machine.toml"), budget="60%")
    made: list[CompressedTier] = []

    def make(capacity_bytes: int, folder: Path) -> CompressedTier:
        made.append(CompressedTier(capacity_bytes, folder))
        return made[-1]

    losses: list[list[float]] = []
    given = stored = 0
    for device in (CpuDevice(tiers={"disk": make}), CpuDevice()):
        with (
            tempfile.TemporaryDirectory() as folder,
            lading.Trainer(plan, graph, build(), folder=folder, device=device) as trainer,
        ):
            losses.append([trainer.step(batch) for _ in range(3)])
            given, stored = made[0].given_bytes or given, made[0].stored_bytes or stored
    assert losses[0] == losses[1], losses
    assert given > 0, "the plan moved nothing"
    print(f"{given} bytes waited in {stored}; losses {losses[0]} with either tier")


if __name__ == "__main__":
    main()
