"""Muon on Qwen3-32B and 256 devices, predicted: the optimizer's step and the whole iteration, owners against redundant.

    python benchmarks/optimizers/cluster.py [--machine h100] [--layout dp32,tp8,sp,zero1,mb1,gb512] [--seq 4096]

Redundant: every rank gathers the pieces of its tensor-parallel group and computes every matrix. Owners: one rank of all
for each matrix (``lading.planner.owners``), pieces in and directions out by all-to-all, four groups that overlap. Both
replace AdamW's update of the blocks' matrices in a simulated step; nothing here has been measured on a cluster.
"""

from __future__ import annotations

import argparse

from lading.clusters import Question, request_of
from lading.cost.collective import collective_s
from lading.cost.topology import group_of
from lading.cost.updates import direction_s
from lading.planner.owner_policies import POLICIES
from lading.planner.owners import Matrix, Owners, assign
from lading.rules import Muon
from lading.sim.simulate import Simulated, simulate
from lading.testing.projections import projections
from lading.units import format_seconds

GROUPS = 4
#: Bytes of an element on the way: the iteration begins in bf16.
WIDTH = 2


def _matrices(sim: Simulated) -> list[Matrix]:
    """Projections of the blocks, priced on the device."""
    device, launch_s = sim.machine.device, sim.request.stack.launch_s
    found: list[Matrix] = []
    for layer, key, rows, columns in projections(sim.table):
        seconds = direction_s(Muon().work(rows, columns), rows * columns, device, "bf16", launch_s)
        found.append(Matrix(f"{layer}.{key}", seconds, rows * columns, layer))
    return found


def _owners_s(owners: Owners, elements: int, sim: Simulated) -> tuple[float, float]:
    """Seconds of a step under owners, and of them those in which nothing computes."""
    devices = sim.request.layout.devices
    everyone = group_of(sim.request.layout, "world", sim.machine)
    way = collective_s("all_to_all", WIDTH * elements / devices / GROUPS, everyone, sim.machine)
    compute = owners.makespan_s / GROUPS
    # The first group travels in and the last one out alone; between, the longer of both counts.
    total = way + (GROUPS - 1) * max(compute, 2 * way) + compute + way
    return total, total - owners.makespan_s


def _redundant_s(matrices: list[Matrix], sim: Simulated) -> tuple[float, float]:
    elements = sum(m.elements for m in matrices)
    tensor = group_of(sim.request.layout, "tp", sim.machine)
    gathered = collective_s("all_gather", WIDTH * elements, tensor, sim.machine) if tensor.ranks > 1 else 0.0
    return gathered + sum(m.seconds for m in matrices), gathered


def main() -> None:
    """Print both, and what each policy of owners would give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--layout", default="dp32,tp8,sp,zero1,mb1,gb512")
    parser.add_argument("--seq", type=int, default=4096)
    args = parser.parse_args()
    request, table = request_of(Question(model=args.model, machine=args.machine, layout=args.layout, seq_len=args.seq))
    sim = simulate(request, table)
    matrices = _matrices(sim)
    devices = request.layout.devices
    owners = assign(matrices, devices)
    adamw_s = sim.step.shares_s["optimizer"]
    rest_s = sim.prediction.step_s - adamw_s
    ours, exposed = _owners_s(owners, sum(m.elements for m in matrices), sim)
    theirs, gathered = _redundant_s(matrices, sim)
    print(f"{args.model} on {devices} x {args.machine}, {request.layout}, {args.seq} tokens: predictions")
    print(f"step with AdamW {format_seconds(sim.prediction.step_s)}, of it the optimizer {format_seconds(adamw_s)}")
    print(f"redundant: optimizer {format_seconds(theirs)} (gathers {format_seconds(gathered)})")
    print(f"owners: optimizer {format_seconds(ours)} (not under computing {format_seconds(exposed)})")
    print(f"optimizer {theirs / ours:.1f}x, iteration {(rest_s + theirs) / (rest_s + ours):.2f}x")
    print(f"load ratio {owners.load_ratio:.3f}, {owners.gap:.1%} above the bound; published elsewhere: 5.8x and 1.57x")
    for name, policy in POLICIES.items():
        total, _ = _owners_s(policy(matrices, devices), sum(m.elements for m in matrices), sim)
        print(f"  {name:<14} optimizer {format_seconds(total)}, {theirs / total:.1f}x")


if __name__ == "__main__":
    main()
