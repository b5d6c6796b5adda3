"""Intervals are formed in logarithms, wider the less is known."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tests.golden.layouts import Case

from lading.catalog.stacks import stack_by_name
from lading.ir.stack import FITTED, GUESSED, SWITCHES
from lading.sim.interval import half_width
from lading.sim.simulate import simulate
from lading.sim.switches import effects_of

SHARES = {"products": 0.6, "attention": 0.1, "tp communication": 0.2, "launches": 0.1}


def test_less_evidence_is_wider() -> None:
    widths = [half_width(known, SHARES, measured=True) for known in (FITTED, SWITCHES, GUESSED)]
    assert widths == sorted(widths)
    assert widths[0] < widths[1] < widths[2]


@pytest.mark.parametrize("known", [FITTED, GUESSED])
def test_what_is_uncertain_widens(known: str) -> None:
    plain = half_width(known, {"products": 1.0}, measured=True)
    assert half_width(known, SHARES, measured=True) > plain
    assert half_width(known, {"products": 1.0}, measured=False) > plain
    unread = half_width(known, {"products": 1.0}, measured=True, untold=2)
    assert unread**2 == pytest.approx(plain**2 + 2 * math.log(1.1) ** 2)


def test_short_kernels_of_software_that_is_not_known_are_uncertain() -> None:
    widths = [half_width(GUESSED, SHARES, measured=True, columns=columns) for columns in (0, 768, 4096)]
    assert widths[1] > widths[0] == widths[2]
    assert half_width(FITTED, SHARES, measured=True, columns=768) == half_width(FITTED, SHARES, measured=True)


def test_a_cause_that_takes_longer_makes_a_step_longer_by_its_share() -> None:
    """Half of a step twice as long makes it one and a half times as long, not by half of a logarithm."""
    alone = half_width(GUESSED, {"updates on the host": 1.0}, measured=True) ** 2
    half = half_width(GUESSED, {"updates on the host": 0.5}, measured=True) ** 2
    base = half_width(GUESSED, {}, measured=True) ** 2
    assert math.sqrt(alone - base) == pytest.approx(math.log(2.2))
    assert math.sqrt(half - base) == pytest.approx(math.log(1.6))


def test_a_prediction_is_in_the_middle_of_the_logarithms_of_software_that_was_seen() -> None:
    """Steps of software that is not known are longer than predicted more often than they are shorter."""
    request, table = Case("llama3-8b", "h100", "dp8,zero3,gb8").request()
    seen = dataclasses.replace(request, stack=stack_by_name("torchtitan-eager"))
    figures = [simulate(one, table).prediction for one in (request, seen)]
    below, above = ([abs(math.log(end / one.step_s)) for end in (one.low_s, one.high_s)] for one in figures)
    assert above[1] == pytest.approx(above[0])
    assert below[1] / below[0] == pytest.approx(1.9 / 0.6)
    assert figures[0].high_s / figures[0].step_s > figures[1].high_s / figures[1].step_s
    assert any("software that is not known" in sentence for sentence in figures[0].assumed)
    assert not any("software that is not known" in sentence for sentence in figures[1].assumed)


def test_what_each_switch_does_to_a_step() -> None:
    request, table = Case("llama3-8b", "h100", "dp4,tp2,zero1,gb8", stack="megatron-core").request()
    effects = effects_of(request, table)
    changes = {(effect.switch, effect.other_value): effect.change for effect in effects}
    assert changes["fusion", "eager"] == pytest.approx(
        simulate(
            dataclasses.replace(request, stack=dataclasses.replace(request.stack, fusion="eager")), table
        ).step.step_s
        / simulate(request, table).step.step_s
        - 1
    )
    assert (changes["fusion", "eager"] or 0) > 0 > (changes["hidden.tp", 1.0] or 0)
    assert (changes["unfused", ("rope",)] or 0) > 0
    assert [abs(e.change or 0) for e in effects] == sorted((abs(e.change or 0) for e in effects), reverse=True)
