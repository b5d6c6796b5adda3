"""AdamW of one parameter, by the kernel that ``torch.optim.AdamW(fused=True)`` runs."""

from __future__ import annotations

import torch


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update ``param``, ``exp_avg``, ``exp_avg_sq`` and ``step`` in place, bit-equal to the fused optimizer.

    Args:
        param, grad, exp_avg, exp_avg_sq: Same shape, dtype and (dense) strides; the kernel walks memory, not indices.
        step: float32 scalar, the number of updates so far.
        lr: Learning rate of this update.

    Source: ``torch.optim.adam._fused_adam``; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """
    step += 1
    torch._fused_adamw_(
        [param], [grad], [exp_avg], [exp_avg_sq], [], [step],
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
