"""Seconds of one operation alone on a device by the rates that were measured there, without its launch.

    product      flops / (peak * efficiency(flops of one matrix) * prod of d/(d + skinny_dim) over m, n, k); of many
                 matrices on a GPU no less than these take to come and go; "product.float32" is a GPU's rate in the
                 place of peak * efficiency for float32, and by a data sheet skinny_dim is a share of itself there
    attention    flops done / rate(flops done for one head)
    the rest     bytes / rate(bytes)

The operation of a step is asked for as the kernel of a rank is, so that a device has one price for both. A rate is
looked up by the operation's own name ("gelu_backward", "bmm"), then by its cost class ("transcendental",
"norm_backward"), each first with its form appended where it has one ("gelu.tanh", "attention.whole"), and with
".strided" when it walks against the order of memory; at last it is the memory bandwidth. "runs" bounds operations on
many small pieces of memory. Own rates of products are FLOP/s against the FLOP of one matrix.
Operations on bfloat16 or float16 have rates of their own: each name is looked up with ".bfloat16" appended first, and
that of products with their layout before it ("matmul.NT.bfloat16"). Without one, products go by float32's rates times
the ratio of the peaks, the rest by float32's rate for their bytes.
A product of float32 whose rows of results begin at no whole vector takes as much longer as "matmul.odd" is below
"matmul.even", FLOP/s against columns: 50,257 columns came at 104 GFLOP/s where 50,304 came at 141 (an AMD EPYC).
Rates hold for one operation at a time with whatever of its operands is in cache as in the probe.
"""

from __future__ import annotations

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, OpKind
from lading.ir.machine import EVEN_COLUMNS, ODD_COLUMNS, VECTOR, WIDE_PRODUCTS, Curve, Device
from lading.ir.opkinds import base_name
from lading.ir.work import Attention, Kernel, Product, Stage

#: Suffix of a rate that holds when the innermost dim of an operand is not its contiguous one.
STRIDED = ".strided"
#: Pieces of memory (two dims that are regular in every operand) that an operation can go through a second.
RUNS = "runs"
#: Dtypes with rates of their own.
LOW = frozenset({"bfloat16", "float16"})
#: Suffix of a class's rate that holds for its operations in backward.
BACKWARD = "_backward"
_FILLS = ("zeros_like", "ones_like", "full_like", "new_", "empty")


def curve_s(kernel: Kernel, device: Device, narrow: float = 1.0) -> float:
    """Seconds of an operation alone, without its launch.

    Args:
        narrow: Factor by which a product computes longer because of where its rows begin.

    A rank's kernel has no strides: of what runs against the order of memory only sums over leading dims are told apart,
    gradients of biases and of norms' weights.

    Raises:
        ConfigError: a product's dtype has no peak on this device.
    Ignores: contention with moves, clock and power limits.
    """
    name, kind = base_name(kernel.name), kernel.kind or OpKind.COPY
    if isinstance(kernel.detail, Product):
        known_rate = measured(name, kind.value, low_of(kernel), device, kernel.form)
        label = f"{kernel.name} in {kernel.module or '(loss)'}"
        return product_curve_s(kernel.detail, kernel.flops, known_rate, kernel.dtype, device, label, narrow)
    if isinstance(kernel.detail, Attention):
        return _attention_s(kernel, kernel.detail, device)
    size = kernel.bytes_written + (0 if name.startswith(_FILLS) else kernel.bytes_read)
    rate = rate_of(kernel, device)
    bandwidth = rate.at(size) if rate and size else device.memory_bandwidth_bytes_per_s
    return max(size / bandwidth, _runs_s(kernel.runs, device))


def low_of(kernel: Kernel) -> str:
    """The 16-bit float that a kernel works on, "" for none."""
    return kernel.dtype if kernel.dtype in LOW else ""


def _runs_s(runs: int, device: Device) -> float:
    """Minimum time of going through many small pieces of memory, at ``rates["runs"]`` pieces a second."""
    return runs / device.rates[RUNS].at(runs) if runs > 1 and RUNS in device.rates else 0.0


def product_curve_s(
    product: Product,
    flops: float,
    measured_rate: tuple[Curve, bool] | None,
    dtype: str,
    device: Device,
    where: str,
    narrow: float = 1.0,
) -> float:
    """Seconds of a product.

    Args:
        flops: FLOP of all its groups together.
        measured_rate: Its measured rate, and whether that was measured in ``dtype``.
        where: Name of the product, for messages.
        narrow: As of ``curve_s``; a measured rate has it already.
    Raises:
        ConfigError: the dtype has no peak on this device.
    """
    flops_per_group = max(1.0, flops / product.groups)
    if measured_rate is not None and (measured_rate[1] or dtype == "float32"):
        return flops / measured_rate[0].at(flops_per_group)
    if dtype not in device.peak_flops_per_s:
        precisions = ", ".join(sorted(device.peak_flops_per_s))
        scaled = " to bfloat16, which needs no scale of the loss" if dtype == "float16" else ""
        raise ConfigError(
            f"{where} is a {dtype} product and {device.name} has a peak only for {precisions}; "
            f"add device.peak_flops_per_s.{dtype} to the machine file or change the model's dtype{scaled}"
        )
    if measured_rate is not None:
        return flops / (measured_rate[0].at(flops_per_group) * _peak_ratio(device, dtype))
    # Multiprocessors work on all groups of a batched product at once, so that these fill a GPU together.
    filling = flops if device.kind == "cuda" else flops_per_group
    rate = _whole_rate(filling, dtype, device)
    skinny = device.skinny_dim * (_wide_skinny(device) if dtype == "float32" else 1.0)
    for dim in (product.m, product.k, product.n):
        rate *= dim / (dim + skinny) if dim else 1.0
    rate *= _columns_share(product.n, device) if dtype == "float32" else 1.0
    seconds = narrow * flops / rate
    heads = device.kind == "cuda" and product.groups > 1
    return max(seconds, _operands_s(product, dtype, device)) if heads else seconds


