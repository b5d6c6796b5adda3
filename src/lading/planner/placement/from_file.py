"""Problems written as JSON: graphs from elsewhere, with the seconds and bytes that were published with them.

    {"name": "...", "micro_batches": 1,
     "devices": [{"name": "gpu0", "memory_bytes": 8000000000}, ...],
     "links": [{"name": "pcie", "devices": ["gpu0", "gpu1"], "medium": "switch",
                "bandwidth_bytes_per_s": 1.2e10, "efficiency": 1.0, "latency_s": 1e-5}, ...],
     "tasks": [{"name": "conv1", "seconds": [0.01, 0.02], "resident_bytes": 1000, "kept_bytes": 0, "working_bytes": 0,
                "group": "", "backward": false, "once": false}, ...],
     "flows": [{"source": "conv1", "targets": ["conv2"], "size_bytes": 4096}, ...],
     "shared": [{"tasks": ["conv1", "conv9"], "size_bytes": 5000}, ...]}

Tasks stand in an order in which they could run; a task that a device cannot run has null for its seconds there. What
tasks of several groups share lies once on each device of theirs; "shared" may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, cast

from lading.errors import ConfigError
from lading.files import read_json
from lading.ir.fleet import Join, network_of
from lading.ir.placement import PlacementProblem, Shared, Task, TaskFlow
from lading.ir.reading import read_as

_ADVICE = "lading.planner.placement.from_file has the keys"


@dataclass(frozen=True)
class _ProblemDevice:
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class _Task:
    name: str
    seconds: tuple[float | None, ...]
    resident_bytes: int
    kept_bytes: int
    working_bytes: int
    group: str
    backward: bool
    once: bool


@dataclass(frozen=True)
class _ProblemFlow:
    source: str
    targets: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class _Shared:
    tasks: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True)
class _ProblemFile:
    name: str
    micro_batches: int
    devices: tuple[_ProblemDevice, ...]
    links: tuple[Join, ...]
    tasks: tuple[_Task, ...]
    flows: tuple[_ProblemFlow, ...]
    shared: tuple[_Shared, ...]


def read_problem(path: Path) -> PlacementProblem:
    """Read a placement problem from a JSON file.

    Raises:
        ConfigError: it is something else; names the field.
    """
    data: Any = read_json(path, "a placement problem", _ADVICE)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a table, got {type(data).__name__}; {_ADVICE}")
    table: dict[str, Any] = {"shared": [], **cast("dict[str, Any]", data)}
    try:
        read: _ProblemFile = read_as(_ProblemFile, table, str(path), _ADVICE)
    except ConfigError as error:
        raise _at(path, error) from error
    number = {task.name: n for n, task in enumerate(read.tasks)}
    if len(number) != len(read.tasks):
        raise ConfigError(f"{path}: expected tasks of different names; number those that repeat")
    names = {name for flow in read.flows for name in (flow.source, *flow.targets)}
    names |= {name for entry in read.shared for name in entry.tasks}
    if unknown := sorted(names - number.keys()):
        raise ConfigError(f"{path}: expected flows between tasks of the file, got {', '.join(unknown[:3])}")
    if len({device.name for device in read.devices}) != len(read.devices):
        raise ConfigError(f"{path}: expected devices of different names; number those that repeat")
    tasks = tuple(_task(task) for task in read.tasks)
    flows = tuple(TaskFlow(number[f.source], tuple(number[t] for t in f.targets), f.size_bytes) for f in read.flows)
    shared = tuple(Shared(tuple(number[t] for t in entry.tasks), entry.size_bytes) for entry in read.shared)
    try:
        network = network_of({device.name: device.memory_bytes for device in read.devices}, read.links)
        return PlacementProblem(read.name, tasks, flows, network, read.micro_batches, (), shared)
    except ConfigError as error:
        raise _at(path, error) from error


def _at(path: Path, error: ConfigError) -> ConfigError:
    """Add the file's name to an error."""
    return error if str(error).startswith(str(path)) else ConfigError(f"{path}: {error}")


def _task(task: _Task) -> Task:
    return Task(
        name=task.name,
        seconds=tuple(inf if seconds is None else float(seconds) for seconds in task.seconds),
        resident_bytes=task.resident_bytes,
        kept_bytes=task.kept_bytes,
        working_bytes=task.working_bytes,
        group=task.group,
        backward=task.backward,
        once_per_step=task.once,
    )
