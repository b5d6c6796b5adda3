"""Summary of a run: its timelines, trace and report, written at the end or made again from its folder."""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from lading import __version__
from lading.alone import launcher
from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.job_timeline import JobTimeline, RankTimeline, rank_timeline
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.ir.timeline import Timeline
from lading.memory.restore import predicted_timeline
from lading.report.html import write_report
from lading.report.metrics import read_steps
from lading.report.perfetto import write_trace
from lading.report.promises import RunSummary, container_words, sentence_of
from lading.report.rank_section import RankReport
from lading.report.snapshot import write_snapshot
from lading.run import Prepared, prepare_plan, programs_of_ranks
from lading.units import format_bytes, format_count, format_seconds

#: Ranks whose peaks are told when a run ends, at most; the file of ranks has all.
MOST_RANKS_TOLD = 8


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Highest memory of one rank, beside its prediction and its budget, in bytes.

    Attributes:
        base_bytes: What its process had before, not counted in these; 0 on another host than the first rank's.
    """

    peak_bytes: int
    predicted_bytes: int
    budget_bytes: int
    base_bytes: int = 0

    @staticmethod
    def of_rank(each: RankTimeline) -> Peak:
        """Peak of a measured rank."""
        sizes = {"peak_bytes": each.peak_bytes, "predicted_bytes": each.predicted_bytes}
        base_bytes = 0 if each.clock_error_s else each.base_bytes
        return Peak(**sizes, budget_bytes=each.budget_bytes, base_bytes=base_bytes)

    @property
    def share(self) -> float:
        """Peak as a share of the budget."""
        return self.peak_bytes / self.budget_bytes

    def __str__(self) -> str:
        peak, budget, predicted = map(format_bytes, (self.peak_bytes, self.budget_bytes, self.predicted_bytes))
        return f"{peak} of {budget} (predicted {predicted})"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run.

    Attributes:
        losses: Loss of each step of this process; of the whole run if it had ended before.
        step_s: Median seconds of a step, the first two left out.
        spread_s: Largest minus smallest seconds of those steps.
        budget_bytes: Budget of the device; 0 where there was none (plain PyTorch).
        base_bytes: Memory that the process had before training; 0 where it is not the budget's memory (a GPU).
        checkpoint: Path of the newest; "" where nothing was saved.
        validation_losses: Number of steps done and validation loss of each evaluation, in order.
        best_checkpoint: Path of the one with the lowest validation loss; "" where none was kept.
        peak_bytes, predicted_peak_bytes, budget_bytes: Those of the rank that came nearest to its budget.
        rank_peaks: Peak of each rank, in the processes that ended the run.
        slow_rank: Sentence that names a rank that is slower than the others; "" without one.
    """

    out: str
    losses: tuple[float, ...]
    step_s: float
    spread_s: float
    peak_bytes: int
    budget_bytes: int
    predicted_step_s: float
    predicted_peak_bytes: int
    base_bytes: int = 0
    checkpoint: str = ""
    validation_losses: tuple[tuple[int, float], ...] = ()
    best_checkpoint: str = ""
    rank_peaks: tuple[Peak, ...] = ()
    slow_rank: str = ""

    def __str__(self) -> str:
        count = "one step" if len(self.losses) == 1 else f"{len(self.losses)} steps"
        lines = [
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {count}",
            f"step time {format_seconds(self.step_s)} (predicted {format_seconds(self.predicted_step_s)})",
            f"peak memory {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(predicted {format_bytes(self.predicted_peak_bytes)})",
            *self._peaks_by_rank(),
            *([sentence_of(self.slow_rank)] if self.slow_rank else []),
            *filter(None, [_container(self.base_bytes, self.peak_bytes, self.budget_bytes, self.rank_peaks)]),
            f"wrote {self.out}/: metrics.jsonl, plan.json, report.html, timeline.pftrace",
        ]
        if self.validation_losses:
            step, lowest = min(self.validation_losses, key=lambda pair: (math.isnan(pair[1]), pair[1]))
            location = f", kept in {self.best_checkpoint}" if self.best_checkpoint else ""
            last = f"validation loss {self.validation_losses[-1][1]:.4f}"
            lines.insert(1, f"{last}, lowest {lowest:.4f} after step {step}{location}")
        if self.checkpoint:
            lines.append(f"trained values in {self.checkpoint}")
            lines.append(f"lading export {shlex.quote(self.out)} --to FOLDER writes them as safetensors")
        else:
            lines.append("the trained values were not saved: checkpoint.at_end is false")
        return "\n".join(lines)

    def _peaks_by_rank(self) -> list[str]:
        """Say what each of several ranks took; of many the fullest ones."""
        peaks = self.rank_peaks
        if len(peaks) < 2:
            return []
        shown = sorted(sorted(range(len(peaks)), key=lambda rank: -peaks[rank].share)[:MOST_RANKS_TOLD])
        lines = [f"  rank {rank}: {peaks[rank]}" for rank in shown]
        if num_hidden := len(peaks) - len(shown):
            lines.append(f"  {num_hidden} more ranks have more of their budgets left; ranks.json has them")
        return lines

    @property
    def of_rank(self) -> str:
        """Words that say whose peak it is, where there are several ranks: " of rank 1"."""
        peak_ranks = [rank for rank, peak in enumerate(self.rank_peaks) if peak.peak_bytes == self.peak_bytes]
        return f" of rank {peak_ranks[0]}" if len(self.rank_peaks) > 1 and peak_ranks else ""


