"""A made-up machine for tests: round numbers, a fast disk, no overhead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from lading.ir.machine import Curve, Device, Gpu, HostDevice, Link, Machine, Tier


def small_machine(*, disk: bool = True, overhead_bytes: int = 0) -> Machine:
    """A CPU at 100 GFLOP/s with a 1 GB/s disk."""
    device = Device(
        name="test",
        kind="cpu",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=2e10,
        op_overhead_s=2e-6,
        peak_flops_per_s={"float32": 1e11, "bfloat16": 5e10},
        optimizer_elements_per_s=5e8,
        overhead_bytes=overhead_bytes,
    )
    tier = Tier(
        name="disk",
        kind="file",
        persistent=True,
        capacity_bytes=1 << 36,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
        mixed_read_bytes_per_s=6e8,
        mixed_write_bytes_per_s=6e8,
        latency_s=1e-4,
    )
    return Machine(name="test", date="2026-11-20", source="made up", device=device, tiers=(tier,) if disk else ())


def machine_with_host(*, host_bytes_per_s: float = 2e9, elements_per_s: float = 5e8) -> Machine:
    """The same as a device with memory of its own, a 1 GB/s host whose processors compute, and the disk."""
    small = small_machine()
    host = dataclasses.replace(
        small.tiers[0], name="host", kind="memory", host_computes=True, persistent=False, latency_s=1e-5
    )
    processors = HostDevice(
        name="host",
        num_threads=8,
        memory_bandwidth_bytes_per_s=host_bytes_per_s,
        optimizer_elements_per_s=elements_per_s,
    )
    device = dataclasses.replace(small.device, kind="cuda")
    return dataclasses.replace(small, device=device, tiers=(host, *small.tiers), host_device=processors)


def unsourced(machine: Machine) -> tuple[str, ...]:
    """Keys of numbers whose origin ``machine.sources`` does not tell, such as ``"device.rates.copy"``.

    An entry covers everything below its key: ``"tiers.disk"`` covers ``"tiers.disk.latency_s"``.
    """
    return tuple(key for key in _number_keys(machine) if not any(part in machine.sources for part in _prefixes(key)))


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[: n + 1]) for n in range(len(parts)))


def _number_keys(machine: Machine) -> Iterator[str]:
    device = machine.device
    for field in dataclasses.fields(Device):
        value = getattr(device, field.name)
        if field.name == "cache_bytes" and not value:  # not known
            continue
        if isinstance(value, dict):
            yield from (f"device.{field.name}.{key}" for key in cast("dict[str, Any]", value))
        elif isinstance(value, (int, float, Curve)):
            yield f"device.{field.name}"
    if device.gpu is not None:
        yield from (f"device.gpu.{f.name}" for f in dataclasses.fields(Gpu) if f.name != "architecture")
    if machine.host_device is not None:
        yield from (f"host_device.{f.name}" for f in dataclasses.fields(HostDevice) if f.name != "name")
    for tier in machine.tiers:
        yield from (f"tiers.{tier.name}.{f.name}" for f in dataclasses.fields(Tier) if str(f.type) in ("int", "float"))
    yield from (f"collectives.{name}" for name in machine.collectives)
    for link in machine.links:
        yield from (f"links.{link.name}.{f.name}" for f in dataclasses.fields(Link) if f.name not in ("name", "kind"))
