"""Seconds of one rank's kernels on a device under a software stack.

    kernels = launched(segment, stack)                                lading.cost.fusion
    seconds = [kernel_s(kernel, device, stack, layout.precision) for kernel in kernels]

Products and attention are priced by shape (``lading.cost.product``, ``attention_s``), other kernels by bytes. Launches
are not counted here: ``lading.sim.parts`` compares the kernels of a stretch with the time that the host takes to issue
them.

[Note: memory]
Moving bytes takes ``class * (fixed_s + bytes / (share * bandwidth))``, where the factor of the class says how much
longer such a kernel takes than a copy. Part of the last cache still holds what the kernel before wrote. Bytes that are
there move ``cache_speed`` times as fast; their share is 1 / (1 + (bytes / size of that part)^2).

[Note: attention]
A block of ``block`` queries of one head goes over its keys. Starting and ending it costs as much as ``prologue_keys``
further keys. With P multiprocessors at ``reach * peak / P`` FLOP/s each,

    block_s = block (keys + prologue_keys) FLOP of a pair / (reach * peak / P)
    busy_s  = sum of all blocks / P + tail * the longest block
    seconds = smooth max(busy_s, the longest block, bytes / bandwidth) + fixed_s

``reach`` depends on the head size, as exponentials take the same time for every pair. A causal mask leaves half of
the pairs and the diagonal blocks whole; its longest block still has all keys. Backward goes over blocks of keys and
computes the scores again: five products.

[Note: attention of PyTorch] Where a mask is a tensor, ``scaled_dot_product_attention`` takes no FlashAttention but the
memory-efficient kernel of xFormers, which leaves no block out (pytorch pull 104310; huggingface/transformers pull
30070). Without a mask that makes 101 to 108 TFLOP/s forward and 88 backward on an A100 for heads of 128 columns
(facebookresearch/xformers issue 712, NVIDIA/cutlass pull 992: 16 heads, 8192 tokens), 1.15 times the first
FlashAttention. Assumption: reading the mask takes that again. FlexAttention reaches 90% of FlashAttention-2 forward and
85% backward on an A100, 1.25 and 1.03 times its rates on an H100 (pytorch.org/blog/flexattention); Blackwell is taken
for the former. In fp32 it is the memory-efficient kernel in any case, on tensor cores from compute capability 8.0 on,
by three products in TF32 for each (gemm_kernel_utils.h, DefaultGemmType: OpMultiplyAddFastF32), which go half as fast
as in 16 bits: a sixth of the 16-bit rate. Where its own rates in fp32 were measured ("efficient-fp32" of an
architecture, shares of the 16-bit peak) these count: backward on an H100 it reaches the share that it has on an A100,
twice the first FlashAttention's there.

FlashAttention-4 goes at the rates of cuDNN from 9.2x on: it is up to 1.3 times as fast on a B200 as cuDNN 9.13, which
the rates of "cudnn" are nearest to, and makes up to 1613 TFLOP/s (arXiv 2603.05451); on Hopper it is FlashAttention-3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import log2

from lading.catalog.kernel_rates import KernelRates, PassRates, kernel_rates
from lading.cost.casts import cast_bytes, product_casts
from lading.cost.curves import BACKWARD, curve_s, low_of
from lading.cost.fusion import DRAW, unfused
from lading.cost.libraries import LOOKED, QUANTIZED, SCAN, STRIDED
from lading.cost.product import (
    LOW_PRECISIONS,
    OPERAND_BYTES,
    floor_s,
    groups_launch_s,
    peak_flops,
    power_slowdown,
    product_s,
    unaligned,
)
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, OpKind
from lading.ir.machine import Device
from lading.ir.stack import FOREACH_PASSES, Stack
from lading.ir.work import Attention, Collective, Kernel, Product, Stage

#: A kernel that an architecture has not got, or that was not measured there, and what stands for it.
_SERVED = {
    "flash1": {"blackwell": "cudnn"},
    "triton": {"blackwell": "cudnn"},
    "flash2": {"blackwell": "cudnn"},
    "flash2-package": {"ampere": "flash2", "hopper": "flash2"},
    "flash3": {"ampere": "flash2", "blackwell": "cudnn"},
    "flash4": {"ampere": "flash2", "hopper": "flash3", "blackwell": "cudnn9"},
    "cudnn": {"ampere": "flash2"},
    "cudnn9": {"ampere": "flash2", "hopper": "cudnn"},
    "cudnn9-mxfp8": {"ampere": "flash2", "hopper": "cudnn"},
}
#: Kernels that go at the rates of another, and how much longer forward and backward take on an architecture
#: ([Note: attention of PyTorch]).
_LIKE = {"masked": "flash1", "flex": "flash2"}
_LONGER = {"flex": {"hopper": (1 / 1.25, 1 / 1.03), "": (1 / 0.9, 1 / 0.85)}, "": {"": (1.0, 1.0)}}
_SMOOTH = 4.0
#: Columns of the memory-efficient kernel's widest tile of a head.
_HEAD_TILE = 128
#: Times that attention in fp32 takes beside the same kernel in 16 bits ([Note: attention of PyTorch]).
_WIDE_S = 6.0
#: Name of an architecture's measured rates of attention in fp32, as shares of the 16-bit peak.
_WIDE = "efficient-fp32"
#: Times that PyTorch's memory-efficient attention takes beside FlashAttention-2, which rates of other devices are of:
#: as at heads of 128 columns on an A100 (catalog/kernels/ampere.toml, forward).
_EFFICIENT_S = 0.6575 / 0.2954
#: The same backward for heads of 97 to 128 columns on GPUs with 99 KiB of shared memory a block: FlashAttention-2
#: makes 53.5 TFLOP/s and it 12.3, of 16 heads and 2,048 tokens (Dao-AILab/flash-attention issue 416); the mask again.
_SMALL_BACKWARD_S = 1.15 * 53.46 / 12.33
#: Columns of the widest head whose gradients' sums stay in registers there (``_in_small_tiles``).
_SMALL_COLUMNS = 96
#: Boards whose blocks have those 99 KiB: compute capability 8.6, 8.9 and 12.0, by NVIDIA's names for them.
_SMALL_BLOCKS = re.compile(
    r"NVIDIA (?:A(?:2|10G?|16|40)|L(?:4|40S?)|GeForce RTX [345]0\d\d|RTX (?:A\d+|PRO \d+|\d+ Ada))\b"
)
#: ``Device.skinny_dim`` of an A100 (catalog/bases/gpu.toml).
_SKINNY_A100 = 128.0
#: Operation of that kernel, and the times that it takes in fp32 beside FlashAttention-2 in 16 bits: median of the two
#: largest shapes, forward and backward, on an H100 (benchmarks/gpu/results, one_device, alone: 5.4, 6.4, 6.4 and 7.2).
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_WIDE_FLASH_S = 6.4
#: Name of the factor of products in fewer than 16 bits, beside the same in their own format where no GPU runs them.
LOW_KEY = "low-precision products"


def attention_s(
    attention: Attention, dtype: str, device: Device, kernel: str = "flash2", *, sustained: float = 1.0
) -> float:
    """Seconds of one pass of fused attention alone on the device, launch not included.

    Args:
        dtype: Dtype of queries, keys and values; products run at its peak.
        kernel: "flash1", "triton", "flash2", "flash3", "cudnn", ...; an architecture without it takes its own kernel.
        sustained: As of ``product_s``.
    Raises:
        ConfigError: nothing is known of the kernel, or of the device's kernels.
    Source: constants fitted in benchmarks/calibrate/attention.py; [Note: attention].
    """
    gpu = device.gpu
    if gpu is None:
        raise ConfigError(f"expected a GPU whose kernels were measured, got {device.name}: see cost.kernels.kernel_s")
    return seconds(attention, dtype, device, kernel_rates(gpu.architecture), kernel, sustained=sustained)


def seconds(
    attention: Attention, dtype: str, device: Device, rates: KernelRates, kernel: str, *, sustained: float = 1.0
) -> float:
    """Seconds of an attention under given rates, as ``attention_s``."""
    gpu = device.gpu
    assert gpu is not None
    if kernel == "masked":
        attention = replace(attention, causal=False)
    name = _LIKE.get(kernel, kernel)
    if dtype == "float32":
        dtype, kernel, name = "bfloat16", "masked", _WIDE if _WIDE in rates.attention else _LIKE["masked"]
        device = device if name == _WIDE else _in_fp32(device)
    on = _LONGER.get(kernel, _LONGER[""])
    longer = on.get(rates.architecture, on[""])[attention.backward]
    pass_rates = _pass_rates(rates, name, attention.backward)
    peak = peak_flops(device, dtype)
    slow = 1 + sustained * (power_slowdown(gpu, rates, dtype, peak) - 1) * pass_rates.power_share
    total, longest = _work(_in_tiles(attention) if kernel == "masked" else attention, pass_rates)
    reach = pass_rates.reach_at((attention.qk_dim + attention.v_dim) / 2)
    rate = peak * gpu.speed * reach / slow * pass_rates.exponentials ** log2(gpu.exponentials)
    memory = _bytes(attention, dtype) / (device.memory_bandwidth_bytes_per_s * rates.memory.share)
    longest *= gpu.num_sms
    parts = ((total + pass_rates.tail * longest) / rate, longest / rate, memory)
    return longer * sum(part**_SMOOTH for part in parts) ** (1 / _SMOOTH) + rates.memory.fixed_s


def _in_fp32(device: Device) -> Device:
    """Return the device with the peak of attention in fp32 in the place of its 16-bit peak."""
    peaks = device.peak_flops_per_s
    return replace(device, peak_flops_per_s={**peaks, "bfloat16": peaks["bfloat16"] / _WIDE_S})


def _pass_rates(rates: KernelRates, kernel: str, backward: bool) -> PassRates:
    name = _SERVED.get(kernel, {}).get(rates.architecture, kernel)
    if name not in rates.attention:
        kernels = ", ".join(sorted(rates.attention))
        raise ConfigError(
            f"expected an attention kernel of {rates.architecture} ({kernels}), got {kernel!r}; 'unfused' attention is "
            "products and a softmax, not one kernel"
        )
    return rates.attention[name]["backward" if backward else "forward"]


def _in_tiles(attention: Attention) -> Attention:
    """Return an attention with head sizes as the memory-efficient kernel computes them, in whole tiles.

    Heads of more than 64 columns and at most 128 have tiles of 128 (PyTorch mem_eff_attention/kernels/cutlassF.h,
    64x128_rf), which the sum over columns alone does not fill: one product of two forward, three of five backward do.
    """
    columns = attention.v_dim
    if not _HEAD_TILE // 2 < columns < _HEAD_TILE or attention.qk_dim != columns:
        return attention
    if not attention.backward:
        return replace(attention, v_dim=_HEAD_TILE)
    return replace(attention, v_dim=(2 * columns + 3 * _HEAD_TILE - 3 * columns) // 2)


def _work(attention: Attention, rates: PassRates) -> tuple[float, float]:
    """FLOP of all blocks, and of the longest block, with the work of starting and ending them."""
    if attention.window and not rates.skips:
        attention = replace(attention, window=0)
    width = 3 * attention.qk_dim + 2 * attention.v_dim if attention.backward else attention.qk_dim + attention.v_dim
    pair = 2.0 * width
    queries, keys = attention.query_tokens, attention.key_tokens
    pairs = attention.pairs + (queries * rates.block / 2 if attention.causal else 0.0)
    visible_keys = min(float(keys), attention.window or keys)
    heads = attention.batch * attention.heads
    total = heads * (min(pairs, float(queries * keys)) + queries * rates.prologue_keys) * pair
    return total, min(rates.block, queries) * (visible_keys + rates.prologue_keys) * pair


def _bytes(attention: Attention, dtype: str) -> float:
    """Bytes of queries, keys, values and output, once in forward; backward reads all and writes as many."""
    queries = attention.batch * attention.heads * attention.query_tokens * (attention.qk_dim + attention.v_dim)
    keys = attention.batch * attention.kv_heads * attention.key_tokens * (attention.qk_dim + attention.v_dim)
    return max(2.0, DTYPE_BYTES[dtype]) * (queries + keys) * (2.5 if attention.backward else 1.0)


#: Dtypes whose products may run in a lower precision.
_HALF = ("bfloat16", "float16")


def kernel_s(kernel: Kernel, device: Device, stack: Stack, precision: str = "") -> float:
    """Seconds of a kernel in a running step, without its launch.

    Args:
        precision: Precision of 16-bit products: "fp8", "mxfp8" or "nvfp4" for those that run in it (casts of their
            operands are counted with them), "fp16" for float16 in the place of bfloat16, anything else their own dtype.
    Raises:
        ConfigError: a collective, or the device lacks a peak or a kernel.
    """
    detail = kernel.detail
    if kernel.name.startswith((SCAN, STRIDED)):
        return memory_s(kernel.bytes_read + kernel.bytes_written, kernel.name.partition(".")[0], device)
    if isinstance(detail, Collective):
        raise ConfigError(f"expected a kernel that computes, got the collective {detail.op}: see cost.collective")
    if kernel.name == DRAW:
        return _draw_s(kernel, device, stack)
    if precision == "fp16" and kernel.dtype == "bfloat16":
        kernel = replace(kernel, dtype="float16")
    if isinstance(detail, Attention) and stack.attention == "unfused":
        parts = unfused(kernel, wide=stack.fusion == "eager")
        return sum(kernel_s(part, device, stack, precision) for part in parts)
    if device.gpu is None and (not runs_low(kernel, precision) or f"{device.architecture}.{LOW_KEY}" in stack.in_situ):
        if isinstance(detail, Attention):
            return _attention_by_curve(kernel, detail, device, stack)
        if isinstance(detail, Product) and stack.tf32 and kernel.dtype == "float32":
            times = peak_flops(device, "bfloat16") / peak_flops(device, "tf32") if _has_tf32(device) else 0.0
            return times * curve_s(replace(kernel, dtype="bfloat16"), device) if times else curve_s(kernel, device)
        return curve_s(kernel, device, _narrow(kernel, device))  # 8 bits: times what the software's profile says
    if isinstance(detail, Attention):
        return attention_s(detail, kernel.dtype, device, stack.attention) + _attention_casts_s(detail, device, stack)
    if isinstance(detail, Product):
        return _product_s(kernel, detail, device, stack, precision)
    kind = memory_class(kernel, stack.fusion)
    if kernel.kind is OpKind.SCATTER:  # what is written is cleared first at the rate of a copy; what is read is added
        return memory_s(kernel.bytes_written, "copy", device) + memory_s(kernel.bytes_read, kind, device)
    return memory_s(kernel.bytes_read + kernel.bytes_written, kind, device)


def _draw_s(kernel: Kernel, device: Device, stack: Stack) -> float:
    """Seconds of drawing the random numbers of a dropout, a byte of mask each."""
    return kernel.bytes_written * stack.random_flop / peak_flops(device, "float32")


def _narrow(kernel: Kernel, device: Device) -> float:
    """Factor of a 16-bit product whose rows begin at no whole vectors, on NVIDIA's GPUs known by a data sheet alone.

    It is 1 on others: of AMD's it was not measured, and where rates were measured ``skinny_dim`` is fitted. Assumption:
    smaller loads cost the clocks that they cost on an A100 (``product.unaligned``), beside computing that takes as many
    more as a multiprocessor's FLOP a clock are fewer, which its ``skinny_dim`` is of too.
    """
    product, low = kernel.detail, low_of(kernel)
    of_sheet = device.kind == "cuda" and device.name.startswith("NVIDIA") and not device.num_threads
    if not isinstance(product, Product) or not of_sheet or not low:
        return 1.0
    of_weight = kernel.stage is Stage.BACKWARD_WEIGHT
    longer = unaligned(product, DTYPE_BYTES[low], kernel_rates("ampere").product, of_weight=of_weight) - 1
    return 1 + longer * min(1.0, device.skinny_dim / _SKINNY_A100)


def _attention_by_curve(kernel: Kernel, attention: Attention, device: Device, stack: Stack) -> float:
    """Seconds on a device whose rates are curves: by the kernel's own, or by FlashAttention-2's."""
    unmasked = replace(kernel, detail=_in_tiles(replace(attention, causal=False)))
    if device.kind == "cuda" and kernel.dtype == "float32" and "bfloat16" in device.peak_flops_per_s:
        wide = unmasked if stack.attention == "masked" else kernel
        name = _EFFICIENT + (BACKWARD if attention.backward else "")
        if name in device.rates:  # as ``lading probe`` measures it
            return curve_s(replace(wide, name=name), device)
        return _WIDE_FLASH_S * curve_s(replace(wide, dtype="bfloat16"), device)
    if before_ampere(device):  # whose own rate is the memory-efficient kernel's; in fp32 it has no tensor cores
        peaks = device.peak_flops_per_s
        longer = peaks["float16"] / peaks["float32"] if kernel.dtype == "float32" and "float16" in peaks else 1.0
        return longer * curve_s(unmasked if stack.attention == "masked" else kernel, device)
    if stack.attention != "masked":
        return curve_s(kernel, device)
    return (_SMALL_BACKWARD_S if _in_small_tiles(attention, device) else _EFFICIENT_S) * curve_s(unmasked, device)


def _in_small_tiles(attention: Attention, device: Device) -> bool:
    """Whether backward of PyTorch's memory-efficient attention goes in tiles that keep no sum in registers.

    That is so for heads of 97 to 128 columns, whose tiles of 128 x 128 do not fit the 99 KiB of shared memory that
    compute capability 8.6, 8.9 and 12.0 have; the next kernel is 64x64_k128, which neither loads ahead nor keeps its
    sums (PyTorch mem_eff_attention/kernels/cutlassB.h, kernel_backward.h: kPreload, kOutputInRF; facebookresearch/
    xformers issue 517). An A100 or H100 that was probed has room, and on AMD's GPUs the kernel is another.
    """
    wide = _SMALL_COLUMNS < max(attention.qk_dim, attention.v_dim) <= _HEAD_TILE
    return attention.backward and wide and _SMALL_BLOCKS.match(device.name) is not None


def before_ampere(device: Device) -> bool:
    """Whether a GPU of NVIDIA's is of compute capability below 8.0: FlashAttention-2 and bf16 begin there."""
    return device.kind == "cuda" and "bfloat16" not in device.peak_flops_per_s


