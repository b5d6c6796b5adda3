"""Known runs: what a run is off by is shared over its causes, and each step takes what it has of them."""

from __future__ import annotations

import math

import pytest

from lading.ir.stack import FITTED, GUESSED
from lading.sim.interval import cause_spreads, causes_of, half_width
from lading.sim.known_runs import KnownRun, shift_of

PRODUCTS = {"products": 0.9, "memory-bound": 0.1}
TRANSFERS = {"products": 0.5, "dp communication": 0.4, "memory-bound": 0.1}


def test_nothing_known_shifts_nothing() -> None:
    assert shift_of(PRODUCTS, []).factor == 1.0
    assert shift_of(PRODUCTS, [KnownRun(1.0, TRANSFERS)]).factor == pytest.approx(1.0)


def test_what_transfers_take_longer_is_not_laid_on_products() -> None:
    slow = KnownRun(1.5, TRANSFERS)
    alike, other = shift_of(TRANSFERS, [slow]), shift_of(PRODUCTS, [slow])
    assert 1.3 < alike.factor < 1.5, "most of it is the transfers', as they are the least certain"
    assert 1.0 < other.factor < 1.07
    assert alike.explained > 10 * other.explained


def test_one_run_is_what_the_formula_says() -> None:
    spreads = cause_spreads(PRODUCTS)
    shared = sum(spread**2 for spread in spreads.values()) + 0.03**2
    expected = shared / (shared + 0.07**2) * math.log(1.1)
    assert math.log(shift_of(PRODUCTS, [KnownRun(1.1, PRODUCTS)]).factor) == pytest.approx(expected)


def test_a_second_run_that_says_the_same_makes_it_surer() -> None:
    run = KnownRun(1.1, PRODUCTS)
    one, two = shift_of(PRODUCTS, [run]), shift_of(PRODUCTS, [run, run])
    assert 1 < one.factor < two.factor < 1.1
    assert two.explained > one.explained


def test_a_wild_run_counts_as_the_furthest_that_is_usual() -> None:
    far, further = (shift_of(PRODUCTS, [KnownRun(ratio, PRODUCTS)]) for ratio in (5.0, 50.0))
    assert far.factor == further.factor < 1.5


def test_a_bubble_lasts_as_long_as_the_rest_makes_it() -> None:
    half = {cause: share / 2 for cause, share in TRANSFERS.items()}
    assert cause_spreads(half | {"bubble": 0.5}) == pytest.approx(cause_spreads(TRANSFERS))


def test_a_known_run_narrows_the_interval() -> None:
    before = half_width(GUESSED, TRANSFERS, measured=True)
    shift = shift_of(TRANSFERS, [KnownRun(1.2, TRANSFERS)])
    assert shift.narrowed(before) < before
    assert shift_of(TRANSFERS, []).narrowed(before) == pytest.approx(before)
    assert shift.narrowed(0.2) == pytest.approx(0.07 * 1.645), "a run's own part stays"
    assert shift.narrowed(0.1) == 0.1, "what was narrower stays so"


def test_of_software_that_is_fitted_one_run_says_less() -> None:
    run = KnownRun(1.2, TRANSFERS)
    assert 1 < shift_of(TRANSFERS, [run], FITTED).factor < shift_of(TRANSFERS, [run], GUESSED).factor


def test_an_update_on_the_host_is_a_cause_of_its_own() -> None:
    shares = {"products": 0.6, "optimizer": 0.4}
    assert causes_of(shares, updates_on_host=False) == shares
    assert causes_of(shares, updates_on_host=True) == {"products": 0.6, "updates on the host": 0.4}


def test_a_run_elsewhere_says_half_as_much() -> None:
    here, away = KnownRun(1.2, PRODUCTS), KnownRun(1.2, PRODUCTS, elsewhere=frozenset(("devices",)))
    said = [math.log(shift_of(PRODUCTS, [run]).factor) for run in (here, away)]
    assert said[1] == pytest.approx(said[0] / 2)
    assert shift_of(PRODUCTS, [away]).explained == pytest.approx(shift_of(PRODUCTS, [here]).explained / 4)
    both = shift_of(PRODUCTS, [here, away])
    assert said[0] < math.log(both.factor) < shift_of(PRODUCTS, [here, here]).factor


def test_runs_in_two_unlike_places_say_less_of_each_other_than_of_what_is_asked_for() -> None:
    devices, network = (KnownRun(1.2, PRODUCTS, elsewhere=frozenset((way,))) for way in ("devices", "network"))
    unlike, alike = shift_of(PRODUCTS, [devices, network]), shift_of(PRODUCTS, [devices, devices])
    assert unlike.explained > alike.explained  # two witnesses that have less in common
