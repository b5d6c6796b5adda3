"""What torch's pipelines take when run: stages that sleep, over gloo, beside what is simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.sleepers import CHUNKS, FORWARD_S, INPUT_S, MICRO_BATCHES, NAMES, RANKS, WEIGHT_S
from tools.pipelines import PipelineSeconds, simulate_pipeline

from lading.ir.schedules import schedule

SEND_S = 0.0005  # a few bytes over gloo, with torch's bookkeeping


@pytest.mark.slow
def test_torch_takes_what_is_simulated(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.sim.sleepers", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=280, cwd=root, capture_output=True)
    took: dict[str, float] = json.loads((tmp_path / "seconds.json").read_text())
    seconds = PipelineSeconds(
        forward=FORWARD_S,
        backward=INPUT_S + WEIGHT_S,
        backward_input=INPUT_S,
        backward_weight=WEIGHT_S,
        send_forward=SEND_S,
        send_backward=SEND_S,
    )
    assert took.keys() == NAMES.keys()
    for kind, found in took.items():
        plan = schedule(kind, RANKS, CHUNKS[kind], MICRO_BATCHES)
        expected = simulate_pipeline(plan, seconds, overlap=kind != "1f1b").makespan_s
        print(kind, round(found, 4), round(expected, 4))
        assert found == pytest.approx(expected, rel=0.1), kind
