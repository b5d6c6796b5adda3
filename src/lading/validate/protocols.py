"""Protocols: what is left of the error when one run of each software stack is known, and when a source is not.

A prediction may contain a factor for its software stack that was fitted on rows (``Prediction.residual``). Both
protocols take it out first, so that nothing of the scored rows is in what they are scored against.

[Note: one run]
A single row is off by what its stack has in common and by what is its own. How much of it is common is known from the
other stacks: the variance between stacks over that and the variance within them. The rest is not passed on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from lading.validate.scoring import Pair, grouped


def anchored(pairs: Sequence[Pair]) -> tuple[list[Pair], dict[str, tuple[str, float]]]:
    """Pairs scaled by what one row of their software stack says, that row left out; and each stack's anchor and factor.

    A stack of one row keeps its prediction. Which row is the anchor depends on requests alone. Of what it says only the
    share is taken that rows of a stack have in common ([Note: one run]).
    """
    scaled: list[Pair] = []
    factors: dict[str, tuple[str, float]] = {}
    stacks = grouped(_without_residual(pairs), _stack)
    for stack, group in sorted(stacks.items()):
        if len(group) < 2:
            scaled += group
            continue
        anchor = anchor_of(group)
        share = common_share([other for name, other in stacks.items() if name != stack])
        factor = (anchor.measured / anchor.predicted) ** share
        factors[stack] = (anchor.outcome.row.id, factor)
        scaled += [_scaled(pair, factor) for pair in group if pair is not anchor]
    return scaled, factors


def common_share(stacks: Sequence[Sequence[Pair]]) -> float:
    """Of how far rows are off, the share of the variance that is between stacks; 1 with fewer than three of them."""
    logs = [
        np.array([math.log(pair.measured / pair.predicted) for pair in group]) for group in stacks if len(group) > 1
    ]
    if len(logs) < 3:
        return 1.0
    between = float(np.var([found.mean() for found in logs], ddof=1))
    within = float(np.mean([found.var(ddof=1) for found in logs]))
    return between / (between + within) if between + within else 1.0


def anchor_of(group: Sequence[Pair]) -> Pair:
    """The row nearest to all others of its stack: of the most usual machine and precision, and of middling size."""
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
    """Pairs scaled by what all other families say: those of the same stack, where there are any; else all.

    Args:
        pairs: Of predictions without any factor that was fitted on whole steps (``outcomes_of(..., fitted=False)``).
    """
    plain = _without_residual(pairs)
    factors: dict[tuple[str, str], float] = {}
    for pair in plain:
        key = (pair.outcome.row.family, _stack(pair))
        if key not in factors:
            others = [other for other in plain if other.outcome.row.family != key[0]]
            factors[key] = _factor([other for other in others if _stack(other) == key[1]] or others)
    return [_scaled(pair, factors[pair.outcome.row.family, _stack(pair)]) for pair in plain]


def _factor(others: Iterable[Pair]) -> float:
    """Median of measured over predicted, each family of equal weight; 1 without any."""
    families = grouped(others, lambda pair: pair.outcome.row.family)
    if not families:
        return 1.0
    logs = [float(np.median([math.log(p.measured / p.predicted) for p in group])) for group in families.values()]
    return math.exp(float(np.mean(logs)))


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
