"""Chunks: which segments each rank of a pipeline holds.

The layers are cut into ``pp * vpp`` stages; what is before them goes to the first, the head and the loss to the last.
Stage ``c * pp + r`` is chunk ``c`` of rank ``r``; in schedules that turn around (DualPipe-V) the second half of the
stages comes back in reverse, so that the first rank holds the last stage too.
"""

from __future__ import annotations

from collections.abc import Sequence

from lading.errors import ConfigError
from lading.ir.layout import Layout
from lading.ir.table import ModelTable

#: (segment, how often) in order of forward.
Chunk = tuple[tuple[int, int], ...]


def chunks(table: ModelTable, layout: Layout, layers: Sequence[int] = ()) -> tuple[tuple[Chunk, ...], ...]:
    """The model chunks of each rank of a pipeline.

    Args:
        layers: Layers of each stage, in order of forward; empty for as even as can be (see ``split_layers``).

    Returns:
        Of each rank its chunks in order of forward: (segment, count) pairs.

    Raises:
        ConfigError: fewer layers than stages, or ``layers`` is not one count for each stage adding up to the model's.
    """
    ends = _ends(table)
    blocks = range(ends[0], len(table.segments) - ends[1])
    total = sum(table.counts[i] for i in blocks)
    split = _checked(layers, total, layout) if layers else split_layers(total, layout)
    remaining = [(i, table.counts[i]) for i in blocks]
    stages: list[list[tuple[int, int]]] = []
    for count in split:
        stages.append(_take(remaining, count))
    stages[0][:0] = [(i, table.counts[i]) for i in range(ends[0])]
    stages[-1].extend((i, table.counts[i]) for i in range(len(table.segments) - ends[1], len(table.segments)))
    return tuple(tuple(tuple(stages[place]) for place in _places(rank, layout)) for rank in range(layout.pp))


def split_layers(layers: int, layout: Layout) -> tuple[int, ...]:
    """Layers of each stage, in order of forward.

    Evenly if they divide; otherwise what is before the layers and what is after counts as a layer each, and what is
    left over goes to the first stages, as torchtitan does (Llama-3 405B on 16 stages: 7, 14 times 8, 7).

    Raises:
        ConfigError: fewer layers than stages, but for the first and the last.
    """
    stages = layout.pp * layout.vpp
    if layers == stages - 2:  # the first stage has what is before the layers alone, the last one the head
        return (0, *(1 for _ in range(layers)), 0)
    if layers < stages:
        raise ConfigError(
            f"layout: expected at least one layer for each of pp {layout.pp} x vpp {layout.vpp} stages, or for all but "
            f"the first and the last, got {layers} layers; the most stages that can be is {layers}, or {layers + 2}"
        )
    if layers % stages == 0:
        return (layers // stages,) * stages
    layers_per_stage, remainder = divmod(layers + 2, stages)
    counts = [layers_per_stage + (stage < remainder) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    if min(counts) < 1:
        layers_per_stage, remainder = divmod(layers, stages)
        counts = [layers_per_stage + (stage < remainder) for stage in range(stages)]
    return tuple(counts)


def _ends(table: ModelTable) -> tuple[int, int]:
    """Segments before and after the layers: those that nothing enters, or that nothing leaves."""
    before = sum(not segment.enters for segment in table.segments[:1])
    after = sum(not segment.leaves for segment in table.segments[-1:]) if len(table.segments) > 1 else 0
    return before, after


def _checked(layers: Sequence[int], total: int, layout: Layout) -> tuple[int, ...]:
    stages = layout.pp * layout.vpp
    if len(layers) != stages or sum(layers) != total or min(layers) < 0:
        raise ConfigError(
            f"layout: expected {stages} counts of layers (pp {layout.pp} x vpp {layout.vpp}) that add up to {total}, "
            f"got {len(layers)} that add up to {sum(layers)}: {', '.join(map(str, layers))}"
        )
    return tuple(layers)


def _take(rest: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The next ``count`` layers; they may be of more than one kind."""
    taken_runs: list[tuple[int, int]] = []
    while count:
        segment, count_left = rest[0]
        num_taken = min(count_left, count)
        taken_runs.append((segment, num_taken))
        count -= num_taken
        if num_taken == count_left:
            del rest[0]
        else:
            rest[0] = (segment, count_left - num_taken)
    return taken_runs


def _places(rank: int, layout: Layout) -> list[int]:
    if layout.schedule in ("dualpipe-v", "zbv"):
        if layout.vpp != 2:
            raise ConfigError(f"layout: {layout.schedule} has 2 chunks of a rank (vpp2), got vpp {layout.vpp}")
        return [rank, 2 * layout.pp - 1 - rank]
    return [chunk * layout.pp + rank for chunk in range(layout.vpp)]
