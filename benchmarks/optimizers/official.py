"""Rules of Lading beside the code of their authors, on the same gradients: largest difference over largest movement.

    python benchmarks/optimizers/official.py [--muon CLONE] [--soap CLONE] [--shampoo CLONE]

CLONE is a checkout of github.com/KellerJordan/Muon, of github.com/nikhilvyas/SOAP and of
github.com/facebookresearch/optimizers. torch.optim.Muon and AdamW are always there. Each has a tolerance, and the exit
code is 1 where one is not kept. Polar Express is beside its published algorithm in tests/optim.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lading.optim.adamw import AdamW
from lading.optim.muon import Muon, MuonRule
from lading.optim.rule import Rule, fresh, update_matrix
from lading.optim.shampoo import Shampoo, ShampooRule
from lading.optim.soap import SOAP, SOAPRule
from lading.runtime.members import PieceRule

SHAPES = ((24, 40), (40, 24), (32, 32), (48, 64))
UPDATES = 50
LR = 1e-3
Make = Callable[[torch.nn.Parameter], torch.optim.Optimizer]


def _ours(rule: Rule | PieceRule, param: torch.Tensor, grads: list[torch.Tensor], lr: float) -> torch.Tensor:
    moved = param.clone()
    if isinstance(rule, PieceRule):
        held = {name: torch.zeros_like(param) for name in rule.state_specs(tuple(param.shape))}
        for number, grad in enumerate(grads, 1):
            rule.step(moved, grad, held, lr=lr, update=number)
        return moved
    held, whole = fresh(rule, (param.shape[0], param.shape[1]), param.dtype)
    for number, grad in enumerate(grads, 1):
        update_matrix(rule, moved, grad, held, whole, lr=lr, update=number)
    return moved


def _theirs(make: Make, param: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    leaf = torch.nn.Parameter(param.clone())
    optimizer = make(leaf)
    for grad in grads:
        leaf.grad = grad.clone()
        optimizer.step()
    return leaf.detach()


def _compare(name: str, rule: Rule | PieceRule, make: Make, *, tolerance: float, lr: float = LR) -> bool:
    """Print the largest difference over shapes, and whether it is within the tolerance."""
    worst = 0.0
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        param = torch.randn(shape, generator=generator)
        grads = [torch.randn(shape, generator=generator) for _ in range(UPDATES)]
        ours, theirs = _ours(rule, param, grads, lr), _theirs(make, param, grads)
        worst = max(worst, float((ours - theirs).abs().max() / (theirs - param).abs().max()))
    print(f"{name:<58} {worst:.1e}  {'within' if worst <= tolerance else 'NOT WITHIN'} {tolerance:g}")
    return worst <= tolerance


def _torch() -> list[bool]:
    """Whether each case equals PyTorch's own, to the bit."""
    adamw = AdamW(lr=LR, weight_decay=0.1)
    found = [
        _compare(
            "AdamW, torch.optim.AdamW", PieceRule(adamw),
            lambda p: torch.optim.AdamW([p], lr=LR, weight_decay=0.1, foreach=False), tolerance=0.0,
        )
    ]  # fmt: skip
    for nesterov in (True, False):
        for ours, theirs in (("original", "original"), ("match-rms-adamw", "match_rms_adamw")):
            settings: dict[str, Any] = {"nesterov": nesterov, "scale": ours}

            def make(p: torch.nn.Parameter, nesterov: bool = nesterov, scale: str = theirs) -> torch.optim.Optimizer:
                return torch.optim.Muon([p], lr=LR, nesterov=nesterov, adjust_lr_fn=scale)

            name = f"Muon, torch.optim.Muon, {ours}, nesterov {nesterov}"
            found.append(_compare(name, MuonRule(Muon(**settings)), make, tolerance=0.0))
    return found


def _jordan(clone: Path) -> list[bool]:
    """Jordan's own: the same in bf16 but for products and sums in one kernel or two."""
    sys.path.insert(0, str(clone))
    from muon import SingleDeviceMuon  # pyright: ignore[reportMissingImports]

    rule = MuonRule(Muon(weight_decay=0.1))
    return [_compare("Muon, Jordan's", rule, lambda p: SingleDeviceMuon([p], lr=LR, weight_decay=0.1), tolerance=0.02)]


def _vyas(clone: Path) -> list[bool]:
    sys.path.insert(0, str(clone))
    from soap import SOAP as Official  # pyright: ignore[reportMissingImports]

    return [
        _compare(
            f"SOAP, its authors', every {often}", SOAPRule(SOAP(frequency=often)),
            lambda p, often=often: Official([p], lr=3e-3, weight_decay=0.01, precondition_frequency=often),
            tolerance=1e-4, lr=3e-3,
        )
        for often in (1, 10)
    ]  # fmt: skip


def _shi(clone: Path) -> list[bool]:
    """Roots in fp32 of factors that are nearly singular differ by their rounding."""
    sys.path.insert(0, str(clone))
    import distributed_shampoo as official  # pyright: ignore[reportMissingImports]

    roots = {"eigen": official.EigenConfig(), "newton": official.CoupledNewtonConfig()}
    grafts = {
        "adam": official.AdamPreconditionerConfig(beta2=0.99, epsilon=1e-8),
        "sgd": official.SGDPreconditionerConfig(),
        "none": None,
    }
    found: list[bool] = []
    for root, grafting, often, start in (
        ("eigen", "adam", 1, 1), ("eigen", "adam", 10, 10), ("eigen", "adam", 5, 12), ("eigen", "sgd", 5, 12),
        ("eigen", "none", 5, 5), ("newton", "adam", 5, 12), ("newton", "sgd", 5, 5), ("newton", "none", 5, 5),
    ):  # fmt: skip
        chosen: dict[str, Any] = {"root": root, "grafting": grafting, "frequency": often, "start": start}
        # Without a norm to take over, Newton's ridge is a share of the factor, theirs an absolute one.
        eps = 1e-2 if root == "newton" else 1e-6
        rule = ShampooRule(Shampoo(beta2=0.99, eps=eps, weight_decay=0.1, **chosen))
        preconditioner = official.RootInvShampooPreconditionerConfig(amortized_computation_config=roots[root])

        def make(
            p: torch.nn.Parameter, how: Any = preconditioner, graft: Any = grafts[grafting], often: int = often,
            start: int = start, eps: float = eps,
        ) -> torch.optim.Optimizer:  # fmt: skip
            return official.DistributedShampoo(
                [p], lr=LR, betas=(0.9, 0.99), epsilon=eps, weight_decay=0.1, max_preconditioner_dim=64,
                precondition_frequency=often, start_preconditioning_step=start, grafting_config=graft,
                preconditioner_config=how,
            )  # fmt: skip

        name = f"Shampoo, its authors', {root}, norm of {grafting}, every {often}, from {start}"
        found.append(_compare(name, rule, make, tolerance=1e-3))
    return found


def main() -> int:
    """Print one line for each rule and setting; 1 if any is not within its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--muon", "--soap", "--shampoo"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = _torch()
    for clone, compare in ((args.muon, _jordan), (args.soap, _vyas), (args.shampoo, _shi)):
        if clone:
            kept += compare(clone)
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
