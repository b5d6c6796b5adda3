"""Memory that the system says a process may have: of the host, and of the control groups that it is in."""

from __future__ import annotations

from pathlib import Path

from lading.runtime.host import available_bytes, memory_bytes, usable_bytes
from lading.units import KiB, MiB


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")


def test_nothing_is_known_of_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_host_has_memory() -> None:
    left = available_bytes()
    assert left is not None
    assert 0 < left < memory_bytes()
    assert left < usable_bytes() <= memory_bytes()


def test_memory_of_the_host_without_a_limit(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:   5000 kB", "proc/self/cgroup": "0::/job"})
    write(tmp_path / "sys/fs/cgroup/job", {"memory.max": "max", "memory.current": 1, "memory.stat": "inactive_file 0"})
    assert available_bytes(tmp_path) == 5000 * KiB


def test_a_group_leaves_what_files_have_in_memory(tmp_path: Path) -> None:
    """And so does the group above it, here the narrower one."""
    write(tmp_path, {"proc/meminfo": "MemAvailable: 900000 kB", "proc/self/cgroup": "0::/pod/job"})
    group = tmp_path / "sys/fs/cgroup/pod/job"
    write(group, {"memory.max": 100 * MiB, "memory.current": 40 * MiB, "memory.stat": f"inactive_file {10 * MiB}"})
    assert available_bytes(tmp_path) == 70 * MiB
    write(group.parent, {"memory.max": 90 * MiB, "memory.current": 60 * MiB, "memory.stat": "inactive_file 0"})
    assert available_bytes(tmp_path) == 30 * MiB


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "9:pids:/\n4:memory:/job"})
    group = {"memory.limit_in_bytes": 50 * MiB, "memory.usage_in_bytes": 60 * MiB}
    write(tmp_path / "sys/fs/cgroup/memory/job", {**group, "memory.stat": f"total_inactive_file {15 * MiB}"})
    assert available_bytes(tmp_path) == 5 * MiB
