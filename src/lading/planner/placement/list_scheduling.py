"""List scheduling: which task each unlike device runs next, and which transfer each link carries, and when.

A device runs one task at a time, a channel carries one transfer at a time; whenever one is free, it takes what is ready
and most urgent. Urgent is what has most work behind it (the longest way to the end, transfers included); of several
micro-batches backward comes before forward and earlier before later ones, which is one-forward-one-backward where parts
are neighbors. A group starts a micro-batch only when at most ``windows`` of its device are under way. Ties go by
number, so the same placement gives the same timeline.

Memory of a device is what is resident there, what groups share once, plus each flow from when its source starts (or its
transfer ends its way there) until its last target there is done and it is sent, plus what runs needs while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from lading.errors import SimulationError
from lading.ir.fleet import Hop
from lading.ir.placement import PlacementProblem
from lading.ir.timeline import Event, Timeline


@dataclass(frozen=True)
class PlacedStep:
    """Result of a placed step.

    Attributes:
        busy_s: Busy seconds of each device; ``channel_s`` of each channel.
        peak_bytes: Most bytes of each device.
        events: (stream, label, start, end), only where asked for.
    """

    step_s: float
    busy_s: tuple[float, ...]
    channel_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    events: tuple[tuple[str, str, float, float], ...] = ()

    def timeline(self) -> Timeline:
        """Timeline of the placed step, for the report and the trace."""
        events = tuple(Event(0, stream, number, a, b) for number, (stream, _, a, b) in enumerate(self.events))
        labels = {number: label for number, (_, label, _, _) in enumerate(self.events)}
        return Timeline("predicted", events, (), labels, peak_bytes=max(self.peak_bytes))


@dataclass(slots=True)
class _Edge:
    """A flow; ``final``: once, when all copies of its source are done."""

    source: int
    targets: list[int]
    size: int
    final: bool
    resident_at_source: bool


class PlacedSimulator:
    """Runs placements of one problem."""

    def __init__(self, problem: PlacementProblem) -> None:
        """Whatever does not depend on the placement."""
        self.problem = problem
        self.edges: list[_Edge] = []
        self.out: list[list[int]] = [[] for _ in problem.tasks]
        self.needs = [0] * len(problem.tasks)
        self.into: list[list[int]] = [[] for _ in problem.tasks]
        for flow in problem.flows:
            late = [t for t in flow.targets if problem.tasks[t].once_per_step]
            soon = [t for t in flow.targets if not problem.tasks[t].once_per_step]
            if problem.tasks[flow.source].once_per_step and soon:
                raise SimulationError(f"task {problem.tasks[flow.source].name} runs once a step and feeds one that not")
            for targets, final in ((soon, False), (late, True)):
                if targets:
                    self._add(
                        _Edge(
                            flow.source, list(dict.fromkeys(targets)), flow.size_bytes, final, flow.resident_at_source
                        )
                    )

    def _add(self, edge: _Edge) -> None:
        number = len(self.edges)
        self.edges.append(edge)
        self.out[edge.source].append(number)
        for target in edge.targets:
            self.needs[target] += 1
            self.into[target].append(number)

    def run(self, devices: Sequence[int], windows: Sequence[int], *, record: bool = False) -> PlacedStep:
        """Simulate a step with the groups on ``devices``.

        Raises:
            SimulationError: a task cannot run where it is placed.
        """
        return _Run(self, devices, windows, record).run()


@dataclass(slots=True)
class _Send:
    """A transfer under way: of an edge's copy to a device, at one of its hops."""

    edge: int
    copy: int
    target: int
    hop: int = 0
    key: tuple[float, ...] = ()


@dataclass(slots=True)
class _Tally:
    """Time and memory of devices and channels."""

    busy: list[float]
    channel: list[float]
    resident_bytes: list[int]
    peak: list[int]
    events: list[tuple[str, str, float, float]] = field(default_factory=lambda: [])


