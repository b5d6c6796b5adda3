"""What a captured step takes for the same in every step: another value of it is an error, never another training."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lading.errors import CaptureError, ConfigError
from lading.prepare import plan
from lading.tracing.attributes import sample_of
from lading.tracing.frozen_values import Watch
from lading.tracing.trace import capture
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


@pytest.mark.parametrize(("change", "message"), [*CHANGES[:-1], (_another, r"drop to stay the Dropout that it was")])
def test_a_model_that_changes_between_two_steps(change: Callable[[Any], Any], message: str) -> None:
    model = Net()
    watch = Watch(capture(model, batch(), loss_fn).frozen, model)
    model.epoch = 1  # nothing that the step's code names
    watch.check([batch()], ["x"])
    change(model)
    with pytest.raises(ConfigError, match=f"expected {message}"):
        watch.check([batch()], ["x"])


class Listed(nn.Module):
    """Runs what is in its lists, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(F, F), nn.Tanh())
        self.named = nn.ModuleDict({"first": nn.Linear(F, F), "then": nn.Tanh()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for each in self.named.values():
            x = each(x)
        return x


def _appended(model: Any) -> None:
    model.body.append(nn.ReLU())


def _reordered(model: Any) -> None:
    model.named._modules["first"] = model.named._modules.pop("first")


def _patched(model: Any) -> None:
    model.body.forward = torch.neg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_appended, "modules in body = '0 1', as captured, got '0 1 2'"),
        (_reordered, "modules in named = 'first then', as captured, got 'then first'"),
        (_patched, "modules whose forward is not that of their class = '', as captured, got 'body'"),
    ],
)
def test_modules_that_come_or_change_places_before_the_trainer(change: Callable[[Any], Any], message: str) -> None:
    """They change neither a parameter nor a class, and make another step."""
    model = Listed()
    frozen = capture(model, batch(), loss_fn).frozen
    Watch(frozen, model).check([batch()], ["x"])
    change(model)
    with pytest.raises(ConfigError, match=f"expected {message}"):
        Watch(frozen, model)


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


def _class() -> tuple[Any, Callable[[], None]]:
    class Settings:
        class Loss:
            weight = 0.5

    return lambda model, given: model(given["x"]).mean() * Settings.Loss.weight, partial(_set, Settings.Loss, "weight")


def _rate(read: Callable[[Any, Any], float]) -> tuple[Any, Callable[[], None]]:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    schedule.optimizer.step()

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return model(given["x"]).mean() * read(optimizer, schedule)

    return loss, schedule.step


@pytest.mark.parametrize(
    ("make", "label"),
    [
        (_closure, "loss.weight"),
        (_class, "Settings.Loss.weight"),
        (partial(_rate, lambda o, s: o.param_groups[0]["lr"]), r"optimizer\.param_groups\.0\.lr"),
        (partial(_rate, lambda o, s: s.get_last_lr()[0]), r"schedule\._last_lr\.0"),
        (_default, "defaults of"),
        (_partial, "loss.keywords.weight"),
        (partial(_method, "gain"), "loss.gain"),
    ],
    ids=["closure", "class", "rate", "schedule", "default", "partial", "method"],
)
def test_variables_of_the_loss(make: Callable[[], tuple[Any, Callable[[], None]]], label: str) -> None:
    loss, change = make()
    watch = Watch(capture(Net(), batch(), loss).frozen, None)
    watch.check([batch()], ["x"])
    change()
    with pytest.raises(ConfigError, match=rf"{label}.*0\.5.*, as captured, got .*0\.25"):
        watch.check([batch()], ["x"])


def test_a_tensor_that_the_loss_reads_is_not_written_in_place() -> None:
    weights, model = torch.ones(8).mul_(0.5), Net()

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return (model(given["x"]) * weights + torch.arange(8)).mean()

    graph = capture(model, batch(), loss)
    watch = Watch(graph.frozen, model)
    watch.check([batch()], ["x"])
    with torch.no_grad():
        weights[0] = 2.0
    with pytest.raises(ConfigError, match=r"expected loss\.weights \(float32 \(8,\), .*was written") as caught:
        watch.check([batch()], ["x"])
    assert "register it as a buffer" in str(caught.value)
    again = pickle.loads(pickle.dumps(graph)).frozen
    Watch(again, model).check([batch()], ["x"])


def _by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[1] = 2.0


def _by_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.9).add_(torch.ones_like(tensor), alpha=0.1)


