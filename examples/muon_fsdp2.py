"""Muon on a stock FSDP2 script: matrices have owners, everything else has AdamW.

    python -m torch.distributed.run --nproc-per-node 2 examples/muon_fsdp2.py    # --steps --overlap

Where to look: src/lading/optim/muon.py (the rule), src/lading/matrices.py (the optimizer), docs/design.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lading
from lading.config import DataConfig
from lading.models.llama import Llama, LlamaConfig
from lading.models.loss import next_byte_loss
from lading.runtime.data import TextDataset


def main() -> None:
    """Train a small Llama on the standard library's source and print what it learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--overlap", choices=("step", "backward", "forward", "both"), default="step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Llama(LlamaConfig(dim=64, num_layers=2, num_heads=4, max_seq_len=64))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    matrices = [(name, p) for name, p in model.named_parameters() if name.startswith("layers") and p.ndim == 2]
    chosen = {name for name, _ in matrices}
    rest = [(name, p) for name, p in model.named_parameters() if name not in chosen]
    optimizer = lading.optim.Muon(
        [{"params": matrices}, {"params": rest, "rule": lading.AdamW(lr=3e-3)}], lr=0.02, mesh=mesh,
        overlap=args.overlap, model=None if args.overlap == "step" else model,
    )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        data = TextDataset(DataConfig(sequence_length=64, batch_size=8), Path(folder), seed=dist.get_rank())
        losses = [_step(model, optimizer, data.batch(step, 0)) for step in range(args.steps)]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; fullest rank {optimizer.owners.load_ratio:.2f} of the mean")
        sent = optimizer.traffic
        print(f"{sent.collectives} all-to-alls in {args.steps} steps, {sent.elements} elements sent")
        assert losses[-1] < losses[0]
    dist.destroy_process_group()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    loss = next_byte_loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


if __name__ == "__main__":
    main()
