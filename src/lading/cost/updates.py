"""Seconds of a matrix optimizer's work on one matrix, on a device."""

from __future__ import annotations

from lading.cost.kernels import memory_s
from lading.cost.product import peak_flops, product_s
from lading.ir.machine import Device
from lading.ir.work import Product
from lading.rules import Work

#: Share of the device's fp32 peak that decompositions of symmetric matrices reach. Assumed: cuSOLVER's syevd of a few
#: thousand rows is bound by memory and by its many small kernels.
_EIGEN_SHARE = 0.05


def direction_s(work: Work, elements: int, device: Device, precision: str, launch_s: float) -> float:
    """Seconds of one direction (``lading.optim.rule.Rule.direction``), launches included.

    Args:
        work: Of the rule for the matrix's rows and columns.
        elements: Of the matrix.
        precision: Of the products: "bf16", "fp32".
        launch_s: Seconds the host takes for a kernel; the host runs ahead, so the longer counts.
    Raises:
        ConfigError: the device has no peak for the precision.
    """
    products = sum(times * product_s(Product(m, n, k), precision, device) for times, m, n, k in work.products)
    width = 4 if precision == "fp32" else 2
    passes = memory_s(work.passes * elements * width, "elementwise", device) if work.passes else 0.0
    eigen = sum(9 * times * n**3 for times, n in work.eigen)
    decomposed = eigen / (_EIGEN_SHARE * peak_flops(device, "fp32")) if eigen else 0.0
    kernels = sum(times for times, *_ in work.products) + work.passes
    return max(products + passes + decomposed, kernels * launch_s)
