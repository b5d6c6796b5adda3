"""Placements for the terminal and as JSON: which part lies where, what it sends, and what limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lading.errors import ConfigError
from lading.ir.fleet import Fleet
from lading.ir.placement import Placement, PlacementProblem, split_points
from lading.report.plan_table import figures_table
from lading.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

#: Parts listed one by one.
_MOST_PARTS = 24
#: Share of a step from which a device or link that is busy limits it, and of its memory from which that does.
_BUSY, _FULL = 0.8, 0.9


def traffic(problem: PlacementProblem, devices: Sequence[int]) -> dict[tuple[int, int], int]:
    """Count the bytes that one step sends between devices, by (from, to)."""
    bytes_by_pair: dict[tuple[int, int], int] = {}
    for flow in problem.flows:
        source = devices[problem.group_of[flow.source]]
        for late in (False, True):
            targets = {devices[problem.group_of[t]] for t in flow.targets if problem.tasks[t].once_per_step is late}
            for target in sorted(targets - {source}):
                times = 1 if late else problem.micro_batches
                bytes_by_pair[source, target] = bytes_by_pair.get((source, target), 0) + times * flow.size_bytes
    return bytes_by_pair


def limit(problem: PlacementProblem, placement: Placement) -> str:
    """Say what keeps the step from being shorter."""
    network, step_s = problem.network, placement.step_s or 1.0
    busy = [(s / step_s, f"{network.devices[d]} computes") for d, s in enumerate(placement.busy_s)]
    busy += [(s / step_s, f"the link {network.channels[c]} sends") for c, s in enumerate(placement.channel_s)]
    share, name = max(busy)
    pairs = zip(placement.peak_bytes, network.memory_bytes, network.devices, strict=True)
    full = [name for peak, size, name in pairs if peak >= _FULL * size]
    sentence = f"{name} for {share:.0%} of the step"
    if share < _BUSY:
        sending = sum(placement.channel_s) / step_s
        sentence += f"; parts wait for one another, and for transfers {sending:.0%} of it"
    return sentence + (f"; the memory of {' and '.join(full)} is full" if full else "")


def _device_figures(problem: PlacementProblem, placement: Placement) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "memory_bytes": problem.network.memory_bytes[d],
            "peak_bytes": placement.peak_bytes[d],
            "busy_s": placement.busy_s[d],
            "under_way": placement.windows[d],
        }
        for d, name in enumerate(problem.network.devices)
    ]


def _split_points(problem: PlacementProblem, placement: Placement) -> list[str] | None:
    """Modules at which torch's pipeline would be split; None where parts are no pipeline."""
    try:
        return list(split_points(problem, placement))
    except ConfigError:
        return None


def policies_table(placements: Sequence[Placement], failed: Sequence[tuple[str, str]]) -> Table:
    """Table of every policy, with its step and how far it is above the bound."""
    table = figures_table("Policies", "policy", "step", "above the bound", "devices", "parts", " ", texts=(" ",))
    best = placements[-1]
    for row in placements:
        chosen = row is best
        gap = f"{row.gap:.1%}" if row.bound_s else "-"
        name = f"{'>' if chosen else ' '} {row.policy}"
        cells = (format_seconds(row.step_s), gap, str(len(set(row.devices))), str(len(row.parts)), row.note)
        table.add_row(name, *cells, style="bold" if chosen else None)
    for name, why in failed:
        table.add_row(f"  {name}", "-", "-", "-", "-", why)
    return table


def devices_table(problem: PlacementProblem, placement: Placement) -> Table:
    """Table of what each device holds, computes and sends in one step."""
    table = figures_table("Devices", "device", "memory", "of", "computes", "share", "sends", "under way")
    bytes_by_pair = traffic(problem, placement.devices)
    for d, name in enumerate(problem.network.devices):
        if d not in placement.devices:
            table.add_row(name, "-", format_bytes(problem.network.memory_bytes[d]), "not used", "-", "-", "-")
            continue
        busy = placement.busy_s[d]
        table.add_row(
            name,
            format_bytes(placement.peak_bytes[d]),
            format_bytes(problem.network.memory_bytes[d]),
            format_seconds(busy),
            f"{busy / (placement.step_s or 1.0):.0%}",
            format_bytes(sum(size for (a, _), size in bytes_by_pair.items() if a == d)),
            str(placement.windows[d]),
        )
    return table


def parts_table(problem: PlacementProblem, placement: Placement) -> Table | None:
    """Table of the runs of neighbors in order, each on its device; None where they are too many to read."""
    parts = placement.parts
    if len(parts) > _MOST_PARTS:
        return None
    table = figures_table(
        "Parts in order", "device", "from", "to", "groups", "weights and states", "computes", texts=("from", "to")
    )
    spared = problem.spared(placement.devices)
    for part in parts:
        part_groups = problem.groups[part.first : part.last + 1]
        tasks = [problem.tasks[t] for g in part_groups for t in g.tasks if t not in spared]
        seconds = sum((1 if t.once_per_step else problem.micro_batches) * t.seconds[part.device] for t in tasks)
        shared = {n for n, groups in enumerate(problem.sharing) if any(part.first <= g <= part.last for g in groups)}
        table.add_row(
            problem.network.devices[part.device],
            part_groups[0].name,
            part_groups[-1].name,
            str(len(part_groups)),
            format_bytes(
                sum(g.resident_bytes for g in part_groups) + sum(problem.shared[n].size_bytes for n in shared)
            ),
            format_seconds(seconds),
        )
    return table


def summary(
    problem: PlacementProblem,
    placements: Sequence[Placement],
    failed: Sequence[tuple[str, str]],
    fleet: Fleet | None = None,
) -> dict[str, Any]:
    """Figures by name: seconds, bytes and shares; the last placement is the chosen one.

    Args:
        fleet: Devices it is for; None for devices as plain numbers.
    """
    best, network = placements[-1], problem.network
    bytes_by_pair = traffic(problem, best.devices)
    return {
        "model": problem.name,
        "machine": fleet.name if fleet else None,
        "machine_fingerprint": fleet.fingerprint if fleet else None,
        "micro_batches": problem.micro_batches,
        "policy": best.policy,
        "step_s": best.step_s,
        "bound_s": best.bound_s,
        "gap": best.gap if best.bound_s else None,
        "limits": limit(problem, best),
        "devices": _device_figures(problem, best),
        "channels": [{"name": name, "busy_s": best.channel_s[c]} for c, name in enumerate(network.channels)],
        "parts": [
            {
                "device": network.devices[part.device],
                "groups": [g.name for g in problem.groups[part.first : part.last + 1]],
            }
            for part in best.parts
        ],
        "split_points": _split_points(problem, best),
        "sent": [
            {"source": network.devices[a], "target": network.devices[b], "size_bytes": size}
            for (a, b), size in bytes_by_pair.items()
        ],
        "policies": [
            {"policy": p.policy, "step_s": p.step_s, "gap": p.gap if p.bound_s else None, "parts": len(p.parts)}
            for p in placements
        ],
        "failed": [{"policy": name, "why": why} for name, why in failed],
        "assumptions": list(problem.assumed),
    }
