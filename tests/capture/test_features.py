"""What models do besides computing: ask for values, keep state, take odd batches, give several losses."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.beside import assert_trains_as_plain
from tests.capture.parity import assert_equals_eager, squares, values
from tools.replay import Replay
from torch import nn
from torch.nn import functional as F

from lading.errors import CaptureError
from lading.ir.graph import Phase, StepGraph
from lading.tracing.batches import input_leaves
from lading.tracing.trace import capture

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Around(nn.Module):
    """A linear layer, what is asked about, a linear layer."""

    def __init__(self, forward: Forward, **attributes: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.told = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.told(self, self.first(x)))


def around(forward: Forward, **attributes: Any) -> Around:
    torch.manual_seed(0)
    return Around(forward, **attributes)


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(1))}


def refusal(model: nn.Module, data: Any = None, loss: Any = squares) -> str:
    with pytest.raises(CaptureError) as error:
        capture(model, data or batch(), loss)
    return str(error.value)


def _rotate(_: Any, x: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (2, 2))) * torch.polar(torch.ones(2), torch.ones(2))
    return torch.view_as_real(turned).flatten(-2)


def _known_numbers(_: Any, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(4) * 2
    if positions.max() > 5 and not (positions == 3).any():
        x = x * positions.sum().item()
    every_other = torch.arange(4) % 2 == 0
    kept = x[:, every_other] + x[:, ~every_other]
    return F.pad(kept, (0, int(torch.nonzero(every_other).numel())))


def _never_dropped(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.0 else x.tanh()


def _transposed(_: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.softplus(x.expand(5, 3, 4).transpose(1, 2).contiguous().transpose(1, 2))
    return F.layer_norm(y.transpose(0, 1), (4,)).sum(1)


@pytest.mark.parametrize(
    "forward",
    [
        _rotate,
        lambda _, x: torch.fft.fft(x).conj().imag,
        lambda _, x: (torch.fft.fft(x) @ torch.fft.fft(x).mH @ torch.fft.fft(x)).real,
        _known_numbers,
        _never_dropped,
        _transposed,
        lambda _, x: F.multi_head_attention_forward(  # as torch's own transformer calls it
            x, x, x, 4, 2, torch.ones(12, 4), torch.zeros(12), None, None, False, 0.0, torch.eye(4), None
        )[0],
        lambda _, x: torch.logsumexp(x.masked_fill(torch.eye(4)[:3].bool(), torch.finfo(x.dtype).min), 1, True) + x,
    ],
)
def test_equals_eager(forward: Forward) -> None:
    assert_equals_eager(around(forward), batch(), squares)


def _under_autocast(model: nn.Module, data: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.huber_loss(model(data["x"]), data["x"])


class Twice(nn.Module):
    """One module under three paths, with a norm whose buffers change, and a weight tied besides."""

    def __init__(self) -> None:
        super().__init__()
        line = nn.Linear(4, 4)
        self.one = nn.Sequential(line, nn.BatchNorm1d(4))
        self.two = nn.Sequential(self.one, nn.Tanh(), line)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = line.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.two(self.one(x)))


def test_a_module_under_several_paths_keeps_its_values(tmp_path: Path) -> None:
    model = Twice()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert_equals_eager(Twice(), batch(), squares)
    capture(model, batch(), squares)
    assert all(now is parameters[name] for name, now in model.named_parameters(remove_duplicate=False))
    assert all(parameter.grad is None for parameter in parameters.values())
    assert_trains_as_plain(Twice, lambda _: batch(), squares, tmp_path)


NORMS: list[Callable[[], nn.Module]] = [
    lambda: nn.LayerNorm(4),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.BatchNorm1d(4),
    lambda: nn.BatchNorm1d(4, track_running_stats=False),
]


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_halves_with_whole_weights_equal_eager(norm: Callable[[], nn.Module]) -> None:
    """Autocast gives a norm bfloat16 beside its float32 weight; its statistics are then float32."""
    model = around(lambda self, x: self.norm(x), norm=norm())
    assert_equals_eager(model, batch(), _under_autocast)


@pytest.mark.parametrize("norm", NORMS[:3])
def test_norms_of_halves_with_whole_weights_train_as_in_plain_pytorch(
    norm: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def built() -> nn.Module:
        return around(lambda self, x: self.norm(x), norm=norm())

    assert_trains_as_plain(built, lambda _: batch(), _under_autocast, tmp_path, steps=2)


def _masked(model: nn.Module, data: Any) -> torch.Tensor:
    x = model(data["x"])
    if not data["mask"].all():
        x = x * data["mask"][:, None]
    return x[:, : int(data["length"].max())].square().mean()


def test_numbers_of_the_batch_are_read_and_checked() -> None:
    model = around(lambda _, x: x)
    data = batch() | {"mask": torch.tensor([True, True, False]), "length": torch.tensor([1, 3])}
    graph = assert_equals_eager(model, data, _masked)
    for other in ({"mask": torch.ones(3, dtype=torch.bool)}, {"length": torch.tensor([1, 2])}):
        with pytest.raises(RuntimeError, match="as captured; capture again"):
            Replay(graph, values(model), data | other).run()
    Replay(graph, values(model), data | {"length": torch.tensor([3, 2])}).run()


def test_a_layer_that_is_dropped_at_random_is_refused() -> None:
    assert "layerdrop=0" in refusal(around(lambda _, x: x if torch.rand([]) < 0.5 else x.tanh()))


@pytest.mark.parametrize(
    ("draw", "owner"),
    [(np.random.rand, "numpy"), (random.random, "Python")],
)
def test_numbers_of_other_generators_are_refused(draw: Callable[[], float], owner: str) -> None:
    assert f"generator of {owner}" in refusal(around(lambda _, x: x * draw()))


@pytest.mark.parametrize(
    ("own", "name"),
    [
        (random.Random(1).random, "random.Random"),
        (np.random.default_rng(1).random, "Generator"),
        (np.random.RandomState(1).rand, "RandomState"),
    ],
)
def test_numbers_of_a_generator_of_ones_own_are_refused(own: Callable[[], float], name: str) -> None:
    def drawing(model: nn.Module, data: Any) -> torch.Tensor:
        return squares(model, data) * own()

    message = refusal(nn.Linear(4, 4), None, drawing)
    assert "generator loss.own (" in message
    assert f"{name})" in message
    capture(nn.Linear(4, 4), batch(), lambda model, data: squares(model, data) * (1.0 if callable(own) else own()))


def test_numbers_after_a_seed_are_refused() -> None:
    """A planned step draws as plain steps do, whose seed a captured one would not set."""

    def seeded(_: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return x + torch.rand(4)

    assert "has set torch's random generator before" in refusal(around(seeded))


class Moving(nn.Module):
    """Assigns its running mean anew in every forward."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x)
        self.seen = y
        out = y - self.mean
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return out


