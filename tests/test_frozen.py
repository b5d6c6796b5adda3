"""What a captured step takes for the same in every step: another value of it is an error, never another training."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lading.capture.frozen import Watch
from lading.capture.trace import capture
from lading.errors import ConfigError
from lading.prepare import plan
from lading.trainer import Trainer
from tests.machines import small_machine

B, F = 4, 8
WEIGHT = 0.5
SETTINGS = {"aux": 0.5}
ARGUMENTS = SimpleNamespace(weight=0.5, verbose=False)


class Net(nn.Module):
    limit = 6.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(F, F), nn.Dropout(0.5), nn.Linear(F, F)
        self.scale = 2.0
        self.epoch = 0
        self.shifts = [0.0, 1.0]
        self.options = SimpleNamespace(gain=3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x)).clamp(max=self.limit) * self.scale
        return self.second(x + self.shifts[1]) * self.options.gain


def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["x"]).square().mean() * batch.get("w", 1.0)


def batch(**more: Any) -> dict[str, Any]:
    return {"x": torch.ones(B, F), **more}


def trainer(model: nn.Module, given: Any, loss: Any, folder: Path) -> Trainer:
    graph = capture(model, given, loss)
    return Trainer(plan(graph, small_machine(), budget="100%"), graph, model, folder=folder)


@pytest.mark.parametrize(
    ("captured", "given", "message"),
    [
        ({"w": 1.0}, {"w": 2.0}, r"'w' = 1\.0, as captured, got 2\.0"),
        ({"w": 1.0}, {"w": 1}, r"'w' = 1\.0, as captured, got 1"),
        ({"w": 1.0}, {}, r"'w' = 1\.0, as captured, got nothing"),
        ({}, {"w": 2.0}, r"'w' = nothing, as captured, got 2\.0"),
        ({"how": {"kind": "sum"}}, {"how": {"kind": "mean"}}, r"'how\.kind' = 'sum', as captured, got 'mean'"),
        ({"flags": (True, None)}, {"flags": (False, None)}, r"'flags\.0' = True, as captured, got False"),
        ({"mask": None}, {"mask": "x"}, r"'mask' = None, as captured, got 'x'"),
        ({"m": torch.ones(1)}, {"m": None}, r"'m' = a tensor, as captured, got None"),
        ({"m": None}, {"m": torch.ones(1)}, r"'m' = None, as captured, got a tensor"),
        ({"rows": []}, {"rows": [3]}, r"'rows' = 'empty list', as captured, got nothing"),
    ],
)
def test_numbers_texts_and_flags_of_a_batch(captured: Any, given: Any, message: str) -> None:
    watch = Watch(capture(Net(), batch(**captured), loss_fn).frozen, None)
    inputs = [name for name, value in batch(**captured).items() if isinstance(value, torch.Tensor)]
    watch.check([batch(**captured)], inputs)
    with pytest.raises(ConfigError, match=f"micro-batch 1: expected {message}; .*make it a tensor"):
        watch.check([batch(**captured), batch(**given)], inputs)


def test_a_batch_of_another_number_runs_no_step(tmp_path: Path) -> None:
    with trainer(Net(), batch(w=1.0), loss_fn, tmp_path) as running:
        running.step(batch(w=1.0))
        before = running.value("first.weight")
        with pytest.raises(ConfigError, match=r"expected 'w' = 1\.0"):
            running.step(batch(w=0.5))
        assert running.steps == 1
        assert torch.equal(running.value("first.weight"), before)
        running.step(batch(w=1.0))


def _scale(model: Any) -> None:
    model.scale = 1.0


def _frozen(model: Any) -> None:
    model.first.weight.requires_grad_(False)


def _hooked(model: Any) -> None:
    model.first.weight.register_hook(torch.neg)


def _module_hooked(model: Any) -> None:
    model.drop.register_forward_hook(lambda *_: None)


def _shifted(model: Any) -> None:
    model.shifts[1] = 0.0


def _optioned(model: Any) -> None:
    model.options.gain = 1.0


def _another(model: Any) -> None:
    model.drop = nn.Identity()


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: model.eval(), r"training = True, as captured, got False"),
    (lambda model: model.drop.eval(), r"drop\.training = True, as captured, got False"),
    (_frozen, r"first\.weight\.requires_grad = True, as captured, got False"),
    (_hooked, r"hooks of first\.weight = \(\), as captured, got \('hook .*neg"),
    (_module_hooked, r"hooks of drop = \(\), as captured, got \('forward_hook"),
    (_scale, r"scale = 2\.0, as captured, got 1\.0"),
    (_shifted, r"shifts\.1 = 1\.0, as captured, got 0\.0"),
    (_optioned, r"options\.gain = 3\.0, as captured, got 1\.0"),
    (_another, r"type of drop = 'Dropout', as captured, got 'Identity'"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_model_that_changed_between_capture_and_trainer(change: Callable[[Any], Any], message: str) -> None:
    model = Net()
    frozen = capture(model, batch(), loss_fn).frozen
    change(model)
    with pytest.raises(ConfigError, match=f"expected {message}.*; a captured step does not see the change"):
        Watch(frozen, model)


@pytest.mark.parametrize(("change", "message"), CHANGES[:-1])
def test_a_model_that_changes_between_two_steps(change: Callable[[Any], Any], message: str) -> None:
    model = Net()
    watch = Watch(capture(model, batch(), loss_fn).frozen, model)
    model.epoch = 1  # nothing that the step's code names
    watch.check([batch()], ["x"])
    change(model)
    with pytest.raises(ConfigError, match=f"expected {message}"):
        watch.check([batch()], ["x"])


def test_another_instance_must_be_alike() -> None:
    frozen = capture(Net(), batch(), loss_fn).frozen
    Watch(frozen, Net())
    with pytest.raises(ConfigError, match="training = True"):
        Watch(frozen, Net().eval())


class Losses:
    """A loss that is a method, of an object whose loop counts steps."""

    weight = 0.5

    def __init__(self) -> None:
        self.gain, self.steps = 0.5, 0

    def total(self, model: nn.Module, given: Any) -> torch.Tensor:
        return self.inner(model(given["x"])) * self.weight

    def inner(self, value: torch.Tensor) -> torch.Tensor:
        return value.square().mean() * self.gain


class Counting(nn.Module):
    """Counts its calls, and has a list that no code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(F, F)
        self.child.history = []  # type: ignore[assignment]
        self.calls = 0

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        self.calls += 1
        return SimpleNamespace(moved=self.child(x).square().mean())


