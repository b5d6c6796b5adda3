"""docs/plan-json.md names every key that is written, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lading.cli.main import main

DOCS = Path(__file__).parents[2] / "docs" / "plan-json.md"


def test_every_key_is_described(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = ["--devices", "2", "--global-batch", "4", "--seq", "256", "--pin", "cp=1", "--pin", "mb=1"]
    command = ["plan", "--model", "gpt2", "--machine", "h100", *options, "--json", str(out)]
    assert main([*command, "--out", str(tmp_path / "plan.json")]) == 0
    found = json.loads(out.read_text())
    whole, each = DOCS.read_text().split("Each of `layouts`")
    for text, keys in ((whole, found.keys()), (each, found["layouts"][0].keys())):
        rows = re.findall(r"^\| (`.*?`(?:, `.*?`)*) \|", text, re.MULTILINE)
        assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(keys)
