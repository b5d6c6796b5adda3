"""Seconds of a matrix optimizer's work on one matrix, on a device."""

from __future__ import annotations

from lading.cost.kernels import memory_s
from lading.cost.product import peak_flops, product_s
from lading.ir.machine import Device
from lading.ir.work import Product
from lading.rules import MatrixRule, Muon, Work

#: Share of the device's fp32 peak that decompositions of symmetric matrices reach. Assumed: cuSOLVER's syevd of a few
#: thousand rows is bound by memory and by its many small kernels.
_EIGEN_SHARE = 0.05
#: On a CPU the share rises with the rows n as n / (n + these). Measured: 0.16 of 64 rows, 0.35 of 128, 0.52 of 256,
#: 0.76 of 512, 0.86 of 1024 (benchmarks/calibrate/eigen.py, one core with AVX-512, torch 2.13).
_EIGEN_ROWS_CPU = 250


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
    decomposed = eigen_s(work, device)
    kernels = sum(times for times, *_ in work.products) + work.passes
    return max(products + passes + decomposed, kernels * launch_s)


def eigen_share(rows: int, device: Device) -> float:
    """Share of the fp32 peak that the decomposition of a symmetric matrix reaches."""
    return rows / (rows + _EIGEN_ROWS_CPU) if device.kind == "cpu" else _EIGEN_SHARE


def eigen_s(work: Work, device: Device) -> float:
    """Seconds of the decompositions of one update, the mean over updates.

    Raises:
        ConfigError: the device has no fp32 peak.
    """
    if not work.eigen:
        return 0.0
    flops = sum(9 * times * n**3 / eigen_share(n, device) for times, n in work.eigen)
    return flops / peak_flops(device, "fp32")


def elementwise_bytes(rule: MatrixRule) -> float:
    """Bytes read and written for each element beside products, in float32.

    Counted in ``lading.runtime.updates``: Muon's momentum (12), look-ahead (12), rounding (6), norm and division (6),
    decay (8) and step (18, with a copy of the direction); the others' passes, decay and step.
    """
    return 62.0 if isinstance(rule, Muon) else 4 * rule.work(1, 1).passes + 20.0
