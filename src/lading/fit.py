"""Fit: whether a run fits a machine, planned for all that the machine has, and shown by what the bytes are for.

A run fits if a plan was found with which the step, the writing of a checkpoint and the reading of one each stay within
what every tier has. If none was, the table is that of the nearest plan that was, and the changes listed below it are
those that would do: every one has a plan behind it, and the one that costs the least step time for a token comes first.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeVar, cast

from lading.catalog.load import load_machine
from lading.catalog.models import model_names, named_model, resolved
from lading.checkpoint.state import CHUNK_BYTES
from lading.config import (
    STDLIB,
    SYNTHETIC,
    CheckpointConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    Optimization,
    RunConfig,
)
from lading.errors import BudgetAboveDevice, ConfigError, PlanInfeasible
from lading.hosts import machine_of
from lading.ir.action import DEVICE
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.program import Program, slot_bytes
from lading.ir.reporting import SILENT, PlanProgress
from lading.memory.tier_layout import home_tiers
from lading.planner.api import Planned
from lading.prepare import plan_run, sketch_run
from lading.report.needs import WORKSPACE, Bytes, Change, FitResult, Needs, StepTime, step_needs, step_time
from lading.run import CapturedRun, capture_run
from lading.units import format_bytes, format_capacity, format_capacity_above, format_count, parse_bytes

#: Tokens of a sequence where neither the run nor the catalog says how many.
_DEFAULT_TOKENS = 1024
#: What the system and the process take of a host's memory that is given as a whole.
_HOST_RESERVE_BYTES = 4_000_000_000
_NOT_SEARCHED = "blocks recomputed and the rest streamed, as no faster plan was looked for (--quick)"
#: Operations captured and planned in search of a change; a larger step has fewer tries.
_TRIED_OPS = 20_000
_SHORTEST = 128

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine, and sizes that replace its own ("64GB"; None leaves them).

    Attributes:
        machine: A name in the catalog, the path of a machine file, or "probe" for this host.
        host: All the memory of the host; some is left to the system.
        budget: Device memory that the plan may use: a size, or a share of what keeping everything needs.
        tiers: Budgets of a run's tiers, shares of what the tiers have; None is all that checkpoints leave.
    """

    machine: str
    device: str | None = None
    host: str | None = None
    disk: str | None = None
    budget: str | float | None = None
    tiers: MemoryConfig | None = None


def run_of_model(model: str, seq: int | None = None) -> RunConfig:
    """Make a run of a model by name, one sequence at a time, that saves checkpoints and keeps one of them.

    Args:
        model: A name in the catalog, "module:function", or the path of a Hugging Face configuration.
        seq: Tokens of a sequence; None is the catalog's longest, but at most 4096, and 1024 for other models.

    Raises:
        ConfigError: no such model, or a sequence that it does not take.
    """
    if model in model_names() or not any(mark in model for mark in ":/."):
        named = named_model(model)
        tokens = seq or named.default_tokens
        config = named.config(tokens)
    else:
        tokens, config = seq or _DEFAULT_TOKENS, ModelConfig(name=model)
    source = SYNTHETIC if config.name == "dit" else STDLIB
    return RunConfig(
        model=config,
        data=DataConfig(sequence_length=tokens, batch_size=1, source=source),
        optimization=Optimization(steps=1),
        memory=MemoryConfig(budget="100%"),
        checkpoint=CheckpointConfig(every_steps=1, keep=1),
    )


def with_sizes(
    run: RunConfig,
    *,
    batch: int | None = None,
    seq: int | None = None,
    accumulation: int | None = None,
    precision: str | None = None,
    keep: int | None = None,
) -> RunConfig:
    """Copy of a run with other sizes; None leaves one as it is.

    Args:
        keep: Checkpoints that stay while another is written; 0 saves none.

    Raises:
        ConfigError: a size out of range, or a sequence that the model does not take.
    """
    data = _replaced(run.data, batch_size=batch, sequence_length=seq)
    optimization = _replaced(run.optimization, accumulation=accumulation, precision=precision)
    checkpoint = run.checkpoint
    if keep is not None:
        checkpoint = CheckpointConfig(every_steps=1, keep=keep) if keep else CheckpointConfig(at_end=False)
    return dataclasses.replace(run, data=data, optimization=optimization, checkpoint=checkpoint)


