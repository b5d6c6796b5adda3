"""Cluster: every rank of a job on its own, each with its own jitter, stragglers and slow links.

A job has ``group`` ranks that work on one micro-batch together (tensor and context parallel), ``ranks`` of a pipeline
and ``replicas``; rank numbers run over the group first, then replicas, then the pipeline, as Megatron's do. An action
of the pipeline's schedule is a row of stretches of computing; after a stretch with a collective the whole group meets.
Gradients of a stage are reduced over its replicas as soon as its last one is there, beside other work, and the step
ends when all are. What a schedule runs as one is run one after the other, as torch does.

The order of actions does not depend on times, so actions are sorted once into waves of at most one a pipeline rank, and
a wave is computed for all replicas and groups at once. What is kept is what each rank has done in all, a digest of
every event's end, and the events of the ranks that are watched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lading.errors import SimulationError
from lading.program.schedules import Schedule, Work
from lading.sim.noise import Jitter, Noise
from lading.sim.pipeline import Entries, PipelineSeconds, entries_of, time_entries

Floats = npt.NDArray[np.float64]
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: any odd number with mixed bits would do


@dataclass(frozen=True)
class Stretches:
    """An action's stretches of computing.

    Attributes:
        seconds: Of each stretch on an equal rank.
        collective_s: Of the collective after it; 0 where the group does not meet.
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
        """Seconds of all on equal ranks."""
        return sum(self.seconds) + sum(self.collective_s)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of a job do.

    Attributes:
        work: Stretches by kind of work: one for all stages, or one a stage.
        group: Ranks that work on one micro-batch together.
        replicas: Of the pipeline.
        send_forward, send_backward: Seconds from stage to stage.
        reduce_s: Seconds in which the gradients of a stage are reduced over replicas; a number, or one a stage.
        ahead_s: How long before a stage's last gradient the first are ready to be reduced; likewise.
        tail_s: Seconds of the reduction of those that come last, which nothing hides; likewise.
        end_s: Seconds of what follows on every rank: the optimizer, gathering of parameters.
        overlap: Whether ranks compute while they send.
        steps: How many in a row.
    """

    plan: Schedule
    work: Mapping[Work, Stretches | Sequence[Stretches]]
    group: int = 1
    replicas: int = 1
    send_forward: float = 0.0
    send_backward: float = 0.0
    reduce_s: npt.ArrayLike = 0.0
    ahead_s: npt.ArrayLike = 0.0
    tail_s: npt.ArrayLike = 0.0
    end_s: float = 0.0
    overlap: bool = True
    steps: int = 1

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.group * self.replicas * self.plan.ranks

    def stretches(self, work: int, stage: int) -> Stretches:
        """What an action of this work does on this stage.

        Raises:
            SimulationError: it is not given.
        """
        found = self.work.get(Work(work))
        if found is None:
            raise SimulationError(f"schedule {self.plan.kind} needs the stretches of {Work(work).name.lower()}")
        return found if isinstance(found, Stretches) else found[stage]


@dataclass(frozen=True, eq=False)
class ClusterRun:
    """What the ranks of a job did.

    Attributes:
        job: What they were given.
        step_s: Seconds of each step, from the end of the one before.
        busy_s: Of each rank, in stretches of computing, all steps together.
        events: Stretches and collectives of all ranks, a collective counted once a rank.
        digest: Of the end of every event of every rank: equal logs have equal digests.
        watched: Of each watched rank, rows of (start, end, action, stretch): action counts those of a step; a
            collective is the row after its stretch, with the same numbers.
    """

    job: Job
    step_s: Floats
    busy_s: Floats
    events: int
    digest: str
    watched: dict[int, Floats] = field(default_factory=lambda: {})

    @property
    def waiting(self) -> Floats:
        """Share of the time that each rank does not compute."""
        return 1.0 - self.busy_s / float(np.sum(self.step_s))


def simulate_cluster(job: Job, noise: Noise, *, watch: Sequence[int] = ()) -> ClusterRun:
    """Events of every rank.

    Args:
        noise: What makes them unequal.
        watch: Ranks whose events are kept.
    Raises:
        SimulationError: stretches that the schedule needs are not given, or its orders wait for each other.
        ConfigError: a slow or watched rank that there is not.
    """
    waves = _waves(job)
    with Jitter(noise.jitter, noise.seed, max(1 << 17, job.ranks)) as jitter:
        state = _State(job, noise, jitter, watch)
        step_s = np.array([state.step(waves) for _ in range(job.steps)])
    digest = hashlib.sha256(state.mixed.tobytes()).hexdigest()[:16]
    busy = np.transpose(state.busy, (1, 2, 0)).reshape(-1)
    rows = {rank: np.array(found).reshape(-1, 4) for rank, found in state.log.items()}
    return ClusterRun(job, step_s, busy, state.events, digest, rows)


@dataclass(frozen=True, slots=True)
class _Part:
    """Actions of one wave whose stretches meet in the same places.

    Attributes:
        places: Pipeline rank of each.
        entries: Their numbers among the actions of all ranks.
        seconds, collective_s: By stretch, one an action.
        meets: By stretch, whether the group meets after it.
    """

    places: list[int]
    entries: list[int]
    seconds: Floats
    collective_s: Floats
    meets: list[bool]


@dataclass(frozen=True, slots=True)
class _Waves:
    """All actions of a step in an order in which what they need is there.

    ``ready`` is, by entry, the stages whose gradients are whole when it ends.
    """

    entries: Entries
    lists: dict[str, list[int]]
    sends: list[float]
    parts: list[_Part]
    ready: dict[int, int]


def _waves(job: Job) -> _Waves:
    plan = job.plan
    totals = [[_total(job, work, stage) for stage in range(plan.stages)] for work in Work]
    forward, backward, inputs, weights = (np.array(row) for row in totals)
    seconds = PipelineSeconds(
        forward=forward,
        backward=backward,
        backward_input=inputs,
        backward_weight=weights,
        send_forward=job.send_forward,
        send_backward=job.send_backward,
    )
    entries = entries_of(plan, seconds)
    levels = time_entries(_by_level(entries), True)[0]
    if np.any(np.isnan(levels)):
        raise SimulationError(f"schedule {plan.kind}: actions wait for each other; check the orders")
    order = np.argsort(levels, kind="stable").tolist()
    rows = np.concatenate(plan.orders).tolist()
    place = np.repeat(np.arange(plan.ranks), np.diff(entries.bounds)).tolist()
    stage = [plan.stage(place[i], row[1]) for i, row in enumerate(rows)]
    ready = {stage[i]: i for i in range(len(rows)) if rows[i][0] in (Work.BACKWARD, Work.BACKWARD_WEIGHT)}
    parts: list[_Part] = []
    wave: list[int] = []
    for entry in [*order, -1]:
        if wave and (entry < 0 or levels[entry] > levels[wave[0]]):
            parts.extend(_parts(job, wave, rows, place, stage))
            wave = []
        wave.append(entry)
    lists = {name: getattr(entries, name).tolist() for name in ("needs", "also", "posts", "links")}
    return _Waves(entries, lists, entries.sends.tolist(), parts, {entry: s for s, entry in ready.items()})


def _total(job: Job, work: Work, stage: int) -> float:
    return job.stretches(work, stage).total_s if work in job.work else np.nan


def _by_level(entries: Entries) -> Entries:
    """The same actions, each of length 1, and no time to send: when they start is how deep they stand."""
    zeros = np.zeros(len(entries.lasts))
    return Entries(
        entries.bounds,
        zeros + 1.0,
        entries.needs,
        entries.also,
        entries.posts,
        zeros,
        entries.links,
        entries.sending,
        entries.joint,
    )


def _parts(
    job: Job, wave: Sequence[int], rows: Sequence[Sequence[int]], place: Sequence[int], stage: Sequence[int]
) -> list[_Part]:
    """Actions of a wave, those together whose group meets in the same places."""
    alike: dict[tuple[bool, ...], list[int]] = {}
    found = {entry: job.stretches(rows[entry][0], stage[entry]) for entry in wave}
    for entry in wave:
        alike.setdefault(tuple(c > 0 for c in found[entry].collective_s), []).append(entry)
    return [
        _Part(
            places=[place[entry] for entry in entries],
            entries=entries,
            seconds=np.array([found[entry].seconds for entry in entries]).T,
            collective_s=np.array([found[entry].collective_s for entry in entries]).T,
            meets=list(meets),
        )
        for meets, entries in alike.items()
    ]


class _State:
    """Where all ranks stand: arrays of (group, pipeline rank, replica)."""

    def __init__(self, job: Job, noise: Noise, jitter: Jitter, watch: Sequence[int]) -> None:
        plan = job.plan
        shape = (plan.ranks, job.replicas, job.group)
        self._job, self._jitter, self._calm = job, jitter, noise.jitter == 0.0
        devices, links = noise.device_factors(job.ranks), noise.link_factors(job.ranks)
        self._device = np.ascontiguousarray(np.transpose(devices.reshape(shape), (2, 0, 1)))
        self._link = np.ascontiguousarray(np.transpose(links.reshape(shape), (2, 0, 1)))
        self._meeting = self._link.max(axis=0)
        reduction = (job.reduce_s, job.ahead_s, job.tail_s)
        self._reduce_s = [
            np.broadcast_to(np.asarray(value, np.float64), (plan.stages,)).tolist() for value in reduction
        ]
        self.free = np.zeros_like(self._device)
        self.busy = np.zeros_like(self._device)
        self.mixed = np.zeros(self._device.shape, np.uint64)
        self.events = 0
        self.log: dict[int, list[tuple[float, float, int, int]]] = {rank: [] for rank in watch}
        if bad := [rank for rank in watch if not 0 <= rank < job.ranks]:
            raise SimulationError(f"expected watched ranks from 0 to {job.ranks - 1}, got {bad[0]}")

    def step(self, waves: _Waves) -> float:
        """One step; returns its seconds."""
        began = float(self.free.max())
        self._arrived: dict[int, Floats] = {}
        self._links = {link: np.zeros_like(self.free[:, 0]) for link in range(3 * self._job.plan.ranks)}
        reduced = self.free.copy()
        for part in waves.parts:
            start = self._start(waves, part)
            end = self._stretches(part, start)
            for row, entry in enumerate(part.entries):
                self._post(waves, entry, part.places[row], end[:, row])
                if entry in waves.ready:
                    self._reduce(reduced[:, part.places[row]], end[:, row], part.places[row], waves.ready[entry])
        np.maximum(self.free, reduced, out=self.free)
        self.free += self._job.end_s
        return float(self.free.max()) - began

    def _start(self, waves: _Waves, part: _Part) -> Floats:
        """When each rank has what it needs and is free."""
        start = self.free[:, part.places]
        nothing = 2 * self._job.plan.stages * self._job.plan.micro_batches
        for row, entry in enumerate(part.entries):
            if (slot := waves.lists["also"][entry]) != nothing:
                np.maximum(start[:, row], self._arrived[slot], out=start[:, row])
            if (slot := waves.lists["needs"][entry]) != nothing:
                np.maximum(start[:, row], self._arrived.pop(slot), out=start[:, row])
        return start

    def _stretches(self, part: _Part, now: Floats) -> Floats:
        """Compute a part's stretches from ``now`` on, which is changed; returns when they end."""
        device, mixed, begun = self._device[:, part.places], self.mixed[:, part.places], now.copy()
        meeting = self._meeting[part.places]
        waited = np.zeros_like(now)
        for number, meets in enumerate(part.meets):
            before = now.copy() if self.log else now
            lasts = device * part.seconds[number][:, None]
            if not self._calm:
                lasts *= self._jitter.take(lasts.size).reshape(lasts.shape)
            now += lasts
            mixed *= _MIX
            mixed += now.view(np.uint64)
            self._watch(part, number, before, now)
            if meets:
                there = now.max(axis=0)
                there += part.collective_s[number][:, None] * meeting
                before = now.copy() if self.log else now
                waited -= now
                now[:] = there
                waited += now
                mixed *= _MIX
                mixed += now.view(np.uint64)
                self._watch(part, number, before, now)
        self.events += now.size * (len(part.meets) + sum(part.meets))
        self.busy[:, part.places] += now - begun - waited
        self.mixed[:, part.places] = mixed
        self.free[:, part.places] = now
        return now

    def _watch(self, part: _Part, number: int, start: Floats, end: Floats) -> None:
        for rank, rows in self.log.items():
            place, rest = divmod(rank, self._job.replicas * self._job.group)
            replica, member = divmod(rest, self._job.group)
            if place in part.places:
                row = part.places.index(place)
                at = (member, row, replica)
                rows.append((float(start[at]), float(end[at]), part.entries[row], number))

    def _post(self, waves: _Waves, entry: int, place: int, end: Floats) -> None:
        """Hand over what an action leaves behind, over its link."""
        post = waves.lists["posts"][entry]
        if post == 2 * self._job.plan.stages * self._job.plan.micro_batches:
            return
        link = waves.lists["links"][entry]
        if link % 3 == 2:
            self._arrived[post] = end
            return
        there = np.maximum(end, self._links[link])
        there += waves.sends[entry] * self._link[:, place]
        self._links[link] = self._arrived[post] = there
        if not self._job.overlap:
            self.free[:, place] = there

    def _reduce(self, reduced: Floats, end: Floats, place: int, stage: int) -> None:
        """Reduce a stage's gradients once every replica has them, after the reductions before it."""
        whole, ahead, tail = (values[stage] for values in self._reduce_s)
        slowest = self._link[:, place].max(axis=1, keepdims=True)
        begin = np.maximum(reduced, end - ahead).max(axis=1, keepdims=True)
        last = end.max(axis=1, keepdims=True) + tail * slowest
        reduced[:] = np.maximum(begin + whole * slowest, last)
