"""Route of matrices whose pieces lie on several ranks: gradients travel to owners, directions back.

An owner is the rank that computes a matrix's direction, along which the matrix then moves. What travels in is what
``Rule.pre`` made of each rank's own piece; what returns is applied by ``Rule.post`` to each rank's own piece. The bits
are those of ``lading.optim.rule.update_matrix`` on one process, whatever the owners, the groups and the cuts:
elementwise parts do not see cuts, and the rest sees the same whole matrix, laid out the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from lading.ir.routes import RoutedShard, ShardRegion, WholeMatrix
from lading.optim.rule import Rule, SharedRule, States
from lading.runtime.exchange import PieceExchange, RuleFailures, Team, Traffic, Under
from lading.runtime.gangs import directions_of, gangs_of, shared_of, stacks_of
from lading.runtime.in_flight import Moving


@dataclass(frozen=True)
class _Ways:
    """Numbers of matrices that travel together in one dtype, and their two exchanges."""

    numbers: list[int]
    inbound: PieceExchange
    outbound: PieceExchange


class MatrixRoute:
    """Owners of matrices, and the exchanges to them and back (a ``lading.runtime.in_flight.Route``)."""

    def __init__(
        self,
        wholes: Sequence[tuple[WholeMatrix, Rule]],
        ranks: Sequence[tuple[int, ...]],
        groups: Sequence[Sequence[int]],
        routes: tuple[Sequence[RoutedShard], Sequence[RoutedShard]],
        team: Team,
        *,
        batched: bool = False,
    ) -> None:
        """Make the route of ``wholes``.

        Args:
            wholes: Matrices, each with the rule that moves it.
            ranks: Owner of each matrix, then the ranks that compute it with the owner.
            groups: Numbers of matrices that travel together, in order.
            routes: Pieces to owners, and back (``lading.ir.routes.pieces``).
            batched: Whether owners stack matrices (``lading.runtime.gangs.stacks_of``).
        """
        self.batched = batched
        self.wholes, self.rules = [whole for whole, _ in wholes], [rule for _, rule in wholes]
        self.owners, self.groups, self.team = [gang[0] for gang in ranks], groups, team
        self.gangs = gangs_of(ranks, team)
        self.traffic, self.failures = Traffic(), RuleFailures()
        self._inbound, self._outbound = routes
        self._known: dict[object, list[_Ways]] = {}

    def parameters(self, group: int) -> Collection[int]:
        """Numbers of the parameters that a group's matrices belong to."""
        return {self.wholes[number].parameter for number in self.groups[group]}

    def flights(self, group: int, moving: Mapping[int, Moving]) -> list[MatrixFlight]:
        """Make one flight for each dtype that travels."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number in self.groups[group]:
            parameter = self.wholes[number].parameter
            if parameter in moving:
                by_dtype.setdefault(moving[parameter].travels.dtype, []).append(number)
        key = (group, tuple((dtype, tuple(numbers)) for dtype, numbers in by_dtype.items()))
        if key not in self._known:
            self._known[key] = [self._ways(numbers, dtype) for dtype, numbers in by_dtype.items()]
        return [MatrixFlight(self, ways, moving) for ways in self._known[key]]

    def _ways(self, numbers: list[int], dtype: torch.dtype) -> _Ways:
        within = set(numbers)
        inbound = PieceExchange([p for p in self._inbound if p.whole in within], self.team, self.team.inbound, dtype)
        outbound = PieceExchange([p for p in self._outbound if p.whole in within], self.team, self.team.outbound, dtype)
        return _Ways(numbers, inbound, outbound)


@dataclass
class MatrixFlight:
    """Matrices of a ``MatrixRoute`` that travel in one step (a ``lading.runtime.in_flight.Flight``).

    Attributes:
        matrices: Directions that this rank has computed, by matrix.
        landing: Tensor that a direction comes back to, and the region of it that this rank holds, by matrix.
        under: The exchange under way.
        rates: Learning rates by parameter.
    """

    route: MatrixRoute
    ways: _Ways
    moving: Mapping[int, Moving]
    matrices: dict[int, torch.Tensor] = field(default_factory=lambda: {})
    landing: dict[int, tuple[torch.Tensor, ShardRegion]] = field(default_factory=lambda: {})
    under: Under | None = None
    rates: Mapping[int, float] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        self.moving = {number: self.moving[number] for number in self.parameters}

    @property
    def parameters(self) -> Collection[int]:
        """Numbers of the parameters that it moves."""
        return {self.route.wholes[number].parameter for number in self.ways.numbers}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.moving.values())).param.device

    def send(self) -> None:
        """Start sending this rank's pieces to owners."""
        self.under = self.ways.inbound.start(self._held, self._device, self.route.traffic)

    def drop(self) -> None:
        """Wait for what was sent, and use none of it."""
        assert self.under is not None
        self.under.wait(self.route.traffic)

    def _own(self, number: int) -> Moving:
        return self.moving[self.route.wholes[number].parameter]

    def _held(self, number: int) -> tuple[torch.Tensor, ShardRegion]:
        moving = self._own(number)
        return moving.travels, moving.region

    def compute(self, whole: Mapping[int, States], rates: Mapping[int, float]) -> None:
        """Compute the directions of the matrices that this rank owns, and start sending them back."""
        assert self.under is not None
        self.rates = {number: rates[number] for number in self.moving}
        wholes, inbound, outbound = self.route.wholes, self.ways.inbound, self.ways.outbound
        mine = [number for number in self.ways.numbers if self.route.owners[number] == self.route.team.rank]
        arrived = {n: torch.empty(wholes[n].region.shape, dtype=inbound.dtype, device=self._device) for n in mine}
        self.under.wait(self.route.traffic)
        inbound.finish(self.under, self._held, lambda number: (arrived[number], wholes[number].region))
        for number, direction in self._directions(arrived, whole):
            self.matrices[number] = direction.to(outbound.dtype).reshape(wholes[number].region.shape)
        self.under = outbound.start(self._computed, self._device, self.route.traffic)

    def _computed(self, number: int) -> tuple[torch.Tensor, ShardRegion]:
        return self.matrices[number], self.route.wholes[number].region

    def _directions(
        self, arrived: dict[int, torch.Tensor], whole: Mapping[int, States]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Directions, (rows, columns), of the matrices that have arrived; each is taken out of ``arrived``."""
        route, dtype = self.route, self.ways.inbound.dtype
        matrices = {n: (route.rules[n], route.wholes[n].rows_columns, dtype) for n in self.ways.numbers}
        for number in shared_of(matrices, route.gangs):
            rule, shape, _ = matrices[number]
            seen = arrived.pop(number, None)
            matrix = torch.empty(shape, dtype=dtype, device=self._device) if seen is None else seen.view(shape)
            direction = route.gangs[number].direction(cast(SharedRule, rule), matrix, route.traffic)
            if seen is not None:
                yield number, direction
        for stack in stacks_of({number: matrices[number] for number in arrived}, batched=route.batched):
            rule, shape, _ = matrices[stack[0]]
            taken = [arrived.pop(number).view(shape) for number in stack]
            states, update = whole.get(stack[0], {}), self._own(stack[0]).update
            yield from zip(stack, directions_of(rule, taken, states, update, route.failures), strict=True)

    def apply(self) -> None:
        """Wait for directions, and move this rank's pieces along them."""
        assert self.under is not None
        self.under.wait(self.route.traffic)
        self.ways.outbound.finish(self.under, self._computed, self._landing)
        for number, (direction, region) in sorted(self.landing.items()):
            matrix = self.route.wholes[number]
            moving = self.moving[matrix.parameter]
            piece, rate = moving.param[region.within(moving.region)], self.rates[matrix.parameter]
            self.route.rules[number].post(piece, direction, matrix.rows_columns, lr=rate, update=moving.update)
        self.matrices.clear()
        self.landing.clear()

    def _landing(self, number: int) -> tuple[torch.Tensor, ShardRegion]:
        if number not in self.landing:
            region = self._own(number).region.meet(self.route.wholes[number].region)
            assert region is not None
            made = torch.empty(region.shape, dtype=self.ways.outbound.dtype, device=self._device)
            self.landing[number] = (made, region)
        return self.landing[number]
