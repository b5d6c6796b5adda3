"""Rules of Lading beside the code of their authors, on the same gradients: largest difference over largest movement.

    python benchmarks/optimizers/official.py --soap CLONE --shampoo CLONE

CLONE is a checkout of github.com/nikhilvyas/SOAP and of github.com/facebookresearch/optimizers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lading.optim.rule import Rule, fresh, update_matrix
from lading.optim.shampoo import ShampooRule
from lading.optim.soap import SOAPRule
from lading.rules import SOAP, Shampoo

SHAPES = ((24, 40), (40, 24), (32, 32), (48, 64))
UPDATES = 50


def _ours(rule: Rule, param: torch.Tensor, grads: list[torch.Tensor], lr: float) -> torch.Tensor:
    moved = param.clone()
    held, whole = fresh(rule, (param.shape[0], param.shape[1]), param.dtype)
    for number, grad in enumerate(grads, 1):
        update_matrix(rule, moved, grad, held, whole, lr=lr, update=number)
    return moved


def _theirs(
    make: Callable[[torch.nn.Parameter], torch.optim.Optimizer], param: torch.Tensor, grads: list[torch.Tensor]
) -> torch.Tensor:
    leaf = torch.nn.Parameter(param.clone())
    optimizer = make(leaf)
    for grad in grads:
        leaf.grad = grad.clone()
        optimizer.step()
    return leaf.detach()


def _compare(name: str, rule: Rule, make: Callable[[torch.nn.Parameter], torch.optim.Optimizer], lr: float) -> None:
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        param = torch.randn(shape, generator=generator)
        grads = [torch.randn(shape, generator=generator) for _ in range(UPDATES)]
        ours, theirs = _ours(rule, param, grads, lr), _theirs(make, param, grads)
        moved = float((theirs - param).abs().max())
        print(f"{name:<40} {shape[0]:>3} x {shape[1]:<3} {float((ours - theirs).abs().max()) / moved:.1e}")


def main() -> None:
    """Print one line for each rule, setting and shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soap", type=Path)
    parser.add_argument("--shampoo", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.soap:
        sys.path.insert(0, str(args.soap))
        from soap import SOAP as Official  # pyright: ignore[reportMissingImports]

        _compare("SOAP", SOAPRule(SOAP()), lambda p: Official([p], lr=3e-3, weight_decay=0.01), 3e-3)
    if args.shampoo:
        sys.path.insert(0, str(args.shampoo))
        import distributed_shampoo as official  # pyright: ignore[reportMissingImports]

        for frequency, start in ((1, 1), (10, 10), (5, 12)):
            settings = Shampoo(beta2=0.99, eps=1e-6, weight_decay=0.1, frequency=frequency, start=start)

            def make(p: torch.nn.Parameter, frequency: int = frequency, start: int = start) -> torch.optim.Optimizer:
                return official.DistributedShampoo(
                    [p], lr=1e-3, betas=(0.9, 0.99), epsilon=1e-6, weight_decay=0.1, max_preconditioner_dim=64,
                    precondition_frequency=frequency, start_preconditioning_step=start,
                    grafting_config=official.AdamPreconditionerConfig(beta2=0.99, epsilon=1e-8),
                )  # fmt: skip

            _compare(f"Shampoo, every {frequency}, from {start}", ShampooRule(settings), make, 1e-3)


if __name__ == "__main__":
    main()
