"""Variants: different ways in which a segment of one request runs, and which block of a chunk runs in which way.

A block may be recomputed or not, and may keep its activations on the device or on a lower tier. All variants are in one
list of ``Phases``: all segments recomputed, then all plain; if activations are moved, both once more with these moved.
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

#: (variant, number of repeats) in order of forward.
Parts = tuple[tuple[int, int], ...]


def moved(phases: Phases) -> Phases:
    """Return a block's phases with its kept activations on a lower tier.

    Twice their bytes are on the device while the block runs, because those of another block are copied meanwhile.
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
    """Choose the variants of the segments in each chunk.

    Args:
        runs: Segments of each chunk, in order of forward.
    Raises:
        ConfigError: activations are to be moved, and no block has any to move.
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
    """Number of whole lists of segments before the variant of block ``place`` of a chunk that has ``size`` blocks."""
    again = layout.recompute_layers < 0 or place < layout.recompute_layers
    goes = "activations" in layout.offload and place < (layout.offload_layers or size - 1)
    return 2 * goes + (not again)


def recomputed_parts(run: Sequence[tuple[int, int]], plain: int, layers: int) -> Sequence[tuple[int, int]]:
    """Split the runs of a chunk into recomputed segments and plain ones, which have numbers of their own.

    Args:
        plain: Number of segments; added to a segment's number to name its plain variant. The first and the last
            segment are no blocks.
        layers: Number of the chunk's first layers that are recomputed; -1 for all.
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
