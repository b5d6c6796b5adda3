"""One thread, as the machine that runs the tests may have few cores; and a device that runs behind the host."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from tests.runtime.fake_accelerator import FakeApi


@pytest.fixture(autouse=True)
def always_one_thread(one_thread: None) -> None:
    """Run every test of this folder on one thread."""


@pytest.fixture
def api() -> Iterator[FakeApi]:
    """A device whose streams are threads that sleep now and then; what it pinned must be given back."""
    generator = random.Random(0)

    def jitter() -> None:
        if generator.random() < 0.05:
            time.sleep(generator.random() * 2e-3)

    api = FakeApi(jitter)
    yield api
    assert api.pinned == [], "page-locked memory is given back"
    api.stop()
