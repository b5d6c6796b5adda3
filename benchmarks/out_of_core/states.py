"""Formats of the optimizer's states out of core: float32, bfloat16 rounded at random, and 8 bit, on the disk.

    python benchmarks/out_of_core/run.py probe --folder F --threads 2                              a minute, quiet
    python benchmarks/out_of_core/states.py --folder F --budget 250MB --only-plan                  minutes
    python benchmarks/out_of_core/states.py --folder F --budget 250MB --json RESULTS.json          minutes, quiet

Sides take turns in one process, so many steps each, on the same batches: plain PyTorch with its fused AdamW and
everything in memory, and a plan of each format for the same bytes. The first losses of a side are compared with those
of the same rule in plain PyTorch. Bytes are those of ``/proc/self/io`` around a side's turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from run import Cell, add_to, cell_options, machine_file, num_parameters, predicted
from sides import LR, Side, Step, disk_bytes, plain, stock_step

import lading
from lading.catalog.load import load_machine
from lading.ir.plan import Plan
from lading.models.reference import model_class
from lading.optim.moment_rule import StateFormat
from lading.tracing.initial import defer

Plans = dict[StateFormat, Plan]
FORMATS: tuple[StateFormat, ...] = ("fp32", "bf16", "8bit")
#: Steps of a turn that do not count: what a step leaves to be written behind its end falls into the next one's time.
_SKIPPED = 1


def first_losses(side: Side, states: StateFormat, count: int) -> list[float]:
    """Losses of the first steps of plain PyTorch with states in a format."""
    module = side.module()
    optimizer = lading.AdamW(lr=LR, states=states).plain(module.parameters())
    step = stock_step(module, optimizer, model_class(side.model).loss)
    return [step(side.batch(number)) for number in range(count)]


def turns(side: Side, steps: dict[str, Step], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds and bytes of the counted steps of each side, and its losses."""
    found = {name: {"seconds": [], "losses": [], "read": 0, "written": 0} for name in steps}
    for turn in range(options.turns):
        names = [*steps][turn % len(steps) :] + [*steps][: turn % len(steps)]  # each is first as often as another
        for name in names:
            row: dict[str, Any] = found[name]
            for number in range(turn * options.steps, (turn + 1) * options.steps):
                before, began = disk_bytes(), time.perf_counter()
                row["losses"].append(steps[name](side.batch(number)))
                if number % options.steps >= _SKIPPED:
                    row["seconds"].append(time.perf_counter() - began)
                    read, written = (b - a for a, b in zip(before, disk_bytes(), strict=True))
                    row["read"], row["written"] = row["read"] + read, row["written"] + written
    return found


def measure(side: Side, plans: Plans, options: argparse.Namespace, graph: Any) -> list[dict[str, Any]]:
    """Take turns, and compare the first losses of each format with plain PyTorch's."""
    expected = {states: first_losses(side, states, options.compared) for states in FORMATS}
    with tempfile.TemporaryDirectory(dir=options.folder) as swap:
        trainers = {
            states: lading.Trainer(
                plan, graph, side.module(), folder=Path(swap) / states, threads=options.threads,
                optimizer=lading.AdamW(lr=LR, states=states),
            )
            for states, plan in plans.items()
        }  # fmt: skip
        steps: dict[str, Step] = {"plain": plain(side)}
        found = turns(side, steps | {states: each.step for states, each in trainers.items()}, options)
        for trainer in trainers.values():
            trainer.close()
    parameters, rows = num_parameters(side), []
    for name, row in found.items():
        counted, losses = len(row["seconds"]), row.pop("losses")
        row |= {"side": name, "median_s": statistics.median(row["seconds"])}
        row |= {way: row[way] / counted / parameters for way in ("read", "written")}
        if name in plans:
            row |= {"equal to the bit": losses[: options.compared] == expected[name]}
            row |= {"predicted": predicted(plans[name], parameters)}
        rows.append(row)
    return rows


def main() -> None:
    """Plan each format for the same bytes, measure them, and add the rows to a file."""
    options = cell_options(__doc__ or "", "250MB", tokens=128, threads=2, turns=3, steps=4, compared=3).parse_args()
    cell = Cell(model=options.model, precision="fp32", tokens=options.tokens)
    side = cell.side("lading", options.folder, options.threads)
    torch.set_num_threads(options.threads)
    graph = lading.capture(defer(side.module).model, side.batch(0), model_class(side.model).loss)
    machine = load_machine(machine_file(options.folder, options.threads))
    plans: Plans = {
        states: lading.plan(graph, machine, budget=options.budget, optimizer=lading.AdamW(lr=LR, states=states))
        for states in FORMATS
    }
    if options.only_plan:
        found: Any = {states: predicted(plan, num_parameters(side)) for states, plan in plans.items()}
    else:
        found = measure(side, plans, options, graph)
    add_to(options, cell, rows=found)


if __name__ == "__main__":
    main()