def assumed_of_attention(attention: str, device: Device) -> tuple[str, ...]:
    """Say which attention kernel stands for one that the device does not run.

    Args:
        attention: Kernel of the software, as of ``Stack.attention``.
    """
    if attention in ("unfused", "masked") or not before_ampere(device):
        return ()
    return (
        f"PyTorch's memory-efficient attention in the place of {attention} on {device.name}: FlashAttention-2 and "
        "later need compute capability 8.0",
    )


def _has_tf32(device: Device) -> bool:
    """Whether tensor cores take fp32 operands, as those do that have bf16."""
    return peak_flops(device, "tf32") > device.peak_flops_per_s["float32"]


@dataclass(frozen=True, slots=True)
class KernelFloor:
    """Lower bound on a kernel with a share r of its tokens: r * linear_s + fixed_s, and moving r times the bytes.

    Attributes:
        moved: (class, bytes) for ``memory_s``, which is not linear, as bytes that fit the cache move faster.
        groups: Number of groups that the host launches one by one (``groups_launch_s``); 1 if it launches one kernel.
    """

    linear_s: float = 0.0
    fixed_s: float = 0.0
    moved: tuple[tuple[str, float], ...] = ()
    groups: int = 1


def floor_of(kernel: Kernel, device: Device, stack: Stack, precision: str = "") -> KernelFloor:
    """Lower bound on the seconds of a computing kernel with fewer tokens; arguments and errors as ``kernel_s``.

    Bytes and FLOP are sums of products of lengths, at most one of which counts tokens, so they fall no faster than the
    number of tokens does.
    """
    detail = kernel.detail
    if kernel.name.startswith((SCAN, STRIDED)):
        moved_bytes = float(kernel.bytes_read + kernel.bytes_written)
        return KernelFloor(moved=((kernel.name.partition(".")[0], moved_bytes),))
    if kernel.name == DRAW:
        return KernelFloor(_draw_s(kernel, device, stack))
    if precision == "fp16" and kernel.dtype == "bfloat16":
        kernel = replace(kernel, dtype="float16")
    if isinstance(detail, Attention):
        if device.gpu is None:
            raise ConfigError(f"expected a device whose kernels were measured, got {device.name}")
        fixed_s = kernel_rates(device.gpu.architecture).memory.fixed_s
        return KernelFloor(attention_s(detail, kernel.dtype, device, stack.attention) - fixed_s, fixed_s)
    if isinstance(detail, Product):
        return _product_floor(kernel, detail, device, stack, precision)
    kind, read, written = memory_class(kernel, stack.fusion), float(kernel.bytes_read), float(kernel.bytes_written)
    if kernel.kind is OpKind.SCATTER:
        return KernelFloor(moved=(("copy", written), (kind, read)))
    return KernelFloor(moved=((kind, read + written),))


