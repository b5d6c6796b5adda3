"""Memory over time: what a pipeline rank holds while a step runs, by role and by the action that brought it.

Combines the memory trace of the lists (``lading.program.memory_trace``) with the times of their actions. Memory of a
region's kernels is there while the region runs. Memory that the host asks for between two regions takes no time on the
device: it is drawn in the order asked, within the first hundredth of the second region, so that the peak is that of
``Simulated.memory`` (tests compare).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lading.errors import ConfigError
from lading.ir.action import ActionKind
from lading.ir.graph import Role
from lading.ir.timeline import MemorySample, MemorySpan
from lading.program.memory_trace import MemoryTrace, What
from lading.sim.rank_engine import RankTimes
from lading.sim.simulate import Simulated
from lading.sim.storage import device_traces, listed_of

#: Where a step has more passes through units than this, a stage is drawn as one, and micro-batches that are alike once.
_MANY = 8192
#: Share of a region within which memory that the host asked for before it is drawn.
_ASKING = 0.01
_UNIT = re.compile(r"stage \d+, unit \d+")
#: Words for a storage, put before the name of the action that brought it.
_WORDS = {
    What.LEAVES: "left by ",
    What.SAVED: "kept by ",
    What.ENTERS: "given on by ",
    What.HANDED: "kept for its peer by ",
    What.GRADIENTS: "gradients made in ",
    What.MADE: "gradients of ",
    What.BUFFER: "buffer of ",
    What.CAST: "shard cast for ",
    What.WHOLE: "parameters gathered for ",
    What.INPUT: "buffer of ",
    What.SHARD: "gradient left by ",
}


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Memory of one pipeline rank over a step.

    Attributes:
        spans: Storages in memory, in the order in which they come.
        duration_s: Seconds of the step.
    """

    rank: int
    spans: tuple[MemorySpan, ...]
    duration_s: float

    @cached_property
    def bytes_over_time(self) -> tuple[npt.NDArray[np.float64], dict[Role, npt.NDArray[np.int64]]]:
        """Moments in ascending order (s), and the bytes of each role from one moment until the next."""
        count = len(self.spans)
        times = np.array([h.start_s for h in self.spans] + [h.end_s for h in self.spans])
        sizes = np.array([h.size_bytes for h in self.spans], np.int64)
        change = np.concatenate([sizes, -sizes])
        comes = np.arange(2 * count) < count
        order = np.lexsort((comes, times))  # at one moment, frees come before allocations
        moments = times[order]
        last = np.append(moments[1:] > moments[:-1], True)
        by_role: dict[Role, npt.NDArray[np.int64]] = {}
        for role in dict.fromkeys(h.role for h in self.spans):
            of_role = np.array([h.role is role for h in self.spans] * 2)
            by_role[role] = np.cumsum(np.where(of_role, change, 0)[order])[last]
        return moments[last], by_role

    @cached_property
    def total(self) -> npt.NDArray[np.int64]:
        """Bytes of all roles together at each moment of ``bytes_over_time``."""
        return np.sum(list(self.bytes_over_time[1].values()), axis=0)

    @property
    def peak_bytes(self) -> int:
        """Largest bytes at one moment of the step."""
        return int(self.total.max())

    def samples(self, tier: str) -> tuple[MemorySample, ...]:
        """Memory samples of a Timeline, one for each moment."""
        times, roles = self.bytes_over_time
        rows = np.stack(list(roles.values()), axis=1).tolist()
        names = [role.value for role in roles]
        return tuple(
            MemorySample(time_s, tier, dict(zip(names, row, strict=True)))
            for time_s, row in zip(times.tolist(), rows, strict=True)
        )


def occupancy(simulated: Simulated, rank: int) -> Occupancy:
    """Compute the memory of a pipeline rank over a simulated step.

    Raises:
        ConfigError: the pipeline has no such rank.
    """
    ranks = len(simulated.memory)
    if not 0 <= rank < ranks:
        raise ConfigError(f"expected a pipeline rank from 0 to {ranks - 1}, got {rank}")
    times = _times(simulated)
    request, step = simulated.request, simulated.step
    trace = device_traces(request, simulated.segments, step.stages, step, times.program)[rank]
    drawn = _drawn(trace, times, rank, _labels(simulated, times, rank), step.step_s)
    return Occupancy(rank, (*_fixed(simulated, trace, rank), *drawn), step.step_s)


