"""What a forward leaves in plain Python: refused where the next step would be another one, else left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.parity import assert_equals_eager, squares
from tests.capture.test_features import around, batch, refusal
from torch import nn

from lading.tracing.trace import capture


def _warm_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return x * min(1.0, self.step / 100)


def _scaled_by_calls(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return x * self.step


def _every_tenth(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    return x.relu() if self.step % 10 == 0 else x


def _after_a_thousand(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    if self.step > 1000:
        x = x.relu()
    return x


def _in_turns(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.turn = not self.turn
    return x if self.turn else x.relu()


def _first_time(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self.ready:
        self.ready = True
        x = x - x.mean()
    return x


def _in_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls.append(1)
    return x * len(self.calls)


def _in_a_private_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self._calls.append(1)
    return x * len(self._calls)


def _in_a_list_of_a_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept["calls"].append(1)
    return x * len(self.kept["calls"])


def _until_a_list_is_empty(self: Any, x: torch.Tensor) -> torch.Tensor:
    if len(self.left) > 1:
        self.left.pop()
        x = x.relu()
    return x


def _until_a_name_is_gone(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.relu() if self.kept.pop("first", False) else x


def _in_a_set(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.relu() if "seen" in self.kept else x
    self.kept.add("seen")
    return x


def _in_an_array(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count[0] += 1
    return x * float(self.count[0])


def _in_a_pair(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.pair = (self.pair[0] + 1, 2)
    return x * self.pair[0]


def _another_module(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.act(x)
    self.act = torch.nn.ReLU()
    return x


class _State:
    """An object of the user's."""

    def __init__(self) -> None:
        self.step = 0


def _in_an_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state.step += 1
    return x * (0.9**self.state.step)


@pytest.mark.parametrize(
    ("forward", "attributes", "named"),
    [
        (_warm_up, {"step": 0}, "'step'"),
        (_scaled_by_calls, {"step": 3}, "'step'"),
        (_every_tenth, {"step": 0}, "'step'"),
        (_after_a_thousand, {"step": 0}, "'step' in every step and decides"),
        (_in_turns, {"turn": False}, "'turn'"),
        (_first_time, {"ready": False}, "'ready'"),
        (_in_a_list, {"calls": []}, "'calls"),
        (_in_an_object, {"state": _State()}, "'state.step'"),
        (_in_a_private_list, {"_calls": []}, "'_calls"),
        (_in_a_list_of_a_table, {"kept": {"calls": []}}, "'kept.calls"),
        (_until_a_list_is_empty, {"left": [1, 1]}, "'left"),
        (_until_a_name_is_gone, {"kept": {"first": True}}, "'kept.first'"),
        (_in_a_set, {"kept": set()}, "'kept.seen'"),
        (_in_an_array, {"count": np.zeros(1)}, "'count.0'"),
        (_in_a_pair, {"pair": (0, 2)}, "'pair'"),
        (_another_module, {"act": torch.nn.Tanh()}, "'act'"),
    ],
)
def test_a_step_that_changes_the_next_is_refused(forward: Any, attributes: dict[str, Any], named: str) -> None:
    model = around(forward, **attributes)
    kept = copy.deepcopy(attributes)
    message = refusal(model)
    assert named in message
    assert "register_buffer" in message
    for key, value in kept.items():
        found = getattr(model, key)
        if isinstance(value, torch.nn.Module):
            assert type(found) is type(value)
            continue
        assert (vars(found) if isinstance(found, _State) else found) == (
            vars(value) if isinstance(value, _State) else value
        )


