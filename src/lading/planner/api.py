"""From a captured graph and a machine to a Plan.

``make_plan`` compares the named policies, states a lower bound, and records for whom the plan was made; ``sketch_plan``
makes one without a search. What either makes is read back as any saved plan is, by ``lading.memory.restore``.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from lading import __version__
from lading.cost.compute import (
    compiled_products,
    decomposes,
    device_costs,
    missing_rates,
    packed_columns,
)
from lading.errors import BudgetAboveDevice, ConfigError, PlanInfeasible, did_you_mean
from lading.ir.action import DEVICE, ActionKind
from lading.ir.graph import StepGraph
from lading.ir.guess import guess_of
from lading.ir.layout import Layout
from lading.ir.machine import KERNEL_BYTES, Machine
from lading.ir.plan import Choice, Choices, Option, Plan, PolicyRow, Predictions, ResourceLimit
from lading.ir.program import COMPUTE_STREAM, PAGE_BYTES, Homes, Program, slot_sizes
from lading.ir.reduction import RECEIVE, TRANSFERS, joined_ranks
from lading.ir.reporting import SILENT, PlanProgress
from lading.ir.request import Request
from lading.ir.sharding import units_of
from lading.ir.timeline import Timeline
from lading.memory.lifetime import Lifetimes, can_recompute, gaps, is_movable, lifetimes
from lading.memory.restore import action_times, predicted_timeline
from lading.memory.tier_layout import usable_tiers
from lading.memory.verify import verify
from lading.planner.critical import relieved
from lading.planner.first_plans import first_plan_s, first_plans_s
from lading.planner.forms import head_forms, late_forms, lesser_forms
from lading.planner.limit import resource_limits, rounded_bound_s, rounded_limit
from lading.planner.lower import StepCosts
from lading.planner.orders import (
    REACH,
    Ordered,
    ahead_of_forms,
    best_of_forms,
    best_order,
    ordered_with_host,
    sharpened,
    sharpened_with_host,
    smallest_order_bytes,
    with_weight_pieces_tried,
)
from lading.planner.pacing import with_paced
from lading.planner.policies import (
    Policy,
    checkpoint_every_block,
    keep_all,
    reshard_and_checkpoint,
    reshard_every_unit,
)
from lading.planner.rescheduling import rescheduled
from lading.planner.residency import Found, StepProblem, lower_bound_s
from lading.planner.streaming import streaming
from lading.planner.trips import changed_trips
from lading.sim.device_step import simulate_ranks, stall_s
from lading.units import format_bytes, format_seconds, parse_bytes, share_of, share_or_bytes

_POLICIES: dict[str, Policy] = {
    "keep-all": keep_all,
    "checkpoint-every-block": checkpoint_every_block,
    "reshard-every-unit": reshard_every_unit,
    "reshard-and-checkpoint": reshard_and_checkpoint,
}
#: Policies for shards: other steps have nothing that they would drop.
_OF_SHARDS = frozenset(("reshard-every-unit", "reshard-and-checkpoint"))
POLICIES = (*_POLICIES, "residency")
#: Setting of a plan: what saving takes of the device beside arena and overhead.
SAVE_BYTES = "save_bytes"
#: Setting of a plan: what staging checkpoints beside training takes of the device, where the budget has room for it.
STAGING_BYTES = "staging_bytes"
#: Setting of a plan: what the kernels of its step were measured to leave behind in a process, once.
KEPT_BYTES = "kept_bytes"
#: Setting of a plan: part of the largest scratch that some of equal runs take and others do not.
SPARE_BYTES = "spare_bytes"
#: Setting of a plan: number of operations of other steps over the same values, which the process is ready to run too.
OTHER_OPS = "other_ops"
#: Setting of a plan: whether updates may wait for the next step, where that may be another one; 1.0 if not said.
DEFERS = "defers"
#: What gloo keeps of its own once it has reduced: so many times what a rank receives of the largest tensor, up to a
#: limit. Measured: 2.1, 7.7 and 8.0 MiB for tensors of 1, 4 and 25 MiB on 2 ranks, 1.1, 3.8 and 7.7 on 4, torch 2.13.
_RECEIVED, _RECEIVED_BYTES = 4, 8 << 20
#: Sizes of buckets that are tried, in bytes; the last holds all gradients. Smaller ones cost more than their
#: collectives take alone, as ranks that share processors wait for a turn. Measured, 2 ranks on 2 cores, a mixture of
#: experts: a step of 450 ms with 14 buckets of 4 MiB took 509 with 54 of 1 and 1005 with 114 of 1/4 (benchmarks/ranks).
_BUCKETS = (4 << 20, 16 << 20, 64 << 20, 1 << 60)
_NO_LIMIT = 1 << 60
#: Share of its bound within which the first plan of a step makes other forms needless.
_NEAR = 0.03
#: Operations of a step of which no other forms are tried, as it has a wide search. Of a larger one as many forms with
#: late updates are tried as have so many operations together.
_FEW_OPS, _FORMS_OPS = 200, 20_000


@dataclass(frozen=True)
class Planned:
    """Plan of a run together with its Program, and those of its others."""

    plan: Plan
    program: Program
    others: tuple[Program, ...] = ()

    @cached_property
    def predicted(self) -> Timeline:
        """Predict the timeline of one step, as it was planned."""
        return predicted_timeline(self.plan, self.program)


@contextmanager
def _collector_paused() -> Generator[None]:
    """Pause the cyclic collector, which walks a large graph again and again.

    Planning makes no cycles worth collecting.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def make_plan(  # noqa: PLR0913  all that decides a plan
    graph: StepGraph,
    machine: Machine,
    *,
    budget: str | float,
    budgets: Mapping[str, str | float] = MappingProxyType({}),
    policy: str | Policy = "residency",
    expansion: Mapping[str, float] | None = None,
    workspace_bytes: Sequence[int] = (),
    homes: Homes | None = None,
    progress: PlanProgress = SILENT,
) -> Planned:
    """Choose where every storage is between any two uses.

    Args:
        graph: The whole step, from ``lading.ir.expand.expand``.
        budget: Device bytes ("256MB"), or a share ("50%" or 0.5) of what keep-all needs.
        budgets: Bytes allowed in tiers, by name; in others their capacity.
        policy: One of POLICIES, or a function of your own, which is compared with them under its name.
        expansion: Settings that ``graph`` was expanded with, SAVE_BYTES, STAGING_BYTES and, where measured, KEPT_BYTES
            and SPARE_BYTES; recorded.
        workspace_bytes: Scratch of each operation outside its tensors; () where unknown, which becomes an assumption.
        homes: Where values are between steps, for a step that takes turns with one planned before.
        progress: Is told what is being done.

    Raises:
        PlanInfeasible: no plan of this policy fits.
        ConfigError: unknown policy, tier, budget or dtype.
    """
    policy, policies = _named(policy, graph)
    lives = lifetimes(graph, homes)
    settings = expansion or {}
    costs = step_costs(graph, machine, workspace_bytes, settings)
    limits = {DEVICE: _NO_LIMIT, **tier_limits(machine, budgets)}
    tiers = usable_tiers(machine.tiers, limits, graph, homes, searched=policy == "residency")
    defers = bool(settings.get(DEFERS, 1.0)) and guess_of(graph) is None
    free = StepProblem(graph, lives, dataclasses.replace(machine, tiers=tiers), costs, limits, defers=defers)
    whole_bytes = free.needs({})
    allowed = {**limits, DEVICE: share_or_bytes(budget, whole_bytes)}
    _check_device(machine, allowed[DEVICE])
    step = dataclasses.replace(free, budgets=allowed)
    rows, fitting = _plain_policies(step, free, whole_bytes, policies)
    chosen = _chosen_form(step, policy, rows, fitting, settings, progress)
    if policy == "residency":
        chosen = chosen if _is_given(step, settings) else with_weight_pieces_tried(chosen, step, progress)
        chosen = _improved(chosen, step, progress, on_device=homes is not None)
    staging_bytes = int(settings.get(STAGING_BYTES, 0.0))
    shortage = _staging_shortage(chosen.found.program, staging_bytes) if staging_bytes else ""
    chosen = _with_staging(chosen, staging_bytes)
    if policy == "residency":
        rows.append(_row(policy, chosen.found))
    plan = chosen.found
    verify(plan.program)
    limits = resource_limits(chosen.orders or (plan.step, step, *step.orders.values())) if chosen.bound_s else ()
    limits = tuple(rounded_limit(each, plan.step_s) for each in limits)
    bound_s = max(chosen.bound_s, limits[0].seconds) if limits else chosen.bound_s
    predictions = _predictions(
        plan,
        lower_bound_s=rounded_bound_s(bound_s, plan.step_s),
        limits=limits,
        keep_all_bytes=whole_bytes,
        policies=tuple(rows),
    )
    request = _request(graph, machine, policy, allowed, settings)
    said = (*_assumptions(graph, machine, workspace_bytes, settings), *filter(None, [shortage, _inexact(plan)]))
    return _planned(plan, request, predictions, said, deferred=chosen.deferred)


