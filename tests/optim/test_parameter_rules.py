"""Rules that move any parameter: one table of tests for all. Each equals plain PyTorch's optimizer, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lading.errors import ConfigError
from lading.optim.adafactor import Adafactor
from lading.optim.adam import Adam
from lading.optim.adamw import AdamW
from lading.optim.lion import Lion
from lading.optim.plain import PlainOptimizer
from lading.optim.registry import parameter_rule, rule_names
from lading.optim.rule import ParameterRule, dtype_of
from lading.optim.sgd import SGD

SHAPES = [(1,), (7,), (64, 33), (3, 5, 17), (4099,)]
RULES: list[ParameterRule] = [
    AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1),
    Adam(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1),
    SGD(weight_decay=0.1),
    SGD(momentum=0.9, dampening=0.3, weight_decay=0.1),
    SGD(momentum=0.9, nesterov=True),
    Lion(beta1=0.8, beta2=0.95, weight_decay=0.1),
    Adafactor(weight_decay=0.1, d=1.5, beta2_decay=-0.6),
]
#: A change of each number that shows after four updates, and what must be set for it to show.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": ({"lr": 2e-2}, {}),
    "beta1": ({"beta1": 0.999}, {"beta2": 0.5}),
    "beta2": ({"beta2": 0.1}, {}),
    "eps": ({"eps": 0.1}, {}),
    "weight_decay": ({"weight_decay": 0.5}, {}),
    "momentum": ({"momentum": 0.5}, {"momentum": 0.9}),
    "dampening": ({"dampening": 0.5}, {"momentum": 0.9}),
    "nesterov": ({"nesterov": True}, {"momentum": 0.9}),
    "beta2_decay": ({"beta2_decay": -0.1}, {}),
    "eps1": ({"eps1": 0.9}, {}),
    "eps2": ({"eps2": 5.0}, {}),
    "d": ({"d": 1.0}, {"d": 9.0}),
    "states": ({"states": "bf16"}, {}),
}


def states_of(rule: ParameterRule, param: torch.Tensor) -> dict[str, torch.Tensor]:
    kinds = rule.state_specs(tuple(param.shape))
    return {name: torch.zeros(kind.shape, dtype=dtype_of(kind, param.dtype)) for name, kind in kinds.items()}


def plain_lion(param: torch.Tensor, grad: torch.Tensor, average: torch.Tensor, rule: Lion, lr: float) -> None:
    """The loop of https://github.com/google/automl/blob/master/lion/lion_pytorch.py, line by line."""
    param.data.mul_(1 - lr * rule.weight_decay)
    update = average * rule.beta1 + grad * (1 - rule.beta1)
    param.add_(update.sign_(), alpha=-lr)
    average.mul_(rule.beta2).add_(grad, alpha=1 - rule.beta2)


