"""Staging memory: host memory that training fills and the saver process reads, allocated once."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from lading.errors import StorageError
from lading.ir.program import LINE_BYTES
from lading.units import format_bytes


def staged_bytes(size_bytes: int) -> int:
    """Bytes of staging memory that a tensor takes: whole lines, so that the next begins at one."""
    return -(-size_bytes // LINE_BYTES) * LINE_BYTES


class StagingMemory:
    """Memory of the host that another process can map; pages take up memory once they are first touched.

    Args:
        size_bytes: Bytes needed, >= 1.
        file: Descriptor of memory that another process has made; None makes new.

    Attributes:
        file: Descriptor by which another process maps the same memory.
        memory: The bytes, writable.

    Raises:
        StorageError: the system has no such memory.
    """

    def __init__(self, size_bytes: int, file: int | None = None) -> None:
        self.size_bytes = size_bytes
        try:
            self.file = os.memfd_create("lading-staging", os.MFD_CLOEXEC) if file is None else file
            if file is None:
                os.ftruncate(self.file, size_bytes)
            self._map = mmap.mmap(self.file, size_bytes)
        except OSError as error:
            raise StorageError(
                f"expected {format_bytes(size_bytes)} of shared memory to stage a checkpoint in, the system gives none "
                f"({error}); save with wait=True, which needs none",
                errno=error.errno,
            ) from error
        self.memory = memoryview(self._map)

    @staticmethod
    def of_process(pid: int, file: int, size_bytes: int) -> StagingMemory:
        """Map the memory that another process of this host has made; it lasts as long as anybody has it.

        Args:
            file: Descriptor in that process.
        Raises:
            StorageError: the process is gone, or is not of this user.
        """
        try:
            opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"expected the memory in which process {pid} stages its part of a checkpoint, found none ({error}); "
                "see whether it lives"
            ) from error
        return StagingMemory(size_bytes, opened)

    def close(self) -> None:
        """Give the memory back; views of it must not be used any more. May be called twice."""
        if self.file < 0:
            return
        os.close(self.file)
        self.file = -1
        with suppress(BufferError):  # a view is alive: the address range stays until it goes
            self.memory.release()
            self._map.close()
