"""Devices with memory and an order of their own: lanes are streams, waits are events, the host only issues.

Everything but the few calls of ``Api`` is the same for every such device, and runs in the tests on one whose streams
are threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from lading.errors import ConfigError, ProgramError
from lading.ir.machine import Tier
from lading.runtime.device import Batches, Call, Lane, Mark, Memory, Meter, Stamp
from lading.runtime.host_arena import Arena
from lading.runtime.tiers import PIECE_BYTES, HostBytes, TierBytes, bound_move, open_tier


class DeviceEvent(Protocol):
    """Point in the work of a device's stream, as ``torch.cuda.Event``."""

    def record(self, stream: Any = None) -> None:
        """Place the event behind all that the stream (None: the current one) was given."""
        ...

    def synchronize(self) -> None:
        """Return once the device has reached it; at once if it was never recorded."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another; the device has reached both."""
        ...


class Api(Protocol):
    """Calls into a vendor's runtime that the executor makes.

    Attributes:
        kind: Kind of the device, as ``lading.ir.machine.Device.kind``.
    """

    kind: str

    def zeros(self, size_bytes: int) -> torch.Tensor:
        """Allocate uint8[size_bytes] of zeros on the device."""
        ...

    def pin(self, memory: torch.Tensor) -> Call:
        """Page-lock host memory; returns the call that undoes it."""
        ...

    def stream(self) -> Any:
        """Make a new stream, or return the one that is current to the caller."""
        ...

    def current(self) -> Any:
        """Stream that is current in this thread."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Context in which the stream is current in this thread."""
        ...

    def launched(self, stream: Any, call: Call) -> Call:
        """Wrap ``call``, which only launches kernels and copies, into one that issues it to a stream."""
        ...

    def event(self) -> DeviceEvent:
        """Make a new event that keeps the time."""
        ...

    def wait(self, stream: Any, event: DeviceEvent) -> None:
        """Run what the stream is given from now on after the event."""
        ...

    def meter(self) -> Meter:
        """Make a meter of the memory that tensors take on the device."""
        ...

    def close(self) -> None:
        """Give back what libraries keep for the streams that were used."""
        ...


class EventMark:
    """Mark of a lane that is an event on its stream."""

    def __init__(self, api: Api, stream: Any) -> None:
        self.event, self._stream = api.event(), stream

    def record(self) -> None:
        """Record the event on the lane's stream, behind everything issued so far."""
        self.event.record(self._stream)


class AsyncLane:
    """A lane whose thread only issues; the device does the work in order."""

    def __init__(self, api: Api) -> None:
        self._api, self.stream = api, api.stream()
        self._events: list[DeviceEvent] = []
        self._next = 0

    def entered(self) -> AbstractContextManager[object]:
        """Context in which the lane's stream is current in this thread."""
        return self._api.on(self.stream)

    def bound(self, call: Call) -> Call:
        """Wrap ``call`` into one that launches it on the lane's stream."""
        return self._api.launched(self.stream, call)

    def mark(self) -> Mark | None:
        """Make a new mark: an event of the lane's stream."""
        return EventMark(self._api, self.stream)

    def wait(self, marks: Sequence[Mark]) -> None:
        """Have the stream run what it is given from now on after the marks of other lanes; the host goes on."""
        for mark in marks:
            assert isinstance(mark, EventMark)
            self._api.wait(self.stream, mark.event)

    def stamp(self) -> Stamp:
        """Record an event behind all that was issued so far; events are made once and used in every step."""
        if self._next == len(self._events):
            self._events.append(self._api.event())
        event = self._events[self._next]
        self._next += 1
        event.record(self.stream)
        return event

    def restart(self) -> None:
        """Use the events of the last step again."""
        self._next = 0


class BlockingLane:
    """A lane whose thread waits for the device before each action and for the action's end."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self._api, self.stream, self.stamp = api, api.stream(), clock

    def entered(self) -> AbstractContextManager[object]:
        """Context in which the lane's stream is current in this thread."""
        return self._api.on(self.stream)

    def bound(self, call: Call) -> Call:
        """Return ``call`` itself, which does its work on the calling thread."""
        return call

    def mark(self) -> None:
        """Return None: an action has ended when its call returns."""

    def wait(self, marks: Sequence[Mark]) -> None:
        """Wait on the host until the device has reached the marks of other lanes."""
        for mark in marks:
            assert isinstance(mark, EventMark)
            mark.event.synchronize()


