"""Bytes of the five moments, worked out by hand, and the need that binds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.memory.moments import MOMENTS, RankBytes, binding, moments_of, over_bytes

ROLES = {Role.PARAMETER: 20, Role.GRADIENT: 10, Role.OPTIMIZER_STATE: 120, Role.ACTIVATION: 300, Role.WORKSPACE: 7}
HELD = RankBytes(
    roles=ROLES,
    gradient_bytes=40,
    longest_bytes=600,
    piece_bytes=50,
    whole_bytes=400,
    stage_bytes=900,
    host_tier="host",
)


def test_in_pieces() -> None:
    peaks = moments_of(HELD)
    assert tuple(peaks) == MOMENTS
    assert peaks["start"] == {"device": 180, "host": 50}  # all gradients, though a step has 10 of 40 at its peak
    assert peaks["step"] == {"device": 457, "host": 0}
    assert peaks["longest"] == {"device": 600, "host": 0}
    assert peaks["save"] == {"device": 180, "host": 140}  # no more than there is to copy
    assert peaks["resume"] == {"device": 180, "host": 100}
    large = replace(HELD, roles={**ROLES, Role.OPTIMIZER_STATE: 30_000_000})
    assert moments_of(large)["save"]["host"] == 50 + 10_000_000
    assert moments_of(replace(large, stages_all=True))["save"]["host"] == 30_000_020


def test_beside_training_all_states_lie_on_the_host() -> None:
    assert moments_of(HELD, "async")["save"] == {"device": 180, "host": 140}


def test_what_lies_on_the_host_is_there_all_the_time_and_copied_too() -> None:
    behind = {Role.OPTIMIZER_STATE: 120, Role.GRADIENT: 40, Role.ACTIVATION: 70}
    roles = {Role.PARAMETER: 20, Role.ACTIVATION: 300}
    peaks = moments_of(
        replace(HELD, roles=roles, gradient_bytes=0, lower_tier_roles=behind, behind_tier="host"), "async"
    )
    assert peaks["start"] == {"device": 20, "host": 230 + 50}
    assert peaks["save"] == {"device": 20, "host": 230 + 140}  # not gradients, nor activations


def test_gathered_needs_one_whole_state_more_and_a_stage_on_the_host() -> None:
    peaks = moments_of(HELD, "gathered")
    assert peaks["save"] == {"device": 580, "host": 900}
    assert peaks["resume"] == {"device": 580, "host": 900}
    assert moments_of(replace(HELD, shares=8.0), "gathered")["save"]["host"] == 113  # of each device's part of a node
    with pytest.raises(ConfigError, match="sharded, async, gathered"):
        moments_of(HELD, "whole")


def test_the_need_that_binds() -> None:
    peaks = moments_of(HELD)
    assert binding(peaks, {"device": 1000, "host": 10_000})[:2] == ("longest", "device")
    assert over_bytes(peaks, {"device": 500, "host": 10_000}) == 100
    assert binding(peaks, {"device": 1000, "host": 150}) == ("save", "host", 140 / 150)
    assert over_bytes(peaks, {"device": 1000, "host": 150}) < 0
