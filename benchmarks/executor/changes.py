"""What it costs a Trainer to change between captures: one loss, captured as two functions, in turns or in a row.

    python benchmarks/executor/changes.py MACHINE.toml --folder F       # of ``lading probe``; one thread is best

Steps go in pairs on one capture and then on the other, so that each first step follows a change and each second one
does not; processor times are compared pair by pair. Evaluations of a model with dropout come between, and the peak is
held against the budget.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lading

_PAIRS = 60
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


def seconds(run: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(machine: str, budget: str, folder: Path) -> None:
    """Print one line of one budget."""
    torch.manual_seed(0)
    model, ids_BT = Model(), torch.randint(4096, (_BATCH, _TOKENS + 1))
    graph = lading.capture(model, ids_BT, first)
    others = [lading.capture(model, ids_BT, second), lading.capture(model, ids_BT, first, evaluation=True)]
    plan = lading.plan(graph, machine, budget=budget, others=others)
    with lading.Trainer(plan, graph, model, others=others, folder=folder) as trainer:
        pairs: list[tuple[float, float]] = []
        for number in range(_PAIRS + 2):
            loss = (first, second)[number % 2]
            changed, same = (seconds(lambda: trainer.step(ids_BT, loss=loss)) for _ in range(2))  # noqa: B023
            pairs.append((changed, same))
            if number % 8 == 0:
                trainer.evaluate(ids_BT)
        peak, limit = trainer.peak_bytes, plan.budgets["device"]
    pairs = pairs[2:]
    step_s = statistics.median(same for _, same in pairs)
    changes = [(changed - same) / step_s for changed, same in pairs]
    middle = statistics.median(changes)
    spread = statistics.median(abs(change - middle) for change in changes)
    print(
        f"budget {budget}: {step_s * 1e3:.1f} ms of a processor a step; a step after a change takes {middle:+.2%} "
        f"(median of {len(changes)} pairs, half within {spread:.2%} of it); {len(plan.choices.gaps)} gaps not kept; "
        f"peak {peak / 2**20:.1f} of {limit / 2**20:.1f} MiB"
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
