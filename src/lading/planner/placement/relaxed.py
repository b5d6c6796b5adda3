"""Relaxation of the placement of any graph, whose optimum bounds every placement, rounded and improved.

Columns: x_gd, the share of group g on device d; S_t, when task t starts; T, the step; y_fgab, the share of flow f to
group g that goes from device a to b (the share within a device included); z_fab, what is sent of f from a to b for all
its targets together; w_sd, the share of what groups share (s) that is on device d. With p_td the seconds of a task,
c_f(a, b) those of a transfer, M micro-batches, r_h the bytes a second of the channel h, it minimizes T subject to

    sum over d of x_gd = 1                                                           ``_Relaxation._shares``
    w_sd >= x_gd                               for each group g that shares s        ``_Relaxation._add_union_share``
    sum over g of (resident_g + kept_g) x_gd + sum over s of size_s w_sd <= memory_d ``_Relaxation._memory``
    sum over b of y_fgab = x_(source)a,   sum over a of y_fgab = x_gb                ``_Relaxation._flow``
    S_v >= S_u + sum p_ud x_ud + sum c_f(a, b) y_fgab  for each flow f from u to v   ``_Relaxation._order``
    T >= S_t + sum p_td x_td                                                         ``_Relaxation._order``
    T >= M sum p_td x_td + once                        for each device               ``_Relaxation._load``
    T >= M sum size_f z_fab / r_h,  z_fab >= y_fgab    for each channel h            ``_Relaxation._load``

Every placement that fits is a solution with shares of 0 and 1: one micro-batch takes at least its longest way, a device
at least its work, a channel at least its bytes. So T is a lower bound (``bound_s``), certified by the solver's dual. On
a chain without a limit of memory the relaxation is a shortest way, so its optimum is a placement. Where y has too many
columns, only what leaves each device is counted, at the least cost there is (``_Relaxation._leaving``): still a bound.

Rounding (``rounded``): one number in [0, 1) picks each group's device from its shares laid end to end, so neighbors
with equal shares stay together; several numbers and several orders of devices. ``priced`` gives whole placements by
the prices of the same rows. ``repaired`` moves groups off a device that is too full;
``lading.planner.placement.local_search`` improves what simulates best.

Branching (``place_branch``): where the program is small, HiGHS branches on x for a number of nodes. What it has proven
by then is a bound too, often far above the relaxation's, where links are slow: shares cost no transfers, whole groups
do. It knows no contention and no order; the simulation does.

Rounding by prices: the relaxation's rows of memory and load as prices, and the cheapest way through the order.

With a price u_d of a byte on device d, and a weight v_d of its load (the weights add up to 1), the groups 0..n-1 in
order get the devices d(0)..d(n-1) that minimize

    sum of p_gd (1 + (M - 1) v_d) + (resident_g + kept_g) u_d + sum of x_{d(g-1) d(g)}(g)

where x are the seconds of all flows over a cut (``lading.planner.placement.chain.crossings``); that is a shortest way
in n layers of devices (``_cheapest``). It is the Lagrangian of the relaxation with order and flows taken along one
chain. Prices rise where a device is too full or busier than the others, and fall where there is room (``priced``);
every round gives a placement, whole where linear programs give shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import isfinite

import numpy as np

from lading.errors import SimulationError
from lading.ir.placement import Placement, PlacementProblem, TaskFlow
from lading.planner.placement.chain import crossings
from lading.planner.placement.local_search import improve
from lading.planner.placement.trial import Trial, key_of


@dataclass(frozen=True)
class Solution:
    """Solution of a linear program.

    Attributes:
        bound: Objective that no solution is below.
    """

    values: np.ndarray
    bound: float


#: Of a search: how near to its bound a solution ends it, and HiGHS's share of work for finding solutions, which is left
#: to the local search.
_NEAR, _HEURISTICS = 0.01, 0.01


class LinearProgram:
    """Linear program built row by row and solved by HiGHS; times are scaled to the order of one."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._starts: list[int] = []
        self._index: list[int] = []
        self._value: list[float] = []

    def columns(self, count: int, *, cost: float = 0.0, upper: float = np.inf, whole: bool = False) -> np.ndarray:
        """Add ``count`` columns in [0, ``upper``]; returns their numbers.

        ``whole``: integers, where they are asked for.
        """
        first = len(self._costs)
        self._costs += [cost] * count
        self._upper += [upper] * count
        self._whole += [whole] * count
        return np.arange(first, first + count)

    def row(self, terms: Sequence[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf) -> None:
        """Add a row of (column, factor) terms; those of one column add up."""
        sums: dict[int, float] = {}
        for column, factor in terms:
            sums[int(column)] = sums.get(int(column), 0.0) + factor
        self._starts.append(len(self._index))
        self._index += sums.keys()
        self._value += sums.values()
        self._low.append(low)
        self._high.append(high)

    def solve(self, *, nodes: int = 0) -> Solution:
        """Solve the program; with ``nodes``, with its whole columns, after at most so many nodes of a search.

        Raises:
            SimulationError: HiGHS finds no solution.
        """
        import highspy

        model = highspy.Highs()
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 1)
        none_i, none_f = np.empty(0, np.int32), np.empty(0)
        count = len(self._costs)
        upper = np.minimum(np.array(self._upper), highspy.kHighsInf)
        model.addCols(count, np.array(self._costs), np.zeros(count), upper, 0, none_i, none_i, none_f)
        model.addRows(
            len(self._low), np.array(self._low), np.array(self._high), len(self._index),
            np.array(self._starts, np.int32), np.array(self._index, np.int32), np.array(self._value),
        )  # fmt: skip
        if nodes:
            whole = np.flatnonzero(self._whole).astype(np.int32)
            model.changeColsIntegrality(len(whole), whole, np.full(len(whole), highspy.HighsVarType.kInteger))
            model.setOptionValue("mip_max_nodes", nodes)
            model.setOptionValue("mip_rel_gap", _NEAR)
            model.setOptionValue("mip_heuristic_effort", _HEURISTICS)
        model.run()
        status, info = model.getModelStatus(), model.getInfo()
        values = np.array(model.getSolution().col_value)
        if nodes and len(values) == count and np.isfinite(info.mip_dual_bound):
            return Solution(values, info.mip_dual_bound)
        if status != highspy.HighsModelStatus.kOptimal:
            raise SimulationError(
                f"HiGHS finds no solution of the placement's program: {model.modelStatusToString(status)}"
            )
        return Solution(values, info.objective_function_value)