def _container(base_bytes: int, peak_bytes: int, budget_bytes: int, ranks: Sequence[Peak]) -> str:
    """Say what container holds a run, with all ranks of the first one's host; "" where nobody knows."""
    here = [peak for peak in ranks if peak.base_bytes]
    if len(here) < 2 or not base_bytes:
        return container_words(base_bytes, peak_bytes, budget_bytes) if base_bytes else ""
    base_bytes, peak_bytes = sum(p.base_bytes for p in here), sum(p.peak_bytes for p in here)
    return container_words(base_bytes, peak_bytes, sum(max(p.peak_bytes, p.budget_bytes) for p in here), len(here))


#: Says how long a step takes of which a rank computes so many times as long.
Straggler = Callable[[Prepared, int, float], float]


def finish_run(prepared: Prepared, job: JobTimeline | None, straggler: Straggler | None = None) -> JobTimeline | None:
    """Save predicted and measured timelines, the trace and the report into the run's folder.

    Args:
        job: The last step; None if this process ran none, which leaves what an earlier one measured.
        straggler: Predicts what a slow rank costs; None leaves that out.

    Returns:
        What was measured, now or before; None where nothing was.
    """
    out = Path(prepared.run.out)
    prepared.predicted.save(out / "predicted.json")
    if job is None:
        job, measured = _job(out, prepared), _measured(out, prepared)
    else:
        measured = job.ranks[0].timeline
        measured.save(out / "measured.json")
        if len(job.ranks) > 1:
            job.save(out / "ranks.json")
    ranks = _rank_report(prepared, job, straggler)
    timelines = [prepared.predicted, *([] if measured is None else [measured])]
    write_trace(out / "timeline.pftrace", timelines if ranks is None else ranks.traced)
    for timeline in timelines:
        write_snapshot(out / f"{timeline.source}.pickle", prepared.program, timeline)
    _write(prepared, measured, ranks, out)
    return job


def write_run_report(folder: Path, straggler: Straggler | None = None) -> Path:
    """Write report.html from what a run left in ``folder``; returns its path.

    Args:
        straggler: As ``finish_run``.

    Raises:
        ConfigError: no plan there.
    """
    prepared = prepare_plan(Plan.load(folder / "plan.json"))
    ranks = _rank_report(prepared, _job(folder, prepared), straggler)
    _write(prepared, _measured(folder, prepared), ranks, folder)
    return folder / "report.html"


