"""Reads of what a rank has of a saved tensor: which of its bytes those are, and in which order they lie on the rank.

Bytes are counted in the order of a tensor's dims, the last one fastest, as in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Protocol

import torch

from lading.errors import ConfigError
from lading.ir.graph import TensorPlacement
from lading.units import MiB

#: Bytes of rows that are in memory at a time.
_BLOCK_BYTES = MiB
#: Run of bytes of a rank: its first among the rank's own bytes, its first in the whole tensor, and how many.
_Run = tuple[int, int, int]
#: Gives the bytes of a tensor from the first of two byte numbers up to the second, in order and in any cuts.
ByteRange = Callable[[int, int], Iterable[memoryview]]


class ReadableValue(Protocol):
    """Value that is read where it is asked for."""

    def bytes_as(self, dtype: str) -> ByteRange:
        """Reader of the bytes that the numbers have in a dtype, by its name: ``"float32"``."""
        ...


class ByteStream:
    """Chunks of bytes, read as if they were one."""

    def __init__(self, chunks: Iterable[memoryview]) -> None:
        self._chunks, self._left = iter(chunks), memoryview(b"")

    def fill(self, room: memoryview) -> None:
        """Fill ``room`` with the next bytes.

        Raises:
            ConfigError: there are fewer.
        """
        while room:
            self._left = self._left or next(self._chunks, memoryview(b""))
            if not self._left:
                raise ConfigError(f"expected {len(room)} more bytes of a value, found none")
            count = min(len(room), len(self._left))
            room[:count] = self._left[:count]
            room, self._left = room[count:], self._left[count:]

    def end(self) -> None:
        """Refuse bytes that are left; a source that checks its bytes does so here."""
        if self._left or next(self._chunks, None) is not None:
            raise ConfigError("expected the bytes of a value to end, found more")


def own_runs(tensor: torch.Tensor, placement: TensorPlacement, rank: int) -> torch.Tensor:
    """Copy the runs of a rank out of a whole tensor.

    Args:
        rank: Number of the rank among those along ``placement.over``.
    """
    return _runs_along(tensor.detach(), placement, rank, placement.dim)


def _runs_along(tensor: torch.Tensor, placement: TensorPlacement, rank: int, dim: int) -> torch.Tensor:
    parts = tensor.split(placement.lengths, dim)
    return torch.cat([part.chunk(placement.ranks, dim)[rank] for part in parts], dim)


def read_range(low: int, high: int, chunks: ByteRange) -> Iterator[tuple[int, torch.Tensor]]:
    """Read the bytes from ``low`` up to ``high`` of a tensor.

    Yields:
        Number of the byte where a chunk begins, and the chunk (uint8, one dim); valid until the next is asked for.
    """
    for chunk in chunks(low, high) if low < high else ():
        if chunk.nbytes:
            yield low, torch.frombuffer(chunk, dtype=torch.uint8)
        low += chunk.nbytes


def read_runs(
    placement: TensorPlacement,
    rank: int,
    item_bytes: int,
    low: int,
    high: int,
    chunks: ByteRange,
    chunk_bytes: int = MiB,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read the bytes from ``low`` up to ``high`` of the runs that a rank has of a tensor, laid one after another.

    Chunks of which the rank has nothing are not asked for, those of which it has something once.

    Args:
        rank: Number of the rank among those along ``placement.over``.
        chunk_bytes: Bytes that are read together, whichever of them are asked for; chunks follow each other from the
            tensor's first byte.

    Yields:
        As ``read_range``, counted among the rank's own bytes.
    """
    shape, dim = placement.shape, placement.dim
    outer, inner_bytes = prod(shape[:dim]), prod(shape[dim + 1 :]) * item_bytes
    row_bytes = sum(placement.lengths) * inner_bytes
    if low >= high:
        return
    if outer > 1 and row_bytes <= min(_BLOCK_BYTES, chunk_bytes):
        yield from _read_rows(placement, rank, inner_bytes, low, high, chunks)
        return
    runs = _cut_runs(_runs(placement, rank, outer, inner_bytes), low, high)
    for section in _sections(runs, chunk_bytes):
        yield from _read_section(section, chunks)


