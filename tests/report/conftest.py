"""The synthetic run, made once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """tests/report/synthetic.py."""
    spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).with_name("synthetic.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run(synthetic: ModuleType) -> dict[str, Any]:
    """Arguments of ``write_report`` for a 12-block step."""
    return synthetic.run()
