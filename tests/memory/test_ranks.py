"""Bytes of states on a rank, against the sums that ZeRO's paper gives (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

import pytest

from lading.cost.kernels import adam_bytes
from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.ir.layout import parse_layout
from lading.ir.stack import Stack
from lading.memory.rank_bytes import adapter_bytes, gathered_bytes, replicas, shards, state_bytes

HALF = Stack(name="s", title="t", gradient_dtype="bfloat16")
ELEMENTS = {"dp": 7_500_000_000}


@pytest.mark.parametrize(
    ("layout", "gigabytes"), [("dp64", 120.0), ("dp64,zero1", 31.4), ("dp64,zero2", 16.6), ("dp64,zero3", 1.9)]
)
def test_figure_1_of_zero(layout: str, gigabytes: float) -> None:
    """7.5 B parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB."""
    total = sum(state_bytes(ELEMENTS, parse_layout(layout), HALF).values())
    assert total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_frozen_weights_have_no_states() -> None:
    roles = adapter_bytes(15_000_000_000, 0, parse_layout("dp2"), HALF)
    assert roles[Role.GRADIENT] == roles[Role.OPTIMIZER_STATE] == 0
    assert roles[Role.PARAMETER] == 15_000_000_000


def test_adapters_have_states_of_their_own() -> None:
    roles = adapter_bytes(1000, 200, parse_layout("dp2,zero1"), HALF)
    assert roles == {Role.PARAMETER: 1200, Role.GRADIENT: 200, Role.OPTIMIZER_STATE: 100 * 12 // 2}


def test_experts_have_fewer_replicas() -> None:
    layout = parse_layout("dp16,tp2,ep8,etp1,zero1")
    assert replicas("dp", layout) == 16
    assert replicas("dp/ep", layout) == 4
    assert shards("dp/ep", layout) == 4
    assert shards("dp", parse_layout("dp16,zero3,shard4")) == 4


def test_gathered_parameters() -> None:
    assert gathered_bytes({"dp": 1000}, parse_layout("dp4,zero3"), HALF) == 2000
    assert gathered_bytes({"dp": 1000}, parse_layout("dp4,zero1"), HALF) == 0


def test_moments_in_16_bits() -> None:
    """Megatron's precision-aware optimizer: 4 bytes of moments and 4 of the master weight."""
    half = Stack(name="s", title="t", moments_dtype="bfloat16")
    states = [state_bytes(ELEMENTS, parse_layout("dp2"), s)[Role.OPTIMIZER_STATE] for s in (HALF, half)]
    assert states == [12 * ELEMENTS["dp"], 8 * ELEMENTS["dp"]]


def test_sgd_keeps_no_moments() -> None:
    layout, adam = parse_layout("dp4,zero1"), Stack(name="s", title="t")
    plain = Stack(name="s", title="t", moments=0)
    states = [state_bytes({"dp": 1000}, layout, stack)[Role.OPTIMIZER_STATE] for stack in (adam, plain)]
    assert states == [1000 * 12 // 4, 1000 * 4 // 4]
    assert adam_bytes(adam) - adam_bytes(plain) == 16
    with pytest.raises(ConfigError, match=r"moments must be 0, 1, 2, \.\.\., got -1"):
        Stack(name="s", title="t", moments=-1)
