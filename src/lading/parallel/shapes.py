"""Shapes: the lengths of a rank's tensors as expressions in sizes and degrees, each written once per segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lading.errors import ConfigError
from lading.ir.sizes import Size
from lading.parallel.atoms import Lineage
from lading.parallel.choose import CONTEXT, EXPERT, TENSOR, CutAxes, is_token

#: Rules by which a length is divided: see ``Factor``.
EVEN, HEADS, SHARED_HEADS, WORDS, TOKENS, EXPERTS = "even", "heads", "shared heads", "words", "tokens", "experts"


@dataclass(frozen=True, slots=True)
class Factor:
    """A length is divided over an axis by a rule.

    ``atom`` is what must divide. "words" are padded up to a multiple; of "shared heads" a rank holds at least one, so
    that fewer than ranks stand more than once.
    """

    axis: str
    rule: str
    atom: Size


@dataclass(frozen=True, slots=True)
class Length:
    """Length of a dim, with what is needed to divide it over ranks: a product of factors, or a sum of parts.

    Attributes:
        size: Length before it is divided, as a polynomial in the model's sizes.
        factors: Factors, outermost first, each with the axes that cut it; () for a sum.
        leaves: Where it has factors: all it is a product of, outermost first, each with its own factors.
        parts: Places, among all lengths, of what each part is a product of.
    """

    size: Size
    factors: tuple[Factor, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    leaves: tuple[tuple[Size, tuple[Factor, ...]], ...] = ()


@dataclass
class Lengths:
    """Table of the distinct lengths of a segment; dims of its tensors are places here."""

    lineage: Lineage
    choice: CutAxes
    cp: bool
    lengths: list[Length] = field(default_factory=lambda: [])
    _places: dict[Length, int] = field(default_factory=lambda: {})

    def place(self, length: Length) -> int:
        """Place of a length in the table, to which a new one is added."""
        if length not in self._places:
            self._places[length] = len(self.lengths)
            self.lengths.append(length)
        return self._places[length]

    def of(self, tensor: int, *, scattered: bool, persistent: bool = False) -> tuple[int, ...]:
        """Dims of a tensor of the segment.

        Args:
            scattered: Its tokens are cut over tp ranks.
            persistent: It is a parameter, which is never cut along tokens.
        """
        sizes, tokens_cut = self.lineage.segment.tensors[tensor].dims, False
        places: list[int] = []
        for size, dim in zip(sizes, self.lineage.dims[tensor], strict=True):
            leaves = self.lineage.atoms.leaves(dim)
            free = persistent or tokens_cut  # scores of all pairs are cut along the first dim of tokens
            places.append(self._dim(size, leaves, scattered and not free, not free))
            tokens_cut = tokens_cut or any(is_token(self.lineage, leaf) for leaf in leaves)
        return tuple(places)

    def _dim(self, size: Size, leaves: tuple[int, ...], scattered: bool, tokens: bool) -> int:
        if len(leaves) == 1 and (parts := self.lineage.atoms.parts(leaves[0])):
            places = tuple(self._product(self.lineage.atoms.leaves(part), scattered, tokens) for part in parts)
            return self.place(Length(size, (), places))
        cuts = tuple((self.lineage.atoms.size(leaf), self._factors(leaf, scattered, tokens)) for leaf in leaves)
        factors = tuple(factor for _, of_leaf in cuts for factor in of_leaf)
        return self.place(Length(size, factors, (), cuts if factors else ()))

    def _product(self, leaves: tuple[int, ...], scattered: bool, tokens: bool) -> tuple[int, ...]:
        return tuple(self._dim(self.lineage.atoms.size(leaf), (leaf,), scattered, tokens) for leaf in leaves)

    def _factors(self, leaf: int, scattered: bool, tokens: bool) -> tuple[Factor, ...]:
        atom = self.lineage.atoms.size(leaf)
        if (axis := self.choice.axis.get(leaf)) is not None:
            return (Factor(axis, self._rule(leaf, axis), atom),)
        if not tokens or not is_token(self.lineage, leaf):
            return ()
        over_ranks = (CONTEXT,) * self.cp + (TENSOR,) * scattered
        return tuple(Factor(axis, TOKENS, atom) for axis in over_ranks)

    def _rule(self, leaf: int, axis: str) -> str:
        if axis == EXPERT:
            return EXPERTS
        if leaf in self.choice.words:
            return WORDS
        return SHARED_HEADS if leaf in self.choice.kv else HEADS if leaf in self.choice.heads else EVEN


def evaluate(lengths: tuple[Length, ...], sizes: Mapping[str, int], degrees: Mapping[str, int]) -> list[int]:
    """Numbers for these sizes and degrees.

    Raises:
        ConfigError: a length does not divide; names the rule and what can be.
    """
    numbers: list[int] = []
    for length in lengths:
        if length.parts:
            total = 0
            for part in length.parts:
                number = 1
                for place in part:
                    number *= numbers[place]
                total += number
            numbers.append(total)
            continue
        number = length.size.at(sizes)
        for factor in length.factors:
            degree = degrees[factor.axis]
            if degree > 1:
                number = _divided(number, factor, degree, sizes)
        numbers.append(number)
    return numbers


def _divided(number: int, factor: Factor, degree: int, sizes: Mapping[str, int]) -> int:
    if factor.rule == WORDS:
        atom = factor.atom.at(sizes)
        return number // atom * -(-atom // degree)
    if factor.rule == SHARED_HEADS:
        return number // min(degree, factor.atom.at(sizes))
    return number // degree


_NEEDS = {
    EVEN: "{atom} = {count} columns to be a multiple of {axis}",
    HEADS: "{atom} = {count} heads to be a multiple of {axis}",
    SHARED_HEADS: "{atom} = {count} key-value heads to be a multiple or a divisor of {axis}",
    EXPERTS: "{atom} = {count} experts to be a multiple of {axis}",
    TOKENS: "{atom} = {count} tokens to be a multiple of {axis}",
}


def check(lengths: tuple[Length, ...], sizes: Mapping[str, int], degrees: Mapping[str, int], name: str) -> None:
    """Whether all divide.

    Raises:
        ConfigError: names the rule, what was found and the nearest degree that can be.
    """
    for factors in dict.fromkeys(length.factors for length in lengths if length.factors):
        tokens = [factor for factor in factors if factor.rule == TOKENS]
        if tokens:
            _check(
                tokens[0], "*".join(f.axis for f in tokens), _product([degrees[f.axis] for f in tokens]), sizes, name
            )
        for factor in factors:
            if factor.rule not in (TOKENS, WORDS):
                _check(factor, factor.axis, degrees[factor.axis], sizes, name)


def _product(numbers: list[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def _check(factor: Factor, axis: str, degree: int, sizes: Mapping[str, int], name: str) -> None:
    count = factor.atom.at(sizes)
    shared = factor.rule == SHARED_HEADS
    if count % degree == 0 or (shared and degree % count == 0):
        return
    can = [d for d in range(1, max(2 * degree, 2)) if count % d == 0 or (shared and d % count == 0)]
    nearest = min(can, key=lambda d: (abs(d - degree), d))
    rule = _NEEDS[factor.rule].format(atom=factor.atom, count=count, axis=axis)
    raise ConfigError(f"segment {name!r}: expected {rule}, got {axis} {degree}; the nearest that can be is {nearest}")
