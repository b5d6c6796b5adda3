"""Counters of memory in the trace of a cluster's step: one for each rank and role, with the bytes of the staircase."""

from __future__ import annotations

from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from lading.clusters import step_of
from lading.ir.request import Request
from lading.report.perfetto import write_trace
from lading.sim.simulate import simulate
from lading.sim.traces import step_timeline


def test_each_rank_has_counters_by_role(tmp_path: Path) -> None:
    asked = Request(model="llama3-8b", machine="h100", layout="tp2,pp4,sp,zero1,gb8", seq_len=4096)
    simulated = simulate(*step_of(asked))
    write_trace(tmp_path / "trace", [step_timeline(simulated)])
    trace = Trace()
    trace.ParseFromString((tmp_path / "trace").read_bytes())
    names = {
        p.track_descriptor.uuid: p.track_descriptor.name
        for p in trace.packet
        if p.HasField("track_descriptor") and p.track_descriptor.HasField("counter")
    }
    most: dict[str, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_event") and packet.track_event.track_uuid in names:
            name = names[packet.track_event.track_uuid]
            most[name] = max(most.get(name, 0), packet.track_event.counter_value)
    for rank in (0, 1, 3):
        assert most[f"rank {rank} memory"] == sum(simulated.memory[rank].values())
        for role in ("activation", "optimizer state", "gradient"):
            assert most[f"rank {rank} memory: {role}"] == simulated.memory[rank][role.replace(" ", "_")]
