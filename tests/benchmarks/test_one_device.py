"""The benchmark of a GPU runs from end to end on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "one_device.py"


@pytest.mark.slow
def test_a_dry_run_has_every_section(tmp_path: Path) -> None:
    out = tmp_path / "results" / "dry"
    command = [sys.executable, str(SCRIPT), "--dry", "--minutes", "20", "--out", str(out)]
    subprocess.run(command, check=True, timeout=1200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    sections = json.loads(out.with_suffix(".json").read_text())["sections"]
    failed = {name: found["failed"] for name, found in sections.items() if "failed" in found}
    assert all(text.startswith("PlanInfeasible") for text in failed.values()), failed
    assert all(row["equal_bits"] for row in sections["compared"]["rows"].values())
    assert {"budget 100%, host", "budget 50%, host", "budget 50%, disk"} <= sections["compared"]["rows"].keys()
    assert sections["operations"]["wrong"] == []
    assert sections["operations"]["errors"] == {}
    for name, found in sections.items():
        for budget in ("100%", "50%"):
            case = found.get(f"budget {budget}") if name.startswith("parity") else None
            if isinstance(case, dict):
                assert case["losses_equal"], name
                assert case["weights_that_differ"] == 0, name
    text = out.with_suffix(".md").read_text()
    assert all(f"## {name}" in text for name in sections)
