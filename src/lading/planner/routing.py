"""Plans of steps that leave out experts without tokens: which experts are read late, and what a step should then take.

The share of steps in which an expert gets tokens says how often its part of a Program runs. A read that waits for the
router can be left out, and then the expert's updates can be left to the step that needs them
(``lading.memory.guards``); but it is waited for where the expert is chosen after all. So experts that are seldom
chosen are read late, and others ahead as ever: of a few bounds between the two, that with the shortest expected step.

Experts differ only by how often they are chosen, which the search for a plan does not know: it counts every move as
certain, and where its plan moves an expert's values within a step they cannot be left out. So a second kind of plan is
tried: it keeps the experts chosen most often, of all layers, as many as there is room for, and has the values of all
others wait on a lower tier, between steps or whenever they are unused. With shares p, that moves p bytes of one of a
seldom chosen expert where the first kind moves it in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import inf
from typing import Protocol

from lading.errors import ConfigError, PlanInfeasible, check_type
from lading.ir.action import DEVICE, ActionKind
from lading.ir.experts import Expert, Router, find_experts, find_routers, owned_values
from lading.ir.graph import StepGraph
from lading.ir.host_speed import READ, WRITE
from lading.ir.machine import HostSpeed, Machine
from lading.ir.plan import HOST_TOKENS, NOT_ON_HOST, Option, Plan
from lading.ir.program import PAGE_BYTES, Program
from lading.memory.guards import (
    Guards,
    find_guards,
    find_routers_alone,
    layer_names,
    replay_bytes,
    with_late_reads,
)
from lading.memory.hosted_experts import HostedExperts, check_hosted, host_bytes, room_bytes
from lading.memory.lifetime import Lifetimes, can_recompute, gaps, is_movable, lifetimes
from lading.memory.restore import action_times
from lading.memory.tier_layout import home_tiers
from lading.memory.verify import verify
from lading.planner.api import POLICIES, Planned
from lading.planner.host_experts import (
    LAUNCHES,
    REFUSED,
    ROOM_REFUSED,
    HostChoice,
    host_choice,
    host_seconds,
    host_wait_s,
    sentences,
    waiting,
)
from lading.planner.policies import Policy
from lading.sim.device_step import simulate, stall_s, step_times
from lading.units import format_bytes, format_seconds

#: Setting of a plan: whether experts without tokens are left out of its step.
EXPERTS = "experts"
#: Setting of a plan: whether its step, which leaves out nothing, counts what routers choose.
COUNTED = "counted_experts"
#: Share of a step below which a plan that keeps whole experts is not taken where it moves more bytes.
_NO_MATTER = 0.01
#: Share by which sums of the same seconds differ.
_ROUNDING = 1e-9
#: Shares of steps below which experts are read late, tried in turn.
_BOUNDS = (0.0, 0.5, 0.9)
#: Plans that are tried between one that keeps as many experts as fit and one that keeps too many.
_NARROWED = 3
#: A gap of fewer operations is no time to go away.
_LEAST_OPS = 10
#: Steps that stand for all, and by how much the next expert's places among them are shifted: in each, experts get
#: tokens whose share is larger than their place. The golden ratio spreads the places of any number of experts.
_STEPS, _SHIFT = 8, 0.6180339887498949
_NO_EXPERTS = (
    "experts: expected outputs multiplied by the columns of a router's weights, which torch.scatter puts into zeros "
    "along the last dim, found none in this step; plan without experts"
)
#: Least share of steps that transfers are scheduled for.
_LEAST_SHARE = 0.05

#: For each router of a micro-batch, by its module, the share of steps in which each expert gets tokens.
Shares = Mapping[str, Sequence[float]]
#: Likewise, or pairs (share, mean tokens in those steps).
Loads = Mapping[str, Sequence[float | tuple[float, float]]]


class Maker(Protocol):
    """Plans a step by a policy, within a budget of the device, for a machine."""

    def __call__(self, policy: str | Policy, budget: str | float, machine: Machine) -> Planned: ...


def check_experts(experts: bool | Loads, graph: StepGraph, ranks: int, *, compile: bool) -> None:
    """Refuse experts where they cannot be left out, before anything is planned.

    Args:
        graph: Captured micro-batch.

    Raises:
        ConfigError: says where.
    """
    if experts is False:
        return
    if experts is not True:
        check_type("experts", experts, Mapping, "True, False, or shares of steps by the router's module")
    if ranks > 1 or compile:
        found = "several ranks" if ranks > 1 else "compile=True"
        raise ConfigError(f"experts: expected one device without compiled regions, got {found}; leave experts out")
    if not find_routers(graph):
        raise ConfigError(_NO_EXPERTS)


def plan_experts(
    make: Maker, policy: str | Policy, budget: str | float, machine: Machine, loads: Loads, *, hosts: bool = False
) -> Planned:
    """Plan a step that leaves out experts without tokens: the plan whose step is expected to be the shortest.

    That is the plan of the policy; or, of "residency" where shares are known, one that keeps the experts chosen most
    often in memory and has all others wait on the nearest tier (``kept_experts``); or, where none of these is expected
    to pay, the plan that fetches every expert, which needs no room for updates and on a device waits for no router.
    Where tokens are known, too, plans are tried in which the host computes experts that get few
    (``planner.host_experts``).

    Args:
        make: Plans the step by a policy, within a budget of the device, for a machine.
        loads: What is known of the routers; of others every step is expected to need every expert.
        hosts: Whether the host is asked to compute experts once their tokens are known.

    Raises:
        ConfigError: the step has no experts, or ``loads`` are of other ones.
        PlanInfeasible: as ``make``, where not even the plan that fetches every expert fits.
    """
    shares, tokens = shares_and_tokens(loads)
    first = make(policy, budget, machine)
    known = _checked(shares, first.program)
    whole_s = expected_step_s(first.program, find_routers_alone(first.program), machine, known)
    host = host_choice(first.program.graph, machine, tokens) if tokens else None
    reasons = (waiting(machine) if hosts else ()) if host is None else host.reasons
    is_hosting = host is not None and bool(host.limits)
    if not _are_seldom(known) and host_wait_s(machine) and not is_hosting:  # for nothing
        return _saying(_fetching_all(first, machine, whole_s), reasons)
    search = _ExpertPlans(make, policy, machine, known, first)
    expected_s, chosen = search.best(None)
    if host is not None and is_hosting:
        hosted_s, hosted = search.hosting(host)
        if hosted is not None and hosted_s < (1 - _NO_MATTER) * expected_s:
            expected_s, chosen = hosted_s, hosted
        else:
            more = () if hosted is None else (each for each in hosted.plan.assumptions if each.startswith(REFUSED))
            reasons = (*reasons, *more, _not_faster(hosted_s, expected_s))
    if chosen is not None and expected_s <= whole_s * (1 + _ROUNDING):
        return _saying(chosen, reasons)
    return _saying(_fetching_all(first, machine, whole_s, expected_s), reasons)


def _not_faster(hosted_s: float, expected_s: float) -> str:
    """Say why a plan in which the host computes experts is not taken."""
    if hosted_s == inf:
        return f"{NOT_ON_HOST}: no plan that does so fits"
    return (
        f"{NOT_ON_HOST}: a step of the best plan that allows it is expected to take "
        f"{format_seconds(hosted_s)}, one without {format_seconds(expected_s)}"
    )


def _saying(made: Planned, sentences: Sequence[str]) -> Planned:
    """Plan with more assumptions."""
    plan = dataclasses.replace(made.plan, assumptions=(*made.plan.assumptions, *sentences))
    return dataclasses.replace(made, plan=plan)


def shares_and_tokens(loads: Loads) -> tuple[Shares, dict[str, tuple[float, ...]]]:
    """Shares of steps, and mean tokens in these of the routers of which they are given for every expert.

    Raises:
        ConfigError: a pair is none of a share and tokens, or some experts of a router have tokens and some none.
    """
    shares: dict[str, Sequence[float]] = {}
    tokens: dict[str, tuple[float, ...]] = {}
    for name, row in loads.items():
        pairs = [each for each in row if not isinstance(each, (int, float))]
        if pairs and (len(pairs) < len(row) or any(len(each) != 2 or not 0 <= each[1] < inf for each in pairs)):
            raise ConfigError(
                f"experts[{name!r}]: expected for every expert a share of steps, or for every one a pair (share, mean "
                f"tokens in those steps), got {list(row)}"
            )
        if pairs:
            tokens[name] = tuple(float(count) for _, count in pairs)
        shares[name] = [each if isinstance(each, (int, float)) else each[0] for each in row]
    return shares, tokens


@dataclass(frozen=True)
class _ExpertPlans:
    """Search for the plan whose step is expected to be the shortest.

    Attributes:
        shares: Shares of steps of every router.
        first: Plan of the policy that knows nothing of experts.
    """

    make: Maker
    policy: str | Policy
    machine: Machine
    shares: Shares
    first: Planned

    def hosting(self, host: HostChoice) -> tuple[float, Planned | None]:
        """Seconds and plan with the best of a few parts of the experts that the host may compute.

        It computes some while others are fetched, so the best part of them is seldom all.
        """
        plans = self._plans(host)
        each = [self.best(part, plans) for part in host.parts()]
        best_s, made = min(each, key=lambda made: made[0])
        whole = each[0][1]
        if made is None or whole is None:
            return best_s, made
        left_off = (line for line in whole.plan.assumptions if line.startswith(ROOM_REFUSED))
        return best_s, _saying(made, [line for line in left_off if line not in made.plan.assumptions])

    def _plans(self, host: HostChoice | None) -> list[Planned]:
        """Plans that do not know the shares, with room for what leaving out takes."""
        first, machine, allowed_bytes = self.first, self.machine, self.first.plan.budgets[DEVICE]
        ways = [
            partial(_with_room, partial(self.make, self.policy, machine=machine), allowed_bytes, machine, first, host)
        ]
        if first.program.graph.on_host:
            ways.append(partial(_on_device, partial(self.make, self.policy), first, machine, host))
        return [*_feasible(ways)]

    def best(self, host: HostChoice | None, plans: list[Planned] | None = None) -> tuple[float, Planned | None]:
        """Seconds of the step and the plan; infinite and None where none fits.

        Args:
            host: Experts that the host may compute; None for none.
            plans: Plans that do not know the shares; None makes them.
        """
        first, machine, allowed_bytes = self.first, self.machine, self.first.plan.budgets[DEVICE]
        plans = self._plans(host) if plans is None else plans
        expected_s, chosen = _shortest(plans, machine, self.shares, allowed_bytes, host)
        shares = self.shares if host is None else host.on_device(self.shares)
        if _are_seldom(shares) and self.policy == POLICIES[-1]:
            kept = _KeptExperts(self.make, machine, shares, first, [first, *plans][-1], allowed_bytes, host).plans()
            kept_s, keeps = _shortest(kept, machine, self.shares, allowed_bytes, host)
            if keeps is not None and (chosen is None or _is_better(keeps, kept_s, chosen, expected_s, shares)):
                return kept_s, keeps
        return expected_s, chosen


def _is_better(keeps: Planned, kept_s: float, chosen: Planned, expected_s: float, shares: Shares) -> bool:
    """Whether to take a plan that keeps whole experts: it is faster by what counts, or as fast and moves less."""
    if kept_s > expected_s:
        return False
    is_faster = kept_s < (1 - _NO_MATTER) * expected_s
    return is_faster or _moved_bytes(keeps.program, shares) < _moved_bytes(chosen.program, shares)


def _feasible(ways: Iterable[Callable[[], Planned]]) -> Iterator[Planned]:
    """Yield the plans that fit: room for updates, or all on the device, may take more than the budget."""
    for way in ways:
        try:
            made = way()
        except PlanInfeasible:
            continue
        yield made


def _shortest(
    plans: Iterable[Planned], machine: Machine, shares: Shares, allowed_bytes: int, host: HostChoice | None
) -> tuple[float, Planned | None]:
    """Plan whose step is expected to be the shortest where experts without tokens are left out, and its seconds."""
    each = (_with_experts(planned, machine, shares, allowed_bytes, host) for planned in plans)
    return min(each, key=lambda made: made[0], default=(inf, None))


def _are_seldom(shares: Shares) -> bool:
    """Whether some expert gets no token in some steps."""
    return any(share < 1 for row in shares.values() for share in row)


def _fetching_all(first: Planned, machine: Machine, whole_s: float, expected_s: float | None = None) -> Planned:
    """Plan in which every expert is fetched in every step: without waits and room for updates, but counting choices.

    Args:
        first: Plan of the step that knows nothing of experts.
        whole_s: Seconds of its step, counting included.
        expected_s: Seconds expected of the best step that leaves experts out; None where that cannot be shorter.
    """
    plan, guards = first.plan, find_routers_alone(first.program)
    timeline = simulate(first.program, machine, longer_s=_waits_s(guards, machine))
    count = sum(router.experts for router in guards.routers if router.micro_batch == 0)
    why = "no step is known to choose one for no token"
    if expected_s == inf:
        why = "there is no room beside its step to make up for updates later"
    elif expected_s is not None:
        why = f"a step that leaves some out is expected to take {format_seconds(expected_s)}"
    sentence = (
        f"{count} experts are fetched in every step, {format_seconds(whole_s)}: {why}; what routers choose is counted"
    )
    return dataclasses.replace(
        first,
        plan=dataclasses.replace(
            plan,
            predictions=dataclasses.replace(
                plan.predictions, step_s=timeline.duration_s, actions=action_times(timeline.events)
            ),
            request=dataclasses.replace(plan.request, settings={**plan.request.settings, COUNTED: 1.0}),
            assumptions=(*plan.assumptions, sentence),
        ),
    )


def _on_device(make: Callable[..., Planned], first: Planned, machine: Machine, host: HostChoice | None) -> Planned:
    """Plan of a step with every operation on the device, within the same budget.

    An update on the host runs in every step, and zeros are moved there for it: too much where much is left out.

    Args:
        first: Plan that has operations on the host.
    """
    alone = dataclasses.replace(machine, host_device=None)
    made = _with_room(partial(make, machine=alone), first.plan.budgets[DEVICE], alone, None, host)
    return _as_asked(made, first, machine)


def _with_room(
    make: Callable[[int], Planned],
    allowed_bytes: int,
    machine: Machine,
    made: Planned | None = None,
    host: HostChoice | None = None,
) -> Planned:
    """Plan a step such that its budget has room to make up for updates.

    Raises:
        PlanInfeasible: it has none, or not enough.
    """
    made = made or make(allowed_bytes)
    more = _more_bytes(made, machine, host)
    if more >= allowed_bytes:
        raise PlanInfeasible(
            f"expected room of {more} bytes for experts beside the step, found a budget of {allowed_bytes} for both; "
            "raise it, or plan without experts",
            missing_bytes=more - allowed_bytes + 1,
            smallest_budget_bytes=0,
        )
    return make(allowed_bytes - more) if more else made


@dataclass(frozen=True)
class _KeptExperts:
    """Planner of steps that keep the experts chosen most often.

    Such a step has every move in it, so that it can be run whoever is chosen, but few of them come: transfers are
    scheduled as if the tier were as much faster as its moves are seldom. Else a write would wait for its turn behind
    writes that do not come, until the next step has begun, and could not be left out.

    Attributes:
        shares: Shares of steps of every router.
        first: Plan of a policy that does not know them.
        rest: Another such plan, of which all but the values of experts may be where it has them.
    """

    make: Maker
    machine: Machine
    shares: Shares
    first: Planned
    rest: Planned
    allowed_bytes: int
    host: HostChoice | None

    def plans(self) -> Iterator[Planned]:
        """Yield plans in which the others' values wait whenever they are unused, and between steps only.

        Whatever else there is stays on the device, or is where the search for a plan has put it.
        """
        tier = next((name for name, size in self.first.plan.budgets.items() if name != DEVICE and size), None)
        graph = self.first.program.graph
        sizes = _expert_bytes(graph)
        if tier is None or not sizes:
            return
        for least_ops, rest in product((_LEAST_OPS, len(graph.ops)), (None, self.rest)):
            made = self._with_most(partial(self._plan, tier, least_ops=least_ops, rest=rest), sizes)
            if made is not None:
                yield made

    def _with_most(self, make: Callable[[int], Planned], sizes: Mapping[frozenset[Expert], int]) -> Planned | None:
        """Plan with as many experts kept as fit, or almost; None where none fits.

        Args:
            make: Plans with so many kept.
            sizes: Bytes of each expert.
        """
        count, fewer, too_many, made = len(sizes), 1, len(sizes) + 1, None
        while made is None:
            try:
                made = make(count)
            except PlanInfeasible as error:  # says how much is missing, which is how many experts too many
                if error.missing_bytes <= 0 or not count:  # a lower tier is full, of which fewer kept experts need more
                    return None
                too_many = count
                more = max(fewer, error.missing_bytes * len(sizes) // sum(sizes.values()))
                count, fewer = max(0, count - more), 2 * fewer
        for _ in range(_NARROWED):
            if (middle := (count + too_many) // 2) == count:
                break
            try:
                made, count = make(middle), middle
            except PlanInfeasible:
                too_many = middle
        return made

    def _plan(self, tier: str, count: int, *, least_ops: int, rest: Planned | None) -> Planned:
        """Plan with so many experts kept; asked for as the first plan was."""
        graph, names = self.first.program.graph, layer_names(find_routers(self.first.program.graph))
        shares = {e: max(self.shares[names[layer]][number] for layer, number in e) for e in _expert_bytes(graph)}
        fetched = sorted(shares.values())[: len(shares) - count]
        often = max(_LEAST_SHARE, sum(fetched) / len(fetched)) if fetched else 1.0
        speed = HostSpeed(tiers={f"{tier}.{way}": often for way in (READ, WRITE)})
        make = partial(self.make, kept_experts(self.shares, Option(tier), count, least_ops=least_ops, rest=rest))
        fast = partial(make, machine=self.machine.at_speed(speed))
        made = _with_room(fast, self.allowed_bytes, self.machine, None, self.host)
        return _as_asked(made, self.first, self.machine)


def _as_asked(made: Planned, first: Planned, machine: Machine) -> Planned:
    """Plan of a step, with those of its others, as plans for a machine; ``first`` was asked for alike, for that one."""
    steps = zip(made.plan.others, made.others, first.plan.others, strict=True)
    others = tuple(_for_machine(*each, machine) for each in steps)
    plan = dataclasses.replace(_for_machine(made.plan, made.program, first.plan, machine), others=others)
    return dataclasses.replace(made, plan=plan)


def _for_machine(plan: Plan, program: Program, asked: Plan, machine: Machine) -> Plan:
    """Plan as one for a machine, though its transfers were scheduled for another.

    Args:
        asked: Plan of the same step that was asked for alike, for that machine.
    """
    timeline, mine = simulate(program, machine), plan.predictions
    row = next((row for row in plan.policies if row.policy == plan.request.policy), None)
    rows = asked.policies
    if row is not None:  # what this plan moves, under the name that it was asked for by
        name = asked.request.policy
        row = dataclasses.replace(row, policy=name, step_s=timeline.duration_s, stall_s=stall_s(timeline, program))
        rows = tuple(row if each.policy == name else each for each in rows)
    predictions = dataclasses.replace(
        asked.predictions,
        policies=rows,
        step_s=timeline.duration_s,
        actions=action_times(timeline.events),
        peaks=mine.peaks,
        bytes_by_role=mine.bytes_by_role,
        host_saves_s=mine.host_saves_s,
    )
    return dataclasses.replace(plan, request=asked.request, predictions=predictions)


def _expert_bytes(graph: StepGraph) -> dict[frozenset[Expert], int]:
    """Bytes of the parameters and states of each expert, as a pair (layer, expert)."""
    sizes: dict[frozenset[Expert], int] = {}
    for storage, experts in owned_values(graph, find_experts(graph)).items():
        if storage in graph.persistent:
            sizes[experts] = sizes.get(experts, 0) + graph.storages[storage].size_bytes
    return sizes


def kept_experts(
    shares: Shares, tier: Option, count: int, *, least_ops: int = _LEAST_OPS, rest: Planned | None = None
) -> Policy:
    """Policy that keeps the values of the experts chosen most often in memory; those of others wait while unused.

    Args:
        shares: Shares of steps of every router.
        tier: Tier that the others' values wait on.
        count: Experts that are kept, of all layers together.
        least_ops: Operations between two uses within a step, of more of which the others' values go away, too.
        rest: Plan of the step whose choices hold for all that is no expert's value; None keeps it on the device.
    """

    def often_chosen_experts(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
        routed = find_experts(graph)
        names = layer_names(routed.routers)
        owners = owned_values(graph, routed)
        share = {each: max(shares[names[layer]][expert] for layer, expert in each) for each in owners.values()}
        kept = set(sorted(share, key=lambda each: (-share[each], sorted(each)))[:count])
        values = owners.keys() & graph.persistent
        others = {} if rest is None else _choices_of(rest, graph, lives)
        return {gap: option for gap, option in others.items() if gap[0] not in values} | {
            (gap.storage, gap.start): tier
            for gap in gaps(graph, lives)
            if gap.storage in values
            and owners[gap.storage] not in kept
            and (gap.wraps or gap.end - gap.start > least_ops)
            and is_movable(graph, gap.storage, PAGE_BYTES)
        }

    return often_chosen_experts


def _choices_of(made: Planned, graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
    """Choices of a plan for the gaps of another form of its step, where it has the same storages; {} where not."""
    before = made.program.graph
    if [(s.name, s.size_bytes) for s in before.storages] != [(s.name, s.size_bytes) for s in graph.storages]:
        return {}
    options = {(choice.storage, choice.start): choice.option for choice in made.plan.choices.gaps}
    rows: dict[int, list[Option]] = {}
    for gap in gaps(before, lifetimes(before)):
        rows.setdefault(gap.storage, []).append(options.get((gap.storage, gap.start), Option.KEEP))
    choices: dict[tuple[int, int], Option] = {}
    for gap in gaps(graph, lives):
        row = rows.get(gap.storage)
        option = row.pop(0) if row else Option.KEEP
        is_possible = (
            can_recompute(graph, lives, gap)
            if option == Option.RECOMPUTE
            else is_movable(graph, gap.storage, PAGE_BYTES)
        )
        if option != Option.KEEP and is_possible:
            choices[gap.storage, gap.start] = option
    return choices


def _with_experts(
    made: Planned, machine: Machine, shares: Shares, allowed_bytes: int, host: HostChoice | None
) -> tuple[float, Planned]:
    """Let the step of a plan leave out experts without tokens; returns the seconds that it is expected to take, too.

    Args:
        shares: Shares of steps of every router.
        allowed_bytes: Budget of the device, of which the plan may leave some to what it needs besides.
    """
    plan, program, host = made.plan, made.program, _beside_others(host, made)
    bounds = _BOUNDS if host is not None or _are_seldom(shares) else _BOUNDS[:1]
    tried = [_made(program, machine, shares, bound, host) for bound in bounds]
    expected_s, chosen, guards = min(tried, key=lambda each: each[0])
    hosted = _hosted(chosen, guards, host)
    room = replay_bytes(chosen, guards) + room_bytes(chosen.graph, hosted)
    budgets = {**plan.budgets, DEVICE: allowed_bytes}
    workspace = _workspace_bytes(chosen, room, machine)
    beside = workspace - chosen.workspace_bytes if machine.device.kind != "cpu" else 0
    steps, on_host = zip(plan.others, made.others, strict=True), host_bytes(chosen, hosted)
    others = [_beside_room(*each, beside, on_host, allowed_bytes) for each in steps]
    chosen = dataclasses.replace(chosen, workspace_bytes=workspace, budgets=budgets)
    programs = (chosen, *(program for _, program in others))
    if any(each.peak_bytes > allowed_bytes for each in programs):  # reads so late take more room than was kept free
        return inf, made
    for each in programs:
        verify(each)
    check_hosted(chosen, guards, hosted, made.others)
    timeline = simulate(chosen, machine, longer_s=_waits_s(guards, machine))
    predictions = dataclasses.replace(
        plan.predictions,
        step_s=timeline.duration_s,
        peaks=_peaks(plan, chosen, hosted),
        actions=action_times(timeline.events),
    )
    settings = {**plan.request.settings, EXPERTS: 1.0, **_limits(guards, hosted)}
    plan = dataclasses.replace(
        plan,
        program=tuple(chosen.text().splitlines()),
        predictions=predictions,
        request=dataclasses.replace(plan.request, budgets=budgets, settings=settings),
        assumptions=(
            *plan.assumptions,
            _sentence(chosen, guards, expected_s, room),
            *_waits(guards, machine),
            *sentences(chosen, hosted, guards, machine),
        ),
        others=tuple(other for other, _ in others),
    )
    return expected_s, Planned(plan, chosen, programs[1:])


def _peaks(plan: Plan, chosen: Program, hosted: HostedExperts) -> dict[str, dict[str, int]]:
    """Peaks of a plan by moment and tier, with what leaving experts out, and computing them on the host, takes."""
    peaks = {moment: dict(tiers) for moment, tiers in plan.predictions.peaks.items()}
    for tiers in peaks.values():
        tiers[DEVICE] = max(tiers[DEVICE], chosen.predicted_bytes)
        if hosted.rows:
            tiers[chosen.host_tier] = chosen.tier_bytes(chosen.host_tier) + host_bytes(chosen, hosted)
    return peaks


def _hosted(program: Program, guards: Guards, host: HostChoice | None) -> HostedExperts:
    """Experts that the host computes in steps of a Program; none where none may be."""
    return HostedExperts({}, {}, {}, {}) if host is None else host.hosted(program, guards)


def _beside_others(host: HostChoice | None, made: Planned) -> HostChoice | None:
    """Choice of experts for whose rows there has to be room beside the further Programs of a plan, too."""
    return None if host is None else dataclasses.replace(host, others=tuple(made.others))


def _limits(guards: Guards, hosted: HostedExperts) -> dict[str, float]:
    """Settings of a plan that say for how many tokens the host computes an expert."""
    names = layer_names(guards.routers)
    return {
        f"{HOST_TOKENS}{names[guards.routers[router].layer]}.{expert}": float(limit)
        for (router, expert), limit in hosted.limits.items()
    }


def _beside_room(plan: Plan, program: Program, room: int, on_host: int, allowed_bytes: int) -> tuple[Plan, Program]:
    """Another step's plan and Program with the room that stays on the device while it runs whole.

    Args:
        on_host: Bytes of the host's memory that are kept meanwhile for experts computed there.
        allowed_bytes: Budget of the device.
    """
    budgets = {**plan.budgets, DEVICE: allowed_bytes}
    program = dataclasses.replace(program, workspace_bytes=program.workspace_bytes + room, budgets=budgets)
    before, peak = plan.predictions, program.predicted_bytes
    peaks = {moment: {**tiers, DEVICE: max(tiers[DEVICE], peak)} for moment, tiers in before.peaks.items()}
    for tiers in peaks.values():
        if on_host:
            tiers[program.host_tier] = program.tier_bytes(program.host_tier) + on_host
    request = dataclasses.replace(plan.request, budgets=budgets)
    predictions = dataclasses.replace(before, peaks=peaks)
    text = tuple(program.text().splitlines())
    return dataclasses.replace(plan, program=text, predictions=predictions, request=request), program


def _workspace_bytes(program: Program, room: int, machine: Machine) -> int:
    """Bytes beside the arena: on a CPU the room to make up for updates is given back after use, elsewhere it stays."""
    scratch = program.workspace_bytes
    return max(scratch, room) if machine.device.kind == "cpu" else scratch + room


def _more_bytes(made: Planned, machine: Machine, host: HostChoice | None = None) -> int:
    """Bytes of the device that a plan may need besides to make up for updates, where its budget has no such room.

    On a CPU its further steps, which run on values that are up to date, have no need of it.
    """
    program, host = made.program, _beside_others(host, made)
    asked = 0
    for each in (program, with_late_reads(program, _always)):  # of which more may be left out, or computed elsewhere
        guards = find_guards(each)
        asked = max(asked, replay_bytes(each, guards) + room_bytes(each.graph, _hosted(each, guards, host)))
    room = _workspace_bytes(program, asked, machine) - program.workspace_bytes
    steps = (program,) if machine.device.kind == "cpu" else (program, *made.others)
    return room if any(each.predicted_bytes + room > each.budgets[DEVICE] for each in steps) else 0


def _always(router: Router, expert: int) -> bool:
    return True


def _sentence(program: Program, guards: Guards, expected_s: float, room: int) -> str:
    moved = {action.storage for action in program.actions if action.kind is ActionKind.MOVE}
    owners = owned_values(program.graph, find_experts(program.graph))
    away = {experts for storage, experts in owners.items() if storage in moved and storage in program.graph.persistent}
    count = sum(router.experts for router in guards.routers if router.micro_batch == 0)
    return (
        f"{count} experts are left out of steps that choose them for no token, {count - len(away)} stay in memory: a "
        f"step is expected to take {format_seconds(expected_s)}; updates of {len(guards.replayed)} parameters are made "
        f"up for later, in {format_bytes(room)}; numbers are plain PyTorch's as long as no expert's are infinite or NaN"
    )


def _waits(guards: Guards, machine: Machine) -> Iterator[str]:
    """Say what a device waits for its host, in an assumption."""
    wait_s = host_wait_s(machine)
    if wait_s:
        yield (
            f"the host waits for a router's choice {len(guards.routers)} times a step, and {machine.device.name} for "
            f"the host {format_seconds(wait_s)} each time: the latency of a copy and {LAUNCHES} launches, not measured"
        )


def _checked(shares: Shares, program: Program) -> Shares:
    """Shares for every router; 1 where nothing is known.

    Raises:
        ConfigError: the step has no experts, or these are shares of others.
    """
    guards = find_guards(program)
    if not guards.actions:
        raise ConfigError(_NO_EXPERTS)
    names = layer_names(guards.routers)
    known = {names[router.layer]: [1.0] * router.experts for router in guards.routers}
    if unknown := sorted(set(shares) - set(known)):
        raise ConfigError(f"experts: expected routers among {', '.join(known)}, got {unknown[0]!r}")
    for name, row in shares.items():
        if len(row) != len(known[name]) or not all(0 <= share <= 1 for share in row):
            raise ConfigError(
                f"experts[{name!r}]: expected {len(known[name])} shares of steps, from 0 to 1, got {list(row)}"
            )
    return {**known, **shares}


def _made(
    program: Program, machine: Machine, shares: Shares, bound: float, host: HostChoice | None
) -> tuple[float, Program, Guards]:
    """Program with experts below a share read late, and the seconds that its step is expected to take."""
    names = layer_names(find_guards(program).routers)
    on_device = shares if host is None else host.on_device(shares)

    def is_late(router: Router, expert: int) -> bool:
        return on_device[names[router.layer]][expert] < bound

    made = with_late_reads(program, is_late) if bound else program
    guards = find_guards(made)
    return expected_step_s(made, guards, machine, shares, host), made, guards


def _waits_s(guards: Guards, machine: Machine) -> dict[int, float]:
    """Seconds that each router takes longer, by the action that runs it first: the host waits for what it chose.

    Where nothing is left out nobody waits: a copy beside computing is launched.
    """
    counts_s = 0.0 if machine.device.kind == "cpu" else machine.device.op_overhead_s
    return dict.fromkeys(guards.chosen_at, host_wait_s(machine) if guards.actions else counts_s)


def _sampled(guards: Guards, shares: Shares) -> tuple[Callable[[Expert], float], list[frozenset[Expert]]]:
    """Share of steps of each expert, and the experts chosen in each of the steps that stand for all."""
    names = layer_names(guards.routers)

    def share(expert: Expert) -> float:
        return shares[names[guards.routers[expert[0]].layer]][expert[1]]

    places = {e: number * _SHIFT for number, e in enumerate(sorted(guards.all_experts()))}
    used = [frozenset(e for e, place in places.items() if share(e) > (place + n / _STEPS) % 1) for n in range(_STEPS)]
    return share, used


def _moved_bytes(program: Program, shares: Shares) -> float:
    """Bytes that a step which leaves out experts is expected to move to lower tiers and back."""
    guards, storages = find_guards(program), program.graph.storages
    moves = (action for action in program.actions if action.kind is ActionKind.MOVE)
    size = {move.id: storages[move.storage].size_bytes for move in moves if move.storage is not None}
    _, steps = _sampled(guards, shares)
    return sum(sum(size.values()) - sum(size.get(a, 0) for a in guards.left_out(used)) for used in steps) / len(steps)


def expected_step_s(
    program: Program, guards: Guards, machine: Machine, shares: Shares, host: HostChoice | None = None
) -> float:
    """Seconds that a step is expected to take, with what is made up for in it.

    Args:
        shares: Shares of steps of every router.
        host: Experts that the host computes where they get few tokens, with the tokens expected.
    """
    share, steps = _sampled(guards, shares)
    hosted, waits_s = _hosted(program, guards, host), _waits_s(guards, machine)

    def seconds(used: frozenset[Expert]) -> float:
        tokens = {} if host is None else host.expected(guards, hosted, used)
        longer_s = {**waits_s, **host_seconds(program, hosted, tokens, machine)}
        left_out = guards.left_out(used - tokens.keys()) - hosted.fetched(tokens.keys())
        return step_times(program, machine, left_out=left_out, longer_s=longer_s)[0]

    each_s = {used: seconds(used) for used in dict.fromkeys(steps)}
    made_up_s, homes = 0.0, home_tiers(program)
    tiers = {tier.name: 1 / tier.read_bytes_per_s + 1 / tier.write_bytes_per_s for tier in machine.tiers}
    for parameter in guards.replayed:
        often = max(map(share, parameter.experts))
        values = {s for op in parameter.updates for s in program.graph.op_writes[op]}
        moved_s = sum(program.graph.storages[s].size_bytes * tiers.get(homes[s], 0.0) for s in values)
        made_up_s += often * (1 - often) * moved_s
    return sum(each_s[used] for used in steps) / len(steps) + made_up_s