def _measured(folder: Path, prepared: Prepared) -> Timeline | None:
    """Timeline of the last step of a run, of the first rank, unless it ran by another plan, whose actions are others.

    Raises:
        ConfigError: the file is damaged, or does not say of each action when it ran.
    """
    path = folder / "measured.json"
    measured = Timeline.load(path) if path.is_file() else None
    if measured is None or measured.labels != prepared.predicted.labels:
        return None
    _check_whole(path, measured, prepared.program)
    return measured


def _check_whole(path: Path, measured: Timeline, program: Program) -> None:
    """Refuse a timeline that lacks an action of its Program, or has one of another."""
    timed = {event.action for event in measured.events}
    if unknown := sorted(timed - {action.id for action in program.actions}):
        raise ConfigError(
            f"{path}: expected events of the plan's {len(program.actions)} actions, found one of action {unknown[0]}; "
            "remove the file, or train again"
        )
    if missing := [action.id for action in program.actions if action.id not in timed]:
        raise ConfigError(
            f"{path}: expected an event of each of the plan's {len(program.actions)} actions, found none of "
            f"action {missing[0]} and {len(missing) - 1} more; remove the file, or train again"
        )


def _job(folder: Path, prepared: Prepared) -> JobTimeline | None:
    """Timelines of all ranks for the last step of a run, unless it ran by another plan.

    Raises:
        ConfigError: the file is damaged, or of another number of ranks.
    """
    path = folder / "ranks.json"
    job = JobTimeline.load(path) if prepared.plan.ranks > 1 and path.is_file() else None
    if job is None or job.plan != prepared.plan.fingerprint:
        return None
    if len(job.ranks) != prepared.plan.ranks:
        raise ConfigError(
            f"{path}: expected timelines of the plan's {prepared.plan.ranks} ranks, found {len(job.ranks)}; remove the "
            "file, or train again"
        )
    if empty := [r.rank for r in job.ranks if min(r.peak_bytes, r.predicted_bytes, r.budget_bytes) <= 0]:
        raise ConfigError(
            f"{path}: expected peak, predicted and budgeted bytes above 0 of each rank, found none of rank {empty[0]}; "
            "remove the file, or train again"
        )
    return job


def _rank_report(prepared: Prepared, job: JobTimeline | None, straggler: Straggler | None) -> RankReport | None:
    """Put each rank's measured timeline beside its own prediction, for the report; None of one rank alone.

    Raises:
        ConfigError: a timeline lacks an action of its rank's Program.
    """
    plan = prepared.plan
    if job is None or plan.ranks == 1:
        return None
    stages, layout = programs_of_ranks(prepared), plan.parsed_layout
    numbers = [layout.place(rank)["pp"] if plan.peers else 0 for rank in range(plan.ranks)]
    for timeline, number in zip(job.ranks, numbers, strict=True):
        _check_whole(Path(prepared.run.out) / "ranks.json", timeline.timeline, stages[number])
    lines = [
        predicted_timeline(stage_plan, program) for stage_plan, program in zip((plan, *plan.peers), stages, strict=True)
    ]
    predicted = [rank_timeline(stages[n], layout, rank, lines[n]) for rank, n in enumerate(numbers)]
    return RankReport(
        measured=job,
        predicted=JobTimeline(plan=job.plan, step=job.step, ranks=tuple(predicted)),
        programs=tuple(stages[number] for number in numbers),
        slow_step_s=straggler(prepared, job.slow.rank, job.slow.factor) if job.slow and straggler else None,
    )


def _write(prepared: Prepared, measured: Timeline | None, ranks: RankReport | None, out: Path) -> None:
    metrics = read_steps(out / "metrics.jsonl") if (out / "metrics.jsonl").is_file() else []
    plain = read_steps(out / "plain.jsonl") if (out / "plain.jsonl").is_file() else []
    write_report(
        out / "report.html",
        plan=prepared.plan,
        program=prepared.program,
        predicted=prepared.predicted,
        measured=measured,
        metrics=metrics,
        summary=run_summary(prepared, measured, metrics, plain, ranks and ranks.measured),
        ranks=ranks,
    )


