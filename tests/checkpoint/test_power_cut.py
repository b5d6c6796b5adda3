"""What a power cut leaves at any moment: the newest checkpoint that was saved loads, and what is beside it is whole."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.power_cuts import DiskLog, lay_out

from lading.checkpoint.lock import run_lock
from lading.checkpoint.store import latest_checkpoint, open_checkpoint, save_checkpoint
from lading.errors import LadingError
from lading.files import write_folder_aside, write_text
from lading.report.metrics import MetricsLog, read_steps, truncate_after

EXPORTED = {"config.json": b"{}", "model.safetensors": b"weights" * 9, "1_Pooling/config.json": b"[]"}


def data_of(value: int) -> bytes:
    return value.to_bytes(4, "little") * 200


def save(folder: Path, step: int, value: int, keep: int = 1) -> None:
    data = data_of(value)
    save_checkpoint(folder, step, [("w", "uint8", [len(data)], [memoryview(data)])], {"value": value}, keep)


def new_folder(root: Path, log: DiskLog) -> None:
    """Two steps, and the second again, into a folder that is made; the first is deleted."""
    for value, step in enumerate((1, 2, 2)):
        save(root / "out" / "checkpoints", step, value)
        log.mark((step, value))


def folder_made_by_hand(root: Path, log: DiskLog) -> None:
    (root / "out" / "checkpoints").mkdir()
    save(root / "out" / "checkpoints", 1, 0)
    log.mark((1, 0))


def killed_while_it_replaced(root: Path, log: DiskLog) -> None:
    """A process has renamed the checkpoint of a step, and the new one to its name, and was killed; another goes on."""
    folder = root / "out" / "checkpoints"
    log.mark((1, 0))
    os.rename(folder / "step-00000001", folder / "step-00000001.old")
    os.rename(folder / "new", folder / "step-00000001")
    save(folder, 2, 2)
    log.mark((2, 2))


def saved_before(root: Path) -> None:
    folder = root / "out" / "checkpoints"
    save(folder, 1, 1)
    (folder / "step-00000001").rename(folder / "new")
    save(folder, 1, 0)


def check_checkpoints(root: Path, promises: list[tuple[int, int]]) -> None:
    """The newest is whole, and none older than what was saved last."""
    newest = latest_checkpoint(root / "out" / "checkpoints")
    if newest is None:
        assert not promises
        return
    checkpoint = open_checkpoint(newest)
    value = checkpoint.meta["value"]
    assert b"".join(checkpoint.chunks("w")) == data_of(value)
    assert not promises or (checkpoint.step, value) >= promises[-1]


def metrics(root: Path, log: DiskLog) -> None:
    def record(step: int) -> dict[str, Any]:
        return {"step": step, "loss": 1.5, "step_s": 0.25, "memory_bytes": 100}

    with MetricsLog(root / "metrics.jsonl") as file:
        for step in range(3):
            file.log(record(step))
        file.sync()
        log.mark(2)
        for step in range(3, 6):
            file.log(record(step))
    log.mark(5)


def check_metrics(root: Path, promises: list[int]) -> None:
    """A run that goes on from a checkpoint has the records of all steps before it."""
    if promises:
        truncate_after(root / "metrics.jsonl", promises[-1])
        assert [record["step"] for record in read_steps(root / "metrics.jsonl")] == [*range(promises[-1] + 1)]
    with MetricsLog(root / "metrics.jsonl") as file:
        file.log({"step": 6})


PLANS = [f"a plan {number}\n" * 50 for number in range(3)]


def plan(root: Path, log: DiskLog) -> None:
    """A run's folder is made, and its plan written and replaced."""
    with run_lock(root / "run"):
        for number, text in enumerate(PLANS):
            write_text(root / "run" / "plan.json", text)
            log.mark(number)


def check_plan(root: Path, promises: list[int]) -> None:
    path = root / "run" / "plan.json"
    if promises or path.exists():
        assert PLANS.index(path.read_text()) >= (promises[-1] if promises else 0)


def export(root: Path, log: DiskLog) -> None:
    """Files that other libraries write, which sync nothing."""
    with write_folder_aside(root / "exports" / "model") as folder:
        for name, data in EXPORTED.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
    log.mark("exported")


def check_export(root: Path, promises: list[str]) -> None:
    target = root / "exports" / "model"
    if promises or target.exists():
        assert {name: (target / name).read_bytes() for name in EXPORTED} == EXPORTED


def nothing(root: Path) -> None:
    pass


def some_folder(root: Path) -> None:
    (root / "out").mkdir()


@dataclass(frozen=True)
class Scenario:
    """What is done before the record begins, while it is on, and what must be true of any state after a power cut."""

    before: Callable[[Path], None]
    write: Callable[[Path, DiskLog], None]
    check: Callable[[Path, list[Any]], None]


SCENARIOS = {
    "new folder": Scenario(nothing, new_folder, check_checkpoints),
    "folder made by hand": Scenario(some_folder, folder_made_by_hand, check_checkpoints),
    "killed while it replaced": Scenario(saved_before, killed_while_it_replaced, check_checkpoints),
    "metrics": Scenario(nothing, metrics, check_metrics),
    "plan": Scenario(nothing, plan, check_plan),
    "export": Scenario(nothing, export, check_export),
}


def recorded(scenario: Scenario, root: Path, drop: int | None = None) -> DiskLog:
    root.mkdir()
    scenario.before(root)
    log = DiskLog(root, drop)
    with log.on():
        scenario.write(root, log)
    return log


def is_good(scenario: Scenario, folder: Path, promises: list[Any]) -> bool:
    """Whether what must be true is; a warning of a damaged checkpoint is an error in tests."""
    try:
        scenario.check(folder, promises)
    except (AssertionError, LadingError, OSError, ValueError, UserWarning):
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_state_that_a_power_cut_may_leave(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    log = recorded(scenario, tmp_path / "disk")
    number = 0
    for number, (tree, promises) in enumerate(log.states(random.Random(0))):
        folder = lay_out(tree, tmp_path / f"{number}")
        scenario.check(folder, promises)
        if scenario.check is check_checkpoints and number % 20 == 0:  # and the next save works, and cleans up
            save(folder / "out" / "checkpoints", 9, 9)
            assert [path.name for path in (folder / "out" / "checkpoints").glob("step-*")] == ["step-00000009"]
    assert number > 5


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_sync_counts(name: str, tmp_path: Path) -> None:
    """Without any one of them there is a state in which something is lost: so the states do find it."""
    scenario = SCENARIOS[name]
    count = recorded(scenario, tmp_path / "disk").syncs
    assert count > 2
    for drop in range(count):
        log = recorded(scenario, tmp_path / f"without {drop}", drop)
        states = enumerate(log.states(random.Random(0)))
        assert any(
            not is_good(scenario, lay_out(tree, tmp_path / f"{drop} {number}"), promises)
            for number, (tree, promises) in states
        ), f"sync {drop} of {count} makes no difference"
