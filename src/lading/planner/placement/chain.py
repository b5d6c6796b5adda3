"""Contiguous parts: exact dynamic programming over cuts, devices and their order.

Groups 0..n-1 in order are cut into parts, each on a device of its own. With M micro-batches, f_d(i, j) the seconds of
groups i..j-1 on device d for one of them, o_d(i, j) those once a step, and x_ab(j) the seconds of all flows over the
cut before group j when it lies between devices a and b (forward from a to b, backward from b to a), it minimizes

    L + (M - 1) B,   L = sum of f + sum of x + o of the first part,   B = the largest f of a part or x of a cut

subject to, for each part with K parts from it to the end,

    resident(i, j) + (min(M, K) - 1) kept(i, j) + peak(i, j) <= memory_d                         ``_Parts.fits``

where peak is what one micro-batch takes at most (``micro_peaks.py``), and what several groups share
is resident once a part. Gradients of weights tied between first and last part are exchanged in the end, then both
update them: o of the first part ends when both are done (``_Parts.update_tail_s``), and the recursion is done for each
device that may be the last.

For one micro-batch of a chain L is the simulated time: nothing runs beside anything else but updates, which are counted
for the first part only (each part's update starts when its own backward is done, the first part's last), and once more
for all parts (``_ONCE``); the simulation decides. For M = 1 the recursion over what is left,

    best[S][d](i) = min over j of f_d(i, j) + min over e in S of x_de(j) + best[S - d][e](j)     ``_Parts.solve``

is exact: S is the set of devices of what is left, of which d comes first, so their order is free. For M > 1, B is
bounded from above, and the range of bounds is halved until no part of it can hold a better plan (``_plans``): the
optimum is found to one part in ten thousand. The best plans are simulated, beside each device alone, and their cuts
refined, as pipelines fill and drain in more ways than L and B tell (``refined``: every cut where they are few, so exact
as simulated); the fastest counts.

A graph that is no chain is taken in its order: what crosses several cuts is counted at each, and the simulation, where
it goes straight to its target, decides.

Pipelines are cut as simulated: what the program minimizes for several micro-batches is not all that they do. Where a
part waits for another, and where memory holds micro-batches back, the simulation knows better. ``refined`` simulates
every contiguous placement where that is affordable, so that the fastest is exact. Else it moves borders, exchanges
devices and takes one part more or fewer, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import comb, inf, perm

import numpy as np

from lading.errors import ConfigError
from lading.ir.fleet import Network
from lading.ir.placement import Placement, PlacementProblem, Task, TaskFlow
from lading.planner.placement.list_scheduling import PlacedSimulator
from lading.planner.placement.micro_peaks import peaks
from lading.planner.placement.trial import Trial, key_of

#: Most devices whose order is searched.
MOST_DEVICES = 10
#: Whether updates of later parts hide under backward of earlier ones.
_ONCE = (False, True)
#: Of the plans found, the best are simulated.
_SIMULATED = 12
_EXACT = 1e-4
#: Most devices for which each is tried as the last.
_MOST_ENDS = 6


@dataclass(frozen=True)
class ChainPlacement:
    """Placement of a chain: which devices, in order, each from which group on.

    Attributes:
        latency_s: Seconds of one micro-batch.
        period_s: Seconds of the busiest part or cut.
    """

    devices: tuple[int, ...]
    starts: tuple[int, ...]
    latency_s: float
    period_s: float

    def total_s(self, copies: int) -> float:
        """Seconds of so many micro-batches."""
        return self.latency_s + (copies - 1) * self.period_s

    def assignment(self, count: int) -> list[int]:
        """Device of each of ``count`` groups."""
        ends = (*self.starts[1:], count)
        return [d for d, a, b in zip(self.devices, self.starts, ends, strict=True) for _ in range(a, b)]


def place_chain(trial: Trial, effort: float = 0) -> Placement | None:
    """Find the fastest contiguous placement that fits as simulated; None where none does.

    Args:
        effort: Work spent on looking further than the dynamic program, where there are several micro-batches.

    Raises:
        ConfigError: more devices than orders can be searched for.
    """
    problem = trial.problem
    if len(problem.network.devices) > MOST_DEVICES:
        raise ConfigError(
            f"chain: expected at most {MOST_DEVICES} devices, got {len(problem.network.devices)}; leave some out"
        )
    memory = problem.network.memory_bytes
    placements: list[Placement] = []
    for windowed in (True, False) if problem.micro_batches > 1 else (False,):
        for once in _ONCE:
            placements += _fitting(trial, windowed=windowed, once=once)
    if problem.micro_batches > 1 and placements:
        return refined(trial, placements, effort)
    return min(placements, key=lambda p: key_of(p, memory), default=None)


def _fitting(trial: Trial, *, windowed: bool, once: bool) -> list[Placement]:
    """Plan with each order of devices; returns the best of each, the one that fits last; [] where there is none."""
    problem = trial.problem
    orders: dict[tuple[int, ...], Placement] = {}

    def plan(memory: Sequence[int]) -> list[int] | None:
        parts = _Parts(problem, memory, trial.peaks, windowed=windowed, once=once)
        cuts = _plans(parts, problem.micro_batches)
        cuts.sort(key=lambda cut: cut.total_s(problem.micro_batches))
        plans = [cut.assignment(len(problem.groups)) for cut in cuts[:_SIMULATED]]
        plans += [[d] * len(problem.groups) for d in range(len(memory)) if parts.fits(d, 1)[0, -1]]
        placed = [trial.of(devices, "chain") for devices in plans if trial.can_run(devices)]
        placed.sort(key=lambda p: key_of(p, problem.network.memory_bytes))
        for placement in reversed(placed):
            orders[tuple(part.device for part in placement.parts)] = placement
        return list(placed[0].devices) if placed else None

    last = trial.fitting(plan, "chain")
    return [*orders.values(), *([] if last is None else [last])]


def best_cut(
    problem: PlacementProblem, memory: Sequence[int], *, windowed: bool = True, once: bool = True
) -> ChainPlacement | None:
    """Find the placement of a chain with the least seconds, by the recursion; None where nothing fits.

    Args:
        memory: Bytes of each device.
        windowed: Each part holds as many micro-batches as there are parts from it on; else one.
        once: Updates of all parts count, not the first part's only.
    """
    parts = _Parts(problem, memory, peaks(problem), windowed=windowed, once=once)
    plans = _plans(parts, problem.micro_batches)
    return min(plans, key=lambda cut: cut.total_s(problem.micro_batches), default=None)


def _plans(parts: _Parts, copies: int) -> list[ChainPlacement]:
    """List placements of a chain with longer and shorter period, the fastest to within ``_EXACT`` among them.

    The least latency falls as the limit of the period rises. Between limits low and high, no plan takes less than the
    latency at high and copies of low; what could still be better is halved.
    """
    cut = parts.solve(inf)
    if cut is None or copies == 1:
        return [] if cut is None else [cut]
    plans = [cut]
    best_s = cut.total_s(copies)
    open_ = [(parts.least_period(), cut.period_s, cut.latency_s)]  # low, high (not taken), latency at high
    while open_:
        low, high, latency_s = open_.pop()
        if high <= low or latency_s + (copies - 1) * low >= best_s * (1 - _EXACT):
            continue
        middle = low if (high - low) * (copies - 1) < _EXACT * best_s else (low + high) / 2
        cut = parts.solve(middle)
        open_.append((middle, high, latency_s))
        if cut is None:
            continue
        plans.append(cut)
        best_s = min(best_s, cut.total_s(copies))
        if middle > low:
            open_.append((low, cut.period_s, cut.latency_s))
        else:
            open_.pop()
    return plans


class _Parts:
    """Seconds and bytes of all parts and cuts of a chain, as arrays."""

    def __init__(
        self, problem: PlacementProblem, memory: Sequence[int], peaks: np.ndarray, *, windowed: bool, once: bool
    ) -> None:
        groups = problem.groups
        self.count, self.devices = len(groups), len(problem.network.devices)
        self.memory, self.copies, self.windowed = memory, problem.micro_batches, windowed
        seconds = np.array([g.seconds for g in groups]).T
        last = np.array([g.once_s for g in groups]).T
        self.busy = np.stack([_sums(row) for row in seconds])  # [d, i, j]
        self.update_s = np.stack([_sums(row) for row in last])
        resident = _sums(np.array([float(g.resident_bytes) for g in groups]))
        for shared, members in zip(problem.shared, problem.sharing, strict=True):
            inside = _inside(members, self.count)
            resident += shared.size_bytes * (inside > 0)
            if problem.tasks[shared.tasks[0]].once_per_step:
                each = problem.tasks[shared.tasks[0]].seconds
                spared = np.maximum(inside - 1, 0)
                self.update_s -= np.where(
                    spared, np.array([s if s < inf else 0.0 for s in each])[:, None, None] * spared, 0.0
                )
        self.resident = resident
        self.ends = _ends(problem)
        self.first = np.zeros_like(self.update_s) if once else self.update_s
        self.cost = self.busy + (self.update_s if once else 0.0)
        self.kept = np.nan_to_num(_sums(np.array([float(g.kept_bytes) for g in groups])), posinf=0.0)
        self.peaks = peaks
        self.cuts = crossings(problem)  # [j, a, b]
        self.twin = [
            next((a for a in range(b)[::-1] if self._are_interchangeable(a, b)), -1) for b in range(self.devices)
        ]

    def _are_interchangeable(self, a: int, b: int) -> bool:
        """Whether two devices can be exchanged without changing any plan's seconds."""
        others = [c for c in range(self.devices) if c not in (a, b)]
        cuts = self.cuts
        return (
            self.memory[a] == self.memory[b]
            and np.array_equal(self.cost[a], self.cost[b])
            and np.array_equal(self.update_s[a], self.update_s[b])
            and np.array_equal(cuts[:, a, others], cuts[:, b, others])
            and np.array_equal(cuts[:, others, a], cuts[:, others, b])
            and np.array_equal(cuts[:, a, b], cuts[:, b, a])
            and np.array_equal(self.ends[:, a, others], self.ends[:, b, others])
            and np.array_equal(self.ends[:, others, a], self.ends[:, others, b])
            and np.array_equal(self.ends[:, a, b], self.ends[:, b, a])
        )

    def _subsets(self) -> Iterator[frozenset[int]]:
        """Yield sets of devices, small ones first; of alike devices only the first ones, the last of these first."""
        for size in range(1, min(self.devices, self.count) + 1):
            for members in map(frozenset, combinations(range(self.devices), size)):
                if all(self.twin[d] < 0 or self.twin[d] in members for d in members):
                    yield members

    def fits(self, device: int, left: int) -> np.ndarray:
        """Whether a part fits a device that has ``left`` parts from it to the end; an array of [first, last]."""
        window = min(self.copies, left) if self.windowed else 1
        return self.resident + (window - 1) * self.kept + self.peaks <= self.memory[device]

    def solve(self, limit: float) -> ChainPlacement | None:
        """Find the plan of least latency in which no part or cut is busier than ``limit`` seconds.

        None where none fits.
        """
        return self._solve(limit, period=False)

    def least_period(self) -> float:
        """Least seconds of the busiest part or cut over all plans; infinite where nothing fits."""
        cut = self._solve(inf, period=True)
        return inf if cut is None else cut.period_s

    def _solve(self, limit: float, *, period: bool) -> ChainPlacement | None:
        """Find the plan of least seconds, trying each device as the last where that changes the sends at the end."""
        ends = [d for d in range(self.devices) if self.twin[d] < 0]
        if period or not self.ends.any() or self.devices > _MOST_ENDS:
            return self._recursion(limit, None, period=period)
        cuts = [cut for end in ends if (cut := self._recursion(limit, end, period=period)) is not None]
        return min(cuts, key=lambda cut: cut.latency_s, default=None)

    def _recursion(self, limit: float, last: int | None, *, period: bool) -> ChainPlacement | None:
        """Run the recursion over sets of devices, with any device or a given one last.

        With ``period``, sums become maxima.
        """
        n, join = self.count, np.maximum if period else np.add
        cost = self.busy if period else self.cost
        crossing = np.where(self.cuts <= limit, self.cuts, inf)
        best: dict[tuple[frozenset[int], int], np.ndarray] = {}
        chosen: dict[tuple[frozenset[int], int], tuple[np.ndarray, np.ndarray]] = {}
        best_s, answer = inf, None
        for members in self._subsets():
            for d in sorted(members - {self.twin[e] for e in members}):
                allowed = self.fits(d, len(members)) & (self.busy[d] <= limit)
                part = np.where(allowed, cost[d], inf)
                after, following = np.full(n + 1, inf), np.full(n + 1, -1)
                rest = members - {d}
                for e in sorted(rest - {self.twin[f] for f in rest}):
                    value = join(crossing[:, d, e], best[rest, e])
                    following = np.where(value < after, e, following)
                    after = np.minimum(value, after)
                if not rest and last in (None, d):
                    after[n] = 0.0
                total = join(part, after[None, :])
                end = total.argmin(axis=1)
                best[members, d] = np.append(total[np.arange(n), end], inf)
                chosen[members, d] = end, following
                whole = total[0] if period else total[0] + self.update_tail_s(d, last, allowed[0], parts=bool(rest))
                first = int(whole.argmin())
                if whole[first] < best_s:
                    best_s, answer = float(whole[first]), (members, d, first)
        return None if answer is None else self._walk(chosen, answer, best_s)

    def update_tail_s(self, first: int, last: int | None, allowed: np.ndarray, *, parts: bool) -> np.ndarray:
        """Seconds after the last backward: its updates, and those of tied weights.

        Returns:
            Array of [end of the first part].
        """
        update = np.where(allowed, self.first[first, 0], 0.0)
        if last is None or not parts:
            return update
        here_s, there_s, update_s = self.ends[:, first, last]
        return np.maximum(np.maximum(update, here_s + update_s), there_s)

    def _walk(
        self,
        chosen: dict[tuple[frozenset[int], int], tuple[np.ndarray, np.ndarray]],
        answer: tuple[frozenset[int], int, int],
        latency_s: float,
    ) -> ChainPlacement:
        """Walk back from the recursion's answer to its plan: device and first group of each part."""
        members, d, end = answer
        devices, starts = [d], [0]
        start, period_s = 0, 0.0
        while True:
            period_s = max(period_s, float(self.busy[d, start, end]))
            if end == self.count:
                return ChainPlacement(tuple(devices), tuple(starts), latency_s, period_s)
            following = int(chosen[members, d][1][end])
            period_s = max(period_s, float(self.cuts[end, d, following]))
            members, d, start = members - {d}, following, end
            devices.append(d)
            starts.append(start)
            end = int(chosen[members, d][0][start])


