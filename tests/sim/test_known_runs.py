"""Known runs: what a run is off by is shared over its causes, and each step takes what it has of them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lading.catalog.stacks import stack_by_name
from lading.ir.layout import Layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.stack import FITTED, GUESSED
from lading.sim.interval import cause_spreads, causes_of, half_width
from lading.sim.known_runs import KnownRun, differences, shift_of

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
    shift = shift_of(TRANSFERS, [KnownRun(1.05, TRANSFERS)])
    assert shift.half_width(before) < math.sqrt((before / 1.645) ** 2 - shift.explained) * 1.645 < before
    assert shift_of(TRANSFERS, []).half_width(before) == pytest.approx(before)
    assert shift.half_width(0.13) == pytest.approx(0.07 * 1.645 * shift.surprise), "a run's own part stays"
    assert shift.half_width(0.1) == pytest.approx(0.1 * shift.surprise), "what was narrower stays so"


def test_a_run_that_is_far_off_widens_the_interval() -> None:
    before = half_width(GUESSED, PRODUCTS, measured=True)
    near, far = (shift_of(PRODUCTS, [KnownRun(ratio, PRODUCTS)]) for ratio in (1.0, 2.0))
    assert near.surprise == pytest.approx(math.sqrt(1 / 2))
    assert near.explained == far.explained
    assert near.half_width(before) < before < far.half_width(before)


def test_software_that_was_not_known_is_still_slower_more_often_than_faster() -> None:
    shift = shift_of(PRODUCTS, [KnownRun(1.1, PRODUCTS)])
    half = shift.half_width(0.3)
    assert shift.bounds(0.3, GUESSED) == pytest.approx((math.exp(-half), math.exp(1.4 * half)))
    assert shift.bounds(0.3, FITTED) == pytest.approx((math.exp(-half), math.exp(half)))


def test_two_runs_that_differ_are_as_surprising_as_the_formula_says() -> None:
    spreads = cause_spreads(PRODUCTS)
    shared = sum(spread**2 for spread in spreads.values()) + 0.03**2
    shift = shift_of(PRODUCTS, [KnownRun(1.3, PRODUCTS), KnownRun(1 / 1.3, PRODUCTS)])
    distance = 2 * math.log(1.3) ** 2 / 0.07**2  # their mean is 0, and their difference has no common part
    assert shift.factor == pytest.approx(1.0)
    assert shift.surprise == pytest.approx(math.sqrt((1 + distance) / 3))
    assert shift.explained == pytest.approx(2 * shared**2 / (2 * shared + 0.07**2))


def test_of_software_that_is_fitted_one_run_says_less() -> None:
    run = KnownRun(1.2, TRANSFERS)
    assert 1 < shift_of(TRANSFERS, [run], FITTED).factor < shift_of(TRANSFERS, [run], GUESSED).factor


def test_an_update_on_the_host_is_a_cause_of_its_own() -> None:
    shares = {"products": 0.6, "optimizer": 0.4}
    assert causes_of(shares, updates_on_host=False) == shares
    assert causes_of(shares, updates_on_host=True) == {"products": 0.6, "updates on the host": 0.4}


def test_a_run_elsewhere_says_half_as_much_of_kernels() -> None:
    here, away = KnownRun(1.2, PRODUCTS), KnownRun(1.2, PRODUCTS, elsewhere=frozenset(("machine",)))
    said = [math.log(shift_of(PRODUCTS, [run]).factor) for run in (here, away)]
    assert said[1] == pytest.approx(said[0] / 2)
    assert shift_of(PRODUCTS, [away]).explained == pytest.approx(shift_of(PRODUCTS, [here]).explained / 4)
    both = shift_of(PRODUCTS, [here, away])
    assert said[0] < math.log(both.factor) < shift_of(PRODUCTS, [here, here]).factor


LAUNCHES = {"launches": 0.7, "products": 0.3}


def covariance_of(shares: dict[str, float], other: dict[str, float], *ways: str) -> float:
    """Covariance as ``shift_of`` has it: the factor of a run that is off by exp(1e-3), times its variance."""
    spreads = cause_spreads(other)
    variance = sum(spread**2 for spread in spreads.values()) + 0.03**2 + 0.07**2
    return math.log(shift_of(shares, [KnownRun(math.exp(1e-3), other, frozenset(ways))]).factor) * 1e3 * variance


@pytest.mark.parametrize("ways", [("model",), ("machine",), ("network",), ("model", "machine", "network", "source")])
def test_host_times_are_the_softwares_and_transfers_those_of_one_model_and_place(ways: tuple[str, ...]) -> None:
    host, transfers = cause_spreads(LAUNCHES), cause_spreads(TRANSFERS)
    half = 0.5 ** len(ways)
    of_kernels = half * (host["kernels"] ** 2 + 0.03**2)
    assert covariance_of(LAUNCHES, LAUNCHES, *ways) == pytest.approx(host["launches"] ** 2 + of_kernels)
    of_kernels = half * (transfers["kernels"] ** 2 + transfers["memory-bound"] ** 2 + 0.03**2)
    assert covariance_of(TRANSFERS, TRANSFERS, *ways) == pytest.approx(of_kernels)


def test_transfers_of_other_lengths_of_one_model_are_alike() -> None:
    transfers = cause_spreads(TRANSFERS)
    of_kernels = 0.5 * (transfers["kernels"] ** 2 + transfers["memory-bound"] ** 2 + 0.03**2)
    expected = transfers["communication"] ** 2 + of_kernels
    assert covariance_of(TRANSFERS, TRANSFERS, "sequence") == pytest.approx(expected)


def test_what_a_source_leaves_out_is_the_same_for_its_runs() -> None:
    ways = (frozenset[str](), frozenset(("source",)))
    told = KnownRun(1.3, PRODUCTS)
    untold, away = (KnownRun(1.3, PRODUCTS, elsewhere, untold=3) for elsewhere in ways)
    assert shift_of(PRODUCTS, [untold], untold=3).factor > shift_of(PRODUCTS, [told], untold=3).factor
    assert shift_of(PRODUCTS, [untold]).factor < shift_of(PRODUCTS, [told]).factor, "it is the run's alone"
    less = shift_of(PRODUCTS, [away], untold=3).factor
    assert less == pytest.approx(shift_of(PRODUCTS, [away]).factor), "another source leaves out other things"


def test_rates_of_a_data_sheet_are_those_of_its_machine() -> None:
    ways = (frozenset[str](), frozenset(("sequence",)), frozenset(("machine",)))
    runs = [KnownRun(1.3, PRODUCTS, elsewhere, data_sheet=True) for elsewhere in ways]
    same, longer, away = (shift_of(PRODUCTS, [run], data_sheet=True).factor for run in runs)
    assert same > longer > shift_of(PRODUCTS, [KnownRun(1.3, PRODUCTS)]).factor > away > 1


def test_differences_of_two_requests() -> None:
    wide = StepRequest(
        name="one",
        model=Architecture(family="gpt", symbols={"h": 1024}, blocks=(("block", 4),)),
        seq_len=1024,
        machine="a100",
        layout=Layout(dp=8),
        stack=stack_by_name("default"),
    )
    deep = dataclasses.replace(wide, model=dataclasses.replace(wide.model, blocks=(("block", 9),)))
    assert differences(wide, deep) == frozenset(), "more of the same blocks"
    narrow = dataclasses.replace(wide.model, symbols={"h": 512})
    other = dataclasses.replace(wide, model=narrow, machine="h100", layout=Layout(dp=8, precision="fp8"))
    assert differences(wide, other) == {"model", "machine", "precision"}
    further = dataclasses.replace(wide, seq_len=4096, network="100 Gb/s InfiniBand")
    assert differences(wide, further) == {"sequence", "network"}


def test_runs_in_two_unlike_places_say_less_of_each_other_than_of_what_is_asked_for() -> None:
    devices, network = (KnownRun(1.2, PRODUCTS, elsewhere=frozenset((way,))) for way in ("machine", "network"))
    unlike, alike = shift_of(PRODUCTS, [devices, network]), shift_of(PRODUCTS, [devices, devices])
    assert unlike.explained > alike.explained  # two witnesses that have less in common
