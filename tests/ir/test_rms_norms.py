"""Norms that a GPU runs as one kernel are found whole, whatever is frozen, and a model's own are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.ir.test_retarget import names
from tests.ir.test_retarget_values import PLAYED, on_cpu, values
from torch import nn
from torch.nn import functional as F

import lading.tracing.interpret
from lading.ir.retarget import retarget
from lading.tracing.trace import capture


class Block(nn.Module):
    """A projection of a norm beside the way around it; ``norm`` takes x and a weight."""

    def __init__(self, norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(torch.rand(24) + 0.5)
        self.before, self.after = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return x + self.after(self.norm(x, self.weight))


def torchs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (24,), weight, 1e-5)


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (24,), eps=1e-5) * weight.sum()


def of_two_dims(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (4, 6))
    return F.rms_norm(pairs, (4, 6), weight.view(4, 6), 1e-5).flatten(-2)


def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Llama's published code."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight


def roots_read(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One that gives away what a norm keeps to itself."""
    squares = torch.ops.aten.add.Scalar(x.pow(2).mean(-1, keepdim=True), 1e-5)
    root = squares.rsqrt()
    return x * root * weight + root


def step_of(
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype, frozen: tuple[str, ...] = ()
) -> tuple[Block, dict[str, torch.Tensor], Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = Block(norm).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    return model, {"x": torch.randn(3, 5, 24).to(dtype)}, lambda m, b: m(b["x"]).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["single", "half", "double"])
@pytest.mark.parametrize("norm", [torchs, plain, of_two_dims])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("before",)], ids=["all", "no weight", "no x"])
def test_torchs_own_norm_is_one_kernel_each_way(
    norm: Callable[..., torch.Tensor], dtype: torch.dtype, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, loss = step_of(norm, dtype, frozen)
    graph = capture(model, batch, loss)
    new = retarget(graph, "cuda")
    found = names(new)
    assert found["_fused_rms_norm"] == 1
    assert found["_fused_rms_norm_backward"] == (0 if norm is plain and frozen == ("before",) else 1)
    assert found["rsqrt"] == found["mean"] - names(graph)["mean"] + 1 == 0
    wanted = values(graph, model, batch)
    monkeypatch.setattr(lading.tracing.interpret, "_resolve", lambda op: PLAYED.get(op) or on_cpu(op))
    roots = [new.tensors[op.results[1]] for op in new.ops if op.name == "aten._fused_rms_norm.default"]
    assert [t.dtype for t in roots] == ["float64" if dtype is torch.float64 else "float32"]
    tolerance = {"rtol": 3e-2, "atol": 2e-3} if dtype is torch.bfloat16 else {}
    for old_value, new_value in zip(wanted, values(new, model, batch), strict=True):
        torch.testing.assert_close(new_value, old_value, **tolerance)


@pytest.mark.parametrize("norm", [own, roots_read])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_eager_runs_in_operations_stays_so(norm: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    graph = capture(*step_of(norm, dtype))
    assert names(retarget(graph, "cuda")) == names(graph)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_weight_of_another_dtype_is_no_kernel() -> None:
    """Eager warns and runs operations, too."""
    graph = capture(*step_of(lambda x, weight: F.rms_norm(x, (24,), weight.float(), 1e-5), torch.bfloat16))
    assert names(retarget(graph, "cuda")) == names(graph)
