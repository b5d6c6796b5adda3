"""A Program with every feature, to be broken."""

from __future__ import annotations

import pytest
from tests.programs import chain, offloaded

from lading.ir.program import Program
from lading.memory.verify import verify


@pytest.fixture(scope="module")
def base() -> Program:
    program = offloaded(chain(3), recompute=(0,)).program(overhead_bytes=10, workspace_bytes=20)
    verify(program)
    return program
