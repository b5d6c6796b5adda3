"""A disk that fills up or loses bytes while a run is on: it says so and stops, and goes on from what was saved."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.checkpoint.store import latest_checkpoint, open_checkpoint, step_of
from lading.config import load_run
from lading.errors import ConfigError, StorageError
from lading.ir.plan import Plan
from lading.prepare import plan_run
from lading.report.metrics import MetricsLog, read_metrics, read_steps
from lading.report.promises import room_words
from lading.train import train_run
from lading.units import MiB, format_bytes
from tests.power_cuts import DiskLog
from tests.runs import num_lines, saved_plan, start, wait_until, write_run

STEPS = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of the run."""
    path = write_run(tmp_path_factory.mktemp("run"))
    threads = torch.get_num_threads()
    result = plan_run(load_run(path, [f"optimization.steps={STEPS}"]), cache=True).plan
    torch.set_num_threads(threads)
    return result


def begun(log: Path, out: Path, *argv: str) -> BaseProcess:
    """The run, once it has saved something."""
    process = start(log, "train", *argv)
    assert wait_until(lambda: num_lines(out / "metrics.jsonl") > 11, process), log.read_text()
    return process


def assert_goes_on(made: Plan, out: Path, log: Path) -> None:
    """What was saved is whole, nothing else is left, and the resumed run ends as one that nothing happened to."""
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    open_checkpoint(newest).verify()
    assert not list((out / "checkpoints").glob("*.tmp-*"))
    assert not list(out.glob("lading*"))
    whole = out.with_name("whole")
    for arguments in ((str(out / "plan.json"), "--resume"), (str(saved_plan(made, whole)),)):
        process = start(log, "train", "--plan", *arguments)
        process.join(120)
        assert process.exitcode == 0, log.read_text()
    assert [r["loss"] for r in read_steps(out / "metrics.jsonl")] == [
        r["loss"] for r in read_steps(whole / "metrics.jsonl")
    ]


@pytest.mark.usefixtures("one_thread")
def test_a_power_cut(tmp_path: Path) -> None:
    """At any moment there is the plan of the checkpoints, and the records of all steps before the newest of them."""
    path = write_run(tmp_path)
    (tmp_path / "disk").mkdir()
    settings = [
        "optimization={steps=4, warmup_steps=0}",
        "checkpoint={every_steps=2, wait=true}",
        f"out={tmp_path}/disk/out",
    ]
    log = DiskLog(tmp_path / "disk")
    with log.on():
        train_run(load_run(path, [*settings, "memory={policy='keep-all', budget='100%'}"]))
        log.mark(4)
    plan, newest = (tmp_path / "disk/out/plan.json").read_bytes(), Counter[int]()
    for tree, promises in log.states(random.Random(0)):
        steps = [int(found[1]) for name in tree if (found := re.fullmatch(r"out/checkpoints/step-(\d{8})", name))]
        newest[max(steps, default=0)] += 1
        assert max(steps, default=0) >= max(promises, default=0)
        if steps:
            assert tree["out/plan.json"] == plan
            records = (tree["out/metrics.jsonl"] or b"").split(b"\n")[: max(steps)]
            assert [json.loads(record)["step"] for record in records] == [*range(max(steps))]
    assert sorted(newest) == [0, 2, 4]


def test_memory_that_other_processes_have_is_told_before_the_first_step(made: Plan) -> None:
    needed = made.peak_bytes["device"]
    assert not room_words(made, needed)
    assert not room_words(made, None)
    assert re.match(r"expected [\d.]+ MiB of memory for the run, found 1.00 MiB that other", room_words(made, MiB))
    on_ranks = dataclasses.replace(made, layout="dp2")
    assert not room_words(on_ranks, needed)  # the other is on another host
    assert not room_words(on_ranks, 2 * needed, 2)
    told = room_words(on_ranks, 2 * needed - 1, 2)
    assert told.startswith(f"expected {format_bytes(2 * needed)} of memory for the 2 ranks here, found")
    stages = dataclasses.replace(made, layout="pp2", peers=(made,))
    assert room_words(stages, 2 * needed - 1, 2) == told


def test_a_machine_file_of_another_host_is_refused_before_planning(tmp_path: Path) -> None:
    run, machine = write_run(tmp_path), tmp_path / "machine.toml"
    machine.write_text(re.sub(r"(?m)^host_id = .*", 'host_id = "another | 8 cores"', machine.read_text()))
    with pytest.raises(ConfigError, match=r"measured on this host .*, found one of 'another \| 8 .*lading probe --out"):
        train_run(load_run(run))
    assert not (tmp_path / "out" / "plan.json").exists()


def swap_file(process: BaseProcess, out: Path) -> Path:
    """The open swap file of a run, the file in its folder that has no name there."""
    links = Path(f"/proc/{process.pid}/fd").iterdir()
    return next(
        link for link in links if re.fullmatch(rf"{re.escape(str(out))}/#?[^/]* \(deleted\)", os.readlink(link))
    )


