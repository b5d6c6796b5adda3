"""Training: the loop, from top to bottom.

``train_run`` is the loop of a configured run around ``lading.trainer.Trainer``; ``train_plain`` the same run in plain
PyTorch, the reference that the planned run must equal to the bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lading.catalog.models import resolved
from lading.checkpoint.lock import check_free, run_lock
from lading.checkpoint.store import (
    BEST,
    NEWEST,
    Checkpoint,
    checkpoint_folders,
    latest_checkpoint,
    open_checkpoint,
    step_of,
)
from lading.clipping_watch import ClippingWatch
from lading.config import CheckpointConfig, FreezeConfig, RunConfig, crowded_words, lr_at, run_to_dict, short_of_peak
from lading.errors import BudgetExceeded, ConfigError, LadingError, StorageError
from lading.files import make_folder
from lading.freezing import Freezing
from lading.host_watch import HostWatch
from lading.hosts import machine_of
from lading.ir.job_timeline import JobTimeline, RankTimeline, slow_words
from lading.ir.plan import Plan
from lading.ir.update_ops import grouped
from lading.optim.master import MasterWeights
from lading.optim.registry import name_of
from lading.rank_watch import RankWatch
from lading.report.lines import fitted
from lading.report.metrics import MetricsLog, keep_figures, read_steps
from lading.report.progress import Progress, planning_progress, training_progress
from lading.report.promises import budget_remedy, limit_words, room_words, wear_words
from lading.resuming import (
    FREEZING,
    VALIDATION,
    going_on_words,
    meta_of,
    naming_an_older_one,
    position_of,
    resumed_path,
    resuming_words,
    take_over,
)
from lading.routing_watch import RoutingWatch
from lading.run import (
    Prepared,
    build,
    built_whole,
    capture_run,
    check_sources,
    dataset_of,
    initial_values,
    layers_to_freeze,
    loss_of,
    prepare_plan,
    sharing_batches,
    sharing_processors,
)
from lading.run_ranks import RunRanks
from lading.runtime.cuda import check_available
from lading.runtime.data import Dataset, from_the_beginning
from lading.runtime.host import available_bytes, check_host
from lading.runtime.interrupts import StopRequest
from lading.runtime.loggers import Logger, check_logging, open_loggers
from lading.runtime.members import How
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.summary import Peak, RunResult, finish_run, nearest_its_budget, of_plan, process_base_bytes
from lading.tracing.initial import defer
from lading.tracing.loss_terms import named_losses, total_of
from lading.trainer import Trainer
from lading.units import format_bytes, format_seconds

#: What a run is compared with between two steps, and planned again for.
Watch: TypeAlias = HostWatch | RankWatch | RoutingWatch | ClippingWatch


def train_run(
    what: RunConfig | Plan, *, resume: bool = False, resume_from: str | Path = "", cache: bool = False
) -> RunResult:
    """Train a run, planned first, or exactly as a plan says. A run that had ended already is reported again.

    SIGINT, SIGTERM and SIGHUP end the run when the step under way has ended and is saved; a second one at once.

    In a job of several ranks (under ``torchrun``) all call this. Each replica trains on micro-batches of its own: those
    of one process with as many times the accumulation; the stages of a pipeline share theirs. The first rank plans,
    prints and writes. An error of any rank ends all, and only the first to fail raises it: the others end by
    SystemExit.

    Args:
        resume: Go on from the newest checkpoint; a job that torchrun has started again always does. How parameters
            move may have changed since (more steps, another learning rate), and the number of ranks, which is said; a
            model, its data or an optimizer may not.
        resume_from: Folder of the checkpoint of this run to go on from in place of the newest; "" for that. Those of
            later steps are set aside, which is said, so a job that torchrun starts again goes on from what is newest.
        cache: Whether the plan may come from the user's cache folder, and is kept there (``planner.cache``).

    Raises:
        BudgetExceeded: measured memory went above the budget; everything is saved and reported first.
        ConfigError: a setting, a plan made for another model, machine or number of ranks, an out folder of another run,
            or ranks that were given unlike things.
        StorageError: another run is using the folder, or the disk is full; checkpoints saved before stay whole.
        DamagedCheckpoint: the one to go on from is damaged; names the newest older one that is whole.
    """
    with begun(what, resume=resume, resume_from=resume_from, cache=cache) as (prepared, ranks, goes_on):
        return _run(prepared, ranks, resume=goes_on, plans=isinstance(what, RunConfig))


@contextmanager
def begun(
    what: RunConfig | Plan, *, resume: bool, cache: bool, resume_from: str | Path = ""
) -> Iterator[tuple[Prepared, RunRanks, bool]]:
    """Join the ranks of a run, plan it, and take its folder for this job; gives whether it goes on, too."""
    ranks = RunRanks.of_job()
    with ranks.ending_together(), ranks.printing():
        if isinstance(what, RunConfig):
            what = sharing_processors(resolved(what))
            check_logging(what.logging)
        ranks.begin(what, resume=resume, resume_from=str(resume_from))
        is_restart, went_back, agents = ranks.started_again(_out_of(what))
        beside = ranks.processes_here()
        resume, back = resume or is_restart or bool(resume_from), "" if went_back else resume_from
        if isinstance(what, RunConfig):
            run = what = sharing_batches(what, ranks.count)

            def early() -> str:  # refuses before it plans, and before it leaves a copy of the data in the folder
                check_free(Path(run.out))
                check_sources(run)
                return resumed_path(run, None, ranks, resume=resume, resume_from=back)

            ranks.by_first(early)
            prepared = _planned(run, ranks, cache=cache)
        else:
            prepared = prepare_plan(what, to_run=True)
        check_available(prepared.plan.request.machine_table["device"]["kind"])
        replica = prepared.plan.parsed_layout.replica(ranks.rank)
        ranks = dataclasses.replace(ranks, replicas=prepared.plan.replicas, replica=replica, beside=beside)
        with ExitStack() as stack:
            out = Path(prepared.run.out)
            ranks.by_first(lambda: stack.enter_context(run_lock(out, agents, partial(_taken_over, out, back))) or "")
            yield prepared, ranks, resume


def _taken_over(out: Path, resume_from: str | Path) -> None:
    """Take the folder over, with the checkpoint that the run is to go on from as its newest; say what is set aside."""
    if words := take_over(out, resume_from):
        print(fitted(words), flush=True)


def _out_of(what: RunConfig | Plan) -> Path:
    """Folder of a run; that of a plan without a run, which is refused later, is the working directory."""
    return Path(what.out if isinstance(what, RunConfig) else (what.request.run or {}).get("out", ""))


def _run(prepared: Prepared, ranks: RunRanks, *, resume: bool, plans: bool) -> RunResult:
    """Train a planned run in its folder, which this job has for itself; raises as ``train_run``.

    Args:
        plans: Whether the run was planned here, and may be again.
    """
    run, out = prepared.run, Path(prepared.run.out)
    data, held_out = ranks.opened(partial(opened_data, run, prepared.step.initial.model))
    for words in filter(None, (short_of_peak(run.optimization), crowded_words(run))):
        print(fitted(words), flush=True)
    if run.data.kind == "random":
        print("the data are random numbers: the loss means nothing, times and memory do", flush=True)
    path = ranks.by_first(lambda: resumed_path(run, data, ranks, resume=resume))
    newest = open_checkpoint(Path(path)) if path else None
    position = position_of(run, newest, ranks)
    if resume:
        print(fitted(resuming_words(run, newest, ranks)), flush=True)
    ranks.by_first(lambda: str(prepared.plan.save(out / "plan.json")))
    plan = prepared.plan
    room = room_words(plan, available_bytes(), len(ranks.beside) + 1)
    for words in filter(None, (limit_words(plan), wear_words(plan), room, *prepared.notes)):
        print(fitted(words), flush=True)
    if newest is not None and newest.step >= run.optimization.steps:
        return _checked(_told(ranks, partial(_reported, prepared, None, 0, 0)))
    data, meta = data.continued(position), meta_of(run, data, ranks, position)
    prepared, first, job, peak = _trained(prepared, data, held_out, newest, ranks, meta, plans=plans)
    return _checked(_told(ranks, partial(_reported, prepared, job, first, peak)))


def _reported(prepared: Prepared, job: JobTimeline | None, first: int, peak_bytes: int) -> RunResult:
    """Write the report of a run that has ended; returns the result of its steps from ``first`` on."""
    job = finish_run(prepared, job, _slow_step_s)
    steps = read_steps(Path(prepared.run.out) / "metrics.jsonl")
    return _result(prepared, [record for record in steps if record["step"] >= first], job, peak_bytes)


def _slow_step_s(prepared: Prepared, rank: int, factor: float) -> float:
    from lading.stragglers import slow_step_s  # only a run with a slow rank needs the simulator

    return slow_step_s(prepared, rank, factor)


def _told(ranks: RunRanks, make: Callable[[], RunResult]) -> RunResult:
    """Let the first rank make the result that all get."""
    if ranks.count == 1:
        return make()
    fields = json.loads(ranks.by_first(lambda: json.dumps(dataclasses.asdict(make()))))
    pairs = tuple((step, loss) for step, loss in fields["validation_losses"])
    peaks = tuple(Peak(**peak) for peak in fields["rank_peaks"])
    return RunResult(**{**fields, "losses": tuple(fields["losses"]), "validation_losses": pairs, "rank_peaks": peaks})


def opened_data(run: RunConfig, model: torch.nn.Module) -> tuple[Dataset, Dataset | None]:
    """Open the data of a run, and its validation data if it has some."""
    return dataset_of(run, model), dataset_of(run, model, held_out=True) if run.validation else None


def _planned(run: RunConfig, ranks: RunRanks, *, cache: bool) -> Prepared:
    """Plan a run whose data can be read: what is wrong with them is told before minutes of planning."""
    from lading.prepare import plan_run  # a saved plan needs no planner

    with planning_progress(ranks.planning_stream) as progress:
        progress.update(0.0, "reading the data")
        initial = defer(lambda: build(run.model, run.optimization.precision))
        ranks.by_first(lambda: opened_data(run, initial.model) and "")
        check_host((machine := machine_of(run)).host_id)
        progress.update(0.0, "capturing the model")
        return plan_run(run, machine, capture_run(run, machine, initial), cache=cache, progress=progress)


def _trained(
    prepared: Prepared,
    data: Dataset,
    held_out: Dataset | None,
    newest: Checkpoint | None,
    ranks: RunRanks,
    meta: dict[str, Any],
    *,
    plans: bool,
) -> tuple[Prepared, int, JobTimeline | None, int]:
    """Train to the last step, or until a signal asks to stop.

    Args:
        held_out: Validation data; None for a run without.
        meta: What checkpoints of the run say of it.
        plans: Whether the run may be planned again.

    Returns:
        The run by its last plan, the first step, the timelines of all ranks for the last (on the first rank), and the
        peak bytes, saving included.
    """
    run, out = prepared.run, Path(prepared.run.out)
    with ExitStack() as stack:
        # Loggers first: what they import does not count as memory of the run.
        loggers = stack.enter_context(_loggers(run, newest.step if newest else 0)) if ranks.is_first else []
        trainer = stack.enter_context(trainer_of(prepared, ranks))
        stack.enter_context(ranks.ending_together())  # told before the trainer's connections close
        freezer = None if run.freeze is None else _Freezer(prepared, trainer, run.freeze, meta)
        if freezer is not None and (words := freezer.begin(newest)):
            print(fitted(words), flush=True)
        if newest is None:
            for note in trainer.initialize(partial(initial_values, run, prepared.step.initial, fill=trainer.fill)):
                print(note, flush=True)
        else:
            with naming_an_older_one(out / "plan.json"):
                trainer.load(newest.path)
        if ranks.is_first:
            keep_figures(out, trainer.steps)
        first = trainer.steps
        ranks.by_first(lambda: _check_room(prepared, first) or "")
        validation = None if held_out is None else _Validation(trainer, run, held_out, meta, ranks)
        if validation is not None and validation.note:
            print(fitted(validation.note), flush=True)
        plans = plans and freezer is None and ranks.count == 1
        now = prepared if freezer is None else freezer.prepared  # planned again if layers freeze before the first step
        watch = _watch_over(now, trainer, ranks, plans=plans)
        try:
            if prepared.run.checkpoint.in_place:
                trainer.check_in_place(Path(prepared.run.out) / NEWEST)
            stop, mine = _loop(trainer, data, meta, validation, freezer, watch, loggers, ranks)
        except (KeyboardInterrupt, SystemExit):
            print(fitted(f"stopped in step {trainer.steps + 1}; {going_on_words(out)}"), flush=True)
            raise
        if mine is None:
            ended = f"stopped after step {trainer.steps} of {run.optimization.steps}"
            print(fitted(f"{ended}; {going_on_words(out)}"), flush=True)
            stop.deliver()
        prepared = watch.prepared if freezer is None else freezer.prepared
        return prepared, first, trainer.timelines(mine), int(trainer.largest(trainer.peak_bytes)[0])


def _watch_over(prepared: Prepared, trainer: Trainer, ranks: RunRanks, *, plans: bool) -> Watch:
    """Watch over a run of this plan; steps that leave out experts differ, so they say little of the host."""
    if prepared.plan.experts:
        return RoutingWatch(prepared, trainer, plans=plans)
    if prepared.run.memory.clipped is not None:
        return ClippingWatch(prepared, trainer, plans=plans)
    return HostWatch(prepared, trainer, plans=plans) if ranks.count == 1 else RankWatch(prepared, trainer, ranks)


def trainer_of(prepared: Prepared, ranks: RunRanks) -> Trainer:
    """Make the trainer of a rank of a run, with files in the run's folder."""
    run = prepared.run
    make_folder(folder := Path(run.memory.folder or run.out))
    return Trainer(
        prepared.plan,
        prepared.step.captured,
        None,
        optimizer=run.optimization.optimizer,
        folder=folder,
        threads=run.num_threads,
        program=prepared.program,
        others=prepared.step.others,
    )


