"""Route of matrices whose pieces lie on several ranks: gradients travel to owners, directions back.

An owner is the rank that computes a matrix's direction, along which the matrix then moves. What travels in is what
``Rule.pre`` made of each rank's own piece; what returns is applied by ``Rule.post`` to each rank's own piece. The bits
are those of ``lading.optim.rule.update_matrix`` on one process, whatever the owners, the groups and the cuts:
elementwise parts do not see cuts, and the rest sees the same whole matrix, laid out the same.

[Note: replicas] On replicas (ZeRO-1) gradients are summed at owners, and owners' results return to every replica
(``ReplicaRoute``). A matrix's gradient goes from every rank to its owner and its direction from the owner to every
rank. Each rank sends and takes (R - 1) / R of all elements each way: what a reduce-scatter and an all-gather of them
move, and no more. The direction may travel in fewer bytes than a parameter would.

Owners add up in the order of ranks and divide at the end, so that the sum is that of one process which does the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from lading.ir.routes import RoutedShard, ShardRegion, WholeMatrix
from lading.optim.rule import Rule, SharedRule, States
from lading.runtime.exchange import PieceExchange, RuleFailures, Team, Traffic, Under
from lading.runtime.gangs import directions_of, gangs_of, shared_of, stacks_of
from lading.runtime.in_flight import Moving
from lading.runtime.members import PieceRule


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
        self.wholes, self.rules = [matrix for matrix, _ in wholes], [rule for _, rule in wholes]
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
        self.under = self.ways.inbound.start(self._outgoing_piece, self._device, self.route.traffic)

    def drop(self) -> None:
        """Wait for what was sent, and use none of it."""
        assert self.under is not None
        self.under.wait(self.route.traffic)

    def _moving_parameter(self, number: int) -> Moving:
        return self.moving[self.route.wholes[number].parameter]

    def _outgoing_piece(self, number: int) -> tuple[torch.Tensor, ShardRegion]:
        moving = self._moving_parameter(number)
        return moving.travels, moving.region

    def compute(self, whole: Mapping[int, States], rates: Mapping[int, float]) -> None:
        """Compute the directions of the matrices that this rank owns, and start sending them back."""
        assert self.under is not None
        self.rates = {number: rates[number] for number in self.moving}
        wholes, inbound, outbound = self.route.wholes, self.ways.inbound, self.ways.outbound
        mine = [number for number in self.ways.numbers if self.route.owners[number] == self.route.team.rank]
        arrived = {n: torch.empty(wholes[n].region.shape, dtype=inbound.dtype, device=self._device) for n in mine}
        self.under.wait(self.route.traffic)
        inbound.finish(self.under, self._outgoing_piece, lambda number: (arrived[number], wholes[number].region))
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
            shard = arrived.pop(number, None)
            matrix = torch.empty(shape, dtype=dtype, device=self._device) if shard is None else shard.view(shape)
            direction = route.gangs[number].direction(cast(SharedRule, rule), matrix, route.traffic)
            if shard is not None:
                yield number, direction
        for stack in stacks_of({number: matrices[number] for number in arrived}, batched=route.batched):
            rule, shape, _ = matrices[stack[0]]
            stacked = [arrived.pop(number).view(shape) for number in stack]
            states, update = whole.get(stack[0], {}), self._moving_parameter(stack[0]).update
            yield from zip(stack, directions_of(rule, stacked, states, update, route.failures), strict=True)

    def apply(self) -> None:
        """Wait for directions, and move this rank's pieces along them."""
        assert self.under is not None
        self.under.wait(self.route.traffic)
        self.ways.outbound.finish(self.under, self._computed, self._landing)
        for number, (direction, region) in sorted(self.landing.items()):
            matrix = self.route.wholes[number]
            moving = self.moving[matrix.parameter]
            piece, rate = moving.param[region.slices_in(moving.region)], self.rates[matrix.parameter]
            self.route.rules[number].post(piece, direction, matrix.rows_columns, lr=rate, update=moving.update)
        self.matrices.clear()
        self.landing.clear()

    def _landing(self, number: int) -> tuple[torch.Tensor, ShardRegion]:
        if number not in self.landing:
            region = self._moving_parameter(number).region.meet(self.route.wholes[number].region)
            assert region is not None
            landing = torch.empty(region.shape, dtype=self.ways.outbound.dtype, device=self._device)
            self.landing[number] = (landing, region)
        return self.landing[number]


