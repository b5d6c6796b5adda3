"""A saved plan and the captured graph are all that training needs: planner, simulator and costs may be missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lading
from lading.config import load_run
from lading.ir.graph import StepGraph
from lading.ir.plan import Option, Plan
from lading.memory.lifetime import Lifetimes, gaps
from lading.prepare import plan_run
from tests.machines import small_machine
from tests.runs import saved_plan, write_run
from tests.train_saved import Net, batch, loop_losses, mean_square, run_losses


def states_on_disk(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """A plan without a search."""
    large = [g for g in gaps(graph, lives) if graph.storages[g.storage].size_bytes >= 4096]
    return {(g.storage, g.start): Option("disk") for g in large if graph.storages[g.storage].role == "optimizer_state"}


@pytest.mark.long
def test_training_from_a_saved_plan_imports_no_planner_no_simulator_and_no_costs(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    graph = lading.capture(Net(), batch(0), mean_square)
    loop = lading.plan(graph, small_machine(), budget="100%", policy=states_on_disk, cache=False)
    assert any(choice.option == Option("disk") for choice in loop.choices.gaps)
    loop.save(tmp_path / "loop.json")
    (tmp_path / "files").mkdir()
    settings = ("optimization.steps=4", "memory.policy=checkpoint-every-block", "memory.budget=80MB")
    run = plan_run(load_run(write_run(tmp_path / "files"), settings)).plan
    assert run.choices.gaps
    saved_plan(run, tmp_path / "run")
    script = Path(__file__).with_name("train_saved.py")
    child = subprocess.run([sys.executable, str(script), str(tmp_path)], check=False, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses["run"]) == 4
    assert losses["run"] == run_losses(saved_plan(run, tmp_path / "here"))
    assert losses["loop"] == loop_losses(tmp_path / "loop.json")
    assert (tmp_path / "run" / "report.html").is_file()
    assert Plan.load(tmp_path / "run" / "plan.json").fingerprint == run.fingerprint
    torch.set_num_threads(threads)
