"""What a forward leaves in plain Python: refused where the next step would be another one, else left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.capture.parity import assert_equals_eager, squares
from tests.capture.test_features import around, batch, refusal

from lading.capture.trace import capture


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


def _counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.step += 1
    self.share = self.step / 7
    return x


def _looked_at(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = x
    self.sizes.append(x.shape[0])
    return x


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
