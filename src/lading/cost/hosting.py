"""Seconds of offloading on a cluster: copies from a device to a lower tier and back, and updates on the host.

[Note: what lies on the host]
ZeRO-Offload keeps the optimizer's states in the host's memory: gradients go down, the host's processors update, the new
parameters come up. ZeRO-Infinity and FSDP's CPUOffloadPolicy keep the pieces of the parameters there too, and fetch
each before it is gathered. A machine's tiers and host processors are those of one rank of the job, as all of a node's
copy and update at once (``Machine.with_job``).

[Note: an update on the host]
Its bytes follow from what is kept: value and moments are read and written, a gradient is read, and if the value is a
master of 16-bit parameters it is read again and their copy is written. For AdamW in fp32 these are 28 bytes, for a
master with 16-bit parameters 34. The bandwidth of the host's memory bounds the update, and software reaches a share of
it that depends on the implementation (``Stack.host_optimizer``). Offload by DeepSpeed and Megatron-Core, with its
norms, scales and copies within the host, reaches 0.145: the median of six published runs, which lie between 0.05 and
0.22 (benchmarks/calibrate/offload.py, which asks ``update_s``). torch's fused kernel alone reaches 0.7, as the
published run with threads bound to their memory does; on two cores of an EPYC it moves 0.6 to 1.7 times what a copy
does. torch's operations one after another, as its AdamW runs on host tensors by default (torch/optim/optimizer.py,
``_default_to_fused_or_foreach``), take 4.7 times as long as fused: 5.9 and 6.8 times on one and two threads of a
Cascade Lake (20 million elements), 3.8 and 3.3 times of the EPYC, there 2.2 and 2.4 times in bfloat16 (40 million
elements; benchmarks/calibrate/host_updates.py). Over lists of tensors ("foreach") they take 1.5 to 1.9 times as long
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from lading.cost.collective import assumptions
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import Layout
from lading.ir.machine import UPDATE_NUMBERS, Device, HostDevice, Machine, Tier
from lading.ir.stack import Stack

#: Bytes of an element as the device's products take it.
_COMPUTE_BYTES = 2
#: Share of what the host's memory allows that an update reaches, by implementation ([Note: an update on the host]).
_REACH = {"cpu-adam": 0.145, "fused": 0.7, "loop": 0.7 / 4.7}
#: Bytes that the update of a machine's ``optimizer_elements_per_s`` moves for an element.
_PLAIN_BYTES = 4 * UPDATE_NUMBERS


def copy_s(size_bytes: Any, machine: Machine, tier: str, *, out: bool, both: bool = False) -> Any:
    """Seconds of copying from the device to a tier behind it, or back.

    Args:
        size_bytes: Bytes copied, a number or an array.
        tier: Name of the tier, as in ``Layout.offload_to``; copies to a tier on which the host's processors do not work
            go through the host's memory, if there is one.
        out: Whether the copy goes away from the device.
        both: Whether copies the other way run at the same time.
    Raises:
        ConfigError: the machine has no such tier.
    """
    hop_seconds = [_tier_s(size_bytes, hop, out, both) for hop in _way(machine, tier)]
    if isinstance(size_bytes, np.ndarray):
        return np.where(size_bytes > 0, np.maximum.reduce(hop_seconds), 0.0)
    return max(hop_seconds) if size_bytes else 0.0


def _way(machine: Machine, tier: str) -> Iterator[Tier]:
    lies_on = machine.offload_tier(tier)
    yield lies_on
    if not lies_on.host_computes and (host := machine.tier(machine.host_tier)) is not None:
        yield host


def _tier_s(size_bytes: Any, tier: Tier, out: bool, both: bool) -> Any:
    if out:
        rate = tier.mixed_write_bytes_per_s if both else tier.write_bytes_per_s
    else:
        rate = tier.mixed_read_bytes_per_s if both else tier.read_bytes_per_s
    return tier.latency_s + size_bytes / rate


def update_s(elements: float, state_bytes: float, machine: Machine, tier: str, stack: Stack) -> float:
    """Seconds in which the host updates ``elements`` elements of each device.

    Args:
        state_bytes: Bytes of an element's optimizer states; on another tier than the host's memory they are read and
            written beside updating.
    Raises:
        ConfigError: nothing is known of the host's processors, or the machine has no such tier.
    """
    host = _processors(machine)
    rate = host.optimizer_elements_per_s * host_share(stack)
    seconds = elements * (update_bytes(stack) / _PLAIN_BYTES) / rate
    lies_on, moved_bytes = machine.offload_tier(tier), elements * state_bytes
    if lies_on.name == machine.host_tier:
        return seconds
    return max(seconds, _tier_s(moved_bytes, lies_on, True, True), _tier_s(moved_bytes, lies_on, False, True))


def host_share(stack: Stack) -> float:
    """Share of the host's memory bandwidth that a software's update reaches ([Note: an update on the host])."""
    return stack.host_optimizer or _REACH[stack.host_update]


def update_bytes(stack: Stack) -> float:
    """Bytes that an update on the host reads and writes for an element ([Note: an update on the host])."""
    wide = stack.master_weights or stack.parameters_dtype == "float32"
    value = 4 if wide else _COMPUTE_BYTES
    moments = stack.moments * DTYPE_BYTES[stack.moments_dtype]
    copied = value + _COMPUTE_BYTES if stack.master_weights else 0
    passes = stack.update_passes * value
    return 2 * value + 2 * moments + DTYPE_BYTES[stack.gradient_dtype] + copied + passes


def _processors(machine: Machine) -> HostDevice:
    if machine.host_device is None:
        raise ConfigError(
            f"offload=optimizer updates on the host: expected a [host_device] of {machine.name}, it has none; add it "
            "to the machine file or leave offload away"
        )
    return machine.host_device


def host_step_s(elements: float, layout: Layout, stack: Stack, machine: Machine, *, state_bytes: float) -> float:
    """Seconds after backward until a device has its updated parameters ([Note: what lies on the host]).

    Gradients of cut buckets came down in backward (``zero`` 2 and 3); others come now. Updated parameters go up beside
    the update, unless they stay there.

    Args:
        elements: Elements that a rank updates.
    """
    seconds = update_s(elements, state_bytes, machine, layout.offload_to, stack)
    if "parameters" not in layout.offload:
        seconds = max(seconds, copy_s(elements * _COMPUTE_BYTES, machine, machine.host_tier, out=False))
    if layout.zero < 2:
        width = DTYPE_BYTES[stack.gradient_dtype]
        seconds += copy_s(elements * width, machine, machine.host_tier, out=True)
    return seconds


def assumed_of_offload(layout: Layout, stack: Stack, machine: Machine) -> tuple[str, ...]:
    """List what is assumed of moves to a lower tier."""
    if not layout.offload:
        return ()
    tier = machine.offload_tier(layout.offload_to).name
    sentences = [*assumptions(machine, f"tiers.{tier}", tier)]
    if layout.updates_on_host:
        sentences += assumptions(machine, "host_device", "host")
        sentences.append(
            f"host: its update ({stack.host_update}, {update_bytes(stack):g} bytes an element) reaches "
            f"{host_share(stack):.0%} of what its memory allows (5% to 22% in six published runs of DeepSpeed and "
            "Megatron-Core, 70% with threads bound and kernels fused)"
        )
    return tuple(sentences)


def move_seconds(size_bytes: int, tier: Tier, direction: Literal["read", "write"]) -> float:
    """Seconds to move ``size_bytes`` from ("read") or to ("write") a tier when the other direction is idle.

    Returns:
        Latency plus bytes over bandwidth.

    Raises:
        ConfigError: the size is negative, or the direction is unknown.
    Ignores: the other direction; while both run each gets the tier's ``mixed_*`` rate, which the simulator applies.
    """
    if size_bytes < 0:
        raise ConfigError(f"expected size_bytes >= 0, got {size_bytes}")
    if direction not in ("read", "write"):
        raise ConfigError(f"expected direction 'read' or 'write', got {direction!r}")
    rate = tier.read_bytes_per_s if direction == "read" else tier.write_bytes_per_s
    return tier.latency_s + size_bytes / rate


def caller_seconds(size_bytes: int, device: Device) -> float:
    """Seconds to copy a batch from the caller of the step, or a loss to it, on the compute stream."""
    return device.op_overhead_s + size_bytes / device.memory_bandwidth_bytes_per_s