moved: float | None = None
LOG = logging.getLogger("tests.frozen")


def _moved(model: nn.Module, given: Any) -> torch.Tensor:
    return model(given["x"]).moved


def _logged(log: logging.Logger, model: nn.Module, given: Any) -> torch.Tensor:
    log.debug("a step")
    LOG.debug("a step")
    return _moved(model, given)


def test_an_attribute_is_no_variable_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(capture(Counting(), batch(), _moved).frozen, None)
    monkeypatch.setitem(globals(), "moved", 0.5)
    watch.check([batch()], ["x"])


def test_a_list_that_no_code_names_may_grow() -> None:
    model: Any = Counting()
    watch = Watch(capture(model, batch(), _moved).frozen, model)
    model.child.history.append(0.5)
    watch.check([batch()], ["x"])


def test_what_a_logger_shows_is_no_part_of_a_step() -> None:
    own = logging.Logger("own")
    watch = Watch(capture(Counting(), batch(), partial(_logged, own)).frozen, None)
    own.setLevel(logging.DEBUG)
    handler = logging.NullHandler()
    LOG.addHandler(handler)
    watch.check([batch()], ["x"])
    LOG.removeHandler(handler)


def test_a_counter_that_makes_no_other_step_may_move_on() -> None:
    model = Counting()
    frozen = capture(model, batch(), _moved).frozen
    model(torch.ones(B, F))
    Watch(frozen, model).check([batch()], ["x"])


def test_settings_that_no_forward_reads_may_change() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    ids = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}

    def scaled(model: Any, given: Any) -> torch.Tensor:
        return model(**given).loss * model.config.hidden_size

    frozen = capture(model, ids, scaled).frozen
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.dtype = "float32"  # both as saving does
    model.generation_config.use_cache = False
    Watch(frozen, model)
    model.config.n_embd = 4  # read as hidden_size
    with pytest.raises(ConfigError, match=r"config\.n_embd = 8, as captured, got 4"):
        Watch(frozen, model)


