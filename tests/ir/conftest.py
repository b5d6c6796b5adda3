"""One thread: the machine that runs the tests may have few cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Run every test of this folder on one thread."""
