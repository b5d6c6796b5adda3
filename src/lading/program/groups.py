"""Emit the list of a rank whose parameters are gathered in groups that a plan chose.

[Note: chosen groups]
A plan may choose its own groups of parameters: modules in a row, how long each group stays, and how many behind it are
asked for as it begins (``emit_groups``). Those asked for early are what FSDP2 prefetches explicitly: the host asks for
them when the group before begins. With a distance of 1 in forward the host asks as the group itself begins; it runs
ahead, so the gather may begin once the group before has begun.
The order, and what waits for what, are otherwise as ``lading.program.emit`` says of FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lading.ir.action import ActionKind
from lading.ir.plan import UnitResidency
from lading.ir.program import ALL_UNITS, COMPUTE, NETWORK, ActionList, ParameterGroup, Program, Region
from lading.program.writer import ListWriter, Numbers


class GroupTiming(NamedTuple):
    """Choice about a group of parameters ([Note: chosen groups]).

    Attributes:
        keep: How long it stays unsharded.
        gather_again: Backward reads it, and so unshards what forward released.
        ahead_forward, ahead_backward: Number of groups behind it that are asked for when it begins, in forward and in
            backward.
        gathers: Number of times that backward gathers it.
        needs_no_network: Each rank has all of it: it is copied, which takes no network.
    """

    keep: UnitResidency = UnitResidency.RELEASE
    gather_again: bool = True
    ahead_forward: int = 1
    ahead_backward: int = 1
    gathers: int = 1
    needs_no_network: bool = False


class GroupTurn(NamedTuple):
    """A region, and the groups by number that begin before it and that end behind it."""

    begins: tuple[int, ...]
    region: Region
    ends: tuple[int, ...]


@dataclass(frozen=True)
class GroupedShape:
    """Facts that the list of a rank with chosen groups follows from, without a size.

    Attributes:
        groups: In the order of forward.
        passes: Forward and backward of one micro-batch.
        units: Units that regions count in.
        micro_batches: Number of them that are listed, from 1; ``num_repeats`` are as the last but one.
        overlap: Gathers and reductions run beside computing.
    """

    groups: tuple[GroupTiming, ...]
    passes: tuple[tuple[GroupTurn, ...], tuple[GroupTurn, ...]]
    units: int
    micro_batches: int
    num_repeats: int = 0
    overlap: bool = True


def emit_groups(shape: GroupedShape) -> Program:
    """Emit the list of a rank whose parameters are gathered in chosen groups ([Note: chosen groups])."""
    numbers = Numbers({}, {}, {})
    actions = _GroupedRank(shape, numbers).write()
    return Program(
        ranks=(actions,),
        regions=tuple(numbers.regions),
        storages=tuple(numbers.storages),
        uses=tuple(frozenset(numbers.uses.get(number, ())) for number in range(len(numbers.regions))),
        alike=(tuple(range(shape.units)),),
        repeat=(shape.micro_batches - 2, shape.num_repeats) if shape.num_repeats else (0, 0),
        schedule="1f1b",
    )


class _GroupedRank(ListWriter):
    """List of a rank with chosen groups."""

    def __init__(self, shape: GroupedShape, numbers: Numbers) -> None:
        super().__init__(numbers)
        self.shape = shape
        self.groups = [ParameterGroup(0, ALL_UNITS, "dp", number) for number in range(len(shape.groups))]
        self.asked: dict[int, int] = {}
        self.present: set[int] = set()
        self.began = -1  # last action on the compute stream when a group began last
        self.last_region = -1

    def write(self) -> ActionList:
        """Write the whole step."""
        for micro_batch in range(self.shape.micro_batches):
            for backward in (False, True):
                first = len(self.actions)
                self._pass(micro_batch, backward)
                kinds = self.actions.kind
                first = next(at for at in range(first, len(kinds)) if kinds[at] is ActionKind.COMPUTE)
                self.actions.rows.append((first, self.last_region))
                self.actions.sends.append(-1)
        self.await_network()
        self.last = self.actions.add(ActionKind.STEP, COMPUTE, self.take_pending())
        return self.actions

    def _pass(self, micro_batch: int, backward: bool) -> None:
        turns, groups = self.shape.passes[backward], self.shape.groups
        order = [number for turn in turns for number in turn.begins]
        under_way: list[int] = []
        place = 0
        for begins, region, ends in turns:
            for number in begins:
                self._begin(number, order[place + 1 :], micro_batch, backward, root=not (backward or place))
                under_way += [number] if groups[number].gather_again or not backward else []
                place += 1
            self.add_region(region, micro_batch, [self.groups[number] for number in under_way])
            self.last_region = self.last
            for number in ends:
                under_way = [unit for unit in under_way if unit != number]
                self._end(number, micro_batch, backward)

    def _begin(self, number: int, later: Sequence[int], micro_batch: int, backward: bool, *, root: bool) -> None:
        after = (*self.pending, self.last) if root else (self.last if backward else self.began,)
        self._ask(number, micro_batch, backward, after)
        if number in self.asked:
            self.pending.append(self.asked.pop(number))
        self.began = self.last
        group = self.shape.groups[number]
        ahead = group.ahead_backward if backward else group.ahead_forward
        if self.shape.overlap and (backward or ahead > 1):
            for unit in later[:ahead]:
                self._ask(unit, micro_batch, backward, (self.last,))

    def _ask(self, number: int, micro_batch: int, backward: bool, after: Sequence[int]) -> None:
        """Have a group gathered if it is not there and is read."""
        timing, group = self.shape.groups[number], self.groups[number]
        if number in self.present or (backward and not timing.gather_again):
            return
        self.present.add(number)
        for time in range(timing.gathers if backward else 1):
            if time:
                self.add_group(ActionKind.RESHARD, COMPUTE, group, micro_batch, ())
            if timing.needs_no_network:
                self.add_group(ActionKind.UNSHARD, COMPUTE, group, micro_batch, ())
            elif not self.shape.overlap:
                self.add_blocking(ActionKind.UNSHARD, group, micro_batch, group.axes)
            else:
                waits = tuple(action for action in after if action >= 0)
                self.asked[number] = self.add_group(ActionKind.UNSHARD, NETWORK, group, micro_batch, waits)

    def _end(self, number: int, micro_batch: int, backward: bool) -> None:
        timing, group = self.shape.groups[number], self.groups[number]
        last = micro_batch == self.shape.micro_batches - 1
        stays = (timing.keep.until_forward and not last) if backward else timing.keep.until_backward
        if number in self.present and not stays:
            self.present.remove(number)
            self.add_group(ActionKind.RESHARD, COMPUTE, group, micro_batch, ())
        if not backward:
            return
        if timing.needs_no_network:
            self.add_group(ActionKind.REDUCE_GRAD, COMPUTE, group, micro_batch, ())
        elif not self.shape.overlap:
            self.add_blocking(ActionKind.REDUCE_GRAD, group, micro_batch, group.axes)
        else:
            self.reduce_beside(group, micro_batch)