@pytest.mark.parametrize("write", [_by_numpy, _by_data])
@pytest.mark.parametrize("make", [lambda: torch.zeros(8), lambda: nn.Parameter(torch.zeros(1000, 8)[999], False)])
def test_a_tensor_that_the_loss_reads_is_not_written_where_torch_does_not_count(
    write: Callable[[torch.Tensor], None], make: Callable[[], torch.Tensor]
) -> None:
    """As averages of a teacher's weights often are."""
    weights, model = make(), Net()
    watch = Watch(capture(model, batch(), lambda model, given: (model(given["x"]) * weights).mean()).frozen, model)
    watch.check([batch()], ["x"])
    write(weights)
    with pytest.raises(ConfigError, match=r"expected loss\.weights \(float32 \(8,\), .*was written"):
        watch.check([batch()], ["x"])


def test_of_two_views_of_one_memory_each_is_compared() -> None:
    table, model = torch.zeros(2, 8), Net()
    first, last = table[0], table[1]

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return (model(given["x"]) * first + last).mean()

    watch = Watch(capture(model, batch(), loss).frozen, model)
    last.numpy()[3] = 1.0
    with pytest.raises(ConfigError, match=r"expected loss\.last \(float32 \(8,\), .*was written"):
        watch.check([batch()], ["x"])


def test_a_large_tensor_is_compared_by_some_of_its_elements() -> None:
    table = torch.arange(12.0e4).view(100, 30, 40)
    assert 4 * 60 <= len(sample_of(table)) <= 4 * 130
    before = sample_of(table.transpose(0, 1))
    table.data.lerp_(torch.ones_like(table), 0.01)
    assert sample_of(table.transpose(0, 1)) != before
    kinds = (torch.tensor(1.0), torch.zeros(0, 3), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16))
    assert [len(sample_of(each)) for each in kinds] == [4, 0, 3, 4]
    assert sample_of(torch.ones(2, dtype=torch.complex64).conj())[:4] == sample_of(torch.ones(1))
    assert sample_of(torch.ones(2, device="meta")) == b""


@pytest.mark.parametrize("others", [itertools.count(1), iter([1.0, 2.0]), (n for n in range(3))])
def test_an_iterator_that_the_step_reads_is_refused(others: Any) -> None:
    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return model(given["x"]).mean() * next(others)

    with pytest.raises(CaptureError, match=r"found the iterator loss\.others .*; take from it outside"):
        capture(Net(), batch(), loss)


class Defaults(nn.Module):
    """A model whose class has what an object may set."""

    scale, epoch = 1.0, 0

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.scale


def test_an_attribute_that_hides_one_of_the_class_is_seen() -> None:
    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return model(given["x"]).mean()

    model, given = Defaults(), {"x": torch.ones(3, 4)}
    graph = pickle.loads(pickle.dumps(capture(model, given, loss)))
    watch = Watch(capture(model, given, loss).frozen, model)
    model.epoch += 1
    watch.check([given], ["x"])
    Watch(graph.frozen, model).check([given], ["x"])
    model.scale = 0.5
    with pytest.raises(ConfigError, match=r"expected scale = nothing, as captured, got 0\.5"):
        watch.check([given], ["x"])


