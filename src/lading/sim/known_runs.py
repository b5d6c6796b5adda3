"""Known runs: what measured steps of a software say of its other steps.

[Note: known runs] The logarithm of measured over predicted is, to first order, a sum over the causes of a step: each
cause's share of it times the logarithm of how much longer that cause takes than was predicted. Such a logarithm is
normal around 0 with the spread that the interval of a prediction gives the cause (``lading.sim.interval``), and a run
has its own part besides. So what a few runs say of another is linear in their logarithms ``r``,

    shift = k K^-1 r,   k_i = cov(step, run i),   K_ij = cov(run i, run j) + own^2 [i = j]
    cov(a, b) = sum over causes of spread^2 * share_a * share_b

A run that waits for transfers half of its time says much of transfers and little of products; what it says is shared by
how uncertain each cause was. A bubble lasts as long as all else makes it, so shares are of what is no bubble.

A run elsewhere, on other devices, another network or under a tracer, has other kernels, links or hosts: for each such
difference half of the covariance is left (assumption: as much of what a software is off by is its own as is of where
it ran).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from lading.ir.stack import GUESSED
from lading.sim.interval import NINE_OF_TEN, cause_spreads

#: Spread of what all steps of a software have in common, and of a run's own part: 0.032 and 0.067 to 0.070 by maximum
#: likelihood on published steps, each framework left out of what predicts it (``tools.validate``, November 2026).
_COMMON, _OWN = 0.03, 0.07
#: What each difference between the places of two runs leaves of their covariance.
_ELSEWHERE = 0.5
#: A run counts as off by at most so many spreads of what such runs are off by.
_MOST = 3.0


@dataclass(frozen=True)
class KnownRun:
    """A run that was measured.

    Attributes:
        ratio: Measured seconds of its step over predicted ones.
        shares: Shares of the predicted step by cause.
        elsewhere: Ways in which it ran elsewhere than what is asked for, by any names: on other devices, between nodes
            on another network, every kernel traced where the other's are not.
    """

    ratio: float
    shares: Mapping[str, float]
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Shift:
    """Correction of a predicted step by runs that are known.

    Attributes:
        factor: Times as long as predicted that it is to be expected to take.
        explained: Variance of the logarithm that is known now.
    """

    factor: float
    explained: float

    def narrowed(self, half_width: float) -> float:
        """Half width of an interval, in logarithms, that had ``half_width`` before the runs were known."""
        left = (half_width / NINE_OF_TEN) ** 2 - self.explained
        return min(half_width, sqrt(max(_OWN**2, left)) * NINE_OF_TEN)


def shift_of(shares: Mapping[str, float], known: Sequence[KnownRun], evidence: str = GUESSED) -> Shift:
    """Share what known runs are off by over causes, and add up those of a step ([Note: known runs]).

    Args:
        shares: Shares of the predicted step by cause.
        known: Runs of the same software.
        evidence: How it was known before (``Stack.evidence_on``).
    """
    if not known:
        return Shift(1.0, 0.0)
    step, *runs = (_parts(parts, evidence) for parts in (shares, *(run.shares for run in known)))
    away = np.array([len(run.elsewhere) for run in known])
    near = _ELSEWHERE ** np.array([[len(one.elsewhere ^ other.elsewhere) for other in known] for one in known])
    among = near * np.array([[_product(one, other) for other in runs] for one in runs]) + _OWN**2 * np.eye(len(runs))
    limits = _MOST * np.sqrt(np.diag(among))
    off = np.clip([log(run.ratio) for run in known], -limits, limits)
    shared = _ELSEWHERE**away * np.array([_product(step, run) for run in runs])
    weights = np.linalg.solve(among, shared)
    return Shift(exp(float(weights @ off)), float(weights @ shared))


def _parts(shares: Mapping[str, float], evidence: str) -> dict[str, float]:
    """Spread of each part of a step's logarithm."""
    return {**cause_spreads(shares, evidence), "common": _COMMON}


def _product(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    return sum(spread * other.get(part, 0.0) for part, spread in one.items())
