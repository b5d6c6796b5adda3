"""From a captured graph and a machine to a Plan, and from a Plan to its Program.

``make_plan`` compares the named policies, states a lower bound, and records for whom the plan was made;
``make_program`` lowers a plan again and refuses any other graph or result.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from lading import __version__
from lading.cost.compute import (
    compiled_products,
    decomposes,
    fused_costs,
    missing_rates,
    op_costs,
    packed_columns,
    placed_costs,
)
from lading.errors import BudgetAboveDevice, ConfigError, PlanInfeasible, ProgramError
from lading.ir.action import ActionKind
from lading.ir.defer import updates
from lading.ir.graph import StepGraph
from lading.ir.machine import KERNEL_BYTES, Machine
from lading.ir.plan import Choice, Option, Plan, PolicyRow
from lading.ir.program import PAGE_BYTES, Program
from lading.ir.reporting import SILENT, PlanProgress
from lading.ir.timeline import Timeline
from lading.memory.lifetime import Lifetimes, can_recompute, gaps, is_movable, lifetimes
from lading.memory.verify import verify
from lading.planner.hosting import hosted_step
from lading.planner.lower import Costs
from lading.planner.orders import Ordered, best_order, deferred_step, ordered_with_host, smallest_order_bytes
from lading.planner.policies import Policy, checkpoint_every_block, keep_all
from lading.planner.residency import MOST_RETIMED, Found, Step, lower_bound_s
from lading.planner.streaming import streaming
from lading.sim.engine import simulate, stall_s
from lading.units import format_bytes, format_seconds, parse_bytes, share_of, share_or_bytes

_POLICIES: dict[str, Policy] = {
    "keep-all": keep_all,
    "checkpoint-every-block": checkpoint_every_block,
}
POLICIES = (*_POLICIES, "residency")
#: Setting of a plan: what saving takes of the device beside arena and overhead.
SAVE_BYTES = "save_bytes"
#: Setting of a plan: what the kernels of its step were measured to leave behind in a process, once.
KEPT_BYTES = "kept_bytes"
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Planned:
    """A plan with the objects it was made from.

    Attributes:
        graph: The whole step (expanded), with updates deferred where the plan does that.
        keep_all_bytes: Device bytes that the policy keep-all needs.
    """

    plan: Plan
    graph: StepGraph
    program: Program
    predicted: Timeline
    keep_all_bytes: int


@contextmanager
def _collector_paused() -> Generator[None]:
    """Keeps the cyclic collector from walking a large graph again and again: planning makes no cycles worth it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def make_plan(
    graph: StepGraph,
    machine: Machine,
    *,
    budget: str | float,
    disk_budget: str | float | None = None,
    policy: str | Policy = "residency",
    expansion: Mapping[str, float] | None = None,
    workspace_bytes: Sequence[int] = (),
    progress: PlanProgress = SILENT,
) -> Planned:
    """Choose where every storage is between any two uses.

    Args:
        graph: The whole step, from ``lading.ir.step.expand``.
        budget: Device bytes ("256MB"), or a share ("50%" or 0.5) of what keep-all needs.
        disk_budget: Bytes allowed on disk; None allows the tier's capacity.
        policy: One of POLICIES, or a function of your own, which is compared with them under its name.
        expansion: Settings that ``graph`` was expanded with, SAVE_BYTES and, where measured, KEPT_BYTES; recorded.
        workspace_bytes: Scratch of each operation outside its tensors; () where unknown, which becomes an assumption.
        progress: Is told what is being done.

    Raises:
        PlanInfeasible: no plan of this policy fits.
        ConfigError: unknown policy, budget or dtype.
    """
    policy, policies = _named(policy)
    lives = lifetimes(graph)
    given = expansion or {}
    costs = step_costs(graph, machine, workspace_bytes, given)
    limits = _budgets(machine, _NO_LIMIT, disk_budget)
    usable = dataclasses.replace(machine, tiers=tuple(tier for tier in machine.tiers if limits[tier.name]))
    free = Step(graph, lives, usable, costs, limits)
    keep_all_bytes = free.needs({})
    budgets = _budgets(machine, share_or_bytes(budget, keep_all_bytes), disk_budget)
    _check_device(machine, budgets["device"])
    step = dataclasses.replace(free, budgets=budgets)
    rows, fitting = _plain_policies(step, free, keep_all_bytes, policies)
    chosen = _chosen(step, policy, rows, fitting, progress)
    if policy == "residency":
        progress.update(0.97, "operations on the host")
        chosen = ordered_with_host(chosen)
        rows.append(_row(policy, chosen.found))
    found = chosen.found
    verify(found.program)
    settings = {"keep_all_bytes": float(keep_all_bytes), **given}
    assumptions = _assumptions(graph, machine, workspace_bytes, given)
    asked = _Asked(graph, machine, policy, budgets)
    plan = _plan(asked, chosen, tuple(rows), settings, assumptions)
    return Planned(plan, chosen.step.graph, found.program, found.timeline, keep_all_bytes)


