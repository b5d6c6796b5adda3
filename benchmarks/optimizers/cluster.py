"""Muon on Qwen3-32B and 256 devices, predicted: the optimizer's step and the whole iteration, owners against others.

    python benchmarks/optimizers/cluster.py [--machine h100] [--layout dp32,tp8,sp,zero1,mb1] [--seq 4096]

Owners: what ``lading simulate --optimizer muon`` predicts, one owner among all ranks for each matrix, four groups that
overlap. Beside it:

  redundant     every rank gathers the pieces of its tensor-parallel group and computes every matrix
  by layer, dp  layers belong to data-parallel ranks, whose tensor-parallel ranks gather their pieces and all compute
  policies      owners among all ranks by other rules (``benchmarks.optimizers.owner_policies``), moved as ours are
  shared        several ranks to a matrix where that is shorter, what they tell each other included

Iterations are those of the simulated step; all but the optimizer is the same. Nothing here was measured on a cluster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.optimizers.owner_policies import POLICIES

from lading.clusters import step_of
from lading.cost.collective import collective_s
from lading.cost.matrix_updates import direction_s, shared_s
from lading.cost.owned import GROUPS, Update
from lading.cost.topology import group_of
from lading.ir.request import Request
from lading.optim.muon import Muon
from lading.parallel.block_matrices import projections
from lading.planner.owners import Matrix, Owners, assign
from lading.sim.simulate import Simulated, simulate
from lading.units import format_seconds

#: Bytes of an element on the way: the iteration begins in bf16.
WIDTH = 2
#: Sequences of an iteration: one for each replica, and 16.
BATCHES = (1, 16)


def _matrices(sim: Simulated) -> list[Matrix]:
    """Projections of the blocks, priced on the device; what they take shared, too."""
    machine, launch_s = sim.machine, sim.request.stack.launch_s
    found: list[Matrix] = []
    for number, (layer, key, rows, columns) in enumerate(projections(sim.table)):
        seconds = direction_s(Muon().work(*sorted((rows, columns))), rows * columns, machine.device, "bf16", launch_s)
        gangs = shared_s(Muon(), rows, columns, machine, launch_s)
        found.append(Matrix(f"{layer}.{key}.{number}", seconds, rows * columns, layer, shared_s=gangs))
    return found


def _elementwise_s(update: Update) -> float:
    """Seconds of what every rank does with its own pieces."""
    return update.seconds - update.directions.seconds - update.exposed_s


def _with(owners: Owners, update: Update) -> float:
    """Seconds of the optimizer's step were these the owners; what travels beside nothing is the same.

    Raises:
        ValueError: computing would no longer cover what travels between the first and the last group.
    """
    if owners.makespan_s < GROUPS * update.exposed_s:
        raise ValueError(f"expected directions of {GROUPS * update.exposed_s} s or more, got {owners.makespan_s}")
    return _elementwise_s(update) + owners.makespan_s + update.exposed_s


def _gathered_s(matrices: Sequence[Matrix], sim: Simulated) -> float:
    """Seconds of gathering the pieces of tensor-parallel ranks."""
    tensor = group_of(sim.request.layout, "tp", sim.machine)
    size = WIDTH * sum(m.elements for m in matrices)
    return collective_s("all_gather", size, tensor, sim.machine) if tensor.ranks > 1 else 0.0


def _redundant_s(matrices: Sequence[Matrix], sim: Simulated) -> float:
    return _gathered_s(matrices, sim) + sum(m.seconds for m in matrices)


def _layerwise_s(matrices: Sequence[Matrix], sim: Simulated) -> float:
    """Seconds of the rank that has most layers, where ranks of a tensor-parallel group repeat each other."""
    ways = sim.request.layout.dp * sim.request.layout.cp
    layers = sorted({m.layer for m in matrices})
    each = [[m for m in matrices if m.layer in layers[rank::ways]] for rank in range(ways)]
    return max(_redundant_s(own, sim) for own in each)


def _asked(args: argparse.Namespace, each: int) -> Simulated:
    replicas = int(next(part[2:] for part in args.layout.split(",") if part.startswith("dp")))
    layout = f"{args.layout},gb{replicas * each}"
    question = Request(model=args.model, machine=args.machine, layout=layout, seq_len=args.seq, optimizer="muon")
    return simulate(*step_of(question))


def main() -> None:
    """Print both, and what each policy of owners would give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-32b")
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--layout", default="dp32,tp8,sp,zero1,mb1")
    parser.add_argument("--seq", type=int, default=4096)
    args = parser.parse_args()
    sims = [_asked(args, each) for each in BATCHES]
    sim, devices = sims[0], sims[0].request.layout.devices
    assert sim.updated is not None
    update, matrices = sim.updated.update, _matrices(sim)
    ours = sim.step.shares_s["optimizer"]
    rest = ours - update.seconds  # AdamW of what is no matrix
    own = _elementwise_s(update)
    arms = {"owners": update.seconds}
    arms |= {"redundant": own + _redundant_s(matrices, sim), "by layer, dp": own + _layerwise_s(matrices, sim)}
    arms |= {name: _with(policy(matrices, devices), update) for name, policy in POLICIES.items()}
    shared = assign(matrices, devices)
    arms["shared"] = _with(shared, update)
    print(f"{args.model} on {devices} x {args.machine}, {args.layout}, sequences of {args.seq} tokens: predictions")
    print(
        f"{update.matrices} matrices, load ratio {update.load_ratio:.3f}, {update.gap:.1%} above the bound of whole "
        f"matrices; shared by up to {max(map(len, shared.ranks))} ranks {shared.load_ratio:.3f}"
    )
    print(f"not under computing {format_seconds(update.exposed_s)}; published elsewhere: 5.8x and 1.57x")
    steps = [one.step.step_s - one.step.shares_s["optimizer"] for one in sims]
    print(f"{'':<14}{'optimizer':>12}{'ours is':>9}" + "".join(f"{f'{n} each':>12}{'ours is':>9}" for n in BATCHES))
    for name, seconds in arms.items():
        row = f"{name:<14}{format_seconds(seconds + rest):>12}{(seconds + rest) / ours:>8.1f}x"
        for step in steps:
            row += f"{format_seconds(step + seconds + rest):>12}{(step + seconds + rest) / (step + ours):>8.2f}x"
        print(row)


if __name__ == "__main__":
    main()