def _improved(chosen: Ordered, step: StepProblem, progress: PlanProgress, *, on_device: bool) -> Ordered:
    """Plan by paced flows, change choices on a plan's critical path, try operations on the host, and sharpen the bound.

    Args:
        on_device: Whether nothing is hosted, as the step has its values where one that was planned before has them.
    """
    progress.update(0.91, "plans that know in which window of the step each byte moves")
    paced = chosen.found if chosen.paced else with_paced(chosen.found, chosen.bound_s)
    progress.update(0.92, "the fastest plan with choices on its critical path changed")
    chosen = dataclasses.replace(chosen, found=relieved(paced, chosen.bound_s), paced=True)
    progress.update(0.95, "operations on the host, and a sharper time that no plan can beat")
    chosen = sharpened(chosen) if on_device else _with_host(chosen, step)
    progress.update(0.97, "what moves changed, as a quick schedule of the fastest plan says, and scheduled again")
    return dataclasses.replace(chosen, found=rescheduled(changed_trips(chosen.found, chosen.bound_s), chosen.bound_s))


def _request(
    graph: StepGraph, machine: Machine, policy: str, budgets: dict[str, int], settings: Mapping[str, float]
) -> Request:
    return Request(
        graph_fingerprint=graph.fingerprint,
        machine=machine.name,
        machine_table=json.loads(json.dumps(dataclasses.asdict(machine))),  # as it is read back
        machine_fingerprint=machine.fingerprint,
        host_id=machine.host_id,
        budgets=budgets,
        policy=policy,
        settings=dict(settings),
    )


