"""Sizes: arithmetic of polynomials, text and back, arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lading.errors import ConfigError
from lading.ir.sizes import Size

_NAMES = ("b", "s", "h")
_VALUES = st.fixed_dictionaries({name: st.integers(0, 50) for name in _NAMES})


def _sizes() -> st.SearchStrategy[Size]:
    leaves = st.one_of(st.integers(-9, 9).map(Size.of), st.sampled_from(_NAMES).map(Size.of))
    return st.recursive(
        leaves, lambda inner: st.tuples(inner, inner, st.booleans()).map(lambda t: t[0] * t[1] if t[2] else t[0] + t[1])
    )


@given(_sizes(), _sizes(), _VALUES)
def test_arithmetic_is_that_of_the_numbers(left: Size, right: Size, values: dict[str, int]) -> None:
    assert (left + right).at(values) == left.at(values) + right.at(values)
    assert (left * right).at(values) == left.at(values) * right.at(values)
    assert left + right == right + left
    assert left * right == right * left


@given(_sizes(), st.integers(1, 6))
def test_text_comes_back(size: Size, divisor: int) -> None:
    part = size.over(divisor)
    assert Size.of(str(part)) == part


@given(_sizes(), _VALUES, st.integers(1, 6))
def test_whole_parts_are_exact(size: Size, values: dict[str, int], divisor: int) -> None:
    assert (size * divisor).over(divisor) == size
    number = size.at(values)
    if number % divisor:
        with pytest.raises(ConfigError, match="whole"):
            size.over(divisor).at(values)
    else:
        assert size.over(divisor).at(values) == number // divisor


def test_arrays_are_one_evaluation_for_many() -> None:
    size = Size.of("2*b*s**2 + h/2")
    values = {"b": np.arange(4), "s": 3, "h": np.array([2, 4, 6, 8])}
    assert size.at(values).tolist() == [18 * b + h // 2 for b, h in zip(range(4), (2, 4, 6, 8), strict=True)]
    with pytest.raises(ConfigError, match="h/2"):
        size.at({"b": 1, "s": 1, "h": np.array([2, 3])})


@pytest.mark.parametrize("text", ["2*", "b+*s", "b//2", "b/0", "b^2", "2.5*b"])
def test_what_is_no_sum_of_products_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Size.of(text)


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(ConfigError, match="'s'"):
        Size.of("b*s").at({"b": 1})