def _attention_casts_s(attention: Attention, device: Device, stack: Stack) -> float:
    """Seconds of casting operands to 8 bits: queries, keys and values in forward, the output's gradient in backward."""
    if stack.attention != "cudnn9-mxfp8" or device.gpu is None or device.gpu.architecture != "blackwell":
        return 0.0
    queries = attention.batch * attention.heads * attention.query_tokens
    keys = attention.batch * attention.kv_heads * attention.key_tokens
    both = attention.qk_dim + attention.v_dim
    elements = queries * attention.v_dim if attention.backward else queries * attention.qk_dim + keys * both
    return memory_s(elements * cast_bytes("mxfp8", stack).inputs, "elementwise.fused", device)


def runs_low(kernel: Kernel, precision: str) -> bool:
    """Whether a product runs in a precision below 16 bits where ``precision`` is what products are to run in."""
    return (
        precision in LOW_PRECISIONS
        and kernel.kind is OpKind.MATMUL
        and kernel.dtype in _HALF
        and not kernel.name.startswith(("unfused.", "adapter."))
    )


def operand_share(precision: str, stack: Stack) -> float:
    """Bytes that a 16-bit operand of products keeps for backward, as a share of its bytes in forward."""
    low = stack.keeps_low and precision in LOW_PRECISIONS
    return OPERAND_BYTES[precision] / DTYPE_BYTES["bfloat16"] if low else 1.0


