"""Fleets: what links give, and what is refused."""

from __future__ import annotations

import pytest

from lading.catalog.load import load_machine
from lading.errors import ConfigError
from lading.ir.fleet import Fleet, Join, Member, fleet_of, network_of


def _join(name: str, *devices: str, medium: str = "wire", bandwidth: float = 1e9, latency: float = 1e-3) -> Join:
    return Join(
        name=name, devices=devices, medium=medium, bandwidth_bytes_per_s=bandwidth, efficiency=0.5, latency_s=latency
    )


def test_a_route_goes_over_what_joins_two_devices() -> None:
    joins = [_join("pcie", "gpu", "laptop", bandwidth=1e10, latency=1e-5), _join("wifi", "laptop", "server")]
    net = network_of({"gpu": 1, "laptop": 2, "server": 3}, joins)
    assert [len(net.routes[0][b]) for b in range(3)] == [0, 1, 2]
    assert net.transfer_s(0, 2, 10**6) == pytest.approx(1e-5 + 1e6 / 5e9 + 1e-3 + 1e6 / 5e8)
    assert net.transfer_s(1, 1, 10**6) == 0.0
    assert net.memory_bytes == (1, 2, 3)


def test_the_faster_of_two_links_is_taken() -> None:
    net = network_of({"a": 1, "b": 1}, [_join("slow", "a", "b", bandwidth=1e6), _join("fast", "a", "b")])
    assert net.transfer_s(0, 1, 10**6) == pytest.approx(1e-3 + 2e-3)


@pytest.mark.parametrize(
    ("medium", "channels"),
    [
        ("shared", [("n",), ("n",), ("n",)]),
        ("switch", [("n: out of a", "n: into b"), ("n: out of b", "n: into a"), ("n: out of a", "n: into c")]),
        ("wire", [("n: a to b",), ("n: b to a",), ("n: a to c",)]),
    ],
)
def test_a_medium_says_what_transfers_share(medium: str, channels: list[tuple[str, ...]]) -> None:
    net = network_of({"a": 1, "b": 1, "c": 1}, [_join("n", "a", "b", "c", medium=medium)])
    hops = [net.routes[a][b][0] for a, b in ((0, 1), (1, 0), (0, 2))]
    assert [tuple(net.channels[c] for c in hop.channels) for hop in hops] == channels


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="none leads from a to c"):
        network_of({"a": 1, "b": 1, "c": 1}, [_join("n", "a", "b")])
    with pytest.raises(ConfigError, match="medium must be one of wire, switch, shared"):
        _join("n", "a", "b", medium="air")
    with pytest.raises(ConfigError, match="two or more different devices"):
        _join("n", "a", "a")
    machine = load_machine("t4")
    member = Member(name="a", machine=machine, memory_bytes=10**9)
    with pytest.raises(ConfigError, match="expected devices among a, got b"):
        Fleet(name="f", date="", source="", devices=(member,), links=(_join("n", "a", "b"),))
    with pytest.raises(ConfigError, match="of different names"):
        Fleet(name="f", date="", source="", devices=(member, member))
    with pytest.raises(ConfigError, match="expected memory_bytes above 0 and at most"):
        Member(name="a", machine=machine, memory_bytes=10**12)


def test_a_machine_is_a_fleet_of_one() -> None:
    fleet = fleet_of(load_machine("t4"))
    net = fleet.network()
    assert net.devices == ("t4",)
    assert net.memory_bytes == (fleet.devices[0].usable_bytes,)
    assert 0 < net.memory_bytes[0] < load_machine("t4").device.memory_bytes
    assert fleet.fingerprint == fleet_of(load_machine("t4")).fingerprint != fleet_of(load_machine("l4")).fingerprint
