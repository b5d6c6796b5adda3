"""Twelve small runs of stock PyTorch on one to four gloo ranks of this host, predicted: step time and peak memory.

    python benchmarks/simulator/here.py --out benchmarks/simulator/results/here_NAME_YYYYMM      # 7 minutes, quiet host

The host is probed first (``lading probe --ranks 4``; OUT.toml keeps it). Each run then trains in processes of its own
(``ranks.py``), and is predicted from its layout, its model's table and the machine file alone. What is done is kept in
OUT.json: started again, the command goes on where it stopped; ``--again`` forgets it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tools.batches import random_batch

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.product import product_s
from lading.ir.machine import Machine
from lading.ir.request import Architecture, StepRequest
from lading.ir.work import Product
from lading.models.reference import build_model, model_class
from lading.runtime.probe_sharing import PRODUCT
from lading.sim.simulate import Simulated, simulate
from lading.tracing.tabulate import module_table
from lading.units import MiB

sys.path.insert(0, str(Path(__file__).parent))
from ranks import RUNS, Run

_STACK = "torch-eager-cpu"
#: Seconds after which a run is given up.
_LONGEST_S = 300
HEAD = (
    f"{'':44}{'ranks':>6}{'MiB pred.':>10}{'meas.':>8}{'error':>8}{'s pred.':>9}{'meas.':>8}{'error':>8}"
    "   80% of the steps; host's products against the probe, before and after; CPU s"
)


def predicted(run: Run, machine: Path) -> Simulated:
    """The run simulated on a probed machine: its model is captured as a processor runs it."""
    batch = random_batch(run.model, run.sizes, rows=3, tokens=run.tokens, seed=0)
    table = module_table(
        build_model(run.model, **run.sizes),
        batch,
        model_class(run.model).loss,
        run.model,
        tokens=0 if run.model == "dit" else run.tokens,
        whole=False,
    )
    request = StepRequest(
        name=str(run),
        model=Architecture(family=run.model, symbols={}, blocks=(("block", run.sizes["num_layers"]),)),
        seq_len=run.tokens,
        machine=str(machine),
        layout=run.parsed,
        stack=stack_by_name(_STACK),
    )
    return simulate(request, table)


def probe(machine_file: Path) -> None:
    """``lading probe --ranks 4`` with one thread, as a user runs it."""
    command = [sys.executable, "-m", "lading.cli.main", "probe", "--ranks", "4"]
    command += ["--out", str(machine_file), "--folder", str(machine_file.parent)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=2 * _LONGEST_S)


def measured(number: int, seconds: float) -> dict[str, Any]:
    """A run in fresh processes: the median step of the slowest rank, the largest peak of any.

    Raises:
        RuntimeError: it failed or took too long; its last words are in the message.
    """
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "ranks.py"), str(number), str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S, env=environment)
    if done.returncode:
        raise RuntimeError(f"{RUNS[number]} failed: {done.stderr[-2000:]}")
    ranks: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    slowest = max(ranks, key=lambda rank: median(rank["wall_s"]))
    wall = sorted(slowest["wall_s"])
    return {
        "steps": len(wall),
        "measured_s": median(wall),
        "spread_s": [wall[len(wall) // 10], wall[-1 - len(wall) // 10]],
        "processor_s": sum(median(rank["processor_s"]) for rank in ranks),
        "measured_bytes": max(rank["peak_bytes"] for rank in ranks),
        "kernels_s": ranks[0]["kernels_s"],
    }


def drift(found: dict[str, Any], ranks: int, machine: Machine) -> list[float]:
    """How many times longer the host's products took before and after a run than its probe says."""
    assert machine.processes is not None
    each = product_s(Product(*PRODUCT), "float32", machine.device) * machine.processes.slower("products", ranks)
    return [kernels["products"] / each for kernels in found["kernels_s"]]


def compared(number: int, found: dict[str, Any], machine_file: Path, machine: Machine) -> dict[str, Any]:
    """A run's measured figures beside the predicted."""
    run = RUNS[number]
    simulated = predicted(run, machine_file)
    return {
        "number": number,
        "name": str(run),
        "ranks": run.parsed.devices,
        **found,
        "predicted_s": simulated.step.step_s,
        "predicted_bytes": simulated.peak_bytes,
        "shares_s": simulated.step.shares_s,
        "drift": drift(found, run.parsed.devices, machine),
    }


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    memory, seconds = (row[f"predicted_{x}"] / row[f"measured_{x}"] - 1 for x in ("bytes", "s"))
    low, high = row["spread_s"]
    before, after = row["drift"]
    return (
        f"{row['name']:44}{row['ranks']:6}{row['predicted_bytes'] / MiB:10.1f}{row['measured_bytes'] / MiB:8.1f}"
        f"{memory:+8.1%}{row['predicted_s']:9.3f}{row['measured_s']:8.3f}{seconds:+8.1%}   {low:.3f} to {high:.3f}, "
        f"{row['steps']} steps; {before:.2f}, {after:.2f}; {row['processor_s']:.2f}"
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """How many runs are within the goals, the worst, and how many are once the host's own drift is taken out."""
    memory = [abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows]
    seconds = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    steady = [abs(row["predicted_s"] * sum(row["drift"]) / 2 / row["measured_s"] - 1) for row in rows]
    return (
        f"peak memory within 5%: {sum(e <= 0.05 for e in memory)} of {len(rows)}, worst {max(memory):.1%}; "
        f"step time within 10%: {sum(e <= 0.1 for e in seconds)} of {len(rows)}, median {median(seconds):.1%}, worst "
        f"{max(seconds):.1%}; at the speed that products had beside each run: {sum(e <= 0.1 for e in steady)}, median "
        f"{median(steady):.1%}, worst {max(steady):.1%}"
    )


def report(rows: list[dict[str, Any]], machine: Machine, out: Path) -> None:
    """Print all rows and write them beside OUT.json."""
    about = f"{machine.host_id}, one thread a rank, torch {torch.__version__}, gloo, machine probed {machine.date}"
    text = "\n".join([about, HEAD, *map(line, rows), verdict(rows)])
    print(text)
    out.with_suffix(".txt").write_text(text + "\n")


def main() -> None:
    """Parse the command line; probe, run what is not done, predict, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix: .json, .txt, .toml are written")
    parser.add_argument("--seconds", type=float, default=5.0, help="training time of each run")
    parser.add_argument(
        "--machine", type=Path, help="a machine file probed with --ranks; without it this host is probed"
    )
    parser.add_argument("--only", type=int, nargs="+", default=range(len(RUNS)), help="numbers of runs")
    parser.add_argument("--again", action="store_true", help="forget what is done")
    options = parser.parse_args()
    started = time.perf_counter()
    kept = options.out.with_suffix(".json")
    before: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() and not options.again else {}
    machine_file = options.machine or options.out.with_suffix(".toml")
    if not machine_file.is_file() or (options.again and not options.machine):
        probe(machine_file)
        before = {}
    machine = load_machine(machine_file)
    done: dict[str, Any] = before.get("measured", {})
    about = {"host": machine.host_id, "torch": torch.__version__, "python": platform.python_version()}
    for number in options.only:
        if str(number) not in done:
            print(f"{number + 1} of {len(RUNS)}: {RUNS[number]}", flush=True)
            done[str(number)] = measured(number, options.seconds)
            kept.write_text(json.dumps({**about, "measured": done}, indent=1) + "\n")
    rows = [compared(number, done[str(number)], machine_file, machine) for number in options.only]
    report(rows, machine, options.out)
    kept.write_text(json.dumps({**about, "measured": done, "runs": rows}, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
