"""Steps of one device, planned for made-up machines: their Programs as text, and when each action is said to run.

The models are a block or two wide enough to have whole pages; what a processor would have to be asked (scratch of
kernels) is told instead, so that the same Programs come out anywhere. A search takes seconds, so the choices that it
made stand in the text: from them the Program is made again in a moment.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tests.machines import machine_with_host, small_machine

from lading.grouping import Matrices
from lading.ir.expand import expand
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Choices, Option
from lading.ir.program import Program
from lading.memory.lifetime import lifetimes
from lading.memory.restore import apply_choices
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.planner.api import Planned, make_plan, step_costs
from lading.planner.host_balance import hosted_step
from lading.planner.orders import deferred_step
from lading.planner.residency import StepProblem
from lading.sim.device_step import simulate
from lading.tracing.trace import capture

#: Scratch of every operation.
SCRATCH_BYTES = 8192
#: Tokens, and sequences of a micro-batch.
TOKENS, SEQUENCES = 32, 4
#: First line of what is told of a plan that its choices alone do not give: a flow says, too, when each move begins.
_OF_A_FLOW = "of a flow"


def _host_alone(machine: Machine) -> Machine:
    """Machine without its disk: what has states there is not computed on the host."""
    return dataclasses.replace(machine, tiers=machine.tiers[:1])


@dataclass(frozen=True)
class Case:
    """A planned step.

    Attributes:
        shows: What the Program is to have, so that the case stays what it is for.
        expansion: How the step is made of a micro-batch: ``clip_norm``, ``master_weights``, ``matrices``.
    """

    shows: tuple[str, ...]
    budget: str
    model: str = "llama"
    machine: Callable[[], Machine] = small_machine
    policy: str = "residency"
    dtype: torch.dtype = torch.float32
    accumulation: int = 1
    expansion: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "keep-all": Case((), "100%", "gpt"),
    "checkpointed": Case(("RECOMPUTE",), "95%", policy="checkpoint-every-block", sizes={"num_layers": 2}),
    "disk": Case(("RECOMPUTE", "to=disk", "from=disk"), "60%", "gpt"),
    "host": Case(("RECOMPUTE", "to=host", "from=host", "to=disk"), "50%", machine=machine_with_host),
    "host-computes": Case(
        ("host_compute", "to=host"),
        "60%",
        machine=lambda: _host_alone(machine_with_host(host_bytes_per_s=2e10)),
        sizes={"dim": 256, "num_heads": 4, "vocab_size": 2000},
    ),
    # At 75% the plan is one of paced flows, whose pace stands in no choice, so that it is not made again from them.
    "micro-batches": Case(("to=disk",), "78%", "gpt", accumulation=3, expansion={"clip_norm": 1.0}),
    "masters": Case(
        ("to=disk", "RECOMPUTE"),
        "70%",
        dtype=torch.bfloat16,
        accumulation=2,
        expansion={"master_weights": True, "clip_norm": 1.0},
    ),
    "muon": Case(("to=disk", "RECOMPUTE"), "75%", expansion={"matrices": Matrices(rule="muon", lr=0.02)}),
}


@cache
def graph_of(name: str) -> StepGraph:
    """The step of a case."""
    case = CASES[name]
    sizes = {"vocab_size": 32, "max_seq_len": TOKENS, "dim": 64, "num_heads": 2, "num_layers": 1, **case.sizes}
    torch.manual_seed(0)
    model = build_model(case.model, **sizes, **({"dropout": 0.1} if case.model == "gpt" else {})).to(case.dtype)
    batch = {"tokens": torch.zeros(SEQUENCES, TOKENS + 1, dtype=torch.int64)}
    return expand(capture(model, batch, next_byte_loss, accumulation=case.accumulation), **case.expansion)


def _scratch(graph: StepGraph) -> list[int]:
    return [SCRATCH_BYTES] * len(graph.ops)


@cache
def planned(name: str) -> Planned:
    """The plan of a case, searched for."""
    case, graph = CASES[name], graph_of(name)
    return make_plan(graph, case.machine(), budget=case.budget, policy=case.policy, workspace_bytes=_scratch(graph))


def planned_text(name: str) -> str:
    """What was chosen for a case, and its Program: of what, where its storages lie, and its actions, one a line."""
    made = planned(name)
    choices = made.plan.choices
    lines = [f"deferred {choices.deferred}", f"retimed {choices.retimed}"]
    lines += [f"hosted {' '.join(map(str, choices.hosted))}"]
    lines += [f"parts {choices.loss_parts}"] if choices.loss_parts else []
    lines += [f"late {op} {after}" for op, after in choices.late_updates]
    lines += [f"choice {c.storage} {c.start} {c.end} {c.option}" for c in choices.gaps]
    body = program_text(made.program)
    text = "\n".join(lines) + "\n" + body
    alone = _lowered(name, text)
    return text if alone is not None and program_text(alone) == body else f"{_OF_A_FLOW}\n{text}"


def program_text(program: Program) -> str:
    """A Program with its graph and its addresses."""
    graph = program.graph
    lines = [f"arena {program.arena_bytes} workspace {program.workspace_bytes} overhead {program.overhead_bytes}"]
    lines += [f"budget {tier} {size}" for tier, size in sorted(program.budgets.items())]
    lines += [f"resident {_pairs(program.resident)}"]
    lines += [f"slots {tier} {_pairs(slots)}" for tier, slots in sorted(program.slots.items())]
    lines += [f"storage {n} {s.name} {s.role} {s.size_bytes}" for n, s in enumerate(graph.storages)]
    lines += [f"op {n} {op.name} {op.module or '-'} {op.phase}" for n, op in enumerate(graph.ops)]
    return "\n".join([*lines, *map(str, program.actions)]) + "\n"


def _pairs(pairs: tuple[tuple[int, int], ...]) -> str:
    return ",".join(f"{storage}@{offset}" for storage, offset in pairs)


def made_again(name: str, text: str) -> Program:
    """The Program of the choices that stand in ``planned_text``, without a search unless they are a flow's."""
    program = planned(name).program if text.startswith(_OF_A_FLOW) else _lowered(name, text)
    assert program is not None
    return program


