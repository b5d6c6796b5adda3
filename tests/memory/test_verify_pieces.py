"""The verifier on weights in pieces: what reads a weight whole finds all its pieces, one after another."""

from __future__ import annotations

import dataclasses
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter import find_fault
from tests.programs import DEVICE, PAGE, TIERS, GraphBuilder, assert_rejects, drop_action, edit, find, machine
from tests.random_programs import random_mutation

from lading.errors import ProgramError
from lading.ir.action import ActionKind
from lading.ir.graph import OpKind, Role, StepGraph, Tensor
from lading.ir.plan import Option
from lading.ir.program import Program
from lading.memory.lifetime import gaps, lifetimes
from lading.memory.verify import verify
from lading.planner.lower import StepCosts, lower

PIECES = 3
#: Rejections of form: the verifier asks for more than a correct execution needs.
FORM = re.compile("points backward|multiple of|does not lie within|expected stream|expected from=|already ran")


def pieced_graph(reads: int = 2) -> StepGraph:
    """Weight of three pieces, read whole by each layer and the first two pieces by the last, then updated by piece."""
    build = GraphBuilder()
    for piece in range(PIECES):
        build.storage(f"w[{piece}]", PAGE, Role.PARAMETER)
    layer = build.storage("x", PAGE, Role.INPUT)
    made: list[int] = []
    for number in range(reads):
        made.append(build.storage(f"a{number}", PAGE, Role.ACTIVATION))
        build.op([0, layer], made[-1:])
        layer = made[-1]
    loss = build.storage("loss", 4, Role.ACTIVATION)
    build.losses.append(loss)
    build.op([0, layer], [loss])
    for piece in range(PIECES):
        build.op([layer], mutates=[piece], kind=OpKind.STEP)
    graph = build.graph()
    alone, front = len(graph.tensors), len(graph.tensors) + 1
    ops = list(graph.ops)
    ops[reads] = dataclasses.replace(ops[reads], inputs=(front, layer))
    ops[reads + 1] = dataclasses.replace(ops[reads + 1], mutates=(alone,))
    views = (Tensor(0, "uint8", (PIECES * PAGE,), (1,)), *graph.tensors[1:])
    more = (Tensor(0, "uint8", (PAGE,), (1,)), Tensor(0, "uint8", (PAGE + 1,), (1,)))
    return dataclasses.replace(graph, tensors=(*views, *more), ops=tuple(ops), runs=(tuple(range(PIECES)),))


def program_of(graph: StepGraph, rng: Random | None = None) -> Program:
    """Verified Program in which everything that may leave goes to the disk, or what ``rng`` chooses."""
    lives = lifetimes(graph)
    movable = [gap for gap in gaps(graph, lives) if graph.storages[gap.storage].role is not Role.INPUT]
    movable = [gap for gap in movable if graph.storages[gap.storage].size_bytes == PAGE]
    tiers = {gap: Option("disk") if rng is None else rng.choice([Option.KEEP, *map(Option, TIERS)]) for gap in movable}
    choices = {(gap.storage, gap.start): tier for gap, tier in tiers.items() if tier.tier}
    count = len(graph.ops)
    costs = StepCosts(op_seconds=(1e-4,) * count, workspace_bytes=(0,) * count)
    budgets = {DEVICE: 1 << 40, **dict.fromkeys(TIERS, 1 << 30)}
    program = lower(graph, lives, machine(), costs, choices, budgets).program
    assert program is not None
    verify(program)
    return program


def rejected(program: Program) -> str:
    """Why a Program is rejected; "" where it is accepted."""
    try:
        verify(program)
    except ProgramError as error:
        return str(error)
    return ""


def test_pieces_that_are_read_together_lie_one_after_another() -> None:
    graph = pieced_graph()
    assert graph.op_reads == ((0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 5), (5, 0), (5, 1), (5, 2))
    program = program_of(graph)
    moves = [a for a in program.actions if a.kind is ActionKind.MOVE and a.target == DEVICE and a.storage in (0, 1, 2)]
    assert len(moves) > PIECES
    assert not find_fault(program, Random(0), num_random=50)


def test_a_use_of_a_weight_of_which_a_piece_is_missing_is_refused() -> None:
    program = program_of(pieced_graph())
    missing = find(program, lambda a: a.kind is ActionKind.MOVE and a.storage == 1 and a.target == DEVICE)
    use = find(program, lambda a: a.op == 0)
    assert use.id > missing.id
    assert_rejects(
        drop_action(program, missing.id), use.id - 1, r"expected storage 1 \(w\[1\]\) resident, found it never placed"
    )


def test_a_use_of_a_weight_of_which_a_piece_need_not_have_come_is_refused() -> None:
    program = program_of(pieced_graph())
    use = find(program, lambda a: a.op == 0)
    late = edit(program, use.id, waits=())
    assert_rejects(late, use.id, "whose placing .* need not have ended; wait for it")


def test_a_piece_that_lies_elsewhere_is_refused() -> None:
    program = program_of(pieced_graph())
    move = find(program, lambda a: a.kind is ActionKind.MOVE and a.storage == 2 and a.target == DEVICE)
    away = -(-program.arena_bytes // PAGE) * PAGE
    roomy = dataclasses.replace(program, arena_bytes=away + PAGE)
    moved = edit(roomy, move.id, places=((2, away),))
    use = find(program, lambda a: a.op == 0)
    assert_rejects(moved, use.id, rf"expected storage 2 .* behind the piece of the parameter in front .* at {away};")
    assert find_fault(moved, Random(0), num_random=1)


@given(st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_accepted_or_wrong(seed: int) -> None:
    """After one random change: rejected, or right in random interleavings; what is rejected does go wrong."""
    rng = Random(seed)
    name, program = random_mutation(program_of(pieced_graph(rng.randint(1, 3)), rng), rng)
    why = rejected(program)
    if not why:
        assert not (fault := find_fault(program, rng, num_random=40)), f"{name}: accepted, yet {fault}"
    elif not FORM.search(why):
        assert find_fault(program, rng, num_random=20), f"{name}: rejected, yet nothing goes wrong: {why}"


def test_a_hosted_use_of_several_pieces_is_refused() -> None:
    graph = pieced_graph()
    ops = (dataclasses.replace(graph.ops[0], on_host=True), *graph.ops[1:])
    program = dataclasses.replace(program_of(graph), graph=dataclasses.replace(graph, ops=ops))
    use = find(program, lambda a: a.op == 0)
    with pytest.raises(ProgramError, match="several pieces of a parameter at once"):
        verify(edit(program, use.id, stream="host_compute", places=()))