@contextmanager
def _loggers(run: RunConfig, first_step: int) -> Generator[list[Logger], None, None]:
    """Open the loggers a run asks for; they are closed at the end."""
    with ExitStack() as stack:
        loggers = open_loggers(run.logging, Path(run.out), first_step=first_step, settings=run_to_dict(run))
        for logger in loggers:
            stack.callback(logger.close)
        yield loggers


def _checked(result: RunResult) -> RunResult:
    """Return the result if the run kept its promise.

    Raises:
        BudgetExceeded: it did not.
    """
    if result.peak_bytes > result.budget_bytes:
        raise BudgetExceeded(
            f"measured peak {format_bytes(result.peak_bytes)}{result.of_rank} is above the budget of "
            f"{format_bytes(result.budget_bytes)} (predicted {format_bytes(result.predicted_peak_bytes)}); "
            f"{budget_remedy(result.budget_bytes, result.predicted_peak_bytes, result.peak_bytes)}; "
            f"see {result.out}/report.html"
        )
    return result


def _result(
    prepared: Prepared, records: Sequence[Mapping[str, Any]], job: JobTimeline | None, peak_bytes: int = 0
) -> RunResult:
    """Make the result from this plan's steps; what an earlier session did under another budget is not this plan's."""
    out = Path(prepared.run.out)
    steps = of_plan(prepared.plan, records)
    seconds = [record["step_s"] for record in steps]
    steady = seconds[2:] or seconds
    largest = max(peak_bytes, *(record["memory_bytes"] for record in steps))
    fullest = nearest_its_budget(prepared, job, largest)
    return RunResult(
        out=prepared.run.out,
        losses=tuple(record["loss"] for record in records),
        step_s=statistics.median(steady),
        spread_s=max(steady) - min(steady),
        peak_bytes=fullest.peak_bytes,
        budget_bytes=fullest.budget_bytes,
        predicted_step_s=prepared.plan.step_s,
        predicted_peak_bytes=fullest.predicted_bytes,
        base_bytes=process_base_bytes(prepared.plan, steps),
        checkpoint=str(latest_checkpoint(out / NEWEST) or ""),
        validation_losses=tuple((r["step"] + 1, r["validation_loss"]) for r in records if "validation_loss" in r),
        best_checkpoint=str((prepared.run.validation and latest_checkpoint(out / BEST)) or ""),
        rank_peaks=() if job is None else tuple(Peak.of_rank(timeline) for timeline in job.ranks),
        slow_rank="" if job is None or job.slow is None else slow_words(job.slow),
    )


