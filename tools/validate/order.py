"""Order: whether the layout predicted fastest is the fastest; and how far apart equal rows were measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import numpy as np

from tools.validate.rows import Row
from tools.validate.scoring import Pair

#: A group of fewer layouts has no order to speak of.
SMALLEST_GROUP = 3


def order(pairs: Sequence[Pair], *, any_batch: bool = False) -> dict[str, dict[str, Any]]:
    """Compare the predicted and measured order of layouts, by family with groups of several layouts.

    A group has one model, machine, number of devices and batch.

    Args:
        any_batch: Groups share the model and the machine alone; compared are device-seconds of a token.

    Returns:
        By family: ``groups``, ``rows``, ``mean_regret`` and ``max_regret`` (how much slower the layout predicted
        fastest is than the fastest measured) and ``kendall_tau`` (mean over the groups).
    """
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        key = (pair.outcome.row.family, _same(pair.outcome.row, any_batch))
        groups.setdefault(key, []).append(_of_a_token(pair))
    by_family: dict[str, list[list[Pair]]] = {}
    for (family, _), group in groups.items():
        if len(group) >= SMALLEST_GROUP:
            by_family.setdefault(family, []).append(group)
    return {family: _figures(several) for family, several in sorted(by_family.items())}


def _same(row: Row, any_batch: bool) -> str:
    """Key that the rows of a group share."""
    besides = ("name", "note", "params_b", *(("seq_len",) if any_batch else ()))
    model = {k: v for k, v in row.model.items() if k not in besides}
    shared = [row.hardware["gpu"], row.layout.get("precision")]
    if not any_batch:
        shared += [row.hardware["gpus"], row.layout.get("global_batch")]
    return json.dumps([model, shared], sort_keys=True)


def _of_a_token(pair: Pair) -> Pair:
    """Pair in device-seconds of a token, so that steps of different batches compare."""
    request = pair.outcome.request
    assert request is not None
    share = request.layout.devices / request.tokens
    return dataclasses.replace(pair, measured=pair.measured * share, predicted=pair.predicted * share)


def _figures(groups: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    regrets = [regret(group) for group in groups]
    return {
        "groups": len(groups),
        "rows": sum(len(group) for group in groups),
        "mean_regret": float(np.mean(regrets)),
        "max_regret": float(np.max(regrets)),
        "kendall_tau": float(np.mean([kendall_tau(group) for group in groups])),
    }


def regret(group: Sequence[Pair]) -> float:
    """Fraction by which the layout predicted fastest ran slower than the fastest."""
    pick = min(group, key=lambda pair: (pair.predicted, pair.outcome.row.id))
    return pick.measured / min(pair.measured for pair in group) - 1


def kendall_tau(group: Sequence[Pair]) -> float:
    """Kendall's tau-b of predicted and measured seconds: 1 for one order, -1 for the reverse, 0 if one is all ties."""
    measured = np.array([pair.measured for pair in group])
    predicted = np.array([pair.predicted for pair in group])
    above = np.triu_indices(len(group), 1)
    left = np.sign(measured[:, None] - measured[None, :])[above]
    right = np.sign(predicted[:, None] - predicted[None, :])[above]
    both = float(np.sqrt(np.sum(left != 0) * np.sum(right != 0)))
    return float(np.sum(left * right)) / both if both else 0.0


def noise(rows: Iterable[Row]) -> dict[str, Any]:
    """Spread of the measurements of one configuration that was published more than once, every stated field equal.

    Returns:
        ``configurations``; ``median`` and ``p75`` of slowest over fastest, minus 1; and ``floor``: the mean error of a
        prediction of exactly their middle. None without repeats.
    """
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.step_s is not None:
            stated = {**row.layout, **row.model, **row.hardware}
            key = json.dumps([row.key, {k: v for k, v in stated.items() if k not in ("name", "note")}], sort_keys=True)
            times.setdefault(key, []).append(row.step_s)
    repeats = [times_s for times_s in times.values() if len(times_s) > 1]
    spreads = [max(times_s) / min(times_s) - 1 for times_s in repeats]
    floors = [
        sum(abs(sqrt(max(times_s) * min(times_s)) / each - 1) for each in times_s) / len(times_s) for times_s in repeats
    ]
    return {
        "configurations": len(repeats),
        "median": float(np.median(spreads)) if spreads else None,
        "p75": float(np.percentile(spreads, 75)) if spreads else None,
        "floor": float(np.mean(floors)) if floors else None,
    }