def _wide_skinny(device: Device) -> float:
    """Share of ``skinny_dim`` that applies to products of fp32 on GPUs known by a data sheet alone.

    On catalog machines ``skinny_dim`` is proportional to the FLOP per clock of the tensor cores, as operands arrive at
    the same bytes per clock. Units of fp32 do fewer FLOP, on operands twice as wide: a quarter of it on a V100.
    """
    peaks = device.peak_flops_per_s
    low = peaks.get("bfloat16") or peaks.get("float16")
    if device.kind != "cuda" or device.num_threads or not low:
        return 1.0
    return min(1.0, 2 * peaks["float32"] / low)


def _whole_rate(flops: float, dtype: str, device: Device) -> float:
    """FLOP/s of a product whose dims are all large, by its FLOP."""
    if dtype == "float32" and WIDE_PRODUCTS in device.rates:
        return device.rates[WIDE_PRODUCTS].at(flops)
    share = device.product_efficiency.at(flops) if device.product_efficiency else 1.0
    return device.peak_flops_per_s[dtype] * share


def _operands_s(product: Product, dtype: str, device: Device) -> float:
    """Minimum time of reading operands and writing results: products of single heads have few FLOP for their bytes."""
    m, n, k = product.m, product.n, product.k
    size = DTYPE_BYTES[dtype] * product.groups * (m * k + k * n + m * n)
    rate = device.rates.get(OpKind.ELEMENTWISE.value)
    return size / (rate.at(size) if rate else device.memory_bandwidth_bytes_per_s)


def _columns_share(columns: int, device: Device) -> float:
    """Share of its rate that a product of float32 keeps because of where its rows of results begin."""
    even, odd = device.rates.get(EVEN_COLUMNS), device.rates.get(ODD_COLUMNS)
    if even is None or odd is None or columns % VECTOR == 0:
        return 1.0
    return min(1.0, odd.at(columns) / even.at(columns))


def _attention_s(kernel: Kernel, attention: Attention, device: Device) -> float:
    flops, low = attention.flops, low_of(kernel)
    if rate := rate_of(kernel, device):
        guessed = low and device.kind == "cpu" and rate_of(kernel, device, low) is None
        flops_per_head = flops / max(1, attention.batch * attention.heads)
        return flops / (rate.at(flops_per_head) * (_peak_ratio(device, low) if guessed else 1.0))
    peak = device.peak_flops_per_s.get(kernel.dtype)
    if peak is None:
        return (kernel.bytes_read + kernel.bytes_written) / device.memory_bandwidth_bytes_per_s
    share = device.product_efficiency.at(flops) if device.product_efficiency else 1.0
    return flops / (peak * share)


def _peak_ratio(device: Device, dtype: str) -> float:
    """Factor by which products of a dtype are faster than in float32; 1 where one of the peaks is not known."""
    peaks = device.peak_flops_per_s
    return peaks[dtype] / peaks["float32"] if dtype in peaks and "float32" in peaks else 1.0


def measured(name: str, kind: str, low: str, device: Device, form: str = "") -> tuple[Curve, bool] | None:
    """Measured rate of a product, and whether it was measured in the product's own dtype.

    Args:
        name: Base name of the product.
        kind: Its cost class.
        low: Its 16-bit dtype, "" for none.
        form: Layout of its operands, such as "NT"; "" where that is not known.
    """
    for key in (f"{name}.{low}", f"{kind}.{form}.{low}", f"{kind}.{low}") if low else ():
        if key in device.rates:
            return device.rates[key], True
    return (device.rates[name], not low) if name in device.rates else None


def rate_of(kernel: Kernel, device: Device, low: str | None = None) -> Curve | None:
    """Most specific measured rate of an operation, None if there is none; with ``low``, of that dtype only."""
    name, kind = base_name(kernel.name), (kernel.kind or OpKind.COPY).value
    names = [name, kind + BACKWARD, kind] if "backward" in name else [name, kind]
    if kernel.form:
        names = [key for plain in names for key in (f"{plain}.{kernel.form}", plain)]
    if kernel.strided or (kernel.kind is OpKind.REDUCTION and kernel.stage is Stage.BACKWARD_WEIGHT):
        names = [form for key in names for form in (key + STRIDED, key)]
    typed = low or low_of(kernel)
    forms = [f"{key}.{typed}" for key in names] if typed else []
    if low is None:
        forms += names
    return next((device.rates[key] for key in forms if key in device.rates), None)