def _sums(values: np.ndarray) -> np.ndarray:
    """Sum of values i..j-1; infinite where there are none; an array of [i, j]."""
    n = len(values)
    known = np.where(np.isfinite(values), values, 0.0)
    total = np.concatenate([[0.0], np.cumsum(known)])
    barred = np.concatenate([[0], np.cumsum(~np.isfinite(values))])
    sums = total[None, :] - total[:-1, None]
    sums[(barred[None, :] - barred[:-1, None]) > 0] = inf
    return np.where(np.arange(n + 1)[None, :] > np.arange(n)[:, None], sums, inf)


def _inside(members: Sequence[int], count: int) -> np.ndarray:
    """Count those of the groups that are among i..j-1; an array of [i, j]."""
    is_member = np.zeros(count)
    is_member[list(members)] = 1.0
    total = np.concatenate([[0.0], np.cumsum(is_member)])
    return np.maximum(total[None, :] - total[:-1, None], 0.0)


def _ends(problem: PlacementProblem) -> np.ndarray:
    """Seconds from the last backward on a, the first part's device, for weights tied to b's, the last's.

    The result is an array of [end, a, b] with three ends: until b's gradient is on a, until b has updated the weights,
    and of their update on a; 0 where nothing is tied.
    """
    count = len(problem.network.devices)
    seconds = np.zeros((3, count, count))
    for shared, groups in zip(problem.shared, problem.sharing, strict=True):
        update = problem.tasks[shared.tasks[0]]
        size = max(
            (f.size_bytes for f in problem.flows if f.resident_at_source and f.targets[0] in shared.tasks), default=0
        )
        if not update.once_per_step or not size or not groups:
            continue
        for a, b in permutations(range(count), 2):
            here_s, there_s = _exchange(problem.network, (a, b), size)
            seconds[:, a, b] += here_s, there_s + update.seconds[b], update.seconds[a]
    return seconds


