"""Place: a problem and a policy's name give a placement with a bound; or all policies side by side.

``chain``    contiguous parts, exact (``lading.planner.placement.chain``)
``lp``       any placement: relaxation, rounding, local search (``lading.planner.placement.relaxed``)
``branch``   as ``lp``, branching where the program is small: the sharpest bound
``single``   everything on the one device where that is fastest
``even``     contiguous parts of equal work on all devices in their order, as one would cut by hand
``best``     the fastest of all these, improved once more
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from lading.errors import ConfigError, PlanInfeasible
from lading.ir.placement import Placement, PlacementProblem
from lading.planner.placement.chain import MOST_DEVICES, place_chain
from lading.planner.placement.local_search import improve
from lading.planner.placement.relaxed import RelaxedPlacement, place_branch, place_lp, relax
from lading.planner.placement.trial import Trial, key_of
from lading.units import format_bytes

#: From a trial, the relaxation (None: it has no solution) and an effort, a placement or None.
Policy = Callable[[Trial, RelaxedPlacement | None, int], Placement | None]
_EFFORT = 6
#: Placements that are improved once more: the fastest ones.
_IMPROVED = 2
BEST = "best"


@dataclass(frozen=True)
class Contest:
    """Placements by every policy of one problem.

    Attributes:
        placements: Placement of each policy that found one, in order; the last is ``best``.
        failed: Policies that found none, and why.
    """

    problem: PlacementProblem
    placements: tuple[Placement, ...]
    failed: tuple[tuple[str, str], ...]
    bound_s: float

    @property
    def best(self) -> Placement:
        """Fastest placement that fits."""
        return self.placements[-1]


def place(problem: PlacementProblem, policy: str = BEST, *, effort: int = _EFFORT) -> Placement:
    """Place a problem by one policy, simulated, with the bound on all placements.

    Args:
        policy: One of ``POLICIES``, or "best".
        effort: Work of local search: how much it simulates, in units of 100,000 tasks and flows.

    Raises:
        ConfigError: no such policy.
        PlanInfeasible: it finds none that fits; says what binds.
    """
    if policy == BEST:
        return contest(problem, effort=effort).best
    if policy not in POLICIES:
        raise ConfigError(f"expected a policy among {', '.join(POLICIES)} or {BEST}, got {policy!r}")
    trial, relaxed = Trial(problem), relax(problem)
    placement = POLICIES[policy](trial, relaxed, effort)
    if placement is None or not placement.fits:
        raise too_full(problem, placement, policy)
    return dataclasses.replace(placement, bound_s=max(placement.bound_s, relaxed.bound_s if relaxed else 0.0))


def contest(problem: PlacementProblem, *, effort: int = _EFFORT) -> Contest:
    """Place a problem by all policies side by side.

    Raises:
        PlanInfeasible: none finds a placement that fits; says what binds.
    """
    trial, relaxed = Trial(problem), relax(problem)
    bound_s = relaxed.bound_s if relaxed else 0.0
    placements: list[Placement] = []
    tried: list[Placement] = []
    failed: list[tuple[str, str]] = []
    for name, policy in POLICIES.items():
        if name == "chain" and len(problem.network.devices) > MOST_DEVICES:
            failed.append((name, f"more than {MOST_DEVICES} devices"))
            continue
        placement = policy(trial, relaxed, effort)
        if placement is not None:
            bound_s = max(bound_s, placement.bound_s)
            tried.append(dataclasses.replace(placement, policy=name))
        if placement is None or not placement.fits:
            large = name == "branch" and placement is None
            failed.append((name, "not tried: too large, or a pipeline" if large else "finds none that fits"))
        else:
            placements.append(dataclasses.replace(placement, policy=name))
    memory = problem.network.memory_bytes
    tried.sort(key=lambda p: key_of(p, memory))
    starts = list({p.devices: p for p in reversed(tried)}.values())[::-1][:_IMPROVED]
    better = [(improve(trial, start, effort / (turn + 1)), start) for turn, start in enumerate(starts)]
    best, start = min(better, key=lambda pair: key_of(pair[0], memory), default=(None, None))
    if best is None or start is None or not best.fits:
        raise too_full(problem, best, BEST)
    note = f"from {start.policy}"
    placements.append(dataclasses.replace(best, policy=BEST, note=note))
    return Contest(problem, tuple(dataclasses.replace(p, bound_s=bound_s) for p in placements), tuple(failed), bound_s)


def too_full(problem: PlacementProblem, found: Placement | None, policy: str) -> PlanInfeasible:
    """Make the error that says what binds: a group that no device holds, all together, or the nearest plan's device."""
    network, groups = problem.network, problem.groups
    need = problem.alone_bytes
    largest = max(range(len(groups)), key=need.__getitem__)
    total, room = problem.least_bytes, sum(network.memory_bytes)
    if need[largest] > max(network.memory_bytes):
        missing = need[largest] - max(network.memory_bytes)
        what = f"{groups[largest].name} alone needs {format_bytes(need[largest])}, the largest device has "
        what += f"{format_bytes(max(network.memory_bytes))}: split it or take a larger device"
    elif total > room:
        missing = total - room
        what = (
            f"all parts need {format_bytes(total)}, the devices have {format_bytes(room)} together: add a device, or "
        )
        what += "make the batch smaller"
    elif found is not None:
        pairs = list(zip(found.peak_bytes, network.memory_bytes, strict=True))
        worst = max(range(len(pairs)), key=lambda d: pairs[d][0] - pairs[d][1])
        missing = pairs[worst][0] - pairs[worst][1]
        what = f"the nearest placement needs {format_bytes(pairs[worst][0])} on {network.devices[worst]}, which has "
        what += f"{format_bytes(pairs[worst][1])}: add a device, or make the batch smaller"
    else:
        missing = 0
        what = (
            f"{format_bytes(total)} in parts of up to {format_bytes(need[largest])} on {len(network.devices)} devices"
        )
        what += (
            " of " + ", ".join(map(format_bytes, network.memory_bytes)) + ": cut the model finer or try another policy"
        )
    return PlanInfeasible(
        f"{problem.name}: {policy} finds no placement that fits; {what}",
        missing_bytes=max(0, missing),
        smallest_budget_bytes=total,
    )


def _single(trial: Trial, relaxed: RelaxedPlacement | None, effort: int) -> Placement | None:
    problem = trial.problem
    whole = [[d] * len(problem.groups) for d in range(len(problem.network.devices))]
    placements = [trial.of(devices) for devices in whole if trial.can_run(devices)]
    return min((p for p in placements if p.fits), key=lambda p: p.step_s, default=None)


def _even(trial: Trial, relaxed: RelaxedPlacement | None, effort: int) -> Placement | None:
    """Place a chain by cutting it where the fastest device's seconds reach each share."""
    problem, count = trial.problem, len(trial.problem.network.devices)
    seconds = [min(g.seconds) + min(g.once_s) for g in problem.groups]
    total, done, devices = sum(seconds), 0.0, list[int]()
    for group_s in seconds:
        devices.append(min(int((done + group_s / 2) / total * count), count - 1) if total else 0)
        done += group_s
    placement = trial.of(devices) if trial.can_run(devices) else None
    return placement if placement is not None and placement.fits else None


#: By name.
POLICIES: dict[str, Policy] = {
    "single": _single,
    "even": _even,
    "chain": lambda trial, relaxed, effort: place_chain(trial, effort / 2),
    "lp": place_lp,
    "branch": place_branch,
}
