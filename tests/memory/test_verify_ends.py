"""The verifier's bounds: arena, budgets, slots, the caller, and what must hold when a step ends."""

from __future__ import annotations

from dataclasses import replace

from tests.programs import (
    DEVICE,
    PAGE,
    GraphBuilder,
    ProgramBuilder,
    assert_rejects,
    chain,
    drop_action,
    edit,
    find,
    keep_all,
)

from lading.ir.action import CALLER, ActionKind
from lading.ir.graph import OpKind, Role
from lading.ir.program import Program
from lading.memory.tier_layout import home_tiers
from lading.memory.verify import verify


def test_home_is_the_device_or_the_farthest_slot() -> None:
    graph = chain(1).graph
    program = ProgramBuilder(graph, {1: DEVICE, 2: "disk"}, {"host": [2, 3], "disk": [2, 1]}).program()
    assert home_tiers(program) == {1: DEVICE, 2: "disk"}


def test_arena_bounds_and_alignment(base: Program) -> None:
    compute = find(base, lambda a: a.kind is ActionKind.COMPUTE)
    (storage, _), *_ = compute.places
    beyond = edit(base, compute.id, places=((storage, base.arena_bytes),))
    assert_rejects(beyond, compute.id, "does not lie within the arena")
    assert_rejects(edit(base, compute.id, places=((storage, -PAGE),)), compute.id, "does not lie within the arena")
    assert_rejects(edit(base, compute.id, places=((storage, 64),)), compute.id, "multiple of 4096")
    loss = find(base, lambda a: a.kind is ActionKind.COMPUTE and any(s == 10 for s, _ in a.places))
    places = tuple((s, o + 8 if s == 10 else o) for s, o in loss.places)
    assert_rejects(edit(base, loss.id, places=places), loss.id, "multiple of 64")


def test_what_begins_within_the_arena_ends_there() -> None:
    program = keep_all(chain(1, size_bytes=2 * PAGE)).program()
    compute = find(program, lambda a: a.kind is ActionKind.COMPUTE)
    places = ((compute.places[0][0], program.arena_bytes - PAGE), *compute.places[1:])
    assert_rejects(edit(program, compute.id, places=places), compute.id, "does not lie within the arena")


def test_budgets(base: Program) -> None:
    for tier in ("device", "disk"):
        tight = {**base.budgets, tier: base.budgets[tier] - 1}
        assert_rejects(replace(base, budgets=tight), None, rf"at most {tight[tier]} bytes in tier {tier}.*by 1 bytes")
        none = {t: n for t, n in base.budgets.items() if t != tier}
        assert_rejects(replace(base, budgets=none), None, f"expected a budget for tier {tier}")
    assert_rejects(replace(base, overhead_bytes=base.overhead_bytes + 1), None, "tier device")
    assert_rejects(replace(base, workspace_bytes=-1), None, "found a negative one")


def test_slots_and_resident(base: Program) -> None:
    (first, at), (second, _), *rest = base.slots["disk"]
    assert_rejects(replace(base, slots={"disk": ((first, at), (second, at), *rest)}), None, "overlap in disk")
    assert_rejects(replace(base, slots={"disk": ((first, 64), *rest)}), None, "multiples of 4096 B")
    assert_rejects(replace(base, slots={"disk": (*base.slots["disk"], (first, 1 << 14))}), None, "twice")
    assert_rejects(replace(base, slots={**base.slots, "tape": ()}), None, "slots in tiers among")
    assert_rejects(replace(base, slots={"disk": ((99, 0),)}), None, r"expected storage ids .* slots of disk")
    (weight, offset), *others = base.resident
    assert_rejects(replace(base, resident=((0, offset), *others)), None, "does not outlive the step")
    assert_rejects(replace(base, resident=((weight, offset), *base.resident)), None, "twice")
    assert_rejects(replace(base, resident=((99, offset), *others)), None, "expected storage ids .* `resident`")
    assert_rejects(replace(base, resident=tuple(others)), None, "give it a home")
    on_top = ((weight, others[0][1]), *others)
    assert_rejects(replace(base, resident=on_top), None, "`resident`: .* overlaps")


def test_batch_and_losses_only_with_the_caller(base: Program) -> None:
    out = find(base, lambda a: a.target == CALLER)
    assert_rejects(drop_action(base, out.id), None, "expected every loss to go to the caller")
    assert_rejects(edit(base, out.id, storage=7), out.id, "expected a loss")
    enter = find(base, lambda a: a.source == CALLER)
    assert_rejects(edit(base, enter.id, storage=8, places=((8, enter.places[0][1]),)), enter.id, "expected an input")


def test_a_written_input_is_no_longer_the_callers() -> None:
    build = GraphBuilder()
    x = build.storage("x", 64, Role.INPUT)
    build.op([], [], [x])
    p = ProgramBuilder(build.graph(), {}, {})
    p.batch(x)
    p.free(x)
    p.batch(x)
    p.run(0)
    p.free(x)
    verify(p.program())
    again = p.batch(x)
    p.free(x)
    assert_rejects(p.program(), again, "was written since")


def test_leak(base: Program) -> None:
    free = find(base, lambda a: a.kind is ActionKind.FREE, -1)
    storage = free.storage
    placed = [a.id for a in base.actions if any(s == storage for s, _ in a.places)][-1]
    assert_rejects(drop_action(base, free.id), placed, "does not outlive the step; free it")


def test_persistent_storage_goes_home(base: Program) -> None:
    store = find(base, lambda a: a.target == "disk", -1)
    free = find(base, lambda a: a.kind is ActionKind.FREE and a.storage == store.storage)
    assert base.graph.storages[store.storage or 0].role is Role.OPTIMIZER_STATE
    assert_rejects(drop_action(base, store.id), free.id - 1, "in disk, its home, is old")
    loads = [a.id for a in base.actions if any(s == store.storage for s, _ in a.places)]
    assert_rejects(drop_action(base, free.id), loads[-1], "left on the device but its home is disk")


def resident_round_trip(offset: int) -> Program:
    """A resident weight is written, stored, freed and loaded back at ``offset``."""
    build = GraphBuilder()
    weight = build.storage("w", PAGE, Role.PARAMETER)
    build.op([], [], [weight], kind=OpKind.STEP)
    p = ProgramBuilder(build.graph(), {weight: DEVICE}, {"disk": [weight]})
    p.run(0)
    p.evict(weight, "disk")
    p.load(weight, "disk", offset)
    return p.program()


def test_resident_ends_with_its_current_value() -> None:
    """A resident storage that an op creates and another writes is created once more and left so."""
    build = GraphBuilder()
    weight = build.storage("w", PAGE, Role.BUFFER)
    build.op([], [weight])
    build.op([], [], [weight])
    p = ProgramBuilder(build.graph(), {weight: DEVICE}, {})
    p.free(weight)
    p.run(0)
    p.run(1)
    verify(p.program())
    p.free(weight)
    again = p.recompute(0)
    assert_rejects(p.program(), again, "ends the step with an old value")


def test_resident_ends_where_it_began() -> None:
    verify(resident_round_trip(0))
    moved = resident_round_trip(PAGE)
    assert_rejects(moved, 3, "ends the step at 4096, expected 0")
    assert_rejects(drop_action(resident_round_trip(0), 3), 2, "in `resident` but gone at the end")
