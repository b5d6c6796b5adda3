"""Files that list devices: those of the catalog, and errors of others."""

from __future__ import annotations

import json
import tomllib
from itertools import permutations
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.fuzz import damaged_document

from lading.catalog.fleets import fleet_names, lists_devices, load_fleet
from lading.catalog.load import load_machine, machine_names, save_machine
from lading.errors import ConfigError

LINK = (
    '[[links]]\nname = "n"\ndevices = ["a", "b"]\nmedium = "wire"\nbandwidth_bytes_per_s = 1e9\nefficiency = 1.0\n'
    "latency_s = 0\n"
)
HEAD = 'name = "own"\ndate = "2026-11-21"\nsource = "a test"\n'
DEVICES = (
    '[[devices]]\nname = "a"\nmachine = "t4"\n[[devices]]\nname = "b"\nmachine = "cpu"\nmemory_bytes = 1000000000\n'
)


@pytest.mark.parametrize("name", fleet_names())
def test_a_fleet_of_the_catalog_is_joined_and_sourced(name: str) -> None:
    fleet = load_fleet(name)
    assert fleet.name == name
    assert name not in machine_names()
    assert len(fleet.network().devices) >= 2
    for link in fleet.links:
        assert fleet.sources[f"links.{link.name}"]
    for member in fleet.devices:
        own = member.memory_bytes == member.machine.device.memory_bytes
        assert own or fleet.sources[f"devices.{member.name}.memory_bytes"]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    save_machine(load_machine("t4"), tmp_path / "mine.toml")
    path.write_text(HEAD + DEVICES.replace('"t4"', '"mine.toml"') + LINK)
    assert lists_devices(path)
    fleet = load_fleet(path)
    assert [member.machine.name for member in fleet.devices] == ["t4", "cpu"]
    assert [member.memory_bytes for member in fleet.devices] == [load_machine("t4").device.memory_bytes, 10**9]


def test_a_list_is_no_machine(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(HEAD + DEVICES + LINK)
    with pytest.raises(ConfigError, match="expected one device, got a list of them; only lading place"):
        load_machine(path)


def test_a_machine_stands_for_itself(tmp_path: Path) -> None:
    save_machine(load_machine("t4"), tmp_path / "mine.toml")
    for name in ("t4", tmp_path / "mine.toml"):
        assert not lists_devices(name)
        assert load_fleet(name).devices[0].machine == load_machine("t4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + DEVICES, "none leads from a to b"),
        (HEAD + DEVICES + LINK.replace("wire", "air"), "medium must be one of"),
        (HEAD + DEVICES.replace("machine =", "machines =") + LINK, r"devices\[0\]: missing \['machine'\], unknown"),
        (HEAD + DEVICES.replace("t4", "t5") + LINK, "expected a machine"),
        (HEAD + DEVICES.replace("1000000000", '"1GB"') + LINK, "memory_bytes: expected int"),
        (HEAD + 'devices = "a"\n', "devices: expected tuple"),
        (HEAD.replace('name = "own"', "") + DEVICES + LINK, r"missing \['name'\]"),
        (HEAD + DEVICES + LINK + "[", "in TOML"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_fleet(path).network()


def test_a_name_that_is_none_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"expected a fleet .*laptop-and-server.*got 'nowhere'$"):
        load_fleet("nowhere")
    with pytest.raises(ConfigError, match="got 'two-desktop'; did you mean 'two-desktops'"):
        load_fleet("two-desktop")


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value)


@given(st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_damaged_list_says_what_is_wrong_or_works(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Numbers that are none, devices twice or unknown, links that lead nowhere: a message, or a network of numbers."""
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    document = damaged_document(data, tomllib.loads(HEAD + DEVICES + LINK))
    assume("null" not in (text := "\n".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in document.items())))
    path.write_text(text, encoding="utf-8")
    said, net = "", None
    try:
        net = load_fleet(path).network()
    except ConfigError as error:
        said = str(error)
    if net is None:
        assert str(path) in said or "none leads from" in said
        return
    assert min(net.memory_bytes) >= 0
    for a, b in permutations(range(len(net.devices)), 2):
        assert 0 < net.transfer_s(a, b, 10**6) < inf
