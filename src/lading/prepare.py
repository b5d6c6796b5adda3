"""Making plans: a captured graph or a configured run becomes a plan for a machine, with all that this host can measure.

``plan`` is the public entry, ``plan_run`` that of a run; both count what kernels and saving take beside tensors, then
ask ``lading.planner``. Nothing here is needed to train: ``lading.run`` takes a plan that was made.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

import torch

from lading import __version__
from lading.alone import num_ranks, rank_number, ranks_here
from lading.catalog.load import as_machine
from lading.catalog.models import resolved
from lading.checkpoint.staging import staged_bytes
from lading.checkpoint.state import CHUNK_BYTES
from lading.config import RunConfig, run_to_dict
from lading.cost.compute import op_costs, send_s
from lading.errors import ConfigError, PlanInfeasible, check_type
from lading.grouping import Matrices
from lading.hosts import machine_of
from lading.ir.action import DEVICE
from lading.ir.graph import DTYPE_BYTES, StepGraph, check_captures
from lading.ir.guess import SPECULATES, with_guess
from lading.ir.layout import ALONE, Layout, parse_layout
from lading.ir.machine import Machine
from lading.ir.plan import Choices, Plan, PlanKind, plan_from_dict
from lading.ir.reduction import reduce_gradients
from lading.ir.reporting import SILENT, PlanProgress
from lading.ir.stage_cuts import narrow_cuts
from lading.ir.together import number_alike
from lading.ir.update_ops import grouped
from lading.kernel_scratch import KernelScratch, memory_by_turns, memory_of_kernels
from lading.memory.restore import of_each_rank, pipeline_of, programs_of, step_of
from lading.optim.moment_rule import MomentRule
from lading.optim.registry import default_rule, name_of
from lading.optim.rule import ParameterRule
from lading.optim.torch_update import TorchUpdate, checked_rule
from lading.planner.api import (
    STAGING_BYTES,
    InMemory,
    Planned,
    best_buckets,
    in_memory,
    joined,
    sketch_plan,
    staging_saves,
)
from lading.planner.cache import cache_folder, cached_plan
from lading.planner.policies import Policy
from lading.planner.routing import Loads, plan_experts
from lading.planner.speculating import check_alone, plan_speculating, with_waiting
from lading.report.progress import planning_progress
from lading.run import CapturedRun, Prepared, capture_run, has_masters, sharing_batches, sharing_processors
from lading.runtime.gathering import gathering_bytes
from lading.runtime.host import host_id
from lading.runtime.value_layout import values_of
from lading.runtime.values import BOUNCE_BYTES, named_tensors
from lading.staging_layout import planned_staging_bytes, saved_beside
from lading.tier_budgets import asked_limits, limit_notes, run_limits
from lading.units import format_bytes, share_of, share_or_bytes

#: Manifest, checksums and code of saving: once, and for each tensor. Measured: 0.1 MiB for a mixture of experts of two
#: layers, 0.7 for a Llama of 6 that gave no freed scratch back before, torch 2.13.
_SAVE_ONCE_BYTES, _SAVE_BYTES_PER_TENSOR = 256 << 10, 1 << 10
#: A search for a plan shorter than this shows nothing.
_QUICK_S = 2.0
#: Settings of a layout that a run may have.
_SPREAD = ("dp", "zero", "shard", "bucket_bytes", "pp", "vpp", "schedule", "tp", "sp", "ep", "cp")
#: Size of which the speed of sends is taken to choose stages by.
_SENT_BYTES = 1 << 20
#: Shape of a parameter whose states are kept as those of large ones are.
_LARGE = (1 << 20,)
_FURTHER = "others=, or validation with dropout or running statistics"


def plan(  # noqa: PLR0913  the public entry spells out all it takes
    graph: StepGraph,
    machine: Machine | str | Path,
    *,
    budget: str | float,
    disk_budget: str | float | None = None,
    budgets: Mapping[str, str | float] = MappingProxyType({}),
    policy: str | Policy = "residency",
    clip_norm: float = 0.0,
    master_weights: bool = False,
    optimizer: ParameterRule | torch.optim.Optimizer | None = None,
    matrices: Matrices | None = None,
    compile: bool = False,
    cache: bool = True,
    layout: str = "",
    devices: int = 0,
    others: Sequence[StepGraph] = (),
    stage_saves: bool = False,
    experts: bool | Loads = False,
    clipped: float | None = None,
) -> Plan:
    """Plan the training step of a captured model, with the updates of its parameters.

    In a job of several ranks (under ``torchrun``) the first plans, and all get its plan. A plan for several that was
    made and saved outside of one is run in one by ``lading.Trainer`` or ``lading train --plan`` as it is.

    Args:
        graph: Graph from ``lading.capture``.
        machine: Machine to plan for: a name of the catalog ("h100"), the path of a file that ``lading probe`` wrote, or
            a ``lading.Machine``.
        budget: Device memory: "256MB", a number of bytes, or a share ("50%" or 0.5) of what keeping everything needs.
            Numbers that could mean several things, such as 1 or 50, are refused.
        disk_budget: Bytes allowed in the swap file, the machine's nearest tier of kind "file" ("20GB"); 0 for none;
            None allows what the machine has.
        budgets: Bytes allowed in any tiers of the machine, by name.
        policy: "keep-all", "checkpoint-every-block" or "residency"; of shards also "reshard-every-unit", as FSDP2, and
            "reshard-and-checkpoint"; or ``policy(graph, lifetimes) -> choices``.
        clip_norm: Limit of the global gradient norm; 0, the default, switches it off.
        master_weights: Give each bfloat16 or float16 parameter a float32 master, as ``lading.optim.master`` does.
        optimizer: Rule that moves parameters (``lading.AdamW(...)``, ``lading.optimizer("lion", ...)``), or an
            optimizer of torch, whose parameter groups then count as they are in each step; None for AdamW.
        matrices: A rule for matrices, as Muon, and which parameters it moves in its stead (``lading.Matrices``).
        compile: Fuse runs of light operations: faster, close to plain PyTorch's numbers, not equal to the bit.
        cache: Take the plan from the user's cache folder if an equal one was made before, which is said on standard
            error, and keep it there; False plans anew. A search of more than two seconds says there what it does.
        layout: How the step is spread: "dp4" for four replicas, ranks that each train on a batch of their own and take
            the mean of their gradients, in buckets that the plan chooses or of "dp4,bucket_bytes=1000000" and more.
            "dp4,zero1" cuts the optimizer's states into shards, one a rank; "dp4,zero2" also the gradients that are
            summed over micro-batches; "dp4,zero3" also the parameters; "dp4,zero3,shard2" among two, whose pairs are
            replicas. "pp4" cuts the model into the stages of a pipeline, which are all given the same batch;
            "pp2,vpp2,interleaved", "pp2,zero-bubble" and more say in which order. "dp2,pp2,zero1" and the like are of
            both; a rank gives the batch of its replica (``Plan.replica``). "tp2" cuts the model's matrices, of which
            each rank computes its share of every product, on the same batch; "tp2,sp" also what lies between them,
            along the tokens. "cp2" cuts every sequence into runs of tokens, on the same batch. Both go with all that
            stands before, as "dp2,tp2,zero3" or "tp2,pp2". "dp2,ep2" spreads the experts of a mixture over the ranks,
            with zero1 to zero3 too. "" is all ranks of the job: replicas if they
            keep everything in the budget, else the fastest of them and of shards; "dp1" is one rank by itself.
        devices: Ranks to plan for where no job runs yet; 0 for those of this job, or of the layout.
        others: Captures of further steps over the same model and optimizer: an evaluation, another loss, a batch with
            a mask. Each is planned within the same budgets, on values where the first has them, so that a Trainer
            changes between them at no cost. Smaller batches need none (``Trainer(shapes=)``).
        stage_saves: Count the memory in which ``Trainer.save(wait=False)`` stages a checkpoint on a CPU, on every rank,
            where the budget has room for it beside the fastest plan; where it has none, an assumption of the plan says
            how much is missing. False counts none: the Trainer then takes what the budget leaves.
        experts: Leave out of each step the experts that its routers choose for no token: their operations, and what
            these move. Or the shares of steps in which each expert gets tokens, by the router's module, as
            ``Trainer.experts.shares()`` counts them: those seldom chosen are then read once they are. Or pairs (share,
            mean tokens in those steps), as ``loads()`` counts them: experts that get few are then computed by the host,
            in its memory, where that is expected to be faster; their sums over fewer rows round otherwise.
        clipped: Share of steps whose gradients are expected to be above ``clip_norm``. Updates then need not wait for
            the norm of all gradients where that is faster: such a step is run again if it is clipped. None waits.

    Raises:
        PlanInfeasible: nothing fits; says what binds, how much is missing and what would do.
        ConfigError: an argument means nothing.
    """
    machine = as_machine(machine)
    check_captures(graph, others=others)
    _check_switches(matrices, master_weights=master_weights, compile=compile, stage_saves=stage_saves)
    share_or_bytes(budget, 1, "budget")  # refused before anything is planned
    spread = check_spread_layout(layout, devices)
    rule = default_rule() if optimizer is None else checked_rule(optimizer)
    stock = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    groups = _other_groups(stock, graph) if stock is not None and spread.devices > 1 else ()
    _check_spread(spread, rule, matrices, others)
    check_alone(graph, spread.devices, experts, (clipped, clip_norm), compile=compile, others=bool(others))
    moved = _MovedBy(clip_norm=clip_norm, master_weights=master_weights, optimizer=rule, matrices=matrices)
    shared, limits = _shared_machine(machine, spread.devices), asked_limits(machine, disk_budget, budgets)
    planner = _LayoutPlanner(
        graph=graph, further_steps=others, machine=shared, limits=limits, policy=policy, moved=moved, groups=groups,
        compile=compile, cache=cache, stage_saves=stage_saves and machine.device.kind == "cpu",
        extra_tensors=saved_beside(graph, stock),
    )  # fmt: skip
    is_settled = bool(layout) or spread.devices == 1 or bool(_uncut(rule, others))
    make = partial(planner.plan if is_settled else planner.plan_fastest, spread, budget)
    if experts is not False:
        return planner.plan_experts(spread, budget, {} if experts is True else experts)
    if clipped is not None:
        return planner.plan_speculating(spread, budget, clipped)
    if spread.devices == 1 or num_ranks()[0] != spread.devices:
        return make()
    asked = {"layout": layout, "budget": budget, "policy": getattr(policy, "__name__", policy), "compile": compile}
    return _by_first_rank(make, [graph, *others], {**asked, "stage_saves": stage_saves, **planner.moved})


def _check_switches(matrices: Matrices | None, **switches: bool) -> None:
    """Refuse arguments of another type.

    Raises:
        ConfigError: naming the first.
    """
    if matrices is not None:
        check_type("matrices", matrices, Matrices, 'lading.Matrices(rule="muon", lr=0.02) or None')
    for name, switch in switches.items():
        check_type(name, switch, bool, "True or False")


def _shared_machine(machine: Machine, devices: int) -> Machine:
    """Make the machine that each of so many ranks has: those of this job on this host share it, or all will."""
    local_ranks = min(ranks_here() if num_ranks()[0] > 1 else devices, devices)
    return _with_threads(machine, local_ranks).shared_by(local_ranks)


class _MovedBy(TypedDict):
    """Settings of how a step moves parameters, as ``step_of`` takes them."""

    clip_norm: float
    master_weights: bool
    optimizer: ParameterRule
    matrices: Matrices | None


@dataclass(frozen=True, kw_only=True)
class _LayoutPlanner:
    """Planner of one captured step and its others in any layout, as ``plan`` is asked for it.

    Attributes:
        machine: Machine that a rank has.
        limits: Budgets of tiers by name.
        groups: Parameters of each group of the optimizer but the first.
        compile, cache, stage_saves: As of ``plan``.
        extra_tensors: Names and bytes of what a checkpoint has beside values.
        waiting: Parameters whose updates wait, in a step whose others do not wait for the norm of all gradients; None
            where all wait.
    """

    graph: StepGraph
    further_steps: Sequence[StepGraph]
    machine: Machine
    limits: Mapping[str, str | float]
    policy: str | Policy
    moved: _MovedBy
    groups: tuple[tuple[str, ...], ...]
    compile: bool
    cache: bool
    stage_saves: bool
    extra_tensors: Sequence[tuple[str, int]]
    waiting: frozenset[str] | None = None

    def plan_speculating(self, spread: Layout, budget: str | float, clipped: float) -> Plan:
        """Plan the step of one device whose updates may run before the norm of all gradients is known."""

        def make(waiting: frozenset[str] | None, budget: str | float) -> Planned:
            return dataclasses.replace(self, waiting=waiting)._ranks(spread, budget)[0]

        step = step_of(self.graph, self.machine, **self.moved)
        return plan_speculating(make, budget, step, clipped).plan

    def plan_experts(self, spread: Layout, budget: str | float, loads: Loads) -> Plan:
        """Plan the step of one device that leaves out experts without tokens."""

        def make(policy: str | Policy, budget: str | float, machine: Machine) -> Planned:
            return dataclasses.replace(self, policy=policy, machine=machine)._ranks(spread, budget)[0]

        return plan_experts(make, self.policy, budget, self.machine, loads).plan

    def plan(self, spread: Layout, budget: str | float) -> Plan:
        """Plan the step in a layout, with the ranks along a pipeline."""
        each = self._ranks(spread, budget)
        return joined(each, self.machine) if spread.pp > 1 else each[0].plan

    def _ranks(self, spread: Layout, budget: str | float) -> list[Planned]:
        """Plan the step of each rank along a pipeline, or of the one kind of ranks without one."""
        layout, parts, _ = _prepared_layout(self.graph, self.machine, spread, self.moved, self.groups)
        each = [self._planned(layout, budget, part) for part in parts]
        if self.stage_saves:
            each = self._with_staging(each, layout)
        return each

    def plan_fastest(self, replicas: Layout, budget: str | float) -> Plan:
        """Plan replicas if they keep everything in the budget; else whatever is fastest of them and of shards.

        Raises:
            PlanInfeasible: none fits.
        """
        plans: list[Plan] = []
        missing: PlanInfeasible | None = None
        try:
            plans.append(self.plan(replicas, budget))
            if plans[0].predictions.keep_all_bytes <= plans[0].budgets[DEVICE]:
                return plans[0]
            budget = plans[0].budgets[DEVICE]
        except PlanInfeasible as error:
            if share_of(budget) is not None:  # of what replicas need
                raise
            missing = error
        for zero in (1, 2, 3) if self.graph.accumulation > 1 else (2, 3):  # without it, the first two are the same
            try:
                plans.append(self.plan(dataclasses.replace(replicas, zero=zero), budget))
            except PlanInfeasible as error:
                missing = error
        if not plans and missing is not None:
            raise missing
        return min(plans, key=lambda plan: plan.predictions.step_s)

    def _with_staging(self, each: list[Planned], layout: Layout) -> list[Planned]:
        """Let every rank stage its part of a checkpoint; the plans are those of the ranks along a pipeline."""
        local_ranks = min(ranks_here() if num_ranks()[0] > 1 else layout.devices, layout.devices)
        programs = [planned.program for planned in each]
        staging_bytes = planned_staging_bytes(
            programs, layout, self.extra_tensors, is_one_host=local_ranks == layout.devices
        )
        of_stage = [0] * len(each)
        for rank, size_bytes in enumerate(staging_bytes):
            stage = layout.place(rank)["pp"]
            of_stage[stage] = max(of_stage[stage], size_bytes)
        return staging_saves(each, of_stage)

    def _planned(self, layout: Layout, budget: str | float, part: Choices) -> Planned:
        """Plan the step of a rank, whose choices begin with those of its part of the model."""
        captures = (self.graph, *self.further_steps)
        steps = [step_of(each, self.machine, **self.moved, layout=layout, choices=part) for each in captures]
        guess = dict[str, float]()
        if self.waiting is not None:
            steps, guess = [with_guess(each, self.waiting) for each in steps], {SPECULATES: 1.0}
        step, *rest = number_alike(steps)
        with planning_progress(after_s=_QUICK_S) as progress:
            memory, others_scratch = memory_by_turns(step, rest, self.machine, progress)
            planned = cached_plan(
                step,
                self.machine,
                folder=cache_folder() if self.cache else None,
                progress=progress,
                others=others_scratch,
                budget=budget,
                budgets=self.limits,
                policy=self.policy,
                expansion={
                    "clip_norm": self.moved["clip_norm"],
                    "master_weights": float(self.moved["master_weights"]),
                    "compile": float(self.compile),
                    **guess,
                    **memory.settings(_save_bytes(step, self.machine, layout)),
                },
                workspace_bytes=memory.scratch_bytes,
            )
        plan = _annotated(planned.plan, memory, self.graph, self.moved["optimizer"], self.moved["matrices"], layout)
        cut = dataclasses.replace(plan.choices, cuts=part.cuts, rank=part.rank, groups=part.groups)
        made = dataclasses.replace(planned, plan=dataclasses.replace(plan, choices=cut))
        return with_waiting(made, self.waiting or frozenset())


def _prepared_layout(
    graph: StepGraph, machine: Machine, spread: Layout, moved: _MovedBy, groups: tuple[tuple[str, ...], ...] = ()
) -> tuple[Layout, list[Choices], InMemory | None]:
    """Choose where a pipeline is cut, and the bytes of a bucket of gradients.

    Args:
        groups: Parameters of each group of the optimizer but the first.

    Returns:
        The layout with its buckets; the choices that the step of each rank along the pipeline begins with, one for all
        ranks without a pipeline; and what their step takes in memory, where choosing predicted that.
    """
    parts = [Choices(groups=groups if spread.zero else ())]
    if spread.pp > 1:
        whole = of_each_rank(graph, spread, machine.device.kind)
        work = op_costs(whole, machine.device)
        sending = 2 / 3 * send_s(_SENT_BYTES, machine) / _SENT_BYTES  # of a forward's work, which is a third
        cuts = narrow_cuts(whole, pipeline_of(spread, graph.accumulation).stages, work, sending)
        parts = [dataclasses.replace(parts[0], cuts=cuts, rank=rank) for rank in range(spread.pp)]
    if (spread.dp * spread.cp == 1 and not spread.zero) or spread.bucket_bytes or spread.cuts_parameters:
        return spread, parts, None
    alone = None
    if not spread.zero and spread.pp == spread.tp == spread.ep == spread.cp == 1:
        alone = step_of(graph, machine, **moved, layout=ALONE, widen=True)

    def step_in(tried: Layout) -> StepGraph:
        if alone is None:  # of a pipeline the first stage's, whose backward ends last
            return step_of(graph, machine, **moved, layout=tried, choices=parts[0])
        return reduce_gradients(alone, tried)

    layout, predicted = best_buckets(step_in, machine, spread)
    return layout, parts, predicted if spread.pp == 1 else None


def _by_first_rank(make: Callable[[], Plan], captures: Sequence[StepGraph], asked: Mapping[str, object]) -> Plan:
    """Let the first rank plan for all, once they have compared what they captured and ask for.

    Raises:
        PlanInfeasible: as the first rank.
        ConfigError: as the first rank, or ranks differ, or one has not come.
    """
    from lading.runtime.agreement import agree_on  # importing torch.distributed takes most of a second
    from lading.runtime.job import by_first_rank, start_job

    def answer_as_json() -> str:
        try:
            return json.dumps({"plan": make().to_dict()})
        except PlanInfeasible as error:
            return json.dumps({"message": f"{error}", **vars(error)})

    ranks = num_ranks()[0]
    start_job(ranks)
    rows = (("first" if not n else f"others[{n - 1}]", each) for n, each in enumerate(captures))
    captured = {f"{which}, {name}": fact for which, each in rows for name, fact in _facts_of(each)}
    versions = {"torch": torch.__version__, "lading": __version__}
    facts = {"versions": versions, "settings": asked, "captures": captured}
    agree_on("lading.plan", range(ranks), lambda: (None, facts))
    answer = json.loads(by_first_rank("lading.plan", answer_as_json))
    if "plan" not in answer:
        raise PlanInfeasible(answer.pop("message"), **answer)
    return plan_from_dict(answer["plan"], "the plan of rank 0", PlanKind.RUN.advice)


def _facts_of(captured: StepGraph) -> Iterator[tuple[str, object]]:
    """Yield what is compared of a capture, by name; its fingerprint last, as it says least."""
    named = [*((p.names[0], p.tensor) for p in captured.parameters), *captured.buffers, *captured.inputs[0]]
    yield "micro-batches", captured.accumulation
    yield from ((name, (captured.tensors[tensor].dtype, captured.tensors[tensor].shape)) for name, tensor in named)
    yield from ((f"gradient of {p.names[0]}", p.gradient is not None) for p in captured.parameters)
    yield "operations", f"{len(captured.ops)}, hash {captured.fingerprint}"


def check_spread_layout(layout: str, devices: int) -> Layout:
    """Layout of a run: the one asked for, or a replica a rank.

    Raises:
        ConfigError: it is no layout, or one that runs are not spread in yet.
    """
    asked = parse_layout(layout, devices) if layout else Layout(dp=devices or num_ranks()[0])
    if asked != Layout(**{key: getattr(asked, key) for key in _SPREAD}):
        raise ConfigError(
            f'layout: expected replicas, as "dp4", shards, as "dp4,zero3" or "dp4,zero3,shard2", a pipeline, as "pp4" '
            f'or "pp2,vpp2,interleaved", tensor parallel, as "tp2" or "tp2,sp", the tokens of a sequence, as "cp2", or '
            f'these together, as "dp2,pp2,zero1" or "dp2,tp2,zero3", or experts on ranks, as "dp2,ep2", got '
            f"{layout!r}; a run is spread in no other way yet"
        )
    if asked.pp == 1 and (asked.vpp > 1 or asked.schedule != ALONE.schedule):
        raise ConfigError(
            f"layout: expected a schedule and chunks of a rank (vpp) in a pipeline only, got {layout!r}; add pp2"
        )
    if asked.cp > 1 and (asked.ep > 1 or asked.sp):
        raise ConfigError(
            f"layout: expected context parallel without experts on ranks and without sequence parallel, got "
            f"{layout!r}; leave {'ep' if asked.ep > 1 else 'sp'} out, or cp"
        )
    if asked.zero and asked.sharding_ranks % asked.cp:
        raise ConfigError(
            f"layout: expected shards over all ranks that share a sequence, so shard a multiple of cp, got {layout!r}; "
            f"give shard{asked.cp} or more"
        )
    shards = asked.axes["shard"]
    if asked.ep > 1 and (asked.ep != asked.dp or asked.tp > 1 or shards not in (1, asked.dp)):
        raise ConfigError(
            f"layout: expected experts spread over all replicas, which may have shards and stages, as "
            f'"dp{asked.ep},ep{asked.ep}", "dp{asked.ep},ep{asked.ep},zero3" or "dp{asked.ep},ep{asked.ep},pp2", got '
            f"{layout!r}; leave the rest out, or ep"
        )
    if asked.sp and asked.tp == 1:
        raise ConfigError(f"layout: expected sequence parallel (sp) over ranks along tp, got {layout!r}; add tp2")
    return dataclasses.replace(asked, zero=0, shard=0) if asked.shards == 1 else asked


def _check_spread(spread: Layout, rule: ParameterRule, matrices: Matrices | None, others: Sequence[StepGraph]) -> None:
    """Refuse a layout that this step cannot be spread in.

    Raises:
        ConfigError: says what is in the way.
    """
    uncut = _uncut(rule, others)
    if (spread.tp > 1 or spread.ep > 1) and any(s.block > 1 for s in rule.state_specs(_LARGE).values()):
        uncut = uncut or f'{name_of(rule)} with states = "8bit", of which each block of elements has one scale'
    if (spread.tp > 1 or spread.ep > 1) and matrices is not None:
        uncut = uncut or f"{matrices.rule}, which moves whole matrices"
    if spread.ep > 1 and isinstance(rule, TorchUpdate):
        uncut = uncut or f"{name_of(rule)}, whose groups name experts that a rank has not"
    if (spread.zero or spread.tp > 1 or spread.ep > 1) and uncut:
        raise ConfigError(
            "layout: expected one step, and a rule that treats elements alone (lading.AdamW, torch.optim.AdamW), to "
            f'be cut into shards, got {uncut}; train replicas (layout="dp{spread.devices}"), or leave that out'
        )
    if spread.pp > 1 and others:
        raise ConfigError(
            "layout: expected one step in a pipeline, whose ranks have parameters of their own, got further steps "
            f'({_FURTHER}); train replicas (layout="dp{spread.devices}"), or leave that out'
        )


def _uncut(rule: ParameterRule, others: Sequence[StepGraph]) -> str:
    """Say what of a step cannot be cut into shards; "" where all can."""
    if others:
        return f"further steps ({_FURTHER}), which use parameters in an order of their own"
    return f"{name_of(rule)}, which moves whole parameters" if rule.whole else ""


def _states_told(captured: StepGraph, rule: ParameterRule) -> str:
    """Say in words how many bytes the states take, of a rule that keeps them in a format of its own; "" of others."""
    if not isinstance(rule, MomentRule) or rule.states == "auto":
        return ""
    shapes = [captured.tensors[p.tensor].shape for p in captured.parameters if p.gradient is not None]
    specs = [spec for shape in shapes for spec in rule.of_size(prod(shape)).state_specs(shape).values()]
    size = sum(prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in specs)
    each = size / max(1, sum(map(prod, shapes)))
    dtypes = ", ".join(dict.fromkeys(spec.dtype for spec in specs))
    return (
        f"states of {name_of(rule)} take {each:.2f} bytes a trained parameter, {format_bytes(size)} in all ({dtypes}); "
        f"their updates are timed by what their operations read and write, partly from a cache"
    )


def _other_groups(optimizer: torch.optim.Optimizer, captured: StepGraph) -> tuple[tuple[str, ...], ...]:
    """Names of the captured parameters that an optimizer moves alike, but those that it moves as its first.

    Alike are those of one group that have had as many updates: a unit of shards counts them once.

    Raises:
        ConfigError: not all are alike, and the model that was captured is gone.
    """
    alike: dict[tuple[int, float], list[torch.Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            alike.setdefault((number, float(state.get("step", bool(state)))), []).append(parameter)
    if len(alike) < 2:
        return ()
    model = None if captured.frozen is None or captured.frozen.model is None else captured.frozen.model()
    if model is None:
        raise ConfigError(
            f"optimizer: expected the model that was captured, moved in {len(alike)} ways (groups, numbers "
            "of updates), found that it is gone; plan while it exists, or capture again"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    first = {alias: p.names[0] for p in captured.parameters for alias in p.names}
    rest = ([names.get(id(p), "") for p in members] for members in [*alike.values()][1:])
    return tuple(tuple(first[name] for name in group if name in first) for group in rest)


def plan_run(
    run: RunConfig,
    machine: Machine | None = None,
    step: CapturedRun | None = None,
    *,
    devices: int = 0,
    cache: bool = False,
    loads: Loads = MappingProxyType({}),
    progress: PlanProgress = SILENT,
) -> Prepared:
    """Plan a run for its machine, or for ``machine``; in a job of several ranks the first does, for all.

    Args:
        step: Captured step of this run, or of one that differs in memory at most; None captures it now.
        devices: Ranks of a job to be started later; 0 for those of this one, or of the run's layout.
        cache: Whether to take the plan from the user's cache folder, and to keep it there (``planner.cache``).
        loads: What is known of the experts of a run that leaves them out: shares of steps, or with mean tokens.
        progress: Receives what is being done, for people.
    """
    ranks = parse_layout(run.layout, devices).devices if num_ranks()[0] == 1 else num_ranks()[0]
    run = sharing_batches(sharing_processors(resolved(run), 0 if num_ranks()[0] > 1 else ranks), ranks)
    torch.set_num_threads(run.num_threads)
    machine = _with_threads(machine or machine_of(run), ranks, run.num_threads)
    progress.update(0.0, "capturing the model")
    step = step or capture_run(run, machine)
    asked, settings = run.optimization, run.memory
    clipping = (settings.clipped, asked.clip_norm)
    check_alone(step.captured, ranks, settings.experts, clipping, compile=asked.compile, others=bool(step.others))
    if ranks > 1:
        return _plan_on_ranks(run, machine, step, ranks, cache=cache)
    rest = [] if step.evaluation_graph is None else [step.evaluation_graph]
    memory, others = memory_by_turns(step.graph, rest, machine, progress)
    make = _RunPlanner(run, step, memory, others, progress, cache)
    if settings.experts:
        planned = plan_experts(make, settings.policy, settings.budget, machine, loads, hosts=settings.experts_on_host)
    elif settings.clipped is not None:
        guessing = partial(make.guessing, machine=machine)
        planned = plan_speculating(guessing, settings.budget, step.graph, settings.clipped)
    else:
        planned = make(settings.policy, settings.budget, machine)
    moved = run.optimization
    made = _annotated(planned.plan, memory, step.captured, moved.optimizer, moved.matrices).of_run(run_to_dict(run))
    return Prepared(run, step, made, planned.program, limit_notes(run, machine, run_limits(run, machine)))


@dataclass(frozen=True)
class _RunPlanner:
    """Planner of a captured run on one device.

    Attributes:
        memory: Memory of its kernels.
        further_steps: Its further steps, each with the scratch of its operations.
        cache: As of ``plan_run``.
        guesses: Whether some updates of the step do not wait for the norm of all gradients.
    """

    run: RunConfig
    step: CapturedRun
    memory: KernelScratch
    further_steps: Sequence[tuple[StepGraph, Sequence[int]]]
    progress: PlanProgress
    cache: bool
    guesses: bool = False

    def guessing(self, waiting: frozenset[str] | None, budget: str | float, machine: Machine) -> Planned:
        """Plan the run with these parameters' updates waiting for the norm of all gradients; None for all."""
        policy = self.run.memory.policy
        if waiting is None:
            return self(policy, budget, machine)
        step = dataclasses.replace(self.step, graph=with_guess(self.step.graph, waiting))
        memory, _ = memory_by_turns(step.graph, [], machine, self.progress)
        made = dataclasses.replace(self, step=step, memory=memory, guesses=True)(policy, budget, machine)
        return with_waiting(made, waiting)

    def __call__(self, policy: str | Policy, budget: str | float, machine: Machine) -> Planned:
        """Plan the run by a policy, within a budget of the device, for a machine."""
        run = self.run
        return cached_plan(
            self.step.graph,
            machine,
            folder=cache_folder() if self.cache else None,
            progress=self.progress,
            others=self.further_steps,
            budget=budget,
            budgets=run_limits(run, machine),
            policy=policy,
            expansion={
                "clip_norm": run.optimization.clip_norm,
                "master_weights": float(has_masters(run)),
                "compile": float(run.optimization.compile),
                **({SPECULATES: 1.0} if self.guesses else {}),
                **self.memory.settings(_run_save_bytes(run, self.step.graph, machine)),
                **_staging(run, self.step, machine),
            },
            workspace_bytes=self.memory.scratch_bytes,
        )


