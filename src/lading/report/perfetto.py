"""Perfetto traces: timelines as TrackEvent protobuf, to open in the Perfetto viewer.

Written by hand: a message is a run of (field number, wire type) tags and values, and a trace is a run of packets.
Field numbers are those of ``protos/perfetto/trace/*.proto`` in the Perfetto sources. Slice names are interned, so an
event costs about 40 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from lading.files import write_aside
from lading.ir.timeline import Event, Timeline
from lading.report.figures import role_names, role_title, tier_samples, tiers_of

_SEQUENCE = 1
_NEEDS_INTERNED = 2
_BEGIN, _END, _COUNTER = 1, 2, 4
_BYTES_UNIT = 3
_SMALL = tuple(bytes([value]) for value in range(128))


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write timelines as one trace.

    Each timeline is a process named after its source, with one thread for each stream (more when actions of one stream
    overlap) and counters of bytes per tier, per role and, when measured, of the resident set. A slice is named by its
    label and carries ``action_id``, the same in every timeline; flows are arrows from slice to slice. An action without
    duration is a slice too: the viewer stacks instants of one moment on top of each other.
    """
    with write_aside(path) as file:
        _Trace(file, timelines).write()


def varint(value: int) -> bytes:
    """Encode an integer in base 128, least significant group first; negative values as 64-bit two's complement."""
    if 0 <= value < 128:
        return _SMALL[value]
    if 0 <= value < 1 << 21:  # ids and lengths
        head, tail = (value & 0x7F | 0x80, value >> 7 & 0x7F), value >> 14
        return bytes((head[0], head[1] | 0x80, tail)) if tail else bytes(head)
    if 1 << 28 <= value < 1 << 35:  # from a quarter of a second to half a minute, in ns
        low = (value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80)
        return bytes((*low, value >> 21 & 0x7F | 0x80, value >> 28))
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def _nested(field: int, payload: bytes | str) -> bytes:
    payload = payload.encode() if isinstance(payload, str) else payload
    return varint(field << 3 | 2) + varint(len(payload)) + payload


_OPENS, _NOTE = _number(9, _BEGIN), _number(1, 1) + b"\x18"
_INTERNED, _LAST = _number(13, _NEEDS_INTERNED), _number(10, _SEQUENCE)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def lanes(events: Iterable[Event]) -> list[list[tuple[int, int, int]]]:
    """Spread (start ns, end ns, action) of one stream over as few lanes as keep slices of a lane apart.

    Starts are moved by up to 1 ns where rounding alone makes neighbours overlap.
    """
    spread: list[list[tuple[int, int, int]]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.end_s, e.action)):
        start, end = _ns(event.start_s), _ns(event.end_s)
        lane = next((lane for lane in spread if lane[-1][1] <= start + 1), None)
        if lane is None:
            spread.append(lane := [])
        start = max(start, lane[-1][1]) if lane else start
        lane.append((start, max(start, end), event.action))
    return spread


class _Trace:
    """Trace file being written; ids of tracks and names count up from 1."""

    def __init__(self, file: BinaryIO, timelines: Sequence[Timeline]) -> None:
        self._file = file
        self._timelines = timelines
        self._names: dict[str, int] = {}
        self._tracks = 0
        self._flows: dict[int, bytes] = {}

    def write(self) -> None:
        self._packet(_number(41, 1) + _number(13, 1) + _nested(12, _nested(3, _number(1, 1) + _nested(2, "action_id"))))
        for pid, timeline in enumerate(self._timelines, 1):
            process = self._track(_nested(3, _number(1, pid) + _nested(6, timeline.source)))
            self._flows = _flow_fields(timeline, pid << 32)
            self._slices(timeline, pid, process)
            self._counters(timeline, process)

    def _packet(self, payload: bytes) -> None:
        self._file.write(_nested(1, payload + _number(10, _SEQUENCE)))

    def _track(self, description: bytes) -> int:
        self._tracks += 1
        self._packet(_nested(60, _number(1, self._tracks) + description))
        return self._tracks

    def _slices(self, timeline: Timeline, pid: int, process: int) -> None:
        streams: dict[tuple[int, str], list[Event]] = defaultdict(list)
        for event in timeline.events:
            streams[event.rank_class, event.stream].append(event)
        several = any(rank_class for rank_class, _ in streams)
        for (rank_class, stream), events in sorted(streams.items()) if several else streams.items():
            title = f"rank class {rank_class} {stream}" if several else stream
            for number, lane in enumerate(lanes(events)):
                name = f"{title} ({number + 1})" if number else title
                tid = 1000 + self._tracks  # unique, and never a pid: the viewer takes tid == pid for a main thread
                thread = _number(1, pid) + _number(2, tid) + _nested(5, name)
                track = self._track(_number(5, process) + _nested(4, thread))
                self._lane(_number(11, track), lane, timeline.labels)

    def _lane(self, track: bytes, lane: Sequence[tuple[int, int, int]], labels: Mapping[int, str]) -> None:
        ends = _nested(11, _number(9, _END) + track) + _number(10, _SEQUENCE)
        packets: list[bytes] = []
        for start, end, action in lane:
            packets.append(self._begin(track, start, action, labels.get(action, f"action {action}")))
            packets.append(b"\x40" + varint(end) + ends)  # field 8, the time
        self._file.write(b"".join(_nested(1, packet) for packet in packets))

    def _begin(self, track: bytes, start: int, action: int, label: str) -> bytes:
        interned = b""
        if (name := self._names.get(label)) is None:
            name = self._names[label] = len(self._names) + 1
            interned = _nested(12, _nested(2, _number(1, name) + _nested(2, label)))
        note = _nested(4, _NOTE + varint(action))
        begin = _OPENS + track + b"\x50" + varint(name) + note + self._flows.get(action, b"")  # field 10, the name
        return b"\x40" + varint(start) + _INTERNED + interned + _nested(11, begin) + _LAST

    def _counters(self, timeline: Timeline, process: int) -> None:
        for name, samples in _counter_values(timeline):
            track = self._track(_number(5, process) + _nested(2, name) + _nested(8, _number(3, _BYTES_UNIT)))
            before: int | None = None
            for time_s, size_bytes in samples:
                if size_bytes != before:
                    event = _number(9, _COUNTER) + _number(11, track) + _number(30, size_bytes)
                    self._packet(_number(8, _ns(time_s)) + _nested(11, event))
                before = size_bytes


def _flow_fields(timeline: Timeline, base: int) -> dict[int, bytes]:
    """Fields of each action's slice for the flows that leave it (47) and that end in it (48): fixed 64-bit ids."""
    fields: dict[int, bytes] = {}
    for number, (source, target) in enumerate(timeline.flows, base + 1):
        flow = number.to_bytes(8, "little")
        fields[source] = fields.get(source, b"") + varint(47 << 3 | 1) + flow
        fields[target] = fields.get(target, b"") + varint(48 << 3 | 1) + flow
    return fields


def _counter_values(timeline: Timeline) -> Iterator[tuple[str, list[tuple[float, int]]]]:
    """Yield name and (seconds, bytes) of each counter of a timeline."""
    for tier in tiers_of(timeline):
        samples = tier_samples(timeline, tier)
        yield f"{tier} memory", [(s.time_s, s.total_bytes) for s in samples]
        for role in role_names({role for s in samples for role in s.bytes_by_role}):
            yield f"{tier} memory: {role_title(role)}", [(s.time_s, s.bytes_by_role.get(role, 0)) for s in samples]
    if timeline.resident:
        yield "resident", list(timeline.resident)
