"""Plans of steps that leave out experts, for a device behind a link: trained on a stand-in, equal to plain PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import machine_with_host, small_machine
from tests.runtime.cases import OPTIMIZER
from tests.runtime.expert_cases import USES, Plain, batches_of, loss_fn, model_of

import lading
from lading.ir.action import DEVICE, ActionKind
from lading.ir.expand import expand
from lading.ir.experts import find_routers
from lading.ir.graph import Role, StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES
from lading.memory.guards import find_guards, find_routers_alone
from lading.memory.lifetime import Lifetimes, can_recompute, gaps, is_movable
from lading.memory.restore import programs_of
from lading.planner.api import Planned, make_plan
from lading.planner.policies import Policy
from lading.planner.routing import expected_step_s, host_wait_s, plan_experts
from lading.sim.device_step import simulate

_WITH_HOST = machine_with_host()
BESIDE_HOST = dataclasses.replace(
    _WITH_HOST, device=dataclasses.replace(_WITH_HOST.device, kind="tests.test_open_tiers:stand_in")
)
#: Whose host only keeps values, so that all updates run on the device.
BEFORE_HOST = dataclasses.replace(
    BESIDE_HOST, host_device=None, tiers=(dataclasses.replace(BESIDE_HOST.tiers[0], host_computes=False),)
)


#: Shares of steps of experts that are worth leaving out.
SELDOM = {f"layers.{number}": [1.0, 0.05, 0.05, 0.05] for number in range(2)}


def all_on_host(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Move everything that can be to the host's memory whenever it is unused."""
    found = gaps(graph, lives)
    return {(gap.storage, gap.start): Option("host") for gap in found if is_movable(graph, gap.storage, PAGE_BYTES)}


