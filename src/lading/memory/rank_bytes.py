"""Ranks: bytes on one rank of a cluster by role, at the moment when they are most.

A rank holds its parameters, their gradients and the optimizer's states, cut as ``layout.zero`` says, and the
activations of the micro-batches under way. Counted is what an allocator is asked for ("allocated"), without its slack
and without what the device's library keeps.
"""

from __future__ import annotations

from collections.abc import Mapping

from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.layout import Layout
from lading.ir.stack import Stack

#: Of a parameter as products take it.
_PRODUCT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2, "mxfp8": 2, "nvfp4": 2}


def replicas(axes: str, layout: Layout) -> int:
    """Number of ranks that hold the same parameters: ``axes`` is "dp", or "dp/ep" for an expert's."""
    ranks = layout.dp * layout.cp
    return ranks * layout.tp // (layout.ep * layout.expert_tp) if axes.endswith("/ep") else ranks


def shards(axes: str, layout: Layout) -> int:
    """Number of ways in which the states of parameters replicated over ``axes`` are cut."""
    if layout.zero == 0:
        return 1
    return min(replicas(axes, layout), layout.shard or replicas(axes, layout))


def parameter_width(layout: Layout, stack: Stack) -> int:
    """Bytes of a parameter's element as it is kept."""
    return DTYPE_BYTES.get(stack.parameters_dtype, _PRODUCT_BYTES[layout.precision])


def kept_state_bytes(stack: Stack) -> int:
    """Bytes of the optimizer's states of one parameter: its moments, and a master where there is one."""
    return stack.moments * DTYPE_BYTES[stack.moments_dtype] + (4 if stack.master_weights else 0)


def state_bytes(elements: Mapping[str, int], layout: Layout, stack: Stack) -> dict[Role, int]:
    """Bytes of parameters, gradients and optimizer states of one rank.

    Args:
        elements: Parameters that the rank works with, by the axes over which they are replicated.
    """
    width = parameter_width(layout, stack)
    gradient = DTYPE_BYTES[stack.gradient_dtype] if not stack.parameters_dtype else width
    states = kept_state_bytes(stack)
    by_role = {Role.PARAMETER: 0.0, Role.GRADIENT: 0.0, Role.OPTIMIZER_STATE: 0.0}
    for axes, number in elements.items():
        ways = shards(axes, layout)
        by_role[Role.PARAMETER] += number * width / (ways if layout.cuts_parameters else 1)
        by_role[Role.GRADIENT] += number * gradient / (ways if layout.zero >= 2 else 1)
        by_role[Role.OPTIMIZER_STATE] += number * states / ways
    return {role: int(size) for role, size in by_role.items()}


def adapter_bytes(frozen_bytes: int, trained_bytes: int, layout: Layout, stack: Stack) -> dict[Role, int]:
    """Bytes of frozen weights and of what is trained beside them: value, gradient and moments of one rank.

    Moments are kept as the values are, or in fp32 where the stack keeps master weights.

    Args:
        frozen_bytes: Bytes of the rank's weights, 4-bit ones as they are packed.
        trained_bytes: Bytes of adapters and, where they are trained, of copies of embedding and head.
    """
    ways = shards("dp", layout)
    states = stack.moments * trained_bytes
    if stack.master_weights:
        states = trained_bytes // 2 * kept_state_bytes(stack)
    return {
        Role.PARAMETER: (frozen_bytes + trained_bytes) // (ways if layout.cuts_parameters else 1),
        Role.GRADIENT: trained_bytes // (ways if layout.zero >= 2 else 1),
        Role.OPTIMIZER_STATE: states // ways,
    }


def gathered_bytes(largest_units: Mapping[str, int], layout: Layout, stack: Stack) -> int:
    """Bytes of parameters gathered at once, and of gradients not yet reduced, where parameters are cut.

    Args:
        largest_units: Elements of the two units that are gathered at the same time.
    """
    if not layout.cuts_parameters:
        return 0
    return sum(largest_units.values()) * gathered_width(layout, stack)


def gathered_width(layout: Layout, stack: Stack) -> int:
    """Bytes of a cut parameter's element as it is gathered."""
    return DTYPE_BYTES.get(stack.gather_dtype, _PRODUCT_BYTES[layout.precision])


def gradient_width(layout: Layout, stack: Stack) -> int:
    """Bytes of an element of a gradient as products make it: no fewer than 16 bits, however parameters travel."""
    return max(2, gathered_width(layout, stack))


def split_offloaded(
    roles: dict[Role, int], updated: float, largest: Mapping[str, int], layout: Layout, stack: Stack
) -> tuple[dict[Role, int], dict[Role, int]]:
    """Split a rank's parameters, gradients and states into the bytes on the device and those behind it.

    Gradients come down a unit at a time where they are cut; the host has all that it updates by.

    Args:
        roles: Bytes without offloading.
        updated: Parameters that the rank updates.
        largest: Elements of the largest unit.
    """
    if not layout.updates_on_host:
        return roles, {}
    width = DTYPE_BYTES[stack.gradient_dtype]
    on_lower_tier = {Role.OPTIMIZER_STATE: roles[Role.OPTIMIZER_STATE], Role.GRADIENT: int(updated * width)}
    on_device = {**roles, Role.OPTIMIZER_STATE: 0}
    if layout.zero >= 2:
        on_device[Role.GRADIENT] = min(on_device[Role.GRADIENT], sum(largest.values()) * width)
    if "parameters" in layout.offload:
        on_lower_tier[Role.PARAMETER], on_device[Role.PARAMETER] = on_device[Role.PARAMETER], 0
    return on_device, on_lower_tier
