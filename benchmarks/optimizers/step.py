"""One step of Muon on gloo ranks of this host: owners against everyone computing everything, and torch.optim.Muon.

    python benchmarks/optimizers/step.py [--ranks 8] [--out FILE.json]

Parameters are cut by FSDP2. Counted are processor seconds of the slowest rank, as ranks share the host's cores; arms
are interleaved, medians and quartiles printed. "ideal" is what the owners' loads alone allow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from lading.matrices import Muon
from lading.optim.muon import MuonRule
from lading.optim.rule import fresh, update_matrix
from lading.rules import Muon as Settings

LAYERS, HIDDEN, WIDE = 4, 256, 1024
ROUNDS = 9


def _sharded(ranks: int) -> nn.Module:
    """Blocks of seven projections, as a Llama's, cut; only their weights count."""
    torch.manual_seed(0)
    shapes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN // 4, HIDDEN), "v": (HIDDEN // 4, HIDDEN), "o": (HIDDEN, HIDDEN)}
    shapes |= {"gate": (WIDE, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
    mesh = init_device_mesh("cpu", (ranks,))
    layers = [nn.Linear(columns, rows, bias=False) for _ in range(LAYERS) for rows, columns in shapes.values()]
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(torch.randn(parameter.shape), mesh, parameter.placements)
    return model


class _Redundant:
    """Every rank gathers every gradient, computes every direction and keeps its own piece."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.rule = MuonRule(settings)
        self.parameters = list(model.parameters())
        self.states = [fresh(self.rule, (p.shape[0], p.shape[1]), p.dtype) for p in self.parameters]
        self.updates = 0

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        self.updates += 1
        for parameter, (held, whole) in zip(self.parameters, self.states, strict=True):
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            full = parameter.full_tensor().clone()
            update_matrix(self.rule, full, parameter.grad.full_tensor(), held, whole, lr=0.02, update=self.updates)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))


def _arms(ranks: int) -> dict[str, Callable[[], object]]:
    exact, low = {"dtype": "float32"}, {"dtype": "bfloat16"}
    return {
        "redundant, fp32": _Redundant(_sharded(ranks), Settings(**exact)).step,
        "owners, fp32, 1 group": Muon(_sharded(ranks).parameters(), groups=1, **exact).step,
        "owners, fp32, 2 groups": Muon(_sharded(ranks).parameters(), groups=2, **exact).step,
        "owners, fp32, 4 groups": Muon(_sharded(ranks).parameters(), groups=4, **exact).step,
        "redundant, bf16": _Redundant(_sharded(ranks), Settings(**low)).step,
        "owners, bf16, 2 groups": Muon(_sharded(ranks).parameters(), groups=2, **low).step,
        "torch.optim.Muon on DTensors, bf16": torch.optim.Muon(_sharded(ranks).parameters(), lr=0.02).step,
    }


def _run(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    arms = _arms(ranks)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(ROUNDS + 1):
        for name, step in arms.items():
            dist.barrier()
            start = time.process_time()
            step()
            taken = torch.tensor([time.process_time() - start])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if turn:
                times[name].append(float(taken))
    owners = Muon(_sharded(ranks).parameters(), dtype="float32").owners
    assert owners is not None
    if rank == 0:
        ideal = ranks / owners.load_ratio
        (Path(folder) / "found.json").write_text(json.dumps({"ideal": ideal, "gap": owners.gap, "seconds": times}))
    dist.destroy_process_group()


def main() -> None:
    """Print medians, quartiles and ratios; write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_run, (args.ranks, folder), nprocs=args.ranks, start_method="spawn")
        found = json.loads((Path(folder) / "found.json").read_text())
    print(
        f"torch {torch.__version__}, {args.ranks} gloo ranks, {7 * LAYERS} matrices; processor ms of the slowest rank"
    )
    middle = {name: statistics.median(row) for name, row in found["seconds"].items()}
    for name, row in found["seconds"].items():
        low, _, high = statistics.quantiles(row, n=4)
        base = middle["redundant, fp32" if "fp32" in name else "redundant, bf16"]
        print(f"{name:<38} {middle[name] * 1e3:8.1f} [{low * 1e3:.1f}, {high * 1e3:.1f}]  {base / middle[name]:.2f}x")
    print(f"ideal {found['ideal']:.2f}x; owners' loads are within {found['gap']:.1%} of the bound")
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "ranks": args.ranks, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
