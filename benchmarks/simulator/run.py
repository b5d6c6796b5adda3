"""Speed of the simulator: events per second beside other engines, and how cost grows.

    python benchmarks/simulator/run.py --out benchmarks/simulator/results/speed_NAME_YYYYMM

simpy takes part if it is installed (``pip install lading[rivals]``). One thread computes; drawing jitter of a cluster
has another. CPU seconds count beside wall seconds, as the latter on a shared host measure its other users.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tools.pipelines import PipelineSeconds, simulate_pipeline

from lading.clusters import step_of
from lading.ir.action import Work
from lading.ir.request import Request
from lading.ir.schedules import schedule
from lading.report.perfetto import write_trace
from lading.sim.cluster import Stretches, simulate_cluster
from lading.sim.noise import Noise
from lading.sim.simulate import simulate
from lading.sim.traces import rank_timeline

sys.path.insert(0, str(Path(__file__).parent))
from engines import ENGINES
from stages import job_of

#: Kind, ranks, chunks, micro-batches.
Pipeline = tuple[str, int, int, int]
SMALL: Pipeline = ("1f1b", 8, 1, 64)
LARGE: Pipeline = ("interleaved", 16, 8, 128)

#: Model, devices and layout of predictions, on H100.
PREDICTED = (
    ("llama3-70b", 64, "tp8,zero3,gb512,recompute=full"),
    ("llama3-405b", 16384, "tp8,cp2,pp16,sp,zero1,gb2048"),
    ("deepseek-v3", 2048, "pp16,ep64,gb15360"),
)


def uneven(case: Pipeline) -> tuple[Any, PipelineSeconds, int]:
    """A schedule, seconds that differ by stage, and its events: actions and sends."""
    plan = schedule(*case)
    step = 1.0 + np.arange(plan.stages) % 3 / 20
    seconds = PipelineSeconds(forward=step, backward=2 * step, send_forward=0.05, send_backward=0.05)
    return plan, seconds, sum(len(order) for order in plan.orders) + 2 * (plan.stages - 1) * plan.micro_batches


def timed(work: Callable[[], Any], repeats: int) -> tuple[list[float], list[float], Any]:
    """CPU and wall seconds of each repeat after one that does not count, and the last result."""
    result = work()
    cpu_s, wall_s = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    return cpu_s, wall_s, result


def row(part: str, case: str, events: int, repeats: int, work: Callable[[], Any]) -> dict[str, Any]:
    cpu_s, wall_s, result = timed(work, repeats)
    found = {
        "part": part,
        "case": case,
        "events": events,
        "cpu_s": median(cpu_s),
        "cpu_least_s": min(cpu_s),
        "cpu_most_s": max(cpu_s),
        "wall_s": median(wall_s),
        "events_per_cpu_s": events / median(cpu_s),
        "result": result,
    }
    print(f"{part:10} {case:44} {events:12,} events {found['cpu_s']:9.4f} CPU s {found['wall_s']:9.4f} s", flush=True)
    return found


def engines(repeats: int) -> list[dict[str, Any]]:
    """Time pipelines on every engine; times they predict must agree."""
    rows = []
    for case in (SMALL, LARGE):
        plan, seconds, events = uneven(case)
        mine = []
        for name, engine in ENGINES.items():
            if name == "simpy" and find_spec("simpy") is None:
                print("simpy is not installed: left out", file=sys.stderr)
                continue
            label = f"{name}, {case[0]} {'x'.join(map(str, case[1:]))}"
            mine.append(row("engines", label, events, repeats, partial(engine, plan, seconds)))
        if max(abs(r["result"] / mine[0]["result"] - 1) for r in mine) > 1e-9:
            raise SystemExit(f"engines disagree on {case}: {[r['result'] for r in mine]}")
        rows += mine
    return rows


def growth(repeats: int) -> list[dict[str, Any]]:
    """One size of a pipeline at a time."""
    cases: list[tuple[str, Pipeline]] = [
        *(("ranks", ("interleaved", ranks, 4, 128)) for ranks in (4, 8, 16, 32, 64)),
        *(("layers", ("interleaved", 16, chunks, 128)) for chunks in (1, 2, 4, 8, 16)),
        *(("batches", ("interleaved", 16, 4, batches)) for batches in (32, 64, 128, 256, 512)),
        *(("kinds", (kind, 16, chunks, 128)) for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))),
    ]
    rows = []
    for part, case in cases:
        plan, seconds, events = uneven(case)
        label = f"{case[0]} {'x'.join(map(str, case[1:]))}"
        rows.append(row(part, label, events, repeats, lambda p=plan, s=seconds: simulate_pipeline(p, s).makespan_s))
    return rows


def whole(repeats: int) -> list[dict[str, Any]]:
    """A large pipeline with everything: schedule made anew, events, timeline of all ranks, trace written."""
    _, seconds, events = uneven(LARGE)

    def everything() -> int:
        schedule.cache_clear()
        timeline = rank_timeline(simulate_pipeline(schedule(*LARGE), seconds).times)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace"
            write_trace(path, [timeline])
            return path.stat().st_size

    return [row("whole", f"schedule to trace, {LARGE[0]} {'x'.join(map(str, LARGE[1:]))}", events, repeats, everything)]


def predictions(repeats: int) -> list[dict[str, Any]]:
    """A step with its explanation; each repeat has a sequence length of its own, so that no number is known before."""
    rows = []
    for model, devices, layout in PREDICTED:
        question = Request(model=model, machine="h100", devices=devices, layout=layout)
        request, table = step_of(question)
        lengths = count(4096, 256)

        def predict(request: Any = request, table: Any = table, lengths: Any = lengths) -> float:
            return simulate(dataclasses.replace(request, seq_len=next(lengths)), table).prediction.step_s

        rows.append(row("prediction", f"{model} on {devices:,}: {layout}", 1, repeats, predict))
    return rows


def clusters(repeats: int, most: int) -> list[dict[str, Any]]:
    """All ranks with jitter, a straggler and a slow link; 512 actions of 20 stretches and 20 collectives a rank."""
    work = {
        Work.FORWARD: Stretches((1e-3,) * 20, (1e-4,) * 20),
        Work.BACKWARD: Stretches((2e-3,) * 20, (1e-4,) * 20),
    }
    noise = Noise(jitter=0.05, spread=0.01, slow_ranks={77: 1.2}, slow_links={5: 3.0}, seed=1)
    rows = []
    for replicas in (5, 20, 80, 320):
        job = job_of(schedule("interleaved", 16, 8, 32), work, group=8, replicas=replicas, reduce_s=0.01)
        if job.ranks > most:
            continue
        events = job.ranks * 512 * 40
        label = f"{job.ranks:,} ranks of {events // job.ranks:,} events"
        rows.append(row("clusters", label, events, repeats, lambda j=job: simulate_cluster(j, noise).digest))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| part | case | events | CPU s, median | least - most | wall s | million events a CPU s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['part']} | {r['case']} | {r['events']:,} | {r['cpu_s']:.4f} | {r['cpu_least_s']:.4f} - "
            f"{r['cpu_most_s']:.4f} | {r['wall_s']:.4f} | {r['events_per_cpu_s'] / 1e6:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--most-ranks", type=int, default=10240, help="largest cluster")
    parser.add_argument("--out", type=Path, help="results without a suffix: .json and .md are written")
    settings = parser.parse_args()
    load = os.getloadavg()[0]
    rows = (
        engines(settings.repeats) + growth(settings.repeats) + whole(settings.repeats) + predictions(settings.repeats)
    )
    rows += clusters(min(settings.repeats, 3), settings.most_ranks)
    names = ("numpy", "simpy") if find_spec("simpy") else ("numpy",)
    about = {
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": load,
        "repeats": settings.repeats,
    }
    if settings.out:
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        settings.out.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        settings.out.with_suffix(".md").write_text(f"{json.dumps(about)}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