def precision_for(machine: str) -> Literal["fp32", "bf16"]:
    """Precision where none is given for a model by name: bf16 on an accelerator that multiplies it, else fp32."""
    device = None if machine == "probe" else load_machine(machine).device
    return "bf16" if device is not None and device.kind != "cpu" and "bfloat16" in device.peak_flops_per_s else "fp32"


def _replaced(config: _T, **values: Any) -> _T:
    """Copy of a configuration with those values that are not None."""
    return dataclasses.replace(cast(Any, config), **{key: value for key, value in values.items() if value is not None})


@contextmanager
def _no_collections() -> Iterator[None]:
    """Hold the cyclic collector off: nearly all that capture and planning make stays, and it walks that every time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_collections()
def fit_run(
    run: RunConfig, hardware: Hardware, name: str = "", *, quick: bool = False, progress: PlanProgress = SILENT
) -> FitResult:
    """Plan a run for all the memory of a machine.

    Args:
        run: The run; its own machine, budgets and folder play no part (``lading fit RUN.toml`` hands its budgets on as
            those of ``hardware``).
        name: Name to call the model; "" for the name that the run gives it.
        quick: Whether to plan without a search, in seconds: blocks recomputed and the rest streamed.
        progress: Receives what is being done, for people.

    Raises:
        ConfigError: no such machine, or the run cannot be built.
        CaptureError: the model cannot be captured.
    """
    name, run = name or run.model.name, resolved(run)
    case = _Case(run, *_machine(run, hardware), hardware.budget, hardware.tiers, SILENT if quick else progress, quick)
    progress.update(0.0, "capturing the model")
    captured = capture_run(run, case.machine)
    tried = _nearest(case, captured)
    needs, allowed = tried.needs, case.allowed
    over = {tier: size for tier, size in needs.total.items() if size > allowed[tier]}
    error = tried.error or (_too_small(tried, over, allowed) if over else None)
    return FitResult(
        title=_title(name, run, captured.graph),
        machine=case.machine.name,
        needs=needs,
        allowed=allowed,
        time=tried.time,
        host_saves_s=tried.planned.plan.predictions.host_saves_s,
        assumptions=(*case.assumptions, *((_NOT_SEARCHED,) if quick else ()), *tried.planned.plan.assumptions),
        error=error,
        changes=() if error is None else tuple(_changes(case, captured, tried, over)),
    )


@dataclass(frozen=True)
class _Case:
    """A run on a machine, of whose tiers ``reserved`` bytes are not the plan's."""

    run: RunConfig
    machine: Machine
    reserved: Bytes
    budget: str | float | None
    tiers: MemoryConfig | None
    progress: PlanProgress
    quick: bool

    def usable_bytes(self, left: Bytes) -> Bytes:
        """Bytes that the plan may use of those ``left`` in each tier."""
        if self.tiers is None:
            return left
        capacity = {tier.name: tier.capacity_bytes for tier in self.machine.tiers}
        limits = self.tiers.tier_budgets(capacity, self.machine.swap_tier)
        return {tier: min(size, limits.get(tier, size)) for tier, size in left.items()}

    @property
    def allowed(self) -> Bytes:
        lower = {t.name: t.capacity_bytes + self.reserved.get(t.name, 0) for t in self.machine.tiers}
        return {DEVICE: self.machine.device.memory_bytes, **lower}

    @property
    def assumptions(self) -> tuple[str, ...]:
        left = (
            f"{format_bytes(size)} of the {tier}'s memory are left to the system and the process"
            for tier, size in self.reserved.items()
        )
        rows = [] if self.budget is None else [(DEVICE, self.budget, "memory.budget, or --budget")]
        if self.tiers is not None:
            by_tier = self.tiers.by_tier(self.machine.swap_tier)
            rows += [(name, budget, self.tiers.setting_of(name)) for name, budget in by_tier.items()]
        within = (f"planned within a {name} budget of {_budget_text(size)} ({setting})" for name, size, setting in rows)
        return (*left, *within)


@dataclass(frozen=True)
class _Tried:
    """A plan with what it needs and takes, and the device's error where the plan is not for the machine as it is."""

    planned: Planned
    needs: Needs
    time: StepTime
    error: PlanInfeasible | None = None


