"""Timeline: what happened when, predicted by the simulator or measured by the executor, in one type."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lading.files import read_json, write_text
from lading.ir.graph import Role
from lading.ir.reading import read_as
from lading.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Event:
    """Run of one action on one stream; seconds from the start of the step."""

    rank_class: int
    stream: str
    action: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes in use in one tier at one moment, by role name."""

    time_s: float
    tier: str
    bytes_by_role: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all roles together."""
        return sum(self.bytes_by_role.values())


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Bytes that are there for a while; ``name`` says what they are and who brought them."""

    start_s: float
    end_s: float
    role: Role
    size_bytes: int
    name: str


@dataclass(frozen=True)
class Timeline:
    """Events of one step in order of start, and memory over time.

    Attributes:
        source: "predicted" or "measured".
        events: Events by start.
        memory: Steps of a staircase per tier: a sample holds until the next of its tier.
        resident: (seconds, bytes) samples of the process's resident set above its start; measured runs only.
        labels: Text for each action id, for people.
        peak_bytes: Highest device memory; for a measured run, the resident peak above the process's start.
        flows: Pairs of actions: what the first sends, the second takes.
    """

    source: str
    events: tuple[Event, ...]
    memory: tuple[MemorySample, ...]
    labels: dict[int, str] = field(default_factory=lambda: {})
    resident: tuple[tuple[float, int], ...] = ()
    peak_bytes: int = 0
    flows: tuple[tuple[int, int], ...] = ()

    def __repr__(self) -> str:
        streams = ", ".join(dict.fromkeys(event.stream for event in self.events))
        took = f"{self.source} step {format_seconds(self.duration_s)}, device peak {format_bytes(self.peak_bytes)}"
        return f"Timeline({took}; {len(self.events)} events on {streams or 'no stream'})"

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the step to the end of the last event."""
        return max((event.end_s for event in self.events), default=0.0)

    def busy_s(self, stream: str) -> float:
        """Seconds a stream spends in actions."""
        return sum(event.end_s - event.start_s for event in self.events if event.stream == stream)

    def peak_of_tier(self, tier: str) -> int:
        """Highest sum of bytes in one tier."""
        return max((s.total_bytes for s in self.memory if s.tier == tier), default=0)

    def save(self, path: Path | str) -> None:
        """Write as JSON, whole or not at all; ``load`` reads it back. Raises as ``lading.files.write_aside``."""
        write_text(Path(path), json.dumps(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``from_saved`` makes a timeline of it again, once it is read."""
        saved = SavedTimeline(
            source=self.source,
            peak_bytes=self.peak_bytes,
            events=tuple((e.rank_class, e.stream, e.action, e.start_s, e.end_s) for e in self.events),
            memory=tuple((s.time_s, s.tier, s.bytes_by_role) for s in self.memory),
            labels=tuple(self.labels.items()),
            resident=self.resident,
            flows=self.flows,
        )
        return vars(saved)

    @staticmethod
    def load(path: Path | str) -> Timeline:
        """Read the timeline that ``save`` wrote.

        Raises:
            ConfigError: it is something else.
        """
        advice = "run again"
        return Timeline.from_saved(read_as(SavedTimeline, read_json(path, "a timeline", advice), str(path), advice))

    @staticmethod
    def from_saved(saved: SavedTimeline) -> Timeline:
        """Make a timeline of its JSON form."""
        return Timeline(
            source=saved.source,
            events=tuple(Event(*row) for row in saved.events),
            memory=tuple(MemorySample(*row) for row in saved.memory),
            labels={int(key): label for key, label in saved.labels},
            resident=saved.resident,
            peak_bytes=saved.peak_bytes,
            flows=saved.flows,
        )


@dataclass(frozen=True)
class SavedTimeline:
    """The JSON form of a timeline: rows for what is many."""

    source: str
    peak_bytes: int
    events: tuple[tuple[int, str, int, float, float], ...]
    memory: tuple[tuple[float, str, dict[str, int]], ...]
    labels: tuple[tuple[int, str], ...]
    resident: tuple[tuple[float, int], ...]
    flows: tuple[tuple[int, int], ...]
