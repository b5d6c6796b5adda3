"""Drivers of devices: what the executor asks of the hardware. One device differs from another only in its driver.

[Note: two halves of a wait] An action that waits for another stream first waits on the host until that stream's thread
has issued the action it waits for. Where issuing is not ending (a GPU), the waiting lane is then told to wait for a
mark that the other lane records behind the action; the host goes on. On a CPU an action has ended when its call
returns, so lanes have no marks and the first half is all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from lading.errors import ConfigError
from lading.ir.machine import Tier
from lading.runtime.host_arena import Arena
from lading.runtime.resident import PeakMeter
from lading.runtime.tiers import MakeTier, TierBytes, open_tier

Call = Callable[[], object]
#: A moment: seconds of the host's clock, or something that the lane turns into them after the step.
Stamp = Any
Batches = Sequence[Mapping[str, torch.Tensor]]


class Memory(Protocol):
    """Bytes from which the tensors of a step are cut.

    Attributes:
        size_bytes: Bytes of it.
    """

    size_bytes: int

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """View of ``size_bytes`` bytes at ``offset`` as uint8[size_bytes], without a copy."""
        ...

    def close(self) -> None:
        """Give everything back; tensors cut from it must not be used any more. May be called twice."""
        ...


class Meter(Protocol):
    """Measures the highest memory of the device since the last reset.

    Attributes:
        exact: Whether no peak can be missed.
        sample: Gives the bytes in use now, cheap enough to be called during a step; None where that means nothing.
    """

    exact: bool
    sample: Callable[[], int] | None

    def now_bytes(self) -> int:
        """Bytes of the device that are in use now."""
        ...

    def beside_bytes(self) -> int:
        """Bytes that the process takes on the device besides those that are metered (a GPU's context, code)."""
        ...

    def reset(self) -> None:
        """Forget the peak so far."""
        ...

    def peak_bytes(self) -> int:
        """Highest bytes of the device in use since the last reset."""
        ...

    def close(self) -> None:
        """Stop measuring the memory in use."""
        ...


class Mark(Protocol):
    """A point in the work of a lane, recorded anew in every step."""

    def record(self) -> None:
        """Place the mark behind everything issued on the lane so far."""
        ...


class Lane(Protocol):
    """A stream of a Program on the device; one thread drives it."""

    def entered(self) -> AbstractContextManager[object]:
        """Context in which what the calling thread issues belongs to this lane."""
        ...

    def bound(self, call: Call) -> Call:
        """Wrap ``call`` into one that issues it to this lane."""
        ...

    def mark(self) -> Mark | None:
        """Make a new mark of this lane; None where work has ended as soon as it is issued."""
        ...

    def wait(self, marks: Sequence[Mark]) -> None:
        """Run what is issued from now on after the marks of other lanes, as they were last recorded."""
        ...

    def stamp(self) -> Stamp:
        """Take the moment at which all that was issued so far has ended."""
        ...


class DeviceDriver(Protocol):
    """Driver of a device: makes its memory, its lower tiers and its lanes.

    Attributes:
        kind: Kind of the device, as ``lading.ir.machine.Device.kind``: whose kernels run.
    """

    kind: str

    def arena(self, size_bytes: int) -> Memory:
        """Allocate ``size_bytes`` of the device's memory, all zeros."""
        ...

    def host(self, size_bytes: int) -> Memory:
        """Allocate ``size_bytes`` of the host's memory, which the device reads and writes at full speed."""
        ...

    def tier(self, tier: Tier, size_bytes: int, folder: Path) -> TierBytes:
        """Open the object that serves a lower tier, in ``folder`` where the tier names no location."""
        ...

    def lane(self, stream: str, *, blocking: bool) -> Lane:
        """Make the lane of a stream of the Program.

        Args:
            blocking: Whether the thread that drives the stream does its work itself: it works on the host, or moves
                what the device cannot.
        """
        ...

    def meter(self) -> Meter:
        """Make a meter of the device's memory."""
        ...

    def handed(self, batches: Batches) -> Batches:
        """Copy of the batches in memory from which the device can take them without the host waiting."""
        ...

    def begin(self) -> None:
        """Begin a step: lanes start after whatever the caller issued before."""
        ...

    def end(self) -> None:
        """Return when all that the lanes were given has ended."""
        ...

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Convert stamps of the step that ended to seconds on the host's clock."""
        ...

    def close(self) -> None:
        """Give back whatever is not given back by closing memory, tiers and meters."""
        ...


class HostLane:
    """A lane of the CPU, where work has ended once it is issued."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stamp = clock

    def entered(self) -> AbstractContextManager[object]:
        """Empty context: calls run on the calling thread."""
        return nullcontext()

    def bound(self, call: Call) -> Call:
        """Bind a call to the lane: on the host ``call`` itself."""
        return call

    def mark(self) -> None:
        """Return None: what was issued has ended."""

    def wait(self, marks: Sequence[Mark]) -> None:
        """Do nothing: lanes of the CPU have no marks."""


class HostMeter(PeakMeter):
    """Meter of the resident set of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.sample: Callable[[], int] | None = self.now_bytes

    def beside_bytes(self) -> int:
        """Return 0: the resident set is all that the process takes."""
        return 0


class CpuDevice:
    """The CPU as the device: memory is the process's own, every stream is a thread.

    Args:
        clock: Gives monotone seconds.
        tiers: Functions that make the tiers of these names, instead of what their kinds say.
    """

    kind = "cpu"

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, tiers: Mapping[str, MakeTier] | None = None
    ) -> None:
        self._clock, self._make = clock, dict(tiers or {})

    def arena(self, size_bytes: int) -> Memory:
        """Map ``size_bytes`` of memory, all zeros."""
        return Arena(size_bytes)

    def host(self, size_bytes: int) -> Memory:
        """Map ``size_bytes`` of memory, as ``arena`` does."""
        return Arena(size_bytes)

    def tier(self, tier: Tier, size_bytes: int, folder: Path) -> TierBytes:
        """Open the object that serves a lower tier, in ``folder`` where the tier names no location."""
        if tier.name in self._make:
            return self._make[tier.name](size_bytes, tier.location or str(folder))
        return open_tier(tier, size_bytes, folder, Arena)

    def lane(self, stream: str, *, blocking: bool) -> Lane:
        """Make a lane whose calls run on the thread that drives it."""
        return HostLane(self._clock)

    def meter(self) -> Meter:
        """Make a meter of this process's resident set."""
        return HostMeter()

    def handed(self, batches: Batches) -> Batches:
        """Return the batches as they are."""
        return batches

    def begin(self) -> None:
        """Do nothing: nothing is under way between steps."""

    def end(self) -> None:
        """Do nothing: what was issued has ended."""

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """Return the stamps, which are seconds already."""
        return list(stamps)

    def close(self) -> None:
        """Do nothing: memory, tiers and meters are closed by themselves."""


def set_threads(stack: ExitStack, threads: int | None) -> None:
    """Set torch's compute threads until a stack is closed; None leaves them.

    Raises:
        ConfigError: fewer than one.
    """
    if threads is None:
        return
    if threads < 1:
        raise ConfigError(f"expected at least one compute thread, got {threads}")
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
