"""Assignment of equal matrices to equal ranks: a model has a few shapes, so all that one rank may own can be listed.

[Note: patterns]
Matrices of equal seconds and state are of one kind j, of which there are n_j. A pattern x says how many of each kind a
rank owns; those of at most T seconds are few. With y_x ranks of pattern x, an assignment of at most T is

    sum over x of y_x <= R,    sum over x of x_j y_x >= n_j for each kind,    y whole                      `_packing`

over the patterns to which nothing can be added (Gilmore and Gomory, doi:10.1287/opre.9.6.849). Where there is none, no
assignment is as short as T: a makespan is the seconds of some pattern, so that those of the next longer one are a bound
(`shortest`). Where ranks share matrices, a pattern also has matrices that it works on with others, at most
`_MOST_SHARED`, largest gangs first. The ranks of one such list are a multiple of its largest gang: all of a gang begin
together and nobody waits (`shortest_shared`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

#: Ranks that may share a matrix.
GANGS = (2, 4, 8, 16)
#: More kinds, and more patterns at once, are not listed.
MOST_KINDS, _MOST_PATTERNS = 8, 4_000
#: Of each kind, so many on every rank are spread with what does not divide.
_HELD_BACK = 2
#: Matrices that a rank works on with others.
_MOST_SHARED = 3
#: Nodes of a search for whole numbers: so many prove or find it, or it stays open.
_NODES = 200
#: Seconds are equal within this share.
_SAME = 1e-9
#: With gangs, makespans are bisected down to this share; whole matrices this near to a bound are not searched on.
_NEAR, _CLOSE = 0.004, 1e-3


@dataclass(frozen=True)
class Kind:
    """Equal matrices: their number, seconds of one alone and on 2, 4, 8, 16 ranks, and bytes of one's whole state."""

    seconds: float
    state_bytes: int
    shared_s: tuple[float, ...]
    count: int


@dataclass(frozen=True)
class Pattern:
    """Matrices that one rank works on.

    Attributes:
        shared: (kind, position in ``GANGS``) of each matrix on which it works with others, largest gang first.
        unshared: Number of matrices of each kind that it owns alone.
    """

    shared: tuple[tuple[int, int], ...]
    unshared: tuple[int, ...]


#: Patterns, and how many ranks have each.
Packing = list[tuple[Pattern, int]]


@dataclass(frozen=True)
class Spread:
    """Whole matrices on ranks.

    Attributes:
        seconds: Seconds of the fullest rank.
        bound_s: Lower bound on the seconds of any assignment.
        mean_s: Mean seconds of all ranks.
        state_bytes: Largest bytes of whole states on one rank.
    """

    seconds: float
    bound_s: float
    mean_s: float
    state_bytes: int


def spread(kinds: tuple[Kind, ...], ranks: int) -> Spread:
    """Find a short assignment of whole matrices: equally many of each kind on every rank, then the rest.

    Args:
        kinds: Kinds of matrices, the longest update first.
    """
    mean_s = sum(kind.seconds * kind.count for kind in kinds) / ranks
    bound = max([mean_s, *(kind.seconds for kind in kinds if kind.count)])
    base = _on_every(kinds, ranks, bound)
    remaining = tuple(replace(kind, count=kind.count - ranks * n) for kind, n in zip(kinds, base, strict=True))
    even_s = sum(kind.seconds * n for kind, n in zip(kinds, base, strict=True))
    even_bytes = sum(kind.state_bytes * n for kind, n in zip(kinds, base, strict=True))
    high, max_state_bytes = _filled(remaining, ranks)
    low = max(bound - even_s, *(kind.seconds for kind in remaining if kind.count), 0.0)
    if len(kinds) <= MOST_KINDS and high > low * (1 + _CLOSE):
        bound_s, packing = shortest([kind for kind in remaining if kind.count], ranks, None, low, high)
        if not any(base):
            bound = max(bound, bound_s)
        if packing is not None:
            nonempty = [kind for kind in remaining if kind.count]
            high = max(seconds_of(nonempty, pattern) for pattern, _ in packing)
            max_state_bytes = max(
                sum(k.state_bytes * n for k, n in zip(nonempty, p.unshared, strict=True)) for p, _ in packing
            )
    return Spread(even_s + high, bound, mean_s, even_bytes + max_state_bytes)


