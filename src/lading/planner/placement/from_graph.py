"""Problems from captured graphs: seconds by the cost model of each device, flows by storages, memory by roles.

A unit is a task; forward and backward of a module, and the AdamW update of its
parameters, are a group. A storage that one unit makes and others read is a flow. A parameter lies where it is read,
with its gradient and states. One that several groups read is shared, once on each device with one of them: a buffer, or
a tied weight (``lading.planner.placement.tied``). Batches are there on every device.

A unit is a run of operations that are placed as one: a module at some depth, or a single operation. Runs are neighbors
in program order, so a graph of units has no cycle. What a module does itself between its children goes with the child
before it (in backward, where order is reversed, with the one after it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, prod

from lading.cost.compute import missing_rates, op_costs
from lading.errors import ConfigError
from lading.ir.fleet import Fleet
from lading.ir.graph import DTYPE_BYTES, Op, Phase, StepGraph
from lading.ir.machine import Device
from lading.ir.placement import PlacementProblem, Shared, Task, TaskFlow
from lading.ir.retarget import retarget
from lading.planner.placement.tied import Holder, Weight, tie

#: AdamW's two moments, and the fp32 value beside a parameter of 16 bits, for each element.
MOMENT_BYTES, MASTER_BYTES = 8, 4
_MOST_UNITS = 96
#: Share of the work with which one module leaves nothing to be placed.
_MOST_OF_ALL = 0.9


@dataclass(frozen=True, kw_only=True)
class Grain:
    """Grain of a placement.

    Attributes:
        operations: Single operations; else modules, as fine as gives at most ``max_units`` of them.
        training: Forward, backward and update; else one forward pass.
    """

    operations: bool = False
    max_units: int = _MOST_UNITS
    training: bool = True


def problem_of(
    graph: StepGraph, fleet: Fleet, *, grain: Grain | None = None, micro_batches: int = 1, name: str = "graph"
) -> PlacementProblem:
    """State the placement of a captured micro-batch (``lading.capture``) on a fleet as a problem.

    Args:
        micro_batches: Micro-batches of one step, one after another.

    Raises:
        ConfigError: no device can run the graph, or the fleet is not joined.
    """
    grain = grain or Grain()
    devices = [member.machine.device for member in fleet.devices]
    graphs = {d.kind: retarget(graph, d.kind, flash="bfloat16" in d.peak_flops_per_s) for d in reversed(devices)}
    base = graphs[devices[0].kind]
    units = operations(base, training=grain.training) if grain.operations else _modules(base, grain)
    seconds, assumed = _seconds(base, graphs, units, devices, grain)
    if not grain.operations and len(devices) > 1:
        _check_divisible(base, grain, units, [row[0] for row in seconds])
    built = _Built(base, units, grain.training)
    tasks, flows = built.tasks(seconds, devices), built.flows()
    shared = built.shared(tasks, flows, devices)
    sentences = dict.fromkeys(assumed)
    return PlacementProblem(
        name, tuple(tasks), tuple(flows), fleet.network(), micro_batches, tuple(sentences), tuple(shared)
    )


def _check_divisible(graph: StepGraph, grain: Grain, units: Sequence[PlacementUnit], seconds: Sequence[float]) -> None:
    """Refuse so few modules that nearly all work is one, such as the list of all blocks, while finer ones are there.

    Raises:
        ConfigError: one module has more than nine tenths of the work; says how many modules the next depth has.
    """
    work: dict[str, float] = defaultdict(float)
    for unit, unit_s in zip(units, seconds, strict=True):
        work[unit.key] += unit_s
    fullest = max(work, key=lambda key: work[key])
    share = work[fullest] / (sum(work.values()) or 1.0)
    finer = _cut(graph, _at_depth(fullest.count(".") + 2), training=grain.training)
    inside = {unit.key for unit in finer if unit.key.startswith(f"{fullest}.")}
    needed = len({unit.key for unit in finer if unit.phase is Phase.FORWARD})
    if share > _MOST_OF_ALL and len(inside) > 1 and needed > grain.max_units:
        raise ConfigError(
            f"expected units enough to divide the model, got {grain.max_units}: {fullest!r} is then one module with "
            f"{share:.0%} of the work, of {len(inside)} below it; give --units {needed} or more"
        )


def _modules(graph: StepGraph, grain: Grain) -> list[PlacementUnit]:
    return modules(graph, grain.max_units, training=grain.training)


def _seconds(
    base: StepGraph,
    graphs: dict[str, StepGraph],
    units: Sequence[PlacementUnit],
    devices: Sequence[Device],
    grain: Grain,
) -> tuple[list[tuple[float, ...]], list[str]]:
    """Predict the seconds of every unit on every device; and say what that assumes."""
    columns: list[list[float]] = []
    sentences: list[str] = []
    for device in devices:
        graph, device_units = graphs[device.kind], units
        if graph is not base:
            matched = None if grain.operations else like(graph, units, grain.max_units, training=grain.training)
            if matched is None:
                graph = base
                sentences.append(f"operations of {devices[0].kind} timed on {device.name} as they are")
            device_units = matched or units
        try:
            costs = op_costs(graph, device)
        except ConfigError as error:
            columns.append([inf] * len(units))
            sentences.append(f"{device.name} is left out: {error}")
            continue
        sentences += missing_rates(graph, device)
        columns.append([sum(costs[unit.first : unit.last + 1]) for unit in device_units])
    return list(zip(*columns, strict=True)), sentences


@dataclass(slots=True)
class _Need:
    """Bytes and elements that a group holds, or that several share."""

    resident: int = 0
    trained: int = 0  # elements
    gradient: int = 0  # bytes of those


class _Built:
    """Units of one graph as tasks and flows."""

    def __init__(self, graph: StepGraph, units: Sequence[PlacementUnit], training: bool) -> None:
        self.graph, self.units, self.training = graph, units, training
        self.unit_of = {i: n for n, unit in enumerate(units) for i in range(unit.first, unit.last + 1)}
        self.groups = self._groups()
        #: (storage, unit that wrote it) to the other units that read it so.
        self.readers: dict[tuple[int, int], dict[int, None]] = {}
        self.working = [0] * len(units)
        self._follow()
        #: What groups hold: of one, or shared by several.
        self.needs: dict[tuple[str, ...], _Need] = defaultdict(_Need)
        self._parameters()

    def _groups(self) -> list[str]:
        """Name of each unit's group; operations are joined by the parameters they use."""
        if len(self.units) < len(self.unit_of) or not self.training:
            return [unit.key for unit in self.units]
        owner = list(range(len(self.units)))

        def root(n: int) -> int:
            while owner[n] != n:
                n = owner[n]
            return n

        first: dict[int, int] = {}
        for index, unit in self.unit_of.items():
            for storage in (*self.graph.op_reads[index], *self.graph.op_writes[index]):
                place = self._parameter_storages.get(storage)
                if place is not None:
                    a, b = root(first.setdefault(place, unit)), root(unit)
                    owner[max(a, b)] = min(a, b)
        return [self.units[root(n)].key for n in range(len(self.units))]

    @property
    def _parameter_storages(self) -> dict[int, int]:
        """Parameter by the storages of its value and its gradient."""
        parameter_of: dict[int, int] = {}
        for number, parameter in enumerate(self.graph.parameters):
            parameter_of[self.graph.storage_of(parameter.tensor)] = number
            if parameter.gradient is not None:
                parameter_of[self.graph.storage_of(parameter.gradient)] = number
        return parameter_of

    def _follow(self) -> None:
        """Follow who reads what whom has written; and count the bytes that a unit needs inside itself."""
        graph, writer = self.graph, dict[int, int]()
        gradients = {graph.storage_of(p.gradient) for p in graph.parameters if p.gradient is not None}
        last: dict[tuple[int, int], int] = {}
        for index, unit in self.unit_of.items():
            for storage in graph.op_reads[index]:
                made = writer.get(storage)
                if made is not None:
                    last[storage, made] = index
                    if made != unit:
                        self.readers.setdefault((storage, made), {})[unit] = None
            for storage in graph.op_writes[index]:
                if storage not in graph.persistent:
                    writer[storage] = unit
                    last.setdefault((storage, unit), index)
        self._output()
        ends: dict[int, dict[int, int]] = defaultdict(dict)
        for (storage, made), index in last.items():
            if (storage, made) not in self.readers and storage not in gradients:
                ends[made][storage] = index
        for number, unit in enumerate(self.units):
            self.working[number] = self._peak(unit, ends[number])

    def _output(self) -> None:
        """Keep the loss's input until backward begins, as torch's pipeline does, though no operation reads it there."""
        back = next((n for n, u in enumerate(self.units) if u.key == LOSS and u.phase is Phase.BACKWARD), None)
        for (_, made), units in self.readers.items():
            inner = self.units[made].phase is Phase.FORWARD and any(self.units[u].phase is Phase.LOSS for u in units)
            if back is not None and inner:
                units.setdefault(back)

    def _peak(self, unit: PlacementUnit, ends: dict[int, int]) -> int:
        """Largest sum of bytes at once of storages that only the unit itself sees."""
        graph, live_bytes, peak, live = self.graph, 0, 0, set[int]()
        for index in range(unit.first, unit.last + 1):
            new = [s for s in graph.op_writes[index] if s in ends and s not in live]
            live.update(new)
            live_bytes += sum(graph.storages[s].size_bytes for s in new)
            peak = max(peak, live_bytes)
            ended = [s for s in live if ends[s] <= index]
            live.difference_update(ended)
            live_bytes -= sum(graph.storages[s].size_bytes for s in ended)
        return peak

    def _parameters(self) -> None:
        """Assign persistent storages to the groups that read them; gradients and states go with their parameters."""
        graph = self.graph
        users: dict[int, dict[str, None]] = defaultdict(dict)
        for index, unit in self.unit_of.items():
            for storage in graph.op_reads[index]:
                if storage in graph.persistent:
                    users[storage][self.groups[unit]] = None
        numbers = {graph.storage_of(p.tensor): n for n, p in enumerate(graph.parameters)}
        for storage, reading in users.items():
            groups = tuple(group for group in dict.fromkeys(self.groups) if group in reading)
            self.needs[groups].resident += graph.storages[storage].size_bytes
            if storage in numbers and self.training:
                self._trained(numbers[storage], groups)

    def _trained(self, number: int, groups: tuple[str, ...]) -> None:
        graph, parameter = self.graph, self.graph.parameters[number]
        if parameter.gradient is None:
            return
        tensor, need = graph.tensors[parameter.tensor], self.needs[groups]
        elements = prod(tensor.shape)
        states = elements * (MOMENT_BYTES + (MASTER_BYTES if DTYPE_BYTES[tensor.dtype] < 4 else 0))
        need.resident += tensor.size_bytes + states
        need.trained += elements
        need.gradient += tensor.size_bytes
        if len(groups) > 1:
            self._part_gradients(graph.storage_of(parameter.gradient), tensor.size_bytes)

    def _part_gradients(self, whole: int, size_bytes: int) -> None:
        """Keep the parts of a tied gradient where they are made; the operation that adds them up is no flow."""
        graph = self.graph
        added = {s for index in self.unit_of if whole in graph.op_writes[index] for s in graph.op_reads[index]} | {
            whole
        }
        for key, units in list(self.readers.items()):
            storage, made = key
            if storage in added and graph.storages[storage].size_bytes == size_bytes:
                for unit in [u for u in units if self.groups[u] != self.groups[made]]:
                    del units[unit]
                if not units:
                    del self.readers[key]

    def tasks(self, seconds: Sequence[tuple[float, ...]], devices: Sequence[Device]) -> list[Task]:
        """Make a task of each unit, then of the update of each group that has parameters."""
        saved_bytes = self._saved_bytes_by_unit()
        tasks: list[Task] = []
        first: set[str] = set()
        for number, unit in enumerate(self.units):
            group = self.groups[number]
            tasks.append(
                Task(
                    name=_named(unit),
                    seconds=seconds[number],
                    resident_bytes=0 if group in first or (group,) not in self.needs else self.needs[group,].resident,
                    kept_bytes=saved_bytes[number],
                    working_bytes=self.working[number],
                    group=group if self.training else "",
                    backward=unit.phase is Phase.BACKWARD,
                )
            )
            first.add(group)
        for group in self._updated():
            each = self._update_s(self.needs[group,].trained, devices)
            tasks.append(Task(f"update of {group}", each, group=group, once_per_step=True))
        return tasks

    @staticmethod
    def _update_s(elements: int, devices: Sequence[Device]) -> tuple[float, ...]:
        return tuple(d.op_overhead_s + elements / d.optimizer_elements_per_s for d in devices)

    def _updated(self) -> list[str]:
        """Names of the groups with an update of what they alone hold, in order."""
        return [group for group in dict.fromkeys(self.groups) if (group,) in self.needs and self.needs[group,].trained]

    def shared(self, tasks: list[Task], flows: list[TaskFlow], devices: Sequence[Device]) -> list[Shared]:
        """List what several groups hold, counted once a device; appends updates of tied weights to both lists."""
        first: dict[str, int] = {}
        for number, group in enumerate(self.groups):
            first.setdefault(group, number)
        shared: list[Shared] = []
        for groups, need in self.needs.items():
            if len(groups) > 1 and need.trained:
                weight = Weight(need.resident, need.gradient, self._update_s(need.trained, devices))
                shared.append(tie(tasks, flows, [Holder(g, tuple(self._makers(g))) for g in groups], weight))
            elif len(groups) > 1:
                shared.append(Shared(tuple(first[group] for group in groups), need.resident))
        return shared

    def _saved_bytes_by_unit(self) -> list[int]:
        """Bytes that each unit saves for backward; each storage counts once, where it is made or at one reader."""
        saved_bytes = [0] * len(self.units)
        for (storage, made), units in self.readers.items():
            back = [u for u in units if self.units[u].phase is Phase.BACKWARD]
            if back and self.units[made].phase is not Phase.BACKWARD:
                home = made if any(self.groups[u] == self.groups[made] for u in back) else back[0]
                saved_bytes[home] += self.graph.storages[storage].size_bytes
        return saved_bytes

    def flows(self) -> list[TaskFlow]:
        """List what units give each other; flows with the same ends are one."""
        sizes: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        for (storage, made), units in self.readers.items():
            sizes[made, tuple(sorted(units))] += self.graph.storages[storage].size_bytes
        for number, group in enumerate(self._updated()):
            for unit in self._makers(group):
                sizes[unit, (len(self.units) + number,)] += 0
        return [TaskFlow(source, targets, size) for (source, targets), size in sizes.items()]

    def _makers(self, group: str) -> Iterable[int]:
        """Numbers of the backward units of a group."""
        return [n for n, u in enumerate(self.units) if self.groups[n] == group and u.phase is Phase.BACKWARD]


