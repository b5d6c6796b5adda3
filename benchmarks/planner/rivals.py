"""Lading against what others would choose, at equal budgets, as predicted for any machine of the catalog.

    python benchmarks/planner/rivals.py --models gpt-small dit-small --machines cpu rtx4090 --out results.md

Models are only captured. ``contest.py`` says who competes and how; ``measured.py`` runs the same contest on this host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from contest import MODELS, RIVALS, Case, best_of, step_within, stripped

from lading import __version__
from lading.catalog.load import load_machine
from lading.errors import PlanInfeasible
from lading.ir.machine import Machine
from lading.memory.restore import step_of
from lading.planner.api import make_plan
from lading.runtime.kernel_calls import workspace_of
from lading.units import format_seconds

_HEAD = "| model | machine | budget | Lading | bound | fastest rival / Lading | "


def rows(case: Case, machine: Machine, budgets: list[str], limit_s: float) -> Iterator[dict[str, Any]]:
    """One row a budget: predicted seconds of Lading and of each rival."""
    graph = step_of(case.graph, machine, clip_norm=0.0, master_weights=False)
    scratch = workspace_of(graph, machine.device.kind)
    for budget in budgets:
        row: dict[str, Any] = {"model": case.name, "machine": machine.name, "budget": budget, "rivals": {}}
        begin = time.process_time()
        try:
            plan = make_plan(graph, machine, budget=budget, workspace_bytes=scratch).plan
        except PlanInfeasible as error:
            row["missing_bytes"] = error.missing_bytes
            yield row
            continue
        row |= {"step_s": plan.step_s, "bound_s": plan.lower_bound_s, "plan_s": time.process_time() - begin}
        step = step_within(graph, machine, plan.budgets, plan.request.settings)
        for name, rival in RIVALS.items():
            begin = time.process_time()
            found = best_of(step, rival(step, limit_s))
            spent = time.process_time() - begin
            row["rivals"][name] = {"step_s": found.step_s if found else None, "decided_s": spent}
        yield row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    start = f"| {row['model']} | {row['machine']} | {row['budget']} "
    if "missing_bytes" in row:
        return f"{start}| does not fit: {row['missing_bytes']} bytes missing |" + " |" * (len(RIVALS) + 2)
    times = {name: rival["step_s"] for name, rival in row["rivals"].items()}
    fastest = min((s for s in times.values() if s), default=None)
    ratio = f"{fastest / row['step_s']:.3f}" if fastest else "-"
    cells = [format_seconds(s) if s else "does not fit" for s in times.values()]
    bound = format_seconds(row["bound_s"]) if row["bound_s"] else "none"
    return f"{start}| {format_seconds(row['step_s'])} | {bound} | {ratio} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--machines", nargs="*", default=["cpu", "rtx4090", "h100"])
    parser.add_argument("--budgets", nargs="*", default=["75%", "50%", "25%"])
    parser.add_argument("--ilp-seconds", type=float, default=10.0, help="time limit of each of torch's programs")
    parser.add_argument("--out", type=Path, help="append the rows here")
    options = parser.parse_args()
    head = _HEAD + " | ".join(RIVALS) + " |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    print(f"Lading {__version__}, torch {torch.__version__}\n\n" + "\n".join(lines), flush=True)
    for name in options.models:
        case = Case.of(name)
        for machine in map(stripped, map(load_machine, options.machines)):
            for row in rows(case, machine, options.budgets, options.ilp_seconds):
                print(line(row), flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(line(row) + "\n")


if __name__ == "__main__":
    main()
