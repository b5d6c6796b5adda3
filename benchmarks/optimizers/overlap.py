"""Waits of a Muon step's exchanges: in the step alone, and under backward and the next forward.

    python benchmarks/optimizers/overlap.py [--ranks 2] [--out FILE.json]

A Llama cut by FSDP2 trains on gloo ranks of this host; ways are interleaved, and all have the same losses to the bit.
Printed per step, of the slowest rank: seconds that a rank waits for exchanges with nothing to do, seconds within
``step``, and processor seconds of the iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from lading.matrices import MatrixOptimizer, Muon
from lading.models.llama import Llama, LlamaConfig
from lading.models.loss import next_byte_loss
from lading.optim.adamw import AdamW

WAYS = ("step", "backward", "forward", "both")
ROUNDS = 15


def _made(overlap: str, ranks: int) -> tuple[nn.Module, MatrixOptimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks,))
    model = Llama(LlamaConfig(dim=256, num_layers=4, num_heads=4, max_seq_len=64))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if name.startswith("layers") and p.ndim == 2]
    chosen = {name for name, _ in matrices}
    rest = [(name, p) for name, p in named if name not in chosen]
    groups = [{"params": matrices}, {"params": rest, "rule": AdamW(lr=3e-3)}]
    known = {} if overlap == "step" else {"model": model}
    return model, Muon(groups, lr=0.02, dtype="float32", overlap=overlap, **known)


def _turn(model: nn.Module, optimizer: MatrixOptimizer, batch: dict[str, torch.Tensor]) -> list[float]:
    """Waited, within the step, processor, and loss."""
    waited, busy = optimizer.traffic.waited_s, time.process_time()
    loss = next_byte_loss(model, batch)
    loss.backward()
    start = time.perf_counter()
    optimizer.step()
    within = time.perf_counter() - start
    optimizer.zero_grad()
    return [optimizer.traffic.waited_s - waited, within, time.process_time() - busy, float(loss.detach())]


def _run(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    made = {way: _made(way, ranks) for way in WAYS}
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for turn in range(ROUNDS + 2):
        seeded = torch.Generator().manual_seed(100 * turn + rank)
        batch = {"tokens": torch.randint(256, (4, 65), generator=seeded)}
        for way, (model, optimizer) in made.items():
            dist.barrier()
            row = torch.tensor(_turn(model, optimizer, batch), dtype=torch.float64)
            loss = float(row[3])
            dist.all_reduce(row, op=dist.ReduceOp.MAX)
            if turn > 1:
                found[way].append([*row[:3].tolist(), loss])
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Print medians, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_run, (args.ranks, folder), nprocs=args.ranks, start_method="spawn")
        found = json.loads((Path(folder) / "found.json").read_text())
    losses = {way: [row[3] for row in rows] for way, rows in found.items()}
    assert all(row == losses["step"] for row in losses.values()), "expected equal losses of all ways"
    print(f"torch {torch.__version__}, {args.ranks} gloo ranks, 4 layers of 256; median ms a step, of the slowest rank")
    for way, rows in found.items():
        waited, within, busy = (statistics.median(row[place] for row in rows) * 1e3 for place in range(3))
        print(f"{way:<9} waited {waited:7.2f}   within step {within:7.1f}   processor, iteration {busy:7.1f}")
    if args.out:
        result = {"torch": torch.__version__, "ranks": args.ranks, "rows": found}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
