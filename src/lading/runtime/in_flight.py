"""Matrices in flight: groups on their way to owners and back, when they start, and when they must have landed.

[Note: pipeline] While group k computes, group k + 1 travels to its owners and group k - 1 returns (``run``). Groups
that have been sent under backward (``Early``) wait there for ``run``; those that need not have landed when a step
returns (``Late``) land before somebody reads what they move.

[Note: order] Every rank sends group 0 first, then 1, and so on; so an exchange never meets another one. Under backward
a group goes when all its gradients are final *and* all groups before it have gone. Ranks may have sent unlike many when
a step begins; the first to know tells all (``lading.runtime.exchange.agree``), and who is behind follows: with its
gradients if the step is taken, with zeros that nobody reads if it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lading.ir.routes import ShardRegion
from lading.optim.rule import States


@dataclass(frozen=True)
class Moving:
    """A parameter in one step, as this rank has it.

    Attributes:
        param, travels: This rank's pieces of the parameter, and of what goes to owners; both of ``region``'s shape.
        region: Region of the parameter that lies on this rank.
        next_states: Elementwise states after this update.
        update: Number of this parameter's update, from 1.
    """

    param: torch.Tensor
    travels: torch.Tensor
    region: ShardRegion
    next_states: States
    update: int


class Flight(Protocol):
    """Matrices that travel together in one dtype, in one step."""

    @property
    def parameters(self) -> Collection[int]:
        """Numbers of the parameters that it moves."""
        ...

    def send(self) -> None:
        """Start sending this rank's pieces to owners."""
        ...

    def compute(self, whole: Mapping[int, States], rates: Mapping[int, float]) -> None:
        """Wait for what came, compute what this rank owns, and start sending it back.

        Args:
            whole: Whole states of the matrices that this rank owns, by matrix.
            rates: Learning rates by parameter.
        """
        ...

    def apply(self) -> None:
        """Wait for what returned, and move this rank's pieces."""
        ...

    def drop(self) -> None:
        """Wait for what was sent, and move nothing."""
        ...


class Route(Protocol):
    """The way of matrices to owners and back."""

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """Numbers of the matrices that travel together, in the order in which they are sent."""
        ...

    def parameters(self, group: int) -> Collection[int]:
        """Numbers of the parameters that a group's matrices belong to."""
        ...

    def flights(self, group: int, moving: Mapping[int, Moving]) -> Sequence[Flight]:
        """Make the flights of a group's matrices whose parameter is in ``moving``, the same ones on every rank."""
        ...


def run(
    flights: Sequence[Flight], sent: int, whole: Mapping[int, States], rates: Mapping[int, float], *, late: bool
) -> None:
    """Send, compute and apply flights, overlapping one with the next ([Note: pipeline]).

    Args:
        sent: Number of flights that have been sent already.
        whole, rates: As ``Flight.compute`` takes them.
        late: Whether somebody else applies them.
    """
    for number, flight in enumerate(flights):
        while sent < min(number + 2, len(flights)):
            flights[sent].send()
            sent += 1
        flight.compute(whole, rates)
        if number and not late:
            flights[number - 1].apply()
    if flights and not late:
        flights[-1].apply()


class Early:
    """Groups that are sent as soon as backward has made their gradients ([Note: order])."""

    def __init__(self, route: Route, prepare: Callable[[int], Moving], blank: Callable[[int], Moving]) -> None:
        """Start with nothing sent.

        Args:
            prepare: Makes what travels of a parameter whose gradient is final, from its number.
            blank: Makes zeros of the same shape and dtype.
        """
        self._route, self._prepare, self._blank = route, prepare, blank
        self._ready: set[int] = set()
        self.flights: list[Flight] = []
        self.groups = 0
        #: Of each parameter sent.
        self.moving: dict[int, Moving] = {}
        self._seen: dict[int, torch.Tensor] = {}
        #: False while gradients are not final, as more micro-batches follow.
        self.last = True

    def arrived(self, number: int, gradient: torch.Tensor) -> None:
        """Take note that a parameter has its gradient, of which this is the rank's piece; send what is ready."""
        if not self.last or number in self.moving:
            return
        self._ready.add(number)
        self._seen[number] = _fingerprint(gradient)
        while self.groups < len(self._route.groups):
            parameters = self._route.parameters(self.groups)
            if not self._ready.issuperset(parameters):
                return
            for parameter in sorted(parameters):
                if parameter not in self.moving:
                    self.moving[parameter] = self._prepare(parameter)
            self._send(self.moving)

    @property
    def stirred(self) -> bool:
        """Whether a parameter's gradient has become final since the last optimizer step."""
        return bool(self._ready)

    def _send(self, moving: Mapping[int, Moving]) -> None:
        flights = self._route.flights(self.groups, moving)
        for flight in flights:
            flight.send()
        self.flights.extend(flights)
        self.groups += 1

    def changed(self, gradients: Mapping[int, torch.Tensor]) -> dict[int, bool | torch.Tensor]:
        """Whether the gradient of each parameter that has been sent is another one now: known, or on the device."""
        changed: dict[int, bool | torch.Tensor] = dict.fromkeys(self.moving, True)
        sent_numbers = sorted(self.moving.keys() & gradients.keys())
        if sent_numbers:
            fingerprints = torch.stack([_fingerprint(gradients[number]) for number in sent_numbers])
            earlier = torch.stack([self._seen[number] for number in sent_numbers])
            changed.update(zip(sent_numbers, (fingerprints != earlier).any(1).unbind(), strict=True))
        return changed

    def take(self) -> tuple[list[Flight], dict[int, Moving], int]:
        """Hand over the flights under way, their parameters and the number of groups sent; begin again with none."""
        under_way = (self.flights, self.moving, self.groups)
        self.flights, self.moving, self.groups = [], {}, 0
        self._ready, self._seen = set(), {}
        return under_way

    def drop(self, groups: int) -> None:
        """Follow the rank that has sent most, wait for everything, and forget it.

        Args:
            groups: Most groups that any rank has sent.
        """
        while self.groups < groups:
            self._send({number: self._blank(number) for number in self._route.parameters(self.groups)})
        flights, _, _ = self.take()
        for flight in flights:
            flight.drop()


class Late:
    """Flights that have returned, or will, and are applied before somebody reads what they move.

    Attributes:
        moved: Event after the last that was applied, for streams that read; None where there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._waiting: list[Flight] = []
        self._device = device
        self.moved: Any = None

    def keep(self, flights: Sequence[Flight]) -> None:
        """Remember flights to be applied later."""
        self._waiting.extend(flights)

    @torch.no_grad()
    def finish(self, parameters: Collection[int] | None = None) -> None:
        """Apply the flights that move any of these parameters; without, all."""
        if not self._waiting:
            return
        due = [f for f in self._waiting if parameters is None or not set(f.parameters).isdisjoint(parameters)]
        self._waiting = [flight for flight in self._waiting if flight not in due]
        for flight in due:
            flight.apply()
        if due and self._device.type != "cpu":
            self.moved = torch.get_device_module(self._device).current_stream(self._device).record_event()


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Two integers that differ where values do, int64[2]: the sums of all bit patterns and of all values.

    Versions of tensors would not tell: DTensors' in-place operations leave them as they are.
    """
    flat = tensor.detach().contiguous()
    bits = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])
    total = flat.sum(dtype=torch.float64).view(torch.int64)
    return torch.stack([bits.sum(dtype=torch.int64), total])
