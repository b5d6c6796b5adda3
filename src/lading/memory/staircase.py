"""Memory over a step: staircases of every tier from what a Program places and frees, and when.

The simulator and the executor both draw theirs with it, so that the two can be laid over each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lading.ir.action import DEVICE, ActionKind
from lading.ir.program import Program, slot_bytes
from lading.ir.timeline import Event, MemorySample
from lading.memory.tier_layout import home_tiers

#: Roles under which scratch outside the arena, and what the process needs besides, are shown.
WORKSPACE, OVERHEAD = "workspace", "overhead"


def memory_samples(
    program: Program, events: Sequence[Event], scratch_bytes: Mapping[int, int], *, overhead_bytes: int = 0
) -> tuple[MemorySample, ...]:
    """Build the staircases of memory by tier: bytes appear when an action that places them starts, till their FREE.

    Args:
        events: Events by action id.
        scratch_bytes: Bytes that an action takes outside the arena while it runs, by action id.
        overhead_bytes: Shown on the device all the time.
    """
    storages = program.graph.storages
    changes: list[tuple[float, int, str, str, int]] = []  # time, order, tier, role, bytes
    used: dict[str, Counter[str]] = {
        DEVICE: Counter({OVERHEAD: overhead_bytes}),
        **{tier.name: Counter() for tier in program.tiers if tier.name in program.slots},
    }
    present = {(home, storage) for storage, home in home_tiers(program).items()}
    for tier, storage in sorted(present):
        used[tier][storages[storage].role.value] += slot_bytes(storages[storage].size_bytes)

    def change(time: float, order: int, tier: str, storage: int, sign: int) -> None:
        size = slot_bytes(storages[storage].size_bytes)
        changes.append((time, order, tier, storages[storage].role.value, sign * size))

    for action, event in zip(program.actions, events, strict=True):
        for storage, _ in action.places:
            change(event.start_s, 1, DEVICE, storage, 1)
        if action.storage is not None and action.kind is ActionKind.FREE:
            present.discard((action.source, action.storage))
            change(event.end_s, 0, action.source, action.storage, -1)
        elif action.storage is not None and action.target in program.slots:
            if (action.target, action.storage) not in present:
                change(event.start_s, 1, action.target, action.storage, 1)
            present.add((action.target, action.storage))
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