def _loop(
    trainer: Trainer,
    data: Dataset,
    meta: Mapping[str, Any],
    validation: _Validation | None,
    freezer: _Freezer | None,
    watch: Watch,
    loggers: Sequence[Logger],
    ranks: RunRanks,
) -> tuple[StopRequest, RankTimeline | None]:
    """Run steps until the end, or until a signal asks a rank to stop.

    Returns:
        The signal, and this rank's timeline of the run's last step; None where it was not reached.
    """
    run, total = watch.prepared.run, watch.prepared.run.optimization.steps
    if run.checkpoint.stages and (shortage := trainer.staging_shortage()):
        print(fitted(shortage), flush=True)
    mine, signal_number = None, 0.0
    with ranks.recording(Path(run.out), trainer.plan, trainer.steps, total) as (log, progress, stop):
        save = partial(_save, trainer, run, meta, log)
        saved, num_reported = trainer.steps, 0
        while trainer.steps < total and not signal_number:
            with _saved_if_it_fails(trainer, saved, save if run.checkpoint.saves and ranks.count == 1 else None):
                trainer.check_saved()
                record = _step(trainer, run, data, ranks, norms=freezer is not None and freezer.asks_norms())
                mine = trainer.rank_timeline() if trainer.steps == total else None  # an evaluation is no step
                watch.look(record["step_s"])
                excess, is_broken = trainer.excess[num_reported:], len(trainer.excess) > num_reported == 0
                record |= {"excess": excess} if excess else {}
                try:
                    if validation is not None and validation.is_due(trainer.steps):
                        record |= validation.evaluate()
                    record |= {} if freezer is None else {"frozen": freezer.frozen}
                    signal_number, is_broken, peak = trainer.largest(stop.number, is_broken, trainer.peak_bytes)
                    record["memory_bytes"] = int(peak)
                finally:
                    if log is not None:
                        log.log(record)
            _tell(record, run, loggers, progress, ranks)
            num_reported = len(trainer.excess)
            _plan_again(freezer, watch, total - trainer.steps, progress)
            if _is_due(run.checkpoint, trainer.steps) or (is_broken and run.checkpoint.saves):
                path = save(ends=bool(is_broken) or trainer.steps == total)
                saved = trainer.steps
                if is_broken:
                    progress.note(f"saved in {path}; the run goes on")
            if validation is not None and "validation_loss" in record:
                _judge(validation, record["validation_loss"], log, progress)
        if run.checkpoint.at_end and saved < trainer.steps:
            save()
        trainer.wait_saved()
    stop.number = int(signal_number)
    return stop, mine


