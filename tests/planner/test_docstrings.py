"""What planners say of themselves holds: each states an optimisation, and every function a docstring names exists."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import cache
from types import ModuleType

import pytest

import lading
import lading.planner

#: Modules that choose, each of which states what it minimises and subject to what.
PLANNERS = (
    "fluid", "layouts", "orders", "owners", "refine", "relaxation", "unshard", "placement.chain",
    "placement.relaxed",
)  # fmt: skip
MODULES = [m.name for m in pkgutil.walk_packages(lading.planner.__path__, "lading.planner.")]


def names_in(text: str) -> set[str]:
    """What stands for something of the code: marked, dotted in an indented line, or private.

    Symbols of one letter with an index (``s_i``), and single words, which may be policies or symbols, are none.
    """
    marked = {name for name in re.findall(r"`{1,2}([A-Za-z_][\w.]*)`{1,2}", text) if re.search(r"[._A-Z]", name)}
    rows = [line for line in text.splitlines() if line.startswith("    ")]
    dotted = {name for line in rows for name in re.findall(r"(?<![\w./])[A-Za-z]\w*(?:\.\w*[a-z]\w+)+(?![\w/])", line)}
    private = set(re.findall(r"(?<![\w.])_[a-z]\w+", text))
    return {name for name in marked | dotted | private if not re.fullmatch(r"[A-Za-z]+_\w|[A-Z]", name)}


def reached(start: object, parts: list[str]) -> bool:
    """Whether the attributes are there, a field of a dataclass included."""
    for part in parts:
        if not hasattr(start, part):
            return part in getattr(start, "__annotations__", {})
        start = getattr(start, part)
    return True


def has(module: ModuleType, parts: list[str]) -> bool:
    """Whether a module has it, or one of its classes, or one of its functions as an argument."""
    classes = [each for _, each in inspect.getmembers(module, inspect.isclass)]
    functions = [each for _, each in inspect.getmembers(module, inspect.isfunction)]
    arguments = {name for each in functions for name in inspect.signature(each).parameters}
    return any(reached(each, parts) for each in (module, *classes)) or parts[0] in arguments


def resolves(name: str, module: ModuleType) -> bool:
    """Whether a name is of the module, of one that its docstring names, or, dotted, of any of the package."""
    parts = name.removesuffix(".py").split(".")
    if has(module, parts) or module_of(parts):
        return True
    named = [full for each in names_in(module.__doc__ or "") if (full := module_of(each.split(".")))]
    if any(has(importlib.import_module(full), parts) for full in named):
        return True
    for length in range(1, len(parts)):
        full = module_of(parts[:length])
        if full and reached(importlib.import_module(full), parts[length:]):
            return True
    siblings = [importlib.import_module(each) for each in MODULES] if len(parts) > 1 else []
    return any(reached(each, parts) for each in siblings)


@cache
def known() -> list[str]:
    """All modules, planners first."""
    return [*MODULES, *(m.name for m in pkgutil.walk_packages(lading.__path__, "lading."))]


def module_of(parts: list[str]) -> str:
    """The first module whose path ends so; "" if there is none."""
    return next((full for full in known() if f".{full}".endswith(f".{'.'.join(parts)}")), "")


@pytest.mark.parametrize("name", MODULES)
def test_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    missing = sorted(each for each in names_in(module.__doc__) if not resolves(each, module))
    assert not missing, f"{name} names {', '.join(missing)}, which do not exist"


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_state_their_optimisation(name: str) -> None:
    module = importlib.import_module(f"lading.planner.{name}")
    text = module.__doc__ or ""
    assert re.search(r"minimi[sz]e", text, re.IGNORECASE)
    assert "subject to" in text
    assert len([each for each in names_in(text) if resolves(each, module)]) >= 3


def test_a_name_that_is_gone_is_found() -> None:
    module = importlib.import_module("lading.planner.layouts")
    for gone in ("pipes.invalid", "_no_such", "moments.none_of", "Space.nothing"):
        assert gone in names_in(f"text ``{gone}``\n    a row   {gone}")
        assert not resolves(gone, module)
