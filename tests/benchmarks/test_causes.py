"""Causes of a stack: kinds of kernels that rows tell apart get factors of their own, others stay with their stack."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from benchmarks.calibrate.causes import cause_factors, cause_shares, with_causes
from tests.validate.test_rows import changed, read
from tools.validate.rows import Row
from tools.validate.scoring import Outcome, Pair
from tools.validate.scoring import outcomes_of as outcomes

from lading.ir.request import Prediction, StepRequest


class Told:
    """Predictor that says the same of every request."""

    def __init__(self, shares: dict[str, float]) -> None:
        self.shares = shares

    def predict(self, request: StepRequest) -> Prediction:
        return Prediction(step_s=1.0, low_s=0.9, high_s=1.1, shares=self.shares)


def pair(row: Row, ratio: float, **shares: float) -> Pair:
    named = {name.replace("_", "-" if name == "memory_bound" else " "): share for name, share in shares.items()}
    (outcome,) = outcomes([row], Told(named))
    assert isinstance(outcome, Outcome)
    return Pair(outcome, ratio, 1.0, 0.9, 1.1)


@pytest.fixture
def row(tmp_path: Path) -> Row:
    return read(tmp_path, changed())[0]


def test_what_slow_attention_takes_longer_is_laid_on_attention(row: Row) -> None:
    much = [pair(row, 1.2, products=0.5, attention=0.5)] * 20
    little = [pair(row, 1.0, products=1.0)] * 20
    found = cause_factors([*much, *little], 1.0)
    assert found["products"] == pytest.approx(1.0, abs=0.03)
    assert 1.3 < found["attention"] < 1.2**2
    assert "memory-bound" not in found, "no row has any"
    errors = [abs(with_causes(one, 1.0, found) / one.measured - 1) for one in (much[0], little[0])]
    assert max(errors) < 0.03


def test_one_row_says_little(row: Row) -> None:
    found = cause_factors([pair(row, 1.2, products=0.9, memory_bound=0.1)], 1.1)
    assert 1.1 < found["products"] < 1.2
    assert found["memory-bound"] == pytest.approx(1.1, rel=0.01)


def test_recomputed_kernels_are_of_the_kinds_of_forward_and_a_bubble_of_none(row: Row) -> None:
    one = pair(row, 1.0, products=0.3, attention=0.1, recomputing=0.2, bubble=0.4)
    products, _, attention, _ = cause_shares(one)
    assert (products, attention) == (pytest.approx(0.75), pytest.approx(0.25))
    assert with_causes(one, 1.1, {}) == pytest.approx(1.1)
    assert math.isclose(with_causes(one, 1.0, {"attention": 2.0}), 2**0.25)
