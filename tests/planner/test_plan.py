"""make_plan and restore_program: budgets are kept, plans are made again to the bit, and errors say what binds."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.captured import captured_step
from tests.machines import small_machine
from tests.planner.steps import step_of, within
from tests.runs import shorten_search

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.defer import updates
from lading.ir.expand import expand
from lading.ir.graph import StepGraph
from lading.ir.host_ops import light_groups
from lading.ir.plan import Choices, Option, Plan
from lading.memory.lifetime import Lifetimes, gaps
from lading.memory.restore import apply_choices, predicted_timeline, restore_program
from lading.memory.verify import verify
from lading.planner import linear, orders
from lading.planner.api import POLICIES, Planned, make_plan
from lading.planner.residency import StepProblem, smallest_budget_bytes
from lading.tracing.trace import capture
from lading.units import parse_bytes

OVERHEAD = 100_000


def graph_of(name: str) -> StepGraph:
    """A small step; "gpt+" has two micro-batches and clipping."""
    if name == "gpt+":
        return captured_step("gpt", num_layers=1, accumulation=2, clip_norm=1.0)
    return captured_step("gpt") if name == "gpt-2-layers" else captured_step(name, num_layers=1)


@cache
def planned(name: str, budget: str, policy: str = "residency") -> Planned:
    """A plan on the small machine, made once."""
    return make_plan(graph_of(name), small_machine(overhead_bytes=OVERHEAD), budget=budget, policy=policy)


@cache
def smallest(name: str) -> int:
    """What the error of a hopeless budget says would do."""
    with pytest.raises(PlanInfeasible) as error:
        make_plan(graph_of(name), small_machine(), budget="1B")
    return error.value.smallest_budget_bytes


CASES = [
    ("gpt", "100%"),
    pytest.param("gpt", "80%", marks=pytest.mark.slow),
    ("gpt", "65%"),
    pytest.param("llama", "75%", marks=pytest.mark.slow),
    pytest.param("gpt+", "75%", marks=pytest.mark.slow),
]


@pytest.fixture
def first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is a plan is all that the test asks, not how good it is."""
    shorten_search(monkeypatch.setattr)


@pytest.mark.long
@pytest.mark.parametrize(("name", "budget"), CASES)
def test_the_budget_is_kept(name: str, budget: str) -> None:
    made = planned(name, budget)
    verify(made.program)
    allowed = int(made.plan.predictions.keep_all_bytes * float(budget.rstrip("%")) / 100)
    assert made.plan.budgets["device"] == allowed == made.program.budgets["device"]
    assert made.program.arena_bytes + made.program.workspace_bytes + made.program.overhead_bytes <= allowed
    assert made.program.overhead_bytes >= OVERHEAD
    assert made.plan.peak_bytes["device"] == made.program.peak_bytes
    assert made.plan.peak_bytes.get("disk", 0) == made.program.tier_bytes("disk")
    assert made.predicted.peak_of_tier("device") == sum(made.plan.predictions.bytes_by_role.values()) <= allowed
    assert bool(made.plan.choices.gaps) == (budget != "100%")


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_no_plain_policy_that_fits_is_faster_and_the_bound_is_below_all(name: str, budget: str) -> None:
    plan = planned(name, budget).plan
    assert [row.policy for row in plan.policies] == [name for name in POLICIES if "reshard" not in name]
    assert plan.policies[-1].step_s == plan.step_s
    for row in plan.policies:
        assert row.fits == (row.step_s is not None)
        if row.step_s is not None:
            assert plan.lower_bound_s <= plan.step_s <= row.step_s * (1 + 1e-9), row
            assert row.peak_bytes <= plan.budgets["device"]
            assert 0 <= row.stall_s + row.recompute_s <= row.step_s
        else:
            assert row.peak_bytes > plan.budgets["device"]
    assert plan.gap >= 0


