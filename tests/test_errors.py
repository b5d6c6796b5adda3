"""Errors: every one survives the way from one process to another."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lading
from lading.errors import BudgetWarning, LadingError, PlanInfeasible


def _kinds(base: type[LadingError]) -> Iterator[type[LadingError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)


def _errors() -> list[type[Exception]]:
    root = Path(lading.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if re.search(r"^class \w+\((LadingError|ConfigError)", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(("lading", *path.relative_to(root).with_suffix("").parts)))
    return [*dict.fromkeys(_kinds(LadingError)), BudgetWarning]


@pytest.mark.parametrize("kind", _errors())
@pytest.mark.parametrize("sent", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_an_error_is_the_same_in_another_process(kind: type[Exception], sent: Any) -> None:
    parameters = inspect.signature(kind).parameters.values()
    named: dict[str, Any] = {p.name: 3 for p in parameters if p.kind is p.KEYWORD_ONLY}
    error = kind("what is wrong", **named)
    error.add_note("what the values are now")
    arrived = sent(error)
    assert type(arrived) is kind
    assert str(arrived) == str(error) == "what is wrong"
    assert {name: getattr(arrived, name) for name in named} == named
    assert arrived.__notes__ == error.__notes__


def test_what_a_plan_lacks_arrives() -> None:
    arrived = pickle.loads(pickle.dumps(PlanInfeasible("x", missing_bytes=5, smallest_budget_bytes=7)))
    assert (arrived.missing_bytes, arrived.smallest_budget_bytes) == (5, 7)