def _on_every(kinds: Sequence[Kind], ranks: int, bound: float) -> list[int]:
    """Number of each kind that every rank gets, so that one more matrix still fits the bound on some ranks."""
    for share in (1.0, 0.75, 0.5, 0.25):
        base = [max(0, int(kind.count * share) // ranks - _HELD_BACK) for kind in kinds]
        even_s = sum(kind.seconds * n for kind, n in zip(kinds, base, strict=True))
        longest = max((k.seconds for k, n in zip(kinds, base, strict=True) if k.count > ranks * n), default=0.0)
        if even_s + longest <= bound:
            return base
    return [0] * len(kinds)


def _filled(kinds: Sequence[Kind], ranks: int) -> tuple[float, int]:
    """Seconds and bytes of the fullest rank when each kind, longest first, goes to the ranks with least work."""
    loads, state_bytes = np.zeros(ranks), np.zeros(ranks, dtype=np.int64)
    for kind in kinds:
        num_left = kind.count
        while num_left:
            number = min(num_left, ranks)
            least_loaded = np.argsort(loads, kind="stable")[:number]
            # No more at once than leaves those that get one behind the next that gets none.
            number = max(1, int(np.searchsorted(loads[least_loaded], loads[least_loaded[0]] + kind.seconds)))
            loads[least_loaded[:number]] += kind.seconds
            state_bytes[least_loaded[:number]] += kind.state_bytes
            num_left -= min(number, num_left)
    return float(loads.max()), int(state_bytes.max())


def shortest(
    kinds: Sequence[Kind], ranks: int, cap_bytes: int | None, low_s: float, high_s: float
) -> tuple[float, Packing | None]:
    """Find a bound that no assignment is below, and the shortest assignment ([Note: patterns]).

    Args:
        low_s, high_s: Known lower bound, and seconds of a known assignment.
    Returns:
        A lower bound, ``low_s`` or more; an assignment shorter than ``high_s``, None if none is found.
    """
    levels = _levels(kinds, cap_bytes, low_s, high_s)
    if levels is None:
        return low_s, None
    first, last, bound, best_packing = 0, len(levels), low_s, None
    while first < last:
        middle = (first + last) // 2
        patterns = list(itertools.islice(_patterns_within(kinds, cap_bytes, levels[middle], ()), _MOST_PATTERNS + 1))
        possible, packing = _packing(kinds, patterns, ranks)
        if packing is not None:
            last, best_packing = middle, packing
            continue
        if not possible:
            bound = levels[middle + 1] if middle + 1 < len(levels) else high_s
        first = middle + 1
    return max(bound, levels[0] if len(levels) else high_s), best_packing


def shortest_shared(
    kinds: Sequence[Kind], ranks: int, cap_bytes: int | None, low_s: float, high_s: float
) -> Packing | None:
    """Find by bisection an assignment with gangs that is shorter than ``high_s``; None if there is none."""
    best_packing: Packing | None = None
    while high_s > low_s * (1 + _NEAR):
        level = (low_s + high_s) / 2 if high_s < 1.2 * low_s else (low_s * 2 + high_s) / 3
        patterns = list(itertools.islice(_sharing(kinds, cap_bytes, level, ranks), _MOST_PATTERNS))
        _, packing = _packing(kinds, patterns, ranks)
        if packing is None:
            low_s = level
        else:
            best_packing, high_s = packing, max(seconds_of(kinds, pattern) for pattern, _ in packing)
    return best_packing


def seconds_of(kinds: Sequence[Kind], pattern: Pattern) -> float:
    """Seconds that a rank with this pattern works."""
    shared = sum(kinds[kind].shared_s[place] for kind, place in pattern.shared)
    return shared + sum(kind.seconds * count for kind, count in zip(kinds, pattern.unshared, strict=True))


def _levels(kinds: Sequence[Kind], cap_bytes: int | None, low_s: float, high_s: float) -> list[float] | None:
    """Distinct seconds of patterns from ``low_s`` to below ``high_s``, ascending; None if there are too many."""
    counts = [min(kind.count, int(high_s / kind.seconds)) + 1 for kind in kinds]
    if math.prod(counts) > 50 * _MOST_PATTERNS:
        return None
    grid = np.indices(counts).reshape(len(kinds), math.prod(counts))
    seconds = np.array([kind.seconds for kind in kinds]) @ grid
    within = (seconds >= low_s * (1 - _SAME)) & (seconds < high_s * (1 - 1e-6))
    if cap_bytes is not None:
        within &= np.array([kind.state_bytes for kind in kinds]) @ grid <= cap_bytes
    levels: list[float] = []
    for value in np.sort(seconds[within]).tolist():
        if not levels or value > levels[-1] * (1 + _SAME):
            levels.append(value)
    return levels


def _patterns_within(
    kinds: Sequence[Kind], cap_bytes: int | None, level: float, shared: tuple[tuple[int, int], ...]
) -> Iterator[Pattern]:
    """Patterns of at most ``level`` seconds with the given shared matrices and as many of the shortest kind as fit."""
    level -= sum(kinds[kind].shared_s[place] for kind, place in shared)
    room = np.inf if cap_bytes is None else cap_bytes - sum(kinds[kind].state_bytes for kind, _ in shared)
    if level < 0 or room < 0:
        return
    level *= 1 + _SAME
    counts = [min(kind.count, int(level / kind.seconds)) + 1 for kind in kinds[:-1]]
    if math.prod(counts) > 50 * _MOST_PATTERNS:
        return
    grid = np.indices(counts).reshape(len(counts), math.prod(counts))
    spare_s = level - np.array([kind.seconds for kind in kinds[:-1]]) @ grid
    free = room - np.array([kind.state_bytes for kind in kinds[:-1]], dtype=float) @ grid
    last = np.minimum(spare_s / kinds[-1].seconds, kinds[-1].count)
    if kinds[-1].state_bytes:
        last = np.minimum(last, free / kinds[-1].state_bytes)
    for place in np.flatnonzero((spare_s >= 0) & (free >= 0)).tolist():
        yield Pattern(shared, (*(int(n) for n in grid[:, place]), int(last[place] + _SAME)))


def _sharing(kinds: Sequence[Kind], cap_bytes: int | None, level: float, ranks: int) -> Iterator[Pattern]:
    """Patterns with and without gangs; kinds whose matrices take a small part of the level alone are not shared."""
    pieces = [
        (kind, place)
        for place in reversed(range(len(GANGS)))
        for kind, matrices in enumerate(kinds)
        if place < len(matrices.shared_s) and GANGS[place] <= ranks
        if matrices.seconds > level / 4 and matrices.shared_s[place] <= level
    ]
    yield from _patterns_within(kinds, cap_bytes, level, ())
    for length in range(1, _MOST_SHARED + 1):
        for shared in itertools.combinations_with_replacement(pieces, length):
            yield from _patterns_within(kinds, cap_bytes, level, shared)


def _packing(kinds: Sequence[Kind], patterns: Sequence[Pattern], ranks: int) -> tuple[bool, Packing | None]:
    """Whether ``ranks`` may be enough for all matrices, and the patterns of the ranks if an assignment was found.

    If there are more patterns than the list may have, the first answer is True.
    """
    import highspy

    if not patterns:
        return False, None
    if len(patterns) > _MOST_PATTERNS:
        return True, None
    alone = np.array([pattern.unshared for pattern in patterns], dtype=float)
    lists = {shared: n for n, shared in enumerate(dict.fromkeys(p.shared for p in patterns if p.shared))}
    counts = np.zeros((len(kinds) + len(lists) + 1, len(patterns) + len(lists)))
    counts[: len(kinds), : len(patterns)] = alone.T
    counts[-1, : len(patterns)] = 1.0
    for column, pattern in enumerate(patterns):
        for kind, place in pattern.shared:
            counts[kind, column] += 1 / GANGS[place]
        if pattern.shared:
            counts[len(kinds) + lists[pattern.shared], column] = 1.0
    for shared, number in lists.items():
        counts[len(kinds) + number, len(patterns) + number] = -GANGS[shared[0][1]]
    model = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1), ("mip_max_nodes", _NODES)):
        model.setOptionValue(option, value)
    columns, empty = counts.shape[1], np.empty(0, np.int32)
    model.addCols(
        columns, np.zeros(columns), np.zeros(columns), np.full(columns, float(ranks)), 0, empty, empty, np.empty(0)
    )
    low = np.array([*(float(kind.count) for kind in kinds), *(0.0 for _ in lists), 0.0])
    high = np.array([*(highspy.kHighsInf for _ in kinds), *(0.0 for _ in lists), float(ranks)])
    row, column = np.nonzero(counts)
    starts = np.searchsorted(row, np.arange(len(low))).astype(np.int32)
    model.addRows(len(low), low, high, len(row), starts, column.astype(np.int32), counts[row, column])
    model.changeColsIntegrality(
        columns, np.arange(columns, dtype=np.int32), np.full(columns, highspy.HighsVarType.kInteger)
    )
    model.run()
    if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return False, None
    values = np.rint(model.getSolution().col_value).astype(int)
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return True, None
    return True, [(pattern, int(n)) for pattern, n in zip(patterns, values, strict=False) if n]
