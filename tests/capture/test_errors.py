"""What cannot be captured is refused: the message names the operation, the module and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.capture.parity import squares
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lading.errors import CaptureError
from lading.tracing.trace import capture

pytestmark = pytest.mark.filterwarnings("ignore:.*non-leaf Tensor.*:UserWarning")
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Outer(nn.Module):
    """A line, then whatever the test puts into module ``inner``."""

    def __init__(self, forward: Forward, **attributes: Any) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.inner = Inner(forward, **attributes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.line(x))


class Inner(nn.Module):
    def __init__(self, forward: Forward, **attributes: Any) -> None:
        super().__init__()
        self.told = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.told(self, x)


def refusal(forward: Forward, **attributes: Any) -> str:
    """The message when a model with this forward is captured."""
    with pytest.raises(CaptureError) as error:
        capture(Outer(forward, **attributes), {"x": torch.ones(3, 4)}, squares)
    return str(error.value)


def _if_positive(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def _count(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.seen += 1
    return x * module.seen


def _constant(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(1.0)


def _forward_mode(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, which compiles its rules when first asked
        return torch.func.jvp(partial(F.linear, weight=torch.ones(4, 4), bias=torch.ones(4)), (x,), (x,))[1]


def _random_again(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = checkpoint(F.dropout, x, 0.5, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize(
    ("forward", "operation", "advice"),
    [
        (lambda _, x: x * x.sum().item(), "_local_scalar_dense", "keep it a tensor"),
        (_if_positive, "_local_scalar_dense", "torch.where"),
        (lambda _, x: x[x > 0], "aten.index.Tensor", "masks"),
        (lambda _, x: x.flatten()[torch.nonzero(x.flatten())], "nonzero", "static shapes"),
        (lambda _, x: x @ torch.ones(5, 4), "aten.mm", "same reduction dim"),
        (lambda _, x: x.long() @ torch.ones(4, 4).t(), "aten.mm", "same dtype"),  # the fake rule lets it pass
        (lambda _, x: x.view(7, 3), "aten.view", "invalid for input of size 12"),
        (lambda _, x: x.to_sparse().to_dense(), "sparse", "dense"),
        (_forward_mode, "_efficientzerotensor", "autograd.grad"),
        (_random_again, "bernoulli", "checkpointing off"),
        (_constant, "aten.add_", "out-of-place"),
    ],
)
def test_an_operation(forward: Forward, operation: str, advice: str) -> None:
    message = refusal(forward)
    assert operation in message
    assert "'inner'" in message or operation == "bernoulli"  # met in backward
    assert advice in message


def test_a_counter_that_is_not_a_buffer() -> None:
    seen = torch.zeros(4)
    message = refusal(_count, seen=seen)
    assert "'inner'" in message
    assert "register_buffer" in message
    assert torch.equal(seen, torch.zeros(4))


def test_a_parameter_that_is_not_registered() -> None:
    hidden = nn.Parameter(torch.ones(4))
    message = refusal(lambda module, x: x * module.hidden[0], hidden=[hidden])  # type: ignore[index]
    assert "'inner'" in message
    assert "ParameterList" in message
    assert hidden.grad is None


def test_a_fake_tensor_that_is_not_registered() -> None:
    with FakeTensorMode():
        stray = torch.ones(4)
    message = refusal(lambda module, x: x * module.stray, stray=stray)  # type: ignore[operator]
    assert "'inner'" in message
    assert "(4,)" in message
    assert "register_buffer" in message


def test_lengths_of_packed_sequences_decide_what_runs() -> None:
    def packed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        sequences = nn.utils.rnn.pack_padded_sequence(x.repeat(2, 1, 1), [3, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(module.layer(sequences)[0], batch_first=True)[0]  # type: ignore[operator]

    message = refusal(packed, layer=nn.LSTM(4, 4, batch_first=True))
    assert "give the RNN padded sequences" in message
    pack = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(CaptureError, match="'x': expected padded sequences, got a PackedSequence"):
        capture(nn.LSTM(4, 4), {"x": pack}, lambda model, batch: model(batch["x"])[0].data.mean())


def test_ctc_of_torch_is_refused_with_another() -> None:
    def ctc(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scores = x.unsqueeze(1).repeat(1, 2, 1).log_softmax(-1)
        ones = torch.ones(2, 2, dtype=torch.long)
        return nn.functional.ctc_loss(scores, ones, torch.tensor([3, 3]), torch.tensor([2, 1]))

    assert "a CTC of tensor operations on padded targets" in refusal(ctc)


def test_a_plain_attribute_is_a_constant() -> None:
    graph = capture(Outer(lambda m, x: x * m.scale, scale=torch.arange(4.0)), {"x": torch.ones(3, 4)}, squares)  # type: ignore[operator]
    held = [s.data for s in graph.storages if s.data is not None]
    assert torch.arange(4.0).numpy().tobytes() in held


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda model, batch: model(batch["x"]), r"\(3, 4\)"),
        (lambda model, batch: 1.0, "float"),
        (lambda model, batch: model(batch["x"]).detach().sum(), "requires_grad"),
    ],
)
def test_the_loss(loss: Any, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        capture(nn.Linear(4, 4), {"x": torch.ones(3, 4)}, loss)


def test_nothing_to_train() -> None:
    with pytest.raises(CaptureError, match="trainable parameter; check requires_grad"):
        capture(nn.Linear(4, 4).requires_grad_(False), {"x": torch.ones(3, 4)}, squares)


def test_no_hook_is_left_after_a_refusal() -> None:
    model = Outer(_if_positive)
    with pytest.raises(CaptureError):
        capture(model, {"x": torch.ones(3, 4)}, squares)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.inner.told = lambda _, x: x
    assert capture(model, {"x": torch.ones(3, 4)}, squares).ops


def _of_grad(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    torch.autograd.grad(loss, list(model.parameters()))
    return loss


def _of_backward(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def _of_optimizer(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (_of_grad, r"expected create_graph=True or retain_graph=True with torch\.autograd\.grad"),
        (_of_backward, r"expected no backward\(\) inside, found one; return the loss, and let Trainer\.step"),
        (_of_optimizer, r"expected no optimizer inside, found SGD\.step\(\); return the loss"),
    ],
)
def test_a_loss_that_does_what_a_step_does_is_refused(loss: Any, why: str) -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(CaptureError, match=why):
        capture(model, x, loss)
    _of_backward(model, x)  # which runs again in eager


class Pair(nn.Module):
    """Two lines, whose weights a test may lay into each other, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) + self.mean