def _views() -> list[tuple[torch.Tensor, ...]]:
    row, square = torch.arange(8.0), torch.arange(16.0).view(4, 4)
    return [
        (row[4:],),
        (row[:4], row[4:]),
        (row[1::2], row.view(2, 4).T),
        (square.diagonal(), square),
        (square[:, 1], square.T),
        (torch.ones(1).expand(4),),
    ]


@pytest.mark.parametrize("case", range(len(_views())))
def test_constants_that_are_views_equal_eager(case: int) -> None:
    """Of one memory, in which the first that is read does not show what another reads."""
    tables = _views()[case]

    def weighed(_: Any, x: torch.Tensor) -> Any:
        return sum(x * each.mean() * each.flatten()[-1] for each in tables)

    assert_equals_eager(around(weighed), batch(), squares)


@pytest.mark.parametrize(
    "forward",
    [
        lambda module, x: x * module.table[0] + x * module.table[1],
        lambda module, x: x * module.table[:, :1].sum() + x * module.table[:, 1:].sum(),
        lambda module, x: x * module.table.diagonal() + x @ module.table,
        lambda module, x: x @ module.table.T + x * module.table.view(torch.int32)[1].float().sigmoid(),
    ],
)
def test_views_of_a_constant_equal_eager(forward: Forward) -> None:
    """Each shows the constant's memory, not what the first of them has made."""
    graph = assert_equals_eager(around(forward, table=torch.arange(16.0).view(4, 4)), batch(), squares)
    assert not any(op.name.startswith(("aten.select", "aten.slice", "aten.diagonal")) for op in graph.ops)


