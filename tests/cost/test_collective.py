"""Collectives: no faster than the wires, slower with size, and as measured; groups as a layout places them."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lading.catalog.load import load_machine
from lading.catalog.networks import with_network
from lading.cost.collective import OPS, algorithm, collective_s, collectives_s, lines, nic_share
from lading.cost.topology import Group, group_of, group_of_ranks
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.machine import Curve, Machine

MACHINES = ("a100", "h100", "b200", "gb200", "mi300x", "v100-32gb", "l40s", "rtx4090")
SIZES = [8 * 4**n for n in range(16)]


def wire_bound_s(op: str, size: float, group: Group, machine: Machine) -> float:
    """What no algorithm can beat: bytes that must leave a rank, and a domain, over data sheet bandwidth."""
    near, n = machine.links[0], group.ranks
    leave = {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_to_all": (n - 1) / n}.get(op, 1.0)
    if op in ("all_gather", "reduce_scatter", "all_to_all") and group.domains > 1:
        leave = (group.domain_ranks - 1) / n
    if op == "all_reduce":
        leave = (1.0 if near.reduces else 2 * (n - 1) / n) if group.domains == 1 else 0.0
    bound = size * leave / near.bandwidth_bytes_per_s if group.domain_ranks > 1 else 0.0
    if group.domains > 1:
        d = group.domains
        out = {"all_reduce": 2 * (d - 1) / d, "broadcast": 1.0, "send": 1.0 / group.domain_ranks}.get(op, (d - 1) / d)
        if op == "all_to_all":
            out = group.domain_ranks * (n - group.domain_ranks) / n
        if op == "send":
            out = group.domain_ranks
        bound = max(bound, size * out / (group.domain_ranks * nic_share(machine.links[-1], group.busy)))
    return bound


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(MACHINES),
    st.sampled_from(OPS),
    st.integers(2, 600),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.floats(8, 1e11),
)
def test_no_collective_beats_its_wires_and_larger_ones_take_longer(
    name: str, op: str, ranks: int, apart: int, size: float
) -> None:
    machine = load_machine(name)
    group = group_of_ranks(ranks, machine, apart)
    seconds = collective_s(op, size, group, machine)
    assert seconds > wire_bound_s(op, size, group, machine)
    assert seconds < collective_s(op, size * 1.5, group, machine) < 1.6 * seconds


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("op", OPS)
def test_time_has_no_jumps(name: str, op: str) -> None:
    machine = load_machine(name)
    group = group_of_ranks(16, machine)
    for size in SIZES:
        step = collective_s(op, size * 1.01, group, machine) / collective_s(op, size, group, machine)
        assert 1 <= step < 1.011


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", MACHINES)
def test_many_sizes_at_once_take_as_long_as_one_by_one(name: str, op: str) -> None:
    machine = load_machine(name)
    for ranks in (1, 4, 8, 64):
        group = group_of_ranks(ranks, machine, devices=max(ranks, 64))
        many = collectives_s(op, np.array([0, *SIZES]), group, machine)
        alone = [collective_s(op, size, group, machine) for size in (0, *SIZES)]
        np.testing.assert_allclose(many, alone, rtol=1e-12)
    with pytest.raises(ConfigError, match="expected sizes >= 0"):
        collectives_s(op, np.array([1.0, -1.0]), group, machine)


def test_what_is_smaller_than_was_measured_takes_as_long_as_the_least_that_was() -> None:
    curve = Curve(size=(1024.0, 1e6), rate=(1e6, 1e9))
    machine = dataclasses.replace(load_machine("h100"), collectives={"all_reduce.2": curve})
    least_s = collective_s("all_reduce", 1024, Group(2, 2), machine)
    assert [collective_s("all_reduce", size, Group(2, 2), machine) for size in (0, 1, 1000)] == [least_s] * 3


def test_more_ranks_take_longer() -> None:
    machine = load_machine("h100")
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for size in (8.0, 1e6, 1e9):
            seconds = [collective_s(op, size, group_of_ranks(8 * n, machine), machine) for n in (2, 4, 16, 64, 512)]
            assert seconds == sorted(seconds), (op, size)


def test_a_tree_is_taken_where_thousands_of_ranks_reduce_little() -> None:
    machine = load_machine("h100")
    groups = [group_of_ranks(n, machine) for n in (256, 2048)]
    small, large = (collective_s("all_reduce", 1024, group, machine) for group in groups)
    assert algorithm("all_reduce", 1024, groups[1], machine).startswith(("tree", "NVLS"))
    assert large / small < 1.6
    assert collective_s("all_gather", 1024, groups[1], machine) > 5 * collective_s(
        "all_gather", 1024, groups[0], machine
    )


def test_one_rank_sends_nothing() -> None:
    machine = load_machine("cpu")
    assert collective_s("all_reduce", 1e9, group_of(parse_layout("tp1"), "tp", machine), machine) == 0.0


def test_a_tensor_parallel_group_over_two_nodes_uses_all_their_nics() -> None:
    machine = with_network(load_machine("a100"), "800 Gb/s per node (4x 200 Gb/s HDR IB)")
    group = group_of(parse_layout("tp16,dp2"), "tp", machine)
    assert group == Group(16, 8, 8)
    gathered = 1e9 * 15 / 16 / collective_s("all_gather", 1e9, group, machine)
    assert 0.9e11 < gathered < 1e11  # four NICs of 25 GB/s, not half of one
    reduced = 1e9 * 2 * 15 / 16 / collective_s("all_reduce", 1e9, group, machine)
    assert gathered < reduced < 2e11  # the tree of two nodes sends every byte once each way, a ring nearly twice


def test_data_parallel_groups_of_a_node_share_its_nics() -> None:
    machine = load_machine("a100")
    layout = parse_layout("tp8,dp16")
    group = group_of(layout, "dp", machine)
    assert group == Group(16, 1, 8)
    four = with_network(machine, "4x 200 Gb/s HDR InfiniBand")
    one, half = (collective_s("all_gather", 1e9, group_of(layout, "dp", m), m) for m in (machine, four))
    assert half / one == pytest.approx(2, rel=0.05)
    assert 1e9 * 15 / 16 / one == pytest.approx(25e9 * 0.95, rel=0.1)


@pytest.mark.parametrize(
    ("text", "axis", "machine", "expected"),
    [
        ("tp8,pp16,dp8", "tp", "h100", Group(8, 8, 8)),
        ("tp8,pp16,dp8", "pp", "h100", Group(2, 1, 8)),
        ("tp2,pp4", "pp", "h100", Group(2, 2, 8)),
        ("tp4,cp4,dp2", "cp", "h100", Group(4, 2, 8)),
        ("tp2,dp64,ep8", "ep", "h100", Group(8, 4, 8)),
        ("tp1,dp64,ep8", "ep", "h100", Group(8, 8, 8)),
        ("tp1,dp64,ep64,etp1", "ep", "gb200", Group(64, 64, 4)),
        ("tp1,dp128,ep64,etp1", "dp/ep", "gb200", Group(2, 1, 4)),
        ("tp1,dp128", "dp", "gb200", Group(128, 64, 4)),
        ("tp2,cp2,dp16", "dp", "h100", Group(32, 4, 8)),
        ("dp64,shard8,zero3", "shard", "h100", Group(8, 8, 8)),
        ("dp64,shard8,zero3", "replicate", "h100", Group(8, 1, 8)),
        ("tp2,pp2,dp2", "world", "h100", Group(8, 8, 8)),
    ],
)
def test_groups_lie_where_the_order_of_ranks_puts_them(text: str, axis: str, machine: str, expected: Group) -> None:
    assert group_of(parse_layout(text), axis, load_machine(machine)) == expected


def test_the_order_of_ranks_can_put_stages_next_to_each_other() -> None:
    machine, layout = load_machine("h100"), parse_layout("tp2,pp4,dp8")
    assert group_of(layout, "pp", machine) == Group(2, 1, 8)
    assert group_of(layout, "pp", machine, "tp-cp-pp-dp") == Group(2, 2, 8)
    assert group_of(layout, "dp", machine).domain_ranks == 4
    assert group_of(layout, "dp", machine, "tp-cp-pp-dp") == Group(8, 1, 8)


#: Bytes and GB/s of bus bandwidth: stas00/ml-engineering network/README.md @744d01e1, and for the H100
#: NVIDIA/dgxc-benchmarking nccl/README.md @841f5466.
MEASURED = [
    ("a100", "all_reduce", 8, 1 << 30, 229.04, True),
    ("h100", "all_reduce", 8, 1 << 26, 361.67, True),
    ("h200", "all_reduce", 8, 1 << 33, 365.6, False),
    ("h200", "all_gather", 8, 1 << 34, 361.4, True),
    ("h200", "all_reduce", 6, 1 << 33, 435.6, True),
    ("b200", "all_reduce", 8, 1 << 30, 723.34, True),
    ("v100-32gb", "all_reduce", 4, 1 << 29, 85.3, True),
    ("a100", "all_reduce", 2, 1 << 30, 197.0, True),
    ("mi300x", "all_reduce", 8, 1 << 32, 312.9, True),
]


@pytest.mark.parametrize(("name", "op", "ranks", "size", "bus", "nvls"), MEASURED)
def test_large_collectives_reach_what_was_measured(
    name: str, op: str, ranks: int, size: int, bus: float, nvls: bool
) -> None:
    machine = load_machine(name)
    seconds = collective_s(op, size, group_of_ranks(ranks, machine), machine, nvls=nvls)
    travels = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
    assert size * travels / seconds / 1e9 == pytest.approx(bus, rel=0.03)


def test_rings_of_b200_lie_between_two_machines_that_were_measured() -> None:
    machine = load_machine("b200")
    seconds = collective_s("all_gather", 1 << 30, group_of_ranks(8, machine), machine)
    # 606 GB/s: MooreThreads/SimuMax b200_bf16_ceperm.json @4dcaae51; 682 GB/s: ml-engineering @744d01e1.
    assert 606e9 < (1 << 30) * 7 / 8 / seconds * 1.03 < 682e9


def test_what_cannot_be_priced_is_refused() -> None:
    machine = load_machine("h100")
    group = group_of_ranks(16, machine)
    with pytest.raises(ConfigError, match="has no links"):
        group_of(parse_layout("dp2"), "dp", load_machine("cpu"))
    with pytest.raises(ConfigError, match="no network"):
        collective_s("all_reduce", 1e6, group, dataclasses.replace(machine, links=machine.links[:1]))
    with pytest.raises(ConfigError, match="expected one of all_reduce"):
        collective_s("gather", 1e6, group, machine)
    with pytest.raises(ConfigError, match="size >= 0"):
        collective_s("send", -1, group, machine)
    with pytest.raises(ConfigError, match="axis of a collective"):
        group_of(parse_layout("dp2"), "data", machine)
    with pytest.raises(ConfigError, match="order of ranks"):
        group_of(parse_layout("dp2"), "dp", machine, "pp-dp")


def test_a_call_takes_microseconds() -> None:
    machine, layout = load_machine("h100"), parse_layout("tp8,pp16,dp64")
    lines.cache_clear()
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for size in range(1, 500):
            collective_s("all_reduce", size * 1e5, group_of(layout, "dp", machine), machine)
        best = min(best, (time.process_time() - start) / 500)
    assert best < 60e-6  # 20 on an idle core
