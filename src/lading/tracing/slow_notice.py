"""Notices on standard error, now and then, while something takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from lading.alone import rank_number

#: Seconds before the first line, and between two.
_EVERY_S = 5.0


@contextmanager
def told_if_slow(what: str, count: Callable[[], int], *, every_s: float = _EVERY_S) -> Iterator[None]:
    """Print how far something is every few seconds, as long as it takes; of several ranks the first does.

    Args:
        what: Name of what is done, such as "capture".
        count: Gives the number of operations so far; called from another thread.
        every_s: Seconds before the first line, and between two.
    """
    finished, start = Event(), time.monotonic()

    def tell() -> None:
        while not finished.wait(every_s):
            seconds = time.monotonic() - start
            print(f"lading: {what}: {count():,} operations after {seconds:.0f} s", file=sys.stderr, flush=True)

    if rank_number():
        yield
        return
    teller = Thread(target=tell, name="lading-slow", daemon=True)
    teller.start()
    try:
        yield
    finally:
        finished.set()
        teller.join()
