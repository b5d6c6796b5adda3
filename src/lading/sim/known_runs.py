"""Known runs: correction of a prediction by measured steps of the same software.

[Note: known runs] The logarithm of measured over predicted is, to first order, a sum over the causes of a step: each
cause's share of it times the logarithm of how much longer that cause takes than was predicted. Such a logarithm is
normal around 0 with the spread that the interval of a prediction gives the cause (``lading.sim.interval``), and a run
has its own part besides. So what a few runs say of another is linear in their logarithms ``r``,

    shift = k K^-1 r,   k_i = cov(step, run i),   K_ij = cov(run i, run j), and the run's own variance where i = j
    cov(a, b) = sum over causes of spread^2 * share_a * share_b * kept

A run that waits for transfers half of its time says much of transfers and little of products; what it says is shared by
how uncertain each cause was. A bubble lasts as long as all else makes it, so shares are of what is no bubble.

How much of a cause two unlike runs have in common (``kept``) goes by what makes the cause:

- launches, waiting between blocks and other work of the host are the software's own, whatever model it trains: all;
- transfers depend on sizes, links and who waits for whom: nothing on another machine, network or model;
- kernels, and what is left, go by shapes and libraries: a half for each difference of machine, network, model (its kind
  and width), number format, sequence, source, or where every kernel of one is traced;
- what a source leaves out or says in words that are not understood is the same for all of its runs, and has nothing to
  do with another's; the rates of a data sheet are those of one machine.

The interval is that of Student's t in several variables: a run that is further off than such runs are says that this
software is less certain than was thought, and one that is as predicted that it is surer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from lading.ir.request import StepRequest
from lading.ir.stack import GUESSED
from lading.sim.interval import DATA_SHEET, NINE_OF_TEN, UNTOLD, cause_spreads

#: Spread of what all steps of a software have in common, and of a run's own part: 0.032 and 0.067 to 0.070 by maximum
#: likelihood on published steps, each framework left out of what predicts it (``tools.validate``, November 2026).
_COMMON, _OWN = 0.03, 0.07
#: What each difference between two runs leaves of the covariance of their kernels. Assumption: a half. Published steps
#: of eight frameworks left out err alike from 0 to 0.5, and more above; those of 57 other sources less the nearer to 1.
_KEPT = 0.5
_ALL_STEPS, _NOT_TOLD, _RATES = "common", "untold", "data sheet"
#: Parts that two steps have in common wholly or not at all, by the differences that end it.
_ENDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("launches", "waiting in blocks", "host"), frozenset[str]()),
    "communication": frozenset(("machine", "network", "model")),
    _NOT_TOLD: frozenset(("source",)),
    _RATES: frozenset(("machine",)),
}
#: A run counts as off by at most so many spreads of what such runs are off by.
_MOST = 3.0
#: Degrees of freedom of Student's t: how sure it was before that a software's spreads are those of others; and how much
#: further up than down the interval of software that was not known reaches, as that is slower more often than faster.
#: Both hold 85 to 95% of published steps of frameworks left out and of 59 other sources, each with one run known.
_FREEDOM, _ABOVE = 1.0, {GUESSED: 1.4}


@dataclass(frozen=True)
class KnownRun:
    """A run whose step was measured.

    Attributes:
        ratio: Measured seconds of its step over predicted ones.
        shares: Shares of the predicted step by cause.
        elsewhere: Ways in which it differs from the predicted step: those of ``differences``; "source" if another one
            published it; "traced" if every kernel of one of the two was traced and none of the other.
        untold: Number of words or fields of its source that were not understood, plus that of facts left out.
        data_sheet: Whether no kernel of its machine was measured.
    """

    ratio: float
    shares: Mapping[str, float]
    elsewhere: frozenset[str] = frozenset()
    untold: int = 0
    data_sheet: bool = False


@dataclass(frozen=True)
class Shift:
    """Correction of a predicted step by known runs.

    Attributes:
        factor: Expected seconds of the step over predicted ones.
        explained: Variance of the logarithm that the known runs remove.
        surprise: Factor on the width of the interval: above 1 if the known runs are further off than such runs are on
            average, below 1 if they are less far off.
    """

    factor: float
    explained: float
    surprise: float = 1.0

    def half_width(self, before: float) -> float:
        """Half width of an interval, in logarithms, that was ``before`` without known runs."""
        variance = (before / NINE_OF_TEN) ** 2
        left = max(min(variance, _OWN**2), variance - self.explained)
        return sqrt(left) * NINE_OF_TEN * self.surprise

    def bounds(self, before: float, evidence: str = GUESSED) -> tuple[float, float]:
        """Bounds of the interval as factors of the corrected seconds.

        Args:
            before: Half width of the interval when no run was known, in logarithms.
            evidence: How the software was known then.
        """
        half = self.half_width(before)
        return exp(-half), exp(_ABOVE.get(evidence, 1.0) * half)


def differences(one: StepRequest, other: StepRequest) -> frozenset[str]:
    """Name the ways in which two steps differ, as far as their requests tell ([Note: known runs])."""
    sides = (
        {
            "machine": request.machine,
            "network": request.network,
            "model": (request.model.family, request.model.symbols.get("h", 0)),
            "precision": request.layout.precision,
            "sequence": request.seq_len,
        }
        for request in (one, other)
    )
    first, second = sides
    return frozenset(way for way in first if first[way] != second[way])


def shift_of(
    shares: Mapping[str, float],
    known: Sequence[KnownRun],
    evidence: str = GUESSED,
    *,
    untold: int = 0,
    data_sheet: bool = False,
) -> Shift:
    """Share the errors of known runs over their causes, and add up those of a step's causes ([Note: known runs]).

    Args:
        shares: Shares of the predicted step by cause.
        known: Runs of the same software.
        evidence: Evidence for the software without these runs (``Stack.evidence_on``).
        untold: As ``KnownRun.untold``, of the step's source.
        data_sheet: Whether no kernel of its machine was measured.
    """
    if not known:
        return Shift(1.0, 0.0)
    step = _parts(shares, evidence, untold, data_sheet)
    runs = [_parts(run.shares, evidence, run.untold, run.data_sheet) for run in known]
    among = _OWN**2 * np.eye(len(runs)) + [
        [_covariance(a, b, run.elsewhere ^ other.elsewhere) for b, other in zip(runs, known, strict=True)]
        for a, run in zip(runs, known, strict=True)
    ]
    shared = np.array([_covariance(step, run, source.elsewhere) for run, source in zip(runs, known, strict=True)])
    off = np.array([log(run.ratio) for run in known])
    limits = _MOST * np.sqrt(np.diag(among))
    weights = np.linalg.solve(among, shared)
    distance = float(off @ np.linalg.solve(among, off))
    surprise = sqrt((_FREEDOM + distance) / (_FREEDOM + len(runs)))
    return Shift(exp(float(weights @ np.clip(off, -limits, limits))), float(weights @ shared), surprise)


def _parts(shares: Mapping[str, float], evidence: str, untold: int, data_sheet: bool) -> dict[str, float]:
    """Spread of each part of a step's logarithm."""
    return {
        **cause_spreads(shares, evidence),
        _ALL_STEPS: _COMMON,
        _NOT_TOLD: sqrt(untold) * UNTOLD / NINE_OF_TEN,
        _RATES: DATA_SHEET / NINE_OF_TEN if data_sheet else 0.0,
    }


def _covariance(one: Mapping[str, float], other: Mapping[str, float], unlike: frozenset[str]) -> float:
    """Covariance of the logarithms of two steps that differ in the ways ``elsewhere``."""
    alike = {part: spread * other.get(part, 0.0) for part, spread in one.items()}
    alike[_NOT_TOLD] = min(one[_NOT_TOLD], other[_NOT_TOLD]) ** 2  # what neither of them says
    return sum(variance * _kept_of(part, unlike) for part, variance in alike.items())


def _kept_of(part: str, unlike: frozenset[str]) -> float:
    """Share of a part's covariance that is left between steps that differ in some ways."""
    ends = _ENDS.get(part)
    return _KEPT ** len(unlike) if ends is None else float(not unlike & ends)
