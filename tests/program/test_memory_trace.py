"""Bytes counted from lists: by hand, against what orders of micro-batches keep, and nothing is left at the end."""

from __future__ import annotations

import numpy as np
import pytest
from tests.program.test_lists import EXPERTS, ONE, pipeline, shape
from tests.sim.pipeline_bounds import alive_peaks

from lading.ir.action import Work
from lading.ir.graph import Role
from lading.ir.program import ALL_UNITS, ParameterGroup, Program
from lading.ir.schedules import KINDS, schedule
from lading.program.emit import ListShape, emit
from lading.program.memory_trace import GradientRules, MemoryTrace, Thing, What, memory_changes, memory_trace

#: A unit of 100 bytes of parameters on two ranks, which keeps 10 and has 15 alive while it runs.
SIZES = {
    What.RUNS: 15, What.ADDS: 15, What.GRADIENTS: 100, What.SAVED: 10, What.MADE: 100, What.BUFFER: 100, What.CAST: 50,
    What.WHOLE: 100, What.INPUT: 100, What.SHARD: 50,
}  # fmt: skip
MADE = GradientRules(makes=True)
ROLES = dict.fromkeys(What, Role.ACTIVATION) | {What.SHARD: Role.GRADIENT}


def traced(program: Program, rules: GradientRules = MADE, rank: int = 0) -> MemoryTrace:
    def size_of(thing: Thing) -> int:
        stays = thing.what is What.MADE and isinstance(thing.of, ParameterGroup) and thing.of.axes != "dp"
        return 0 if stays else SIZES.get(thing.what, 0)

    return memory_trace(memory_changes(program, rank, rules), size_of, ROLES, {Role.PARAMETER: 7})


def test_two_units_by_hand() -> None:
    """The most is in the backward of the first unit, whose parameters came while the second's were gathered:
    7 of parameters, 15 alive, 100 whole, 100 made, 100 in the buffer of the reduction before, 50 of its result.
    """
    trace = traced(emit(shape(2)))
    assert trace.peak_bytes == 7 + 15 + 100 + 100 + 100 + 50
    assert trace.peak == {Role.PARAMETER: 7, Role.ACTIVATION: 315, Role.GRADIENT: 50}
    assert trace.totals[-1] == 7 + 2 * 50, "gradients of both shards are left"


def test_a_second_micro_batch_finds_gradients_of_the_first() -> None:
    """The most is in the second backward of the last unit: 7 of parameters, 10 kept by the first unit, 15 alive, 100
    whole, 100 made, 100 in the buffer of the gather in front, 100 in that of the last reduction, 2 * 50 of gradients.
    """
    one, two = (traced(emit(shape(2, micro_batches=n))) for n in (1, 2))
    assert two.peak_bytes == 7 + 10 + 15 + 100 + 100 + 100 + 100 + 2 * 50
    assert one.totals[-1] == two.totals[-1]


def test_shards_that_go_to_the_host_leave_nothing() -> None:
    assert traced(emit(shape(3)), GradientRules(makes=True, to_host=True)).totals[-1] == 7


def test_a_group_alone_is_copied_and_reduced_too() -> None:
    """Experts whose ranks have no replicas: without an exchange, but with parameters and gradients of their own."""
    plan = schedule("1f1b", 1, 1, 2)
    runs = ((EXPERTS, 2),)
    trace = traced(emit(ListShape(plan, (runs,), shards="parameters", single_rank_axes=frozenset({"dp/ep"}))))
    counts = np.bincount(trace.changes.number, trace.changes.sign)
    left = {thing.what for thing, count in zip(trace.changes.things, counts, strict=True) if count}
    assert left <= {What.SHARD, What.MADE}


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_those_that_an_order_keeps(kind: str) -> None:
    """Gradients are in buffers: 10 kept of each micro-batch under way, and 5 besides while one runs."""
    asked = pipeline(kind, "", units=1)
    program = emit(asked)
    kept = alive_peaks(asked.plan, 10, 10, 5)
    for rank in range(asked.plan.ranks):
        trace = traced(program, GradientRules(makes=False), rank)
        whole_first = rank == asked.plan.rank_of(0)
        assert trace.peak_bytes - 7 <= kept[rank] if whole_first else trace.peak_bytes - 7 == kept[rank]
        assert trace.totals[-1] == 7


@pytest.mark.parametrize(("kind", "units"), [("interleaved", 2), ("zero-bubble", 3), ("1f1b", 2)])
def test_stages_of_a_pipeline_are_gathered_and_reduced(kind: str, units: int) -> None:
    program = emit(pipeline(kind, "parameters", units=units))
    for rank in range(4):
        trace = traced(program, MADE, rank)
        whole = [np.cumsum(np.where(trace.changes.number == n, trace.changes.sign, 0)) for n, thing
                 in enumerate(trace.changes.things) if thing.what is What.WHOLE]  # fmt: skip
        assert 1 <= np.sum(whole, axis=0).max() <= 3 * units
        assert np.sum(whole, axis=0)[-1] == 0


def test_buckets_take_gradients_over() -> None:
    """DistributedDataParallel: made in the first micro-batch, in buckets that are always there from the last on."""
    plan = schedule("1f1b", 1, 1, 2)
    program = emit(ListShape(plan, (((ONE, 2),),)))
    there = traced(program, GradientRules(makes=True, in_buckets=True))
    changes = there.changes
    made = [n for n, thing in enumerate(changes.things) if thing.what is What.MADE]
    regions = [thing.of for thing in changes.things if thing.what is What.ADDS]
    assert made
    assert {region.unit for region in regions} <= {ALL_UNITS, 0, 1}
    assert all(getattr(region, "work", None) is Work.BACKWARD for region in regions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", ["optimizer", "parameters"])
@pytest.mark.parametrize("rules", [GradientRules(makes=False), MADE, GradientRules(makes=True, in_buckets=True)])
def test_regions_that_were_seen_before_change_the_same(
    kind: str, shards: str, rules: GradientRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = emit(pipeline(kind, shards, micro_batches=16))
    remembered = [memory_changes.__wrapped__(program, rank, rules) for rank in range(len(program.ranks))]
    monkeypatch.setattr("lading.program.memory_trace._Reader._is_steady", lambda self, op: False)
    for rank, changes in enumerate(remembered):
        read = memory_changes.__wrapped__(program, rank, rules)
        assert read.things == changes.things
        for name in ("number", "sign", "action", "ends"):
            assert np.array_equal(getattr(read, name), getattr(changes, name))
