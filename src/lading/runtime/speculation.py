"""Steps that speculate: their updates ran as if nothing were clipped, and count once that is known to be so.

What such an update changes has its value from before the step in a lower tier, until the step counts: values that are
written there after their update go to a second place. A flip of one number then makes that the place of the values. A
step whose gradients turn out to be clipped makes no flip: it is rewound and run again, with the coefficient that came
out in the place of the guess. See ``lading.ir.guess``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Set

import torch

from lading.errors import ProgramError, StorageError
from lading.ir.action import DEVICE
from lading.ir.guess import guess_of, is_update, speculated
from lading.ir.program import Program, slot_bytes
from lading.memory.tier_layout import Location
from lading.memory.values_before import values_before
from lading.runtime.cuda import generator_state, set_generator_state
from lading.runtime.device import Call, Memory
from lading.runtime.tiers import HostBytes, TierBytes, bound_move
from lading.runtime.values import Values

#: Norms (L1, L2) of a gradient.
Norms = tuple[torch.Tensor, torch.Tensor]


class Version:
    """Which of the two places holds the values: 0 the slots of the Program, 1 the places behind them."""

    number = 0


class VersionedTier:
    """A tier whose values are where a version says.

    Args:
        tier: What has the bytes of both places.
        slots: Start and end of the first place of each value that has two, and the start of the second.
        other: Whether this shows the places that the version does not say.

    Attributes:
        behind: Tier that has the bytes.
    """

    def __init__(self, tier: TierBytes, slots: list[tuple[int, int, int]], version: Version, *, other: bool) -> None:
        self.behind, self._version, self._other = tier, version, other
        self._slots = sorted(slots)
        self._starts = [start for start, _, _ in self._slots]

    def place(self, offset: int, number: int | None = None) -> int:
        """Offset in the tier of the byte that the Program has at an offset, by the version of now or of a number."""
        number = self._version.number if number is None else number
        return offset if number == self._other else self._second(offset)

    def _second(self, offset: int) -> int:
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return offset
        start, end, second = self._slots[at]
        return second + offset - start if offset < end else offset

    def reading(self, offset: int, into: torch.Tensor) -> Callable[[], None]:
        """Prepare ``read`` with these arguments."""
        return self._prepared(offset, into, reads=True)

    def writing(self, offset: int, data: torch.Tensor) -> Callable[[], None]:
        """Prepare ``write`` with these arguments."""
        return self._prepared(offset, data, reads=False)

    def _prepared(self, offset: int, memory: torch.Tensor, *, reads: bool) -> Callable[[], None]:
        """Prepare a transfer of whichever place a version says when it is made."""
        first = bound_move(self.behind, offset, memory, reads=reads)
        if self._second(offset) == offset:
            return first
        second = bound_move(self.behind, self._second(offset), memory, reads=reads)
        version, other_version = self._version, self._other

        def run() -> None:
            (first if version.number == other_version else second)()

        return run

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into``, as ``TierBytes.read``."""
        self.behind.read(self.place(offset), into)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Put ``data``, as ``TierBytes.write``."""
        self.behind.write(self.place(offset), data)

    def close(self) -> None:
        """Give memory, disk space and handles back."""
        self.behind.close()


class VersionedMemory(VersionedTier):
    """A tier in memory of the host whose values are where a version says."""

    def __init__(self, tier: TierBytes, slots: list[tuple[int, int, int]], version: Version, *, other: bool) -> None:
        super().__init__(tier, slots, version, other=other)
        assert isinstance(tier, HostBytes)
        self._memory: HostBytes = tier

    def bytes_at(self, offset: int, size_bytes: int, number: int | None = None) -> torch.Tensor:
        """uint8[size_bytes] where the Program has ``offset``, without a copy, by the version of now or of a number."""
        return self._memory.bytes_at(self.place(offset, number), size_bytes)


class Speculation:
    """Runs the steps of a Program that speculates, and takes back those whose guess was wrong.

    Args:
        tiers: The lower tiers by name, which have room for both places (``Program.tier_bytes``).
        kind: Kind of the device.

    Attributes:
        tiers: The lower tiers, where the values of the last whole step are.
        next_tiers: Likewise, where those of the step under way come to be.
        refused: Whether the step under way is clipped by another coefficient than was guessed.
        again: Steps that were run a second time.

    Raises:
        ProgramError: what is changed on a guess is never in a lower tier.
    """

    def __init__(self, program: Program, arena: Memory, tiers: Mapping[str, TierBytes], kind: str) -> None:
        graph, guess = program.graph, guess_of(program.graph)
        assert guess is not None, "the step speculates"
        self._changed = speculated(graph)
        self.refused, self.again = False, 0
        self._kind, self._version = kind, Version()
        self.tiers = {name: self._versioned(program, name, tier, other=False) for name, tier in tiers.items()}
        self.next_tiers = {name: self._versioned(program, name, tier, other=True) for name, tier in tiers.items()}
        self._homes, self._slots = dict(program.resident), {t: dict(pairs) for t, pairs in program.slots.items()}
        self._guess = arena.bytes_at(self._homes[guess], graph.storages[guess].size_bytes)
        self._one = torch.frombuffer(bytearray(graph.storages[guess].data or b""), dtype=torch.uint8)
        self._coefficient = self._guess.clone()
        self._before = values_before(program)
        small = (s for s, before in self._before.items() if not before.tier)
        self._small = {s: arena.bytes_at(self._homes[s], graph.storages[s].size_bytes) for s in small}
        self._copies = {s: view.clone() for s, view in self._small.items()}
        self._random = any(op.random for op in graph.ops)
        self._is_stale = True  # whether values on the device were written since the tiers had them

    def _versioned(self, program: Program, name: str, tier: TierBytes, *, other: bool) -> VersionedTier:
        first, sizes = dict(program.slots.get(name, ())), program.graph.storages
        slots = [
            (first[s], first[s] + slot_bytes(sizes[s].size_bytes), second)
            for s, second in program.second_places.get(name, {}).items()
        ]
        kind = VersionedMemory if isinstance(tier, HostBytes) else VersionedTier
        return kind(tier, slots, self._version, other=other)

    def run(self, step: Callable[[], list[float]], values: Values, norms: dict[int, list[Norms]] | None) -> list[float]:
        """Run a step, and run it again if its gradients are clipped.

        Args:
            step: Runs it, and calls ``settle`` at its end.
            norms: What it puts norms of gradients into.

        Raises:
            StorageError: values from before the step could not be read again, and are lost.
            ProgramError: the second run gave another norm; the step has not happened.
        """
        drawn = self._begin(values)
        losses = step()
        if not self.refused:
            return losses
        _check_whole(values)
        self.again, self.refused = self.again + 1, False
        self._guess.copy_(self._coefficient)
        if drawn is not None:
            set_generator_state(self._kind, drawn)
        if norms is not None:
            norms.clear()
        try:
            losses = step()
        finally:
            self._guess.copy_(self._one)
        if self.refused:
            _check_whole(values)
            raise ProgramError(
                "expected the same norm of all gradients from a step that was run twice, found another: an operation "
                "does not give the same numbers again; plan without clipped"
            )
        return losses

    def _begin(self, values: Values) -> torch.Tensor | None:
        """Guess that the step is not clipped, and keep what a second run would begin with.

        Returns:
            State of the generator from which the step draws random numbers; None where it draws none.
        """
        self.refused = False
        for storage, view in self._small.items():
            self._copies[storage].copy_(view)
        for storage, before in self._before.items() if self._is_stale else ():
            if before.tier and before.action < 0:
                values.copy(storage, self._home(storage), self._place(storage, before.tier))
        self._is_stale = False
        return generator_state(self._kind) if self._random else None

    def written(self) -> None:
        """Take note that values were written between steps."""
        self._is_stale = True

    def rewind(self, values: Values, ended: Set[int] | None = None) -> None:
        """Make every value what it was when the step began; one whose tier fails is lost.

        Args:
            ended: Actions of the step that came to their end; None for all.
        """
        lost = set[int]()
        for storage, view in self._small.items():
            view.copy_(self._copies[storage])
        for storage, before in self._before.items():
            if before.tier and (ended is None or before.action < 0 or before.action in ended):
                try:
                    values.copy(storage, self._place(storage, before.tier), self._home(storage))
                except OSError:
                    lost.add(storage)
        values.lose(frozenset(lost))

    def _home(self, storage: int) -> Location:
        return Location(DEVICE, self._homes[storage])

    def _place(self, storage: int, tier: str) -> Location:
        return Location(tier, self._slots[tier][storage])

    def settle(self, values: Values) -> bool:
        """Let a step that came to its end count, or rewind it where it is refused; says whether it counts."""
        if self.refused:
            self.rewind(values)
            return False
        self._version.number ^= 1
        return True

    def unguessed(self, homes: Mapping[int, str]) -> dict[int, str]:
        """Storages, with where they are at home, but for those that are as before the step until it counts."""
        return {storage: tier for storage, tier in homes.items() if storage not in self._changed}

    def left_out(self, program: Program) -> frozenset[int]:
        """Actions that do nothing in the step under way: the updates of one that is refused."""
        if not self.refused:
            return frozenset()
        return frozenset(a.id for a in program.actions if a.op is not None and is_update(program.graph, a.op))

    def noting(self, run: Call, coefficient: torch.Tensor) -> Call:
        """Make the call of the operation that makes the coefficient, which then is compared with the guess."""
        value = coefficient.reshape(-1).view(torch.uint8)

        def noted() -> None:
            run()
            self._coefficient.copy_(value)
            self.refused = not torch.equal(self._coefficient, self._guess)

        return noted

    def by_version(self, make: Callable[[int], Call]) -> Call:
        """Make a call for either version, of which the one runs that says where values are.

        Args:
            make: Makes the call for a version by its number.
        """
        runs, version = (make(0), make(1)), self._version

        def run() -> None:
            runs[version.number]()

        return run

    def guarded(self, run: Call) -> Call:
        """Make the call of an update, which is left out once the step is refused."""

        def guarded() -> None:
            if not self.refused:
                run()

        return guarded


def _check_whole(values: Values) -> None:
    """Refuse to go on without values from before the step.

    Raises:
        StorageError: some are lost.
    """
    if values.lost:
        raise StorageError(
            f"a step was clipped and is taken back, but {len(values.lost)} values from before it could not be read "
            "from their tier again; load a checkpoint"
        )
