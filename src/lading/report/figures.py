"""Numbers that reports show, computed from plans, programs and timelines; no drawing here."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lading.ir.action import DEVICE, Action, ActionKind
from lading.ir.graph import Phase, Role, StepGraph
from lading.ir.plan import Option, Plan
from lading.ir.program import Program, transfer_of
from lading.ir.timeline import MemorySample, Timeline

#: Roles from the bottom of a stack to its top: what stays longest lies lowest. Unknown names go above.
ROLE_ORDER = (
    Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BUFFER, Role.CONSTANT,
    Role.INPUT, Role.GRADIENT, Role.ACTIVATION, Role.WORKSPACE,
)  # fmt: skip


class SliceKind(StrEnum):
    """Kind of a slice of a timeline, as a reader sees it; finer than ActionKind for COMPUTE and MOVE."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    STEP = "step"
    READ = "read"
    WRITE = "write"
    COMMUNICATION = "communication"
    FREE = "free"


_KINDS = {
    ActionKind.RECOMPUTE: SliceKind.RECOMPUTE,
    ActionKind.STEP: SliceKind.STEP,
    ActionKind.FREE: SliceKind.FREE,
    ActionKind.RESHARD: SliceKind.FREE,
}
_PHASES = {Phase.FORWARD: SliceKind.FORWARD, Phase.LOSS: SliceKind.FORWARD, Phase.BACKWARD: SliceKind.BACKWARD}


def kind_of(program: Program, action: Action) -> SliceKind:
    """Kind of an action as a reader sees it.

    The loss counts as forward; a MOVE is a read when it ends on the device, or brings what lies behind the host to it.
    """
    if action.kind is ActionKind.COMPUTE and action.op is not None:
        return _PHASES.get(program.graph.ops[action.op].phase, SliceKind.STEP)
    if action.kind is ActionKind.MOVE:
        return SliceKind.READ if _transfer(program, action)[1] else SliceKind.WRITE
    return _KINDS.get(action.kind, SliceKind.COMMUNICATION)


def _transfer(program: Program, action: Action) -> tuple[str, bool]:
    """Tier of a MOVE, or the caller, and whether it brings something from there."""
    return transfer_of((action.source, action.target), program.host_tier)


def role_names(names: Sequence[str] | set[str]) -> list[str]:
    """Distinct role names in stacking order."""
    known_roles = [role.value for role in ROLE_ORDER if role.value in names]
    return known_roles + sorted(set(names) - set(known_roles))


def role_title(role: str) -> str:
    """A role's name for people: ``'optimizer state'``."""
    return role.replace("_", " ")


def seconds_by_kind(program: Program, timeline: Timeline) -> dict[str, float]:
    """Busy seconds of each kind that takes any; moves are told apart by tier: ``'read disk'``."""
    seconds: dict[str, float] = defaultdict(float)
    for event in timeline.events:
        action = program.actions[event.action]
        kind = kind_of(program, action)
        name = kind.value
        if action.kind is ActionKind.MOVE:
            name = f"{kind.value} {_transfer(program, action)[0]}"
        seconds[name] += event.end_s - event.start_s
    order = [kind.value for kind in SliceKind]
    names = sorted(seconds, key=lambda name: (order.index(name.split()[0]), name))
    return {name: seconds[name] for name in names if seconds[name]}


def compute_seconds(program: Program, timeline: Timeline) -> float:
    """Seconds that forward, backward and the optimizer's step compute, without what is recomputed or moved."""
    seconds = seconds_by_kind(program, timeline)
    return sum(seconds.get(kind, 0.0) for kind in (SliceKind.FORWARD, SliceKind.BACKWARD, SliceKind.STEP))


@dataclass(frozen=True, kw_only=True)
class OptionTotal:
    """Storages of one role that take one option."""

    num_storages: int = 0
    size_bytes: int = 0


