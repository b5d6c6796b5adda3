"""Gathers and reductions of cut parameters beside computing: the two streams of a data-parallel step.

[Note: units]
Parameters are gathered, and gradients reduced, a unit at a time (a block; what is before and after them). The network's
stream takes one at a time, in the order in which the runtime asks: the gather of the next unit is asked for when a unit
begins, so at most two are under way, and in backward before the reduction of the unit that just ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """Seconds of one unit in one micro-batch.

    Attributes:
        gather_s, reduce_s: On the network, alone.
        forward_s, backward_s: On the device.
        backward_gathers: How often it is gathered in backward: twice where a recomputed forward releases it again.
    """

    gather_s: float
    reduce_s: float
    forward_s: float
    backward_s: float
    backward_gathers: int = 1


@dataclass(frozen=True, slots=True)
class Beside:
    """What a step of units takes.

    Attributes:
        seconds: From the first gather to the last reduction.
        exposed_s: Of it, seconds in which the device waited for the network.
    """

    seconds: float
    exposed_s: float


def fully_sharded(units: Sequence[Unit], slowdown: float, *, regather: bool = True) -> Beside:
    """One micro-batch whose units are gathered before each use and whose gradients are reduced ([Note: units]).

    Args:
        units: In the order of forward.
        slowdown: By how much longer the device takes while the network's kernels run beside it.
        regather: Whether units are released after forward; the last one never is.
    """
    clock = _Streams(slowdown)
    for index, unit in enumerate(units):
        clock.gather(unit.gather_s, ahead=2)
        clock.compute(unit.forward_s, after=index)
    again = list(reversed(units))
    for index, unit in enumerate(again):
        if regather and index > 0:
            clock.gather(unit.gather_s * unit.backward_gathers, ahead=2)
        else:
            clock.gather(0.0, ahead=2)
        clock.compute(unit.backward_s, after=len(units) + index)
        clock.reduce(unit.reduce_s)
    return clock.result()


def reduced_beside(backward_s: Sequence[float], reduce_s: Sequence[float], slowdown: float) -> Beside:
    """A last backward whose gradients are reduced a bucket at a time, as they come.

    Args:
        backward_s: Seconds of each bucket's backward, in order.
        reduce_s: Seconds of its reduction.
        slowdown: As above.
    """
    clock = _Streams(slowdown)
    for index, (compute, reduction) in enumerate(zip(backward_s, reduce_s, strict=True)):
        clock.gather(0.0, ahead=2)
        clock.compute(compute, after=index)
        clock.reduce(reduction)
    return clock.result()


class _Streams:
    """Clocks of the device and of the network; reductions wait until the next gather has been asked for."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.device = 0.0
        self.network = 0.0
        self.busy = 0.0
        self.gathered: list[float] = []
        self.starts: list[float] = []
        self.waiting: list[tuple[float, float]] = []
        self.spans: list[tuple[float, float]] = []

    def gather(self, seconds: float, ahead: int) -> None:
        """Ask for the next unit: no earlier than when the unit ``ahead`` - 1 before it began."""
        number = len(self.gathered)
        asked = self.starts[number - ahead + 1 - 1] if number >= ahead else 0.0
        self._take(asked, seconds)
        self.gathered.append(self.network if seconds else max(self.gathered[-1], 0.0) if self.gathered else 0.0)
        self._flush()

    def compute(self, seconds: float, after: int) -> None:
        """Run a unit once it is gathered."""
        start = max(self.device, self.gathered[after])
        beside = sum(max(0.0, min(end, start + seconds) - max(begin, start)) for begin, end in self.spans[-4:])
        self.starts.append(start)
        self.device = start + seconds + min(beside, seconds) * self.slowdown
        self.busy += self.device - start

    def reduce(self, seconds: float) -> None:
        """Reduce what the unit made, behind the gather that is asked for next."""
        self.waiting.append((self.device, seconds))

    def result(self) -> Beside:
        """All that is under way has ended."""
        self._flush()
        end = max(self.device, self.network)
        return Beside(end, end - self.busy)

    def _flush(self) -> None:
        for ready, seconds in self.waiting:
            self._take(ready, seconds)
        self.waiting.clear()

    def _take(self, ready: float, seconds: float) -> None:
        if seconds:
            start = max(self.network, ready)
            self.network = start + seconds
            self.spans.append((start, self.network))
