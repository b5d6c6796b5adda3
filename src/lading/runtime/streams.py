"""Streams: in-order queues of bound actions that wait for each other by counters, and by marks where a device has them.

[Note: cheap waits] Each stream counts the actions it has ended. An action that must wait holds (stream, count) pairs
with everything already implied left out, and only actions that somebody waits for take the lock to announce themselves,
so an ordinary operation pays two clock readings and nothing else. An announcement wakes only streams whose count it
reaches: were all that wait woken, each would take the interpreter's lock from the stream that computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lading.errors import LadingError, ProgramError, StorageError
from lading.ir.action import Action
from lading.ir.program import Program
from lading.runtime.device import Call, Lane, Mark, Stamp

Jitter = Callable[[Action], None]


@dataclass(slots=True)
class Entry:
    """One bound action in its stream's queue.

    Attributes:
        run: Call that does the action.
        waits: Pairs (stream index, count of ended actions) to reach first.
        count: Actions of this stream that have ended when this one has.
        announce: Whether another stream waits for this.
        action: Id of the action.
        marks: Marks of the actions waited for, for the lane to wait for ([Note: two halves of a wait] in ``device``).
        mark: Mark to record behind this action, for those who wait for it.
    """

    run: Call
    waits: tuple[tuple[int, int], ...]
    count: int
    announce: bool
    action: int
    marks: tuple[Mark, ...] = ()
    mark: Mark | None = None


class Stopped(Exception):
    """Raised in a stream that gives up because another one failed."""


class ActionFailed(Exception):
    """Raised when an action raised; ``__cause__`` is what it raised."""

    def __init__(self, action: int) -> None:
        super().__init__(action)
        self.action = action


def named_error(program: Program, failure: BaseException) -> BaseException:
    """Turn a failure of a step into one of Lading's errors that names the action."""
    cause = failure.__cause__
    if isinstance(failure, LadingError):
        return failure
    if not isinstance(failure, ActionFailed) or not isinstance(cause, Exception):  # KeyboardInterrupt as it is
        return cause or failure
    action = program.actions[failure.action]
    text = f"action {action} ({program.label(action)}) failed: {cause}"
    error: LadingError = StorageError(text) if isinstance(cause, OSError) else ProgramError(text, action_id=action.id)
    error.__cause__ = cause
    return error


@dataclass(frozen=True, slots=True)
class Reached:
    """Place where a stream stopped: how many entries ended, and whether the next began and raised (``cut``)."""

    ended: int
    cut: bool = False


class Gate:
    """Counters of all streams of one step, how far each came, and the first failure.

    Attributes:
        counts: Actions that each stream has ended.
        reached: How far each stream came, once it has ended or given up; None while that is not known.
        failure: First failure of any stream; None without one.
    """

    def __init__(self, num_streams: int) -> None:
        self.counts = [0] * num_streams
        self.reached: list[Reached | None] = [Reached(0)] * num_streams
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: list[list[tuple[int, threading.Condition]]] = [[] for _ in self.counts]  # by stream waited for

    def reset(self) -> None:
        """Start a step; no stream may be running."""
        self.counts[:] = [0] * len(self.counts)
        self._waiting = [[] for _ in self.counts]
        self.reached[:] = [Reached(0)] * len(self.counts)
        self.failure = None

    def wait(self, waits: Sequence[tuple[int, int]]) -> None:
        """Return once every (stream, count) is reached.

        Raises:
            Stopped: a stream failed.
        """
        for stream, count in waits:
            if self.counts[stream] < count:
                with self._lock:
                    while self.counts[stream] < count and self.failure is None:
                        reached = threading.Condition(self._lock)
                        self._waiting[stream].append((count, reached))
                        reached.wait()
        if self.failure is not None:
            raise Stopped

    def announce(self, stream: int, count: int) -> None:
        """Tell those who wait for it that ``stream`` has ended ``count`` actions."""
        with self._lock:
            self.counts[stream] = count
            if waiting := self._waiting[stream]:
                self._waiting[stream] = [waiter for waiter in waiting if waiter[0] > count]
                _wake(waiter for waiter in waiting if waiter[0] <= count)

    def fail(self, failure: BaseException) -> None:
        """Stop every stream at its next action; the first failure is remembered."""
        with self._lock:
            self.failure = self.failure or failure
            for waiting in self._waiting:
                _wake(waiting)
                waiting.clear()


