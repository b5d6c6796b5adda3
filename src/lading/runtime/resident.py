"""Memory of this process as the operating system counts it, and settings that keep its allocator from wandering."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path

#: Temporaries up to this size stay with the process when they are freed.
LARGEST_KEPT_BYTES = 4 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = (1 << 31) - 1
#: First line of a mapping in /proc/self/maps and smaps: its addresses, and the device and inode of its file.
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+ \d+)")


def resident_bytes() -> int:
    """Bytes of this process's resident set now (VmRSS)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reuse_pages() -> bool:
    """Make freed temporaries stay with the process, so that the next one finds its pages touched.

    A fresh page costs about as much as reading its bytes ten times, and glibc returns much of what is freed to the
    kernel. Temporaries above 4 MiB still go back at once: kept, they would leave holes larger than a plan allows for.
    True if the C library took the settings (glibc does).
    """
    try:
        libc = ctypes.CDLL(None)
        return bool(
            libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
        )
    except (AttributeError, OSError):
        return False


class _MallocStatistics(ctypes.Structure):
    """Result of glibc's mallinfo2, over all heaps: bytes, and counts of blocks, under glibc's names."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def take_gaps() -> Callable[[], None]:
    """Take the gaps of the heap in which temporaries above 4 MiB would come to lie; returns what gives them back.

    A heap has gaps where large pieces were freed, as planning leaves them, of up to 32 MiB. glibc puts a request into a
    gap that fits, whatever its size; only where none does, requests above the threshold of ``reuse_pages`` have a
    mapping of their own, which goes back to the kernel when they are freed. What lies in a gap stays. Taken gaps are
    not touched: they have no pages.
    """
    libc, blocks = ctypes.CDLL(None), list[ctypes.c_void_p]()
    if not hasattr(libc, "mallinfo2"):  # another C library, or glibc before 2.33
        return lambda: None
    statistics, libc.malloc.restype = libc.mallinfo2, ctypes.c_void_p
    statistics.restype = _MallocStatistics
    before = statistics()
    for _ in range(before.fordblks // LARGEST_KEPT_BYTES):  # of what is free
        blocks.append(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(LARGEST_KEPT_BYTES))))
        if statistics().hblks > before.hblks:  # it has a mapping of its own, so no gap is left
            libc.free(blocks.pop())
            break

    def give() -> None:
        while blocks:
            libc.free(blocks.pop())

    return give


def trim() -> bool:
    """Return freed memory to the kernel; True if the C library can (glibc)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return False
    return True


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    function: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return function


def give_back() -> None:
    """Return freed memory to the kernel without collecting garbage: for kernels with many temporaries of many sizes."""
    if (give := _malloc_trim()) is not None:
        give(0)


def files_at(addresses: Iterable[int]) -> list[str | None]:
    """Identify the file mapped at each address by its device and inode; None where memory is the process's own."""
    mappings = [match for line in _lines("maps") if (match := _MAPPING.match(line))]
    starts = [int(mapping[1], 16) for mapping in mappings]

    def at(address: int) -> str | None:
        mapping = mappings[max(0, bisect_right(starts, address) - 1)]
        inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
        return mapping[3] if inside and not mapping[3].endswith(" 0") else None

    return [at(address) for address in addresses]


def mapped_bytes(files: Collection[str]) -> int:
    """Bytes of the resident set that are pages of mapped files, each named as by ``files_at``."""
    size_bytes, counts = 0, False
    for line in _lines("smaps") if files else ():
        if match := _MAPPING.match(line):
            counts = match[3] in files
        elif counts and line.startswith("Rss:"):
            size_bytes += 1024 * int(line.split()[1])
    return size_bytes


def _lines(name: str) -> list[str]:
    return Path("/proc/self", name).read_text().splitlines()


class ResidentSet:
    """The resident set read often: its file stays open, for opening it takes five times as long as reading it."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def now_bytes(self) -> int:
        """Bytes of the resident set now, as ``resident_bytes``."""
        return int(os.pread(self._file, 256, 0).split()[1]) * self._page_bytes

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


#: Bytes that an operation may take without being looked at, kept free below a limit.
UNSEEN_BYTES = 1 << 20


class Ceiling:
    """Gives freed memory back to the kernel where it would take the room that a plan has for something else.

    glibc's heap keeps what is freed in it, and pieces of different sizes leave holes. To give them back costs as much
    as to touch their pages again, so it is done when there is need, not each time.

    Args:
        now_bytes: Gives the bytes of the resident set.
        limit_bytes: Most bytes that it is to have.
        is_first_step: Whether results still come to pages that nothing has touched, which take room too.
    """

    def __init__(
        self, now_bytes: Callable[[], int], limit_bytes: int, is_first_step: Callable[[], bool] = lambda: False
    ) -> None:
        self._now_bytes, self._is_first_step = now_bytes, is_first_step
        self.limit_bytes = limit_bytes
        self._least_bytes = 0  # what was left when memory was last given back

    def make_room(self, size_bytes: int, written_bytes: int = 0) -> None:
        """Give freed memory back if ``size_bytes`` more, and results yet untouched, would not fit below the limit.

        Not where hardly anything has come since the last time.
        """
        now_bytes = self._now_bytes()
        needed_bytes = now_bytes + size_bytes + written_bytes * self._is_first_step()
        has_grown = now_bytes > self._least_bytes + UNSEEN_BYTES // 4
        if needed_bytes > self.limit_bytes - UNSEEN_BYTES and has_grown:
            give_back()
            self._least_bytes = self._now_bytes()


class PeakMeter:
    """Meter of the highest resident set since the last reset.

    The kernel's own high-water mark where it may be reset (``/proc/self/clear_refs``), otherwise samples taken by a
    thread, which can miss short peaks.

    Args:
        period_s: Seconds between two samples.

    Attributes:
        exact: Whether the kernel keeps the mark.
    """

    def __init__(self, *, period_s: float = 2e-3) -> None:
        self.exact = _reset_kernel_mark()
        self._resident, self._peak = ResidentSet(), 0
        self._stop = threading.Event()
        self._period_s = period_s
        self._thread = None if self.exact else threading.Thread(target=self._sample, name="lading-peak", daemon=True)
        if self._thread is not None:
            self._thread.start()

    def reset(self) -> None:
        """Forget the peak so far."""
        self._peak = resident_bytes()
        if self.exact:
            _reset_kernel_mark()

    def now_bytes(self) -> int:
        """Bytes of the resident set now; not to be called once closed."""
        return self._resident.now_bytes()

    def peak_bytes(self) -> int:
        """Highest bytes of the resident set since the last reset."""
        if self.exact:
            return max(_kernel_mark(), resident_bytes())
        self._peak = max(self._peak, resident_bytes())
        return self._peak

    def close(self) -> None:
        """Stop sampling; may be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._resident.close()

    def _sample(self) -> None:
        while not self._stop.wait(self._period_s):
            self._peak = max(self._peak, resident_bytes())


def _reset_kernel_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kernel_mark() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
