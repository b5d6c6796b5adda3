"""Deferred updates: the same numbers to the bit, whenever someone looks at the values between two steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.runtime.cases import (
    OPTIMIZER,
    assert_equals_eager,
    at_random,
    batches_of,
    differing,
    disk_always,
    eager_run,
    graph_of,
    load,
    model_of,
    program_of,
)

from lading.ir.action import ActionKind
from lading.ir.defer import defer, updates
from lading.ir.graph import OpKind
from lading.runtime.executor import Executor

RATES = [1e-3, 5e-4, 2e-3, 1e-3]
STEPS = [  # model, micro-batches, clipping, dropout, what leaves the device, share of the updates that is deferred
    ("gpt", 1, 0.0, 0.0, "half", 0.4),
    ("gpt", 2, 1.0, 0.2, "half", 1.0),
    ("llama", 2, 0.0, 0.0, "all", 1.0),
    ("moe", 1, 0.5, 0.0, "nothing", 1.0),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "micro", "clip", "dropout", "evict", "share"), STEPS)
def test_equals_plain_pytorch(
    tmp_path: Path, name: str, micro: int, clip: float, dropout: float, evict: str, share: float
) -> None:
    sizes = {"dropout": dropout} if dropout else {}
    graph = graph_of(name, micro=micro, clip=clip, **sizes)
    later, order = defer(graph, int(share * len(updates(graph))))
    assert sorted(order) == list(range(len(graph.ops)))
    assert later.deferred
    program = program_of(later, {"nothing": None, "half": at_random(0), "all": disk_always}[evict])
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES, **sizes)


def test_values_read_after_every_step_are_those_of_that_step(tmp_path: Path) -> None:
    graph = graph_of("gpt", micro=2, clip=1.0)
    later, _ = defer(graph, len(updates(graph)))
    program = program_of(later, at_random(3))
    batches = batches_of(len(RATES), 2)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, poison=True) as executor:
        load(executor, model_of("gpt"))
        for steps in range(1, len(RATES) + 1):
            executor.step(batches[steps - 1], lr=RATES[steps - 1])
            if random.Random(steps).random() < 0.3:
                continue
            took = executor.timeline()
            reference = model_of("gpt")
            eager_run(reference, batches[:steps], RATES[:steps], 1.0)
            assert differing(executor, reference) == [], f"after step {steps}"
            executor.flush()  # nothing is left to do
            assert differing(executor, reference) == []
            assert executor.timeline() == took


def test_values_are_read_without_making_a_timeline_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lie beside what saving takes; it is made when it is asked for, of the step and not of what followed."""
    later, _ = defer(graph_of("gpt"), 4)
    with Executor(program_of(later), optimizer=OPTIMIZER, folder=tmp_path) as executor:
        load(executor, model_of("gpt"))
        executor.step(batches_of(1, 1)[0], lr=1e-3)
        starts = {action: start for action, start in enumerate(executor._times.starts) if start}
        with monkeypatch.context() as patch:
            patch.setattr("lading.runtime.executor.measured_timeline", None)
            executor.flush()
        events = {event.action: event.start_s for event in executor.timeline().events}
        first = min(starts, key=lambda action: starts[action])
        for action, start in starts.items():
            assert events[action] - events[first] == pytest.approx(start - starts[first])
        assert executor.timing


def test_every_update_stands_before_the_first_use_of_its_parameter() -> None:
    graph = graph_of("llama", micro=2, clip=1.0)
    later, _ = defer(graph, len(updates(graph)))
    assert {op.kind for op in later.ops if op.kind is OpKind.STEP} == {OpKind.STEP}
    for index in later.deferred:
        written = {later.storage_of(t) for t in later.ops[index].mutates}
        earlier = [i for i in range(index) if i not in later.deferred and written & set(later.reads(later.ops[i]))]
        assert earlier == []
    assert {graph.storages[s].role.value for s in later.carried} == {"gradient", "workspace"}
    assert sum(op.kind is OpKind.STEP for op in later.ops) == len(later.parameters)
    assert not later.deferred == graph.deferred == ()


def test_what_is_deferred_is_skipped_where_nothing_is_pending(tmp_path: Path) -> None:
    graph = graph_of("gpt")
    later, _ = defer(graph, len(updates(graph)))
    program = program_of(later)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path) as executor:
        model = model_of("gpt")
        load(executor, model)
        executor.flush()
        assert differing(executor, model) == []
        executor.step(batches_of(1, 1)[0], lr=1e-3)
        assert differing(executor, model) != []
    assert any(a.kind is ActionKind.STEP and a.op in later.deferred for a in program.actions)
