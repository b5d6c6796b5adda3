"""Layers that freeze on the ranks of this host: stages become replicas, beside as many stages throughout.

    lading probe --ranks 4 --out machine.toml
    torchrun --nproc-per-node 4 benchmarks/ranks/freezing.py machine.toml [--steps N] [--epoch STEPS] [--json FILE]

A Llama is trained by two Trainers in turns of one step, so that both meet the same moments of the host. In both, the
leading layers freeze in the same steps. One goes on in the layout of the next phase; the other keeps its stages, which
are cut again where the work is, so that it does better than a pipeline left alone. Seconds of an epoch are the median
step times the number of its steps; a transition is what one pays between two phases: pause, capture and plan, resume.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.batches import random_batch

import lading
from lading.ir.layout import parse_layout
from lading.models.reference import build_model, model_class

_SIZES: dict[str, Any] = {
    "num_layers": 8, "dim": 256, "num_heads": 4, "num_kv_heads": 4, "hidden_dim": 768, "vocab_size": 2048,
    "max_seq_len": 64,
}  # fmt: skip
_ROWS, _TOKENS, _MICRO = 2, 64, 8
#: Layout of each phase and number of leading layers that are frozen in it, by the number of ranks.
PHASES = {2: (("pp2", 0), ("pp2", 4), ("dp2", 6)), 4: (("pp4", 0), ("pp2,dp2", 4), ("dp4", 6))}
_WARM_UP = 2


@dataclass(frozen=True)
class Row:
    """A phase: seconds of a step by both, measured and predicted; and of the transition to it."""

    layout: str
    frozen: int
    step_s: float
    predicted_s: float
    stages_s: float
    stages_predicted_s: float
    transition_s: float
    same_loss: bool


class Run:
    """One training of the model, which all ranks take part in."""

    def __init__(self, machine: str, layout: str, stack: ExitStack) -> None:
        torch.manual_seed(0)
        self._model, self._machine, self.losses = build_model("llama", **_SIZES), machine, list[float]()
        plan, graph = self._planned(layout)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.trainer = stack.enter_context(lading.Trainer(plan, graph, self._model, folder=folder, threads=1))

    def _planned(self, layout: str) -> tuple[lading.Plan, lading.StepGraph]:
        self._layout = parse_layout(layout)
        share = _MICRO // self._layout.dp
        graph = lading.capture(self._model, _batch(0, 0), model_class("llama").loss, accumulation=share)
        return lading.plan(graph, self._machine, budget="100%", cache=False, layout=layout), graph

    def change(self, layout: str, frozen: int) -> float:
        """Freeze layers and go on in a layout; returns the seconds."""
        started = time.perf_counter()
        self.trainer.pause()
        for layer in (
            self._model.get_submodule("tokens"),
            *list(self._model.get_submodule("layers").children())[:frozen],
        ):
            layer.requires_grad_(False)
        self.trainer.resume(*self._planned(layout))
        return time.perf_counter() - started

    def step(self) -> float:
        """Train on this rank's micro-batches of the next step; returns the seconds."""
        share = _MICRO // self._layout.dp
        first = share * self._layout.replica(dist.get_rank())
        given = [_batch(self.trainer.steps, first + number) for number in range(share)]
        dist.barrier()
        started = time.perf_counter()
        self.losses.append(self.trainer.step(given))
        return time.perf_counter() - started


def _batch(step: int, number: int) -> Any:
    return random_batch("llama", _SIZES, rows=_ROWS, tokens=_TOKENS, seed=1000 * step + number)


def run_phases(machine: str, steps: int) -> list[Row]:
    """Train both runs through all phases; called on all ranks."""
    phases, rows = PHASES[dist.get_world_size()], list[Row]()
    with ExitStack() as stack:
        first = phases[0][0]
        elastic, stages = Run(machine, first, stack), Run(machine, first, stack)
        for layout, frozen in phases:
            transition_s = elastic.change(layout, frozen) if frozen else 0.0
            if frozen:
                stages.change(first, frozen)
            pairs = [(elastic.step(), stages.step()) for _ in range(steps)][_WARM_UP:]
            step_s, stages_s = (statistics.median(each) for each in zip(*pairs, strict=True))
            same = all(abs(a - b) < 1e-4 for a, b in zip(elastic.losses, stages.losses, strict=True))
            rows.append(
                Row(
                    layout, frozen, step_s, elastic.trainer.plan.step_s, stages_s, stages.trainer.plan.step_s,
                    transition_s, same,
                )
            )  # fmt: skip
            if dist.get_rank() == 0:
                print(_told(rows[-1], first), flush=True)
    return rows


def _told(row: Row, first: str) -> str:
    return (
        f"{row.frozen} frozen  {row.layout:8} {row.step_s * 1e3:7.1f} ms (predicted {row.predicted_s * 1e3:7.1f})  "
        f"{first} throughout {row.stages_s * 1e3:7.1f} ms (predicted {row.stages_predicted_s * 1e3:7.1f})  "
        f"transition {row.transition_s:5.2f} s  losses {'alike' if row.same_loss else 'DIFFER'}"
    )


def speed_up(rows: list[Row], epoch: int) -> tuple[float, float]:
    """How many times faster the whole run is, measured and predicted, at so many steps in each phase."""
    transitions = sum(row.transition_s for row in rows)
    measured = sum(epoch * row.stages_s for row in rows) / (sum(epoch * row.step_s for row in rows) + transitions)
    return measured, sum(row.stages_predicted_s for row in rows) / sum(row.predicted_s for row in rows)


def main() -> None:
    """Run all phases and print a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--epoch", type=int, default=500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = run_phases(args.machine, args.steps)
    if dist.get_rank() == 0:
        measured, predicted = speed_up(rows, args.epoch)
        print(
            f"{args.epoch} steps a phase: {measured:.2f} times as fast with transitions, predicted {predicted:.2f} "
            "without"
        )
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
