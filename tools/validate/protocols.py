"""Protocols: what is left of the error when one run of each software stack is known, and when a source is not.

A prediction may contain a factor for its software stack that was fitted on rows (``Prediction.residual``). Both
protocols take it out first, so that nothing of the scored rows is in what they are scored against. What the rows that
are known say of the others is shrunk (``tools.validate.shrinkage``): a single row is off by more than what its stack
has in common.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from lading.catalog.load import load_machine
from tools.validate.scoring import Pair, grouped
from tools.validate.shrinkage import Cell, expected


def anchored(pairs: Sequence[Pair]) -> tuple[list[Pair], dict[str, tuple[str, float]]]:
    """Scale pairs by what one row of each software stack says; returns the rest, and each stack's row and factor.

    A stack of one row has none and is scaled by what the others say. Which row is the anchor depends on requests alone.
    """
    plain = _without_residual(pairs)
    anchors = {stack: anchor_of(group) for stack, group in sorted(grouped(plain, _stack).items()) if len(group) > 1}
    known = cells_of(anchors.values())
    factors = {cell: math.exp(expected(known, cell)) for cell in {_cell(pair) for pair in plain}}
    scored = [pair for pair in plain if anchors.get(_stack(pair)) is not pair]
    told = {stack: (pair.outcome.row.id, factors[_cell(pair)]) for stack, pair in anchors.items()}
    return [_scaled(pair, factors[_cell(pair)]) for pair in scored], told


def anchor_of(group: Sequence[Pair]) -> Pair:
    """Choose the row nearest to all others of its stack: the most usual machine and precision, and middling size."""
    points = np.array([_features(pair) for pair in group])
    kinds = [_kind(pair) for pair in group]
    spread = points.std(axis=0)
    points = points / np.where(spread > 0, spread, 1.0)
    distances = [
        float(np.sum(np.linalg.norm(points - point, axis=1)) + 2 * sum(kind != other for other in kinds))
        for point, kind in zip(points, kinds, strict=True)
    ]
    nearest = min(range(len(group)), key=lambda i: (round(distances[i], 9), group[i].outcome.row.id))
    return group[nearest]


def left_out(pairs: Sequence[Pair]) -> list[Pair]:
    """Scale pairs by what all other families say of their software stack and architecture.

    Args:
        pairs: Predictions without any factor that was fitted on whole steps (``outcomes_of(..., fitted=False)``).
    """
    plain = _without_residual(pairs)
    cells = cells_of(plain)
    factors: dict[Cell, float] = {}
    for cell in {_cell(pair) for pair in plain}:
        factors[cell] = math.exp(expected([other for other in cells if other.source != cell.source], cell))
    return [_scaled(pair, factors[_cell(pair)]) for pair in plain]


def cells_of(pairs: Iterable[Pair]) -> list[Cell]:
    """Evidence of pairs by source, stack and architecture."""
    groups: dict[Cell, list[float]] = {}
    for pair in pairs:
        groups.setdefault(_cell(pair), []).append(math.log(pair.measured / pair.predicted))
    return [
        dataclasses.replace(cell, median=float(np.median(residuals)), rows=len(residuals))
        for cell, residuals in groups.items()
    ]


def _cell(pair: Pair) -> Cell:
    request = pair.outcome.request
    assert request is not None
    gpu = load_machine(request.machine).device.gpu
    return Cell(pair.outcome.row.family, request.stack.name, gpu.architecture if gpu else "")


def _without_residual(pairs: Iterable[Pair]) -> list[Pair]:
    return [_scaled(pair, 1 / pair.outcome.prediction.residual) if pair.outcome.prediction else pair for pair in pairs]


def _scaled(pair: Pair, factor: float) -> Pair:
    return dataclasses.replace(pair, predicted=pair.predicted * factor, low=pair.low * factor, high=pair.high * factor)


def _stack(pair: Pair) -> str:
    assert pair.outcome.request is not None
    return pair.outcome.request.stack.name


def _kind(pair: Pair) -> tuple[str, str, str]:
    request = pair.outcome.request
    assert request is not None
    return request.machine, request.layout.precision, request.model.family


def _features(pair: Pair) -> tuple[float, ...]:
    """Sizes in powers of two: devices, width, depth, tokens of a device, ways within the model."""
    request = pair.outcome.request
    assert request is not None
    layout = request.layout
    sizes = (
        layout.devices,
        request.model.symbols["h"],
        request.model.layers,
        request.tokens / layout.devices,
        request.seq_len,
        layout.tp,
        layout.pp,
    )
    return tuple(math.log2(size) for size in sizes)
