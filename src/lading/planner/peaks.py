"""Peaks: bytes that the ranks of a simulated step need at each of the five moments, by tier, and what there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.machine import Machine
from lading.ir.request import Request
from lading.ir.schedules import schedule_of
from lading.memory.moments import RankBytes, moments_of
from lading.memory.rank_bytes import kept_state_bytes, parameter_width, shards, state_bytes
from lading.planner.space import Space
from lading.sim.simulate import MEMORY_SPREAD, Simulated, runs_of, simulate


def room_of(space: Space) -> dict[str, int]:
    """Bytes that tensors may take, by tier: on the device, less what a prediction may be wrong by, and behind it.

    Raises:
        ConfigError: the budget is less than a process needs.
    """
    device = space.machine.device
    whole = space.wanted_request.budget_bytes or device.memory_bytes
    if whole <= device.overhead_bytes:
        raise ConfigError(
            f"expected a budget of more than the {device.overhead_bytes} bytes that a process needs on "
            f"{device.name}, got {whole}"
        )
    lower_tiers = {tier.name: tier.capacity_bytes for tier in space.machine.tiers}
    return {DEVICE: int((whole - device.overhead_bytes) / (1 + MEMORY_SPREAD)), **lower_tiers}


def budget_for(device_bytes: int, machine: Machine) -> int:
    """Least budget in bytes that leaves ``device_bytes`` for tensors: what ``room_of`` takes off, put on."""
    return machine.device.overhead_bytes + int(device_bytes * (1 + MEMORY_SPREAD)) + 2


def peaks_of(simulated: Simulated, asked: Request) -> dict[str, dict[str, int]]:
    """Count bytes by moment and tier of the rank that needs most, with the checkpoints and sequences asked for."""
    request = simulated.request
    layout, longest = request.layout, simulated.memory
    if asked.longest > request.seq_len:
        unit = 2 * layout.cp * layout.tp
        longest = simulate(replace(request, seq_len=-(-asked.longest // unit) * unit), simulated.table).memory
    plan = schedule_of(layout, rules="megatron" if request.stack.megatron_order else "torch")
    runs = runs_of(request, simulated.table)
    whole = _whole_elements(simulated)
    peaks: dict[str, dict[str, int]] = {}
    for rank, (roles, long, lower_tier_roles) in enumerate(
        zip(simulated.memory, longest, simulated.lower_tier_by_rank, strict=True)
    ):
        counts: dict[int, int] = {}
        for segment, count in (part for stage in plan.stages_of(rank) for part in runs[stage]):
            counts[segment] = counts.get(segment, 0) + count
        rank_bytes = RankBytes(
            roles=roles,
            gradient_bytes=_gradient_bytes(simulated, counts),
            longest_bytes=sum(long.values()),
            piece_bytes=_largest_piece(simulated, counts),
            whole_bytes=max(max(whole[segment], default=0) for segment in counts) * _width(simulated),
            stage_bytes=sum(sum(whole[segment]) * count for segment, count in counts.items())
            * _checkpoint_bytes_per_element(simulated),
            shares=_host_shares(simulated),
            host_tier=simulated.machine.host_tier,
            behind_tier=simulated.behind_tier,
            lower_tier_roles=lower_tier_roles,
            stages_all=request.stack.megatron_order,
        )
        for moment, tiers in moments_of(rank_bytes, asked.save).items():
            peak = peaks.setdefault(moment, dict.fromkeys(tiers, 0))
            peak.update({tier: max(peak[tier], size) for tier, size in tiers.items()})
    return peaks


def _gradient_bytes(simulated: Simulated, counts: Mapping[int, int]) -> int:
    """Bytes of all gradients that a rank keeps on the device; where the host updates, 0: they are counted in its step.

    Args:
        counts: How often the rank has each segment.
    """
    layout, stack = simulated.request.layout, simulated.request.stack
    if layout.updates_on_host:
        return 0
    elements: dict[str, int] = {}
    for segment, count in counts.items():
        phases = simulated.segments[segment]
        for axes, number in (phases if layout.is_pipeline else phases.without_tied).elements.items():
            elements[axes] = elements.get(axes, 0) + number * count
    return state_bytes(elements, layout, stack)[Role.GRADIENT]


def _largest_piece(simulated: Simulated, counts: Mapping[int, int]) -> int:
    """Bytes of the largest state of one parameter that a rank keeps: the parameter itself, or an optimizer's state."""
    layout = simulated.request.layout
    parameter_bytes, width = parameter_width(layout, simulated.request.stack), _width(simulated)
    largest = 0
    for segment in (simulated.segments[number].segment for number in counts):
        for tensor, axes in segment.parameters:
            elements, ways = prod(segment.tensors[tensor].shape), shards(axes, layout)
            largest = max(
                largest,
                -(-elements // ways) * width,
                elements * parameter_bytes // (ways if layout.cuts_parameters else 1),
            )
    return largest


def _whole_elements(simulated: Simulated) -> list[list[int]]:
    """List by segment the elements of each parameter, not cut; a tied one counts where it is first."""
    request, table = simulated.request, simulated.table
    sizes: dict[str, Any] = {**table.symbols, "s": request.seq_len, "b": request.layout.micro_batch}
    tied = {second for _, second in table.tied} if request.layout.pp == 1 else set[tuple[int, str]]()
    return [
        [
            prod(int(dim.at(sizes)) for dim in segment.tensors[parameter].dims)
            for parameter, _ in segment.gradients
            if (number, segment.tensors[parameter].name) not in tied
        ]
        for number, segment in enumerate(table.segments)
    ]


def _width(simulated: Simulated) -> int:
    """Bytes of one element of the widest optimizer state."""
    stack = simulated.request.stack
    return 4 if stack.master_weights else DTYPE_BYTES[stack.moments_dtype]


def _checkpoint_bytes_per_element(simulated: Simulated) -> int:
    """Bytes of one element of a parameter with its states in a checkpoint."""
    stack = simulated.request.stack
    return parameter_width(simulated.request.layout, stack) + kept_state_bytes(stack)


def _host_shares(simulated: Simulated) -> float:
    """Devices of a node for each of its ranks that keeps a whole stage ([Note: what PyTorch does])."""
    layout, links = simulated.request.layout, simulated.machine.links
    node = next((link.nic_ranks for link in links if link.nics), 0) or (links[0].ranks if links else 0)
    devices = min(layout.devices, node or layout.devices)
    return devices / -(-devices * layout.pp // layout.devices)
