"""Seconds of one rank's kernels on a processor, by the rates of its operations as ``lading.cost.compute`` has them.

A kernel of a cut segment has no strides, so of what runs against the order of memory only sums over leading dims are
told apart: gradients of biases and of norms' weights.
"""

from __future__ import annotations

from lading.cost.access import base_name
from lading.cost.attention import attention_s
from lading.cost.product import product_s
from lading.ir.graph import OpKind
from lading.ir.machine import Curve, Device
from lading.ir.work import Attention, Kernel, Product, Stage


def processor_s(kernel: Kernel, device: Device) -> float:
    """Seconds of a kernel alone, without its launch.

    Raises:
        ConfigError: the device has no peak for its dtype, or no rate of attention.
    """
    detail, own = kernel.detail, base_name(kernel.name)
    if isinstance(detail, Attention):
        return attention_s(detail, kernel.dtype, device)
    if isinstance(detail, Product):
        if detail.groups > 1 and own in device.rates:
            return detail.flops / device.rates[own].at(detail.flops / detail.groups)
        return product_s(detail, kernel.dtype, device)
    size = _moved_bytes(kernel)
    if not size:
        return 0.0
    rate = _rate(own, kernel, device)
    return size / (rate.at(size) if rate else device.memory_bandwidth_bytes_per_s)


def _moved_bytes(kernel: Kernel) -> int:
    """Bytes read and written; a fill reads nothing of what it is shaped like."""
    own = base_name(kernel.name)
    if own.startswith(("zeros_like", "ones_like", "full_like", "new_", "empty")):
        return kernel.bytes_written
    return kernel.bytes_read + kernel.bytes_written


def _rate(own: str, kernel: Kernel, device: Device) -> Curve | None:
    """The most specific measured rate of an operation; None if there is none."""
    kind = (kernel.kind or OpKind.COPY).value
    names = [own, f"{kind}_backward", kind] if "backward" in own else [own, kind]
    if kernel.kind is OpKind.REDUCTION and kernel.stage is Stage.BACKWARD_WEIGHT:
        names = [form for name in names for form in (f"{name}.strided", name)]
    return next((device.rates[name] for name in names if name in device.rates), None)
