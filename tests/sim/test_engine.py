"""The simulator: hand-computed times with shared disk rates, and what must hold of every timeline."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.machines import machine_with_host
from tests.programs import (
    DEVICE,
    GraphBuilder,
    ProgramBuilder,
    chain,
    edit,
    keep_all,
    machine,
    offloaded,
    with_actions,
)
from tests.random_programs import random_program

from lading.cost.compute import op_costs
from lading.cost.hosting import caller_seconds, move_seconds
from lading.errors import SimulationError
from lading.ir.action import CALLER, Action, ActionKind
from lading.ir.graph import Op, OpKind, Phase, Role, StepGraph, Storage, Tensor
from lading.ir.machine import Machine
from lading.ir.program import HOST_STREAM, ActionList, Program, slot_bytes
from lading.ir.timeline import Timeline
from lading.memory.verify import verify
from lading.sim.device_step import simulate, stall_s, step_times

STREAMS = ("compute", "host_read", "host_write", "disk_read", "disk_write")


def spans(timeline: Timeline) -> dict[int, tuple[float, float]]:
    return {e.action: (e.start_s, e.end_s) for e in timeline.events}


def two_weights(read_bytes: int, write_bytes: int, *, tiers: tuple[str, str] = ("disk", "disk")) -> Program:
    """Action 2 loads weight r from one tier; action 1 stores weight w, once action 0 has written it, in another.

    0 STEP on w, 1 MOVE w out, 2 MOVE r in, 3 COMPUTE on r, 4 FREE r, 5 FREE out.
    """
    build = GraphBuilder()
    r = build.storage("r", read_bytes, Role.PARAMETER)
    w = build.storage("w", write_bytes, Role.PARAMETER)
    out = build.storage("out", 64, Role.ACTIVATION)
    build.op([], [], [w], kind=OpKind.STEP)
    build.op([r], [out])
    slots: dict[str, list[int]] = {tier: [] for tier in tiers}
    slots[tiers[0]].append(r)
    slots[tiers[1]].append(w)
    p = ProgramBuilder(build.graph(), {r: tiers[0], w: DEVICE}, slots)
    p.run(0)
    p.store(w, tiers[1])
    p.load(r, tiers[0])
    p.run(1)
    p.free(r)
    p.free(out)
    program = p.program()
    verify(program)
    return program


def test_shared_disk_by_hand() -> None:
    """Read of 1000 B: latency 0-1, alone at 100 B/s in 1-5 (400 B), mixed at 50 B/s from 5.

    The write starts at 4, its latency ends at 5, 400 B at the mixed 80 B/s take to 10. By then 250 more were read; the
    last 350 B go at 100 B/s: 13.5.
    """
    timeline = simulate(two_weights(1000, 400), machine(), op_seconds=[4.0, 2.0])
    assert spans(timeline) == {
        0: (0.0, 4.0), 1: (4.0, 10.0), 2: (0.0, 13.5), 3: (13.5, 15.5), 4: (15.5, 15.5), 5: (15.5, 15.5),
    }  # fmt: skip
    assert timeline.duration_s == 15.5
    assert stall_s(timeline, two_weights(1000, 400)) == 9.5


def test_the_write_that_lasts_longer_speeds_up() -> None:
    """Mixed from 5 until the read's last 100 B are done at 7; of 960 B written 160 so far, 800 B at 200 B/s to 11."""
    timeline = simulate(two_weights(500, 960), machine(), op_seconds=[4.0, 2.0])
    assert spans(timeline)[2] == (0.0, 7.0)
    assert spans(timeline)[1] == (4.0, 11.0)


def test_operations_slow_in_proportion_to_the_rates_beside_them() -> None:
    """A read alone makes them 1.5 times as long. At mixed rates it takes half of that, and the write 80 / 200 of 0.4.

    The STEP: 1 s, then 3 s at 1.5, ends at 5.5, and its write begins to move at 6.5. The 4 s beside: 2/3 s done by
    then, 10/3 s at 1.41, ends at 11.2, before the write does at 11.5.
    """
    build = GraphBuilder()
    r, w = build.storage("r", 1000, Role.PARAMETER), build.storage("w", 400, Role.PARAMETER)
    x, out = (build.storage(name, 64, Role.ACTIVATION) for name in ("x", "out"))
    build.op([], [], [w], kind=OpKind.STEP)
    build.op([], [x])
    build.op([r, x], [out])
    p = ProgramBuilder(build.graph(), {r: "disk", w: DEVICE}, {"disk": [r, w]})
    p.run(0)
    p.store(w, "disk")
    p.load(r, "disk")
    p.run(1)
    p.run(2)
    for storage in (r, x, out):
        p.free(storage)
    program = p.program()
    verify(program)
    toy = machine()
    tiers = tuple(replace(t, read_slowdown=0.5, write_slowdown=0.4) if t.name == "disk" else t for t in toy.tiers)
    found = spans(simulate(program, replace(toy, tiers=tiers), op_seconds=[4.0, 4.0, 1.0]))
    assert found[0] == pytest.approx((0.0, 5.5))
    assert found[1] == pytest.approx((5.5, 11.5))
    assert found[3] == pytest.approx((5.5, 11.2))
    assert found[4] == pytest.approx((13.5, 14.5))