def _module(name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    exec(text, vars(module))
    return module


#: Modules as a user's files are.
INNER = _module("inner", "G, STEP = 0.5, 0\ndef factor(): return G")
OUTER = _module("outer", "W, TABLE = 0.5, {'w': 0.5}\ndef total(x): return x * W * inner.factor()")
vars(OUTER)["inner"] = INNER


@pytest.mark.parametrize(
    ("change", "label"),
    [
        (lambda patch: patch.setattr(OUTER, "W", 0.25), r"outer\.W"),
        (lambda patch: patch.setattr(INNER, "G", 0.25), r"inner\.G"),
        (lambda patch: patch.setitem(vars(OUTER)["TABLE"], "w", 0.25), r"outer\.TABLE\.w"),
    ],
)
def test_variables_of_modules_that_the_loss_reads(
    change: Callable[[Any], None], label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        return OUTER.total(model(given["x"]).mean()) * OUTER.TABLE["w"]

    watch = Watch(capture(Net(), batch(), loss).frozen, None)
    monkeypatch.setattr(INNER, "STEP", 1)
    watch.check([batch()], ["x"])
    change(monkeypatch)
    with pytest.raises(ConfigError, match=rf"expected {label} = 0\.5, as captured, got 0\.25"):
        watch.check([batch()], ["x"])


class Slotted:
    """Settings with slots for them."""

    __slots__ = ("unread", "weight")

    def __init__(self) -> None:
        self.weight, self.unread = 0.5, 0

    def weighed(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


SLOTTED = Slotted()


def test_an_object_with_slots_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Slotted()
    for read, label in ((SLOTTED, r"tests\.test_frozen\.SLOTTED"), (mine, r"loss\.mine")):

        def loss(model: nn.Module, given: Any) -> torch.Tensor:
            return mine.weighed(SLOTTED.weighed(model(given["x"]).mean()))

        watch = Watch(capture(Net(), batch(), loss).frozen, None)
        read.unread += 1
        watch.check([batch()], ["x"])
        monkeypatch.setattr(read, "weight", 0.25)
        with pytest.raises(ConfigError, match=rf"expected {label}\.weight = 0\.5, as captured, got 0\.25"):
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


class Sizes(NamedTuple):
    gain: float
    parts: tuple[int, ...] = (1, 2)


class Mode(Enum):
    PLAIN = 1
    SCALED = 2


@dataclass(slots=True)
class Slots:
    gain: float = 2.0


def _named(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * scale


class Leading(nn.Module):
    """Has one attribute of each kind that leads to something."""

    kinds: ClassVar[list[int]] = [1, 2]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(F, F)])
        self.register_buffer("shift", torch.ones(F))
        self.act: Any = torch.relu
        self.scaled = _named(2.0)
        self.dtype = torch.float32
        self.mode = Mode.PLAIN
        self.sizes = Sizes(1.0)
        self.slots = Slots()
        self.values = [1.0, 2.0]
        self.table = {"gain": 1.0, "shape": SimpleNamespace(width=F)}
        self.seen = {"a", "b"}
        self.array = np.ones(3)
        self.mask = torch.ones(F)
        self.late = SimpleNamespace(step=0)  # which nothing reads

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.act(block(x)) + self.shift
        x = self.scaled(x).to(self.dtype) * self.sizes.gain * self.slots.gain * self.values[0] * self.table["gain"]
        if self.mode is Mode.SCALED or "c" in self.seen:
            x = x * 2.0
        return self.helper(x) * float(self.array[0]) * self.table["shape"].width * self.mask * len(self.kinds)


def _leading(model: nn.Module, given: Any) -> torch.Tensor:
    return squared(model(given["x"]))


def squared(x: torch.Tensor, *, gain: float = 1.0, gains: tuple[Any, ...] = (1.0,)) -> torch.Tensor:
    return x.square().mean() * gain


def _attribute(name: str, value: Callable[[], Any]) -> Callable[[Any, Any], None]:
    return lambda model, patch: setattr(model, name, value())


REPLACED: list[tuple[str, Callable[[Any, Any], Any], str]] = [
    ("list", _attribute("values", lambda: [0.5, 2.0]), r"values\.0 = 1\.0, as captured, got 0\.5"),
    ("longer", _attribute("values", lambda: [1.0, 2.0, 3.0]), r"values\.length = 2, as captured, got 3"),
    ("dict", _attribute("table", lambda: {"gain": 0.5}),
     r"table\.gain = 1\.0, as captured, got 0\.5|len\(table\) = 2"),
    ("entry", lambda model, patch: model.table.update(more=1.0), r"len\(table\) = 2, as captured, got 3"),
    ("inner", lambda model, patch: model.table.update(shape=SimpleNamespace(width=2)),
     r"width = 8, as captured, got 2"),
    ("kind", _attribute("values", lambda: (1.0, 2.0)), r"values = a list, as captured, got \(1\.0, 2\.0\)"),
    ("set", _attribute("seen", lambda: {"a", "c"}), r"seen\.b = True, as captured, got nothing"),
    ("member", lambda model, patch: model.seen.add("c"), r"len\(seen\) = 2, as captured, got 3"),
    ("array", _attribute("array", lambda: np.zeros(3)), r"array\.0 = 1\.0, as captured, got 0\.0"),
    ("function", _attribute("act", lambda: torch.tanh), r"act = function relu, as captured, got function tanh"),
    ("closure", _attribute("scaled", lambda: _named(3.0)), r"scaled\.scale = 2\.0, as captured, got 3\.0"),
    ("dtype", _attribute("dtype", lambda: torch.float64), r"dtype = torch\.float32, as captured, got torch\.float64"),
    ("enum", _attribute("mode", lambda: Mode.SCALED), r"mode = Mode\.PLAIN, as captured, got Mode\.SCALED"),
    ("named tuple", _attribute("sizes", lambda: Sizes(0.5)), r"sizes = Sizes\(gain=1\.0.*got Sizes\(gain=0\.5"),
    ("its kind", _attribute("sizes", lambda: Sizes(1.0, (1, True))),
     r"sizes = Sizes\(.*got Sizes\(gain=1\.0, parts=\(1, True"),
    ("slots", _attribute("slots", lambda: Slots(3.0)), r"slots(?: to stay a Slots|.gain = 2.0), as captured, got"),
    ("tensor", _attribute("mask", lambda: torch.zeros(F)),
     r"mask to stay a tensor of float32 \(8,\), as captured, got an"),
    ("module", lambda model, patch: model.blocks.__setitem__(0, nn.Linear(F, F)), r"blocks\.0 to stay the Linear that"),
    ("more", lambda model, patch: model.blocks.append(nn.Linear(F, F)), r"blocks\.1 to stay nothing, got a Linear"),
    ("parameter", lambda model, patch: setattr(model.blocks[0], "weight", nn.Parameter(torch.ones(F, F))),
     r"blocks\.0\.weight to stay the Parameter that it was, got another"),
    ("buffer", _attribute("shift", lambda: torch.zeros(F)),
     r"shift to stay the Tensor that it was, got another Tensor"),
    ("method", lambda model, patch: patch.setattr(Leading, "helper", _another_helper),
     r"Leading\.helper = function Leading\.helper .*, as captured, got function _another_helper"),
    ("class", lambda model, patch: patch.setattr(Leading, "kinds", [1]),
     r"Leading\.kinds\.length = 2, as captured, got 1"),
    ("keyword default", lambda model, patch: patch.setitem(squared.__kwdefaults__, "gain", 2.0),
     r"kwdefaults of .*squared = \(\('gain', 1\.0\), .*got \(\('gain', 2\.0\)"),
    ("variable", lambda model, patch: patch.setitem(globals(), "squared", _another_helper),
     r"test_frozen\.squared = function squared .*, as captured, got function _another_helper"),
]  # fmt: skip


def _another_helper(self: Any, x: Any = None) -> Any:
    return x


@pytest.mark.long
@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REPLACED], ids=[case[0] for case in REPLACED])
def test_what_is_replaced_between_two_steps(
    change: Callable[[Any, Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Leading()
    watch = Watch(capture(model, batch(), _leading).frozen, model)
    model.late = SimpleNamespace(step=1)
    watch.check([batch()], ["x"])
    change(model, monkeypatch)
    with pytest.raises(ConfigError, match=f"expected .*{message}"):
        watch.check([batch()], ["x"])


def test_what_is_replaced_by_its_equal_makes_the_same_step() -> None:
    """And what is in it is compared from then on."""
    model: Any = Leading()
    watch = Watch(capture(model, batch(), _leading).frozen, model)
    model.values, model.table, model.seen = list(model.values), dict(model.table), set(model.seen)
    model.array, model.scaled, model.slots, model.sizes = np.ones(3), _named(2.0), Slots(), Sizes(1.0)
    model.table["shape"] = SimpleNamespace(width=F)
    watch.check([batch()], ["x"])
    model.values[0] = 0.5
    with pytest.raises(ConfigError, match=r"values\.0 = 1\.0, as captured, got 0\.5"):
        watch.check([batch()], ["x"])


@pytest.mark.parametrize("name", ["function", "dtype", "enum"])
def test_another_instance_has_the_same_functions_and_dtypes(name: str) -> None:
    frozen = capture(Leading(), batch(), _leading).frozen
    change, message = next(case[1:] for case in REPLACED if case[0] == name)
    other = Leading()
    Watch(frozen, other)
    change(other, None)
    for graph_of in (frozen, pickle.loads(pickle.dumps(frozen))):
        with pytest.raises(ConfigError, match=f"expected {message}"):
            Watch(graph_of, other)


def test_of_a_long_dict_or_set_the_first_items_are_compared() -> None:
    model: Any = Leading()
    model.table.update({str(n): float(n) for n in range(1000)})
    model.seen.update(map(str, range(1000)))
    frozen = capture(model, batch(), _leading).frozen
    assert frozen is not None
    assert sum(name.startswith(("table.", "seen.")) for name in frozen.others) <= 2 * 64 + 1
    watch = Watch(frozen, model)
    model.table["999"] = 0.0  # not among the first
    watch.check([batch()], ["x"])
    del model.table["999"]
    with pytest.raises(ConfigError, match=r"len\(table\) = 1002, as captured, got 1001"):
        watch.check([batch()], ["x"])


def test_switches_of_torch_around_a_step_are_those_of_the_capture() -> None:
    model = Net()
    watches = [Watch(capture(model, batch(), loss_fn).frozen, model)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        watches.append(Watch(capture(model, batch(), loss_fn).frozen, model))
        watches[1].check([batch()], ["x"])
        with pytest.raises(ConfigError, match="expected autocast off, as captured, got it to bfloat16 on cpu"):
            watches[0].check([batch()], ["x"])
    watches[1].check([batch()], ["x"])  # a captured autocast is part of the step
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ConfigError, match="expected autocast to bfloat16 on cpu, as captured, got it to float16 on cpu"),
    ):
        watches[1].check([batch()], ["x"])
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(ConfigError, match=r"expected torch\.autograd\.set_detect_anomaly\(False\), found it on"),
    ):
        watches[0].check([batch()], ["x"])
