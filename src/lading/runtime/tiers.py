"""Tiers at run time: the memory behind the device, as objects that read, write and close.

A tier's kind decides which object serves it (``open_tier``): memory of the host, a swap file, or what a function of the
user's makes, which the machine file names as "module:function".
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import re
import secrets
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch

from lading.errors import ConfigError, StorageError
from lading.files import this_host
from lading.ir.machine import FILE, MEMORY, Tier
from lading.ir.program import PAGE_BYTES, whole_pages
from lading.permissions import check_code, check_path
from lading.runtime.host_arena import Arena
from lading.units import MiB, format_bytes

#: One system call moves at most this much: large enough for full speed, small enough to stop promptly.
PIECE_BYTES = 8 * MiB
#: What a file system says that takes no O_DIRECT, or has no files without a name.
_NOT_TAKEN = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR)
#: Errors of a write for which the disk may have room: what forbids it.
_LIMITS = {
    errno.EFBIG: "a limit on the size of a file, of the process (ulimit -f) or of the file system",
    errno.EDQUOT: "a quota on the space of this user",
}
_SWAP = re.compile(r"lading-swap-\d+(-[0-9a-f]+)?\Z")
#: Folder of the files of a rank but the first, which goes when they do.
_OF_RANK = re.compile(r"rank-\d+\Z")


@runtime_checkable
class HostBytes(Protocol):
    """Host memory addressed by offset, as ``Arena`` is."""

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """uint8[size_bytes] at ``offset``, without a copy."""
        ...

    def close(self) -> None:
        """Give the memory of the tier back."""
        ...


class TierBytes(Protocol):
    """Bytes at offsets, of one tier. One reader and one writer may work at the same time, on different bytes.

    A transfer has ended on return, or is ordered behind what the current lane was given before.
    """

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8, dense) with what was last written at ``offset``, zeros where nothing was."""
        ...

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Put ``data`` (uint8, dense) at ``offset``."""
        ...

    def close(self) -> None:
        """Give memory, disk space and handles back."""
        ...


@runtime_checkable
class BoundMoves(Protocol):
    """A tier that prepares its transfers: what is known before the step is not worked out in each.

    [Note: prepared moves] A thread that moves holds the interpreter's lock before and after its call to the system, and
    takes a processor from those that compute. A read of 256 KiB cost 63 us of a processor with everything worked out
    around it and 35 without.
    """

    def reading(self, offset: int, into: torch.Tensor) -> Callable[[], None]:
        """Prepare ``read`` with these arguments."""
        ...

    def writing(self, offset: int, data: torch.Tensor) -> Callable[[], None]:
        """Prepare ``write`` with these arguments."""
        ...


def bound_move(tier: TierBytes, offset: int, memory: torch.Tensor, *, reads: bool) -> Callable[[], None]:
    """Prepare a transfer of a tier: ``read`` at an offset into ``memory``, or ``write`` from it."""
    if isinstance(tier, BoundMoves):
        return tier.reading(offset, memory) if reads else tier.writing(offset, memory)
    return partial(tier.read if reads else tier.write, offset, memory)


#: Makes what serves a tier, from its bytes and its location: a folder or an address.
MakeTier = Callable[[int, str], TierBytes]


def open_tier(tier: Tier, size_bytes: int, folder: Path, memory: Callable[[int], HostBytes]) -> TierBytes:
    """Open the object that serves a tier.

    Args:
        tier: Tier of the machine.
        size_bytes: Bytes that the Program needs of it.
        folder: Folder of the run, used where the tier names no location of its own.
        memory: Makes memory of the host that the device reads and writes at full speed, from a size in bytes.
    Raises:
        ConfigError: the kind is no function that can be imported.
        StorageError: the folder of a file has no room, or another run is using it.
    """
    if tier.kind == MEMORY:
        return MemoryTier(memory(size_bytes))
    location = tier.location or str(folder)
    if tier.kind == FILE:
        check_path(location, f"location of tier {tier.name}")
        return FileTier(Path(location), size_bytes)
    return cast(MakeTier, imported(tier.kind, f"tier {tier.name}"))(size_bytes, location)


def tiers_of_rank(tiers: Sequence[Tier], folder: Path, rank: int) -> tuple[Tier, ...]:
    """Tiers as a rank of a job has them: its files lie in folders of its own, inside of those that all were given.

    Args:
        folder: Folder of the run, which tiers that name no location are given, of any kind.
    """
    if rank == 0:
        return tuple(tiers)

    def of_rank(tier: Tier) -> Tier:
        if tier.kind == FILE or (tier.kind != MEMORY and not tier.location):
            return replace(tier, location=str(Path(tier.location or folder) / f"rank-{rank}"))
        return tier

    return tuple(map(of_rank, tiers))


def imported(kind: str, what: str) -> object:
    """Import the function that a kind "module:function" names.

    Args:
        what: Name of the thing whose kind it is, for messages.
    Raises:
        ConfigError: it cannot be imported, or the user did not grant it (``lading.permissions``).
    """
    check_code(kind, what)
    module, _, function = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{what}: expected a kind that Lading has, or a 'module:function' that can be imported, got {kind!r}: "
            f"{error}"
        ) from error


class MemoryTier:
    """A tier in memory of the host."""

    def __init__(self, memory: HostBytes) -> None:
        self._memory = memory

    def bytes_at(self, offset: int, size_bytes: int) -> torch.Tensor:
        """uint8[size_bytes] at ``offset``, without a copy: what the host's processors work on."""
        return self._memory.bytes_at(offset, size_bytes)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8) with the bytes at ``offset``, by a copy that lets other threads run."""
        into.copy_(self._memory.bytes_at(offset, len(into)), non_blocking=True)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Put ``data`` (uint8) at ``offset``."""
        self._memory.bytes_at(offset, len(data)).copy_(data, non_blocking=True)

    def close(self) -> None:
        """Give the memory of the tier back."""
        self._memory.close()