def _as_run(kernel: Kernel, product: Product, stack: Stack, precision: str) -> tuple[Product, str, float]:
    """Product as the stack runs it, precision of its operands, and bytes of an element of its output."""
    if stack.fusion == "fused" and kernel.stage is Stage.BACKWARD_WEIGHT and "gradients" not in stack.unfused:
        product = replace(product, accumulates=True)  # Megatron's kernels add to the gradient's buffer themselves
    used = precision if runs_low(kernel, precision) else kernel.dtype
    used = "tf32" if stack.tf32 and used == "float32" else used
    wide = product.accumulates and stack.gradient_dtype == "float32"
    return product, used, 4.0 if wide or OPERAND_BYTES.get(used, 2.0) >= 4 else 2.0


def _casts_bytes(kernel: Kernel, product: Product, stack: Stack, precision: str) -> float:
    """Bytes moved to cast a product's operands ([Note: casts of operands] in ``lading.cost.casts``)."""
    if not runs_low(kernel, precision):
        return 0.0
    was_cast, looked = (kernel.name.endswith(end) for end in (QUANTIZED, LOOKED))
    return product_casts(kernel, product, precision, stack, was_cast=was_cast, looked=looked)


def _is_launched_by_group(kernel: Kernel, stack: Stack) -> bool:
    return kernel.is_experts and stack.fusion == "fused" and not stack.cuda_graphs


