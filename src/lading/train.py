"""Training: the loop, from top to bottom.

``train_run`` is the loop of a configured run around ``lading.trainer.Trainer``; ``train_plain`` the same run in plain
PyTorch, the reference that the planned run must equal to the bit.
"""

from __future__ import annotations

import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lading.alone import check_only_rank
from lading.catalog.models import resolved
from lading.checkpoint.lock import run_lock
from lading.checkpoint.store import Checkpoint, latest_checkpoint, open_checkpoint
from lading.config import CheckpointConfig, Optimization, RunConfig, lr_at, run_to_dict
from lading.errors import BudgetExceeded, BudgetWarning, ConfigError, LadingError
from lading.files import remove_file, rename_file
from lading.hosts import machine_of
from lading.ir.plan import Plan
from lading.ir.timeline import Timeline
from lading.ir.update_ops import grouped
from lading.optim.master import MasterWeights
from lading.optim.registry import name_of
from lading.report.lines import fitted
from lading.report.metrics import MetricsLog, read_steps, truncate_after
from lading.report.progress import planning_progress, training_progress
from lading.report.promises import budget_remedy, container_words
from lading.run import (
    Prepared,
    build,
    built_whole,
    capture_run,
    dataset_of,
    initial_values,
    loss_of,
    prepare_plan,
)
from lading.runtime.cuda import check_available
from lading.runtime.data import Dataset
from lading.runtime.interrupts import StopRequest
from lading.runtime.loggers import Logger, check_logging, open_loggers
from lading.runtime.members import How
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.summary import finish_run, of_plan, process_base_bytes
from lading.tracing.initial import defer
from lading.tracing.loss_terms import named_losses, total_of
from lading.trainer import Trainer
from lading.units import format_bytes, format_seconds

#: Settings with which a run may go on otherwise than it began, beside numbers of its optimizer.
_CHANGEABLE = frozenset(
    f"optimization.{key}"
    for key in ("steps", "schedule", "warmup_steps", "clip_norm", "accumulation", "compile", "matrices.lr")
)


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

    def __str__(self) -> str:
        count = "one step" if len(self.losses) == 1 else f"{len(self.losses)} steps"
        lines = [
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {count}",
            f"step time {format_seconds(self.step_s)} (predicted {format_seconds(self.predicted_step_s)})",
            f"peak memory {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(predicted {format_bytes(self.predicted_peak_bytes)})",
            *([container_words(self.base_bytes, self.peak_bytes, self.budget_bytes)] if self.base_bytes else []),
            f"wrote {self.out}/: metrics.jsonl, plan.json, report.html, timeline.pftrace",
        ]
        if self.checkpoint:
            lines.append(f"trained values in {self.checkpoint}")
            lines.append(f"lading export {shlex.quote(self.out)} --to FOLDER writes them as safetensors")
        else:
            lines.append("the trained values were not saved: checkpoint.at_end is false")
        return "\n".join(lines)


