"""Lower tiers as the arena: slots lie apart and aligned, and a fetch waits for the write-back of what it reads.

Each fault is put into a Program and into the lowering that makes one: the verifier refuses it before anything runs, and
brute force finds what would have gone wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.interpreter import Fault, find_fault, run_delayed, run_random
from tests.machines import small_machine
from tests.memory.test_verify_host import lowered
from tests.planner.steps import NO_LIMIT, options_of, step_of
from tests.programs import PAGE, GraphBuilder, ProgramBuilder, assert_rejects, chain, edit, find, offloaded

from lading.errors import ProgramError
from lading.ir.graph import OpKind, Role, StepGraph
from lading.ir.host_ops import hosted
from lading.ir.machine import Machine
from lading.ir.plan import Option
from lading.ir.program import HOST_STREAM, LINE_BYTES, Program
from lading.memory.verify import verify
from lading.planner import lower
from lading.planner.lower import StepCosts

Slots = dict[str, tuple[tuple[int, int], ...]]


def refusal(program: Program) -> str:
    """Why the verifier refuses a program; "" where it does not."""
    try:
        verify(program)
    except ProgramError as error:
        return str(error)
    return ""


def fetched_back(tier: str) -> tuple[Program, int]:
    """An activation goes to a tier and comes back; with the number of the fetch."""
    build = GraphBuilder()
    x = build.storage("x", PAGE, Role.INPUT)
    a, b, c = (build.storage(name, PAGE, Role.ACTIVATION) for name in "abc")
    build.op([x], [a])
    build.op([a], [b])
    build.op([a, b], [c])
    p = ProgramBuilder(build.graph(), {}, {tier: [a]}, reuse=False)
    p.batch(x)
    p.run(0)
    p.run(1)
    p.evict(a, tier)
    fetch = p.load(a, tier)
    p.run(2)
    p.free_all()
    return p.program(), fetch


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_fetch_waits_for_its_own_write_back(tier: str) -> None:
    program, fetch = fetched_back(tier)
    verify(program)
    assert not find_fault(program, Random(0), num_random=5)
    stored = find(program, lambda a: a.target == tier)
    hasty = edit(program, fetch, waits=())
    assert_rejects(hasty, fetch, f"reads the {tier} copy that action {stored.id} may still be writing; wait for it")
    assert find_fault(hasty, Random(0), num_random=20)


def updated_first(seed: int) -> Program:
    """The host's processors update a weight that the device then reads, as where its update was deferred."""
    build = GraphBuilder()
    x = build.storage("x", PAGE, Role.INPUT)
    weight = build.storage("w", PAGE, Role.PARAMETER)
    gradient = build.storage("g", PAGE, Role.GRADIENT)
    output, loss = (build.storage(name, PAGE, Role.ACTIVATION) for name in ("y", "loss"))
    build.losses.append(loss)
    build.op([x], [gradient], kind=OpKind.MATMUL)
    update = build.op([gradient], mutates=[weight], kind=OpKind.STEP, name="adamw")
    build.op([x, weight], [output], kind=OpKind.MATMUL)
    build.op([output], [loss])
    return lowered(hosted(build.graph(), [update]), seed)


def put_off_the_host(program: Program) -> None:
    """Run a program once for each action of the host's processors, which ends as late as it can."""
    for action in program.actions:
        if action.stream == HOST_STREAM:
            run_delayed(program, ("end", action.id))


def test_a_lowering_whose_fetches_do_not_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host's processors wrote is fetched while they write it."""
    seeds = range(3)
    right = [updated_first(seed) for seed in seeds]
    for program in right:
        verify(program)
    writer: Any = lower.__dict__["_ActionWriter"]
    fetch: Callable[[Any, int], None] = writer._fetch

    def hasty(self: Any, index: int) -> None:
        written, self.written = self.written, {}
        fetch(self, index)
        self.written = written

    monkeypatch.setattr(writer, "_fetch", hasty)
    wrong = [updated_first(seed) for seed in seeds]
    changed = [program for program, before in zip(wrong, right, strict=True) if program.text() != before.text()]
    assert changed
    for program in changed:
        assert "reads the host copy that action" in refusal(program)
        with pytest.raises(Fault):
            put_off_the_host(program)


def shifted(program: Program, tier: str, number: int, by: int) -> Program:
    """With one slot of a tier somewhere else, and budget enough."""
    slots = list(program.slots[tier])
    storage, offset = slots[number]
    slots[number] = storage, offset + by
    budgets = {**program.budgets, tier: program.budgets[tier] + abs(by)}
    return replace(program, slots={**program.slots, tier: tuple(slots)}, budgets=budgets)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("size_bytes", [PAGE, 5000])
def test_slots_of_every_tier_lie_apart_and_aligned(tier: str, size_bytes: int) -> None:
    program = offloaded(chain(2, size_bytes), tier).program()
    verify(program)
    run_random(program, Random(0))
    count = len(program.slots[tier])
    assert count >= 4
    for number in range(count):
        for by in (-PAGE, PAGE, LINE_BYTES, -LINE_BYTES):
            changed = shifted(program, tier, number, by)
            if by == PAGE and number == count - 1:
                verify(changed)  # nothing lies behind the last
                run_random(changed, Random(0))
                continue
            assert_rejects(changed, None, f"overlap in {tier} at|multiples of {PAGE} B, found storage .* of {tier}")
            with pytest.raises(Fault, match=tier):
                run_random(changed, Random(0))


def on_disk(graph: StepGraph, machine: Machine) -> Program:
    """Everything that may be on disk between two uses is there."""
    step = step_of(graph, machine, StepCosts((1e-4,) * len(graph.ops), (0,) * len(graph.ops)), NO_LIMIT)
    choices = {key: Option("disk") for key in options_of(step)}
    program = step.lower(choices).program
    assert program is not None
    return program


def _by_a_page(program: Program, slots: Slots) -> Slots:
    return {tier: (*rows[:1], *((s, offset - PAGE) for s, offset in rows[1:])) for tier, rows in slots.items()}


def _end_to_end(program: Program, slots: Slots) -> Slots:
    """Slots one after another, each as long as its storage to the byte."""
    packed: Slots = {}
    for tier, rows in slots.items():
        ends = [0]
        for storage, _ in rows:
            ends.append(ends[-1] + program.graph.storages[storage].size_bytes)
        packed[tier] = tuple((storage, end) for (storage, _), end in zip(rows, ends, strict=False))
    return packed


@pytest.mark.parametrize(
    ("alignment", "fault", "why"),
    [
        (PAGE, _by_a_page, "overlap in disk"),
        (PAGE, _end_to_end, "expected slot offsets at multiples of 4096 B"),
        (1 << 16, _by_a_page, "expected slot offsets at multiples of 65536 B"),
        (1 << 16, _end_to_end, "expected slot offsets at multiples of 65536 B"),
    ],
)
def test_a_lowering_whose_slots_are_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, alignment: int, fault: Callable[[Program, Slots], Slots], why: str
) -> None:
    disk = replace(small_machine().tiers[0], alignment_bytes=alignment)
    machine, graph = replace(small_machine(), tiers=(disk,)), chain(2, 5000).graph
    program = on_disk(graph, machine)
    verify(program)
    run_random(program, Random(0))
    right = lower.__dict__["_tier_slots"]
    monkeypatch.setattr(lower, "_tier_slots", lambda *args: fault(program, right(*args)))
    wrong = on_disk(graph, machine)
    assert wrong.slots != program.slots
    assert why in refusal(wrong)
    with pytest.raises(Fault):
        run_random(wrong, Random(0))