def placement(plan: Plan, graph: StepGraph) -> dict[str, dict[Option, OptionTotal]]:
    """Count storages and bytes per role and option.

    A storage is under KEEP if no gap of its own has another option, else under each option that one of its gaps has:
    a storage with unlike gaps is under several.
    """
    options: dict[int, set[Option]] = defaultdict(set)
    for choice in plan.choices.gaps:
        if choice.option != Option.KEEP:
            options[choice.storage].add(choice.option)
    table: dict[str, dict[Option, OptionTotal]] = {}
    for role in role_names({storage.role.value for storage in graph.storages}):
        rows = [(i, s.size_bytes) for i, s in enumerate(graph.storages) if s.role == role]
        table[role] = {}
        for option in plan.options:
            sizes = [size for i, size in rows if option in (options.get(i) or {Option.KEEP})]
            table[role][option] = OptionTotal(num_storages=len(sizes), size_bytes=sum(sizes))
    return table


def peak_storages(program: Program, timeline: Timeline) -> tuple[float, list[int]]:
    """Find the second at which most bytes are on the device, and the storages that are there, largest first.

    Replays the events: a storage is there from the start of the action that places it to the end of its FREE.
    """
    changes: list[tuple[float, int, int]] = []
    for event in timeline.events:
        action = program.actions[event.action]
        changes.extend((event.start_s, 1, storage) for storage, _ in action.places)
        if action.kind is ActionKind.FREE and action.source == DEVICE and action.storage is not None:
            changes.append((event.end_s, 0, action.storage))
    changes.sort(key=lambda change: change[:2])
    sizes = [storage.size_bytes for storage in program.graph.storages]
    present = {storage for storage, _ in program.resident}
    total = peak = sum(sizes[s] for s in present)
    peak_s, peak_count = 0.0, 0
    for count, (time_s, arrives, storage) in enumerate(changes, 1):
        if arrives == (storage in present):
            continue
        (present.add if arrives else present.remove)(storage)
        total += sizes[storage] if arrives else -sizes[storage]
        if total > peak:
            peak, peak_s, peak_count = total, time_s, count
    at_peak = {storage for storage, _ in program.resident}
    for _, arrives, storage in changes[:peak_count]:
        (at_peak.add if arrives else at_peak.discard)(storage)
    return peak_s, sorted(at_peak, key=lambda s: (-sizes[s], s))


def grouped_storages(program: Program, storages: Sequence[int]) -> list[tuple[tuple[Role, str], list[int]]]:
    """Group storages by role and by name, numbers in it aside; groups of most bytes first.

    A number between dots is the layer's and becomes ``*``; one at the end is an operation's and is dropped.
    """
    groups: dict[tuple[Role, str], list[int]] = defaultdict(list)
    for storage in storages:
        item = program.graph.storages[storage]
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", re.sub(r"(?<=.)\.\d+$", "", item.name))
        groups[item.role, name].append(storage)

    def size_bytes(members: list[int]) -> int:
        return sum(program.graph.storages[s].size_bytes for s in members)

    return sorted(groups.items(), key=lambda group: -size_bytes(group[1]))


def tiers_of(*timelines: Timeline | None) -> list[str]:
    """Tiers in which any timeline has bytes, in the order in which they come in them: device first."""
    samples = [sample for line in timelines if line is not None for sample in line.memory]
    used = {sample.tier for sample in samples if sample.total_bytes}
    return [tier for tier in dict.fromkeys(sample.tier for sample in samples) if tier in used]


def coarse(samples: Sequence[tuple[float, int]], duration_s: float, columns: int) -> list[tuple[int, int]]:
    """Sample a staircase of (seconds, height) at ``columns`` pixels.

    Returns:
        (column, index of the sample to show) wherever it changes; of the samples that hold in a column the highest is
        shown, so no peak is lost.
    """
    shown: list[tuple[int, int]] = []
    holding, following = -1, 0
    for column in range(columns):
        until = duration_s * (column + 1) / columns
        best = holding
        while following < len(samples) and (samples[following][0] < until or column == columns - 1):
            if best < 0 or samples[following][1] > samples[best][1]:
                best = following
            holding = following
            following += 1
        if best >= 0 and (not shown or shown[-1][1] != best):
            shown.append((column, best))
    return shown


def tier_samples(timeline: Timeline, tier: str) -> list[MemorySample]:
    """Samples of one tier in order of time."""
    return sorted((s for s in timeline.memory if s.tier == tier), key=lambda s: s.time_s)
