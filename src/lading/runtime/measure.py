"""Measured timeline: times from the clock, memory by adding up what the Program says was placed and freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lading.ir.action import ActionKind
from lading.ir.program import Program, slot_bytes
from lading.ir.timeline import Event, MemorySample, Timeline
from lading.memory.layout import DEVICE, home_tiers

#: Role under which scratch outside the arena is shown.
WORKSPACE = "workspace"


def measured_timeline(
    program: Program,
    starts: list[float],
    ends: list[float],
    *,
    scratch_bytes: Mapping[int, int],
    resident: tuple[tuple[float, int], ...],
    peak_bytes: int,
) -> Timeline:
    """Timeline of one step from the start and end of each action (seconds, by id; the first start is zero)."""
    origin = min(starts, default=0.0)
    events = [
        Event(0, action.stream, action.id, starts[action.id] - origin, ends[action.id] - origin)
        for action in program.actions
    ]
    return Timeline(
        source="measured",
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.action))),
        memory=memory_samples(program, events, scratch_bytes),
        labels={action.id: program.label(action) for action in program.actions},
        resident=tuple((max(0.0, time - origin), size) for time, size in resident),
        peak_bytes=peak_bytes,
    )


def memory_samples(program: Program, events: list[Event], scratch_bytes: Mapping[int, int]) -> tuple[MemorySample, ...]:
    """Staircases of every tier: bytes appear when the action that places them starts, and go when they are freed.

    Args:
        events: By action id.
    """
    storages = program.graph.storages
    changes: list[tuple[float, int, str, str, int]] = []  # time, order, tier, role, bytes
    used: dict[str, Counter[str]] = {DEVICE: Counter(), **{tier: Counter() for tier in program.slots}}
    held = {(home, storage) for storage, home in home_tiers(program).items()}
    for tier, storage in held:
        used[tier][storages[storage].role.value] += slot_bytes(storages[storage].size_bytes)

    def change(time: float, order: int, tier: str, storage: int, sign: int) -> None:
        size = slot_bytes(storages[storage].size_bytes)
        changes.append((time, order, tier, storages[storage].role.value, sign * size))

    for action, event in zip(program.actions, events, strict=True):
        for storage, _ in action.places:
            change(event.start_s, 1, DEVICE, storage, 1)
        if action.storage is not None and action.kind is ActionKind.FREE:
            held.discard((action.source, action.storage))
            change(event.end_s, 0, action.source, action.storage, -1)
        elif action.storage is not None and action.target in program.slots:
            if (action.target, action.storage) not in held:
                change(event.start_s, 1, action.target, action.storage, 1)
            held.add((action.target, action.storage))
        if scratch := scratch_bytes.get(action.id, 0):
            changes.append((event.start_s, 1, DEVICE, WORKSPACE, scratch))
            changes.append((event.end_s, 0, DEVICE, WORKSPACE, -scratch))
    return _staircase(used, changes)


def _staircase(
    used: dict[str, Counter[str]], changes: list[tuple[float, int, str, str, int]]
) -> tuple[MemorySample, ...]:
    samples = [MemorySample(0.0, tier, _positive(roles)) for tier, roles in used.items()]
    changes.sort(key=lambda c: (c[0], c[1]))
    for index, (time, _, tier, role, size) in enumerate(changes):
        used[tier][role] += size
        last = index + 1 == len(changes) or changes[index + 1][0] > time
        if last:
            touched = {c[2] for c in changes[_first_at(changes, index) : index + 1]}
            samples.extend(MemorySample(time, t, _positive(used[t])) for t in sorted(touched))
    return tuple(samples)


def _first_at(changes: list[tuple[float, int, str, str, int]], index: int) -> int:
    time = changes[index][0]
    while index and changes[index - 1][0] == time:
        index -= 1
    return index


def _positive(roles: Counter[str]) -> dict[str, int]:
    return {role: size for role, size in roles.items() if size}
