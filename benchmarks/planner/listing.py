"""Policies of others that place one task after another as time goes by, to compare with ``lading.planner.placement``.

``m-topo``, ``m-etf`` and ``m-sct`` are those of Baechi (Jeon et al., "Baechi: Fast Device Placement of Machine Learning
Graphs", SoCC 2020): in topological order up to an even share of memory; earliest start first; and with each task's
favorite child kept on its device. They were made for alike devices: a start counts, however slow the device. ``heft``
(Topcuoglu, Hariri and Wu 2002) is for unlike ones: tasks by the longest way behind them, each where it ends first.

[Note: favorite children]
m-SCT solves, with p_i the seconds of a task (the least of any device), c_ij those of a transfer (the mean over pairs),

    min w   subject to  s_i + p_i + c_ij x_ij <= s_j,  s_i + p_i <= w,                      ``_favorites``
            sum over children j of x_ij >= children - 1,  sum over parents i of x_ij >= parents - 1,  0 <= x <= 1

and takes j as i's favorite child where x_ij < 0.5 (at most one each way, the smallest first). A device that has just
run i waits for its favorite child, unless another task could start there however its inputs come.

All reserve a group's memory when its first task is placed; each takes the problem and bytes of each device, and gives
the device of each group, or None where a task finds no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

from lading.ir.placement import Placement, PlacementProblem
from lading.planner.placement.relaxed import LinearProgram
from lading.planner.placement.trial import Trial

_FAVORITE = 0.5


def topo(problem: PlacementProblem, memory: Sequence[int]) -> list[int] | None:
    """Groups in order, device after device, each up to an even share of the bytes and one group's more (m-TOPO)."""
    need = problem.alone_bytes
    share = sum(need) / len(memory) + max(need)
    devices: list[int] = []
    device, used = 0, 0
    for group, size in enumerate(need):
        while device < len(memory) and (used + size > min(share, memory[device]) or not _can(problem, group, device)):
            device, used = device + 1, 0
        if device == len(memory):
            return None
        devices.append(device)
        used += size
    return devices


def etf(problem: PlacementProblem, memory: Sequence[int]) -> list[int] | None:
    """Always the task and device that can start first (m-ETF)."""
    return _Listing(problem, memory, {}).run()


def sct(problem: PlacementProblem, memory: Sequence[int]) -> list[int] | None:
    """As ``etf``, with devices kept for favorite children (m-SCT)."""
    return _Listing(problem, memory, favorites(problem)).run()


def heft(problem: PlacementProblem, memory: Sequence[int]) -> list[int] | None:
    """The task with the longest way behind it, where it ends first."""
    rank = _upward(problem)
    listing = _Listing(problem, memory, {})
    for task in sorted(range(len(problem.tasks)), key=lambda t: (-rank[t], t)):
        options = [(listing.ends_s(task, d), d) for d in listing.allowed(task)]
        if not options:
            return None
        listing.put(task, min(options)[1])
    return listing.where


def _can(problem: PlacementProblem, group: int, device: int) -> bool:
    own = problem.groups[group]
    return isfinite(own.seconds[device] + own.once_s[device])


def _mean_transfer(problem: PlacementProblem) -> Callable[[int], float]:
    """Seconds of a transfer of so many bytes, the mean over pairs of devices."""
    network = problem.network
    count = len(network.devices)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if not pairs:
        return lambda size: 0.0
    latency = sum(network.transfer_s(a, b, 0) for a, b in pairs) / len(pairs)
    each = sum(hop.seconds_per_byte for a, b in pairs for hop in network.routes[a][b]) / len(pairs)
    return lambda size: latency + size * each


def _upward(problem: PlacementProblem) -> list[float]:
    """Seconds of the longest way from each task to the end, of mean seconds and transfers."""
    transfer_s = _mean_transfer(problem)
    behind = [0.0] * len(problem.tasks)
    out: list[list[tuple[int, float]]] = [[] for _ in problem.tasks]
    for flow in problem.flows:
        out[flow.source] += [(t, transfer_s(flow.size_bytes)) for t in flow.targets]
    for number in range(len(problem.tasks) - 1, -1, -1):
        known = [s for s in problem.tasks[number].seconds if isfinite(s)]
        after = max((behind[t] + seconds for t, seconds in out[number]), default=0.0)
        behind[number] = sum(known) / len(known) + after
    return behind


@dataclass(slots=True)
class _Seat:
    """A device while tasks are placed."""

    free_s: float
    memory: float
    last: int = -1


