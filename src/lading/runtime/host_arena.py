"""Arena on the host: one anonymous mapping from which every tensor of a step is cut, at addresses known beforehand.

[Note: huge pages] An arena asks for huge pages. A disk takes its bytes past the page cache from physical memory, one
segment for each run of neighbouring pages, and small pages have few neighbours: a transfer of 8 MiB is then 2,048 pages
to pin and up to as many segments. Measured on a virtual disk (2 cores, one reading and one writing thread, 8 MiB at a
time, beside products): 0.81 GB/s read and 1.04 written with pages of 4 KiB, 1.57 and 1.59 with pages of 2 MiB, and 0.01
instead of 0.06 seconds of a processor for each GiB.
"""

from __future__ import annotations

import contextlib
import mmap
from functools import cache
from pathlib import Path

import torch

from lading.errors import ConfigError, StorageError
from lading.ir.graph import DTYPE_BYTES, Tensor
from lading.ir.program import PAGE_BYTES
from lading.units import format_bytes

_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


@cache
def huge_page_bytes() -> int:
    """Bytes of a huge page; 0 where the system makes none for those who ask."""
    try:
        size = int(_HUGE_PAGE.read_text())
        refused = "[never]" in _HUGE_PAGE.with_name("enabled").read_text()
    except (OSError, ValueError):
        return 0
    return 0 if refused or not hasattr(mmap, "MADV_HUGEPAGE") else size


class Arena:
    """Page-aligned private memory; pages take up memory once they are first touched, huge ones where there are any.

    Args:
        size_bytes: Bytes needed, >= 0.

    Attributes:
        size_bytes: Bytes of whole pages, at least one page; more is never resident.
        memory: The bytes, writable; slices are what tiers read into and write from.

    Raises:
        ConfigError: ``size_bytes`` is negative.
        StorageError: the system has no such memory for the process.
    """

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 0:
            raise ConfigError(f"expected an arena of >= 0 bytes, got {size_bytes}")
        self.size_bytes = max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES
        huge = huge_page_bytes() if huge_page_bytes() <= self.size_bytes else 0
        try:
            self._map = mmap.mmap(-1, self.size_bytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise StorageError(
                f"expected {format_bytes(self.size_bytes)} of memory for the tensors of a step, the system gives none "
                f"({error}); lower the memory budget, or raise what the process may have (ulimit -v)"
            ) from error
        start = -torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr() % huge if huge else 0
        if huge:  # whole ones only: of one that reaches beyond the end all would be resident
            end = start + self.size_bytes // huge * huge
            with contextlib.suppress(OSError):  # the pages are as the system makes them then
                self._map.madvise(mmap.MADV_HUGEPAGE, start, end - start)
                self._map.madvise(mmap.MADV_NOHUGEPAGE, end)
        self.memory = memoryview(self._map)[start : start + self.size_bytes]

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """View of ``size_bytes`` bytes at ``offset`` as uint8[size_bytes], without a copy."""
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise ConfigError(f"bytes {offset}..{offset + size_bytes} lie outside the arena of {self.size_bytes} bytes")
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size_bytes, offset=offset)

    def discard(self) -> None:
        """Give the pages back until they are touched again; every byte is zero then."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give everything back; tensors cut from the arena must not be used any more. May be called twice."""
        if self._map.closed:
            return
        self.discard()
        with contextlib.suppress(BufferError):  # a view is alive: the address range stays, its pages are gone
            self.memory.release()
            self._map.close()


def view_of(memory: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """View a storage's bytes (uint8) as a tensor of the graph: in its dtype, shape, strides and offset."""
    item = DTYPE_BYTES[tensor.dtype]
    typed = memory[: memory.numel() // item * item].view(getattr(torch, tensor.dtype))
    return typed.as_strided(tensor.shape, tensor.stride, typed.storage_offset() + tensor.offset)
