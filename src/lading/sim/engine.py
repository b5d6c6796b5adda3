"""Engine: when every action of a Program runs, of one device or of all classes of ranks.

A stream takes its actions in order; an action starts when its stream is free and all it waits for has ended. That is
one loop (``StreamRun``); what an action lasts while others run is a model of resources that is handed in. Where ends
follow from what has begun before, streams are walked one after the other as far as they go, and no event is sorted;
where they follow from what begins later, all streams go on together from one end to the next.

The resources of one device, its tiers, are in ``lading.sim.device_step``; those of ranks in ``lading.sim.rank_engine``.
Nothing here knows what an action costs: seconds are handed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from lading.errors import SimulationError
from lading.ir.program import Program


class Resources(Protocol):
    """Clock of actions that share something, so that what one takes depends on what others run."""

    def begin(self, action: int, stream: int, start_s: float) -> float | None:
        """End of an action that begins; None where that follows from what begins later."""
        ...

    def advance(self) -> Sequence[tuple[int, float]]:
        """Go on to the next end of an action of which ``begin`` knew none.

        Returns:
            Streams whose actions end, and when; () if none runs.
        """
        ...


class StreamRun:
    """One run of streams: where each stands, and when its actions started and ended.

    Args:
        queues: Actions of each stream.
        waits: For each action those that must have ended.
        seconds: Seconds of every action alone.
        shared: Whether resources say what an action lasts; others last ``seconds``.
        ahead: For each stream the one that is walked before it as far as it can be, as what runs there makes actions of
            this one last longer, and resources are asked while it runs only; -1 for none. Without it they always are.
    Attributes:
        starts, ends: By action; an end is -1 before it is known.
        free, at: By stream, end of its last action, and the place of the next.
    """

    def __init__(
        self,
        queues: Sequence[Sequence[int]],
        waits: Sequence[Sequence[int]],
        seconds: Sequence[float],
        shared: Sequence[bool],
        ahead: Sequence[int] = (),
    ) -> None:
        self.queues, self.waits, self.seconds, self._shared = queues, waits, seconds, shared
        self._ahead = ahead or [-1] * len(queues)
        self._until = -1.0 if ahead else float("inf")
        self.starts, self.ends = [0.0] * len(waits), [-1.0] * len(waits)
        self.free, self.at = [0.0] * len(queues), [0] * len(queues)
        self._waiting: dict[int, list[int]] = {}

    def run(self, resources: Resources) -> list[int]:
        """Run every stream as far as it goes; returns the actions that wait forever, one a stream, if there are any."""
        first = set(self._ahead)
        todo = [stream for stream, queue in enumerate(self.queues) if queue]
        todo.sort(key=lambda stream: (stream in first, -stream))
        while True:
            while todo:
                todo += self._walk(todo.pop(), resources)
            if not (ended := resources.advance()):
                break
            for stream, end_s in ended:
                action = self.queues[stream][self.at[stream]]
                self.ends[action] = self.free[stream] = end_s
                self.at[stream] += 1
                todo.append(stream)
                if action in self._waiting:
                    todo += self._waiting.pop(action)
            if len(todo) > 1:
                todo.sort(reverse=True)
        return [queue[at] for queue, at in zip(self.queues, self.at, strict=True) if at < len(queue)]

    def _walk(self, stream: int, resources: Resources) -> list[int]:
        """Run a stream as far as it goes; returns the streams that may go on."""
        queue, clock_s, waiting, shared = self.queues[stream], self.free[stream], self._waiting, self._shared
        waits, starts, ends, seconds = self.waits, self.starts, self.ends, self.seconds
        ahead = self._ahead[stream]
        until = self.free[ahead] if ahead >= 0 else self._until
        woken: list[int] = []
        for place in range(self.at[stream], len(queue)):
            action, start = queue[place], clock_s
            for wait in waits[action]:
                end = ends[wait]
                if end > start:
                    start = end
                elif end < 0.0:
                    waiting.setdefault(wait, []).append(stream)
                    self.free[stream], self.at[stream] = clock_s, place
                    return woken
            starts[action] = start
            if until > start and shared[action]:
                end = resources.begin(action, stream, start)
                if end is None:
                    self.at[stream] = place
                    return woken
                clock_s = end
            else:
                clock_s = start + seconds[action]
            ends[action] = clock_s
            if action in waiting:
                woken += waiting.pop(action)
                if ahead in woken:
                    woken.remove(ahead)
                    self.free[stream], self.at[stream] = clock_s, place + 1
                    return [*woken, stream, ahead]
        self.free[stream], self.at[stream] = clock_s, len(queue)
        return woken


def deadlock(program: Program, stuck: Sequence[int]) -> SimulationError:
    """Error that names actions that wait forever, numbered over the lists of all classes of ranks."""
    lines: list[str] = []
    for number in stuck[:4]:
        rank = bisect_right(program.bounds, number) - 1
        action = program.ranks[rank].action(number - program.bounds[rank])
        lines.append(f"rank {rank}, action {action.id} [{action}], {program.label(action)}")
    return SimulationError(f"deadlock of streams, each waits forever: {'; '.join(lines)}; verify the Program")