def _runs(placement: TensorPlacement, rank: int, outer: int, inner_bytes: int) -> Iterator[_Run]:
    """List a rank's runs."""
    shard_offset, begin = 0, 0
    for _ in range(outer):
        for length in placement.lengths:
            size = length // placement.ranks * inner_bytes
            yield shard_offset, begin + rank * size, size
            shard_offset, begin = shard_offset + size, begin + length * inner_bytes


def _cut_runs(runs: Iterable[_Run], low: int, high: int) -> Iterator[_Run]:
    """Leave of runs what lies from own byte ``low`` up to ``high``."""
    for shard_offset, source, size in runs:
        start, end = max(low, shard_offset), min(high, shard_offset + size)
        if start < end:
            yield start, source + start - shard_offset, end - start


def _sections(runs: Iterable[_Run], chunk_bytes: int) -> Iterator[list[_Run]]:
    """Put runs together between which no whole chunk lies."""
    section = list[_Run]()
    for run in runs:
        if section:
            _, source, size = section[-1]
            if run[1] // chunk_bytes > (source + size - 1) // chunk_bytes + 1:
                yield section
                section = []
        section.append(run)
    if section:
        yield section


def _read_section(runs: list[_Run], chunks: ByteRange) -> Iterator[tuple[int, torch.Tensor]]:
    """Read runs with all that lies between them.

    Raises:
        ConfigError: there are fewer bytes.
    """
    at, end, number = runs[0][1], runs[-1][1] + runs[-1][2], 0
    for chunk in chunks(at, end):
        stop = at + chunk.nbytes
        while number < len(runs) and runs[number][1] < stop:
            shard_offset, source, size = runs[number]
            first, last = max(source, at), min(source + size, stop)
            if first < last:
                yield shard_offset + first - source, torch.frombuffer(chunk[first - at : last - at], dtype=torch.uint8)
            if source + size > stop:
                break
            number += 1
        at = stop
    if at != end:
        raise ConfigError(f"expected the bytes of a value up to {end}, found them up to {at}")


def _read_rows(
    placement: TensorPlacement, rank: int, inner_bytes: int, low: int, high: int, chunks: ByteRange
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read runs within short rows, as ``read_runs``: as many rows at a time as a block has room for.

    Of the first and the last row only what lies between the first byte that is asked for and the last one is read.
    """
    length = sum(placement.lengths)
    row_bytes, own_bytes = length * inner_bytes, length // placement.ranks * inner_bytes
    first, last = low // own_bytes, -(-high // own_bytes)
    row_runs = [*_runs(placement, rank, 1, inner_bytes)]
    (_, begin, _), *_ = _cut_runs(row_runs, low - first * own_bytes, own_bytes)
    *_, (_, source, size) = _cut_runs(row_runs, 0, high - (last - 1) * own_bytes)
    begin, end = first * row_bytes + begin, (last - 1) * row_bytes + source + size
    step = max(1, _BLOCK_BYTES // row_bytes)
    stream = ByteStream(chunks(begin, end))
    room = torch.empty(min(step, last - first) * row_bytes, dtype=torch.uint8)
    for row in range(first, last, step):
        rows = min(step, last - row)
        block = room[: rows * row_bytes]
        at = row * row_bytes
        stream.fill(block[max(0, begin - at) : end - at].numpy().data)
        runs = _runs_along(block.view(rows, length, inner_bytes), placement, rank, 1).flatten()
        shard_offset = row * own_bytes
        start, stop = max(low, shard_offset), min(high, shard_offset + rows * own_bytes)
        yield start, runs[start - shard_offset : stop - shard_offset]
    stream.end()
