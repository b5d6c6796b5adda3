"""The benchmark out of core runs a tiny cell from the probe to the table, with losses equal to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_tiny_cell_is_planned_measured_and_shown(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks/out_of_core/run.py")]
    cell = ["--folder", str(tmp_path), "--threads", "1", "--model", "tiny", "--tokens", "64", "--budgets", "90%"]
    results = tmp_path / "results.json"
    turns = ["--turns", "2", "--steps", "2", "--json", str(results), "--sides", "plain", "lading", "fsdp2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    for arguments in (["probe", *cell[:4]], ["plan", *cell], ["measure", *cell, *turns]):
        subprocess.run([*script, *arguments], check=True, timeout=300, env=environment, capture_output=True)
    found = json.loads(results.read_text())["cells"]["tiny fp32 64"]
    assert found["failed"] == {}
    assert found["sides"].keys() == {"plain", "lading 90%", "fsdp2"}
    ours, plain = found["sides"]["lading 90%"], found["sides"]["plain"]
    assert ours["losses"] == plain["losses"]
    assert len(ours["losses"]) == 2 + 2 * 2
    assert ours["plan"]["limits"][0]["seconds"] <= ours["plan"]["bound_s"] <= ours["plan"]["step_s"]
    assert ours["written"] == pytest.approx(ours["plan"]["written"], rel=0.05, abs=0.1)
    shown = subprocess.run([*script, "show", "--json", str(results)], check=True, capture_output=True, env=environment)
    assert b"| tiny fp32 64 | lading 90% |" in shown.stdout
    assert b"equal in 6" in shown.stdout
