"""Memory over time agrees with the peak that is reported, on every rank of every kind of schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.golden.layouts import CASES

from lading.clusters import step_of
from lading.errors import ConfigError
from lading.ir.graph import Role
from lading.ir.request import Request
from lading.sim import occupancy as module
from lading.sim.occupancy import occupancy
from lading.sim.simulate import Simulated, simulate
from lading.sim.traces import step_timeline

LAYOUTS = [
    "tp8,pp8,gb16",
    "tp8,pp8,gb16,gpipe",
    "tp8,pp8,vpp3,gb16",
    "tp8,pp4,gb16,zero-bubble",
    "tp8,pp4,vpp2,gb16,zbv",
    "tp8,pp4,vpp2,gb16,dualpipe-v",
    "tp8,pp8,sp,gb16,recompute=full,recompute_layers=3",
    "tp8,sp,dp2,zero1,gb8",
    "dp64,zero3,gb128,recompute=full",
]


def step(layout: str, **others: Any) -> Simulated:
    asked = {"model": "gpt3-175b", "machine": "a100", "seq_len": 2048, "stack": "megatron-core", **others}
    request, table = step_of(Request(**asked, layout=layout))
    return simulate(request, table)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_most_is_what_is_reported(layout: str) -> None:
    simulated = step(layout)
    for rank, roles in enumerate(simulated.memory):
        found = occupancy(simulated, rank)
        times, by_role = found.bytes_over_time
        assert found.peak_bytes == sum(roles.values())
        assert times[0] >= 0.0
        assert times[-1] <= simulated.step.step_s * (1 + 1e-12)
        assert np.all(np.diff(times) > 0)
        assert min(sizes.min() for sizes in by_role.values()) >= 0
        assert found.total[-1] == by_role[Role.ACTIVATION][-1] == 0
        for role in (Role.PARAMETER, Role.OPTIMIZER_STATE):
            assert set(by_role[role][:-1].tolist()) == {roles[role]}
        assert by_role[Role.GRADIENT].max() >= roles[Role.GRADIENT], "where they are sharded they come with backward"


@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[7], "dp64,zero3,gb1024"])
def test_whole_chunks_peak_as_their_segments_do(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = step(layout)
    fine = occupancy(simulated, 0)
    monkeypatch.setattr(module, "_MANY", 0)
    coarse = occupancy(simulated, 0)
    assert len(coarse.spans) < len(fine.spans) / 3
    assert coarse.peak_bytes == fine.peak_bytes
    for role in (Role.GRADIENT, Role.PARAMETER):
        assert coarse.bytes_over_time[1][role].max() == fine.bytes_over_time[1][role].max()


def test_gathered_parameters_come_and_go_with_their_units() -> None:
    simulated = step("dp64,zero3")
    found = occupancy(simulated, 0)
    assert found.peak_bytes == simulated.peak_bytes
    sizes = found.bytes_over_time[1]
    own = 4 * sum(simulated.step.stages[0].elements.values()) // 64
    assert sizes[Role.GRADIENT][0] == 0
    assert sizes[Role.GRADIENT].max() == pytest.approx(own, rel=1e-6)
    assert sizes[Role.WORKSPACE][-1] == 0 < len(set(sizes[Role.WORKSPACE].tolist())) - 3


def test_micro_batches_under_way_are_what_the_first_rank_keeps() -> None:
    """1F1B on four stages: the first keeps four micro-batches, the last one."""
    simulated = step("tp8,pp4,gb16")
    kept = [stage.saved_bytes for stage in simulated.step.stages]
    for rank, number in ((0, 4), (3, 1)):
        sizes = occupancy(simulated, rank).bytes_over_time[1][Role.ACTIVATION]
        assert number * kept[rank] <= sizes.max() < (number + 1) * kept[rank]


def test_adapters_and_single_ranks() -> None:
    simulated = step("gb4,zero3,dp4", model="llama3-8b", machine="h100", lora=16)
    found = occupancy(simulated, 0)
    assert found.peak_bytes == simulated.peak_bytes
    assert any(held.role is Role.WORKSPACE and held.size_bytes for held in found.spans)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.machine == "host"])
def test_stock_pytorch_is_drawn_too(name: str) -> None:
    simulated = simulate(*CASES[name].request())
    for rank, roles in enumerate(simulated.memory):
        assert occupancy(simulated, rank).peak_bytes == sum(roles.values())


def test_the_trace_draws_it() -> None:
    simulated = step(LAYOUTS[0])
    timeline = step_timeline(simulated, ranks=[0, 7])
    for rank in (0, 7):
        assert timeline.peak_of_tier(f"rank {rank}") == sum(simulated.memory[rank].values())
    assert {name for s in timeline.memory for name in s.bytes_by_role} >= {"activation", "parameter", "optimizer_state"}
    assert timeline.peak_bytes == sum(simulated.memory[0].values())


def test_without_a_pipeline_memory_goes_with_the_events() -> None:
    simulated = step("tp8,sp,zero1,gb3")
    timeline = step_timeline(simulated)
    keeps = [s.time_s for s in timeline.memory if s.bytes_by_role["activation"] and s.tier == "rank 0"]
    actions = [e for e in timeline.events if e.action < 6]
    assert keeps[0] == pytest.approx(min(e.start_s for e in actions), abs=1e-3 * simulated.step.step_s)
    assert keeps[-1] <= max(e.end_s for e in actions)


def test_ranks_that_are_not_there() -> None:
    simulated = step("tp8,pp8,gb16")
    with pytest.raises(ConfigError, match="from 0 to 7, got 8"):
        occupancy(simulated, 8)
