"""One type of plan, of a run, of a cluster and of unlike devices: each comes back as it was, or is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.plans import cluster_plan, placed_plan, some_plan

from lading.errors import ConfigError
from lading.ir.plan import (
    PLAN_FORMAT,
    Choice,
    Choices,
    Plan,
    PlanKind,
    PolicyRow,
    Predictions,
    ResourceLimit,
    ShardedUnit,
)
from lading.ir.request import Request

PLANS = {PlanKind.RUN: some_plan(), PlanKind.CLUSTER: cluster_plan(), PlanKind.PLACEMENT: placed_plan()}
#: What saved plans of format 4 and before were told apart by.
EARLIER: dict[str, dict[str, Any]] = {
    "run": {"format": 4, "choices": {}, "request": {}},
    "cluster": {"format": 2, "groups": [], "layout": "dp8,zero3", "model": "llama3-8b"},
    "placement": {"format": 1, "groups": [], "units": 10, "model": "gpt"},
}


@pytest.mark.parametrize("kind", PlanKind)
def test_a_plan_is_read_as_it_was_written_and_says_what_it_is(kind: PlanKind, tmp_path: Path) -> None:
    PLANS[kind].save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json", kind)
    assert plan == PLANS[kind]
    assert plan.kind is kind
    assert plan.fingerprint == PLANS[kind].fingerprint
    for other in PlanKind:
        if other is not kind:
            with pytest.raises(ConfigError, match=f"expected a {other}, found a {kind}; make one with: lading pla"):
                Plan.load(tmp_path / "plan.json", other)


def test_how_far_above_its_bound_a_plan_is_and_what_it_unshards() -> None:
    assert cluster_plan().gap == pytest.approx(0.1)
    twice = cluster_plan(layout="dp8,zero3,gb16")
    assert twice.micro_batches == 2
    assert twice.unshards == (1 + 2 + 2, 2)  # the first unit stays, the second until backward, the third not at all
    assert repr(cluster_plan()) == ("Plan(llama3-8b on 8 x h100: dp8,zero3,gb8; step 1.100 s, 10.0% above the bound)")
    assert repr(placed_plan()) == "Plan(gpt on a: 1 parts, step 1.000 s)"


@pytest.mark.parametrize(
    "change", [{"format": 99}, {"layout": 3}, {"layout": "dp8,xy3"}, {"predictions": {"step_s": "much"}}]
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(cluster_plan().to_dict() | change))
    with pytest.raises(ConfigError, match=r"plan\.json.*(expected|missing)"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("name", EARLIER)
def test_a_plan_of_an_earlier_version_is_refused_by_its_format(name: str, tmp_path: Path) -> None:
    """Its fields are others: that it is old is said, not which fields."""
    (tmp_path / "plan.json").write_text(json.dumps(EARLIER[name]))
    said = (
        rf"plan\.json: expected a plan of format {PLAN_FORMAT}, found format {EARLIER[name]['format']} of an earlier "
        "Lading; plan again"
    )
    for kind in (None, *PlanKind):
        with pytest.raises(ConfigError, match=said):
            Plan.load(tmp_path / "plan.json", kind)


#: A hash of the fields that files of the format have: who changes fields raises the format too.
_KINDS = (Plan, Request, Choices, Choice, ShardedUnit, Predictions, PolicyRow, ResourceLimit)
_FIELDS = (16, "a0e1a3f1")


def test_fields_do_not_change_without_the_format() -> None:
    names = [field.name for kind in _KINDS for field in dataclasses.fields(kind)]
    found = hashlib.sha256(" ".join(names).encode()).hexdigest()[:8]
    assert (PLAN_FORMAT, found) == _FIELDS, "other fields than the format's: raise it"


def test_a_unit_has_modules() -> None:
    with pytest.raises(ConfigError, match="at least one module"):
        ShardedUnit(modules=())


def test_a_placement_names_its_devices() -> None:
    with pytest.raises(ConfigError, match="expected devices among a, got 'b'"):
        placed_plan(placement=(("x", "b"),))
