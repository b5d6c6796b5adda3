"""Training: the loop, from top to bottom.

``Trainer`` is the loop's inside for a user's own loop: it holds every value of the step where the plan wants it.
``train_run`` is the whole loop of a configured run, ``train_plain`` the same run in plain PyTorch, which is the
reference the planned run must equal to the bit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from lading.capture.initial import Deferred
from lading.capture.trace import input_leaves
from lading.checkpoint.store import TensorSource, latest_checkpoint, open_checkpoint, save_checkpoint
from lading.config import AdamW, RunConfig, lr_at, run_to_dict
from lading.errors import BudgetExceeded, ConfigError, StorageError
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.ir.timeline import Timeline
from lading.prepare import Prepared, build, loss_of, lowered, plan_run, prepare_plan
from lading.report.metrics import MetricsLog, read_metrics, truncate_after
from lading.report.progress import training_progress
from lading.runtime.data import ByteDataset
from lading.runtime.executor import Executor
from lading.runtime.resident import PeakMeter, resident_bytes, trim
from lading.summary import finish_run
from lading.units import format_bytes, format_seconds

_RNG = "torch.rng_state"


class Trainer:
    """Runs the training step of a plan; owns parameters, buffers and optimizer states until it is closed.

    Args:
        plan: From ``lading.plan``, for this ``graph``.
        graph: From ``lading.capture``.
        model: Its values are taken over now and written back by ``close``; None starts from zeros (see ``load``).
        optimizer: AdamW's numbers.
        folder: Where the swap file goes.
        threads: Compute threads; None keeps torch's setting.

    Raises:
        ConfigError: the plan was made for another graph.
        StorageError: no room in ``folder``.
    """

    def __init__(
        self,
        plan: Plan,
        graph: StepGraph,
        model: torch.nn.Module | None,
        *,
        optimizer: AdamW | None = None,
        folder: str | Path = ".",
        threads: int | None = None,
        program: Program | None = None,
    ) -> None:
        self.plan, self.optimizer = plan, optimizer or AdamW()
        self.program = program or lowered(plan, graph)
        self.steps = 0
        step_graph = self.program.graph
        self._inputs = [name for name, _ in step_graph.inputs[0]]
        self._named = {p.names[0]: step_graph.storage_of(p.tensor) for p in step_graph.parameters}
        self._named |= {name: step_graph.storage_of(t) for name, t in (*step_graph.buffers, *step_graph.states)}
        self._dtypes = {
            name: step_graph.tensors[t]
            for name, t in (
                *((p.names[0], p.tensor) for p in step_graph.parameters),
                *step_graph.buffers,
                *step_graph.states,
            )
        }
        self._model = model
        self._executor = Executor(self.program, optimizer=self.optimizer, folder=Path(folder), threads=threads)
        if model is not None:
            self._take_over(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(write_back=kind is None)

    def step(self, batches: Any, *, lr: float | None = None) -> float:
        """One optimizer step.

        Args:
            batches: The batch, or a list of micro-batches, one for each of the accumulation.
            lr: Learning rate of this step; None is the optimizer's.

        Returns:
            The loss, averaged over micro-batches.
        """
        micro = batches if isinstance(batches, list) else [batches]
        feeds = [dict(input_leaves(batch)) for batch in micro]
        losses = self._executor.step(feeds, lr=self.optimizer.lr if lr is None else lr)
        self.steps += 1
        return sum(losses)

    def timeline(self) -> Timeline:
        """What happened when in the last step."""
        return self._executor.timeline()

    @property
    def peak_bytes(self) -> int:
        """Highest resident set during any step, above what the process had before this trainer."""
        return self._executor.peak_resident_bytes

    def value(self, name: str) -> torch.Tensor:
        """A copy of a parameter, buffer or optimizer state (``"layers.0.weight.exp_avg"``)."""
        return self._executor.read_storage(self._named[name])

    def set_value(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter, buffer or optimizer state."""
        self._executor.write_storage(self._named[name], value)

    def initialize(self, initial: Deferred, seed: int) -> None:
        """Give the parameters and buffers the values that building the model with ``seed`` would."""
        initial.materialize(seed, lambda name, value: self.set_value(name, value) if name in self._named else None)
        trim()

    def save(self, folder: Path, *, meta: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint of this step: every value, the random generator's state and ``meta``."""
        state = torch.get_rng_state()
        sources: Iterator[TensorSource] = (self._source(name) for name in self._named)
        rng: TensorSource = (_RNG, "uint8", tuple(state.shape), [state.numpy().data])
        return save_checkpoint(folder, self.steps, [*sources, rng], dict(meta), keep)

    def load(self, path: Path) -> dict[str, Any]:
        """Take every value from a checkpoint; returns its meta.

        Raises:
            StorageError: the checkpoint is damaged or of another model.
        """
        checkpoint = open_checkpoint(path)
        missing = (self._named.keys() | {_RNG}) ^ checkpoint.tensors.keys()
        if missing:
            raise StorageError(f"{path}: expected a checkpoint of this model, these tensors differ: {sorted(missing)[:5]}")
        for name in self._named:
            self.set_value(name, checkpoint.read(name))
        torch.set_rng_state(checkpoint.read(_RNG))
        self.steps = checkpoint.step
        trim()
        return checkpoint.meta

    def close(self, *, write_back: bool = True) -> None:
        """Write the values back into the model and give all memory and disk space back."""
        if self._model is not None and write_back:
            with torch.no_grad():
                for name, tensor in _tensors_of(self._model):
                    if name in self._named:
                        tensor.data = self.value(name)
        self._executor.close()

    def _source(self, name: str) -> TensorSource:
        tensor = self._dtypes[name]
        return name, tensor.dtype, tensor.shape, self._executor.chunks(self._named[name])

    def _take_over(self, model: torch.nn.Module) -> None:
        """Copy the model's values and free its own memory."""
        for name, tensor in _tensors_of(model):
            if name in self._named:
                self.set_value(name, tensor)
                tensor.data = torch.empty(0, dtype=tensor.dtype)
        trim()


def _tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run did.

    Attributes:
        losses: Loss of each step, from the first step of this process.
        step_s: Median seconds of a step, the first two left out.
        spread_s: Largest minus smallest of those.
        budget_bytes: 0 where there was none (plain PyTorch).
    """

    out: str
    losses: tuple[float, ...]
    step_s: float
    spread_s: float
    peak_bytes: int
    budget_bytes: int
    predicted_step_s: float
    predicted_peak_bytes: int

    def __str__(self) -> str:
        lines = [
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} in {len(self.losses)} steps",
            f"step time {format_seconds(self.step_s)} (predicted {format_seconds(self.predicted_step_s)})",
            f"peak memory {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"(predicted {format_bytes(self.predicted_peak_bytes)})",
            f"wrote {self.out}/: metrics.jsonl, plan.json, report.html, timeline.pftrace",
        ]
        return "\n".join(lines)


def train_run(what: RunConfig | Plan, *, resume: bool = False) -> RunResult:
    """Train a run, planned first, or exactly as a plan says.

    Raises:
        BudgetExceeded: measured memory went above the budget; everything is saved and reported first.
        ConfigError: a setting, or a plan made for another model or machine.
    """
    prepared = plan_run(what) if isinstance(what, RunConfig) else prepare_plan(what)
    run = prepared.run
    out = Path(run.out)
    out.mkdir(parents=True, exist_ok=True)
    prepared.plan.save(out / "plan.json")
    data = ByteDataset(run.data, out, seed=run.seed)
    folder = Path(run.memory.folder or run.out)
    with Trainer(
        prepared.plan,
        prepared.captured,
        None,
        optimizer=run.optimization.optimizer,
        folder=folder,
        threads=run.num_threads,
        program=prepared.program,
    ) as trainer:
        _start(trainer, prepared, out, data, resume=resume)
        first = trainer.steps
        seconds = _loop(trainer, run, data, out, prepared.plan.budgets["device"])
        timeline = trainer.timeline() if seconds else None
        peak = trainer.peak_bytes
    losses = tuple(r["loss"] for r in read_metrics(out / "metrics.jsonl") if r["step"] >= first)
    if timeline is None:
        raise ConfigError(f"{out} has already reached step {run.optimization.steps}; raise optimization.steps")
    result = _result(prepared, losses, seconds, peak)
    finish_run(prepared, timeline)
    if peak > prepared.plan.budgets["device"]:
        raise BudgetExceeded(
            f"measured peak {format_bytes(peak)} is above the budget of {format_bytes(prepared.plan.budgets['device'])} "
            f"(predicted {format_bytes(prepared.program.peak_bytes)}); see {out}/report.html"
        )
    return result


def _result(prepared: Prepared, losses: tuple[float, ...], seconds: Sequence[float], peak: int) -> RunResult:
    steady = seconds[2:] or seconds
    return RunResult(
        out=prepared.run.out,
        losses=losses,
        step_s=statistics.median(steady),
        spread_s=max(steady) - min(steady),
        peak_bytes=peak,
        budget_bytes=prepared.plan.budgets["device"],
        predicted_step_s=prepared.plan.step_s,
        predicted_peak_bytes=prepared.program.peak_bytes,
    )


def _start(trainer: Trainer, prepared: Prepared, out: Path, data: ByteDataset, *, resume: bool) -> None:
    """Fresh values, or those of the newest complete checkpoint."""
    newest = latest_checkpoint(out / "checkpoints")
    if newest is not None and not resume:
        raise ConfigError(f"{out} holds checkpoints of an earlier run (newest {newest.name}); give --resume, or another out")
    if newest is None:
        trainer.initialize(prepared.initial, prepared.run.seed)
        (out / "metrics.jsonl").unlink(missing_ok=True)
        return
    meta = trainer.load(newest)
    wanted = _meta(prepared.run, data)
    differing = sorted(key for key in wanted if meta.get(key) != wanted[key])
    if differing:
        raise ConfigError(f"{newest} was saved by a run with another {', '.join(differing)}; use another out folder")
    truncate_after(out / "metrics.jsonl", trainer.steps - 1)


def _meta(run: RunConfig, data: ByteDataset) -> dict[str, Any]:
    """What must not change between a run and its resumption."""
    config = json.loads(json.dumps(run_to_dict(run)))
    fixed = {key: config[key] for key in ("model", "data", "seed", "threads")}
    return {**fixed, "optimization": {k: v for k, v in config["optimization"].items()}, "text": data.fingerprint}


def _loop(trainer: Trainer, run: RunConfig, data: ByteDataset, out: Path, budget_bytes: int) -> list[float]:
    """Steps until the end; returns the seconds of each."""
    every, seconds = run.checkpoint.every_steps, []
    tokens = run.data.batch_size * run.data.sequence_length * run.optimization.accumulation
    total = run.optimization.steps
    with ExitStack() as stack:
        log = stack.enter_context(MetricsLog(out / "metrics.jsonl"))
        progress = stack.enter_context(training_progress(total, budget_bytes, first_step=trainer.steps))
        while trainer.steps < total:
            step = trainer.steps
            batches = [data.batch(step, micro) for micro in range(run.optimization.accumulation)]
            started = time.perf_counter()
            lr = lr_at(run.optimization, step)
            loss = trainer.step(batches, lr=lr)
            seconds.append(time.perf_counter() - started)
            rate = tokens / seconds[-1]
            record = {"step": step, "loss": loss, "lr": lr, "step_s": seconds[-1]}
            log.log({**record, "tokens_per_s": rate, "memory_bytes": trainer.peak_bytes})
            progress.update(step=step + 1, loss=loss, tokens_per_s=rate, memory_bytes=trainer.peak_bytes)
            if every and trainer.steps % every == 0:
                trainer.save(out / "checkpoints", meta=_meta(run, data), keep=run.checkpoint.keep)
    return seconds


def train_plain(run: RunConfig, out: Path) -> RunResult:
    """The same run in plain PyTorch: everything in memory, autograd, fused AdamW. Writes ``plain.jsonl`` into ``out``."""
    torch.set_num_threads(run.num_threads)
    data = ByteDataset(run.data, out, seed=run.seed)
    trim()
    baseline, meter = resident_bytes(), PeakMeter()
    torch.manual_seed(run.seed)
    model, loss_fn = build(run.model), loss_of(run.model)
    chosen = run.optimization.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=chosen.lr,
        betas=(chosen.beta1, chosen.beta2),
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=True,
    )
    losses: list[float] = []
    seconds: list[float] = []
    with MetricsLog(out / "plain.jsonl") as log, training_progress(run.optimization.steps, 1 << 60) as progress:
        for step in range(run.optimization.steps):
            batches = [data.batch(step, micro) for micro in range(run.optimization.accumulation)]
            started = time.perf_counter()
            losses.append(plain_step(model, loss_fn, optimizer, batches, run, step))
            seconds.append(time.perf_counter() - started)
            peak = max(0, meter.peak_bytes() - baseline)
            rate = run.data.batch_size * run.data.sequence_length * len(batches) / seconds[-1]
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


def plain_step(
    model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any], run: RunConfig, step: int
) -> float:
    """One step of the reference, as anyone would write it; returns the loss averaged over micro-batches."""
    for group in optimizer.param_groups:
        group["lr"] = lr_at(run.optimization, step)
    total = 0.0
    for batch in batches:
        loss = loss_fn(model, batch)
        if len(batches) > 1:
            loss = loss / len(batches)
        loss.backward()
        total += loss.item()
    if run.optimization.clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimization.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total
