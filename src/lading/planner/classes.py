"""Folding: candidates at the same place of alike blocks are decided together.

A model of 80 equal layers asks 80 times the same questions. Layers that follow one another make a group, and gaps that
lie between the same operations of the layers of one group make a class: the relaxation then chooses in how many layers
of the group an option is taken, and rounding spreads these layers evenly. Classes only tie choices together, so what
is found is a plan of the whole step; a bound on all plans must not be folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lading.ir.fold import block_items
from lading.ir.graph import Phase, StepGraph
from lading.planner.relaxation import Candidate, Folding

_GOLDEN = 0.6180339887498949


def fold(graph: StepGraph, candidates: Sequence[Candidate], most: int) -> Folding | None:
    """Classes of the candidates, about ``most`` of them at most; None if there are no more candidates than that."""
    if len(candidates) <= most:
        return None
    places, layers = _places(graph)
    keys: list[tuple[object, ...]] = []
    of: list[int] = []
    for candidate in candidates:
        gap = candidate.gap
        layer = layers[gap.start] if layers[gap.start] >= 0 else layers[gap.end]
        own = gap.storage if layer < 0 else layers[gap.end] - layer
        version = None if candidate.version is None else candidate.version[1]
        keys.append(
            (places[gap.start], places[gap.end], own, layer < 0, candidate.size_bytes, candidate.options, version)
        )
        of.append(layer)
    per_group = _layers_per_group(keys, of, most)
    numbers: dict[object, int] = {}
    class_of = [
        numbers.setdefault((key, layer // per_group), len(numbers)) for key, layer in zip(keys, of, strict=True)
    ]
    return _seated(np.array(class_of), np.array(of))


def _layers_per_group(keys: Sequence[object], layers: Sequence[int], most: int) -> int:
    """Layers in a group, so that classes are few enough; at least two, as there are too many candidates."""
    repeats = Counter(keys)
    alone = sum(count == 1 for count in repeats.values())
    shared = len(repeats) - alone
    groups = max(1, (most - alone) // max(shared, 1))
    return max(2, -(-(max(layers) + 1) // groups))


def _seated(class_of: np.ndarray, layers: np.ndarray) -> Folding:
    """Seats by the fractional parts of the layer's multiples of the golden ratio: any first part is spread evenly."""
    order = np.lexsort((layers, (layers * _GOLDEN) % 1.0, class_of))
    sizes = np.bincount(class_of)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    seat = np.empty(len(class_of), dtype=np.int64)
    seat[order] = np.arange(len(order)) - first[class_of[order]]
    return Folding(class_of, seat, sizes[class_of])


def _places(graph: StepGraph) -> tuple[list[tuple[str, Phase, int]], list[int]]:
    """For each op its list of blocks, phase and number within its block, and which block it is (-1: none)."""
    counts: Counter[tuple[str, Phase]] = Counter()
    places: list[tuple[str, Phase, int]] = []
    layers: list[int] = []
    for op, item in zip(graph.ops, block_items(graph.ops), strict=True):
        name, _, layer = item.rpartition(".")
        places.append((name, op.phase, counts[item, op.phase]))
        counts[item, op.phase] += 1
        layers.append(int(layer) if item else -1)
    return places, layers
