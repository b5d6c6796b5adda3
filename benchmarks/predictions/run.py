"""Predictions against what happens: peak memory and step time of planned training runs.

The host is probed, and again every few runs, as its speed changes within minutes. Each run captures, plans, trains and
measures in a process of its own, one after another.

    python benchmarks/predictions/run.py --threads 2
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tools.batches import random_batch

from lading.catalog.load import load_machine, save_machine
from lading.config import ModelConfig
from lading.grouping import Matrices
from lading.ir.host_speed import measured_speed
from lading.ir.machine import TIER_SPEEDS
from lading.ir.timeline import Timeline
from lading.memory.restore import program_of
from lading.models.reference import model_class
from lading.optim.adamw import AdamW
from lading.prepare import plan
from lading.run import build
from lading.runtime.host import host_id
from lading.runtime.probe import probe
from lading.runtime.resident import trim
from lading.sim.device_step import simulate
from lading.tracing.initial import defer
from lading.tracing.trace import capture
from lading.trainer import Trainer
from lading.units import GiB, MiB


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run; ``share`` of what keeping everything needs is its budget.

    Decompositions of ``matrices`` other than Muon are due every third update, so that a short run has some.
    """

    model: str
    sizes: dict[str, Any]
    share: float
    batch_size: int = 2
    sequence_length: int = 256
    accumulation: int = 1
    clip_norm: float = 0.0
    precision: str = "fp32"
    matrices: str = ""

    def __str__(self) -> str:
        extras = [f"clip {self.clip_norm:g}"] if self.clip_norm else []
        extras += [f"{self.accumulation} micro-batches"] if self.accumulation > 1 else []
        extras += [f"dropout {self.sizes['dropout']:g}"] if self.sizes.get("dropout") else []
        extras += ["bf16"] if self.precision == "bf16" else []
        extras += [self.matrices] if self.matrices else []
        return ", ".join([f"{self.model} at {self.share:.0%}", *extras])


_GPT = {"num_layers": 4, "dim": 512, "num_heads": 8, "vocab_size": 8192, "max_seq_len": 256}
_LLAMA = {"num_layers": 4, "dim": 512, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 8192, "max_seq_len": 256}
_MOE = {"num_layers": 2, "dim": 256, "num_heads": 4, "vocab_size": 4096, "max_seq_len": 256}
_DIT = {"num_layers": 6, "dim": 384, "num_heads": 6}
RUNS = (
    Run(model="gpt", sizes=_GPT, share=1.0),
    Run(model="gpt", sizes={**_GPT, "dropout": 0.1}, share=0.5, clip_norm=1.0),
    Run(model="gpt", sizes=_GPT, share=0.3, accumulation=2),
    Run(model="llama", sizes=_LLAMA, share=1.0, clip_norm=1.0),
    Run(model="llama", sizes=_LLAMA, share=0.5),
    Run(model="llama", sizes=_LLAMA, share=0.3, accumulation=2, clip_norm=1.0),
    Run(model="moe", sizes=_MOE, share=1.0, accumulation=2),
    Run(model="moe", sizes=_MOE, share=0.5, clip_norm=1.0),
    Run(model="moe", sizes=_MOE, share=0.3),
    Run(model="dit", sizes={**_DIT, "dropout": 0.1}, share=1.0, batch_size=8),
    Run(model="dit", sizes=_DIT, share=0.5, batch_size=8, clip_norm=1.0),
    Run(model="llama", sizes={**_LLAMA, "num_layers": 2}, share=0.5, precision="bf16", clip_norm=1.0),
    Run(model="gpt", sizes=_GPT, share=1.0, clip_norm=1.0, matrices="muon"),
    Run(model="llama", sizes=_LLAMA, share=0.5, accumulation=2, matrices="muon"),
    Run(model="llama", sizes={**_LLAMA, "num_layers": 2}, share=0.5, precision="bf16", clip_norm=1.0, matrices="muon"),
    Run(model="gpt", sizes=_GPT, share=0.5, matrices="soap"),
    Run(model="gpt", sizes=_GPT, share=0.5, matrices="shampoo"),
    Run(model="gpt", sizes={**_GPT, "num_layers": 6, "dim": 320, "num_heads": 5}, share=1.0, batch_size=4),
    Run(model="llama", sizes={**_LLAMA, "num_layers": 2, "dim": 768, "num_heads": 12}, share=0.6),
)  # fmt: skip


