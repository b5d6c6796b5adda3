"""Disk: rates of one reading and one writing thread, alone and together, past the page cache where that is possible.

Transfers are timed while the device computes, for that is when a step makes them, from memory as a step's. What they
take from computing is compared in pairs: each with the same work just before and just after, as a host's speed drifts.

[Note: latency of a move] A move takes a latency and its bytes at the tier's rate, and both come from the mean seconds
of small and of whole pieces. Part of the latency lies with a thread that wants a processor when its bytes are there, so
the median of reads of single pages, one behind another, was 60 us where moves of a step came to 100 to 120 (2 cores,
both computing). Moves of a step come in rows, with pauses between for room in memory: of 5,280 reads alone in eleven
runs of ``benchmarks/predictions`` 3 in 10 came after a pause, and took 0.1 ms longer.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from lading.errors import StorageError
from lading.ir.machine import FILE, Tier
from lading.runtime.host_arena import Arena
from lading.runtime.probe_cases import StepWork
from lading.runtime.tiers import PIECE_BYTES
from lading.units import KiB, MiB, format_bytes

Work = Callable[[], object] | None
_FILE_BYTES = 256 * MiB
#: A piece far smaller than what the executor moves at once, and how much slower than whole pieces it is read beside
#: writes at least where directions take turns: 256 KiB beside 8 MiB came at a tenth of their rate.
_SMALL_BYTES, _TURNS = 256 * KiB, 0.5
#: Moves of a stream alone in a row, and seconds of the pause behind them. See [Note: latency of a move].
_ROW, _PAUSE_S = 3, 1e-3
#: Share of a small move's time that may be latency at most, and its shortest.
_MOST_LATENCY, _LEAST_LATENCY_S = 0.9, 1e-6
#: Seconds of a sample, and most rounds. Short ones: a host's speed changes within seconds.
_SLICE_S, _MOST_ROUNDS = 0.1, 31
#: What is timed: whole pieces alone and both ways at once, small reads beside whole writes, and small ones alone.
_TIMED = ("read", "write", "mixed_read", "mixed_write", "turns_read", "small_read")
#: What work is compared beside: whole pieces each way, and small ones; and passes among it, beside whole ones.
_BESIDE = ("write", "read", "small_read")
_PASSES = {"write": "passes beside writes", "read": "passes beside reads"}
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
    with DiskMeter(folder, work, file_bytes) as meter:
        meter.run(seconds)
        return meter.median_probe()


class DiskMeter:
    """Measures the disk under a folder with a temporary file, in as many periods as it is told to; a context manager.

    Args:
        folder, work, file_bytes: As of ``probe_disk``.

    Raises:
        StorageError: as ``probe_disk``.
    """

    def __init__(self, folder: Path, work: Work = None, file_bytes: int = _FILE_BYTES) -> None:
        self._folder, self._work = folder, work
        self._rounds, self._samples = 0, _Samples()
        self._free = _free_bytes(folder)
        if self._free < file_bytes + file_bytes // 8:
            raise StorageError(
                f"the probe needs {format_bytes(file_bytes + file_bytes // 8)} in {folder}, {format_bytes(self._free)} "
                "are free; free some space or probe another folder"
            )
        path = folder / f"{_NAME}.{os.getpid()}-{secrets.token_hex(8)}"  # nobody can wait for it in a shared folder
        self._file = _ProbeFile(path, file_bytes)

    def __enter__(self) -> Self:
        with _probing(self._folder):
            self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__()

    def run(self, seconds: float) -> None:
        """Measure in rounds, each of which has everything once: a host that is faster now and slower then is so to all.

        Raises:
            StorageError: the disk is full or failed.
        """
        slice_s = min(_SLICE_S, max(0.05, seconds / 20))
        end = time.monotonic() + seconds
        _mean_of(self._work, slice_s / 2)
        rounds = 0
        with _probing(self._folder):
            while rounds < 1 or (time.monotonic() + 7 * slice_s < end and rounds < _MOST_ROUNDS):
                _round(self._file, slice_s, self._work, self._samples)
                rounds += 1
        self._rounds += rounds

    def median_probe(self) -> DiskProbe:
        """Return the tier by the medians of all rounds so far, of which there has been one at least."""
        tier = replace(_tier(self._samples), capacity_bytes=self._free)
        note = "assumption: no O_DIRECT in this folder; buffered transfers with fsync measured instead"
        return DiskProbe(tier, self._rounds, "" if self._file.direct else note)


@contextmanager
def _probing(folder: Path) -> Generator[None]:
    """Turn an error of the operating system inside into one that names the folder and says what to change."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
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
            _check_all_moved(os.pwritev(self.fd, [buffer], offset), PIECE_BYTES)
        os.fsync(self.fd)

    def settle(self) -> None:
        """Flush what was written to the disk, and forget what was read, where there is no O_DIRECT."""
        if not self.direct:
            os.fsync(self.fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _check_all_moved(moved: int, expected: int) -> None:
    if moved != expected:
        raise StorageError(f"expected to move {expected} bytes, the disk moved {moved}; is it full or failing?")


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds of a call of ``work``: of its passes, where it times them, and of the rest."""

    rest_s: float = 0.0
    passes_s: float = 0.0


@dataclass(slots=True)
class _Samples:
    """Measurements of all rounds: seconds of a move by what was timed, and how many times longer work took beside it.

    The latter is that of work done while moves are under way, without the pauses between them; where its passes are
    timed apart, of what else it does.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in _TIMED})
    times_longer: dict[str, list[float]] = field(
        default_factory=lambda: {key: [] for key in (*_BESIDE, *_PASSES.values())}
    )
    idle: _Spent = field(default_factory=_Spent)  # in a call of ``work`` just before

    def compare(self, key: str, beside: _Spent, idle: _Spent, moving: float = 1.0) -> None:
        """Compare work beside transfers with the same work just before and just after them.

        Args:
            moving: Share of the time in which a move was under way, > 0.
        """
        self._note(key, (self.idle.rest_s, beside.rest_s, idle.rest_s), moving)
        if key in _PASSES:
            self._note(_PASSES[key], (self.idle.passes_s, beside.passes_s, idle.passes_s), moving)
        self.idle = idle

    def _note(self, key: str, seconds: tuple[float, float, float], moving: float) -> None:
        before_s, beside_s, after_s = seconds
        if before_s and beside_s and after_s:
            longer = 2.0 * beside_s / (before_s + after_s) - 1.0
            self.times_longer[key].append(1.0 + longer / moving)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Moves of one stream: mean seconds of one, and the share of the time in which one was under way."""

    mean_s: float
    moving: float


def _tier(samples: _Samples) -> Tier:
    """Tier of these measurements, of no capacity yet. See [Note: latency of a move]."""
    times = {key: median(values) for key, values in samples.seconds.items()}
    small_s, whole_s = times["small_read"], times["read"]
    byte_s = (whole_s - small_s) / (PIECE_BYTES - _SMALL_BYTES)
    latency = min(max(small_s - _SMALL_BYTES * byte_s, _LEAST_LATENCY_S), _MOST_LATENCY * small_s)
    rates = {key: float(f"{PIECE_BYTES / max(times[key] - latency, _LEAST_LATENCY_S):.4g}") for key in _TIMED[:4]}
    tier = Tier(
        name="disk",
        kind=FILE,
        persistent=True,
        capacity_bytes=1,
        read_bytes_per_s=rates["read"],
        write_bytes_per_s=rates["write"],
        mixed_read_bytes_per_s=min(rates["mixed_read"], rates["read"]),
        mixed_write_bytes_per_s=min(rates["mixed_write"], rates["write"]),
        latency_s=float(f"{latency:.3g}"),
        read_slowdown=_slowdown(samples.times_longer["read"]),
        write_slowdown=_slowdown(samples.times_longer["write"]),
        read_slowdown_of_passes=_slowdown(samples.times_longer[_PASSES["read"]]),
        write_slowdown_of_passes=_slowdown(samples.times_longer[_PASSES["write"]]),
    )
    return replace(
        tier,
        turn_bytes=_turn_bytes(_SMALL_BYTES / times["turns_read"], tier),
        latency_slowdown=_latency_slowdown(tier, _slowdown(samples.times_longer["small_read"])),
    )


def _round(file: _ProbeFile, slice_s: float, work: Work, samples: _Samples) -> None:
    """Take one sample of everything; work beside nothing stands between, for comparison."""
    samples.idle = _mean_of(work, slice_s / 2)
    _, writes, beside = _run(file, slice_s, work, write=PIECE_BYTES)
    samples.compare("write", beside, _mean_of(work, slice_s / 2), writes.moving)
    reads, _, beside = _run(file, slice_s, work, read=PIECE_BYTES)
    samples.compare("read", beside, _mean_of(work, slice_s / 2), reads.moving)
    small, _, beside = _run(file, slice_s, work, read=_SMALL_BYTES)
    samples.compare("small_read", beside, _mean_of(work, slice_s / 2), small.moving)
    mixed_reads, mixed_writes, _ = _run(file, 1.5 * slice_s, work, read=PIECE_BYTES, write=PIECE_BYTES)
    turns, _, _ = _run(file, slice_s / 2, work, read=_SMALL_BYTES, write=PIECE_BYTES)
    for key, moves in zip(_TIMED, (reads, writes, mixed_reads, mixed_writes, turns, small), strict=True):
        samples.seconds[key].append(moves.mean_s)


def _turn_bytes(small_read: float, tier: Tier) -> int:
    """Bytes of a turn, from the rate of small reads beside writes of whole pieces.

    Without turns a small read takes a move's latency and its bytes at the rate of whole pieces beside writes.
    """
    alone_s = tier.latency_s + _SMALL_BYTES / tier.mixed_read_bytes_per_s
    return PIECE_BYTES if small_read < _TURNS * _SMALL_BYTES / alone_s else 0


def _latency_slowdown(tier: Tier, slowdown: float) -> float:
    """Share by which work takes longer in the latency of a move, from that beside small reads."""
    transfer_s = _SMALL_BYTES / tier.read_bytes_per_s
    lost_s = slowdown * (tier.latency_s + transfer_s) - tier.read_slowdown * transfer_s
    return max(0.0, round(lost_s / tier.latency_s, 3))


def _slowdown(times_longer: list[float]) -> float:
    """Share by which work takes longer beside transfers, the median of rounds."""
    return max(0.0, round(median(times_longer) - 1.0, 3)) if times_longer else 0.0


def _mean_of(work: Work, seconds: float) -> _Spent:
    """Mean seconds of a call of ``work``, called until ``seconds`` are over: mean, as a step adds up its operations."""
    if work is None:
        return _Spent()
    timed = work if isinstance(work, StepWork) else None
    passes_s = timed.passes_s if timed is not None else 0.0
    calls, start = 0, time.perf_counter()
    while (now_s := time.perf_counter()) < start + seconds or not calls:
        work()
        calls += 1
    passes_s = timed.passes_s - passes_s if timed is not None else 0.0
    return _Spent((now_s - start - passes_s) / calls, passes_s / calls)


def _run(
    file: _ProbeFile, seconds: float, work: Work, *, read: int = 0, write: int = 0
) -> tuple[_Moves, _Moves, _Spent]:
    """Move pieces of so many bytes, 0 for none: one thread reads the file's first half, one writes the second.

    Meanwhile this thread does ``work``, as it would in a step. A stream alone pauses now and then.

    Returns:
        Moves read and written, and what a call of ``work`` took in the mean.
    """
    half = file.size_bytes // 2 // PIECE_BYTES * PIECE_BYTES
    half_moves = [_Moves(0.0, 0.0), _Moves(0.0, 0.0)]
    errors: list[OSError] = []
    file.settle()
    deadline = time.perf_counter() + seconds

    def move_until(index: int, move: Callable[..., int], size: int) -> None:
        try:
            offsets = range(index * half, (index + 1) * half, size)
            half_moves[index] = _stream(file, move, offsets, file.rooms[index], deadline, pausing=not (read and write))
        except OSError as error:
            errors.append(error)

    moves = ((0, os.preadv, read), (1, os.pwritev, write))
    threads = [threading.Thread(target=move_until, args=each) for each in moves if each[2]]
    for thread in threads:
        thread.start()
    beside = _mean_of(work, 0.9 * seconds)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return half_moves[0], half_moves[1], beside


def _stream(
    file: _ProbeFile, move: Callable[..., int], offsets: range, room: Arena, deadline: float, *, pausing: bool
) -> _Moves:
    """Move the pieces at these offsets in random order, in one thread, until the deadline."""
    size = offsets.step
    draw = random.Random(offsets.start)
    start = time.perf_counter()
    count, moving_s = 0, 0.0
    while not count or time.perf_counter() < deadline:
        began = time.perf_counter()
        _check_all_moved(move(file.fd, [room.memory[:size]], offsets[draw.randrange(len(offsets))]), size)
        moving_s += time.perf_counter() - began
        count += 1
        if pausing and count % _ROW == 0:
            time.sleep(_PAUSE_S)
    if move is os.pwritev and not file.direct:
        began = time.perf_counter()
        os.fsync(file.fd)
        moving_s += time.perf_counter() - began
    return _Moves(moving_s / count, moving_s / (time.perf_counter() - start))