#: Columns of y beyond which what leaves a device is counted instead.
_MOST_COLUMNS = 30_000
#: What the solver's tolerances may hide, as a share.
_TOLERANCE = 1e-6
_PICKS = (0.5, 0.25, 0.75, 0.1, 0.9)
#: Starts that are simulated at least, and those that are improved: each with half the effort of the one before.
_FEWEST_TRIED, _IMPROVED = 12, 3
#: Columns of a program that is branched on, nodes for each unit of effort, and how often for less and less memory.
_MOST_BRANCHED, _NODES, _BRANCHED = 5000, 3, 2


@dataclass(frozen=True)
class RelaxedPlacement:
    """Optimum of the relaxation of a placement.

    Attributes:
        shares: [group, device]: share of the group there.
        bound_s: Seconds that no placement that fits is below.
        columns: Number of columns of the program.
    """

    shares: np.ndarray
    bound_s: float
    columns: int


def relax(problem: PlacementProblem, *, nodes: int = 0) -> RelaxedPlacement | None:
    """Solve the relaxation of a placement; None where not even shares fit.

    Args:
        nodes: Also branch on the shares, over at most so many nodes: a sharper bound for small problems.
    """
    return _Relaxation(problem).solve(nodes)


def place_lp(trial: Trial, relaxed: RelaxedPlacement | None, effort: int) -> Placement | None:
    """Place by rounding the relaxation, repairing and improving; None where it has no solution."""
    if relaxed is None:
        return None
    problem, memory = trial.problem, trial.problem.network.memory_bytes
    options = chain((next(rounded(relaxed.shares)),), priced(problem, memory), rounded(relaxed.shares))
    cuts = crossings(problem)
    distinct = dict.fromkeys(map(tuple, options))
    ways = (cuts, np.zeros_like(cuts))  # runs that grow at their ends, and groups one by one
    tried = dict.fromkeys(tuple(repaired(problem, devices, memory, way)) for devices in distinct for way in ways)
    most = max(_FEWEST_TRIED, trial.affordable(effort))
    starts = [trial.of(devices, "lp") for devices in islice(filter(trial.can_run, tried), most)]
    starts.sort(key=lambda p: (key_of(p, memory), p.devices))
    better = [improve(trial, start, effort / 2**turn) for turn, start in enumerate(starts[:_IMPROVED], 1)]
    return min(better, key=lambda p: key_of(p, memory), default=None)


