"""A loop on several ranks: the lines of one process, under torchrun.

    torchrun --nproc-per-node 2 examples/on_ranks.py

Each rank trains on a batch of its own. Gradients are reduced in buckets while backward goes on, inside the budget of
each rank, and the numbers are those of one process with as many micro-batches. The first rank plans; all compare what
they were given before anything runs. Here the machine is a made-up one; your own: ``lading probe --ranks 2``.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import torch

import lading
from lading.ir.machine import Curve
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model

STEPS, ROWS, TOKENS = 3, 4, 64
TEXT = Path(os.__file__).read_bytes()


def machine() -> lading.Machine:
    """The example's machine, with the speed of an all-reduce between two processes: bytes/s by bytes."""
    alone = lading.load_machine(Path(__file__).parent / "own_machine.toml")
    return dataclasses.replace(alone, collectives={"all_reduce.2": Curve(size=(1e3, 1e7), rate=(1e7, 5e8))})


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    """Micro-batch ``number`` of a step: bytes of the standard library, a row each TOKENS + 1."""
    size = ROWS * (TOKENS + 1)
    start = (step * 8 + number) * size
    rows = torch.frombuffer(bytearray(TEXT[start : start + size]), dtype=torch.uint8)
    return {"tokens": rows.long().view(ROWS, TOKENS + 1)}


def main() -> None:
    """Train, and print the losses on the first rank."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = build_model("llama", vocab_size=256, max_seq_len=TOKENS, dim=128, num_heads=4, num_layers=2)
    micro = 2 // ranks  # of two micro-batches a step
    graph = lading.capture(model, batch(0, 0), next_byte_loss, accumulation=micro)
    plan = lading.plan(graph, machine(), budget="100%", cache=False)
    with tempfile.TemporaryDirectory() as folder, lading.Trainer(plan, graph, model, folder=folder) as trainer:
        losses = [
            trainer.step([batch(step, rank * micro + number) for number in range(micro)]) for step in range(STEPS)
        ]
    if rank == 0:
        print(f"{ranks} rank{'s' if ranks > 1 else ''}: {' '.join(f'{loss:.6f}' for loss in losses)}")


if __name__ == "__main__":
    main()
