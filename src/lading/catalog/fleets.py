"""Fleets of unlike devices: files that list machines and what joins them, read strictly.

    name = "laptop-and-server"
    date = "2026-11-21"
    source = "..."

    [[devices]]
    name = "laptop"
    machine = "cpu-laptop"            # of the catalog, or a machine file beside this one (lading probe writes them)
    memory_bytes = 12_000_000_000     # what may be used; left out: all the machine has

    [[links]]
    name = "wifi"
    devices = ["laptop", "server"]
    medium = "shared"                 # "wire": each pair, each way alone; "switch": a port each; "shared": all in turn
    bandwidth_bytes_per_s = 1.5e8
    efficiency = 0.6
    latency_s = 3e-3

    [sources]
    "links.wifi" = "..."

A machine file, or a machine's name, is a fleet of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lading.catalog.load import load_machine, machine_names
from lading.errors import ConfigError, did_you_mean
from lading.files import read_toml
from lading.ir.fleet import Fleet, Join, Member, fleet_of
from lading.ir.reading import read_as
from lading.permissions import check_path

FLEETS = Path(__file__).parent / "fleets"
_ADVICE = "lading.catalog.fleets has the keys of such a file"


@dataclass(frozen=True)
class _FleetDevice:
    name: str
    machine: str
    memory_bytes: int | None


@dataclass(frozen=True)
class _FleetFile:
    name: str
    date: str
    source: str
    devices: tuple[_FleetDevice, ...]
    links: tuple[Join, ...]
    sources: dict[str, str]


def fleet_names() -> tuple[str, ...]:
    """Names of the catalog's fleets, sorted."""
    return tuple(sorted(path.stem for path in FLEETS.glob("*.toml")))


def lists_devices(name_or_path: str | Path) -> bool:
    """Whether a machine's name or file stands for a list of devices, not for one."""
    if str(name_or_path) in fleet_names():
        return True
    path = Path(name_or_path)
    return str(path) not in machine_names() and path.is_file() and "devices" in _parsed(path)


def load_fleet(name_or_path: str | Path) -> Fleet:
    """Load a fleet of the catalog by name, one described by a TOML file, or a machine as a fleet of one.

    Raises:
        ConfigError: no such name or file, not TOML, or a key or value of the file is wrong.
    """
    text = str(name_or_path)
    if not lists_devices(name_or_path):
        if text not in machine_names() and not Path(text).is_file():
            hint = did_you_mean(text, [*fleet_names(), *machine_names()])
            names = ", ".join(fleet_names())
            raise ConfigError(f"expected a fleet ({names}), a machine or the path of a TOML file, got {text!r}{hint}")
        return fleet_of(load_machine(name_or_path))
    path = FLEETS / f"{text}.toml" if text in fleet_names() else Path(name_or_path)
    table: dict[str, Any] = {"links": [], "sources": {}, **_parsed(path)}
    if isinstance(table["devices"], list):
        rows = cast("list[Any]", table["devices"])
        table["devices"] = [{"memory_bytes": None, **row} if isinstance(row, dict) else row for row in rows]
    try:
        read: _FleetFile = read_as(_FleetFile, table, str(path), _ADVICE)
        members = tuple(_member(device, path) for device in read.devices)
        return Fleet(
            name=read.name, date=read.date, source=read.source, devices=members, links=read.links, sources=read.sources
        )
    except ConfigError as error:
        raise error if str(error).startswith(str(path)) else ConfigError(f"{path}: {error}") from error


def _member(device: _FleetDevice, path: Path) -> Member:
    beside = path.parent / device.machine
    name: str | Path = device.machine
    if name not in machine_names():
        name = beside if beside.is_file() else name
        check_path(name, f"{path}: machine of device {device.name}")
    machine = load_machine(name)
    memory = machine.device.memory_bytes if device.memory_bytes is None else device.memory_bytes
    return Member(name=device.name, machine=machine, memory_bytes=memory)


def _parsed(path: Path) -> dict[str, Any]:
    return read_toml(path, "a list of devices")
