"""FLOP of one operation, from torch's own formulas; a multiply-add counts two."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATEN = torch.ops.aten

#: Attention that torch's own table does not have: the CPU's, and that of tables (``lading.tracing.fused``).
_FORWARD = frozenset(
    {"aten::_scaled_dot_product_flash_attention_for_cpu", "lading::_scaled_dot_product_flash_attention"}
)
_BACKWARD = frozenset(f"{name}_backward" for name in _FORWARD)


def op_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOP of ``func(*args, **kwargs)``; 0 for operations that are not products or attention.

    Attention counts the full square of scores, causal or not, as torch's counter does.
    """
    packet = func.overloadpacket
    if func._schema.name in _FORWARD:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func._schema.name in _BACKWARD:
        return int(sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape))
    if packet is getattr(_ATEN, "_grouped_mm", None):
        rows, inner = args[0].shape[-2:]
        return 2 * int(rows) * int(inner) * int(args[1].shape[-1])
    if packet is _ATEN.convolution_backward and args[9] > 1:  # torch's own formula counts every pair of channels
        each = 2 * args[0].numel() * args[2][0].numel()
        return each * sum(args[10][:2])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0