def test_a_truncated_swap_file(made: Plan, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    process = begun(log, out, "--plan", str(saved_plan(made, out)))
    os.truncate(swap_file(process, out), 0)
    process.join(60)
    assert process.exitcode == 2
    assert f"the swap file in {out}" in log.read_text()
    assert "it was cut from outside" in log.read_text() or "moved less than a page" in log.read_text()
    assert_goes_on(made, out, log)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={8 * MiB}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(path: Path) -> None:
    """Write until the disk takes no more."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.slow
def test_a_disk_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    run, out, log = write_run(tmp_path), small_disk / "out", tmp_path / "log"
    swap = f"memory.folder={tmp_path}"  # which wants a disk of its own
    settings = (str(run), f"out={out}", f"optimization.steps={STEPS}", swap)
    process = begun(log, out, *settings)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        fill_up(filler)
    process.join(60)
    assert process.exitcode == 2
    assert "No space left on device" in log.read_text() or "the disk is full" in log.read_text()
    filler.unlink()
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    open_checkpoint(newest).verify()
    process = start(log, "train", *settings, "--resume")
    process.join(120)
    assert process.exitcode == 0, log.read_text()
    assert [record["step"] for record in read_steps(out / "metrics.jsonl")] == list(range(STEPS))


@pytest.mark.slow
def test_a_disk_too_small_for_the_swap_file(small_disk: Path, tmp_path: Path) -> None:
    run, log = write_run(tmp_path), tmp_path / "log"
    (small_disk / "filler").write_bytes(bytes(7 * MiB + MiB // 2))
    process = start(log, "train", str(run), f"memory.folder={small_disk}", "memory.disk_budget=1GB")
    process.join(120)
    assert process.exitcode == 2
    assert f"of space in {small_disk}, found" in log.read_text()
    assert "free some space" in log.read_text()


def test_a_full_disk_when_a_figure_is_logged(tmp_path: Path) -> None:
    """/dev/full takes nothing: the error names the file, and closing does not raise another."""
    full = os.open("/dev/full", os.O_WRONLY)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.log({"step": 0})
        for descriptor in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{descriptor}") == str(tmp_path / "metrics.jsonl"):
                os.dup2(full, int(descriptor))
        with pytest.raises(StorageError, match=r"metrics.jsonl: No space.*; free some space.*--resume"):
            log.log({"step": 1})
    os.close(full)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}]


def test_no_checkpoint_is_ahead_of_figures_that_the_disk_did_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that fails once is tried again when the run saves what it had reached; the step of one that goes on failing
    is made again.
    """
    for name, failures in (("once", 1), ("ever", 1 << 30)):
        (tmp_path / name).mkdir()
        settings = ["optimization={steps=6, warmup_steps=0}", "checkpoint={every_steps=2, wait=true}"]
        run = load_run(write_run(tmp_path / name), [*settings, "memory={policy='keep-all', budget='100%'}"])
        out, left, write = Path(run.out), [failures], MetricsLog._write

        def fails(self: MetricsLog, left: list[int] = left, write: Any = write) -> None:
            if b'{"step": 4' in self._unwritten and left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            write(self)

        with monkeypatch.context() as patch:
            patch.setattr(MetricsLog, "_write", fails)
            with pytest.raises(StorageError, match=r"metrics.jsonl: Input/output error; check the disk") as caught:
                train_run(run)
        saved = "saved in" if name == "once" else "could not be saved"
        assert any(saved in note for note in caught.value.__notes__)
        newest = latest_checkpoint(out / "checkpoints")
        assert newest is not None
        assert len(read_steps(out / "metrics.jsonl")) == step_of(newest) == (5 if name == "once" else 4)
        train_run(run, resume=True)
        assert [record["step"] for record in read_steps(out / "metrics.jsonl")] == list(range(6))


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes calls to the system fail; see its file."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library, source = tmp_path_factory.mktemp("disk") / "failing_disk.so", Path(__file__).with_name("failing_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "error", "reads"),
    [
        (12, errno.EROFS, False),
        (90, errno.EROFS, False),
        (150, errno.EROFS, False),
        (200, errno.ENOSPC, False),
        (80, errno.EIO, True),
        (250, errno.EIO, True),
    ],
)
def test_a_disk_that_fails_for_good(
    made: Plan, failing_disk: Path, tmp_path: Path, number: int, error: int, reads: bool
) -> None:
    """From some call on nothing below the run's folder can be written, or all fails, wherever the run is by then."""
    out, log = tmp_path / "out", tmp_path / "log"
    changes = {"steps": 12, "every_steps": 3}
    settings = {"FAILS_BELOW": str(out), "FAILS_FROM": f"{number}", "FAILS_WITH": f"{error}"}
    settings |= {"LD_PRELOAD": str(failing_disk), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "lading", "train", "--trust", "--plan", str(saved_plan(made, out, **changes))]
    ended = subprocess.run(
        command, env={**os.environ, **settings, **({"FAILS_READS": "1"} if reads else {})}, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    said = " ".join(ended.stderr.split())
    assert ended.returncode == 2, said
    assert "error: " in said
    assert os.strerror(error) in said or "the disk is full" in said
    assert "Traceback" not in said
    newest = latest_checkpoint(out / "checkpoints") if (out / "checkpoints").is_dir() else None
    if newest is not None:
        open_checkpoint(newest).verify()
    reached = read_steps(out / "metrics.jsonl") if (out / "metrics.jsonl").is_file() else []
    again = str(out / "plan.json") if (out / "plan.json").is_file() else str(tmp_path / "out.json")
    whole = tmp_path / "whole"
    for arguments in ((again, "--resume"), (str(saved_plan(made, whole, **changes)),)):
        process = start(log, "train", "--plan", *arguments)
        process.join(120)
        assert process.exitcode == 0, log.read_text()
    losses = [r["loss"] for r in read_steps(whole / "metrics.jsonl")]
    assert [r["loss"] for r in read_steps(out / "metrics.jsonl")] == losses
    assert [r["loss"] for r in reached] == losses[: len(reached)]
    assert not list(out.rglob("*.tmp-*"))
    assert not list(out.glob("lading*"))