def place_branch(trial: Trial, relaxed: RelaxedPlacement | None, effort: int) -> Placement | None:
    """The program branched on, until shares are whole or the nodes are used up, and improved; with its own bound.

    None where the program is too large for that, and for pipelines, whose bound it does not move.
    """
    problem = trial.problem
    if relaxed is None or not effort or relaxed.columns > _MOST_BRANCHED or problem.micro_batches > 1:
        return None
    bounds: list[float] = []

    def plan(memory: Sequence[int]) -> list[int] | None:
        network = replace(problem.network, memory_bytes=tuple(memory))
        branched = relax(replace(problem, network=network), nodes=_NODES * effort)
        if branched is None:
            return None
        bounds.append(branched.bound_s)
        devices = [int(d) for d in branched.shares.argmax(axis=1)]
        return devices if trial.can_run(devices) else None

    placed = trial.fitting(plan, "branch", rounds=_BRANCHED)
    if placed is None:
        return None
    return replace(improve(trial, placed, effort / 2), bound_s=bounds[0])


def rounded(shares: np.ndarray) -> Iterator[list[int]]:
    """Yield assignments of groups to devices, drawn from shares."""
    yield [int(d) for d in shares.argmax(axis=1)]
    count = shares.shape[1]
    for turn in range(min(count, 4)):
        turned = [(turn + place) % count for place in range(count)]
        for order in (turned, turned[::-1]):
            ends = np.cumsum(shares[:, order], axis=1)
            for pick in _PICKS:
                places = np.minimum((ends <= pick).sum(axis=1), count - 1)
                yield [order[int(place)] for place in places]


def repaired(problem: PlacementProblem, devices: Sequence[int], memory: Sequence[int], cuts: np.ndarray) -> list[int]:
    """Move groups off devices that the planner's count says are too full, while there is room elsewhere.

    Of a full device goes the group whose move costs the fewest seconds for each byte, those of the cuts before and
    behind it included, so that runs grow at their ends.

    Args:
        cuts: Seconds of flows over each cut, of ``crossings``.
    """
    groups, count = problem.groups, len(memory)
    seconds = np.array([[s + o for s, o in zip(g.seconds, g.once_s, strict=True)] for g in groups])
    need = np.array(problem.alone_bytes, float)
    placed, rows = np.array(devices), np.arange(len(groups))
    kept_bytes = np.bincount(placed, weights=[float(g.kept_bytes) for g in groups], minlength=count)
    free = np.array(memory, float) - kept_bytes - np.array(problem.resident_on(devices), float)
    for _ in rows:
        if not (full := free < 0).any():
            break
        total = seconds.copy()
        total[1:] += cuts[rows[1:], placed[:-1]]
        total[:-1] += cuts[rows[1:], :, placed[1:]]
        each = (total - total[rows, placed][:, None]) / np.maximum(need, 1e-9)[:, None]
        each[~full[placed] | (need <= 0)] = np.inf
        each[(need[:, None] > free[None, :]) | full[None, :]] = np.inf
        group, device = divmod(int(np.nan_to_num(each, nan=np.inf).argmin()), count)
        if not np.isfinite(each[group, device]):
            break
        free[placed[group]] += need[group]
        free[device] -= need[group]
        placed[group] = device
    return placed.tolist()


