"""Late updates: the same numbers to the bit, wherever inside its step an update runs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.cases import OPTIMIZER, assert_equals_eager, at_random, graph_of, program_of

from lading.errors import ConfigError
from lading.ir.defer import defer, updates
from lading.ir.graph import OpKind, Phase, StepGraph
from lading.ir.late_updates import covered_moves, even_moves, paced_moves, with_late_updates
from lading.ir.loss_parts import with_loss_parts
from lading.ir.plan import Choices
from lading.memory.restore import apply_choices
from lading.runtime.executor import Executor

RATES = [1e-3, 5e-4, 2e-3]


def late(graph: StepGraph, hurry: float) -> StepGraph:
    moves = even_moves(graph, [1.0] * len(graph.ops), hurry)
    assert moves
    return with_late_updates(graph, moves)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro", "hurry", "share"), [("gpt", 1, 1.0, 0.0), ("llama", 2, 3.0, 0.4), ("moe", 1, 0.5, 1.0)]
)
def test_equals_plain_pytorch(tmp_path: Path, name: str, micro: int, hurry: float, share: float) -> None:
    graph = late(graph_of(name, micro=micro), hurry)
    graph = defer(graph, int(share * len(updates(graph))))[0] if share else graph
    program = program_of(graph, at_random(1))
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, rates=RATES)


def test_updates_are_spread_evenly_and_never_early() -> None:
    graph = graph_of("gpt", num_layers=4)
    seconds = [1.0] * len(graph.ops)
    moved, origins = with_late_updates(graph, even_moves(graph, seconds))
    assert sorted(origins) == list(range(len(graph.ops)))
    for op, after in even_moves(graph, seconds):
        assert graph.ops[op].kind is OpKind.STEP
        assert op < after
    runs = [op.phase is Phase.OPTIMIZER for op in moved.ops]
    behind = [i for i, op in enumerate(graph.ops) if op.phase is Phase.OPTIMIZER]
    first, last = behind[0], max(i for i, op in enumerate(moved.ops) if op.phase is not Phase.OPTIMIZER)
    half = (first + last) // 2
    assert 0.3 < sum(runs[:half]) / sum(runs[:last]) < 0.7, "half of the updates in half of the time"


def paced(graph: StepGraph) -> tuple[StepGraph, int]:
    moves, count = paced_moves(graph, [1.0] * len(graph.ops))
    return defer(with_late_updates(graph, moves)[0], count)[0], count


@pytest.mark.long
@pytest.mark.parametrize(("name", "micro"), [("llama", 1), ("moe", 2)])
def test_updates_all_around_the_step_equal_plain_pytorch(tmp_path: Path, name: str, micro: int) -> None:
    graph, count = paced(graph_of(name, micro=micro))
    assert 0 < count < len(updates(graph_of(name, micro=micro)))
    program = program_of(graph, at_random(3))
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, rates=RATES)


def test_updates_are_spread_over_the_next_forward_too() -> None:
    """A quarter of the step has about a quarter of what updates write, wherever it is."""
    graph = paced(graph_of("gpt", num_layers=8))[0]
    assert graph.deferred, "some wait for the next step"
    written = [op.bytes_written if op.phase is Phase.OPTIMIZER else 0 for op in graph.ops]
    ends = [i for i, op in enumerate(graph.ops) if op.phase is not Phase.OPTIMIZER]
    quarters = [ends[len(ends) * k // 4] for k in range(4)] + [len(graph.ops)]
    shares = [sum(written[a:b]) / sum(written) for a, b in itertools.pairwise(quarters)]
    assert min(shares) > 0.12, shares
    assert max(shares) < 0.4, shares


def covered(graph: StepGraph) -> tuple[StepGraph, int]:
    moves, count = covered_moves(graph, [1.0] * len(graph.ops))
    return defer(with_late_updates(graph, moves)[0], count)[0], count


@pytest.mark.long
@pytest.mark.parametrize(("name", "micro"), [("gpt", 1), ("llama", 2)])
def test_updates_with_cover_equal_plain_pytorch(tmp_path: Path, name: str, micro: int) -> None:
    graph, count = covered(graph_of(name, micro=micro))
    assert 0 < count < len(updates(graph_of(name, micro=micro)))
    program = program_of(graph, at_random(4))
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, rates=RATES)


def test_updates_of_what_is_read_at_once_are_not_deferred() -> None:
    """The embedding is read first; of what is read later about the share of the forward waits."""
    whole = graph_of("gpt", num_layers=8)
    graph, count = covered(whole)
    assert 0 < count < len(updates(whole)) / 2
    names = {graph.storages[s].name for op in graph.deferred for s in graph.op_writes[op]}
    assert not any(name.startswith(("tokens.", "positions.")) for name in names), names
    layers = {int(name.split(".")[1]) for name in names if name.startswith("layers.")}
    assert layers & {1, 2, 3}, "of early layers some wait"
    assert layers & {5, 6, 7}, "and of late ones"
    assert covered_moves(whole, [1.0] * len(whole.ops), 0.0) == ((), 0)


def test_updates_behind_all_others_are_left_where_they_are() -> None:
    """With clipping every update waits for the last gradient: there is nothing to compute between them."""
    graph = graph_of("gpt", clip=1.0)
    assert paced_moves(graph, [1.0] * len(graph.ops)) == ((), 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda op, after: [(0, after)], "expected an update and a later one"),
        (lambda op, after: [(op, op)], "expected an update and a later one"),
        (lambda op, after: [(op, 1 << 30)], "expected an update and a later one"),
        (lambda op, after: [(op, after), (op, after)], "twice"),
    ],
)
def test_other_moves_are_refused(change: Callable[[int, int], list[tuple[int, int]]], why: str) -> None:
    graph = graph_of("gpt")
    (op, after), *_ = even_moves(graph, [1.0] * len(graph.ops))
    choices = Choices(late_updates=tuple(change(op, after)))
    with pytest.raises(ConfigError, match=why):
        apply_choices(graph, choices)


def test_an_order_that_changes_what_an_operation_sees_is_refused() -> None:
    """Two updates of one parameter in parts share what they write; the later part may not go first."""
    graph = graph_of("gpt")
    ops = [i for group in updates(graph) for i in group]
    first = min(ops)
    twin = dataclasses.replace(graph, ops=(*graph.ops[: first + 1], *graph.ops[first:]))
    with pytest.raises(ConfigError, match="changes the order in which"):
        with_late_updates(twin, [(first, first + 2)])


def test_random_late_updates_of_a_loss_in_parts(tmp_path: Path) -> None:
    graph = with_loss_parts(graph_of("gpt"), 3)[0]
    rng = random.Random(0)
    free = {i for group in updates(graph) for i in group}
    last = max(i for i in range(len(graph.ops)) if i not in free)
    moves = sorted((i, rng.choice([j for j in range(i + 1, last + 1) if j not in free])) for i in free if i < last)
    program = program_of(with_late_updates(graph, moves)[0], at_random(2))
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, "gpt", rates=RATES)
