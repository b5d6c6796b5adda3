"""Small steps by hand, lowered and proved safe: what is sent, recomputed, written to a tier or done by the host."""

from __future__ import annotations

import dataclasses

import pytest
from tests.machines import machine_with_host, small_machine
from tests.planner.steps import step_of
from tests.programs import PAGE, GraphBuilder, chain

from lading.ir.action import CALLER, DEVICE, ActionKind
from lading.ir.graph import OpKind, Role, StepGraph
from lading.ir.host_ops import hosted
from lading.ir.machine import Machine
from lading.ir.plan import Option
from lading.ir.program import HOST_STREAM, Program
from lading.ir.reduction import SEND
from lading.memory.lifetime import lifetimes
from lading.memory.verify import verify
from lading.planner.emission import Choices, emit
from lading.planner.lower import StepCosts


def lowered(graph: StepGraph, choices: Choices, machine: Machine) -> Program:
    costs = StepCosts((1e-3,) * len(graph.ops), (0,) * len(graph.ops))
    program = step_of(graph, machine, costs).lower(dict(choices)).program
    assert program is not None
    verify(program)
    return program


@pytest.mark.parametrize("overwritten", [False, True])
def test_what_is_sent_stays_as_it_is_until_it_has_gone(overwritten: bool) -> None:
    """The rank goes on meanwhile: it reads the activation, or writes in place of it, and then needs its memory."""
    build = GraphBuilder()
    x, weight = build.storage("x", PAGE, Role.INPUT), build.storage("w", PAGE, Role.PARAMETER)
    sent, later, loss = (build.storage(name, PAGE, Role.ACTIVATION) for name in ("sent", "later", "loss"))
    build.op([x, weight], [sent])
    send = build.op([sent], kind=OpKind.COLLECTIVE, name=SEND)
    build.op([sent], [later], mutates=[sent] if overwritten else [])
    build.op([later], [loss])
    build.losses.append(loss)
    graph = build.graph()
    ops = list(graph.ops)
    ops[send] = dataclasses.replace(ops[send], kwargs=(("peer", 1), ("tag", "next")))
    program = lowered(dataclasses.replace(graph, ops=tuple(ops)), {}, small_machine(disk=False))
    going = next(action for action in program.actions if action.op == send)
    assert (going.kind, going.stream) == (ActionKind.SEND, "send_next")


def test_an_update_waits_for_what_is_recomputed_with_the_weight() -> None:
    build = GraphBuilder()
    x, weight = build.storage("x", PAGE, Role.INPUT), build.storage("w", PAGE, Role.PARAMETER)
    hidden, loss, last = (build.storage(name, PAGE, Role.ACTIVATION) for name in ("hidden", "loss", "last"))
    gradient, of_weight = (build.storage(name, PAGE, Role.GRADIENT) for name in ("gradient", "of weight"))
    forward = build.op([x, weight], [hidden], kind=OpKind.MATMUL)
    dropped = build.op([hidden], [loss, gradient])
    build.op([gradient], [of_weight])
    update = build.op([of_weight], mutates=[weight], kind=OpKind.STEP)
    build.op([hidden, gradient], [last])
    build.losses.append(loss)
    program = lowered(build.graph(), {(hidden, dropped): Option.RECOMPUTE}, small_machine(disk=False))
    ran = [(action.kind, action.op) for action in program.actions if action.op is not None]
    assert ran.index((ActionKind.RECOMPUTE, forward)) < ran.index((ActionKind.STEP, update))


def test_what_a_recomputation_makes_on_its_way_goes_as_soon_as_it_has_been_read() -> None:
    build = GraphBuilder()
    x = build.storage("x", PAGE, Role.INPUT)
    first, second, third, loss, last = (
        build.storage(name, PAGE, Role.ACTIVATION) for name in ("first", "second", "third", "loss", "last")
    )
    build.op([x], [first])
    again = build.op([first], [second])
    build.op([second], [third])
    dropped = build.op([third], [loss])
    build.op([third, loss], [last])
    build.losses.append(loss)
    graph = build.graph()
    choices = {(third, dropped): Option.RECOMPUTE}
    emission = emit(graph, lifetimes(graph), choices)
    ran = [(item.kind, item.op) for item in emission.items]
    read = ran.index((ActionKind.RECOMPUTE, again))
    stays = [stay for stay in emission.residencies if stay.storage == first]
    assert [stay.last for stay in stays][1:] == [read]
    lowered(graph, choices, small_machine(disk=False))


def test_a_tier_is_written_where_it_lacks_the_value_and_not_again() -> None:
    """A weight that is fetched for forward and for backward goes back once: when it has been updated."""
    made = chain(2)
    weight = made.weights[0]
    uses = [n for n in range(len(made.graph.ops)) if weight in made.graph.op_reads[n]]
    program = lowered(made.graph, {(weight, use): Option("disk") for use in uses}, small_machine())
    moves = [action for action in program.actions if action.kind is ActionKind.MOVE and action.storage == weight]
    routes = [(action.source, action.target) for action in moves]
    assert routes.count((DEVICE, "disk")) == 1
    assert routes.count(("disk", DEVICE)) > 1
    assert CALLER not in {end for route in routes for end in route}


def test_what_the_host_writes_is_fetched_once_it_has() -> None:
    build = GraphBuilder()
    x, weight = build.storage("x", PAGE, Role.INPUT), build.storage("w", PAGE, Role.PARAMETER)
    state, gradient = build.storage("m", PAGE, Role.OPTIMIZER_STATE), build.storage("g", PAGE, Role.GRADIENT)
    loss = build.storage("loss", PAGE, Role.ACTIVATION)
    build.op([x, weight], [loss, gradient])
    there = build.op([gradient], mutates=[state], kind=OpKind.STEP)
    here = build.op([state], mutates=[weight], kind=OpKind.STEP)
    build.losses.append(loss)
    program = lowered(hosted(build.graph(), (there,)), {}, machine_with_host())
    ran = [(action.op, action.stream) for action in program.actions if action.op in (there, here)]
    assert ran == [(there, HOST_STREAM), (here, "compute")]
    fetches = [action for action in program.actions if action.storage == state and action.target == DEVICE]
    assert [action.source for action in fetches] == ["host"]
