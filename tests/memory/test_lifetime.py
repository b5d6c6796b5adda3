"""Lifetimes, gaps, and what may be recomputed or moved."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.captured import captured_step
from tests.programs import GraphBuilder, chain

from lading.ir.graph import PERSISTENT, OpKind, Phase, Role, StepGraph
from lading.ir.program import PAGE_BYTES
from lading.memory.lifetime import FOREVER, Gap, can_recompute, gaps, is_movable, is_pure, lifetimes

NAMES = ["llama", "gpt", "moe"]


def gap_of(graph: StepGraph, storage: int, start: int) -> Gap:
    """The gap of a storage that opens at an operation."""
    return next(g for g in gaps(graph, lifetimes(graph)) if (g.storage, g.start) == (storage, start))


def recomputable(graph: StepGraph, storage: int, start: int) -> bool:
    return can_recompute(graph, lifetimes(graph), gap_of(graph, storage, start))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_gaps_tile_the_time_between_uses(name: str) -> None:
    graph = captured_step(name)
    lives = lifetimes(graph)
    found = gaps(graph, lives)
    for storage, uses in enumerate(lives.uses):
        assert list(uses) == [i for i, op in enumerate(graph.ops) if storage in {*graph.reads(op), *graph.writes(op)}]
        own = [g for g in found if g.storage == storage]
        inner = [(g.start, g.end) for g in own if not g.wraps]
        assert inner == list(pairwise(uses))
        wraps = [(g.start, g.end) for g in own if g.wraps]
        persistent = graph.storages[storage].role in PERSISTENT
        assert wraps == ([(uses[-1], uses[0])] if uses and persistent else [])


def test_producers_and_writers() -> None:
    parts = chain(2)
    lives = lifetimes(parts.graph)
    assert lives.producer[parts.batch] is None
    assert [lives.producer[a] for a in parts.activations] == parts.forward[:2]
    assert not any(lives.mutated)  # an optimizer step does not count
    assert all(lives.available_until[w] == FOREVER for w in (*parts.weights, *parts.states))


def _built(*, random: bool = False, writes: str = "", step: bool = False) -> tuple[StepGraph, int]:
    """x, w -> a -> b -> c, then a and x again; ``writes`` is mutated in between. Returns the graph and a."""
    build = GraphBuilder()
    x = build.storage("x", 8, Role.INPUT)
    w, other = build.storage("w", 8, Role.PARAMETER), build.storage("other", 8, Role.BUFFER)
    a, b, c = (build.storage(n, 8, Role.ACTIVATION) for n in "abc")
    build.op([x, w], [a], random=random)
    build.op([a], [b])
    if writes:
        build.op([other], mutates=[{"a": a, "x": x, "w": w, "b": b, "other": other}[writes]])
    if step:
        build.op([b], mutates=[w], kind=OpKind.STEP)
    build.op([b], [c])
    build.op([a, c, x], [build.storage("loss", 4, Role.ACTIVATION)])
    return build.graph(), a


def test_a_pure_producer_can_run_again() -> None:
    graph, a = _built()
    assert recomputable(graph, a, 1)


def test_a_random_producer_cannot() -> None:
    graph, a = _built(random=True)
    assert not is_pure(graph.ops[0])
    assert not recomputable(graph, a, 1)


@pytest.mark.parametrize(
    ("writes", "allowed"), [("a", False), ("x", False), ("w", False), ("b", True), ("other", True)]
)
def test_a_write_in_place_forbids_what_it_touches(writes: str, allowed: bool) -> None:
    graph, a = _built(writes=writes)
    start = max(i for i, op in enumerate(graph.ops) if a in graph.reads(op) and i < len(graph.ops) - 1)
    assert recomputable(graph, a, start) == allowed


def test_an_optimizer_step_on_the_source_does_not_forbid_it() -> None:
    graph, a = _built(step=True)
    assert recomputable(graph, a, 1)  # the lowering delays the step


def test_nothing_is_recomputed_for_an_optimizer_operation_or_over_the_boundary() -> None:
    parts = chain(2)
    graph = parts.graph
    lives = lifetimes(graph)
    for gap in gaps(graph, lives):
        if gap.wraps or graph.ops[gap.end].phase is Phase.OPTIMIZER or lives.producer[gap.storage] is None:
            assert not can_recompute(graph, lives, gap)


def test_a_source_that_is_gone_forbids_it() -> None:
    """Inputs of the batch are freed after their last use and cannot be had again."""
    build = GraphBuilder()
    x = build.storage("x", 8, Role.INPUT)
    a, b, loss = (build.storage(n, 8, Role.ACTIVATION) for n in ("a", "b", "loss"))
    build.op([x], [a])
    build.op([a], [b])
    build.op([b], [build.storage("c", 8, Role.ACTIVATION)])
    build.op([a, b], [loss])
    graph = build.graph()
    assert not recomputable(graph, a, 1)
    assert not recomputable(graph, b, 2) or lifetimes(graph).available_until[a] >= 3


@pytest.mark.parametrize("name", NAMES)
def test_what_may_be_recomputed_in_a_captured_step(name: str) -> None:
    graph = captured_step(name)
    lives = lifetimes(graph)
    allowed = [g for g in gaps(graph, lives) if can_recompute(graph, lives, g)]
    assert any(graph.ops[g.start].phase is Phase.FORWARD and graph.ops[g.end].phase is Phase.BACKWARD for g in allowed)
    for gap in allowed:
        producer = lives.producer[gap.storage]
        assert producer is not None
        op = graph.ops[producer]
        assert not op.random
        assert not op.mutates
        assert not lives.mutated[gap.storage]
        assert graph.ops[gap.end].phase is not Phase.OPTIMIZER
        for source in graph.reads(op):
            persistent = graph.storages[source].role in PERSISTENT
            assert persistent or lives.available_until[source] >= gap.end


def test_what_is_movable() -> None:
    build = GraphBuilder()
    sizes = (PAGE_BYTES - 1, PAGE_BYTES)
    found = {(role, size): build.storage(role.value, size, role) for role in Role for size in sizes}
    for storage in found.values():
        if build.storages[storage].role not in (*PERSISTENT, Role.INPUT):
            build.op([], [storage])
    graph = build.graph()
    movable = {key for key, storage in found.items() if is_movable(graph, storage, PAGE_BYTES)}
    assert movable == {(role, PAGE_BYTES) for role in Role if role not in (Role.INPUT, Role.CONSTANT)}
