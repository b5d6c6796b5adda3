"""What the groups of a matrix optimizer say counts at its next step, as with torch's optimizers, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lading import AdamW
from lading.errors import ConfigError
from lading.matrices import SOAP, MatrixOptimizer, Muon, Shampoo

KINDS: dict[str, Callable[..., MatrixOptimizer]] = {"muon": Muon, "shampoo": Shampoo, "soap": SOAP}


def _parameters() -> tuple[nn.Parameter, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(6, 4, generator=draw)), nn.Parameter(torch.randn(5, generator=draw))


def _made(kind: str = "muon", **options: Any) -> tuple[tuple[nn.Parameter, nn.Parameter], MatrixOptimizer]:
    matrix, vector = _parameters()
    groups = [{"params": [("w", matrix)]}, {"params": [("b", vector)], "rule": AdamW(lr=1e-2)}]
    return (matrix, vector), KINDS[kind](groups, lr=0.02, **options)


def _give(parameters: tuple[nn.Parameter, ...], step: int) -> None:
    draw = torch.Generator().manual_seed(1 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def test_settings_that_change_are_torchs() -> None:
    """Each setting that torch reads at every step, changed before some: the bits of torch's own optimizers."""
    ours, optimizer = _made()
    theirs = _parameters()
    muon = torch.optim.Muon([theirs[0]], lr=0.02)
    adamw = torch.optim.AdamW([theirs[1]], lr=1e-2, foreach=False)
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"momentum": 0.5, "lr": 0.1}, {"beta1": 0.5}),
        ({"weight_decay": 0.7}, {"weight_decay": 0.3, "beta2": 0.9, "lr": 0.0}),
        ({"nesterov": False, "eps": 1e-3}, {"eps": 1e-2, "lr": 0.1}),
    ]
    for step, (of_muon, of_adamw) in enumerate(changes):
        optimizer.param_groups[0].update(of_muon)
        optimizer.param_groups[1].update(of_adamw)
        muon.param_groups[0].update(of_muon)
        now = optimizer.param_groups[1]
        plain = {key: now[key] for key in ("lr", "eps", "weight_decay")}
        adamw.param_groups[0].update(plain, betas=(now["beta1"], now["beta2"]))
        for parameters in (ours, theirs):
            _give(parameters, step)
        for each in (optimizer, muon, adamw):
            each.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step


@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("shampoo", {"beta1": 0.5, "beta2": 0.5, "eps": 1e-3, "weight_decay": 0.5}, {"frequency": 1}),
        ("shampoo", {"grafting_eps": 1.0}, {"frequency": 1}),
        ("soap", {"beta1": 0.5, "beta2": 0.5, "factor_beta": 0.5, "eps": 1e-2, "weight_decay": 0.5}, {"frequency": 1}),
        ("muon", {"momentum": 0.5}, {"reduces": True}),
    ],
)
def test_every_live_setting_counts(kind: str, changes: dict[str, float], options: dict[str, Any]) -> None:
    def after(change: dict[str, float]) -> torch.Tensor:
        (matrix, vector), optimizer = _made(kind, **options)
        for step in range(3):
            if step == 1:
                optimizer.param_groups[0].update(change)
            _give((matrix, vector), step)
            optimizer.step()
        return matrix.detach()

    plain = after({})
    for key, value in changes.items():
        assert not torch.equal(after({key: value}), plain), key


def test_groups_may_have_names_as_with_torch() -> None:
    matrix, vector = _parameters()
    groups = [{"params": [matrix], "name": "matrices"}, {"params": [vector], "rule": AdamW(lr=1e-2), "name": "rest"}]
    optimizer = KINDS["muon"](groups, lr=0.02)
    _give((matrix, vector), 0)
    optimizer.param_groups[1]["name"] = "vectors"
    optimizer.step()
    assert [group["name"] for group in optimizer.param_groups] == ["matrices", "vectors"]
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("number", "key", "value", "said"),
    [
        (0, "lr", -0.1, r"param_groups\[0\]: expected lr of 0 or more, got -0\.1"),
        (0, "lr", float("nan"), r"param_groups\[0\], lr: expected a number, got nan"),
        (0, "lr", "0.1", r"param_groups\[0\], lr: expected a number, got '0\.1'"),
        (0, "momentum", 1.5, r"param_groups\[0\]: muon: expected momentum from 0 to 1, got 1\.5"),
        (0, "nesterov", 0.5, r"nesterov: expected True or False, got 0\.5"),
        (0, "momentun", 0.5, r"got 'momentun', which Muon does not read; did you mean 'momentum'\?"),
        (0, "betas", (0.9, 0.99), r"got 'betas', which Muon does not read"),
        (1, "momentum", 0.5, r"param_groups\[1\]: .* got 'momentum', which AdamW does not read"),
        (1, "weight_decay", -1.0, r"param_groups\[1\]: weight_decay: expected a number >= 0, got -1\.0"),
        (0, "steps", 7, r"expected steps to stay 5, as the optimizer was made, got 7; make another"),
        (0, "dtype", "float32", r"expected dtype to stay 'bfloat16'"),
        (0, "parts", (3, 3), r"expected parts to stay \(\), as"),
        (0, "params", [], r"expected the groups and parameters that the optimizer was made with"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_moves(number: int, key: str, value: Any, said: str) -> None:
    parameters, optimizer = _made()
    before = [parameter.detach().clone() for parameter in parameters]
    _give(parameters, 0)
    group = optimizer.param_groups[number]
    made = dict(group)
    group[key] = value
    with pytest.raises(ConfigError, match=said):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    group.clear()
    group.update(made)
    optimizer.step()
    assert not torch.equal(parameters[0], before[0])


def test_a_negative_rate_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="expected lr of 0 or more, got -1"):
        Muon([("w", _parameters()[0])], lr=-1.0)


def test_schedules_of_torch_have_what_they_keep_in_groups() -> None:
    parameters, optimizer = _made()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, cycle_momentum=False)
    for step in range(3):
        _give(parameters, step)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_schedules_that_cycle_momentum_reach_every_rule(rule: str) -> None:
    """OneCycleLR writes one momentum into all groups: Muon's own, and beta1 of the others."""
    matrix, vector = _parameters()
    groups = [{"params": [matrix]}, {"params": [vector], "rule": AdamW(lr=1e-2)}]
    optimizer: Any = KINDS[rule](groups, lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, max_momentum=0.9, base_momentum=0.5)
    seen: list[float] = []
    for step in range(3):
        _give((matrix, vector), step)
        optimizer.step()
        seen += [optimizer._live.current[0].rule.momentum if rule == "muon" else optimizer._live.current[0].rule.beta1]
        assert optimizer._live.current[1].rule.beta1 == optimizer.param_groups[0]["momentum"] == seen[-1]
        schedule.step()
    assert seen[0] == 0.9
    assert min(seen) < 0.6
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[1]["max_momentum"] == 0.9


def test_settings_are_saved_with_states() -> None:
    parameters, optimizer = _made()
    optimizer.param_groups[0].update(momentum=0.5, weight_decay=0.0)
    _give(parameters, 0)
    optimizer.step()
    others, second = _made()
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert second.param_groups[0]["momentum"] == 0.5
    for mine, theirs in zip(parameters, others, strict=True):
        theirs.data.copy_(mine)
    for each, own in ((parameters, optimizer), (others, second)):
        _give(each, 1)
        own.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_momentum_that_changes_while_gradients_travel() -> None:
    """Under backward what travels has been made with the old one."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = Muon([("w", model.weight)], reduces=True, overlap="both", model=model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ConfigError, match="expected momentum and nesterov to stay from backward to step"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
