"""Causes of one stack: how much longer each kind of kernel takes in its steps than the stack's kernels do in all.

[Note: causes of a stack]
Of a row, what the factor of its stack leaves is a sum over kinds of kernels: share of the step times the logarithm of
the kind's own factor. These are normal around 0 with a spread of ``SPREAD``, and a row has its own part besides, so the
best estimate is linear (ridge regression), and a kind of which a stack's rows say little stays with the stack. Kernels
that are recomputed are taken to be of the kinds that forward is of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from tools.validate.protocols import CAUSES, kernel_share
from tools.validate.scoring import Pair

#: Standard deviations of the logarithm of a kind's factor beside its stack's, and of a row's own part.
SPREAD, ROW = 0.12, 0.08
#: A row counts as off by at most so much, in logarithms.
_MOST = 0.3


def cause_factors(pairs: Sequence[Pair], factor: float) -> dict[str, float]:
    """Factors of kinds of kernels, the stack's own included.

    Args:
        pairs: Steps of one stack on one architecture, predicted without factors.
        factor: Factor of the stack there.
    Returns:
        Factor by kind; kinds that no row has are left out.
    """
    shares = np.array([cause_shares(pair) for pair in pairs])
    left = [math.log(pair.measured / pair.predicted) - kernel_share(pair) * math.log(factor) for pair in pairs]
    off = np.clip(left, -_MOST, _MOST)
    squares = shares.T @ shares / ROW**2 + np.eye(len(CAUSES)) / SPREAD**2
    own = np.linalg.solve(squares, shares.T @ off / ROW**2)
    return {
        cause: factor * math.exp(float(own[place]))
        for place, cause in enumerate(CAUSES)
        if float(shares[:, place].max()) > 0
    }


def with_causes(pair: Pair, factor: float, kinds: Mapping[str, float]) -> float:
    """Times as long as without factors that a pair's step takes with them."""
    shares = zip(cause_shares(pair), CAUSES, strict=True)
    return math.exp(sum(share * math.log(kinds.get(cause, factor)) for share, cause in shares))


def cause_shares(pair: Pair) -> list[float]:
    """Shares of a step's kinds of kernels, of what is no bubble, in the order of ``CAUSES``."""
    assert pair.outcome.prediction is not None
    shares = pair.outcome.prediction.shares
    kinds = [max(0.0, shares.get(cause, 0.0)) for cause in CAUSES]
    again, working = max(0.0, shares.get("recomputing", 0.0)), 1.0 - max(0.0, shares.get("bubble", 0.0))
    whole = (1 + again / sum(kinds)) / max(1e-9, working) if sum(kinds) else 0.0
    return [share * whole for share in kinds]