def test_a_number_that_became_a_list_is_called_so() -> None:
    model: Any = Net()
    frozen = capture(model, batch(), loss_fn).frozen
    model.options.gain = [1.0]
    with pytest.raises(ConfigError, match=r"options\.gain = 3\.0, as captured, got a list"):
        Watch(frozen, model)


def _with_global(model: nn.Module, given: Any) -> torch.Tensor:
    return model(given["x"]).mean() * WEIGHT * SETTINGS["aux"] * ARGUMENTS.weight


def _set(held: Any, name: str) -> None:
    setattr(held, name, 0.25)


def _closure() -> tuple[Any, Callable[[], None]]:
    weight = 0.5

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return model(given["x"]).mean() * weight

    def change() -> None:
        nonlocal weight
        weight = 0.25

    return loss, change


def _default() -> tuple[Any, Callable[[], None]]:
    def loss(model: nn.Module, given: Any, weight: float = 0.5) -> torch.Tensor:
        return model(given["x"]).mean() * weight

    return loss, lambda: setattr(loss, "__defaults__", (0.25,))


def _partial() -> tuple[Any, Callable[[], None]]:
    def loss(model: nn.Module, given: Any, *, weight: float) -> torch.Tensor:
        return model(given["x"]).mean() * weight

    made = partial(loss, weight=0.5)
    return made, lambda: made.keywords.update(weight=0.25)


def _method(name: str) -> tuple[Any, Callable[[], None]]:
    losses = Losses()
    return losses.total, partial(_set, losses, name)


@pytest.mark.parametrize(
    ("make", "label"),
    [
        (_closure, "loss.weight"),
        (_default, "defaults of"),
        (_partial, "loss.keywords.weight"),
        (partial(_method, "gain"), "loss.gain"),
    ],
    ids=["closure", "default", "partial", "method"],
)
def test_variables_of_the_loss(make: Callable[[], tuple[Any, Callable[[], None]]], label: str) -> None:
    loss, change = make()
    watch = Watch(capture(Net(), batch(), loss).frozen, None)
    watch.check([batch()], ["x"])
    change()
    with pytest.raises(ConfigError, match=rf"{label}.*0\.5.*, as captured, got .*0\.25"):
        watch.check([batch()], ["x"])


def test_counters_of_the_loop_may_move_on() -> None:
    losses = Losses()
    watch = Watch(capture(Net(), batch(), losses.total).frozen, None)
    losses.steps += 1
    watch.check([batch()], ["x"])


@pytest.mark.parametrize(
    ("change", "label"),
    [
        (lambda patch: patch.setitem(globals(), "WEIGHT", 0.25), "WEIGHT"),
        (lambda patch: patch.setitem(SETTINGS, "aux", 0.25), "SETTINGS.aux"),
        (lambda patch: patch.setattr(ARGUMENTS, "weight", 0.25), "ARGUMENTS.weight"),
        (lambda patch: patch.setattr(Net, "limit", 0.25), "Net.limit"),
    ],
    ids=["number", "dict", "object", "class"],
)
def test_variables_of_the_file(change: Callable[[Any], None], label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    watch = Watch(capture(model, batch(), _with_global).frozen, model)
    monkeypatch.setattr(ARGUMENTS, "verbose", True)
    watch.check([batch()], ["x"])
    change(monkeypatch)
    with pytest.raises(ConfigError, match=rf"test_frozen\.{label} = .*, as captured, got 0\.25"):
        watch.check([batch()], ["x"])


def test_a_graph_through_pickle_still_knows_its_batch_and_its_modules() -> None:
    graph = pickle.loads(pickle.dumps(capture(Net(), batch(w=1.0), lambda m, b: m(b["x"]).mean() * b["w"])))
    with pytest.raises(ConfigError, match="training = True"):
        Watch(graph.frozen, Net().eval())
    with pytest.raises(ConfigError, match="'w' = 1"):
        Watch(graph.frozen, Net()).check([batch(w=2.0)], ["x"])
