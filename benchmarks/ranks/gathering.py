"""Unsharding as early and as late as memory allows, over a limited network: Lading beside stock FSDP2.

    lading probe --ranks 2 --out machine.toml
    python benchmarks/ranks/gathering.py machine.toml --model llama --rate 400mbit [--rounds 2] [--json FILE]

Four minutes for a model and a rate. Lading has three budgets: "zero3", the least in which FSDP2's rule (reshard every
unit after forward and after backward) can run; "zero2", where nothing is resharded; and half way. FSDP2 reshards always
or never, or half of the blocks, with two gathered ahead: what a hand may set. Each way is a job of its own
(``network.py``), as what one has freed hides what the next takes; a round goes through all ways. What the network
carries is measured first (``probe_job``), so that predictions are of this network.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.ranks.shards import FSDP, MODELS, Model, fsdp, max_over_ranks

import lading
from lading.catalog.load import load_machine, save_machine
from lading.errors import LadingError
from lading.runtime.probe_ranks import probe_job
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.units import MiB

#: Sizes of collectives that are measured: up to those of a unit.
_SIZES = (1 << 14, 1 << 20, 1 << 23)
#: Policy that unshards as FSDP2 does.
_AS_FSDP2 = "reshard-every-unit"
#: A budget is found to this share of it.
_NEAR = 0.005
#: Steps that are not counted.
_WARM_UP = 2
_PLANNED = ("zero3", "at zero3's", "half way", "zero2")


def probe_to(path: Path, machine: str) -> None:
    """Write the machine with the network that joins the ranks of this job as it is now.

    Its hosts are of this machine, whose processors they share: plans take a rank's part.
    """
    known = load_machine(Path(machine)).with_threads()
    curves, busy = probe_job(6.0, _SIZES)
    shared = known.processes
    if shared is not None:
        shared = dataclasses.replace(shared, busy={**shared.busy, **busy})
    if dist.get_rank() == 0:
        made = dataclasses.replace(known, collectives={**known.collectives, **curves}, processes=shared)
        save_machine(made, path)
    dist.barrier()


def _fits(model: Model, budget: int) -> bool:
    try:
        model.plan("zero3", budget, policy=_AS_FSDP2, disk_budget=0)
    except LadingError:  # of any rank
        return False
    return True


def plan_all(model: Model, folder: Path) -> None:
    """Write plans as FSDP2 has it in the least budget of that, and free ones there, half way, and with all kept."""
    whole = model.plan("zero3", "100%", disk_budget=0)
    high = whole.peak_bytes["device"]
    low = high // 2
    while high - low > _NEAR * high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(model, middle) else (middle, high)
    half = (high + whole.peak_bytes["device"]) // 2
    plans = (
        model.plan("zero3", high, policy=_AS_FSDP2, disk_budget=0),
        model.plan("zero3", high, disk_budget=0),
        model.plan("zero3", half, disk_budget=0),
        whole,
    )
    for way, plan in zip(_PLANNED, plans, strict=True):
        if dist.get_rank() == 0:
            plan.save(folder / f"{way}.json")


@contextmanager
def _by_fsdp(model: Model, way: str) -> Iterator[tuple[Callable[[Any], Any], Callable[[], int]]]:
    """Give what makes a step of FSDP2, and what tells its memory beyond that of the uncut model."""
    meter, before = PeakMeter(), resident_bytes()
    step = fsdp(model.name, model.made(), *FSDP[way])
    gc.collect()
    trim()
    meter.reset()
    yield step, lambda: meter.peak_bytes() - before


@contextmanager
def _by_lading(model: Model, plan: Path) -> Iterator[tuple[Callable[[Any], Any], Callable[[], int]]]:
    with tempfile.TemporaryDirectory() as folder, model.trainer(lading.Plan.load(plan), folder) as trainer:
        yield trainer.step, lambda: trainer.peak_bytes


def train(model: Model, way: str, steps: int, folder: Path) -> None:
    """Train one way; the first rank adds the seconds of its steps, and the highest memory of any rank, to a file."""
    batches = [model.batch(step) for step in range(steps)]
    with _by_fsdp(model, way) if way in FSDP else _by_lading(model, folder / f"{way}.json") as (step, peak_bytes):
        spent: list[float] = []
        for given in batches:
            dist.barrier()
            started = time.perf_counter()
            step(given)
            spent.append(time.perf_counter() - started)
        taken = max_over_ranks(peak_bytes())
    if dist.get_rank() == 0:
        with (folder / "results").open("a") as results:
            results.write(json.dumps([way, spent[_WARM_UP:], taken]) + "\n")


def work(args: argparse.Namespace) -> None:
    """Do one rank's part of a job: probe and plan, or train one way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(args.folder)
    if args.way == "plans":
        probe_to(folder / "machine.toml", args.machine)
        plan_all(Model(args.model, str(folder / "machine.toml")), folder)
    else:
        train(Model(args.model, str(folder / "machine.toml")), args.way, args.steps, folder)
    dist.barrier()
    os._exit(0)  # now and then a thread of gloo's aborts a process of FSDP2 that ends as others do


