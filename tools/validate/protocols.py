"""Protocols: what is left of the error when one run of each software stack is known, and when a source is not.

[Note: a framework left out]
Software that nobody measured is scored by leaving out each framework with all its sources: its rows are predicted as
software that is not known (``tools.validate.software``), by the defaults of their class and what they say themselves,
without any factor that was fitted on whole steps. What all other frameworks say of running steps on the architecture
scales them. Then one run of the framework is known: what it is off by is shared over the causes of its step, and each
other run is scaled by what it has of them (``lading.sim.known_runs``).

A prediction may contain a factor for its software stack that was fitted on rows (``Prediction.residual``). Both
protocols take it out first, so that nothing of the scored rows is in what they are scored against. What the rows that
are known say of the others is shrunk (``tools.validate.shrinkage``): a single row is off by more than what its stack
has in common.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lading.catalog.load import load_machine
from lading.catalog.stacks import evidence_on
from lading.ir.stack import GUESSED
from lading.sim.interval import bounds, causes_of, half_width
from lading.sim.known_runs import KnownRun, Shift, differences, shift_of
from lading.sim.parts import ATTENTION, LOW, MEMORY, PRODUCTS
from tools.validate.recipes import SWEEP
from tools.validate.requests import said
from tools.validate.scoring import Pair, figures, grouped
from tools.validate.shrinkage import Cell, expected
from tools.validate.software import framework_of

CAUSES = (PRODUCTS, LOW, ATTENTION, MEMORY)
#: Runs of a framework that are compared with each other to choose the one to be known.
_ENOUGH = 60


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
    shares: dict[Cell, list[float]] = {}
    for pair in pairs:
        groups.setdefault(_cell(pair), []).append(math.log(pair.measured / pair.predicted))
        shares.setdefault(_cell(pair), []).append(kernel_share(pair))
    return [
        dataclasses.replace(
            cell, median=float(np.median(residuals)), rows=len(residuals), share=float(np.median(shares[cell]))
        )
        for cell, residuals in groups.items()
    ]


def framework_left_out(plain: Sequence[Pair], guessed: Sequence[Pair]) -> list[Pair]:
    """Scale pairs of software taken as not known by what all other frameworks say ([Note: a framework left out]).

    Args:
        plain: Predictions by named sets of switches, without factors fitted on whole steps.
        guessed: Predictions of the same rows as software that is not known, without these factors either.
    """
    cells: dict[str, list[Cell]] = {}
    for framework in {_framework(pair) for pair in guessed}:
        others = cells_of(pair for pair in _without_residual(plain) if _framework(pair) != framework)
        cells[framework] = others
    scaled: list[Pair] = []
    for pair in guessed:
        target = Cell("", "", _cell(pair).architecture)
        factor = math.exp(kernel_share(pair) * expected(cells[_framework(pair)], target))
        assert pair.outcome.request is not None
        first_reading = pair.outcome.request.first_reading
        moved, (low, high) = _scaled(pair, factor), bounds(GUESSED, _half_of(pair), first_reading=first_reading)
        scaled.append(dataclasses.replace(moved, low=moved.predicted * low, high=moved.predicted * high))
    return scaled


def framework_anchored(left: Sequence[Pair]) -> tuple[list[Pair], dict[str, tuple[str, float]]]:
    """Scale pairs of each framework by one run of it; returns the rest, and each framework's run and factor.

    Args:
        left: Pairs as ``framework_left_out`` returns them.
    """
    scored: list[Pair] = []
    told: dict[str, tuple[str, float]] = {}
    for framework, group in sorted(grouped(left, _framework).items()):
        if len(group) == 1:
            continue
        anchor = most_telling(group)
        told[framework] = (anchor.outcome.row.id, shift_by(anchor, anchor).factor)
        scored += [known_by(pair, anchor) for pair in group if pair is not anchor]
    return scored, told


def source_anchored(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Correct pairs of each source by one run of it; returns the rest as they were, and corrected."""
    before: list[Pair] = []
    after: list[Pair] = []
    for _, group in sorted(grouped(pairs, lambda pair: pair.outcome.row.family).items()):
        if len(group) == 1:
            continue
        anchor = most_telling(group)
        rest = [pair for pair in group if pair is not anchor]
        before += rest
        after += [known_by(pair, anchor) for pair in rest]
    return before, after