class _Relaxation:
    """Builder of the relaxation; times in units of ``unit`` seconds, bytes in those of the largest memory."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem, self.network = problem, problem.network
        self.devices = range(len(problem.network.devices))
        self.sparable = problem.spared([0] * len(problem.groups))
        self.unit = max(sum(min(s for s in t.seconds if isfinite(s)) for t in problem.tasks) / 100, 1e-12)
        self.program = LinearProgram()
        self.whole = self.program.columns(1, cost=1.0)[0]
        self.start = self.program.columns(len(problem.tasks))
        self.share = self.program.columns(len(problem.groups) * len(self.devices), whole=True)
        self.share = self.share.reshape(len(problem.groups), len(self.devices))
        self.channel: list[list[tuple[int, float]]] = [[] for _ in problem.network.channels]
        self._shares()
        self.together = [self._add_union_share(groups) for groups in problem.sharing]
        self._memory()
        between = [(f, g) for f in problem.flows for g in self._groups(f)]
        detailed = len(between) * len(self.devices) ** 2 <= _MOST_COLUMNS
        last = [True] * len(problem.tasks)
        for flow in problem.flows:
            self._order(flow, detailed=detailed)
            last[flow.source] = False
        for task in np.flatnonzero(last):
            self.program.row([(self.whole, 1.0), (self.start[task], -1.0), *self._work(int(task), -1.0)], low=0.0)
        self._load()

    def solve(self, nodes: int) -> RelaxedPlacement | None:
        try:
            solution = self.program.solve(nodes=nodes)
        except SimulationError:
            return None
        shares = np.clip(solution.values[self.share], 0.0, 1.0)
        return RelaxedPlacement(shares, max(0.0, solution.bound * self.unit * (1 - _TOLERANCE)), len(solution.values))

    def _groups(self, flow: TaskFlow) -> list[int]:
        """Groups other than its own that a flow goes to."""
        group_of = self.problem.group_of
        return sorted({group_of[t] for t in flow.targets} - {group_of[flow.source]})

    def _work(self, task: int, factor: float) -> list[tuple[int, float]]:
        """Terms of a task's seconds, by the device that its group is on."""
        work, row = self.problem.tasks[task], self.share[self.problem.group_of[task]]
        if task in self.sparable:
            return []
        return [(row[d], factor * work.seconds[d] / self.unit) for d in self.devices if isfinite(work.seconds[d])]

    def _shares(self) -> None:
        for group, alone, row in zip(self.problem.groups, self.problem.alone_bytes, self.share, strict=True):
            can = [isfinite(group.seconds[d] + group.once_s[d]) for d in self.devices]
            can = [c and alone <= self.network.memory_bytes[d] for d, c in zip(self.devices, can, strict=True)]
            self.program.row([(row[d], 1.0) for d in self.devices], low=1.0, high=1.0)
            if barred := [(row[d], 1.0) for d in self.devices if not can[d]]:
                self.program.row(barred, high=0.0)

    def _add_union_share(self, groups: Sequence[int]) -> np.ndarray:
        """Add the share on each device of what these groups share: at least that of each group."""
        columns = self.program.columns(len(self.devices), upper=1.0)
        for group in groups:
            for d in self.devices:
                self.program.row([(columns[d], 1.0), (self.share[group][d], -1.0)], low=0.0)
        return columns

    def _memory(self) -> None:
        need = [g.resident_bytes + g.kept_bytes for g in self.problem.groups]
        need += [shared.size_bytes for shared in self.problem.shared]
        for d in self.devices:
            size = self.network.memory_bytes[d]
            if sum(need) > size:
                scale = 100 / max(need)
                columns = [row[d] for row in (*self.share, *self.together)]
                self.program.row(
                    [(c, bytes_ * scale) for c, bytes_ in zip(columns, need, strict=True)], high=size * scale
                )

    def _order(self, flow: TaskFlow, *, detailed: bool) -> None:
        group_of = self.problem.group_of
        source = group_of[flow.source]
        ways: dict[int, list[tuple[int, float]]] = {source: []}
        moved: list[np.ndarray] = []
        for group in self._groups(flow):
            if detailed:
                columns = self._flow(source, group)
                moved.append(columns)
                ways[group] = [
                    (columns[a, b], -self.network.transfer_s(a, b, flow.size_bytes) / self.unit)
                    for a in self.devices
                    for b in self.devices
                    if a != b
                ]
            else:
                ways[group] = self._leaving(flow, source, group)
        for target in dict.fromkeys(flow.targets):
            terms = [(self.start[target], 1.0), (self.start[flow.source], -1.0), *self._work(flow.source, -1.0)]
            self.program.row([*terms, *ways[group_of[target]]], low=0.0)
        if moved and flow.size_bytes:
            self._count_sent_bytes(flow, moved)

    def _flow(self, source: int, group: int) -> np.ndarray:
        count = len(self.devices)
        columns = self.program.columns(count * count).reshape(count, count)
        for d in self.devices:
            self.program.row([(self.share[source][d], -1.0), *((c, 1.0) for c in columns[d])], low=0.0, high=0.0)
            self.program.row([(self.share[group][d], -1.0), *((c, 1.0) for c in columns[:, d])], low=0.0, high=0.0)
        return columns

    def _leaving(self, flow: TaskFlow, source: int, group: int) -> list[tuple[int, float]]:
        columns = self.program.columns(len(self.devices))
        terms: list[tuple[int, float]] = []
        for a in self.devices:
            row = [(columns[a], 1.0), (self.share[source][a], -1.0), (self.share[group][a], 1.0)]
            self.program.row(row, low=0.0)
            min_transfer_s = min(
                (self.network.transfer_s(a, b, flow.size_bytes) for b in self.devices if b != a), default=0.0
            )
            terms.append((columns[a], -min_transfer_s / self.unit))
        return terms

    def _count_sent_bytes(self, flow: TaskFlow, moved: list[np.ndarray]) -> None:
        """Count the bytes of a flow on each channel: for each micro-batch, or once for what works once a step."""
        tasks, number = self.problem.tasks, self.problem.group_of
        for late, times in ((False, self.problem.micro_batches), (True, 1)):
            targets = {number[t] for t in flow.targets if tasks[t].once_per_step is late}
            part = [columns for g, columns in zip(self._groups(flow), moved, strict=True) if g in targets]
            if part:
                self._passes(flow, part, times)

    def _passes(self, flow: TaskFlow, moved: list[np.ndarray], times: int) -> None:
        for a in self.devices:
            for b in self.devices:
                hops = self.network.routes[a][b]
                if not hops:
                    continue
                column = moved[0][a, b]
                if len(moved) > 1:
                    column = self.program.columns(1)[0]
                    for columns in moved:
                        self.program.row([(column, 1.0), (columns[a, b], -1.0)], low=0.0)
                for hop in hops:
                    seconds = times * flow.size_bytes * hop.seconds_per_byte / self.unit
                    for channel in hop.channels:
                        self.channel[channel].append((column, -seconds))

    def _load(self) -> None:
        copies, tasks = self.problem.micro_batches, self.problem.tasks
        updates = {t for shared in self.problem.shared for t in shared.tasks if tasks[t].once_per_step}
        for d in self.devices:
            terms = [(self.whole, 1.0)]
            for row, group in zip(self.share, self.problem.groups, strict=True):
                known = [
                    tasks[t].seconds[d] * (1 if tasks[t].once_per_step else copies)
                    for t in group.tasks
                    if t not in updates
                ]
                if isfinite(sum(known)):
                    terms.append((row[d], -sum(known) / self.unit))
            for shared, columns in zip(self.problem.shared, self.together, strict=True):
                known = [tasks[t].seconds[d] for t in shared.tasks if t in updates]
                if known and isfinite(min(known)):
                    terms.append((columns[d], -min(known) / self.unit))
            self.program.row(terms, low=0.0)
        for terms in self.channel:
            if terms:
                self.program.row([(self.whole, 1.0), *terms], low=0.0)


