"""Whole runs: what they refuse, and what they leave when they go wrong."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lading import prepare
from lading.checkpoint.lock import run_lock
from lading.checkpoint.store import STATE, latest_checkpoint, open_checkpoint
from lading.cli.main import main
from lading.config import load_run, lr_at, run_from_dict
from lading.errors import ConfigError
from lading.ir.plan import Plan
from lading.optim.adamw import AdamW
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.runtime.data import TextDataset
from lading.runtime.interrupts import StopRequest
from lading.runtime.resident import PeakMeter
from lading.train import train_run
from lading.trainer import Trainer
from tests.runs import failing, num_lines, saved_plan, start, wait_until, write_run

pytestmark = pytest.mark.usefixtures("one_thread")


#: A shorter run.
SHORT = ("optimization.steps=12",)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """(RUN.toml, plan of the short run)."""
    path = write_run(tmp_path_factory.mktemp("short"))
    threads = torch.get_num_threads()
    result = plan_run(load_run(path, SHORT), cache=True).plan
    torch.set_num_threads(threads)
    return path, result


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def words(text: str) -> str:
    """The text on one line, wherever it was broken."""
    return " ".join(text.split())


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.long
def test_an_out_folder_with_checkpoints(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan_made = made
    out = tmp_path / "out"
    result = train_run(Plan.load(saved_plan(plan_made, out)))
    assert list(result.losses) == losses(out)
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["step-00000010", "step-00000012"]
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    code, message = failure(capsys, "train", str(path), *SHORT, f"out={out}")
    assert code == 2
    assert "holds checkpoints of an earlier run (newest step-00000012); give --resume, or another out" in message
    for change, expected in {
        "seed=4": "seed (was 3, is 4)",
        "model.sizes.dim=96": "model.sizes.dim (was 64, is 96)",
        "optimization.precision=bf16": "optimization.precision (was 'fp32', is 'bf16')",
        "optimization.matrices={rule = 'muon', lr = 0.02}": "optimization.matrices.rule (was None, is 'muon')",
        "threads=2": "threads (was 1, is 2)",
    }.items():
        code, message = failure(capsys, "train", str(path), *SHORT, f"out={out}", change, "--resume")
        assert (code, expected in message) == (2, True), message
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_run_of_a_model_of_the_catalog_goes_on(tmp_path: Path) -> None:
    """Its checkpoints hold the reference model it stands for; the run file still names the catalog's."""
    sizes = "model.sizes={num_layers=1, dim=64, num_heads=2, vocab_size=256, max_seq_len=32}"
    settings = ["model.name=gpt2", sizes, "memory.policy=keep-all", "memory.budget=100%"]
    settings += [f"out={tmp_path}/out", "optimization.schedule=constant"]
    path = write_run(tmp_path)
    train_run(load_run(path, [*settings, "optimization.steps=5"]))
    result = train_run(load_run(path, [*settings, "optimization.steps=7"]), resume=True)
    assert len(losses(tmp_path / "out")) == 7
    assert list(result.losses) == losses(tmp_path / "out")[5:]


