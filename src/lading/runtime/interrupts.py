"""Interrupts: hold back what handlers of signals raise until the end of what must not be cut in two."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

#: Signals that ask a program to end.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: All that may have a handler, such as SIGALRM of a timeout or SIGUSR1 of a job that is to make room.
_HANDLED = tuple(sorted(signal.valid_signals()))


class HeldInterrupts:
    """Context that holds back the exceptions of signal handlers until its end; the handlers themselves run at once.

    The first exception is raised when the block has ended. Python runs handlers on the main thread only, so on another
    thread nothing is to be done, nor for a signal without a handler of Python's. Blocks may lie in each other.

    Args:
        stop: Called with what the handler of a second SIGINT or SIGTERM raises: the block is to end soon. None waits
            all the same.
    """

    def __init__(self, stop: Callable[[BaseException], object] | None = None) -> None:
        self._stop = stop
        self._open = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._raised: list[BaseException] = []
        self._count = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._open = True
            for number in _HANDLED:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._open:  # the block has ended, or never began: there is nothing to wait for
            self._handlers[number](number, frame)
            return
        asks_to_end = number in _SIGNALS
        self._count += asks_to_end
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self._raised.append(error)
            if self._stop is not None and asks_to_end and self._count > 1:
                self._stop(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        for number, handler in reversed(self._handlers.items()):
            if signal.getsignal(number) == self._handle:  # else a handler has set another
                signal.signal(number, handler)
        raised, self._raised = self._raised, []
        if raised and error not in raised:
            raise raised[0]


class StopRequest:
    """Context that takes note of the first SIGINT, SIGTERM or SIGHUP; another acts as if this context were not there.

    A SIGHUP says that the terminal is gone: what is printed from then on goes nowhere, as writing to it would fail.

    Args:
        tells: Whether to say so on standard error.

    Attributes:
        number: Number of the signal; 0 while none came.
    """

    def __init__(self, *, tells: bool = True) -> None:
        self.number, self._tells = 0, tells
        self._handlers: dict[int, Any] = {}
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]  # one that is gone is none any more

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*_SIGNALS, signal.SIGHUP):
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # None: not Python's to replace
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _print_nowhere(self._terminals)
        if not self.number:
            self.number = number
            if self._tells:
                os.write(2, b"\nstopping when this step has ended and is saved; once more stops at once\n")
        elif callable(self._handlers[number]):
            self._handlers[number](number, frame)
        else:
            signal.signal(number, self._handlers[number])
            signal.raise_signal(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def deliver(self) -> None:
        """Let the signal that was noted in the block do what it would have done."""
        if self.number:
            signal.raise_signal(self.number)


def _print_nowhere(streams: Sequence[int]) -> None:
    """Let what is printed to streams, given as file descriptors, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


@contextmanager
def ending_at_once() -> Generator[None, None, None]:
    """Let SIGTERM end the process while the block waits outside of Python, where no handler would run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
