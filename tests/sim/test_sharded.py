"""Gathers and reductions beside computing, against what can be worked out by hand and bounds that always hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lading.sim.sharded import Unit, fully_sharded, reduced_beside

seconds = st.floats(0.0, 5.0)
units = st.lists(st.builds(Unit, seconds, seconds, seconds, seconds), min_size=1, max_size=12)


def test_computing_hides_all_but_the_ends() -> None:
    beside = fully_sharded([Unit(1, 1, 2, 4)] * 10, 0.0)
    assert beside.seconds == pytest.approx(10 * 2 + 10 * 4 + 1 + 1)
    assert beside.exposed_s == pytest.approx(2)


def test_a_slow_network_is_what_lasts() -> None:
    """Forward waits for ten gathers; backward for nine more and ten reductions, its first unit being there."""
    beside = fully_sharded([Unit(30, 30, 2, 4)] * 10, 0.0)
    assert beside.seconds == pytest.approx(10 * 30 + 2 + 4 + 9 * 30 + 10 * 30, abs=4 + 2)


def test_kept_parameters_are_gathered_once() -> None:
    slow = [Unit(30, 0, 2, 4)] * 10
    assert fully_sharded(slow, 0.0, regather=False).seconds == pytest.approx(10 * 30 + 2 + 10 * 4)
    assert fully_sharded(slow, 0.0).seconds > 500


def test_reductions_follow_their_buckets() -> None:
    assert reduced_beside([4] * 10, [1] * 10, 0.0).seconds == pytest.approx(41)
    assert reduced_beside([1] * 10, [3] * 10, 0.0).seconds == pytest.approx(31)


@given(units, st.floats(0.0, 1.0))
def test_bounds(found: list[Unit], slowdown: float) -> None:
    computed = sum(u.forward_s + u.backward_s for u in found)
    network = sum(2 * u.gather_s + u.reduce_s for u in found) - found[-1].gather_s
    beside = fully_sharded(found, slowdown)
    assert beside.seconds >= max(computed, network) - 1e-9
    assert beside.seconds <= (computed + network) * (1 + slowdown) + 1e-9
    assert -1e-9 <= beside.exposed_s <= network + 1e-9
    assert fully_sharded(found, 0.0).seconds <= beside.seconds + 1e-9


def test_computing_loses_what_gathers_and_reductions_beside_it_take() -> None:
    """A second of network beside computing costs a third of a second where computing takes 1.5 times as long."""
    beside = fully_sharded([Unit(1, 1, 2, 4)] * 10, 0.5)
    seconds = 9 + 9 + 9  # gathers in forward, in backward, reductions: all but the first and the last
    assert beside.seconds == pytest.approx(1 + 10 * 2 + 10 * 4 + seconds / 3 + 1)
    assert reduced_beside([4] * 10, [1] * 10, 0.5).seconds == pytest.approx(41 + 9 / 3)


def test_computing_within_one_gather_is_slow_all_the_time() -> None:
    """Two units: the second is gathered for 30 seconds, beside which the first, of 2, takes 3."""
    beside = fully_sharded([Unit(1, 0, 2, 4), Unit(30, 0, 2, 4)], 0.5)
    assert beside.seconds == pytest.approx(1 + 30 + 2 + 4 + 1 / 3 + 4)
