"""Gathering: values of which ranks have parts, read in order by all of them together, a MiB at a time.

[Note: gathering] A checkpoint has whole tensors, so whoever writes it gathers what ranks have in parts. Whole values
would take a rank twice the largest of them, beside its own state. So ranks go through a value together, in cuts that
each works out for itself: bytes that one rank has are broadcast by it; where a cut has short runs of all ranks, they
are gathered and laid in order. Whoever does not write takes part, and drops what it gets. Their buffers are a mapping
of its own, which goes back to the kernel at the end: a heap would keep it, and have holes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from lading.ir.graph import DTYPE_BYTES, TensorPlacement
from lading.runtime.binding import Reducer
from lading.runtime.executor import Executor
from lading.runtime.host_arena import Arena
from lading.runtime.value_layout import Value, is_here, local_value
from lading.units import MiB

#: Most bytes of a value that ranks gather at once.
PIECE_BYTES = MiB
#: Fills room (uint8, one dim) with the bytes of a value that begin at a number.
_Read = Callable[[int, torch.Tensor], object]
#: Gives a buffer by its number, 0 to 2, and its bytes (uint8, one dim); valid until it is asked for again.
_Buffers = Callable[[int, int], torch.Tensor]


def gathering_bytes(value: Value) -> int:
    """Bytes of the buffers through which a value is gathered: a piece, and where runs are laid in order three."""
    size_bytes = min(PIECE_BYTES, value.size_bytes)
    return size_bytes if value.placement is None else 3 * size_bytes


def read_value(executor: Executor, value: Value, ranks: Reducer | None = None) -> torch.Tensor:
    """Copy all parts of a value into one tensor of the value's shape.

    Args:
        ranks: This rank and the others, some of which hold it or a shard of it; all call this.
    """
    if value.start is None and not value.is_shared:
        parts = [executor.read_storage(storage) for storage in value.storages]
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts]).view(value.shape)
    flat = torch.empty(value.size_bytes, dtype=torch.uint8, device="cpu")
    read = _reader(executor, value, ranks, _new_buffer)
    for low, high in _cuts(value):
        read(low, flat[low:high])
    return flat.view(getattr(torch, value.dtype)).view(value.shape)


def _new_buffer(_: int, size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


class Gathering:
    """Reads of values in pieces; those that ranks share are each read once and in one order, by all of them.

    Args:
        values: Values by name, as this rank has them.
        shared: Names of those that ranks share, in order.
        ranks: This rank and the others; None alone.
    """

    def __init__(
        self, executor: Executor, values: Mapping[str, Value], shared: Iterable[str], ranks: Reducer | None
    ) -> None:
        self._executor, self._values, self._ranks, self._left = executor, values, ranks, dict.fromkeys(shared)
        self._begun: Iterator[torch.Tensor] = iter(())
        self._arena: Arena | None = None

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Read the bytes of a value in order, of those that ranks share the next; ``end`` reads what is left of it.

        Yields:
            At most ``PIECE_BYTES`` of them (uint8, one dim), valid until the next are asked for.
        """
        read = self._read(name)
        if self._values[name].is_shared:
            del self._left[name]
            self._begun = read
        for piece in read:  # noqa: UP028  "yield from" would end that one with this
            yield piece

    def end(self) -> None:
        """Take part in whatever is left to be read, which other ranks wait for, and give the buffers back."""
        for _ in self._begun:
            pass
        for name in self._left:
            for _ in self._read(name):
                pass
        self._left.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _read(self, name: str) -> Iterator[torch.Tensor]:
        value = self._values[name]
        read = _reader(self._executor, value, self._ranks, self._buffer)
        for low, high in _cuts(value):
            piece = self._buffer(0, high - low)
            read(low, piece)
            yield piece

    def _buffer(self, number: int, size_bytes: int) -> torch.Tensor:
        self._arena = self._arena or Arena(3 * PIECE_BYTES)
        return self._arena.bytes_at(number * PIECE_BYTES, size_bytes)