_ROUNDS = 16
_STEP = 0.6


def priced(problem: PlacementProblem, memory: Sequence[int]) -> Iterator[list[int]]:
    """Yield assignments of groups to devices by rising and falling prices of memory and load, one a round."""
    groups, copies = problem.groups, problem.micro_batches
    seconds = np.array([[s + o / copies for s, o in zip(g.seconds, g.once_s, strict=True)] for g in groups])
    need = np.array(problem.alone_bytes, float)
    room = np.maximum(np.array(memory, float), 1.0)
    cuts = crossings(problem)
    known = np.where(np.isfinite(seconds), seconds, 0.0)
    worth = known.max(axis=1).sum() / max(need.sum(), 1.0)  # seconds that a byte may cost
    price, weight = np.zeros(len(memory)), np.full(len(memory), 1 / len(memory))
    for turn in range(_ROUNDS):
        costs = seconds * (1 + (copies - 1) * weight) + need[:, None] * price
        devices = _cheapest(costs, cuts)
        yield devices
        place = np.array(devices)
        used = np.bincount(place, weights=need, minlength=len(memory)) / room
        load = np.bincount(place, weights=known[np.arange(len(groups)), place], minlength=len(memory))
        step = _STEP / (1 + turn / 4)
        price = np.maximum(0.0, price + step * worth * (used - 1))
        weight = weight * np.exp(step * load / max(load.max(), 1e-30))
        weight /= weight.sum()


def _cheapest(costs: np.ndarray, cuts: np.ndarray) -> list[int]:
    """Device of each group on the shortest way through ``costs[g, d]`` and ``cuts[g, before, after]``."""
    count, devices = costs.shape
    total, back = costs[0], np.zeros((count, devices), int)
    for group in range(1, count):
        ways = total[:, None] + cuts[group]
        back[group] = ways.argmin(axis=0)
        total = ways.min(axis=0) + costs[group]
    chosen = [int(total.argmin())]
    for group in range(count - 1, 0, -1):
        chosen.append(int(back[group][chosen[-1]]))
    return chosen[::-1]
