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

#: Bytes of rows that are in memory at a time; runs as long as that are read by themselves.
_BLOCK_BYTES = MiB
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
    placement: TensorPlacement, rank: int, item_bytes: int, low: int, high: int, chunks: ByteRange
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read the bytes from ``low`` up to ``high`` of the runs that a rank has of a tensor, laid one after another.

    Runs of whole rows are read by themselves. Runs within rows are cut out of these, of which some are in memory at a
    time, as every piece of a file has some of every run.

    Args:
        rank: Number of the rank among those along ``placement.over``.

    Yields:
        As ``read_range``, counted among the rank's own bytes.
    """
    shape, dim = placement.shape, placement.dim
    outer, inner_bytes = prod(shape[:dim]), prod(shape[dim + 1 :]) * item_bytes
    if low >= high:
        return
    if outer > 1 and min(placement.lengths) // placement.ranks * inner_bytes < _BLOCK_BYTES:
        yield from _read_rows(placement, rank, inner_bytes, low, high, chunks)
        return
    for own, source, size in _runs(placement, rank, outer, inner_bytes):
        shift = source - own
        for at, data in read_range(max(low, own) + shift, min(high, own + size) + shift, chunks):
            yield at - shift, data


def _runs(placement: TensorPlacement, rank: int, outer: int, inner_bytes: int) -> Iterator[tuple[int, int, int]]:
    """List a rank's runs: its own byte where each begins, that of the whole tensor, and how many bytes there are."""
    own, begin = 0, 0
    for _ in range(outer):
        for length in placement.lengths:
            size = length // placement.ranks * inner_bytes
            yield own, begin + rank * size, size
            own, begin = own + size, begin + length * inner_bytes


def _read_rows(
    placement: TensorPlacement, rank: int, inner_bytes: int, low: int, high: int, chunks: ByteRange
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read runs within rows, as ``read_runs``: the rows that have them, as many at a time as a chunk has room for."""
    length = sum(placement.lengths)
    row_bytes, own_bytes = length * inner_bytes, length // placement.ranks * inner_bytes
    first, last = low // own_bytes, -(-high // own_bytes)
    step = max(1, _BLOCK_BYTES // row_bytes)
    stream = ByteStream(chunks(first * row_bytes, last * row_bytes))
    room = torch.empty(min(step, last - first) * row_bytes, dtype=torch.uint8)
    for row in range(first, last, step):
        rows = min(step, last - row)
        block = room[: rows * row_bytes]
        stream.fill(block.numpy().data)
        runs = _runs_along(block.view(rows, length, inner_bytes), placement, rank, 1).flatten()
        begin = row * own_bytes
        start, end = max(low, begin), min(high, begin + rows * own_bytes)
        yield start, runs[start - begin : end - begin]
    stream.end()
