"""How fast a host is now: factors come back from steps that they slowed, and slow what is predicted."""

from __future__ import annotations

import dataclasses

import pytest
from tests.machines import small_machine
from tests.programs import GraphBuilder, ProgramBuilder, chain, offloaded
from tests.rank_steps import Row, program_of

from lading.errors import ConfigError
from lading.ir.action import ActionKind
from lading.ir.graph import OpKind, Role
from lading.ir.host_speed import measured_speed
from lading.ir.machine import Curve, HostSpeed, Machine, Processes
from lading.ir.program import Program
from lading.ir.timeline import Timeline
from lading.sim.device_step import job_step_s, simulate


def host() -> Machine:
    """A host without latencies, whose products and passes have curves."""
    small = small_machine()
    rates = {name: Curve(size=(1.0,), rate=(1e10,)) for name in ("matmul.bfloat16", "elementwise", "copy")}
    device = dataclasses.replace(small.device, op_overhead_s=0.0, rates=rates)
    return dataclasses.replace(
        small, device=device, tiers=tuple(dataclasses.replace(tier, latency_s=0.0) for tier in small.tiers)
    )


def stretched(timeline: Timeline, factor: float) -> Timeline:
    events = (dataclasses.replace(e, start_s=e.start_s * factor, end_s=e.end_s * factor) for e in timeline.events)
    return dataclasses.replace(timeline, events=tuple(events))


def offloading() -> Program:
    return offloaded(chain(4, 1 << 20)).program()


def slowed(made: Program, machine: Machine, products: float, others: float) -> Timeline:
    """Simulate a step whose operations take so many milliseconds, products and others."""
    kinds = [op.kind is OpKind.MATMUL for op in made.graph.ops]
    return simulate(made, machine, op_seconds=[(products if product else others) / 1e3 for product in kinds])


def test_factors_come_back_from_a_step_that_they_slowed() -> None:
    speed = HostSpeed(products=1.5, others=2.5, tiers={"disk.read": 1.25, "disk.write": 0.8})
    made, now = offloading(), host().at_speed(speed)
    told = measured_speed(made, slowed(made, host(), 1.0, 1.0), [slowed(made, now, 1.5, 2.5)])
    assert told.products == pytest.approx(1.5)
    assert told.others == pytest.approx(2.5)
    assert told.tiers["disk.read"] == pytest.approx(1.25, rel=0.1)  # shared for another time
    assert told.tiers["disk.write"] == pytest.approx(0.8, rel=0.1)


def test_a_step_takes_longer_on_a_slower_host() -> None:
    made = offloading()
    slower = host().at_speed(HostSpeed(others=2.0, tiers={"disk.read": 2.0, "disk.write": 2.0}))
    assert job_step_s([made], slower) == pytest.approx(2 * job_step_s([made], host()), rel=0.01)


def test_the_median_of_steps_counts() -> None:
    made, predicted = offloading(), simulate(offloading(), host())
    steps = [stretched(predicted, factor) for factor in (1.2, 1.2, 9.0)]
    told = measured_speed(made, predicted, steps)
    assert told.products == pytest.approx(1.2)
    assert told.others == pytest.approx(1.2)
    assert told.tiers == pytest.approx({"disk.read": 1.2, "disk.write": 1.2})


def test_what_a_step_hardly_has_gets_the_factor_of_all_operations() -> None:
    build = GraphBuilder()
    source, made = (build.storage(name, 1 << 20, Role.ACTIVATION) for name in ("source", "made"))
    build.op([], [source], name="product", kind=OpKind.MATMUL)
    build.op([source], [made], name="copy", kind=OpKind.COPY)
    program = ProgramBuilder(build.graph(), {}, {})
    for index in range(2):
        program.run(index)
    step = program.program()
    told = measured_speed(step, slowed(step, host(), 0.01, 1.0), [slowed(step, host(), 0.5, 2.0)])
    assert told.products == pytest.approx(2.5 / 1.01)
    assert told.others == pytest.approx(2)
    assert told.tiers == {}


def test_what_ranks_do_together_says_nothing_of_the_host() -> None:
    rows: list[Row] = [
        ("network", ActionKind.UNSHARD, (), 0.0, 1.0), ("compute", ActionKind.COMPUTE, (0,), 1.0, 3.0),
        ("network", ActionKind.REDUCE_GRAD, (1,), 3.0, 7.0),
    ]  # fmt: skip
    made = dataclasses.replace(program_of("dp2,zero3", rows), resident=((0, 0),))
    predicted = simulate(made, host(), op_seconds=[1.0, 2.0, 4.0])
    told = measured_speed(made, predicted, [simulate(made, host(), op_seconds=[5.0, 3.0, 40.0])])
    assert (told.products, told.others, told.tiers) == (pytest.approx(1.5), pytest.approx(1.5), {})


def test_every_number_of_the_processors_is_slower() -> None:
    shared = Processes(cores=2, slowdown={"memory-bound": (1.0, 1.5)}, tiers={"disk.read_bytes_per_s": (1e9, 4e8)})
    device = dataclasses.replace(host().device, op_overhead_s=2e-6)
    before = dataclasses.replace(host(), device=device, processes=dataclasses.replace(shared, device=device))
    now = before.at_speed(HostSpeed(products=2.0, others=4.0, tiers={"disk.read": 5.0}))
    assert now.processes is not None
    for device in filter(None, (now.device, now.processes.device)):
        assert device.op_overhead_s == 8e-6
        assert device.peak_flops_per_s == {"float32": 5e10, "bfloat16": 2.5e10}
        assert device.rates["matmul.bfloat16"].rate == (5e9,)
        assert device.rates["elementwise"].rate == (2.5e9,)
        assert device.optimizer_elements_per_s == before.device.optimizer_elements_per_s / 4
        assert device.memory_bandwidth_bytes_per_s == before.device.memory_bandwidth_bytes_per_s / 4
    disk = now.tiers[0]
    assert (disk.read_bytes_per_s, disk.mixed_read_bytes_per_s, disk.write_bytes_per_s) == (2e8, 1.2e8, 1e9)
    assert now.processes.tiers == {"disk.read_bytes_per_s": (2e8, 8e7)}


def test_a_factor_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a positive factor of disk\.read, got 0"):
        HostSpeed(tiers={"disk.read": 0.0})
