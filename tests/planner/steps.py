"""Steps for the planner's tests: captured ones with their costs, and tiny random ones that can be enumerated."""

from __future__ import annotations

import dataclasses
from itertools import product
from random import Random
from typing import Any

from tests.captured import captured_step
from tests.machines import small_machine
from tests.programs import chain

from lading.cost.compute import op_costs
from lading.ir.graph import Op, Phase, StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES
from lading.memory.lifetime import can_recompute, gaps, is_movable, lifetimes
from lading.planner.lower import StepCosts, fixed_bytes
from lading.planner.residency import Found, ResidencySearch, StepProblem, lower_bound_s, polished, smallest_budget_bytes

Key = tuple[int, int]
NO_LIMIT = 1 << 40


def step_of(graph: StepGraph, machine: Machine, costs: StepCosts | None = None, device: int = NO_LIMIT) -> StepProblem:
    """A step with all that the planner works on; the tiers are wide."""
    costs = costs or StepCosts(tuple(op_costs(graph, machine.device)), (0,) * len(graph.ops))
    budgets = {"device": device, **{tier.name: tier.capacity_bytes for tier in machine.tiers}}
    return StepProblem(graph, lifetimes(graph), machine, costs, budgets)


def captured(name: str = "llama", *, machine: Machine | None = None, **settings: Any) -> StepProblem:
    """A captured step on the small machine."""
    return step_of(captured_step(name, **settings), machine or small_machine())


def within(step: StepProblem, device: int) -> StepProblem:
    """The same step with a device budget."""
    return dataclasses.replace(step, budgets={**step.budgets, "device": device})


def needs(step: StepProblem, choices: dict[Key, Option]) -> int:
    """Device bytes that choices take with room for every transfer."""
    return within(step, NO_LIMIT).lower(choices).arena_bytes + fixed_bytes(step.machine, step.costs)


def options_of(step: StepProblem) -> dict[Key, list[Option]]:
    """Every gap with a choice, and what may be chosen."""
    found: dict[Key, list[Option]] = {}
    for gap in gaps(step.graph, step.lives):
        options = [Option.KEEP]
        if can_recompute(step.graph, step.lives, gap):
            options.append(Option.RECOMPUTE)
        if is_movable(step.graph, gap.storage, PAGE_BYTES):
            options.extend(Option(tier.name) for tier in step.machine.tiers)
        if len(options) > 1 and (gap.wraps or gap.end - gap.start > 1):
            found[gap.storage, gap.start] = options
    return found


def random_choices(step: StepProblem, rng: Random) -> dict[Key, Option]:
    """Any option for some of the gaps."""
    share = rng.choice((0.05, 0.3, 0.7, 1.0))
    drawn = {key: rng.choice(options) for key, options in options_of(step).items() if rng.random() < share}
    return {key: option for key, option in drawn.items() if option != Option.KEEP}


def tiny(seed: int, depth: int = 2) -> StepProblem:
    """A chain of layers with random sizes and times, and a budget between the least and what keep-all needs."""
    rng = Random(seed)
    graph = chain(depth).graph
    sizes = [4 if s.name == "loss" else PAGE_BYTES * rng.choice((8, 16, 64, 128, 256, 512)) for s in graph.storages]
    graph = dataclasses.replace(
        graph,
        storages=tuple(dataclasses.replace(s, size_bytes=n) for s, n in zip(graph.storages, sizes, strict=True)),
        tensors=tuple(dataclasses.replace(t, shape=(n,)) for t, n in zip(graph.tensors, sizes, strict=True)),
    )
    seconds = tuple(rng.choice((1e-4, 5e-4, 1e-3, 2e-3, 5e-3)) for _ in graph.ops)
    step = step_of(graph, small_machine(), StepCosts(seconds, (0,) * len(graph.ops)))
    most, least = needs(step, {}), smallest_budget_bytes(step)[0]
    return within(step, int(least + (most - least) * rng.uniform(0.05, 0.95)))


def bytes_machine() -> Machine:
    """The small machine, which can multiply what a tiny step is made of."""
    machine = small_machine()
    rates = {**machine.device.peak_flops_per_s, "uint8": 1e9}
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, peak_flops_per_s=rates))


def slower_disk(machine: Machine, slower: float) -> Machine:
    """The machine with a disk ``slower`` times slower."""
    disk = machine.tiers[0]
    rates = {f.name: getattr(disk, f.name) / slower for f in dataclasses.fields(disk) if f.name.endswith("bytes_per_s")}
    return dataclasses.replace(machine, tiers=(dataclasses.replace(disk, **rates),))


def in_blocks(step: StepProblem, slower: float) -> StepProblem:
    """A tiny step whose layers are blocks, on a machine whose disk is ``slower`` times slower."""
    depth = sum(op.name == "f" for op in step.graph.ops)
    ops: list[Op] = []
    for position, op in enumerate(step.graph.ops):
        forward, layer = position < depth, min(position, 2 * depth - 1 - (position - 1 - depth) // 2 - depth)
        phase = Phase.FORWARD if forward else Phase.LOSS if position == depth else op.phase
        phase = Phase.BACKWARD if op.name == "backward" else phase
        ops.append(dataclasses.replace(op, phase=phase, module="" if position == depth else f"layers.{layer}"))
    machine = slower_disk(step.machine, slower)
    return within(step_of(dataclasses.replace(step.graph, ops=tuple(ops)), machine, step.costs), step.budgets["device"])


def every_choice(step: StepProblem) -> list[Found]:
    """All combinations of options that fit."""
    options = options_of(step)
    found: list[Found] = []
    for drawn in product(*options.values()):
        choices = {key: option for key, option in zip(options, drawn, strict=True) if option != Option.KEEP}
        program = step.lower(choices).program
        if program is not None:
            found.append(Found(choices, program, step))
    return found


def searched(step: StepProblem) -> Found:
    """The fastest plan that a search of the step in its own order finds."""
    bound_s, search = lower_bound_s(step), ResidencySearch(step, ())
    search.advance()
    return polished(search.finish(bound_s), bound_s)
