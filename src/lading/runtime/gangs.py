"""Gangs, several ranks that compute one matrix's direction together, and stacks, several matrices that one computes.

Of a gang each rank computes some blocks of rows of every product.

Its owner, the first of the gang, tells the others the matrix; after each product all get each other's rows, so that all
end with the whole direction. Blocks follow from the matrix's shape alone (``SharedRule.blocks``), so that bits do not
depend on how many share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import cast

import torch
import torch.distributed as dist

from lading.optim.rule import Rule, SharedRule, StackedRule, States
from lading.runtime.exchange import FAILURES, RuleFailures, Team, Traffic

#: Most elements that are copied into one stack: matrices so large that few fit keep a device busy alone.
_STACKED_ELEMENTS = 1 << 25


class Gang:
    """Ranks of a team that share matrices; each makes one with the same ranks."""

    def __init__(self, team: Team, ranks: Sequence[int]) -> None:
        """Make the gang of these ranks, numbered within the team; the first owns."""
        self._rank, self._ranks = team.rank, sorted(ranks)
        self._owner = team.members[ranks[0]]
        self._group = team.part(self._ranks)

    def direction(self, rule: SharedRule, matrix: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        """Compute the direction of a matrix together; every rank of the gang returns all of it.

        Args:
            matrix: (rows, columns), contiguous; the owner's values count, on the others they are overwritten.
        """
        dist.broadcast(matrix, src=self._owner, group=self._group)
        self._count(traffic, matrix.numel() if dist.get_rank() == self._owner else 0)
        blocks = rule.blocks(min(matrix.shape))
        shares = [blocks[len(blocks) * k // len(self._ranks) : len(blocks) * (k + 1) // len(self._ranks)]
                  for k in range(len(self._ranks))]  # fmt: skip
        rows = [sum(block.stop - block.start for block in share) for share in shares]
        place = self._ranks.index(self._rank)

        def meet(product: torch.Tensor) -> torch.Tensor:
            """Gather every rank's rows of a product."""
            columns, start = product.shape[1], sum(rows[:place])
            rows_here = product[start : start + rows[place]].reshape(-1)
            arrived = torch.empty_like(product)
            send_counts, receive_counts = [rows_here.numel()] * len(rows), [count * columns for count in rows]
            dist.all_to_all_single(
                arrived.view(-1), rows_here.repeat(len(rows)), receive_counts, send_counts, group=self._group
            )
            self._count(traffic, rows_here.numel())
            return arrived

        return rule.by_blocks(matrix, shares[place], meet)

    def _count(self, traffic: Traffic, elements: int) -> None:
        traffic.collectives += 1
        traffic.elements += elements * (len(self._ranks) - 1)


def gangs_of(ranks: Sequence[tuple[int, ...]], team: Team) -> dict[int, Gang]:
    """Make the gangs that this rank is in, by matrix; equal gangs are one.

    A rank that is not in a gang makes a process group of its own, so that all have made as many (``Team.level``).
    """
    gang_by_ranks: dict[tuple[int, ...], Gang] = {}
    several = sorted({gang for gang in ranks if len(gang) > 1})
    if several:
        team.level()
    for gang in several:
        if team.rank in gang:
            gang_by_ranks[gang] = Gang(team, gang)
        else:
            team.part([team.rank])
    return {number: gang_by_ranks[gang] for number, gang in enumerate(ranks) if len(gang) > 1 and gang in gang_by_ranks}


def shared_of(numbers: Iterable[int], gangs: Mapping[int, Gang]) -> list[int]:
    """Matrices that this rank shares; all compute them first, in this one order, so that none waits in a circle."""
    return sorted(number for number in numbers if number in gangs)


def stacks_of(matrices: Mapping[int, tuple[Rule, tuple[int, int], torch.dtype]], *, batched: bool) -> list[list[int]]:
    """Group matrices whose directions one call computes: alike, under equal settings of a rule that stacks.

    Args:
        matrices: Rule, (rows, columns) and dtype of matrices that this rank alone computes, by number.
        batched: Whether any are stacked.
    """
    stacks: list[list[int]] = []
    last: dict[object, list[int]] = {}
    for number in sorted(matrices):
        rule, shape, dtype = matrices[number]
        key = (shape, dtype, rule.settings) if batched and isinstance(rule, StackedRule) else number
        stack = last.get(key)
        if stack is None or (len(stack) + 1) * prod(shape) > _STACKED_ELEMENTS:
            stack = last[key] = []
            stacks.append(stack)
        stack.append(number)
    return stacks


def directions_of(
    rule: Rule, matrices: Sequence[torch.Tensor], states: States, update: int, failures: RuleFailures
) -> Sequence[torch.Tensor]:
    """Directions of a stack's matrices, (rows, columns) each; zeros, and a failure noted, where the rule raises."""
    try:
        if len(matrices) > 1:
            return cast(StackedRule, rule).directions(torch.stack(list(matrices))).unbind()
        return [rule.direction(matrices[0], states, update)]
    except FAILURES as error:  # zeros travel, and all ranks are told at the end
        failures.last = error
        return [torch.zeros_like(matrix) for matrix in matrices]


def shares(rule: Rule, rows_columns: tuple[int, int]) -> list[float]:
    """Largest share of a matrix's work that one of 2, 4, 8 and 16 ranks has; as many entries as it can be shared by."""
    if not rule.shared:
        return []
    blocks = len(cast(SharedRule, rule).blocks(min(rows_columns)))
    return [-(-blocks // ranks) / blocks for ranks in (2, 4, 8, 16) if ranks <= blocks]
