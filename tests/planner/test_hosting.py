"""Operations on the host: chosen where the simulated step gets shorter, and nowhere else."""

from __future__ import annotations

import dataclasses
from random import Random

import numpy as np
import pytest
from tests.machines import machine_with_host, small_machine
from tests.planner.steps import NO_LIMIT, captured, needs, random_choices, step_of, within

from lading.cost.compute import host_processors, op_seconds, placed_costs
from lading.errors import ConfigError
from lading.ir.action import ActionKind
from lading.ir.defer import updates
from lading.ir.graph import Phase, Role
from lading.ir.guess import speculated, with_guess
from lading.ir.host_ops import light_groups
from lading.ir.machine import Machine
from lading.ir.plan import Option, Plan
from lading.ir.program import HOST_STREAM, slot_bytes
from lading.memory.restore import restore_program
from lading.memory.verify import verify
from lading.planner.api import make_plan
from lading.planner.fluid import FlowProgram
from lading.planner.forms import lesser_forms
from lading.planner.host_balance import hosted_alike, hosted_step, with_host
from lading.planner.linear import dual_bound_s, solve
from lading.planner.orders import Ordered, deferred_step, sharpened, sharpened_with_host
from lading.planner.relaxation import fold
from lading.planner.residency import Found, StepProblem, flow_bound_s, lower_bound_s
from lading.planner.streaming import streaming
from lading.report.needs import step_needs
from lading.sim.device_step import simulate


def step(**host: float) -> StepProblem:
    """Everything but what one operation touches is on the host."""
    whole = captured("llama", machine=machine_with_host(**host), num_layers=2, dim=256, vocab_size=4000)
    return within(whole, int(0.72 * needs(whole, {})))


def test_hosting_shortens_a_step_that_waits_for_its_states() -> None:
    fast = step(host_bytes_per_s=2e10)
    found = streaming(fast)
    graph = found.step.graph
    assert graph.hosted
    assert found.device_s > 1.05 * found.step_s
    verify(found.program)
    timeline = simulate(found.program, fast.machine)
    assert timeline.duration_s == found.step_s, "costs are those of the place"
    rows = step_needs(found.program, timeline, ["host", "disk"])
    assert all(size >= 0 for row in rows.rows.values() for size in row.values())


def test_transfers_slow_the_host() -> None:
    """Gradients come down at 1 GB/s while the host, which has 2 GB/s, updates: up to half as long again."""
    whole = step()
    ops = [op for group in light_groups(whole.graph) for op in group]
    made = within(hosted_step(whole, ops), NO_LIMIT)
    program = made.lower({}).program
    assert program is not None
    alone = placed_costs(made.graph, made.machine)
    spans = {e.action: e.end_s - e.start_s for e in simulate(program, made.machine).events if e.stream == HOST_STREAM}
    slower = [spans[a.id] / alone[a.op] for a in program.actions if a.id in spans and a.op is not None]
    assert len(slower) == len(ops)
    assert min(slower) == pytest.approx(1.0)
    assert 1.2 < max(slower) < 1.5 + 1e-6


def test_a_slow_host_is_left_alone() -> None:
    slow = step(host_bytes_per_s=2e7, elements_per_s=1e5)
    found = streaming(slow)
    assert not found.step.graph.hosted
    assert found.device_s == 0.0


def test_machines_without_processors_of_a_host() -> None:
    fast = step(host_bytes_per_s=2e10)
    bare = dataclasses.replace(fast, machine=dataclasses.replace(fast.machine, host_device=None))
    found = streaming(bare)
    assert with_host(found, lambda _: None) is found
    with pytest.raises(ConfigError, match="expected a \\[host_device\\]"):
        host_processors(small_machine())
    hosted = hosted_step(fast, streaming(fast).step.graph.hosted)
    op = hosted.graph.hosted[0]
    assert hosted.costs.op_seconds[op] == op_seconds(fast.graph, fast.graph.ops[op], host_processors(fast.machine))