def _product_s(kernel: Kernel, product: Product, device: Device, stack: Stack, precision: str) -> float:
    """Seconds of a product, the cast of its operands, and the host where it launches groups one by one."""
    product, used, out = _as_run(kernel, product, stack, precision)
    of_weight = kernel.stage is Stage.BACKWARD_WEIGHT
    seconds = product_s(product, used, device, out_bytes=out, of_weight=of_weight)
    if _is_launched_by_group(kernel, stack):
        seconds = max(seconds, groups_launch_s(product, device))
    moved_bytes = _casts_bytes(kernel, product, stack, precision)
    return seconds + memory_s(moved_bytes, "elementwise.fused", device) if moved_bytes else seconds


def _product_floor(kernel: Kernel, product: Product, device: Device, stack: Stack, precision: str) -> KernelFloor:
    product, used, out = _as_run(kernel, product, stack, precision)
    of_weight = kernel.stage is Stage.BACKWARD_WEIGHT
    linear_s, fixed_s = floor_s(product, used, device, out_bytes=out, of_weight=of_weight)
    moved_bytes = _casts_bytes(kernel, product, stack, precision)
    casts = (("elementwise.fused", moved_bytes),) if moved_bytes else ()
    return KernelFloor(linear_s, fixed_s, casts, product.groups if _is_launched_by_group(kernel, stack) else 1)


