"""Traces are read back with Perfetto's own protobuf classes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor, Trace, TrackEvent

from lading.ir.timeline import Event, MemorySample, Timeline
from lading.report.perfetto import lanes, varint, write_trace

Slice = tuple[int, int, str, int]


class Read:
    """What a viewer would make of a trace: tracks by uuid, slices and counter values per track."""

    def __init__(self, path: Path) -> None:
        self.trace = Trace()
        self.trace.ParseFromString(path.read_bytes())
        self.tracks: dict[int, Any] = {}
        self.slices: dict[int, list[Slice]] = defaultdict(list)
        self.counters: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._keys: dict[int, str] = {}
        self._open: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
        for packet in self.trace.packet:
            self._packet(packet)
        assert not any(self._open.values())

    def _packet(self, packet: Any) -> None:
        assert packet.trusted_packet_sequence_id == 1
        self._names.update({n.iid: n.name for n in packet.interned_data.event_names})
        self._keys.update({n.iid: n.name for n in packet.interned_data.debug_annotation_names})
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in self.tracks
            self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if packet.HasField("track_event"):
            self._event(packet.timestamp, packet.track_event, packet.sequence_flags)

    def _event(self, time_ns: int, event: Any, flags: int) -> None:
        track = event.track_uuid
        assert track in self.tracks
        if event.type == TrackEvent.TYPE_COUNTER:
            self.counters[track].append((time_ns, event.counter_value))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            start, name, action = self._open[track].pop()
            self.slices[track].append((start, time_ns, name, action))
        else:
            assert flags & 2
            (note,) = event.debug_annotations
            assert self._keys[note.name_iid] == "action_id"
            opened = (time_ns, self._names[event.name_iid], note.uint_value)
            assert event.type == TrackEvent.TYPE_SLICE_BEGIN
            assert not self._open[track], "slices of one stream follow each other"
            self._open[track].append(opened)

    def process(self, name: str) -> int:
        return next(u for u, t in self.tracks.items() if t.process.process_name == name)

    def threads(self, process: int) -> dict[str, int]:
        return {
            t.thread.thread_name: u
            for u, t in self.tracks.items()
            if t.parent_uuid == process and t.HasField("thread")
        }  # fmt: skip

    def counter(self, process: int, name: str) -> list[tuple[int, int]]:
        (track,) = (u for u, t in self.tracks.items() if t.parent_uuid == process and t.name == name)
        assert self.tracks[track].counter.unit == CounterDescriptor.UNIT_SIZE_BYTES
        return self.counters[track]


@pytest.fixture(scope="module")
def read(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Read:
    path = tmp_path_factory.mktemp("trace") / "t.pftrace"
    write_trace(path, [run["predicted"], run["measured"]])
    return Read(path)


def test_every_action_is_there_in_both_timelines_with_the_same_name(read: Read, run: dict[str, Any]) -> None:
    found: list[dict[int, str]] = []
    for source in ("predicted", "measured"):
        threads = read.threads(read.process(source))
        assert sorted(threads) == sorted({e.stream for e in run[source].events})
        slices = [s for track in threads.values() for s in read.slices[track]]
        assert len(slices) == len(run[source].events)
        found.append({action: name for _, _, name, action in slices})
    assert found[0] == found[1] == run["predicted"].labels


def test_slices_of_a_track_do_not_overlap_and_keep_their_times(read: Read, run: dict[str, Any]) -> None:
    for source in ("predicted", "measured"):
        events = {e.action: e for e in run[source].events}
        for track in read.threads(read.process(source)).values():
            end_before = 0
            for start, end, _, action in read.slices[track]:
                assert end_before <= start <= end
                assert start == pytest.approx(events[action].start_s * 1e9, abs=2)
                assert end == pytest.approx(events[action].end_s * 1e9, abs=2)
                end_before = end


def test_counters_follow_memory(read: Read, run: dict[str, Any]) -> None:
    for source in ("predicted", "measured"):
        process = read.process(source)
        for tier in ("device", "disk"):
            values = read.counter(process, f"{tier} memory")
            assert max(v for _, v in values) == run[source].peak_of_tier(tier)
            assert [t for t, _ in values] == sorted(t for t, _ in values)
        peak = max(s.bytes_by_role.get("activation", 0) for s in run[source].memory if s.tier == "device")
        assert max(v for _, v in read.counter(process, "device memory: activation")) == peak
    resident = read.counter(read.process("measured"), "resident")
    assert max(v for _, v in resident) == run["measured"].peak_bytes
    assert not any(t.name == "resident" and t.parent_uuid == read.process("predicted") for t in read.tracks.values())


def test_thread_ids_are_unique(read: Read) -> None:
    tids = [t.thread.tid for t in read.tracks.values() if t.HasField("thread")]
    assert len(tids) == len(set(tids))


def test_an_event_is_small(tmp_path: Path) -> None:
    events = tuple(Event(0, "compute", i, i * 1e-4, (i + 1) * 1e-4) for i in range(10_000))
    line = Timeline("predicted", events, (), dict.fromkeys(range(10_000), "mm layers.0"))
    write_trace(tmp_path / "t", [line])
    assert (tmp_path / "t").stat().st_size / 10_000 < 50


def test_overlapping_actions_of_one_stream_get_their_own_tracks(tmp_path: Path) -> None:
    events = (
        Event(0, "disk_read", 0, 0.0, 2.0),
        Event(0, "disk_read", 1, 1.0, 3.0),
        Event(0, "disk_read", 2, 2.5, 4.0),
    )
    write_trace(tmp_path / "t", [Timeline("measured", events, (MemorySample(0.0, "device", {"parameter": 0}),))])
    read = Read(tmp_path / "t")
    threads = read.threads(read.process("measured"))
    assert {name: [s[3] for s in read.slices[t]] for name, t in threads.items()} == {
        "disk_read": [0, 2],
        "disk_read (2)": [1],
    }


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=30))
def test_lanes_never_overlap(spans: list[tuple[float, float]]) -> None:
    spread = lanes(Event(0, "s", i, start, start + length) for i, (start, length) in enumerate(spans))
    assert sorted(action for lane in spread for *_, action in lane) == list(range(len(spans)))
    for lane in spread:
        assert all(a[0] <= a[1] <= b[0] <= b[1] for a, b in itertools.pairwise(lane))


@given(st.integers(0, 2**64 - 1))
def test_varint_is_base_128(value: int) -> None:
    encoded = varint(value)
    assert sum((byte & 0x7F) << (7 * i) for i, byte in enumerate(encoded)) == value
    assert all(byte & 0x80 for byte in encoded[:-1])
    assert not encoded[-1] & 0x80
