"""Program: the actions of one class of ranks for one step, with every address fixed before anything runs.

Streams are in-order queues. Nothing orders two streams but ``waits``. Streams of a program:

    compute      operations, in program order
    <tier>_read  moves from a tier to the device      <tier>_write  moves from the device to a tier
    host_compute operations that the host's processors run where a tier of the host's memory holds their operands

One step starts when every action of the step before has ended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from lading.errors import ProgramError
from lading.ir.action import Action, ActionKind, pairs_text, parse_action, parse_pairs
from lading.ir.graph import StepGraph
from lading.ir.machine import TIER_ALIGNMENT_BYTES, Tier, host_tier
from lading.units import format_bytes

COMPUTE_STREAM = "compute"
HOST_STREAM = "host_compute"
#: Alignment of every storage that may be moved, so that its bytes go by O_DIRECT and DMA.
PAGE_BYTES = TIER_ALIGNMENT_BYTES
#: Alignment of smaller storages.
LINE_BYTES = 64


def read_stream(tier: str) -> str:
    """Name of the stream of moves from a tier to the device."""
    return f"{tier}_read"


def write_stream(tier: str) -> str:
    """Name of the stream of moves from the device to a tier."""
    return f"{tier}_write"


def slot_bytes(size_bytes: int) -> int:
    """Bytes a storage takes in an arena: whole pages, or whole cache lines when smaller than a page."""
    unit = PAGE_BYTES if size_bytes >= PAGE_BYTES else LINE_BYTES
    return max(unit, -(-size_bytes // unit) * unit)


def slot_sizes(graph: StepGraph) -> list[int]:
    """Bytes each storage takes in an arena."""
    return [slot_bytes(storage.size_bytes) for storage in graph.storages]


@dataclass(frozen=True)
class Program:
    """One step for one class of ranks.

    Attributes:
        graph: What the op and storage ids refer to.
        actions: In an order in which every wait points backward.
        arena_bytes: Size of the device arena that ``places`` index.
        workspace_bytes: Largest scratch any operation needs outside the arena.
        resident: (storage, arena offset) of what lies on the device at the start and again at the end of a step.
        slots: For each lower tier, (storage, offset) of every storage that is ever there; offsets are multiples of the
            tier's alignment.
        budgets: Bytes allowed in each tier; the device's covers arena, workspace and overhead.
        overhead_bytes: What the running process needs besides.
        save_bytes: What saving takes between two steps beside arena and overhead; 0 where nothing is saved.
        spare_bytes: Part of the workspace that some of equal runs take and others do not.
        tiers: The machine's tiers, nearest first; ``slots`` are in some of them.
    """

    graph: StepGraph
    actions: tuple[Action, ...]
    arena_bytes: int
    workspace_bytes: int
    resident: tuple[tuple[int, int], ...]
    slots: dict[str, tuple[tuple[int, int], ...]]
    budgets: dict[str, int]
    overhead_bytes: int = 0
    save_bytes: int = 0
    spare_bytes: int = 0
    tiers: tuple[Tier, ...] = ()

    def __repr__(self) -> str:
        lower = "".join(f", {tier} {format_bytes(self.tier_bytes(tier))}" for tier in self.slots)
        memory = f"device {format_bytes(self.peak_bytes)} of {format_bytes(self.budgets['device'])}{lower}"
        return f"Program({len(self.actions)} actions on {', '.join(self.streams)}; {memory})"

    @property
    def step_bytes(self) -> int:
        """Highest device peak of a step: arena, workspace and overhead."""
        return self.arena_bytes + self.workspace_bytes + self.overhead_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest device peak, of a step or of saving after it: what the budget has to cover."""
        return max(self.step_bytes, self.arena_bytes + self.overhead_bytes + self.save_bytes)

    @property
    def predicted_bytes(self) -> int:
        """Device peak to be expected: as ``peak_bytes``, with half of what equal runs vary by."""
        return max(self.step_bytes - self.spare_bytes // 2, self.arena_bytes + self.overhead_bytes + self.save_bytes)

    def tier_bytes(self, tier: str) -> int:
        """Bytes of a lower tier's file or arena."""
        sizes = self.graph.storages
        return max((offset + slot_bytes(sizes[s].size_bytes) for s, offset in self.slots.get(tier, ())), default=0)

    @property
    def host_tier(self) -> str:
        """Name of the tier on whose bytes the host's processors work; "" where there is none."""
        return host_tier(self.tiers)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of first use."""
        return tuple(dict.fromkeys(action.stream for action in self.actions))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of ``text``."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def label(self, action: Action) -> str:
        """Text for people: ``'mm layers.0.mlp'``, ``'disk -> device layers.0.attn.wq'``."""
        if action.op is not None:
            op = self.graph.ops[action.op]
            name = op.name.split(".")[1] if op.name.count(".") else op.name
            again = "recompute " if action.kind is ActionKind.RECOMPUTE else ""
            return f"{again}{name} {op.module}".rstrip()
        name = self.graph.storages[action.storage].name if action.storage is not None else ""
        if action.kind is ActionKind.MOVE:
            return f"{action.source} -> {action.target} {name}"
        return f"free {name}"

    def text(self) -> str:
        """Sizes in bytes, budgets and addresses, then one line an action; ``parse_program`` reads it back."""
        sizes = [f"{name} {getattr(self, field)}" for name, field in _SIZES.items()]
        sizes += [f"spare {self.spare_bytes}"] if self.spare_bytes else []
        budgets = (f"budget {tier} {size}" for tier, size in self.budgets.items())
        slots = (f"slots {tier} {pairs_text(pairs)}" for tier, pairs in self.slots.items())
        lines = (*sizes, *budgets, f"resident {pairs_text(self.resident)}", *slots, *map(str, self.actions))
        return "\n".join(lines) + "\n"


#: Sizes at the head of a Program's text.
_SIZES = MappingProxyType(
    {"arena": "arena_bytes", "workspace": "workspace_bytes", "overhead": "overhead_bytes", "save": "save_bytes"}
)
_HEAD = re.compile(r"(arena|workspace|overhead|save|spare|budget \w+) (\d{1,18})\Z|(resident|slots \w+) ([\d@,]*)\Z")


def parse_program(lines: Iterable[str], graph: StepGraph, tiers: tuple[Tier, ...]) -> Program:
    """Inverse of ``Program.text``, line by line.

    Args:
        graph: What the operations and storages are numbered in.
        tiers: Of the machine that it is for.

    Raises:
        ProgramError: a line is neither an action nor of the head, or one of the head is missing or there twice.
    """
    numbers: dict[str, int] = {}
    places: dict[str, tuple[tuple[int, int], ...]] = {}
    actions: list[Action] = []
    for line in lines:
        if line[:1].isdecimal():
            actions.append(parse_action(line))
            continue
        match = _HEAD.match(line)
        key = match and (match[1] or match[3])
        if match is None or not key or key in numbers or key in places:
            raise ProgramError(f"expected an action, or a size, budget or list of addresses once, got {line[:80]!r}")
        if match[1]:
            numbers[key] = int(match[2])
        else:
            places[key] = parse_pairs(match[4])
    if missing := {*_SIZES, "budget device", "resident"} - numbers.keys() - places.keys():
        raise ProgramError(
            f"expected lines {', '.join(map(repr, sorted(missing)))} at the head of a Program, found none"
        )
    return Program(
        graph=graph,
        spare_bytes=numbers.pop("spare", 0),
        actions=tuple(actions),
        resident=places.pop("resident"),
        slots={key.split()[1]: pairs for key, pairs in places.items()},
        budgets={key.split()[1]: size for key, size in numbers.items() if key not in _SIZES},
        tiers=tiers,
        **{field: numbers[name] for name, field in _SIZES.items()},
    )
