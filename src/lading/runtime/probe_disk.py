"""Disk: rates of one reading and one writing thread, alone and together, past the page cache where that is possible.

Transfers are timed while the device computes, for that is when a step makes them, from memory as a step's. What they
take from computing is compared in pairs: each with the same work just before and just after, as a host's speed drifts.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from lading.errors import StorageError
from lading.ir.machine import FILE, Tier
from lading.ir.program import PAGE_BYTES
from lading.runtime.host_arena import Arena
from lading.runtime.tiers import PIECE_BYTES
from lading.units import KiB, MiB, format_bytes

Work = Callable[[], object] | None
_FILE_BYTES = 256 * MiB
#: A piece far smaller than what the executor moves at once, and how much slower than whole pieces it is read beside
#: writes at least where directions take turns: 256 KiB beside 8 MiB came at a tenth of their rate.
_SMALL_BYTES, _TURNS = 256 * KiB, 0.5
#: Seconds of a sample, and most rounds. Short ones: a host's speed changes within seconds.
_SLICE_S, _MOST_ROUNDS = 0.1, 31
_RATES = ("read", "write", "mixed_read", "mixed_write", "small_read")
#: What work is compared beside: whole pieces each way, and small ones.
_BESIDE = ("write", "read", "small moves")
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
        #: What is read into and written from, of the memory that a step has.
        self.rooms = (Arena(PIECE_BYTES), Arena(PIECE_BYTES))
        for room in self.rooms:
            room.memory[:] = os.urandom(PIECE_BYTES)

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
        for room in self.rooms:
            room.close()

    def _fill(self) -> None:
        """Write every byte: blocks never written are read without touching the disk."""
        buffer = self.rooms[1].memory
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

    def settle(self) -> None:
        """Flush what was written to the disk, and forget what was read, where there is no O_DIRECT."""
        if not self.direct:
            os.fsync(self.fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _whole(moved: int, expected: int) -> None:
    if moved != expected:
        raise StorageError(f"expected to move {expected} bytes, the disk moved {moved}; is it full or failing?")


@dataclass(slots=True)
class _Samples:
    """Measurements of all rounds: bytes/s by what ran, and how many times longer ``work`` took beside it."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in _RATES})
    times_longer: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in _BESIDE})
    idle_s: float = 0.0  # seconds of a call of ``work`` just before

    def compare(self, key: str, beside_s: float, idle_s: float) -> None:
        """Compare work beside transfers with the same work just before and just after them."""
        if beside_s and idle_s and self.idle_s:
            self.times_longer[key].append(2.0 * beside_s / (self.idle_s + idle_s))
        self.idle_s = idle_s


def _measure(file: _ProbeFile, seconds: float, free: int, work: Work) -> DiskProbe:
    """Measure in rounds, each of which has everything once: a host that is faster now and slower then is so to all."""
    found = _Samples()
    slice_s = min(_SLICE_S, max(0.05, seconds / 20))
    end = time.monotonic() + seconds
    _mean_s(work, slice_s / 2)
    rounds = 0
    while rounds < 1 or (time.monotonic() + 7 * slice_s < end and rounds < _MOST_ROUNDS):
        _round(file, slice_s, work, found)
        rounds += 1
    best = {key: float(f"{median(values):.4g}") for key, values in found.rates.items()}
    mixed_read, mixed_write = min(best["mixed_read"], best["read"]), min(best["mixed_write"], best["write"])
    tier = Tier(
        name="disk",
        kind=FILE,
        persistent=True,
        capacity_bytes=free,
        read_bytes_per_s=best["read"],
        write_bytes_per_s=best["write"],
        mixed_read_bytes_per_s=mixed_read,
        mixed_write_bytes_per_s=mixed_write,
        latency_s=_latency(file, work),
        read_slowdown=_slowdown(found.times_longer["read"]),
        write_slowdown=_slowdown(found.times_longer["write"]),
    )
    tier = replace(
        tier,
        turn_bytes=_turn_bytes(best["small_read"], tier),
        latency_slowdown=_latency_slowdown(tier, _slowdown(found.times_longer["small moves"])),
    )
    note = (
        "" if file.direct else "assumption: no O_DIRECT in this folder; buffered transfers with fsync measured instead"
    )
    return DiskProbe(tier, rounds, note)


