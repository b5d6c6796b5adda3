"""A saved plan of a cluster comes back as it was, or is refused."""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from lading.errors import ConfigError
from lading.ir.clusterplan import CLUSTER_PLAN_FORMAT, ClusterPlan, GatherGroup, Keep
from lading.ir.placedplan import PLACED_PLAN_FORMAT, PlacedDevice, PlacedGroup, PlacedPlan
from lading.ir.plan import PLAN_FORMAT, Choice, Choices, Plan, PlanRequest, PolicyRow, Predictions

PLAN = ClusterPlan(
    version="0.1",
    model="llama3-8b",
    machine="h100",
    machine_fingerprint="abc",
    stack="default",
    devices=8,
    seq_len=8192,
    layout="dp8,zero3,gb8",
    groups=(
        GatherGroup(modules=("",), keep=Keep.STEP, gathered_bytes=10),
        GatherGroup(modules=("layers.0", "layers.1"), keep=Keep.BACKWARD, ahead=2),
        GatherGroup(modules=("layers.2",)),
    ),
    step_s=1.1,
    bound_s=1.0,
    peaks={"step": {"device": 5, "host": 1}},
    budget_bytes=6,
)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path):
    PLAN.save(tmp_path / "plan.json")
    assert ClusterPlan.load(tmp_path / "plan.json") == PLAN
    assert PLAN.gap == pytest.approx(0.1)


@pytest.mark.parametrize("change", [{"format": 9}, {"layout": 3}, {"peaks": {"step": {"device": "much"}}}])
def test_another_file_is_refused(tmp_path: Path, change: dict[str, object]):
    (tmp_path / "plan.json").write_text(json.dumps(dataclasses.asdict(PLAN) | change))
    with pytest.raises(ConfigError, match=r"plan\.json.*expected"):
        ClusterPlan.load(tmp_path / "plan.json")


def test_plans_of_one_device_and_of_a_cluster_are_told_apart(tmp_path: Path):
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="expected a plan of a run of format 4, found a cluster plan; plan again"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="expected a placement of format 1, found a cluster plan; make one"):
        PlacedPlan.load(tmp_path / "plan.json")


def test_a_plan_of_an_earlier_version_is_refused_by_its_format(tmp_path: Path):
    """Its groups have fields that are no more: that it is old is said, not which fields."""
    data = dataclasses.asdict(PLAN) | {"format": 1, "reduces_each": True}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    said = (
        r"plan\.json: expected a cluster plan of format 2, found format 1 of an earlier Lading; make one with: lading"
    )
    with pytest.raises(ConfigError, match=said):
        ClusterPlan.load(tmp_path / "plan.json")


#: A hash of the fields that files of each format have: who changes fields raises the format too.
_FIELDS = {
    (ClusterPlan, GatherGroup): (CLUSTER_PLAN_FORMAT, 2, "4fd62b38"),
    (PlacedPlan, PlacedDevice, PlacedGroup): (PLACED_PLAN_FORMAT, 1, "abdc1c46"),
    (Plan, PlanRequest, Choices, Choice, Predictions, PolicyRow): (PLAN_FORMAT, 4, "752dbfd0"),
}


@pytest.mark.parametrize("kinds", _FIELDS)
def test_fields_do_not_change_without_the_format(kinds: tuple[type, ...]):
    number, of_hash, known = _FIELDS[kinds]
    names = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    found = hashlib.sha256(" ".join(names).encode()).hexdigest()[:8]
    assert (number, found) == (of_hash, known), "other fields than the format's: raise it"


def test_a_group_has_modules():
    with pytest.raises(ConfigError, match="at least one module"):
        GatherGroup(modules=())
