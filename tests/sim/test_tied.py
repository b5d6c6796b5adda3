"""An embedding that is the head too: there once on one stage, a copy on both ends of a pipeline."""

from __future__ import annotations

import dataclasses

import pytest
from tests.sim.sequence import collectives_of

from lading.catalog.architectures import table_parameters
from lading.clusters import step_of
from lading.ir.graph import Role
from lading.ir.request import Request
from lading.planner.peaks import peaks_of
from lading.sim.simulate import Simulated, simulate
from lading.sim.step import DATA_PARALLEL

#: Vocabulary times width.
TIED = {"gpt2": 50257 * 768, "llama3.2-1b": 128256 * 2048}


def both(model: str, layout: str, stack: str = "default", **others: int) -> tuple[Simulated, Simulated]:
    """A step of a model, and of the same whose head has a weight of its own."""
    asked = Request(model=model, machine="h100", layout=layout, seq_len=512, stack=stack)
    request, table = step_of(dataclasses.replace(asked, **others))
    return simulate(request, table), simulate(request, dataclasses.replace(table, tied=()))


@pytest.mark.parametrize("model", TIED)
@pytest.mark.parametrize("layout", ["mb2,gb2", "dp4,gb8", "dp4,zero1,gb8", "dp4,zero2,gb8", "tp4,gb2"])
def test_one_stage_has_it_once(model: str, layout: str) -> None:
    tied, untied = both(model, layout)
    own, ways = tied.request.layout, tied.request.layout.tp
    elements = tied.step.stages[0].elements["dp"]
    assert ways > 1 or elements == table_parameters(tied.table, 512)
    fewer = {role: untied.memory[0][role] - tied.memory[0][role] for role in tied.memory[0]}
    number = untied.step.stages[0].elements["dp"] - elements
    assert number == pytest.approx(TIED[model] / ways, rel=1e-3)  # rows of a vocabulary are rounded up
    assert fewer[Role.PARAMETER] == 2 * number
    assert fewer[Role.OPTIMIZER_STATE] == pytest.approx(12 * number / (4 if own.zero else 1), abs=4)
    assert fewer[Role.GRADIENT] == pytest.approx(4 * number / (4 if own.zero == 2 else 1), abs=4)
    assert fewer[Role.ACTIVATION] == 0
    assert tied.step.step_s < untied.step.step_s


def test_stock_pytorch_has_its_gradient_from_the_head_on() -> None:
    """Value and moments go, the most of gradients goes where the embedding's are done; no more than all of them."""
    tied, untied = both("llama3.2-1b", "mb1,gb1", "torchtitan-eager")
    fewer = {role: untied.memory[0][role] - tied.memory[0][role] for role in tied.memory[0]}
    assert fewer[Role.PARAMETER] == 4 * TIED["llama3.2-1b"]
    assert fewer[Role.OPTIMIZER_STATE] == 8 * TIED["llama3.2-1b"]
    assert 0 <= fewer[Role.GRADIENT] <= 4 * TIED["llama3.2-1b"]


@pytest.mark.parametrize("lora", [0, 8])
def test_frozen_weights_are_there_once_too(lora: int) -> None:
    tied, untied = both("llama3.2-1b", "mb1,gb1", lora=lora)
    assert untied.peak_bytes - tied.peak_bytes == (2 if lora else 18) * TIED["llama3.2-1b"]


def test_gradients_are_reduced_once() -> None:
    tied, untied = both("gpt2", "dp4,gb8")
    sizes = [
        sum(c.size_bytes for c in collectives_of(found.request, found.table) if c.axis == "dp")
        for found in (tied, untied)
    ]
    assert sizes == [4 * found.step.stages[0].elements["dp"] for found in (tied, untied)]
    assert sizes[1] - sizes[0] == 4 * TIED["gpt2"]


def test_the_start_of_a_run_has_it_once() -> None:
    tied, untied = both("gpt2", "mb2,gb2")
    starts = [peaks_of(found, Request(model="gpt2", machine="h100"))["start"]["device"] for found in (tied, untied)]
    assert starts[1] - starts[0] == 18 * TIED["gpt2"]


def test_a_pipeline_sums_the_gradients_of_two_copies() -> None:
    tied, untied = both("gpt2", "pp2,gb4")
    assert [stage.elements for stage in tied.step.stages] == [stage.elements for stage in untied.step.stages]
    assert tied.memory == untied.memory
    more = tied.step.shares_s[DATA_PARALLEL] - untied.step.shares_s[DATA_PARALLEL]
    assert more > 4 * TIED["gpt2"] / 450e9  # at the links' peak
    assert tied.step.step_s - untied.step.step_s == pytest.approx(more, rel=0.05)