@pytest.mark.slow
def test_a_plan_remembers_what_is_hosted(tmp_path: object) -> None:
    fast = step(host_bytes_per_s=2e10)
    machine = fast.machine
    planned = make_plan(fast.graph, machine, budget=fast.budgets["device"])
    assert planned.plan.choices.hosted == planned.program.graph.hosted != ()
    assert planned.plan.predictions.host_saves_s > 0
    assert "saves" in planned.plan.policies[-1].note
    planned.plan.save(tmp_path / "plan.json")  # type: ignore[operator]
    plan = Plan.load(tmp_path / "plan.json")  # type: ignore[operator]
    assert restore_program(plan, fast.graph, machine).fingerprint == planned.program.fingerprint
    bad = dataclasses.replace(plan, choices=dataclasses.replace(plan.choices, hosted=(0,)))
    with pytest.raises(ConfigError, match="got operation 0"):
        restore_program(bad, fast.graph, machine)


@pytest.mark.long
def test_updates_on_a_guess_run_on_the_host_with_room_for_two_values_of_each() -> None:
    """A copy of what may not count costs the host time, too."""
    machine = machine_with_host(host_bytes_per_s=2e11, elements_per_s=7e9)
    waits = captured("llama", machine=machine, num_layers=2, dim=256, vocab_size=4000, clip_norm=1.0)
    whole = step_of(with_guess(waits.graph, set()), machine)
    found = streaming(within(whole, int(0.72 * needs(whole, {}))))
    graph, guessed = found.step.graph, speculated(found.step.graph)
    assert found.device_s > found.step_s
    changed = {s for op in graph.hosted for s in guessed.intersection(graph.op_writes[op])}
    assert changed
    assert changed <= found.program.second_places["host"].keys()
    lasting = graph.persistent.intersection(s for s, _ in found.program.slots["host"])  # gradients share places
    slots = sum(graph.storages[s].size_bytes for s in lasting)
    copies = sum(graph.storages[s].size_bytes for s in changed)
    assert found.program.tier_bytes("host") >= slots + copies
    op = max(graph.hosted, key=lambda op: sum(graph.storages[s].size_bytes for s in graph.op_writes[op]))
    alone_s = op_seconds(graph, graph.ops[op], host_processors(machine))
    copied_bytes = sum(graph.storages[s].size_bytes for s in graph.op_writes[op])
    assert placed_costs(graph, machine)[op] == pytest.approx(alone_s + 3 * copied_bytes / 2e11)
    verify(found.program)


def forms_on_a_gpu() -> list[StepProblem]:
    """A step and a form of it that computes more, in less memory than all of it needs."""
    whole = captured("gpt", machine=machine_with_host(host_bytes_per_s=2e10), num_layers=2, dim=64, vocab_size=8000)
    forms = lesser_forms(within(whole, int(0.8 * needs(whole, {}))))
    assert len(forms) > 1
    return forms


def test_forms_have_the_same_updates_on_the_host() -> None:
    whole, *_, parts = forms_on_a_gpu()
    ops = [op for group in light_groups(parts.graph)[::2] for op in group]
    hosted = hosted_step(parts, ops)
    alike = hosted_alike(whole, hosted)
    assert alike is not None

    def states(step: StepProblem) -> list[str]:
        graph = step.graph
        return sorted(
            graph.storages[s].name
            for op in graph.on_host
            for s in graph.op_writes[op]
            if "exp_avg" in graph.storages[s].name
        )

    assert states(alike) == states(hosted) != []
    assert alike.graph.ops != hosted.graph.ops
    few = captured("gpt", machine=whole.machine, num_layers=1, dim=64, vocab_size=8000)
    assert hosted_alike(few, hosted) is None


