"""Networks in words become NICs; what is not said is assumed aloud."""

from __future__ import annotations

import pytest
from tests.machines import unsourced

from lading.catalog.load import load_machine
from lading.catalog.networks import checked_network, parse_network, parse_node, with_network
from lading.catalog.rates import find_rates, parse_rate
from lading.errors import ConfigError
from lading.units import parse_bytes

WORDS = [
    ("4x Omni-Path 100 Gb/s per node (Jean Zay)", "omnipath", 4, 100),
    ("8x HDR InfiniBand 200 Gb/s per node (fat-tree, Selene)", "infiniband", 8, 200),
    ("8x 200 Gb/s HDR InfiniBand (Azure NDm A100 v4)", "infiniband", 8, 200),
    ("8x200 Gb/s RNIC per node", "ethernet", 8, 200),
    ("1600 Gb/s RoCE node-to-node", "ethernet", 8, 200),
    ("800 Gb/s per node (4x 200 Gb/s HDR IB)", "infiniband", 4, 200),
    ("RDMA 400 Gb/s per GPU", "infiniband", 8, 400),
    ("InfiniBand 400 Gb/s x8 (DGX; not stated)", "infiniband", 8, 400),
    ("EFA 400 Gb/s", "ethernet", 4, 100),
    ("3.2 Tb/s EFA v2 per node", "ethernet", 8, 400),
    ("400 Gb/s", "infiniband", 4, 100),
    ("8 x 400GbE", "ethernet", 8, 400),
    ("8x NDR400 InfiniBand", "infiniband", 8, 400),
    ("NVIDIA Quantum-2 InfiniBand NDR 400Gb/s, 8 NICs per node", "infiniband", 8, 400),
    ("Slingshot-11, 4x 200 Gb/s", "ethernet", 4, 200),
    ("100 Gb/s Ethernet", "ethernet", 1, 100),
    ("50 GB/s InfiniBand per GPU", "infiniband", 8, 400),
    ("8x 50 GB/s RoCE", "ethernet", 8, 400),
    ("400 GB/s per node", "infiniband", 8, 400),
    ("25 GBps HDR per GPU", "infiniband", 8, 200),
    ("4 x 12.5 GByte/s EDR", "infiniband", 4, 100),
    ("8x 400G RoCE", "ethernet", 8, 400),
    ("2x 25GbE", "ethernet", 2, 25),
    ("10 GigE", "ethernet", 1, 10),
    ("dual 100GE", "ethernet", 2, 100),
    ("4x HDR100 InfiniBand", "infiniband", 4, 100),
    ("NDR200, 8 NICs", "infiniband", 8, 200),
    ("100 Gb/s InfiniBand EDR, one NIC per 2 GPUs", "infiniband", 4, 100),
    ("NVLink 900 GB/s inside, 8x 400 Gb/s InfiniBand", "infiniband", 8, 400),
    ("8x 400 Gb/s (3.2 Tb/s aggregate)", "infiniband", 8, 400),
    ("3,200 Gb/s EFA per node", "ethernet", 8, 400),
    ("100 GB/s bidirectional RoCE per GPU", "ethernet", 8, 400),
    ("4 nodes x 8 GPUs, 1600 Gb/s RoCE per node", "ethernet", 8, 200),
    ("125 MB/s Ethernet", "ethernet", 1, 1),
    ("ConnectX-7 400G per GPU", "infiniband", 8, 400),
    ("400G per GPU", "infiniband", 8, 400),
    ("2x100G", "infiniband", 2, 100),
    ("200 Gigabit/s per GPU", "infiniband", 8, 200),
]


def test_capitals_that_say_nothing_are_an_assumption() -> None:
    plain = parse_network("8x 400 gb/s roce")
    assert plain.link is not None
    assert plain.link.bandwidth_bytes_per_s == 5e10
    assert "its capitals say neither" in plain.said
    assert find_rates("50 gb/s", bits=False)[0].bytes_per_s == 5e10
    assert find_rates("50 gb/s", bits=True)[0].bytes_per_s == 6.25e9
    assert find_rates("2x 80 GB", bits=True) == (), "a size is no rate"


