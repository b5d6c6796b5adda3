"""Timelines of pipelines: all there is, arrows where something is sent, and what Perfetto reads back."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from tools.pipelines import PipelineSeconds, simulate_pipeline

from lading.errors import ConfigError
from lading.ir.schedules import schedule
from lading.ir.timeline import Timeline
from lading.report.perfetto import write_trace
from lading.sim.traces import COMPUTE, SEND_DOWN, SEND_UP, rank_timeline

SECONDS = PipelineSeconds(forward=1, backward=2, send_forward=0.25, send_backward=0.125)


def test_every_action_and_send_is_there_with_its_times() -> None:
    run = simulate_pipeline(schedule("1f1b", 3, 1, 4), SECONDS)
    timeline = rank_timeline(run.times)
    assert timeline.duration_s == run.makespan_s
    for rank in range(3):
        mine = [e for e in timeline.events if e.rank_class == rank]
        computed = sorted((e for e in mine if e.stream == COMPUTE), key=lambda e: e.action)
        assert [e.start_s for e in computed] == run.start_s[rank].tolist()
        assert sum(e.stream == SEND_DOWN for e in mine) == (4 if rank < 2 else 0)
        assert sum(e.stream == SEND_UP for e in mine) == (4 if rank > 0 else 0)
    assert len(timeline.events) == 3 * 8 + 4 * 4
    assert "forward of stage 0, micro-batch 0" in timeline.labels.values()


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zero-bubble", "zbv"])
def test_flows_join_a_send_and_what_takes_it(kind: str) -> None:
    chunks = {"interleaved": 2, "zbv": 2}.get(kind, 1)
    seconds = PipelineSeconds(
        forward=1, backward=2, backward_input=1, backward_weight=1, send_forward=0.25, send_backward=0.125
    )
    plan = schedule(kind, 4, chunks, 8)
    timeline = rank_timeline(simulate_pipeline(plan, seconds).times)
    events = {e.action: e for e in timeline.events}
    hops = sum(plan.rank_of(s) != plan.rank_of(s + 1) for s in range(plan.stages - 1))
    assert len(timeline.flows) == 2 * 8 * hops
    for send, taker in timeline.flows:
        assert events[send].end_s <= events[taker].start_s + 1e-12
        texts = [re.search(r"of stage (\d+), micro-batch (\d+)", timeline.labels[a]) for a in (send, taker)]
        assert texts[0]
        assert texts[1]
        assert texts[0].groups() == texts[1].groups()
        down = timeline.labels[send].startswith("send activation")
        assert events[send].stream == (SEND_DOWN if down else SEND_UP)
        assert timeline.labels[taker].startswith("forward" if down else ("backward", "input gradient"))


def test_some_ranks_keep_their_ids_and_the_flows_between_them() -> None:
    run = simulate_pipeline(schedule("1f1b", 4, 1, 4), SECONDS)
    whole, some = rank_timeline(run.times), rank_timeline(run.times, ranks=[0, 1])
    assert set(some.flows) < set(whole.flows)
    assert len(some.flows) == 8
    assert [e for e in whole.events if e.rank_class < 2] == list(some.events)
    with pytest.raises(ConfigError, match="from 0 to 3"):
        rank_timeline(run.times, ranks=[4])


def test_perfetto_reads_the_arrows(tmp_path: Path) -> None:
    timeline = rank_timeline(simulate_pipeline(schedule("1f1b", 2, 1, 3), SECONDS).times)
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
    write_trace(tmp_path / "trace", [timeline, timeline])
    trace = Trace()
    trace.ParseFromString((tmp_path / "trace").read_bytes())
    events = [p.track_event for p in trace.packet if p.HasField("track_event")]
    leaving, ending = ([i for e in events for i in getattr(e, f)] for f in ("flow_ids", "terminating_flow_ids"))
    assert sorted(leaving) == sorted(ending)
    assert len(set(leaving)) == len(leaving) == 2 * len(timeline.flows) == 12
    names = [p.track_descriptor.thread.thread_name for p in trace.packet if p.track_descriptor.HasField("thread")]
    assert names[:2] == ["rank class 0 compute", f"rank class 0 {SEND_DOWN}"]


def test_a_large_pipeline_is_simulated_and_drawn_within_a_moment(tmp_path: Path) -> None:
    # A quarter of Llama 3 405B's micro-batches on 16,384 devices: 16 ranks of 8 chunks; each replica is alike.
    began = time.process_time()
    run = simulate_pipeline(schedule("interleaved", 16, 8, 32), SECONDS)
    timeline = rank_timeline(run.times)
    write_trace(tmp_path / "trace", [timeline])
    took_s = time.process_time() - began
    assert len(timeline.events) > 15000
    assert took_s < 3  # a third on one core