class _Run:
    """The state of one run: a heap of (time, ticket, what ends)."""

    def __init__(
        self, simulator: PlacedSimulator, devices: Sequence[int], windows: Sequence[int], record: bool
    ) -> None:
        problem = simulator.problem
        self.of, self.problem, self.record = simulator, problem, record
        self.copies, self.num = problem.micro_batches, len(problem.tasks)
        self.windows = windows
        self.device = [devices[g] for g in problem.group_of]
        self.seconds = [task.seconds[d] for task, d in zip(problem.tasks, self.device, strict=True)]
        for task in problem.spared(devices):
            self.seconds[task] = 0.0
        if max(self.seconds) == float("inf"):
            worst = self.seconds.index(float("inf"))
            place = problem.network.devices[self.device[worst]]
            raise SimulationError(f"task {problem.tasks[worst].name} cannot run on {place}; place it elsewhere")
        self.routes = problem.network.routes
        self.split = [self._by_device(edge) for edge in simulator.edges]
        self.rank = self._ranks()
        count, channels = len(problem.network.devices), len(problem.network.channels)
        self.ready: list[list[tuple[tuple[float, ...], int]]] = [[] for _ in range(count)]
        self.waiting: list[tuple[tuple[float, ...], int, _Send]] = []
        self.running = [False] * count
        self.channel_is_busy = [False] * channels
        self.heap: list[tuple[float, int, int, object]] = []
        self.tickets = 0
        self.now_s = 0.0
        resident = problem.resident_on(devices)
        self.tally = _Tally([0.0] * count, [0.0] * channels, resident, list(resident))
        self.uses_to_come: dict[tuple[int, int, int], int] = {}  # uses of an edge's copy on a device still to come
        self._start_counts()

    def _by_device(self, edge: _Edge) -> dict[int, list[int]]:
        by_device: dict[int, list[int]] = {}
        for target in edge.targets:
            by_device.setdefault(self.device[target], []).append(target)
        return by_device

    def _ranks(self) -> list[float]:
        """Seconds of the longest way from each task's start to the end."""
        rank = [0.0] * self.num
        network = self.problem.network
        for task in range(self.num - 1, -1, -1):
            behind = 0.0
            for number in self.of.out[task]:
                size = self.of.edges[number].size
                for device, targets in self.split[number].items():
                    way = 0.0 if device == self.device[task] else network.transfer_s(self.device[task], device, size)
                    behind = max(behind, way + max(rank[t] for t in targets))
            rank[task] = self.seconds[task] + behind
        return rank

    def _start_counts(self) -> None:
        """Count what each copy of each task waits for; what waits for nothing is ready."""
        tasks, groups = self.problem.tasks, self.problem.groups
        self.gate = [sum(not tasks[t].once_per_step for t in group.tasks) for group in groups]
        self.undone = [[count] * self.copies for count in self.gate]
        self.needs: list[list[int]] = []
        for copy in range(self.copies):
            row = list(self.of.needs)
            for task in range(self.num):
                gated = copy >= self.windows[self.device[task]] and not (
                    tasks[task].backward or tasks[task].once_per_step
                )
                row[task] += gated
            self.needs.append(row)
        self.final = [self.copies if not tasks[e.source].once_per_step else 1 for e in self.of.edges]
        for copy in range(self.copies):
            for task in range(self.num):
                if not self.needs[copy][task] and (copy == 0 or not tasks[task].once_per_step):
                    self._make_ready(task, copy)

    def _key(self, task: int, copy: int) -> tuple[float, ...]:
        work = self.problem.tasks[task]
        if self.copies == 1 or work.once_per_step:
            return (float(work.once_per_step and self.copies > 1) * 2, 0.0, -self.rank[task], task)
        return (0.0 if work.backward else 1.0, copy, -self.rank[task], task)

    def _make_ready(self, task: int, copy: int) -> None:
        heappush(self.ready[self.device[task]], (self._key(task, copy), copy * self.num + task))

    def run(self) -> PlacedStep:
        self._start_all()
        while self.heap:
            self.now_s = self.heap[0][0]
            while self.heap and self.heap[0][0] == self.now_s:
                _, _, kind, what = heappop(self.heap)
                self._happen(kind, what)
            self._start_all()
        if stuck := [row for rows in self.undone for row in rows if row]:
            raise SimulationError(f"{len(stuck)} groups never end; expected flows without a cycle")
        tally = self.tally
        return PlacedStep(self.now_s, tuple(tally.busy), tuple(tally.channel), tuple(tally.peak), tuple(tally.events))

    def _happen(self, kind: int, what: object) -> None:
        if isinstance(what, _Send):
            if kind == 1:
                self._release_channels(what)
            else:
                self._arrive(what)
        elif isinstance(what, int):
            self._end(*reversed(divmod(what, self.num)))

    def _push(self, time_s: float, kind: int, what: object) -> None:
        self.tickets += 1
        heappush(self.heap, (time_s, self.tickets, kind, what))

    def _start_all(self) -> None:
        for device, queue in enumerate(self.ready):
            if queue and not self.running[device]:
                self._start(device, heappop(queue)[1])
        if not self.waiting:
            return
        still_waiting: list[tuple[tuple[float, ...], int, _Send]] = []
        while self.waiting:
            entry = heappop(self.waiting)
            if any(self.channel_is_busy[c] for c in self._hop(entry[2]).channels):
                still_waiting.append(entry)
            else:
                self._send(entry[2])
        self.waiting = still_waiting  # sorted, so a heap

    def _start(self, device: int, number: int) -> None:
        copy, task = divmod(number, self.num)
        self.running[device] = True
        work = self.problem.tasks[task]
        self._take(device, work.working_bytes)
        for e in self.of.out[task]:
            edge = self.of.edges[e]
            if not edge.final or copy == self.copies - 1 or work.once_per_step:
                targets = self.split[e]
                remote = len(targets) - (device in targets)
                self.uses_to_come[e, self._copy(e, copy), device] = remote + len(targets.get(device, ()))
                if not edge.resident_at_source:
                    self._take(device, edge.size)
        end_s = self.now_s + self.seconds[task]
        self.tally.busy[device] += self.seconds[task]
        if self.record:
            tag = f"{work.name} [{copy}]" if self.copies > 1 and not work.once_per_step else work.name
            self.tally.events.append((self.problem.network.devices[device], tag, self.now_s, end_s))
        self._push(end_s, 0, number)

    def _copy(self, e: int, copy: int) -> int:
        return 0 if self.of.edges[e].final else copy

    def _take(self, device: int, size: int) -> None:
        tally = self.tally
        tally.resident_bytes[device] += size
        tally.peak[device] = max(tally.peak[device], tally.resident_bytes[device])

    def _end(self, task: int, copy: int) -> None:
        work, device = self.problem.tasks[task], self.device[task]
        self.running[device] = False
        self.tally.resident_bytes[device] -= work.working_bytes
        for e in self.of.into[task]:
            self._used(e, self._copy(e, copy), device)
        for e in self.of.out[task]:
            if self.of.edges[e].final:
                self.final[e] -= 1
                if self.final[e]:
                    continue
            self._give(e, self._copy(e, copy))
        if not work.once_per_step:
            self._pass_gate(self.problem.group_of[task], copy, device)

    def _pass_gate(self, group: int, copy: int, device: int) -> None:
        self.undone[group][copy] -= 1
        later = copy + self.windows[device]
        if self.undone[group][copy] == 0 and later < self.copies:
            for task in self.problem.groups[group].tasks:
                if not (self.problem.tasks[task].backward or self.problem.tasks[task].once_per_step):
                    self._satisfy(task, later)

    def _satisfy(self, task: int, copy: int) -> None:
        self.needs[copy][task] -= 1
        if self.needs[copy][task] == 0:
            self._make_ready(task, copy)

    def _give(self, e: int, copy: int) -> None:
        """An edge's bytes are made: there for the targets beside them, to be sent to the others."""
        home = self.device[self.of.edges[e].source]
        for device, targets in self.split[e].items():
            if device == home:
                for target in targets:
                    self._satisfy(target, copy)
                continue
            key = min(self._key(t, copy) for t in targets)
            send = _Send(e, copy, device, key=key)
            heappush(self.waiting, (key, self.tickets, send))
            self.tickets += 1

    def _hop(self, send: _Send) -> Hop:
        return self.routes[self.device[self.of.edges[send.edge].source]][send.target][send.hop]

    def _send(self, send: _Send) -> None:
        hop, edge = self._hop(send), self.of.edges[send.edge]
        holds_s = edge.size * hop.seconds_per_byte
        for channel in hop.channels:
            self.channel_is_busy[channel] = True
            self.tally.channel[channel] += holds_s
        if send.hop == len(self.routes[self.device[edge.source]][send.target]) - 1:
            self._take(send.target, edge.size)
            self.uses_to_come[send.edge, send.copy, send.target] = len(self.split[send.edge][send.target])
        if self.record:
            name = f"{self.problem.tasks[edge.source].name} to {self.problem.network.devices[send.target]}"
            stream = self.problem.network.channels[hop.channels[0]]
            self.tally.events.append((stream, name, self.now_s, self.now_s + holds_s))
        self._push(self.now_s + holds_s, 1, send)

    def _release_channels(self, send: _Send) -> None:
        hop = self._hop(send)
        for channel in hop.channels:
            self.channel_is_busy[channel] = False
        if send.hop == 0:
            self._used(send.edge, send.copy, self.device[self.of.edges[send.edge].source])
        self._push(self.now_s + hop.latency_s, 2, send)

    def _arrive(self, send: _Send) -> None:
        send.hop += 1
        home = self.device[self.of.edges[send.edge].source]
        if send.hop < len(self.routes[home][send.target]):
            heappush(self.waiting, (send.key, self.tickets, send))
            self.tickets += 1
            return
        for target in self.split[send.edge][send.target]:
            self._satisfy(target, send.copy)

    def _used(self, e: int, copy: int, device: int) -> None:
        """One use of an edge's bytes on a device is over; after the last they are gone."""
        key = (e, copy, device)
        self.uses_to_come[key] -= 1
        if self.uses_to_come[key] == 0:
            del self.uses_to_come[key]
            edge = self.of.edges[e]
            if not edge.resident_at_source or device != self.device[edge.source]:
                self.tally.resident_bytes[device] -= edge.size
