"""What the benchmark of the memory manager measures is what is asked of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_clean_copy_is_written_and_nothing_is_allocated_in_the_steady_state(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    script = [sys.executable, str(ROOT / "benchmarks/out_of_core/memory_manager.py"), "--folder", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [*script, "--only", "disk", "--json", str(results)]
    subprocess.run(command, check=True, timeout=600, env=environment, capture_output=True)
    found = json.loads(results.read_text())["disk"]
    steady = found["steady"]
    assert steady["written"] == found["predicted"]["disk_write"] < found["evicted"]
    assert steady["read"] == found["predicted"]["disk_read"] == found["evicted"]
    assert (steady["new buffers"], steady["transfer faults"]) == (0, 0)
    assert found["clean"]["of clean copies"] == 0 < found["clean"]["writes"]
    assert found["directions"]["both"]["seconds of a step"] > 0