def train_run(what: RunConfig | Plan, *, resume: bool = False, cache: bool = False) -> RunResult:
    """Train a run, planned first, or exactly as a plan says. A run that had ended already is reported again.

    SIGINT and SIGTERM end the run when the step under way has ended and is saved; a second one at once.

    Args:
        resume: Go on from the newest complete checkpoint. How parameters move may have changed since (more steps,
            another learning rate), which is said; a model, its data or an optimizer may not.
        cache: Whether the plan may come from the user's cache folder, and is kept there (``planner.cache``).

    Raises:
        BudgetExceeded: measured memory went above the budget; everything is saved and reported first.
        ConfigError: a setting, a plan made for another model or machine, an out folder of another run, or a job of
            several ranks.
        StorageError: another run is using the folder, or the disk is full; checkpoints saved before stay whole.
    """
    check_only_rank()
    if isinstance(what, RunConfig):
        what = resolved(what)
        check_logging(what.logging)
        _newest(what, Path(what.out), None, resume=resume)  # refuses before it plans; asked again below
    prepared = _planned(what, cache=cache) if isinstance(what, RunConfig) else prepare_plan(what, to_run=True)
    run, out = prepared.run, Path(prepared.run.out)
    check_available(prepared.plan.request.machine_table["device"]["kind"])
    with run_lock(out):
        data = dataset_of(run, prepared.step.initial.model)
        if (note := _short_of_peak(run.optimization)) is not None:
            print(note, flush=True)
        if run.data.kind == "random":
            print("the data are random numbers: the loss means nothing, times and memory do", flush=True)
        newest = _newest(run, out, data, resume=resume)
        if resume:
            print(fitted(_resuming(run, newest)), flush=True)
        prepared.plan.save(out / "plan.json")
        if newest is not None and newest.step >= run.optimization.steps:
            finish_run(prepared, None)
            return _checked(_result(prepared, read_steps(out / "metrics.jsonl"), checkpoint=newest.path))
        first, timeline, peak = _trained(prepared, data, newest)
        finish_run(prepared, timeline)
        records = [record for record in read_steps(out / "metrics.jsonl") if record["step"] >= first]
    return _checked(_result(prepared, records, peak, latest_checkpoint(out / "checkpoints")))


def _planned(run: RunConfig, *, cache: bool) -> Prepared:
    from lading.prepare import plan_run  # a saved plan needs no planner

    with planning_progress() as progress:
        return plan_run(run, cache=cache, progress=progress)


def _short_of_peak(optimization: Optimization) -> str | None:
    """Note that a run ends within its warm-up; None for any other run."""
    steps, warmup = optimization.steps, optimization.warmup_steps
    if steps >= warmup:
        return None
    last = lr_at(optimization, steps - 1)
    return (
        f"the run ends within its warm-up, at step {steps} of {warmup}: the learning rate\n"
        f"rises to {last:g} of {optimization.optimizer.lr:g}; optimization.warmup_steps shortens it"
    )


def _trained(prepared: Prepared, data: Dataset, newest: Checkpoint | None) -> tuple[int, Timeline, int]:
    """Train to the last step; returns the first one, the Timeline of the last, and the peak bytes, saving included."""
    run, out = prepared.run, Path(prepared.run.out)
    # Loggers first: what they import does not count as memory of the run.
    with _loggers(run, newest.step if newest else 0) as loggers, _trainer(prepared) as trainer:
        if newest is None:
            for note in trainer.initialize(partial(initial_values, run, prepared.step.initial)):
                print(note, flush=True)
            if (out / "metrics.jsonl").is_file():  # a run that saved nothing to go on from
                rename_file(out / "metrics.jsonl", out / "metrics.before.jsonl")
            remove_file(out / "measured.json")
        else:
            trainer.load(newest.path)
            truncate_after(out / "metrics.jsonl", trainer.steps - 1)
        first = trainer.steps
        try:
            stop = _loop(trainer, run, data, out, prepared.plan.budgets["device"], loggers)
        except (KeyboardInterrupt, SystemExit):
            print(fitted(f"stopped in step {trainer.steps + 1}; {_going_on(out)}"), flush=True)
            raise
        if stop.number and trainer.steps < run.optimization.steps:
            ended = f"stopped after step {trainer.steps} of {run.optimization.steps}"
            print(fitted(f"{ended}; {_going_on(out)}"), flush=True)
            stop.deliver()
        return first, trainer.timeline(), trainer.peak_bytes


def _going_on(out: Path) -> str:
    """Say how to go on with a run that was stopped."""
    newest = latest_checkpoint(out / "checkpoints")
    if newest is None:
        return "nothing is saved"
    return f"saved in {newest}\ngo on with: lading train --plan {shlex.quote(str(out / 'plan.json'))} --resume"


def _trainer(prepared: Prepared) -> Trainer:
    run = prepared.run
    return Trainer(
        prepared.plan,
        prepared.step.captured,
        None,
        optimizer=run.optimization.optimizer,
        folder=run.memory.folder or run.out,
        threads=run.num_threads,
        program=prepared.program,
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
            f"measured peak {format_bytes(result.peak_bytes)} is above the budget of "
            f"{format_bytes(result.budget_bytes)} (predicted {format_bytes(result.predicted_peak_bytes)}); "
            f"{budget_remedy(result.budget_bytes, result.predicted_peak_bytes, result.peak_bytes)}; "
            f"see {result.out}/report.html"
        )
    return result


