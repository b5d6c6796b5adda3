"""``lading train`` on several ranks: the numbers, files and words of one process."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.catalog.load import save_machine
from lading.checkpoint.store import STATE, latest_checkpoint, open_checkpoint
from lading.cli.main import main
from lading.config import load_run
from lading.errors import ConfigError, PlanInfeasible, StorageError
from lading.ir.job_timeline import JobTimeline
from lading.ir.plan import Plan
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.run import prepare_plan, sharing_batches
from lading.runtime.data import TextDataset
from lading.train import train_plain, train_run
from lading.units import format_bytes, format_seconds
from tests.machines import small_machine
from tests.ranks import run_ranks
from tests.report.test_html import Page
from tests.runs import OVERHEAD_BYTES, write_run
from tests.runs import failing as failing_after
from tests.test_pipelines import connected

#: Two stages of a pipeline, which add no numbers that one process adds in another order.
STAGES = ("optimization={steps=4, accumulation=2}", "model.sizes={num_layers=2, dropout=0.0}", "layout=pp2")
#: A run with dropout, in which everything stays in memory.
ASKED = (
    "model.sizes={dim=64, num_layers=1, num_heads=2, dropout=0.1}",
    "optimization={steps=4, clip_norm=1.0, warmup_steps=1}",
    "memory={policy='keep-all', budget='100%'}",
    "checkpoint={every_steps=2}",
    "validation={share=0.25, every_steps=2, batches=2}",
)


pytestmark = pytest.mark.usefixtures("one_thread")


def written(root: Path) -> Path:
    path = write_run(root)
    here = dataclasses.replace(small_machine(overhead_bytes=OVERHEAD_BYTES), collectives=connected().collectives)
    save_machine(here, root / "machine.toml")
    return path


@pytest.mark.parametrize("rank", [0, 1])
def test_each_stage_of_a_pipeline_has_its_own_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A run compares its first steps with it, on every rank."""
    plan = plan_run(load_run(written(tmp_path), STAGES), devices=2).plan
    monkeypatch.setenv("RANK", str(rank))
    prepared = prepare_plan(plan)
    assert len(prepared.predicted.events) == len(prepared.program.actions)
    numbers = {len(each.predictions.actions) for each in (plan, *plan.peers)}
    assert len(numbers) == 2, "the stages have unlike many actions"


