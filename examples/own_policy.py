"""A policy of your own: what happens to every tensor between two of its uses.

    python examples/own_policy.py

A policy is a function of the step and its lifetimes that returns a choice for any gap it does not leave as it is. It
decides nothing else: when transfers start, every address and every wait follow from the choices, and the program that
comes out is verified and simulated like any other. Here: optimizer states wait on disk, and what an elementwise
operation of the forward made is made again for the backward.

Where to look: src/lading/planner/policies.py (the plain ones), src/lading/planner/relaxation.py (the one that solves
for the least time), src/lading/planner/emission.py and lower.py (what is made of choices).
"""

from __future__ import annotations

from pathlib import Path

import torch

import lading
from lading.ir.graph import OpKind, Phase, Role, StepGraph
from lading.ir.plan import Option
from lading.memory.lifetime import Gap, Lifetimes, can_recompute, gaps


def states_away(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Optimizer states on disk, results of elementwise operations made again."""
    cheap = (OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL)
    choices: dict[tuple[int, int], Option] = {}
    for gap in gaps(graph, lives):
        storage = graph.storages[gap.storage]
        if storage.role is Role.OPTIMIZER_STATE and storage.size_bytes >= 4096:
            choices[gap.storage, gap.start] = Option("disk")
        elif graph.ops[lives.uses[gap.storage][0]].kind in cheap and _waits_for_backward(graph, lives, gap):
            choices[gap.storage, gap.start] = Option.RECOMPUTE
    return choices


def _waits_for_backward(graph: StepGraph, lives: Lifetimes, gap: Gap) -> bool:
    phases = graph.ops[gap.start].phase, graph.ops[gap.end].phase
    return phases == (Phase.FORWARD, Phase.BACKWARD) and can_recompute(graph, lives, gap)


def main() -> None:
    """Plan the same step with it and with the built-in policies, and print them side by side."""
    torch.manual_seed(0)
    layers = [(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*(part for layer in layers for part in layer))
    batch = {"x": torch.randn(1024, 512)}

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["x"])

    graph = lading.capture(model, batch, loss)
    machine = lading.load_machine(Path(__file__).parent / "own_machine.toml")
    ours = lading.plan(graph, machine, budget="90%", policy=states_away)
    best = lading.plan(graph, machine, budget="90%")
    for row in (*ours.policies, best.policies[-1]):
        time = f"{row.step_s * 1e3:7.2f} ms" if row.step_s else "  no fit  "
        print(f"{row.policy:<24} {time} {row.peak_bytes / 2**20:8.1f} MiB")
    assert best.step_s <= ours.step_s
    with lading.Trainer(ours, graph, model) as trainer:
        print(f"loss with states_away: {trainer.step(batch):.6f}")


if __name__ == "__main__":
    main()