def _result(
    prepared: Prepared, records: Sequence[Mapping[str, Any]], peak_bytes: int = 0, checkpoint: Path | None = None
) -> RunResult:
    """Make the result from this plan's steps; what an earlier session did under another budget is not this plan's."""
    steps = of_plan(prepared.plan, records)
    seconds = [record["step_s"] for record in steps]
    steady = seconds[2:] or seconds
    return RunResult(
        out=prepared.run.out,
        losses=tuple(record["loss"] for record in records),
        step_s=statistics.median(steady),
        spread_s=max(steady) - min(steady),
        peak_bytes=max(peak_bytes, *(record["memory_bytes"] for record in steps)),
        budget_bytes=prepared.plan.budgets["device"],
        predicted_step_s=prepared.plan.step_s,
        predicted_peak_bytes=prepared.program.predicted_bytes,
        base_bytes=process_base_bytes(prepared.plan, steps),
        checkpoint=str(checkpoint or ""),
    )


def _newest(run: RunConfig, out: Path, data: Dataset | None, *, resume: bool) -> Checkpoint | None:
    """Checkpoint to go on from; None starts afresh. Without ``data`` it is not compared."""
    path = latest_checkpoint(out / "checkpoints")
    if path is None:
        return None
    if not resume:
        raise ConfigError(
            f"{out} holds checkpoints of an earlier run (newest {path.name}); give --resume, or another out"
        )
    checkpoint = open_checkpoint(path)
    changed = [text for key, text in _changes(run, checkpoint, data).items() if not _may_change(key)]
    if changed:
        raise ConfigError(f"{path} was saved with another {', '.join(changed)}; set it back, or use another out folder")
    return checkpoint


def _changes(run: RunConfig, checkpoint: Checkpoint, data: Dataset | None) -> dict[str, str]:
    """Settings that are not as when the checkpoint was saved, by dotted key, in words."""
    now, before = _meta(run, data), checkpoint.meta
    keys = (now.keys() | before.keys()) - (set[str]() if data is not None else {"data.source"})
    return {k: f"{k} (was {before.get(k)!r}, is {now.get(k)!r})" for k in sorted(keys) if before.get(k) != now.get(k)}


def _may_change(key: str) -> bool:
    """Whether a run may go on with another value: of how parameters move, but not of which states they have."""
    is_number = key.startswith("optimization.optimizer.") and key != "optimization.optimizer.rule"
    return key in _CHANGEABLE or is_number


def _resuming(run: RunConfig, newest: Checkpoint | None) -> str:
    """Say from where a run goes on, and with which settings changed."""
    if newest is None:
        return f"no checkpoint in {run.out}: starting from the beginning"
    steps = run.optimization.steps
    if newest.step >= steps:
        return f"the run had ended after step {newest.step}; a larger optimization.steps than {steps} goes on"
    changes = _changes(run, newest, None)
    said = f", with another {', '.join(changes.values())}" if changes else ""
    return f"going on after step {newest.step} of {steps}, from {newest.path}{said}"


