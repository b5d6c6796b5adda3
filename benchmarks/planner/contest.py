"""Who competes, on what: models, a step with a budget, and each rival's best choices for it.

Each rival's choices go through the same lowering and the same simulator, and its transfers are scheduled again where
compute waits, as Lading's are. A rival that has a knob is tried at several settings and counts with its best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import poet
import sac
import torch
from hand import Choices, everything_moved, states_away
from tools.batches import random_batch

from lading.errors import PlanInfeasible
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.memory.lifetime import lifetimes
from lading.models.reference import build_model, model_class
from lading.planner.api import step_costs
from lading.planner.orders import evict
from lading.planner.policies import checkpoint_every_block
from lading.planner.residency import MOST_RETIMED, Found, StepProblem
from lading.planner.streaming import streaming
from lading.runtime.kernel_calls import workspace_of
from lading.tracing.initial import Deferred, defer
from lading.tracing.trace import capture

_SMALL = {"vocab_size": 256, "dim": 256, "num_heads": 4, "num_layers": 8}
_LLAMA_1B = {"dim": 2048, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 128256}
#: Name: (model, sizes, batch, tokens); a DiT's tokens follow from its image.
MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "gpt-small": ("gpt", _SMALL, 8, 128),
    "llama-small": ("llama", _SMALL, 8, 128),
    "moe-small": ("moe", {**_SMALL, "num_layers": 4}, 8, 128),
    "dit-small": ("dit", {"dim": 384, "num_heads": 6, "num_layers": 6}, 32, 0),
    "gpt-124m": ("gpt", {"dim": 768, "num_layers": 12, "num_heads": 12, "vocab_size": 50304}, 4, 1024),
    "llama-1b-6-layers": ("llama", {**_LLAMA_1B, "num_layers": 6}, 1, 2048),
    "moe-8-experts": (
        "moe",
        {"dim": 512, "num_layers": 6, "num_heads": 8, "vocab_size": 32000, "num_experts": 8},
        4,
        512,
    ),
    "dit-l": ("dit", {"dim": 1024, "num_layers": 24, "num_heads": 16, "image_size": 32}, 8, 0),
}
#: What a process takes besides tensors would be most of a small model's budget, and is the same for all.
OVERHEAD_BYTES = 4_000_000
#: A rival decides for these shares of the room there is: too little leaves time unused, too much does not fit.
ROOMS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
LEAST_OPS = (10, 40, 160)
#: The same for POET's program, each of which may take all of its time.
POET_ROOMS = (1.0, 0.85, 0.7)
#: What POET's program takes a second of paging to cost beside one of computing: as much, or little as it hides.
PRICES = (1.0, 0.1)
_NONE: Choices = {}


@dataclass(frozen=True)
class Case:
    """A captured model with what is needed to run it."""

    name: str
    initial: Deferred
    graph: StepGraph

    @classmethod
    def of(cls, name: str) -> Case:
        """Capture a model of ``MODELS``."""
        kind, sizes, _, tokens = MODELS[name]
        sizes = sizes if kind == "dit" else {**sizes, "max_seq_len": tokens}
        initial = defer(lambda: build_model(kind, **sizes))
        return cls(name, initial, capture(initial.model, batch_of(name, 0), model_class(kind).loss))


def batch_of(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Random tokens or images."""
    kind, sizes, rows, tokens = MODELS[name]
    return random_batch(kind, sizes, rows=rows, tokens=tokens, seed=seed)


def stripped(machine: Machine) -> Machine:
    """The machine with little overhead, and memory for whatever a share of the budget asks for."""
    device = dataclasses.replace(machine.device, overhead_bytes=OVERHEAD_BYTES, memory_bytes=1 << 45)
    return dataclasses.replace(machine, device=device)


def step_within(
    graph: StepGraph, machine: Machine, budgets: dict[str, int], settings: Mapping[str, float]
) -> StepProblem:
    """Make the problem that the planner works on, for rivals; ``settings`` are those of Lading's plan."""
    costs = step_costs(graph, machine, workspace_of(graph, machine.device.kind), settings)
    return StepProblem(graph, lifetimes(graph), machine, costs, budgets)


Offered = Iterator[Choices]
Rival = Callable[[StepProblem, float], Offered]


def _checkpointed(step: StepProblem, away: Choices) -> Offered:
    yield {**checkpoint_every_block(step.graph, step.lives), **away}


def dtr(step: StepProblem, away: Choices) -> Offered:
    """Offer what DTR's greedy evicts where ``away`` is on a lower tier."""
    for share in ROOMS:
        evicted = evict(step, away, int(share * step.arena_bytes))
        if evicted.step_s is None:
            return
        yield {**evicted.choices, **away}


def _sac(step: StepProblem, away: Choices, limit_s: float) -> Offered:
    for share in ROOMS:
        found = sac.choices(step, away, int(share * step.arena_bytes), limit_s)
        if found is not None:
            yield {**found, **away}


def poets(step: StepProblem, away: Choices, limit_s: float) -> Offered:
    """Offer what POET's program pages and computes again, each within ``limit_s`` seconds."""
    for price in PRICES:
        for share in POET_ROOMS:
            found = poet.choices(step, away, int(share * step.arena_bytes), limit_s, price)
            if found is None:
                break
            yield {**found, **away}


def _moved(step: StepProblem) -> Offered:
    for least in LEAST_OPS:
        yield everything_moved(step, least)


def _streamed(step: StepProblem) -> Offered:
    try:
        yield streaming(step).choices
    except PlanInfeasible:
        return


RIVALS: dict[str, Rival] = {
    "checkpoint every block": lambda step, limit_s: _checkpointed(step, _NONE),
    "checkpoint every block, states away": lambda step, limit_s: _checkpointed(step, states_away(step)),
    "SAC ILP": lambda step, limit_s: _sac(step, _NONE, limit_s),
    "SAC ILP, states away": lambda step, limit_s: _sac(step, states_away(step), limit_s),
    "DTR": lambda step, limit_s: dtr(step, _NONE),
    "DTR, states away": lambda step, limit_s: dtr(step, states_away(step)),
    "POET": lambda step, limit_s: poets(step, _NONE, limit_s),
    "POET, states away": lambda step, limit_s: poets(step, states_away(step), limit_s),
    "everything moved": lambda step, limit_s: _moved(step),
    "blocks recomputed, rest moved": lambda step, limit_s: _streamed(step),
}


def best_of(step: StepProblem, offered: Offered) -> Found | None:
    """The fastest of a rival's offers that fits; the schedules that help it are tried too."""
    best: Found | None = None
    for choices in offered:
        program = step.lower(choices).program
        if program is None:
            continue
        found = step.retimed(Found(choices, program, step), MOST_RETIMED)
        if best is None or found.step_s < best.step_s:
            best = found
    return best
