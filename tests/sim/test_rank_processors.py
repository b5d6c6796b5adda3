"""Processors of a host that its ranks share: priced once, by how many compute at the moment, and beside collectives."""

from __future__ import annotations

import dataclasses

import pytest
from tests.machines import small_machine
from tests.rank_steps import RECV, SEND, Row, program_of, rows_of_replica

from lading.cost.compute import device_costs, placed_costs
from lading.errors import ConfigError
from lading.ir import reduction
from lading.ir.action import ActionKind
from lading.ir.machine import Curve, Machine, Processes
from lading.ir.program import Program
from lading.sim.device_step import simulate, simulate_ranks, straggler_step_s


def host(busy: float = 0.0) -> Machine:
    """A host of two processors, measured with a thread a process."""
    small = small_machine()
    return dataclasses.replace(
        small,
        device=dataclasses.replace(small.device, num_threads=1),
        collectives={"all_reduce.2": Curve(size=(1.0,), rate=(1.0,)), "send.2": Curve(size=(1.0,), rate=(1.0,))},
        processes=Processes(cores=2, slowdown={"memory-bound": (1.0, 1.5)}, busy={"all_reduce.2": busy}),
    )


def program(layout: str, rows: list[Row], peer: int = 0) -> Program:
    made = program_of(layout, rows, peer)
    transfers = {SEND: reduction.SEND, RECV: reduction.RECEIVE}
    names = {action.op: transfers[action.kind] for action in made.actions if action.kind in transfers}
    ops = tuple(dataclasses.replace(op, name=names.get(n, op.name)) for n, op in enumerate(made.graph.ops))
    return dataclasses.replace(made, graph=dataclasses.replace(made.graph, ops=ops), resident=((0, 0),))


def test_ranks_take_turns_at_the_processors_once() -> None:
    graph = program("dp2", rows_of_replica(1, 2)).graph
    product = next(n for n in range(len(graph.ops)) if n not in graph.collectives)
    alone, shared = (device_costs(graph, machine)[product] for machine in (host(), host().shared_by(2)))
    assert shared == pytest.approx(1.5 * alone)
    with pytest.raises(ConfigError, match="expected a whole host, found what one of 2 ranks of one has"):
        host().shared_by(2).shared_by(2)


def test_a_collective_and_computing_beside_it_both_take_longer() -> None:
    # Two ranks of a thread on two processors, whose collective keeps one busy: everything beside it takes 1.5 times
    # as long. Computing of 1 s ends at 2.5; 1 s of the collective's 2 is done by then, and the other needs no more.
    machine, made = host(busy=1.0).shared_by(2), program("dp2", rows_of_replica(1, 3))
    events = {event.action: event for event in simulate(made, machine, op_seconds=[1.0, 2.0, 1.0, 1.0]).events}
    assert events[2].end_s == pytest.approx(2.5)
    assert events[1].end_s == pytest.approx(3.5)
    assert events[3].end_s == pytest.approx(4.5)


def test_a_collective_that_nothing_runs_beside_takes_what_was_measured() -> None:
    rows: list[Row] = [
        ("compute", ActionKind.COMPUTE, (), 0.0, 1.0), ("network", ActionKind.REDUCE_GRAD, (0,), 1.0, 3.0),
        ("compute", ActionKind.STEP, (1,), 3.0, 4.0),
    ]  # fmt: skip
    machine = host(busy=1.6).shared_by(2)
    assert simulate(program("dp2", rows), machine, op_seconds=[1.0, 2.0, 1.0]).duration_s == pytest.approx(4.0)


def test_a_rank_that_computes_slowly_has_the_network_of_the_others() -> None:
    rows: list[Row] = [
        ("compute", ActionKind.COMPUTE, (), 0.0, 1.0), ("network", ActionKind.REDUCE_GRAD, (0,), 1.0, 3.0),
        ("compute", ActionKind.STEP, (1,), 3.0, 4.0),
    ]  # fmt: skip
    made, machine = program("dp2", rows), host()
    first, reduction_s, last = placed_costs(made.graph, machine)
    assert min(first, reduction_s, last) > 0
    slower_s = straggler_step_s([made], machine, 3.0)
    assert slower_s == pytest.approx([3 * (first + last) + reduction_s], rel=1e-9)


def test_a_stage_computes_faster_while_the_others_wait() -> None:
    # Both stages compute at first, then the second waits for the first, which has the host to itself: the 3 s of its
    # second operation, priced among two that compute, take 2.
    sends: list[Row] = [
        ("compute", ActionKind.COMPUTE, (), 0.0, 0.0), ("compute", ActionKind.COMPUTE, (), 0.0, 0.0),
        ("send_3", SEND, (1,), 0.0, 0.0),
    ]  # fmt: skip
    waits: list[Row] = [
        ("compute", ActionKind.COMPUTE, (), 0.0, 0.0), ("receive_3", RECV, (), 0.0, 0.0),
        ("compute", ActionKind.COMPUTE, (1,), 0.0, 0.0),
    ]  # fmt: skip
    programs = [program("pp2", sends, peer=1), program("pp2", waits, peer=0)]
    lines = simulate_ranks(programs, host().shared_by(2), [[3.0, 3.0, 1.0], [3.0, 1.0, 3.0]])
    ends = [{event.action: event.end_s for event in line.events} for line in lines]
    assert [ends[0][0], ends[1][0]] == pytest.approx([3.0, 3.0])
    assert ends[0][1] == pytest.approx(5.0)
    assert ends[1][1] == pytest.approx(6.0)
    assert ends[1][2] == pytest.approx(8.0)


def test_ranks_wait_for_the_last_of_them_as_long_as_their_stretches_differ() -> None:
    # 4 s of computing, then 0.2 * sqrt(4) s for the last of two ranks, the collective of 1 s, and 1 s of computing.
    rows: list[Row] = [
        ("compute", ActionKind.COMPUTE, (), 0.0, 4.0), ("network", ActionKind.REDUCE_GRAD, (0,), 4.0, 5.0),
        ("compute", ActionKind.COMPUTE, (1,), 5.0, 6.0),
    ]  # fmt: skip
    plain, made = host(), program("dp2", rows)
    assert plain.processes is not None
    skewed = dataclasses.replace(plain, processes=dataclasses.replace(plain.processes, skew=(0.0, 0.2)))
    seconds = [4.0, 1.0, 1.0]
    assert simulate(made, plain.shared_by(2), op_seconds=seconds).duration_s == pytest.approx(6.0)
    assert simulate(made, skewed.shared_by(2), op_seconds=seconds).duration_s == pytest.approx(6.4)
    assert simulate(made, skewed, op_seconds=seconds).duration_s == pytest.approx(6.0)  # one process meets nobody
    with pytest.raises(ConfigError, match=r"processes.skew: expected seconds >= 0 from one process on, got \(-1.0,\)"):
        Processes(cores=2, slowdown={"memory-bound": (1.0,)}, skew=(-1.0,))
