"""Frames: what the rules of lineage write down, and how they read an operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from lading.ir.graph import Op
from lading.ir.sizes import Size
from lading.ir.table import Segment
from lading.parallel.atoms import Atoms

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


def base_name(name: str) -> str:
    """``aten.mm.default`` -> ``mm``; an in-place form counts as the plain one."""
    parts = name.split(".")
    base = parts[1] if len(parts) > 1 else parts[0]
    return base if base.startswith("_") and base.rstrip("_") == "" else base.rstrip("_")


def setting(op: Op, key: str) -> object:
    """A setting, None if it has none of this name."""
    return next((value for name, value in op.settings if name == key), None)
