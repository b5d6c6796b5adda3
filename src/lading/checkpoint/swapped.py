"""Checkpoints in place: values whose bytes stay in the swap file of their run, which has a name in the checkpoint.

    folder/step-00000050/state.safetensors      values, and pieces of values, that were in memory
                         swap                   the swap file, by another name (a hard link)
                         manifest.json          where the other values lie in it

To who reads them, the parts of the swap file follow the state file, so a value's bytes are a run in one file
(``JoinedFile``). Pieces of such a value that were in memory are tensors of the state file, which the manifest names as
parts among those. Their checksums are made after the save (``lading.checkpoint.store.add_checksums``), as the bytes
stay where they are; until then a value has none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

#: Name of the swap file in a checkpoint.
SWAP = "swap"


@dataclass(frozen=True, slots=True)
class SwapPlaces:
    """Parts of a swap file that follow the state file, in the order in which they do.

    Attributes:
        size_bytes: Bytes of the swap file.
        parts: First byte and bytes of each, in the swap file.
        in_state: Numbers of the parts that lie in the state file instead, ascending.
    """

    size_bytes: int
    parts: tuple[tuple[int, int], ...]
    in_state: tuple[int, ...] = ()

    def are_inside(self, state_bytes: int) -> bool:
        """Whether all parts lie in their files, of which the state file has so many bytes."""
        count, numbers_in_state = len(self.parts), set(self.in_state)
        ends = [state_bytes if number in numbers_in_state else self.size_bytes for number in range(count)]
        numbered = len(numbers_in_state) == len(self.in_state) and numbers_in_state <= set(range(count))
        return numbered and all(
            start >= 0 and size > 0 and start + size <= end for (start, size), end in zip(self.parts, ends, strict=True)
        )

    @property
    def joined_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)

    def is_in_state(self, offset: int) -> bool:
        """Whether a byte of the parts, counted from the first one's, lies in the state file."""
        ends = list(accumulate(size for _, size in self.parts))
        return bisect_right(ends, offset) in self.in_state


class SwappedPart(NamedTuple):
    """Run of a value's bytes.

    Attributes:
        start: First byte in the file that has it.
        piece: Tensor of the state file whose bytes these are; "" in the swap file.
    """

    start: int
    size_bytes: int
    piece: str = ""


@dataclass(frozen=True)
class SwappedTensor:
    """Value some or all of whose bytes are in the swap file.

    Attributes:
        parts: Its parts there, and its pieces in the state file, in order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[SwappedPart, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the value."""
        return sum(part.size_bytes for part in self.parts)


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

    def places(self, starts: Mapping[str, int]) -> SwapPlaces:
        """Places of all parts, where the tensors of the state file start at these bytes."""
        parts = [part for tensor in self.tensors for part in tensor.parts]
        places = tuple((starts[part.piece] if part.piece else part.start, part.size_bytes) for part in parts)
        return SwapPlaces(self.size_bytes, places, tuple(n for n, part in enumerate(parts) if part.piece))


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
        end, in_state = state_bytes, frozenset(swap.in_state)
        for number, (start, size) in enumerate(swap.parts):
            self._starts.append(end)
            self._ranges.append((self._state if number in in_state else self._swap, start, size))
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
