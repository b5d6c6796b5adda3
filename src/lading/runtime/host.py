"""Identity of this host, as text that a plan remembers, and the memory it has. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
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
    """Refuse to run on this host what was planned by the measures of another; "" is any host.

    Raises:
        ConfigError: it was measured elsewhere.
    """
    if host and host != host_id():
        raise ConfigError(
            f"expected a machine file that was measured on this host ({host_id()}), found one of {host!r}, whose times "
            'and memory are others: measure this host (lading probe --out machine.toml, or machine = "probe"), and '
            "plan again with that"
        )


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
    """Bytes of memory that this process may have: all of the host's, or what its control groups allow."""
    return min([memory_bytes(), *(limit for limit, _ in _limits_and_uses(Path("/")))])


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process could have now, beside what it has: of the host, and of its control groups.

    What files have in memory counts, as the system lets go of it.

    Args:
        root: Where the system tells about itself.
    Returns:
        None where it does not.
    """
    meminfo = root / "proc/meminfo"
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines()) if meminfo.exists() else {}
    free_bytes = [int(lines["MemAvailable"].split()[0]) * KiB] if "MemAvailable" in lines else []
    free_bytes += [limit - used for limit, used in _limits_and_uses(root)]
    return max(0, min(free_bytes)) if free_bytes else None


def _limits_and_uses(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, without files, in bytes, of each control group of this process that has a limit."""
    cgroup_file = root / "proc/self/cgroup"
    for line in cgroup_file.read_text().splitlines() if cgroup_file.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / kinds
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if kinds
            else ("memory.max", "memory.current", "inactive_file")
        )
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(top):
                break
            limit, used = group / names[0], group / names[1]
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield int(text), int(used.read_text()) - int(statistics.get(names[2], 0))


def _model_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()
