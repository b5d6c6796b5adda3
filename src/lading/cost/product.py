"""Seconds of matrix products on a GPU by their shape.

[Note: product]
The output is cut in tiles of ``bm`` by ``bn``, each made by one multiprocessor in a loop over k; a product takes as
many waves as it has tiles for every multiprocessor. With T tiles, S parts of k, P multiprocessors and w = T S / P,

    waves   = (1 - wave_share) max(w, 1) + wave_share ceil(w)
    compute = waves * 2 bm bn (k / S + prologue_k) * (1 + operand_columns (1/bm + 1/bn)) / (peak * reach / P)
    memory  = bytes of operands and output / (memory_share * bandwidth)
    seconds = (compute^4 + memory^4)^(1/4) + fixed_s

the least over the library's tiles and S in 1, 2, 4, 8 (with S > 1 partial sums in fp32 are written and read again). A
part ``epilogue_share`` of the output's bytes is not under computing. Adding to what the output holds reads it once
more.

Where rows in memory start at multiples of few bytes, as those of 50,257 columns do, loads are narrow: computing takes
``unaligned`` times as long.

[Note: product of fewer rows]
As waves are no fewer than T S / P, and T no fewer than the output over a tile, computing takes at least the FLOP of
2 m n (k + prologue_k) with the least ``operand_columns`` of all tiles. That falls no faster than m or k do, nor do the
bytes, nor the smooth maximum of both. So a product of a share r of the rows, or of the sum, takes at least r times what
``floor_s`` says of the whole, and ``fixed_s``. Of a grouped product rows and sums are rounded up by less than one; more
groups of fewer rows are as many FLOP and more bytes.

A board at its power limit runs slower: at most ``flops_per_joule * power`` FLOP/s. A single product measured on a cool
device may be done before that (it takes about 5 ms on a B200: flashinfer-ai/flashinfer#2899); in a running step it is
so all the time, which is what is assumed unless told otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

from lading.catalog.kernel_rates import KernelRates, ProductRates, kernel_rates
from lading.cost.curves import LOW, measured, product_curve_s
from lading.errors import ConfigError
from lading.ir.graph import OpKind
from lading.ir.machine import Device, Gpu
from lading.ir.work import Product

#: Bytes of an operand's element by precision: block scales (one byte for 32 or 16 elements) included.
OPERAND_BYTES = {
    "float32": 4.0, "tf32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0,
    "fp8": 1.0, "float8_e4m3fn": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
#: Key of ``peak_flops_per_s`` by precision.
_PEAK = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16",
    "fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn_x2",
}  # fmt: skip
#: Operands that are made from 16-bit tensors by a kernel of their own.
LOW_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
_SPLITS = (1, 2, 4, 8)
#: Exponent of the smooth maximum of computing and moving bytes.
_SMOOTH = 4.0
#: Output elements of 16 bits, and of sums in fp32.
_OUT_BYTES, _SUM_BYTES = 2.0, 4.0


def peak_flops(device: Device, precision: str) -> float:
    """Dense peak of a device for operands of a precision or dtype, FLOP/s.

    Raises:
        ConfigError: the device has none.
    """
    key = _PEAK.get(precision, precision)
    if precision == "tf32":
        return _tf32_flops(device)
    if key not in device.peak_flops_per_s:
        precisions = ", ".join(sorted(device.peak_flops_per_s))
        raise ConfigError(
            f"a product in {precision} needs device.peak_flops_per_s.{key}, {device.name} has only {precisions}; "
            "add it to the machine file or choose another precision"
        )
    return device.peak_flops_per_s[key]


def _tf32_flops(device: Device) -> float:
    """Peak of fp32 operands on tensor cores in TF32: half that of bf16, where there are such (from Ampere on)."""
    return max(device.peak_flops_per_s["float32"], device.peak_flops_per_s.get("bfloat16", 0.0) / 2)


def product_s(
    product: Product,
    precision: str,
    device: Device,
    *,
    out_bytes: float = 0.0,
    sustained: float = 1.0,
    of_weight: bool = False,
) -> float:
    """Seconds of a product, or of ``groups`` of them in one kernel, alone on the device, launch not included.

    Args:
        precision: Precision of the operands: a dtype, or "fp8", "mxfp8", "nvfp4" (casts: ``lading.cost.casts``).
        out_bytes: Bytes of an element of the output; 0: four where it accumulates, else two (four from fp32 operands).
        sustained: How much of the slowdown at the power limit applies: 1 for one after another, 0 on a cool device.
        of_weight: It makes a weight's gradient, whose operands lie in rows of m and n; else in rows of n and k.
    Raises:
        ConfigError: the device has no peak for the precision, or nothing is known of its kernels.
    Source: constants fitted in benchmarks/calibrate/products.py; [Note: product].
    """
    gpu = device.gpu
    if gpu is None:
        dtype = _PEAK.get(precision, precision)
        rate = measured("mm", OpKind.MATMUL.value, dtype if dtype in LOW else "", device)
        return product_curve_s(product, product.flops, rate, dtype, device, "a matrix product")
    rates = kernel_rates(gpu.architecture)
    peak, operand, element, (limit, narrow) = _terms(product, precision, device, rates, out_bytes, of_weight)
    slow = (1 + sustained * (limit - 1)) * narrow
    bandwidth = device.memory_bandwidth_bytes_per_s
    return _cached_product_s(
        product, (operand, element), peak * gpu.speed / slow, bandwidth, gpu.num_sms, gpu.architecture
    )


def floor_s(
    product: Product, precision: str, device: Device, *, out_bytes: float = 0.0, of_weight: bool = False
) -> tuple[float, float]:
    """Lower bound on the seconds of a product: a part in proportion to its rows or sum, and a fixed part.

    Arguments and errors as ``product_s``; [Note: product of fewer rows].
    """
    gpu = device.gpu
    if gpu is None:
        raise ConfigError(f"expected a device whose kernels were measured, got {device.name}")
    rates = kernel_rates(gpu.architecture)
    peak, operand, element, (limit, narrow) = _terms(product, precision, device, rates, out_bytes, of_weight)
    product_rates, grouped = _rates_of(gpu.architecture, operand), product.groups > 1
    bandwidth = device.memory_bandwidth_bytes_per_s * product_rates.memory_share
    outputs = float(product.groups * product.m * product.n)
    written = outputs * element * (2.0 if product.accumulates else 1.0)
    reads = operand * product.groups * product.k * (product.m + product.n)
    loads = min(1 + product_rates.operand_columns * (1 / rows + 1 / columns) for rows, columns in product_rates.tiles)
    rate = peak * gpu.speed / (limit * narrow) * product_rates.reach * (product_rates.group_reach if grouped else 1.0)
    compute = (
        2.0 * outputs * (product.k + product_rates.prologue_k) * loads / rate
        + product_rates.epilogue_share * written / bandwidth
    )
    memory = (reads + written) / bandwidth
    rounded = product.k if of_weight else product.m
    rows_left_share = (rounded - 1) / rounded if grouped else 1.0
    return rows_left_share * (compute**_SMOOTH + memory**_SMOOTH) ** (1 / _SMOOTH), product_rates.fixed_s


def _terms(
    product: Product, precision: str, device: Device, rates: KernelRates, out_bytes: float, of_weight: bool
) -> tuple[float, float, float, tuple[float, float]]:
    """Peak, bytes of an element of operands and of the output, slowdown at the power limit, and by addresses."""
    peak, gpu = peak_flops(device, precision), device.gpu
    assert gpu is not None
    operand = OPERAND_BYTES.get(precision, _OUT_BYTES)
    element = out_bytes or (_SUM_BYTES if product.accumulates or operand >= _SUM_BYTES else _OUT_BYTES)
    narrow = unaligned(product, operand, rates.product, of_weight=of_weight)
    return peak, operand, element, (power_slowdown(gpu, rates, precision, peak), narrow)


@lru_cache(maxsize=1 << 14)
def _cached_product_s(
    product: Product,
    element_bytes: tuple[float, float],
    peak: float,
    bandwidth: float,
    num_sms: int,
    architecture: str,
) -> float:
    """Seconds of a product; cached, as layers and compared layouts have equal products."""
    return seconds(product, element_bytes, peak, bandwidth, num_sms, _rates_of(architecture, element_bytes[0]))


@lru_cache(maxsize=64)
def _rates_of(architecture: str, operand_bytes: float) -> ProductRates:
    """Rates of an architecture's products; those of fp32, without tensor cores, reach another share of their peak.

    Assumption: ``float32_reach`` is that of the largest tile, and smaller tiles lose as much as they do in 16 bits.
    """
    rates = kernel_rates(architecture).product
    if operand_bytes < _SUM_BYTES:
        return rates
    min_loads = min(1 + rates.operand_columns * (1 / rows + 1 / columns) for rows, columns in rates.tiles)
    return replace(rates, reach=rates.float32_reach * min_loads)


def unaligned(product: Product, operand_bytes: float, rates: ProductRates, *, of_weight: bool = False) -> float:
    """Factor by which computing takes longer because of the addresses at which rows of 16-bit numbers start, >= 1."""
    if operand_bytes != _OUT_BYTES:
        return 1.0  # not measured: fp32 without tensor cores loads single numbers, 8 bits refuse such rows
    rows = (product.m, product.n) if of_weight else (product.n, product.k)
    return max(rates.unaligned_at(int(row * operand_bytes)) for row in rows)


def groups_launch_s(product: Product, device: Device) -> float:
    """Seconds the host needs to launch a grouped product group by group, as Transformer Engine does; 0 for one product.

    Raises:
        ConfigError: nothing is known of the device's kernels.
    """
    if product.groups == 1 or device.gpu is None:
        return 0.0
    return product.groups * kernel_rates(device.gpu.architecture).product.group_s


def power_slowdown(gpu: Gpu, rates: KernelRates, precision: str, peak: float) -> float:
    """Factor by which products take longer at the power limit than at full clock, >= 1."""
    joule = rates.product.flops_per_joule.get(_operand_class(precision))
    if joule is None:
        return 1.0
    return max(1.0, peak * gpu.speed * rates.product.reach / (joule * gpu.power_w))


def _operand_class(precision: str) -> str:
    key = _PEAK.get(precision, precision)
    return "bfloat16" if key == "float16" else key


def seconds(
    product: Product,
    element_bytes: tuple[float, float],
    peak: float,
    memory_bandwidth: float,
    num_sms: int,
    rates: ProductRates,
) -> float:
    """Seconds of a product under given rates: ``element_bytes`` of operands and output, ``peak`` in FLOP/s."""
    operand, element = element_bytes
    grouped = product.groups > 1
    reach = rates.reach * (rates.group_reach if grouped else 1.0)
    bandwidth = memory_bandwidth * rates.memory_share
    outputs = float(product.groups * product.m * product.n)
    written = outputs * element * (2.0 if product.accumulates else 1.0)
    reads = operand * product.groups * product.k * (product.m + product.n)
    compute = min(
        _tiled(product, tile, splits, rates, num_sms) / (peak * reach)
        + ((splits + 1) * _SUM_BYTES * outputs / bandwidth if splits > 1 else 0.0)
        for tile in rates.tiles
        for splits in _SPLITS
        if splits == 1 or (product.k >= 2048 * splits and not grouped)
    )
    compute += rates.epilogue_share * written / bandwidth
    memory = (reads + written) / bandwidth
    return (compute**_SMOOTH + memory**_SMOOTH) ** (1 / _SMOOTH) + rates.fixed_s


def _tiled(product: Product, tile: tuple[int, int], splits: int, rates: ProductRates, num_sms: int) -> float:
    """FLOP that the device could do in the time that the tiles take."""
    rows, columns = tile
    tiles = product.groups * ceil(product.m / rows) * ceil(product.n / columns) * splits
    waves = tiles / num_sms
    waves = (1 - rates.wave_share) * max(waves, 1.0) + rates.wave_share * ceil(waves)
    loads = 1 + rates.operand_columns * (1 / rows + 1 / columns)
    return waves * num_sms * 2.0 * rows * columns * (product.k / splits + rates.prologue_k) * loads