@dataclass(frozen=True)
class _Asked:
    """For what a plan is made."""

    graph: StepGraph
    machine: Machine
    policy: str
    budgets: dict[str, int]


def _plan(
    asked: _Asked,
    chosen: Ordered,
    policies: tuple[PolicyRow, ...],
    settings: dict[str, float],
    assumptions: tuple[str, ...],
) -> Plan:
    """The record of what was chosen."""
    found, program = chosen.found, chosen.found.program
    lower = {tier: program.tier_bytes(tier) for tier in program.slots}
    return Plan(
        version=__version__,
        graph_fingerprint=asked.graph.fingerprint,
        machine_fingerprint=asked.machine.fingerprint,
        host_id=asked.machine.host_id,
        program_fingerprint=program.fingerprint,
        policy=asked.policy,
        budgets=asked.budgets,
        choices=_choices(chosen.step.lives, found.choices),
        settings={
            **settings,
            "deferred": chosen.deferred,
            "retimed": found.retimed,
            "host_saves_s": _saved_s(found),
        },
        hosted=chosen.step.graph.hosted,
        step_s=found.timeline.duration_s,
        lower_bound_s=min(chosen.bound_s, found.step_s),  # a plan that reaches its bound does so up to rounding
        peak_bytes={"device": program.peak_bytes, **lower},
        bytes_by_role=_bytes_at_peak(found),
        policies=policies,
        assumptions=assumptions,
        machine=json.loads(json.dumps(dataclasses.asdict(asked.machine))),  # as it is read back
    )


def _saved_s(found: Found) -> float:
    return max(0.0, found.device_s - found.step_s)


@dataclass(frozen=True)
class Sketch:
    """A plan made without a search, for a step that a search would take too long for: verified like any other.

    Attributes:
        host_saves_s: By how much running operations on the host makes the step shorter.
    """

    program: Program
    predicted: Timeline
    assumptions: tuple[str, ...]
    host_saves_s: float = 0.0


@_collector_paused()
def sketch_plan(
    graph: StepGraph,
    machine: Machine,
    *,
    budget: str | float,
    disk_budget: str | float | None = None,
    workspace_bytes: Sequence[int] = (),
    settings: Mapping[str, float] | None = None,
) -> Sketch:
    """A plan by ``lading.planner.streaming``; the arguments are those of ``make_plan``, ``settings`` its expansion.

    Raises:
        PlanInfeasible: it does not fit; ``make_plan`` may find one that does.
        ConfigError: unknown budget or dtype.
    """
    given = settings or {}
    costs = step_costs(graph, machine, workspace_bytes, given)
    free = Step(graph, lifetimes(graph), machine, costs, _budgets(machine, _NO_LIMIT, disk_budget))
    whole_bytes = 0 if share_of(budget) is None else free.needs({})
    budgets = _budgets(machine, share_or_bytes(budget, whole_bytes), disk_budget)
    _check_device(machine, budgets["device"])
    found = streaming(dataclasses.replace(free, budgets=budgets))
    return Sketch(found.program, found.timeline, _assumptions(graph, machine, workspace_bytes, given), _saved_s(found))


@_collector_paused()
def make_program(plan: Plan, graph: StepGraph, machine: Machine, *, workspace_bytes: Sequence[int] = ()) -> Program:
    """The Program of a plan, made again.

    Raises:
        ConfigError: the plan was made for another model, batch or machine.
        ProgramError: this version of Lading lowers the plan differently.
    """
    check_made_for(plan, graph, machine)
    lives = lifetimes(graph)
    costs = step_costs(graph, machine, workspace_bytes, plan.settings)
    step = deferred_step(Step(graph, lives, machine, costs, plan.budgets), _deferred(plan, graph))
    step = hosted_step(step, plan.hosted)
    _check_choices(plan.choices, step, "the plan")
    retimed = min(max(0, int(plan.settings.get("retimed", 0))), MOST_RETIMED)
    lowered = step.lower({(c.storage, c.start): c.option for c in plan.choices}, retimed)
    if lowered.program is None or lowered.program.fingerprint != plan.program_fingerprint:
        raise ProgramError(
            f"the plan was made by Lading {plan.version} and does not give the same program here "
            f"(Lading {__version__}); plan again"
        )
    verify(lowered.program)
    return lowered.program