class _Listing:
    """Tasks placed so far, without contention on links."""

    def __init__(self, problem: PlacementProblem, memory: Sequence[int], favorites: dict[int, int]) -> None:
        self.problem, self.favorites = problem, favorites
        self.seats = [_Seat(0.0, float(size)) for size in memory]
        self.where = [-1] * len(problem.groups)
        self.ends = [inf] * len(problem.tasks)
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in problem.tasks]
        self.children: list[list[int]] = [[] for _ in problem.tasks]
        for flow in problem.flows:
            for target in flow.targets:
                self.inputs[target].append((flow.source, flow.size_bytes))
                self.children[flow.source].append(target)
        self.needs = [len(ways) for ways in self.inputs]
        count = len(self.seats)
        self.pairs = [(a, b) for a in range(count) for b in range(count) if a != b]

    def allowed(self, task: int) -> list[int]:
        """Devices on which the task can be: its group's, or those that can run it and have room for all of it."""
        group = self.problem.group_of[task]
        if self.where[group] >= 0:
            return [self.where[group]]
        working = self.problem.groups[group].working_bytes
        return [
            d
            for d, seat in enumerate(self.seats)
            if self._bytes(group, d) + working <= seat.memory and _can(self.problem, group, d)
        ]

    def _bytes(self, group: int, device: int) -> int:
        """Bytes that a group would add to a device: less what it shares with one that is there."""
        found = self.problem.alone_bytes[group]
        for own, groups in zip(self.problem.shared, self.problem.sharing, strict=True):
            if group in groups and any(self.where[other] == device for other in groups):
                found -= own.size_bytes
        return found

    def start_s(self, task: int, device: int) -> float:
        """When it could start there."""
        return max(self.seats[device].free_s, self._arrival(task, device))

    def _arrival(self, task: int, device: int) -> float:
        transfer_s, group_of = self.problem.network.transfer_s, self.problem.group_of
        return max(
            (self.ends[s] + transfer_s(self.where[group_of[s]], device, size) for s, size in self.inputs[task]),
            default=0.0,
        )

    def _urgent_s(self, task: int) -> float:
        """When it could start wherever its inputs were sent from and to."""
        transfer_s = self.problem.network.transfer_s
        return max(
            (
                self.ends[s] + max((transfer_s(a, b, size) for a, b in self.pairs), default=0.0)
                for s, size in self.inputs[task]
            ),
            default=0.0,
        )

    def put(self, task: int, device: int) -> None:
        """Place a task, and with the first of a group its memory."""
        group, seat = self.problem.group_of[task], self.seats[device]
        self.ends[task] = self.start_s(task, device) + self.problem.tasks[task].seconds[device]
        if self.where[group] < 0:
            seat.memory -= self._bytes(group, device)
            self.where[group] = device
        seat.free_s, seat.last = self.ends[task], task

    def run(self) -> list[int] | None:
        """Devices of all groups by earliest start; None where a task has no device with room left."""
        ready = {task for task, needs in enumerate(self.needs) if not needs}
        while ready:
            options = [(self._start_for(t, d), self.ends_s(t, d), t, d) for t in ready for d in self.allowed(t)]
            if not options:
                return None
            _, _, task, device = min(options)
            self.put(task, device)
            ready.remove(task)
            for child in self.children[task]:
                self.needs[child] -= 1
                if not self.needs[child]:
                    ready.add(child)
        return self.where

    def ends_s(self, task: int, device: int) -> float:
        """When it would end there."""
        return self.start_s(task, device) + self.problem.tasks[task].seconds[device]

    def _start_for(self, task: int, device: int) -> float:
        """When it may start: on a device that waits for a favorite child, another only once it could anywhere."""
        start_s, last = self.start_s(task, device), self.seats[device].last
        child = self.favorites.get(last, -1)
        if child < 0 or child == task or isfinite(self.ends[child]):
            return start_s
        return max(start_s, self._urgent_s(task))


def favorites(problem: PlacementProblem) -> dict[int, int]:
    """The favorite child of each task that has one ([Note: favorite children])."""
    edges = sorted({(f.source, t, f.size_bytes) for f in problem.flows for t in f.targets})
    if not edges:
        return {}
    share = _favorites(problem, edges)
    children: dict[int, int] = {}
    parents: set[int] = set()
    for place in sorted(range(len(edges)), key=lambda e: (float(share[e]), e)):
        source, target, _ = edges[place]
        if share[place] < _FAVORITE and source not in children and target not in parents:
            children[source] = target
            parents.add(target)
    return children


def _favorites(problem: PlacementProblem, edges: list[tuple[int, int, int]]) -> np.ndarray:
    """x_ij of every edge."""
    program, transfer_s = LinearProgram(), _mean_transfer(problem)
    tasks = len(problem.tasks)
    seconds = [min(task.seconds) for task in problem.tasks]
    share = program.columns(len(edges), upper=1.0)
    start = program.columns(tasks)
    whole = program.columns(1, cost=1.0)[0]
    out: dict[int, list[int]] = {}
    into: dict[int, list[int]] = {}
    for number, (source, target, size) in enumerate(edges):
        terms = [(start[target], 1.0), (start[source], -1.0), (share[number], -transfer_s(size))]
        program.row(terms, low=seconds[source])
        out.setdefault(source, []).append(number)
        into.setdefault(target, []).append(number)
    for numbers in (*out.values(), *into.values()):
        if len(numbers) > 1:
            program.row([(share[n], 1.0) for n in numbers], low=len(numbers) - 1.0)
    for task in range(tasks):
        if task not in out:
            program.row([(whole, 1.0), (start[task], -1.0)], low=seconds[task])
    return program.solve().values[share]


#: By name: from a problem and bytes of each device, the device of each group.
POLICIES: dict[str, Callable[[PlacementProblem, Sequence[int]], list[int] | None]] = {
    "m-topo": topo,
    "m-etf": etf,
    "m-sct": sct,
    "heft": heft,
}


def placed(problem: PlacementProblem) -> dict[str, Placement]:
    """Placement by each of ``POLICIES`` that finds one, simulated as Lading's are; it may not fit."""
    trial = Trial(problem)
    made = {
        name: trial.fitting(lambda memory, plan=plan: plan(problem, memory), name) for name, plan in POLICIES.items()
    }
    return {name: placement for name, placement in made.items() if placement is not None}
