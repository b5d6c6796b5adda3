"""One update of many matrices whose owners see them whole: gradients travel in, directions back, a group at a time.

[Note: pipeline]
While group k computes, group k + 1 travels to its owners and group k - 1 returns. What travels in is what ``Rule.pre``
made of each rank's own piece; what returns is applied by ``Rule.post`` to each rank's own piece. The bits are those of
``lading.optim.rule.update_matrix`` on one process, whatever the owners, the groups and the cuts: elementwise parts do
not see cuts, and the rest sees the same whole matrix, laid out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lading.ir.routes import Box, Piece, Whole
from lading.optim.rule import Rule, States
from lading.runtime.exchange import FAILURES, Exchange, Team, Traffic, Under, agree_done


@dataclass(frozen=True)
class Moving:
    """A parameter in one step.

    Attributes:
        param, travels: This rank's pieces of the parameter and of what ``Rule.pre`` gave; of ``box``'s shape.
        update: Of this parameter, from 1.
    """

    param: torch.Tensor
    travels: torch.Tensor
    box: Box
    lr: float
    update: int


@dataclass
class _Group:
    """Matrices that travel together in one dtype.

    Attributes:
        landing: Where directions come back to, by matrix, of the piece that this rank holds.
    """

    numbers: list[int]
    inbound: Exchange
    outbound: Exchange
    matrices: dict[int, torch.Tensor]
    landing: dict[int, tuple[torch.Tensor, Box]]
    under: Under | None = None


class MatrixStep:
    """Who owns what, and the way there; ``run`` makes one step."""

    def __init__(
        self, wholes: Sequence[tuple[Whole, Rule]], owners: Sequence[int], groups: Sequence[Sequence[int]],
        routes: tuple[Sequence[Piece], Sequence[Piece]], team: Team,
    ) -> None:  # fmt: skip
        """A step of ``wholes``.

        Args:
            wholes: Each with the rule that moves it.
            groups: Numbers of matrices that travel together, in order.
            routes: Pieces to owners, and back (``lading.ir.routes.pieces``).
        """
        self.wholes, self.rules = [whole for whole, _ in wholes], [rule for _, rule in wholes]
        self.owners, self.groups, self.team = owners, groups, team
        self.traffic = Traffic()
        self._failed: Exception | None = None
        #: Decompositions may not end; products do.
        self._may_fail = any(hasattr(rule.settings, "frequency") for rule in self.rules)
        self._inbound, self._outbound = routes
        self._known: dict[object, list[tuple[list[int], Exchange, Exchange]]] = {}

    def run(self, moving: Mapping[int, Moving], whole: Mapping[int, States]) -> None:
        """Move every parameter of ``moving``, the same ones on every rank ([Note: pipeline]).

        Args:
            moving: By parameter.
            whole: Whole states of the matrices that this rank owns, by matrix.
        """
        groups = self._prepared(moving) if moving else []
        self._failed = None
        last: _Group | None = None
        if groups:
            self._send(groups[0], moving)
        for number, group in enumerate(groups):
            if number + 1 < len(groups):
                self._send(groups[number + 1], moving)
            self._compute(group, moving, whole)
            if last is not None:
                self._apply(last, moving)
            last = group
        if last is not None:
            self._apply(last, moving)
        if groups and self._may_fail:
            agree_done(self._failed, self.team, _device(moving))

    def _prepared(self, moving: Mapping[int, Moving]) -> list[_Group]:
        key = tuple((number, m.travels.dtype) for number, m in sorted(moving.items()))
        if key not in self._known:
            self._known[key] = self._exchanges(moving)
        return [_Group(*made, {}, {}) for made in self._known[key]]

    def _exchanges(self, moving: Mapping[int, Moving]) -> list[tuple[list[int], Exchange, Exchange]]:
        """A group for each dtype that travels, of what moves."""
        found: list[tuple[list[int], Exchange, Exchange]] = []
        for group in self.groups:
            by_dtype: dict[torch.dtype, list[int]] = {}
            for number in group:
                parameter = self.wholes[number].parameter
                if parameter in moving:
                    by_dtype.setdefault(moving[parameter].travels.dtype, []).append(number)
            for dtype, numbers in by_dtype.items():
                within = set(numbers)
                inbound = Exchange([p for p in self._inbound if p.whole in within], self.team, self.team.inbound, dtype)
                outbound = Exchange(
                    [p for p in self._outbound if p.whole in within], self.team, self.team.outbound, dtype
                )
                found.append((numbers, inbound, outbound))
        return found

    def _send(self, group: _Group, moving: Mapping[int, Moving]) -> None:
        group.under = group.inbound.start(self._held(moving), _device(moving), self.traffic)

    def _held(self, moving: Mapping[int, Moving]) -> Callable[[int], tuple[torch.Tensor, Box]]:
        def place(number: int) -> tuple[torch.Tensor, Box]:
            own = moving[self.wholes[number].parameter]
            return own.travels, own.box

        return place

    def _compute(self, group: _Group, moving: Mapping[int, Moving], whole: Mapping[int, States]) -> None:
        """Directions of the matrices of a group that this rank owns, sent back."""
        assert group.under is not None
        mine = [number for number in group.numbers if self.owners[number] == self.team.rank]
        arrived = {
            number: torch.empty(self.wholes[number].box.shape, dtype=group.inbound.dtype, device=_device(moving))
            for number in mine
        }
        group.inbound.finish(group.under, self._held(moving), lambda number: (arrived[number], self.wholes[number].box))
        for number in mine:
            matrix = self.wholes[number]
            own = moving[matrix.parameter]
            found = self._direction(
                number, arrived.pop(number).view(matrix.rows_columns), whole.get(number, {}), own.update
            )
            group.matrices[number] = found.to(group.outbound.dtype).reshape(matrix.box.shape)
        group.under = group.outbound.start(
            lambda number: (group.matrices[number], self.wholes[number].box), _device(moving), self.traffic
        )

    def _direction(self, number: int, seen: torch.Tensor, states: States, update: int) -> torch.Tensor:
        """What the rule makes of a matrix; where it fails, zeros travel, and all ranks are told at the end."""
        try:
            return self.rules[number].direction(seen, states, update)
        except FAILURES as error:
            self._failed = error
            return torch.zeros_like(seen)

    def _apply(self, group: _Group, moving: Mapping[int, Moving]) -> None:
        """Wait for a group's directions, and move this rank's pieces along them."""
        assert group.under is not None

        def landing(number: int) -> tuple[torch.Tensor, Box]:
            if number not in group.landing:
                held = self._box(number, moving)
                assert held is not None
                made = torch.empty(held.shape, dtype=group.outbound.dtype, device=_device(moving))
                group.landing[number] = (made, held)
            return group.landing[number]

        group.outbound.finish(group.under, lambda number: (group.matrices[number], self.wholes[number].box), landing)
        for number, (direction, held) in sorted(group.landing.items()):
            matrix = self.wholes[number]
            own = moving[matrix.parameter]
            piece = own.param[held.within(own.box)]
            self.rules[number].post(piece, direction, matrix.rows_columns, lr=own.lr, update=own.update)
        group.matrices.clear()
        group.landing.clear()

    def _box(self, number: int, moving: Mapping[int, Moving]) -> Box | None:
        matrix = self.wholes[number]
        return moving[matrix.parameter].box.meet(matrix.box)


def _device(moving: Mapping[int, Moving]) -> torch.device:
    return next(iter(moving.values())).param.device
