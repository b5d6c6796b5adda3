"""Runs whose file names another optimizer: the numbers of plain PyTorch in a budget, and what resuming may change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lading.config import load_run, run_from_dict, run_to_dict
from lading.errors import ConfigError
from lading.ir.plan import Plan
from lading.optim.lion import Lion
from lading.optim.rule import ParameterRule
from lading.optim.sgd import SGD
from lading.train import train_plain, train_run
from tests.optim.toy import Toy
from tests.runs import write_run

QUICK = ("optimization.steps=3", "optimization.warmup_steps=0", "checkpoint.every_steps=2", "memory.budget=100%")


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ('{ rule = "sgd", lr = 0.1, momentum = 0.9 }', SGD(lr=0.1, momentum=0.9)),
        ('{ rule = "lion" }', Lion()),
        ('{ rule = "tests.optim.toy:Toy", decay = 0.8 }', Toy(decay=0.8)),
    ],
)
def test_a_file_names_its_optimizer(table: str, rule: ParameterRule, tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path), [f"optimization.optimizer={table}"])
    assert run.optimization.optimizer == rule
    assert run_from_dict(run_to_dict(run)) == run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('rule="loin"', "optimization.optimizer.rule: expected one of adamw, .*, got 'loin'; did you mean 'lion'"),
        ('rule="muon"', "optimization.optimizer.rule: .* moves whole matrices; give it in optimization.matrices"),
        ("rule=3", "optimization.optimizer.rule: expected a text, got 3"),
        ("momentum=0.9", "unknown key 'optimization.optimizer.momentum'"),
        ("beta1=2.0", "optimization.optimizer.beta1: expected a number >= 0 and < 1, got 2.0"),
    ],
)
def test_what_is_no_optimizer_is_refused_by_its_key(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(write_run(tmp_path), [f"optimization.optimizer.{override}"])


def test_a_run_is_plain_pytorchs_and_goes_on(tmp_path: Path) -> None:
    """By a rule that only the tests know: trained, stopped, gone on with another rate, and not with another rule."""
    path = write_run(tmp_path)
    own = (*QUICK, 'optimization.optimizer.rule="tests.optim.toy:Toy"')
    run = load_run(path, own)
    planned = train_run(run)
    assert planned.losses == train_plain(run, tmp_path).losses
    assert Plan.load(tmp_path / "out" / "plan.json").request.optimizer == "tests.optim.toy:Toy"
    longer = dataclasses.replace(
        run, optimization=dataclasses.replace(run.optimization, steps=4, optimizer=Toy(lr=0.5))
    )
    assert len(train_run(longer, resume=True).losses) == 1
    with pytest.raises(ConfigError, match=r"saved with another optimization\.optimizer.*rule"):
        train_run(load_run(path, [*QUICK, 'optimization.optimizer.rule="adam"']), resume=True)
