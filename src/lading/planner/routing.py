"""Plans of steps that leave out experts without tokens: which experts are read late, and what a step should then take.

The share of steps in which an expert gets tokens says how often its part of a Program runs. A read that waits for the
router can be left out, and then the expert's updates can be left to the step that needs them
(``lading.memory.guards``); but it is waited for where the expert is chosen after all. So experts that are seldom
chosen are read late, and others ahead as ever: of a few bounds between the two, that with the shortest expected step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lading.errors import ConfigError, check_type
from lading.ir.action import DEVICE
from lading.ir.experts import Expert, Router
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.memory.guards import Guards, find_guards, layer_names, replay_bytes, with_late_reads
from lading.memory.restore import action_times
from lading.memory.tier_layout import home_tiers
from lading.memory.verify import verify
from lading.sim.device_step import simulate, step_times
from lading.units import format_bytes, format_seconds

#: Setting of a plan: whether experts without tokens are left out of its step.
EXPERTS = "experts"
#: Shares of steps below which experts are read late, tried in turn.
_BOUNDS = (0.0, 0.5, 0.9)
#: Steps that stand for all: in each, the experts with a larger share than this get tokens.
_QUANTILES = (0.125, 0.375, 0.625, 0.875)

#: For each router of a micro-batch, by its module, the share of steps in which each expert gets tokens.
Shares = Mapping[str, Sequence[float]]


def check_experts(experts: bool | Shares, machine: Machine, ranks: int, *, compile: bool) -> None:
    """Refuse experts where they cannot be left out.

    Raises:
        ConfigError: says where.
    """
    if experts is False:
        return
    if experts is not True:
        check_type("experts", experts, Mapping, "True, False, or shares of steps by the router's module")
    if machine.device.kind != "cpu" or ranks > 1 or compile:
        found = "several ranks" if ranks > 1 else "compile=True" if compile else f"a {machine.device.kind!r} device"
        raise ConfigError(f"experts: expected one CPU without compiled regions, got {found}; leave experts out")


def with_experts(plan: Plan, program: Program, machine: Machine, shares: Shares, allowed_bytes: int) -> Plan:
    """Copy of a plan whose step leaves out experts without tokens.

    Args:
        program: The plan's.
        shares: What is known of the routers; of others every step is expected to need every expert.
        allowed_bytes: Budget of the device, of which the plan may leave some to what it needs besides.

    Raises:
        ConfigError: the step has no experts, or ``shares`` are of other ones.
    """
    guards = find_guards(program)
    if not guards.actions:
        raise ConfigError(
            "experts: expected outputs multiplied by the columns of a router's weights, which torch.scatter puts into "
            "zeros along the last dim, found none in this step; plan without experts"
        )
    known = _checked(shares, guards)
    tried = [_made(program, machine, known, bound) for bound in (_BOUNDS if shares else _BOUNDS[:1])]
    expected_s, chosen, guards = min(tried, key=lambda each: each[0])
    room = replay_bytes(chosen, guards)
    budgets = {**plan.budgets, DEVICE: allowed_bytes}
    chosen = dataclasses.replace(chosen, workspace_bytes=max(chosen.workspace_bytes, room), budgets=budgets)
    verify(chosen)
    timeline, peak = simulate(chosen, machine), chosen.predicted_bytes
    before = plan.predictions
    peaks = {moment: {**tiers, DEVICE: max(tiers[DEVICE], peak)} for moment, tiers in before.peaks.items()}
    predictions = dataclasses.replace(
        before, step_s=timeline.duration_s, peaks=peaks, actions=action_times(timeline.events)
    )
    return dataclasses.replace(
        plan,
        program=tuple(chosen.text().splitlines()),
        predictions=predictions,
        request=dataclasses.replace(plan.request, budgets=budgets, settings={**plan.request.settings, EXPERTS: 1.0}),
        assumptions=(*plan.assumptions, _sentence(guards, expected_s, room)),
    )


def more_bytes(program: Program) -> int:
    """Bytes of the device that a plan may need besides to make up for updates, where its budget has no such room."""
    room = max(0, replay_bytes(program, find_guards(with_late_reads(program, _always))) - program.workspace_bytes)
    return room if program.predicted_bytes + room > program.budgets[DEVICE] else 0


def _always(router: Router, expert: int) -> bool:
    return True


def _sentence(guards: Guards, expected_s: float, room: int) -> str:
    experts = sum(router.experts for router in guards.routers if router.micro_batch == 0)
    return (
        f"{experts} experts are left out of steps that choose them for no token: a step is expected to take "
        f"{format_seconds(expected_s)}; updates of {len(guards.replayed)} parameters are made up for later, in "
        f"{format_bytes(room)}; numbers are plain PyTorch's as long as no expert's are infinite or NaN"
    )


def _checked(shares: Shares, guards: Guards) -> Shares:
    """Shares for every router; 1 where nothing is known."""
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


def _made(program: Program, machine: Machine, shares: Shares, bound: float) -> tuple[float, Program, Guards]:
    """Program with experts below a share read late, and the seconds that its step is expected to take."""
    names = layer_names(find_guards(program).routers)

    def is_late(router: Router, expert: int) -> bool:
        return shares[names[router.layer]][expert] < bound

    made = with_late_reads(program, is_late) if bound else program
    guards = find_guards(made)
    return expected_step_s(made, guards, machine, shares), made, guards


def expected_step_s(program: Program, guards: Guards, machine: Machine, shares: Shares) -> float:
    """Seconds that a step is expected to take, with what is made up for in it.

    Args:
        shares: Shares of steps of every router.
    """
    names = layer_names(guards.routers)

    def share(expert: Expert) -> float:
        return shares[names[guards.routers[expert[0]].layer]][expert[1]]

    steps = [frozenset(e for e in guards.all_experts() if share(e) > quantile) for quantile in _QUANTILES]
    each_s = {used: step_times(program, machine, left_out=guards.left_out(used))[0] for used in dict.fromkeys(steps)}
    made_up_s, homes = 0.0, home_tiers(program)
    tiers = {tier.name: 1 / tier.read_bytes_per_s + 1 / tier.write_bytes_per_s for tier in machine.tiers}
    for parameter in guards.replayed:
        often = max(map(share, parameter.experts))
        values = {s for op in parameter.updates for s in program.graph.op_writes[op]}
        moved_s = sum(program.graph.storages[s].size_bytes * tiers.get(homes[s], 0.0) for s in values)
        made_up_s += often * (1 - often) * moved_s
    return sum(each_s[used] for used in steps) / len(steps) + made_up_s