def _deferred(plan: Plan, graph: StepGraph) -> int:
    count, known = plan.settings.get("deferred", 0), len(updates(graph))
    if not 0 <= count <= known or count != int(count):
        raise ConfigError(f"the plan defers {count} updates, expected a whole number in 0..{known}; plan again")
    return int(count)


def step_costs(
    graph: StepGraph,
    machine: Machine,
    workspace_bytes: Sequence[int] = (),
    settings: Mapping[str, float] = MappingProxyType({}),
) -> Costs:
    """What a plan of a step is made from; the arguments are those of ``make_plan``, ``settings`` its expansion.

    Raises:
        ConfigError: a dtype without a peak on this device.
    """
    fused, kept = bool(settings.get("compile", 0.0)), settings.get(KEPT_BYTES)
    return Costs(
        op_seconds=tuple((fused_costs if fused else op_costs)(graph, machine.device)),
        workspace_bytes=tuple(workspace_bytes) or (0,) * len(graph.ops),
        columns=packed_columns(graph),
        compiled=compiled_products(graph),
        decomposes=decomposes(graph),
        save_bytes=max(0, int(settings.get(SAVE_BYTES, 0.0))),
        kept_bytes=None if kept is None else max(0, int(kept)),
    )


def predict(plan: Plan, program: Program, machine: Machine) -> Timeline:
    """What one step of a plan's Program does on the machine, as it was planned."""
    return simulate(program, machine, op_seconds=placed_costs(program.graph, machine, fused=plan.compiled))


def check_made_for(plan: Plan, graph: StepGraph, machine: Machine) -> None:
    """Refuse a plan made for something else.

    Raises:
        ConfigError: naming what differs.
    """
    pairs = (
        ("model, batch or optimizer", plan.graph_fingerprint, graph.fingerprint),
        ("machine", plan.machine_fingerprint, machine.fingerprint),
    )
    for what, wanted, found in pairs:
        if wanted != found:
            raise ConfigError(f"the plan was made for another {what} (expected {wanted}, found {found}); plan again")


def _check_choices(choices: Sequence[Choice], step: Step, whose: str) -> None:
    """Refuse what an edited or damaged file, or a policy of the user's, asks for and the step does not offer."""
    known = {(gap.storage, gap.start, gap.end): gap for gap in gaps(step.graph, step.lives)}
    for choice in choices:
        gap = known.get((choice.storage, choice.start, choice.end))
        if gap is not None and choice.option is Option.RECOMPUTE and can_recompute(step.graph, step.lives, gap):
            continue
        tier = step.machine.tier(choice.option.value)
        if gap is not None and tier is not None and is_movable(step.graph, gap.storage, PAGE_BYTES):
            continue
        raise ConfigError(
            f"{whose} has a choice that this step does not offer, {choice}: expected recompute where "
            "can_recompute allows it, or a tier of the machine where is_movable does"
        )


def _budgets(machine: Machine, device: int, disk_budget: str | float | None) -> dict[str, int]:
    budgets = {"device": device}
    for tier in machine.tiers:
        limit = disk_budget if tier.name == "disk" else None
        budgets[tier.name] = tier.capacity_bytes if limit is None else parse_bytes(limit)
    return budgets


def _check_device(machine: Machine, budget_bytes: int) -> None:
    if budget_bytes < 1:
        raise ConfigError("expected a device budget above 0 bytes, got 0")
    if budget_bytes > machine.device.memory_bytes:
        raise BudgetAboveDevice(
            f"expected a device budget of at most {machine.device.memory_bytes} bytes, all that {machine.name} has, "
            f"got {budget_bytes}"
        )


def _named(policy: str | Policy) -> tuple[str, dict[str, Policy]]:
    """The policy's name, and every plain policy to compare by name."""
    if not isinstance(policy, str):
        name = str(getattr(policy, "__name__", type(policy).__name__))
        if name in POLICIES:
            raise ConfigError(f"expected a policy of another name than Lading's own, got {name!r}")
        return name, {**_POLICIES, name: policy}
    if policy not in POLICIES:
        raise ConfigError(f"expected a policy among {', '.join(POLICIES)}, got {policy!r}")
    return policy, _POLICIES


