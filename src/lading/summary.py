"""Summary of a run: its timelines, trace and report, written at the end or made again from its folder."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from math import prod
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from lading import __version__
from lading.alone import launcher
from lading.errors import ConfigError
from lading.ir.plan import Plan
from lading.ir.timeline import Timeline
from lading.report.html import write_report
from lading.report.metrics import read_steps
from lading.report.perfetto import write_trace
from lading.report.promises import RunSummary
from lading.report.snapshot import write_snapshot
from lading.run import Prepared, prepare_plan
from lading.units import format_count


def finish_run(prepared: Prepared, measured: Timeline | None) -> None:
    """Save both timelines, the trace and the report into the run's folder.

    Args:
        measured: The last step; None if this process ran none, which leaves what an earlier one measured.
    """
    out = Path(prepared.run.out)
    prepared.predicted.save(out / "predicted.json")
    if measured is None:
        measured = _measured(out, prepared)
    else:
        measured.save(out / "measured.json")
    timelines = [prepared.predicted] if measured is None else [prepared.predicted, measured]
    write_trace(out / "timeline.pftrace", timelines)
    for timeline in timelines:
        write_snapshot(out / f"{timeline.source}.pickle", prepared.program, timeline)
    _write(prepared, measured, out)


def write_run_report(folder: Path) -> Path:
    """Write report.html from what a run left in ``folder``; returns its path.

    Raises:
        ConfigError: no plan there.
    """
    prepared = prepare_plan(Plan.load(folder / "plan.json"))
    _write(prepared, _measured(folder, prepared), folder)
    return folder / "report.html"


def _measured(folder: Path, prepared: Prepared) -> Timeline | None:
    """Timeline of the last step of a run, unless it ran by another plan, whose actions are others.

    Raises:
        ConfigError: the file is damaged, or does not say of each action when it ran.
    """
    path = folder / "measured.json"
    measured = Timeline.load(path) if path.is_file() else None
    if measured is None or measured.labels != prepared.predicted.labels:
        return None
    timed = {event.action for event in measured.events}
    if missing := [action.id for action in prepared.program.actions if action.id not in timed]:
        raise ConfigError(
            f"{path}: expected an event of each of the plan's {len(prepared.program.actions)} actions, found none of "
            f"action {missing[0]} and {len(missing) - 1} more; remove the file, or train again"
        )
    return measured


def _write(prepared: Prepared, measured: Timeline | None, out: Path) -> None:
    metrics = read_steps(out / "metrics.jsonl") if (out / "metrics.jsonl").is_file() else []
    plain = read_steps(out / "plain.jsonl") if (out / "plain.jsonl").is_file() else []
    write_report(
        out / "report.html",
        plan=prepared.plan,
        program=prepared.program,
        predicted=prepared.predicted,
        measured=measured,
        metrics=metrics,
        summary=run_summary(prepared, measured, metrics, plain),
    )


def of_plan(plan: Plan, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Records of steps that ran under this plan; all of them where none says (an older file)."""
    under_plan = [record for record in records if record.get("plan") == plan.fingerprint]
    return under_plan or list(records)


def process_base_bytes(plan: Plan, records: Sequence[Mapping[str, Any]]) -> int:
    """Bytes that the process had before training; 0 on a GPU, whose budget is of other memory, or if unrecorded."""
    if plan.request.machine_table["device"]["kind"] != "cpu":
        return 0
    return max((record.get("base_bytes", 0) for record in records), default=0)


def _steady_s(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Median seconds of a step, the first two left out; None without records."""
    seconds = [record["step_s"] for record in records]
    return median(seconds[2:] or seconds) if seconds else None


def reproduction(out: Path, ranks: int = 1) -> str:
    """Commands that run the plan of so many ranks in ``out`` once more; checkpoints there are moved aside first."""
    again = f"{launcher(ranks)}lading train --plan {quote(str(out / 'plan.json'))}"
    held = [str(out / name) for name in ("checkpoints", "best") if (out / name).is_dir()]
    return "\n".join([*(f"mv {quote(path)} {quote(f'{path}-before')}" for path in held), again])


def run_summary(
    prepared: Prepared, measured: Timeline | None, metrics: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> RunSummary:
    """Numbers at the top of the report."""
    run, graph = prepared.run, prepared.program.graph
    steps = of_plan(prepared.plan, metrics)
    seconds = [r["step_s"] for r in steps[2:] or steps]
    parameters = sum(prod(graph.tensors[p.tensor].shape) for p in graph.parameters)
    same = [r["loss"] for r in metrics] == [r["loss"] for r in plain][: len(metrics)] if plain and metrics else None
    return RunSummary(
        title=Path(run.out).name,
        model=f"{run.model.name}, {format_count(parameters)} parameters, "
        f"{run.optimization.accumulation} x {run.data} a step",
        machine=prepared.plan.request.machine,
        date=datetime.now().isoformat(sep=" ", timespec="minutes"),
        budget_bytes=prepared.plan.budgets["device"],
        keep_all_bytes=prepared.plan.predictions.keep_all_bytes,
        predicted_step_s=prepared.plan.step_s,
        predicted_peak_bytes=prepared.program.predicted_bytes,
        plain_step_s=_steady_s(plain),
        plain_peak_bytes=max((r["memory_bytes"] for r in plain), default=None),
        measured_step_s=_steady_s(steps) if measured else None,
        measured_step_spread_s=max(seconds) - min(seconds) if seconds else 0.0,
        measured_peak_bytes=max(r["memory_bytes"] for r in steps) if measured and steps else None,
        base_bytes=process_base_bytes(prepared.plan, steps),
        excess=tuple(sentence for r in steps for sentence in r.get("excess", ())),
        identical_to_plain=same,
        plain_losses=tuple((r["step"] + 1, r["loss"]) for r in plain),
        versions={"lading": __version__, "torch": version("torch"), "python": platform.python_version()},
        command=reproduction(Path(run.out), prepared.plan.ranks),
    )
