"""Cut gradients and parameters in a pipeline: one program for time and bytes, gathered as torch's lists gather."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sim.sequence import sequence_of
from torch.distributed.pipelining.schedules import (
    _Action,  # pyright: ignore[reportPrivateUsage]
    _add_unshard_reshard,  # pyright: ignore[reportPrivateUsage]
)

from lading.catalog.stacks import stack_by_name
from lading.clusters import step_of
from lading.ir.action import ActionKind
from lading.ir.graph import Role
from lading.ir.request import Request
from lading.ir.schedules import schedule
from lading.program.emit import gathering
from lading.sim.jobs import job_of
from lading.sim.occupancy import occupancy
from lading.sim.prices import MachinePrices
from lading.sim.simulate import Simulated, simulate
from lading.sim.step import DATA_PARALLEL
from lading.sim.traces import step_times


def step(layout: str, **others: Any) -> Simulated:
    asked = {"model": "llama3-8b", "machine": "h100", "devices": 16, "seq_len": 4096, **others}
    return simulate(*step_of(Request(**asked, layout=layout)))


@pytest.mark.parametrize(
    ("kind", "chunks"), [("interleaved", 2), ("interleaved", 4), ("zbv", 2), ("zero-bubble", 5), ("dualpipe-v", 2)]
)
def test_stages_are_gathered_and_released_as_torch_does(kind: str, chunks: int) -> None:
    plan = schedule(kind, 4, chunks, 8)
    for rank in range(plan.ranks):
        actions: list[_Action | None] = [_Action.from_str(text) for text in plan.texts(rank)]
        theirs = [str(action) for action in _add_unshard_reshard(actions)]
        while "RESHARD" in theirs[-1]:  # what is released behind the last action
            theirs.pop()
        ours: list[str] = []
        texts = iter(plan.texts(rank))
        for (gone, comes), joint in zip(gathering(plan, rank), plan.orders[rank][:, 3].tolist(), strict=True):
            ours += [*(f"{stage}RESHARD" for stage in sorted(gone)), *(f"{stage}UNSHARD" for stage in comes)]
            ours += [] if joint else [next(texts)]
        assert ours == theirs


@pytest.mark.parametrize("layout", ["pp4,gb64", "pp4,vpp2,gb64", "pp4,vpp4,tp2,sp,gb64", "pp4,gb64,zero-bubble"])
def test_two_and_three_are_one_program(layout: str) -> None:
    two, three = step(f"{layout},zero2"), step(f"{layout},zero3")
    assert two.step.step_s == three.step.step_s
    assert two.memory == three.memory
    assert sum(two.step.shares_s.values()) == pytest.approx(two.step.step_s)
    for rank, roles in enumerate(two.memory):
        assert occupancy(two, rank).peak_bytes == sum(roles.values())
    ours = [[i.collective for i in sequence_of(s.request, s.table, rank=1)] for s in (two, three)]
    assert ours[0] == ours[1]


def test_gradients_are_reduced_once_and_so_are_whole_until_then() -> None:
    """A rank has 8 blocks of 218.1 million parameters: 2 bytes gathered and 4 of gradients each, 2 / 4 kept."""
    cut = step("pp4,gb64,zero3")
    issued = [i.collective for i in sequence_of(cut.request, cut.table, rank=1) if i.collective]
    assert [c.op for c in issued if c.op in ("all_gather", "reduce_scatter")] == 8 * ["all_gather"] + 8 * [
        "reduce_scatter"
    ]
    elements = 8 * 218_112_000
    roles = cut.memory[1]
    assert roles[Role.WORKSPACE] == pytest.approx(6 * elements, rel=1e-3)
    assert roles[Role.GRADIENT] == 0
    assert roles[Role.PARAMETER] == pytest.approx(2 * elements / 4, rel=1e-3)


def test_each_stage_holds_up_the_first_micro_batch_and_the_first_one_reduces_last() -> None:
    """Of 1F1B: one unit's gather on each stage, and the first stage's whole reduction behind its last backward."""
    cut = step("pp4,gb64,zero3")
    times = step_times(cut)
    program = times.program
    for base, actions in zip(program.bounds, program.ranks, strict=False):
        first = actions.kind.index(ActionKind.COMPUTE)
        gather = actions.kind.index(ActionKind.UNSHARD)
        sent = times.start_s[base + gather]  # once the input is there
        assert actions.waits[first] == (*actions.waits[gather], gather)
        assert times.start_s[base + first] == pytest.approx(times.end_s[base + gather])
        assert times.end_s[base + gather] - sent > 0
    reduce_s = MachinePrices(cut.machine, cut.request.layout, cut.request.stack).reduce_s(cut.step.stages[0].trained)
    assert cut.step.shares_s[DATA_PARALLEL] == pytest.approx(reduce_s, rel=0.3)


@pytest.mark.parametrize("seq_len", [256, 4096])
@pytest.mark.parametrize("layout", ["pp4,vpp2,gb64,zero3", "pp4,vpp4,gb64,zero3", "pp4,vpp4,gb64,zero3,zero-bubble"])
def test_a_rank_waits_for_gathers_where_it_needs_them(layout: str, seq_len: int) -> None:
    """A stage is computed once its gathers have ended, which begin when the action before them has."""
    times = step_times(step(layout, seq_len=seq_len))
    program, waited = times.program, 0
    for base, actions in zip(program.bounds, program.ranks, strict=False):
        for number, kind in enumerate(actions.kind):
            asked = [w for w in actions.waits[number] if actions.kind[w] is ActionKind.UNSHARD]
            waited += bool(asked) and kind is ActionKind.COMPUTE
            for wait in asked:
                assert times.end_s[base + wait] <= times.start_s[base + number]
                assert all(times.end_s[base + w] <= times.start_s[base + wait] for w in actions.waits[wait])
    assert waited >= len({region.stage for region in program.regions})


def test_all_ranks_take_what_the_step_says() -> None:
    cut = step("pp4,tp2,gb64,zero3")
    job = job_of(cut)
    assert job.group == 2
    assert job.replicas == 2


def test_a_stack_that_does_not_run_it_says_so() -> None:
    said = "zero3 in a pipeline simulated as PyTorch's FSDP2 has it"
    assert any(said in text for text in step("pp4,gb64,zero3", stack="megatron-bridge").assumed)
    assert not any(said in text for text in step("pp4,gb64,zero3", stack="torchtitan-compile").assumed)
    assert not any(said in text for text in step("gb64,zero3", stack="megatron-bridge").assumed)
    assert not stack_by_name("megatron-deepspeed").cuts_in_pipeline