def _exchange(network: Network, ends: tuple[int, int], size_bytes: int) -> tuple[float, float]:
    """Seconds until two devices have each other's bytes, the second sending as soon as it hears of the first."""
    quiet, (a, b) = (0.0,) * len(network.devices), ends
    tasks = (Task("a", quiet), Task("b", quiet), Task("at a", quiet), Task("at b", quiet))
    flows = (TaskFlow(0, (1,), 0), TaskFlow(0, (3,), size_bytes), TaskFlow(1, (2,), size_bytes))
    roomy = replace(network, memory_bytes=(3 * size_bytes,) * len(network.devices))
    simulator = PlacedSimulator(PlacementProblem("exchange", tasks, flows, roomy))
    run = simulator.run((a, b, a, b), (1,) * len(network.devices), record=True)
    ended = {label: end for _, label, _, end in run.events}
    return ended["at a"], ended["at b"]


def crossings(problem: PlacementProblem) -> np.ndarray:
    """Seconds of all flows of a micro-batch over the cut before group j, with a before and b behind it.

    Returns:
        Array of [j, a, b].
    """
    n, network = len(problem.groups), problem.network
    devices = range(len(network.devices))
    crossed_s = np.zeros((n + 1, len(devices), len(devices)))
    for flow in problem.flows:
        source = problem.group_of[flow.source]
        targets = [problem.group_of[t] for t in flow.targets if not problem.tasks[t].once_per_step]
        if not targets:
            continue
        seconds = np.array([[network.transfer_s(a, b, flow.size_bytes) for b in devices] for a in devices])
        crossed_s[source + 1 : max(targets) + 1] += seconds
        crossed_s[min(targets) + 1 : source + 1] += seconds.T
    return crossed_s


