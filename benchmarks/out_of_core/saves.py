"""Checkpoints out of core: in place, where what lies in the swap file stays there, and copied; in turns.

    python benchmarks/out_of_core/run.py probe --folder F --threads 2                       a minute, quiet
    python benchmarks/out_of_core/saves.py --folder F --only-plan                           a minute
    python benchmarks/out_of_core/saves.py --folder F --json RESULTS.json                   minutes, quiet

Sides train the same model one after another within each turn: ``in place`` and ``copied`` by one plan, and
``dcp.save``, plain PyTorch with everything in memory that saves by ``torch.distributed.checkpoint``. A turn of a side
is a save and the steps behind it. The call is the time for which training stops; "behind" is by how much longer the
steps behind a save take than those of the side before any, in all; bytes are those of ``/proc/self/io`` until the
checkpoint is whole, beyond those of as many steps. The last checkpoint of each side is read again and compared.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from run import Cell, add_to, cell_options, machine_file
from sides import LR, Side, disk_bytes, stock_step
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import lading
from lading.catalog.load import load_machine
from lading.models.reference import model_class
from lading.tracing.initial import defer
from lading.units import MiB

IN_PLACE, COPIED, DCP = "in place", "copied", "dcp.save"


@dataclass
class Way:
    """One way of saving: its step, its save, and what waits until the checkpoint is whole; with what was measured.

    Attributes:
        alone: Seconds of steps before any save.
        calls, steps: Seconds of each save, and of the steps behind it.
        bytes: Read and written by each save with the steps behind it, and before by as many steps alone.
    """

    step: Callable[[dict[str, torch.Tensor]], float]
    save: Callable[[], object]
    wait: Callable[[], object]
    is_read_again: Callable[[], bool]
    alone: list[float] = field(default_factory=lambda: [])
    calls: list[float] = field(default_factory=lambda: [])
    steps: list[list[float]] = field(default_factory=lambda: [])
    bytes: list[tuple[int, int]] = field(default_factory=lambda: [])

    def run(self, side: Side, count: int) -> list[float]:
        """Make so many steps; returns the seconds of each."""
        seconds = list[float]()
        for number in range(count):
            began = time.perf_counter()
            self.step(side.batch(number))
            seconds.append(time.perf_counter() - began)
        return seconds

    def turn(self, side: Side, count: int, *, saves: bool) -> None:
        """Save, if this is a turn that does, and make so many steps."""
        before, began = disk_bytes(), time.perf_counter()
        if saves:
            self.save()
            self.calls.append(time.perf_counter() - began)
        seconds = self.run(side, count)
        self.wait()
        if saves:
            self.steps.append(seconds)
        else:
            self.alone = seconds
        after = disk_bytes()
        self.bytes.append((after[0] - before[0], after[1] - before[1]))

    def row(self) -> dict[str, Any]:
        """Medians over the saves."""
        step_s, (first, *others) = statistics.median(self.alone), self.bytes
        later = [sum(each) - step_s * len(each) for each in self.steps]
        moved = [statistics.median(each[way] for each in others) - first[way] for way in (0, 1)]
        return {
            "call_s": statistics.median(self.calls),
            "calls": self.calls,
            "step_s": step_s,
            "behind_s": statistics.median(later),
            "read_mib": moved[0] / MiB,
            "written_mib": moved[1] / MiB,
            "equal when read again": self.is_read_again(),
        }


def of_trainer(trainer: lading.Trainer, folder: Path, side: Side, graph: Any, *, in_place: bool) -> Way:
    """Way of a Trainer; reads its checkpoint again into one of its own."""

    def is_equal() -> bool:
        newest = trainer.save(folder, keep=1, in_place=in_place)
        trainer.wait_saved()
        with lading.Trainer(trainer.plan, graph, side.module(), folder=folder / "again", threads=side.threads) as other:
            other.load(newest)
            names = [name for name, _ in side.module().named_parameters()]
            keys = [f"{name}{state}" for name in names for state in ("", ".exp_avg", ".exp_avg_sq")]
            return all(torch.equal(trainer.value(key), other.value(key)) for key in keys)

    save = partial(trainer.save, folder, keep=1, in_place=in_place)
    return Way(trainer.step, save, trainer.wait_saved, is_equal)


def of_plain(side: Side, folder: Path) -> Way:
    """Way of plain PyTorch with everything in memory."""
    module = side.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    step = stock_step(module, optimizer, model_class(side.model).loss)

    def state() -> dict[str, Any]:
        return {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}

    def save() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        state_dict_saver.save(state(), checkpoint_id=folder, no_dist=True)

    def is_equal() -> bool:
        save()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        state_dict_loader.load({"model": module.state_dict()}, checkpoint_id=folder, no_dist=True)
        return all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    return Way(step, save, lambda: None, is_equal)


def measure(side: Side, plan: lading.Plan, graph: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let the ways take turns."""
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folders = {name: Path(made) / name.replace(" ", "-") for name in (IN_PLACE, COPIED, DCP)}
        ways = {DCP: of_plain(side, folders[DCP])}
        trainers = list[lading.Trainer]()
        for name in (IN_PLACE, COPIED):
            swap = folders[name] / "swap"
            trainers.append(lading.Trainer(plan, graph, side.module(), folder=swap, threads=options.threads))
            ways[name] = of_trainer(trainers[-1], folders[name], side, graph, in_place=name == IN_PLACE)
        trainers[0].check_in_place(folders[IN_PLACE])
        for turn in range(options.saves + 2):  # nothing is saved in the first two, of which one does not count
            for way in ways.values():
                way.bytes = [] if turn == 1 else way.bytes
                way.turn(side, options.steps, saves=turn > 1)
        rows = [{"way": name, **way.row()} for name, way in ways.items()]
        for trainer in trainers:
            trainer.close()
    return rows


def main() -> None:
    """Plan, measure, and add the rows to a file."""
    options = cell_options(__doc__ or "", "25%", tokens=256, threads=2, saves=7, steps=4).parse_args()
    cell = Cell(model=options.model, precision="fp32", tokens=options.tokens)
    side = cell.side("lading", options.folder, options.threads)
    torch.set_num_threads(options.threads)
    graph = lading.capture(defer(side.module).model, side.batch(0), model_class(side.model).loss)
    machine = load_machine(machine_file(options.folder, options.threads))
    plan = lading.plan(graph, machine, budget=options.budget)
    if options.only_plan:
        found: Any = [{"planned_s": plan.step_s}]
    else:
        found = measure(side, plan, graph, options)
    add_to(options, cell, rows=found)


if __name__ == "__main__":
    main()