def _machine(run: RunConfig, hardware: Hardware) -> tuple[Machine, Bytes]:
    """Make the machine with its sizes replaced; returns the bytes of its tiers that are reserved, too."""
    machine = machine_of(dataclasses.replace(run, machine=hardware.machine))
    if hardware.device is not None:
        device = dataclasses.replace(machine.device, memory_bytes=parse_bytes(hardware.device, "--device"))
        machine = dataclasses.replace(machine, device=device)
    reserved: Bytes = {}
    sizes = ("--host", machine.host_tier, hardware.host), ("--disk", machine.persistent_tier, hardware.disk)
    for option, name, size in sizes:
        if size is None:
            continue
        if not name:
            tier_names = ", ".join((DEVICE, *(tier.name for tier in machine.tiers)))
            raise ConfigError(f"{option}: {machine.name} has no such tier (it has {tier_names}); leave the option out")
        capacity = parse_bytes(size, option)
        if name == machine.host_tier:
            reserved[name] = _HOST_RESERVE_BYTES
            capacity -= _HOST_RESERVE_BYTES
        if capacity <= 0:
            raise ConfigError(
                f"{option}: expected more than {format_bytes(reserved.get(name, 0))}, which are left to the system and "
                f"the process, got {size!r}"
            )
        machine = _resized(machine, {name: capacity})
    return machine, reserved


def _budget_text(budget: str | float) -> str:
    """Write a budget as people do: bytes as a size."""
    return format_bytes(budget) if isinstance(budget, int) else str(budget)


def _resized(machine: Machine, capacity_bytes: Bytes) -> Machine:
    """Copy of the machine with tiers of other sizes; one without any room has a byte."""
    tiers = tuple(
        dataclasses.replace(tier, capacity_bytes=max(1, capacity_bytes.get(tier.name, tier.capacity_bytes)))
        for tier in machine.tiers
    )
    return dataclasses.replace(machine, tiers=tiers)


def _nearest(case: _Case, captured: CapturedRun) -> _Tried:
    """Find a plan for the machine; where there is none, for the same machine with as much more as it takes."""
    machine = case.machine
    if _cannot_hold(case, captured.graph):
        machine = _roomy(machine, captured.graph)
    try:
        return _planned(case, captured, machine)
    except PlanInfeasible as error:
        device = dataclasses.replace(machine.device, memory_bytes=error.smallest_budget_bytes)
        larger = dataclasses.replace(_roomy(machine, captured.graph), device=device)
        memory = dataclasses.replace(case.run.memory, policy="residency")  # whose smallest budget the error names
        smallest = dataclasses.replace(case, run=dataclasses.replace(case.run, memory=memory), budget=None)
        return dataclasses.replace(_planned(smallest, captured, larger), error=error)


def _planned(case: _Case, captured: CapturedRun, machine: Machine, *, search: bool = True) -> _Tried:
    """Make a plan for the device's memory, and what a checkpoint leaves of the tier where it lies.

    Args:
        search: Whether to look for the fastest plan, unless the case is a quick one.

    Raises:
        PlanInfeasible: there is none.
    """
    budgets = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    if host_tier := machine.host_tier:  # a tensor of a checkpoint passes through it
        machine = _resized(machine, {host_tier: budgets[host_tier] - _largest_bytes(captured.graph)})
        budgets = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    if saved := machine.persistent_tier:
        budgets[saved] = max(0, budgets[saved] - _saved_bytes(case.run, captured.graph))
    run = dataclasses.replace(case.run, memory=case.run.memory.with_tier_budgets(case.usable_bytes(budgets)))
    size = machine.device.memory_bytes
    try:
        tried = _for_budget(run, case, captured, machine, size if case.budget is None else case.budget, search)
    except BudgetAboveDevice:  # then all that it has
        tried = _for_budget(run, case, captured, machine, size, search)
    over = tried.needs.total[DEVICE] - size
    if case.budget is None and 0 < over < size:  # a tensor of a checkpoint passes through a CPU's own memory
        with suppress(PlanInfeasible):  # then it is the whole device that is too small, as the first plan shows
            tried = _for_budget(run, case, captured, machine, size - over, search)
    return tried


def _for_budget(
    run: RunConfig, case: _Case, captured: CapturedRun, machine: Machine, budget: str | float, search: bool
) -> _Tried:
    run = dataclasses.replace(run, memory=dataclasses.replace(run.memory, budget=budget))
    if search and not case.quick:
        prepared = plan_run(run, machine, captured, progress=case.progress)
        planned = Planned(prepared.plan, prepared.program)
    else:
        planned = sketch_run(run, machine, captured)
    return _Tried(planned, _with_checkpoints(planned, case), step_time(planned.program, planned.predicted))


