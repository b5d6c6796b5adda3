"""Shrinkage: what rows of other sources and stacks say of a stack that few rows or none are known of.

[Note: a residual's parts]
The logarithm of measured over predicted is what all stacks have in common, what those on one architecture have, what
one stack has, what it has on one architecture, what one source has, and a row's own. Each part is normal around 0 with
a spread that is set beforehand (``Spreads``), so the best estimate is linear: a stack seen in many rows keeps what it
shows, one seen in a single row a third of it, one never seen what its architecture shows. Rows of one source, stack and
architecture count by their median, held to ``Spreads.most``. All but a row's own part is of kernels: where these are
half of a step, so is what it says of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spreads:
    """Standard deviations of the parts of a residual, and the largest median that counts, as shares of a step.

    Kernels alone are known to take 5 to 12% less than in a running step; equal configurations published twice differ by
    6%; errors on published rows without any fit on whole steps have a standard deviation of about 10%.
    """

    common: float = 0.05
    architecture: float = 0.05
    stack: float = 0.03
    both: float = 0.03
    source: float = 0.03
    row: float = 0.1
    most: float = 0.3


@dataclass(frozen=True)
class Cell:
    """Rows of one source, stack and architecture: the median of their residuals' logarithms, and how many they are.

    ``share`` is the share of a step that its kernels take.
    """

    source: str
    stack: str
    architecture: str
    median: float = 0.0
    rows: int = 0
    share: float = 1.0


def expected(known: Sequence[Cell], target: Cell, spreads: Spreads | None = None) -> float:
    """Logarithm of measured over predicted that is to be expected of a target ([Note: a residual's parts]).

    Args:
        known: Cells with rows.
        target: Cell that is asked for; its source, median and rows do not count.
    """
    spreads = spreads or Spreads()
    if not known:
        return 0.0
    among = np.array([[_shared(a, b, spreads) + _of_source(a, b, spreads) for b in known] for a in known])
    with_target = np.array([_shared(target, cell, spreads) for cell in known])
    noise = np.diag([spreads.row**2 / cell.rows for cell in known])
    medians = np.clip([cell.median for cell in known], -spreads.most, spreads.most)
    return float(with_target @ np.linalg.solve(among + noise, medians))


def _shared(one: Cell, two: Cell, spreads: Spreads) -> float:
    """Covariance of two cells' residuals, of whatever source."""
    stack, architecture = one.stack == two.stack, one.architecture == two.architecture
    parts = spreads.common**2 + spreads.architecture**2 * architecture + spreads.stack**2 * stack
    return one.share * two.share * (parts + spreads.both**2 * (stack and architecture))


def _of_source(one: Cell, two: Cell, spreads: Spreads) -> float:
    """Covariance of what two cells have of one source in common."""
    return one.share * two.share * spreads.source**2 * (one.source == two.source)