#: Steps that are not looked at, and those behind them that say how fast the host is, as to ``lading train``.
_SKIPPED, _LOOKED_AT = 2, 7


def batch_of(run: Run, number: int) -> dict[str, torch.Tensor]:
    """Random tokens or images, the same for the same number."""
    return random_batch(run.model, run.sizes, rows=run.batch_size, tokens=run.sequence_length, seed=number)


def _matrices(name: str) -> Matrices | None:
    if not name:
        return None
    return Matrices(rule=name, lr=1e-3, settings={} if name == "muon" else {"frequency": 3})


def measure(run: Run, machine_file: Path, folder: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Plan a run for the machine, train it for ``seconds`` and compare."""
    torch.set_num_threads(threads)
    machine = load_machine(machine_file)
    initial = defer(lambda: build(ModelConfig(name=run.model, sizes=run.sizes), run.precision))
    graph = capture(initial.model, batch_of(run, 0), model_class(run.model).loss, accumulation=run.accumulation)
    started = time.perf_counter()
    made = plan(
        graph,
        machine,
        budget=f"{run.share:%}",
        disk_budget=8 * GiB,
        clip_norm=run.clip_norm,
        master_weights=run.precision == "bf16",
        matrices=_matrices(run.matrices),
    )
    planned_s = time.perf_counter() - started
    program = program_of(made, graph)
    with Trainer(made, graph, None, optimizer=AdamW(), folder=folder, threads=threads, program=program) as trainer:
        initial.materialize(0, trainer.set_value)
        trim()
        times, timelines = _trained(run, trainer, seconds)
        step_peak, timeline = trainer.peak_bytes, trainer.timeline()
        trainer.save(folder / "saved", keep=1)
        peak = trainer.peak_bytes
    steady = sorted(times[_SKIPPED:])
    later = times[_SKIPPED + len(timelines) :]
    speed = measured_speed(program, simulate(program, machine), timelines)
    return {
        "run": dataclasses.asdict(run),
        "name": str(run),
        "plan_s": planned_s,
        "steps": len(times),
        "predicted_s": made.step_s,
        "measured_s": median(steady),
        "spread_s": [steady[len(steady) // 10], steady[-1 - len(steady) // 10]],
        "speed": dataclasses.asdict(speed),
        "then_predicted_s": simulate(program, machine.at_speed(speed)).duration_s,
        "later_s": median(later) if later else None,
        "predicted_bytes": program.predicted_bytes,
        "arena_bytes": program.arena_bytes,
        "workspace_bytes": program.workspace_bytes,
        "overhead_bytes": program.overhead_bytes,
        "budget_bytes": program.budgets["device"],
        "measured_step_bytes": step_peak,
        "measured_bytes": peak,
        "measured_sample_bytes": max((size for _, size in timeline.resident), default=0),
    }


def _trained(run: Run, trainer: Trainer, seconds: float) -> tuple[list[float], list[Timeline]]:
    """Train for so long; returns the seconds of every step, and the timelines of those that are looked at."""
    times, timelines = list[float](), list[Timeline]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        number = len(times) * run.accumulation
        batches = [batch_of(run, number + micro) for micro in range(run.accumulation)]
        started = time.perf_counter()
        trainer.step(batches)
        times.append(time.perf_counter() - started)
        if _SKIPPED < len(times) <= _SKIPPED + _LOOKED_AT:
            timelines.append(trainer.timeline())
    return times, timelines


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    memory = found["predicted_bytes"] / found["measured_bytes"] - 1
    seconds = found["predicted_s"] / found["measured_s"] - 1
    low, high = found["spread_s"]
    return (
        f"{found['name']:48}{found['predicted_bytes'] / MiB:9.1f}{found['measured_bytes'] / MiB:9.1f}{memory:+7.1%}"
        f"{found['predicted_s']:9.3f}{found['measured_s']:9.3f}{seconds:+7.1%}   {low:.3f} to {high:.3f}, "
        f"{found['steps']} steps{_describe_later_steps(found)}"
    )


def _describe_later_steps(found: dict[str, Any]) -> str:
    """What the steps behind those looked at were predicted to take at the speed that those had."""
    if found["later_s"] is None:
        return ""
    error = found["then_predicted_s"] / found["later_s"] - 1
    factors = {"products": found["speed"]["products"], "others": found["speed"]["others"], **found["speed"]["tiers"]}
    words = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    return (
        f"; at the speed of steps 3 to 9 ({words}) {found['then_predicted_s']:.3f} {found['later_s']:.3f}{error:+7.1%}"
    )


HEAD = f"{'':48}{'MiB pred.':>9}{'meas.':>9}{'error':>7}{'s pred.':>9}{'meas.':>9}{'error':>7}   80% of the steps"


def verdict(found: list[dict[str, Any]]) -> str:
    """How many runs are within the goals, and the worst."""
    memory = [abs(f["predicted_bytes"] / f["measured_bytes"] - 1) for f in found]
    above = sum(f["measured_bytes"] > f["budget_bytes"] for f in found)
    seconds = [abs(f["predicted_s"] / f["measured_s"] - 1) for f in found]
    then = [abs(f["then_predicted_s"] / f["later_s"] - 1) for f in found if f["later_s"] is not None]
    return (
        f"peak memory within 5%: {sum(e <= 0.05 for e in memory)} of {len(found)}, worst {max(memory):.1%}, "
        f"above its budget {above}; "
        f"step time within 10%: {sum(e <= 0.1 for e in seconds)} of {len(found)}, worst {max(seconds):.1%}"
        + (f"; later steps at the speed of the first: {sum(e <= 0.1 for e in then)} of {len(then)}" if then else "")
    )


def child(number: int, machine: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run ``measure`` in a fresh process.

    Raises:
        RuntimeError: it failed; its last words are in the message.
    """
    command = [sys.executable, "-W", "ignore", __file__, "--one", str(number), "--machine", str(machine)]
    command += ["--folder", str(folder), "--threads", str(options.threads), "--seconds", str(options.seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{RUNS[number]} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _write(options: argparse.Namespace, tiers: list[dict[str, float]], found: list[dict[str, Any]]) -> None:
    """Write what there is so far: a benchmark that is stopped keeps the runs that it has made."""
    about = {
        "host": host_id(),
        "disk": tiers,
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    options.json.write_text(json.dumps({**about, "runs": found}, indent=1) + "\n")


def main() -> None:
    """Parse the command line; probe, run all, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=12.0, help="training time of each run")
    parser.add_argument("--probe-seconds", type=float, default=50.0)
    parser.add_argument("--probe-every", type=int, default=4, help="runs after which the host is probed anew")
    parser.add_argument("--machine", type=Path, help="a machine file; without it this host is probed")
    parser.add_argument("--folder", type=Path, default=Path(), help="where swap files may lie")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(RUNS)), help="numbers of runs")
    parser.add_argument("--one", type=int, help="run this one here and print it as JSON")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        run = RUNS[options.one]
        print(json.dumps(measure(run, options.machine, options.folder, options.threads, options.seconds)))
        return
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        machine = options.machine or folder / "machine.toml"
        print(f"{host_id()}, {options.threads} threads, torch {torch.__version__}\n{HEAD}")
        found: list[dict[str, Any]] = []
        tiers: list[dict[str, float]] = []
        for at, number in enumerate(options.only):
            if not options.machine and at % options.probe_every == 0:
                measured = probe(folder=folder, threads=options.threads, seconds=options.probe_seconds, device="cpu")
                save_machine(measured, machine)
                tiers.append({key: getattr(measured.tiers[-1], key) for key in TIER_SPEEDS})
            found.append(child(number, machine, folder, options))
            print(line(found[-1]), flush=True)
            if options.json:
                _write(options, tiers, found)
    print(f"{verdict(found)}\n{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
