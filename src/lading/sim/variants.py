"""Variants: segments of one request that run in different ways, and which blocks of a chunk run in which.

A block may be recomputed or not, and keep its activations on the device or move them behind it. All variants stand in
one row of ``Phases``, the segments' order repeated: recomputed, then plain; where activations are moved both once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby

from lading.errors import ConfigError
from lading.ir.layout import Layout
from lading.ir.request import StepRequest
from lading.ir.table import ModelTable
from lading.sim.phases import Phases

#: (variant, how often) in order of forward.
Parts = tuple[tuple[int, int], ...]


def moved(phases: Phases) -> Phases:
    """Return a block's phases with its kept activations on a lower tier.

    Twice their bytes are on the device while the block runs, as one block's are copied beside.
    """
    staged_bytes = 2 * phases.saved_bytes
    forward, backward = phases.transients
    return dataclasses.replace(
        phases,
        saved_bytes=0,
        moved_bytes=phases.saved_bytes,
        transients=(forward + staged_bytes, backward + staged_bytes),
    )


def parts_of(runs: Sequence[Parts], request: StepRequest, table: ModelTable) -> list[Parts]:
    """Variants in each chunk.

    Args:
        runs: Segments of each chunk, in order of forward.
    Raises:
        ConfigError: activations are to be moved, and none is.
    """
    layout = request.layout
    blocks = {i for i, segment in enumerate(table.segments) if segment.enters and segment.leaves}
    sizes = [sum(count for index, count in run if index in blocks) for run in runs]
    if layout.recompute_layers < 0 and "activations" not in layout.offload:
        return [tuple(run) for run in runs]
    chunk_runs: list[Parts] = []
    for run, size in zip(runs, sizes, strict=True):
        variants: list[int] = []
        place = 0
        for index in (index for index, count in run for _ in range(count)):
            shift = _shift(layout, place, size) if index in blocks else 0
            variants.append(index + shift * len(table.segments))
            place += index in blocks
        chunk_runs.append(tuple((variant, len(list(same))) for variant, same in groupby(variants)))
    moving = 2 * len(table.segments)
    if "activations" in layout.offload and not any(variant >= moving for run in chunk_runs for variant, _ in run):
        raise ConfigError(
            f"layout: offload=activations moves what all blocks of a chunk but the last keep, and no chunk of {layout} "
            "has more than one; take fewer stages, or offload_layers=1 to move that of the only block"
        )
    return chunk_runs


def _shift(layout: Layout, place: int, size: int) -> int:
    """Count how many times over the segments stand before the variant of the block ``place`` of ``size`` in a chunk."""
    again = layout.recompute_layers < 0 or place < layout.recompute_layers
    goes = "activations" in layout.offload and place < (layout.offload_layers or size - 1)
    return 2 * goes + (not again)


def recomputed_parts(run: Sequence[tuple[int, int]], plain: int, layers: int) -> Sequence[tuple[int, int]]:
    """A chunk's segments with those that are not recomputed as segments of their own.

    Args:
        plain: Segments in all: what is added to a segment's number where nothing of it is recomputed. The first and
            the last are no blocks.
        layers: How many of the chunk's first layers are recomputed; -1 all.
    """
    if layers < 0:
        return run
    parts: list[tuple[int, int]] = []
    for segment, count in run:
        block = 0 < segment < plain - 1
        again = min(count, layers) if block else count
        layers -= again if block else 0
        parts += [(segment, again), (segment + plain, count - again)]
    return [part for part in parts if part[1]]
