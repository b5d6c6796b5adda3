"""Processors beside a device as the probe measures them: products of a few rows, fitted by two rates."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import partial
from pathlib import Path

import pytest
from tests.machines import machine_with_host

from lading.catalog.load import load_machine, machine_from_dict, machine_to_toml
from lading.errors import ConfigError
from lading.runtime import probe as runtime_probe
from lading.runtime import probe_cases, probe_disk, probe_host
from lading.runtime.probe import probe
from lading.runtime.probe_cases import Case
from lading.runtime.probe_host import LAYOUTS, ROWS, fit_rows, processor_cases
from lading.units import MiB


def products(flops_per_s: float, bytes_per_s: float) -> list[tuple[Case, float]]:
    """Products whose gradients move thrice as slowly as others, and take what these rates say together."""
    timed: list[tuple[Case, float]] = []
    for rows in ROWS:
        flops, size = 8e6 * rows, 16e6 + 2e4 * rows
        for layout, share in zip(LAYOUTS, (0.5, 0.7, 1.8), strict=True):
            seconds = share * (size / bytes_per_s + flops / flops_per_s)
            timed.append((Case(f"rows.{layout}", size, flops, lambda: None), seconds))
    return timed


def test_the_fit_recovers_the_rates_that_made_the_times() -> None:
    flops_per_s, bytes_per_s, error = fit_rows(products(9e10, 8e9))
    assert (flops_per_s, bytes_per_s) == pytest.approx((9e10, 8e9))
    assert error == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("rates", "measured"), [((9e10, 1e30), 0), ((1e30, 8e9), 1)])
def test_what_takes_no_time_has_a_rate_beyond_all_others(rates: tuple[float, float], measured: int) -> None:
    """Also where times that spread would make it less than none."""
    timed = [(case, seconds * (1.001 if case.work > 1e8 else 1.0)) for case, seconds in products(*rates)]
    found = fit_rows(timed)
    assert found[measured] == pytest.approx(rates[measured], rel=0.01)
    assert found[1 - measured] > 1e12
    assert found[2] < 0.01


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
    assert 1e8 < host.row_bytes_per_s < 1e12
    assert host.row_flops_per_s > 1e8
    assert 1e6 < host.optimizer_elements_per_s < host.memory_bandwidth_bytes_per_s < 1e12
    assert "products of rows fitted within" in found.sources["host_device"]
    assert machine_from_dict(tomllib.loads(machine_to_toml(found)), "probe") == found
    shared = dataclasses.replace(found, node_devices=1).with_job(2).host_device
    assert shared is not None
    assert shared.row_flops_per_s == host.row_flops_per_s / 2
    assert shared.row_bytes_per_s == host.row_bytes_per_s / 2


def test_a_machine_file_without_rates_of_rows_loads_and_half_of_them_does_not() -> None:
    machine = load_machine("rtx4090")
    text = machine_to_toml(machine)
    lines = [line for line in text.splitlines() if not line.startswith("row_")]
    assert len(lines) == len(text.splitlines()) - 2
    assert machine_from_dict(tomllib.loads("\n".join(lines)), "old") == machine
    half = text.replace("row_bytes_per_s = 0.0", "row_bytes_per_s = 8e9")
    with pytest.raises(ConfigError, match=r"expected both of host_device\.row_flops_per_s and row_bytes_per_s"):
        machine_from_dict(tomllib.loads(half), "half")
