"""Owners as others choose them, to compare with ``lading.planner.owners``; none of them minds a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lading.planner.owners import Loads, Matrix, Owners, bound_s, fill_largest_first, owners_of


def largest_first(matrices: Sequence[Matrix], ranks: int) -> Owners:
    """Largest first to the least loaded rank, over all layers."""
    loads = fill_largest_first(matrices, ranks, None)
    assert loads is not None
    return owners_of("largest-first", matrices, loads, bound_s(matrices, ranks))


def round_robin(matrices: Sequence[Matrix], ranks: int) -> Owners:
    """In order, one after another (Jordan's own distributed Muon)."""
    return _owned("round-robin", matrices, ranks, [number % ranks for number in range(len(matrices))])


def by_layer(matrices: Sequence[Matrix], ranks: int) -> Owners:
    """Largest first within each layer, whose bucket ends before the next begins."""
    owner: list[int] = [0] * len(matrices)
    loads = np.zeros(ranks)
    for layer in sorted({m.layer for m in matrices}):
        numbers = [i for i, m in enumerate(matrices) if m.layer == layer]
        own = np.full(ranks, loads.max())
        for number in sorted(numbers, key=lambda i: (-matrices[i].seconds, i)):
            owner[number] = int(own.argmin())
            own[owner[number]] += matrices[number].seconds
        loads = own
    found = tuple((rank,) for rank in owner)
    return Owners("by layer", found, tuple(loads.tolist()), bound_s(matrices, ranks))


def contiguous(matrices: Sequence[Matrix], ranks: int, alpha: float, *, bucket_elements: int = 400_000_000) -> Owners:
    """Contiguous cuts of each bucket, balanced by count: evenly (``alpha`` 0), or to even out what came before (1).

    Source: Canzona, https://arxiv.org/abs/2602.06079: cuts of a flat buffer moved to the boundaries of parameters.
    """
    owner: list[int] = []
    counted = np.zeros(ranks)
    target = sum(m.elements for m in matrices) / ranks
    for bucket in _buckets(matrices, bucket_elements):
        size = sum(matrices[i].elements for i in bucket)
        missing = np.maximum(0.0, target - counted)
        greedy = missing / missing.sum() * size if missing.sum() else np.full(ranks, size / ranks)
        ends = np.cumsum((1 - alpha) * size / ranks + alpha * greedy)
        owner.extend(_cut(matrices, bucket, ends, counted))
    return _owned(f"contiguous cuts, alpha {alpha:g}", matrices, ranks, owner)


def _buckets(matrices: Sequence[Matrix], most: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    size = 0
    for number, matrix in enumerate(matrices):
        if found[-1] and size + matrix.elements > most:
            found.append([])
            size = 0
        found[-1].append(number)
        size += matrix.elements
    return found


def _cut(matrices: Sequence[Matrix], bucket: Sequence[int], ends: np.ndarray, counted: np.ndarray) -> list[int]:
    """Owner of each of a bucket: cut at the boundary nearest to each end."""
    boundaries = np.concatenate([[0], np.cumsum([matrices[i].elements for i in bucket])])
    owners: list[int] = []
    start = 0
    for rank, end in enumerate(ends):
        last = len(bucket) if rank == len(ends) - 1 else max(start, int(np.abs(boundaries - end).argmin()))
        owners += [rank] * (last - start)
        counted[rank] += boundaries[last] - boundaries[start]
        start = last
    return owners


def _owned(policy: str, matrices: Sequence[Matrix], ranks: int, owner: Sequence[int]) -> Owners:
    loads = Loads(ranks, None)
    for number, (matrix, rank) in enumerate(zip(matrices, owner, strict=True)):
        loads.assign_matrix(number, matrix, (rank,), matrix.seconds)
    return owners_of(policy, matrices, loads, bound_s(matrices, ranks))


#: What else there is, by name.
POLICIES: dict[str, Callable[[Sequence[Matrix], int], Owners]] = {
    "largest-first": largest_first,
    "round-robin": round_robin,
    "contiguous-0": lambda matrices, ranks: contiguous(matrices, ranks, 0.0),
    "contiguous-1": lambda matrices, ranks: contiguous(matrices, ranks, 1.0),
    "by-layer": by_layer,
}
