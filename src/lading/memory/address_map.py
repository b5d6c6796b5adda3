"""Who holds, or held last, each byte of the device arena."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from lading.memory.order import START, Uses


@dataclass(slots=True, eq=False)
class AddressedResidency:
    """Stay of a storage on the device, at one address, from the action that places it to its FREE.

    Attributes:
        version: How many writes of the step the storage's value has seen.
        placed, freed: Ids of the actions; ``freed`` is None while it lasts.
    """

    storage: int
    offset: int
    version: int
    placed: int = START
    freed: int | None = None
    uses: Uses = field(default_factory=Uses)


class AddressMap:
    """Map of the arena: disjoint segments, sorted, each with the last residency that lay there.

    Only the last one matters: it was placed after the one before it was freed, which was checked then.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[AddressedResidency] = []

    def place(self, residency: AddressedResidency, size_bytes: int) -> list[AddressedResidency]:
        """Put ``residency`` at its offset; returns the residencies that it covers, wholly or in part."""
        start, end = residency.offset, residency.offset + size_bytes
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        covered = self._owners[low:high]
        pieces = [(start, end, residency)]
        if covered and self._starts[low] < start:
            pieces.insert(0, (self._starts[low], start, covered[0]))
        if covered and self._ends[high - 1] > end:
            pieces.append((end, self._ends[high - 1], covered[-1]))
        self._starts[low:high] = [piece[0] for piece in pieces]
        self._ends[low:high] = [piece[1] for piece in pieces]
        self._owners[low:high] = [piece[2] for piece in pieces]
        return covered