def _predictions(
    found: Found,
    *,
    lower_bound_s: float = 0.0,
    limits: tuple[ResourceLimit, ...] = (),
    keep_all_bytes: int,
    policies: tuple[PolicyRow, ...] = (),
) -> Predictions:
    program = found.program
    peaks = {DEVICE: program.predicted_bytes, **{tier: program.tier_bytes(tier) for tier in program.slots}}
    return Predictions(
        step_s=found.timeline.duration_s,
        lower_bound_s=lower_bound_s,
        limits=limits,
        keep_all_bytes=keep_all_bytes,
        host_saves_s=_saved_s(found),
        peaks={"step": peaks},
        bytes_by_role=_bytes_at_peak(found),
        policies=policies,
        actions=action_times(found.timeline.events),
    )


def _planned(
    found: Found, request: Request, predictions: Predictions, assumptions: tuple[str, ...], *, deferred: int = 0
) -> Planned:
    """Make the plan of choices, for a step of which ``deferred`` updates are deferred."""
    gaps = _gap_choices(found.step.lives, found.choices)
    plan = Plan(
        version=__version__,
        request=request,
        choices=Choices(
            gaps=gaps,
            loss_parts=found.step.loss_parts,
            head_parts=found.step.head_parts,
            gradient_pieces=found.step.gradient_pieces,
            late_products=found.step.late_products,
            weight_pieces=found.step.weight_pieces,
            late_updates=found.step.late_updates,
            deferred=deferred,
            retimed=found.retimed,
            hosted=found.step.graph.hosted,
        ),
        program=tuple(found.program.text().splitlines()),
        predictions=predictions,
        assumptions=assumptions,
    )
    return Planned(plan, found.program)


def _saved_s(found: Found) -> float:
    return max(0.0, found.device_s - found.step_s)


@_collector_paused()
def sketch_plan(
    graph: StepGraph,
    machine: Machine,
    *,
    budget: str | float,
    budgets: Mapping[str, str | float] = MappingProxyType({}),
    workspace_bytes: Sequence[int] = (),
    expansion: Mapping[str, float] | None = None,
) -> Planned:
    """Plan by ``lading.planner.streaming``, without a search; the arguments are those of ``make_plan``.

    Nothing is compared with it, and no bound is stated.

    Raises:
        PlanInfeasible: it does not fit; ``make_plan`` may find one that does.
        ConfigError: unknown budget or dtype.
    """
    settings = expansion or {}
    costs = step_costs(graph, machine, workspace_bytes, settings)
    free = StepProblem(graph, lifetimes(graph), machine, costs, {DEVICE: _NO_LIMIT, **tier_limits(machine, budgets)})
    whole_bytes = 0 if share_of(budget) is None else free.needs({})
    allowed = {**free.budgets, DEVICE: share_or_bytes(budget, whole_bytes)}
    _check_device(machine, allowed[DEVICE])
    plan = streaming(dataclasses.replace(free, budgets=allowed))
    request = _request(graph, machine, "streaming", allowed, settings)
    predictions = _predictions(plan, keep_all_bytes=whole_bytes)
    return _planned(plan, request, predictions, _assumptions(graph, machine, workspace_bytes, settings))


