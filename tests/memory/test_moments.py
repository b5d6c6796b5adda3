"""Bytes of the five moments, worked out by hand, and the need that binds."""

from __future__ import annotations

import pytest

from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.memory.moments import MOMENTS, Held, Room, binding, moments_of, over_bytes

ROLES = {Role.PARAMETER: 20, Role.GRADIENT: 40, Role.OPTIMIZER_STATE: 120, Role.ACTIVATION: 300, Role.WORKSPACE: 7}
HELD = Held(roles=ROLES, longest_bytes=600, piece_bytes=50, whole_bytes=400, ranks=8)


def test_in_pieces() -> None:
    peaks = moments_of(HELD)
    assert tuple(peaks) == MOMENTS
    assert peaks["start"] == {"device": 180, "host": 50}
    assert peaks["step"] == {"device": 487, "host": 0}
    assert peaks["longest"] == {"device": 600, "host": 0}
    assert peaks["save"] == {"device": 180, "host": 140}  # no more than there is to copy
    assert peaks["resume"] == {"device": 180, "host": 100}


def test_beside_training_all_states_lie_on_the_host() -> None:
    assert moments_of(HELD, "async")["save"] == {"device": 180, "host": 140}


def test_gathered_needs_one_whole_state_more_and_all_states_on_the_host() -> None:
    peaks = moments_of(HELD, "gathered")
    assert peaks["save"] == {"device": 580, "host": 8 * 140}
    assert peaks["resume"] == {"device": 580, "host": 8 * 140}
    with pytest.raises(ConfigError, match="sharded, async, gathered"):
        moments_of(HELD, "whole")


def test_the_need_that_binds() -> None:
    peaks = moments_of(HELD)
    assert binding(peaks, Room(device_bytes=1000, host_bytes=10_000))[:2] == ("longest", "device")
    assert over_bytes(peaks, Room(device_bytes=500, host_bytes=10_000)) == 100
    assert binding(peaks, Room(device_bytes=1000, host_bytes=150)) == ("save", "host", 140 / 150)
    assert over_bytes(peaks, Room(device_bytes=1000, host_bytes=150)) < 0