def _check_room(prepared: Prepared, first: int) -> None:
    """Refuse to train what cannot be saved, as the disk has no room for the checkpoints that come beside those it has.

    Args:
        first: Steps that were done before.

    Raises:
        StorageError: says how much is missing; nothing was trained.
    """
    run, size = prepared.run, prepared.step.graph.saved_bytes  # whole, whatever ranks have of it
    saved_steps = [step_of(path) for path in checkpoint_folders(Path(run.out) / NEWEST)]
    bests = len(checkpoint_folders(Path(run.out) / BEST))
    most = run.most_checkpoints(first, saved_steps, has_best=bests > 0) - len(saved_steps) - bests
    missing = most * size - shutil.disk_usage(run.out).free
    if most > 0 and missing > 0:
        interval = run.checkpoint.keep_every_steps
        fewer = f"checkpoint.keep = {run.checkpoint.keep}" + (f", keep_every_steps = {interval}" if interval else "")
        raise StorageError(
            f"{run.out}: expected room for checkpoints of {format_bytes(size)}, {most} of them beside those there are, "
            f"found {format_bytes(missing)} too little; nothing was trained: free some space, choose another folder "
            f"(out), or keep fewer ({fewer})"
        )


def _plan_again(freezer: _Freezer | None, watch: Watch, steps_left: int, progress: Progress) -> None:
    """Plan again where layers froze, the host, chosen experts or clipped steps are others; shows what comes of it."""
    watched = watch.advance(steps_left)  # of the Program before layers freeze
    for words in (watched, "" if freezer is None else freezer.advance()):
        if words:
            progress.note(fitted(words))