def step_costs(
    graph: StepGraph,
    machine: Machine,
    workspace_bytes: Sequence[int] = (),
    settings: Mapping[str, float] = MappingProxyType({}),
) -> StepCosts:
    """Predict the seconds and bytes of a step's operations that a plan is made from.

    Args:
        graph, machine, workspace_bytes: As in ``make_plan``.
        settings: Its ``expansion``.

    Raises:
        ConfigError: a dtype without a peak on this device.
    """
    fused, measured_bytes = bool(settings.get("compile", 0.0)), settings.get(KEPT_BYTES)
    return StepCosts(
        op_seconds=tuple(device_costs(graph, machine, fused=fused)),
        workspace_bytes=tuple(workspace_bytes) or (0,) * len(graph.ops),
        columns=packed_columns(graph),
        compiled=compiled_products(graph),
        decomposes=decomposes(graph),
        save_bytes=max(0, int(settings.get(SAVE_BYTES, 0.0))),
        kept_bytes=None if measured_bytes is None else max(0, int(measured_bytes)),
        spare_bytes=max(0, int(settings.get(SPARE_BYTES, 0.0))),
        received_bytes=_received_bytes(graph),
        reducing_bytes=_reducing_bytes(graph),
        other_ops=int(settings.get(OTHER_OPS, 0.0)),
        output_bytes=graph.output_bytes,
    )


def keep_all_bytes(
    graph: StepGraph, machine: Machine, workspace_bytes: Sequence[int], settings: Mapping[str, float]
) -> int:
    """Device bytes that a step takes if all of it stays there; the arguments are those of ``step_costs``."""
    limits = {DEVICE: _NO_LIMIT, **{tier.name: tier.capacity_bytes for tier in machine.tiers}}
    costs = step_costs(graph, machine, workspace_bytes, settings)
    return StepProblem(graph, lifetimes(graph), machine, costs, limits).needs({})


@dataclass(frozen=True)
class InMemory:
    """Step of ranks that keep everything in memory, as predicted.

    Attributes:
        seconds: Seconds of the step.
        peak_bytes: Most device bytes of a rank, scratch of kernels left out.
        working_bytes: Most bytes that one operation of a rank reads and writes: no plan of the step needs fewer.
    """

    seconds: float
    peak_bytes: int
    working_bytes: int


def best_buckets(step_of: Callable[[Layout], StepGraph], machine: Machine, layout: Layout) -> tuple[Layout, InMemory]:
    """Layout with the least bytes of a bucket with which a step takes the shortest time, all kept in memory.

    Small buckets are reduced early, and each costs a collective's latency.

    Args:
        step_of: Makes the whole step in a layout.

    Returns:
        The layout, and what its step takes.

    Raises:
        ConfigError: the step cannot be run by several ranks, or nothing is known of collectives among so many.
    """
    predicted: dict[Layout, InMemory] = {}
    counts = set[int]()
    for size in _BUCKETS:
        tried = dataclasses.replace(layout, bucket_bytes=size)
        graph = step_of(tried)
        if len(graph.collectives) not in counts:  # else the buckets of a smaller size
            counts.add(len(graph.collectives))
            predicted[tried] = in_memory([graph], machine)
        if sum(graph.ops[index].bytes_read for index in graph.collectives) < size:
            break  # one bucket has all gradients, and so has any larger one
    best = min(predicted, key=lambda tried: (predicted[tried].seconds, tried.bucket_bytes))
    return best, predicted[best]


