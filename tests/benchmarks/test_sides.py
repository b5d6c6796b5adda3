"""Sides of the benchmark of training out of core."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.models.reference import model_class
from lading.optim.master import MasterWeights

pytestmark = pytest.mark.usefixtures("one_thread")

_SIDES = Path(__file__).parents[2] / "benchmarks" / "out_of_core" / "sides.py"


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Any:
    specification = importlib.util.spec_from_file_location("sides", _SIDES)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "sides", module)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plain_side_trains_and_in_16_bits_float32_masters(sides: Any, precision: str) -> None:
    """A side whose optimizer has no gradients would look fast and need little memory."""
    sizes = {"num_layers": 1, "dim": 32, "num_heads": 2, "vocab_size": 64}
    side = sides.Side(
        kind="plain", model="gpt", sizes=sizes, tokens=16, precision=precision, threads=1, folder="unused"
    )
    step = sides.plain(side)
    losses = [step(side.batch(0)) for _ in range(4)]

    module = side.module()
    masters = MasterWeights(module)
    optimizer = torch.optim.AdamW(masters.parameters, lr=sides.LR)
    expected = []
    for _ in range(4):
        loss = model_class("gpt").loss(module, side.batch(0))
        loss.backward()
        masters.add_gradients()
        optimizer.step()
        masters.write_back()
        optimizer.zero_grad()
        expected.append(loss.item())

    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < losses[0] - 0.01
