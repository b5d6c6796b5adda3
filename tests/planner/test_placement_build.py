"""Problems from captured graphs and from tables: nothing is lost, counted twice, or timed otherwise than elsewhere."""

from __future__ import annotations

from functools import cache
from math import inf, prod

import pytest
import torch
from tests.captured import SIZES

from lading.catalog.fleets import load_fleet
from lading.catalog.stacks import stack_by_name
from lading.catalog.tables import model_table
from lading.clusters import step_of
from lading.cost.compute import op_costs
from lading.errors import ConfigError
from lading.ir.graph import Phase, StepGraph
from lading.ir.placement import PlacementProblem
from lading.ir.request import Request
from lading.ir.retarget import retarget
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.planner.placement.from_graph import Grain, problem_of
from lading.planner.placement.from_table import chain_of
from lading.planner.placement.trial import Trial
from lading.sim.simulate import simulate
from lading.tracing.trace import capture

GRAINS = (Grain(), Grain(max_units=8), Grain(operations=True))


@cache
def _graph(dtype: str = "float32") -> StepGraph:
    torch.manual_seed(0)
    model = build_model("gpt", **SIZES).to(getattr(torch, dtype))
    return capture(model, {"tokens": torch.zeros(4, 33, dtype=torch.int64)}, next_byte_loss)


def _parameters(graph: StepGraph) -> int:
    return sum(prod(graph.tensors[p.tensor].shape) for p in graph.parameters)


def _alone(problem: PlacementProblem, device: int = 0) -> tuple[float, int]:
    found = Trial(problem).of([device] * len(problem.groups))
    return found.step_s, found.peak_bytes[device]


def _tied_bytes(graph: StepGraph) -> int:
    return sum(graph.tensors[p.tensor].size_bytes for p in graph.parameters if len(p.names) > 1)


@pytest.mark.parametrize("grain", GRAINS)
def test_on_one_device_a_step_takes_what_its_operations_take(grain: Grain) -> None:
    graph, fleet = _graph(), load_fleet("cpu-laptop")
    device = fleet.devices[0].machine.device
    problem = problem_of(graph, fleet, grain=grain)
    again = problem.spared([0] * len(problem.groups))  # a tied weight is updated once
    updates = [t.seconds[0] for n, t in enumerate(problem.tasks) if t.once_per_step and t.seconds[0] and n not in again]
    assert len(again) == (0 if grain.operations else 1)
    step_s, _ = _alone(problem)
    costs = op_costs(retarget(graph, "cpu", flash=True), device)
    assert step_s == pytest.approx(sum(costs) + sum(updates))
    assert sum(updates) == pytest.approx(
        _parameters(graph) / device.optimizer_elements_per_s + len(updates) * device.op_overhead_s
    )


@pytest.mark.parametrize("grain", GRAINS)
def test_on_one_device_memory_is_that_of_the_graph(grain: Grain) -> None:
    """Weight, gradient and two moments, and what lives between operations, walked here one by one."""
    graph = _graph()
    own = retarget(graph, "cpu", flash=True)
    gradients = {own.storage_of(p.gradient) for p in own.parameters if p.gradient is not None}
    inputs = {own.storage_of(t) for batch in own.inputs for _, t in batch}
    skip = own.persistent | gradients | inputs
    last = {s: i for i in range(len(own.ops)) for s in (*own.op_reads[i], *own.op_writes[i])}
    now, peak, there = 0, 0, set[int]()
    for index in range(len(own.ops)):
        new = {s for s in own.op_writes[index] if s not in there and s not in skip}
        there |= new
        now += sum(own.storages[s].size_bytes for s in new)
        peak = max(peak, now)
        gone = {s for s in there if last[s] == index}
        there -= gone
        now -= sum(own.storages[s].size_bytes for s in gone)
    problem = problem_of(graph, load_fleet("cpu-laptop"), grain=grain)
    resident = problem.resident_on([0] * len(problem.groups))[0]
    assert resident == 16 * _parameters(graph)  # tied weights once
    _, peak_bytes = _alone(problem)
    assert peak_bytes == pytest.approx(resident + peak, rel=0.06)
    kept = sum(g.kept_bytes for g in problem.groups)
    assert kept <= peak  # it bounds from below what must be there