def in_memory(steps: Sequence[StepGraph], machine: Machine) -> InMemory:
    """Predict a step of ranks that keep everything in memory.

    Args:
        steps: Step of each rank along a pipeline; one where all ranks run the same.
    """
    limits = {DEVICE: _NO_LIMIT, **{tier.name: tier.capacity_bytes for tier in machine.tiers}}
    problems = [StepProblem(step, lifetimes(step), machine, step_costs(step, machine), limits) for step in steps]
    programs = [program for each in problems if (program := each.lower({}).program) is not None]
    assert len(programs) == len(steps), "without a limit everything fits"
    if len(programs) == 1:
        seconds = problems[0].seconds(programs[0])
    else:
        seconds = max(timeline.duration_s for timeline in simulate_ranks(programs, machine))
    return InMemory(seconds, max(program.predicted_bytes for program in programs), max(map(_working_bytes, steps)))


def _working_bytes(step: StepGraph) -> int:
    """Most bytes of the device that one operation of a step reads and writes."""
    sizes = slot_sizes(step)
    touched = ({*step.op_reads[op], *step.op_writes[op]} for op in range(len(step.ops)) if op not in step.on_host)
    return max((sum(sizes[storage] for storage in storages) for storages in touched), default=0)


def joined(each: Sequence[Planned], machine: Machine) -> Plan:
    """Plan of the first rank of a pipeline with those of the others, whose steps wait for each other.

    Args:
        each: Plan of each rank, as if what it receives were there.
    """
    timelines = simulate_ranks([planned.program for planned in each], machine)
    step_s = max(timeline.duration_s for timeline in timelines)
    plans = [
        dataclasses.replace(
            planned.plan,
            predictions=dataclasses.replace(
                planned.plan.predictions, step_s=step_s, actions=action_times(timeline.events)
            ),
        )
        for planned, timeline in zip(each, timelines, strict=True)
    ]
    return dataclasses.replace(plans[0], peers=tuple(plans[1:]))


def staging_saves(each: Sequence[Planned], staging_bytes: Sequence[int]) -> list[Planned]:
    """Let checkpoints be staged beside training in what the plans leave of their budgets, if that is enough for all.

    Args:
        each: Plans of the ranks along a pipeline, or the one of all ranks.
        staging_bytes: Bytes that it takes on the busiest rank of each.
    """
    rows = list(zip(each, staging_bytes, strict=True))
    shortages = (_staging_shortage(program, size) for p, size in rows for program in (p.program, *p.others))
    if words := next(filter(None, shortages), ""):
        return [dataclasses.replace(p, plan=_assuming(p.plan, words)) for p in each]
    made = list[Planned]()
    for planned, size in rows:
        pairs = zip(planned.plan.others, planned.others, strict=True)
        others = [_staged(plan, program, size) for plan, program in pairs]
        plan, program = _staged(planned.plan, planned.program, size)
        plan = dataclasses.replace(plan, others=tuple(other for other, _ in others))
        made.append(Planned(plan, program, tuple(other for _, other in others)))
    return made


def _staged(plan: Plan, program: Program, staging_bytes: int) -> tuple[Plan, Program]:
    """Copy of a plan and its Program that stage checkpoints in so many bytes."""
    program = dataclasses.replace(program, staging_bytes=staging_bytes)
    peak, before = program.predicted_bytes, plan.predictions
    rows = (
        dataclasses.replace(row, peak_bytes=peak) if row.policy == plan.request.policy else row
        for row in before.policies
    )
    peaks = {moment: {**tiers, DEVICE: peak} for moment, tiers in before.peaks.items()}
    predictions = dataclasses.replace(before, peaks=peaks, policies=tuple(rows))
    return dataclasses.replace(plan, program=tuple(program.text().splitlines()), predictions=predictions), program


def _staging_shortage(program: Program, staging_bytes: int) -> str:
    """Say why checkpoints cannot be staged beside training in what a plan leaves of its budget; "" where they can."""
    room = program.budgets[DEVICE] - program.peak_bytes
    if staging_bytes <= room:
        return ""
    return (
        f"checkpoints are written while training waits: staged beside it they would take "
        f"{format_bytes(staging_bytes)}, and the budget leaves {format_bytes(room)}; raise it by "
        f"{format_bytes(staging_bytes - room)}"
    )


def _assuming(plan: Plan, words: str) -> Plan:
    return dataclasses.replace(plan, assumptions=(*plan.assumptions, words))


def _received_bytes(graph: StepGraph) -> int:
    """Bytes of the host's memory in which all that a step receives from other stages has a place."""
    return sum(op.bytes_written for op in graph.ops if op.name == RECEIVE)