def test_a_bound_with_the_host_is_below_lesser_forms_and_no_lower_than_without_what_the_plan_computes_more() -> None:
    whole, *_, parts = forms_on_a_gpu()
    more_s = sum(parts.costs.op_seconds) - sum(whole.costs.op_seconds)
    assert more_s > 0
    hosted = hosted_step(parts, (op for group in light_groups(parts.graph) for op in group))
    alike = hosted_alike(whole, hosted)
    assert alike is not None
    program = within(hosted, NO_LIMIT).lower({}).program
    assert program is not None
    ordered = Ordered(0, hosted, Found({}, program, hosted), hosted.bound_s, (hosted,))
    own_s, bound_s = sharpened(ordered).bound_s, sharpened_with_host(ordered, parts, [whole, parts]).bound_s
    assert min(own_s, max(alike.bound_s, own_s - more_s)) <= bound_s <= own_s
    lacking = captured("gpt", machine=whole.machine, num_layers=1, dim=64, vocab_size=8000)
    less_s = sum(parts.costs.op_seconds) - sum(lacking.costs.op_seconds)
    assert sharpened_with_host(ordered, parts, [lacking]).bound_s == pytest.approx(max(0.0, own_s - less_s))
    hopeless = within(whole, 1)
    assert hopeless.is_hopeless
    assert sharpened_with_host(ordered, parts, [hopeless]).bound_s == own_s


def test_what_the_host_wrote_leaves_without_being_written_in_bounds_as_in_plans() -> None:
    whole = step()
    made = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    graph = made.graph
    updated = {s for op in graph.on_host for s in graph.op_writes[op] if graph.storages[s].role is Role.PARAMETER}
    gaps = [each for each in made.bound_problem.candidates if each.gap.storage in updated]
    assert gaps
    assert all(each.version is None for each in gaps)
    program = (
        within(made, NO_LIMIT).lower({(each.gap.storage, each.gap.start): Option("host") for each in gaps}).program
    )
    assert program is not None
    moved = [a for a in program.actions if a.kind is ActionKind.MOVE and a.storage in updated]
    assert sum(a.target == "device" for a in moved) >= len(gaps) + len(updated)
    assert not [a for a in moved if a.target == "host"]


def test_a_bound_lets_the_host_run_behind_the_operations_that_stand_beside_it() -> None:
    """All gradients are made at once, and go to the host beside the last operation of the backward."""
    whole = step()
    made = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    last = max(i for i, op in enumerate(made.graph.ops) if op.phase is Phase.BACKWARD)
    seconds = [1.0 if i == last else 1e-6 for i in range(len(made.graph.ops))]
    made = within(dataclasses.replace(made, costs=dataclasses.replace(made.costs, op_seconds=tuple(seconds))), NO_LIMIT)
    program = made.lower({}).program
    assert program is not None
    for windows in (4, 16):
        assert flow_bound_s(made, windows) <= made.simulate(program).duration_s * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_bounds_with_a_busy_host_are_below_all_plans(seed: int, share: float) -> None:
    """The host's memory carries 2 GB/s, of which transfers take up to 2: the host is what takes longest."""
    whole = captured("llama", machine=machine_with_host(), num_layers=2, dim=256, vocab_size=4000)
    whole = deferred_step(within(whole, NO_LIMIT), int(share * len(updates(whole.graph))))
    rng = Random(seed)
    groups = [group for group in light_groups(whole.graph) if rng.random() < 0.8]
    made = hosted_step(whole, (op for group in groups for op in group))
    program = made.lower(random_choices(made, rng)).program
    assert program is not None
    tight = within(made, program.peak_bytes)
    tight = dataclasses.replace(tight, budgets={**tight.budgets, "host": program.tier_bytes("host")})
    step_s = made.simulate(program).duration_s
    for bound_s in (lower_bound_s(tight), *(flow_bound_s(tight, windows) for windows in (1, 4, 16))):
        assert bound_s <= step_s * (1 + 1e-6)