def test_a_constant_is_not_written_through_a_view() -> None:
    def written(module: Any, x: torch.Tensor) -> torch.Tensor:
        row = module.table[0]
        row.add_(1)
        return x * row

    assert "writes in place to a tensor that is neither" in refusal(around(written, table=torch.ones(2, 4)))


def test_a_buffer_that_is_assigned_anew_is_written() -> None:
    model = Moving()
    graph = assert_equals_eager(model, batch(), squares)
    assert model.mean.any()
    written = {graph.storages[graph.storage_of(t)].name for op in graph.ops for t in op.mutates}
    assert written == {"mean"}


def test_attributes_are_put_back() -> None:
    model = Moving()
    before = model.mean
    capture(model, batch(), squares)
    assert model.seen is None
    assert model.mean is before
    assert not before.any()


def test_a_value_carried_in_a_plain_attribute_is_refused() -> None:
    def carry(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.held = module.held + x.detach().mean()
        return x * module.held

    held = torch.zeros(())
    model = around(carry, held=held)
    assert "assigns a tensor to 'held'" in refusal(model)
    assert model.held is held


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    class Grows(Moving):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = torch.cat((self.mean, self.mean))
            return self.line(x)

    assert "'mean': expected to stay torch.float32 (4,)" in refusal(Grows())


@dataclass(frozen=True)
class Data:
    x: torch.Tensor
    options: Any = None


Named = namedtuple("Named", ["x", "scale"])


def _trees() -> list[tuple[Any, Callable[[Any], torch.Tensor], list[str]]]:
    x = batch()["x"]
    return [
        (x, lambda b: b, ["batch"]),
        (
            Data(x, {"by": [x + 1, 3, None, True]}),
            lambda b: b.x * b.options["by"][0] * b.options["by"][1],
            ["x", "options.by.0"],
        ),
        (Named(x, x + 2), lambda b: b.x * b.scale, ["x", "scale"]),
        (UserDict({"x": x, "way": "up"}), lambda b: b["x"], ["x"]),
        ({"x": x.expand(2, 3, 4), 0: x}, lambda b: b["x"].sum(0) + b[0], ["x", "0"]),
        ((x, (x + 1, [x + 2])), lambda b: b[0] * b[1][0] * b[1][1][0], ["0", "1.0", "1.1.0"]),
    ]


@pytest.mark.parametrize("case", range(6))
def test_batches_of_many_forms(case: int) -> None:
    data, chosen, names = _trees()[case]
    assert [name for name, _ in input_leaves(data)] == names
    graph = assert_equals_eager(around(lambda _, x: x), data, lambda m, b: m(chosen(b)).square().mean())
    assert [name for name, _ in graph.inputs[0]] == names


def test_an_output_of_transformers_is_a_batch() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    data = {"encoder": outputs.BaseModelOutput(last_hidden_state=batch()["x"]), "n": 2}
    graph = assert_equals_eager(
        around(lambda _, x: x), data, lambda m, b: m(b["encoder"].last_hidden_state * b["n"]).square().mean()
    )
    assert [name for name, _ in graph.inputs[0]] == ["encoder.last_hidden_state"]


class Hides:
    def __init__(self) -> None:
        self.x = torch.ones(3, 4)


@pytest.mark.parametrize(("data", "found"), [({"x": np.ones((3, 4))}, "ndarray"), ({"x": Hides()}, "Hides")])
def test_data_that_no_step_could_exchange_is_refused(data: Any, found: str) -> None:
    message = refusal(around(lambda _, x: x), data)
    assert "'x'" in message
    assert found in message


@pytest.mark.parametrize("form", [list, tuple, lambda terms: dict(enumerate(terms))])
def test_several_losses_are_summed(form: Callable[[list[torch.Tensor]], Any]) -> None:
    model = around(lambda _, x: x)

    def losses(m: nn.Module, b: Any) -> list[torch.Tensor]:
        y = m(b["x"])
        return [y.square().mean(), y.abs().sum() * 0.1, y.std()]

    def total(m: nn.Module, b: Any) -> torch.Tensor:
        first, second, third = losses(m, b)
        return first + second + third

    several, one = capture(model, batch(), lambda m, b: form(losses(m, b))), capture(model, batch(), total)
    assert several.ops == one.ops
    assert len(several.losses) == 4
    assert several.losses[0] == one.losses[0]
    assert_equals_eager(model, batch(), total)


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda m, b: (m(b["x"]).mean(), m(b["x"])), r"(3, 4)"),
        (lambda m, b: {"loss": m(b["x"]).mean(), "accuracy": torch.ones(())}, "the loss 'accuracy' does not depend"),
        (lambda m, b: (), "got none"),
    ],
)
def test_other_outputs_are_no_losses(loss: Any, found: str) -> None:
    assert found in refusal(around(lambda _, x: x), loss=loss)


