"""Size: a whole number that depends on others by name, such as ``2*b*s + h``: a polynomial with integer coefficients.

Values may be ints or numpy arrays of int64: one evaluation serves one layout, or ten thousand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lading.errors import ConfigError

#: Symbols with their powers, sorted by name; () is the constant.
Monomial = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Size:
    """Sum of ``coefficient * product of symbol**power``; ``terms`` are sorted, without zeros."""

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def of(value: int | str | Size) -> Size:
        """A constant, a symbol, or a text such as ``"2*b*s**2 + 3"``.

        Raises:
            ConfigError: the text is not a sum of products.
        """
        if isinstance(value, Size):
            return value
        return _sum([((), value)]) if isinstance(value, int) else _parse(value)

    def __add__(self, other: Size | int) -> Size:
        return _sum([*self.terms, *Size.of(other).terms])

    def __mul__(self, other: Size | int) -> Size:
        return _sum((_product(left, right), a * b) for left, a in self.terms for right, b in Size.of(other).terms)

    @property
    def symbols(self) -> frozenset[str]:
        """Names it depends on."""
        return frozenset(name for monomial, _ in self.terms for name, _ in monomial)

    def at(self, values: Mapping[str, Any]) -> Any:
        """The number for these values: an int, or an array if a value is one.

        Raises:
            ConfigError: a symbol has no value.
        """
        total: Any = 0
        for monomial, coefficient in self.terms:
            product: Any = coefficient
            for name, power in monomial:
                if name not in values:
                    raise ConfigError(f"expected a value of {name!r} in {self}, got only {', '.join(sorted(values))}")
                product = product * values[name] ** power
            total = total + product
        return total

    def __str__(self) -> str:
        return " + ".join(_text(monomial, coefficient) for monomial, coefficient in self.terms) or "0"


def _sum(terms: Iterable[tuple[Monomial, int]]) -> Size:
    found: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        found[monomial] = found.get(monomial, 0) + coefficient
    return Size(tuple(sorted((monomial, c) for monomial, c in found.items() if c)))


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


def _parse(text: str) -> Size:
    total = Size(())
    for term in text.replace(" ", "").replace("-", "+-").split("+"):
        if not term:
            continue
        product = _sum([((), -1 if term.startswith("-") else 1)])
        for factor in re.split(r"(?<!\*)\*(?!\*)", term.lstrip("-")):
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