class ReplicaRoute:
    """Owners of matrices, and of parameters that are none, whose states lie with their owner alone."""

    def __init__(
        self, wholes: Sequence[tuple[WholeMatrix, Rule | PieceRule]], ranks: Sequence[tuple[int, ...]],
        groups: Sequence[Sequence[int]], team: Team, *, batched: bool = False,
    ) -> None:  # fmt: skip
        """Make the route of ``wholes``.

        Args:
            ranks: Owner of each matrix, then the ranks that compute it with the owner.
            groups: Numbers of matrices that travel together, in order.
            batched: Whether owners stack matrices (``lading.runtime.gangs.stacks_of``).
        """
        self.batched = batched
        self.wholes, self.groups, self.team = wholes, groups, team
        self.owners, self.gangs = [gang[0] for gang in ranks], gangs_of(ranks, team)
        self.traffic, self.failures = Traffic(), RuleFailures()

    def parameters(self, group: int) -> Collection[int]:
        """Numbers of the parameters that a group's matrices belong to."""
        return {self.wholes[number][0].parameter for number in self.groups[group]}

    def flights(self, group: int, moving: Mapping[int, Moving]) -> list[ReplicaFlight]:
        """Make one flight of the group's matrices, or none if nothing of it moves."""
        numbers = [number for number in self.groups[group] if self.wholes[number][0].parameter in moving]
        return [ReplicaFlight(self, numbers, moving)] if numbers else []


