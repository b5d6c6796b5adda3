"""Values that are copied while a step runs are those between the steps, however late each copy is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from tests.programs import chain, keep_all
from tests.runtime.cases import OPTIMIZER, batches_of, load, model_of, program_of
from tests.runtime.test_salvage import CASES

from lading.ir.action import DEVICE
from lading.ir.program import PAGE_BYTES
from lading.runtime import executor as executors
from lading.runtime.executor import Executor
from lading.runtime.fence import Fence, _Homes
from lading.runtime.values import named_tensors

Rooms = dict[int, list[torch.Tensor]]


class LateFence(Fence):
    """Copies each value at the last moment: when something is about to write over it."""

    def wait(self, storages: Collection[int] | None = None) -> None:
        with self._changed:
            for storage in [s for s in self._copies if s in self._left and (storages is None or s in storages)]:
                self._copies[storage]()
                self._left.discard(storage)


def rooms_of(executor: Executor) -> Rooms:
    graph = executor.program.graph
    staged = [s for s in named_tensors(graph) if executor.can_stage(s)]
    return {s: [torch.zeros(graph.storages[s].size_bytes, dtype=torch.uint8)] for s in staged}


def values_of(executor: Executor) -> dict[int, bytes]:
    return {s: b"".join(bytes(c) for c in executor.chunks(s)) for s in rooms_of(executor)}


def unlike(rooms: Rooms, values: dict[int, bytes]) -> list[int]:
    return [s for s, (room,) in rooms.items() if room.numpy().tobytes() != values[s]]


def staged_late(case: str, folder: Path) -> tuple[list[int], int]:
    """Storages whose staged bytes are not those of the moment, of copies made as late as can be; and of how many."""
    make, pick, machine, _ = CASES[case]
    program, batches = program_of(make(), pick, machine), batches_of(4, 1)
    wrong, count = list[int](), 0
    with Executor(program, optimizer=OPTIMIZER, folder=folder, poison=True) as executor:
        load(executor, model_of("llama", num_layers=1))
        executor.step(batches[0], lr=1e-3)
        for batch, ends in zip(batches[1:], (False, True, False), strict=True):
            rooms, values = rooms_of(executor), values_of(executor)
            fence = executor.stage(rooms)
            executor.step(batch, lr=1e-3)
            if ends:  # what the step did not write over is copied long after it
                executor.forward(batch)
            fence.wait()
            wrong += unlike(rooms, values)
            count += len(rooms)
    return wrong, count


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_values_are_copied_before_a_step_writes_over_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "Fence", LateFence)
    wrong, count = staged_late(case, tmp_path)
    assert count > 0
    assert wrong == []


def test_without_the_fence_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "Fence", LateFence)
    monkeypatch.setattr(executors.Ready, "writes", {})
    wrong, _ = staged_late("kept", tmp_path)
    assert wrong


@pytest.mark.parametrize("change", ["write", "close"])
def test_what_changes_values_between_steps_waits(tmp_path: Path, change: str) -> None:
    program = program_of(CASES["kept"][0]())
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path) as executor:
        load(executor, model_of("llama", num_layers=1))
        rooms, values = rooms_of(executor), values_of(executor)
        fence, first = executor.stage(rooms), next(iter(rooms))
        changing = threading.Thread(target=changes(executor, first)[change])
        changing.start()
        changing.join(0.2)
        assert changing.is_alive()
        fence.run()
        changing.join(10)
        assert not changing.is_alive()
        assert unlike(rooms, values) == []


def changes(executor: Executor, storage: int) -> dict[str, Callable[[], object]]:
    zeros = torch.zeros(executor.program.graph.storages[storage].size_bytes, dtype=torch.uint8)
    return {"write": lambda: executor.write_storage(storage, zeros), "close": executor.close}


def test_a_copy_that_fails_holds_nothing_back(tmp_path: Path) -> None:
    program, batches = program_of(CASES["kept"][0]()), batches_of(1, 1)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path) as executor:
        load(executor, model_of("llama", num_layers=1))
        rooms = rooms_of(executor)
        rooms[next(iter(rooms))] = [torch.zeros(1, dtype=torch.uint8)]
        fence = executor.stage(rooms)
        with pytest.raises(ValueError, match="broadcast"):
            fence.run()
        executor.step(batches[0], lr=1e-3)
        assert fence.is_open


def test_all_values_that_an_action_writes_on_are_waited_for() -> None:
    fence = Fence({0: int, 1: int}, lane=None)  # type: ignore[arg-type]  # nothing is copied here
    fence._end([0])
    waiter = threading.Thread(target=fence.wait, args=({0, 1},), daemon=True)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    fence._end([1])
    waiter.join(30)
    assert not waiter.is_alive()


def test_a_value_is_written_on_wherever_a_storage_lies_over_it() -> None:
    program = keep_all(chain(1, size_bytes=2 * PAGE_BYTES)).program()
    sizes = program.graph.storages
    value, place = next((s, at) for s, at in program.resident if sizes[s].size_bytes == 2 * PAGE_BYTES)
    shifts = (-2, -1, 0, 1, 2)
    over = [value in _Homes(program).values_overlapping(DEVICE, place + shift * PAGE_BYTES, value) for shift in shifts]
    assert over == [False, True, True, True, False]
