"""Collectives among processes of this host: measured for every operation and size, and priced as measured."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from tests.ranks import run_ranks

from lading.catalog.load import load_machine, machine_from_dict, machine_to_toml
from lading.config import processors
from lading.cost.collective import algorithm, collective_s
from lading.cost.topology import Group, group_of
from lading.errors import ConfigError
from lading.hosts import probe_to
from lading.ir.layout import parse_layout
from lading.ir.machine import TIER_SPEEDS, Curve
from lading.runtime.host import host_id
from lading.runtime.probe_ranks import OPS, probe_ranks
from lading.runtime.probe_sharing import probe_sharing


def test_what_was_measured_is_what_a_collective_takes() -> None:
    curve = Curve(size=(1e3, 1e6), rate=(1e7, 1e9))
    machine = dataclasses.replace(load_machine("cpu"), collectives={"all_reduce.4": curve})
    again = machine_from_dict(tomllib.loads(machine_to_toml(machine)), "again")
    assert again == machine
    group = group_of(parse_layout("dp4"), "dp", machine)
    assert group == Group(4, 4)
    assert collective_s("all_reduce", 1e6, group, machine) == pytest.approx(1e-3)
    assert collective_s("all_reduce", 2e6, group, machine) == pytest.approx(2e-3)
    assert collective_s("all_reduce", 8, group, machine) == pytest.approx(1e-4)
    assert algorithm("all_reduce", 8, group, machine) == "measured"
    with pytest.raises(ConfigError, match="has no links"):
        collective_s("all_gather", 8, group, machine)


@pytest.mark.slow
def test_processes_of_this_host_are_measured() -> None:
    found = probe_ranks(2, seconds=1.0, sizes=(1 << 10, 1 << 22))
    assert set(found) == {f"{op}.2" for op in OPS}
    for name, curve in found.items():
        small, large = (size / rate for size, rate in zip(curve.size, curve.rate, strict=True))
        assert 1e-6 < small < large < 1, name


@pytest.mark.slow
def test_what_processes_share_is_measured(tmp_path: Path) -> None:
    found = probe_sharing(2, tmp_path, seconds=1.0)
    assert {name: len(each) for name, each in found.tiers.items()} == {f"disk.{name}": 2 for name in TIER_SPEEDS}
    assert all(1e6 < rate < 1e12 for name, each in found.tiers.items() for rate in each if name.endswith("_per_s"))
    assert not list(tmp_path.iterdir())
    assert {cause: len(times) for cause, times in found.slowdown.items()} == {"products": 2, "memory-bound": 2}
    assert all(times[0] == 1.0 for times in found.slowdown.values())
    assert (len(found.skew), found.skew[0]) == (2, 0.0)
    assert 0 < found.skew[1] < 1
    assert set(found.busy) == {f"{op}.2" for op in OPS}
    assert set(found.overhead_s) == {"operation", "tensor-parallel", "unit"}
    assert 0 < found.overhead_s["operation"] < found.overhead_s["tensor-parallel"] < 1


def _probes(rank: int, folder: str) -> None:
    probe_to(Path(folder) / "machine.toml", Path(folder), seconds=2.0, device="cpu")


@pytest.mark.slow
def test_a_job_measures_its_host_with_all_processors_and_writes_one_file(tmp_path: Path) -> None:
    run_ranks(_probes, 2, str(tmp_path))  # each rank begins with one thread, as under torchrun
    machine = load_machine(tmp_path / "machine.toml")
    assert (machine.host_id, machine.device.num_threads) == (host_id(), processors())
    assert "among 2 ranks of a job" in machine.sources["collectives"]
    assert {f"{op}.2" for op in OPS} <= machine.collectives.keys()
    assert machine.processes is not None
    assert [path.name for path in tmp_path.glob("*.toml")] == ["machine.toml"]


def test_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ranks >= 2"):
        probe_sharing(1, tmp_path)
    with pytest.raises(ConfigError, match="ranks >= 2"):
        probe_ranks(1)