def _judge(validation: _Validation, loss: float, log: MetricsLog | None, progress: Progress) -> None:
    """Compare a loss with the lowest, whose records are on disk before its checkpoint, and show what comes of it."""
    if log is not None:
        log.sync()
    progress.note(fitted(validation.judge(loss)))


def _save(
    trainer: Trainer, run: RunConfig, meta: Mapping[str, Any], log: MetricsLog | None, *, ends: bool = True
) -> Path:
    """Write a checkpoint, when the records of what led to it are on disk; returns its folder.

    Args:
        ends: Whether it is the last, or of a run that may not go on: it is written whole, and waited for.
    """
    if log is not None:
        log.sync()
    settings = run.checkpoint
    retention = {"keep": settings.keep, "keep_every_steps": settings.keep_every_steps}
    in_place = not ends and settings.is_in_place(trainer.steps)
    wait = ends or not settings.stages
    return trainer.save(Path(run.out) / NEWEST, meta=meta, **retention, wait=wait, in_place=in_place)


def _tell(
    record: Mapping[str, Any], run: RunConfig, loggers: Sequence[Logger], progress: Progress, ranks: RunRanks
) -> None:
    """Hand the figures of a step to loggers and to the terminal, and say what memory was not predicted."""
    step, losses = record["step"], record.get("losses", {})
    if step % run.logging.every_steps == 0 or step + 1 == run.optimization.steps or "validation_loss" in record:
        names = ("loss", "lr", "step_s", "tokens_per_s", "memory_bytes", "validation_loss")
        figures = {name: record[name] for name in names if name in record}
        figures |= {f"loss/{name}": value for name, value in losses.items()}
        for logger in loggers:
            logger.log(step, figures)
    progress.update(
        step=step + 1,
        loss=record["loss"],
        losses=losses,
        tokens_per_s=record["tokens_per_s"],
        memory_bytes=record["memory_bytes"],
    )
    for sentence in record.get("excess", ()):
        (progress.note if ranks.is_first else partial(print, f"rank {ranks.rank}:", file=sys.stderr))(sentence)