def _cannot_hold(case: _Case, graph: StepGraph) -> bool:
    """Whether no plan can exist, as what outlives a step and its checkpoints is more than all tiers together."""
    outlives = graph.saved_bytes + _saved_bytes(case.run, graph)
    return outlives > case.machine.device.memory_bytes + sum(tier.capacity_bytes for tier in case.machine.tiers)


def _roomy(machine: Machine, graph: StepGraph) -> Machine:
    """Copy of the machine whose last tier, if it has one, holds everything."""
    if not machine.tiers:
        return machine
    everything = 8 * sum(slot_bytes(storage.size_bytes) for storage in graph.storages)
    last = machine.tiers[-1]
    return _resized(machine, {last.name: max(last.capacity_bytes, everything)})


def _saved_bytes(run: RunConfig, graph: StepGraph) -> int:
    """Bytes of disk that checkpoints take while one more is written."""
    return (run.kept_checkpoints + 1) * graph.saved_bytes if run.kept_checkpoints else 0


def _with_checkpoints(planned: Planned, case: _Case) -> Needs:
    """Needs of the step together with those of saving and resuming.

    A checkpoint is written in a stream beside those that stay, and read back one tensor at a time. A new run draws its
    initial values one tensor at a time too.
    """
    program, run, machine = planned.program, case.run, case.machine
    tiers = [tier.name for tier in machine.tiers]
    needs = step_needs(program, planned.predicted, tiers)
    for tier, size in case.reserved.items():
        needs.rows[WORKSPACE][tier] += size
        needs.step[tier] += size
    lower = {tier: needs.step[tier] for tier in tiers}
    kept_bytes = run.kept_checkpoints * program.graph.saved_bytes
    beside = DEVICE if machine.device.kind == "cpu" or not machine.host_tier else machine.host_tier
    save = {DEVICE: program.arena_bytes + program.overhead_bytes + program.save_bytes, **lower} if kept_bytes else {}
    resume = {DEVICE: _at_home_bytes(program) + program.overhead_bytes, **lower}
    resume[beside] += _largest_bytes(program.graph)
    if kept_bytes and not program.save_bytes:  # the buffers are not the device's
        save[beside] += CHUNK_BYTES
    if saved := machine.persistent_tier:
        resume[saved] += kept_bytes
        save |= {saved: lower[saved] + _saved_bytes(run, program.graph)} if kept_bytes else {}
    return dataclasses.replace(needs, save=save, resume=resume)


def _at_home_bytes(program: Program) -> int:
    """Bytes of the device's memory that are taken between two steps."""
    at_home = (storage for storage, home in home_tiers(program).items() if home == DEVICE)
    return sum(slot_bytes(program.graph.storages[storage].size_bytes) for storage in at_home)


def _largest_bytes(graph: StepGraph) -> int:
    """Bytes of the largest tensor of a checkpoint: a parameter, or its state of four bytes an element."""
    return max(max(prod(t.shape) * 4, t.size_bytes) for t in (graph.tensors[p.tensor] for p in graph.parameters))


def _title(name: str, run: RunConfig, graph: StepGraph) -> str:
    parameters = sum(prod(graph.tensors[p.tensor].shape) for p in graph.parameters)
    data, optimization = run.data, run.optimization
    saved = f"saved, {run.kept_checkpoints} older kept" if run.kept_checkpoints else "not saved"
    micro = f" x {optimization.accumulation} micro-batches" if optimization.accumulation > 1 else ""
    return f"{name}: {format_count(parameters)} parameters, {data}{micro}, {optimization.precision}, {saved}"


def _too_small(tried: _Tried, over: Bytes, allowed: Bytes) -> PlanInfeasible:
    """Error for tiers that overflow by ``over`` bytes."""
    texts: list[str] = []
    for tier, size in over.items():
        occasion = "a step" if tried.needs.step[tier] > allowed[tier] else "saving or resuming"
        texts.append(
            f"{tier} needs {format_bytes(size)} for {occasion} and has {format_bytes(allowed[tier])}: "
            f"{format_bytes(size - allowed[tier])} are missing"
        )
    missing = max(size - allowed[tier] for tier, size in over.items())
    return PlanInfeasible(
        "; ".join(texts), missing_bytes=missing, smallest_budget_bytes=tried.planned.program.budgets[DEVICE]
    )


