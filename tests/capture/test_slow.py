"""What takes long says so, and time grows with layers, not with their square."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from tests.capture.parity import own, tokens

from lading.ir.expand import expand
from lading.models.loss import next_byte_loss
from lading.tracing.slow_notice import told_if_slow
from lading.tracing.trace import capture


def test_what_takes_long_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with told_if_slow("capture", lambda: 1234, every_s=0.01):
        time.sleep(0.05)
    assert "lading: capture: 1,234 operations after 0 s\n" in capsys.readouterr().err
    with told_if_slow("capture", lambda: 1234):
        pass
    assert not capsys.readouterr().err


def _calls(num_layers: int) -> int:
    """Calls of Python functions that making a step of accumulated micro-batches takes."""
    graph = capture(own("gpt", num_layers=num_layers), tokens(), next_byte_loss, accumulation=2)
    count = 0

    def see(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        expand(graph, clip_norm=1.0)
    finally:
        sys.setprofile(None)
    return count


def test_gradients_are_added_up_in_time_that_grows_with_layers() -> None:
    torch.manual_seed(0)
    assert _calls(12) < 5 * _calls(3)