def test_bounds_count_what_transfers_take_from_the_host() -> None:
    """Gradients come down while the host updates: it has a part of its memory's bandwidth, and ends behind the last."""
    whole = step(elements_per_s=5e7)
    made = within(hosted_step(whole, (op for group in light_groups(whole.graph) for op in group)), NO_LIMIT)
    program = made.lower({}).program
    assert program is not None
    made = within(made, program.peak_bytes)
    work, moves = made.bound_problem.host_work, made.bound_problem.host_moves["host"]
    moved = moves.sent.sum() + moves.fetched.sum()
    alone_s = sum(work.seconds)
    assert alone_s == pytest.approx(sum(made.costs.op_seconds[op] for op in made.graph.hosted))
    assert lower_bound_s(made) == pytest.approx(alone_s + moved * work.per_byte["host"])
    assert lower_bound_s(made) > 1.05 * alone_s
    assert flow_bound_s(made, 16) > lower_bound_s(made) + 0.5 * made.bound_problem.op_seconds[: work.since[0]].sum()
    assert flow_bound_s(made, 16) <= made.simulate(program).duration_s * (1 + 1e-6)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_host_works_behind_the_gradients_and_ahead_of_who_reads_what_it_made(deferred: bool) -> None:
    whole = step()
    whole = deferred_step(whole, len(updates(whole.graph)) if deferred else 0)
    made = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    graph, work, last = made.graph, made.bound_problem.host_work, len(made.graph.ops) - 1
    assert work.ops == graph.hosted
    for op, since, until in zip(work.ops, work.since, work.until, strict=True):
        gradients = [s for s in graph.op_reads[op] if graph.storages[s].role is Role.GRADIENT]
        makers = [u for s in gradients for u in made.lives.uses[s] if s in graph.op_writes[u]]
        readers = [u for s in graph.op_writes[op] for u in made.lives.uses[s] if u not in graph.on_host]
        assert (since, until) == ((0, min(readers)) if deferred else (max(makers), last))


def test_a_byte_takes_from_the_host_no_more_than_beside_all_that_can_move() -> None:
    """Work beside moves at r bytes/s takes 1 + r / bandwidth times as long, so each byte 1 / (bandwidth + r)."""
    made = step()
    made = hosted_step(made, (op for group in light_groups(made.graph) for op in group))
    machine, work = made.machine, made.bound_problem.host_work
    assert machine.host_device is not None
    bandwidth = machine.host_device.memory_bandwidth_bytes_per_s
    shares = {tier.name: 1 if tier.host_computes else 2 for tier in machine.tiers}
    most = sum(shares[t.name] * (t.mixed_read_bytes_per_s + t.mixed_write_bytes_per_s) for t in machine.tiers)
    for name, share in shares.items():
        assert work.per_byte[name] <= share / (bandwidth + most) * (1 + 1e-9)
        assert work.per_byte[name] > 0.4 * share / (bandwidth + most)


@pytest.mark.parametrize("layers", [1, 4])
def test_prices_know_the_host_too(layers: int) -> None:
    """Bounds of large steps are those of prices: below the whole program, and with all that takes longest."""
    whole = captured("llama", machine=machine_with_host(), num_layers=2, dim=256, vocab_size=4000)
    made = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    made = within(made, int(0.8 * needs(made, {})))
    folding = fold(made.graph, made.bound_problem.candidates, layers)
    assert folding is not None
    priced_s = dual_bound_s(made.bound_problem, folding, made.arena_bytes)
    assert sum(made.bound_problem.host_work.seconds) < priced_s <= lower_bound_s(made) * (1 + 1e-6)


