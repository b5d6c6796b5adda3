"""Polynomials in named sizes: find the one that a number is, given what it was for several values of the sizes.

A single product of sizes is tried first, then a sum of two, then every sum of products without powers, then the sum of
two or three lengths that were found (a matrix whose columns are parts of several).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import combinations, combinations_with_replacement
from math import lcm

import numpy as np
from numpy.typing import NDArray

from lading.ir.sizes import Monomial, Size

#: Factors of a product at most.
_DEGREE = 4
#: Factors of each product in a sum of two.
_SUM_DEGREE = 3
#: Divisors of a coefficient: half a head is turned by rotary positions, state-space layers work in chunks of tokens.
_DIVISORS = (1, 2, 128)


class Identifier:
    """Finds the polynomials that lengths are, from observations at several sizes.

    Args:
        values: Value of each symbol, one mapping for each observation; the symbols should vary independently.
        largest: Largest coefficient; None means any (where the model's own sizes are numbers).
    """

    def __init__(self, values: Sequence[Mapping[str, int]], largest: int | None) -> None:
        self.values = list(values)
        self.largest = largest
        self.names = sorted(self.values[0])
        self._found: dict[tuple[int, ...], Size | None] = {}

    def size(self, observed: Sequence[int]) -> Size | None:
        """Find the polynomial with these values, one for each observation; None if there is none of a simple form."""
        key = tuple(observed)
        if key not in self._found:
            self._found[key] = self._search(np.array(observed, dtype=np.int64))
        return self._found[key]

    def learn(self, lengths: Iterable[Sequence[int]]) -> None:
        """Find the polynomials of these lengths, those that are sums of others too."""
        rest = {tuple(observed) for observed in lengths}
        rest = {key for key in rest if self.size(key) is None}
        parts = sorted((key for key, size in self._found.items() if size is not None and min(key) > 0), key=sum)
        for key in rest:
            self._found[key] = self._sum_of_found(key, parts, 3)

    def _sum_of_found(self, key: tuple[int, ...], parts: Sequence[tuple[int, ...]], most: int) -> Size | None:
        """Find ``key`` as the sum of at most ``most`` lengths that are known; None without one."""
        if most == 1 or min(key) <= 0:
            return self._found.get(key)
        for part in parts:
            other = tuple(whole - piece for whole, piece in zip(key, part, strict=True))
            left, right = self._found[part], self._sum_of_found(other, parts, most - 1)
            if left is not None and right is not None:
                return left + right
        return None

    def _search(self, observed: NDArray[np.int64]) -> Size | None:
        if (observed == observed[0]).all():
            return Size.of(int(observed[0]))
        size = self._product(observed)
        if size is None:
            size = self._sum(observed)
        return size if size is not None else self._multilinear(observed)

    @cached_property
    def _monomials(self) -> tuple[list[Monomial], NDArray[np.int64]]:
        """Every product of symbols, lowest degree first, and its values, (products, observations)."""
        names: list[Monomial] = []
        for degree in range(_DEGREE + 1):
            for chosen in combinations_with_replacement(self.names, degree):
                names.append(tuple((n, chosen.count(n)) for n in dict.fromkeys(chosen)))
        rows = [[_value(m, at) for at in self.values] for m in names]
        return names, np.array(rows, dtype=np.int64)

    def _product(self, observed: NDArray[np.int64]) -> Size | None:
        names, rows = self._monomials
        for divisor in _DIVISORS:
            first = observed[0] * divisor // rows[:, 0]
            good = (first[:, None] * rows == observed * divisor).all(axis=1) & (first > 0)
            for index in np.flatnonzero(good):
                if self._allowed(int(first[index])):
                    return _size([(names[index], Fraction(int(first[index]), divisor))])
        return None

    def _allowed(self, coefficient: int) -> bool:
        return self.largest is None or abs(coefficient) <= self.largest

    def _sum(self, observed: NDArray[np.int64]) -> Size | None:
        """Find ``p*x + q*y`` of two products, trying those of low degree first; None without one."""
        names, _ = self._monomials
        for degree in range(1, _SUM_DEGREE + 1):
            count = sum(sum(power for _, power in m) <= degree for m in names)
            left, right = np.triu_indices(count, 1)
            for at in combinations(range(len(self.values)), 2):
                solution = self._solved(observed, at, left, right)
                if solution is not None:
                    return solution
        return None

    def _solved(
        self, observed: NDArray[np.int64], at: tuple[int, int], left: NDArray[np.intp], right: NDArray[np.intp]
    ) -> Size | None:
        """Find the sum of two products whose coefficients the observations ``at`` give, if the others agree."""
        names, rows = self._monomials
        (first, second), wide = at, rows.astype(float)
        a, b, c, d = wide[left, first], wide[right, first], wide[left, second], wide[right, second]
        ahead, behind = float(observed[first]), float(observed[second])
        determinant = a * d - b * c
        safe = np.where(determinant == 0, 1.0, determinant)
        p, q = np.rint((ahead * d - b * behind) / safe), np.rint((a * behind - ahead * c) / safe)
        fit = (determinant != 0) & (p != 0) & (q != 0)
        if self.largest is not None:
            fit &= (abs(p) <= self.largest) & (abs(q) <= self.largest)
        chosen = np.flatnonzero(fit)
        agrees = p[chosen, None] * wide[left[chosen]] + q[chosen, None] * wide[right[chosen]] == observed
        for index in chosen[agrees.all(axis=1)]:
            pair = names[left[index]], names[right[index]]
            return _size([(m, Fraction(int(c))) for m, c in zip(pair, (p[index], q[index]), strict=True)])
        return None

    def _multilinear(self, observed: NDArray[np.int64]) -> Size | None:
        """Find a sum of products without powers, where there are enough observations to tell."""
        names, rows = self._monomials
        chosen = [i for i, m in enumerate(names) if all(power == 1 for _, power in m)]
        if len(chosen) > len(self.values):
            return None
        solution = np.linalg.lstsq(rows[chosen].T.astype(float), observed.astype(float), rcond=None)[0]
        whole = np.rint(solution).astype(np.int64)
        if not (whole @ rows[chosen] == observed).all() or not all(map(self._allowed, map(int, whole))):
            return None
        return _size([(names[i], Fraction(int(c))) for i, c in zip(chosen, whole, strict=True)])


def _value(monomial: Monomial, values: Mapping[str, int]) -> int:
    product = 1
    for name, power in monomial:
        product *= values[name] ** power
    return product


def _size(terms: Sequence[tuple[Monomial, Fraction]]) -> Size:
    divisor = lcm(*(c.denominator for _, c in terms))
    total = Size(())
    for monomial, coefficient in terms:
        total = total + Size(((monomial, int(coefficient * divisor)),))
    return total.over(divisor)
