"""List writer: appends the actions of one rank, with their waits, for those who know the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lading.ir.action import ActionKind
from lading.ir.program import COMPUTE, NETWORK, ActionList, ParameterGroup, Region, UnitStorage


@dataclass
class Numbers:
    """Numbers of regions and storages, given as they come; and the sharded storages that a region uses."""

    regions: dict[Region, int]
    storages: dict[UnitStorage, int]
    uses: dict[int, tuple[int, ...]]

    def region(self, region: Region) -> int:
        """Number of a region."""
        return self.regions.setdefault(region, len(self.regions))

    def storage(self, storage: UnitStorage) -> int:
        """Number of a storage."""
        return self.storages.setdefault(storage, len(self.storages))


class ListWriter:
    """List of one rank, being written: its last action on the compute stream, and what the next region waits for."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.actions = ActionList()
        self.last = self.before = -1  # last action on the compute stream, and the one before it
        self.pending: list[int] = []
        self.reducing = -1  # last reduction beside computing

    def add_group(
        self, kind: ActionKind, stream: int, group: ParameterGroup, micro_batch: int, waits: tuple[int, ...]
    ) -> int:
        """Append what gathers, releases or reduces a group; returns its number."""
        number = self.numbers.storage(group)
        return self.actions.add(kind, stream, waits, storage=number, micro_batch=micro_batch, group=group.axes)

    def add_region(self, region: Region, micro_batch: int, uses: Sequence[ParameterGroup]) -> None:
        """Append a region, which waits for all that is pending."""
        number = self.region_number(region, uses)
        waits = self.take_pending()
        self.before = self.last
        self.last = self.actions.add(ActionKind.COMPUTE, COMPUTE, waits, op=number, micro_batch=micro_batch)

    def region_number(self, region: Region, uses: Sequence[ParameterGroup]) -> int:
        """Number of a region that uses such groups."""
        number = self.numbers.region(region)
        if uses and number not in self.numbers.uses:
            self.numbers.uses[number] = tuple(self.numbers.storage(group) for group in uses)
        return number

    def add_blocking(self, kind: ActionKind, group: ParameterGroup, micro_batch: int, axis: str) -> None:
        """Append a collective that computing waits for."""
        number = self.numbers.storage(group)
        self.before, self.last = (
            self.last,
            self.actions.add(kind, COMPUTE, self.take_pending(), storage=number, micro_batch=micro_batch, group=axis),
        )

    def reduce_beside(self, group: ParameterGroup, micro_batch: int) -> None:
        """Append a reduction beside computing; the next region waits for the reduction before it."""
        before = self.reducing
        self.reducing = self.add_group(ActionKind.REDUCE_GRAD, NETWORK, group, micro_batch, (self.last,))
        if before >= 0:
            self.pending.append(before)

    def take_pending(self) -> tuple[int, ...]:
        """Take what the next action on the compute stream waits for."""
        waits = tuple(self.pending)
        self.pending.clear()
        return waits

    def await_network(self) -> None:
        """Let the next action on the compute stream wait for the network's last."""
        self.pending += [at for at, stream in enumerate(self.actions.stream) if stream == NETWORK][-1:]