def test_windows_know_when_gradients_can_go_to_the_host_and_their_bound_is_below_all_plans() -> None:
    """Gradients are made in the backward: one window lets them be written all through the step."""
    whole = step()
    slow = (dataclasses.replace(tier, write_bytes_per_s=tier.write_bytes_per_s / 20) for tier in whole.machine.tiers)
    whole = dataclasses.replace(whole, machine=dataclasses.replace(whole.machine, tiers=tuple(slow)))
    made = within(hosted_step(whole, (op for group in light_groups(whole.graph) for op in group)), NO_LIMIT)
    programs = [made.lower(random_choices(made, Random(seed))).program for seed in range(3)]
    for program in filter(None, programs):
        tight = within(made, program.peak_bytes)
        bound = FlowProgram(tight.bound_problem, tight.arena_bytes, 4).solve()
        assert bound is not None
        assert bound.step_s > 1.02 * lower_bound_s(tight)
        assert bound.step_s <= made.simulate(program).duration_s * (1 + 1e-6)


RATES = ("read_bytes_per_s", "write_bytes_per_s", "mixed_read_bytes_per_s", "mixed_write_bytes_per_s")
#: Ways past the device.
PAST = (("disk", "host"), ("host", "disk"))


def wired(link: float = 1.5) -> Machine:
    """A host whose link the disk of a third to two thirds of its rate shares, and whose processors are quick."""
    machine = machine_with_host(host_bytes_per_s=2e10, elements_per_s=7e8)
    host, disk = machine.tiers
    rates = {name: link * getattr(host, name) for name in RATES}
    return dataclasses.replace(
        machine, tiers=(dataclasses.replace(host, wire="link", **rates), dataclasses.replace(disk, wire="link"))
    )


def states_behind(link: float = 1.5) -> StepProblem:
    """The host's memory has room for less than half of the states, the device for none beside what it works on."""
    whole = captured("llama", machine=wired(link), num_layers=2, dim=256, vocab_size=4000)
    lasting = sum(s.size_bytes for s in whole.graph.storages if s.role in (Role.OPTIMIZER_STATE, Role.PARAMETER))
    step = within(whole, int(0.7 * needs(whole, {})))
    return dataclasses.replace(step, budgets={**step.budgets, "host": int(0.4 * lasting)})


def hosted_from_disk(whole: StepProblem) -> StepProblem:
    """All updates on the host, their states on the disk."""
    states = [s for s, item in enumerate(whole.graph.storages) if item.role is Role.OPTIMIZER_STATE]
    ops = (op for group in light_groups(whole.graph) for op in group)
    return within(hosted_step(whole, ops, dict.fromkeys(states, "disk")), NO_LIMIT)


def test_what_passes_the_device_takes_the_disks_rate_and_no_wire() -> None:
    """Gradients go down the link as fast as without a disk on it; the host is slowed by what it and the disk move."""
    made = hosted_from_disk(captured("llama", machine=wired(), num_layers=2, dim=256, vocab_size=4000))
    program = made.lower({}).program
    assert program is not None
    verify(program)
    loose = dataclasses.replace(
        made.machine, tiers=tuple(dataclasses.replace(tier, wire="") for tier in made.machine.tiers)
    )
    timelines = [simulate(program, machine) for machine in (made.machine, loose)]
    assert [e.end_s for e in timelines[0].events] == pytest.approx([e.end_s for e in timelines[1].events])
    spans = {e.action: (e.start_s, e.end_s) for e in timelines[0].events}
    ways = {way: [a for a in program.actions if (a.source, a.target) == way] for way in PAST}
    assert len(ways["disk", "host"]) == len(ways["host", "disk"]) == len(made.lives.behind_host)
    disk, sent = made.machine.tiers[1], [a for a in program.actions if a.stream == "host_write"]
    crossing = 0
    for action in (action for way in PAST for action in ways[way]):
        size, (start, end) = made.graph.storages[action.storage or 0].size_bytes, spans[action.id]
        moving_s = end - start - disk.latency_s
        assert size / disk.read_bytes_per_s < moving_s + 1e-9 < size / disk.mixed_read_bytes_per_s + 2e-9
        crossing += any(spans[a.id][0] < end and start < spans[a.id][1] for a in sent)
    assert crossing, "the link is busy while the disk is"