def _plan_on_ranks(run: RunConfig, machine: Machine, step: CapturedRun, ranks: int, *, cache: bool) -> Prepared:
    """Plan a captured run for several ranks, which share this host."""
    chosen = run.optimization
    local_ranks = ranks_here() if num_ranks()[0] > 1 else ranks
    limits = run_limits(run, machine, local_ranks)
    made = plan(
        step.captured,
        machine,
        budget=run.memory.budget,
        budgets=limits,
        policy=run.memory.policy,
        clip_norm=chosen.clip_norm,
        master_weights=has_masters(run),
        optimizer=chosen.optimizer,
        matrices=chosen.matrices,
        compile=chosen.compile,
        cache=cache,
        layout=run.layout,
        devices=ranks,
        others=step.others,
        stage_saves=run.checkpoint.stages,
    ).of_run(run_to_dict(run))
    mine, notes = made.of_rank(rank_number()), limit_notes(run, machine, limits, local_ranks)
    return Prepared(run, step, made, programs_of(mine, step.captured, step.others)[0], notes)


def run_in_memory(run: RunConfig, machine: Machine, step: CapturedRun, devices: int) -> InMemory:
    """Predict a captured run in its layout if ranks of one host keep everything in memory; nothing is searched.

    Raises:
        ConfigError: a run is not spread so, or this step cannot be.
    """
    chosen, spread = run.optimization, check_spread_layout(run.layout, devices)
    _check_spread(spread, chosen.optimizer, chosen.matrices, step.others)
    moved = _MovedBy(
        clip_norm=chosen.clip_norm,
        master_weights=has_masters(run),
        optimizer=chosen.optimizer,
        matrices=chosen.matrices,
    )
    shared = _with_threads(machine, devices, run.num_threads).shared_by(devices)
    layout, parts, predicted = _prepared_layout(step.captured, shared, spread, moved)
    if predicted is not None:
        return predicted
    return in_memory([step_of(step.captured, shared, **moved, layout=layout, choices=part) for part in parts], shared)


