"""Plans made up for tests, by the names of their fields whichever part of the plan has them."""

from __future__ import annotations

import dataclasses
from typing import Any

from lading.ir.plan import Choice, Choices, Option, Plan, PolicyRow, Predictions, ResourceLimit, ShardedUnit
from lading.ir.request import Request

_PARTS = {"request": Request, "choices": Choices, "predictions": Predictions}


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
        "machine": "test",
        "machine_table": {"name": "test", "tiers": [{"name": "disk", "kind": "file"}]},
        "run": {"model": {"name": "llama"}},
        "gaps": (Choice(1, 2, 3, Option("disk")), Choice(4, 6, 5, Option.RECOMPUTE)),
        "deferred": 1,
        "hosted": (7,),
        "retimed": 2,
        "program": ("arena 4096", "0 COMPUTE compute op=0"),
        "step_s": 0.5,
        "lower_bound_s": 0.4,
        "limits": (
            ResourceLimit(resource="computing", seconds=0.4),
            ResourceLimit(resource="reads from disk", seconds=0.2, size_bytes=7),
        ),
        "keep_all_bytes": 9,
        "host_saves_s": 0.1,
        "peaks": {"step": {"device": 5}},
        "bytes_by_role": {"parameter": 3},
        "policies": (
            PolicyRow(policy="keep-all", fits=False, peak_bytes=9, note="does not fit"),
            PolicyRow(policy="residency", fits=True, peak_bytes=5, step_s=0.5, moved_bytes={"disk_read": 7}),
        ),
        "actions": ("0.000 500000.000",),
        "assumptions": ("the disk is idle",),
    } | changes
    return _made(fields)


def cluster_plan(**changes: Any) -> Plan:
    """A plan of a small model on a cluster; ``changes`` replace its fields, or those of a part of it, by name."""
    fields: dict[str, Any] = {
        "version": "0.1",
        "model": "llama3-8b",
        "machine": "h100",
        "machine_fingerprint": "abc",
        "devices": 8,
        "seq_len": 8192,
        "pins": {"zero": 3, "offload": ()},
        "budgets": {"device": 6},
        "layout": "dp8,zero3,gb8",
        "units": (
            ShardedUnit(modules=("",), reshard_after_forward=False, reshard_after_backward=False, unsharded_bytes=10),
            ShardedUnit(modules=("layers.0", "layers.1"), reshard_after_forward=False, prefetch_forward=2),
            ShardedUnit(modules=("layers.2",)),
        ),
        "step_s": 1.1,
        "lower_bound_s": 1.0,
        "peaks": {"step": {"device": 5, "host": 1}},
    }
    return _made(fields | changes)


def placed_plan(**changes: Any) -> Plan:
    """A plan of a small model on unlike devices; ``changes`` replace its fields, or those of a part of it, by name."""
    fields: dict[str, Any] = {
        "version": "0.1",
        "model": "gpt",
        "machine": "two",
        "machine_fingerprint": "aa",
        "budgets": {"a": 2},
        "policy": "chain",
        "seq_len": 4,
        "layout": "gb1",
        "placement": (("x", "a"),),
        "in_flight": {"a": 1},
        "step_s": 1.0,
        "lower_bound_s": 1.0,
        "peaks": {"step": {"a": 1}},
    }
    return _made(fields | changes)


def _made(fields: dict[str, Any]) -> Plan:
    """A plan of fields by their names; ``layout`` is the plan's, not what was asked for, ``units`` those of choices."""
    plan = {field.name for field in dataclasses.fields(Plan)} - _PARTS.keys()
    parts: dict[str, Any] = {part: {} for part in _PARTS}
    own: dict[str, Any] = {}
    for name, value in fields.items():
        homes = [part for part, kind in _PARTS.items() if name in {field.name for field in dataclasses.fields(kind)}]
        if name in plan:
            own[name] = value
        elif name == "units":
            parts["choices"]["units"] = value
        else:
            parts[homes[0]][name] = value
    return Plan(**own, **{part: kind(**parts[part]) for part, kind in _PARTS.items()})