@dataclass
class ReplicaFlight:
    """Matrices of a ``ReplicaRoute`` that travel in one step (a ``lading.runtime.in_flight.Flight``)."""

    route: ReplicaRoute
    numbers: list[int]
    moving: Mapping[int, Moving]
    under: Under | None = None
    rates: Mapping[int, float] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        self.moving = {number: self.moving[number] for number in self.parameters}

    @property
    def parameters(self) -> Collection[int]:
        """Numbers of the parameters that it moves."""
        return {self.route.wholes[number][0].parameter for number in self.numbers}

    def _size(self, number: int) -> int:
        return self.route.wholes[number][0].region.size

    def _moving_parameter(self, number: int) -> Moving:
        return self.moving[self.route.wholes[number][0].parameter]

    def _view(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[
            self.route.wholes[number][0].region.slices_in(ShardRegion((0,) * tensor.ndim, tuple(tensor.shape)))
        ]

    def _of(self, rank: int) -> list[int]:
        return [number for number in self.numbers if self.route.owners[number] == rank]

    def send(self) -> None:
        """Start sending every rank's gradients to their owners."""
        team = self.route.team
        rows = [self._of(rank) for rank in range(team.ranks)]
        parts = [
            self._view(number, self._moving_parameter(number).travels).reshape(-1) for row in rows for number in row
        ]
        mine = sum(map(self._size, rows[team.rank]))
        sizes = [sum(map(self._size, row)) for row in rows]
        self.under = self._exchange(torch.cat(parts), [mine] * team.ranks, sizes, team.inbound)

    def drop(self) -> None:
        """Wait for what was sent, and use none of it."""
        assert self.under is not None
        self.under.wait(self.route.traffic)

    def compute(self, whole: Mapping[int, States], rates: Mapping[int, float]) -> None:
        """Compute what every replica is to get of the matrices that this rank owns, and start sending it to all."""
        self.rates = {number: rates[number] for number in self.moving}
        gradients = self._summed()
        results = {number: result.reshape(-1) for number, result in self._results(gradients, whole)}
        self._send_out([results[number] for number in self._of(self.route.team.rank)])

    def _summed(self) -> dict[int, torch.Tensor]:
        """Mean over ranks of the gradients that this rank owns, by matrix."""
        assert self.under is not None
        self.under.wait(self.route.traffic)
        ranks, arrived = self.route.team.ranks, self.under.arrived
        rows = arrived.view(ranks, -1) if arrived.numel() else arrived.expand(ranks, 0)
        total = rows[0].clone()
        for row in rows[1:]:
            total.add_(row)
        total.div_(ranks)
        means: dict[int, torch.Tensor] = {}
        start = 0
        for number in self._of(self.route.team.rank):
            # A tensor of its own: products differ in bits with where in memory their operands begin.
            part = total[start : start + self._size(number)].view(self.route.wholes[number][0].region.shape)
            means[number] = part.to(self._moving_parameter(number).travels.dtype, copy=True)
            start += self._size(number)
        return means

    def _results(
        self, gradients: dict[int, torch.Tensor], whole: Mapping[int, States]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Directions, or new values, of what this rank owns, by number; each is taken out of ``gradients``."""
        route = self.route
        pairs = {number: route.wholes[number] for number in self.numbers}
        for number in [n for n in gradients if isinstance(pairs[n][1], PieceRule)]:
            yield number, self._moved(number, gradients.pop(number), whole[number])
        matrices = {
            number: (rule, matrix.rows_columns, self._travels(number))
            for number, (matrix, rule) in pairs.items() if not isinstance(rule, PieceRule)
        }  # fmt: skip

        def preprocess(number: int) -> torch.Tensor:
            rule, shape, _ = matrices[number]
            return rule.pre(
                gradients.pop(number).view(shape), whole[number], self._moving_parameter(number).update
            ).contiguous()

        for number in shared_of(matrices, route.gangs):
            rule, shape, dtype = matrices[number]
            is_owned = number in gradients
            matrix = (
                preprocess(number) if is_owned else self._moving_parameter(number).param.new_empty(shape, dtype=dtype)
            )
            direction = route.gangs[number].direction(cast(SharedRule, rule), matrix, route.traffic)
            if is_owned:
                yield number, direction
        for stack in stacks_of({number: matrices[number] for number in gradients}, batched=route.batched):
            rule, _, _ = matrices[stack[0]]
            states, update = whole[stack[0]], self._moving_parameter(stack[0]).update
            stacked = [preprocess(number) for number in stack]
            directions = directions_of(rule, stacked, states, update, route.failures)
            yield from zip(stack, (each.to(stacked[0].dtype) for each in directions), strict=True)

    def _moved(self, number: int, grad: torch.Tensor, states: States) -> torch.Tensor:
        """New value of what is no matrix."""
        (matrix, rule), moving = self.route.wholes[number], self._moving_parameter(number)
        value = self._view(number, moving.param).clone()
        cast(PieceRule, rule).step(value, grad, states, lr=self.rates[matrix.parameter], update=moving.update)
        return value

    def _send_out(self, results: list[torch.Tensor]) -> None:
        """Start sending results to every replica in one dtype, that of the group's widest."""
        team = self.route.team
        dtype = max({self._travels(number) for number in self.numbers}, key=lambda kind: kind.itemsize)
        device = next(iter(self.moving.values())).param.device
        flat = (
            torch.cat([part.to(dtype) for part in results]) if results else torch.empty(0, dtype=dtype, device=device)
        )
        sizes = [sum(map(self._size, self._of(rank))) for rank in range(team.ranks)]
        self.under = self._exchange(flat.repeat(team.ranks), sizes, [flat.numel()] * team.ranks, team.outbound)

    def _travels(self, number: int) -> torch.dtype:
        rule = self.route.wholes[number][1]
        dtype = None if isinstance(rule, PieceRule) else rule.travels
        return dtype or self._moving_parameter(number).param.dtype

    def apply(self) -> None:
        """Wait for results, and move every replica along them."""
        assert self.under is not None
        self.under.wait(self.route.traffic)
        start = 0
        for rank in range(self.route.team.ranks):
            for number in self._of(rank):
                (matrix, rule), moving = self.route.wholes[number], self._moving_parameter(number)
                param = self._view(number, moving.param)
                part = self.under.arrived[start : start + matrix.region.size].view(matrix.region.shape)
                start += matrix.region.size
                if isinstance(rule, PieceRule):
                    param.copy_(part)
                else:
                    direction, rate = part.to(self._travels(number)), self.rates[matrix.parameter]
                    rule.post(param, direction, matrix.rows_columns, lr=rate, update=moving.update)

    def _exchange(self, out: torch.Tensor, taken: list[int], sent: list[int], group: dist.ProcessGroup | None) -> Under:
        team, traffic = self.route.team, self.route.traffic
        if team.ranks == 1:
            return Under(None, out, out)
        arrived = out.new_empty(sum(taken))
        traffic.collectives += 1
        traffic.elements += sum(sent) - sent[team.rank]
        return Under(dist.all_to_all_single(arrived, out, taken, sent, group=group, async_op=True), arrived, out)