def test_the_next_step_reading_a_tensor_of_this_one_is_refused() -> None:
    def recurrent(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x if self.last_seen is None else x + self.last_seen
        self.last_seen = y.detach()
        return y

    assert "'last_seen'" in refusal(around(recurrent, last_seen=None))

    def remembered(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.memory.append(x.detach())
        return x + self.memory[0]

    assert "'memory" in refusal(around(remembered, memory=[]))


@pytest.mark.parametrize("wrap", [lambda h: (h, 1), lambda h: [h], lambda h: {"h": (h,)}, SimpleNamespace])
def test_so_is_a_state_inside_of_something(wrap: Callable[[torch.Tensor], Any]) -> None:
    """As recurrent models keep it from call to call."""

    def recurrent(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x if self.state is None else x + next(_tensors(self.state))
        self.state = wrap(y.detach()) if wrap is not SimpleNamespace else SimpleNamespace(h=y.detach())
        return y

    assert "'state'" in refusal(around(recurrent, state=None))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else []
        for inner in [*inside, *(vars(value).values() if isinstance(value, SimpleNamespace) else [])]:
            yield from _tensors(inner)


def _counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    self.share = self.step / 7
    return x


def _looked_at(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = x
    self.sizes.append(x.shape[0])
    return x


def _looked_at_together(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = {"x": (x, 3)}
    self._sizes = [x.shape[0]]
    return x


def _tables(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self._tables:
        self._tables.append((torch.arange(4.0), torch.ones(4)))
    return x + self._tables[0][0] * self._tables[0][1]


def _cached(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.table is None or self.longest < x.shape[0]:
        self.table, self.longest = torch.arange(float(x.shape[0])), x.shape[0]
    return x + self.table[: x.shape[0], None]


@pytest.mark.parametrize(
    ("forward", "attributes"),
    [
        (_counted, {"step": 0, "share": 0.0}),
        (_looked_at, {"seen": None, "sizes": []}),
        (_cached, {"table": None, "longest": 0}),
        (_looked_at_together, {"seen": None, "_sizes": []}),
        (_tables, {"_tables": []}),
    ],
)
def test_what_the_next_step_does_not_look_at_is_captured(forward: Any, attributes: dict[str, Any]) -> None:
    model = around(forward, **attributes)
    assert_equals_eager(model, batch(), squares)


def test_attributes_are_as_before_a_capture() -> None:
    model = around(_looked_at, seen=None, sizes=[])
    capture(model, batch(), squares)
    assert model.seen is None
    assert model.sizes == []


class _Annealed:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, model: Any, data: Any) -> torch.Tensor:
        self.step += 1
        return squares(model, data) * self.step

    def again(self, model: Any, data: Any) -> torch.Tensor:
        return self(model, data)


def _counting() -> Callable[[Any, Any], torch.Tensor]:
    """A loss that assigns a variable of the function that made it."""
    step = 0

    def loss(model: Any, data: Any) -> torch.Tensor:
        nonlocal step
        step += 1
        return squares(model, data) * step

    return loss


@pytest.mark.parametrize("loss", [_Annealed(), _Annealed().again, partial(_Annealed().again), _counting()])
def test_a_loss_that_changes_the_next_step_is_refused(loss: Any) -> None:
    model = around(lambda _, x: x)
    assert "step', and so what the next step computes" in refusal(model, loss=loss)
    assert "step', and so what the next step computes" in refusal(model, loss=loss), "it is as it was before"


class _Schedule:
    """An object that is called."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> float:
        self.step += 1
        return 0.5**self.step


def test_an_object_that_is_called_and_a_tensor_in_a_list_count_too() -> None:
    schedule = _Schedule()
    assert "'schedule.step'" in refusal(around(lambda self, x: x * self.schedule(), schedule=schedule))
    assert schedule.step == 0

    def recurrent(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + self.memory[0]
        self.memory[0] = y.detach()
        return y

    assert "'memory.0'" in refusal(around(recurrent, memory=[torch.zeros(3, 4)]))


class Cached(nn.Module):
    """Positions that a cache keeps by length, in a closure as diffusers has them, and by (length, module)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

        @cache
        def positions(length: int) -> torch.Tensor:
            return torch.arange(length, dtype=torch.float32)

        self.positions = positions

    @lru_cache(maxsize=8)  # noqa: B019  as a library has it
    def scales(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(length), torch.zeros(length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.scales(x.shape[-1])
        return (self.linear(x) + self.positions(x.shape[-1])) * scale + shift


def test_what_a_cache_took_in_while_capturing_is_let_go() -> None:
    model, x = Cached(), torch.randn(2, 4)
    capture(model, x, lambda model, x: model(x).sum())
    assert model(x).isfinite().all()  # and no tensor without values among it
    capture(model, x, lambda model, x: model(x).sum())