def sketch_run(run: RunConfig, machine: Machine, step: CapturedRun) -> Planned:
    """Plan a captured run for ``machine`` without a search; budgets are the run's, those of tiers in bytes."""
    memory = memory_of_kernels(step.graph, machine)
    return sketch_plan(
        step.graph,
        machine,
        budget=run.memory.budget,
        budgets=run.memory.tier_budgets({tier.name: 0 for tier in machine.tiers}, machine.swap_tier),
        workspace_bytes=memory.scratch_bytes,
        expansion=memory.settings(_run_save_bytes(run, step.graph, machine)),
    )


def _annotated(
    plan: Plan,
    memory: KernelScratch,
    captured: StepGraph,
    optimizer: ParameterRule,
    matrices: Matrices | None,
    layout: Layout = ALONE,
) -> Plan:
    """Copy of a plan that records what moves its parameters, and what was assumed about the step's memory."""
    assumptions = (*plan.assumptions, *([memory.assumption] if memory.assumption else []))
    if isinstance(optimizer, TorchUpdate):
        assumptions = (
            f"updates by {optimizer.optimizer} are timed by what their {optimizer.calls} operations read and write, "
            "partly from a cache, and by Python's part in each",
            *assumptions,
        )
    if states_sentence := _states_told(captured, optimizer):
        assumptions = (states_sentence, *assumptions)
    settings = {} if optimizer == default_rule() else dataclasses.asdict(optimizer)
    request = dataclasses.replace(plan.request, optimizer=name_of(optimizer), optimizer_settings=settings)
    if matrices is not None:
        request = dataclasses.replace(request, matrices=dataclasses.asdict(matrices))
        assumptions = (grouped(captured, matrices, name_of(optimizer))[1], *assumptions)
    plan = dataclasses.replace(plan, request=request, assumptions=assumptions)
    if layout.devices == 1:
        return plan
    request = dataclasses.replace(request, layout=str(layout), devices=layout.devices)
    return dataclasses.replace(plan, request=request, layout=str(layout))


