"""Fleet: a list of unlike devices and what joins them, such as a laptop, its GPU and a server behind a network.

A link says which devices it joins and how their transfers share it; a ``Network`` is what follows from the links: the
hops of a transfer between any two devices, as numbers only, so that planners and simulators need no machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import inf

from lading.errors import ConfigError, did_you_mean
from lading.ir.machine import Machine

#: How transfers over one link share it: between each pair each way alone; through a port of each device, one out and
#: one in at a time; all one after another (Wi-Fi, a bus).
MEDIA = ("wire", "switch", "shared")
#: Bytes of the transfer whose fastest way is the route of all.
_ROUTE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Member:
    """One device of a fleet.

    Attributes:
        machine: Its device, and the tiers beside it, which placement leaves alone.
        memory_bytes: Device memory that may be used.
    """

    name: str
    machine: Machine
    memory_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.memory_bytes <= self.machine.device.memory_bytes:
            raise ConfigError(
                f"device {self.name}: expected memory_bytes above 0 and at most the {self.machine.device.memory_bytes} "
                f"of {self.machine.name}, got {self.memory_bytes}"
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes for tensors: the memory that may be used less what the process itself takes."""
        return max(0, self.memory_bytes - self.machine.device.overhead_bytes)


@dataclass(frozen=True, kw_only=True)
class Join:
    """Link that joins devices of a fleet.

    Attributes:
        devices: Names of the devices it joins, two or more.
        medium: One of ``MEDIA``.
        bandwidth_bytes_per_s: Each direction, by the data sheet; of all together where the medium is shared.
        efficiency: Share of it that a long transfer reaches.
        latency_s: Seconds of a transfer of a few bytes.
    """

    name: str
    devices: tuple[str, ...]
    medium: str
    bandwidth_bytes_per_s: float
    efficiency: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.medium not in MEDIA:
            raise ConfigError(f"link {self.name}: medium must be one of {', '.join(MEDIA)}, got {self.medium!r}")
        if len(set(self.devices)) < 2 or len(set(self.devices)) != len(self.devices):
            raise ConfigError(
                f"link {self.name}: expected two or more different devices, got {', '.join(self.devices) or 'none'}"
            )
        is_valid = 0 < self.bandwidth_bytes_per_s < inf and 0 <= self.latency_s < inf
        if not is_valid or not 0 < self.efficiency <= 1:
            raise ConfigError(
                f"link {self.name}: expected a positive bandwidth, an efficiency in (0, 1] and a latency >= 0, got "
                f"{self.bandwidth_bytes_per_s}, {self.efficiency} and {self.latency_s}"
            )


@dataclass(frozen=True, slots=True)
class Hop:
    """Part of a transfer that goes over one link.

    Attributes:
        channels: Channels it holds while its bytes pass, each held by one transfer at a time.
    """

    channels: tuple[int, ...]
    latency_s: float
    seconds_per_byte: float

    def seconds(self, size_bytes: int) -> float:
        """Seconds of a transfer that waits for nothing."""
        return self.latency_s + size_bytes * self.seconds_per_byte


@dataclass(frozen=True)
class Network:
    """Devices by number, with the hops between any two.

    Attributes:
        devices: Names of the devices.
        memory_bytes: Bytes of each device for tensors.
        channels: Names of what hops hold.
        routes: From each device to each other: a hop after another, each begun when the one before has all bytes.
    """

    devices: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    channels: tuple[str, ...]
    routes: tuple[tuple[tuple[Hop, ...], ...], ...]

    def transfer_s(self, source: int, target: int, size_bytes: int) -> float:
        """Seconds of a transfer that waits for nothing; 0 within a device."""
        return sum(hop.seconds(size_bytes) for hop in self.routes[source][target])


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Fleet of unlike devices that work together.

    Attributes:
        sources: Where each number comes from, by key.
    """

    name: str
    date: str
    source: str
    devices: tuple[Member, ...]
    links: tuple[Join, ...] = ()
    sources: dict[str, str] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        names = [member.name for member in self.devices]
        if not names or len(set(names)) != len(names) or "" in names:
            raise ConfigError(f"expected one or more devices of different names, got {', '.join(names) or 'none'}")
        links = [link.name for link in self.links]
        if len(set(links)) != len(links):
            raise ConfigError(f"expected links of different names, got {', '.join(links)}")
        for link in self.links:
            _check_devices_exist(link, names)

    @property
    def fingerprint(self) -> str:
        """Hash of every number of the fleet."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def network(self) -> Network:
        """Build the network that the links make.

        Raises:
            ConfigError: two devices that no link joins, nor a chain of them.
        """
        return network_of({member.name: member.usable_bytes for member in self.devices}, self.links)


