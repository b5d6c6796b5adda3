"""Trainer: runs a planned step inside a user's own loop, and holds every value of the step where the plan wants it."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from lading.alone import check_only_rank
from lading.captures import (
    Loss,
    captured_step,
    checked_model,
    digest_of,
    in_folders_of_rank,
    join,
    left_if_it_fails,
    of_stages,
    of_this_rank,
    step_for,
    step_rates,
)
from lading.checkpoint.store import Checkpoint, read_checkpoint
from lading.errors import BudgetWarning, ConfigError, StorageError
from lading.ir.graph import StepGraph, check_captures
from lading.ir.job_timeline import JobTimeline, RankTimeline
from lading.ir.plan import Plan, PlanKind, plan_for
from lading.ir.program import Program
from lading.ir.timeline import Timeline
from lading.ir.update_ops import rule_of
from lading.memory.restore import planned_optimizer, programs_of, smaller_program
from lading.optim.registry import name_of
from lading.optim.rule import ParameterRule
from lading.optim.torch_update import checked_rule
from lading.runtime.binding import checked_batches
from lading.runtime.carried import CarriedValues, folder_beside
from lading.runtime.cuda import check_available, device_of, generator_state, set_generator_state
from lading.runtime.custody import Custody, FreedBytes, give_values_back
from lading.runtime.device import DeviceDriver
from lading.runtime.draws import Draws
from lading.runtime.executor import Executor
from lading.runtime.host import check_host
from lading.runtime.interrupts import HeldInterrupts
from lading.runtime.measuring import StepNotes
from lading.runtime.named import (
    NamedValues,
    StateDict,
    check_numbers,
    check_saved,
    first_few,
    state_keys,
    tensors_of,
)
from lading.runtime.parameter_groups import GROUPS, ParameterGroups, check_given
from lading.runtime.resident import trim
from lading.runtime.shard_reads import ReadableValue
from lading.runtime.update_kernels import check_planned
from lading.runtime.value_layout import values_here, values_of
from lading.saved_values import Snapshot
from lading.saving import Saves
from lading.saving_in_place import check_in_place
from lading.tracing.side_effects import as_written
from lading.units import format_bytes

#: What a checkpoint has beside values: the random generator's state, and the names of frozen parameters as text.
_RNG, _FROZEN = "torch.rng_state", "lading.frozen"


class Trainer:
    """Runs the training step of a plan; owns parameters, buffers and optimizer states until it is closed.

    Leaving the ``with`` block writes the values of the last whole step back into the model, whatever ended the block;
    so does the end of the trainer or of the process without one. Until then the model refuses to be used, copied or
    saved: ``value``, ``state_dict`` and ``save`` read the values where they are.

    A step that fails before it has changed a parameter has not happened: the next one may be run. Ctrl-C waits for the
    end of the step, a second one for that of its operations under way. Where some parameters are of the step that
    failed and others of the one before, the error says so, ``unfinished`` which, and only ``load`` helps.

    Args:
        plan: Plan from ``lading.plan``, for this ``graph``; or the path of one that was saved.
        graph: Graph from ``lading.capture``.
        model: Model whose values are taken over now and written back by ``close``; None starts from zeros.
        optimizer: The rule that the plan was made for, with the numbers that count now; None takes the plan's. Or the
            optimizer of torch that it was made for: each step takes the numbers that its parameter groups have then,
            its states are taken over and given back as the model's values are.
        folder: Folder for the swap file.
        threads: Compute threads; None keeps torch's setting.
        device: Driver of the device to run on, for this trainer alone; None is the one that the plan was made for.
        independent: Train for oneself where the job has several ranks, as in a sweep: nothing is reduced between them.
        others: Captures of further steps over the same values, as ``lading.plan`` was given them: an evaluation,
            another loss, a batch with a mask. A batch runs by the first capture that takes batches like it.
        shapes: Captures of the same steps over smaller batches (a short last batch, shorter sequences): they run by the
            same plans, in the same memory. A plan is for the largest.
        program: The plan's Program, where it was restored and verified already (``lading.memory.restore``).

    Attributes:
        losses: Terms of the last step's loss, where it is several, and its metrics: the value of each by name,
            averaged over micro-batches.
        outputs: Tensors with dims that the last step's loss function returned beside the loss, by name, of this rank's
            batch; of several micro-batches a list of each. They are yours to keep or change.
        gradient_norm: Norm of all gradients of the last step together, before they were clipped, as
            ``torch.nn.utils.clip_grad_norm_`` returns it; None without ``clip_norm``, and after an evaluation.
        experts: Counts of what routers chose by this plan; None where it was not asked to leave out ``experts``.
        speculation: Counts steps that were clipped and run twice (``again``); None of a plan whose updates all wait.
        excess: Memory that was not predicted, a sentence a step; empty while the budget is kept.

    Raises:
        ConfigError: the job has several ranks; the plan was made for another graph, its Program is not safe to run, or
            ``model`` is not the one that was captured.
        StorageError: no room in ``folder``.
    """

    def __init__(  # noqa: PLR0913  the public entry spells out all it takes
        self,
        plan: Plan | Path | str,
        graph: StepGraph,
        model: torch.nn.Module | None,
        *,
        optimizer: ParameterRule | torch.optim.Optimizer | None = None,
        folder: str | Path = ".",
        threads: int | None = None,
        device: DeviceDriver | None = None,
        program: Program | None = None,
        independent: bool = False,
        others: Sequence[StepGraph] = (),
        shapes: Sequence[StepGraph] = (),
    ) -> None:
        self._model = None if model is None else as_written(model)
        self._settings = (optimizer, Path(folder), threads, device, independent)
        self.steps = 0
        self.losses: dict[str, float] = {}
        self.outputs: dict[str, Any] = {}
        self.gradient_norm: float | None = None
        self.excess: list[str] = []
        self._given = ""  # hash of the values that were set since the model's, or a checkpoint's, and in which order
        self._half_loaded = ""  # what a load that ended half-way was to say
        self._saves = Saves()
        self._paused: CarriedValues | None = None
        self._lock = threading.RLock()
        self._begin(plan, graph, others, shapes, program)

    def _begin(
        self,
        plan: Plan | Path | str,
        graph: StepGraph,
        others: Sequence[StepGraph],
        shapes: Sequence[StepGraph],
        program: Program | None = None,
    ) -> None:
        """Take the model's values over and be ready for steps by a plan; the arguments are those of the class."""
        optimizer, *_, independent = self._settings
        full_plan = plan_for("lading.Trainer", plan, PlanKind.RUN)
        if full_plan.ranks == 1 and not independent:
            check_only_rank()
        plan = of_this_rank(full_plan)
        check_captures(graph, others=others, shapes=shapes)
        planned = planned_optimizer(plan)
        stock = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self.optimizer = planned if optimizer is None else checked_rule(optimizer)
        check_available(plan.request.machine_table["device"]["kind"])
        check_host(plan.request.host_id)
        self.plan = plan
        programs = programs_of(plan, graph, others, program)
        if any(isinstance(rule_of(op), ParameterRule) for step_program in programs for op in step_program.graph.ops):
            check_planned(planned, self.optimizer)
        self._random = any(op.random for captured in (graph, *others, *shapes) for op in captured.ops)
        values, stages = of_stages(full_plan, graph, plan.choices.rank) or (values_of(programs[0].graph), [])
        if self._paused is not None:
            self._paused.check(values)
        self._first_name = {alias: p.names[0] for p in graph.parameters for alias in p.names}
        self._closed = False
        model = None if self._model is None else checked_model(self._model, graph)
        self._frozen = [p.names[0] for p in graph.parameters if p.gradient is None]
        self._trained = [p.names[0] for p in graph.parameters if p.gradient is not None]
        self._keys = state_keys(model, [name for name, _ in graph.buffers], self._first_name)
        check_given(stock, self.optimizer)
        self._groups = stock and ParameterGroups(stock, self.optimizer, model, [p.graph for p in programs], stages)
        self._replicas = join(full_plan, programs, self.optimizer, model, self._groups) if full_plan.ranks > 1 else None
        self.program = (programs := in_folders_of_rank(programs, self._settings[1], self._replicas))[0]
        self._notes = StepNotes(self._replicas)
        values = values_here(values, self._replicas)
        with left_if_it_fails(self._replicas):
            self._start_executor(programs, (graph, *others), shapes, model)
        self._values = NamedValues(values, self._first_name, self.program.graph, self._executor, self._replicas)
        self._kind, self._custody = self._executor.kind, Custody()
        self._give_back_at_the_end()
        try:
            self._take_over(model)
        except BaseException:
            self.close()
            raise

    def _start_executor(
        self,
        programs: Sequence[Program],
        captures: Sequence[StepGraph],
        shapes: Sequence[StepGraph],
        model: torch.nn.Module | None,
    ) -> None:
        """Bind the Programs of a plan's captures, and of ``shapes``, to one executor, and know the batches of each."""
        _, folder, threads, device, _ = self._settings
        smaller = [smaller_program(self.plan, programs, captured, captures[1:]) for captured in shapes]
        runs = zip((*programs, *(shape_program for shape_program, _ in smaller)), (*captures, *shapes), strict=True)
        self._steps = [captured_step(n, captured, program, model) for n, (program, captured) in enumerate(runs)]
        _ = self._steps[0].watch
        self._executor = Executor(
            self.program,
            optimizer=self.optimizer,
            folder=folder,
            threads=threads,
            device=device or device_of(self.plan.request.machine_table["device"]["kind"]),
            fuse=self.plan.compiled,
            replicas=self._replicas,
            others=programs[1:],
            draws=[self._draws(capture) for capture in captures],
            experts=self.plan.host_tokens or self.plan.experts,
        )
        self.experts = None if self._executor.experts is None else self._executor.experts.counts
        self.speculation = self._executor.speculation
        for (shape_program, of), captured in zip(smaller, shapes, strict=True):
            self._executor.add_shape(shape_program, of, self._draws(captured))

    def __repr__(self) -> str:
        return f"Trainer({'closed' if self._closed else f'{self.steps} steps done'}, of {self.plan!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._replicas is not None:
            self._replicas.abandon(error)
        try:
            self._saves.close()
        except StorageError as other:
            if error is None:
                self.close()
                raise
            error.add_note(f"{other}")
        self.close()

    def step(
        self,
        batches: Any,
        *,
        loss: Loss | None = None,
        lr: float | None = None,
        matrix_lr: float | None = None,
        norms: bool = False,
    ) -> float:
        """Run one optimizer step.

        Args:
            batches: The batch, or a list of micro-batches, one for each of the accumulation. A batch may itself be a
                list, as a DataLoader makes it.
            loss: The function that was captured, where several were with batches alike; None takes the first.
            lr, matrix_lr: Learning rates of this step, by the optimizer and by a rule for matrices; None is their own.
            norms: Take the norms of this step's gradients, for ``gradient_norms``.

        Returns:
            The loss, averaged over micro-batches; where it is several, their sum. See ``losses``, ``outputs`` and
            ``gradient_norm`` for what else comes out.

        Raises:
            ConfigError: not the batch that was captured, or one of two rates, and nothing has run; or an earlier step
                or load left values of two steps.
            StorageError, ProgramError: the step failed half-way; a note of the error says what the values are now.
        """
        feeds, shape = self._fed(batches, [n for n, captured in enumerate(self._steps) if captured.trains], loss)
        rates = step_rates(self.plan, self.optimizer, self._groups is not None, lr, matrix_lr)
        with self._lock, HeldInterrupts(self._executor.stop):
            self._notes.came_s = time.perf_counter()
            rules = {} if self._groups is None else self._groups.rules()
            numbers = "" if self._groups is None else repr(self._groups.numbers())
            self._meet(
                f"run step {self.steps + 1}", feeds, lr=rates[0], matrix_lr=rates[1],
                **{"numbers of the optimizer's groups": numbers}, **self._compared(shape),
            )  # fmt: skip
            before, state = self._executor.completed, generator_state(self._kind) if self._random else None
            try:
                losses = self._executor.step(
                    feeds, lr=rates[0], matrix_lr=rates[1], rules=rules, shape=shape, norms=norms
                )
            except BaseException as error:
                if self._executor.completed == before:
                    self._undo(error, state)
                raise
            finally:
                self.steps += self._executor.completed - before
        self._tell_excess()
        self._notes.stepped(self._executor)
        if self._groups is not None:
            self._groups.stepped()
        self.gradient_norm = self._executor.gradient_norm
        return self._told(losses, shape)

    def _draws(self, captured: StepGraph) -> Draws | None:
        """Random numbers of a captured step that are this rank's; None where it draws none, or one process does."""
        if self._replicas is None or not any(op.random for op in captured.ops):
            return None
        layout, count = self.plan.parsed_layout, captured.accumulation
        return Draws(captured, layout.replica(self._replicas.rank) * count, layout.dp * count)

    def _compared(self, shape: int) -> dict[str, float | str]:
        """Facts that ranks compare before they run a batch: by which capture, and from which random numbers on."""
        facts: dict[str, float | str] = {"capture of the batch (graph, others, shapes, counted from 0)": shape}
        if self._random and self._replicas is not None:
            advice = "call torch.manual_seed alike on all, and draw what is to differ from a torch.Generator"
            facts[f"random state ({advice})"] = f"{zlib.crc32(generator_state(self._kind).numpy().data)}"
        return facts

    def _told(self, losses: Sequence[float], shape: int) -> float:
        step = self._steps[shape]
        graph, outputs = step.program.graph, self._executor.take_outputs()
        rows = {name: outputs[index :: len(step.outputs)] for index, name in enumerate(step.outputs) if outputs}
        self.outputs = {name: row if len(row) > 1 else row[0] for name, row in rows.items()}
        names, count = [name for name in graph.loss_names if name not in step.outputs], len(graph.inputs)
        if self._replicas is not None:  # of a pipeline, the last stage has them
            totals = self._replicas.sum(losses or [0.0] * count * len(names))
            layout = self.plan.parsed_layout  # ranks along "cp" and "tp" have the same
            losses = [total / (layout.dp * layout.cp * layout.tp) for total in totals]
        self.losses = {name: sum(losses[index :: len(names)]) / count for index, name in enumerate(names) if index}
        return sum(losses[:: len(names)])

    def gradient_norms(self, order: Literal[1, 2] = 2) -> dict[str, float]:
        """Norms of the gradients of the last step by parameter, as its update saw them: averaged, and clipped.

        All ranks call this.

        Args:
            order: 1 for the sum of absolute values, 2 for the root of the sum of squares.

        Raises:
            ConfigError: the last step was not asked for ``norms``, or ranks have shards of gradients.
        """
        self._check_whole()
        self._values.check_whole_gradients(self._trained)
        self._meet("read norms of gradients")
        alike = self.plan.ranks // self.plan.parsed_layout.pp
        return self._values.gradient_norms(self._trained, order, alike)

    def evaluate(self, batches: Any, *, loss: Loss | None = None) -> float:
        """Compute the loss of a batch, or of micro-batches, and change no value; ``losses`` has its terms.

        A capture with ``evaluation=True`` runs as the model does in ``eval()`` mode. Without one, forward and loss of
        a training step run, where they are the same.

        Args:
            batches: As ``step``.
            loss: As ``step``.

        Raises:
            ConfigError: as ``step``; or there is no such capture, and the forward draws random numbers or changes
                buffers, as in training only.
            StorageError, ProgramError: as ``step``.
        """
        numbers = [n for n, captured in enumerate(self._steps) if not captured.trains] or [*range(len(self._steps))]
        feeds, shape = self._fed(batches, numbers, loss)
        if self._steps[shape].trains and (op := self._steps[shape].program.graph.training_only()) is not None:
            raise ConfigError(
                f"evaluate: expected a forward without dropout and running statistics, found {op.name} in "
                f"{op.module or 'the loss'}; give lading.plan and the Trainer a capture of the evaluation: "
                "others=[lading.capture(model, batch, loss, evaluation=True)]"
            )
        with self._lock, HeldInterrupts(self._executor.stop):
            self._meet(f"evaluate after step {self.steps}", feeds, **self._compared(shape))
            losses = self._executor.forward(feeds, shape=shape)
        return self._told(losses, shape)

    def largest(self, *values: float) -> list[float]:
        """Largest of numbers over all ranks of a job, which all call this; alone, the numbers themselves.

        For what ranks are to decide alike, such as whether one of them was asked to stop.

        Raises:
            StorageError: another rank is gone or late; says which.
        """
        return list(values) if self._replicas is None else self._replicas.largest(values)

    def _meet(
        self, doing: str, feeds: Sequence[Mapping[str, torch.Tensor]] | None = None, **facts: float | str
    ) -> None:
        """Wait until all ranks come to do the same with the same numbers; alone, do nothing.

        Args:
            feeds: Micro-batches, which are to be the same on all ranks of a replica.
        """
        if self._replicas is None:
            return
        of_replica: dict[str, float] = {}
        if feeds is not None and self.plan.ranks > self.plan.replicas:
            of_replica["batches"] = digest_of(feeds)
        now = {"number of steps done": self.steps, "values set (by load, set_value, initialize)": self._given}
        self._replicas.meet(doing, {**facts, **now}, of_replica)

    def _fed(
        self, batches: Any, numbers: Sequence[int], loss: Loss | None
    ) -> tuple[list[dict[str, torch.Tensor]], int]:
        """Tensors of each micro-batch by name, and the number of the capture that takes them; ends the last results.

        Args:
            numbers: Captures to choose from.

        Raises:
            ConfigError: the trainer cannot make a step, or something is not as it was captured.
        """
        step = step_for(batches, [self._steps[number] for number in numbers], loss)
        self._check_whole()
        self.outputs, self.gradient_norm = {}, None
        micro, feeds = step.fed(batches)
        step.watch.check(micro, [name for name, _ in step.program.graph.inputs[0]])
        if self._replicas is not None:  # before the others come to this step: they wait for the next try
            checked_batches(step.program, feeds)
        return feeds, step.number

    def _tell_excess(self) -> None:
        """Warn of a broken budget at the step that broke it, and at the next one of what had not been predicted."""
        beside = self._executor.beside_bytes
        budget, peak = self.plan.budgets["device"], self._executor.step_peak_bytes + beside
        if len(self.excess) > 1 or (peak <= budget and not self.excess):
            return
        cause = self._executor.excess_cause()
        if self.excess and not cause:
            return
        text = (
            f"step {self.steps} took {format_bytes(peak)} of memory, above the budget of {format_bytes(budget)} "
            f"(predicted {format_bytes(self.program.predicted_bytes)})"
        )
        if beside:  # other processes' too, where nvidia-smi does not list them
            text += f"; {format_bytes(beside)} beside tensors ({format_bytes(self.program.overhead_bytes)} predicted)"
        self.excess.append(f"what was not predicted: {cause}" if self.excess else text)
        warnings.warn(self.excess[-1], BudgetWarning, stacklevel=3)

    def _undo(self, error: BaseException, generator: torch.Tensor | None) -> None:
        """Say what a failed step has left; where that is nothing, random numbers go on from where it began."""
        if self._executor.is_running:  # called inside of another step
            return
        if not self._executor.is_whole:
            error.add_note(self._state())
            return
        if generator is not None:
            set_generator_state(self._kind, generator)
        touched = [name for name, value in self._values.items() if set(value.storages) & self._executor.changed.keys()]
        but = f", but buffers that the forward had changed ({first_few(touched)})" if touched else ""
        error.add_note(
            f"this step has not happened: all values are those after step {self.steps}{but}; go on if you like"
        )

    def timeline(self) -> Timeline:
        """Measured Timeline of the last step: when each action ran, and memory over time."""
        return self._executor.timeline()

    def rank_timeline(self) -> RankTimeline:
        """Timeline of this rank's last step, with what its computing waited for, on the clock of this process."""
        return self._notes.rank_timeline(self.plan, self.program, self._executor)

    def timelines(self, of_step: RankTimeline | None = None) -> JobTimeline | None:
        """Collect on the first rank the timelines of all for the last step, or one ``of_step``; others get None.

        Printed, they say of each rank what it took of memory beside its prediction and budget, and of time: computing,
        exposed communication, and waiting, for whom. All ranks call this.

        Raises:
            ConfigError: the last that ran is no step. StorageError: another rank is gone or late.
        """
        mine = of_step or self.rank_timeline()
        self._meet("collect the timelines of all ranks")
        return self._notes.of_all_ranks(mine, self.peak_bytes, self.plan.fingerprint, self.steps)

    @property
    def compiled(self) -> tuple[int, int]:
        """Number of calls of compiled regions that a step makes, and number of functions compiled for them."""
        return self._executor.compiled

    @property
    def peak_bytes(self) -> int:
        """Highest memory in bytes during any step, above what was in use before this trainer.

        On a CPU the resident set; on a GPU what tensors take, and what the process takes besides (its context).
        """
        return self._executor.peak_resident_bytes + self._executor.beside_bytes

    @property
    def base_bytes(self) -> int:
        """Memory in bytes that was in use before this trainer; on a CPU of the process, Python's and torch's."""
        return self._executor.base_bytes

    def value(self, name: str) -> torch.Tensor:
        """Copy a parameter, buffer or optimizer state (``"layers.0.weight.exp_avg"``).

        What is sharded over ranks is gathered: all of them call this.

        Raises:
            ConfigError: no such name.
        """
        if self._values.find(name).is_shared:
            self._meet(f"read {name}")
        return self._values.read(name)

    def set_value(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter, buffer or optimizer state; with a parameter its master, which would overwrite it.

        All ranks of a job set the same.

        Raises:
            ConfigError: no such name, or another shape or dtype.
        """
        self._values.write(name, value)
        if self._replicas is not None:
            from lading.runtime.agreement import digest

            self._note_given(name, digest(value))

    def fill(self, name: str, numbers: ReadableValue) -> None:
        """Set a parameter or buffer, and its master, from what reads its numbers; a rank reads those that it has."""
        self._values.fill_first(name, numbers.bytes_as)
        self._note_given(name)

    def _note_given(self, *what: str) -> None:
        """Note that values were set, for ranks to compare when they meet next."""
        self._given = hashlib.sha256(" ".join((self._given, *what)).encode()).hexdigest()

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers by the names of the model's own state dict; each is read when it is asked for.

        ``dict(trainer.state_dict())`` has them all at once, beside what the plan takes.
        """
        return StateDict(self, self._keys)

    @property
    def unfinished(self) -> dict[str, str]:
        """Values that are not those after step ``steps``: "step 8", "part of step 8" or "lost", by name.

        Empty, but after a step that failed when it had changed some parameters and not others.
        """
        return self._values.unfinished(self.steps + 1)

    def initialize(self, values: Callable[[Callable[[str, torch.Tensor], None]], list[str]]) -> list[str]:
        """Let ``values`` set the parameters and buffers, through the ``set_value`` given; returns its notes."""
        notes = values(self.set_value)
        self._executor.observe_peak()
        trim()
        return notes

    def save(
        self,
        folder: str | Path,
        *,
        meta: Mapping[str, Any] | None = None,
        keep: int = 2,
        keep_every_steps: int = 0,
        wait: bool = True,
        in_place: bool = False,
    ) -> Path:
        """Write a checkpoint: every value, the random generator's state and ``meta``. All ranks call this.

        Args:
            keep: How many of the newest stay. One that is being read stays until a later save.
            keep_every_steps: Those of every so many steps stay, too; 0 for none.
            wait: False lets training go on meanwhile: values are copied while the next step runs, and a process writes
                them (``wait_saved``). That takes as much memory as the checkpoint has bytes, of each rank for what it
                alone has; where the budget leaves less, training waits, and a warning says so.
            in_place: What lies in the swap file stays there, until the next one (``lading.saving_in_place``).

        Returns:
            Its folder, for ``load``; without ``wait`` it is there once it is whole. One under way ends first.
        Raises:
            StorageError: the disk is full, another trainer saves there, or the save before failed; older ones stay.
            ConfigError: a step or load left values of two steps, ``meta`` has no JSON form, or ``in_place`` cannot be.
        """
        self._meet("save a checkpoint")
        save_args = Path(folder), meta or {}, keep, keep_every_steps
        if in_place:
            return self._saves.save_in_place(self._snapshot(), *save_args)
        if not wait and (path := self._saves.begin(self._snapshot(), *save_args)) is not None:
            return path
        self._saves.newest = self._by_first_rank(
            "Trainer.save",
            lambda: str(self._saves.save(self._snapshot(), *save_args)),
            lambda: self._values.gathering().end(),
        )
        return Path(self._saves.newest)

    def wait_saved(self) -> None:
        """Wait until the newest checkpoint is whole, with its checksums; raises as ``save``. All ranks call this."""
        self._by_first_rank("Trainer.wait_saved", self._saves.waited, lambda: None)

    def check_saved(self) -> None:
        """Raise what the last save beside training has failed of, if that is known by now; as ``wait_saved``."""
        self._saves.check()

    def check_in_place(self, folder: str | Path) -> None:
        """Refuse what keeps checkpoints from being saved in place, and reserve their room; raises as ``save``."""
        check_in_place(self._executor, Path(folder), is_alone=self._replicas is None)

    @property
    def is_saving(self) -> bool:
        """Whether this rank has a save beside training under way."""
        return self._saves.is_under_way

    def staging_shortage(self) -> str:
        """Say why ``save`` has no room beside training in the plan's budget; "" where it has. All ranks call this."""
        return self._saves.shortage(self._snapshot())

    def _snapshot(self) -> Snapshot:
        self._check_whole()
        beside = {} if self._groups is None else self._groups.saved()
        beside |= {_FROZEN: "\n".join(self._frozen).encode()} if self._frozen else {}
        beside[_RNG], programs = generator_state(self._kind).numpy().tobytes(), [step.program for step in self._steps]
        return Snapshot(self.steps, self._executor, self._values, programs, beside, self._replicas)

    def _by_first_rank(self, call: str, make: Callable[[], str], meanwhile: Callable[[], object]) -> str:
        """Let the first rank make a text that all get, while the others take part in it; alone, make it."""
        self._saves.settle()  # its thread and this one have one connection to the store
        return make() if self._replicas is None else self._replicas.by_first(call, make, meanwhile)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Take values, step count, random generator's state and numbers of groups from a checkpoint; returns its meta.

        States of what is frozen now stay as they are; those of what was frozen then, and is trained now, begin anew.

        Raises:
            StorageError: the checkpoint is of another model, and nothing has changed; or a tensor of it is damaged.
        """
        with read_checkpoint(Path(path)) as checkpoint:
            return self._load(checkpoint)

    def _load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        beside = (_RNG, _FROZEN, GROUPS, *(f"{name}." for name in self._frozen))
        frozen = bytes(checkpoint.read(_FROZEN).tolist()).decode().split("\n") if _FROZEN in checkpoint.tensors else []
        thawed = {name for name in self._values.states_of(frozen) if name not in checkpoint.tensors}
        saved = {n: (entry.dtype, entry.shape) for n, entry in checkpoint.tensors.items() if not n.startswith(beside)}
        expected = {name: value for name, value in self._values.items() if name not in thawed}
        check_saved(checkpoint.path, saved, expected, name_of(self.optimizer))
        scalars = {name: checkpoint.read(name) for name, value in expected.items() if not value.shape}
        check_numbers(self._values, scalars)
        generator, self._given = checkpoint.read(_RNG), ""
        self._half_loaded = f"loading {checkpoint.path} failed half-way: some values are its, the others from before"
        self._values.load(checkpoint, thawed)
        self._note_given(*(f"{name} {tensor.digest}" for name, tensor in sorted(checkpoint.tensors.items())))
        set_generator_state(self._kind, generator)
        if self._groups is not None and GROUPS in checkpoint.tensors:  # no rule of Lading saved it
            self._groups.load(checkpoint, str(checkpoint.path))
        self._half_loaded, self._saves.newest, self.steps = "", str(checkpoint.path), checkpoint.step
        self._executor.observe_peak()
        trim()
        return checkpoint.meta

    def close(self) -> None:
        """Write the values back into the model and give all memory and disk space back. May be called twice.

        Waits for a save under way. Warns where values are of two steps (``unfinished``).

        Raises:
            StorageError: there is no memory for the values, and nothing has changed: free some and close again; or
                values could not be read and are lost, and their tensors refuse to be used; or the last save failed
                beside training.
            ConfigError: called inside of a step, by a handler of a signal.
        """
        mixed = self._custody and (self._half_loaded or not self._executor.is_whole) and self._state()
        try:
            self._give_back()
        finally:
            self._closed = self._executor.is_closed
            if self._closed:
                self._paused = None
                if self._replicas is not None:
                    self._replicas.close()
                self._finalizer.detach()
                atexit.unregister(self._finalizer)
            if mixed:
                warnings.warn(f"written back into the model: {mixed}", stacklevel=2)
            if self._closed:
                self._saves.close()

    def pause(self) -> None:
        """Give the model its values back, and keep what else a step needs, until ``resume`` goes on by another plan.

        Meanwhile the model is an ordinary one: freeze or thaw parameters, capture and plan again. Values, and states of
        the optimizer, lie in ordinary memory then, or, where the plan has some on a disk, in a file without a
        name there; of states over several ranks each keeps those that it had.

        Raises:
            ConfigError: a step or load left values of two steps.
            StorageError: as ``close``, or no room for that file; the trainer is as it was.
        """
        self._check_whole()
        with self._lock:
            self._meet("pause")
            self.wait_saved()
            names, folder = self._custody.names, folder_beside(self.program, self._settings[1])
            carried = CarriedValues(self._executor, self._values, names, self._replicas, folder)
            with self._saves.keeping_folders():
                self.close()
            self._paused = carried

    def resume(
        self,
        plan: Plan | Path | str,
        graph: StepGraph,
        *,
        others: Sequence[StepGraph] = (),
        shapes: Sequence[StepGraph] = (),
    ) -> None:
        """Go on after ``pause`` by another plan for the same model and optimizer, of any layout.

        Values and states go to the ranks that hold them now. Of parameters that were frozen states are dropped, those
        of parameters that were thawed begin at zero. Arguments are those of the class.

        Raises:
            ConfigError: the trainer is not paused, the plan moves parameters by other rules, or as the class; it stays
                paused.
            StorageError: as the class.
        """
        if self._paused is None:
            raise ConfigError("resume: expected a trainer that is paused, found one that is not; call pause() first")
        self._begin(plan, graph, others, shapes)

    def _check_whole(self) -> None:
        if self._paused is not None:
            raise ConfigError("expected a trainer that is ready, found one that is paused; call resume(plan, graph)")
        if self._half_loaded or not self._executor.is_whole:
            raise ConfigError(f"{self._state()}; load a checkpoint")

    def _state(self) -> str:
        """Describe the values after a step or a load that left them in parts."""
        saved = self._saves.newest
        newest = f"the newest checkpoint is {saved}" if saved else "this trainer has saved no checkpoint"
        if self._half_loaded:
            return f"{self._half_loaded}; {newest}"
        unfinished, parameters = self.unfinished, [p.names[0] for p in self.program.graph.parameters]
        groups: dict[str, list[str]] = {}
        for name in parameters:
            groups.setdefault(unfinished.get(name, f"step {self.steps}"), []).append(name)
        parts = [
            f"{len(names)} {'are lost' if state == 'lost' else f'of {state}'} ({first_few(names)})"
            for state, names in groups.items()
        ]
        return (
            f"step {self.steps + 1} failed half-way, when it had begun to change values; of {len(parameters)} "
            f"parameters now {', '.join(parts)}; trainer.unfinished names all values; {newest}"
        )

    def _give_back_at_the_end(self) -> None:
        """Let the end of this trainer, or of the process, write the values back if nobody has closed it by then."""
        values, ended = self._values, None
        if self._groups is not None:
            values, ended = {**values, **self._groups.values_of_states(values)}, self._groups.ended
        self._give_back = partial(
            give_values_back, self._executor, self._custody, values, self._lock, os.getpid(), ended, self._replicas
        )
        self._finalizer = weakref.finalize(self, self._give_back)
        atexit.register(self._finalizer)  # before what was registered earlier, which may look at the model

    def _take_over(self, model: torch.nn.Module | None) -> None:
        """Copy the model's values and free its own memory, one tensor after the other."""
        tensors, fresh = tensors_of(model) if model is not None else [], list[tuple[str, torch.Tensor]]()
        if self._groups is not None:
            states, filled = self._groups.states(self._values)
            check_numbers(self._values, {name: state for name, state in states if not state.dim()})
            with_values = {id(tensor) for tensor in filled}
            tensors += [pair for pair in states if id(pair[1]) in with_values]
            fresh = [pair for pair in states if id(pair[1]) not in with_values]
        carried = self._paused
        more = [] if carried is None else [*carried.tensors.items()]
        has_own = self.plan.request.machine_table["device"]["kind"] != "cpu"
        kind = "" if has_own and self._kind == "cpu" else self._kind  # of tensors in the device's memory
        freed = FreedBytes([t for _, t in (*tensors, *more) if t.device.type == kind], self._executor.now_bytes)
        for name, tensor in tensors:
            value = tensor.detach()
            self._values.write(name, value if value.dim() else value.expand(self._values[name].shape).clone())
            del value
            take = partial(self._custody.take, name, tensor)
            freed.drop(tensor, take) if tensor.device.type == kind else take()
        for name, tensor in fresh:
            self._custody.take(name, tensor)
        if carried is not None:
            self._paused = None
            for name, tensor in carried.spread(self._replicas):
                if name in self._values:
                    self._values.write(name, tensor)
                drop = partial(setattr, tensor, "data", tensor.new_empty(0))
                freed.drop(tensor, drop) if tensor.device.type == kind else drop()
        self._executor.observe_peak()
        trim()
        self._executor.given_back(freed.total())
