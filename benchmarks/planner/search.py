"""Seconds of the search of layouts: two models on 10,240 devices, all of the space, by phase.

Processor seconds of one process with one thread: of bounds (everything but simulations), and of events. Each model runs
in a process of its own. Beside them an exhaustive search by closed forms: Calculon (Isaev et al., SC 2023) enumerates
14,984,160 executions of its 1T model on 10,240 GPUs; at the 5.5 to 12 ms that one was measured to take with its code on
such a processor, these are 23 to 50 CPU-hours.

    python benchmarks/planner/search.py                     # both models
    python benchmarks/planner/search.py gpt-1t --out FILE   # one of them, written as FILE.json and FILE.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEVICES, BATCH = 10_240, 10_240
#: Tokens of a sequence by model.
MODELS = {"gpt-1t": 2048, "deepseek-v3": 4096}
#: CPU-hours of Calculon's exhaustive search of 1T, least and most: 14,984,160 executions of 5.5 to 12 ms.
CALCULON_CPU_HOURS = (23, 50)


def measure(model: str) -> dict[str, Any]:
    """Search once in this process."""
    from lading.clusters import space_of
    from lading.ir.request import Request
    from lading.planner import layouts, refine

    asked = Request(model=model, machine="h100", seq_len=MODELS[model], devices=DEVICES, global_batch=BATCH)
    space = space_of(asked)
    events: list[float] = []
    plain = refine.refine

    def timed(*args: Any) -> refine.Refined:
        begun = time.process_time()
        found = plain(*args)
        events.append(time.process_time() - begun)
        return found

    refine.refine = layouts.refine = timed
    begun, clock = time.process_time(), time.perf_counter()
    found = layouts.find_layouts(space)
    seconds = time.process_time() - begun
    return {
        "model": model,
        "plans": found.counted,
        "bounded_one_by_one": found.evaluated,
        "simulated": len(events),
        "bounds_s": seconds - sum(events),
        "events_s": sum(events),
        "wall_s": time.perf_counter() - clock,
        "load": os.getloadavg()[0],
        "layout": str(found.winner.layout),
        "step_s": found.winner.step_s,
        "proven": found.proven,
        "rest_s": found.proof.rest_s,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | plans | bounded one by one | simulated | bounds, CPU s | events, CPU s | load | best step, s "
        "| proven |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        counts = f"{row['plans']:,} | {row['bounded_one_by_one']:,} | {row['simulated']}"
        times = f"{row['bounds_s']:.1f} | {row['events_s']:.1f} | {row['load']:.0f}"
        lines.append(f"| {row['model']} | {counts} | {times} | {row['step_s']:.3f} | {row['proven']} |")
    least, most = CALCULON_CPU_HOURS
    return "\n".join([*lines, "", f"Calculon's exhaustive search (SC 2023) of 1T: {least} to {most} CPU-hours."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--one", action="store_true", help="search in this process and print JSON")
    parser.add_argument("--out", type=Path, help="write results here as .json and .md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.models[0])))
        return
    rows: list[dict[str, Any]] = []
    for model in args.models:
        command = [sys.executable, __file__, model, "--one"]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(table(rows))
    if args.out is not None:
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
