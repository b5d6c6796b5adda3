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


def test_gathers_into_lists_take_the_host_a_copy_for_each_rank() -> None:
    machine = load_machine("a100")
    plain = Stack(name="any", title="any", pieces=12)
    lists = dataclasses.replace(plain, gather_rank_s=5e-6)
    for words, ranks in (("dp64,zero3,gb64", 64), ("dp8,zero3,gb8", 8), ("zero3,gb1", 0), ("dp64,zero1,gb64", 0)):
        flat_s, lists_s = (
            MachinePrices(machine, parse_layout(words), stack).gather_s({"dp": 1_000_000_000})
            for stack in (plain, lists)
        )
        assert lists_s - flat_s == pytest.approx(12 * ranks * 5e-6)


def test_gradients_that_are_summed_whole_take_twice_as_long_between_nodes() -> None:
    machine, plain = load_machine("a100"), Stack(name="any", title="any")
    for stage, more in ((1, True), (2, True), (3, False)):
        layout = parse_layout(f"dp64,zero{stage},gb64")
        cut_s, whole_s = (
            MachinePrices(machine, layout, stack).reduce_s({"dp": 1_000_000_000})
            for stack in (plain, dataclasses.replace(plain, reduces_whole=2))
        )
        assert (1.8 * cut_s < whole_s < 2.2 * cut_s) if more else whole_s == cut_s
