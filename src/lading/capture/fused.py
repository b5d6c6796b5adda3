"""Operations that are one kernel on a GPU but several on the CPU, kept whole while a table is captured.

A StepGraph says what the processor at hand would run; a table is what any accelerator runs, and torch has one kernel
there for RMS norm and for dropout. Attention is whole on fake CPU tensors already.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("lading::_fused_rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten._fused_rms_norm`` on fake tensors: the result, and the reciprocal root mean squares that backward needs.

    The operation of aten decomposes on the CPU; the epsilon changes nothing here.
    """
    raise NotImplementedError("this operation has shapes only")


@_rms_norm.register_fake
def _(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    kept = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(kept, dtype=torch.float32)


@torch.library.custom_op("lading::_fused_rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], rstd: torch.Tensor, weight: torch.Tensor | None
) -> list[torch.Tensor]:
    """Gradients of the input, and of the weight if there is one."""
    raise NotImplementedError("this operation has shapes only")


@_rms_norm_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], rstd: torch.Tensor, weight: torch.Tensor | None
) -> list[torch.Tensor]:
    return [torch.empty_like(x), *(() if weight is None else (torch.empty_like(weight),))]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.shape, weight = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, rstd, weight = ctx.saved_tensors
    grads = torch.ops.lading._fused_rms_norm_backward(grad, x, list(ctx.shape), rstd, weight)
    return grads[0], None, grads[1] if weight is not None else None


torch.library.register_autograd("lading::_fused_rms_norm", _backward, setup_context=_keep)


def _whole_rms_norm(x: torch.Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    return torch.ops.lading._fused_rms_norm(x, list(shape), weight)[0]


def _whole_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(x, p, True)[0] if training and 0 < p < 1 and prod(x.shape) else x


class Whole(TorchFunctionMode):
    """Within it, RMS norms and dropouts are one operation each."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.rms_norm, torch.rms_norm):
            return _whole_rms_norm(*args, **_renamed(kwargs))
        if func in (F.dropout, torch.dropout):
            return _whole_dropout(*args, **_renamed(kwargs))
        return func(*args, **kwargs)


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {"input": "x", "normalized_shape": "shape", "train": "training"}
    return {names.get(key, key): value for key, value in kwargs.items()}
