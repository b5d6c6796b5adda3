"""The host's seconds of a stretch: launches, passes, and a host that waits for each kernel."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.load import load_machine
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.stack import Stack
from lading.ir.work import Collective, Kernel, Stage
from lading.sim.parts import Part, part_of, span, total
from lading.sim.prices import MachinePrices

STACK = Stack(name="any", title="any", launch_s=1e-3, block_s=5e-3, hidden={"tp": 1.0})
PART = Part(busy_s={"products": 0.1}, comm_s={"tp": 0.02}, issued={"kernels": 10, "blocks": 1})


class Prices:
    def kernel_s(self, kernel: object) -> float:
        raise NotImplementedError

    def collective_s(self, collective: object) -> float:
        raise NotImplementedError

    precision = "bf16"

    def in_situ(self, cause: str) -> float:
        return 1.0

    def lateness(self, axis: str) -> float:
        return 1.5

    def lost_beside(self, axis: str, memory_bound: float) -> float:
        return 0.0


class FreePrices(Prices):
    def collective_s(self, collective: object) -> float:
        return 0.0


def test_a_host_that_runs_ahead_is_hidden_and_one_that_is_slower_is_waited_for() -> None:
    assert span(PART, Prices(), STACK).seconds == pytest.approx(0.1)
    small = Part(busy_s={"products": 0.001}, issued={"kernels": 10, "blocks": 1})
    waited = span(small, Prices(), STACK)
    assert waited.seconds == pytest.approx(10 * 1e-3 + 5e-3)
    assert waited.shares_s["launches"] == pytest.approx(0.015 - 0.001)
    assert span(total([(small, 4.0)]), Prices(), STACK).seconds == pytest.approx(4 * 0.015)


def test_a_host_that_waits_for_each_kernel_hides_nothing() -> None:
    blocking = Stack(name="any", title="any", launch_s=1e-3, block_s=5e-3, hidden={"tp": 1.0}, launch_blocking=True)
    found = span(PART, Prices(), blocking)
    assert found.seconds == pytest.approx(0.1 + 0.02 + 10 * 1e-3 + 5e-3)
    assert sum(found.shares_s.values()) == pytest.approx(found.seconds)


def test_ranks_that_come_late_are_waited_for_however_far_ahead_the_host_is() -> None:
    late = Stack(name="any", title="any", launch_s=1e-3, block_wait_s=3e-3, collective_wait_s=2e-3)
    kernels = [
        Kernel("sum", None, Stage.FORWARD, "", "bfloat16", 0, 0, (), (), Collective("all_reduce", "tp", 8)),
    ] * 2
    part = dataclasses.replace(part_of(kernels, FreePrices()), busy_s={"products": 1.0})
    found = span(part, Prices(), late)
    assert found.seconds == pytest.approx(1.0 + 3e-3 + 2 * 1.5 * 2e-3)
    assert found.shares_s["waiting in blocks"] == pytest.approx(9e-3)
    assert span(part, Prices(), dataclasses.replace(late, cuda_graphs=True)).seconds == pytest.approx(1.0)


def test_graphs_need_no_host() -> None:
    graphs = Stack(name="any", title="any", launch_s=1e-3, block_s=5e-3, cuda_graphs=True)
    assert span(
        Part(busy_s={"products": 0.001}, issued={"kernels": 10, "blocks": 1}), Prices(), graphs
    ).seconds == pytest.approx(1e-3)


def test_a_pass_of_negative_seconds_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_s must be >= 0"):
        Stack(name="any", title="any", block_s=-1.0)


def test_flat_rings_take_each_rank_through_its_own_nic() -> None:
    layout = parse_layout("dp64,zero3,gb64")
    machine = load_machine("a100")
    plain = Stack(name="any", title="any")
    nested, flat = (
        MachinePrices(machine, layout, stack).gather_s({"dp": 1_000_000_000})
        for stack in (plain, dataclasses.replace(plain, flat_rings=True))
    )
    assert 4 * nested < flat < 10 * nested
    one_node = MachinePrices(machine, parse_layout("dp8,zero3,gb8"), dataclasses.replace(plain, flat_rings=True))
    same = MachinePrices(machine, parse_layout("dp8,zero3,gb8"), plain)
    assert one_node.gather_s({"dp": 1_000_000_000}) == same.gather_s({"dp": 1_000_000_000})