def test_scratch_is_part_of_the_budget() -> None:
    graph, scratch = graph_of("gpt"), 300_000
    workspace = [0] * len(graph.ops)
    workspace[7] = scratch
    made = make_plan(graph, small_machine(), budget="100%", workspace_bytes=workspace)
    bare = make_plan(graph, small_machine(), budget="100%")
    assert made.program.workspace_bytes == scratch
    assert made.plan.predictions.keep_all_bytes >= bare.plan.predictions.keep_all_bytes + scratch
    assert made.program.peak_bytes <= made.plan.budgets["device"]
    assert any("scratch" in text for text in bare.plan.assumptions)
    assert not any("scratch" in text for text in made.plan.assumptions)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "budget", "searched"),
    [
        ("gpt", "65%", False),
        pytest.param("gpt", "65%", True, marks=pytest.mark.slow),
        pytest.param("gpt+", "75%", True, marks=pytest.mark.slow),
    ],
)
def test_planning_is_deterministic_and_plans_are_made_again(
    name: str, budget: str, searched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not searched:
        shorten_search(monkeypatch.setattr)
    machine = small_machine(overhead_bytes=OVERHEAD)
    first, second = (make_plan(graph_of(name), machine, budget=budget) for _ in range(2))
    first.plan.save(tmp_path / "first.json")
    second.plan.save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    assert first.program.fingerprint == second.program.fingerprint
    assert first.plan.fingerprint == second.plan.fingerprint
    program = restore_program(Plan.load(tmp_path / "first.json"), graph_of(name), machine)
    assert program.text() == first.program.text()
    assert predicted_timeline(first.plan, program) == first.predicted


def test_a_plan_is_refused_for_anything_else() -> None:
    plan, machine = planned("gpt", "65%").plan, small_machine(overhead_bytes=OVERHEAD)
    with pytest.raises(ConfigError, match="another model, batch or optimizer"):
        restore_program(plan, graph_of("llama"), machine)
    with pytest.raises(ConfigError, match="another model, batch or optimizer"):
        restore_program(plan, graph_of("gpt+"), machine)
    with pytest.raises(ConfigError, match="another machine"):
        restore_program(plan, graph_of("gpt"), small_machine(overhead_bytes=OVERHEAD + 1))


def _swapped(lines: list[str]) -> list[str]:
    """The first two operations in the other order."""
    first, second = (i for i, line in enumerate(lines) if line[:2] in ("0 ", "1 "))
    return [*lines[:first], f"0{lines[second][1:]}", f"1{lines[first][1:]}", *lines[second + 1 :]]


DAMAGES = {
    "order": _swapped,
    "address": lambda lines: [line.replace("@0", "@64", 1) if line.startswith("resident") else line for line in lines],
    "cut": lambda lines: lines[:-1],
    "arena": lambda lines: ["arena 64", *lines[1:]],
    "budget": lambda lines: [line.replace("budget device ", "budget device 9") for line in lines],
    "no head": lambda lines: lines[1:],
    "not an action": lambda lines: [*lines, "9999 DANCE compute"],
    "a wait forward": lambda lines: [*lines[:-1], f"{lines[-1].split(' waits=')[0]} waits=99999"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_program_that_was_changed_is_refused(damage: str) -> None:
    plan, machine = planned("gpt", "65%").plan, small_machine(overhead_bytes=OVERHEAD)
    changed = dataclasses.replace(plan, program=tuple(DAMAGES[damage](list(plan.program))))
    assert changed != plan
    with pytest.raises(ConfigError, match=r"the Program in the plan .* is not safe to run: .*; plan again"):
        restore_program(changed, graph_of("gpt"), machine)


def test_what_a_plan_chooses_is_no_field_of_the_graph() -> None:
    graph = graph_of("gpt")
    before = graph.fingerprint
    group = light_groups(graph)[0]
    chosen = apply_choices(graph, Choices(deferred=2))
    assert not {"deferred", "carried", "hosted"} & {field.name for field in dataclasses.fields(StepGraph)}
    assert (graph.deferred, graph.carried, graph.hosted) == ((), frozenset(), ())
    moved = [graph.ops[i] for ops in updates(graph)[:2] for i in ops]
    assert sorted(map(id, moved)) == sorted(id(chosen.ops[i]) for i in chosen.deferred)
    assert chosen.carried == {s for i in chosen.deferred for s in chosen.op_reads[i]} - graph.persistent
    assert sorted(map(id, chosen.ops)) == sorted(map(id, graph.ops)), "the same operations in another order"
    assert apply_choices(graph, Choices(hosted=group)).hosted == group
    assert graph.fingerprint == before == graph_of("gpt").fingerprint


def test_choices_that_the_step_lacks_are_refused() -> None:
    plan, machine = planned("gpt", "65%").plan, small_machine(overhead_bytes=OVERHEAD)
    many = dataclasses.replace(plan, choices=dataclasses.replace(plan.choices, deferred=1000))
    with pytest.raises(ConfigError, match="defers 1000 updates, expected 0 to"):
        restore_program(many, graph_of("gpt"), machine)


def test_a_timeline_of_another_program_is_refused() -> None:
    made = planned("gpt", "65%")
    actions = made.plan.predictions.actions[1:]
    plan = dataclasses.replace(made.plan, predictions=dataclasses.replace(made.plan.predictions, actions=actions))
    with pytest.raises(ConfigError, match=f"of {len(actions) + 1} actions .* found {len(actions)} in"):
        predicted_timeline(plan, made.program)


@pytest.mark.long
@pytest.mark.usefixtures("first_that_fits")
@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt+"))])
def test_the_smallest_budget_is_one_that_does(name: str) -> None:
    made = make_plan(graph_of(name), small_machine(), budget=smallest(name))
    verify(made.program)
    assert made.program.peak_bytes <= smallest(name)
    assert smallest(name) < 0.75 * made.plan.predictions.keep_all_bytes


@pytest.mark.long
@pytest.mark.usefixtures("first_that_fits")
def test_transfers_go_without_room_where_nothing_else_fits() -> None:
    """Their room would have needed 632,504 bytes, as it leaves holes that nothing fits into."""
    made = make_plan(graph_of("gpt"), small_machine(), budget=600_000)
    verify(made.program)
    assert made.program.peak_bytes <= 600_000


@pytest.mark.usefixtures("first_that_fits")
def test_what_is_missing_is_said_in_bytes_and_names() -> None:
    graph, budget = graph_of("gpt"), smallest("gpt") // 2
    with pytest.raises(PlanInfeasible) as error:
        make_plan(graph, small_machine(), budget=budget)
    message = str(error.value)
    assert error.value.smallest_budget_bytes == smallest("gpt")
    assert error.value.missing_bytes == smallest("gpt") - budget
    assert f"{smallest('gpt')} bytes" in message
    op = re.search(r"recomputed, (\S+) in (.+) \((\w+)\) needs at once", message)
    assert op is not None
    assert (op[1], op[2], op[3]) in {(o.name, o.module or "the loss", o.phase.value) for o in graph.ops}
    listed = re.findall(r"^ +([\d.]+ \w+)  (.+)$", message, flags=re.MULTILINE)
    assert len(listed) > 2
    names = {s.name for s in graph.storages}
    assert sum(name in names for _, name in listed) >= len(listed) - 2  # the rest: "n more" and the process
    shown = [parse_bytes(size) for size, name in listed if name in names]
    assert shown == sorted(shown, reverse=True)
    assert "micro-batch" in message


@pytest.mark.parametrize(
    ("width", "overhead_bytes", "advice"),
    [(64, 0, "leaves an update as large"), (8, 1 << 20, "Most of that is the process")],
)
def test_what_no_smaller_batch_mends_is_said(width: int, overhead_bytes: int, advice: str) -> None:
    graph = capture(torch.nn.Linear(width, width), torch.ones(2, width), lambda model, x: model(x).sum())
    with pytest.raises(PlanInfeasible, match=advice) as error:
        make_plan(expand(graph), small_machine(overhead_bytes=overhead_bytes), budget="1KB")
    assert "micro-batch or the sequence" not in str(error.value)


@pytest.mark.usefixtures("first_that_fits")
@pytest.mark.parametrize("policy", ["keep-all", "checkpoint-every-block"])
def test_a_plain_policy_that_does_not_fit(policy: str) -> None:
    fits = planned("gpt-2-layers", "100%", policy)
    assert fits.plan.request.policy == policy
    assert fits.plan.step_s == next(r.step_s for r in fits.plan.policies if r.policy == policy)
    with pytest.raises(PlanInfeasible, match=f"policy '{policy}' needs") as error:
        make_plan(graph_of("gpt"), small_machine(), budget="60%", policy=policy)
    assert "residency" in str(error.value)
    assert error.value.missing_bytes > 0
    assert error.value.smallest_budget_bytes == smallest("gpt")


@pytest.mark.usefixtures("first_that_fits")
def test_without_a_disk_only_recomputing_is_left() -> None:
    graph = captured_step("gpt")
    machine = small_machine(disk=False)
    needs = smallest_budget_bytes(step_of(graph, machine))[0]
    made = make_plan(graph, machine, budget=needs)
    assert {c.option for c in made.plan.choices.gaps} == {Option.RECOMPUTE}
    assert set(made.plan.budgets) == {"device"}
    with pytest.raises(PlanInfeasible):
        make_plan(graph, machine, budget=needs // 2)


@pytest.mark.long
@pytest.mark.usefixtures("first_that_fits")
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device alone"])
def test_what_no_plan_can_hold_is_refused_without_a_search(disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the error of the whole search; and what the least budget of a plan holds is searched for."""
    graph, machine = graph_of("gpt"), small_machine(disk=disk)
    step = step_of(graph, machine)
    needs, solved = smallest_budget_bytes(step)[0], list[int]()
    solve = linear.Relaxation.solve

    def counted(self: linear.Relaxation, budget_bytes: int, extra: np.ndarray | None = None) -> Any:
        solved.append(budget_bytes)
        return solve(self, budget_bytes, extra)

    monkeypatch.setattr(linear.Relaxation, "solve", counted)
    for found in ("cross_entropies", "heads"):  # with one of these in parts it would need less
        monkeypatch.setattr(f"lading.planner.forms.{found}", lambda graph: ())
    tight = within(step, needs)
    floor = needs - tight.arena_bytes + int(tight.bound_problem.base.max())
    assert needs // 4 < floor <= needs
    errors: list[str] = []
    for hopeless in (True, False):
        with monkeypatch.context() as patch:
            if not hopeless:
                patch.setattr(StepProblem, "is_hopeless", False)
            with pytest.raises(PlanInfeasible) as raised:
                make_plan(graph, machine, budget=floor - 1)
        errors.append(f"{raised.value} {raised.value.smallest_budget_bytes}")
        assert bool(solved) == (not hopeless)
    assert errors[0] == errors[1]
    solved.clear()
    assert make_plan(graph, machine, budget=needs).plan.budgets["device"] == needs
    assert solved


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy": "keep-some"}, "keep-all, checkpoint-every-block, residency"),
        ({"budget": "lots"}, "lots"),
        ({"budget": "0%"}, "0%"),
        ({"budget": "101%"}, "101%"),
        ({"budget": -1}, "-1"),
        ({"budgets": {"disk": "much"}}, "much"),
        ({"budgets": {"tape": "1GB"}}, "expected tiers of test (disk), got 'tape'"),
    ],
)
def test_arguments_that_mean_nothing(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        make_plan(graph_of("gpt"), small_machine(), **{"budget": "100%", **settings})  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.usefixtures("first_that_fits")
def test_a_disk_budget_that_is_too_small_is_refused() -> None:
    wanted = planned("gpt", "65%").plan.peak_bytes["disk"]
    assert wanted > 4096
    with pytest.raises(ConfigError, match="raise that, or the device's"):
        make_plan(graph_of("gpt"), small_machine(overhead_bytes=OVERHEAD), budget="65%", budgets={"disk": 4096})


def test_a_full_disk_is_named_where_no_plan_fits() -> None:
    """The memory that is missing is not all that can be changed: values could leave it for a disk with room."""
    small = small_machine(overhead_bytes=OVERHEAD)
    with pytest.raises(PlanInfeasible, match=r"There is room for only 0 B on the disk, and values between steps take"):
        make_plan(graph_of("gpt"), small, budget="40%", budgets={"disk": 0})
    with pytest.raises(PlanInfeasible) as caught:
        make_plan(graph_of("gpt"), small, budget=OVERHEAD)
    assert "There is room" not in str(caught.value)


def test_a_policy_of_ones_own() -> None:
    """It is compared under its name; a choice that the step does not offer is refused."""

    def states_on_disk(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
        large = [g for g in gaps(graph, lives) if graph.storages[g.storage].size_bytes >= 4096]
        return {
            (g.storage, g.start): Option("disk") for g in large if graph.storages[g.storage].role == "optimizer_state"
        }

    def on_a_host(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
        return dict.fromkeys(states_on_disk(graph, lives), Option("host"))

    with pytest.raises(ConfigError, match=r"among keep-all, .*, or a function that makes the choices, got 3"):
        make_plan(graph_of("gpt"), small_machine(), budget="100%", policy=3)  # type: ignore[arg-type]
    made = make_plan(graph_of("gpt"), small_machine(), budget="100%", policy=states_on_disk)
    rows = {row.policy: row for row in made.plan.policies}
    assert made.plan.request.policy == "states_on_disk"
    assert rows["states_on_disk"].moved_bytes["disk_read"] > 0
    assert {choice.option for choice in made.plan.choices.gaps} == {Option("disk")}
    with pytest.raises(ConfigError, match="policy 'on_a_host' has a choice that this step does not offer"):
        make_plan(graph_of("gpt"), small_machine(), budget="100%", policy=on_a_host)


def test_a_compiled_step_is_predicted_to_be_faster_and_planned_again() -> None:
    machine, graph = small_machine(overhead_bytes=OVERHEAD), captured_step("llama", num_layers=2, dim=128)
    whole = make_plan(graph, machine, budget="100%", policy="keep-all", expansion={"compile": 1.0})
    plain = make_plan(graph, machine, budget="100%", policy="keep-all")
    assert whole.plan.compiled
    assert not plain.plan.compiled
    assert whole.plan.step_s < plain.plan.step_s
    assert whole.plan.lower_bound_s <= whole.plan.step_s
    assert restore_program(whole.plan, graph, machine).text() == whole.program.text()
    assert whole.predicted.duration_s == pytest.approx(whole.plan.step_s)


@pytest.mark.parametrize("name", ["gpt", "gpt+"])
def test_where_everything_fits_nothing_is_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "ResidencySearch", lambda *_: pytest.fail("searched"))
    machine = small_machine(overhead_bytes=OVERHEAD)
    slow = dataclasses.replace(machine.device, op_overhead_s=1e-3)  # taking the batch counts
    plan = make_plan(graph_of(name), dataclasses.replace(machine, device=slow), budget="100%").plan
    assert not plan.choices.gaps
    assert plan.lower_bound_s == plan.step_s == plan.policies[0].step_s
