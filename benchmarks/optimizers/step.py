"""One step of Muon on gloo ranks of this host: owners, everyone computing everything, torch.optim.Muon, dion's Muon.

    python benchmarks/optimizers/step.py [--ranks 8] [--machine PROBED.toml] [--out FILE.json]

Parameters are cut by FSDP2. Counted are processor seconds of the slowest rank, as ranks share the host's cores; arms
are interleaved, medians and quartiles printed. "ideal" is what the owners' loads alone allow. dion's
Muon takes part where it is installed. With what ``lading probe --ranks N`` wrote, steps in fp32 are predicted, too
([Note: prediction]); nothing in it is fitted to a step.

[Note: prediction]
Owners plan by the machine's seconds. The fullest rank computes its directions while all cores are busy; of every
parameter it has a piece, on which the kernels of ``pre``, ``post`` and four copies run, each an operation's overhead or
its bytes, whichever is longer; and it keeps its share of processors busy with what travels. Redundant compute has all
directions and all elements of the parameters, and gathers a gradient and a parameter at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from lading.catalog.load import load_machine
from lading.cost.collective import collective_s
from lading.cost.kernels import memory_s
from lading.cost.product import product_s
from lading.cost.topology import Group
from lading.ir.machine import Machine
from lading.ir.work import Product
from lading.matrices import Muon
from lading.optim.muon import Muon as Settings
from lading.optim.muon import MuonRule
from lading.optim.rule import fresh, update_matrix

LAYERS, HIDDEN, WIDE = 4, 256, 1024
ROUNDS = 9
#: Bytes for each element of the kernels of ``pre`` and ``post`` in fp32: momentum, look-ahead, rounding that is none,
#: decay, moving; and of what ``direction`` does beside products: a copy, a norm, a division.
OWN_BYTES, DIRECTION_BYTES = (12, 12, 0, 8, 12), (8, 4, 8)
COPIES = 4


def _shapes() -> list[tuple[int, int]]:
    """Shapes of the seven projections of a block, as a Llama's."""
    narrow = HIDDEN // 4
    attention = [(HIDDEN, HIDDEN), (narrow, HIDDEN), (narrow, HIDDEN), (HIDDEN, HIDDEN)]
    return [*attention, (WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)]


class _Predicted:
    """Processor seconds of the slowest rank by a probed machine ([Note: prediction])."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        assert machine.processes is not None
        self.machine, self.ranks, self.shared = machine, ranks, machine.processes
        self.each = [shape for _ in range(LAYERS) for shape in _shapes()]

    def _kernel_s(self, size_bytes: float) -> float:
        seconds = memory_s(size_bytes, "elementwise", self.machine.device) if size_bytes else 0.0
        return max(seconds * self.shared.slower("memory-bound", self.shared.cores), self.machine.device.op_overhead_s)

    def direction_s(self, rows: int, columns: int) -> float:
        """Seconds of one matrix's direction."""
        work, device = Settings().work(rows, columns), self.machine.device
        slower = self.shared.slower("products", self.shared.cores)
        products = sum(
            times * max(slower * product_s(Product(m, n, k), "fp32", device), device.op_overhead_s)
            for times, m, n, k in work.products
        )
        return products + sum(self._kernel_s(size * rows * columns) for size in DIRECTION_BYTES)

    def _own_s(self, share: float, copies: int) -> float:
        """Kernels on a part of every parameter."""
        return sum(self._kernel_s(size * r * c * share) for r, c in self.each for size in (*OWN_BYTES, *(8,) * copies))

    def _travel_s(self, op: str, size_bytes: float) -> float:
        """A rank's share of the processors that a collective keeps busy."""
        busy = self.shared.busy.get(f"{op}.{self.ranks}")
        if busy is None:
            raise SystemExit(f"expected a machine probed with --ranks {self.ranks}, got one without {op}.{self.ranks}")
        group = Group(self.ranks, self.ranks)
        return collective_s(op, size_bytes, group, self.machine) * busy / self.ranks

    def owners_s(self, owned: Sequence[Sequence[tuple[int, int]]], groups: int) -> float:
        """Seconds of the fullest rank; ``owned``: shapes of what each rank owns."""
        directions = max(sum(self.direction_s(*shape) for shape in own) for own in owned)
        size = 4 * sum(r * c for r, c in self.each) / self.ranks / groups
        travels = 2 * groups * self._travel_s("all_to_all", size) + self._travel_s("all_reduce", 4.0)
        return directions + self._own_s(1 / self.ranks, COPIES) + travels

    def redundant_s(self) -> float:
        """Seconds of every rank where all compute everything."""
        gathers = sum(2 * self._travel_s("all_gather", 4 * r * c) for r, c in self.each)
        return sum(self.direction_s(*shape) for shape in self.each) + self._own_s(1.0, COPIES) + gathers


