"""docs/plan-json.md names every key that is written, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.plans import cluster_plan, placed_plan, some_plan

from lading.cli.main import main
from lading.ir.plan import Plan

DOCS = Path(__file__).parents[2] / "docs" / "plan-json.md"


def described(text: str) -> set[str]:
    """Keys in the first column of the tables of a part of the page."""
    rows = re.findall(r"^\| (`.*?`(?:, `.*?`)*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_key_is_described(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--devices", "2", "--global-batch", "4", "--seq", "256", "--pin", "cp=1", "--pin", "mb=1"]
    command = ["plan", "--model", "gpt2", "--machine", "h100", *options, "--json", str(out)]
    assert main([*command, "--out", str(tmp_path / "plan.json")]) == 0
    found = json.loads(out.read_text())
    whole, each = DOCS.read_text().split("## ")[2].split("Each of `layouts`")
    for text, keys in ((whole, found.keys()), (each, found["layouts"][0].keys())):
        assert described(text) == set(keys)


@pytest.mark.parametrize("plan", [some_plan(), cluster_plan(), placed_plan()], ids=lambda plan: str(plan.kind))
def test_every_key_of_a_plan_is_described(plan: Plan, tmp_path: Path) -> None:
    """One schema, whatever a plan is of."""
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    text = DOCS.read_text().split("## ")[1]
    heads = r"^(?:Each of )?`(?:request|choices|units|program|predictions)`"
    whole, request, choices, unit, _, predictions = re.split(heads, text, flags=re.M)
    assert described(whole) == data.keys()
    for part, name in ((request, "request"), (choices, "choices"), (predictions, "predictions")):
        assert described(part) == data[name].keys()
    for each in data["choices"]["units"]:
        assert described(unit) == each.keys()