def _changes(case: _Case, captured: CapturedRun, tried: _Tried, over: Bytes) -> list[Change]:
    """Changes that would make it fit, those that cost least for a token first."""
    changes: list[Change] = []
    if over:  # this plan is the one that fits them
        sizes = " and ".join(f"{format_capacity_above(size)} of {tier}" for tier, size in over.items())
        old = " and ".join(f"{format_capacity(case.allowed[tier])} of {tier}" for tier in over)
        changes.append(_change(f"{sizes} instead of {old}", tried, case.run))
        saved, tier = _saved_bytes(case.run, captured.graph), case.machine.persistent_tier
        if over.keys() == {tier} and tried.needs.step[tier] <= case.allowed[tier] and saved:
            text = f"checkpoints on another {tier}, of {format_capacity_above(saved)}"
            changes.append(_change(text, tried, case.run))
    elif case.budget is not None and tried.error is not None:
        size = format_capacity_above(tried.error.smallest_budget_bytes)
        changes.append(_change(f"a device budget of {size} instead of {_budget_text(case.budget)}", tried, case.run))
    num_ops_left = _TRIED_OPS - len(captured.graph.ops)
    hopeless = _cannot_hold(case, captured.graph)
    for variants in () if hopeless else _variants(case.run, case.machine):
        for text, run in variants:
            changed = dataclasses.replace(case, run=run)
            recaptured = capture_run(run, case.machine)
            num_ops_left -= len(recaptured.graph.ops)
            if num_ops_left < 0:
                break
            planned = _that_fits(changed, recaptured)
            if planned is not None:
                changes.append(_change(text, planned, run))
                break
    return sorted(changes, key=lambda change: change.token_s)


def _change(text: str, tried: _Tried, run: RunConfig) -> Change:
    tokens = run.data.num_tokens * run.optimization.accumulation
    return Change(text=text, step_s=tried.time.step_s, token_s=tried.time.step_s / tokens)


def _that_fits(case: _Case, captured: CapturedRun) -> _Tried | None:
    """Find a plan that fits the machine as it is; None without one."""
    if _cannot_hold(case, captured.graph):
        return None
    try:
        tried = _planned(case, captured, case.machine, search=False)
    except PlanInfeasible:
        return None
    return tried if all(size <= case.allowed[tier] for tier, size in tried.needs.total.items()) else None


def _variants(run: RunConfig, machine: Machine) -> Iterator[Iterator[tuple[str, RunConfig]]]:
    """Kinds of changes to a run; each yields what to try in turn until something fits."""
    if run.memory.policy != "residency":
        memory = dataclasses.replace(run.memory, policy="residency")
        yield iter([("policy residency", dataclasses.replace(run, memory=memory))])
    if run.checkpoint.saves and run.checkpoint.keep > 1:
        yield iter([("one checkpoint kept", dataclasses.replace(run, checkpoint=_keeping_one(run)))])
    if run.optimization.precision == "fp32" and "bfloat16" in machine.device.peak_flops_per_s:
        yield iter([("precision bf16", with_sizes(run, precision="bf16"))])
    yield _smaller_batches(run)
    if run.model.name != "dit":
        yield _shorter_sequences(run)


def _keeping_one(run: RunConfig) -> CheckpointConfig:
    return dataclasses.replace(run.checkpoint, keep=1)


def _smaller_batches(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Runs with half the micro-batch and twice as many of them, and so on; the step stays the same."""
    size, count = run.data.batch_size, run.optimization.accumulation
    while size % 2 == 0:
        size, count = size // 2, count * 2
        data = dataclasses.replace(run.data, batch_size=size)
        optimization = dataclasses.replace(run.optimization, accumulation=count)
        yield (
            f"micro-batches of {size} with accumulation {count}",
            dataclasses.replace(run, data=data, optimization=optimization),
        )


def _shorter_sequences(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    length = run.data.sequence_length // 2
    while length >= _SHORTEST:
        data = dataclasses.replace(run.data, sequence_length=length)
        yield f"sequences of {length} tokens", dataclasses.replace(run, data=data)
        length //= 2
