"""Operations on the host against brute force: what the verifier accepts never goes wrong."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from tests.interpreter import run_delayed, run_random
from tests.machines import machine_with_host
from tests.programs import assert_rejects, chain, drop_action, drop_wait, edit, find
from tests.random_programs import random_mutation

from lading.errors import ConfigError, ProgramError
from lading.ir.action import ActionKind
from lading.ir.graph import PERSISTENT, StepGraph
from lading.ir.host_ops import hosted, light_groups
from lading.ir.plan import Option
from lading.ir.program import HOST_STREAM, PAGE_BYTES, Program, parse_program
from lading.memory.lifetime import gaps, lifetimes
from lading.memory.tier_layout import passing_on_host
from lading.memory.verify import verify
from lading.planner.lower import StepCosts, lower


def lowered(graph: StepGraph, seed: int, host_bytes: int = 1 << 30, *, behind: float = 0.0) -> Program:
    """With some of the gaps spent on a lower tier.

    Args:
        behind: Share of what the host works on, of all that lasts, that lies on the disk.
    """
    rng, drawing = Random(seed), Random(seed + 1)
    lasting = sorted(s for s in graph.host_storages if graph.storages[s].role in PERSISTENT)
    lives = lifetimes(graph, behind_host={s: "disk" for s in lasting if drawing.random() < behind})
    options = (Option.KEEP, Option("host"), Option("disk"))
    choices = {(gap.storage, gap.start): rng.choice(options) for gap in gaps(graph, lives)}
    costs = StepCosts((1e-4,) * len(graph.ops), (0,) * len(graph.ops))
    budgets = {"device": 1 << 30, "host": host_bytes, "disk": 1 << 30}
    program = lower(graph, lives, machine_with_host(), costs, choices, budgets).program
    assert program is not None
    return dataclasses.replace(program, budgets={**budgets, "host": 1 << 30})  # a small one only packs tighter


def drawn(seed: int, *, behind: float = 0.0) -> Program:
    """A chain of layers, some of whose updates run on the host."""
    rng = Random(seed)
    made = chain(rng.randint(1, 4), PAGE_BYTES * rng.choice((1, 2)))
    graph = hosted(made.graph, [step for step in made.steps if rng.random() < 0.7])
    room = rng.choice((1 << 30, 14 * PAGE_BYTES))
    return lowered(graph, seed, room if not behind else rng.choice((room, 1, 8 * PAGE_BYTES)), behind=behind)


def accepted(program: Program) -> bool:
    try:
        verify(program)
    except ProgramError:
        return False
    return True


#: Seeds of programs without anything behind the host, and of some with states and parameters on the disk.
NEAR = [(seed, 0.0) for seed in range(4)]
FAR = [(seed, share) for seed in range(4) for share in (0.5, 1.0)]


@pytest.mark.parametrize(("seed", "behind"), [*NEAR[:3], *FAR])
def test_what_is_lowered_runs_right(seed: int, behind: float) -> None:
    program, rng = drawn(seed, behind=behind), Random(seed)
    verify(program)
    for _ in range(20):
        run_random(program, rng)


@pytest.mark.parametrize(("seed", "behind"), [*NEAR, *FAR])
def test_every_wait_counts(seed: int, behind: float) -> None:
    """Without one of the waits a program is rejected, or it goes right with what was waited for put off."""
    program = drawn(seed, behind=behind)
    rejected = 0
    for action in program.actions:
        for wait in action.waits:
            changed = drop_wait(program, action.id, wait)
            if accepted(changed):
                run_delayed(changed, ("end", wait))
            else:
                rejected += 1
    assert rejected or not program.graph.hosted


@pytest.mark.parametrize("behind", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_random_changes(seed: int, behind: float) -> None:
    rng = Random(seed)
    _, program = random_mutation(drawn(seed, behind=behind), rng)
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
    assert_rejects(edit(program, freed.id, storage=kept), freed.id, "what passes through the host to be worked on")


def test_what_is_not_light_stays_on_the_device() -> None:
    made = chain(2)
    assert sorted(op for group in light_groups(made.graph) for op in group) == sorted(made.steps)
    with pytest.raises(ConfigError, match=f"got operation {made.forward[0]}"):
        hosted(made.graph, made.forward[:1])
    with pytest.raises(ConfigError, match="got operation 99"):
        hosted(made.graph, [99])


def on_the_disk() -> Program:
    """A chain whose updates run on the host, which has room for one of them; all that lasts lies on the disk."""
    made = chain(3)
    return lowered(hosted(made.graph, made.steps), 0, 1, behind=1.0)


def test_states_behind_the_host_come_for_their_update_and_go_back() -> None:
    program = on_the_disk()
    verify(program)
    graph = program.graph
    lasting = {s for s in graph.host_storages if graph.storages[s].role in PERSISTENT}
    assert lasting == passing_on_host(program) & graph.persistent
    for route, stream in ((("disk", "host"), "disk_read"), (("host", "disk"), "disk_write")):
        moves = [a for a in program.actions if (a.source, a.target) == route]
        assert sorted(a.storage for a in moves if a.storage is not None) == sorted(lasting)
        assert {a.stream for a in moves} == {stream}
        assert not any(a.places for a in moves)
    shared = [o for s, o in program.slots["host"] if s in lasting]
    assert len(set(shared)) < len(shared)
    again = parse_program(program.text().splitlines(), graph, program.tiers)
    assert again.fingerprint == program.fingerprint
    verify(again)


def test_rejections_of_moves_past_the_device() -> None:
    program = on_the_disk()
    actions = program.actions
    load = find(program, lambda a: (a.source, a.target) == ("disk", "host"), -1)
    worked = find(program, lambda a: load.id in a.waits)
    store = find(program, lambda a: (a.source, a.target) == ("host", "disk") and worked.id in a.waits)
    taken = find(program, lambda a: (a.source, a.target) == ("disk", "host") and bool(a.waits))
    assert [actions[wait].kind for wait in taken.waits] == [ActionKind.FREE]
    assert_rejects(drop_wait(program, worked.id, load.id), worked.id, "may still be writing")
    assert_rejects(drop_wait(program, taken.id, taken.waits[0]), taken.id, "need not have ended")
    assert_rejects(edit(program, load.id, stream="host_write"), load.id, "expected stream 'disk_read'")
    assert_rejects(drop_wait(program, store.id, worked.id), store.id, "may still be writing")
    last = find(program, lambda a: (a.source, a.target) == ("host", "disk"), -1)
    with pytest.raises(ProgramError, match="in disk, its home, is old at the end of the step"):
        verify(drop_action(drop_action(program, last.id), last.id))
    kept = edit(program, store.id + 1, source="disk")
    assert_rejects(kept, store.id + 1, "lower tiers keep all but what passes through the host to be worked on")