@contextmanager
def _saved_if_it_fails(trainer: Trainer, saved: int, save: Callable[[], Path] | None) -> Generator[None, None, None]:
    """Save what a run had reached before a step failed without changing anything.

    Args:
        saved: Steps that the newest checkpoint has.
        save: Writes a checkpoint; None for a run that saves none.
    """
    try:
        yield
    except LadingError as error:
        if save is not None and trainer.steps > saved and not trainer.unfinished:
            try:
                error.add_note(f"saved in {save()}; go on with --resume when the cause is mended")
            except LadingError as other:
                error.add_note(f"what the run had reached could not be saved: {other}")
        raise


def _step(trainer: Trainer, run: RunConfig, data: Dataset, ranks: RunRanks, *, norms: bool) -> dict[str, Any]:
    """Run one step at the rates of the schedule, on this rank's micro-batches; returns its figures."""
    step, chosen = trainer.steps, run.optimization
    lr, matrices = lr_at(chosen, step), chosen.matrices
    matrix_lr = None if matrices is None else lr_at(chosen, step, matrices.lr)
    first = ranks.replica * chosen.accumulation
    batches = [data.batch(step, first + micro) for micro in range(chosen.accumulation)]
    started = time.perf_counter()
    loss = trainer.step(batches, lr=lr, matrix_lr=matrix_lr, norms=norms)
    step_s = time.perf_counter() - started
    record = {"step": step, "loss": loss, "lr": lr, "step_s": step_s, "plan": trainer.plan.fingerprint}
    losses = {"losses": dict(trainer.losses)} if trainer.losses else {}
    rate = run.data.num_tokens * chosen.accumulation * ranks.replicas / step_s
    memory = {"memory_bytes": trainer.peak_bytes, "base_bytes": trainer.base_bytes}
    return {**record, **losses, "tokens_per_s": rate, **memory}


def _is_due(checkpoint: CheckpointConfig, steps: int) -> bool:
    return checkpoint.every_steps > 0 and steps % checkpoint.every_steps == 0


class _Freezer:
    """Layers of a run that freeze while it trains; when some do, the run is planned again between two steps.

    Args:
        prepared: The run as it was planned with nothing frozen.
        meta: What checkpoints of the run say of it, to which the state of the rule is added.

    Attributes:
        prepared: The run by its plan of now.

    Raises:
        ConfigError: a rule by gradients, where ranks have shards of them.
    """

    def __init__(self, prepared: Prepared, trainer: Trainer, settings: FreezeConfig, meta: dict[str, Any]) -> None:
        self.prepared, self._trainer, self._settings, self._meta = prepared, trainer, settings, meta
        layers = layers_to_freeze(prepared.run, prepared.step.initial.model)
        epochs = None if settings.schedule is None else dict(enumerate(settings.schedule))
        rule = {"epochs": epochs, "alpha": settings.alpha, "percentile": settings.percentile}
        self._rule = Freezing(prepared.step.initial.model, layers, **rule)
        layout = prepared.plan.parsed_layout
        if self._rule.needs_norms and (layout.zero or layout.tp > 1 or layout.ep > 1):
            raise ConfigError(
                f"freeze: expected ranks that have whole gradients, for a rule that compares them, found the layout "
                f"{layout}; set freeze.schedule instead, or a layout without zero, tp and ep"
            )

    @property
    def frozen(self) -> int:
        """Number of layers that are frozen."""
        return self._rule.frozen

    def asks_norms(self) -> bool:
        """Whether the next step has to take the norms of its gradients."""
        return self._rule.needs_norms and (self._trainer.steps + 1) % self._settings.every_steps == 0

    def begin(self, newest: Checkpoint | None) -> str:
        """Freeze what is frozen when a run begins or goes on, before it has values; returns this in words, or ""."""
        if newest is None or newest.step == 0:  # which was imported
            self._rule.advance(0, self._trainer)
        else:
            self._rule.load(newest.meta[FREEZING])
        step = 0 if newest is None else newest.step
        return self._planned_again(step) if self._rule.frozen else self._noted()

    def advance(self) -> str:
        """Freeze what is due after an epoch, as ``begin``; after the last step for a run that goes on from there."""
        epoch, step_in_epoch = divmod(self._trainer.steps, self._settings.every_steps)
        if step_in_epoch:
            return ""
        froze = self._rule.advance(epoch, self._trainer)
        is_last = self._trainer.steps == self.prepared.run.optimization.steps
        return self._planned_again(self._trainer.steps) if froze and not is_last else self._noted()

    def _noted(self) -> str:
        self._meta[FREEZING] = self._rule.state()
        return ""

    def _planned_again(self, step: int) -> str:
        """Plan the run with what is frozen now, within the budgets that it has, and go on by the new plan."""
        from lading.prepare import plan_run

        self._noted()
        started, before = time.perf_counter(), self.prepared
        budgets = dict(before.plan.budgets)
        memory = dataclasses.replace(before.run.memory, budget=budgets.pop("device")).with_tier_budgets(budgets)
        run = dataclasses.replace(before.run, memory=memory)
        machine = machine_of(run)
        self.prepared = plan_run(run, machine, capture_run(run, machine, before.step.initial))
        self._trainer.pause()
        self._trainer.resume(self.prepared.plan, self.prepared.step.captured, others=self.prepared.step.others)
        took = format_seconds(time.perf_counter() - started)
        times = " -> ".join(format_seconds(prepared.plan.step_s) for prepared in (before, self.prepared))
        return (
            f"{self._rule.frozen} of {len(self._settings.layers)} layers are frozen after step {step}; planned again "
            f"in {took}, step predicted {times}"
        )


