"""Does a slow rank cost what ``lading simulate --straggler`` predicts, and is it named? Models over ranks of this host.

    lading probe --ranks 2 --out machine.toml
    python benchmarks/ranks/stragglers.py machine.toml [--only pp2] [--json FILE]

Two minutes. Each case is a launch of torchrun with a thread a rank. One rank sleeps between its operations until it has
computed ``FACTOR`` times as long as it does by itself, in every other step, so that the host is the same in both kinds
of steps; then in all steps of a second trainer, whose ranks are asked who is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch

import lading
from lading import trainer as trainers
from lading.catalog.load import machine_from_dict
from lading.ir.action import Action
from lading.ir.layout import parse_layout
from lading.ir.program import COMPUTE_STREAM
from lading.ir.timeline import Timeline
from lading.memory.restore import programs_of
from lading.models.reference import build_model, model_class
from lading.runtime.executor import Executor
from lading.sim.device_step import straggler_step_s

_SIZES = {"num_layers": 6, "dim": 384, "num_heads": 6, "vocab_size": 4096, "max_seq_len": 64}
#: Layout, micro-batches of a replica, and the rank that is slow.
CASES = (("dp2", 1, 1), ("dp2,zero3", 1, 0), ("pp2", 4, 0), ("pp2", 4, 1))
FACTOR = 1.5
_PAIRS, _WARM_UP, _SLOW_STEPS = 10, 3, 8
#: Seconds that a rank sleeps at once, at least: shorter sleeps last too long.
_SHORTEST_S = 1e-3


@dataclass(frozen=True)
class Row:
    """Result of one case: seconds of a step with and without a slow rank, and which rank was named, with its factor."""

    case: str
    slow: int
    predicted_s: float
    predicted_slow_s: float
    step_s: float
    slow_step_s: float
    named: int | None
    factor: float

    def __str__(self) -> str:
        named = "no rank named" if self.named is None else f"rank {self.named} named, {self.factor:.2f} times as long"
        return (
            f"{self.case:14} rank {self.slow} slow: {self.slow_step_s / self.step_s - 1:+6.1%} measured "
            f"({self.step_s * 1e3:.0f} -> {self.slow_step_s * 1e3:.0f} ms), "
            f"{self.predicted_slow_s / self.predicted_s - 1:+6.1%} predicted; {named}"
        )


class Sleeper:
    """Jitter of an executor that sleeps between operations, in proportion to what each took."""

    def __init__(self) -> None:
        self.enabled = False
        self.seconds: dict[int, float] = {}
        self._due_s = 0.0

    def learn(self, plain: Timeline) -> None:
        """Take each operation's seconds from a step without sleep."""
        self.seconds = {e.action: e.end_s - e.start_s for e in plain.events if e.stream == COMPUTE_STREAM}

    def __call__(self, action: Action) -> None:
        if not self.enabled:
            return
        self._due_s += (FACTOR - 1) * self.seconds.get(action.id, 0.0)
        if self._due_s >= _SHORTEST_S:
            started = time.perf_counter()
            time.sleep(self._due_s)
            self._due_s -= time.perf_counter() - started


def train(layout: str, micro_batches: int, slow: int, machine: str) -> Row | None:
    """Plan and train one case; called on all ranks, the first gets the row."""
    rank, replica = dist.get_rank(), parse_layout(layout).replica(dist.get_rank())

    def batches(step: int) -> list[Any]:
        seeds = (1000 * step + 10 * replica + number for number in range(micro_batches))
        return [random_batch("gpt", _SIZES, rows=4, tokens=64, seed=seed) for seed in seeds]

    torch.manual_seed(0)
    model = build_model("gpt", **_SIZES)
    graph = lading.capture(model, batches(0)[0], model_class("gpt").loss, accumulation=micro_batches)
    plan = lading.plan(graph, machine, budget="100%", policy="keep-all", cache=False, layout=layout)
    sleeper, plain_s, slow_s = Sleeper(), list[float](), list[float]()
    if rank == slow:
        trainers.Executor = partial(Executor, jitter=sleeper)  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder:
        made = partial(lading.Trainer, plan, graph, model, folder=folder, threads=1, optimizer=lading.AdamW(lr=1e-3))
        with made() as trainer:
            for step in range(_WARM_UP):
                trainer.step(batches(step))
            sleeper.learn(trainer.timeline())
            for step in range(2 * _PAIRS):
                sleeper.enabled = step % 2 == 1
                given = batches(step)
                dist.barrier()
                started = time.perf_counter()
                trainer.step(given)
                (slow_s if step % 2 else plain_s).append(time.perf_counter() - started)
        with made() as trainer:
            sleeper.enabled = True
            for step in range(_SLOW_STEPS):
                trainer.step(batches(step))
            job = trainer.timelines()
    if job is None:
        return None
    programs = [programs_of(each, graph, ())[0] for each in (plan, *plan.peers)]
    shared = machine_from_dict(plan.request.machine_table, "the plan's machine")
    costs = straggler_step_s(programs, shared, FACTOR)
    return Row(
        case=f"gpt {layout}",
        slow=slow,
        predicted_s=plan.step_s,
        predicted_slow_s=costs[slow if plan.peers else 0],
        step_s=statistics.median(plain_s),
        slow_step_s=statistics.median(slow_s),
        named=None if job.slow is None else job.slow.rank,
        factor=0.0 if job.slow is None else job.slow.factor,
    )


def main() -> None:
    """Run the cases and print a line each, or one case as a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--only", default="", help="cases whose layout contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        layout, micro_batches, slow = args.case
        if (row := train(layout, micro_batches, slow, args.machine)) is not None:
            args.json.write_text(json.dumps(asdict(row)))
        dist.destroy_process_group()
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (each for each in CASES if args.only in each[0]):
            out = Path(folder) / "row.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
            given = [args.machine, "--case", json.dumps(case), "--json", str(out)]
            done = subprocess.run([*command, *given], check=False, capture_output=True, text=True, timeout=180)
            if done.returncode:
                sys.exit(f"{case}: failed\n{done.stderr[-2000:]}")
            rows.append(Row(**json.loads(out.read_text())))
            print(rows[-1], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
