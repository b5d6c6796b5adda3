"""Memory snapshots: a step's memory over time as torch's memory viewer (pytorch.org/memory_viz) reads it.

A snapshot is a pickle of plain lists and dicts. Each tier is a device of it, the computing device first. Arenas are
segments, so the viewer's allocator history shows where in an arena each storage lies; what the step takes outside
(scratch of kernels, the process) lies in segments of its own. The first frame of an allocation is the storage's name
and role, the second the action that brought it.

Source: torch/cuda/_memory_viz.py and torch.cuda.memory._snapshot (torch 2.13).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lading.files import write_aside
from lading.ir.action import DEVICE, Action, ActionKind
from lading.ir.program import Program, slot_bytes
from lading.ir.timeline import Event, Timeline
from lading.memory.staircase import OVERHEAD, WORKSPACE
from lading.memory.tier_layout import home_tiers

#: Addresses at which the segments of a tier begin: its arena, and what lies outside.
_BASE = {"arena": 1 << 40, WORKSPACE: 2 << 40, OVERHEAD: 3 << 40}
_START = "start of the step"

#: Time (s), order within it, whether it is freed, address, bytes, bytes asked for, first frame, second frame.
Change = tuple[float, int, bool, int, int, int, str, str]


def write_snapshot(path: Path, program: Program, timeline: Timeline) -> None:
    """Write the memory of one step, predicted or measured, as a snapshot."""
    with write_aside(path) as file:
        pickle.dump(snapshot(program, timeline), file, protocol=4)


def snapshot(program: Program, timeline: Timeline) -> dict[str, Any]:
    """Build the snapshot as plain data; its segments are those at the end of the step."""
    traces: list[list[dict[str, Any]]] = []
    segments: list[dict[str, Any]] = []
    for device, tier in enumerate((DEVICE, *program.slots)):
        changes = sorted((*_stays(program, timeline, tier), *_outside(timeline, tier)), key=lambda c: (c[0], c[1]))
        sizes = _segment_sizes(program, tier, changes)
        trace = [entry("segment_alloc", address, size, 0.0, []) for address, size in sizes.items()]
        for time_s, _, freed, address, size, _, *names in changes:
            for action in ("free_requested", "free_completed") if freed else ("alloc",):
                trace.append(entry(action, address, size, time_s, frames(names)))
        traces.append(trace)
        segments += [segment(device, address, size, changes) for address, size in sizes.items()]
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def _stays(program: Program, timeline: Timeline, tier: str) -> Iterator[Change]:
    """List when each storage comes to a tier and when it goes.

    One that comes and goes at the same moment is left out. Streams of a device and of the host are measured by two
    clocks: what comes before all that was at its place has gone, by them, comes when that has.
    """
    last_use_s: dict[tuple[int, int], float] = {}  # first byte and end of what was there -> when it went last
    events = {event.action: event for event in timeline.events}
    slots = dict(program.slots.get(tier, ()))
    present: dict[int, tuple[float, int, str]] = {}  # storage -> since when, address, what brought it

    def change(time_s: float, storage: int, address: int, label: str, *, freed: bool) -> Change:
        item = program.graph.storages[storage]
        name = f"{item.name} ({item.role.value})"
        return time_s, 0 if freed else 1, freed, address, slot_bytes(item.size_bytes), item.size_bytes, name, label

    first = program.resident if tier == DEVICE else [(s, slots[s]) for s, t in home_tiers(program).items() if t == tier]
    for storage, offset in first:
        present[storage] = 0.0, _BASE["arena"] + offset, _START
    for action in program.actions:
        event = events[action.id]
        for storage, offset in _brought(action, tier, slots):
            if storage not in present:
                low, high = offset, offset + slot_bytes(program.graph.storages[storage].size_bytes)
                free_s = max((t for (at, end), t in last_use_s.items() if at < high and end > low), default=0.0)
                since = max(event.start_s, free_s)
                present[storage] = since, _BASE["arena"] + offset, _label(program, action, event)
        if action.kind is ActionKind.FREE and action.source == tier and action.storage in present:
            since, address, label = present.pop(action.storage)
            low, size = address - _BASE["arena"], slot_bytes(program.graph.storages[action.storage].size_bytes)
            last_use_s[low, low + size] = max(event.end_s, since)
            if event.end_s > since:
                yield change(since, action.storage, address, label, freed=False)
                yield change(event.end_s, action.storage, address, label, freed=True)
    for storage, (since, address, label) in present.items():
        yield change(since, storage, address, label, freed=False)


def _brought(action: Action, tier: str, slots: dict[int, int]) -> list[tuple[int, int]]:
    """List the storages that an action brings to a tier, with their offsets in its arena."""
    if tier == DEVICE:
        return list(action.places)
    storage = action.storage
    moved = storage is not None and action.kind is not ActionKind.FREE and action.target == tier
    return [(storage, slots[storage])] if moved and storage is not None else []


def _outside(timeline: Timeline, tier: str) -> Iterator[Change]:
    """List what is taken outside the arena: the process all the time, scratch while kernels run."""
    for role in (OVERHEAD, WORKSPACE):
        size, time_s = 0, 0.0
        for sample in timeline.memory:
            time_s = max(time_s, sample.time_s)
            if sample.tier == tier and (size_now := sample.bytes_by_role.get(role, 0)) != size:
                if size:
                    yield time_s, 1, True, _BASE[role], size, size, role, ""
                if size_now:
                    yield time_s, 1, False, _BASE[role], size_now, size_now, role, ""
                size = size_now


def _segment_sizes(program: Program, tier: str, changes: list[Change]) -> dict[int, int]:
    """Bytes of each segment of a tier, by address."""
    arena = program.arena_bytes if tier == DEVICE else program.tier_bytes(tier)
    sizes = {_BASE["arena"]: arena} if arena else {}
    for change in changes:
        if change[3] in (_BASE[WORKSPACE], _BASE[OVERHEAD]):
            sizes[change[3]] = max(sizes.get(change[3], 0), change[4])
    return sizes


def segment(device: int, start: int, size: int, changes: list[Change]) -> dict[str, Any]:
    """Describe a segment as it is at the end: what is still there, and the gaps."""
    live: dict[int, Change] = {}
    for change in changes:
        if start <= change[3] < start + size:
            if change[2]:
                del live[change[3]]
            else:
                live[change[3]] = change
    blocks: list[dict[str, Any]] = []
    at = start
    for address in sorted(live):
        _, _, _, _, block_bytes, requested_bytes, *names = live[address]
        if address > at:
            blocks.append(_block(at, address - at, 0, "inactive", []))
        blocks.append(_block(address, block_bytes, requested_bytes, "active_allocated", frames(names)))
        at = address + block_bytes
    if at < start + size:
        blocks.append(_block(at, start + size - at, 0, "inactive", []))
    active = sum(change[4] for change in live.values())
    return {
        "device": device, "address": start, "total_size": size, "stream": 0, "segment_type": "large",
        "allocated_size": active, "active_size": active, "requested_size": sum(c[5] for c in live.values()),
        "blocks": blocks, "frames": [], "segment_pool_id": (0, 0), "is_expandable": False,
    }  # fmt: skip


def _block(address: int, size: int, asked: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": asked, "state": state, "frames": frames}


def entry(action: str, address: int, size: int, time_s: float, frames: list[dict[str, Any]]) -> dict[str, Any]:
    time_us = round(time_s * 1e6)
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": frames}


def frames(names: list[str]) -> list[dict[str, Any]]:
    return [{"name": name, "filename": "", "line": 0} for name in names if name]


def _label(program: Program, action: Action, event: Event) -> str:
    return f"{program.label(action)} on {event.stream}"
