"""Noise: how much longer equal work takes on unequal devices, and what meeting at barriers makes of it.

Jitter is a lognormal factor of mean 1 on each stretch of computing. ``spread`` is a normal factor around 1 that a
device keeps throughout a run (clocks, temperature, silicon). Ranks that meet wait for the slowest of them, so the
expected loss is that of the largest of N factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from math import log, sqrt
from statistics import NormalDist
from types import TracebackType

import numpy as np
import numpy.typing as npt

from lading.errors import ConfigError

Factors = npt.NDArray[np.float32]
_SLOWEST = 0.5  # a device is never drawn faster than twice the mean, which no spread of a cluster comes near


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Causes that make equal ranks unequal.

    Attributes:
        jitter: Standard deviation of the factor on each stretch of computing.
        spread: Standard deviation of the factor that a device keeps.
        slow_ranks: Factor on the computing of some ranks: stragglers.
        slow_links: Factor on what some ranks send, and on every collective that they take part in.
        seed: Seed of all that is drawn.
    """

    jitter: float = 0.0
    spread: float = 0.0
    slow_ranks: Mapping[int, float] = field(default_factory=lambda: {})
    slow_links: Mapping[int, float] = field(default_factory=lambda: {})
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("jitter", self.jitter), ("spread", self.spread)):
            if not 0 <= value < 1:
                raise ConfigError(f"noise: {name} is a share of the time, from 0 to below 1, got {value}")
        for name, factors in (("slow_ranks", self.slow_ranks), ("slow_links", self.slow_links)):
            if bad := [(rank, factor) for rank, factor in factors.items() if not factor > 0]:
                raise ConfigError(f"noise: {name} are factors above 0, got {bad[0][1]} for rank {bad[0][0]}")

    def device_factors(self, ranks: int) -> npt.NDArray[np.float64]:
        """Factors on each rank's seconds of computing.

        Raises:
            ConfigError: a slow rank is not in the job.
        """
        drawn = 1.0 + self.spread * np.random.Generator(np.random.SFC64([self.seed, 1])).standard_normal(ranks)
        return np.maximum(drawn, _SLOWEST) * _placed(self.slow_ranks, ranks, "slow_ranks")

    def link_factors(self, ranks: int) -> npt.NDArray[np.float64]:
        """Factors on each rank's seconds of communication.

        Raises:
            ConfigError: a slow link is of a rank that is not in the job.
        """
        return _placed(self.slow_links, ranks, "slow_links")


def _placed(factors: Mapping[int, float], ranks: int, name: str) -> npt.NDArray[np.float64]:
    if bad := [rank for rank in factors if not 0 <= rank < ranks]:
        raise ConfigError(f"noise: {name} are of ranks 0 to {ranks - 1}, got {bad[0]}")
    rank_factors = np.ones(ranks)
    rank_factors[list(factors)] = list(factors.values())
    return rank_factors


class Jitter:
    """Endless lognormal factors of mean 1, drawn a block ahead in a thread of its own. Same seed, same factors.

    Args:
        block: How many are drawn at once.
    """

    def __init__(self, jitter: float, seed: int, block: int = 1 << 17) -> None:
        self._size = block
        self._sigma = sqrt(log(1.0 + jitter * jitter))
        self._random = np.random.Generator(np.random.SFC64([seed, 2]))
        self._thread = ThreadPoolExecutor(1)
        self._block, self._at = self._draw(), 0
        self._next: Future[Factors] = self._thread.submit(self._draw)

    def __enter__(self) -> Jitter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _draw(self) -> Factors:
        block = self._random.standard_normal(self._size, dtype=np.float32)
        block *= np.float32(self._sigma)
        block -= np.float32(self._sigma**2 / 2)
        return np.exp(block, out=block)

    def take(self, count: int) -> Factors:
        """The next factors, at most a block; the caller may change them."""
        if self._at + count > self._size:
            self._block, self._at = self._next.result(), 0
            self._next = self._thread.submit(self._draw)
        self._at += count
        return self._block[self._at - count : self._at]


@lru_cache(maxsize=256)
def largest_of(count: int) -> float:
    """Expected largest of ``count`` standard normal numbers: 0 of one, 1.42 of 8, 3.85 of 10,240."""
    if count < 1:
        raise ConfigError(f"expected at least one number to take the largest of, got {count}")
    normal, points = NormalDist(), 4000
    # Of what lies above the u-th quantile of the largest, each single number has the chance 1 - u**(1/count).
    chances = [(i + 0.5) / points for i in range(points)]
    return sum(-normal.inv_cdf(-np.expm1(log(u) / count)) for u in chances) / points


#: Published steps of one layout on more and more devices (benchmarks/calibrate/scale.py, November 2026) lose 0.026 +-
#: 0.007 for a unit of ``largest_of`` where ranks meet at the end of a step, and 0.057 +- 0.011 where all meet in every
#: block: what devices differ by, and with it what a stretch of work varies by.
DEVICE_SPREAD, BLOCK_SPREAD = 0.026, 0.057
_NODE = 8  # what a node's devices lose to each other is in the factors of a running step, which are fitted there


def waiting_share(devices: int, *, every_block: bool) -> float:
    """Share by which work takes longer than on the devices of one node, because all wait for the slowest device.

    Args:
        every_block: Whether devices meet in every block (sharded parameters), and not only at the end of a step.
    Ignores: congestion, which grows with devices too and cannot be told apart in whole steps.
    """
    lag = largest_of(max(devices, _NODE)) - largest_of(_NODE)
    return (BLOCK_SPREAD if every_block else DEVICE_SPREAD) * lag
