"""Drivers of other simulators refuse what those cannot express, and committed results are those the README tells of."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.validate.test_rows import FILES
from tools.validate.requests import request_of
from tools.validate.rows import read_rows

from lading.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "simulator" / "peers"
ROWS = {row.id: row for row in read_rows(FILES[:1])[0]}


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("run", "drive_calculon", "drive_llm_analysis", "drive_simumax"):
        sys.modules.pop(name, None)
    return importlib.import_module("run")


@pytest.mark.parametrize(
    ("row", "calculon", "llm_analysis", "simumax"),
    [
        (
            "tt2412-002",
            "a system file for h100-96gb; models of family llama; sharded",
            "machine h100-96gb",
            "system file",
        ),
        ("mbridge26.08-pretrain-002", "models of family mla-moe", "models of family mla-moe", "precision mxfp8"),
        ("bloom-079", "layers that do not divide", "", "a system file for a100"),
        ("qwen-finetune-003", "the task lora", "the task lora", "the task lora"),
    ],
)
def test_what_a_simulator_cannot_express_is_refused(
    drivers: Any, row: str, calculon: str, llm_analysis: str, simumax: str
) -> None:
    request = request_of(ROWS[row])
    peers = (
        (drivers.Calculon(Path()), calculon),
        (drivers.LlmAnalysis(0.5), llm_analysis),
        (drivers.SimuMax(Path()), simumax),
    )
    for peer, message in peers:
        if message:
            with pytest.raises(ConfigError, match=message):
                peer.predict(request)


def test_committed_results_are_those_known_of_each_simulator() -> None:
    """Calculon's error on its own validation set as it prints it, SimuMax's as its release prints it."""
    found = {name: json.loads((FOLDER / "results" / f"{name}.json").read_text()) for name in ("calculon", "simumax")}
    assert found["calculon"]["step_time"]["families"]["korthikanti22"] == pytest.approx(0.0365, abs=5e-5)
    assert 0.10 < found["calculon"]["step_time"]["families"]["megatron-sc21"] < 0.12
    assert found["simumax"]["step_time"]["rows"] == 21
    assert found["simumax"]["memory"]["macro_abs_error"] < 0.005
