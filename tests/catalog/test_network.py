"""Networks in words become NICs; what is not said is assumed aloud."""

from __future__ import annotations

import pytest
from tests.machines import unsourced

from lading.catalog.load import load_machine, parse_network, with_network
from lading.errors import ConfigError

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
]


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
