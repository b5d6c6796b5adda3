"""Graphs for a GPU compute what the captured ones do, with each GPU kernel played by what a CPU has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ir.test_retarget import Attends
from tools.replay import Replay

import lading.tracing.interpret
from lading.ir.graph import StepGraph
from lading.ir.retarget import retarget
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.trace import capture

ATEN = torch.ops.aten
CPU = ATEN._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
resolve = lading.tracing.interpret._resolve


def flash(q: Any, k: Any, v: Any, dropout: float, causal: bool, debug: bool, *, scale: float | None = None) -> Any:
    assert not dropout
    assert not debug
    out, lse = CPU(q, k, v, 0.0, causal, scale=scale)
    return out, lse.contiguous(), None, None, q.shape[2], k.shape[2], None, None, None


def flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, scale: Any = None) -> Any:
    first, second, queries, keys, dropout, causal, seed, unused = rest
    assert (first, second, queries, keys, dropout) == (None, None, q.shape[2], k.shape[2], 0.0)
    assert lse.is_contiguous()
    assert not seed.view(torch.int64).any()
    assert unused.shape == ()
    return CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def efficient(
    q: Any, k: Any, v: Any, bias: Any, keep: bool, dropout: float, causal: bool, *, scale: float | None = None
) -> Any:
    assert keep
    assert not dropout
    assert q.shape[1] == k.shape[1] == v.shape[1]
    assert bias is None or bias.shape == (*q.shape[:3], k.shape[2])
    assert bias is None or (bias.stride(-1) == 1 and not any(s % 8 for s in bias.stride()[:-1]))
    out, lse = CPU(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    rows = -(-q.shape[2] // 32) * 32
    return out, torch.nn.functional.pad(lse, (0, rows - q.shape[2])), None, None


def efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, *rest: Any, scale: Any = None
) -> Any:
    seed, offset, dropout, wanted, causal = rest
    assert (seed.item(), offset.item(), dropout, wanted) == (0, 0, 0.0, [True, True, True, False])
    lse = lse[:, :, : q.shape[2]]
    return *CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale), None


def rms_norm_backward(grad: Any, x: Any, dims: Any, rstd: Any, weight: Any, wanted: Any) -> Any:
    """In the dtype of the roots, as a GPU's kernel."""
    over = tuple(range(-len(dims), 0))
    with torch.inference_mode(False), torch.enable_grad():
        wide = x.to(rstd.dtype, copy=True).requires_grad_()
        factor = (wide.new_ones(dims) if weight is None else weight.to(rstd.dtype, copy=True)).requires_grad_()
        root = (wide.square().mean(over, keepdim=True) + 1e-5).rsqrt()
        of_x, of_weight = torch.autograd.grad(wide * root * factor, (wide, factor), grad.to(rstd.dtype, copy=True))
    torch.testing.assert_close(root.detach(), rstd)
    return of_x.to(x.dtype) if wanted[0] else None, of_weight.to(x.dtype) if wanted[1] else None


PLAYED: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention.default": flash,
    "aten._scaled_dot_product_flash_attention_backward.default": flash_backward,
    "aten._scaled_dot_product_efficient_attention.default": efficient,
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_backward,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
}


def llama(dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[..., torch.Tensor]]:
    sizes = {"num_layers": 1, "dim": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 80, "max_seq_len": 40}
    model = build_model("llama", **sizes).to(dtype)
    return model, {"tokens": torch.randint(80, (2, 38))}, next_byte_loss


def masked(dtype: torch.dtype, length: int = 16, **sizes: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Any]:
    model = Attends(**sizes).to(dtype)
    if model.mask is not None:
        model.mask.normal_()  # type: ignore[operator]
    x = torch.randn(3, length, model.heads * model.width, dtype=dtype)
    return model, {"x": x}, lambda m, b: m(b["x"]).square().sum()


CASES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "flash, shared heads": lambda: llama(torch.bfloat16),
    "efficient, shared heads": lambda: llama(torch.float32),
    "mask of rows": lambda: masked(torch.float32, mask=(16, 16)),
    "mask of heads, 16 bits": lambda: masked(torch.bfloat16, mask=(1, 2, 16, 16)),
    "mask of odd rows": lambda: masked(torch.float32, 15, mask=(15, 15)),
    "mask of odd columns": lambda: masked(torch.float32, 15, mask=(3, 1, 1, 15)),
    "mask and shared heads": lambda: masked(torch.float32, heads=4, kv_heads=2, mask=(3, 1, 16, 16)),
    "layer norm in 16 bits": lambda: masked(torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, batch, loss = CASES[name]()
    graph = capture(model, batch, loss)
    wanted = values(graph, model, batch)
    new = retarget(graph, "cuda")
    monkeypatch.setattr(lading.tracing.interpret, "_resolve", lambda op: PLAYED.get(op) or on_cpu(op))
    assert any(op.name in PLAYED for op in new.ops)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if next(model.parameters()).dtype is torch.bfloat16 else {}
    for old_value, new_value in zip(wanted, values(new, model, batch), strict=True):
        torch.testing.assert_close(new_value, old_value, **tolerance)


def on_cpu(name: str) -> Callable[..., Any]:
    """The operation, with results in the dtypes that a GPU gives."""
    call = resolve(name)
    if name == "aten.native_layer_norm.default":
        return lambda *args: widened(call(*args))
    if name == "aten.native_layer_norm_backward.default":
        return lambda *args: call(*(a.to(args[0].dtype) if i in (3, 4) else a for i, a in enumerate(args)))
    return lambda *args, **named: call(*args, **{**named, **({"device": "cpu"} if "device" in named else {})})


def widened(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return results[0], results[1].float(), results[2].float()


def values(graph: StepGraph, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The loss and every gradient."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    replay = Replay(graph, named, batch)
    loss = replay.run().clone()
    return [loss, *(replay.tensor(p.gradient).clone() for p in graph.parameters if p.gradient is not None)]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_is_dropout(share: float) -> None:
    """The same share is dropped, the rest scaled, and gradients go where values went."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(share))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    graph = retarget(capture(model, {"x": torch.ones(400, 64)}, lambda m, b: m(b["x"]).sum()), "cuda")
    assert any("native_dropout" in op.name for op in graph.ops)
    torch.manual_seed(0)
    loss, _, of_bias = values(graph, model, {"x": torch.ones(400, 64)})
    assert abs(loss.item() / (400 * 64) - 1) < 0.02
    torch.testing.assert_close(of_bias.sum(), loss)
