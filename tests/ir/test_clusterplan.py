"""A saved plan of a cluster comes back as it was, or is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from lading.errors import ConfigError
from lading.ir.clusterplan import ClusterPlan, GatherGroup, Keep
from lading.ir.plan import Plan

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
    with pytest.raises(ConfigError):
        Plan.load(tmp_path / "plan.json")


def test_a_group_has_modules():
    with pytest.raises(ConfigError, match="at least one module"):
        GatherGroup(modules=())
