"""Seconds of a matrix optimizer's work on one matrix, on a device."""

from __future__ import annotations

from lading.cost.collective import collective_s
from lading.cost.kernels import memory_s
from lading.cost.patterns import GANGS
from lading.cost.product import peak_flops, product_s
from lading.cost.topology import group_of_ranks
from lading.ir.graph import DTYPE_BYTES
from lading.ir.machine import Device, Machine
from lading.ir.work import Product
from lading.optim.rule import MatrixRule, UpdateWork

#: Share of the device's fp32 peak that decompositions of symmetric matrices reach. Assumed: cuSOLVER's syevd of a few
#: thousand rows is bound by memory and by its many small kernels.
_EIGEN_SHARE = 0.05
#: On a CPU the share rises with the rows n as n / (n + these). Measured: 0.16 of 64 rows, 0.35 of 128, 0.52 of 256,
#: 0.76 of 512, 0.86 of 1024 (benchmarks/calibrate/eigen.py, one core with AVX-512, torch 2.13).
_EIGEN_ROWS_CPU = 250


def direction_s(work: UpdateWork, elements: int, device: Device, precision: str, launch_s: float) -> float:
    """Seconds of one direction (``lading.optim.rule.Rule.direction``), launches included.

    Args:
        work: Work of the rule for the matrix's rows and columns.
        elements: Elements of the matrix.
        precision: Precision of the products: "bf16", "fp32".
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


def precision_of(rule: MatrixRule) -> str:
    """Precision of a rule's products: "bf16" or "fp32"."""
    return "bf16" if rule.product_dtype == "bfloat16" else "fp32"


def shared_s(rule: MatrixRule, rows: int, columns: int, machine: Machine, launch_s: float) -> tuple[float, ...]:
    """Seconds of one direction on 2, 4, 8 and 16 neighbouring ranks that share it; () if it cannot be shared.

    The first rank sends the matrix to the others. Each rank computes some rows of every product and receives the others
    (``lading.runtime.gangs``). Rows are shared in blocks of at least 64.
    """
    short, long = sorted((rows, columns))
    precision, width = precision_of(rule), DTYPE_BYTES[rule.product_dtype]
    seconds_by_gang: list[float] = []
    for ranks in GANGS:
        shared = rule.shared_work(-(-short // ranks), short, long)
        if shared is None or short < 64 * ranks or (machine.links and ranks > machine.links[0].ranks):
            break
        rounds, step = shared
        share_s = direction_s(step, short * long // ranks, machine.device, precision, launch_s)
        group = group_of_ranks(ranks, machine)
        sizes = (short * short * width, short * long * width)
        gather_s = sum(collective_s("all_gather", size, group, machine) for size in sizes)
        broadcast_s = collective_s("broadcast", sizes[1], group, machine)
        seconds_by_gang.append(rounds * (share_s + gather_s) + broadcast_s)
    return tuple(seconds_by_gang)


def eigen_share(rows: int, device: Device) -> float:
    """Share of the fp32 peak that the decomposition of a symmetric matrix reaches."""
    return rows / (rows + _EIGEN_ROWS_CPU) if device.kind == "cpu" else _EIGEN_SHARE


def eigen_s(work: UpdateWork, device: Device) -> float:
    """Seconds of the decompositions of one update, the mean over updates.

    Raises:
        ConfigError: the device has no fp32 peak.
    """
    if not work.eigen:
        return 0.0
    flops = sum(9 * times * n**3 / eigen_share(n, device) for times, n in work.eigen)
    return flops / peak_flops(device, "fp32")