def _wake(waiting: Iterable[tuple[int, threading.Condition]]) -> None:
    for _, reached in waiting:
        reached.notify()


@dataclass(slots=True)
class Clocking:
    """Times of one step by action id, and the device's memory sampled by the compute stream on the way.

    Attributes:
        starts, ends: Stamps by action id, which the lane turns into seconds after the step.
        sample: Gives the bytes in use now; None takes no samples.
        period_s: Shortest time between two samples.
        samples: Pairs (seconds, bytes in use).
        enabled: Whether anything is taken; a step is a little faster without.
    """

    starts: list[Stamp]
    ends: list[Stamp]
    sample: Callable[[], int] | None = None
    period_s: float = 0.01
    samples: list[tuple[float, int]] = field(default_factory=lambda: [])
    enabled: bool = True


def run_stream(
    entries: Sequence[Entry], stream: int, lane: Lane, gate: Gate, times: Clocking, *, sampling: bool = False
) -> None:
    """Run a stream's actions in order. See [Note: cheap waits].

    Raises:
        ActionFailed: naming the action; its cause is what the action raised.
        Stopped: another stream failed.
    """
    stamp, starts, ends = lane.stamp if times.enabled else _no_stamp, times.starts, times.ends
    sample = times.sample if sampling and times.enabled else None
    due = stamp() if sample is not None else 0.0
    action, ended = -1, 0
    gate.reached[stream] = None
    try:
        for ended, entry in enumerate(entries):
            action = entry.action
            if entry.waits:
                gate.wait(entry.waits)
                if entry.marks:
                    lane.wait(entry.marks)
            starts[action] = stamp()
            entry.run()
            ends[action] = now_s = stamp()
            if entry.announce:
                if entry.mark is not None:
                    entry.mark.record()
                gate.announce(stream, entry.count)
            if sample is not None and now_s >= due:
                times.samples.append((now_s, sample()))
                due = now_s + times.period_s
            if gate.failure is not None and entry is not entries[-1]:
                gate.reached[stream] = Reached(ended + 1)
                raise Stopped
        gate.reached[stream] = Reached(len(entries))
    except Stopped:
        gate.reached[stream] = gate.reached[stream] or Reached(ended)
        raise
    except BaseException as error:
        gate.reached[stream] = Reached(ended, cut=True)
        raise ActionFailed(action) from error


def _no_stamp() -> float:
    return 0.0


class Workers:
    """Threads of all streams but the compute stream: each runs its stream once whenever it is started."""

    def __init__(self, streams: Sequence[str], run: Callable[[str], None]) -> None:
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._orders: dict[str, queue.SimpleQueue[bool | threading.Event]] = {s: queue.SimpleQueue() for s in streams}
        self._threads = [
            threading.Thread(target=self._work, args=(name, run), name=f"lading-{name}", daemon=True)
            for name in self._orders
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, name: str, run: Callable[[str], None]) -> None:
        while order := self._orders[name].get():
            if isinstance(order, threading.Event):
                order.set()
                continue
            try:
                run(name)
            finally:
                self._done.put(name)

    def start(self, streams: Sequence[str]) -> None:
        """Let each of the streams run once."""
        for name in streams:
            self._orders[name].put(True)

    def join(self, streams: Sequence[str]) -> None:
        """Wait until each thread has ended its stream or given it up."""
        for _ in streams:
            self._done.get()

    def settle(self) -> None:
        """Return when no stream runs, whichever were started: for use after the thread that started them failed."""
        reached = {name: threading.Event() for name in self._orders}
        for name, event in reached.items():
            self._orders[name].put(event)
        for event in reached.values():
            event.wait()
        while not self._done.empty():
            self._done.get()

    def close(self) -> None:
        """End the threads."""
        for orders in self._orders.values():
            orders.put(False)
        for thread in self._threads:
            thread.join()
