"""Engines that the simulator's speed is compared with give the same times."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from benchmarks.simulator.engines import heap_s, lading_s, simpy_s
from tools.pipelines import PipelineSeconds

from lading.ir.schedules import schedule

SECONDS = PipelineSeconds(
    forward=1, backward=2.25, backward_input=1.25, backward_weight=1, send_forward=0.25, send_backward=0.5
)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_engines_agree(kind: str) -> None:
    plan = schedule(kind, 4, {"interleaved": 3, "zbv": 2}.get(kind, 1), 8)
    assert heap_s(plan, SECONDS) == lading_s(plan, SECONDS)
    if find_spec("simpy"):
        assert simpy_s(plan, SECONDS) == pytest.approx(lading_s(plan, SECONDS))
