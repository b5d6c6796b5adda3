"""Load of others: what share of the processors that this process may use went to anybody else."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
#: Columns of a processor's line in /proc/stat that count as work: user, nice, system, irq, softirq and steal.
_WORK = (1, 2, 3, 6, 7, 8)
#: The system counts in hundredths of a second: less says nothing.
_SHORTEST_S = 0.2


class LoadMeter:
    """Measures from its creation on; what a hypervisor gives to other guests counts too, as far as it says so."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._begun = self._read()

    def share(self) -> float | None:
        """Share of the processors' time since then that others took, in [0, 1]; None where nobody says."""
        if self._begun is None or (now := self._read()) is None:
            return None
        wall_s, busy_s, own_s = (after - before for after, before in zip(now, self._begun, strict=True))
        if wall_s < _SHORTEST_S or busy_s <= 0:
            return None
        return min(1.0, max(0.0, busy_s - own_s) / (wall_s * len(self._cpus)))

    def _read(self) -> tuple[float, float, float] | None:
        """Seconds on the clock, of work of the processors, and of this process and its children."""
        try:
            lines = _STAT.read_text().splitlines()
        except OSError:
            return None
        busy = busy_seconds(lines, self._cpus)
        return None if busy is None else (time.monotonic(), busy, sum(os.times()[:4]))


def busy_seconds(lines: list[str], cpus: list[int]) -> float | None:
    """Seconds that processors worked since the system started, by the lines of /proc/stat; None if one is missing."""
    rows = {words[0]: words for words in map(str.split, lines) if words}
    if not cpus or any(len(rows.get(f"cpu{cpu}", ())) < 9 for cpu in cpus):
        return None
    ticks = sum(int(rows[f"cpu{cpu}"][column]) for cpu in cpus for column in _WORK)
    return ticks / os.sysconf("SC_CLK_TCK")