def most_telling(group: Sequence[Pair]) -> Pair:
    """Choose the run that is worth measuring: the one that tells most of the others by what is predicted of them.

    What it tells of a run is how much of the variance of that run's logarithm is known with it (``Shift.explained``):
    nothing that was measured counts, and sources count alike. Of a long group every n-th run is looked at.
    """
    sample = sorted(group, key=lambda pair: pair.outcome.row.id)[:: -(-len(group) // _ENOUGH)]
    rows = Counter(pair.outcome.row.family for pair in sample)

    def explained_by(anchor: Pair) -> float:
        others = (pair for pair in sample if pair is not anchor)
        return sum(shift_by(pair, anchor).explained / rows[pair.outcome.row.family] for pair in others)

    return max(sample, key=lambda pair: round(explained_by(pair), 9))


def by_framework(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """Figures of each framework."""
    return {name: figures(group) for name, group in sorted(grouped(pairs, _framework).items())}


def _framework(pair: Pair) -> str:
    row = pair.outcome.row
    return framework_of(row, said(row)) or row.family


def kernel_share(pair: Pair) -> float:
    """Share of a step that kernels take, of what is no bubble, which lasts longer as they do."""
    assert pair.outcome.prediction is not None
    shares = pair.outcome.prediction.shares
    kernels = sum(max(0.0, shares.get(cause, 0.0)) for cause in (*CAUSES, "recomputing"))
    return min(1.0, kernels / max(1e-9, 1.0 - max(0.0, shares.get("bubble", 0.0)))) if shares else 1.0


def known_by(pair: Pair, anchor: Pair) -> Pair:
    """Scale a pair by what a known run says of it, with the interval that is left."""
    shift = shift_by(pair, anchor)
    scaled, (low, high) = _scaled(pair, shift.factor), shift.bounds(_half_of(pair), _evidence(pair))
    return dataclasses.replace(scaled, low=scaled.predicted * low, high=scaled.predicted * high)


def shift_by(pair: Pair, anchor: Pair) -> Shift:
    """Work out what a known run says of a pair's step."""
    known = [known_run(anchor, pair)]
    return shift_of(_causes(pair), known, _evidence(pair), untold=_untold(pair), data_sheet=not _measured(pair))


def known_run(anchor: Pair, pair: Pair) -> KnownRun:
    """Make the known run of an anchor, as unlike as its step and source are to a pair's."""
    one, other = pair.outcome.request, anchor.outcome.request
    assert one is not None
    assert other is not None
    publication, anchor_publication = _published(pair), _published(anchor)
    ways = {way for way in publication if publication[way] != anchor_publication[way]}
    unlike = differences(one, other) | ways
    return KnownRun(
        anchor.measured / anchor.predicted, _causes(anchor), unlike, _untold(anchor), data_sheet=not _measured(anchor)
    )


def _published(pair: Pair) -> dict[str, object]:
    """Source of a pair's row, and whether every kernel of it was traced."""
    row = pair.outcome.row
    return {"source": row.family, "traced": SWEEP in row.source.lower()}


def _untold(pair: Pair) -> int:
    """Number of words that were not understood, and of things that the source does not say."""
    request = pair.outcome.request
    assert request is not None
    return len(request.unread) + len(request.unstated)


def _measured(pair: Pair) -> bool:
    """Whether kernels of a pair's machine were measured by shape."""
    request = pair.outcome.request
    assert request is not None
    return load_machine(request.machine).device.gpu is not None


def _evidence(pair: Pair) -> str:
    """How a pair's software is known: guessed where it is taken as not known."""
    request = pair.outcome.request
    assert request is not None
    return evidence_on(request.stack, load_machine(request.machine).device.architecture)


def _half_of(pair: Pair) -> float:
    """Half width of the interval of a pair's step, in logarithms."""
    request = pair.outcome.request
    assert request is not None
    columns = request.model.symbols.get("h", 0)
    return half_width(_evidence(pair), _causes(pair), measured=_measured(pair), untold=_untold(pair), columns=columns)


def _causes(pair: Pair) -> dict[str, float]:
    prediction, request = pair.outcome.prediction, pair.outcome.request
    assert prediction is not None
    assert request is not None
    return causes_of(prediction.shares, updates_on_host=request.layout.updates_on_host)


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