def test_a_small_move_waits_for_the_turns_of_a_large_one() -> None:
    """Turns of 400 B, one after another: 100 B/s read or 200 written, so full turns move 400 B each way in 6 s.

    The read is in its latency until 1, then alone, and of its 1000 B 400 are there at 5 when the write of 50 B begins
    to move. A turn of the read takes 4 s and one of the write 0.25: the write has 50 B in 4.25 s, until 9.25, and the
    read 400. The last 200 B come alone.
    """
    both = 400 / 6
    turns = {"mixed_read_bytes_per_s": both, "mixed_write_bytes_per_s": both}
    tiers = tuple(replace(t, turn_bytes=400, **turns) if t.name == "disk" else t for t in machine().tiers)
    found = spans(simulate(two_weights(1000, 50), replace(machine(), tiers=tiers), op_seconds=[4.0, 2.0]))
    assert found[1] == pytest.approx((4.0, 9.25))
    assert found[2] == pytest.approx((0.0, 11.25))


def test_operations_take_longer_while_a_move_is_prepared() -> None:
    """The read waits for its tier until 1: of the operation's 4 s half a second is done by then, so it ends at 4.5."""
    tiers = tuple(replace(t, latency_slowdown=1.0) if t.name == "disk" else t for t in machine().tiers)
    found = spans(simulate(two_weights(1000, 400), replace(machine(), tiers=tiers), op_seconds=[4.0, 2.0]))
    assert found[0] == pytest.approx((0.0, 4.5))
    assert found[1][0] == pytest.approx(4.5)


@pytest.mark.parametrize(("kind", "ends"), [(OpKind.MATMUL, 4.5), (OpKind.ELEMENTWISE, 5.0)])
def test_passes_and_products_have_slowdowns_of_their_own(kind: OpKind, ends: float) -> None:
    """The read transfers from 1 on: 3 s of the operation's 4 take 1/6 longer if it is a product, else 1/3."""
    slower = {"read_slowdown": 1 / 6, "read_slowdown_of_passes": 1 / 3}
    tiers = tuple(replace(t, **slower) if t.name == "disk" else t for t in machine().tiers)
    program = two_weights(1000, 400)
    ops = (replace(program.graph.ops[0], kind=kind), *program.graph.ops[1:])
    program = replace(program, graph=replace(program.graph, ops=ops))
    found = spans(simulate(program, replace(machine(), tiers=tiers), op_seconds=[4.0, 2.0]))
    assert found[0] == pytest.approx((0.0, ends))


def test_two_tiers_share_nothing() -> None:
    program = two_weights(1000, 400, tiers=("disk", "host"))
    timeline = simulate(program, machine(), op_seconds=[4.0, 2.0])
    assert spans(timeline)[1] == (4.0, 7.0)
    assert spans(timeline)[2] == (0.0, 11.0)


@pytest.mark.parametrize(("tier", "longer_s"), [("host", 1 / 3), ("disk", 1 / 2)])
def test_bytes_of_a_disk_go_through_the_hosts_memory_twice(tier: str, longer_s: float) -> None:
    """They go in and out of it. The host has 2 GB/s and computes for 10 s; beside it 1 GB moves at 1 GB/s."""
    storages, tensors = (Storage("w", 10**9, Role.PARAMETER),), (Tensor(0, "uint8", (10**9,), (1,)),)
    update = Op("f", Phase.OPTIMIZER, (), (), (), (), (), (), "", OpKind.STEP)
    moves = Action(1, ActionKind.MOVE, f"{tier}_read", storage=0, source=tier, target=DEVICE)
    actions = ActionList().extend([Action(0, ActionKind.STEP, HOST_STREAM, op=0), moves])
    program = Program((actions,), StepGraph(storages, tensors, (update,), (), (), ((),), ()), arena_bytes=10**9)
    duration_s, _ = step_times(program, machine_with_host(), op_seconds=[10.0])
    assert duration_s == pytest.approx(10.0 + longer_s, abs=1e-3)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_move_alone_takes_what_the_cost_model_says(direction: str) -> None:
    program = two_weights(7000, 900)
    toy = machine()
    disk = toy.tier("disk")
    assert disk is not None
    start, end = spans(simulate(program, toy, op_seconds=[1e3, 1.0]))[2 if direction == "read" else 1]
    if direction == "read":
        assert end - start == pytest.approx(move_seconds(7000, disk, "read"))
    else:
        assert end - start == pytest.approx(move_seconds(900, disk, "write"))


