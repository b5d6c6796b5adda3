"""What it costs a Trainer to change between captures: one loss, captured as two functions, in turns or in a row.

    python benchmarks/executor/changes.py MACHINE.toml --folder F       # of ``lading probe``; one thread is best

Blocks of steps that change every time and blocks that never do follow each other; processor time of the process is
compared block by block. Evaluations of a model with dropout come between the blocks, and the peak is held against the
budget.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lading

_STEPS, _ROUNDS = 6, 8
_LAYERS, _WIDTH, _TOKENS, _BATCH = 6, 256, 128, 8


class Model(torch.nn.Module):
    """A transformer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(4096, _WIDTH), torch.nn.Linear(_WIDTH, 4096)
        layer = (_WIDTH, 4, 4 * _WIDTH, 0.1)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(*layer, batch_first=True, norm_first=True) for _ in range(_LAYERS)
        )

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits, (B, T, V)."""
        h_BTD = self.embed(ids_BT)
        for layer in self.layers:
            h_BTD = layer(h_BTD)
        return self.head(h_BTD)


def first(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    logits_NV = model(ids_BT[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:].flatten())


def second(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Compute what ``first`` does: another function, so another capture."""
    return first(model, ids_BT)


def timed(
    run: Callable[[Callable[..., torch.Tensor]], object], losses: tuple[Callable[..., torch.Tensor], ...]
) -> float:
    """Processor seconds of a step, of a block of steps on these losses in turns."""
    start = time.process_time()
    for step in range(_STEPS):
        run(losses[step % len(losses)])
    return (time.process_time() - start) / _STEPS


def measure(machine: str, budget: str, folder: Path) -> None:
    """Print one line of one budget."""
    torch.manual_seed(0)
    model, ids_BT = Model(), torch.randint(4096, (_BATCH, _TOKENS + 1))
    graph = lading.capture(model, ids_BT, first)
    others = [lading.capture(model, ids_BT, second), lading.capture(model, ids_BT, first, evaluation=True)]
    plan = lading.plan(graph, machine, budget=budget, others=others)
    with lading.Trainer(plan, graph, model, others=others, folder=folder) as trainer:
        run = lambda loss: trainer.step(ids_BT, loss=loss)  # noqa: E731
        timed(run, (first, second))
        ratios: list[float] = []
        steps: list[float] = []
        for _ in range(_ROUNDS):
            row, turns = timed(run, (first,)), timed(run, (first, second))
            trainer.evaluate(ids_BT)
            ratios.append(turns / row)
            steps.append(row)
        peak, limit = trainer.peak_bytes, plan.budgets["device"]
    moved = len(plan.choices.gaps)
    low, high = min(ratios), max(ratios)
    print(
        f"budget {budget}: {statistics.median(steps) * 1e3:.1f} ms of a processor a step in a row; in turns "
        f"{statistics.median(ratios):.3f} of that ({low:.3f} to {high:.3f}, {_ROUNDS} pairs of {_STEPS} steps); "
        f"{moved} gaps not kept; peak {peak / 2**20:.1f} of {limit / 2**20:.1f} MiB"
    )


def main() -> None:
    """Measure a plan that keeps all, and tighter ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--budgets", nargs="+", default=["100%", "60%"])
    args = parser.parse_args()
    for budget in args.budgets:
        measure(args.machine, budget, args.folder)


if __name__ == "__main__":
    main()
