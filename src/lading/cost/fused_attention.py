"""Seconds of fused attention on a GPU by kernel generation, head size, length, mask and how many blocks there are.

[Note: attention]
A block of ``block`` queries of one head goes over its keys, and starting and ending it costs as much as
``prologue_keys`` keys more. With P multiprocessors at ``reach * peak / P`` FLOP/s each,

    block_s = block (keys + prologue_keys) FLOP of a pair / (reach * peak / P)
    busy_s  = sum of all blocks / P + tail * the longest block
    seconds = smooth max(busy_s, the longest block, bytes / bandwidth) + fixed_s

``reach`` depends on the head size, as exponentials take the same time for every pair. A causal mask leaves half of
the pairs and the diagonal blocks whole; its longest block still has all keys. Backward goes over blocks of keys and
computes the scores again: five products.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2

from lading.catalog.kernel_rates import KernelRates, PassRates, kernel_rates
from lading.cost.product import peak_flops, power_slowdown
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES
from lading.ir.machine import Device
from lading.ir.work import Attention

#: A kernel that an architecture has not got, or that was not measured there, and what stands for it.
_SERVED = {
    "flash1": {"blackwell": "cudnn"},
    "triton": {"blackwell": "cudnn"},
    "flash2": {"blackwell": "cudnn"},
    "flash3": {"ampere": "flash2", "blackwell": "cudnn"},
    "cudnn": {"ampere": "flash2"},
    "cudnn9": {"ampere": "flash2", "hopper": "cudnn"},
    "cudnn9-mxfp8": {"ampere": "flash2", "hopper": "cudnn"},
}
_SMOOTH = 4.0


def attention_s(
    attention: Attention, dtype: str, device: Device, kernel: str = "flash2", *, sustained: float = 1.0
) -> float:
    """Seconds of one pass of fused attention alone on the device, launch not included.

    Args:
        dtype: Dtype of queries, keys and values; products run at its peak.
        kernel: "flash1", "triton", "flash2", "flash3", "cudnn", ...; where an architecture has no such kernel, the one
            used there.
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
    """As ``attention_s``, under given rates."""
    gpu = device.gpu
    assert gpu is not None
    found = _pass_rates(rates, kernel, attention.backward)
    peak = peak_flops(device, dtype)
    slow = 1 + sustained * (power_slowdown(gpu, rates, dtype, peak) - 1) * found.power_share
    total, longest = _work(attention, found)
    reach = found.reach_at((attention.qk_dim + attention.v_dim) / 2)
    rate = peak * gpu.speed * reach / slow * found.exponentials ** log2(gpu.exponentials)
    memory = _bytes(attention, dtype) / (device.memory_bandwidth_bytes_per_s * rates.memory.share)
    longest *= gpu.num_sms
    parts = ((total + found.tail * longest) / rate, longest / rate, memory)
    return sum(part**_SMOOTH for part in parts) ** (1 / _SMOOTH) + rates.memory.fixed_s


def _pass_rates(rates: KernelRates, kernel: str, backward: bool) -> PassRates:
    name = _SERVED.get(kernel, {}).get(rates.architecture, kernel)
    if name not in rates.attention:
        known = ", ".join(sorted(rates.attention))
        raise ConfigError(
            f"expected an attention kernel of {rates.architecture} ({known}), got {kernel!r}; 'unfused' attention is "
            "products and a softmax, not one kernel"
        )
    return rates.attention[name]["backward" if backward else "forward"]


def _work(attention: Attention, rates: PassRates) -> tuple[float, float]:
    """FLOP of all blocks, and of the longest one, extra work included."""
    if attention.window and not rates.skips:
        attention = replace(attention, window=0)
    width = 3 * attention.qk_dim + 2 * attention.v_dim if attention.backward else attention.qk_dim + attention.v_dim
    pair = 2.0 * width
    queries, keys = attention.query_tokens, attention.key_tokens
    pairs = attention.pairs + (queries * rates.block / 2 if attention.causal else 0.0)
    own = min(float(keys), attention.window or keys)
    heads = attention.batch * attention.heads
    total = heads * (min(pairs, float(queries * keys)) + queries * rates.prologue_keys) * pair
    return total, min(rates.block, queries) * (own + rates.prologue_keys) * pair


def _bytes(attention: Attention, dtype: str) -> float:
    """Queries, keys, values and output, read or written once; backward reads all and writes as many."""
    queries = attention.batch * attention.heads * attention.query_tokens * (attention.qk_dim + attention.v_dim)
    keys = attention.batch * attention.kv_heads * attention.key_tokens * (attention.qk_dim + attention.v_dim)
    return max(2.0, DTYPE_BYTES[dtype]) * (queries + keys) * (2.5 if attention.backward else 1.0)
