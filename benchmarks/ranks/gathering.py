"""Unsharding as early and as late as memory allows, over a limited network: Lading beside stock FSDP2.

    lading probe --ranks 2 --out machine.toml
    python benchmarks/ranks/network.py --rate 400mbit -- benchmarks/ranks/gathering.py machine.toml --model llama
    python benchmarks/ranks/network.py -- benchmarks/ranks/gathering.py machine.toml --model llama --peak "FSDP2 half"

Two minutes for a model and a rate. Lading has three budgets: "zero3", the least in which FSDP2's rule (reshard every
unit after forward and after backward) can run; "zero2", where nothing is resharded; and half way. FSDP2 reshards
always or never, or half of the blocks, with two blocks gathered ahead: what a hand may set. Ways train in turns of one
step. What the network carries is measured first (``probe_job``), so that the predictions are of this network. Memory is
measured in a launch for each way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.ranks.shards import FSDP, MODELS, Model, fsdp, in_turns, peak

import lading
from lading.catalog.load import load_machine
from lading.errors import LadingError
from lading.ir.machine import Machine
from lading.runtime.probe_ranks import probe_job
from lading.units import MiB

#: Sizes of collectives that are measured: up to those of a unit.
_SIZES = (1 << 14, 1 << 20, 1 << 23)
#: Policy that unshards as FSDP2 does.
_AS_FSDP2 = "reshard-every-unit"
#: A budget is found to this share of it.
_NEAR = 0.005


@dataclass(frozen=True)
class Row:
    """Result of one way: seconds of a step, and what was predicted of it, 0 where nothing was."""

    way: str
    step_s: float
    predicted_s: float = 0.0
    budget_bytes: int = 0
    predicted_bytes: int = 0
    unsharded_again: int = 0


def here(path: str) -> Machine:
    """Machine of a file, with the network that joins the ranks of this job as it is now."""
    machine = load_machine(Path(path))
    curves, busy = probe_job(6.0, _SIZES)
    shared = machine.processes
    if shared is not None:
        shared = dataclasses.replace(shared, busy={**shared.busy, **busy})
    return dataclasses.replace(machine, collectives={**machine.collectives, **curves}, processes=shared)


def _fits(model: Model, budget: int) -> bool:
    try:
        model.plan("zero3", budget, policy=_AS_FSDP2, disk_budget=0)
    except LadingError:  # of any rank
        return False
    return True


def plans_of(model: Model) -> dict[str, lading.Plan]:
    """Plan a model as FSDP2 has it in the least budget of that, and freely there, half way, and with all kept."""
    whole = model.plan("zero3", "100%", disk_budget=0)
    high = whole.peak_bytes["device"]
    low = high // 2
    while high - low > _NEAR * high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(model, middle) else (middle, high)
    half = (high + whole.peak_bytes["device"]) // 2
    return {
        "zero3": model.plan("zero3", high, policy=_AS_FSDP2, disk_budget=0),
        "at zero3's": model.plan("zero3", high, disk_budget=0),
        "half way": model.plan("zero3", half, disk_budget=0),
        "zero2": whole,
    }


def rows_of(model: Model, steps: int) -> list[Row]:
    """Train a model in all ways in turns."""
    plans = plans_of(model)
    with ExitStack() as stack:
        ways = {way: fsdp(model.name, model.made(), *setting) for way, setting in FSDP.items()}
        for way, plan in plans.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ways[way] = stack.enter_context(model.trainer(plan, folder)).step
        spent = in_turns(model, ways, steps)
    rows: list[Row] = []
    for way, times in spent.items():
        row = Row(way, statistics.median(times))
        if way in plans:
            plan = plans[way]
            again = sum("RECOMPUTE network" in line for line in plan.program)
            device = plan.budgets["device"], plan.peak_bytes["device"]
            row = Row(way, row.step_s, plan.step_s, *device, again)
        rows.append(row)
    return rows


def tell(rows: list[Row]) -> None:
    """Print the rows, and what half way gains, measured and predicted."""
    for row in rows:
        line = f"{row.way:12} {row.step_s * 1e3:7.0f} ms"
        if row.predicted_s:
            line += f", predicted {row.predicted_s * 1e3:.0f}, {row.predicted_bytes / MiB:.1f} MiB of "
            line += f"{row.budget_bytes / MiB:.1f}, {row.unsharded_again} unsharded again"
        print(line, flush=True)
    of = {row.way: row for row in rows}
    slow, fast = of["zero3"], of["half way"]
    print(
        f"half way takes {1 - fast.step_s / slow.step_s:.1%} less than zero3, predicted "
        f"{1 - fast.predicted_s / slow.predicted_s:.1%}; {1 - fast.step_s / min(of[way].step_s for way in FSDP):.1%} "
        "less than FSDP2 at its best"
    )


def main() -> None:
    """Print the seconds of all ways, or the memory of one, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peak", default="", help='a way: "FSDP2 half", "half way"')
    parser.add_argument("--json", default="", help="a file for the rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = Model(args.model, here(args.machine))
    if args.peak:
        taken = peak(model, args.peak if args.peak in FSDP else plans_of(model)[args.peak])
        if dist.get_rank() == 0:
            print(f"{args.model} {args.peak}: {taken}")
    else:
        rows = rows_of(model, args.steps)
        if dist.get_rank() == 0:
            tell(rows)
            if args.json:
                Path(args.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
