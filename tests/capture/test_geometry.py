"""Operations that give a tensor another geometry in place: recurrent layers use them, and they write nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.beside import assert_trains_as_plain
from tests.capture.parity import assert_equals_eager, squares
from torch import nn

from lading.errors import CaptureError
from lading.ir.graph import Phase
from lading.prepare import plan
from lading.tracing.trace import capture
from lading.trainer import Trainer

B, T, F = 4, 3, 8


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(B, T, F, generator=torch.Generator().manual_seed(step))}


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.layer = kind(F, F, batch_first=True, **settings)
        self.out = nn.Linear(F * (1 + self.layer.bidirectional), F)

    def forward(self, x_BTF: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x_BTF)[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(nn.RNN, {}), (nn.GRU, {"num_layers": 2, "bidirectional": True, "dropout": 0.3}), (nn.LSTM, {})],
)
def test_recurrent_layers_with_the_batch_first_train_as_in_plain_pytorch(
    kind: Callable[..., nn.RNNBase], settings: dict[str, Any], tmp_path: Path
) -> None:
    """To the bit where torch, too, runs an LSTM step by step."""
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # type: ignore[no-untyped-call]
        assert_trains_as_plain(lambda: Recurrent(kind, **settings), batch, squares, tmp_path, steps=2)


def test_an_lstm_is_captured_as_it_is() -> None:
    """Close to oneDNN's kernel of the whole, which plain PyTorch takes."""
    torch.manual_seed(0)
    model, x = Recurrent(nn.LSTM, num_layers=2), batch(0)
    graph = capture(model, x, squares)
    assert not any("mkldnn_rnn" in op.name for op in graph.ops)
    with torch.no_grad():
        expected = squares(model, x).item()
    assert "lstm" not in vars(torch._VF)
    with Trainer(plan(graph, "cpu", budget="1GB"), graph, model) as trainer:
        assert trainer.evaluate(x) == pytest.approx(expected, rel=1e-5)


class Shaped(nn.Module):
    """A line, then what the test does to its result."""

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.line = nn.Linear(F, F)
        self.change = change
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(F))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.line(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda _, h: h.transpose_(0, 1).relu(),
        lambda _, h: h.unsqueeze_(1).mul(2.0).squeeze_(1),
        lambda _, h: h.view(-1, F).t_().contiguous(),
        lambda _, h: h.clone().as_strided_((B, F), (T * F, 1)).relu(),
        lambda _, h: h + torch.zeros(1).set_(h.detach()),
    ],
    ids=["transpose_", "unsqueeze_", "t_", "as_strided_", "set_"],
)
def test_views_in_place_are_no_writes(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    graph = assert_equals_eager(Shaped(change), batch(0), squares)
    assert not any(op.mutates for op in graph.ops if op.phase is Phase.FORWARD)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda self, h: h * self.scale.unsqueeze_(0), r"unsqueeze_.*a buffer or a tensor of the batch another shape"),
        (lambda _, h: h + torch.zeros(4).resize_(B, T, F).zero_(), r"resize_.*gives a tensor other memory"),
        (lambda _, h: h + torch.zeros(4).set_().sum(), r"set_.*gives a tensor other memory"),  # pyright: ignore[reportCallIssue]
        (lambda _, h: h + torch.mul(h.detach(), 2.0, out=torch.empty(0)), r"mul\.out.*gives a tensor other memory"),
    ],
    ids=["buffer", "resize_", "set_", "out="],
)
def test_other_memory_and_other_shapes_of_what_stays_are_refused(
    change: Callable[[Any, torch.Tensor], torch.Tensor], advice: str
) -> None:
    with pytest.raises(CaptureError, match=advice):
        capture(Shaped(change), batch(0), squares)


def test_a_batch_that_the_loss_changes_in_place_is_told_and_keeps_its_values(tmp_path: Path) -> None:
    def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(given["x"].mul_(2.0)).square().mean()

    model, given = nn.Linear(F, F), batch(0)
    with pytest.warns(UserWarning, match="changes batch entry 'x' in place.*keeps its values"):
        graph = capture(model, given, loss)
    before = given["x"].clone()
    with Trainer(plan(graph, "cpu", budget="1GB"), graph, model, folder=tmp_path) as trainer:
        trainer.step(given)
    assert torch.equal(given["x"], before)


def test_a_batch_that_the_loss_turns_in_place_is_refused() -> None:
    with pytest.raises(CaptureError, match="a tensor of the batch another shape in place"):
        capture(nn.Linear(F, F), batch(0), lambda model, given: model(given["x"].transpose_(0, 1)).sum())
