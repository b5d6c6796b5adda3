"""Ways to group a model's parameters: by blocks and parts of blocks, some apart, and what is near a grouping."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lading.ir.plan import UnitResidency
from lading.sim.buckets import Bucket
from lading.sim.modules import Modules


def runs(modules: Modules) -> list[int]:
    """Count the blocks in a row up to each place of the model; 0 outside of blocks."""
    block_runs = [0]
    for _, path in modules.order:
        block_runs.append(block_runs[-1] + 1 if path else 0)
    return block_runs


def keeping(buckets: tuple[Bucket, ...], first: int, last: int, keep: UnitResidency) -> tuple[Bucket, ...]:
    """Keep atoms ``first`` to ``last`` gathered, apart from the rest of the bucket they are in."""
    split_buckets: list[Bucket] = []
    for bucket in buckets:
        if last < bucket.first or first > bucket.last:
            split_buckets.append(bucket)
            continue
        if bucket.first < first:
            split_buckets.append(replace(bucket, last=first - 1))
        split_buckets.append(replace(bucket, first=max(first, bucket.first), last=min(last, bucket.last), keep=keep))
        if last < bucket.last:
            split_buckets.append(replace(bucket, first=last + 1))
    return tuple(split_buckets)


def children(modules: Modules, first: int, last: int) -> list[tuple[int, int]]:
    """Split a bucket by the modules in it, one level down: (first, last) atom of each; none for a single atom."""
    if first == last:
        return []
    atoms = range(first, last + 1)
    paths = [_path(modules, atom) for atom in atoms]
    depth = 0
    while len({tuple(path[: depth + 1]) for path in paths}) == 1:
        depth += 1
    parts: list[tuple[int, int]] = []
    for atom, path in zip(atoms, paths, strict=True):
        module_path = tuple(path[: depth + 1])
        if parts and module_path == tuple(paths[parts[-1][0] - first][: depth + 1]):
            parts[-1] = (parts[-1][0], atom)
        else:
            parts.append((atom, atom))
    return parts


def _path(modules: Modules, number: int) -> list[str]:
    """Path of modules from the model down to an atom; a list and a place in it count as one."""
    path = modules.order[modules.atoms[number][0]][1]
    return [*([path] if path else []), *modules.atom(number).module.split("."), str(number)]


def partition(modules: Modules, size: int) -> list[tuple[int, int]]:
    """Partition all atoms into buckets of so many blocks, 0 for half a block; what is outside of blocks is apart.

    Returns:
        First and last atom of each bucket.
    """
    spans: list[tuple[int, int]] = []
    filled = 0
    start = 0
    for block, path in modules.order:
        stop = start + len(modules.blocks[block].atoms)
        if stop == start:
            continue
        if path and size > 1 and filled % size:
            spans[-1] = (spans[-1][0], stop - 1)
        elif path and not size:
            spans += halves(modules, start, stop - 1)
        else:
            spans.append((start, stop - 1))
        filled = filled + 1 if path else 0
        start = stop
    return spans


def halves(modules: Modules, first: int, last: int) -> list[tuple[int, int]]:
    """Cut a block between two of its modules so that the halves are as equal as can be."""
    parts = children(modules, first, last)
    if len(parts) < 2:
        return [(first, last)]
    counts = [sum(modules.atom(n).count for n in range(low, high + 1)) for low, high in parts]
    cut = min(range(1, len(parts)), key=lambda n: abs(sum(counts[:n]) - sum(counts[n:])))
    return [(first, parts[cut][0] - 1), (parts[cut][0], last)]


def borders(modules: Modules) -> list[int]:
    """List the atoms at which a bucket may begin: the first of each block and of each half of one."""
    whole = {first for first, _ in partition(modules, 1)}
    return sorted(whole | {first for first, _ in partition(modules, 0)})


def neighbors(
    buckets: tuple[Bucket, ...], cuts: Sequence[int], stays: Sequence[UnitResidency]
) -> Iterator[tuple[Bucket, ...]]:
    """Yield groupings near one: a border moved, left out or put in, or one bucket that stays or is asked for otherwise.

    Args:
        cuts: Atoms at which buckets may begin.
        stays: Ways in which they may stay.
    """
    for n, bucket in enumerate(buckets):
        before, after = buckets[:n], buckets[n + 1 :]
        if after:
            yield from _bordering(before, bucket, after, cuts)
        inside = [cut for cut in cuts if bucket.first < cut <= bucket.last]
        for cut in dict.fromkeys(inside[len(inside) * part // 4] for part in (1, 2, 3)) if inside else ():
            yield (*before, replace(bucket, last=cut - 1), replace(bucket, first=cut), *after)
        for keep in stays:
            if keep is not bucket.keep:
                yield (*before, replace(bucket, keep=keep), *after)
        for ahead in {1, 2, 3} - {bucket.ahead_forward}:
            yield (*before, replace(bucket, ahead_forward=ahead), *after)
        for ahead in {1, 2, 3} - {bucket.ahead_backward}:
            yield (*before, replace(bucket, ahead_backward=ahead), *after)


def _bordering(
    before: tuple[Bucket, ...], one: Bucket, after: tuple[Bucket, ...], cuts: Sequence[int]
) -> Iterator[tuple[Bucket, ...]]:
    """Yield groupings in which two neighbors are one bucket, or have their border elsewhere."""
    other, *rest = after
    for residency in dict.fromkeys((one.keep, other.keep)):
        yield (*before, replace(one, last=other.last, keep=residency), *rest)
    at = bisect_left(cuts, other.first)
    for step in (1, -1, 2, -2, 4, -4):
        if 0 <= at + step < len(cuts) and one.first < cuts[at + step] <= other.last:
            cut = cuts[at + step]
            yield (*before, replace(one, last=cut - 1), replace(other, first=cut), *rest)