class _Validation:
    """Evaluations of a run on data that it does not train on, and the checkpoint of the lowest loss.

    Args:
        data: Validation data.
        meta: What checkpoints of the run say of it.
        ranks: Ranks that evaluate together, each micro-batches of its own, as they train.

    Attributes:
        note: Sentence on a best checkpoint that no longer counts; "" without one.
    """

    def __init__(
        self, trainer: Trainer, run: RunConfig, data: Dataset, meta: Mapping[str, Any], ranks: RunRanks
    ) -> None:
        if run.validation is None:
            raise ConfigError("expected a run with validation, got one without")
        self._trainer, self._data, self._settings = trainer, data, run.validation
        self._micro, self._total, self._ranks = run.optimization.accumulation, run.optimization.steps, ranks
        count = self._settings.batches * self._micro * ranks.replicas
        measure = {"content": data.fingerprint, "micro_batches": count}
        self._measure = {"share": self._settings.share, **measure}
        self._meta, self._folder = meta, Path(run.out) / BEST
        self._lowest: tuple[float, int] | None = None
        self._waits = not run.checkpoint.stages
        self.note = self._remember() if trainer.steps else ""

    def _remember(self) -> str:
        """Take over the lowest loss of an earlier process; returns a note where it was one of other data."""
        if (path := latest_checkpoint(self._folder)) is None:
            return ""
        best = open_checkpoint(path)
        best_validation = dict(best.meta.get(VALIDATION, {}))
        loss = best_validation.pop("loss", None)
        if best_validation != self._measure:
            return f"validation is not as it was for {path}, so the next evaluation takes its place"
        self._lowest = (loss, best.step)
        return ""

    def is_due(self, steps: int) -> bool:
        """Whether an evaluation follows after so many steps."""
        return steps % self._settings.every_steps == 0 or steps == self._total

    def evaluate(self) -> dict[str, Any]:
        """Evaluate; returns the figures for metrics.jsonl: the loss, its terms where it is several, and the seconds."""
        started = time.perf_counter()
        count, total, terms = self._settings.batches, 0.0, dict[str, float]()
        for number in range(count):
            first = (number * self._ranks.replicas + self._ranks.replica) * self._micro
            total += self._trainer.evaluate([self._data.batch(0, first + micro) for micro in range(self._micro)])
            for name, value in self._trainer.losses.items():
                terms[name] = terms.get(name, 0.0) + value / count
        figures = {"validation_loss": total / count, "validation_s": time.perf_counter() - started}
        return figures | ({"validation_losses": terms} if terms else {})

    def judge(self, loss: float) -> str:
        """Say how a loss compares with those before, and keep a checkpoint of the lowest."""
        words = f"validation after step {self._trainer.steps}: loss {loss:.4f}"
        if not math.isfinite(loss):
            return words
        if self._lowest is not None and loss >= self._lowest[0]:
            return f"{words}; the lowest is {self._lowest[0]:.4f}, after step {self._lowest[1]}"
        self._lowest = (loss, self._trainer.steps)
        if not self._settings.keep_best:
            return f"{words}, the lowest so far"
        meta = {**self._meta, VALIDATION: {"loss": loss, **self._measure}}
        path = self._trainer.save(self._folder, meta=meta, keep=1, wait=self._waits)
        return f"{words}, the lowest so far; kept in {path}"


