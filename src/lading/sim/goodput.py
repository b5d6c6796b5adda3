"""Goodput: how much of a long run is training, when devices fail.

Failures come at random at a rate of devices over the mean time between failures of one; any of them stops all. A
checkpoint blocks training for ``checkpoint_s`` and is whole ``write_s`` later, written beside training. After a failure
the job restarts, which takes ``restart_s`` and may fail again, from the last whole checkpoint.

Between two failures a job restarts, and then ends segments of L = interval + checkpoint seconds, of which those count
whose checkpoint is whole. With rate f, restart R and write W, the time between failures is more than x with chance
exp(-f x), so the segments that count are sum over k of exp(-f (R + W + k L)) a failure, and

    goodput = f * interval * exp(-f (R + W)) / (exp(f L) - 1)

(Daly 2006, equation 13, for W = 0). It is highest where f * interval = 1 - exp(-f L), whatever R and W. Its variance in
a run of T is that of a renewal process: f E[(counted - goodput * between)**2] / T.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

import numpy as np
import numpy.typing as npt

from lading.errors import ConfigError

Floats = npt.NDArray[np.float64]
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures of a job: how often it stops, and what that and guarding against it costs.

    Attributes:
        devices: All that the job needs at once.
        device_mtbf_hours: Mean time between failures of one device, with its share of host, network and software. Llama
            3 405B: 419 unexpected interruptions in 54 days of 16,384 devices (arXiv 2407.21783, section 3.3.4), 50,676
            hours.
        restart_s: From a failure to the first new step: noticing, replacing, starting, reading the checkpoint.
        checkpoint_s: Seconds that training stands still for a checkpoint.
        write_s: Seconds after these until the checkpoint can be read back.
    """

    devices: int
    device_mtbf_hours: float
    restart_s: float
    checkpoint_s: float
    write_s: float = 0.0

    def __post_init__(self) -> None:
        if self.devices < 1 or not self.device_mtbf_hours > 0:
            raise ConfigError(
                f"failures: expected devices >= 1 and hours between failures > 0, got {self.devices}, "
                f"{self.device_mtbf_hours}"
            )
        if min(self.restart_s, self.checkpoint_s, self.write_s) < 0:
            raise ConfigError(
                f"failures: expected seconds >= 0, got restart {self.restart_s}, checkpoint {self.checkpoint_s}, "
                f"write {self.write_s}"
            )

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the job."""
        return self.device_mtbf_hours * _HOUR_S / self.devices


@dataclass(frozen=True, slots=True)
class Goodput:
    """Shares of the time of a long run, which add up to 1.

    Attributes:
        interval_s: Seconds of training between checkpoints.
        useful: Training that counts: the goodput.
        checkpoint: Standing still for checkpoints that count.
        restart: From failures to the next step.
        redone: What was done before a failure and not whole in a checkpoint.
        deviation: Standard deviation of ``useful`` in a run of ``run_s``; 0 for an endless one.
    """

    interval_s: float
    useful: float
    checkpoint: float
    restart: float
    redone: float
    deviation: float = 0.0


def goodput(failures: Failures, interval_s: float, *, run_s: float = float("inf")) -> Goodput:
    """Expected goodput with a checkpoint every ``interval_s`` seconds of training.

    Args:
        run_s: Length of the run, for the deviation.
    Raises:
        ConfigError: the interval is not above 0, or too short for a checkpoint to be written in.
    Ignores: failures that come in bursts; that a restart waits longer for a repair than the mean.
    """
    segment = interval_s + failures.checkpoint_s
    if not interval_s > 0 or not run_s > 0:
        raise ConfigError(f"expected an interval and a run of more than 0 s, got {interval_s} and {run_s}")
    if failures.write_s > segment:
        raise ConfigError(
            f"a checkpoint takes {failures.write_s} s to be written, longer than the {segment} s until the next; take "
            "longer intervals"
        )
    rate, useful = 1.0 / failures.mtbf_s, _share(failures, interval_s)
    checkpoint = useful * failures.checkpoint_s / interval_s
    restart = -expm1(-rate * failures.restart_s)
    redone = max(0.0, 1.0 - useful - checkpoint - restart)
    deviation = sqrt(_variance_s(failures, interval_s, useful) / run_s)
    return Goodput(interval_s, useful, checkpoint, restart, redone, deviation)


def _share(failures: Failures, interval_s: float) -> float:
    rate = 1.0 / failures.mtbf_s
    segment = rate * (interval_s + failures.checkpoint_s)
    if segment > 700:
        return 0.0
    return rate * interval_s * exp(-rate * (failures.restart_s + failures.write_s)) / expm1(segment)


def _variance_s(failures: Failures, interval_s: float, share: float) -> float:
    """Variance of the useful time of a run over its length, in seconds."""
    rate, segment = 1.0 / failures.mtbf_s, interval_s + failures.checkpoint_s
    before = failures.restart_s + failures.write_s
    chance, fails = exp(-rate * segment), -expm1(-rate * segment)
    survives = exp(-rate * before)
    square = interval_s**2 * survives * chance * (1.0 + chance) / fails**2
    product = interval_s * survives * chance * ((before + 1.0 / rate) / fails + segment / fails**2)
    return max(0.0, rate * (square - 2.0 * share * product + 2.0 * (share / rate) ** 2))


def best_interval_s(failures: Failures) -> float:
    """Interval with the highest goodput; at least as long as a checkpoint takes to be written.

    Raises:
        ConfigError: checkpoints cost nothing: then there is no best interval, each step can have one.
    """
    if failures.checkpoint_s == 0.0:
        raise ConfigError("expected checkpoints of more than 0 s; where they cost nothing, write one every step")
    rate = 1.0 / failures.mtbf_s
    low, high = 0.0, failures.mtbf_s
    for _ in range(60):  # halving: below the root more than the interval is expected to be lost
        middle = (low + high) / 2.0
        below = rate * middle < -expm1(-rate * (middle + failures.checkpoint_s))
        low, high = (middle, high) if below else (low, middle)
    return max(high, failures.write_s - failures.checkpoint_s)


def best_interval_steps(failures: Failures, step_s: float) -> int:
    """Whole steps between checkpoints with the highest goodput, at least one.

    Raises:
        ConfigError: a step that takes no time, or as ``best_interval_s``.
    """
    if not step_s > 0:
        raise ConfigError(f"expected a step of more than 0 s, got {step_s}")
    min_steps = max(1, int(np.ceil((failures.write_s - failures.checkpoint_s) / step_s)))
    below = max(min_steps, int(best_interval_s(failures) / step_s))
    return max((below, below + 1), key=lambda steps: _share(failures, steps * step_s))


def cost_per_billion_tokens(
    *, tokens_per_s: float, price_per_device_hour: float, devices: int, useful: float = 1.0
) -> float:
    """Price of a billion trained tokens, in the currency of the price.

    Args:
        tokens_per_s: Tokens a second of the whole job while it trains.
        useful: Goodput: the share of the time that counts.
    Raises:
        ConfigError: no tokens would ever be trained, or a price below 0.
    """
    if not tokens_per_s * useful > 0 or price_per_device_hour < 0 or devices < 1:
        raise ConfigError(
            "expected tokens per second and goodput above 0, a price >= 0 and devices >= 1, "
            f"got {tokens_per_s}, {useful}, {price_per_device_hour}, {devices}"
        )
    return price_per_device_hour * devices / _HOUR_S / (tokens_per_s * useful) * 1e9
