"""A run whose newest checkpoint is damaged stops, and names the command that goes on from the newest whole one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from lading.checkpoint.store import open_checkpoint, run_checkpoints, save_checkpoint
from lading.cli.main import main
from lading.config import load_run
from lading.errors import ConfigError, DamagedCheckpoint
from lading.ir.plan import Plan
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.resuming import go_back, naming_an_older_one
from lading.train import train_run
from tests.runs import saved_plan, write_run

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of a run that has ended and has its checkpoints of steps 2, 4, 6 and 8."""
    settings = [f"optimization.steps={STEPS}", "checkpoint={every_steps=2, keep=9, wait=true}"]
    run = load_run(
        write_run(tmp_path_factory.mktemp("run")), [*settings, "memory.policy=keep-all", "memory.budget=100%"]
    )
    threads = torch.get_num_threads()
    plan = plan_run(run).plan
    train_run(plan)
    torch.set_num_threads(threads)
    return plan


@pytest.fixture
def reference(made: Plan) -> Path:
    """Folder of that run."""
    assert made.request.run is not None
    return Path(made.request.run["out"])


@pytest.fixture
def plan(made: Plan, reference: Path, tmp_path: Path) -> Plan:
    """The plan of a copy of it, killed after step 6."""
    shutil.copytree(reference, tmp_path / "out")
    shutil.rmtree(tmp_path / "out/checkpoints/step-00000008")
    path = saved_plan(made, tmp_path / "out")
    return Plan.load(path.rename(tmp_path / "out/plan.json"))


def at(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def alter(path: Path) -> None:
    """Alter a byte in the middle of a checkpoint's tensors, which only reading them finds."""
    with (path / "state.safetensors").open("r+b") as file:
        file.seek(-(path / "state.safetensors").stat().st_size // 2, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def shorten(path: Path) -> None:
    """Cut a checkpoint's file, which opening it finds."""
    os.truncate(path / "state.safetensors", (path / "state.safetensors").stat().st_size - 1)


def names(out: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-0000000") for path in (out / "checkpoints").iterdir())


@pytest.mark.long
def test_the_command_of_the_error_goes_on_with_the_same_numbers(
    plan: Plan, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    alter(at(out, 6))
    alter(at(out, 4))
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(DamagedCheckpoint, match=r"step-00000006/state.safetensors: tensor .* expected byte") as caught:
        train_run(plan, resume=True)
    assert caught.value.older == str(at(out, 2))
    command = f"lading train --plan {out}/plan.json --resume-from {at(out, 2)}"
    assert str(caught.value).endswith(f"go on from there with: {command}")
    assert (names(out), (out / "metrics.jsonl").read_bytes()) == (["2", "4", "6"], before)
    assert main(shlex.split(command)[1:]) == 0
    said = " ".join(capsys.readouterr().out.split())
    aside = f"{at(out, 6)}.set-aside, {at(out, 4)}.set-aside"
    assert f"set aside, as the run goes on from {at(out, 2)}: {aside}; delete them when nobody needs them" in said
    assert f"going on after step 2 of {STEPS}, from {at(out, 2)}" in said
    assert names(out) == ["2", "4", "4.set-aside", "6", "6.set-aside", "8"]
    assert [r["loss"] for r in read_metrics(out / "metrics.jsonl")] == [
        r["loss"] for r in read_metrics(reference / "metrics.jsonl")
    ]
    state = "state.safetensors"
    assert (at(out, STEPS) / state).read_bytes() == (at(reference, STEPS) / state).read_bytes()


@pytest.mark.parametrize("by_run_file", [True, False])
def test_a_file_that_is_cut_stops_a_run_too(plan: Plan, by_run_file: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shorten(at(out, 6))
    what = plan
    if by_run_file:
        assert plan.request.run is not None
        settings = [f"out={out}", f"optimization.steps={STEPS}", "memory.policy=keep-all", "memory.budget=100%"]
        what = load_run(Path(plan.request.run["data"]["source"]).parent / "run.toml", settings)
    ends = rf"go on from there with: --resume-from {at(out, 4)}, in place of --resume\Z"
    with pytest.raises(DamagedCheckpoint, match=rf"expected \d+ bytes, found \d+, .*{ends}"):
        train_run(what, resume=True)


def test_without_one_that_is_whole_there_is_no_command(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    alter(at(out, 6))
    shorten(at(out, 4))
    (at(out, 2) / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"there is no older checkpoint in .* start the run again\Z") as caught:
        train_run(plan, resume=True)
    assert caught.value.older == ""


def test_one_that_is_no_checkpoint_of_the_run_or_damaged_is_refused(
    plan: Plan, reference: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for given in (at(reference, 4), tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=rf"expected a checkpoint of the run in {out}.* got '{given}'"):
            train_run(plan, resume_from=given)
    alter(at(out, 4))
    with pytest.raises(DamagedCheckpoint, match=f"--resume-from {at(out, 2)}, in place of --resume"):
        train_run(plan, resume_from=at(out, 4))
    assert names(out) == ["2", "4", "6"]


def test_a_job_that_torchrun_starts_again_goes_back_once(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that are started again get the same command: what they saved meanwhile stays."""
    out = tmp_path / "out"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the first try failed before it had the run's folder
    train_run(plan, resume_from=at(out, 2))
    assert "going on after step 2" in capsys.readouterr().out
    assert names(out) == ["2", "4", "4.set-aside", "6", "6.set-aside", "8"]
    shutil.rmtree(at(out, 8))
    train_run(plan, resume_from=at(out, 2))
    assert "going on after step 6" in capsys.readouterr().out
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    train_run(plan, resume_from=at(out, 6))
    assert names(out) == ["2", "4", "4.set-aside", "6", "6.set-aside", "8", "8.set-aside"]


def test_a_command_starts_as_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lading.resuming.num_ranks", lambda: (2, ""))
    start = re.escape("torchrun --standalone --nproc-per-node 2 -m lading train --plan plan.json --resume-from 'a b'")
    with pytest.raises(DamagedCheckpoint, match=f"{start}$"), naming_an_older_one(Path("plan.json")):
        raise DamagedCheckpoint("damaged", older="a b")


def save(folder: Path, step: int, data: bytes = b"12345678") -> Path:
    return save_checkpoint(folder, step, [("w", "uint8", [8], [memoryview(data)])], {}, 9)


def test_the_best_checkpoint_is_one_to_go_back_to(tmp_path: Path) -> None:
    newest, best, later = save(tmp_path / "checkpoints", 3), save(tmp_path / "best", 3), save(tmp_path / "best", 5)
    assert run_checkpoints(tmp_path / "checkpoints") == [later, newest, best]
    alter(newest)
    with pytest.raises(DamagedCheckpoint, match=f"use the older checkpoint {best}, all bytes of which were read"):
        open_checkpoint(newest).read("w")
    assert "step-00000005.set-aside" in go_back(tmp_path, best)
    assert run_checkpoints(tmp_path / "checkpoints") == [best]
    again = save(tmp_path / "checkpoints", 3)
    assert run_checkpoints(tmp_path / "checkpoints") == [again, best]
    assert go_back(tmp_path, again) == ""
    assert f"{again}.set-aside-2" in go_back(tmp_path, best)