def _lowered(name: str, text: str) -> Program | None:
    graph, machine = graph_of(name), CASES[name].machine()
    parts = re.search(r"^parts (\d+)$", text, re.MULTILINE)
    late = tuple((int(op), int(after)) for op, after in re.findall(r"^late (\d+) (\d+)$", text, re.MULTILINE))
    graph = apply_choices(graph, Choices(loss_parts=int(parts[1]) if parts else 0, late_updates=late))
    costs = step_costs(graph, machine, _scratch(graph))
    budgets = {tier: int(size) for tier, size in re.findall(r"^budget (\w+) (\d+)$", text, re.MULTILINE)}
    step = deferred_step(StepProblem(graph, lifetimes(graph), machine, costs, budgets), _number(text, "deferred"))
    hosted = re.search(r"^hosted(.*)$", text, re.MULTILINE)
    assert hosted is not None
    step = hosted_step(step, tuple(map(int, hosted[1].split())))
    rows = re.findall(r"^choice (\d+) (\d+) \d+ (\w+)$", text, re.MULTILINE)
    choices = {(int(storage), int(start)): Option(option) for storage, start, option in rows}
    return step.lower(choices, _number(text, "retimed")).program


def _number(text: str, key: str) -> int:
    found = re.search(rf"^{key} (\d+)$", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def timeline(name: str, program: Program) -> dict[str, Any]:
    """What a Program of a case is simulated to do: the step, and each action's start and end, in seconds."""
    found = simulate(program, CASES[name].machine())
    spans = {event.action: [event.start_s, event.end_s] for event in found.events}
    return {
        "step_s": found.duration_s,
        "peak_bytes": {tier: found.peak_of_tier(tier) for tier in ("device", *program.slots)},
        "actions": [spans[action] for action in sorted(spans)],
    }


def compared(name: str) -> dict[str, Any]:
    """The policies that a plan was compared with, and its bound."""
    plan = planned(name).plan
    rows = {row.policy: [row.fits, row.step_s, row.peak_bytes] for row in plan.policies}
    return {"step_s": plan.step_s, "lower_bound_s": plan.lower_bound_s, "policies": rows}
