"""Operations on the host against brute force: what the verifier accepts never goes wrong."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from tests.interpreter import run_delayed, run_random
from tests.machines import machine_with_host
from tests.programs import assert_rejects, chain, drop_wait, edit, find
from tests.random_programs import random_mutation

from lading.errors import ConfigError, ProgramError
from lading.ir.action import ActionKind
from lading.ir.graph import StepGraph
from lading.ir.host_ops import hosted, light_groups
from lading.ir.plan import Option
from lading.ir.program import HOST_STREAM, PAGE_BYTES, Program
from lading.memory.lifetime import gaps, lifetimes
from lading.memory.verify import verify
from lading.planner.lower import StepCosts, lower


def lowered(graph: StepGraph, seed: int, host_bytes: int = 1 << 30) -> Program:
    """With some of the gaps spent on a lower tier."""
    rng, lives = Random(seed), lifetimes(graph)
    options = (Option.KEEP, Option("host"), Option("disk"))
    choices = {(gap.storage, gap.start): rng.choice(options) for gap in gaps(graph, lives)}
    costs = StepCosts((1e-4,) * len(graph.ops), (0,) * len(graph.ops))
    budgets = {"device": 1 << 30, "host": host_bytes, "disk": 1 << 30}
    program = lower(graph, lives, machine_with_host(), costs, choices, budgets).program
    assert program is not None
    return dataclasses.replace(program, budgets={**budgets, "host": 1 << 30})  # a small one only packs tighter


def drawn(seed: int) -> Program:
    """A chain of layers, some of whose updates run on the host."""
    rng = Random(seed)
    made = chain(rng.randint(1, 4), PAGE_BYTES * rng.choice((1, 2)))
    graph = hosted(made.graph, [step for step in made.steps if rng.random() < 0.7])
    return lowered(graph, seed, rng.choice((1 << 30, 14 * PAGE_BYTES)))


def accepted(program: Program) -> bool:
    try:
        verify(program)
    except ProgramError:
        return False
    return True


@pytest.mark.parametrize("seed", range(3))
def test_what_is_lowered_runs_right(seed: int) -> None:
    program, rng = drawn(seed), Random(seed)
    verify(program)
    for _ in range(20):
        run_random(program, rng)


@pytest.mark.parametrize("seed", range(4))
def test_every_wait_counts(seed: int) -> None:
    """Without one of the waits a program is rejected, or it goes right with what was waited for put off."""
    program = drawn(seed)
    rejected = 0
    for action in program.actions:
        for wait in action.waits:
            changed = drop_wait(program, action.id, wait)
            if accepted(changed):
                run_delayed(changed, ("end", wait))
            else:
                rejected += 1
    assert rejected or not program.graph.hosted


@pytest.mark.parametrize("seed", range(12))
def test_random_changes(seed: int) -> None:
    rng = Random(seed)
    _, program = random_mutation(drawn(seed), rng)
    if accepted(program):
        for _ in range(20):
            run_random(program, rng)


def whole() -> Program:
    made = chain(2)
    return lowered(hosted(made.graph, made.steps), 0)


def test_rejections_name_the_action() -> None:
    program = whole()
    verify(program)
    worked = find(program, lambda a: a.stream == HOST_STREAM and a.op is not None)
    freed = find(program, lambda a: a.kind is ActionKind.FREE and a.source == "host")
    stored = find(program, lambda a: a.target == "host" and a.storage == freed.storage)
    assert_rejects(edit(program, worked.id, stream="compute"), worked.id, "expected stream 'host_compute'")
    assert_rejects(drop_wait(program, worked.id, stored.id), worked.id, "may still be writing")
    again = edit(program, worked.id, kind=ActionKind.RECOMPUTE)
    assert_rejects(again, worked.id, "gives other bits")
    kept = next(s for s, _ in program.slots["host"] if s in program.graph.persistent)
    assert_rejects(edit(program, freed.id, storage=kept), freed.id, "what no op on the host works on")


def test_what_is_not_light_stays_on_the_device() -> None:
    made = chain(2)
    assert sorted(op for group in light_groups(made.graph) for op in group) == sorted(made.steps)
    with pytest.raises(ConfigError, match=f"got operation {made.forward[0]}"):
        hosted(made.graph, made.forward[:1])
    with pytest.raises(ConfigError, match="got operation 99"):
        hosted(made.graph, [99])
