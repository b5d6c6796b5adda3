"""Aims: what a linear program of a plan believes of transfers, and how it is cut and rounded.

The relaxation sees bytes and seconds, not queues. A transfer waits for those before it on its stream, and a storage
keeps its place on the device until it has left; where both directions of a tier are busy all the time, each delay adds
to the next. What a plan can rely on lies between two beliefs: that a tier reaches all of its rates, or only a part of
them. Which is nearer depends on the step, so several are tried and simulated.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lading.ir.machine import Machine, Tier


@dataclass(frozen=True)
class Aim:
    """One linear program to solve for a plan.

    Attributes:
        reserve: Share of the arena that it leaves to what it does not see.
        windows: Windows that it cuts the step into.
        moving: Whether a storage takes its place while it moves (``planner.relaxation``: held).
        careful: Whether to rely on a share of each tier's rates only.
        across: Whether recomputation may lead from block to block.
        settled: Whether large storages are decided one after another (``Relaxation.settled``).
    """

    reserve: float
    windows: int
    moving: bool = False
    careful: bool = False
    settled: bool = False
    across: bool = False


#: Shares of rates that leave room for queues, of the host's memory and of what lies behind it, whose transfers are
#: long, so that one that waits holds much for long.
_CAREFUL_NEAR, _CAREFUL_FAR = 0.85, 0.5
_ROOMY, _TIGHT = (0.15, 0.05, 0.3), (0.02, 0.0)
_WINDOWS = (4, 16, 1)
#: Operations of a step that is small enough for every combination, and of one that is too large for more than a few.
_SMALL_OPS, _LARGE_OPS = 200, 6000
_CAREFUL_FIRST = (
    Aim(0.05, 16, moving=True, careful=True, settled=True),
    Aim(0.05, 16, moving=True, careful=True, settled=True, across=True),
    Aim(0.02, 4, moving=True),
    Aim(0.05, 16, moving=True, settled=True),
)
_LATER = (
    Aim(0.15, 16),
    Aim(0.15, 4, moving=True, careful=True, settled=True),
    Aim(0.05, 16),
    Aim(0.3, 16),
    Aim(0.15, 4),
    Aim(0.15, 1),
)


def aims(num_ops: int) -> tuple[tuple[Aim, ...], tuple[Aim, ...]]:
    """What to try, the likeliest first; and what to try where none of that leads to a plan that fits."""
    windows = _WINDOWS if num_ops <= _SMALL_OPS else (16, 4, 1)
    tight = tuple(Aim(reserve, count) for reserve in _TIGHT for count in windows)
    if num_ops > _LARGE_OPS:  # of which few are tried: both beliefs at least
        return (_LATER[0], *_CAREFUL_FIRST, *_LATER[1:]), tight
    if num_ops > _SMALL_OPS:
        return _CAREFUL_FIRST + _LATER, tight
    every = tuple(Aim(reserve, count) for reserve in _ROOMY for count in windows)
    across = tuple(Aim(reserve, count, across=True) for reserve in (0.15, 0.0) for count in windows)
    return every + _CAREFUL_FIRST + across, tight


def careful(machine: Machine) -> Machine:
    """The machine with the shares of its tiers' rates that leave room for queues."""
    tiers = (_slower(tier, _CAREFUL_NEAR if tier.host_computes else _CAREFUL_FAR) for tier in machine.tiers)
    return dataclasses.replace(machine, tiers=tuple(tiers))


def _slower(tier: Tier, share: float) -> Tier:
    return dataclasses.replace(
        tier,
        read_bytes_per_s=share * tier.read_bytes_per_s,
        write_bytes_per_s=share * tier.write_bytes_per_s,
        mixed_read_bytes_per_s=share * tier.mixed_read_bytes_per_s,
        mixed_write_bytes_per_s=share * tier.mixed_write_bytes_per_s,
    )