def test_memory_that_a_step_changes_under_two_names_is_refused() -> None:
    """In eager PyTorch a change of one changes the other, too; a plan has each in a place of its own."""
    batch = {"x": torch.ones(3, 4)}
    by_data = Pair()
    by_data.b.weight.data = by_data.a.weight.data
    with pytest.raises(CaptureError, match=r"b\.weight: expected memory of its own, found elements of a\.weight"):
        capture(by_data, batch, squares)
    rows = Pair()
    rows.b.weight = nn.Parameter(rows.a.weight.detach()[:, ::2])
    with pytest.raises(CaptureError, match=r"b\.weight: expected memory of its own"):
        capture(rows, batch, lambda _, batch: squares(rows.a, batch) + rows.b.weight.sum())
    follows = Pair()
    follows.register_buffer("mean", follows.a.bias.detach())
    with pytest.raises(CaptureError, match=r"mean: expected memory of its own, found elements of a\.bias"):
        capture(follows, batch, squares)


@pytest.mark.parametrize("other", [lambda weight: weight.data, lambda weight: weight.detach()[1:, 0]])
def test_a_constant_with_the_memory_of_what_is_trained_is_refused(other: Any) -> None:
    """In eager PyTorch it follows each update."""
    model, batch = nn.Linear(4, 4), {"x": torch.ones(3, 4)}
    before = other(model.weight)
    match = r"expected a constant of the step \(float32 .*found the memory of weight, which the step changes"
    with pytest.raises(CaptureError, match=match):
        capture(model, batch, lambda model, batch: squares(model, batch) + before.sum())
    before = before.clone()
    capture(model, batch, lambda model, batch: squares(model, batch) + before.sum())
    model.bias.requires_grad_(False)
    bias = model.bias.detach()
    capture(model, batch, lambda model, batch: squares(model, batch) + bias.sum())