def _sharded(ranks: int) -> nn.Module:
    """Blocks of seven projections, cut; only their weights count."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks,))
    layers = [nn.Linear(columns, rows, bias=False) for _ in range(LAYERS) for rows, columns in _shapes()]
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
        **_dion(ranks),
    }


def _dion(ranks: int) -> dict[str, Callable[[], object]]:
    """Muon of microsoft/dion, where it is installed: owners by turns, equal shapes batched, bf16."""
    if find_spec("dion") is None:
        return {}
    parameters = list(_sharded(ranks).parameters())
    assert isinstance(parameters[0], DTensor)
    mesh, muon = parameters[0].device_mesh, import_module("dion").Muon
    return {"dion.Muon, bf16": muon(parameters, mesh, lr=0.02, nesterov=True, use_polar_express=False).step}


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
        owner = [gang[0] for gang in owners.ranks]
        found = {"ideal": ranks / owners.load_ratio, "gap": owners.gap, "owner": owner, "seconds": times}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _guesses(machine: Path, ranks: int, owner: Sequence[int]) -> dict[str, float]:
    """Predicted processor seconds by arm."""
    predicted = _Predicted(load_machine(str(machine)), ranks)
    owned = [[shape for shape, own in zip(predicted.each, owner, strict=True) if own == rank] for rank in range(ranks)]
    found = {f"owners, fp32, {n} group{'s' * (n > 1)}": predicted.owners_s(owned, n) for n in (1, 2, 4)}
    return {"redundant, fp32": predicted.redundant_s(), **found}


def main() -> None:
    """Print medians, quartiles and ratios; write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_run, (args.ranks, folder), nprocs=args.ranks, start_method="spawn")
        found = json.loads((Path(folder) / "found.json").read_text())
    print(
        f"torch {torch.__version__}, {args.ranks} gloo ranks, {7 * LAYERS} matrices; processor ms of the slowest rank"
    )
    guess = _guesses(args.machine, args.ranks, found["owner"]) if args.machine else {}
    middle = {name: statistics.median(row) for name, row in found["seconds"].items()}
    for name, row in found["seconds"].items():
        low, _, high = statistics.quantiles(row, n=4)
        base = middle["redundant, fp32" if "fp32" in name else "redundant, bf16"]
        line = f"{name:<38} {middle[name] * 1e3:8.1f} [{low * 1e3:.1f}, {high * 1e3:.1f}]  {base / middle[name]:.2f}x"
        if name in guess:
            line += f"  predicted {guess[name] * 1e3:.1f} ({guess[name] / middle[name] - 1:+.0%})"
        print(line)
    if guess:
        found["predicted"] = guess
    if find_spec("dion") is None:
        print("dion.Muon is left out: not installed; pip install git+https://github.com/microsoft/dion.git")
    print(f"ideal {found['ideal']:.2f}x; owners' loads are within {found['gap']:.1%} of the bound")
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "ranks": args.ranks, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