def memory_class(kernel: Kernel, fusion: str) -> str:
    """Class of a kernel that only moves bytes: its kind, "norm_backward" for norms, and ".fused" unless eager."""
    kind = (kernel.kind or OpKind.COPY).value
    if kernel.kind is OpKind.NORM and kernel.stage is not Stage.FORWARD:
        kind = "norm_backward"
    return kind if fusion == "eager" else f"{kind}.fused"


def memory_s(size_bytes: float, kind: str, device: Device) -> float:
    """Seconds of moving bytes in one kernel, read and written ones together, launch not included.

    Args:
        kind: Class of the kernel, such as "norm", "norm_backward.fused" or "copy".
    Raises:
        ConfigError: nothing is known of the device's kernels or of its rate of this class.
    Source: constants fitted in benchmarks/calibrate/memory.py; [Note: memory].
    """
    bandwidth = device.memory_bandwidth_bytes_per_s
    if device.gpu is None:
        plain_kind = kind.removesuffix(".fused")
        rate = device.rates.get(plain_kind, device.rates.get(plain_kind.removesuffix("_backward")))
        return size_bytes / (rate.at(size_bytes) if rate and size_bytes else bandwidth)
    rates = kernel_rates(device.gpu.architecture).memory
    factors = rates.classes
    factor = factors.get(kind, factors.get(kind.removesuffix(".fused"), 1.0) if not kind.startswith("norm") else 1.0)
    room = rates.cache_share * device.gpu.l2_bytes
    cached = 1 / (1 + (size_bytes / room) ** 2)
    moved_bytes = size_bytes * (1 - cached + cached / rates.cache_speed)
    return factor * (rates.fixed_s + moved_bytes / (rates.share * bandwidth))


