"""AdamW of one parameter, by the kernel that ``torch.optim.AdamW(fused=True)`` runs."""

from __future__ import annotations

from typing import Protocol

import torch


class AdamWSettings(Protocol):
    """What an update needs besides the learning rate; ``lading.config.AdamW`` is one."""

    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    *,
    lr: float,
    settings: AdamWSettings,
    counted: bool = False,
) -> None:
    """Update ``param``, ``exp_avg``, ``exp_avg_sq`` and ``step`` in place, bit-equal to the fused optimizer.

    The tensors may be a part of a parameter and of its states: parts give the bits of the whole where each begins at a
    whole vector of the CPU (64 elements are that everywhere). ``step`` is then counted once for all of them.

    Args:
        param, grad, exp_avg, exp_avg_sq: Same shape, dtype and (dense) strides; the kernel walks memory, not indices.
        step: float32 scalar, the number of updates so far.
        lr: Learning rate of this update.
        counted: Whether ``step`` has counted this update already.

    Source: ``torch.optim.adam._fused_adam``; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """
    if not counted:
        step += 1
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [param], [grad], [exp_avg], [exp_avg_sq], [], [step],
        lr=lr, beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay, eps=settings.eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
