"""Happens-before: which actions have surely ended before another one starts, whatever the timing of the streams.

A stream is an in-order queue and an action starts after the actions it waits for, so one number a stream says it all:
the highest id on that stream known to have ended (a vector clock).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lading.ir.action import Action

#: Stands for what was done before the step began.
START = -1


@dataclass(slots=True)
class Uses:
    """Accesses of a piece of memory: its last write, and for each stream the last read since."""

    written: int = START
    reads: dict[int, int] = field(default_factory=lambda: {})


class Order:
    """Happens-before relation of the actions appended so far."""

    def __init__(self, streams: Sequence[str]) -> None:
        self._index = {stream: i for i, stream in enumerate(streams)}
        self._last = [START] * len(streams)
        self._stream_of: list[int] = []
        self._clocks: list[list[int]] = []

    def append(self, action: Action) -> None:
        """Add the next action; its waits must point backward."""
        stream = self._index[action.stream]
        previous = self._last[stream]
        clock = list(self._clocks[previous]) if previous != START else [START] * len(self._last)
        clock[stream] = previous
        for wait in action.waits:
            clock = [a if a > b else b for a, b in zip(clock, self._clocks[wait], strict=True)]
            clock[self._stream_of[wait]] = max(clock[self._stream_of[wait]], wait)
        self._clocks.append(clock)
        self._stream_of.append(stream)
        self._last[stream] = action.id

    def before(self, first: int, second: int) -> bool:
        """Whether ``first`` has ended when ``second`` starts, in every execution."""
        return first == START or self._clocks[second][self._stream_of[first]] >= first

    def read(self, uses: Uses, action: int) -> int | None:
        """Record a read; returns a write it races with, or None."""
        if not self.before(uses.written, action):
            return uses.written
        uses.reads[self._stream_of[action]] = action
        return None

    def write(self, uses: Uses, action: int) -> int | None:
        """Record a write (or the end of the memory's use); returns an earlier use it races with, or None."""
        for earlier in (uses.written, *uses.reads.values()):
            if earlier != action and not self.before(earlier, action):
                return earlier
        uses.written = action
        uses.reads.clear()
        return None
