"""The public names: each resolves, the list is complete, and none of the thinking brings torch along."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lading


@pytest.mark.parametrize("name", lading.__all__)
def test_every_public_name_resolves_to_what_type_checkers_see(name: str) -> None:
    value = getattr(lading, name)
    assert name == "__version__" or callable(value)
    if name != "__version__":
        assert value.__name__ == name


def test_type_checkers_see_the_public_names_and_no_others() -> None:
    tree = ast.parse(Path(str(lading.__file__)).read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("lading.")]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen.keys() | {"__version__"} == set(lading.__all__)
    for name, module in seen.items():
        assert getattr(lading, name).__module__ == module, name


def test_the_list_of_names_offers_them() -> None:
    assert set(lading.__all__) <= set(dir(lading))
    with pytest.raises(AttributeError, match="no attribute 'captur'"):
        _ = lading.captur  # type: ignore[attr-defined]


def test_optimizers_are_there_by_name() -> None:
    assert lading.optim.Muon.__module__ == "lading.matrices"
    with pytest.raises(AttributeError, match="no attribute 'Moun'"):
        _ = lading.optim.Moun  # type: ignore[attr-defined]


def test_capture_is_a_plain_function() -> None:
    """Also once its module is imported, which binds the names of packages to their parents."""
    from lading.tracing import trace

    assert lading.capture is trace.capture
    assert inspect.isfunction(lading.capture)


THINKING = ["lading", "lading.planner.api", "lading.sim.device_step", "lading.report.html", "lading.catalog.load"]


def test_thinking_never_imports_torch() -> None:
    code = f"""
import importlib, sys
for name in {THINKING}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
import lading
lading.simulate, lading.Machine, lading.AdamW, lading.load_machine
assert "torch" not in sys.modules, "a public name"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
