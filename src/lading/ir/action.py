"""Action: one thing a rank does, on one stream, after the actions it waits for. Prints and parses as one line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from lading.errors import ProgramError

#: The pseudo-tier of the code that calls the step: batches come from it and losses go to it.
CALLER = "caller"


class ActionKind(StrEnum):
    """What an action does."""

    COMPUTE = "COMPUTE"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"
    MOVE = "MOVE"
    RECOMPUTE = "RECOMPUTE"
    SEND = "SEND"
    RECV = "RECV"
    STEP = "STEP"
    FREE = "FREE"


@dataclass(frozen=True, slots=True)
class Action:
    """One action.

    Attributes:
        id: Position in its Program.
        op: Operation of the graph (COMPUTE, RECOMPUTE, STEP).
        storage: Storage moved or freed (MOVE, FREE).
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
        if self.places:
            parts.append("at=" + ",".join(f"{s}@{offset}" for s, offset in self.places))
        if self.waits:
            parts.append("waits=" + ",".join(map(str, self.waits)))
        return " ".join(parts)


_HEAD = re.compile(r"(\d+) ([A-Z]+) (\w+)((?: \w+=[^ ]+)*)\Z")
_KEYS = {"op", "storage", "from", "to", "at", "waits"}


def parse_action(line: str) -> Action:
    """Inverse of ``str(action)``.

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
        pairs = [pair.split("@") for pair in fields["at"].split(",")] if "at" in fields else []
        return Action(
            id=int(match[1]),
            kind=ActionKind(match[2]),
            stream=match[3],
            op=int(fields["op"]) if "op" in fields else None,
            storage=int(fields["storage"]) if "storage" in fields else None,
            source=fields.get("from", ""),
            target=fields.get("to", ""),
            places=tuple((int(storage), int(offset)) for storage, offset in pairs),
            waits=tuple(int(w) for w in fields["waits"].split(",")) if "waits" in fields else (),
        )
    except ValueError as error:
        raise ProgramError(f"expected integers in {line!r}: {error}") from error
