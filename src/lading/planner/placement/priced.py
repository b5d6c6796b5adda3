"""Rounding by prices: the relaxation's rows of memory and load as prices, and the cheapest way through the order.

With a price u_d of a byte on device d, and a weight v_d of its load (the weights add up to 1), the groups 0..n-1 in
order get the devices d(0)..d(n-1) that minimize

    sum of p_gd (1 + (M - 1) v_d) + (resident_g + kept_g) u_d + sum of x_{d(g-1) d(g)}(g)

where x are the seconds of all flows over a cut (``lading.planner.placement.chain.crossings``); that is a shortest way
in n layers of devices (``_cheapest``). It is the Lagrangian of the relaxation in ``lading.planner.placement.relaxed``
with order and flows taken along one chain. Prices rise where a device is too full or busier than the others, and fall
where there is room (``priced``); every round gives a placement, whole where linear programs give shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lading.ir.placement import Problem
from lading.planner.placement.chain import crossings

_ROUNDS = 16
_STEP = 0.6


def priced(problem: Problem, memory: Sequence[int]) -> Iterator[list[int]]:
    """Assignments of groups to devices, one a round."""
    groups, copies = problem.groups, problem.micro_batches
    seconds = np.array([[s + o / copies for s, o in zip(g.seconds, g.once_s, strict=True)] for g in groups])
    need = np.array(problem.alone_bytes, float)
    room = np.maximum(np.array(memory, float), 1.0)
    cuts = crossings(problem)
    known = np.where(np.isfinite(seconds), seconds, 0.0)
    worth = known.max(axis=1).sum() / max(need.sum(), 1.0)  # seconds that a byte may cost
    price, weight = np.zeros(len(memory)), np.full(len(memory), 1 / len(memory))
    for turn in range(_ROUNDS):
        costs = seconds * (1 + (copies - 1) * weight) + need[:, None] * price
        devices = _cheapest(costs, cuts)
        yield devices
        place = np.array(devices)
        used = np.bincount(place, weights=need, minlength=len(memory)) / room
        load = np.bincount(place, weights=known[np.arange(len(groups)), place], minlength=len(memory))
        step = _STEP / (1 + turn / 4)
        price = np.maximum(0.0, price + step * worth * (used - 1))
        weight = weight * np.exp(step * load / max(load.max(), 1e-30))
        weight /= weight.sum()


def _cheapest(costs: np.ndarray, cuts: np.ndarray) -> list[int]:
    """The device of each group on the shortest way through ``costs[g, d]`` and ``cuts[g, before, after]``."""
    count, devices = costs.shape
    total, back = costs[0], np.zeros((count, devices), int)
    for group in range(1, count):
        ways = total[:, None] + cuts[group]
        back[group] = ways.argmin(axis=0)
        total = ways.min(axis=0) + costs[group]
    found = [int(total.argmin())]
    for group in range(count - 1, 0, -1):
        found.append(int(back[group][found[-1]]))
    return found[::-1]
