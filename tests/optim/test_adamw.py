"""One parameter's update equals torch's fused AdamW, bit for bit."""

from __future__ import annotations

import pytest
import torch

from lading.config import AdamW
from lading.optim.adamw import adamw_step

SHAPES = [(), (1,), (7,), (64, 33), (3, 5, 17), (4099,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_fused_adamw_over_steps_sizes_and_rates(dtype: torch.dtype) -> None:
    settings = AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1)
    torch.manual_seed(0)
    ours = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    theirs = [torch.nn.Parameter(p.clone()) for p in ours]
    states = [(torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())) for p in ours]
    optimizer = torch.optim.AdamW(theirs, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=True)
    for lr in (1e-3, 5e-2, 0.0, 1e-3, 2e-3):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for param, reference, state in zip(ours, theirs, states, strict=True):
            reference.grad = torch.randn_like(reference)
            adamw_step(param, reference.grad, *state, lr=lr, settings=settings)
        optimizer.step()
        for param, reference, (exp_avg, exp_avg_sq, step) in zip(ours, theirs, states, strict=True):
            theirs_state = optimizer.state[reference]
            assert torch.equal(param, reference)
            assert torch.equal(exp_avg, theirs_state["exp_avg"])
            assert torch.equal(exp_avg_sq, theirs_state["exp_avg_sq"])
            assert torch.equal(step, theirs_state["step"])


def test_each_number_matters() -> None:
    def updated(**changes: float) -> torch.Tensor:
        param, lr = torch.ones(3), changes.pop("lr", 1e-2)
        state = (torch.zeros(3), torch.zeros(3), torch.zeros(()))
        for grad in (0.5, -0.2):
            adamw_step(param, torch.full((3,), grad), *state, lr=lr, settings=AdamW(**changes))
        return param

    plain = updated()
    for change in ({"lr": 2e-2}, {"beta1": 0.5}, {"beta2": 0.5}, {"eps": 0.1}, {"weight_decay": 0.5}):
        assert not torch.equal(updated(**change), plain), change


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_at_whole_vectors_give_the_bits_of_the_whole(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        count = 100_003
        start = [torch.randn(count), torch.randn(count), torch.randn(count), torch.rand(count)]

        def updated(size: int) -> list[torch.Tensor]:
            tensors = [t.clone() for t in start]
            for step in (1.0, 2.0):
                for at in range(0, count, size):
                    part = [t[at : at + size] for t in tensors]
                    adamw_step(*part, torch.tensor(step), lr=1e-2, settings=AdamW(), counted=True)
            return tensors

        whole = updated(count)
        for size in (1024, 16 * 1024, 64 * 1024):
            assert all(map(torch.equal, updated(size), whole)), size
        assert not all(map(torch.equal, updated(1001), whole))  # why parts are cut where they are
    finally:
        torch.set_num_threads(before)