class PinnedMemory:
    """Page-locked host memory, of exactly the bytes asked for."""

    def __init__(self, api: Api, size_bytes: int) -> None:
        self._arena = Arena(size_bytes)
        self.size_bytes = self._arena.size_bytes
        try:
            self._unpin: Call | None = api.pin(self._arena.bytes_at(0, self.size_bytes))
        except BaseException:
            self._arena.close()
            raise

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """View of ``size_bytes`` bytes at ``offset`` as uint8[size_bytes], without a copy."""
        return self._arena.bytes_at(offset, size_bytes)

    def close(self) -> None:
        """Unlock the pages and give the memory back. May be called twice."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()
        self._arena.close()


class DeviceMemory:
    """Allocation of bytes on the device, freed by ``close``."""

    def __init__(self, api: Api, size_bytes: int) -> None:
        self.size_bytes = max(1, size_bytes)
        self._memory = api.zeros(self.size_bytes)

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """View of ``size_bytes`` bytes at ``offset`` as uint8[size_bytes] on the device, without a copy."""
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise ConfigError(f"bytes {offset}..{offset + size_bytes} lie outside the arena of {self.size_bytes} bytes")
        return self._memory[offset : offset + size_bytes]

    def close(self) -> None:
        """Give the memory back; tensors cut from it keep it alive. May be called twice."""
        self._memory = self._memory[:0].clone()


class BouncedTier:
    """A tier that the device cannot reach: each direction goes through two page-locked pieces of host memory.

    While the tier works on one piece, the device copies the other. One thread at a time reads, and one writes: updates
    that an expert missed are made up for beside the streams of a step.

    Attributes:
        behind: Tier that has the bytes.
    """

    def __init__(self, api: Api, behind: TierBytes) -> None:
        self.behind, self._memory = behind, PinnedMemory(api, 4 * PIECE_BYTES)
        pieces = [self._memory.bytes_at(i * PIECE_BYTES, PIECE_BYTES) for i in range(4)]
        self._read = [(piece, api.event()) for piece in pieces[:2]]
        self._write = [(piece, api.event()) for piece in pieces[2:]]
        self._current = api.current
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8 on the device) with the bytes at ``offset`` of the tier, by pieces through the host."""
        with self._reading:
            self._read_pieces(offset, into)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Put ``data`` (uint8 on the device) at ``offset`` of the tier, piece by piece through the host."""
        with self._writing:
            self._write_pieces(offset, data)

    def _read_pieces(self, offset: int, into: torch.Tensor) -> None:
        for turn, start in enumerate(range(0, len(into), PIECE_BYTES)):
            place = into[start : start + PIECE_BYTES]
            piece, copied = self._read[turn % 2]
            copied.synchronize()
            self.behind.read(offset + start, piece[: len(place)])
            place.copy_(piece[: len(place)], non_blocking=True)
            copied.record(self._current())
        for _, copied in self._read:
            copied.synchronize()

    def _write_pieces(self, offset: int, data: torch.Tensor) -> None:
        starts = range(0, len(data), PIECE_BYTES)
        self._fetch(data, 0)
        for turn, start in enumerate(starts):
            if turn + 1 < len(starts):
                self._fetch(data, turn + 1)
            piece, copied = self._write[turn % 2]
            copied.synchronize()
            self.behind.write(offset + start, piece[: min(PIECE_BYTES, len(data) - start)])

    def _fetch(self, data: torch.Tensor, turn: int) -> None:
        part = data[turn * PIECE_BYTES : (turn + 1) * PIECE_BYTES]
        piece, copied = self._write[turn % 2]
        piece[: len(part)].copy_(part, non_blocking=True)
        copied.record(self._current())

    def move_host(self, offset: int, memory: torch.Tensor, *, reads: bool) -> None:
        """Fill ``memory`` of the host (uint8) with the bytes at ``offset`` of the tier, or put it there."""
        with self._reading if reads else self._writing:
            (self.behind.read if reads else self.behind.write)(offset, memory)

    def close(self) -> None:
        """Close the tier behind, and give the page-locked memory back."""
        self.behind.close()
        self._memory.close()


def move_past_device(tier: TierBytes, offset: int, memory: torch.Tensor, *, reads: bool) -> Call:
    """Prepare a transfer between a tier and ``memory`` of the host, past the device: from the tier, or to it.

    Raises:
        ProgramError: the tier is memory, too: a copy there would not wait for those that a device has under way.
    """
    if isinstance(tier, HostBytes):
        raise ProgramError(
            f"expected a file behind the host's memory, to move past the device, got {tier!r}; plan again"
        )
    if isinstance(tier, BouncedTier):
        return partial(tier.move_host, offset, memory, reads=reads)
    return bound_move(tier, offset, memory, reads=reads)


class AcceleratorDevice:
    """A device that is driven through an Api.

    Args:
        clock: Gives monotone seconds of the host.
    """

    def __init__(self, api: Api, clock: Callable[[], float] = time.perf_counter) -> None:
        self.kind = api.kind
        self._api, self._clock = api, clock
        self._lanes: list[AsyncLane | BlockingLane] = []
        self._origin, self._zero_s = api.event(), 0.0
        self._before, self._ends = api.event(), list[DeviceEvent]()  # made once, recorded in every step
        self._inbox: dict[tuple[int, str], PinnedMemory] = {}

    def arena(self, size_bytes: int) -> Memory:
        """Allocate ``size_bytes`` on the device, all zeros."""
        return DeviceMemory(self._api, size_bytes)

    def host(self, size_bytes: int) -> Memory:
        """Allocate ``size_bytes`` of page-locked host memory."""
        return PinnedMemory(self._api, size_bytes)

    def tier(self, tier: Tier, size_bytes: int, folder: Path) -> TierBytes:
        """Open the object that serves a lower tier; what is not host memory is bounced through page-locked pieces."""
        opened = open_tier(tier, size_bytes, folder, self.host)
        if isinstance(opened, HostBytes):
            return opened
        try:
            return BouncedTier(self._api, opened)
        except BaseException:
            opened.close()
            raise

    def lane(self, stream: str, *, blocking: bool) -> Lane:
        """Make the lane of a stream: one that only issues, or one whose thread waits for the device (``blocking``)."""
        lane = BlockingLane(self._api, self._clock) if blocking else AsyncLane(self._api)
        self._lanes.append(lane)
        self._ends.append(self._api.event())
        return lane

    def meter(self) -> Meter:
        """Make a meter of the memory that tensors take on the device."""
        return self._api.meter()

    def handed(self, batches: Batches) -> Batches:
        """Copy batches to page-locked memory of their own, unless they lie on the device already."""
        return [
            {name: self._handed(micro, name, tensor) for name, tensor in batch.items()}
            for micro, batch in enumerate(batches)
        ]

    def _handed(self, micro: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor
        key, size = (micro, name), tensor.numel() * tensor.element_size()
        memory = self._inbox.get(key)
        if memory is None or memory.size_bytes < size:  # the largest of several shapes so far
            if memory is not None:
                del self._inbox[key]
                memory.close()
            memory = self._inbox[key] = PinnedMemory(self._api, size)
        return memory.bytes_at(0, size).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def begin(self) -> None:
        """Begin a step: lanes start after what the caller issued. Waits for the device once, to set both clocks."""
        self._before.record(self._api.current())
        for lane in self._lanes:
            self._api.wait(lane.stream, self._before)
            if isinstance(lane, AsyncLane):
                lane.restart()
        self._origin.record(self._api.current())
        self._origin.synchronize()
        self._zero_s = self._clock()

    def end(self) -> None:
        """Return when the device has done all that the lanes were given."""
        for lane, end_event in zip(self._lanes, self._ends, strict=True):
            end_event.record(lane.stream)
            end_event.synchronize()

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Convert stamps of the step that ended, which may be events, to seconds on the host's clock."""
        return [
            stamp if isinstance(stamp, float) else self._zero_s + self._origin.elapsed_time(stamp) / 1e3
            for stamp in stamps
        ]

    def close(self) -> None:
        """Give back the page-locked memory in which batches were handed over, and what libraries keep for streams."""
        while self._inbox:
            self._inbox.popitem()[1].close()
        self._api.close()
