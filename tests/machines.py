"""A made-up machine for tests: round numbers, a fast disk, no overhead."""

from __future__ import annotations

from lading.ir.machine import Device, Machine, Tier


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
        capacity_bytes=1 << 36,
        read_bytes_per_s=1e9,
        write_bytes_per_s=1e9,
        mixed_read_bytes_per_s=6e8,
        mixed_write_bytes_per_s=6e8,
        latency_s=1e-4,
    )
    return Machine(name="test", date="2026-11-20", source="made up", device=device, tiers=(tier,) if disk else ())