def _times(simulated: Simulated) -> RankTimes:
    """Times of all actions: by unit and micro-batch, unless there are too many to draw."""
    step = simulated.step
    if step.times is not None:
        return step.times
    units = sum(count for stage in step.stages for _, count in stage.run)
    fine = 2 * units * simulated.request.layout.micro_batches <= _MANY * len(simulated.memory)
    return dataclasses.replace(listed_of(simulated.request, step), every_micro_batch=fine, by_unit=fine).times()


def _fixed(simulated: Simulated, trace: MemoryTrace, rank: int) -> Iterator[MemorySpan]:
    """Yield spans of the whole step: fixed storages, and what ``Simulated.memory`` counts beside the lists."""
    for role, size in simulated.memory[rank].items():
        size_bytes = size - trace.peak.get(role, 0) + trace.fixed.get(role, 0)
        name = "buffers that stay" if role is Role.WORKSPACE else role.value.replace("_", " ")
        if size_bytes:
            yield MemorySpan(0.0, simulated.step.step_s, role, size_bytes, name)


def _labels(simulated: Simulated, times: RankTimes, rank: int) -> list[str]:
    """Label each action of a rank, with the names of the model's segments."""
    segments = [segment.name for segment in simulated.table.segments]
    names: dict[str, str] = {}
    for number, stage in enumerate(simulated.step.stages):
        unit = 0
        for variant, count in stage.run:
            for place in range(count):
                name = segments[variant % len(segments)] + (f" {place}" if count > 1 else "")
                names[f"stage {number}, unit {unit}"] = f"{name} of stage {number}"
                unit += 1
    labels = map(times.program.label, times.program.ranks[rank])
    return [_UNIT.sub(lambda match: names.get(match[0], match[0]), label) for label in labels]


def _drawn(
    trace: MemoryTrace, times: RankTimes, rank: int, labels: Sequence[str], until_s: float
) -> Iterator[MemorySpan]:
    """Yield spans of storages that come and go; a free ends the oldest span of its storage, else of its stage."""
    changes = trace.changes
    present: dict[tuple[What, int], list[_Coming]] = {}
    rows: list[list[int]] = np.stack([changes.number, changes.sign, changes.action], axis=1).tolist()
    for (number, sign, action), time_s in zip(rows, _moments(trace, times, rank), strict=True):
        thing, size = changes.things[number], int(trace.sizes[number])
        if not size:
            continue
        candidates = present.setdefault((thing.what, thing.of.stage), [])
        if sign > 0:
            name = _WORDS.get(thing.what, "") + labels[action]
            candidates.append(_Coming(number, time_s, trace.roles[number], size, name))
            continue
        for one in sorted(candidates, key=lambda one: one.number != number):
            freed_bytes = min(size, one.size_bytes)
            size, one.size_bytes = size - freed_bytes, one.size_bytes - freed_bytes
            yield MemorySpan(one.start_s, time_s, one.role, freed_bytes, one.name)
            if not one.size_bytes:
                candidates.remove(one)
            if not size:
                break
    for one in (one for alike in present.values() for one in alike):
        yield MemorySpan(one.start_s, until_s, one.role, one.size_bytes, one.name)


@dataclass
class _Coming:
    """Bytes that were allocated and are not yet freed."""

    number: int
    start_s: float
    role: Role
    size_bytes: int
    name: str


def _moments(trace: MemoryTrace, times: RankTimes, rank: int) -> list[float]:
    """Seconds at which each change of the trace is drawn."""
    program, base = times.program, times.program.bounds[rank]
    moments: list[float] = []
    before_s, num_requests = 0.0, 0
    rows: list[list[int]] = np.stack([trace.changes.action, trace.changes.ends], axis=1).tolist()
    for action, ends in rows:
        if not ends:
            num_requests += 1
            continue
        start_s, end_s = times.start_s[base + action], times.end_s[base + action]
        moments += _between(before_s, start_s + _ASKING * (end_s - start_s), num_requests)
        moments.append(end_s)
        before_s, num_requests = end_s, 0
    moments += _between(before_s, max(before_s, times.step_s), num_requests)
    first, repeats = program.repeat
    if not repeats:
        return moments
    actions = program.ranks[rank]
    regions = [number for number, kind in enumerate(actions.kind) if kind is ActionKind.COMPUTE]
    start_s = min(times.start_s[base + n] for n in regions if actions.micro_batch[n] == first)
    end_s = max(times.end_s[base + n] for n in regions if actions.micro_batch[n] == first)
    return [t + repeats * (min(t, end_s) - start_s if t > start_s else 0.0) for t in moments]


def _between(start_s: float, end_s: float, count: int) -> list[float]:
    """Spread ``count`` moments evenly over (start, end], in seconds."""
    return [start_s + (end_s - start_s) * (place + 1) / count for place in range(count)]
