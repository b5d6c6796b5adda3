"""Size: a whole number that depends on others by name, such as ``2*b*s + h``: a polynomial with whole coefficients.

Values may be ints or numpy arrays of int64: one evaluation serves one layout, or ten thousand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

from lading.errors import ConfigError

#: Symbols with their powers, sorted by name; () is the constant.
Monomial = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Size:
    """Sum of ``coefficient * product of symbol**power``, by ``divisor``; ``terms`` are sorted, without zeros.

    The divisor is 1 but for sizes such as half a head, ``d/2``, which rotary positions turn.
    """

    terms: tuple[tuple[Monomial, int], ...]
    divisor: int = 1

    @staticmethod
    def of(value: int | str | Size) -> Size:
        """Make a size of a constant, a symbol, or a text such as ``"2*b*s**2 + 3"`` or ``"n*d/2"``.

        Raises:
            ConfigError: the text is not a sum of products.
        """
        if isinstance(value, Size):
            return value
        return _number(value) if isinstance(value, int) else _parse(value)

    def __add__(self, other: Size | int) -> Size:
        right = Size.of(other)
        terms = (
            *((monomial, c * right.divisor) for monomial, c in self.terms),
            *((monomial, c * self.divisor) for monomial, c in right.terms),
        )
        return _sum(terms, self.divisor * right.divisor)

    def __mul__(self, other: Size | int) -> Size:
        right = Size.of(other)
        terms = ((_product(m, n), a * b) for m, a in self.terms for n, b in right.terms)
        return _sum(terms, self.divisor * right.divisor)

    def over(self, divisor: int) -> Size:
        """Divide the size by a whole number."""
        return _sum(self.terms, self.divisor * divisor)

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the symbols that the size depends on."""
        return frozenset(name for monomial, _ in self.terms for name, _ in monomial)

    def at(self, values: Mapping[str, Any]) -> Any:
        """Evaluate the size for these values: an int, or an array if a value is one.

        Raises:
            ConfigError: a symbol has no value, or the result is not whole.
        """
        total: Any = 0
        for monomial, coefficient in self.terms:
            product: Any = coefficient
            for name, power in monomial:
                if name not in values:
                    raise ConfigError(f"expected a value of {name!r} in {self}, got only {', '.join(sorted(values))}")
                product = product * values[name] ** power
            total = total + product
        if self.divisor == 1:
            return total
        remainder: Any = total % self.divisor
        if remainder.any() if hasattr(remainder, "any") else remainder:
            sizes = ", ".join(f"{name}={values[name]}" for name in sorted(self.symbols))
            raise ConfigError(f"expected sizes for which {self} is whole, got {sizes}; use even sizes")
        return total // self.divisor

    def __str__(self) -> str:
        """Write the size as ``of`` reads it."""
        over = "" if self.divisor == 1 else f"/{self.divisor}"
        return " + ".join(_text(monomial, coefficient) + over for monomial, coefficient in self.terms) or "0"


@dataclass(frozen=True, slots=True)
class Power:
    """Size to a power that is negative or no whole number: ``d**-0.5``, the scale of attention."""

    size: Size
    exponent: float

    def at(self, values: Mapping[str, Any]) -> float:
        """Evaluate the power for these values; errors as ``Size.at``."""
        return float(self.size.at(values)) ** self.exponent


def _sum(terms: Iterable[tuple[Monomial, int]], divisor: int = 1) -> Size:
    coefficients: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        coefficients[monomial] = coefficients.get(monomial, 0) + coefficient
    common = gcd(divisor, *coefficients.values())
    return Size(tuple(sorted((m, c // common) for m, c in coefficients.items() if c)), divisor // common)


def _product(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted(powers.items()))


def _text(monomial: Monomial, coefficient: int) -> str:
    factors = [name if power == 1 else f"{name}**{power}" for name, power in monomial]
    if coefficient != 1 or not factors:
        factors.insert(0, str(coefficient))
    return "*".join(factors)


@cache
def _number(value: int) -> Size:
    return _sum([((), value)])


@cache
def _parse(text: str) -> Size:
    total = Size(())
    for term in text.replace(" ", "").replace("-", "+-").split("+"):
        if not term:
            continue
        above, _, below = term.lstrip("-").partition("/")
        if below and not re.fullmatch(r"[1-9]\d*", below):
            raise ConfigError(f"expected a whole number after '/', got {below!r} in {text!r}")
        product = _sum([((), -1 if term.startswith("-") else 1)], int(below or 1))
        for factor in re.split(r"(?<!\*)\*(?!\*)", above):
            product = product * _factor(factor, text)
        total = total + product
    return total


def _factor(factor: str, text: str) -> Size:
    base, _, power = factor.partition("**")
    if not re.fullmatch(r"\d+|[A-Za-z_]\w*", base) or not re.fullmatch(r"\d*", power):
        raise ConfigError(f"expected a sum of products of whole numbers and names, got {factor!r} in {text!r}")
    if base.isdigit():
        return _sum([((), int(base) ** int(power or 1))])
    return _sum([(((base, int(power or 1)),), 1)])