def _reducing_bytes(graph: StepGraph) -> int:
    """Bytes of the host's memory that what ranks reduce in a step takes besides, at most."""
    reductions = (graph.ops[index] for index in graph.collectives if graph.ops[index].name not in TRANSFERS)
    largest = max((op.bytes_read // joined_ranks(op) for op in reductions), default=0)
    return min(_RECEIVED_BYTES, _RECEIVED * largest)


def _check_choices(choices: Sequence[Choice], step: StepProblem, whose: str) -> None:
    """Refuse choices of a user's policy that the step does not offer."""
    known = {(gap.storage, gap.start, gap.end): gap for gap in gaps(step.graph, step.lives)}
    for choice in choices:
        gap = known.get((choice.storage, choice.start, choice.end))
        if gap is not None and choice.option == Option.RECOMPUTE and can_recompute(step.graph, step.lives, gap):
            continue
        tier = step.machine.tier(choice.option.tier)
        if gap is not None and tier is not None and is_movable(step.graph, gap.storage, PAGE_BYTES):
            continue
        raise ConfigError(
            f"{whose} has a choice that this step does not offer, {choice}: expected recompute where "
            "can_recompute allows it, or a tier of the machine where is_movable does"
        )


def tier_limits(machine: Machine, budgets: Mapping[str, str | float]) -> dict[str, int]:
    """Bytes allowed in every tier of a machine, nearest first: its budget, or its capacity.

    Args:
        budgets: Sizes ("20GB") or bytes by the name of a tier.
    Raises:
        ConfigError: no such tier, or no such size.
    """
    capacity = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    if unknown := budgets.keys() - capacity.keys():
        raise ConfigError(
            f"budgets: expected tiers of {machine.name} ({', '.join(capacity) or 'it has none'}), got {min(unknown)!r}"
        )
    return capacity | {name: parse_bytes(size, f"budgets[{name!r}]") for name, size in budgets.items()}


def _check_device(machine: Machine, budget_bytes: int) -> None:
    if budget_bytes < 1:
        raise ConfigError("expected a device budget above 0 bytes, got 0")
    if budget_bytes > machine.device.memory_bytes:
        ranks = machine.sources.get("ranks", "").removeprefix("assumption: ")
        raise BudgetAboveDevice(
            f"expected a device budget of at most {machine.device.memory_bytes} bytes, all that {machine.name} has"
            f"{ranks and f' for a rank ({ranks})'}, got {budget_bytes}"
        )


def _named(policy: str | Policy, graph: StepGraph) -> tuple[str, dict[str, Policy]]:
    """Name a policy, and list every plain policy to compare for a step by name."""
    plain = {name: each for name, each in _POLICIES.items() if name not in _OF_SHARDS or units_of(graph)}
    if not isinstance(policy, str):
        if not callable(policy):
            names = ", ".join((*plain, POLICIES[-1]))
            raise ConfigError(f"expected a policy among {names}, or a function that makes the choices, got {policy!r}")
        name = str(getattr(policy, "__name__", type(policy).__name__))
        if name in POLICIES:
            raise ConfigError(f"expected a policy of another name than Lading's own, got {name!r}")
        return name, {**plain, name: policy}
    if policy not in plain and policy != POLICIES[-1]:
        names = (*plain, POLICIES[-1])
        raise ConfigError(f"policy: expected one of {', '.join(names)}, got {policy!r}{did_you_mean(policy, names)}")
    return policy, plain


def _plain_policies(
    step: StepProblem, free: StepProblem, keep_all_bytes: int, policies: Mapping[str, Policy]
) -> tuple[list[PolicyRow], dict[str, Found]]:
    """Lower every policy that ignores the budget; returns a row for each, and those that fit by name."""
    rows: list[PolicyRow] = []
    fitting: dict[str, Found] = {}
    for name, policy in policies.items():
        choices = policy(step.graph, step.lives)
        if name not in _POLICIES:
            _check_choices(_gap_choices(step.lives, choices), step, f"policy {name!r}")
        lowered = step.lower(choices)
        if lowered.program is not None:
            fitting[name] = Found(choices, lowered.program, step)
            rows.append(_row(name, fitting[name]))
        else:
            needs = free.needs(choices) if choices else keep_all_bytes
            rows.append(PolicyRow(policy=name, fits=False, peak_bytes=needs, note="does not fit the budget"))
    return rows, fitting


def _chosen(
    step: StepProblem, policy: str, rows: Sequence[PolicyRow], fitting: dict[str, Found], progress: PlanProgress
) -> Ordered:
    if policy == "residency":
        return best_order(step, fitting.values(), progress)
    if policy in fitting:
        return Ordered(0, step, fitting[policy], lower_bound_s(step))
    needs = next(row.peak_bytes for row in rows if row.policy == policy)
    smallest, missing = smallest_order_bytes(step), needs - step.budgets[DEVICE]
    raise PlanInfeasible(
        f"policy {policy!r} needs {needs} bytes ({format_bytes(needs)}) on the device whatever the budget: "
        f"{missing} bytes ({format_bytes(missing)}) are missing.\n"
        f"Raise the budget, or take policy 'residency', which can do with {smallest} bytes ({format_bytes(smallest)}).",
        missing_bytes=missing,
        smallest_budget_bytes=smallest,
    )


def _chosen_form(
    step: StepProblem,
    policy: str,
    rows: Sequence[PolicyRow],
    fitting: dict[str, Found],
    settings: Mapping[str, float],
    progress: PlanProgress,
) -> Ordered:
    """Choose a plan of the step as it is or in another form: with its loss in parts, with late updates, or both.

    Forms are searched whose first plans are the fastest, or which have a plan at all; the bound is below plans of all.
    A head in parts, which adds up a gradient in another order, is one of them only where no other has a plan.

    Raises:
        PlanInfeasible: as ``_chosen``; says it of the form that needs least.
    """
    try:
        return _chosen_exactly(step, policy, rows, fitting, settings, progress)
    except PlanInfeasible as error:
        forms = head_forms(step) if policy == "residency" and not _is_shared(step, settings) else []
        if not forms:
            raise
        exactly = error
    ahead = ahead_of_forms(forms, step)
    if ahead is not None:
        return ahead
    try:
        return best_of_forms(forms, first_plans_s(forms), fitting, progress)
    except PlanInfeasible as error:
        raise min(exactly, error, key=lambda each: each.smallest_budget_bytes or _NO_LIMIT) from None


def _chosen_exactly(
    step: StepProblem,
    policy: str,
    rows: Sequence[PolicyRow],
    fitting: dict[str, Found],
    settings: Mapping[str, float],
    progress: PlanProgress,
) -> Ordered:
    """Choose a plan of the forms of a step that give the same bits.

    Raises:
        PlanInfeasible: as ``_chosen``; says it of the form that needs least.
    """
    if policy != "residency" or any(not found.choices for found in fitting.values()) or _is_given(step, settings):
        return _chosen(step, policy, rows, fitting, progress)
    whole_s = first_plan_s(step)
    if whole_s < float("inf") and whole_s <= (1 + _NEAR) * lower_bound_s(step):  # another form could gain no more
        return _chosen(step, policy, rows, fitting, progress)
    forms = lesser_forms(step)
    first_s = first_plans_s(forms)
    # Of forms within reach of each other the last one needs least at once, which leaves gradients a place for longer.
    near = [form for form, form_s in zip(forms, first_s, strict=True) if form_s <= (1 + REACH) * min(first_s)]
    late = late_forms(near[-1]) if len(near[-1].graph.ops) > _FEW_OPS and not near[-1].is_hopeless else []
    late = late[: max(0, _FORMS_OPS // len(step.graph.ops) - len(forms))]
    first_s += first_plans_s(late, min(first_s))
    return best_of_forms([*forms, *late], first_s, fitting, progress)


def _with_host(chosen: Ordered, step: StepProblem) -> Ordered:
    """Try the plan with operations on the host, and sharpen the bound of the plan that is taken.

    With operations on the host it is below plans of the forms that compute less, with the same work there, too.
    """
    hosted = ordered_with_host(chosen)
    if hosted is chosen:
        return sharpened(chosen)
    return sharpened_with_host(hosted, chosen.step, chosen.orders or (step,))


def _is_given(step: StepProblem, settings: Mapping[str, float]) -> bool:
    """Whether a step keeps its operations: what others share, what is compiled, what ranks exchange.

    And what is small enough for a wide search, but for one of which no plan exists.
    """
    few = len(step.graph.ops) <= _FEW_OPS and not step.is_hopeless
    return few or _is_shared(step, settings)


def _is_shared(step: StepProblem, settings: Mapping[str, float]) -> bool:
    """Whether others have a say in a step's operations: steps over the same values, a compiler, other ranks."""
    shared = step.lives.homes is not None or settings.get(OTHER_OPS) or settings.get("compile")
    return bool(shared or step.graph.collectives)


def _with_staging(chosen: Ordered, staging_bytes: int) -> Ordered:
    """Let checkpoints be staged beside training in what the best plan leaves of the budget, if that is enough."""
    program = chosen.found.program
    if not staging_bytes or _staging_shortage(program, staging_bytes):
        return chosen
    program = dataclasses.replace(program, staging_bytes=staging_bytes)
    return dataclasses.replace(chosen, found=dataclasses.replace(chosen.found, program=program))


def _row(name: str, found: Found) -> PolicyRow:
    program, timeline = found.program, found.timeline
    spent = {event.action: event.end_s - event.start_s for event in timeline.events}
    recompute = sum(spent.get(a.id, 0.0) for a in program.actions if a.kind is ActionKind.RECOMPUTE)
    moved: Counter[str] = Counter()
    for action in program.actions:
        if action.kind is ActionKind.MOVE and action.stream != COMPUTE_STREAM and action.storage is not None:
            moved[action.stream] += program.graph.storages[action.storage].size_bytes
    return PolicyRow(
        policy=name,
        fits=True,
        peak_bytes=program.predicted_bytes,
        step_s=timeline.duration_s,
        recompute_s=recompute,
        stall_s=stall_s(timeline, program),
        moved_bytes=dict(moved),
        note=_hosting(found),
    )


def _hosting(found: Found) -> str:
    """Describe what runs on the host; "" where nothing does."""
    count = len(found.step.graph.hosted)
    saved = f": saves {format_seconds(_saved_s(found))} a step" if found.device_s else ""
    return f"{count} operations, updates mostly, on the host's processors{saved}" if count else ""


def _gap_choices(lives: Lifetimes, choices: dict[tuple[int, int], Option]) -> tuple[Choice, ...]:
    rows: list[Choice] = []
    for (storage, start), option in sorted(choices.items()):
        uses = lives.uses[storage]
        later = [u for u in uses if u > start]
        rows.append(Choice(storage, start, later[0] if later else uses[0], option))
    return tuple(row for row in rows if row.option != Option.KEEP)


def _bytes_at_peak(found: Found) -> dict[str, int]:
    sample = max((s for s in found.timeline.memory if s.tier == DEVICE), key=lambda s: s.total_bytes)
    return dict(sample.bytes_by_role)


def _inexact(found: Found) -> str:
    """Say what a plan adds up in another order than the step does; "" where all numbers keep their bits."""
    if not found.step.head_parts:
        return ""
    return (
        f"the head and its loss are computed in {found.step.head_parts} parts of the tokens, as no plan fits that has "
        "all logits at once: the gradient of the head's weight is added up in another order, so its last bits, and "
        "those of what is trained with it, are not plain PyTorch's"
    )


def _assumptions(
    graph: StepGraph, machine: Machine, workspace_bytes: Sequence[int], settings: Mapping[str, float]
) -> tuple[str, ...]:
    sentences = list(missing_rates(graph, machine.device))
    if settings.get("compile", 0.0):
        sentences.append(
            "compiled regions take the share of their operations' time that their own reads and writes are"
        )
    of_device = {
        key: text for key, text in machine.sources.items() if not key.startswith("links")
    }  # of one device's step
    sentences += [
        f"{key}: {text.removeprefix('assumption: ')}"
        for key, text in of_device.items()
        if text.startswith("assumption")
    ]
    sentences += [
        f"operations are not slowed by transfers of the {tier.name}: give its read_slowdown and write_slowdown"
        for tier in machine.tiers
        if not (machine.host_id or tier.read_slowdown or tier.write_slowdown)
    ]
    worked_out = machine.device.kind == "cpu" and KEPT_BYTES not in settings
    if worked_out and KERNEL_BYTES not in machine.sources and compiled_products(graph):
        sentences.append(
            f"{KERNEL_BYTES} is not known: code compiled for 16-bit products is taken as "
            f"{format_bytes(machine.device.kernel_bytes)} for each; measure it with: lading probe"
        )
    if not workspace_bytes:
        sentences.append(
            "scratch memory inside operations is taken as 0: the kernels of this device are not known here"
        )
    elif machine.device.kind != "cpu" and not machine.host_id:
        sentences.append(
            "scratch memory inside operations is worked out from their shapes: no such device was here to measure it"
        )
    return tuple(sentences)