def _meta(run: RunConfig, data: Dataset | None) -> dict[str, Any]:
    """Everything that the losses of a run depend on, by dotted key."""
    config = run_to_dict(run)
    settings = _flat({key: config[key] for key in ("model", "data", "optimization", "seed")})
    source = f"content {data.fingerprint}" if data is not None else ""
    return {**settings, "data.source": source, "threads": run.num_threads}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _loop(
    trainer: Trainer, run: RunConfig, data: Dataset, out: Path, budget_bytes: int, loggers: Sequence[Logger]
) -> StopRequest:
    """Run steps until the end, or until a signal asks to stop, which is returned."""
    tokens = run.data.num_tokens * run.optimization.accumulation
    total = run.optimization.steps
    save = partial(trainer.save, out / "checkpoints", meta=_meta(run, data), keep=run.checkpoint.keep)
    with ExitStack() as stack:
        log = stack.enter_context(MetricsLog(out / "metrics.jsonl"))
        progress = stack.enter_context(training_progress(total, budget_bytes, first_step=trainer.steps))
        stop = stack.enter_context(StopRequest())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", BudgetWarning)  # said by progress
        saved, told = trainer.steps, 0
        while trainer.steps < total and not stop.number:
            step = trainer.steps
            try:
                batches = [data.batch(step, micro) for micro in range(run.optimization.accumulation)]
                started = time.perf_counter()
                loss, lr = _step(trainer, run, batches)
            except LadingError as error:
                if run.checkpoint.saves and trainer.steps > saved and not trainer.unfinished:
                    _save_after(error, save)
                raise
            step_s = time.perf_counter() - started
            rate = tokens / step_s
            record = {"step": step, "loss": loss, "lr": lr, "step_s": step_s, "plan": trainer.plan.fingerprint}
            losses = {"losses": dict(trainer.losses)} if trainer.losses else {}
            memory_bytes = trainer.peak_bytes
            memory: dict[str, Any] = {"memory_bytes": memory_bytes, "base_bytes": trainer.base_bytes}
            if trainer.excess[told:]:
                memory["excess"] = trainer.excess[told:]
            log.log({**record, **losses, "tokens_per_s": rate, **memory})
            if step % run.logging.every_steps == 0 or step + 1 == total:
                figures = {"loss": loss, "lr": lr, "step_s": step_s, "tokens_per_s": rate}
                figures |= {f"loss/{name}": value for name, value in trainer.losses.items()}
                for logger in loggers:
                    logger.log(step, {**figures, "memory_bytes": memory_bytes})
            progress.update(
                step=step + 1, loss=loss, losses=trainer.losses, tokens_per_s=rate, memory_bytes=memory_bytes
            )
            is_broken = len(trainer.excess) > told == 0
            for sentence in trainer.excess[told:]:
                progress.note(sentence)
            told = len(trainer.excess)
            if _is_due(run.checkpoint, step + 1) or (is_broken and run.checkpoint.saves):
                path = save()
                saved = step + 1
                if is_broken:
                    progress.note(f"saved in {path}; the run goes on")
        if run.checkpoint.at_end and saved < trainer.steps:
            save()
    return stop


def _step(trainer: Trainer, run: RunConfig, batches: list[Any]) -> tuple[float, float]:
    """Run one step at the rates of the schedule; returns the loss and the optimizer's rate."""
    lr, matrices = lr_at(run.optimization, trainer.steps), run.optimization.matrices
    matrix_lr = None if matrices is None else lr_at(run.optimization, trainer.steps, matrices.lr)
    return trainer.step(batches, lr=lr, matrix_lr=matrix_lr), lr


def _is_due(checkpoint: CheckpointConfig, steps: int) -> bool:
    return checkpoint.every_steps > 0 and steps % checkpoint.every_steps == 0


def _save_after(error: LadingError, save: Callable[[], Path]) -> None:
    """Save what a run had reached before a step failed without changing anything."""
    try:
        error.add_note(f"saved in {save()}; go on with --resume when the cause is mended")
    except LadingError as other:
        error.add_note(f"what the run had reached could not be saved: {other}")


def train_plain(run: RunConfig, out: Path) -> RunResult:
    """Train a run in plain PyTorch: everything in memory, autograd, torch's optimizer. Writes ``out/plain.jsonl``.

    Matrices are moved by ``lading.optim`` where the run says so, of which Muon is ``torch.optim.Muon`` to the bit.
    """
    torch.set_num_threads(run.num_threads)
    run = resolved(run)
    loss_fn, data = loss_of(run.model), dataset_of(run, defer(lambda: build(run.model)).model)
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
        how = How(skip_nonfinite=False)
        optimizers.append((MatrixOptimizer(groups, matrices.made(), matrices.lr, how=how), matrices.lr))
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