def _named(unit: PlacementUnit) -> str:
    name = unit.key or "(model)"
    return f"{name} backward" if unit.phase is Phase.BACKWARD else name


LOSS = "loss"


@dataclass(slots=True)
class PlacementUnit:
    """Operations ``first`` to ``last`` of the graph, placed as one.

    Attributes:
        key: Common name of its parts: a module's path, or the operation's number.
    """

    key: str
    phase: Phase
    first: int
    last: int


def modules(graph: StepGraph, most: int, *, training: bool) -> list[PlacementUnit]:
    """Make units by module, at the greatest depth with at most ``most`` modules in forward; at least depth 1.

    A module that runs several times, such as a cell over time, is a unit each time.
    """
    best = _cut(graph, _at_depth(1), training=training)
    depth = 2
    while True:
        units = _cut(graph, _at_depth(depth), training=training)
        if len({u.key for u in units if u.phase is Phase.FORWARD}) > most:
            return best
        deepest = max((op.module.count(".") + 1 for op in graph.ops if op.module), default=1)
        best, depth = units, depth + 1
        if depth > deepest:
            return best


def operations(graph: StepGraph, *, training: bool) -> list[PlacementUnit]:
    """Make a unit of each operation."""
    ops = _chosen(graph, training=training)
    return [PlacementUnit(f"{i} {graph.ops[i].module or LOSS}", _phase(graph.ops[i]), i, i) for i in ops]


