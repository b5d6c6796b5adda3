"""Contiguous parts of pipelines, as simulated: every cut where they are few, else the best one's neighbors.

What the dynamic program minimizes for several micro-batches, L + (M - 1) B, is not all that a pipeline does: where a
part waits for another, and where memory holds micro-batches back, the simulation knows better. ``refined`` simulates
every contiguous placement where that is affordable, so that the fastest is exact. Else it moves borders, exchanges
devices and takes one part more or fewer, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import comb, perm

from lading.ir.placement import Placement
from lading.planner.placement.trial import Trial, key_of

#: Groups that a border moves over at once.
_MOVES = (1, 2, 4)
_Parts = tuple[tuple[int, ...], tuple[int, ...]]  # devices in order, and the first group of each


def refined(trial: Trial, starts: Sequence[Placement], effort: float) -> Placement:
    """The best contiguous placement found, one of ``starts`` or another.

    Args:
        starts: At least one; of each order of devices the best is improved.
        effort: How much is simulated, in units of 100,000 tasks and flows.
    """
    groups, devices = len(trial.problem.groups), len(trial.problem.network.devices)
    most = trial.affordable(effort)
    count = sum(comb(groups - 1, parts - 1) * perm(devices, parts) for parts in range(1, min(devices, groups) + 1))
    if count <= most:
        return min(_placed(trial, _all(groups, devices), starts[0]), key=lambda p: _key(trial, p))
    ranked = sorted(starts, key=lambda p: _key(trial, p))
    distinct = {tuple(part.device for part in p.parts): p for p in reversed(ranked)}
    climbed = [_climbed(trial, start, most // len(distinct)) for start in distinct.values()]
    return min([ranked[0], *climbed], key=lambda p: _key(trial, p))


def _climbed(trial: Trial, start: Placement, most: int) -> Placement:
    """From neighbor to better neighbor, over at most so many."""
    groups, devices = len(trial.problem.groups), len(trial.problem.network.devices)
    best, left = start, most
    while left > 0:
        near = list(_near(best, groups, devices))[:left]
        left -= len(near)
        found = min(_placed(trial, near, best), key=lambda p: _key(trial, p))
        if found is best or not near:
            break
        best = found
    return best


def _key(trial: Trial, placement: Placement) -> tuple[int, float]:
    return key_of(placement, trial.problem.network.memory_bytes)


def _placed(trial: Trial, options: Sequence[_Parts] | Iterator[_Parts], start: Placement) -> Iterator[Placement]:
    """The start, then each option that can run."""
    yield start
    groups = len(trial.problem.groups)
    for order, starts in options:
        ends = (*starts[1:], groups)
        devices = [d for d, a, b in zip(order, starts, ends, strict=True) for _ in range(a, b)]
        if trial.can_run(devices):
            yield trial.of(devices, start.policy)


def _all(groups: int, devices: int) -> Iterator[_Parts]:
    for parts in range(1, min(devices, groups) + 1):
        for cuts in combinations(range(1, groups), parts - 1):
            for order in permutations(range(devices), parts):
                yield order, (0, *cuts)


def _near(placement: Placement, groups: int, devices: int) -> Iterator[_Parts]:
    """Placements that differ in one border, one device or one part."""
    order = tuple(part.device for part in placement.parts)
    starts = tuple(part.first for part in placement.parts)
    for place in range(1, len(starts)):
        low, high = starts[place - 1] + 1, (*starts[place + 1 :], groups)[0] - 1
        for move in (sign * size for size in _MOVES for sign in (-1, 1)):
            if low <= starts[place] + move <= high:
                yield order, (*starts[:place], starts[place] + move, *starts[place + 1 :])
    for a, b in combinations(range(len(order)), 2):
        changed = list(order)
        changed[a], changed[b] = changed[b], changed[a]
        yield tuple(changed), starts
    unused = [device for device in range(devices) if device not in order]
    for place in range(len(order)):
        end = (*starts[place + 1 :], groups)[0]
        middle = (starts[place] + end) // 2
        for device in unused:
            yield (*order[:place], device, *order[place + 1 :]), starts
            if middle > starts[place]:
                split = (*starts[: place + 1], middle, *starts[place + 1 :])
                yield (*order[: place + 1], device, *order[place + 1 :]), split
        if len(order) > 1:  # its groups go to the part before, of the first to the one behind
            kept = [first for n, first in enumerate(starts) if n != max(place, 1)]
            yield (*order[:place], *order[place + 1 :]), tuple(kept)
