"""Seconds of a move between the device and a tier, with nothing else on the link, and from or to the caller."""

from __future__ import annotations

from typing import Literal

from lading.errors import ConfigError
from lading.ir.machine import Device, Tier


def move_seconds(size_bytes: int, tier: Tier, direction: Literal["read", "write"]) -> float:
    """Seconds to move ``size_bytes`` from ("read") or to ("write") a tier when the other direction is idle.

    Returns:
        Latency plus bytes over bandwidth.

    Raises:
        ConfigError: negative size or another direction.
    Ignores: the other direction; while both run each gets the tier's ``mixed_*`` rate, which the simulator applies.
    """
    if size_bytes < 0:
        raise ConfigError(f"expected size_bytes >= 0, got {size_bytes}")
    if direction not in ("read", "write"):
        raise ConfigError(f"expected direction 'read' or 'write', got {direction!r}")
    rate = tier.read_bytes_per_s if direction == "read" else tier.write_bytes_per_s
    return tier.latency_s + size_bytes / rate


def caller_seconds(size_bytes: int, device: Device) -> float:
    """Seconds to copy a batch from the caller of the step, or a loss to it, on the compute stream."""
    return device.op_overhead_s + size_bytes / device.memory_bandwidth_bytes_per_s
