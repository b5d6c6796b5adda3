"""Gangs: several ranks that compute one matrix's direction together, each some blocks of rows of every product.

Its owner, the first of the gang, tells the others the matrix; after each product all get each other's rows, so that all
end with the whole direction. Blocks follow from the matrix's shape alone (``SharedRule.blocks``), so that
bits do not depend on how many share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist

from lading.optim.rule import Rule, SharedRule
from lading.runtime.exchange import Team, Traffic


class Gang:
    """Ranks of a team that share matrices; each makes one with the same ranks."""

    def __init__(self, team: Team, ranks: Sequence[int]) -> None:
        """Of ranks within the team; the first owns."""
        self._rank, self._ranks = team.rank, sorted(ranks)
        self._owner = team.members[ranks[0]]
        self._group = team.part(self._ranks)

    def direction(self, rule: SharedRule, matrix: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        """Of a matrix, on all of them.

        Args:
            matrix: (rows, columns), contiguous; what it holds counts with the owner alone.
        """
        dist.broadcast(matrix, src=self._owner, group=self._group)
        self._count(traffic, matrix.numel() if dist.get_rank() == self._owner else 0)
        blocks = rule.blocks(min(matrix.shape))
        shares = [blocks[len(blocks) * k // len(self._ranks) : len(blocks) * (k + 1) // len(self._ranks)]
                  for k in range(len(self._ranks))]  # fmt: skip
        rows = [sum(block.stop - block.start for block in share) for share in shares]
        place = self._ranks.index(self._rank)

        def meet(product: torch.Tensor) -> torch.Tensor:
            """Everyone's rows."""
            columns, start = product.shape[1], sum(rows[:place])
            own = product[start : start + rows[place]].reshape(-1)
            arrived = torch.empty_like(product)
            given, taken = [own.numel()] * len(rows), [count * columns for count in rows]
            dist.all_to_all_single(arrived.view(-1), own.repeat(len(rows)), taken, given, group=self._group)
            self._count(traffic, own.numel())
            return arrived

        return rule.by_blocks(matrix, shares[place], meet)

    def _count(self, traffic: Traffic, elements: int) -> None:
        traffic.collectives += 1
        traffic.elements += elements * (len(self._ranks) - 1)


def gangs_of(ranks: Sequence[tuple[int, ...]], team: Team) -> dict[int, Gang]:
    """By matrix, of those that this rank shares with others; equal gangs are one.

    Whoever is not in one makes one of its own, so that all have made as many (``Team.level``).
    """
    made: dict[tuple[int, ...], Gang] = {}
    several = sorted({gang for gang in ranks if len(gang) > 1})
    if several:
        team.level()
    for gang in several:
        if team.rank in gang:
            made[gang] = Gang(team, gang)
        else:
            team.part([team.rank])
    return {number: made[gang] for number, gang in enumerate(ranks) if len(gang) > 1 and gang in made}


def together_first(numbers: Sequence[int], gangs: Mapping[int, Gang]) -> list[int]:
    """Matrices in the order in which they are computed: shared ones in one order on all ranks, so that none waits for
    one that waits for it."""
    return sorted(numbers, key=lambda number: (number not in gangs, number))


def shares(rule: Rule, rows_columns: tuple[int, int]) -> list[float]:
    """Of a matrix's work, what each of 2, 4, 8 and 16 ranks that share it has; as far as it can be shared."""
    if not rule.shared:
        return []
    blocks = len(cast(SharedRule, rule).blocks(min(rows_columns)))
    return [-(-blocks // ranks) / blocks for ranks in (2, 4, 8, 16) if ranks <= blocks]
