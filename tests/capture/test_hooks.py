"""Hooks on parameters and modules: part of the captured step, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.beside import assert_trains_as_plain
from tests.capture.parity import assert_equals_eager, squares
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from lading.errors import CaptureError
from lading.tracing.frozen_values import Watch
from lading.tracing.trace import capture

B, F = 4, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(6, F), nn.Linear(F, F)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.line(self.table(rows).tanh())


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.randint(6, (B,), generator=torch.Generator().manual_seed(step))}


def _halved(gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


def masked() -> Net:
    """A model of which half the rows of the table are to stay as they are."""
    net = Net()
    mask = (torch.arange(6) < 3).float().unsqueeze(1)
    net.table.weight.register_hook(lambda gradient: gradient * mask)
    net.table.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return net


class Lazy(nn.Module):
    """Hooks into its part at the first call, and remembers that it did, as transformers does to record outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.is_hooked = nn.Linear(F, F), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        if not self.is_hooked:
            self.is_hooked = True
            self.line.register_forward_hook(lambda module, _, out: vars(module)["outputs"].append(out))
        vars(self.line)["outputs"] = outputs
        self.line(x)
        del vars(self.line)["outputs"]
        return torch.stack(outputs)


def test_what_a_forward_hooks_into_modules_is_taken_away_again() -> None:
    """Left there, with the flag put back, it would run twice from then on."""
    model, given = Lazy(), {"x": torch.ones(B, F)}
    frozen = capture(model, given, squares).frozen
    Watch(frozen, model).check([given], ["x"])
    for _ in range(2):
        assert model(given["x"]).shape == (1, B, F)
    Watch(frozen, model).check([given], ["x"])  # the hook makes no other step


def test_a_masked_table_trains_as_in_plain_pytorch(tmp_path: Path) -> None:
    assert_trains_as_plain(masked, batch, squares, tmp_path, steps=2)


def _scaled_output(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 0.5


def _on_node(_: Any, __: Any, out: torch.Tensor) -> None:
    assert out.grad_fn is not None
    out.grad_fn.register_hook(lambda ins, _: _halved(ins))


def _on_activation(_: Any, __: Any, out: torch.Tensor) -> None:
    out.register_hook(lambda gradient: gradient * 0.5)


def _of_old(hook: Callable[[nn.Module], Any], module: nn.Module) -> None:
    """Add what torch calls old, and much code has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        hook(module)


@pytest.mark.parametrize(
    "add",
    [
        lambda net: net.line.weight.register_hook(lambda gradient: gradient * 0.5),
        lambda net: net.line.register_full_backward_hook(lambda _, ins, __: _halved(ins)),
        lambda net: net.line.register_full_backward_pre_hook(lambda _, outs: _halved(outs)),
        lambda net: net.line.register_forward_hook(_scaled_output),
        lambda net: net.line.register_forward_hook(_on_node),
        lambda net: net.line.register_forward_hook(_on_activation),
        lambda net: nn.modules.module.register_module_forward_hook(_scaled_output),  # pyright: ignore[reportArgumentType]
        lambda net: weight_norm(net.line),
        lambda net: spectral_norm(net.line),
        lambda net: orthogonal(net.line),
        lambda net: parametrize.register_parametrization(net.line, "weight", nn.Tanh()),
        lambda net: _of_old(nn.utils.weight_norm, net.line),
        lambda net: prune.l1_unstructured(net.line, "weight", amount=0.5),
    ],
    ids=[
        "parameter", "backward", "backward_pre", "forward", "node", "activation", "global",
        "weight_norm", "spectral_norm", "orthogonal", "parametrization",
        "weight_norm by a hook", "pruned by a hook",
    ],
)  # fmt: skip
def test_hooks_and_parametrizations_equal_eager(add: Callable[[Any], Any]) -> None:
    net = Net()
    handle = add(net)
    try:
        assert_equals_eager(net, batch(), squares)
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def test_saved_tensors_hooks_equal_eager() -> None:
    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        with autograd_graph.saved_tensors_hooks(lambda t: t * 0.5 if t.is_floating_point() else t, lambda t: t):
            return squares(model, given)

    assert_equals_eager(Net(), batch(), loss)


def _zero_grad(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _in_every_step(model: Any, given: Any) -> torch.Tensor:
    model.line.weight.register_hook(torch.neg)
    return squares(model, given)


def _after_all(net: Net) -> None:
    autograd_graph.register_multi_grad_hook((net.line.weight, net.table.weight), lambda _: None)


@pytest.mark.parametrize(
    ("add", "loss", "message"),
    [
        (
            lambda net: net.line.weight.register_post_accumulate_grad_hook(_zero_grad),
            squares,
            r"parameter 'line\.weight' has a post_accumulate_grad_hook, _zero_grad \(test_hooks\.py:.*register_hook",
        ),
        (_after_all, squares, r"parameter '.*weight' has a hook of register_multi_grad_hook.*register_hook on each"),
        (lambda _: None, _in_every_step, r"the step changes the hooks of parameter 'line\.weight'.*before capture"),
    ],
    ids=["post_accumulate", "multi", "in_every_step"],
)
def test_hooks_that_are_no_part_of_a_step_are_refused(add: Any, loss: Any, message: str) -> None:
    net = Net()
    add(net)
    with pytest.raises(CaptureError, match=message):
        capture(net, batch(), loss)


def test_what_hooks_collect_is_put_back() -> None:
    net = Net()
    seen: list[Any] = []
    net.line.register_forward_hook(lambda _, __, out: seen.append(out))
    net.line.weight.register_hook(lambda gradient: (seen.append(gradient), gradient)[1])
    capture(net, batch(), squares)
    assert seen == []