def like(graph: StepGraph, units: Sequence[PlacementUnit], most: int, *, training: bool) -> list[PlacementUnit] | None:
    """Match units to another graph of the same model, one for each of ``units``; None where they differ."""
    units_there = modules(graph, most, training=training)
    same = [(u.key, u.phase) for u in units_there] == [(u.key, u.phase) for u in units]
    return units_there if same else None


def _at_depth(depth: int) -> Callable[[str], str]:
    return lambda module: ".".join(module.split(".")[:depth])


def _phase(op: Op) -> Phase:
    return Phase.BACKWARD if op.phase is Phase.BACKWARD else Phase.LOSS if op.phase is Phase.LOSS else Phase.FORWARD


def _chosen(graph: StepGraph, *, training: bool) -> list[int]:
    wanted = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD) if training else (Phase.FORWARD,)
    return [i for i, op in enumerate(graph.ops) if op.phase in wanted]


def _cut(graph: StepGraph, name: Callable[[str], str], *, training: bool) -> list[PlacementUnit]:
    runs: list[PlacementUnit] = []
    for index in _chosen(graph, training=training):
        op = graph.ops[index]
        key, phase = (LOSS if op.phase is Phase.LOSS else name(op.module)), _phase(op)
        if runs and runs[-1].key == key and runs[-1].phase is phase and runs[-1].last == index - 1:
            runs[-1].last = index
        else:
            runs.append(PlacementUnit(key, phase, index, index))
    return _absorbed(_absorbed(runs, Phase.FORWARD), Phase.BACKWARD)


def _absorbed(runs: list[PlacementUnit], phase: Phase) -> list[PlacementUnit]:
    """Join a module's own operations between its children to a child's unit; the model's last ones to the loss."""
    if phase is Phase.BACKWARD:
        runs = [PlacementUnit(u.key, u.phase, -u.last, -u.first) for u in reversed(runs)]
    joined: list[PlacementUnit] = []
    for run in runs:
        before = joined[-1] if joined and joined[-1].phase is phase else None
        inside = before is not None and (before.key == run.key or _is_inside(before.key, run.key))
        if run.phase is phase and before is not None and inside and before.last == run.first - 1:
            before.last = run.last
        else:
            joined.append(PlacementUnit(run.key, run.phase, run.first, run.last))
    if phase is Phase.BACKWARD:
        joined = [PlacementUnit(u.key, u.phase, -u.last, -u.first) for u in reversed(joined)]
        for unit in joined:
            unit.key = unit.key or LOSS
    return joined


def _is_inside(module: str, other: str) -> bool:
    return module != LOSS and (not other or module.startswith(f"{other}."))