def _with_threads(machine: Machine, local_ranks: int, threads: int = 0) -> Machine:
    """Make the machine of processes with so many threads, or those of this one where it is one of those that train.

    Others, and all on another host, have a rank's share of it, as it was measured; one process there has all of it.
    """
    if machine.host_id != host_id():
        return machine if local_ranks == 1 else machine.with_threads()
    if not threads and (local_ranks == 1 or num_ranks()[0] > 1):
        threads = torch.get_num_threads()
    return machine.with_threads(threads)


def _save_bytes(graph: StepGraph, machine: Machine, layout: Layout = ALONE) -> int:
    """Bytes ``Trainer.save`` takes of a CPU: a block to write, a bounce buffer, and what it cannot read in chunks.

    Of several ranks each takes part in gathering what they share. On another device the buffers lie on the host.
    """
    if machine.device.kind != "cpu":
        return 0
    sized = [(view, graph.storages[storage].size_bytes) for storage, view in named_tensors(graph).items()]
    loose = [size for view, size in sized if not (view.is_row_major and view.spans(size))]
    objects = _SAVE_ONCE_BYTES + _SAVE_BYTES_PER_TENSOR * len(sized)
    shared = (value for value in values_of(graph).values() if value.is_shared or layout.pp > 1)
    gathered = max(map(gathering_bytes, shared), default=0)
    return objects + CHUNK_BYTES + max(BOUNCE_BYTES, 2 * max(loose, default=0)) + gathered


def _run_save_bytes(run: RunConfig, graph: StepGraph, machine: Machine) -> int:
    return _save_bytes(graph, machine) if run.kept_checkpoints else 0


def _staging(run: RunConfig, step: CapturedRun, machine: Machine) -> dict[str, float]:
    """Setting of a plan that stages checkpoints beside training, of a run that wants that of a CPU."""
    if not run.checkpoint.stages or machine.device.kind != "cpu":
        return {}
    sizes = [value.size_bytes for value in values_of(step.graph).values()]
    sizes += [size for _, size in saved_beside(step.captured)]
    return {STAGING_BYTES: float(sum(map(staged_bytes, sizes)))}