def test_a_rate_of_storage_and_sizes_in_bits() -> None:
    assert parse_rate("2TB", "--storage") == parse_rate("2 TB/s", "--storage") == 2e12
    assert parse_rate("400 Gb/s", "--storage") == 5e10
    with pytest.raises(ConfigError, match="a small b is bits"):
        parse_bytes("256Mb")
    with pytest.raises(ConfigError, match="--storage: expected a size"):
        parse_rate("fast", "--storage")


def test_words_that_nobody_reads_are_told_and_refused_of_a_user() -> None:
    assert parse_network("8x HDR InfiniBand 200 Gb/s per node (fat-tree, Selene)").unread == ()
    assert "warp" in parse_network("8x 200 Gb/s warp drive").unread[0]
    with pytest.raises(ConfigError, match=r"'warp drive' in .* is not understood"):
        checked_network("8x 200 Gb/s warp drive")
    with pytest.raises(ConfigError, match=r"'fast' in .* is not understood"):
        checked_network("fast InfiniBand")
    with pytest.raises(ConfigError, match="it has no rate"):
        checked_network("InfiniBand")
    assert checked_network("4x 200 Gb/s HDR") == "4x 200 Gb/s HDR"
    assert "whole node" in parse_network("400 Gb/s").unread[0], "it may be each NIC's"


@pytest.mark.parametrize(("words", "kind", "nics", "gigabits"), WORDS)
def test_words_name_nics(words: str, kind: str, nics: int, gigabits: int) -> None:
    link = parse_network(words).link
    assert link is not None
    assert (link.kind, link.nics, link.bandwidth_bytes_per_s * 8 / 1e9) == (kind, nics, gigabits)
    assert link.nic_ranks == 8


@pytest.mark.parametrize("words", [None, "", "n/a", "n/a (single node)", "RoCE RDMA (4 nodes)", "not stated"])
def test_words_that_name_no_rate_leave_the_machine_its_own(words: str | None) -> None:
    machine = load_machine("a100")
    assert "own" in parse_network(words).said
    assert with_network(machine, words) == machine


def test_a_machine_gets_another_network_and_says_so() -> None:
    machine = with_network(load_machine("gb200"), "4x 400 Gb/s InfiniBand")
    assert [(link.name, link.ranks, link.nics, link.nic_ranks) for link in machine.links] == [
        ("nvlink", 72, 0, 0),
        ("network", 0, 4, 4),
    ]
    assert "4 x 400 Gb/s" in machine.sources["links.network"]
    assert unsourced(machine) == ()
    assert with_network(load_machine("cpu"), "100 Gb/s Ethernet").links[0].nics == 1


def test_what_is_no_network_is_refused() -> None:
    machine = load_machine("a100")
    with pytest.raises(ConfigError, match="with nics"):
        with_network(machine, machine.links[0])
    with pytest.raises(ConfigError, match="node_ranks"):
        parse_network("400 Gb/s", 0)


def test_counted_links_of_a_node_are_added_up() -> None:
    machine = load_machine("a100")
    near = parse_node(machine, "12 links of 50 GB/s NVLink").links[0]
    assert near.bandwidth_bytes_per_s == pytest.approx(machine.links[0].bandwidth_bytes_per_s, rel=0.02)
    assert parse_node(machine, "8x 50 GB/s NVLink").links[0].bandwidth_bytes_per_s == pytest.approx(2e11)


def test_rates_that_have_nothing_to_do_with_each_other_are_not_understood() -> None:
    with pytest.raises(ConfigError, match="'50 MB/s' beside '400 Gb/s' is not understood"):
        checked_network("400 Gb/s and 50 MB/s")
    for words in ("400 Gb/s per GPU, 3.2 Tb/s per node", "56 Gb/s FDR, 6.8 GB/s", "8x 400 Gb/s (of 25 GB/s reached)"):
        assert not parse_network(words).unread
