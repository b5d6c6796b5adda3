"""The planned run beside plain PyTorch, through the public functions, and what both leave behind."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lading.cli.main import main
from lading.config import MemoryConfig, RunConfig, load_run
from lading.ir.plan import Plan
from lading.ir.timeline import Timeline
from lading.prepare import plan_run
from lading.report.metrics import read_metrics
from lading.run import Prepared
from lading.summary import RunResult
from lading.train import train_plain, train_run
from tests.runs import budget_for, write_run

STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quarter(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run with room for a quarter of its tensors."""
    sizes = [
        "data.batch_size=4",
        "model.sizes.num_layers=2",
        "optimization.accumulation=2",
        f"optimization.steps={STEPS}",
    ]
    run = load_run(write_run(tmp_path_factory.mktemp("quarter")), sizes)
    everything = plan_run(dataclasses.replace(run, memory=MemoryConfig(budget="100%"))).program
    return dataclasses.replace(run, memory=MemoryConfig(budget=budget_for(everything, 0.25)))


@pytest.fixture(scope="module")
def results(quarter: RunConfig) -> tuple[RunResult, RunResult]:
    """(plain, planned)."""
    plain = train_plain(quarter, Path(quarter.out))
    return plain, train_run(quarter)


@pytest.fixture(scope="module")
def prepared(quarter: RunConfig, results: tuple[RunResult, RunResult]) -> Prepared:
    from lading.run import prepare_plan

    return prepare_plan(Plan.load(Path(quarter.out) / "plan.json"))


@pytest.mark.long
def test_the_losses_are_those_of_plain_pytorch(results: tuple[RunResult, RunResult]) -> None:
    plain, planned = results
    assert len(plain.losses) == STEPS
    assert planned.losses == plain.losses
    assert len(set(plain.losses)) == STEPS
    assert plain.losses[-1] < plain.losses[0]
    assert 0 < planned.peak_bytes <= planned.budget_bytes
    assert planned.step_s > 0
    assert planned.spread_s >= 0


def test_what_a_run_leaves(quarter: RunConfig, results: tuple[RunResult, RunResult], prepared: Prepared) -> None:
    out = Path(quarter.out)
    records, plain = read_metrics(out / "metrics.jsonl"), read_metrics(out / "plain.jsonl")
    assert [record["step"] for record in records] == [record["step"] for record in plain] == list(range(STEPS))
    assert tuple(record["loss"] for record in records) == results[1].losses
    assert all(record["memory_bytes"] <= prepared.plan.budgets["device"] for record in records)
    predicted, measured = (Timeline.load(out / f"{name}.json") for name in ("predicted", "measured"))
    assert (predicted.source, measured.source) == ("predicted", "measured")
    ids = [action.id for action in prepared.program.actions]
    assert sorted(event.action for event in measured.events) == ids
    assert {event.action: event.stream for event in measured.events} == {
        a.id: a.stream for a in prepared.program.actions
    }
    assert {event.action for event in predicted.events} <= set(ids)
    assert any(event.stream == "disk_read" for event in measured.events)
    assert predicted == prepared.predicted
    assert len(list((out / "checkpoints").iterdir())) == 2


def test_the_report(quarter: RunConfig, prepared: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    report = Path(quarter.out) / "report.html"
    written = report.read_text()
    assert written.rstrip().endswith("</html>")
    assert str(prepared.plan.version) in written
    report.unlink()
    assert main(["report", quarter.out]) == 0
    assert capsys.readouterr().out == f"wrote {report}\n"
    assert abs(len(report.read_text()) - len(written)) < 200  # but for the date


def test_the_report_of_a_run_that_was_stopped(quarter: RunConfig, prepared: Prepared, tmp_path: Path) -> None:
    """Only a plan and some records are there."""
    (tmp_path / "plan.json").write_bytes((Path(quarter.out) / "plan.json").read_bytes())
    assert main(["report", str(tmp_path)]) == 0
    record = (Path(quarter.out) / "metrics.jsonl").read_text().splitlines()[0]
    (tmp_path / "metrics.jsonl").write_text(record + "\n" + record[:20])
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_trace(quarter: RunConfig, prepared: Prepared) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace_pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = trace_pb2.Trace()
    trace.ParseFromString((Path(quarter.out) / "timeline.pftrace").read_bytes())
    assert len(trace.packet) > 2 * len(prepared.program.actions)


def test_simulate_and_fit(quarter: RunConfig, prepared: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(Path(quarter.out) / "plan.json")
    assert main(["simulate", plan]) == 0
    assert capsys.readouterr().out.startswith("predicted step ")
    assert json.loads(Path(plan).read_text())["predictions"]["step_s"] == pytest.approx(prepared.predicted.duration_s)