def test_units_join_forward_backward_and_update() -> None:
    problem = problem_of(_graph(), load_fleet("two-desktops"), grain=Grain(max_units=8))
    names = [g.name for g in problem.groups]
    assert names == ["tokens", "layers.0", "layers.1", "norm", "head", "loss"]
    layer = problem.groups[1]
    assert [problem.tasks[t].name for t in layer.tasks] == ["layers.0", "layers.0 backward", "update of layers.0"]
    between = {
        (problem.group_of[f.source], problem.group_of[t]): f.size_bytes for f in problem.flows for t in f.targets
    }
    assert between[1, 2] == between[2, 1] == 4 * 32 * 64 * 4  # tokens by width in fp32, and its gradient


def test_tied_weights_lie_on_both_and_their_gradients_meet_once_a_step() -> None:
    graph = _graph()
    problem = problem_of(graph, load_fleet("two-desktops"), grain=Grain(max_units=8), micro_batches=4)
    size = _tied_bytes(graph)
    number = {t.name: n for n, t in enumerate(problem.tasks)}
    ways = {(f.source, t): f for f in problem.flows for t in f.targets}
    for one, other in (("tied gradient at head", "tokens"), ("tokens backward", "head")):
        flow = ways[number[one], number[f"update of tokens and head at {other}"]]
        assert flow.size_bytes == size
        assert flow.resident_at_source
    assert ways[number["head backward"], number["norm backward"]].size_bytes == 4 * 32 * 64 * 4  # activations only
    assert (number["head backward"], number["tokens backward"]) not in ways
    assert max(own.size_bytes for own in problem.shared) == 4 * size  # value, gradient and two moments
    groups, trial = len(problem.groups), Trial(problem)
    one, two = trial.of([0] * groups), trial.of([0] * (groups - 2) + [1] * 2)
    assert sum(problem.resident_on(two.devices)) == sum(problem.resident_on(one.devices)) + 4 * size
    sent = {label for _, label, _, _ in trial.run(two.devices, record=True).events if " to " in label}
    assert {"tied gradient at head to rtx4090", "tokens backward to rtx3090"} <= sent


def test_one_pass_has_weights_only() -> None:
    graph = _graph()
    problem = problem_of(graph, load_fleet("cpu-laptop"), grain=Grain(training=False))
    forward = sum(c for c, op in zip(op_costs(graph, load_fleet("cpu-laptop").devices[0].machine.device), graph.ops,
                                     strict=True) if op.phase is Phase.FORWARD)  # fmt: skip
    step_s, _ = _alone(problem)
    assert step_s == pytest.approx(forward)
    assert not any(t.backward or t.once_per_step or t.kept_bytes for t in problem.tasks)


def test_a_device_without_the_dtype_is_left_out_and_said() -> None:
    problem = problem_of(_graph("bfloat16"), load_fleet("laptop-and-server"))
    products = next(t for t in problem.tasks if t.name.endswith("qkv"))
    assert products.seconds[1] == inf
    assert all(s < inf for s in (products.seconds[0], products.seconds[2]))
    assert any(sentence.startswith("NVIDIA T4 is left out") for sentence in problem.assumed)
    with pytest.raises(ConfigError, match="no device can"):
        problem_of(_graph("bfloat16"), load_fleet("t4"))


@pytest.mark.parametrize("name", ["gpt2", "llama3.2-1b", "qwen3-30b-a3b"])
def test_a_table_on_one_device_is_what_simulate_says(name: str) -> None:
    stack = stack_by_name("default")
    problem = chain_of(model_table(name), load_fleet("b200"), stack, seq_len=1024, batch=2)
    request, table = step_of(Request(model=name, machine="b200", layout="mb2,gb2", seq_len=1024))
    known = simulate(request, table)
    step_s, peak_bytes = _alone(problem)
    assert step_s == pytest.approx(known.step.step_s, rel=0.1)
    assert peak_bytes == pytest.approx(known.peak_bytes, rel=0.03)  # tied weights are there once


def test_a_table_that_no_device_can_run_says_why() -> None:
    fleet, stack = load_fleet("laptop-and-server"), stack_by_name("default")
    problem = chain_of(model_table("gpt2"), fleet, stack, seq_len=128)
    assert problem.assumed == ("NVIDIA T4 computes in float16, as it has no bfloat16",)
    assert [len(problem.tasks), len(problem.groups)] == [3 * 14 + 3, 14]  # tied weights are updated at both ends