def test_an_error_of_the_model_itself_names_the_module() -> None:
    def fails(_: Any, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("scale")

    message = refusal(nn.Sequential(around(fails)), loss=lambda m, b: m(b["x"]).mean())
    assert "module '0' fails" in message
    assert "KeyError: 'scale'" in message


def test_a_forward_may_convert_what_needs_no_conversion() -> None:
    def convert(dtype: torch.dtype) -> Forward:
        def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
            module.last = module.last.to(dtype)
            return x

        return forward

    assert_equals_eager(around(convert(torch.float32)), batch(), squares)
    assert "converts its own module 'last'" in refusal(around(convert(torch.float64)))


def test_a_frozen_part_in_evaluation_and_a_tied_one(tmp_path: Any) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.unused = nn.Parameter(torch.ones(2))
            self.drop = nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.drop(self.a(self.frozen(x))))

    graph: StepGraph = assert_equals_eager(Parts(), batch(), squares)
    without = [p.names[0] for p in graph.parameters if p.gradient is None]
    assert without == ["unused", "frozen.0.weight", "frozen.0.bias", "frozen.1.weight", "frozen.1.bias"]
    assert not [op for op in graph.ops if op.phase is Phase.BACKWARD and op.module.startswith("frozen")]


def test_a_view_has_the_strides_of_eager_in_dims_of_size_1() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.conv = nn.Linear(4, 4), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.line(x).transpose(1, 2).view(1, 4, 2, 2))

    graph = assert_equals_eager(Image(), {"x": torch.randn(1, 4, 4)}, squares)
    (conv,) = [op for op in graph.ops if op.name == "aten.convolution.default"]
    read, _, _, made = (graph.tensors[t] for t in (*conv.inputs, *conv.outputs))
    assert read.stride == (4, 1, 8, 4)  # not the memory of channels-last, which a stride of 16 would make it
    assert made.stride == (16, 4, 2, 1)


def test_a_model_that_mends_what_is_not_finite() -> None:
    def mended(_: Any, x: torch.Tensor) -> torch.Tensor:
        if torch.isinf(x).any() or torch.isnan(x).any():
            x = x.clamp(-1.0, 1.0)
        return x

    model = around(mended)
    graph = assert_equals_eager(model, batch(), squares)
    broken = {"x": torch.full((3, 4), torch.inf)}
    with pytest.raises(RuntimeError, match="expected finite numbers in the model itself"):
        Replay(graph, values(model), broken).run()
