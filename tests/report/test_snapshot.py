"""The memory snapshot: torch's own reader takes it, and it says what the timeline says."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.machines import small_machine
from tests.programs import GraphBuilder, ProgramBuilder
from torch.cuda import _memory_viz

from lading.ir.action import ActionKind
from lading.ir.expand import expand
from lading.ir.graph import Role, StepGraph
from lading.ir.program import PAGE_BYTES, Program
from lading.ir.timeline import Event, Timeline
from lading.memory.staircase import OVERHEAD, memory_samples
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.planner.api import Planned, make_plan
from lading.report.snapshot import snapshot, write_snapshot
from lading.tracing.trace import capture


@pytest.fixture(scope="module")
def planned() -> Planned:
    """A step that does not fit: storages come from the disk and go back."""
    torch.manual_seed(0)
    model = build_model("gpt", dim=64, num_layers=1, num_heads=2)
    batch = {"tokens": torch.zeros(4, 33, dtype=torch.int64)}
    step = expand(capture(model, batch, next_byte_loss))
    scratch = [64 * (index % 3) for index in range(len(step.ops))]
    machine = small_machine(overhead_bytes=1 << 20)
    keep = make_plan(step, machine, budget="100%", workspace_bytes=scratch)
    made = make_plan(
        step, machine, budget=keep.program.peak_bytes - keep.program.arena_bytes // 2, workspace_bytes=scratch
    )
    assert made.program.slots["disk"]
    return made


def assert_holds(program: Program, timeline: Timeline, *, peaks: bool = True) -> dict[str, Any]:
    """The snapshot, whose allocations never overlap, and whose peaks and ends are those of the timeline."""
    data = snapshot(program, timeline)
    for device, tier in enumerate(("device", "disk")):
        peak = now = 0
        live: dict[int, int] = {}
        before = -1
        for entry in data["device_traces"][device]:
            assert entry["time_us"] >= max(0, before)
            before = entry["time_us"]
            if entry["action"] == "alloc":
                free = all(a + s <= entry["addr"] or entry["addr"] + entry["size"] <= a for a, s in live.items())
                assert free, "two storages at one address"
                live[entry["addr"]] = entry["size"]
                now += entry["size"]
            elif entry["action"] == "free_completed":
                now -= live.pop(entry["addr"])
            peak = max(peak, now)
        assert not peaks or peak == timeline.peak_of_tier(tier)
        segments = [s for s in data["segments"] if s["device"] == device]
        assert sum(s["active_size"] for s in segments) == sum(live.values())
        for segment in segments:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    return data


@pytest.mark.long
def test_it_holds_what_the_timeline_says(planned: Planned) -> None:
    data = assert_holds(planned.program, planned.predicted)
    roles = {frame["name"] for trace in data["device_traces"] for e in trace for frame in e["frames"][:1]}
    parameters = {f"{p.names[0]} (parameter)" for p in planned.program.graph.parameters}
    assert {"tokens (input)", OVERHEAD, *parameters} <= roles


@pytest.mark.parametrize("together", [7, 1 << 20])
def test_what_comes_and_goes_at_one_moment_is_left_out(planned: Planned, together: int) -> None:
    """Every so many actions in a row, or all of them, take no time by a coarse clock."""
    program = planned.program
    times = [float(index // together) for index in range(len(program.actions))]
    events = [Event(0, a.stream, a.id, time, time) for a, time in zip(program.actions, times, strict=True)]
    assert_holds(program, Timeline("measured", tuple(events), memory_samples(program, events, {})))


def test_clocks_that_do_not_agree(planned: Planned) -> None:
    """A device and its host have two: by them, what comes to a place may come before what was there has gone."""
    program = planned.program
    late = {a.id: 2.5 if a.kind is ActionKind.FREE else 0.0 for a in program.actions}
    events = [Event(0, a.stream, a.id, float(a.id), a.id + late[a.id]) for a in program.actions]
    timeline = Timeline("measured", tuple(events), memory_samples(program, events, {}))
    assert_holds(program, timeline, peaks=False)


def test_what_comes_beside_a_smaller_one_does_not_wait_for_it() -> None:
    """Both lie where a larger one was, and one of them comes while the other is there."""
    build = GraphBuilder()
    size = {"large": 2 * PAGE_BYTES, "first": PAGE_BYTES, "second": PAGE_BYTES}
    large, first, second = (build.storage(name, size[name], Role.ACTIVATION) for name in size)
    actions = ProgramBuilder(graph_of(build, large, first, second), {}, {})
    places, times = {large: 0, first: 0, second: PAGE_BYTES}, {large: (0.0, 1.0), first: (1.0, 5.0), second: (2.0, 6.0)}
    events: list[Event] = []
    for storage, (start_s, end_s) in times.items():
        made, gone = actions.run(storage, {storage: places[storage]}), actions.free(storage)
        events += [Event(0, "compute", made, start_s, start_s), Event(0, "compute", gone, end_s, end_s)]
    trace = snapshot(actions.program(), Timeline("measured", tuple(events), ()))["device_traces"][0]
    came = {e["frames"][0]["name"]: e["time_us"] for e in trace if e["action"] == "alloc"}
    assert came == {f"{name} (activation)": 1e6 * times[s][0] for s, name in zip(times, size, strict=True)}


def graph_of(build: GraphBuilder, *storages: int) -> StepGraph:
    """The graph in which an operation of the same number makes each storage."""
    for storage in storages:
        build.op(outputs=[storage])
    return build.graph()


def test_torch_reads_it(planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_snapshot(tmp_path / "memory.pickle", planned.program, planned.predicted)
    data: Any = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    for text in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert "MemoryViz" in text
    arena = sum(segment["total_size"] for segment in data["segments"])
    summary = _memory_viz.segsum(data)  # raises where blocks do not add up
    assert f"total_reserved: {_memory_viz.Bytes(arena)}" in summary
    events = _memory_viz.trace(data)
    assert "free" in events
    assert "cudaMalloc" in events
