"""Gaps that are left in the heap do not keep what a large temporary touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