#: Groups that a border moves over at once.
_MOVES = (1, 2, 4)
_Borders = tuple[tuple[int, ...], tuple[int, ...]]  # devices in order, and the first group of each


def refined(trial: Trial, starts: Sequence[Placement], effort: float) -> Placement:
    """Search around the starts for the contiguous placement of fewest seconds.

    Args:
        starts: At least one; of each order of devices the best is improved.
        effort: How much is simulated, in units of 100,000 tasks and flows.
    """
    groups, devices = len(trial.problem.groups), len(trial.problem.network.devices)
    most = trial.affordable(effort)
    count = sum(comb(groups - 1, parts - 1) * perm(devices, parts) for parts in range(1, min(devices, groups) + 1))
    if count <= most:
        return min(_placed(trial, _all(groups, devices), starts[0]), key=lambda p: _key(trial, p))
    ranked = sorted(starts, key=lambda p: _key(trial, p))
    distinct = {tuple(part.device for part in p.parts): p for p in reversed(ranked)}
    climbed = [_climbed(trial, start, most // len(distinct)) for start in distinct.values()]
    return min([ranked[0], *climbed], key=lambda p: _key(trial, p))


def _climbed(trial: Trial, start: Placement, most: int) -> Placement:
    """Go from neighbor to better neighbor, over at most ``most`` of them."""
    groups, devices = len(trial.problem.groups), len(trial.problem.network.devices)
    best, left = start, most
    while left > 0:
        near = list(_neighbor_placements(best, groups, devices))[:left]
        left -= len(near)
        nearest = min(_placed(trial, near, best), key=lambda p: _key(trial, p))
        if nearest is best or not near:
            break
        best = nearest
    return best


def _key(trial: Trial, placement: Placement) -> tuple[int, float]:
    return key_of(placement, trial.problem.network.memory_bytes)


def _placed(trial: Trial, options: Sequence[_Borders] | Iterator[_Borders], start: Placement) -> Iterator[Placement]:
    """Yield the start, then the simulated placement of each option that can run."""
    yield start
    groups = len(trial.problem.groups)
    for order, starts in options:
        ends = (*starts[1:], groups)
        devices = [d for d, a, b in zip(order, starts, ends, strict=True) for _ in range(a, b)]
        if trial.can_run(devices):
            yield trial.of(devices, start.policy)


def _all(groups: int, devices: int) -> Iterator[_Borders]:
    for parts in range(1, min(devices, groups) + 1):
        for cuts in combinations(range(1, groups), parts - 1):
            for order in permutations(range(devices), parts):
                yield order, (0, *cuts)


def _neighbor_placements(placement: Placement, groups: int, devices: int) -> Iterator[_Borders]:
    """Yield placements that differ in one border, one device or one part."""
    order = tuple(part.device for part in placement.parts)
    starts = tuple(part.first for part in placement.parts)
    for place in range(1, len(starts)):
        low, high = starts[place - 1] + 1, (*starts[place + 1 :], groups)[0] - 1
        for move in (sign * size for size in _MOVES for sign in (-1, 1)):
            if low <= starts[place] + move <= high:
                yield order, (*starts[:place], starts[place] + move, *starts[place + 1 :])
    for a, b in combinations(range(len(order)), 2):
        changed = list(order)
        changed[a], changed[b] = changed[b], changed[a]
        yield tuple(changed), starts
    unused = [device for device in range(devices) if device not in order]
    for place in range(len(order)):
        end = (*starts[place + 1 :], groups)[0]
        middle = (starts[place] + end) // 2
        for device in unused:
            yield (*order[:place], device, *order[place + 1 :]), starts
            if middle > starts[place]:
                split = (*starts[: place + 1], middle, *starts[place + 1 :])
                yield (*order[: place + 1], device, *order[place + 1 :]), split
        if len(order) > 1:  # its groups go to the part before, of the first to the one behind
            remaining = [first for n, first in enumerate(starts) if n != max(place, 1)]
            yield (*order[:place], *order[place + 1 :]), tuple(remaining)
