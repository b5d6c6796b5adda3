"""Disk: rates of one reading and one writing thread, alone and together, past the page cache where that is possible.

Transfers are timed while the device computes, for that is when a step makes them.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from lading.errors import StorageError
from lading.ir.machine import FILE, Tier
from lading.ir.program import PAGE_BYTES
from lading.units import MiB, format_bytes

Work = Callable[[], object] | None
#: About what the executor moves at once; a disk is up to twice as fast on pieces several times as large.
PIECE_BYTES = 1 * MiB
_FILE_BYTES = 256 * MiB
_NAME = "lading-probe.tmp"


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """A measured tier and, where it is not what it seems, a note that says why."""

    tier: Tier
    rounds: int
    note: str = ""


def probe_disk(folder: Path, seconds: float, work: Work = None, file_bytes: int = _FILE_BYTES) -> DiskProbe:
    """Measure the disk under ``folder`` with a temporary file, which is removed whatever happens.

    Args:
        seconds: Time to measure for.
        work: Call that keeps the device busy during transfers; how much it slows becomes the tier's.
        file_bytes: Bytes of the file.

    Raises:
        StorageError: the folder is missing, read-only or without ``file_bytes`` of space; says what to change.
    """
    path = folder / f"{_NAME}.{os.getpid()}-{secrets.token_hex(8)}"  # nobody can wait for it in a shared folder
    free = _free_bytes(folder)
    if free < file_bytes + file_bytes // 8:
        raise StorageError(
            f"the probe needs {format_bytes(file_bytes + file_bytes // 8)} in {folder}, {format_bytes(free)} are free; "
            "free some space or probe another folder"
        )
    try:
        with _ProbeFile(path, file_bytes) as file:
            return _measure(file, seconds, free, work)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        reason = "it is full" if error.errno == errno.ENOSPC else str(error)
        raise StorageError(
            f"cannot measure the disk under {folder}: {reason}; choose a writable folder with space"
        ) from error


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(
            f"expected an existing folder to probe, got {folder}: {error}; create it or choose another"
        ) from error


class _ProbeFile:
    """A file of random bytes, opened past the page cache if the file system can."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.direct = True
        self._piece = os.urandom(PIECE_BYTES)

    def __enter__(self) -> _ProbeFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            self.fd = os.open(self.path, flags | getattr(os, "O_DIRECT", 0), 0o600)
            self.direct = hasattr(os, "O_DIRECT")
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.path.unlink(missing_ok=True)  # made before the flag was refused
            self.fd = os.open(self.path, flags, 0o600)
            self.direct = False
        try:
            self._fill()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        self.path.unlink(missing_ok=True)

    def _fill(self) -> None:
        """Write every byte: blocks never written are read without touching the disk."""
        buffer = self.buffer()
        try:
            os.pwritev(self.fd, [buffer], 0)
        except OSError as error:  # some file systems take the flag and refuse the transfer
            if error.errno != errno.EINVAL or not self.direct:
                raise
            os.close(self.fd)
            self.fd, self.direct = os.open(self.path, os.O_RDWR), False
        for offset in range(0, self.size_bytes, PIECE_BYTES):
            _whole(os.pwritev(self.fd, [buffer], offset), PIECE_BYTES)
        os.fsync(self.fd)

    def buffer(self) -> mmap.mmap:
        """Make a page-aligned piece of random bytes."""
        piece = mmap.mmap(-1, PIECE_BYTES)
        piece[:] = self._piece
        return piece

    def settle(self) -> None:
        """Flush what was written to the disk, and forget what was read, where there is no O_DIRECT."""
        if not self.direct:
            os.fsync(self.fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _whole(moved: int, expected: int) -> None:
    if moved != expected:
        raise StorageError(f"expected to move {expected} bytes, the disk moved {moved}; is it full or failing?")


def _measure(file: _ProbeFile, seconds: float, free: int, work: Work) -> DiskProbe:
    rates: dict[str, list[float]] = {key: [] for key in ("read", "write", "mixed_read", "mixed_write")}
    slice_s = min(0.5, max(0.05, seconds / 20))
    end = time.monotonic() + seconds
    times: dict[str, list[float]] = {key: [] for key in ("idle", "read", "write")}
    _times(work, slice_s / 2)
    rounds = 0
    while rounds < 1 or (time.monotonic() + 3.5 * slice_s < end and rounds < 15):
        times["idle"] += _times(work, slice_s / 2)
        rates["write"].append(_run(file, slice_s, work, times["write"], write=True)[1])
        rates["read"].append(_run(file, slice_s, work, times["read"], read=True)[0])
        both = _run(file, slice_s, work, read=True, write=True)
        rates["mixed_read"].append(both[0])
        rates["mixed_write"].append(both[1])
        rounds += 1
    best = {key: float(f"{median(values):.4g}") for key, values in rates.items()}
    tier = Tier(
        name="disk",
        kind=FILE,
        persistent=True,
        capacity_bytes=free,
        read_bytes_per_s=best["read"],
        write_bytes_per_s=best["write"],
        mixed_read_bytes_per_s=min(best["mixed_read"], best["read"]),
        mixed_write_bytes_per_s=min(best["mixed_write"], best["write"]),
        latency_s=_latency(file, work),
        read_slowdown=_slowdown(times["read"], times["idle"]),
        write_slowdown=_slowdown(times["write"], times["idle"]),
    )
    note = (
        "" if file.direct else "assumption: no O_DIRECT in this folder; buffered transfers with fsync measured instead"
    )
    return DiskProbe(tier, rounds, note)


def _slowdown(busy: list[float], idle: list[float]) -> float:
    """Mean of the busy times over the mean of the idle ones: mean, for a step adds up its operations."""
    return max(0.0, round(fmean(busy) / fmean(idle) - 1.0, 3)) if busy and idle else 0.0


def _times(work: Work, seconds: float) -> list[float]:
    """Seconds of each call of ``work``, called until ``seconds`` are over."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while work is not None and time.perf_counter() < end:
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return samples


def _run(
    file: _ProbeFile,
    seconds: float,
    work: Work,
    samples: list[float] | None = None,
    *,
    read: bool = False,
    write: bool = False,
) -> tuple[float, float]:
    """Rates (read, write) in bytes/s of the threads asked for: one reads the file's first half, one writes the second.

    Meanwhile this thread does ``work``, as it would in a step; its times go to ``samples``.
    """
    half = file.size_bytes // 2 // PIECE_BYTES * PIECE_BYTES
    workers: list[tuple[int, Callable[..., int], int]] = []
    if read:
        workers.append((0, os.preadv, 0))
    if write:
        workers.append((1, os.pwritev, half))
    rates = [0.0, 0.0]
    errors: list[OSError] = []
    file.settle()
    deadline = time.perf_counter() + seconds

    def move_until(index: int, move: Callable[..., int], base: int) -> None:
        try:
            rates[index] = _stream(file, move, base, half, deadline)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=move_until, args=worker) for worker in workers]
    for thread in threads:
        thread.start()
    timed = _times(work, 0.9 * seconds)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if samples is not None:
        samples += timed
    return rates[0], rates[1]


def _stream(file: _ProbeFile, move: Callable[..., int], base: int, length: int, deadline: float) -> float:
    """Bytes/s of one thread moving pieces of the ``length`` bytes from ``base`` in random order until the deadline."""
    buffer = file.buffer()
    draw = random.Random(base)
    start = time.perf_counter()
    moved = 0
    while not moved or time.perf_counter() < deadline:
        _whole(move(file.fd, [buffer], base + draw.randrange(length // PIECE_BYTES) * PIECE_BYTES), PIECE_BYTES)
        moved += PIECE_BYTES
    if move is os.pwritev and not file.direct:
        os.fsync(file.fd)
    return moved / (time.perf_counter() - start)


def _latency(file: _ProbeFile, work: Work, count: int = 40) -> float:
    """Median seconds of reading one page at a random place, from a thread of its own while this one does ``work``."""
    samples: list[float] = []
    errors: list[OSError] = []

    def sample() -> None:
        page = mmap.mmap(-1, PAGE_BYTES)
        draw = random.Random(0)
        try:
            for _ in range(count):
                file.settle()
                offset = draw.randrange(file.size_bytes // PAGE_BYTES) * PAGE_BYTES
                start = time.perf_counter()
                _whole(os.preadv(file.fd, [page], offset), PAGE_BYTES)
                samples.append(time.perf_counter() - start)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    while work is not None and thread.is_alive():
        work()
    thread.join()
    if errors:
        raise errors[0]
    return float(f"{median(samples):.3g}")
