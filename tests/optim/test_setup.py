"""Set-up of owners: what each rank computes before the first step, for many matrices on many ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from lading.ir.routes import RoutedShard, ShardRegion, WholeMatrix, pieces, wholes_of
from lading.planner.owners import Matrix, Owners, assign, spread_turns


def _rows(shape: tuple[int, ...], ranks: int) -> list[ShardRegion]:
    """Regions of FSDP2, cut by rows."""
    size = -(-shape[0] // ranks)
    starts = [min(rank * size, shape[0]) for rank in range(ranks)]
    rest = (0,) * (len(shape) - 1)
    return [ShardRegion((a, *rest), (min(a + size, shape[0]) - a, *shape[1:])) for a in starts]


def _matrices(wholes: Sequence[WholeMatrix]) -> list[Matrix]:
    return [Matrix(w.name, float(w.region.size), w.region.size, turn=n % 3) for n, w in enumerate(wholes)]


def test_owners_of_a_mixture_are_set_up_in_no_time() -> None:
    """Six layers of Qwen3-30B-A3B, an eighth, on 256 ranks: 2 s where each matrix asks each rank, a tenth now."""
    ranks, shapes = 256, [(4096, 2048), (512, 2048), (128, 2048, 768), (128, 2048, 768), (128, 768, 2048)] * 6
    start = time.process_time()
    wholes = [whole for number, shape in enumerate(shapes) for whole in wholes_of(number, str(number), shape)]
    items = _matrices(wholes)
    owners = spread_turns(items, assign(items, ranks))
    pieces(wholes, [_rows(shape, ranks) for shape in shapes], [gang[0] for gang in owners.ranks])
    assert time.process_time() - start < 1


def _each_rank_asked(
    wholes: Sequence[WholeMatrix], holdings: Sequence[Sequence[ShardRegion]], owners: Sequence[int]
) -> tuple[list[RoutedShard], list[RoutedShard]]:
    """Routes, as found by meeting every region with every matrix."""
    inbound, outbound, sent = list[RoutedShard](), list[RoutedShard](), [0] * len(holdings[0])
    for number, (whole, owner) in enumerate(zip(wholes, owners, strict=True)):
        held = [(region.meet(whole.region), rank) for rank, region in enumerate(holdings[whole.parameter])]
        outbound += [RoutedShard(number, region, owner, rank) for region, rank in held if region]
        for region in sorted({region for region, _ in held if region}):
            ranks = [rank for other, rank in held if other == region]
            source = owner if owner in ranks else min(ranks, key=lambda rank: (sent[rank], rank))
            sent[source] += region.size if source != owner else 0
            inbound.append(RoutedShard(number, region, source, owner))
    return inbound, outbound


def _each_slot_asked(matrices: Sequence[Matrix], owners: Owners) -> Owners:
    """Turns spread by looking for the best slot among all."""
    ranks, due = list(owners.ranks), dict[tuple[int, int], float]()
    for seconds in sorted({m.seconds for m in matrices}, reverse=True):
        numbers = [n for n, m in enumerate(matrices) if m.seconds == seconds]
        slots = sorted(owners.ranks[number] for number in numbers)
        for number in sorted(numbers, key=lambda i: (matrices[i].turn, matrices[i].name)):
            turn = matrices[number].turn
            ranks[number] = min(slots, key=lambda gang: (due.get((gang[0], turn), 0.0), gang))
            slots.remove(ranks[number])
            due[ranks[number][0], turn] = due.get((ranks[number][0], turn), 0.0) + seconds
    return replace(owners, ranks=tuple(ranks))


def test_routes_and_turns_are_those_of_asking_everyone() -> None:
    draw = random.Random(3)
    for _ in range(20):
        ranks = draw.randint(1, 6)
        shapes = [(draw.choice((2, 5, 8)), draw.choice((3, 4)), 2)[: draw.choice((2, 3))] for _ in range(4)]
        wholes = [whole for number, shape in enumerate(shapes) for whole in wholes_of(number, str(number), shape)]
        items = _matrices(wholes)
        assigned = assign(items, ranks)
        owners = spread_turns(items, assigned)
        assert owners == _each_slot_asked(items, assigned)
        holdings = [_rows(shape, ranks) for shape in shapes]
        if draw.random() < 0.5:  # replicas of halves
            holdings = [[row[rank // 2] for rank in range(ranks)] for row in (_rows(s, -(-ranks // 2)) for s in shapes)]
        owner = [gang[0] for gang in owners.ranks]
        assert pieces(wholes, holdings, owner) == _each_rank_asked(wholes, holdings, owner)
