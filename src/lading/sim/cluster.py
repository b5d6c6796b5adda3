"""Cluster: every rank of a job simulated on its own, each with its own jitter, stragglers and slow links.

The lists of actions are those of ``lading.sim.rank_step``, in the order in which the rank engine runs them. Each action
runs on all ranks of its class at once, as arrays of (member of the group, replica). A group is the ranks that work on
one micro-batch together (tensor and context parallel). A region consists of stretches of computing; the whole group
meets after a stretch that has a collective. All replicas of a class meet in a gather or a reduction, all ranks in an
all-reduce of the world. Ranks are numbered over the group first, then replicas, then the pipeline, as Megatron's are.

Recorded are the seconds that each rank computes in all, and a digest of the end of every event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lading.errors import SimulationError
from lading.ir.action import ActionKind
from lading.ir.program import STREAMS, Program, Region
from lading.program.emit import WORLD
from lading.sim.noise import Jitter, Noise
from lading.sim.rank_engine import run_order, wired

Floats = npt.NDArray[np.float64]
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: any odd number with mixed bits would do
_DATA_PARALLEL = (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD)


@dataclass(frozen=True)
class Stretches:
    """Stretches of computing in a region.

    Attributes:
        seconds: Seconds of each stretch on an equal rank.
        collective_s: Seconds of the collective after it; 0 where the group does not meet.
    """

    seconds: tuple[float, ...]
    collective_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or len(self.seconds) != len(self.collective_s):
            raise SimulationError(
                f"expected stretches with a collective each, got {len(self.seconds)} and {len(self.collective_s)}"
            )
        if min(*self.seconds, *self.collective_s) < 0:
            raise SimulationError(f"expected seconds >= 0, got {min(*self.seconds, *self.collective_s)}")

    @property
    def total_s(self) -> float:
        """Seconds of the stretches and their collectives on equal ranks."""
        return sum(self.seconds) + sum(self.collective_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Work of all ranks of a job.

    Attributes:
        program: Lists of all classes of ranks, every micro-batch in them.
        seconds: Seconds of every action on equal ranks, of all classes one after the other.
        stretches: How a region's seconds are made up: they count as shares of its action's.
        group: Number of ranks that work on one micro-batch together.
        replicas: Number of copies of the pipeline.
        steps: Number of steps in a row.
    """

    program: Program
    seconds: Sequence[float]
    stretches: Mapping[Region, Stretches]
    group: int = 1
    replicas: int = 1
    steps: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks in all."""
        return self.group * self.replicas * len(self.program.ranks)


@dataclass(frozen=True, eq=False)
class ClusterRun:
    """Result of simulating all ranks of a job.

    Attributes:
        step_s: Seconds of each step, from the end of the one before.
        busy_s: Seconds that each rank computed, in all steps together.
        events: Stretches and collectives of all ranks, a collective counted once a rank.
        digest: Hash of the end of every event of every rank: equal logs have equal digests.
    """

    step_s: Floats
    busy_s: Floats
    events: int
    digest: str

    @property
    def waiting(self) -> Floats:
        """Share of the time in which each rank does not compute."""
        return 1.0 - self.busy_s / float(np.sum(self.step_s))


def simulate_cluster(job: Job, noise: Noise) -> ClusterRun:
    """Run the lists on every rank.

    Args:
        noise: Jitter, spread, stragglers and slow links.
    Raises:
        SimulationError: actions wait for each other.
        ConfigError: ``noise`` slows a rank that the job does not have.
    """
    with Jitter(noise.jitter, noise.seed, max(1 << 17, job.ranks)) as jitter:
        state = _State(job, noise, jitter)
        step_s = np.array([state.step() for _ in range(job.steps)])
    digest = hashlib.sha256(state.mixed.tobytes()).hexdigest()[:16]
    busy = np.transpose(state.busy, (0, 2, 1)).reshape(-1)
    return ClusterRun(step_s, busy, state.events, digest)


class _State:
    """State of all ranks: arrays of (class of ranks, group, replica)."""

    def __init__(self, job: Job, noise: Noise, jitter: Jitter) -> None:
        classes = len(job.program.ranks)
        shape = (classes, job.replicas, job.group)
        self._job, self._jitter, self._calm = job, jitter, noise.jitter == 0.0
        factors = (noise.device_factors(job.ranks), noise.link_factors(job.ranks))
        self._device, self._link = (
            np.ascontiguousarray(np.transpose(each.reshape(shape), (0, 2, 1))) for each in factors
        )
        self._meeting = self._link.max(axis=1)
        self._wires = wired(job.program)
        self._order = run_order(job.program)
        self._rank_of = np.repeat(np.arange(classes), np.diff(job.program.bounds)).tolist()
        self._needed = [0] * len(self._wires.waits)
        for waits in self._wires.waits:
            for wait in waits:
                self._needed[wait] += 1
        self.free = np.zeros((len(STREAMS) * classes, job.group, job.replicas))
        self.busy = np.zeros_like(self._device)
        self.mixed = np.zeros(self._device.shape, np.uint64)
        self.events = 0

    def step(self) -> float:
        """Run one step; returns its seconds."""
        began = float(self.free.max())
        self._ends: dict[int, Floats] = {}
        self._left = list(self._needed)
        for stream, action in self._order:
            self._run(stream, action)
        return float(self.free.max()) - began

    def _run(self, stream: int, action: int) -> None:
        """Run an action on all ranks of its class."""
        clock_s = self.free[stream]
        for wait in self._wires.waits[action]:
            np.maximum(clock_s, self._ends[wait], out=clock_s)
            self._left[wait] -= 1
            if not self._left[wait]:
                del self._ends[wait]
        rank, program = self._rank_of[action], self._job.program
        number = action - program.bounds[rank]
        actions, seconds = program.ranks[rank], self._job.seconds[action]
        kind = actions.kind[number]
        if kind is ActionKind.COMPUTE:
            self._region(rank, program.regions[actions.op[number]], seconds, clock_s)
        elif kind in _DATA_PARALLEL or (kind is ActionKind.ALL_REDUCE and actions.group[number] == WORLD):
            clock_s[:] = clock_s.max()
            clock_s += seconds * float(self._link[rank].max())
        elif kind is ActionKind.SEND:
            clock_s += seconds * self._link[rank]
        elif kind is ActionKind.ALL_REDUCE:
            clock_s[:] = clock_s.max(axis=0)
            clock_s += seconds * self._meeting[rank]
        else:
            clock_s += seconds
        if self._left[action]:
            self._ends[action] = clock_s.copy()

    def _region(self, rank: int, region: Region, seconds: float, clock_s: Floats) -> None:
        """Run a region's stretches from ``clock_s`` on, which is updated in place."""
        stretches, device, mixed = self._job.stretches[region], self._device[rank], self.mixed[rank]
        scale = seconds / total if (total := stretches.total_s) else 0.0
        begun, waited = clock_s.copy(), 0.0
        for alone, together in zip(stretches.seconds, stretches.collective_s, strict=True):
            lasts = device * (alone * scale)
            if not self._calm:
                lasts *= self._jitter.take(lasts.size).reshape(lasts.shape)
            clock_s += lasts
            self._note(mixed, clock_s)
            if together:
                before = clock_s.copy()
                clock_s[:] = clock_s.max(axis=0) + together * scale * self._meeting[rank]
                waited = waited + (clock_s - before)
                self._note(mixed, clock_s)
        self.busy[rank] += clock_s - begun - waited

    def _note(self, mixed: npt.NDArray[np.uint64], clock_s: Floats) -> None:
        """Count an event of all ranks of a class, and add its end to their digest."""
        mixed *= _MIX
        mixed += clock_s.view(np.uint64)
        self.events += clock_s.size