def train_plain(run: RunConfig, out: Path) -> RunResult:
    """Train a run in plain PyTorch: everything in memory, autograd, torch's optimizer. Writes ``out/plain.jsonl``.

    Matrices are moved by ``lading.optim`` where the run says so, of which Muon is ``torch.optim.Muon`` to the bit.
    """
    torch.set_num_threads(run.num_threads)
    run = sharing_batches(resolved(run), 1)
    loss_fn, data = loss_of(run.model), dataset_of(run, defer(lambda: build(run.model)).model)
    data = data.continued(from_the_beginning(run.data, run.optimization.accumulation))
    trim()
    baseline, meter = resident_bytes(), PeakMeter()
    model = built_whole(run)
    masters = MasterWeights(model)
    optimizers = _plain_optimizers(run, model, masters)
    losses: list[float] = []
    seconds: list[float] = []
    peak = 0
    with MetricsLog(out / "plain.jsonl") as log, training_progress(run.optimization.steps, 0) as progress:
        for step in range(run.optimization.steps):
            batches = [data.batch(step, micro) for micro in range(run.optimization.accumulation)]
            started = time.perf_counter()
            losses.append(plain_step(model, loss_fn, optimizers, masters, batches, run, step))
            seconds.append(time.perf_counter() - started)
            peak = max(0, meter.peak_bytes() - baseline)
            rate = run.data.num_tokens * len(batches) / seconds[-1]
            log.log({"step": step, "loss": losses[-1], "step_s": seconds[-1], "memory_bytes": peak})
            progress.update(step=step + 1, loss=losses[-1], tokens_per_s=rate, memory_bytes=peak)
    meter.close()
    steady = seconds[2:] or seconds
    return RunResult(
        out=str(out),
        losses=tuple(losses),
        step_s=statistics.median(steady),
        spread_s=max(steady) - min(steady),
        peak_bytes=peak,
        budget_bytes=0,
        predicted_step_s=0.0,
        predicted_peak_bytes=0,
    )


def _plain_optimizers(
    run: RunConfig, model: torch.nn.Module, masters: MasterWeights
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Make the optimizers that move the parameters, each with its learning rate at the peak."""
    chosen, matrices = run.optimization.optimizer, run.optimization.matrices
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    named = dict(zip(names, masters.parameters, strict=True))
    optimizers: list[tuple[torch.optim.Optimizer, float]] = []
    if matrices is not None:
        from lading.matrices import MatrixOptimizer  # who owns which matrix is planned

        captured = capture_run(run, machine_of(run)).captured
        parts = grouped(captured, matrices, name_of(chosen))[0]
        groups = [
            {"params": [(name, named.pop(name))], "parts": parts[p.tensor]}
            for p in captured.parameters
            for name in [name for name in p.names if p.tensor in parts and name in named]
        ]
        handling = How(skip_nonfinite=False)
        optimizers.append((MatrixOptimizer(groups, matrices.made(), matrices.lr, how=handling), matrices.lr))
    if named:
        optimizers.append((chosen.plain(list(named.values())), chosen.lr))
    return optimizers


def plain_step(
    model: torch.nn.Module,
    loss_fn: Any,
    optimizers: Sequence[tuple[torch.optim.Optimizer, float]],
    masters: MasterWeights,
    batches: Sequence[Any],
    run: RunConfig,
    step: int,
) -> float:
    """Run one step of the reference, as anyone would write it; returns the loss averaged over micro-batches."""
    for optimizer, peak in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(run.optimization, step, peak)
    total = 0.0
    for batch in batches:
        loss = total_of(named_losses(loss_fn(model, batch)))
        if len(batches) > 1:
            loss = loss / len(batches)
        loss.backward()
        masters.add_gradients()
        total += loss.item()
    if run.optimization.clip_norm:
        torch.nn.utils.clip_grad_norm_(masters.parameters, run.optimization.clip_norm)
    for optimizer, _ in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    masters.write_back()
    return total
