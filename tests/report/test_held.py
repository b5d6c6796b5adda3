"""What ranks hold: torch's own reader takes the snapshot, and chart and snapshot say what `bytes_over_time` says."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from lading.cli.main import main
from lading.clusters import fullest_chart, step_of, write_cluster_snapshot
from lading.ir.graph import Role
from lading.ir.program import slot_bytes
from lading.ir.request import Request
from lading.ir.timeline import MemorySample, MemorySpan
from lading.report.memory_chart import held_snapshot, memory_chart
from lading.sim.occupancy import Occupancy
from lading.sim.simulate import Simulated, simulate
from lading.units import format_bytes


@pytest.fixture(scope="module")
def simulated() -> Simulated:
    asked = Request(model="llama3-8b", machine="h100", layout="tp2,pp4,vpp2,sp,dp2,zero1,gb16", seq_len=4096)
    return simulate(*step_of(asked))


def test_allocations_never_overlap_and_peak_as_reported(simulated: Simulated, tmp_path: Path) -> None:
    write_cluster_snapshot(tmp_path / "memory.pickle", simulated)
    data: Any = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    totals = [sum(roles.values()) for roles in simulated.memory]
    ranks = sorted({0, totals.index(max(totals)), 3})
    assert len(data["device_traces"]) == len(ranks)
    for device, rank in enumerate(ranks):
        live: dict[int, int] = {}
        peak = before = 0
        for entry in data["device_traces"][device]:
            assert entry["time_us"] >= before
            before = entry["time_us"]
            if entry["action"] == "alloc":
                assert all(a + s <= entry["addr"] or entry["addr"] + entry["size"] <= a for a, s in live.items())
                live[entry["addr"]] = entry["size"]
            elif entry["action"] == "free_completed":
                del live[entry["addr"]]
            peak = max(peak, sum(live.values()))
        assert data["segments"][device]["active_size"] == sum(live.values())
        kept = sum(simulated.memory[rank][role] for role in (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE))
        assert kept <= sum(live.values()) <= kept + 2048
        assert totals[rank] <= peak <= totals[rank] * 1.001  # allocations are whole slots


def test_torch_reads_it(simulated: Simulated, tmp_path: Path) -> None:
    write_cluster_snapshot(tmp_path / "memory.pickle", simulated)
    data: Any = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    for text in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert "MemoryViz" in text
    reserved = sum(segment["total_size"] for segment in data["segments"])
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in _memory_viz.segsum(data)
    assert "cudaMalloc" in _memory_viz.trace(data)
    names = {frame["name"] for trace in data["device_traces"] for entry in trace for frame in entry["frames"][:1]}
    assert {
        "optimizer state (optimizer_state)",
        "kept by forward of layers 3 of stage 4, micro-batch 7 (activation)",
    } <= names


def test_what_is_still_there_at_the_end_is_in_the_segment() -> None:
    """Allocations that begin and end at the same moments share no address."""
    held = [MemorySpan(0.0, 2.0, Role.PARAMETER, 1000, "p"), MemorySpan(0.0, 1.0, Role.ACTIVATION, 500, "a")]
    held += [MemorySpan(1.0, 2.0, Role.ACTIVATION, 500, "b"), MemorySpan(1.0, 1.0, Role.ACTIVATION, 9000, "no time")]
    data = held_snapshot({"rank": held})
    assert data["segments"][0]["total_size"] == 4096 + slot_bytes(500)  # what stays takes whole pages
    names = [e["frames"][0]["name"] for e in data["device_traces"][0] if e["action"] == "alloc"]
    assert names == ["p (parameter)", "a (activation)", "b (activation)"]


def test_the_chart_has_as_many_rows_as_bytes() -> None:
    samples = [
        MemorySample(0.0, "device", {"parameter": 50, "activation": 0}),
        MemorySample(1.0, "device", {"parameter": 50, "activation": 50}),
        MemorySample(1.001, "device", {"parameter": 50, "activation": 20}),
        MemorySample(2.0, "device", {"parameter": 50, "activation": 0}),
    ]
    lines = memory_chart(samples, 4.0, "Memory").plain.splitlines()
    assert lines[0] == "Memory: 100 B at 1.000 s"
    rows = [line.partition("|")[2] for line in lines[1:11]]
    columns = ["".join(row[c] for row in rows) for c in range(64)]
    assert columns[0] == " " * 5 + "p" * 5
    assert columns[16] == "a" * 5 + "p" * 5  # the moment of the peak is seen though it is short
    assert columns[17] == " " * 3 + "a" * 2 + "p" * 5
    assert columns[63] == columns[0]


def test_the_fullest_rank_is_drawn(simulated: Simulated) -> None:
    totals = [sum(roles.values()) for roles in simulated.memory]
    head = fullest_chart(simulated).plain.splitlines()[0]
    assert head.startswith(f"Memory of pipeline rank {totals.index(max(totals))} over the step")
    assert format_bytes(max(totals)) in head


def test_rows_below_the_top_add_up() -> None:
    occupancy = Occupancy(
        0, (MemorySpan(0.0, 1.0, Role.GRADIENT, 7, "g"), MemorySpan(0.5, 1.0, Role.WORKSPACE, 3, "w")), 1.0
    )
    assert [s.total_bytes for s in occupancy.samples("device")] == [7, 10, 0]
    assert occupancy.peak_bytes == 10


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.pickle"
    asked = ["--model", "llama3-8b", "--machine", "h100", "--layout", "dp8,zero3"]
    assert main(["simulate", *asked, "--snapshot", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "Memory over the step: " in printed
    assert "a activation" in printed
    assert f"wrote {path}" in printed.replace("\n", "")
    assert len(pickle.loads(path.read_bytes())["device_traces"]) == 1