def _round(file: _ProbeFile, slice_s: float, work: Work, found: _Samples) -> None:
    """Take one sample of everything; work beside nothing stands between, for comparison."""
    found.idle_s = _mean_s(work, slice_s / 2)
    _, written, beside_s = _run(file, slice_s, work, write=PIECE_BYTES)
    found.compare("write", beside_s, _mean_s(work, slice_s / 2))
    read, _, beside_s = _run(file, slice_s, work, read=PIECE_BYTES)
    found.compare("read", beside_s, _mean_s(work, slice_s / 2))
    _, _, beside_s = _run(file, slice_s, work, read=_SMALL_BYTES)
    found.compare("small moves", beside_s, _mean_s(work, slice_s / 2))
    mixed_read, mixed_write, _ = _run(file, 1.5 * slice_s, work, read=PIECE_BYTES, write=PIECE_BYTES)
    small_read, _, _ = _run(file, slice_s / 2, work, read=_SMALL_BYTES, write=PIECE_BYTES)
    for key, rate in zip(_RATES, (read, written, mixed_read, mixed_write, small_read), strict=True):
        found.rates[key].append(rate)


def _turn_bytes(small_read: float, tier: Tier) -> int:
    """Bytes of a turn, from the rate of small reads beside writes of whole pieces.

    Without turns a small read takes a move's latency and its bytes at the rate of whole pieces beside writes.
    """
    alone_s = tier.latency_s + _SMALL_BYTES / tier.mixed_read_bytes_per_s
    return PIECE_BYTES if small_read < _TURNS * _SMALL_BYTES / alone_s else 0


def _latency_slowdown(tier: Tier, slowdown: float) -> float:
    """Share by which work takes longer in the latency of a move, from that beside small reads, one behind another."""
    transfer_s = _SMALL_BYTES / tier.read_bytes_per_s
    lost_s = slowdown * (tier.latency_s + transfer_s) - tier.read_slowdown * transfer_s
    return max(0.0, round(lost_s / tier.latency_s, 3))


def _slowdown(times_longer: list[float]) -> float:
    """Share by which work takes longer beside transfers, the median of rounds."""
    return max(0.0, round(median(times_longer) - 1.0, 3)) if times_longer else 0.0


def _mean_s(work: Work, seconds: float) -> float:
    """Mean seconds of a call of ``work``, called until ``seconds`` are over: mean, as a step adds up its operations."""
    if work is None:
        return 0.0
    calls, start = 0, time.perf_counter()
    while (now := time.perf_counter()) < start + seconds or not calls:
        work()
        calls += 1
    return (now - start) / calls


def _run(file: _ProbeFile, seconds: float, work: Work, *, read: int = 0, write: int = 0) -> tuple[float, float, float]:
    """Move pieces of so many bytes, 0 for none: one thread reads the file's first half, one writes the second.

    Meanwhile this thread does ``work``, as it would in a step.

    Returns:
        Bytes/s read and written, and the mean seconds of a call of ``work``.
    """
    half = file.size_bytes // 2 // PIECE_BYTES * PIECE_BYTES
    rates = [0.0, 0.0]
    errors: list[OSError] = []
    file.settle()
    deadline = time.perf_counter() + seconds

    def move_until(index: int, move: Callable[..., int], size: int) -> None:
        try:
            rates[index] = _stream(
                file, move, range(index * half, (index + 1) * half, size), file.rooms[index], deadline
            )
        except OSError as error:
            errors.append(error)

    moves = ((0, os.preadv, read), (1, os.pwritev, write))
    threads = [threading.Thread(target=move_until, args=each) for each in moves if each[2]]
    for thread in threads:
        thread.start()
    beside_s = _mean_s(work, 0.9 * seconds)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return rates[0], rates[1], beside_s


def _stream(file: _ProbeFile, move: Callable[..., int], offsets: range, room: Arena, deadline: float) -> float:
    """Bytes/s of one thread moving the pieces at these offsets in random order until the deadline."""
    size = offsets.step
    draw = random.Random(offsets.start)
    start = time.perf_counter()
    moved = 0
    while not moved or time.perf_counter() < deadline:
        _whole(move(file.fd, [room.memory[:size]], offsets[draw.randrange(len(offsets))]), size)
        moved += size
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
