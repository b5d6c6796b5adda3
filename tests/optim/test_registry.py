"""The registry: every rule by its name, own ones by "module:Class", nowhere else a rule's name, and no torch."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.optim.toy import Toy

import lading
from lading.errors import ConfigError
from lading.optim import registry
from lading.optim.rule import MatrixRule, ParameterRule

SOURCE = Path(str(lading.__file__)).parent


@pytest.mark.parametrize("name", registry.rule_names())
def test_a_rule_is_found_by_its_name(name: str) -> None:
    rule = registry.make_rule(name, {})
    assert registry.name_of(rule) == name
    assert registry.is_for_matrices(name) == isinstance(rule, MatrixRule)
    if isinstance(rule, ParameterRule):
        table = registry.rule_to_dict(dataclasses.replace(rule, lr=0.5))
        assert table.pop("rule", registry.DEFAULT) == name
        assert registry.optimizer(name, settings=table) == dataclasses.replace(rule, lr=0.5)


def test_an_own_rule_is_found_in_its_module() -> None:
    name = registry.name_of(Toy())
    assert name == "tests.optim.toy:Toy"
    assert registry.optimizer(name, lr=0.5) == Toy(lr=0.5)
    assert registry.rule_to_dict(Toy(lr=0.5)).items() >= {"rule": name, "lr": 0.5}.items()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loin", "expected one of adamw, .*, or 'module:Class' for your own, got 'loin'; did you mean 'lion'"),
        ("tests.optim.toy:Tiny", "expected a class of optimizer settings named 'tests.optim.toy:Tiny', got none"),
        ("no.such.module:Rule", "got none: No module named 'no'"),
        ("pathlib:Path", "expected a subclass of ParameterRule or MatrixRule as 'pathlib:Path'"),
        ("muon", "expected a rule that moves any parameter .*, got muon, which moves whole matrices"),
    ],
)
def test_what_is_no_rule_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.optimizer(name)


def test_settings_of_another_rule_or_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown 'beta1' of sgd; expected one of lr, momentum"):
        registry.optimizer("sgd", settings={"beta1": 0.9})
    with pytest.raises(ConfigError, match=r"expected momentum of sgd as float, got .0\.9."):
        registry.optimizer("sgd", settings={"momentum": "0.9"})
    with pytest.raises(ConfigError, match=r"expected a rule for matrices \(muon, .*\), got lion"):
        registry.matrix_rule("lion")


def test_no_other_file_names_a_rule() -> None:
    """Strings of the code that are a rule's name; docstrings and comments may speak of rules."""
    named: list[str] = []
    for path in SOURCE.rglob("*.py"):
        code = path.read_text()
        if not re.search(rf"""["'](lading\.)?({"|".join(registry.rule_names())})["']""", code):
            continue
        tree = ast.parse(code)
        said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
        texts = [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in said
        ]
        where = str(path.relative_to(SOURCE))
        if any(re.fullmatch(rf"(lading\.)?({'|'.join(registry.rule_names())})", text) for text in texts):
            named.append(where)
    assert {where for where in named if not where.startswith("optim/")} <= {"validate/requests.py"}


def test_settings_are_read_without_torch() -> None:
    code = """
import sys
from lading.optim import registry
rules = [registry.make_rule(name, {}) for name in registry.rule_names()]
[rule.state_specs((4, 4)) if isinstance(rule, registry.ParameterRule) else rule.work(4, 4) for rule in rules]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
