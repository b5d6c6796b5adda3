"""The timetable of choices, which knows bytes and no addresses, and what moves changed as it says."""

from __future__ import annotations

import dataclasses

import pytest
from tests.machines import machine_with_host
from tests.planner.steps import captured, within

from lading.ir.host_ops import light_groups
from lading.memory.verify import verify
from lading.planner import trips
from lading.planner.host_balance import hosted_step
from lading.planner.lower import Lowering
from lading.planner.residency import Found, StepProblem
from lading.planner.single_changes import Choices
from lading.planner.streaming import moving
from lading.planner.timetable import Timetable, timetable
from lading.planner.trips import changed_trips


def moved() -> Found:
    """The slowest plan in which whatever waits is on the disk, though there is room for a part of it."""
    step = captured("gpt", num_layers=4)
    step = within(step, int(0.7 * step.needs({})))
    return max(moving(step), key=lambda found: found.step_s)


def timed(step: StepProblem, choices: Choices, share: float = 1.0) -> tuple[Timetable, Lowering]:
    lowering = Lowering(step.graph, step.lives, step.machine, step.costs, choices)
    return timetable(step, lowering.emission, lowering.seconds, int(share * step.arena_bytes)), lowering


def test_a_step_that_moves_nothing_takes_what_it_computes() -> None:
    step = captured("gpt")
    table, lowering = timed(step, {})
    assert table.step_s == pytest.approx(sum(lowering.seconds))
    assert not table.waited_s


def test_a_timetable_is_near_the_program_and_not_below_what_one_stream_takes() -> None:
    found = moved()
    tiers = tuple(
        dataclasses.replace(tier, read_slowdown=0.0, write_slowdown=0.0, latency_slowdown=0.0)
        for tier in found.step.machine.tiers
    )
    step = dataclasses.replace(found.step, machine=dataclasses.replace(found.step.machine, tiers=tiers))
    table, lowering = timed(step, found.choices)
    read = sum(
        step.graph.storages[stay.storage].size_bytes for stay in lowering.emission.residencies if stay.tier == "disk"
    )
    assert table.step_s >= read / tiers[0].read_bytes_per_s
    assert table.step_s == pytest.approx(step.seconds(found.program), rel=0.1)
    assert sum(table.waited_s.values()) <= table.step_s - sum(lowering.seconds) + 1e-9
    assert timed(step, found.choices)[0] == table


def test_early_reads_leave_room_for_what_is_needed() -> None:
    found = moved()
    little, much = (timed(found.step, found.choices, share)[0] for share in (0.0, 1.0))
    assert much.step_s < little.step_s < float("inf")


def test_the_host_works_beside_the_device_on_what_has_gone_down() -> None:
    whole = captured("llama", machine=machine_with_host(elements_per_s=1e6), num_layers=2)
    step = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    table, lowering = timed(step, {})
    hosted_s = sum(step.costs.op_seconds[op] for op in step.graph.on_host)
    assert hosted_s <= table.step_s <= hosted_s + sum(lowering.seconds)
    program = step.lower({}).program
    assert program is not None
    assert table.step_s == pytest.approx(step.seconds(program), rel=0.1)


def test_the_host_takes_longer_beside_what_moves() -> None:
    """It has 2 GB/s of memory, of which gradients that come down take one: a step of it alone lasts up to 1.5 times."""
    whole = captured("llama", machine=machine_with_host(elements_per_s=1e7), num_layers=2)
    step = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    assert step.machine.host_device is not None
    wide = dataclasses.replace(step.machine.host_device, memory_bandwidth_bytes_per_s=1e15)
    alone = dataclasses.replace(step, machine=dataclasses.replace(step.machine, host_device=wide))
    beside_s, alone_s = timed(step, {})[0].step_s, timed(alone, {})[0].step_s
    assert 1.01 * alone_s < beside_s < 1.5 * alone_s
    program = step.lower({}).program
    assert program is not None
    assert abs(beside_s - step.seconds(program)) < abs(alone_s - step.seconds(program))


def test_a_step_without_room_comes_to_a_stop() -> None:
    found = moved()
    step = within(found.step, found.step.budgets["device"] // 2)
    lowering = Lowering(step.graph, step.lives, step.machine, step.costs, {})
    assert lowering.peak_bytes > step.arena_bytes
    assert timetable(step, lowering.emission, lowering.seconds, step.arena_bytes).step_s == float("inf")


@pytest.mark.long
def test_what_moves_is_changed_while_that_makes_the_program_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trips, "_WORK", 30_000)
    found = moved()
    better, *others = changed_trips(found, 0.0)
    assert found in others
    assert min(other.step_s for other in others) >= better.step_s
    assert better.step_s < 0.95 * found.step_s
    assert better.program.peak_bytes <= found.step.budgets["device"]
    verify(better.program)
    assert changed_trips(moved(), 0.0)[0].choices == better.choices


def test_a_plan_near_its_bound_keeps_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = moved()
    monkeypatch.setattr(StepProblem, "lower", lambda *_: pytest.fail("nothing is to be tried"))
    assert changed_trips(found, found.step_s) == [found]
