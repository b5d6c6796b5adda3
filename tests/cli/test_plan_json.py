"""docs/plan-json.md names every key that is written, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.plans import some_plan

from lading.cli.main import main

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


def test_every_key_of_a_plan_is_described(tmp_path: Path) -> None:
    some_plan().save(tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    text = DOCS.read_text().split("## ")[1]
    whole, request, choices, _, predictions = re.split(r"^`(?:request|choices|program|predictions)`", text, flags=re.M)
    assert described(whole) == plan.keys()
    for part, name in ((request, "request"), (choices, "choices"), (predictions, "predictions")):
        assert described(part) == plan[name].keys()
