"""Identity of this host, as text that a plan remembers, and the memory it has. Imports no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from lading.errors import ConfigError
from lading.units import GiB, KiB


def host_id() -> str:
    """Name this host as ``"model name | cores | memory"``, the same at every call."""
    return f"{_model_name()} | {os.cpu_count()} cores | {memory_bytes() / GiB:.1f} GiB"


def clock_id() -> str:
    """Name the clock that ``time.perf_counter`` reads: processes for which it is the same may compare their moments."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    boot_id = boot.read_text().strip() if boot.exists() else platform.node()
    return f"{boot_id} {namespace.readlink()}" if namespace.is_symlink() else boot_id


def check_host(host: str) -> None:
    """Refuse a plan that was made for another host than this one; "" is any host.

    Raises:
        ConfigError: it was made for another.
    """
    if host and host != host_id():
        raise ConfigError(f"the plan was made for the host {host!r}, this one is {host_id()!r}; plan again here")


def memory_bytes() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache_bytes(level: int) -> int:
    """Bytes of the first processor's cache of a level, 0 where the system does not say; of several the largest."""
    sizes = [0]
    for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        size = (cache / "size").read_text().strip() if (cache / "size").is_file() else ""
        if size.endswith("K") and size[:-1].isdigit() and (cache / "level").read_text().strip() == f"{level}":
            sizes.append(int(size[:-1]) * KiB)
    return max(sizes)


def usable_bytes() -> int:
    """Bytes of memory that this process may have: all of the host's, or what its control group allows."""
    limits = [memory_bytes()]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()
