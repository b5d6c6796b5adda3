"""Moves: latency plus bytes over the rate of their direction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lading.catalog.load import load_machine
from lading.cost.hosting import move_seconds
from lading.errors import ConfigError
from lading.ir.machine import Tier

DISK = load_machine("cpu").tiers[-1]


@given(small=st.integers(0, 10**12), more=st.integers(1, 10**12), direction=st.sampled_from(["read", "write"]))
def test_more_bytes_take_longer(small: int, more: int, direction: str) -> None:
    assert DISK.latency_s <= move_seconds(small, DISK, direction) < move_seconds(small + more, DISK, direction)  # type: ignore[arg-type]


def test_each_direction_has_its_own_rate() -> None:
    tier = Tier(
        name="disk",
        kind="file",
        capacity_bytes=1,
        read_bytes_per_s=1e9,
        write_bytes_per_s=2e9,
        mixed_read_bytes_per_s=1e8,
        mixed_write_bytes_per_s=1e8,
        latency_s=0.5,
    )
    assert move_seconds(10**9, tier, "read") == 1.5
    assert move_seconds(10**9, tier, "write") == 1.0


@pytest.mark.parametrize(("size", "direction"), [(-1, "read"), (1, "sideways")])
def test_nonsense_is_refused(size: int, direction: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        move_seconds(size, DISK, direction)  # type: ignore[arg-type]