def fleet_of(machine: Machine) -> Fleet:
    """Make a fleet of a machine's one device."""
    member = Member(name=machine.name, machine=machine, memory_bytes=machine.device.memory_bytes)
    return Fleet(name=machine.name, date=machine.date, source=machine.source, devices=(member,))


def network_of(memory_bytes: Mapping[str, int], links: Sequence[Join]) -> Network:
    """Build a network of devices, by name with their bytes of memory, joined by links.

    The route between two devices is the one whose transfer of a MiB is done first; what lies between hands it on.

    Raises:
        ConfigError: two devices that no link joins, nor a chain of them.
    """
    names = tuple(memory_bytes)
    place = {name: number for number, name in enumerate(names)}
    channels: dict[str, int] = {}
    direct: dict[tuple[int, int], Hop] = {}
    for link in links:
        _check_devices_exist(link, names)
        for a, b in permutations(link.devices, 2):
            numbers = tuple(channels.setdefault(name, len(channels)) for name in _channel_names(link, a, b))
            hop = Hop(numbers, link.latency_s, 1 / (link.bandwidth_bytes_per_s * link.efficiency))
            fastest = direct.get((place[a], place[b]))
            if fastest is None or hop.seconds(_ROUTE_BYTES) < fastest.seconds(_ROUTE_BYTES):
                direct[place[a], place[b]] = hop
    return Network(names, tuple(memory_bytes.values()), tuple(channels), _routes(names, direct))


def _check_devices_exist(link: Join, names: Sequence[str]) -> None:
    """Refuse a link to a device that is not there."""
    if unknown := [name for name in link.devices if name not in names]:
        hint = did_you_mean(unknown[0], names)
        raise ConfigError(
            f"link {link.name}: expected devices among {', '.join(names)}, got {', '.join(unknown)}{hint}"
        )


def _channel_names(link: Join, source: str, target: str) -> tuple[str, ...]:
    """Names of the channels that a transfer over a link holds."""
    if link.medium == "shared":
        return (link.name,)
    if link.medium == "switch":
        return f"{link.name}: out of {source}", f"{link.name}: into {target}"
    return (f"{link.name}: {source} to {target}",)


def _routes(names: tuple[str, ...], direct: Mapping[tuple[int, int], Hop]) -> tuple[tuple[tuple[Hop, ...], ...], ...]:
    """Find the fastest ways between all pairs of devices (Floyd and Warshall)."""
    count = len(names)
    ways: dict[tuple[int, int], tuple[Hop, ...]] = {pair: (hop,) for pair, hop in direct.items()}

    def seconds(way: tuple[Hop, ...]) -> float:
        return sum(hop.seconds(_ROUTE_BYTES) for hop in way)

    for middle in range(count):
        for a, b in permutations([n for n in range(count) if n != middle], 2):
            if (a, middle) in ways and (middle, b) in ways:
                way = ways[a, middle] + ways[middle, b]
                if (a, b) not in ways or seconds(way) < seconds(ways[a, b]):
                    ways[a, b] = way
    for a, b in permutations(range(count), 2):
        if (a, b) not in ways:
            raise ConfigError(f"expected links that join all devices, none leads from {names[a]} to {names[b]}")
    return tuple(tuple(ways[a, b] if a != b else () for b in range(count)) for a in range(count))
