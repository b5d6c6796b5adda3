"""Atoms: what the dims of a segment's tensors are made of, and which of them are the same.

A dim is a product of atoms, outermost first: tokens of a micro-batch are (b, s), the columns of a fused query, key and
value product are (3, heads, head size). Operations say which dims run along each other; views say how a dim splits.
What is found to be the same is one atom from then on, so that to cut it is to cut it everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lading.ir.graph import Op
from lading.ir.sizes import Monomial, Size
from lading.ir.table import Segment

ONE = Size.of(1)


@dataclass(slots=True)
class _Atom:
    """An atom. ``same_as``, ``factors`` or ``parts`` say what it is; with none of them it stands for itself."""

    size: Size
    same_as: int | None = None
    factors: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    whole: bool = False


@dataclass
class Atoms:
    """The atoms of one segment. An atom is known by its number; dims are tuples of numbers."""

    _atoms: list[_Atom] = field(default_factory=lambda: [])

    def new(self, size: Size) -> tuple[int, ...]:
        """A dim of which nothing is known but its length; a dim of length 1 has no atoms."""
        if size == ONE:
            return ()
        self._atoms.append(_Atom(size))
        return (len(self._atoms) - 1,)

    def size(self, atom: int) -> Size:
        """Length of an atom."""
        return self._atoms[self._root(atom)].size

    def is_whole(self, atom: int) -> bool:
        """Whether an operation needs all of it at once."""
        return self._atoms[self._root(atom)].whole

    def keep_whole(self, dim: tuple[int, ...]) -> None:
        """An operation needs all of these at once: they cannot be cut."""
        for atom in self.leaves(dim):
            self._atoms[atom].whole = True
            for part in self._atoms[atom].parts:
                self.keep_whole(part)

    def parts(self, atom: int) -> tuple[tuple[int, ...], ...]:
        """Dims that stand one after another in it, if they are not of one length."""
        return self._atoms[self._root(atom)].parts

    def leaves(self, dim: tuple[int, ...]) -> tuple[int, ...]:
        """The atoms a dim is made of, as far as is known."""
        atom_leaves: list[int] = []
        for atom in dim:
            root = self._root(atom)
            factors = self._atoms[root].factors
            atom_leaves.extend(self.leaves(factors) if factors else (root,))
        return tuple(atom_leaves)

    def split_unevenly(self, whole: tuple[int, ...], parts: tuple[tuple[int, ...], ...]) -> None:
        """``whole`` is these dims one after another."""
        leaves = self.leaves(whole)
        if len(leaves) != 1:
            for dim in (leaves, *parts):
                self.keep_whole(dim)
            return
        atom = self._atoms[leaves[0]]
        if not atom.parts:
            atom.parts = parts
        elif len(atom.parts) == len(parts):
            for mine, part in zip(atom.parts, parts, strict=True):
                self.align(mine, part)
        else:
            for dim in (leaves, *parts):
                self.keep_whole(dim)

    def align(self, left: tuple[int, ...], right: tuple[int, ...]) -> None:
        """Note that two dims, as rows of atoms, are the same elements in the same order."""
        mine, others = list(self.leaves(left)), list(self.leaves(right))
        while mine and others:
            if mine[0] == others[0] or self.size(mine[0]) == self.size(others[0]):
                self._merge(mine.pop(0), others.pop(0))
            elif mine[-1] == others[-1] or self.size(mine[-1]) == self.size(others[-1]):
                self._merge(mine.pop(), others.pop())
            elif not self._split_first(mine, others):
                break
            mine, others = list(self.leaves(tuple(mine))), list(self.leaves(tuple(others)))
        self.keep_whole((*mine, *others))

    def _split_first(self, mine: list[int], other: list[int]) -> bool:
        """Split the longer of the first atoms by the shorter, or of the last."""
        for first in (True, False):
            for long, short in ((mine, other), (other, mine)):
                place = 0 if first else -1
                quotient = divide(self.size(long[place]), self.size(short[place]))
                if quotient is None or quotient == ONE or self._atoms[long[place]].parts:
                    continue
                remainder = self.new(quotient)
                factors = (short[place], *remainder) if first else (*remainder, short[place])
                atom = self._atoms[long[place]]
                atom.factors = factors
                if atom.whole:
                    self.keep_whole(factors)
                return True
        return False

    def _merge(self, left: int, right: int) -> None:
        left, right = self._root(left), self._root(right)
        if left == right:
            return
        mine, right_atom = self._atoms[left], self._atoms[right]
        if mine.parts and not right_atom.parts:
            left, right, mine, right_atom = right, left, right_atom, mine
        mine.same_as = right
        if mine.whole:
            self.keep_whole((right,))
        if mine.parts and len(mine.parts) == len(right_atom.parts):
            for a, b in zip(mine.parts, right_atom.parts, strict=True):
                self.align(a, b)
        elif mine.parts:
            self.keep_whole((right,))

    def _root(self, atom: int) -> int:
        while (parent := self._atoms[atom].same_as) is not None:
            atom = parent
        return atom


def divide(size: Size, by: Size) -> Size | None:
    """The quotient of a polynomial and a single product, None if it is none."""
    if len(by.terms) != 1:
        return None
    divisor, number = by.terms[0]
    terms: list[tuple[Monomial, int]] = []
    for monomial, coefficient in size.terms:
        powers = dict(monomial)
        for name, power in divisor:
            powers[name] = powers.get(name, 0) - power
        if any(power < 0 for power in powers.values()):
            return None
        terms.append((tuple(sorted((name, power) for name, power in powers.items() if power)), coefficient))
    quotient = Size(tuple(sorted(terms))) * by.divisor
    quotient = quotient.over(size.divisor * number)
    is_number = not quotient.symbols
    return None if is_number and quotient.divisor != 1 else quotient


Dim = tuple[int, ...]
Dims = tuple[Dim, ...]


@dataclass
class Lineage:
    """Dims of every tensor of a segment, in atoms.

    ``normed`` are atoms that norms are over; ``unknown`` are operations of which nothing is known; ``cuts`` are slices
    (length of the whole, start, length) that together make up a whole.
    """

    segment: Segment
    atoms: Atoms
    dims: list[Dims]
    normed: set[int] = field(default_factory=set[int])
    unknown: list[Op] = field(default_factory=list[Op])
    cuts: set[tuple[Size, Size, Size]] = field(default_factory=set[tuple[Size, Size, Size]])

    def leaves(self, tensor: int) -> tuple[int, ...]:
        """Atoms of all its dims."""
        return tuple(leaf for dim in self.dims[tensor] for leaf in self.atoms.leaves(dim))


def setting(op: Op, key: str) -> object:
    """A setting, None if it has none of this name."""
    return next((value for name, value in op.settings if name == key), None)