def away_for_long(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Move to the host's memory what is unused for long."""
    return {
        (gap.storage, gap.start): Option("host")
        for gap in gaps(graph, lives)
        if (gap.wraps or gap.end - gap.start > 10) and is_movable(graph, gap.storage, PAGE_BYTES)
    }


def all_recomputed(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Run every operation again for each later use, where its numbers would be the same."""
    return {
        (gap.storage, gap.start): Option.RECOMPUTE for gap in gaps(graph, lives) if can_recompute(graph, lives, gap)
    }


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return lading.capture(model_of(), batches_of([[0]], 1)[0][0], loss_fn)


@pytest.mark.parametrize(
    ("machine", "policy"),
    [
        (BESIDE_HOST, all_on_host),
        pytest.param(BEFORE_HOST, "residency", marks=pytest.mark.slow),
        pytest.param(BESIDE_HOST, "residency", marks=pytest.mark.slow),
    ],
)
def test_a_device_behind_a_link_trains_by_plans_that_leave_experts_out(
    graph: StepGraph, machine: Machine, policy: Any, tmp_path: Path
) -> None:
    plain, rate, before = Plain(model_of(), 0.0), OPTIMIZER.lr, None
    settings: dict[str, Any] = {"budget": "45%", "policy": policy, "optimizer": OPTIMIZER, "cache": False}
    made = lading.plan(graph, machine, experts=True, **settings)
    assert made.experts == "count"  # nothing is known to be left out, and leaving out takes waits
    with lading.Trainer(made, graph, model_of(), optimizer=OPTIMIZER, folder=tmp_path) as trainer:
        for step, batches in enumerate(batches_of(USES, 1)):
            assert [trainer.step(batches[0], lr=rate)] == plain.step(batches, rate)
            if step == len(USES) // 2:
                assert trainer.experts is not None
                before, shares = trainer.experts, trainer.experts.shares()
                trainer.pause()
                again = lading.plan(graph, machine, experts=shares, **settings)
                assert again.experts is True
                assert any("the host waits for a router's choice 2 times" in each for each in again.assumptions)
                trainer.resume(again, graph)
        assert trainer.experts is not None
        assert before is not None
        assert not before.spared_bytes
        assert sum(trainer.experts.spared_bytes.values()) > 0
        assert before.chosen["layers.0"] == [sum(e in used for used in USES[: before.steps]) for e in range(4)]
        assert trainer.base_bytes + trainer.peak_bytes <= made.budgets["device"]  # the model's own memory is the host's
        differing = [n for n, value in plain.values().items() if not torch.equal(trainer.value(n), value)]
        assert differing == []


@pytest.mark.long
def test_further_steps_have_room_beside_what_makes_up_for_updates(graph: StepGraph, tmp_path: Path) -> None:
    """On a device it stays while they run, and they may fill the budget where the first step does not."""
    small = batches_of([[0, 1]], 1)[0][0]
    large = {"tokens": small["tokens"].repeat(64, 1), "scale": small["scale"]}
    other = lading.capture(model_of(), large, loss_fn)
    settings: dict[str, Any] = {"budget": "100%", "optimizer": OPTIMIZER, "cache": False}
    made = lading.plan(graph, BESIDE_HOST, experts=SELDOM, others=[other], **settings)
    assert made.experts is True
    assert all(each.peak_bytes[DEVICE] <= each.budgets[DEVICE] == made.budgets[DEVICE] for each in made.others)
    plain = Plain(model_of(), 0.0)
    with lading.Trainer(made, graph, model_of(), optimizer=OPTIMIZER, others=[other], folder=tmp_path) as trainer:
        for batch in (small, large, small):
            assert [trainer.step(batch, lr=OPTIMIZER.lr)] == plain.step([batch], OPTIMIZER.lr)
        assert trainer.base_bytes + trainer.peak_bytes <= made.budgets[DEVICE]


@pytest.mark.slow
def test_a_further_step_waits_for_no_router(graph: StepGraph) -> None:
    """It runs whole, so it takes as long as what is simulated, also beside the experts chosen most often."""
    small = batches_of([[0, 1]], 1)[0][0]
    other = lading.capture(model_of(), {**small, "tokens": small["tokens"].repeat(2, 1)}, loss_fn)
    shares = {f"layers.{number}": [1.0, 0.1, 0.1, 0.1] for number in range(2)}
    made = lading.plan(
        graph, BESIDE_HOST, budget="60%", experts=shares, others=[other], optimizer=OPTIMIZER, cache=False
    )
    _, program = programs_of(made, graph, [other])
    assert made.others[0].step_s == simulate(program, BESIDE_HOST).duration_s


def test_the_wait_for_a_router_is_in_the_step(graph: StepGraph) -> None:
    """Where the launches that it takes are longer, the step is so much longer; a CPU does not wait for itself."""
    everything: dict[str, Any] = {"budget": "1GB", "policy": "keep-all", "cache": False, "optimizer": OPTIMIZER}
    assert host_wait_s(small_machine()) == 0.0
    assert host_wait_s(BESIDE_HOST) == pytest.approx(1e-5 + 3 * 2e-6)
    plain = lading.plan(graph, BESIDE_HOST, **everything)
    waits = lading.plan(graph, BESIDE_HOST, experts=SELDOM, **everything)
    routers = len(model_of().layers)
    assert waits.step_s - plain.step_s == pytest.approx(routers * host_wait_s(BESIDE_HOST), rel=1e-6)


def test_a_router_that_is_recomputed_is_waited_for_once(graph: StepGraph) -> None:
    """What it chose is known by then."""
    everything: dict[str, Any] = {"budget": "1GB", "policy": all_recomputed, "cache": False, "optimizer": OPTIMIZER}
    plain = lading.plan(graph, BESIDE_HOST, **everything)
    waits = lading.plan(graph, BESIDE_HOST, experts=SELDOM, **everything)
    (program,) = programs_of(waits, graph, ())
    routers = {router.op for router in find_routers(program.graph)}
    assert any(action.op in routers and action.kind is ActionKind.RECOMPUTE for action in program.actions)
    assert waits.step_s - plain.step_s == pytest.approx(len(routers) * host_wait_s(BESIDE_HOST), rel=1e-6)


@pytest.mark.parametrize("shares", [{}, {"layers.0": [1.0] * 4, "layers.1": [1.0] * 4}])
def test_what_fetches_every_expert_is_planned_where_every_expert_is_chosen(graph: StepGraph, shares: Any) -> None:
    """Nothing waits, no room is kept free, and a choice is counted for a launch; a CPU leaves out for nothing."""
    settings: dict[str, Any] = {"budget": "45%", "policy": all_on_host, "cache": False, "optimizer": OPTIMIZER}
    every = lading.plan(graph, BEFORE_HOST, **settings)
    made = lading.plan(graph, BEFORE_HOST, experts=shares or True, **settings)
    assert made.experts == "count"
    assert made.program == every.program
    assert every.step_s <= made.step_s <= every.step_s + 2 * BEFORE_HOST.device.op_overhead_s
    assert any("8 experts are fetched in every step" in each for each in made.assumptions)
    on_cpu = {**settings, "budget": "1GB", "policy": "keep-all"}
    assert lading.plan(graph, small_machine(), experts=shares or True, **on_cpu).experts is True


@pytest.mark.parametrize("share", [0.99, 0.6, 0.05])
def test_no_plan_is_expected_to_take_longer_than_what_fetches_every_expert(graph: StepGraph, share: float) -> None:
    settings: dict[str, Any] = {"budget": "1GB", "policy": "keep-all", "cache": False, "optimizer": OPTIMIZER}
    every = lading.plan(graph, BEFORE_HOST, **settings)
    rows = {f"layers.{number}": [1.0, 1.0, 1.0, share] for number in range(2)}
    made = lading.plan(graph, BEFORE_HOST, experts=rows, **settings)
    (program,) = programs_of(made, graph, ())
    guards = find_guards(program) if made.leaves_out_experts else find_routers_alone(program)
    expected_s = expected_step_s(program, guards, BEFORE_HOST, rows)
    assert expected_s <= every.step_s + 2 * BEFORE_HOST.device.op_overhead_s
    assert made.experts == ("count" if share == 0.99 else True)


def test_experts_often_chosen_stay_beside_what_the_search_has_moved() -> None:
    """With all else in memory no expert fits there; where the search has put that, some do, and a step is shorter."""
    rates = ("read", "write", "mixed_read", "mixed_write")
    near = dataclasses.replace(BEFORE_HOST.tiers[0], **{f"{rate}_bytes_per_s": 1e12 for rate in rates})
    machine = dataclasses.replace(BEFORE_HOST, tiers=(near,))
    small = batches_of([[0]], 1)[0][0]
    large = {"tokens": small["tokens"].repeat(16, 1), "scale": small["scale"]}
    step = expand(lading.capture(model_of(), large, loss_fn), optimizer=OPTIMIZER)

    def make(policy: str | Policy, budget: str | float, machine: Machine) -> Planned:
        return make_plan(step, machine, budget=budget, policy=away_for_long if policy == "residency" else policy)

    moved = plan_experts(make, away_for_long, 600_000, machine, SELDOM)
    kept = plan_experts(make, "residency", 600_000, machine, SELDOM)
    (none, moved_s), (count, kept_s) = (_stays_and_seconds(made, machine) for made in (moved, kept))
    assert (none, count) == (0, 2)  # the one of each layer that is chosen in every step
    assert kept_s < moved_s
    moves = [(a.storage, a.stream) for a in kept.program.actions if a.kind is ActionKind.MOVE and a.storage is not None]
    written = [storage for storage, stream in moves if stream == "host_write"]
    row = next(each for each in kept.plan.policies if each.policy == kept.plan.request.policy)
    assert row.moved_bytes["host_write"] == sum(step.storages[storage].size_bytes for storage in written)
    assert any(step.storages[s].role is Role.ACTIVATION for s, _ in moves)


def test_a_budget_without_room_for_updates_fetches_every_expert(graph: StepGraph) -> None:
    """Where leaving out needs more memory than there is, the step is planned all the same."""
    step = expand(graph, optimizer=OPTIMIZER)

    def make(policy: str | Policy, budget: str | float, machine: Machine) -> Planned:
        return make_plan(step, machine, budget=budget, policy=policy)

    budget = make("keep-all", "1GB", BEFORE_HOST).program.predicted_bytes
    made = plan_experts(make, "keep-all", budget, BEFORE_HOST, SELDOM)
    assert made.plan.experts == "count"
    assert "there is no room beside its step to make up for updates later" in made.plan.assumptions[-1]
    roomy = plan_experts(make, "keep-all", budget + (1 << 20), BEFORE_HOST, SELDOM)
    assert roomy.plan.experts is True


def test_experts_chosen_in_every_step_are_not_kept_for_others(graph: StepGraph) -> None:
    """At uniform routing a CPU's plan is that of the search, to the move."""
    step = expand(graph, optimizer=OPTIMIZER)
    asked: list[str | Policy] = []

    def make(policy: str | Policy, budget: str | float, machine: Machine) -> Planned:
        asked.append(policy)
        return make_plan(step, machine, budget=budget, policy=away_to_disk if policy == "residency" else policy)

    def away_to_disk(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
        return {gap: Option("disk") for gap in away_for_long(graph, lives)}

    first = make("residency", "1GB", small_machine())
    made = plan_experts(make, "residency", "1GB", small_machine(), {f"layers.{n}": [1.0] * 4 for n in range(2)})
    assert made.plan.experts is True
    assert made.plan.choices == first.plan.choices
    assert set(asked) == {"residency"}


def _stays_and_seconds(made: Planned, machine: Machine) -> tuple[int, float]:
    """Experts that stay in memory, and the seconds that a step is expected to take."""
    said = next(each for each in made.plan.assumptions if "stay in memory" in each)
    seconds = expected_step_s(made.program, find_guards(made.program), machine, SELDOM)
    return int(said.split(" stay in memory")[0].rsplit(" ", 1)[1]), seconds