def rows_of(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all jobs; returns a row for each way: seconds, bytes, and what was predicted of both."""
    network = [sys.executable, str(Path(__file__).with_name("network.py")), "--rate", args.rate, "--"]

    def job(way: str) -> None:
        asked = ["--model", args.model, "--steps", str(args.steps), "--folder", str(folder), "--way", way]
        subprocess.run([*network, __file__, args.machine, *asked], check=True, stdout=subprocess.DEVNULL)

    job("plans")
    for _ in range(args.rounds):
        for way in (*FSDP, *_PLANNED):
            job(way)
    results = [json.loads(line) for line in (folder / "results").read_text().splitlines()]
    rows: list[dict[str, Any]] = []
    for way in (*FSDP, *_PLANNED):
        spent = [seconds for name, each, _ in results for seconds in each if name == way]
        taken = max(taken for name, _, taken in results if name == way)
        row: dict[str, Any] = {"way": way, "step_s": statistics.median(spent), "fastest_s": min(spent), "bytes": taken}
        if way in _PLANNED:
            plan = lading.Plan.load(folder / f"{way}.json")
            row |= {"predicted_s": plan.step_s, "predicted_bytes": plan.peak_bytes["device"]}
            row |= {"budget_bytes": plan.budgets["device"]}
            row["again"] = sum("RECOMPUTE network" in line for line in plan.program)
        rows.append(row)
    return rows


def tell(rows: list[dict[str, Any]]) -> None:
    """Print the rows, and what half way gains, measured and predicted."""
    for row in rows:
        line = f"{row['way']:12} {row['step_s'] * 1e3:7.0f} ms, {row['bytes'] / MiB:6.1f} MiB"
        if "budget_bytes" in row:
            line += f", predicted {row['predicted_s'] * 1e3:.0f} and {row['predicted_bytes'] / MiB:.1f} of "
            line += f"{row['budget_bytes'] / MiB:.1f}, {row['again']} unsharded again"
        print(line, flush=True)
    of = {row["way"]: row for row in rows}
    slow, fast = of["zero3"], of["half way"]
    best = min(of[way]["step_s"] for way in FSDP)
    gain, predicted = (1 - fast[key] / slow[key] for key in ("step_s", "predicted_s"))
    print(
        f"half way takes {gain:.1%} less than zero3, predicted {predicted:.1%}; "
        f"{1 - fast['step_s'] / best:.1%} less than FSDP2 at its best"
    )


def main() -> None:
    """Print the seconds and bytes of all ways; in a job, do one rank's part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama")
    parser.add_argument("--rate", default="400mbit", help="of each host's link, in the words of tc")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", default="", help="a file for the rows")
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(args, Path(folder))
    tell(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
