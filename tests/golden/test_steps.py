"""Programs of one device, and when their actions run, are what they were when the goldens were written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.golden import steps
from tests.golden.store import check, read_json, read_text

from lading.memory.verify import verify


@pytest.fixture(scope="module", autouse=True)
def short_search() -> None:
    """Search as for users: goldens are of whole searches."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.parametrize("name", steps.CASES)
def test_a_program_of_its_choices_and_when_it_runs(name: str) -> None:
    golden = read_text(f"programs/{name}.txt")
    program = steps.made_again(name, golden)
    verify(program)
    found = steps.program_text(program)
    check(golden[golden.index("arena ") :].splitlines(), found.splitlines())
    assert all(word in found for word in steps.CASES[name].shows)
    check(read_json("timelines.json")[name], steps.timeline(name, program))


def test_the_programs_cover_what_a_step_can_do() -> None:
    texts = {name: read_text(f"programs/{name}.txt") for name in steps.CASES}
    assert "deferred 0" not in texts["masters"]
    assert "hosted \n" not in texts["host-computes"]
    assert "lading.muon" in texts["muon"]


@pytest.mark.slow
@pytest.mark.parametrize("name", steps.CASES)
def test_a_plan(name: str) -> None:
    check(read_text(f"programs/{name}.txt").splitlines(), steps.planned_text(name).splitlines())
    check(read_json("compared.json")[name], steps.compared(name))