def alone(path: Path, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    """Records of the run in one process with as many micro-batches."""
    run = load_run(path, [*ASKED, "optimization.accumulation=2", f"out={path.parent}/alone", *overrides])
    train_run(run, resume=resume)
    return records(Path(run.out))


def records(out: Path) -> list[dict[str, Any]]:
    return read_metrics(out / "metrics.jsonl")


def numbers(found: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [(r["step"], r["loss"], r["lr"], r.get("validation_loss", 0.0)) for r in found]


@pytest.mark.slow
def test_torchrun_trains_as_one_process_to_the_bit(tmp_path: Path) -> None:
    path, out = written(tmp_path), tmp_path / "ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "lading", "train", str(path), "--no-cache", *ASKED, f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    whole = alone(path)
    assert numbers(records(out)) == numbers(whole)
    check_saved(out, tmp_path / "alone")
    assert sorted(p.name for p in out.iterdir() if p.suffix in (".html", ".jsonl")) == ["metrics.jsonl", "report.html"]
    assert done.stdout.count("loss ") == 2  # of the result: in training and in validation
    assert done.stderr.count("step 1/4") == 1
    assert Plan.load(out / "plan.json").replicas == 2
    check_report(out, done.stdout)


def check_saved(out: Path, alone: Path) -> None:
    """Two ranks saved the values of one process."""
    saved, other = (open_checkpoint(folder / "checkpoints/step-00000004") for folder in (out, alone))
    assert saved.tensors.keys() == other.tensors.keys()
    for name in saved.tensors:
        assert torch.equal(saved.read(name), other.read(name)), name
    assert saved.meta["ranks"] == 2


def check_report(out: Path, said: str) -> None:
    """Both ranks are in the report, each beside its own prediction, and it is written again from what is left."""
    job = JobTimeline.load(out / "ranks.json")
    for each in job.ranks:
        peak, budget, predicted = map(format_bytes, (each.peak_bytes, each.budget_bytes, each.predicted_bytes))
        assert f"rank {each.rank}: {peak} of {budget} (predicted {predicted})" in said
    assert max(each.peak_bytes for each in job.ranks) >= max(r["memory_bytes"] for r in records(out))
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    page = Page((out / "report.html").read_text())
    for rank in range(2):
        rows = [row for row in page.rows if row[0] == f"rank {rank}"]
        assert rows[0][1] == format_bytes(job.ranks[rank].peak_bytes)
        assert rows[1][1] == format_seconds(job.ranks[rank].timeline.duration_s)
    saved_ranks = (out / "ranks.json").read_text()
    changed = json.loads(saved_ranks)
    changed["ranks"].pop()
    (out / "ranks.json").write_text(json.dumps(changed))
    assert main(["report", str(out)]) == 2
    changed = json.loads(saved_ranks)
    changed["ranks"][1]["budget_bytes"] = 0
    (out / "ranks.json").write_text(json.dumps(changed))
    assert main(["report", str(out)]) == 2
    changed["plan"] = "another"
    (out / "ranks.json").write_text(json.dumps(changed))
    assert main(["report", str(out)]) == 0
    assert not [row for row in Page((out / "report.html").read_text()).rows if row[0] == "rank 1"]


@pytest.mark.parametrize(
    ("ranks", "layout", "each"),
    [(1, "", 4), (2, "", 2), (4, "dp2,pp2", 2), (2, "pp2", 4), (2, "zero3", 2), (4, "pp2", 2)],
)
def test_micro_batches_of_all_replicas_are_shared(tmp_path: Path, ranks: int, layout: str, each: int) -> None:
    run = load_run(written(tmp_path), ["optimization.micro_batches=4", f"layout='{layout}'"])
    assert sharing_batches(run, ranks).optimization.accumulation == each
    with pytest.raises(ConfigError, match="expected a multiple of the 3 replicas, got 4"):
        sharing_batches(dataclasses.replace(run, layout=""), 3)
    both = dataclasses.replace(run, optimization=dataclasses.replace(run.optimization, accumulation=3))
    with pytest.raises(ConfigError, match=r"micro_batches = 4 and accumulation = 3; leave one out"):
        sharing_batches(both, ranks)  # made in Python, which no reader of files has seen
    shared = sharing_batches(run, ranks)
    assert sharing_batches(shared, ranks) == shared


@pytest.mark.long
def test_what_one_torchrun_starts_again_goes_on_and_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun does not count a start of its own as one again where ranks have joined or left."""
    path = written(tmp_path)
    run, shorter = (load_run(path, [*ASKED, f"optimization.steps={n}", f"out={tmp_path}/out"]) for n in (4, 2))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    train_run(shorter)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        train_run(run)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    train_run(run)
    assert [record["step"] for record in records(tmp_path / "out")] == [0, 1, 2, 3]
    train_run(dataclasses.replace(run, out=f"{tmp_path}/whole"))
    assert numbers(records(tmp_path / "out")) == numbers(records(tmp_path / "whole"))


@pytest.mark.slow
def test_layers_of_a_file_freeze_on_ranks_as_in_one_process(tmp_path: Path) -> None:
    path, out = written(tmp_path), tmp_path / "ranks"
    asked = ("model.sizes.num_layers=2", "optimization={steps=6, clip_norm=1.0, micro_batches=4}")
    freeze = ("freeze.layers=['tokens positions layers.0', 'layers.1']", "freeze.every_steps=2")
    every = [*ASKED, *asked, *freeze, "freeze.schedule=[0, 1, 2]"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lading"]
    command += ["train", str(path), "--no-cache", *every, f"out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    train_run(load_run(path, [*every, f"out={tmp_path}/alone"]))
    assert [record["frozen"] for record in records(out)] == [0, 0, 1, 1, 2, 2]
    for found, expected in zip(numbers(records(out)), numbers(records(tmp_path / "alone")), strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=0)  # four are added up in another order: float32's ulps


def _says(call: Callable[[], object]) -> tuple[int, str, str]:
    """Exit code and output of a command line."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = call()
        except SystemExit as end:
            code = end.code
    return int(str(code or 0)), out.getvalue(), err.getvalue()


def _train(folder: Path, out: str, *more: str) -> tuple[int, str, str]:
    """Train the run in ``folder``; ``more`` are overrides and flags."""
    return _says(lambda: main(["train", str(folder / "run.toml"), "--no-cache", *ASKED, f"out={folder / out}", *more]))


def _limits(rank: int, root: str) -> None:
    """Run into a limit of memory, of a folder and of a disk; tells what each said."""
    folder, told, batch = Path(root), dict[str, Any](), TextDataset.batch

    def starving(self: TextDataset, step: int, micro: int) -> Any:
        if rank == 1 and step == 1:
            torch.empty(1 << 60, dtype=torch.uint8)  # as where a limit is met
        return batch(self, step, micro)

    TextDataset.batch = starving
    told["starved"] = _train(folder, "starved")
    TextDataset.batch = batch
    if rank == 1:
        (folder / "blocked").mkdir()
        (folder / "blocked" / "rank-1").write_text("no folder can be here")
    told["blocked"] = _train(folder, "blocked", "memory={budget='99%'}")  # which moves something to a disk
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(os, "fsync", failing_after(os.fsync, 3, errno.ENOSPC, STATE))
        told["full"] = _train(folder, "full", "validation.every_steps=4")
    (folder / f"told {rank}").write_text(json.dumps(told))


def _scenes(rank: int, root: str) -> None:
    """Run what ranks do in one process each; tells what each said."""
    folder, told = Path(root), dict[str, Any]()
    train = partial(_train, folder)
    told["grown"] = train("growing", "--resume")
    told["unlike"] = train("unlike", f"optimization.optimizer.lr={0.1 * (rank + 1)}")
    told["probe"] = train("probe", "machine=probe")
    told["too many"] = train("too many", "layout='dp4,zero3'")
    told["planned"] = _says(lambda: main(["train", "--plan", str(folder / "stages.json")]))

    batch = TextDataset.batch

    def stopping(self: TextDataset, step: int, micro: int) -> Any:
        if rank == 1 and (step, micro) == (2, 1):
            signal.raise_signal(signal.SIGTERM)
        return batch(self, step, micro)

    TextDataset.batch = stopping
    told["stopped"] = train("stopped")

    def failing(self: TextDataset, step: int, micro: int) -> Any:
        if rank == 1 and step == 1:
            raise StorageError("the disk of rank 1 is full")
        return batch(self, step, micro)

    TextDataset.batch = failing
    started = time.monotonic()
    told["failed"] = train("failed")
    told["seconds"] = time.monotonic() - started
    (folder / f"told {rank}").write_text(json.dumps(told))


def told_by_ranks(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = (json.loads((folder / f"told {rank}").read_text()) for rank in range(2))
    return first, second


def said_by_one(both: tuple[dict[str, Any], dict[str, Any]], scene: str) -> str:
    """Message of the one rank that says anything, where neither ended well."""
    errors = [told[scene][2] for told in both if "error: " in told[scene][2]]
    assert len(errors) == 1, (scene, both[0][scene], both[1][scene])
    assert 0 not in (both[0][scene][0], both[1][scene][0])
    return " ".join(errors[0].partition("error: ")[2].split())


@pytest.mark.long
def test_ranks_stop_fail_and_are_refused_together(tmp_path: Path) -> None:
    path = written(tmp_path)
    asked = [*ASKED, *STAGES, f"out={tmp_path}/planned"]
    code, out, _ = _says(
        lambda: main(["plan", str(path), *asked, "--no-cache", "--out", str(tmp_path / "stages.json")])
    )
    assert code == 0
    assert "torchrun --standalone --nproc-per-node 2 -m lading train --plan" in out.splitlines()[-1]
    code, out, _ = _says(lambda: main(["simulate", str(tmp_path / "stages.json"), "--straggler", "1.5"]))
    assert code == 0
    assert "computing 1.5 times as long: step" in out
    alone(path, f"out={tmp_path}/growing", "optimization.steps=2")
    run_ranks(_scenes, 2, str(tmp_path))
    first, second = told_by_ranks(tmp_path)
    one_message = partial(said_by_one, (first, second))
    refused = one_message("too many")
    assert "layout dp4,zero3 is for so many, found one of 2; start it with: torchrun --standalone" in refused
    assert "rank 1 in the run, optimization.optimizer.lr: expected 0.1 as on rank 0, got 0.2" in one_message("unlike")
    assert "make one with: lading probe --ranks 2 --out machine.toml" in one_message("probe")
    assert one_message("failed").startswith("the disk of rank 1 is full")
    assert first["seconds"] < 30
    assert second["failed"][2].count("error: ") == 1  # it is the rank that failed that says so

    # A signal to one rank stops both after the same step, with a checkpoint from which any number goes on.
    assert first["stopped"][0] == second["stopped"][0] == 143
    assert "stopped after step 3 of 4" in first["stopped"][1]
    assert "torchrun --standalone --nproc-per-node 2 -m lading train --plan" in " ".join(first["stopped"][1].split())
    newest = latest_checkpoint(tmp_path / "stopped/checkpoints")
    assert newest is not None
    assert open_checkpoint(newest).step == 3
    whole = numbers(alone(path))
    assert numbers(records(tmp_path / "stopped")) == whole[:3]
    assert numbers(alone(path, f"out={tmp_path}/stopped", resume=True)) == whole

    # Stages train on the same batches.
    assert first["planned"][0] == 0, first
    out = tmp_path / "planned"
    job = JobTimeline.load(out / "ranks.json")
    assert job.ranks[0].predicted_bytes != job.ranks[1].predicted_bytes  # stages are unlike
    assert (out / "report.html").read_text().count("Streams of rank") == 3
    assert numbers(records(out)) == numbers(alone(path, *STAGES[:2], f"out={tmp_path}/one"))
    assert sorted(p.name for p in out.iterdir() if p.suffix in (".html", ".jsonl")) == ["metrics.jsonl", "report.html"]
    assert first["planned"][1].count("loss ") == 2  # of the result: in training and in validation
    assert first["planned"][2].count("step 1/4") == 1
    assert Plan.load(out / "plan.json").ranks == 2
    check_report(out, first["planned"][1])

    # And from one process to two ranks, of which the first alone speaks.
    assert first["grown"][0] == second["grown"][0] == 0, first
    assert second["grown"][1:] == ["", ""]
    assert numbers(records(tmp_path / "growing")) == whole
    check_saved(tmp_path / "growing", tmp_path / "alone")
    assert "ranks (was 1, is 2)" in " ".join(first["grown"][1].split())


def _stages(rank: int, root: str) -> None:
    (Path(root) / f"told {rank}").write_text(json.dumps(_train(Path(root), "stages", *STAGES)))


@pytest.mark.slow
def test_stages_that_are_planned_where_they_train(tmp_path: Path) -> None:
    """Those of a saved plan are in a quick test."""
    path = written(tmp_path)
    run_ranks(_stages, 2, str(tmp_path))
    assert [json.loads((tmp_path / f"told {rank}").read_text())[0] for rank in range(2)] == [0, 0]
    assert numbers(records(tmp_path / "stages")) == numbers(alone(path, *STAGES[:2], f"out={tmp_path}/one"))


@pytest.mark.slow
def test_ranks_meet_a_limit_together(tmp_path: Path) -> None:
    written(tmp_path)
    run_ranks(_limits, 2, str(tmp_path))
    told = told_by_ranks(tmp_path)
    assert "the process was refused memory: " in said_by_one(told, "starved")
    assert "rank-1" in said_by_one(told, "blocked")
    assert "the disk is full" in said_by_one(told, "full")


def test_a_plan_for_ranks_says_how_it_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.pop("RANK", None)
    path = written(tmp_path)
    run_ranks(_plans, 2, str(path))
    assert main(["train", "--plan", f"{tmp_path}/plan.json"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "expected a job of 2 ranks, as the layout dp2" in said
    assert "found one of 1; start it with: torchrun --standalone --nproc-per-node 2 -m lading train --plan" in said


@pytest.mark.slow
def test_a_slow_rank_of_a_product_is_a_stage_and_its_replicas(tmp_path: Path) -> None:
    path, plan = written(tmp_path), str(tmp_path / "plan.json")
    asked = [*ASKED, *STAGES[:2], "layout='dp2,pp2'", f"out={tmp_path}/out"]
    assert main(["plan", str(path), *asked, "--no-cache", "--out", plan]) == 0
    code, out, _ = _says(lambda: main(["simulate", plan, "--straggler", "2"]))
    assert code == 0
    assert re.search(r"rank [02] or a replica of it computing 2 times as long: step", " ".join(out.split()))


def _plans(rank: int, path: str) -> None:
    code, out, err = _says(
        lambda: main(["plan", path, "--no-cache", *ASKED, "--out", str(Path(path).with_name("plan.json"))])
    )
    assert code == 0, err
    assert bool(out) == (rank == 0)


def _trained(rank: int, plan: str) -> None:
    train_run(Plan.load(plan))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "dp2,zero3"])
def test_bf16_with_dropout_in_the_least_memory_trains_on_ranks_as_plain_pytorch(tmp_path: Path, layout: str) -> None:
    """Micro-batches of two ranks, clipped, with masters, in the smallest budget that a plan is found for."""
    path, plain = written(tmp_path), tmp_path / "plain"
    asked = (
        "model.sizes={dim=64, num_layers=3, num_heads=2, dropout=0.2}",
        "optimization={steps=6, clip_norm=0.5, warmup_steps=2, precision='bf16', micro_batches=4}",
    )
    plain.mkdir()
    expected = train_plain(load_run(path, [*asked, f"out={plain}"]), plain).losses
    run = load_run(path, [*asked, f"layout='{layout}'", f"memory.budget={OVERHEAD_BYTES}"])
    with pytest.raises(PlanInfeasible) as refused:
        plan_run(run, devices=2)
    memory = dataclasses.replace(run.memory, budget=refused.value.smallest_budget_bytes)
    made = plan_run(dataclasses.replace(run, memory=memory), devices=2).plan
    assert len(made.choices.gaps) > 100
    made.save(tmp_path / "plan.json")
    run_ranks(_trained, 2, str(tmp_path / "plan.json"))
    assert [record["loss"] for record in records(Path(run.out))] == [*expected]
