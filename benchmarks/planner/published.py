"""Published set-ups against the layouts that ``lading plan --model`` finds for them, both as simulated.

    python benchmarks/planner/published.py benchmarks/validation/measurements.jsonl --most 40 [--out results.json]

A set-up is a model, a machine, devices, sequences of a step and their length, a precision and a software stack; of
several published layouts of one set-up the one that is fastest as simulated counts. The plan is found with the same
stack, under the memory of the machine, while a published layout may not fit as predicted, which is said.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from lading.errors import LadingError, PlanInfeasible
from lading.ir.request import Request
from lading.planner.layouts import find_layouts
from lading.planner.space import Ask
from lading.sim.simulate import Simulated, machine_of, simulate
from lading.validate.requests import request_of
from lading.validate.rows import read_rows


def setups(files: list[Path]) -> dict[str, Simulated]:
    """The fastest published layout of each set-up, as simulated."""
    rows, _ = read_rows(files)
    found: dict[str, Simulated] = {}
    for row in rows:
        try:
            request = request_of(row)
            if request.task not in ("pretrain", "sft") or request.layout.offload not in ((), ("optimizer",)):
                continue
            simulated = simulate(request)
        except LadingError:
            continue
        key = name_of(request)
        if key not in found or simulated.step.step_s < found[key].step.step_s:
            found[key] = simulated
    return found


def name_of(request: Request) -> str:
    """What makes a set-up."""
    model, layout = request.model, request.layout
    blocks = "+".join(f"{count} {kind}" for kind, count in model.blocks)
    sizes = f"h{model.symbols.get('h', 0)}"
    precision = f"{layout.precision} {request.linear_dtype}".strip()
    return (
        f"{model.family} {blocks} {sizes}, {layout.devices} x {request.machine}, {layout.global_batch} x "
        f"{request.seq_len}, {precision}, {request.stack.name}"
    )


def compare(published: Simulated) -> dict[str, Any]:
    """The plan found for a set-up, next to the published layout."""
    request = published.request
    plain = dataclasses.replace(request.layout, recompute_modules=())
    ask = Ask(
        request=dataclasses.replace(request, layout=plain, schedule_detail="", edge_layers_fewer=0),
        table=published.table,
        machine=machine_of(request),
        devices=request.layout.devices,
        global_batch=request.layout.global_batch,
        top=1,
    )
    row: dict[str, Any] = {
        "published": str(request.layout),
        "published_s": published.step.step_s,
        "published_fits": published.prediction.fits,
    }
    begun = time.process_time()
    try:
        found = find_layouts(ask)
    except PlanInfeasible as error:
        return row | {"found": "", "ratio": None, "why": str(error).splitlines()[0]}
    return row | {
        "found": str(found.winner.layout),
        "found_s": found.winner.step_s,
        "ratio": found.winner.step_s / published.step.step_s,
        "proven": found.proven,
        "plans": found.counted,
        "cpu_s": round(time.process_time() - begun, 1),
    }


def main() -> int:
    """Print one line a set-up, and the exceptions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=0, help="set-ups, spread evenly over all; 0 for all")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    every = sorted(setups(asked.files).items())
    step = max(1, -(-len(every) // asked.most)) if asked.most else 1
    rows: list[dict[str, Any]] = []
    for name, published in every[::step]:
        rows.append({"setup": name} | compare(published))
        ratio = rows[-1]["ratio"]
        print(f"{'none fits' if ratio is None else f'{ratio:9.3f}'}  {name}", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps({"setups": len(every), "rows": rows}, indent=1) + "\n")
    good = [row for row in rows if row["ratio"] is not None and row["ratio"] <= 1.0 + 1e-9]
    print(f"{len(good)} of {len(rows)} set-ups: the plan found is at least as fast as the published layout")
    for row in rows:
        if row not in good:
            fits = "fits" if row["published_fits"] else "does not fit as predicted"
            print(
                f"exception: {row['setup']}: published {row['published']} ({fits}), found {row['found'] or 'nothing'}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