def test_a_constant_that_is_a_small_part_of_a_large_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lading.tracing.tracer._LIMIT_BYTES", 1 << 10)
    row, batch = torch.ones(100, 4)[3], {"x": torch.ones(3, 4)}
    with pytest.raises(CaptureError, match=r"found a view of 1\.56 KiB.*; clone\(\) it"):
        capture(nn.Linear(4, 4), batch, lambda model, batch: squares(model, batch) + row.sum())


def test_expanded_memory_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    model.register_buffer("scale", torch.ones(1).expand(4))
    with pytest.raises(CaptureError, match=r"scale: expected memory of its own for each element.* \(0,\); register"):
        capture(model, torch.ones(2, 4), lambda model, batch: (model(batch) * model.scale).sum())


def test_memory_that_is_apart_or_does_not_change_may_be_shared() -> None:
    batch = {"x": torch.ones(3, 4)}
    columns, base = Pair(), torch.randn(4, 8)
    columns.a.weight, columns.b.weight = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 1::2])
    assert capture(columns, batch, squares).parameters
    frozen = Pair()
    frozen.b.weight.data = frozen.a.weight.data
    frozen.a.weight.requires_grad_(False)
    frozen.b.weight.requires_grad_(False)
    assert capture(frozen, batch, squares).parameters
    tied = Pair()
    tied.b.weight = tied.a.weight
    assert ("a.weight", "b.weight") in [p.names for p in capture(tied, batch, squares).parameters]


def test_entries_of_a_batch_that_share_what_the_loss_changes_are_refused() -> None:
    x = torch.ones(3, 4)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        target = batch["y"].masked_fill_(batch["y"] > 0, 0.0)
        return F.mse_loss(model(batch["x"]), target)

    with pytest.raises(CaptureError, match=r"batch entry 'y': expected memory of its own, as the step changes 'y'"):
        capture(Pair(), {"x": x, "y": x}, loss)
    with pytest.warns(UserWarning, match="changes batch entry 'y' in place"):
        assert capture(Pair(), {"x": x, "y": x.clone()}, loss).parameters
    assert capture(Pair(), {"x": x, "y": x}, lambda model, b: F.mse_loss(model(b["x"]), b["y"])).parameters


@pytest.mark.parametrize("others", [{"a.b": 1.0, "a": {"b": 2.0}}, {0: 1.0, "0": 2.0}])
@pytest.mark.parametrize("kind", [torch.tensor, float])
def test_keys_of_a_batch_that_are_one_name_are_refused(others: dict[Any, Any], kind: Callable[[float], Any]) -> None:
    """Values of both would be taken from one of them."""
    batch = {"x": torch.ones(3, 4)} | {
        key: {"b": kind(item["b"])} if isinstance(item, dict) else kind(item) for key, item in others.items()
    }
    with pytest.raises(CaptureError, match=r"differ, found two of '(a\.b|0)'; rename one"):
        capture(Pair(), batch, squares)


@pytest.mark.parametrize("name", ["mean", "a.weight"])
def test_data_that_the_forward_assigns_is_refused(name: str) -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tensor = model.get_buffer(name) if name == "mean" else model.get_parameter(name)
        tensor.data = tensor.data.clamp(-1, 1)
        return squares(model, batch)

    with pytest.raises(CaptureError, match=rf"assigns to the \.data of '{name}'"):
        capture(Pair(), {"x": torch.ones(3, 4)}, loss)


def test_a_lazy_module_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"1\.weight: expected a shape, found an UninitializedParameter of a lazy"):
        capture(model, {"x": torch.ones(3, 4)}, squares)
    model(torch.ones(3, 4))
    assert capture(model, {"x": torch.ones(3, 4)}, squares).parameters


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_and_a_search_for_anomalies_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(CaptureError, match=r"^1: expected a module with a forward in Python.*torch\.jit \(Linear\)"):
        capture(model, {"x": torch.ones(3, 4)}, squares)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(CaptureError, match=r"set_detect_anomaly\(False\) at capture, found it on"),
    ):
        capture(nn.Linear(4, 4), {"x": torch.ones(3, 4)}, squares)
