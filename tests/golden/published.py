"""Errors on published steps by source, and the layouts that searches find."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tools.validate.document import document_of
from tools.validate.rows import Row, read_rows
from tools.validate.scoring import Simulator, outcomes_of

from lading.clusters import space_of
from lading.ir.request import Request
from lading.planner.layouts import find_layouts

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"
#: Of the published rows, so many of each source are compared by themselves.
_EACH = 1


@cache
def _rows() -> list[Row]:
    return read_rows([_FOLDER / "measurements.jsonl", _FOLDER / "measurements_vtrain_single_node.jsonl"])[0]


def some_rows() -> dict[str, Any]:
    """A few rows of each source: seconds and bytes that are predicted."""
    by_source: dict[str, list[Row]] = {}
    for row in _rows():
        by_source.setdefault(row.family, []).append(row)
    rows = [row for found in by_source.values() for row in found[:: max(1, len(found) // _EACH)][:_EACH]]
    return {
        outcome.row.id: [outcome.prediction.step_s, outcome.prediction.peak_bytes]
        if outcome.prediction
        else outcome.reason
        for outcome in outcomes_of(rows, Simulator())
    }


def leaderboard() -> dict[str, Any]:
    """Errors by source, as shipped and with each source left out of what was fitted."""
    simulator = Simulator()
    document = document_of(outcomes_of(_rows(), simulator), outcomes_of(_rows(), simulator, fitted=False))
    return {key: document[key] for key in ("rows", "rows_skipped", "step_time", "step_time_left_out", "memory")}


#: Searches that take a moment: what is asked, devices, sequences of a step, and what is pinned.
SEARCHES: dict[str, tuple[Request, int, int, dict[str, Any]]] = {
    "gpt2": (Request(model="gpt2", machine="h100", seq_len=512), 4, 8, {"micro_batch": 2, "cp": 1}),
    "gpt2 muon": (
        Request(model="gpt2", machine="h100", seq_len=512, optimizer="muon"),
        4,
        8,
        {"micro_batch": 2, "cp": 1, "recompute": "none"},
    ),
    "llama3-8b": (
        Request(model="llama3-8b", machine="h100", seq_len=4096, stack="torchtitan-compile"),
        8,
        32,
        {"micro_batch": 1, "cp": 1},
    ),
    "mixtral": (
        Request(model="mixtral-8x7b", machine="h100", seq_len=4096, stack="megatron-core"),
        32,
        64,
        {"micro_batch": 1, "cp": 1, "schedule": "1f1b", "vpp": 1},
    ),
}
#: Those of benchmarks/planner/search.py: 34 and 271 million plans.
LARGE_SEARCHES = {
    "gpt-1t": (Request(model="gpt-1t", machine="h100", seq_len=2048), 10_240, 10_240, {}),
    "deepseek-v3": (Request(model="deepseek-v3", machine="h100", seq_len=4096), 10_240, 10_240, {}),
}


def searched(request: Request, devices: int, batch: int, pins: dict[str, Any]) -> dict[str, Any]:
    """What a search finds: how much it saw, what is proven, and its first ten rows."""
    found = find_layouts(space_of(replace(request, devices=devices, global_batch=batch, pins=pins)))
    return {
        "counted": found.counted,
        "proven": found.proven,
        "bound_s": found.bound_s,
        "chosen": str(found.chosen.request.layout),
        "chosen_s": found.chosen.step.step_s,
        "best": [
            {"layout": str(one.layout), "step_s": one.step_s, "bound_s": one.bound_s, "peaks": one.peaks}
            for one in found.best[:10]
        ],
        "faster_but_too_large": [str(one.layout) for one in found.over],
    }
