"""Steps of ranks that share a host's processors, on a machine file with made-up figures."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tools.pipelines import PipelineRun, PipelineSeconds, pipeline_run, simulate_pipeline

from lading.catalog.load import load_machine, machine_from_dict, machine_to_toml, save_machine
from lading.catalog.stacks import stack_by_name
from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.action import ActionKind, Work
from lading.ir.layout import parse_layout
from lading.ir.machine import Curve, Machine, Processes
from lading.ir.program import Program, Region
from lading.ir.request import Architecture, StepRequest
from lading.ir.schedules import Schedule, schedule
from lading.ir.stack import Stack
from lading.program.emit import ListShape, emit
from lading.sim.rank_engine import Priced, action_seconds, run_sharing
from lading.sim.simulate import Simulated, simulate
from lading.sim.traces import step_timeline

SHARED = Processes(
    cores=2,
    slowdown={"products": (1.0, 1.0, 1.5, 2.0), "memory-bound": (1.0, 1.5, 2.25, 3.0)},
    busy={"all_reduce.2": 1.0, "all_gather.2": 2.0, "reduce_scatter.2": 2.0, "send.2": 1.0},
    overhead_s={"operation": 1e-5, "tensor-parallel": 1e-3, "unit": 2e-3},
)
LINE = Curve(size=(1e3, 1e9), rate=(1e9, 1e9))


def host(shared: Processes | None = SHARED) -> Machine:
    names = ("all_reduce", "all_gather", "reduce_scatter", "send")
    collectives = {f"{op}.{n}": LINE for op in names for n in (2, 3, 4)}
    return dataclasses.replace(load_machine("cpu"), collectives=collectives, processes=shared)


def simulated(folder: Path, layout: str, machine: Machine | None = None, stack: Stack | None = None) -> Simulated:
    path = folder / "machine.toml"
    save_machine(machine or host(), path)
    request = StepRequest(
        name=layout,
        model=Architecture(family="gpt", symbols={}, blocks=(("block", 4),)),
        seq_len=256,
        machine=str(path),
        layout=parse_layout(layout),
        stack=stack or stack_by_name("torch-eager-cpu"),
    )
    return simulate(request, family_table("gpt", layers=4, h=256, n=4, v=1000))


def test_what_processes_share_is_kept_in_a_machine_file() -> None:
    assert machine_from_dict(tomllib.loads(machine_to_toml(host())), "again") == host()
    assert SHARED.slower("products", 4) == 2.0
    assert SHARED.slower("attention", 2) == 1.5
    assert SHARED.slower("products", 8) == 4.0
    with pytest.raises(ConfigError, match="positive factors"):
        Processes(cores=2, slowdown={"products": (1.0, 0.0)})


def test_replicas_take_turns_on_the_processors(tmp_path: Path) -> None:
    """Equal work a rank: as long on two processors as alone but for bandwidth, twice as long for four ranks."""
    one, two, four = (simulated(tmp_path, f"dp{n},mb1,gb{n}").step.shares_s for n in (1, 2, 4))
    assert one["products"] == pytest.approx(two["products"]) == pytest.approx(four["products"] / 2)
    assert two["memory-bound"] == pytest.approx(1.5 * one["memory-bound"])
    assert four["memory-bound"] == pytest.approx(3 * one["memory-bound"])
    assert one["launches"] == pytest.approx(two["launches"]) == pytest.approx(four["launches"] / 2)


def test_what_software_takes_on_the_host_takes_turns_too(tmp_path: Path) -> None:
    """Four ranks on two processors launch half as fast each, and so is all else that their processes do."""
    own = dataclasses.replace(stack_by_name("torch-eager-cpu"), launch_s=1e-4, parameter_s=1e-5, step_s=1e-3)
    one, four = (simulated(tmp_path, f"dp{n},mb1,gb{n}", stack=own).step for n in (1, 4))
    assert four.shares_s["launches"] == pytest.approx(2 * one.shares_s["launches"])
    assert one.shares_s["host"] == pytest.approx(1e-3 + 1e-5 * one.stages[0].parameters)
    assert four.shares_s["host"] == pytest.approx(2 * one.shares_s["host"])


def test_a_reduction_beside_backward_costs_what_it_keeps_busy(tmp_path: Path) -> None:
    half, whole = (
        simulated(
            tmp_path, "dp2,mb1,gb2", host(dataclasses.replace(SHARED, busy={"all_reduce.2": processors}))
        ).step.shares_s["data-parallel communication"]
        for processors in (1.0, 2.0)
    )
    elements = sum(simulated(tmp_path, "dp2,mb1,gb2").step.stages[0].elements.values())
    assert whole - half == pytest.approx(elements * 4 / 1e9 / 2, rel=1e-3)


def test_fsdp_waits_for_every_collective(tmp_path: Path) -> None:
    """All but the last unit are gathered twice, each is reduced once; copies and hooks come on top."""
    step = simulated(tmp_path, "dp2,zero3,mb1,gb2").step
    elements = sum(step.stages[0].elements.values())
    last = 1000 * 256 + 2 * 256
    alone = (3 * elements - last) * 4 / 1e9
    assert alone < step.shares_s["data-parallel communication"] < 1.5 * alone
    assert step.shares_s["host"] == pytest.approx(6 * 2e-3)
    kept = simulated(tmp_path, "dp2,zero2,mb1,gb2").step
    assert kept.step_s < step.step_s


def test_groups_beside_each_other_share_the_processors(tmp_path: Path) -> None:
    alone = simulated(tmp_path, "tp2,mb1,gb1").step.shares_s["tp communication"]
    beside = simulated(tmp_path, "tp2,dp2,mb1,gb2").step.shares_s["tp communication"]
    assert beside == pytest.approx(alone)  # one processor each
    busier = host(dataclasses.replace(SHARED, busy={"all_reduce.2": 2.0}))
    assert simulated(tmp_path, "tp2,dp2,mb1,gb2", busier).step.shares_s["tp communication"] == pytest.approx(2 * alone)


def shared(plan: Schedule, slower: list[float], send_s: float = 0.0) -> PipelineRun:
    """A pipeline of forwards of 1 s and backwards of 2 s, so much slower while 1, 2, ... ranks compute."""
    program: Program = emit(ListShape(plan, ((),) * plan.stages, whole_first=False))

    def seconds(key: Priced, factor: float) -> float:
        kind, what, _ = key
        if kind is ActionKind.SEND:
            return send_s
        return factor * (1.0 if what.work is Work.FORWARD else 2.0) if isinstance(what, Region) else 0.0

    levels = [action_seconds(program, lambda key, factor=factor: seconds(key, factor)) for factor in slower]
    return pipeline_run(plan, run_sharing(program, levels), overlap=True)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_a_pipeline_on_processors_of_its_own_is_the_textbook_one(kind: str) -> None:
    plan = schedule(kind, 2, 1, 4)
    run = shared(plan, [1.0, 1.0])
    assert run.makespan_s == pytest.approx((4 + 1) * 3.0)
    assert run.busy_s.tolist() == pytest.approx([12.0, 12.0])
    same = simulate_pipeline(plan, PipelineSeconds(forward=np.ones(2), backward=2 * np.ones(2)))
    for ours, theirs in zip(run.end_s, same.end_s, strict=True):
        assert ours.tolist() == pytest.approx(theirs.tolist())
    later = shared(plan, [1.0, 1.0], 0.1)
    assert later.makespan_s > run.makespan_s
    assert later.send_s == pytest.approx(0.1)


def test_a_pipeline_on_one_processor_has_no_bubble() -> None:
    run = shared(schedule("1f1b", 2, 1, 4), [1.0, 2.0])
    assert run.makespan_s == pytest.approx(2 * 4 * 3.0)


def test_a_region_is_slower_only_while_others_compute() -> None:
    """The first stage's first forward and last backward run alone."""
    run = shared(schedule("gpipe", 2, 1, 1), [1.0, 5.0])
    assert run.makespan_s == pytest.approx(2 * 3.0)
    run = shared(schedule("gpipe", 2, 1, 2), [1.0, 2.0])  # alone 1, both 2 (1 each), both 4 (2 each), alone 2
    assert run.makespan_s == pytest.approx(2 * 2 * 3.0)


