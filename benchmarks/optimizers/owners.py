"""Owners of Qwen3's matrices under Muon on 16 to 256 ranks: makespan over the bound, by policy, and planning time.

    python benchmarks/optimizers/owners.py [--machine h100]

Costs are products counted, the short side's cube included; a shared matrix takes 1 / (k 0.85^log2 k) of its time on
each of k ranks, as if each doubling lost 15%. With a machine, costs are its seconds, and sharing what ranks of one of
its nodes tell each other (``lading.planner.owners``). Policies are over the bound, ours over the mean.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.optimizers.owner_policies import POLICIES

from lading.catalog.tables import model_table
from lading.optim.muon import Muon
from lading.parallel.block_matrices import projections
from lading.planner.owners import DirectionCosts, Matrix, assign

MODELS = ("1.7b", "4b", "8b", "14b", "32b")


def matrices(name: str, *, shared: bool, machine: str = "") -> list[Matrix]:
    """One for each projection, q, k, v, gate and up apart."""
    costs = DirectionCosts.of(machine)
    found: list[Matrix] = []
    for layer, key, rows, columns in projections(model_table(f"qwen3-{name}")):
        seconds = costs.matrix(Muon(), *sorted((rows, columns)))
        shares = [1 / (2 * (0.85 if not machine else 1.0)) ** power for power in (1, 2, 3, 4)]
        gangs = costs.shared(Muon(), rows, columns, shares) if shared else ()
        found.append(Matrix(f"{layer}.{key}", seconds, rows * columns, layer, shared_s=gangs))
    return found


def main() -> None:
    """Print a row for each model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="")
    machine = parser.parse_args().machine
    head = ["model", "ranks", "ours", "bound proven", "shared", "gap", "ms", *POLICIES]
    print(" | ".join(head))
    for name in MODELS:
        for ranks in (16, 32, 64, 128, 256):
            alone, shared = (matrices(name, shared=way, machine=machine) for way in (False, True))
            owners = assign(alone, ranks)
            taken: list[float] = []
            for _ in range(5):
                start = time.process_time()
                together = assign(shared, ranks)
                taken.append(time.process_time() - start)
            others = [policy(alone, ranks).makespan_s / owners.bound_s for policy in POLICIES.values()]
            mean_s = sum(m.seconds for m in alone) / ranks
            row = [name, ranks, f"{owners.makespan_s / mean_s:.3f}", f"{owners.bound_s / mean_s:.3f}"]
            row += [
                f"{together.makespan_s / mean_s:.3f}",
                f"{together.gap:.1%}",
                f"{statistics.median(taken) * 1e3:.0f}",
            ]
            print(" | ".join(str(cell) for cell in [*row, *(f"{other:.2f}" for other in others)]))


if __name__ == "__main__":
    main()
