"""Operations that are one kernel on a GPU but several on the CPU, kept whole while a table is captured.

A StepGraph says what the processor at hand would run; a table is what any accelerator runs, and torch has one kernel
there for RMS norm and for dropout. Attention is whole on fake CPU tensors already, but where values are not as wide as
keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("lading::_fused_rms_norm", mutates_args=())
def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``aten._fused_rms_norm``, which decomposes on the CPU.

    Returns:
        The result, of x's shape and dtype, and the reciprocal root mean squares, with 1 in the normalised dims.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    dims = list(range(x.dim() - len(shape), x.dim()))
    rstd = (wide.square().mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    normed = (wide * rstd).to(x.dtype)
    return normed if weight is None else normed * weight, rstd


@_rms_norm.register_fake
def _(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    statistics_shape = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(statistics_shape, dtype=_statistics_of(x))


def _statistics_of(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("lading::_fused_rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> list[torch.Tensor]:
    """Gradients of an RMS norm's input, and of its weight if there is one."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    normed = x.to(rstd.dtype) * rstd
    wide = grad.to(rstd.dtype)
    scaled = wide if weight is None else wide * weight
    of_input = rstd * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    of_weight = () if weight is None else ((wide * normed).sum(list(range(x.dim() - len(shape)))).to(weight.dtype),)
    return [of_input.to(x.dtype), *of_weight]


@_rms_norm_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> list[torch.Tensor]:
    return [torch.empty_like(x), *(() if weight is None else (torch.empty_like(weight),))]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, rstd, weight = ctx.saved_tensors
    mask = [True, weight is not None]
    grads = torch.ops.lading._fused_rms_norm_backward(grad, x, list(ctx.shape), rstd, weight, mask)
    return grads[0], None, grads[1] if weight is not None else None, None


torch.library.register_autograd("lading::_fused_rms_norm", _backward, setup_context=_keep)


@torch.library.custom_op("lading::_scaled_dot_product_flash_attention", mutates_args=())
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with values of any width: q, k [batch, heads, length, dim] -> out, and the log-sums backward needs."""
    raise NotImplementedError("this operation has shapes only")


@_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length = q.shape[:3]
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)  # as flash attention lays it out
    return out, q.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("lading::_scaled_dot_product_flash_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of an attention's queries, keys and values, each of its tensor's shape."""
    raise NotImplementedError("this operation has shapes only")


@_attention_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    like = [x.new_empty([x.shape[i] for i in (0, 2, 1, 3)]).transpose(1, 2) for x in (q, k, v)]
    return like[0], like[1], like[2]


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.is_causal = inputs[3]
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    return (*torch.ops.lading._scaled_dot_product_flash_attention_backward(grad, *saved, ctx.is_causal), None)


torch.library.register_autograd(
    "lading::_scaled_dot_product_flash_attention", _attention_gradients, setup_context=_keep_attention
)


def _whole_rms_norm(x: torch.Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    return torch.ops.lading._fused_rms_norm(x, list(shape), weight, eps)[0]


def _whole_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(x, p, True)[0] if training and 0 < p < 1 and prod(x.shape) else x


def _wider_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether an attention has keys and values of unlike width, and neither mask nor dropout."""
    masked = args[0] if args else kwargs.get("attn_mask")
    dropped = args[1] if len(args) > 1 else kwargs.get("dropout_p", 0.0)
    return q.shape[-1] != v.shape[-1] and masked is None and not dropped


class WholeKernels(TorchFunctionMode):
    """Mode in which norms, dropouts and attentions are one operation each."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.rms_norm, torch.rms_norm):
            return _whole_rms_norm(*args, **_renamed(kwargs))
        if func in (F.dropout, torch.dropout):
            return _whole_dropout(*args, **_renamed(kwargs))
        if func is F.scaled_dot_product_attention and len(args) >= 3 and _wider_keys(*args, **kwargs):
            is_causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
            return torch.ops.lading._scaled_dot_product_flash_attention(*args[:3], is_causal)[0]
        return func(*args, **kwargs)


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {"input": "x", "normalized_shape": "shape", "train": "training"}
    return {names.get(key, key): value for key, value in kwargs.items()}
