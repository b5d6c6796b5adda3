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
    again = list(reversed(units))
    backward = [unit.gather_s * unit.backward_gathers * regather for unit in again[1:]]
    clock = _Streams(slowdown, [*(unit.gather_s for unit in units), 0.0, *backward])
    for unit in units:
        clock.compute(unit.forward_s)
    for unit in again:
        clock.compute(unit.backward_s)
        clock.reduce(unit.reduce_s)
    return clock.result()


def reduced_beside(backward_s: Sequence[float], reduce_s: Sequence[float], slowdown: float) -> Beside:
    """A last backward whose gradients are reduced a bucket at a time, as they come.

    Args:
        backward_s: Seconds of each bucket's backward, in order.
        reduce_s: Seconds of its reduction.
        slowdown: As above.
    """
    clock = _Streams(slowdown, [0.0] * len(backward_s))
    for compute, reduction in zip(backward_s, reduce_s, strict=True):
        clock.compute(compute)
        clock.reduce(reduction)
    return clock.result()


class _Streams:
    """Clocks of the device and of the network; reductions wait until the next gather has been asked for."""

    def __init__(self, slowdown: float, gathers: Sequence[float]) -> None:
        self.slowdown = slowdown
        self.gathers = gathers
        self.device = 0.0
        self.network = 0.0
        self.busy = 0.0
        self.computed = 0
        self.gathered: list[float] = []
        self.waiting: list[tuple[float, float]] = []
        self.spans: list[tuple[float, float]] = []
        self._ask(0.0)

    def compute(self, seconds: float) -> None:
        """Run the next unit once it is gathered; the one behind it is asked for when it begins."""
        start = max(self.device, self.gathered[self.computed])
        self.computed += 1
        self._ask(start)
        self.device = self._end(start, seconds)
        self.busy += self.device - start

    def reduce(self, seconds: float) -> None:
        """Reduce what the unit made, behind the gather that is asked for next."""
        self.waiting.append((self.device, seconds))

    def result(self) -> Beside:
        """All that is under way has ended."""
        self._flush()
        end = max(self.device, self.network)
        return Beside(end, end - self.busy)

    def _ask(self, now: float) -> None:
        number = len(self.gathered)
        if number < len(self.gathers):
            seconds = self.gathers[number]
            self._take(now, seconds)
            before = self.gathered[-1] if self.gathered else 0.0
            self.gathered.append(self.network if seconds else before)
        self._flush()

    def _flush(self) -> None:
        for ready, seconds in self.waiting:
            self._take(ready, seconds)
        self.waiting.clear()

    def _take(self, ready: float, seconds: float) -> None:
        if seconds:
            start = max(self.network, ready)
            self.network = start + seconds
            self.spans.append((start, self.network))

    def _end(self, start: float, seconds: float) -> float:
        """When computing of so many seconds that begins now ends, slower while the network's kernels run."""
        now, left = start, seconds
        self.spans = [span for span in self.spans if span[1] > now]
        for begin, end in self.spans:
            alone = min(left, max(0.0, begin - now))
            now, left = now + alone, left - alone
            beside = max(0.0, min(left * (1 + self.slowdown), end - now))
            now, left = now + beside, max(0.0, left - beside / (1 + self.slowdown))
        return now + left
