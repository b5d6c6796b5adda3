"""Processors beside a device as the probe measures them: products of a few rows, by their number."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import partial
from pathlib import Path

import pytest
from tests.machines import machine_with_host

from lading.catalog.load import load_machine, machine_from_dict, machine_to_toml
from lading.errors import ConfigError
from lading.ir.machine import Curve
from lading.runtime import probe as runtime_probe
from lading.runtime import probe_cases, probe_disk, probe_host
from lading.runtime.probe import probe
from lading.runtime.probe_cases import Case
from lading.runtime.probe_host import ROWS, processor_cases, row_rates
from lading.units import MiB


def test_rows_of_each_layout_count_together() -> None:
    """The rate of two rows is that of all their products in the time of all, however unlike these are."""
    seconds = {
        ("NT", 1.0): 1.0,
        ("NN", 1.0): 1.0,
        ("TN", 1.0): 2.0,
        ("NT", 2.0): 2.0,
        ("NN", 2.0): 3.0,
        ("TN", 2.0): 7.0,
    }
    timed = [(Case(f"rows.{layout}", rows, 1e9 * rows, lambda: None), each) for (layout, rows), each in seconds.items()]
    assert row_rates(timed) == Curve(size=(1.0, 2.0), rate=(7.5e8, 5e8))


def test_a_probe_of_a_device_measures_the_processors_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rates are in the machine file, which reads back; what they were fitted within is among the sources."""
    made_up = machine_with_host()
    monkeypatch.setattr("lading.runtime.probe._probe_device", lambda *_: (made_up.device, made_up.tiers[0], 3, 0.0))
    monkeypatch.setattr(runtime_probe, "DiskMeter", partial(probe_disk.DiskMeter, file_bytes=32 * MiB))
    monkeypatch.setattr(runtime_probe, "processor_cases", partial(processor_cases, (256, 128)))
    monkeypatch.setattr(runtime_probe, "_TRIES", 1)  # other tests load the host
    monkeypatch.setattr(probe_host, "flush_bytes", lambda: (MiB, MiB))
    monkeypatch.setitem(probe_cases._DISTURBANCE_BYTES, "cpu", MiB)
    lines: list[str] = []
    found = probe(folder=tmp_path, threads=1, seconds=0.5, progress=lines.append)
    assert "processors of the host with 1 threads" in lines
    host = found.host_device
    assert host is not None
    assert host.num_threads == 1
    assert host.row_flops_per_s is not None
    assert host.row_flops_per_s.size == ROWS
    assert 1e8 < min(host.row_flops_per_s.rate) < max(host.row_flops_per_s.rate) < 1e13
    assert 1e6 < host.optimizer_elements_per_s < host.memory_bandwidth_bytes_per_s < 1e12
    assert "samples, 1 threads" in found.sources["host_device"]
    assert machine_from_dict(tomllib.loads(machine_to_toml(found)), "probe") == found
    shared = dataclasses.replace(found, node_devices=1).with_job(2).host_device
    assert shared is not None
    assert shared.row_flops_per_s == host.row_flops_per_s.slower(2)


def test_a_machine_file_without_rates_of_rows_loads() -> None:
    machine = load_machine("rtx4090")
    text = machine_to_toml(machine)
    assert "row_flops_per_s" not in text
    assert machine_from_dict(tomllib.loads(text), "old") == machine
    host = machine.host_device
    assert host is not None
    curve = Curve(size=(1.0, 16.0), rate=(3e9, 4e10))
    measured = dataclasses.replace(machine, host_device=dataclasses.replace(host, row_flops_per_s=curve))
    assert machine_from_dict(tomllib.loads(machine_to_toml(measured)), "new") == measured
    half = tomllib.loads(machine_to_toml(measured))
    half["host_device"]["row_flops_per_s"]["rate"] = [3e9]
    with pytest.raises(ConfigError, match="a curve needs as many rates as sizes, got 2 and 1"):
        machine_from_dict(half, "half")
