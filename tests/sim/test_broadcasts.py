"""Updated parameters go out by a broadcast from each rank where software sends them so: each pays a ring of latency."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.ir.layout import parse_layout
from lading.sim.prices import MachinePrices


def gather_s(ranks: int, *, broadcasts: bool, overlap: bool = False, zero: int = 1) -> float:
    """Seconds in which ranks that cut the states of a billion parameters send what they updated."""
    stack = dataclasses.replace(stack_by_name("eager-torch"), broadcasts=broadcasts, overlap_param_gather=overlap)
    layout = parse_layout(f"dp{ranks},zero{zero},mb1,gb{ranks}")
    return MachinePrices(load_machine("a100"), layout, stack).gather_s({"dp": 10**9})


def test_broadcasts_cost_more_the_more_ranks_send() -> None:
    more = [gather_s(ranks, broadcasts=True) - gather_s(ranks, broadcasts=False) for ranks in (64, 256, 1024)]
    assert 0 < more[0] < more[1] / 4 < more[2] / 16


@pytest.mark.parametrize(("overlap", "zero"), [(True, 1), (False, 3)])
def test_what_is_gathered_beside_computing_or_cut_is_not_broadcast(overlap: bool, zero: int) -> None:
    told = [gather_s(64, broadcasts=one, overlap=overlap, zero=zero) for one in (True, False)]
    assert told[0] == told[1]
