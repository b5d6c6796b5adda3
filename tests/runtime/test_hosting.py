"""Operations on the host's processors, beside a device that runs behind the host: the numbers of plain PyTorch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.runtime.cases import (
    OPTIMIZER,
    TIERED,
    assert_equals_eager,
    at_random,
    behind_host,
    disk_always,
    graph_of,
    program_of,
)
from tests.runtime.fake_accelerator import FakeApi, fake_device

from lading.ir.action import ActionKind
from lading.ir.defer import defer
from lading.ir.graph import OpKind, Role, StepGraph
from lading.ir.host_ops import hosted, light_groups
from lading.ir.program import HOST_STREAM, Program
from lading.runtime.device import CpuDevice, DeviceDriver
from lading.runtime.executor import Executor
from lading.units import GiB


@pytest.fixture(params=["stand-in", pytest.param("cpu", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest, api: FakeApi) -> DeviceDriver:
    return CpuDevice() if request.param == "cpu" else fake_device(api)


def on_host(graph: StepGraph, share: float, *, sums: bool = False) -> StepGraph:
    """A share of the groups that may run on the host, drawn at random."""
    rng = random.Random(1)
    groups = [group for group in light_groups(graph, sums=sums) if rng.random() < share]
    assert groups
    return hosted(graph, (i for group in groups for i in group))


@pytest.mark.long
@pytest.mark.parametrize(
    ("micro", "clip", "share", "sums"),
    [
        pytest.param(1, 0.0, 1.0, False, marks=pytest.mark.slow),
        (2, 0.5, 0.5, False),  # updates on either side
        pytest.param(2, 0.5, 1.0, True, marks=pytest.mark.slow),
    ],
)
def test_equals_plain_pytorch(
    tmp_path: Path, device: DeviceDriver, micro: int, clip: float, share: float, sums: bool
) -> None:
    graph = on_host(graph_of("llama", micro=micro, clip=clip), share, sums=sums)
    program = program_of(graph, at_random(0), TIERED)
    worked = [a for a in program.actions if a.stream == HOST_STREAM and a.kind is not ActionKind.FREE]
    assert {a.op for a in worked} == graph.on_host
    kinds = {graph.ops[i].kind for i in graph.hosted}
    assert OpKind.STEP in kinds
    assert ({OpKind.ELEMENTWISE, OpKind.REDUCTION} <= kinds) == sums
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, device=device, poison=True) as executor:
        assert_equals_eager(executor, "llama", micro=micro, clip=clip)
        lanes = {event.stream for event in executor.timeline().events}
        assert HOST_STREAM in lanes


@pytest.mark.slow
def test_deferred_updates_on_the_host(tmp_path: Path, device: DeviceDriver) -> None:
    """They run in the next step, or before a value is read."""
    graph = on_host(defer(graph_of("llama"), 6)[0], 1.0)
    assert set(graph.deferred) <= graph.on_host
    program = program_of(graph, at_random(1), TIERED)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, device=device, poison=True) as executor:
        assert_equals_eager(executor, "llama")


@pytest.mark.slow
def test_gradients_on_their_way_share_their_place() -> None:
    """What is on the host only to be worked on takes less there than all of it together."""
    graph = on_host(graph_of("llama"), 1.0)
    program = program_of(graph, None, TIERED)
    passing = graph.host_storages - graph.persistent
    places = [(o, o + graph.storages[s].size_bytes) for s, o in program.slots["host"] if s in passing]
    freed = {a.storage for a in program.actions if a.kind is ActionKind.FREE and a.source == "host"}
    assert freed == passing
    assert max(end for _, end in places) - min(low for low, _ in places) < sum(
        graph.storages[s].size_bytes for s in passing
    )


def from_disk(graph: StepGraph, host_bytes: int = GiB) -> Program:
    """All that the host works on lies on the disk between two updates, as does what else leaves the device."""
    return program_of(graph, disk_always, TIERED, behind_host=behind_host(graph), host_bytes=host_bytes)


def moved(program: Program, source: str, target: str) -> list[int]:
    return [a.storage for a in program.actions if (a.source, a.target) == (source, target) and a.storage is not None]


@pytest.mark.long
@pytest.mark.parametrize(
    ("micro", "clip", "sums", "deferred"),
    [(2, 0.5, True, 0), pytest.param(1, 0.0, False, 6, marks=pytest.mark.slow)],
)
def test_states_on_the_disk_pass_through_the_hosts_memory(
    tmp_path: Path, device: DeviceDriver, micro: int, clip: float, sums: bool, deferred: int
) -> None:
    """The host has room for the largest update and a half: its memory is taken by one after another."""
    step = graph_of("llama", micro=micro, clip=clip)
    graph = on_host(defer(step, deferred)[0] if deferred else step, 1.0, sums=sums)
    wide = from_disk(graph)
    lasting = behind_host(graph)
    largest = max(sum(graph.storages[s].size_bytes for s in graph.op_reads[op]) for op in graph.hosted)
    others = sum(graph.storages[s].size_bytes for s in graph.host_storages - lasting.keys())
    program = from_disk(graph, others + largest * 3 // 2)
    assert program.tier_bytes("host") < wide.tier_bytes("host")
    for each in (wide, program):
        assert sorted(moved(each, "disk", "host")) == sorted(moved(each, "host", "disk")) == sorted(lasting)
        states = {s for s in lasting if graph.storages[s].role is Role.OPTIMIZER_STATE}
        assert states.isdisjoint([*moved(each, "disk", "device"), *moved(each, "device", "disk")])
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, device=device, poison=True) as executor:
        assert_equals_eager(executor, "llama", micro=micro, clip=clip)
        assert executor.homes.items() >= lasting.items()
