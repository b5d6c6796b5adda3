"""The benchmark of a capped GPU runs from end to end on the stand-in device, Lading beside the other ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_dry_run_trains_on_the_stand_in_device(tmp_path: Path) -> None:
    out = tmp_path / "results" / "dry"
    command = [sys.executable, str(ROOT / "benchmarks/gpu/out_of_core.py"), "--dry", "--minutes", "10"]
    command += ["--driver", "tests.test_open_tiers:stand_in", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    subprocess.run(command, check=True, timeout=600, env=environment)
    sections = json.loads(out.with_suffix(".json").read_text())["sections"]
    assert {name: found["failed"] for name, found in sections.items() if "failed" in found} == {}
    ours = {name: found for name, found in sections.items() if name.endswith(": Lading")}
    assert len(ours) == 4
    for name, found in ours.items():
        assert found["limit_s"] <= found["bound_s"] <= found["predicted_step_s"], name
        assert found["tokens_per_s"] > 0
        assert found["peak_bytes"] <= found["budget_bytes"]
        plain = sections[name.replace("Lading", "plain PyTorch")]
        assert found["losses"] == plain["losses"], name
    assert "| tiny-1 in 85%: Lading |" in out.with_suffix(".md").read_text()