def test_the_table_has_every_rule() -> None:
    assert {type(rule) for rule in RULES} == {parameter_rule(name) for name in rule_names(matrices=False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_updates_are_plain_pytorchs_to_the_bit(rule: ParameterRule, dtype: torch.dtype) -> None:
    """Over steps, sizes and rates, states included: AdamW and Adam fused, SGD and Adafactor a parameter at a time."""
    torch.manual_seed(0)
    ours = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    theirs = [torch.nn.Parameter(p.clone()) for p in ours]
    states = [states_of(rule, p) for p in ours]
    optimizer = rule.plain(theirs)
    averages = [torch.zeros_like(p) for p in ours]
    formula = [p.clone() for p in ours]
    for number, lr in enumerate((1e-3, 5e-2, 0.0, 1e-3, 2e-3), 1):
        optimizer.param_groups[0]["lr"] = lr
        step = torch.tensor(float(number)) if rule.counts else None
        for place, (param, reference) in enumerate(zip(ours, theirs, strict=True)):
            reference.grad = torch.randn_like(reference)
            rule.update(param, reference.grad, states[place], lr=lr, step=step)
            if isinstance(rule, Lion):
                plain_lion(formula[place], reference.grad, averages[place], rule, lr)
        optimizer.step()
        for place, (param, reference) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(param, reference)
            kept = optimizer.state[reference]
            assert all(torch.equal(value, kept[name]) for name, value in states[place].items())
            if isinstance(rule, Lion):
                assert torch.equal(param, formula[place])
                assert torch.equal(states[place]["exp_avg"], averages[place])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_reference_is_torchs_where_torch_has_one(rule: ParameterRule) -> None:
    known = getattr(torch.optim, type(rule).__name__, PlainOptimizer)
    assert type(rule.plain([torch.nn.Parameter(torch.ones(2))])) is known
    assert (known is PlainOptimizer) == isinstance(rule, Lion)


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Lion, Adafactor])
def test_each_number_matters(kind: type[ParameterRule]) -> None:
    def updated(**settings: Any) -> torch.Tensor:
        rule = kind(**settings)
        param, states = torch.ones(3), states_of(rule, torch.ones(3))
        for number, grad in enumerate((0.5, -0.2, 0.5, -0.2, -1.0), 1):  # signs that do not cancel
            rule.update(param, torch.full((3,), grad), states, lr=settings["lr"], step=torch.tensor(float(number)))
        return param

    for field in dataclasses.fields(kind):
        change, others = CHANGES[field.name]
        base = {"lr": 1e-2, **others}
        assert not torch.equal(updated(**{**base, **change}), updated(**base)), field.name


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.whole], ids=str)
def test_parts_at_whole_vectors_give_the_bits_of_the_whole(rule: ParameterRule, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        count = 100_003
        start = [torch.randn(count), torch.randn(count), *(torch.rand(count) for _ in rule.state_specs((count,)))]

        def updated(size: int) -> list[torch.Tensor]:
            tensors = [t.clone() for t in start]
            for step in (1.0, 2.0):
                for at in range(0, count, size):
                    param, grad, *states = (t[at : at + size] for t in tensors)
                    named = dict(zip(rule.state_specs((count,)), states, strict=True))
                    rule.update(param, grad, named, lr=1e-2, step=torch.tensor(step))
            return tensors

        whole = updated(count)
        for size in (1024, 16 * 1024, 64 * 1024):
            assert all(map(torch.equal, updated(size), whole)), size
        if isinstance(rule, AdamW):
            assert not all(map(torch.equal, updated(1001), whole))  # why parts are cut where they are
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rule", [AdamW(), SGD(momentum=0.9), Lion(weight_decay=0.1)], ids=str)
def test_pieces_of_any_shape_move_as_the_whole(rule: ParameterRule) -> None:
    """On ranks. AdamW's pieces have the bits of the optimizer that is not fused."""
    torch.manual_seed(0)
    param, grad = torch.randn(10, 7), torch.randn(10, 7)
    leaf = torch.nn.Parameter(param.clone())
    leaf.grad = grad
    optimizer = torch.optim.AdamW([leaf], rule.lr, foreach=False) if isinstance(rule, AdamW) else rule.plain([leaf])
    states = states_of(rule, param)
    for update in (1, 2):
        optimizer.step()
        for box in ((slice(0, 3), slice(None)), (slice(3, 10), slice(0, 5)), (slice(3, 10), slice(5, 7))):
            held = {name: value[box] for name, value in states.items()}
            rule.update_piece(param[box], grad[box], held, lr=rule.lr, update=update)
    assert torch.equal(param, leaf)


def test_a_rule_that_needs_whole_parameters_says_so_on_ranks() -> None:
    param = torch.ones(4, 3)
    with pytest.raises(ConfigError, match="expected a rule that moves pieces of parameters on ranks"):
        Adafactor().update_piece(param, param, states_of(Adafactor(), param), lr=1e-2, update=1)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SGD, {"nesterov": True}, "nesterov: expected momentum above 0 and no dampening with it"),
        (SGD, {"momentum": -0.1}, "momentum: expected a number >= 0, got -0.1"),
        (Adam, {"beta1": 1.0}, "beta1: expected a number >= 0 and < 1, got 1.0"),
        (Lion, {"beta2": 1.0}, "beta2: expected a number >= 0 and < 1, got 1.0"),
        (Adafactor, {"beta2_decay": 0.8}, "beta2_decay: expected a number from -100 to 0, got 0.8"),
        (Adafactor, {"d": 0.5}, "d: expected a number >= 1, got 0.5"),
        (AdamW, {"lr": math.nan}, "lr: expected a number >= 0, got nan"),
    ],
)
def test_numbers_out_of_range_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)