def nearest_its_budget(prepared: Prepared, job: JobTimeline | None, largest_bytes: int) -> Peak:
    """Peak of the rank that came nearest to its budget.

    Args:
        job: All ranks of the processes that ended the run.
        largest_bytes: Largest peak of any rank; where that was before, it counts as that of the rank that was to take
            most.
    """
    peaks = [] if job is None else [Peak.of_rank(timeline) for timeline in job.ranks]
    if peaks and largest_bytes <= max(peak.peak_bytes for peak in peaks):
        return max(peaks, key=lambda peak: peak.share)
    most = max((prepared.plan, *prepared.plan.peers), key=lambda rank_plan: rank_plan.peak_bytes[DEVICE])
    planned, budget = most.peak_bytes[DEVICE], most.budgets[DEVICE]
    return Peak(peak_bytes=largest_bytes, predicted_bytes=planned, budget_bytes=budget)


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
    command = f"{launcher(ranks)}lading train --plan {shlex.quote(str(out / 'plan.json'))}"
    old_folders = [str(out / name) for name in ("checkpoints", "best") if (out / name).is_dir()]
    return "\n".join([*(f"mv {shlex.quote(path)} {shlex.quote(f'{path}-before')}" for path in old_folders), command])


def run_summary(
    prepared: Prepared,
    measured: Timeline | None,
    metrics: list[dict[str, Any]],
    plain: list[dict[str, Any]],
    job: JobTimeline | None = None,
) -> RunSummary:
    """Numbers at the top of the report."""
    run, graph = prepared.run, prepared.step.captured  # of which a rank may have a part
    steps = of_plan(prepared.plan, metrics)
    seconds = [r["step_s"] for r in steps[2:] or steps]
    fullest = nearest_its_budget(prepared, job, max((r["memory_bytes"] for r in steps), default=0))
    parameters = sum(math.prod(graph.tensors[p.tensor].shape) for p in graph.parameters)
    is_identical = (
        [r["loss"] for r in metrics] == [r["loss"] for r in plain][: len(metrics)] if plain and metrics else None
    )
    return RunSummary(
        title=Path(run.out).name,
        model=f"{run.model.name}, {format_count(parameters)} parameters, "
        f"{run.optimization.accumulation * prepared.plan.replicas} x {run.data} a step",
        machine=prepared.plan.request.machine,
        date=datetime.now().isoformat(sep=" ", timespec="minutes"),
        budget_bytes=fullest.budget_bytes,
        keep_all_bytes=max(each.predictions.keep_all_bytes for each in (prepared.plan, *prepared.plan.peers)),
        predicted_step_s=prepared.plan.step_s,
        predicted_peak_bytes=fullest.predicted_bytes,
        plain_step_s=_steady_s(plain),
        plain_peak_bytes=max((r["memory_bytes"] for r in plain), default=None),
        measured_step_s=_steady_s(steps) if measured else None,
        measured_step_spread_s=max(seconds) - min(seconds) if seconds else 0.0,
        measured_peak_bytes=fullest.peak_bytes if measured and steps else None,
        container=_container(
            process_base_bytes(prepared.plan, steps),
            fullest.peak_bytes,
            fullest.budget_bytes,
            [] if job is None else [Peak.of_rank(timeline) for timeline in job.ranks],
        ),
        excess=tuple(sentence for r in steps for sentence in r.get("excess", ())),
        identical_to_plain=is_identical,
        plain_losses=tuple((r["step"] + 1, r["loss"]) for r in plain),
        versions={"lading": __version__, "torch": version("torch"), "python": platform.python_version()},
        command=reproduction(Path(run.out), prepared.plan.ranks),
    )
