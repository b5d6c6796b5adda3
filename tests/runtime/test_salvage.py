"""A step that stops at any action leaves every value of one step or the other, and says which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.cases import (
    MACHINE,
    OPTIMIZER,
    TIERED,
    at_random,
    batches_of,
    behind_host,
    disk_always,
    graph_of,
    load,
    model_of,
    program_of,
)

from lading.errors import ConfigError, ProgramError, StorageError
from lading.ir.action import Action, ActionKind
from lading.ir.defer import defer, updates
from lading.ir.graph import StepGraph
from lading.ir.host_ops import hosted, light_groups
from lading.runtime.executor import Executor
from lading.runtime.values import named_tensors
from lading.units import GiB

Values = dict[int, torch.Tensor]


class Fault:
    """Makes an executor stop at one action: it raises, or is told to stop as by a second signal."""

    def __init__(self) -> None:
        self.at, self.raises = -1, True
        self.executor: Executor | None = None

    def __call__(self, action: Action) -> None:
        if action.id == self.at:
            if self.raises:
                raise RuntimeError("boom")
            assert self.executor is not None
            self.executor.stop(KeyboardInterrupt())


def read(executor: Executor) -> Values:
    return {s: executor.read_storage(s) for s in named_tensors(executor.program.graph)}


def write(executor: Executor, values: Values) -> None:
    for storage, value in values.items():
        executor.write_storage(storage, value)


def small(deferred: float = 0.0, clip: float = 0.0) -> StepGraph:
    graph = graph_of("llama", clip=clip, num_layers=1)
    return defer(graph, int(deferred * len(updates(graph))))[0]


def on_host(graph: StepGraph) -> StepGraph:
    """Every other update runs on the host."""
    return hosted(graph, (i for group in light_groups(graph)[::2] for i in group))


#: Room of the host for a few updates, where what they work on lies behind it.
ROOM = 400_000
CASES = {  # graph, what leaves the device, machine, what there can be
    "kept": (small, None, MACHINE, {"whole", "partial"}),
    "disk": (small, disk_always, MACHINE, {"whole", "partial"}),
    "clipped": (lambda: small(clip=1.0), at_random(1), MACHINE, {"whole", "partial"}),
    "deferred": (lambda: small(deferred=1.0), disk_always, MACHINE, {"whole"}),
    "tiered": (lambda: small(deferred=0.5), at_random(2), TIERED, {"whole", "partial"}),
    "hosted": (lambda: on_host(small(deferred=0.5)), at_random(3), TIERED, {"whole", "partial"}),
    "behind": (lambda: on_host(small(deferred=0.5)), disk_always, TIERED, {"whole", "partial"}),
}
QUICK = [(case, 6) for case in ("disk", "deferred", "hosted", "behind")]
SLOW = [pytest.param(case, 10_000, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.long
@pytest.mark.parametrize(("case", "positions"), [*QUICK, *SLOW])
def test_every_value_is_of_the_step_it_is_said_to_be(tmp_path: Path, case: str, positions: int) -> None:
    make, pick, machine, wanted = CASES[case]
    graph, fault, batches = make(), Fault(), batches_of(2, 1)
    lie_behind = behind_host(graph) if case == "behind" else {}
    program = program_of(graph, pick, machine, behind_host=lie_behind, host_bytes=ROOM if lie_behind else GiB)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, jitter=fault, poison=True) as executor:
        fault.executor = executor
        load(executor, model_of("llama", num_layers=1))
        initial = read(executor)
        executor.step(batches[0], lr=1e-3)
        before = read(executor)
        executor.step(batches[1], lr=1e-3)
        after, seen = read(executor), set[str]()
        count = len(program.actions)
        last = max(a.id for a in program.actions if a.kind is ActionKind.STEP)
        for number, at in enumerate([*range(count // positions // 2, count, max(1, count // positions)), last]):
            write(executor, initial)
            executor.completed = 0
            executor.step(batches[0], lr=1e-3)
            fault.at, fault.raises = at, number % 2 == 0
            with pytest.raises((ProgramError, KeyboardInterrupt)):
                executor.step(batches[1], lr=1e-3)
            fault.at = -1
            seen.add(check(executor, before, after, look=number % 4 > 1))
            if executor.is_whole and executor.completed == 1:  # as if nothing had happened
                executor.step(batches[1], lr=1e-3)
                assert_same(read(executor), after)
        assert seen >= wanted


def check(executor: Executor, before: Values, after: Values, *, look: bool) -> str:
    """Compare every value with those of the step that it is said to be of."""
    if executor.is_whole and not executor.changed:
        if look or executor.completed == 2:
            assert_same(read(executor), after if executor.completed == 2 else before)
        return "whole"
    with pytest.raises(ConfigError, match="load a checkpoint"):
        executor.step(batches_of(1, 1)[0], lr=1e-3)
    for storage in before:
        if storage in executor.lost:
            with pytest.raises(StorageError, match="was lost in a step that failed"):
                executor.read_storage(storage)
            continue
        done, total = executor.changed.get(storage, (0, 1))
        if done in (0, total):
            assert torch.equal(executor.read_storage(storage), (after if done else before)[storage])
    return "partial"


def assert_same(left: Values, right: Values) -> None:
    assert [s for s in right if not torch.equal(left[s], right[s])] == []
