"""The example of a placed model: both of its commands, as its first lines give them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
def test_both_commands_run(tmp_path: Path) -> None:
    text = (EXAMPLES / "placed.py").read_text().replace("\\\n", " ")
    commands = [line.split() for line in re.findall(r"^    (lading .*|torchrun .*)$", text, re.MULTILINE)]
    starts = {"lading": ["-m", "lading.cli.main"], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    path = os.pathsep.join([str(EXAMPLES.parent / "src"), str(EXAMPLES)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    said = ""
    for program, *words in commands:
        named = [str(EXAMPLES / word) if word.endswith((".py", ".toml")) else word for word in words]
        command = [sys.executable, *starts[program], *named]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, timeout=200, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said += done.stdout
    assert [program for program, *_ in commands] == ["lading", "torchrun"]
    assert "the memory of server is full" in said
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", said)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1