def _plain_policies(
    step: Step, free: Step, keep_all_bytes: int, policies: Mapping[str, Policy]
) -> tuple[list[PolicyRow], dict[str, Found]]:
    """One row for each policy that ignores the budget; those that fit it can also be used."""
    rows: list[PolicyRow] = []
    fitting: dict[str, Found] = {}
    for name, policy in policies.items():
        choices = policy(step.graph, step.lives)
        if name not in _POLICIES:
            _check_choices(_choices(step.lives, choices), step, f"policy {name!r}")
        lowered = step.lower(choices)
        if lowered.program is not None:
            fitting[name] = Found(choices, lowered.program, step)
            rows.append(_row(name, fitting[name]))
        else:
            needs = free.needs(choices) if choices else keep_all_bytes
            rows.append(PolicyRow(policy=name, fits=False, peak_bytes=needs, note="does not fit the budget"))
    return rows, fitting


def _chosen(
    step: Step, policy: str, rows: Sequence[PolicyRow], fitting: dict[str, Found], progress: PlanProgress
) -> Ordered:
    if policy == "residency":
        return best_order(step, fitting.values(), progress)
    if policy in fitting:
        return Ordered(0, step, fitting[policy], lower_bound_s(step))
    needs = next(row.peak_bytes for row in rows if row.policy == policy)
    smallest, missing = smallest_order_bytes(step), needs - step.budgets["device"]
    raise PlanInfeasible(
        f"policy {policy!r} needs {needs} bytes ({format_bytes(needs)}) on the device whatever the budget: "
        f"{missing} bytes ({format_bytes(missing)}) are missing.\n"
        f"Raise the budget, or take policy 'residency', which can do with {smallest} bytes ({format_bytes(smallest)}).",
        missing_bytes=missing,
        smallest_budget_bytes=smallest,
    )


def _row(name: str, found: Found) -> PolicyRow:
    program, timeline = found.program, found.timeline
    spent = {event.action: event.end_s - event.start_s for event in timeline.events}
    recompute = sum(spent.get(a.id, 0.0) for a in program.actions if a.kind is ActionKind.RECOMPUTE)
    moved: Counter[str] = Counter()
    for action in program.actions:
        if action.kind is ActionKind.MOVE and action.stream != "compute" and action.storage is not None:
            moved[action.stream] += program.graph.storages[action.storage].size_bytes
    return PolicyRow(
        policy=name,
        fits=True,
        peak_bytes=program.peak_bytes,
        step_s=timeline.duration_s,
        recompute_s=recompute,
        stall_s=stall_s(timeline, program),
        moved_bytes=dict(moved),
        note=_hosting(found),
    )


def _hosting(found: Found) -> str:
    """What runs on the host, in words; "" where nothing does."""
    count = len(found.step.graph.hosted)
    saved = f": saves {format_seconds(_saved_s(found))} a step" if found.device_s else ""
    return f"{count} operations, updates mostly, on the host's processors{saved}" if count else ""


def _choices(lives: Lifetimes, choices: dict[tuple[int, int], Option]) -> tuple[Choice, ...]:
    rows: list[Choice] = []
    for (storage, start), option in sorted(choices.items()):
        uses = lives.uses[storage]
        later = [u for u in uses if u > start]
        rows.append(Choice(storage, start, later[0] if later else uses[0], option))
    return tuple(row for row in rows if row.option is not Option.KEEP)


def _bytes_at_peak(found: Found) -> dict[str, int]:
    sample = max((s for s in found.timeline.memory if s.tier == "device"), key=lambda s: s.total_bytes)
    return dict(sample.bytes_by_role)


def _assumptions(
    graph: StepGraph, machine: Machine, workspace_bytes: Sequence[int], settings: Mapping[str, float]
) -> tuple[str, ...]:
    found = list(missing_rates(graph, machine.device))
    if settings.get("compile", 0.0):
        found.append("compiled regions take the share of their operations' time that their own reads and writes are")
    own = {key: text for key, text in machine.sources.items() if not key.startswith("links")}  # of one device's step
    found += [f"{key}: {text}" for key, text in own.items() if text.startswith("assumption")]
    found += [
        f"operations are not slowed by transfers of the {tier.name}: give its read_slowdown and write_slowdown"
        for tier in machine.tiers
        if not (machine.host_id or tier.read_slowdown or tier.write_slowdown)
    ]
    worked_out = machine.device.kind == "cpu" and KEPT_BYTES not in settings
    if worked_out and KERNEL_BYTES not in machine.sources and compiled_products(graph):
        found.append(
            f"{KERNEL_BYTES} is not known: code compiled for 16-bit products is taken as "
            f"{format_bytes(machine.device.kernel_bytes)} for each; measure it with: lading probe"
        )
    if not workspace_bytes:
        found.append("scratch memory inside operations is taken as 0: the kernels of this device are not known here")
    elif machine.device.kind != "cpu" and not machine.host_id:
        found.append(
            "scratch memory inside operations is worked out from their shapes: no such device was here to measure it"
        )
    return tuple(found)