class FileTier:
    """A tier in one file of a folder, past the page cache where the file system allows.

    The file has no name once it is open, so however the process ends nothing is left behind; its space is reserved
    at the start, so a full disk is found before the first step. One run per folder, guarded by a lock.

    [Note: two places] Checkpoints in place need the bytes of one state to stay while steps write the next
    (``lading.saving_in_place``). Once ``reserve_second`` has made the file twice as long, each page has two places.
    ``keep`` says that the bytes of now stay: from then on a page is written where they are not, and read where it was
    written last.

    Attributes:
        direct: Whether transfers pass the page cache (O_DIRECT).
        file_bytes: Bytes of the file.
        is_linkable: Whether the file system gives a file without a name another one.

    Raises:
        StorageError: the folder is in use by another run, cannot be written, or lacks the space.
    """

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.folder = folder
        self.capacity_bytes = whole_pages(capacity_bytes)
        self._places: np.ndarray | None = None  # of each page: 0 first, 1 second
        self._kept: np.ndarray | None = None
        self._is_linked, self._made_folder = False, bool(_OF_RANK.match(folder.name)) and not folder.exists()
        self._lock = _lock_folder(folder)
        try:
            with _swapping(folder):
                self._file, self.direct, self.is_linkable = _open_unnamed(folder)
            try:
                self._reserve(self.capacity_bytes)
                self._read_page, self._write_page = Arena(PAGE_BYTES), Arena(PAGE_BYTES)
            except BaseException:
                os.close(self._file)
                raise
        except BaseException:
            with suppress(OSError):  # of a folder that cannot be written
                (folder / "lading.lock").unlink()
            os.close(self._lock)
            self._remove_folder()
            raise
        if not self.direct:
            warnings.warn(f"{folder} does not take O_DIRECT: transfers go through the page cache", stacklevel=2)

    def _reserve(self, size_bytes: int) -> None:
        try:
            if size_bytes:
                os.posix_fallocate(self._file, 0, size_bytes)
        except OSError as error:
            if error.errno in _LIMITS:
                raise StorageError(
                    f"expected a swap file of {format_bytes(size_bytes)} ({size_bytes} bytes) in {self.folder}, "
                    f"found {_LIMITS[error.errno]} ({error.strerror}); raise it, choose another folder or raise the "
                    "memory budget",
                    errno=error.errno,
                ) from error
            stat = os.statvfs(self.folder)
            raise StorageError(
                f"expected {format_bytes(size_bytes)} ({size_bytes} bytes) of space in "
                f"{self.folder}, found {format_bytes(stat.f_bavail * stat.f_frsize)} free ({error.strerror}); free "
                "some space, choose another folder or raise the memory budget"
            ) from error
        with _swapping(self.folder):
            self.file_bytes, self._blocks = size_bytes, os.fstat(self._file).st_blocks

    def reserve_second(self) -> None:
        """Make room for a second place of every page, once. See [Note: two places].

        Raises:
            StorageError: the disk has no room.
        """
        if self._places is None:
            self._reserve(2 * self.capacity_bytes)
            self._places = np.zeros(self.capacity_bytes // PAGE_BYTES, np.uint8)

    @property
    def is_lost(self) -> bool:
        """Whether all names that the file was given are gone; then it can be given no other."""
        return self._is_linked and os.fstat(self._file).st_nlink == 0

    def has_name(self, path: Path) -> bool:
        """Whether the file is there by that name."""
        return path.exists() and os.path.samestat(os.stat(path), os.fstat(self._file))

    def link(self, path: Path) -> None:
        """Give the file another name, under which it stays when this run is gone, with all bytes on the disk.

        Raises:
            OSError: as the file system says; EXDEV where ``path`` is on another one.
        """
        os.fdatasync(self._file)
        files = os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC)
        try:  # with a folder, link follows what /proc has; without one it does not, on Linux
            os.link(f"{self._file}", path, src_dir_fd=files, follow_symlinks=True)
        finally:
            os.close(files)
        self._is_linked = True

    def keep(self) -> None:
        """Leave the bytes of now where they are, until this is called again. Nothing may be moved meanwhile."""
        assert self._places is not None, "reserve_second has been called"
        self._kept = self._places.copy()

    def runs(self, offset: int, size_bytes: int, *, writes: bool = False) -> list[tuple[int, int]]:
        """Find where bytes lie in the file, or are to be written: (first byte, bytes) of each run, in order."""
        if self._places is None:
            return [(offset, size_bytes)]
        pages = slice(offset // PAGE_BYTES, -(-(offset + size_bytes) // PAGE_BYTES))
        places = 1 - self._kept[pages] if writes and self._kept is not None else self._places[pages]
        cuts = [0, *(np.flatnonzero(places[1:] != places[:-1]) + 1).tolist(), len(places)]
        end = offset + size_bytes
        ranges = [(offset + a * PAGE_BYTES, min(offset + b * PAGE_BYTES, end), a) for a, b in pairwise(cuts) if a < b]
        return [(low + int(places[a]) * self.capacity_bytes, high - low) for low, high, a in ranges]

    def _written(self, offset: int, size_bytes: int) -> None:
        """Read bytes from now on where they were written last."""
        if self._places is not None and self._kept is not None:
            pages = slice(offset // PAGE_BYTES, -(-(offset + size_bytes) // PAGE_BYTES))
            self._places[pages] = 1 - self._kept[pages]

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (uint8 in host memory) with the bytes at ``offset``, a whole number of pages.

        Raises:
            StorageError: the disk returned an error or fewer bytes.
        """
        self._check_whole()
        remaining = into.numpy().data
        for at, size in self.runs(offset, len(remaining)):
            memory, remaining = remaining[:size], remaining[size:]
            whole_pages = size // PAGE_BYTES * PAGE_BYTES
            self._transfer(os.preadv, "read", at, memory[:whole_pages])
            if whole_pages < size:
                self._transfer(os.preadv, "read", at + whole_pages, self._read_page.memory)
                memory[whole_pages:] = self._read_page.memory[: size - whole_pages]

    def _check_whole(self) -> None:
        """Refuse a file that was cut, before a write makes it as long again: its holes would read as zeros."""
        with _swapping(self.folder):
            is_whole = self._is_whole()
        if not is_whole:
            advice = (
                "a checkpoint that is not in place, as those lie in this file" if self._is_linked else "the last one"
            )
            raise StorageError(
                f"the swap file in {self.folder} has lost some of its {self.file_bytes} bytes: it was cut from "
                f"outside; resume from a checkpoint: {advice}"
            )

    def _is_whole(self) -> bool:
        """Whether the file is as long as reserved, and has its blocks, of which a file system may join some."""
        stat = os.fstat(self._file)
        return stat.st_size >= self.file_bytes and stat.st_blocks >= self._blocks * 15 // 16

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Put ``data`` (uint8 in host memory) at ``offset``, whole pages; the rest of a last partial page is undefined.

        Raises:
            StorageError: the disk returned an error or took fewer bytes.
        """
        self._check_whole()
        left = data.numpy().data
        for at, size in self.runs(offset, len(left), writes=True):
            memory, left = left[:size], left[size:]
            whole_pages = size // PAGE_BYTES * PAGE_BYTES
            self._transfer(os.pwritev, "write", at, memory[:whole_pages])
            if whole_pages < size:
                self._write_page.memory[: size - whole_pages] = memory[whole_pages:]
                self._transfer(os.pwritev, "write", at + whole_pages, self._write_page.memory)
        self._written(offset, len(data))

    def reading(self, offset: int, into: torch.Tensor) -> Callable[[], None]:
        """Prepare ``read``. See [Note: prepared moves]."""
        pieces = self._one_call(offset, into)
        if pieces is None:
            return partial(self.read, offset, into)
        size = len(pieces[0])

        def run() -> None:
            (at, count), *_ = self.runs(offset, size)
            try:
                is_done = count == size == os.preadv(self._file, pieces, at) and self._is_whole()
            except OSError:
                is_done = False
            if not is_done:  # once more, and what fails again is said
                self.read(offset, into)

        return run

    def writing(self, offset: int, data: torch.Tensor) -> Callable[[], None]:
        """Prepare ``write``. See [Note: prepared moves]."""
        pieces = self._one_call(offset, data)
        if pieces is None:
            return partial(self.write, offset, data)
        size = len(pieces[0])

        def run() -> None:
            (at, count), *_ = self.runs(offset, size, writes=True)
            try:
                is_done = self._is_whole() and count == size == os.pwritev(self._file, pieces, at)
            except OSError:
                is_done = False
            if is_done:
                self._written(offset, size)
            else:
                self.write(offset, data)

        return run

    def _one_call(self, offset: int, data: torch.Tensor) -> list[memoryview] | None:
        """Buffers of the one call to the system that moves all of ``data``; None where it takes more than that."""
        memory = data.numpy().data
        size = len(memory)
        is_one = self.direct and 0 < size <= PIECE_BYTES and size % PAGE_BYTES == 0
        is_inside = offset % PAGE_BYTES == 0 and offset + size <= self.capacity_bytes
        return [memory] if is_one and is_inside else None

    def _transfer(self, call: Callable[..., int], verb: str, offset: int, data: memoryview) -> None:
        """Move every byte in pieces; a short one is continued from its last whole page."""
        if offset % PAGE_BYTES or offset + len(data) > self.file_bytes:
            raise StorageError(
                f"cannot {verb} {len(data)} bytes at {offset}: not whole pages of {self.file_bytes} bytes"
            )
        num_done = 0
        while num_done < len(data):
            piece = data[num_done : num_done + PIECE_BYTES]
            try:
                moved = call(self._file, [piece], offset + num_done)
                if not self.direct:
                    os.posix_fadvise(self._file, offset + num_done, moved, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                advice = f"raise {limit}" if (limit := _LIMITS.get(error.errno or 0)) else "check the disk (dmesg)"
                raise StorageError(
                    f"cannot {verb} {len(piece)} bytes at {offset + num_done} of the swap file in {self.folder}: "
                    f"{error.strerror}; {advice}",
                    errno=error.errno,
                ) from error
            if moved < len(piece):
                moved = moved // PAGE_BYTES * PAGE_BYTES
                if not moved:
                    raise StorageError(
                        f"{verb} of {len(piece)} bytes at {offset + num_done} of the swap file in {self.folder} moved "
                        "less than a page; check the disk (dmesg)"
                    )
            num_done += moved

    def close(self) -> None:
        """Delete the file: its space and the folder are free again. May be called twice."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        self._read_page.close()
        self._write_page.close()
        try:
            (self.folder / "lading.lock").unlink(missing_ok=True)
        except OSError as error:  # the next run takes it as it is: its lock ends here
            warnings.warn(f"cannot remove {self.folder / 'lading.lock'}: {error.strerror}", stacklevel=2)
        finally:
            os.close(self._lock)
        self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove the folder of a rank that this file made."""
        if self._made_folder:
            with suppress(OSError):  # others have put something there, or made it anew
                self.folder.rmdir()


@contextmanager
def _swapping(folder: Path) -> Generator[None]:
    """Turn an error of the operating system inside into one that names the swap folder."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot use {folder} for swapping: {error.strerror or error}; choose a folder that can be written "
            "(memory.folder)"
        ) from error


def _lock_folder(folder: Path) -> int:
    """Open and lock a file that marks the folder as in use until the descriptor is closed or the process ends."""
    with _swapping(folder):
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            lock = os.open(folder / "lading.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if _is_locked(lock, folder):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)


def _is_locked(lock: int, folder: Path) -> bool:
    """Take the lock; False if the run before deleted the file between open and lock."""
    path = folder / "lading.lock"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace")
        found = f"process {owner.partition(' ')[0] or 'unknown'}; wait for that run"
        if owner == _process():
            found = "another Trainer of this process; close that one"
        raise StorageError(
            f"expected {folder} to be free, found it in use by {found}, or give this one a folder of its own"
        ) from error
    if not path.exists() or path.stat().st_ino != os.fstat(lock).st_ino:
        return False
    os.ftruncate(lock, 0)
    os.pwrite(lock, _process().encode(), 0)
    return True


def _process() -> str:
    """Number of this process, and its host: those of other containers may have the same number."""
    return f"{os.getpid()} {this_host()}"


def _open_unnamed(folder: Path) -> tuple[int, bool, bool]:
    """Open a new file without a name; returns its descriptor, and whether it is O_DIRECT and can be given a name."""
    for stale in folder.iterdir():  # left by a run killed between open and unlink; the lock says none is alive
        if _SWAP.match(stale.name):
            stale.unlink()
    for flags in (os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | os.O_DIRECT, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC):
        try:
            return os.open(folder, flags, 0o600), bool(flags & os.O_DIRECT), True
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise _no_swap_file(folder, error) from error
    path = folder / f"lading-swap-{os.getpid()}-{secrets.token_hex(8)}"  # nobody can wait for it in a shared folder
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file, direct = os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in _NOT_TAKEN:
            raise _no_swap_file(folder, error) from error
        file, direct = os.open(path, flags, 0o600), False
    try:
        path.unlink()
    except BaseException:
        os.close(file)
        raise
    return file, direct, False


def _no_swap_file(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot create a swap file in {folder}: {error.strerror}; choose another folder")
