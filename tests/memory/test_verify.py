"""The verifier: accepts every valid feature, and names the action that breaks each rule."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
from tests.interpreter import find_fault
from tests.programs import (
    DEVICE,
    PAGE,
    GraphBuilder,
    ProgramBuilder,
    assert_rejects,
    chain,
    drop_action,
    drop_wait,
    edit,
    find,
    keep_all,
    offloaded,
    repeat_action,
    with_actions,
)

from lading.errors import ProgramError
from lading.ir.action import Action, ActionKind
from lading.ir.graph import Role
from lading.ir.program import Program
from lading.memory.verify import AddressedResidency, AddressMap, verify

# Valid programs.


@pytest.mark.parametrize(
    "builder",
    [
        keep_all(chain(3)),
        keep_all(chain(3), reuse=True),
        offloaded(chain(4), "disk"),
        offloaded(chain(4), "host"),
        offloaded(chain(4), "disk", recompute=(0, 1)),
        offloaded(chain(3, size_bytes=100), "disk"),
    ],
    ids=["keep-all", "reused addresses", "disk", "host", "recompute", "small storages"],
)
def test_accepts_every_feature(builder: ProgramBuilder) -> None:
    verify(builder.program())


def versioned() -> ProgramBuilder:
    """a = f(x); b = g(a); a += 1; c = h(a, b): an in-place write between two reads. ids x a b c = 0 1 2 3."""
    build = GraphBuilder()
    x = build.storage("x", PAGE, Role.INPUT)
    a, b, c = (build.storage(name, PAGE, Role.ACTIVATION) for name in "abc")
    build.op([x], [a])
    build.op([a], [b])
    build.op([], [], [a])
    build.op([a, b], [c])
    return ProgramBuilder(build.graph(), {}, {"disk": [a, b]})


def test_accepts_the_recompute_of_an_old_version_for_a_recompute() -> None:
    """b is computed again from a's first version, itself computed again, while a's second version lies on disk."""
    p = versioned()
    p.batch(0)
    p.run(0)
    p.run(1)
    p.free(2)
    p.run(2)
    p.evict(1, "disk")
    p.recompute(0)
    p.recompute(1)
    p.free(1)
    p.load(1, "disk")
    p.run(3)
    p.free_all()
    program = p.program()
    verify(program)
    assert not find_fault(program, Random(0), num_random=100)


def two_outputs() -> ProgramBuilder:
    """(a, b) = f(x); c = g(a, b). ids x a b c = 0 1 2 3."""
    build = GraphBuilder()
    x = build.storage("x", PAGE, Role.INPUT)
    a, b, c = (build.storage(name, PAGE, Role.ACTIVATION) for name in "abc")
    build.op([x], [a, b])
    build.op([a, b], [c])
    p = ProgramBuilder(build.graph(), {}, {})
    p.batch(0)
    p.run(0)
    p.free(1)
    p.recompute(0)
    p.run(1)
    p.free_all()
    return p


def test_recompute_places_exactly_the_outputs_that_are_not_resident() -> None:
    program = two_outputs().program()
    verify(program)
    again = find(program, lambda a: a.kind is ActionKind.RECOMPUTE)
    assert [s for s, _ in again.places] == [1]
    assert_rejects(edit(program, again.id, places=()), again.id, r"exactly the storages \[1\], got \[\]")
    both = (*again.places, (2, 3 * PAGE))
    assert_rejects(edit(program, again.id, places=both), again.id, r"exactly the storages \[1\], got \[1, 2\]")


# One broken rule each. ``base`` has every feature; its ids are chain(3)'s: x 0, w 1-3, m 4-6, a 7-9, loss 10.


def test_ids_are_positions(base: Program) -> None:
    with pytest.raises(ProgramError, match=r"expected action 3, got \[4 ") as caught:
        edit(base, 3, id=4)
    assert caught.value.action_id == 4


def test_waits_point_backward(base: Program) -> None:
    assert_rejects(edit(base, 3, waits=(3,)), 3, "points backward")
    assert_rejects(edit(base, 3, waits=(-1,)), 3, "points backward")


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        (ActionKind.COMPUTE, {"op": 99}, "expected an op in"),
        (ActionKind.COMPUTE, {"op": None}, "expected an op in"),
        (ActionKind.COMPUTE, {"storage": 1}, "expected no storage="),
        (ActionKind.COMPUTE, {"stream": "disk_read"}, "expected stream 'compute'"),
        (ActionKind.COMPUTE, {"stream": "side"}, "expected a stream among"),
        (ActionKind.COMPUTE, {"kind": ActionKind.STEP}, "expected COMPUTE for op"),
        (ActionKind.STEP, {"kind": ActionKind.COMPUTE}, "expected STEP for op"),
        (ActionKind.COMPUTE, {"kind": ActionKind.RESHARD}, "of coarser grain"),
        (ActionKind.COMPUTE, {"places": ()}, "expected an address for exactly"),
        (ActionKind.COMPUTE, {"places": ((99, 0),)}, "expected storage ids"),
        (ActionKind.FREE, {"storage": 99}, "expected a storage in"),
        (ActionKind.FREE, {"op": 0}, "expected no op="),
        (ActionKind.FREE, {"source": "disk"}, "expected from=device"),
        (ActionKind.FREE, {"places": ((0, 0),)}, r"expected places for storages \[\]"),
        (ActionKind.MOVE, {"storage": None}, "expected a storage in"),
        (ActionKind.MOVE, {"source": "disk", "target": "disk"}, "expected from= and to= among"),
        (ActionKind.MOVE, {"stream": "disk_write"}, "expected stream 'compute'"),
        (ActionKind.MOVE, {"places": ()}, r"expected places for storages \[0\]"),
    ],
)
def test_form(base: Program, kind: ActionKind, changes: dict[str, object], why: str) -> None:
    action = find(base, lambda a: a.kind is kind)
    assert_rejects(edit(base, action.id, **changes), action.id, why)


def test_every_op_runs_once(base: Program) -> None:
    last = find(base, lambda a: a.kind is ActionKind.STEP, -1)
    assert_rejects(repeat_action(base, last.id), last.id + 1, "already ran")
    skipped = edit(base, last.id, kind=ActionKind.FREE, op=None, storage=base.graph.ops[last.op or 0].inputs[0])
    free = find(base, lambda a: a.kind is ActionKind.FREE and a.storage == skipped.actions[last.id].storage)
    skipped = drop_action(edit(skipped, last.id, source=DEVICE), free.id)
    assert_rejects(skipped, None, "never do")


def test_a_dependency_may_not_be_reordered() -> None:
    """The write of a before the read of its old value: write after read."""
    p = versioned()
    p.batch(0)
    p.run(0)
    p.run(2)
    p.run(1)
    p.run(3)
    p.free_all()
    assert_rejects(p.program(), 3, "after 1 writes .* found it after 2")


def test_a_read_may_not_come_before_the_write_that_it_wants() -> None:
    p = versioned()
    p.batch(0)
    p.run(0)
    p.run(1)
    p.run(3)
    p.run(2)
    p.free_all()
    assert_rejects(p.program(), 3, "after 2 writes .* found it after 1")


def test_what_is_left_of_a_covered_place_is_remembered() -> None:
    """Who takes the rest of a place has to wait for what lay on all of it."""
    arena, whole = AddressMap(), AddressedResidency(0, 0, version=0)
    assert arena.place(whole, 3 * PAGE) == []
    for place in (1, 0, 2):
        assert arena.place(AddressedResidency(1, place * PAGE, version=0), PAGE) == [whole]


def test_writes_keep_their_order() -> None:
    """Two ops create the same storage, one after the other was read and freed."""
    build = GraphBuilder()
    a = build.storage("a", 64, Role.ACTIVATION)
    build.op([], [a])
    build.op([], [a])
    for order, why in (((0, 1), ""), ((1, 0), "expected 1 writes of storage 0")):
        p = ProgramBuilder(build.graph(), {}, {})
        for op in order:
            p.run(op)
            p.free(a)
        if why:
            assert_rejects(p.program(), 0, why)
        else:
            verify(p.program())


def test_independent_ops_may_be_reordered() -> None:
    build = GraphBuilder()
    x = build.storage("x", 64, Role.INPUT)
    outs = [build.storage(name, 64, Role.ACTIVATION) for name in "ab"]
    for out in outs:
        build.op([x], [out])
    p = ProgramBuilder(build.graph(), {}, {})
    p.batch(x)
    p.run(1)
    p.run(0)
    p.free_all()
    verify(p.program())


def test_read_needs_residency(base: Program) -> None:
    """Without a load, the action that would read the storage is named."""
    step = find(base, lambda a: a.kind is ActionKind.STEP)
    load = find(base, lambda a: a.source == "disk" and a.storage == 6)
    assert load.storage in base.graph.reads(base.graph.ops[step.op or 0])
    assert_rejects(drop_action(base, load.id), step.id - 1, "resident, found it never placed|found it freed")


def test_read_needs_its_producer_to_have_ended(base: Program) -> None:
    step = find(base, lambda a: a.kind is ActionKind.STEP)
    load = find(base, lambda a: a.source == "disk" and a.id in step.waits)
    assert_rejects(drop_wait(base, step.id, load.id), step.id, rf"placing \(action {load.id}\) need not have ended")


def test_store_waits_for_the_write(base: Program) -> None:
    """An in-place optimizer step races with the move of its state to disk."""
    step = find(base, lambda a: a.kind is ActionKind.STEP)
    store = find(base, lambda a: a.target == "disk" and step.id in a.waits)
    assert_rejects(drop_wait(base, store.id, step.id), store.id, rf"write \(action {step.id}\) need not have ended")


def in_place_race() -> Program:
    """A stored activation is written in place; the write waits for the store."""
    p = versioned()
    p.batch(0)
    p.run(0)
    p.run(1)
    p.store(1, "disk")
    p.run(2)
    p.run(3)
    p.free_all()
    return p.program()


def test_in_place_write_waits_for_a_move() -> None:
    program = in_place_race()
    verify(program)
    assert program.actions[4].waits == (3,)
    assert_rejects(drop_wait(program, 4, 3), 4, "in place, which action 3 may still be using")


def test_stale_copy() -> None:
    """The copy on disk is from before the in-place write."""
    p = versioned()
    p.batch(0)
    p.run(0)
    p.run(1)
    p.store(1, "disk")
    p.run(2)
    p.free(1)
    load = p.load(1, "disk")
    p.run(3)
    p.free_all()
    assert_rejects(p.program(), load, r"expected the current value of storage 1 \(a\) \(2 writes\).*after 1 in disk")


def test_copy_must_exist_and_be_written() -> None:
    p = versioned()
    p.batch(0)
    p.run(0)
    p.run(1)
    p.evict(2, "disk")
    load = p.load(2, "disk")
    p.run(2)
    p.run(3)
    p.free_all()
    program = p.program()
    verify(program)
    waits = program.actions[load].waits
    assert_rejects(edit(program, load, waits=()), load, r"disk copy that action 3 may still be writing")
    assert len(waits) == 1
    assert_rejects(drop_action(program, 3), load - 1, r"expected a copy of storage 2 \(b\) in disk, found none")


def test_store_waits_for_an_earlier_load() -> None:
    """The slot must not be overwritten while it is read."""
    p = versioned()
    p.batch(0)
    p.run(0)
    p.evict(1, "disk")
    load = p.load(1, "disk")
    store = p.store(1, "disk")
    p.run(1)
    p.run(2)
    p.run(3)
    p.free_all()
    program = p.program()
    verify(program)
    assert program.actions[store].waits == (load,)
    assert_rejects(drop_wait(program, store, load), store, rf"action {load}\) need not have ended")


def test_store_needs_a_slot(base: Program) -> None:
    store = find(base, lambda a: a.target == "disk")
    slots = {"disk": tuple(pair for pair in base.slots["disk"] if pair[0] != store.storage)}
    assert_rejects(replace(base, slots=slots), store.id, "expected a slot for")


def test_recompute_rules() -> None:
    p = versioned()
    p.batch(0)
    p.run(0)
    p.run(1)
    p.free(2)
    p.run(2)
    wrong = p.recompute(1)
    p.run(3)
    p.free_all()
    assert_rejects(p.program(), wrong, "after 1 writes of this step, found it after 2")
    assert_rejects(edit(p.program(), wrong, op=2, places=()), wrong, "writes in place")
    assert_rejects(edit(p.program(), 2, kind=ActionKind.RECOMPUTE), 2, "has not run yet")


def test_random_ops_are_not_recomputed() -> None:
    p = two_outputs()
    program = p.program()
    ops = (replace(program.graph.ops[0], random=True), program.graph.ops[1])
    again = find(program, lambda a: a.kind is ActionKind.RECOMPUTE)
    assert_rejects(replace(program, graph=replace(program.graph, ops=ops)), again.id, "random")


def test_address_of_a_live_storage(base: Program) -> None:
    first, second = [a for a in base.actions if a.kind is ActionKind.COMPUTE][:2]
    storage, _ = second.places[0]
    there = edit(base, second.id, places=((storage, first.places[0][1]),))
    assert_rejects(there, second.id, "overlaps .* still resident")


def test_overlap_by_one_page() -> None:
    program = keep_all(chain(2, size_bytes=2 * PAGE)).program()
    action = find(program, lambda a: a.kind is ActionKind.COMPUTE)
    (storage, offset), *_ = action.places
    assert_rejects(edit(program, action.id, places=((storage, offset - PAGE),)), action.id, "overlaps")


def test_address_freed_on_another_stream(base: Program) -> None:
    """The new residency does not wait for the FREE of the old one."""
    for action in base.actions:
        for wait in action.waits:
            if base.actions[wait].kind is ActionKind.FREE and action.storage != base.actions[wait].storage:
                why = rf"overlaps .* FREE \(action {wait}\) need not have ended"
                assert_rejects(drop_wait(base, action.id, wait), action.id, why)
                return
    pytest.fail("the base program reuses no address across streams")


def test_same_storage_is_freed_before_it_is_placed_again() -> None:
    p = versioned()
    p.batch(0)
    p.run(0)
    p.store(1, "disk")
    free = p.free(1, "disk_write")
    load = p.load(1, "disk", offset=8 * PAGE)
    for op in (1, 2, 3):
        p.run(op)
    p.free_all()
    program = p.program()
    verify(program)
    store = free - 1
    assert_rejects(edit(program, load, waits=(store,)), load, rf"the FREE \(action {free}\) .* need not have ended")


def test_placed_twice(base: Program) -> None:
    load = find(base, lambda a: a.source == "disk")
    assert_rejects(repeat_action(base, load.id), load.id + 1, "already resident")


def test_free_waits_for_all_uses(base: Program) -> None:
    store = find(base, lambda a: a.target == "disk")
    free = find(base, lambda a: a.kind is ActionKind.FREE and a.storage == store.storage)
    assert_rejects(edit(base, free.id, stream="compute"), free.id, f"while action {store.id} may still use it")


def test_freed_twice(base: Program) -> None:
    free = find(base, lambda a: a.kind is ActionKind.FREE)
    assert_rejects(repeat_action(base, free.id), free.id + 1, rf"already freed by action {free.id}")


def test_freed_first_action() -> None:
    """The first action of the program may be a FREE: its id, 0, is no 'never'."""
    build = GraphBuilder()
    weight = build.storage("w", 64, Role.PARAMETER)
    build.op([], [], [weight])
    p = ProgramBuilder(build.graph(), {weight: DEVICE}, {"disk": [weight]})
    p.free(weight)
    program = p.program()
    assert_rejects(program, None, "never do")
    assert_rejects(repeat_action(program, 0), 1, "already freed by action 0")
    run = Action(1, ActionKind.COMPUTE, "compute", op=0)
    assert_rejects(with_actions(program, (*program.actions, run)), 1, "found it freed by action 0")
    load = Action(1, ActionKind.MOVE, "disk_read", storage=weight, source="disk", target=DEVICE, places=((weight, 0),))
    assert_rejects(with_actions(program, (*program.actions, load)), 1, "expected a copy")


@pytest.mark.long
def test_a_large_program_takes_a_moment() -> None:
    program = offloaded(chain(500), recompute=tuple(range(0, 500, 2))).program()
    assert len(program.actions) > 6000
    start = time.process_time()
    verify(program)
    assert time.process_time() - start < 1.0
