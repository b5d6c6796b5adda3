"""The host's seconds of a stretch: launches, passes, and a host that waits for each kernel."""

from __future__ import annotations

import pytest

from lading.errors import ConfigError
from lading.ir.stack import Stack
from lading.sim.parts import Part, span, total

STACK = Stack(name="any", title="any", launch_s=1e-3, block_s=5e-3, hidden={"tp": 1.0})
PART = Part(busy_s={"products": 0.1}, comm_s={"tp": 0.02}, launches=10, passes=1)


class Prices:
    def kernel_s(self, kernel: object) -> float:
        raise NotImplementedError

    def collective_s(self, collective: object) -> float:
        raise NotImplementedError

    def slowdown_beside(self, axis: str) -> float:
        return 0.0


def test_a_host_that_runs_ahead_is_hidden_and_one_that_is_slower_is_waited_for() -> None:
    assert span(PART, Prices(), STACK).seconds == pytest.approx(0.1)
    small = Part(busy_s={"products": 0.001}, launches=10, passes=1)
    waited = span(small, Prices(), STACK)
    assert waited.seconds == pytest.approx(10 * 1e-3 + 5e-3)
    assert waited.shares_s["launches"] == pytest.approx(0.015 - 0.001)
    assert span(total([(small, 4.0)]), Prices(), STACK).seconds == pytest.approx(4 * 0.015)


def test_a_host_that_waits_for_each_kernel_hides_nothing() -> None:
    blocking = Stack(name="any", title="any", launch_s=1e-3, block_s=5e-3, hidden={"tp": 1.0}, launch_blocking=True)
    found = span(PART, Prices(), blocking)
    assert found.seconds == pytest.approx(0.1 + 0.02 + 10 * 1e-3 + 5e-3)
    assert sum(found.shares_s.values()) == pytest.approx(found.seconds)


def test_graphs_need_no_host() -> None:
    graphs = Stack(name="any", title="any", launch_s=1e-3, block_s=5e-3, cuda_graphs=True)
    assert span(Part(busy_s={"products": 0.001}, launches=10, passes=1), Prices(), graphs).seconds == pytest.approx(
        1e-3
    )


def test_a_pass_of_negative_seconds_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_s must be >= 0"):
        Stack(name="any", title="any", block_s=-1.0)