def test_moves_of_the_caller_cost_memory_bandwidth() -> None:
    program = keep_all(chain(1, size_bytes=500_000)).program()
    timeline = simulate(program, machine(), op_seconds=[1.0] * len(program.graph.ops))
    enter = next(a.id for a in program.actions if a.source == CALLER)
    assert spans(timeline)[enter] == (0.0, 1.0)


def test_default_costs_are_those_of_the_cost_model() -> None:
    program = keep_all(chain(2)).program()
    costs = op_costs(program.graph, machine().device)
    assert simulate(program, machine()) == simulate(program, machine(), op_seconds=costs)


def test_labels_and_events() -> None:
    program = offloaded(chain(3), recompute=(0,)).program()
    timeline = simulate(program, machine(), op_seconds=[1.0] * len(program.graph.ops))
    assert timeline.source == "predicted"
    assert timeline.peak_bytes == program.peak_bytes
    assert timeline.labels == {a.id: program.label(a) for a in program.actions}
    assert sorted(e.action for e in timeline.events) == list(range(len(program.actions)))


def test_memory_of_a_tier_starts_at_home_and_stays_in_its_slots() -> None:
    chained = chain(3, size_bytes=5000)
    program = offloaded(chained).program(overhead_bytes=123)
    timeline = simulate(program, machine(), op_seconds=[1.0] * len(program.graph.ops))
    samples = [s for s in timeline.memory if s.tier == "disk"]
    assert samples[0].bytes_by_role == {"optimizer_state": 3 * 8192}
    assert all(s.bytes_by_role["optimizer_state"] == 3 * 8192 for s in samples)
    assert max(s.total_bytes for s in samples) == 5 * 8192 <= program.tier_bytes("disk")
    assert all(s.bytes_by_role["overhead"] == 123 for s in timeline.memory if s.tier == "device")


def test_deadlock_is_an_error() -> None:
    program = two_weights(100, 100)
    with pytest.raises(SimulationError, match=r"deadlock .*action 0 \["):
        simulate(edit(program, 0, waits=(3,)), machine(), op_seconds=[1.0, 1.0])
    with pytest.raises(SimulationError, match="deadlock"):
        simulate(edit(program, 0, waits=(99,)), machine(), op_seconds=[1.0, 1.0])


def test_what_has_no_cost_is_an_error() -> None:
    program = two_weights(100, 100)
    toy = machine()
    with pytest.raises(SimulationError, match="expected 2 op_seconds"):
        simulate(program, toy, op_seconds=[1.0])
    with pytest.raises(SimulationError, match="for op 1"):
        simulate(program, toy, op_seconds=[1.0, float("nan")])
    with pytest.raises(SimulationError, match=r"action 1 \[.*needs tier 'disk'"):
        simulate(program, replace(toy, tiers=toy.tiers[:1]), op_seconds=[1.0, 1.0])
    gather = Action(0, ActionKind.UNSHARD, "compute")
    with pytest.raises(SimulationError, match=r"action 0 \[0 UNSHARD compute\] has no cost"):
        simulate(with_actions(program, (gather,)), toy, op_seconds=[1.0, 1.0])


# What holds of every program.


def random_case(seed: int) -> tuple[Program, list[float], float]:
    """A valid program, its op seconds (some 0) and the tiers' latency."""
    rng = Random(seed)
    program = random_program(rng)
    seconds = [rng.choice((0.0, 1.0, rng.expovariate(0.05))) for _ in program.graph.ops]
    return program, seconds, rng.choice((0.0, 1.0, 30.0))


@given(st.integers(0, 1 << 30))
def test_same_input_same_log(seed: int) -> None:
    program, seconds, latency_s = random_case(seed)
    first = simulate(program, machine(latency_s=latency_s), op_seconds=seconds)
    again, again_seconds, _ = random_case(seed)
    assert first == simulate(again, machine(latency_s=latency_s), op_seconds=again_seconds)
    assert first.duration_s == step_times(program, machine(latency_s=latency_s), op_seconds=seconds)[0]