def test_states_on_the_disk_are_updated_on_the_host_where_that_is_faster() -> None:
    step = states_behind()
    found = streaming(step)
    graph, behind = found.step.graph, found.step.lives.behind_host
    assert set(behind.values()) == {"disk"}
    assert behind.keys() <= graph.host_storages & graph.persistent
    assert found.step_s < 0.97 * found.device_s
    assert found.program.tier_bytes("host") <= step.budgets["host"]
    assert 0 < lower_bound_s(found.step) < found.step_s
    assert flow_bound_s(found.step, 8) < found.step_s
    rows = step_needs(found.program, found.timeline, ["host", "disk"])
    assert all(size >= 0 for row in rows.rows.values() for size in row.values())
    slow = dataclasses.replace(step.machine.host_device, optimizer_elements_per_s=1e6)  # type: ignore[type-var]
    slower = dataclasses.replace(step, machine=dataclasses.replace(step.machine, host_device=slow))
    assert not streaming(slower).step.lives.behind_host


def test_a_disk_that_a_machine_lists_before_its_memory_is_not_behind_it() -> None:
    step = states_behind()
    machine = dataclasses.replace(step.machine, tiers=step.machine.tiers[::-1])
    found = streaming(dataclasses.replace(step, machine=machine))
    assert not found.step.lives.behind_host
    verify(found.program)


def test_what_has_a_place_on_the_host_takes_no_other_one() -> None:
    """Parameters that the host updates may leave the device though the host has room for nothing else."""
    whole = captured("llama", machine=machine_with_host(), num_layers=2, dim=256, vocab_size=4000)
    made = hosted_step(whole, (op for group in light_groups(whole.graph) for op in group))
    made = within(made, int(0.62 * needs(whole, {})))
    problem = made.bound_problem
    updated = tuple(each for each in problem.candidates if each.gap.storage in problem.placed)
    problem = dataclasses.replace(problem, candidates=updated, folding=None, capacity_bytes={"host": 0, "disk": 0})
    assert problem.placed == made.graph.host_storages
    assert updated
    most = int(problem.base.max()) + sum(each.size_bytes for each in updated) // 4
    assert solve(problem, most, windows=1) is not None
    assert solve(dataclasses.replace(problem, placed=frozenset()), most, windows=1) is None


def test_bounds_count_what_passes_the_device_on_the_disk_and_not_on_the_wire() -> None:
    whole = captured("llama", machine=wired(), num_layers=2, dim=256, vocab_size=4000)
    made = within(hosted_from_disk(whole), needs(whole, {}))
    moves = made.bound_problem.host_moves["disk"]
    size = sum(slot_bytes(s.size_bytes) for s in made.graph.storages if s.role is Role.OPTIMIZER_STATE)
    assert moves.loaded.sum() == moves.stored.sum() == size
    host, disk = made.machine.tiers
    window = np.zeros(len(made.graph.ops), dtype=np.int64)
    reads = [made.bound_problem.fixed_seconds(disk, (1.0, 0.0), window, 1, on_wire=way)[0] for way in (False, True)]
    assert reads == [size, 0.0]
    assert made.bound_problem.fixed_seconds(host, (0.0, 1.0), window, 1, on_wire=True)[0] > 0, "gradients go down"
    assert made.bound_s >= 0.999 * size / disk.mixed_read_bytes_per_s, "both directions of the disk at once"


def test_forms_have_the_same_states_on_the_disk() -> None:
    whole, *_, parts = forms_on_a_gpu()
    states = [s for s, item in enumerate(parts.graph.storages) if "exp_avg" in item.name]
    ops = [op for group in light_groups(parts.graph)[::2] for op in group]
    hosted = hosted_step(parts, ops, dict.fromkeys(states, "disk"))
    alike = hosted_alike(whole, hosted)
    assert alike is not None
    named = [sorted(each.graph.storages[s].name for s in each.lives.behind_host) for each in (hosted, alike)]
    assert named[0] == named[1] != []
    assert {s for s in states if s in hosted.graph.host_storages} == hosted.lives.behind_host.keys()
