"""Action: one thing a rank does, on one stream, after the actions it waits for. Prints and parses as one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from lading.errors import ProgramError

#: The device's own memory, as the source or target of a MOVE and among the tiers of a budget.
DEVICE = "device"
#: The pseudo-tier of the code that calls the step: batches come from it and losses go to it.
CALLER = "caller"


class ActionKind(StrEnum):
    """Kind of an action, in words of torch.distributed.pipelining and FSDP2 where these have one.

    UNSHARD gathers sharded parameters from the other ranks, RESHARD drops what was gathered, REDUCE_GRAD reduces their
    gradients to this rank's shard (or to all of them, where parameters are whole).
    """

    COMPUTE = "COMPUTE"
    RECOMPUTE = "RECOMPUTE"
    STEP = "STEP"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    ALL_REDUCE = "ALL_REDUCE"
    ALL_GATHER = "ALL_GATHER"
    REDUCE_SCATTER = "REDUCE_SCATTER"
    ALL_TO_ALL = "ALL_TO_ALL"
    SEND = "SEND"
    RECV = "RECV"
    MOVE = "MOVE"
    FREE = "FREE"


class Work(IntEnum):
    """Part of a micro-batch that a region computes; BACKWARD is both gradients at once."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3


@dataclass(frozen=True, slots=True)
class Action:
    """Action of a Program: one operation, move or communication on one stream.

    Attributes:
        id: Position in its Program.
        op: Operation of the graph, or region of it (COMPUTE, RECOMPUTE, STEP).
        storage: Storage moved, freed, gathered, reduced or handed on (MOVE, FREE, UNSHARD, RESHARD, REDUCE_GRAD, SEND,
            RECV).
        micro_batch: Micro-batch it belongs to; None for what belongs to the whole step.
        group: Axis of the layout whose ranks take part in a collective.
        peer: Class of ranks that a SEND goes to or a RECV comes from.
        source, target: Tiers of a MOVE; for FREE ``source`` is the tier that is freed.
        places: (storage, byte offset in the device arena) for each storage this action makes resident.
        waits: Ids of earlier actions on other streams that must have ended.
    """

    id: int
    kind: ActionKind
    stream: str
    op: int | None = None
    storage: int | None = None
    source: str = ""
    target: str = ""
    micro_batch: int | None = None
    group: str = ""
    peer: int | None = None
    places: tuple[tuple[int, int], ...] = ()
    waits: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [str(self.id), self.kind.value, self.stream]
        if self.op is not None:
            parts.append(f"op={self.op}")
        if self.storage is not None:
            parts.append(f"storage={self.storage}")
        if self.source:
            parts.append(f"from={self.source}")
        if self.target:
            parts.append(f"to={self.target}")
        if self.micro_batch is not None:
            parts.append(f"mb={self.micro_batch}")
        if self.group:
            parts.append(f"group={self.group}")
        if self.peer is not None:
            parts.append(f"peer={self.peer}")
        if self.places:
            parts.append(f"at={pairs_text(self.places)}")
        if self.waits:
            parts.append("waits=" + ",".join(map(str, self.waits)))
        return " ".join(parts)


def pairs_text(pairs: Iterable[tuple[int, int]]) -> str:
    """Write storages and the offsets where they lie as text: ``"3@0,5@4096"``."""
    return ",".join(f"{storage}@{offset}" for storage, offset in pairs)


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Parse the text that ``pairs_text`` writes.

    Raises:
        ProgramError: a pair is not two integers with "@" between them.
    """
    pairs = [pair.split("@") for pair in text.split(",")] if text else []
    try:
        return tuple((int(storage), int(offset)) for storage, offset in pairs)
    except ValueError as error:
        raise ProgramError(f"expected integers as STORAGE@OFFSET,..., got {text[:80]!r}: {error}") from error


_HEAD = re.compile(r"(\d+) ([A-Z_]+) (\w+)((?: \w+=[^ ]+)*)\Z")
_KEYS = {"op", "storage", "from", "to", "mb", "group", "peer", "at", "waits"}


def parse_action(line: str) -> Action:
    """Parse the line that ``str(action)`` gives.

    Raises:
        ProgramError: the line is not an action.
    """
    match = _HEAD.match(line.strip())
    if match is None or match[2] not in ActionKind.__members__:
        raise ProgramError(f"expected 'ID KIND STREAM key=value ...', got {line!r}")
    fields = dict(part.split("=", 1) for part in match[4].split())
    if unknown := fields.keys() - _KEYS:
        raise ProgramError(f"expected keys among {sorted(_KEYS)}, got {sorted(unknown)} in {line!r}")
    try:
        return Action(
            id=int(match[1]),
            kind=ActionKind(match[2]),
            stream=match[3],
            op=int(fields["op"]) if "op" in fields else None,
            storage=int(fields["storage"]) if "storage" in fields else None,
            source=fields.get("from", ""),
            target=fields.get("to", ""),
            micro_batch=int(fields["mb"]) if "mb" in fields else None,
            group=fields.get("group", ""),
            peer=int(fields["peer"]) if "peer" in fields else None,
            places=parse_pairs(fields.get("at", "")),
            waits=tuple(int(w) for w in fields["waits"].split(",")) if "waits" in fields else (),
        )
    except ValueError as error:
        raise ProgramError(f"expected integers in {line!r}: {error}") from error
