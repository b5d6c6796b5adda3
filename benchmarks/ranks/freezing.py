"""Layers that freeze on the ranks of this host: stages become replicas, beside as many stages throughout.

    lading probe --ranks 4 --out machine.toml
    torchrun --nproc-per-node 4 benchmarks/ranks/freezing.py machine.toml [--steps N] [--epoch STEPS] [--json FILE]

A Llama is trained by two Trainers in turns of one step, so that both meet the same moments of the host. In both, the
leading layers freeze in the same steps. One goes on in the layout of the next phase, in the last with a cache of what
the frozen layers compute; the other keeps its stages, which are cut again where the work is, so that it does better
than a pipeline left alone. A step's seconds are those of the fastest, as a shared host only adds to them; an epoch is
so many of them. A transition is what is paid between two phases: pause, capture and plan, resume.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
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
#: Of each phase: layout, number of leading layers that are frozen, whether what they compute is cached; by ranks.
PHASES = {
    2: (("pp2", 0, False), ("dp2", 4, False), ("dp2", 6, False), ("dp2", 6, True)),
    4: (("pp4", 0, False), ("pp2,dp2", 4, False), ("dp4", 6, False), ("dp4", 6, True)),
}
#: Steps of an epoch that are timed: their batches come again and again.
_DISTINCT = 3
_WARM_UP = 2


class Prefix(torch.nn.Module):
    """Embedding and leading layers of a Llama, from tokens to what the next layer reads."""

    def __init__(self, model: Any, count: int) -> None:
        super().__init__()
        self.tokens, self.rope, self.layers = model.tokens, model.rope, model.layers[:count]

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Hidden states: tokens_BT -> x_BTD."""
        x_BTD = self.tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.rope)
        return x_BTD


def rest_loss(model: Any, batch: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Loss of a model whose leading layers were run before."""
    x_BTD = batch["hidden"]
    for layer in model.layers[count:]:
        x_BTD = layer(x_BTD, model.rope)
    logits_BTV = model.head(model.norm(x_BTD))
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch["tokens"][:, 1:].flatten())


@dataclass(frozen=True)
class Row:
    """A phase: seconds of a step by both, measured and predicted; and of the transition to it."""

    layout: str
    frozen: int
    cached: bool
    step_s: float
    predicted_s: float
    stages_s: float
    stages_predicted_s: float
    pause_s: float
    plan_s: float
    resume_s: float
    same_loss: bool
    verdict: str

    @property
    def transition_s(self) -> float:
        """Seconds between two phases."""
        return self.pause_s + self.plan_s + self.resume_s


class Run:
    """One training of the model, which all ranks take part in."""

    def __init__(self, machine: str, layout: str, stack: ExitStack) -> None:
        torch.manual_seed(0)
        self._model, self._machine, self.losses = build_model("llama", **_SIZES), machine, list[float]()
        self._layout, self._frozen, self.cache = parse_layout(layout), 0, None
        self._folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.trainer = stack.enter_context(
            lading.Trainer(*self._planned(), self._model, folder=self._folder, threads=1)
        )

    def _planned(self) -> tuple[lading.Plan, lading.StepGraph]:
        loss = model_class("llama").loss if self.cache is None else partial(rest_loss, count=self._frozen)
        share = _MICRO // self._layout.dp
        graph = lading.capture(self._model, self._micro_batch(0, 0), loss, accumulation=share)
        asked: dict[str, Any] = {"budget": "100%", "policy": "keep-all", "cache": False}
        return lading.plan(graph, self._machine, layout=str(self._layout), **asked), graph

    def change(self, layout: str, frozen: int, *, cached: bool) -> tuple[float, float, float]:
        """Freeze layers and go on in a layout; returns the seconds of pause, plan and resume."""
        marks = [time.perf_counter()]
        self.trainer.pause()
        marks.append(time.perf_counter())
        self._layout, self._frozen = parse_layout(layout), frozen
        prefix = Prefix(self._model, frozen).requires_grad_(False)
        if cached:
            self.cache = lading.PrefixCache(prefix, self._machine, memory="100MB", folder=self._folder)
        planned = self._planned()
        marks.append(time.perf_counter())
        self.trainer.resume(*planned)
        marks.append(time.perf_counter())
        pause, plan, resume = (after - before for before, after in pairwise(marks))
        return pause, plan, resume

    def _micro_batch(self, step: int, number: int) -> dict[str, torch.Tensor]:
        """Micro-batch of a step, with what the frozen layers make of it where that is cached."""
        step %= _DISTINCT
        drawn = random_batch("llama", _SIZES, rows=_ROWS, tokens=_TOKENS, seed=1000 * step + number)
        if self.cache is None:
            return drawn
        first = (step * _MICRO + number) * _ROWS
        return {**drawn, "hidden": self.cache(range(first, first + _ROWS), drawn["tokens"][:, :-1])}

    def step(self) -> float:
        """Train on this rank's micro-batches of the next step; returns the seconds."""
        share = _MICRO // self._layout.dp
        first = share * self._layout.replica(dist.get_rank())
        dist.barrier()
        started = time.perf_counter()
        batches = [self._micro_batch(self.trainer.steps, first + number) for number in range(share)]
        self.losses.append(self.trainer.step(batches))
        return time.perf_counter() - started


def run_phases(machine: str, steps: int) -> list[Row]:
    """Train both runs through all phases; called on all ranks."""
    phases, rows = PHASES[dist.get_world_size()], list[Row]()
    with ExitStack() as stack:
        first = phases[0][0]
        elastic, stages = Run(machine, first, stack), Run(machine, first, stack)
        for layout, frozen, cached in phases:
            seconds = elastic.change(layout, frozen, cached=cached) if frozen else (0.0, 0.0, 0.0)
            if frozen:
                stages.change(first, frozen, cached=False)
            pairs = [(elastic.step(), stages.step()) for _ in range(_WARM_UP + _DISTINCT + steps)][-steps:]
            step_s, stages_s = (min(each) for each in zip(*pairs, strict=True))
            same = all(abs(a - b) < 1e-4 for a, b in zip(elastic.losses, stages.losses, strict=True))
            row = Row(
                layout, frozen, cached, step_s, elastic.trainer.plan.step_s, stages_s, stages.trainer.plan.step_s,
                *seconds, same, "" if elastic.cache is None else elastic.cache.verdict,
            )  # fmt: skip
            rows.append(row)
            if dist.get_rank() == 0:
                print(_describe_row(row, first), flush=True)
    return rows


def _describe_row(row: Row, first: str) -> str:
    return (
        f"{row.frozen} frozen{', cached' if row.cached else ''}: {row.layout} {row.step_s * 1e3:.1f} ms (predicted "
        f"{row.predicted_s * 1e3:.1f}), {first} throughout {row.stages_s * 1e3:.1f} ms (predicted "
        f"{row.stages_predicted_s * 1e3:.1f}); pause {row.pause_s:.2f} s, plan {row.plan_s:.2f}, resume "
        f"{row.resume_s:.2f}; losses {'alike' if row.same_loss else 'DIFFER'} {row.verdict}"
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