@dataclass(frozen=True)
class _Runs:
    """Bytes of a tensor of which ranks have runs: rows, of parts, of a run of each rank.

    Attributes:
        row_bytes: Bytes of a row.
        parts: Bytes of each part of a row.
        ranks: Number of ranks.
    """

    row_bytes: int
    parts: tuple[int, ...]
    ranks: int

    @staticmethod
    def of(value: Value, placement: TensorPlacement) -> _Runs:
        """Find the runs of a value."""
        inner = prod(value.shape[placement.dim + 1 :]) * DTYPE_BYTES[value.dtype]
        parts = tuple(length * inner for length in placement.lengths)
        return _Runs(sum(parts), parts, placement.ranks)

    @property
    def are_gathered(self) -> bool:
        """Whether rows are gathered from all ranks, as several of them are one piece."""
        return self.row_bytes <= PIECE_BYTES

    def cuts(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut all bytes into whole rows, or into pieces of one rank's runs."""
        if self.are_gathered:
            step = PIECE_BYTES // max(1, self.row_bytes) * self.row_bytes
            yield from _equal_cuts(0, size_bytes, step)
            return
        at = 0
        while at < size_bytes:
            for part in self.parts:
                for _ in range(self.ranks):
                    yield from _equal_cuts(at, at + part // self.ranks, PIECE_BYTES)
                    at += part // self.ranks

    def find(self, at: int) -> tuple[int, int]:
        """Find the rank that has a byte, and the byte's number among its own."""
        row, inside = divmod(at, self.row_bytes)
        shard_offset = row * (self.row_bytes // self.ranks)
        for part in self.parts:
            if inside < part:
                rank, within = divmod(inside, part // self.ranks)
                return rank, shard_offset + within
            inside, shard_offset = inside - part, shard_offset + part // self.ranks
        raise AssertionError("a row ends where its parts do")

    def lay(self, gathered: torch.Tensor, room: torch.Tensor) -> None:
        """Lay rows in order that come as all of the first rank's, all of the second's, and so on."""
        shards, rows = gathered.view(self.ranks, -1, self.row_bytes // self.ranks), room.view(-1, self.row_bytes)
        at = shard_offset = 0
        for part in self.parts:
            size = part // self.ranks
            for shard in shards:
                rows[:, at : at + size] = shard[:, shard_offset : shard_offset + size]
                at += size
            shard_offset += size


def _equal_cuts(low: int, high: int, step: int) -> Iterator[tuple[int, int]]:
    for at in range(low, high, max(1, step)):
        yield at, min(at + step, high)


def _cuts(value: Value) -> Iterator[tuple[int, int]]:
    """Cut the bytes of a value as every rank does: the first of each piece, and the end."""
    if value.placement is None:
        return _equal_cuts(0, value.size_bytes, PIECE_BYTES)
    return _Runs.of(value, value.placement).cuts(value.size_bytes)


def _reader(executor: Executor, value: Value, ranks: Reducer | None, buffers: _Buffers) -> _Read:
    """Make what reads a value in the pieces of ``_cuts``; all ranks that share it read each."""
    if value.is_shared:
        assert ranks is not None, "a plan for one process has no shards"
        if value.owner is not None:
            local = dataclasses.replace(value, owner=None)
            read = _reader(executor, local, ranks, buffers) if is_here(value, ranks) else None
            return _from_owner(read, value, value.owner, ranks)
        if value.placement is not None:
            read = _reader(executor, local_value(value), ranks, buffers)
            return _from_runs(read, value, value.placement, ranks, buffers)
        return _from_shards(executor, value, ranks)
    return _from_storages(executor, value)


def _from_owner(read: _Read | None, value: Value, owner: int, ranks: Reducer) -> _Read:
    """Make what reads a value that one rank has, with others or alone, and reads by ``read``."""

    def broadcast(at: int, room: torch.Tensor) -> None:
        if read is not None:
            read(at, room)
        ranks.broadcast(room, owner, value.owners)

    return broadcast


def _from_runs(read: _Read, value: Value, placement: TensorPlacement, ranks: Reducer, buffers: _Buffers) -> _Read:
    """Make what reads a value of which ranks have runs, each its own by ``read``."""
    runs, over = _Runs.of(value, placement), placement.over

    def gather(at: int, room: torch.Tensor) -> None:
        mine, gathered = buffers(1, room.numel() // runs.ranks), buffers(2, room.numel())
        read(at // runs.ranks, mine)
        ranks.all_gather(gathered, mine, over)
        runs.lay(gathered, room)

    def broadcast(at: int, room: torch.Tensor) -> None:
        rank, shard_offset = runs.find(at)
        if ranks.number(over) == rank:
            read(shard_offset, room)
        ranks.broadcast(room, rank, over)

    return gather if runs.are_gathered else broadcast


def _from_shards(executor: Executor, value: Value, ranks: Reducer) -> _Read:
    """Make what reads a value that lies in a unit, of which each rank has a shard."""
    storages = executor.program.graph.storages
    shard_bytes = sum(storages[storage].size_bytes for storage in value.storages)
    start = (value.start or 0) * DTYPE_BYTES[value.dtype]
    read = _from_storages(executor, dataclasses.replace(value, start=0))

    def broadcast(at: int, room: torch.Tensor) -> None:
        low, end = start + at, start + at + room.numel()
        for rank in range(low // shard_bytes, -(-end // shard_bytes)):
            first, stop = max(low, rank * shard_bytes), min(end, (rank + 1) * shard_bytes)
            part = room[first - low : stop - low]
            if ranks.number(value.over) == rank:
                read(first - rank * shard_bytes, part)
            ranks.broadcast(part, rank, value.over)

    return broadcast


def _from_storages(executor: Executor, value: Value) -> _Read:
    """Make what reads the bytes that this rank has of a value; what lies in another order is laid out anew, whole."""
    start = (value.start or 0) * DTYPE_BYTES[value.dtype]
    if not all(map(executor.takes_chunks, value.storages)):
        parts = [executor.read_storage(s).contiguous().flatten().view(torch.uint8) for s in value.storages]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return lambda at, room: room.copy_(flat[start + at : start + at + room.numel()])
    storages = executor.program.graph.storages

    def read(at: int, room: torch.Tensor) -> None:
        begin = start + at
        for storage in value.storages:
            size = storages[storage].size_bytes
            low, high = max(0, begin), min(size, begin + room.numel())
            if low < high:
                executor.read_part(storage, low, room[low - begin : high - begin])
            begin -= size

    return read
