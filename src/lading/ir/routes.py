"""Routes: which piece of which matrix goes from which rank to which, so that owners see whole matrices.

Every rank holds a region of each parameter (its shard, all of it, or nothing). A matrix is a region of a parameter,
too: all of it, a projection of a fused one, or one expert of a stack. Pieces are where the regions meet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

from lading.errors import ConfigError


class ShardRegion(NamedTuple):
    """Region of a tensor: its offset and its lengths, in elements by dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def meet(self, other: ShardRegion) -> ShardRegion | None:
        """Intersection with another region; None if it is empty."""
        offset: list[int] = []
        shape: list[int] = []
        for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, end = max(a, b), min(a + m, b + n)
            if start >= end:
                return None
            offset.append(start)
            shape.append(end - start)
        return ShardRegion(tuple(offset), tuple(shape))

    def slices_in(self, other: ShardRegion) -> tuple[slice, ...]:
        """Slices that pick this region out of a tensor that holds the region ``other``, which contains it."""
        starts = [a - b for a, b in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class WholeMatrix:
    """Matrix that one rank is to see whole: a region of parameter number ``parameter`` with two lengths above 1."""

    name: str
    parameter: int
    region: ShardRegion

    @property
    def rows_columns(self) -> tuple[int, int]:
        """Rows and columns of the matrix: its last two lengths."""
        return self.region.shape[-2], self.region.shape[-1]


class RoutedShard(NamedTuple):
    """Shard of a matrix that one rank sends to another, or keeps."""

    whole: int
    region: ShardRegion
    source: int
    target: int


def wholes_of(parameter: int, name: str, shape: Sequence[int], parts: Sequence[int] = ()) -> list[WholeMatrix]:
    """The matrices of a parameter: it, its parts by rows, or for a stack of three dims one for each of the first.

    Args:
        parts: Rows of each part of a fused parameter (q, k, v; gate and up); () for one matrix.
    Raises:
        ConfigError: it is no matrix and no stack, or parts do not add up to its rows.
    """
    if len(shape) not in (2, 3) or not prod(shape):
        raise ConfigError(
            f"{name}: expected a matrix or a stack of matrices, got shape {tuple(shape)}; "
            "give it to a rule that works on elements"
        )
    rows = shape[-2]
    if parts and sum(parts) != rows:
        raise ConfigError(f"{name}: expected parts that add up to its {rows} rows, got {tuple(parts)}")
    lengths = list(parts) or [rows]
    matrices: list[WholeMatrix] = []
    for stacked in range(shape[0] if len(shape) == 3 else 1):
        start = 0
        for number, length in enumerate(lengths):
            offset = (stacked, start, 0) if len(shape) == 3 else (start, 0)
            size = (1, length, shape[-1]) if len(shape) == 3 else (length, shape[-1])
            label = name + (f"[{stacked}]" if len(shape) == 3 else "") + (f".{number}" if parts else "")
            matrices.append(WholeMatrix(label, parameter, ShardRegion(offset, size)))
            start += length
    return matrices


def pieces(
    wholes: Sequence[WholeMatrix], holdings: Sequence[Sequence[ShardRegion]], owners: Sequence[int]
) -> tuple[list[RoutedShard], list[RoutedShard]]:
    """Route shards of matrices to their owners, and back to whoever holds them.

    Of several ranks that hold the same, the owner itself sends, or else the one that has sent least so far.

    Args:
        holdings: Regions by parameter and rank; those of one parameter are equal or apart.
        owners: Rank that owns each matrix.
    Raises:
        ConfigError: some of a matrix is held by no rank.
    """
    inbound: list[RoutedShard] = []
    outbound: list[RoutedShard] = []
    sent_elements = [0] * (max(map(len, holdings)) if holdings else 0)
    rows: dict[tuple[ShardRegion, ...], _RegionsByRows] = {}  # a model has few kinds of parameters
    for key in map(tuple, holdings):
        if key not in rows:
            rows[key] = _RegionsByRows(key)
    by_rows = [rows[tuple(regions)] for regions in holdings]
    for number, (matrix, owner) in enumerate(zip(wholes, owners, strict=True)):
        holders, held_regions, covered = by_rows[matrix.parameter].holders(matrix.region)
        outbound.extend([RoutedShard(number, region, owner, rank) for rank, region in held_regions])
        if covered != matrix.region.size:
            raise ConfigError(
                f"{matrix.name}: expected its {matrix.region.size} elements on the ranks once each, found {covered} in "
                f"{len(holders)} different pieces; placements other than shards and replicas cannot be routed"
            )
        for region, ranks in holders:
            source = owner if owner in ranks else min(ranks, key=lambda rank: (sent_elements[rank], rank))
            sent_elements[source] += region.size if source != owner else 0
            inbound.append(RoutedShard(number, region, source, owner))
    return inbound, outbound


class _RegionsByRows:
    """Regions that ranks have of parameters, sorted by offset in the first dim, so that few are tried."""

    def __init__(self, regions: Sequence[ShardRegion]) -> None:
        ranks: dict[ShardRegion, list[int]] = {}
        for rank, region in enumerate(regions):
            ranks.setdefault(region, []).append(rank)
        self._ranks = sorted((pair for pair in ranks.items() if pair[0].size), key=lambda pair: pair[0].offset)
        self._starts = [region.offset[0] for region, _ in self._ranks]
        self._longest = max((region.shape[0] for region, _ in self._ranks), default=0)

        self._holders: dict[ShardRegion, _Holders] = {}

    def holders(self, whole: ShardRegion) -> _Holders:
        """Find the ranks that have some of ``whole``."""
        if whole not in self._holders:
            start, end = whole.offset[0], whole.offset[0] + whole.shape[0]
            first, last = bisect_right(self._starts, start - self._longest), bisect_left(self._starts, end)
            ranks_by_region: dict[ShardRegion, list[int]] = {}
            for region, ranks in self._ranks[first:last]:
                common = region.meet(whole)
                if common is not None:
                    ranks_by_region.setdefault(common, []).extend(ranks)
            by_region = [(region, sorted(ranks)) for region, ranks in sorted(ranks_by_region.items())]
            by_rank = sorted((rank, region) for region, ranks in by_region for rank in ranks)
            self._holders[whole] = _Holders(by_region, by_rank, sum(region.size for region in ranks_by_region))
        return self._holders[whole]


class _Holders(NamedTuple):
    """Ranks that have some of a matrix, by the region that they have of it and in order, and elements on any."""

    by_region: list[tuple[ShardRegion, list[int]]]
    by_rank: list[tuple[int, ShardRegion]]
    elements: int


def micro_groups(seconds: Sequence[float], owners: Sequence[int], groups: int) -> list[list[int]]:
    """Split matrices into groups such that each owner has about the same work in each.

    Each owner's own list is cut by where the middle of a matrix falls in its work; the order is that of the matrices.

    Args:
        seconds: Seconds of each matrix.
        groups: At least 1; empty groups are left out.
    """
    members: list[list[int]] = [[] for _ in range(groups)]
    cost_by_owner: dict[int, float] = {}
    total: dict[int, float] = {}
    for cost, owner in zip(seconds, owners, strict=True):
        total[owner] = total.get(owner, 0.0) + cost
    for number, (cost, owner) in enumerate(zip(seconds, owners, strict=True)):
        middle = cost_by_owner.get(owner, 0.0) + cost / 2
        cost_by_owner[owner] = cost_by_owner.get(owner, 0.0) + cost
        share = middle / total[owner] if total[owner] else 0.0
        members[min(groups - 1, int(share * groups))].append(number)
    return [group for group in members if group]


@dataclass(frozen=True)
class Moves:
    """Elements that come to a rank in a step, shards of matrices and of their directions.

    Attributes:
        busiest: To the rank that gets most.
        balanced: To some rank, whoever owns what: the mean over ranks if every owner were the one that moves least.
    """

    busiest: int
    balanced: int


def moves_of(routes: tuple[Sequence[RoutedShard], Sequence[RoutedShard]], ranks: int) -> Moves:
    """Count the elements that travel to owners and back (``pieces``)."""
    received_elements = [0] * ranks
    for piece in chain(*routes):
        if piece.source != piece.target:
            received_elements[piece.target] += piece.region.size
    by_whole: dict[int, list[RoutedShard]] = {}
    for piece in routes[1]:
        by_whole.setdefault(piece.whole, []).append(piece)
    total = 0
    for outbound in by_whole.values():
        sizes = {piece.region: piece.region.size for piece in outbound}
        everyone = sum(sizes[piece.region] for piece in outbound)
        # An owner gets what it has not, and all but it get their direction.
        total += sum(sizes.values()) + everyone - 2 * max(sizes.values())
    return Moves(max(received_elements, default=0), -(-total // ranks))