@given(st.integers(0, 1 << 30))
@settings(max_examples=150)
def test_order_of_events(seed: int) -> None:
    """The clock never goes back, no stream overlaps itself, all waits are kept and no start is put off for nothing."""
    program, seconds, latency_s = random_case(seed)
    timeline = simulate(program, machine(latency_s=latency_s), op_seconds=seconds)
    at = spans(timeline)
    assert sorted(at) == list(range(len(program.actions)))
    starts = [e.start_s for e in timeline.events]
    assert starts == sorted(starts)
    times = [s.time_s for s in timeline.memory if s.tier == "device"]
    assert times == sorted(times)
    free_at = dict.fromkeys(STREAMS, 0.0)
    for action in program.actions:
        start, end = at[action.id]
        assert start <= end
        assert start == max([free_at[action.stream], *(at[w][1] for w in action.waits)])
        free_at[action.stream] = end


@given(st.integers(0, 1 << 30))
def test_durations(seed: int) -> None:
    """Ops last what they cost; a move lies between its time alone and its time at the mixed rate throughout."""
    program, seconds, latency_s = random_case(seed)
    toy = machine(latency_s=latency_s)
    for event in simulate(program, toy, op_seconds=seconds).events:
        action = program.actions[event.action]
        lasted = event.end_s - event.start_s
        if action.op is not None:
            assert lasted == pytest.approx(seconds[action.op], abs=1e-9)
        elif action.kind is ActionKind.FREE:
            assert lasted == 0.0
        elif CALLER not in (action.source, action.target):
            size = program.graph.storages[action.storage or 0].size_bytes
            full, mixed = (100.0, 50.0) if action.target == DEVICE else (200.0, 80.0)
            assert latency_s + size / full - 1e-6 <= lasted <= latency_s + size / mixed + 1e-6


def critical_path_s(program: Program, toy: Machine, seconds: list[float]) -> float:
    """Seconds of the longest chain of actions, each after the one before on its stream or after those it waits for."""
    ends: list[float] = []
    free_at: dict[str, float] = {}
    for action in program.actions:
        lasts = seconds[action.op] if action.op is not None else 0.0
        if action.kind is ActionKind.MOVE:
            size = program.graph.storages[action.storage or 0].size_bytes
            if CALLER in (action.source, action.target):
                lasts = caller_seconds(size, toy.device)
            else:
                lasts = toy.tiers[0].latency_s + size / (100.0 if action.target == DEVICE else 200.0)
        ready = max([free_at.get(action.stream, 0.0), *(ends[wait] for wait in action.waits)])
        ends.append(ready + lasts)
        free_at[action.stream] = ends[-1]
    return max(ends, default=0.0)


@given(st.integers(0, 1 << 30))
def test_bounds(seed: int) -> None:
    """Makespan is at least the critical path and each stream's work; the stall is what compute does not fill."""
    program, seconds, latency_s = random_case(seed)
    toy = machine(latency_s=latency_s)
    timeline = simulate(program, toy, op_seconds=seconds)
    slack = 1e-9 * timeline.duration_s
    assert timeline.duration_s >= critical_path_s(program, toy, seconds) - slack
    assert all(timeline.duration_s >= timeline.busy_s(stream) - slack for stream in STREAMS)
    assert stall_s(timeline, program) == pytest.approx(timeline.duration_s - timeline.busy_s("compute"), abs=1e-6)


@given(st.integers(0, 1 << 30))
def test_equal_rates_reach_the_critical_path(seed: int) -> None:
    """Where the two directions do not slow each other, makespan is the critical path."""
    program, seconds, latency_s = random_case(seed)
    toy = machine(latency_s=latency_s, mixed_read_bytes_per_s=100.0, mixed_write_bytes_per_s=200.0)
    expected = critical_path_s(program, toy, seconds)
    assert simulate(program, toy, op_seconds=seconds).duration_s == pytest.approx(expected)


@given(st.integers(0, 1 << 30))
def test_memory(seed: int) -> None:
    """Device bytes begin and end with the resident set, and never exceed the arena."""
    program, seconds, latency_s = random_case(seed)
    timeline = simulate(program, machine(latency_s=latency_s), op_seconds=seconds)
    samples = [s.bytes_by_role for s in timeline.memory if s.tier == "device"]
    assert samples[0] == samples[-1]
    sizes = [slot_bytes(program.graph.storages[s].size_bytes) for s, _ in program.resident]
    assert sum(samples[0].values()) == sum(sizes) + program.overhead_bytes
    assert all(n > 0 for sample in samples for n in sample.values())
    assert timeline.peak_of_tier("device") <= program.arena_bytes + program.overhead_bytes


def test_thinking_does_not_import_torch() -> None:
    code = "import sys, lading.sim.device_step, lading.memory.verify; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.long
def test_a_large_program_takes_a_moment() -> None:
    program = offloaded(chain(500), recompute=tuple(range(0, 500, 2))).program()
    start = time.process_time()
    simulate(program, machine(), op_seconds=[1.0] * len(program.graph.ops))
    assert time.process_time() - start < 1.0
