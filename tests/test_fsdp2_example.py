"""The example of a plan in an FSDP2 script: both of its commands, as its first lines give them."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import lading
from lading.cli.main import main
from lading.optim.torch_update import checked_rule
from lading.runtime.apply import stop_counting

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_both_commands_run(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "fsdp2_plan.py").read_text().replace("\\\n", " ")
    commands = [line.split() for line in re.findall(r"^    (lading .*|torchrun .*)$", text, re.MULTILINE)]
    starts = {"lading": ["-m", "lading.cli.main"], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    said = ""
    for program, *words in commands:
        named = [str(ROOT / "examples" / word) if word.endswith(".py") else word for word in words]
        command = [sys.executable, *starts[program], *named]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, timeout=200, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said += done.stdout
    assert [program for program, *_ in commands] == ["lading", "torchrun"]
    assert "residency *" in said
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1


@pytest.mark.long
def test_a_plan_for_tied_weights_is_applied_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tied_plan.py").write_text(
        "from fsdp2_plan import Model\n\n\ndef tied():\n    model = Model(width=32, layers=2)\n"
        "    model.head.weight = model.embed.weight\n    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    pins = [word for pin in ("zero=3", "pp=1", "tp=1", "cp=1", "mb=4") for word in ("--pin", pin)]
    asked = ["--machine", "h100", "--devices", "2", "--global-batch", "16", "--seq", "32", *pins]
    assert main(["plan", "--model", "tied_plan:tied", *asked, "--out", str(tmp_path / "plan.json")]) == 0
    made: Any = importlib.import_module("tied_plan")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = lading.apply(lading.Plan.load(tmp_path / "plan.json"), made.tied(), init_device_mesh("cpu", (2,)))
        assert isinstance(model, FSDPModule)
        checked_rule(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))  # for a Trainer beside it
        stop_counting(model)
    finally:
        dist.destroy_process_group()
