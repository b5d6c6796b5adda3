"""Budgets of the tiers behind the device: read in bytes, and compared with what a machine and its disk have.

A budget is a limit, and a plan may take less. One that no machine or disk can give is refused, or, where it is of a
disk that is not here, said: a machine file has the room that was free when the disk was measured, or that a data sheet
names.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from lading.config import MemoryConfig, RunConfig
from lading.errors import ConfigError
from lading.ir.machine import FILE, Machine, Tier
from lading.planner.api import tier_limits
from lading.runtime.host import host_id, usable_bytes
from lading.units import format_bytes, parse_bytes, share_or_bytes


def asked_limits(
    machine: Machine, disk_budget: str | float | None, budgets: Mapping[str, str | float]
) -> Mapping[str, str | float]:
    """Collect budgets of tiers by name, refusing bad ones before anything is planned.

    Args:
        disk_budget: Budget of the nearest tier of kind "file"; None where it is not set.

    Raises:
        ConfigError: one means nothing, is said twice, is of a tier that the machine has not, or is more memory than it
            has.
    """
    if disk_budget is not None:
        size = parse_bytes(disk_budget, "disk_budget")
        swap = machine.swap_tier
        if swap in budgets:
            raise ConfigError(f"expected one budget of {swap!r}, got disk_budget and one in budgets; leave one out")
        if size and not swap:
            raise ConfigError(
                f"disk_budget: expected a machine with a tier of kind 'file', got {machine!r}; leave it out"
            )
        if swap:
            budgets = {**budgets, swap: size}
    limits = tier_limits(machine, budgets)
    for tier in machine.tiers:
        if tier.kind != FILE and limits[tier.name] > (most := _memory_bytes(tier, machine)):
            raise _above(f"budgets[{tier.name!r}]", limits[tier.name], most, f"{machine.name} has")
    return budgets


def run_limits(run: RunConfig, machine: Machine, local_ranks: int = 1) -> dict[str, int]:
    """Budgets in bytes that a run's settings give the tiers of its machine, for each of the ranks that share them.

    Raises:
        ConfigError: a budget is of no tier, or is more than there is; or the run has a setting of a swap file, and its
            machine has none.
    """
    memory, swap = run.memory, machine.swap_tier
    if not swap and share_or_bytes(memory.disk_budget, 1 << 40) and memory.disk_budget != MemoryConfig.disk_budget:
        raise ConfigError(
            f"memory.disk_budget: expected a machine with a tier of kind 'file', found none in {machine.name}; leave "
            "it out"
        )
    whole_bytes = {tier.name: _whole_bytes(tier, run) // local_ranks for tier in machine.tiers}
    limits = memory.tier_budgets(whole_bytes, swap)
    for tier in machine.tiers:
        most, owner = _memory_bytes(tier, machine) // local_ranks, f"{machine.name} has"
        if tier.kind == FILE:
            if machine.host_id != host_id():
                continue
            folder = _existing(_folder(tier, run))
            most = max(tier.capacity_bytes, shutil.disk_usage(folder).total) // local_ranks
            owner = f"the disk of {folder} has"
        if limits.get(tier.name, 0) > most:
            raise _above(memory.setting_of(tier.name), limits[tier.name], most, owner, local_ranks)
    return limits


def limit_notes(run: RunConfig, machine: Machine, limits: Mapping[str, int], local_ranks: int = 1) -> tuple[str, ...]:
    """Sentences on what of a run's budgets there may not be room for now; no part of a plan, as free space changes.

    Args:
        limits: Budgets as ``run_limits`` gives them.
    """
    notes: list[str] = []
    if run.memory.folder and not any(tier.kind == FILE and not tier.location for tier in machine.tiers):
        notes.append(f"memory.folder does nothing, as {machine.name} has no swap file without a location of its own")
    for tier in machine.tiers:
        if tier.kind != FILE or tier.name not in limits:
            continue
        is_here = machine.host_id == host_id()
        room = _whole_bytes(tier, run) if is_here else tier.capacity_bytes
        if limits[tier.name] > room // local_ranks:
            where = f"{machine.name} says of its {tier.name}"
            if is_here:
                where = f"{_existing(_folder(tier, run))} has free"
            each = f", for each of {local_ranks} ranks" if local_ranks > 1 else ""
            notes.append(
                f"{run.memory.setting_of(tier.name)} is {format_bytes(limits[tier.name])}, more than the "
                f"{format_bytes(room // local_ranks)} that {where}{each}: a run that finds less than its plan takes is "
                "refused"
            )
    return tuple(notes)


def _above(setting: str, size_bytes: int, most_bytes: int, owner: str, ranks: int = 1) -> ConfigError:
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    return ConfigError(
        f"{setting}: expected at most {format_bytes(most_bytes)} ({most_bytes} bytes), all that {owner}{each}, got "
        f"{format_bytes(size_bytes)} ({size_bytes} bytes); lower it, or leave it out"
    )


def _memory_bytes(tier: Tier, machine: Machine) -> int:
    """Bytes of memory behind a tier of the host that this machine is or, if it is another, of its node.

    ``Tier.capacity_bytes`` is less: what a plan may use without a budget, for one of the node's devices.
    """
    if machine.host_id == host_id():
        return max(tier.capacity_bytes, usable_bytes())
    return tier.capacity_bytes * machine.node_devices


def _whole_bytes(tier: Tier, run: RunConfig) -> int:
    """Bytes that a share of a tier is taken of: the free space where it is a file, else its capacity."""
    return _free_bytes(_folder(tier, run)) if tier.kind == FILE else tier.capacity_bytes


def _folder(tier: Tier, run: RunConfig) -> Path:
    return Path(tier.location or run.memory.folder or run.out)


def _existing(folder: Path) -> Path:
    """Nearest folder that is there."""
    while not folder.exists():
        folder = folder.absolute().parent
    return folder


def _free_bytes(folder: Path) -> int:
    """Bytes free on a folder's disk, rounded down to five leading bits, so that equal runs get the same share of it."""
    free = shutil.disk_usage(_existing(folder)).free
    unit = 1 << max(0, free.bit_length() - 5)
    return free // unit * unit
