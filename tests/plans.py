"""Plans made up for tests, by the names of their fields whichever part of the plan has them."""

from __future__ import annotations

import dataclasses
from typing import Any

from lading.ir.plan import Choice, Choices, Option, Plan, PlanRequest, PolicyRow, Predictions

_PARTS = {"request": PlanRequest, "choices": Choices, "predictions": Predictions}


def some_plan(**changes: Any) -> Plan:
    """A plan with something in every field, of the plan or of a part of it; ``changes`` replace them by name."""
    fields: dict[str, Any] = {
        "version": "0.1",
        "graph_fingerprint": "aa",
        "machine_fingerprint": "bb",
        "host_id": "",
        "policy": "residency",
        "budgets": {"device": 10, "disk": 20},
        "settings": {"clip_norm": 0.0},
        "machine": {"name": "test", "tiers": [{"name": "disk"}]},
        "run": {"model": {"name": "llama"}},
        "gaps": (Choice(1, 2, 3, Option("disk")), Choice(4, 6, 5, Option.RECOMPUTE)),
        "deferred": 1,
        "hosted": (7,),
        "retimed": 2,
        "program": ("arena 4096", "0 COMPUTE compute op=0"),
        "step_s": 0.5,
        "lower_bound_s": 0.4,
        "keep_all_bytes": 9,
        "host_saves_s": 0.1,
        "peak_bytes": {"device": 5},
        "bytes_by_role": {"parameter": 3},
        "policies": (
            PolicyRow(policy="keep-all", fits=False, peak_bytes=9, note="does not fit"),
            PolicyRow(policy="residency", fits=True, peak_bytes=5, step_s=0.5, moved_bytes={"disk_read": 7}),
        ),
        "actions": ("0.000 500000.000",),
        "assumptions": ("the disk is idle",),
    } | changes
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        names = {field.name for field in dataclasses.fields(kind)} & fields.keys()
        parts[part] = kind(**{name: fields.pop(name) for name in names})
    return Plan(**fields, **parts)