def test_a_pipeline_adds_up(tmp_path: Path) -> None:
    step = simulated(tmp_path, "pp2,dp2,zero2,gpipe,mb1,gb8").step
    assert sum(step.shares_s.values()) == pytest.approx(step.step_s)
    assert min(step.shares_s.values()) >= 0
    split = simulated(tmp_path, "pp2,zero-bubble,mb1,gb4").step
    assert sum(split.shares_s.values()) == pytest.approx(split.step_s)


def test_a_first_gradient_is_added_to_nothing(tmp_path: Path) -> None:
    two, five = (simulated(tmp_path, f"pp2,1f1b,mb1,gb{n}").step.shares_s["gradients"] for n in (2, 5))
    assert five == pytest.approx(4 * two)


def test_norms_gradients_are_summed_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Four blocks with two norms, and one behind them, of two vectors of 256 each."""
    host_file = host()
    curve = host_file.collectives["all_reduce.2"]
    slower = dataclasses.replace(
        host_file, collectives={**host_file.collectives, "all_reduce.2": dataclasses.replace(curve, rate=(1e6, 1e6))}
    )
    with_sums, fast = (simulated(tmp_path, "tp2,sp,mb1,gb1", machine).step for machine in (slower, host_file))
    sums = sum(number * count for number, count in with_sums.stages[0].summed.items())
    assert sums >= (4 * 2 + 1) * 2 * 256
    took = with_sums.shares_s["tp communication"] - fast.shares_s["tp communication"]
    assert took >= sums * 4 / 1e6 * 0.99


def test_the_lists_of_processes_are_drawn(tmp_path: Path) -> None:
    timeline = step_timeline(simulated(tmp_path, "dp2,zero3,mb1,gb4"))
    labels = list(timeline.labels.values())
    assert sum(label.startswith("unshard") for label in labels) == 2 * (6 + 5)
    assert sum(label.startswith("reduce grad") for label in labels) == 2 * 6
