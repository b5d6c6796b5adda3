"""Gaps of the heap do not keep what a large temporary touched; meters give the mark of memory, not the present."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from lading.runtime import resident
from lading.runtime.cuda import CudaMeter, bytes_of_others
from lading.runtime.host_arena import Arena
from lading.runtime.resident import PeakMeter

#: A process frees 20 MiB that lie below a piece still in use, then has a temporary of 16 MiB.
_GAP = """
import ctypes, sys
from lading.runtime.resident import resident_bytes, reuse_pages, take_gaps, trim

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.mallopt(-3, 32 << 20)  # as glibc itself raises it while large pieces are freed
below, above = (ctypes.c_void_p(libc.malloc(size << 20)) for size in (20, 3))
libc.free(below)
trim()
reuse_pages()
give = take_gaps() if sys.argv[1] == "taken" else lambda: None
for _ in range(2):  # what was given back is taken again
    before = resident_bytes()
    temporary = ctypes.c_void_p(libc.malloc(16 << 20))
    ctypes.memset(temporary, 1, 16 << 20)
    libc.free(temporary)
    print((resident_bytes() - before) >> 20)
    give()
    give = take_gaps()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures glibc's heap in /proc")
@pytest.mark.parametrize(("gaps", "kept_mib"), [("left", "16"), ("taken", "0")])
def test_large_temporaries_lie_in_no_gap_of_the_heap(gaps: str, kept_mib: str) -> None:
    done = subprocess.run([sys.executable, "-c", _GAP, gaps], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [kept_mib, "0"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("exact", [True, False], ids=["mark of the kernel", "samples"])
def test_the_peak_is_the_highest_since_the_reset(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    if not exact:
        monkeypatch.setattr(resident, "_reset_kernel_mark", lambda: False)
    size, meter, arena = 64 << 20, PeakMeter(period_s=1e-3), Arena(64 << 20)
    assert meter.exact or not exact
    meter.reset()
    before = meter.now_bytes()
    arena.bytes_at(0, size).fill_(1)
    if not meter.exact:  # until a sample was taken
        ends = time.monotonic() + 10
        while meter.__dict__["_peak"] - before <= size * 3 // 4 and time.monotonic() < ends:
            time.sleep(1e-3)
    arena.close()
    assert meter.now_bytes() - before < size // 4
    assert meter.peak_bytes() - before > size * 3 // 4
    meter.reset()
    assert meter.peak_bytes() - before < size // 4
    meter.close()


def test_the_peak_of_a_gpu_is_what_its_allocator_had_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 7)
    meter = CudaMeter(0)
    assert (meter.now_bytes(), meter.peak_bytes()) == (3, 7)


@pytest.mark.parametrize(
    ("listed", "mebibytes"),
    [
        ("7, 800\n8, 9000\n9, 5\n", 9005),
        ("7, 800\n", 0),
        ("8, 9000\n", 0),  # a container's numbers are others
        ("7, 800\n8, [N/A]\n", 0),
        ("", 0),
    ],
)
def test_other_processes_on_a_gpu_are_told_apart(listed: str, mebibytes: int) -> None:
    assert bytes_of_others(listed, own=7) == mebibytes * 2**20


def test_what_a_gpu_has_beside_tensors_is_without_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    free = [60 * gib]
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 * gib)
    monkeypatch.setattr("lading.runtime.cuda._others_bytes", lambda index: asked.append(index) or 15 * gib)
    meter = CudaMeter(0)
    assert meter.beside_bytes() == gib == meter.beside_bytes()
    assert asked == [0]
    free[0] -= 2 * gib  # of whoever
    assert meter.beside_bytes() == 3 * gib
    assert asked == [0, 0]
