"""Order statistics of ranks that wait for each other: the closed form that simulated clusters are held against."""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from lading.sim.noise import largest_of


def largest_factor(jitter: float, count: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of so many lognormal factors of mean 1."""
    sigma = sqrt(log(1.0 + jitter * jitter))
    normal, chances = NormalDist(), (np.arange(4000) + 0.5) / 4000
    largest = [exp(sigma * -normal.inv_cdf(-np.expm1(log(u) / count)) - sigma * sigma / 2) for u in chances]
    return float(np.mean(largest)), float(np.std(largest))


def stalled_share(
    stretches: npt.ArrayLike, *, group: int, replicas: int, jitter: float = 0.0, spread: float = 0.0
) -> float:
    """Expected share by which a step without a pipeline takes longer because equal ranks are not equal.

    Ranks of a group meet after every stretch, replicas at the end of the step.

    Args:
        stretches: Seconds of computing between the meetings of a group.
        group: Ranks that meet each time (tensor and context parallel).
        replicas: Groups that meet at the end.
    Returns:
        For example 0.05 for a step that takes 5% longer than on equal ranks.
    Source: order statistics, with a sum of many stretches taken as normal; within a tenth of the loss that events give.
    """
    seconds = np.asarray(stretches, np.float64)
    total = float(np.sum(seconds))
    mean, deviation = largest_factor(jitter, group)
    of_sum = float(np.sqrt(np.sum(seconds**2))) / total
    drawn = mean - 1.0 + deviation * of_sum * largest_of(replicas)
    if spread == 0.0:
        return drawn
    # The group that all wait for has the slowest device of all; in it that one meets the largest of the others.
    slowest = sqrt(spread**2 + (jitter * of_sum) ** 2) * largest_of(group * replicas)
    if group == 1:
        return slowest
    points = (np.arange(400) + 0.5) / 400
    normal = NormalDist()
    its = slowest + jitter * np.array([normal.inv_cdf(u) for u in points])
    others = sqrt(spread**2 + jitter**2) * np.array([normal.inv_cdf(u ** (1 / (group - 1))) for u in points])
    return max(drawn, float(np.mean(np.maximum.outer(its, others))))
