"""What seconds of collectives and copies take for granted, in sentences for a report."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lading.cost.collective import NCCL, Tuning
from lading.cost.topology import group_of
from lading.ir.layout import Layout
from lading.ir.machine import Machine

_ASSUMED = re.compile(r"assumption: ([^;]+)")


def assumed_of_links(layout: Layout, machine: Machine, tuning: Tuning = NCCL) -> tuple[str, ...]:
    """What the links that a job of ``layout`` uses, and the rates over them, assume for want of a measurement.

    Raises:
        ConfigError: the layout has several ranks and the machine neither links nor measured collectives.

    Example:
        ``assumed_of_links(parse_layout("tp8,dp4"), load_machine("a100"))`` starts with
        ``"network: eight HDR InfiniBand NICs of 200 Gb/s a node, as DGX A100"``.
    """
    world = group_of(layout, "world", machine)
    if world.ranks == 1 or not machine.links:
        return ()
    used = machine.links if world.domains > 1 else machine.links[:1]
    said = [sentence for link in used for sentence in assumptions(machine, f"links.{link.name}", link.name)]
    if world.domains > 2:
        said.append(f"network: {tuning.congestion:.1%} of its rate lost each time the domains double beyond two")
    experts = group_of(layout, "ep", machine)
    if experts.domains > 1 and experts.domain_ranks > 1:
        share = tuning.all_to_all_share[1]
        said.append(f"network: all-to-alls reach {share:.0%} of it (53% to 90% on the two clusters measured)")
    if group_of(layout, "pp", machine).domains > 1:
        share = tuning.send_share[1]
        said.append(f"network: sends reach {share:.0%} of a NIC (46% and 84% measured, before and after tuning)")
    return tuple(said)


def assumptions(machine: Machine, key: str, name: str) -> Iterator[str]:
    """What a machine's sources for a key, and for those below it, say is assumed, each after a name."""
    for other, text in machine.sources.items():
        if other == key or other.startswith(f"{key}."):
            yield from (f"{name}: {found.strip()}" for found in _ASSUMED.findall(text))
