"""Clipping out of core: updates that wait for the norm of all gradients, and updates on a guess.

    python benchmarks/out_of_core/run.py probe --folder F --threads 2                    a minute, quiet
    python benchmarks/out_of_core/clipping.py --folder F --budget 25% --only-plan        minutes
    python benchmarks/out_of_core/clipping.py --folder F --budget 25% --json RESULTS.json  minutes, quiet

Sides take turns in one process, a step each, on the same batches: plain PyTorch with ``clip_grad_norm_``, everything in
memory; Lading's plan for the budget in which all updates wait; and that with ``clipped=0.02``. In the first steps the
norm is below the limit, and in the last ones every step is clipped, so that the guess is wrong each time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from run import Cell, add_to, cell_options, machine_file
from sides import LR, Side

import lading
from lading.catalog.load import load_machine
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan
from lading.models.reference import model_class
from lading.tracing.initial import defer

#: Limits of the norm: above that of every step, and below.
_NEVER, _ALWAYS = 1e3, 1e-2
_GUESS = 0.02


def plans(graph: StepGraph, machine: Path, budget: str, clip_norm: float) -> dict[str, Plan]:
    """Plans of both of Lading's sides, within the same bytes."""
    hosts = load_machine(machine)
    waits = lading.plan(graph, hosts, budget=budget, clip_norm=clip_norm, optimizer=lading.AdamW(lr=LR))
    size = waits.budgets["device"]
    guess = lading.plan(graph, hosts, budget=size, clip_norm=clip_norm, clipped=_GUESS, optimizer=lading.AdamW(lr=LR))
    return {"all wait": waits, "on a guess": guess}


def measure(cell: Cell, options: argparse.Namespace, clip_norm: float, steps: int) -> dict[str, Any]:
    """Take turns for so many steps, of which the first two do not count."""
    folder = options.folder
    side = cell.side("lading", folder, options.threads)
    torch.set_num_threads(options.threads)
    loss_of = model_class(side.model).loss
    graph = lading.capture(defer(side.module).model, side.batch(0), loss_of)
    made = plans(graph, machine_file(folder, options.threads), options.budget, clip_norm)
    if options.only_plan:
        return {name: [plan.step_s, *plan.assumptions[-1:]] for name, plan in made.items()}
    reference = side.module()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, fused=True)

    def plain(batch: dict[str, torch.Tensor]) -> float:
        loss = loss_of(reference, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    with tempfile.TemporaryDirectory(dir=folder) as swap:
        trainers = {
            name: lading.Trainer(
                plan, graph, side.module(), folder=Path(swap) / f"{n}", threads=options.threads,
                optimizer=lading.AdamW(lr=LR),
            )
            for n, (name, plan) in enumerate(made.items())
        }  # fmt: skip
        found = _turns(side, {"plain": plain, **{name: each.step for name, each in trainers.items()}}, steps)
        guess = trainers["on a guess"].speculation
        for trainer in trainers.values():
            trainer.close()
    rows = {name: {"median_s": statistics.median(each[2:]), "seconds": each[2:]} for name, (each, _) in found.items()}
    for name, plan in made.items():
        rows[name] |= {
            "predicted_s": plan.step_s,
            "budget_bytes": plan.budgets["device"],
            "said": plan.assumptions[-1:],
        }
    losses = [each for _, each in found.values()]
    equal = all(each == losses[0] for each in losses)
    return {"clip_norm": clip_norm, "again": guess and guess.again, "equal to the bit": equal, "rows": rows}


def _turns(side: Side, steps: dict[str, Any], count: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds and losses of each side."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    names = [*steps]
    for number in range(count):
        for at in range(len(names)):  # each is first as often as another
            name = names[(number + at) % len(names)]
            began = time.perf_counter()
            found[name][1].append(steps[name](side.batch(number)))
            found[name][0].append(time.perf_counter() - began)
    return found


def main() -> None:
    """Measure steps that are not clipped, then such as are, and add them to a file."""
    options = cell_options(__doc__ or "", "25%", tokens=256, threads=2, steps=10, clipped_steps=6).parse_args()
    cell = Cell(model=options.model, precision="fp32", tokens=options.tokens)
    found = [measure(cell, options, _NEVER, options.steps), measure(cell, options, _ALWAYS, options.clipped_steps)]
    add_to(options, cell, runs=found)


if __name__ == "__main__":
    main()
