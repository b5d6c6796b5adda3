"""Placement: tasks on unlike devices, as plain numbers.

A *problem* is an acyclic graph of tasks (operations or modules) with the seconds each takes on each device, flows of
bytes between them, and a network. A *placement* says on which device each task runs, and what comes of that. Tasks of a
group share a device: forward and backward of a module, whose parameters and saved activations lie there. Bytes that
several groups use, such as a tied weight with its gradient and states, are ``Shared``: once on each device of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, isnan

from lading.errors import ConfigError
from lading.ir.fleet import Network


@dataclass(frozen=True, slots=True)
class Task:
    """Operation, or a module's operations of one phase, that is placed as one.

    Attributes:
        seconds: On each device; infinite where it cannot run.
        resident_bytes: On its device throughout: weights, gradients, optimizer states.
        kept_bytes: On its device, of each micro-batch under way, at one moment (the end of forward) beside the
            ``kept_bytes`` of all others: activations saved for backward, each counted for one task only. Planners and
            bounds count them; the simulation follows the flows.
        working_bytes: While it runs, beside what flows in and out.
        group: Tasks of one group share a device; "" for a group of its own.
        backward: Goes before forward tasks that could start as well.
        once_per_step: Runs once a step, after all micro-batches: an optimizer's update.
    """

    name: str
    seconds: tuple[float, ...]
    resident_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0
    group: str = ""
    backward: bool = False
    once_per_step: bool = False


@dataclass(frozen=True, slots=True)
class TaskFlow:
    """Bytes that a task sends once to each other device that has a target, where they stay till the last is done.

    Attributes:
        targets: Tasks that need it, all after the source.
        resident_at_source: Whether the bytes are resident at their source (a gradient): they take memory only where it
            arrives.
    """

    source: int
    targets: tuple[int, ...]
    size_bytes: int
    resident_at_source: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that several groups use: resident once on each device that has one of them.

    Attributes:
        tasks: One task of each group. Of tasks that run once a step (updates of a tied weight), only the first on a
            device takes its seconds.
    """

    tasks: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks that share a device, in order, with the sums that planners use.

    Attributes:
        seconds, once_s: Seconds by device of one micro-batch, and of what runs once a step.
        working_bytes: Most that one of its tasks needs beside what is resident and kept, flows in and out included.
    """

    name: str
    tasks: tuple[int, ...]
    seconds: tuple[float, ...]
    once_s: tuple[float, ...]
    resident_bytes: int
    kept_bytes: int
    working_bytes: int


@dataclass(frozen=True)
class PlacementProblem:
    """Tasks in an order in which they could run on one device, flows, and the network.

    Attributes:
        micro_batches: Micro-batches of one step, each of which runs the tasks once.
        assumed: Assumptions made in stating it, a sentence each.
        shared: Bytes that several groups use, beside the ``resident_bytes`` of each.
    """

    name: str
    tasks: tuple[Task, ...]
    flows: tuple[TaskFlow, ...]
    network: Network
    micro_batches: int = 1
    assumed: tuple[str, ...] = ()
    shared: tuple[Shared, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.network.devices)
        if not count or min(self.network.memory_bytes) < 0:
            raise ConfigError(f"expected devices with memory >= 0, got {self.network.memory_bytes}")
        if self.micro_batches < 1 or not self.tasks:
            raise ConfigError(f"expected tasks and micro_batches >= 1, got {len(self.tasks)} and {self.micro_batches}")
        for task in self.tasks:
            if len(task.seconds) != count or min(task.seconds) < 0 or any(map(isnan, task.seconds)):
                raise ConfigError(f"task {task.name}: expected {count} seconds >= 0, one a device, got {task.seconds}")
            if min(task.resident_bytes, task.kept_bytes, task.working_bytes) < 0:
                raise ConfigError(f"task {task.name}: expected bytes >= 0, got {task}")
        for flow in self.flows:
            if not flow.targets:
                raise ConfigError(f"expected a flow to at least one task, got {flow}")
            if not all(0 <= flow.source < target < len(self.tasks) for target in flow.targets) or flow.size_bytes < 0:
                raise ConfigError(f"expected a flow of >= 0 bytes to later tasks, got {flow}")
        for entry in self.shared:
            inside = all(0 <= task < len(self.tasks) for task in entry.tasks)
            if (
                not inside
                or entry.size_bytes < 0
                or len({self.group_of[t] for t in entry.tasks}) < len(entry.tasks)
                or not entry.tasks
            ):
                raise ConfigError(f"expected >= 0 shared bytes of tasks in different groups, got {entry}")
        for group in self.groups:
            if not any(isfinite(s + o) for s, o in zip(group.seconds, group.once_s, strict=True)):
                raise ConfigError(f"expected a device that can run all of {group.name}, no device can; {self.assumed}")

    @cached_property
    def groups(self) -> tuple[TaskGroup, ...]:
        """Groups of tasks, in the order of their first tasks."""
        members: dict[str, list[int]] = {}
        for number, task in enumerate(self.tasks):
            members.setdefault(task.group or f"{task.name} #{number}", []).append(number)
        return tuple(map(self._group, members.values()))

    def _group(self, numbers: list[int]) -> TaskGroup:
        tasks = [self.tasks[n] for n in numbers]
        devices = range(len(self.network.devices))
        return TaskGroup(
            name=self.tasks[numbers[0]].group or self.tasks[numbers[0]].name,
            tasks=tuple(numbers),
            seconds=tuple(sum(t.seconds[d] for t in tasks if not t.once_per_step) for d in devices),
            once_s=tuple(sum(t.seconds[d] for t in tasks if t.once_per_step) for d in devices),
            resident_bytes=sum(t.resident_bytes for t in tasks),
            kept_bytes=sum(t.kept_bytes for t in tasks),
            working_bytes=max(self._working_bytes_by_task[n] for n in numbers),
        )

    @cached_property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """Groups of each entry of ``shared``, in order."""
        return tuple(tuple(sorted(self.group_of[task] for task in entry.tasks)) for entry in self.shared)

    @cached_property
    def alone_bytes(self) -> tuple[int, ...]:
        """Bytes that each group needs alone on a device: resident, shared and kept."""
        needed_bytes = [group.resident_bytes + group.kept_bytes for group in self.groups]
        for entry, groups in zip(self.shared, self.sharing, strict=True):
            for group in groups:
                needed_bytes[group] += entry.size_bytes
        return tuple(needed_bytes)

    @cached_property
    def least_bytes(self) -> int:
        """Bytes that all groups need, shared ones counted once."""
        groups = sum(group.resident_bytes + group.kept_bytes for group in self.groups)
        return groups + sum(entry.size_bytes for entry in self.shared)

    def resident_on(self, devices: Sequence[int]) -> list[int]:
        """Bytes resident on each device with the groups on ``devices``."""
        resident = [0] * len(self.network.devices)
        for group, device in zip(self.groups, devices, strict=True):
            resident[device] += group.resident_bytes
        for entry, groups in zip(self.shared, self.sharing, strict=True):
            for device in {devices[group] for group in groups}:
                resident[device] += entry.size_bytes
        return resident

    def spared(self, devices: Sequence[int]) -> set[int]:
        """Updates of shared weights that another task does on the same device."""
        spared: set[int] = set()
        for entry in self.shared:
            devices_counted: set[int] = set()
            for task in sorted(entry.tasks):
                device = devices[self.group_of[task]]
                if self.tasks[task].once_per_step and device in devices_counted:
                    spared.add(task)
                devices_counted.add(device)
        return spared

    @cached_property
    def _working_bytes_by_task(self) -> list[int]:
        """Bytes that each task needs while it runs: its own, and flows in and out that are not kept for backward."""
        needed_bytes = [task.working_bytes for task in self.tasks]
        for flow in self.flows:
            if flow.resident_at_source:
                continue  # nothing where both are on one device; else the simulation counts it
            if self.tasks[flow.source].backward or not any(self.tasks[t].backward for t in flow.targets):
                for task in (flow.source, *dict.fromkeys(flow.targets)):
                    needed_bytes[task] += flow.size_bytes
        return needed_bytes

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Number of the group of each task."""
        numbers = [0] * len(self.tasks)
        for number, group in enumerate(self.groups):
            for task in group.tasks:
                numbers[task] = number
        return tuple(numbers)


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Run of groups, neighbors in order, that lie on one device."""

    device: int
    first: int
    last: int


@dataclass(frozen=True)
class Placement:
    """Assignment of groups to devices, with its simulated step.

    Attributes:
        devices: Device that each group runs on.
        windows: Micro-batches that may be under way on each device at a time.
        step_s, bound_s: Seconds of all micro-batches, and a bound below every placement that fits (0: none known).
        busy_s, channel_s: Seconds of work of each device, and of each channel.
        peak_bytes: Bytes at the peak of each device.
        fits: Whether every peak is within the device's memory.
        policy, note: Policy that found it, and a remark on that.
    """

    policy: str
    devices: tuple[int, ...]
    windows: tuple[int, ...]
    step_s: float
    busy_s: tuple[float, ...]
    channel_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    fits: bool
    bound_s: float = 0.0
    note: str = ""

    @property
    def gap(self) -> float:
        """Share of the bound by which the step is above it; infinite where none is known."""
        return self.step_s / self.bound_s - 1 if self.bound_s > 0 else inf

    @property
    def parts(self) -> tuple[GroupRange, ...]:
        """Runs of groups on one device, in order."""
        ranges: list[GroupRange] = []
        for number, device in enumerate(self.devices):
            if ranges and ranges[-1].device == device:
                ranges[-1] = GroupRange(device, ranges[-1].first, number)
            else:
                ranges.append(GroupRange(device, number, number))
        return tuple(ranges)


def split_points(problem: PlacementProblem, placement: Placement) -> tuple[str, ...]:
    """Modules at which each part but the first begins, for ``torch.distributed.pipelining.pipeline``'s ``split_spec``.

    The stages are then the parts in order. Of a captured model, whose groups go by the names of its modules.

    Raises:
        ConfigError: a device has several parts, so that they are no pipeline.
    """
    parts = placement.parts
    if len({part.device for part in parts}) < len(parts):
        names = ", ".join(problem.network.devices[part.device] for part in parts)
        raise ConfigError(f"expected one part on each device, got parts on {names}; place with the policy chain")
    return tuple(problem.groups[part.first].name for part in parts[1:])
