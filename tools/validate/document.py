"""Document of scores: what ``python -m tools.validate --json`` writes and the terminal shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lading.report.understood import understood
from lading.sim.simulate import machine_of
from lading.units import GiB
from tools.validate.order import noise, order
from tools.validate.protocols import anchored, by_framework, framework_anchored, framework_left_out, left_out
from tools.validate.scoring import (
    MEMORY_KINDS,
    Outcome,
    Pair,
    breakdown,
    memory_pairs,
    step_pairs,
    summary,
    worst,
)


def document_of(
    outcomes: Sequence[Outcome], unfitted: Sequence[Outcome] = (), guessed: Sequence[Outcome] = ()
) -> dict[str, Any]:
    """Collect all scores in one document; fractions, not percent.

    ``step_time`` and ``memory`` (allocated bytes) are of tier A, one row for each configuration; ``step_time_anchored``
    knows one run of each software stack, ``step_time_left_out`` only what other families say of it.

    Args:
        unfitted: Outcomes of these rows, predicted without what was fitted on whole steps: for ``step_time_left_out``,
            and for anchors, which then stand in its place.
        guessed: Outcomes of these rows as software that is not known, for ``step_time_framework_left_out`` and
            ``step_time_framework_anchored``, which knows one run of each framework.
    """
    steps = step_pairs(outcomes)
    plain = step_pairs(unfitted)
    scaled, anchors = anchored(plain or steps)
    away = framework_left_out(plain, step_pairs(guessed))
    near, runs = framework_anchored(away)
    memory = memory_pairs(outcomes)
    return {
        "rows": len(outcomes),
        "rows_skipped": sum(outcome.prediction is None for outcome in outcomes),
        "skipped": [{"id": o.row.id, "reason": o.reason} for o in outcomes if o.prediction is None],
        "step_time": summary(steps),
        "memory": summary(memory),
        "step_time_anchored": {**summary(scaled), "anchors": {name: list(anchor) for name, anchor in anchors.items()}},
        "step_time_left_out": summary(left_out(plain)),
        "step_time_framework_left_out": {**summary(away), "frameworks": by_framework(away)},
        "step_time_framework_anchored": {
            **summary(near),
            "frameworks": by_framework(near),
            "anchors": {name: list(run) for name, run in runs.items()},
        },
        "step_time_tier_b": summary(step_pairs(outcomes, "B")),
        "memory_by_kind": {kind: summary(memory_pairs(outcomes, kind)) for kind in MEMORY_KINDS},
        "memory_above_interval": [_brief(pair) for pair in memory if pair.measured > pair.high],
        "ran_but_said_not_to_fit": [o.row.id for o in outcomes if o.prediction is not None and not o.prediction.fits],
        "by": breakdown(steps),
        "order": order(steps),
        "order_any_batch": order(steps, any_batch=True),
        "noise": noise(outcome.row for outcome in outcomes),
        "worst": [_brief(pair) for pair in worst(steps)],
        "worst_memory": [_brief(pair, GiB) for pair in worst(memory, 5)],
    }


def _brief(pair: Pair, unit: float = 1.0) -> dict[str, Any]:
    request = pair.outcome.request
    assert request is not None
    return {
        "id": pair.outcome.row.id,
        "error": pair.error,
        "measured": pair.measured / unit,
        "predicted": pair.predicted / unit,
        "machine": request.machine,
        "stack": request.stack.name,
        "layout": str(request.layout),
    }


def predictions_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """List every row with what was measured, predicted and assumed, for a closer look."""
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        row, prediction, request = outcome.row, outcome.prediction, outcome.request
        line: dict[str, Any] = {"id": row.id, "family": row.family, "tier": row.tier, "measured_s": outcome.measured_s}
        if request is not None:
            line |= {"machine": request.machine, "stack": request.stack.name, "layout": str(request.layout)}
        if prediction is None:
            line["reason"] = outcome.reason
        else:
            line |= {"step_s": prediction.step_s, "low_s": prediction.low_s, "high_s": prediction.high_s}
            line |= {"peak_bytes": prediction.peak_bytes, "shares": dict(prediction.shares)}
            if request is not None:
                line["understood"] = understood(request, machine_of(request))
                line["unread"] = list(request.unread)
                line["unstated"] = list(request.unstated)
            line["assumed"] = list(dict.fromkeys([*(request.assumed if request else ()), *prediction.assumed]))
        rows.append(line)
    return rows