def step_s(elements: float, bytes_per_element: float, device: Device, kernels: int = 1) -> float:
    """Seconds of an optimizer's step over ``elements`` parameters in fused kernels over many tensors.

    Args:
        bytes_per_element: Bytes read and written for each parameter (``adam_bytes``).
        kernels: Number of kernels in which it is launched.
    """
    return sum(memory_s(elements * bytes_per_element / kernels, "step", device) for _ in range(kernels))


def adam_bytes(stack: Stack) -> float:
    """Bytes of an update for each parameter: gradient read; moments and the fp32 value read and written; 16-bit copy.

    The value is the master where the stack keeps one, whose 16-bit copy is written too, else the parameter itself.
    """
    wide = stack.master_weights or stack.parameters_dtype == "float32"
    passes = stack.update_passes + (FOREACH_PASSES if stack.foreach else 0)
    gradient = (4.0 if stack.gradient_dtype == "float32" else 2.0) + (4 if wide else 2) * passes
    if stack.master_weights:
        return gradient + 8 * (stack.moments + 1) + 2
    parameter_bytes = 8.0 if stack.parameters_dtype == "float32" else 4.0
    return gradient + stack.moments * parameter_bytes + parameter_bytes


def clip_s(elements: float, stack: Stack, device: Device) -> float:
    """Seconds of the norm of gradients, which reads them, and of scaling them, which reads and writes them."""
    size = elements * (4.0 if stack.gradient_dtype == "float32" else 2.0)
    return memory_s(size, "reduction", device) + memory_s(2 * size, "elementwise", device)