@pytest.mark.long
def test_a_longer_run_at_a_constant_rate_goes_on(made: tuple[Path, Plan], tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    settings: dict[str, Any] = {"schedule": "constant", "warmup_steps": 2}
    train_run(Plan.load(saved_plan(made[1], out, steps=3, **settings)))
    result = train_run(Plan.load(saved_plan(made[1], out, steps=6, **settings)), resume=True)
    train_run(Plan.load(saved_plan(made[1], whole, steps=6, **settings)))
    assert losses(out) == losses(whole)
    assert list(result.losses) == losses(out)[3:]


@pytest.mark.long
def test_a_run_that_ended_goes_on_with_more_steps_and_another_rate(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has changed since is said, and what the steps then do is what plain PyTorch would do with it."""
    out, file = tmp_path / "out", saved_plan(made[1], tmp_path / "out", steps=3, every_steps=0, warmup_steps=1)
    result = train_run(Plan.load(file))
    assert result.checkpoint == f"{out}/checkpoints/step-00000003"  # the default
    assert f"trained values in {result.checkpoint}\nlading export {out} --to FOLDER" in str(result)
    capsys.readouterr()
    assert main(["train", "--plan", str(file), "--resume"]) == 0
    assert "the run had ended after step 3; a larger optimization.steps than 3 goes on" in words(
        capsys.readouterr().out
    )
    changes: dict[str, Any] = {
        "steps": 5,
        "every_steps": 0,
        "warmup_steps": 1,
        "optimizer": {**made[1].request.run["optimization"]["optimizer"]},
    }
    changes["optimizer"]["lr"] = 1e-2
    assert main(["train", "--plan", str(saved_plan(made[1], out, **changes)), "--resume"]) == 0
    assert (
        f"going on after step 3 of 5, from {out}/checkpoints/step-00000003, with another optimization.optimizer.lr "
        "(was 0.0003, is 0.01), optimization.steps (was 3, is 5)"
    ) in words(capsys.readouterr().out)
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(5))
    run = run_from_dict(made[1].request.run)
    longer = dataclasses.replace(run.optimization, steps=5, warmup_steps=1, optimizer=AdamW(lr=1e-2))
    assert records[3]["lr"] == lr_at(longer, 3)
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    assert open_checkpoint(newest).step == 5


def test_a_job_that_nothing_launched_is_refused_before_it_plans(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("lading.train._planned", lambda *_, **__: pytest.fail("planned"))
    code, message = failure(capsys, "train", str(made[0]), *SHORT, f"out={tmp_path}")
    assert (code, "found one process (no RANK in the environment)" in message) == (2, True), message


def test_a_run_that_keeps_nothing_says_so(made: tuple[Path, Plan], tmp_path: Path) -> None:
    plain = saved_plan(made[1], tmp_path / "out", steps=2, every_steps=0, at_end=False, warmup_steps=0)
    result = train_run(Plan.load(plain))
    assert result.checkpoint == ""
    assert "the trained values were not saved: checkpoint.at_end is false" in str(result)
    assert not (tmp_path / "out" / "checkpoints").exists()
    counted = Plan.load(plain)
    lines = tuple("save 0" if line.startswith("save ") else line for line in counted.program)
    assert lines != counted.program
    dataclasses.replace(counted, program=lines).save(plain)
    run = json.loads(plain.read_text())
    run["request"]["run"]["checkpoint"]["at_end"] = True
    plain.write_text(json.dumps(run))
    with pytest.raises(ConfigError, match="the plan counts no memory for saving, and its run saves"):
        train_run(Plan.load(plain))


def test_a_second_signal_stops_at_once_and_leaves_what_was_saved(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, save = tmp_path / "out", Trainer.save
    file = str(saved_plan(made[1], out, steps=9, every_steps=2))

    def interrupted(trainer: Trainer, *args: Any, **kwargs: Any) -> Path:
        if trainer.steps == 4:
            os.kill(os.getpid(), signal.SIGINT)  # noted; the second one, while values are written
            list(map(os.kill, [os.getpid()], [signal.SIGINT]))
        return save(trainer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", interrupted)
        assert main(["train", "--plan", file]) == 130
    said = words(capsys.readouterr().out)
    assert f"stopped in step 5; saved in {out}/checkpoints/step-00000002 go on with: lading train --plan" in said
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main(["train", "--plan", file, "--resume"]) == 0
    assert len(losses(out)) == 9


@pytest.mark.long
def test_a_step_that_fails_keeps_what_the_run_had_reached(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, batch, whole = tmp_path / "out", TextDataset.batch, tmp_path / "whole"
    settings: dict[str, Any] = {"steps": 6, "every_steps": 0}

    def bad(data: TextDataset, step: int, micro: int) -> dict[str, torch.Tensor]:
        tokens = batch(data, step, micro)["tokens"]
        if step == 3:
            tokens[0, 0] = 1000
        return {"tokens": tokens}

    with monkeypatch.context() as patch:
        patch.setattr(TextDataset, "batch", bad)
        assert main(["train", "--plan", str(saved_plan(made[1], out, **settings))]) == 1
    assert f"saved in {out}/checkpoints/step-00000003; go on with --resume" in words(capsys.readouterr().err)
    assert main(["train", "--plan", str(out / "plan.json"), "--resume"]) == 0
    train_run(Plan.load(saved_plan(made[1], whole, **settings)))
    assert losses(out) == losses(whole)


def test_another_text_is_another_run(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("a text of one's own " * 100)
    arguments = ["train", str(made[0]), *SHORT, f"out={out}", f"data.source={text}"]
    assert main([*arguments, "optimization.steps=2"]) == 0
    said = capsys.readouterr().out
    assert "ends within its warm-up, at step 2 of 4: the learning rate\nrises to 0.00015 of 0.0003;" in said
    text.write_text("another text of one's own " * 100)
    code, message = failure(capsys, *arguments, "optimization.steps=2", "--resume")
    assert code == 2
    assert "data.source (was 'content " in message


@pytest.mark.long
def test_a_plan_is_run_as_it_is(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lading.trainer

    plan_made = made[1]
    run_at: list[str] = []
    executor = lading.trainer.Executor

    def recording(program: Any, **kwargs: Any) -> Any:
        run_at.append(program.fingerprint)
        return executor(program, **kwargs)

    monkeypatch.setattr(lading.trainer, "Executor", recording)
    assert plan_made.choices.gaps
    text = "\n".join(plan_made.program) + "\n"
    file = saved_plan(plan_made, tmp_path / "out", steps=4)
    assert main(["train", "--plan", str(file)]) == 0
    assert run_at == [hashlib.sha256(text.encode()).hexdigest()[:16]]
    assert Plan.load(tmp_path / "out" / "plan.json") == Plan.load(file)

    edits: dict[str, Callable[[Plan], Plan]] = {
        "found one of 'another', whose times and memory are others: measure this host": lambda plan: of_request(
            plan, host_id="another"
        ),
        "the plan was made for another model": another_model,
        "the plan was made for another machine": another_machine,
        "expected a cuda device, found none: this PyTorch is built without CUDA": cuda,
        "the plan records no run": lambda plan: of_request(plan, run=None),
        "is not safe to run": lambda plan: dataclasses.replace(plan, program=plan.program[:-1]),
    }
    capsys.readouterr()
    for expected, edit in edits.items():
        edit(Plan.load(file)).save(tmp_path / "edited.json")
        code, message = failure(capsys, "train", "--plan", str(tmp_path / "edited.json"))
        assert code == 2, message
        assert expected in message
    assert len(run_at) == 1


def of_request(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, request=dataclasses.replace(plan.request, **changes))


def another_model(plan: Plan) -> Plan:
    run = json.loads(json.dumps(plan.request.run))
    run["model"]["sizes"]["dim"] = 96
    return of_request(plan, run=run)


def another_machine(plan: Plan) -> Plan:
    machine = json.loads(json.dumps(plan.request.machine_table))
    machine["device"]["memory_bytes"] = 1 << 30
    return of_request(plan, machine_table=machine)


def cuda(plan: Plan) -> Plan:
    """A plan for a GPU, of the same run."""
    assert plan.request.run is not None
    run = {**plan.request.run, "machine": "rtx4090", "out": plan.request.run["out"] + "-gpu"}
    return plan_run(load_run_dict(run)).plan


def load_run_dict(run: dict[str, Any]) -> Any:
    from lading.config import run_from_dict

    return run_from_dict({**run, "memory": {"budget": "100%"}})


def test_a_broken_budget_is_reported_and_saved(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(PeakMeter, "peak_bytes", lambda _: 1 << 40)
    code, message = failure(capsys, "train", "--plan", str(saved_plan(made[1], out, steps=4)))
    assert code == 4
    assert "measured peak 102" in message
    assert "above the budget" in message
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    assert open_checkpoint(newest).step == 4
    assert "this plan needs a budget of 102" in message
    report = (out / "report.html").read_text()
    for words in ("Step 1 took 102", "What was not predicted: ", "This plan needs a budget of 102"):
        assert words in report
    code, _ = failure(capsys, "train", "--plan", str(out / "plan.json"), "--resume")
    assert code == 4  # asked again, it says so again


def test_a_full_disk(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    file = str(saved_plan(made[1], out, every_steps=2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, 1, errno.ENOSPC))
        code, message = failure(capsys, "train", "--plan", file)
        assert (code, "No space left on device" in message) == (2, True), message
    with monkeypatch.context() as patch:
        # The fifth checkpoint does not fit.
        patch.setattr(os, "fsync", failing(os.fsync, 5, errno.ENOSPC, STATE))
        code, message = failure(capsys, "train", "--plan", file)
        assert (code, "the disk is full: checkpoint" in message) == (2, True), message
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    open_checkpoint(newest).verify()
    assert str(newest) in message
    assert not list((out / "checkpoints").glob("*.tmp-*"))
    assert not list(out.glob("lading*"))
    assert main(["train", "--plan", file, "--resume"]) == 0
    train_run(Plan.load(saved_plan(made[1], whole)))
    assert losses(out) == losses(whole)


def test_a_disk_without_room_for_checkpoints_is_told_before_training(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(saved_plan(made[1], tmp_path / "out", every_steps=2))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        code, message = failure(capsys, "train", "--plan", file)
    assert code == 2
    assert ", 3 of them beside those there are, found " in message
    assert "nothing was trained: free some space" in message
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("setting", ["data.source", "validation.source"])
def test_a_source_that_is_not_there_is_told_before_planning(
    made: tuple[Path, Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
) -> None:
    monkeypatch.setattr("lading.train._planned", lambda *_, **__: pytest.fail("planned"))
    more = ["validation.every_steps=2"] if setting == "validation.source" else []
    code, message = failure(capsys, "train", str(made[0]), *SHORT, f"out={tmp_path}", f"{setting}=none.txt", *more)
    assert code == 2
    assert "got 'none.txt', which does not exist" in message


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"text": ', "expected a JSON object"),
        ("rows.parquet", "no Parquet", "expected a Parquet file"),
        ("short.txt", "few words", "expected at least 33 tokens of text, got 9"),
    ],
)
def test_data_that_cannot_be_used_are_told_before_planning(
    made: tuple[Path, Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    said: str,
) -> None:
    monkeypatch.setattr("lading.prepare.plan_run", lambda *_, **__: pytest.fail("planned"))
    source = tmp_path / name
    source.write_text(text)
    code, message = failure(
        capsys, "train", str(made[0]), *SHORT, f"out={tmp_path / 'out'}", f"data.source={source}", "--trust"
    )
    assert code == 2, message
    assert said in message


@pytest.mark.parametrize(
    ("every", "keep", "kept", "total", "evaluated", "there", "most"),
    [
        (0, 2, 0, 10, 0, [], 1),  # at the end
        (2, 2, 0, 10, 0, [], 3),  # one more than stay while the last is written
        (2, 2, 4, 20, 0, [], 6),  # 4, 8, 12, 16, 20, and 18
        (2, 2, 4, 20, 5, [], 8),  # and two best ones
        (2, 2, 4, 20, 0, [4, 8, 10], 6),
        (10, 5, 0, 20, 10, [], 4),  # 10 and 20 beside two best ones
        (0, 1, 0, 10, 3, [], 2),  # the best, and the next best; then the last
        (0, 1, 0, 10, 10, [], 2),
    ],
)
def test_how_many_checkpoints_are_there_at_once(
    made: tuple[Path, Plan],
    every: int,
    keep: int,
    kept: int,
    total: int,
    evaluated: int,
    there: list[int],
    most: int,
) -> None:
    more = ["validation.share=0.1", f"validation.every_steps={evaluated}"] if evaluated else []
    run = load_run(
        made[0],
        [
            f"optimization.steps={total}",
            f"checkpoint.every_steps={every}",
            f"checkpoint.keep={keep}",
            f"checkpoint.keep_every_steps={kept}",
            *more,
        ],
    )
    assert run.most_checkpoints(max(there, default=0), there, has_best=False) == most


def test_a_busy_folder_is_refused_before_anything_is_planned_or_written(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(prepare, "plan_run", lambda *_, **__: pytest.fail("it was planned"))
    with run_lock(out):
        code, message = failure(capsys, "train", str(made[0]), f"out={out}")
        assert code == 2
        assert f"expected {out} to be free, found process {os.getpid()} training there" in message
        assert [path.name for path in out.iterdir()] == ["run.lock"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_and_a_second_run(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    file = str(saved_plan(made[1], out, steps=100_000, schedule="constant"))
    process = start(log, "train", "--plan", file)
    assert wait_until(lambda: num_lines(out / "metrics.jsonl") > 6, process), log.read_text()
    assert process.pid is not None
    if number == signal.SIGTERM:
        found, message = failure(capsys, "train", "--plan", file, "--resume")
        assert found == 2
        assert f"expected {out} to be free, found process {process.pid} training there" in message
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == code
    lines = log.read_text().splitlines()
    assert lines[-1] == {143: "terminated", 130: "interrupted", 129: "hung up"}[code]
    assert "stopping when this step has ended and is saved; once more stops at once" in lines
    assert not list(out.glob("lading*"))
    steps = [record["step"] for record in read_metrics(out / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    open_checkpoint(newest).verify()
    assert open_checkpoint(newest).step == len(steps)
    said = words(log.read_text())
    assert f"stopped after step {len(steps)} of 100000; saved in {newest} go on with: lading train --plan" in said
    assert f"{out}/plan.json --resume" in said


def test_what_is_printed_to_a_terminal_that_is_gone_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    request = StopRequest(tells=False)
    monkeypatch.setattr(request, "_terminals", [writes])
    os.close(reads)  # writing would now fail, as to a terminal that is gone
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have had ignored
    with request:
        signal.raise_signal(signal.SIGHUP)
        os.write(writes, b"step 2")
    signal.signal(signal.SIGHUP, before)
    os.close(writes)
    assert request.number == signal.SIGHUP
