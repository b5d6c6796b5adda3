"""Checkpoints in place: values whose bytes stay in the swap file of their run, which has a name in the checkpoint.

    folder/step-00000050/state.safetensors      values that were in memory
                         swap                   the swap file, by another name (a hard link)
                         manifest.json          where the other values lie in it

To who reads them, the parts of the swap file follow the state file, so a value's bytes are a run in one file
(``JoinedFile``). Their checksums are made after the save (``lading.checkpoint.store.add_checksums``), as the bytes stay
where they are; until then a value has none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

#: Name of the swap file in a checkpoint.
SWAP = "swap"


@dataclass(frozen=True, slots=True)
class SwapPlaces:
    """Parts of a swap file that follow the state file.

    Attributes:
        size_bytes: Bytes of the swap file.
        parts: First byte and bytes of each, in the swap file.
    """

    size_bytes: int
    parts: tuple[tuple[int, int], ...]

    @property
    def are_inside(self) -> bool:
        """Whether all parts lie in the swap file."""
        return all(start >= 0 and size > 0 and start + size <= self.size_bytes for start, size in self.parts)

    @property
    def joined_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class SwappedTensor:
    """Value whose bytes are in the swap file.

    Attributes:
        parts: First byte and bytes of each of its parts there, in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the value."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Swapped:
    """Values of a checkpoint that stay in a swap file.

    Attributes:
        link: Gives the file another name, with all bytes on the disk.
        size_bytes: Bytes of the file.
    """

    tensors: Sequence[SwappedTensor]
    link: Callable[[Path], None]
    size_bytes: int


class JoinedFile:
    """A state file and the parts of a swap file behind it, read as one.

    Args:
        open_file: Opens a file of the checkpoint by its name.
        state_bytes: Bytes of the state file.
    """

    def __init__(self, open_file: Callable[[str], FileIO], state: str, state_bytes: int, swap: SwapPlaces) -> None:
        with ExitStack() as stack:
            self._state = stack.enter_context(open_file(state))
            self._swap = stack.enter_context(open_file(SWAP))
            self._files = stack.pop_all()
        self._starts, self._ranges = [0], [(self._state, 0, state_bytes)]
        end = state_bytes
        for start, size in swap.parts:
            self._starts.append(end)
            self._ranges.append((self._swap, start, size))
            end += size
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def seek(self, offset: int) -> int:
        """Go to a byte."""
        self._at = offset
        return offset

    def readinto(self, target: memoryview) -> int:
        """Read what comes next of one file, at most as much as ``target`` has room for; returns how much."""
        number = bisect_right(self._starts, self._at) - 1
        file, start, size = self._ranges[number]
        within = self._at - self._starts[number]
        file.seek(start + within)
        count = file.readinto(target[: max(0, size - within)]) or 0
        self._at += count
        return count
