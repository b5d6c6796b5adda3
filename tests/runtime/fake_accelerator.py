"""A device whose streams are threads: they run behind the host, in order, and wait only for events.

With it the executor's lines for a GPU run on any machine; only the calls of ``lading.runtime.cuda`` do not.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lading.runtime.accelerator import AcceleratorDevice


class FakeStream:
    """Runs what it is given on a thread of its own. After a failure it runs nothing; ``check`` raises it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="fake-stream", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        self._queue.put(call)

    def _work(self) -> None:
        torch.set_num_threads(1)  # each thread has its own setting
        with torch.inference_mode():
            while (call := self._queue.get()) is not None:
                try:
                    if self._failure is None or isinstance(call, Control):
                        call()
                except Exception as error:
                    self._failure = error

    def check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"device-side error: {self._failure}")

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()


class Control:
    """A call that a stream makes even after a failure, so that nobody waits for ever."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __call__(self) -> object:
        return self._call()


class FakeEvent:
    """Like a CUDA event: a wait is for the record before it; one that was never recorded is reached."""

    def __init__(self, api: FakeApi) -> None:
        self._api, self._changed = api, threading.Condition()
        self._recorded = self._reached = 0
        self._stream: FakeStream | None = None
        self.time_s = 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        self._recorded += 1
        self._stream = stream or self._api.current()
        turn = self._recorded
        self._stream.put(Control(lambda: self._reach(turn)))

    def _reach(self, turn: int) -> None:
        with self._changed:
            self._reached, self.time_s = turn, time.perf_counter()
            self._changed.notify_all()

    def await_turn(self, turn: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._reached >= turn, timeout=30), "deadlock"

    def synchronize(self) -> None:
        self.await_turn(self._recorded)
        if self._stream is not None:
            self._stream.check()

    def turn(self) -> int:
        return self._recorded

    def elapsed_time(self, end_event: Any) -> float:
        return 1e3 * (end_event.time_s - self.time_s)


class FakeMeter:
    """Bytes that were asked of the device."""

    exact: bool = True
    sample: Callable[[], int] | None = None

    def __init__(self, api: FakeApi) -> None:
        self._api = api

    def now_bytes(self) -> int:
        return self._api.taken_bytes

    def beside_bytes(self) -> int:
        return 1000

    def reset(self) -> None:
        self._api.peak_bytes = self._api.taken_bytes

    def peak_bytes(self) -> int:
        return self._api.peak_bytes

    def close(self) -> None:
        pass


class FakeApi:
    """Api on the CPU. ``jitter`` is called on a stream's thread before each thing it does."""

    kind = "cpu"

    def __init__(self, jitter: Callable[[], object] | None = None) -> None:
        self.taken_bytes = self.peak_bytes = 0
        self.pinned: list[int] = []
        self.closed = 0  # how often
        self.deaf = False  # streams that do not wait for events
        self._jitter = jitter
        self._streams: list[FakeStream] = []
        self._here = threading.local()
        self._default = self.stream()

    def zeros(self, size_bytes: int) -> torch.Tensor:
        memory = torch.zeros(size_bytes, dtype=torch.uint8)
        self._take(size_bytes)
        weakref.finalize(memory, self._take, -size_bytes)
        return memory

    def _take(self, size_bytes: int) -> None:
        self.taken_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)

    def pin(self, memory: torch.Tensor) -> Callable[[], object]:
        address = memory.data_ptr()
        self.pinned.append(address)
        return lambda: self.pinned.remove(address)

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream())
        return self._streams[-1]

    def current(self) -> FakeStream:
        return getattr(self._here, "stream", self._default)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self._here.stream = stream
        yield
        self._here.stream = self._default

    def launched(self, stream: FakeStream, call: Callable[[], object]) -> Callable[[], object]:
        def late() -> None:
            if self._jitter is not None:
                self._jitter()
            call()

        return lambda: stream.put(late)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def wait(self, stream: FakeStream, event: Any) -> None:
        turn = event.turn()
        if not self.deaf:
            stream.put(Control(lambda: event.await_turn(turn)))

    def close(self) -> None:
        self.closed += 1

    def meter(self) -> FakeMeter:
        return FakeMeter(self)

    def stop(self) -> None:
        for stream in self._streams:
            stream.stop()


def fake_device(api: FakeApi) -> AcceleratorDevice:
    return AcceleratorDevice(api)
