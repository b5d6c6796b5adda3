"""Memory over time: what a pipeline rank holds while a step runs, by role and by the action that brought it.

[Note: what comes and goes]
A forward goes through the segments of its chunk and keeps of each what backward reads; backward goes through them in
reverse and lets it go; what either needs besides is there while it runs. Where the two gradients are apart, all is kept
until that of the weights is done. Parameters, gradients and optimizer states are as ``lading.memory.ranks`` counts
them: their buffers are there all the time. Where parameters are cut, gathered ones, gradients that are not reduced yet
and their buffers are there as ``lading.sim.gathered`` says, and a part's gradient from its first reduction on; in a
pipeline they are there from the first action to the last. The most at one moment is what ``Simulated.memory`` says
(tests compare).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.graph import Role
from lading.ir.request import StepRequest
from lading.ir.timeline import Held, MemorySample
from lading.program.schedules import Schedule, schedule
from lading.sim.gathered import UnitBytes, gathered_passes, own_gradients
from lading.sim.parts import Part
from lading.sim.phases import Phases
from lading.sim.simulate import WAITING, Simulated
from lading.sim.step import SimulatedStage
from lading.sim.storage import on_device, units_of

#: Of more passes through segments than this in a step, a chunk is drawn as one.
_MANY = 8192


@dataclass(frozen=True, eq=False)
class Occupancy:
    """What one pipeline rank holds.

    Attributes:
        held: In the order in which it comes.
        duration_s: Of the step.
    """

    rank: int
    held: tuple[Held, ...]
    duration_s: float

    @cached_property
    def staircase(self) -> tuple[npt.NDArray[np.float64], dict[Role, npt.NDArray[np.int64]]]:
        """Moments (s), ascending, and bytes by role from each until the next."""
        count = len(self.held)
        times = np.array([h.start_s for h in self.held] + [h.end_s for h in self.held])
        sizes = np.array([h.size_bytes for h in self.held], np.int64)
        change = np.concatenate([sizes, -sizes])
        comes = np.arange(2 * count) < count
        order = np.lexsort((comes, times))  # what goes at a moment goes before what comes
        moments = times[order]
        last = np.append(moments[1:] > moments[:-1], True)
        found: dict[Role, npt.NDArray[np.int64]] = {}
        for role in dict.fromkeys(h.role for h in self.held):
            of_role = np.array([h.role is role for h in self.held] * 2)
            found[role] = np.cumsum(np.where(of_role, change, 0)[order])[last]
        return moments[last], found

    @cached_property
    def total(self) -> npt.NDArray[np.int64]:
        """Bytes of all roles at each moment of ``staircase``."""
        return np.sum(list(self.staircase[1].values()), axis=0)

    @property
    def peak_bytes(self) -> int:
        """Most at one moment."""
        return int(self.total.max())

    @property
    def peak_s(self) -> float:
        """When that is."""
        return float(self.staircase[0][int(self.total.argmax())])

    def samples(self, tier: str) -> tuple[MemorySample, ...]:
        """The staircase for a Timeline."""
        times, roles = self.staircase
        rows = np.stack(list(roles.values()), axis=1).tolist()
        names = [role.value for role in roles]
        return tuple(
            MemorySample(time_s, tier, dict(zip(names, row, strict=True)))
            for time_s, row in zip(times.tolist(), rows, strict=True)
        )


def occupancy(simulated: Simulated, rank: int, spans: Sequence[tuple[float, float]] | None = None) -> Occupancy:
    """What a pipeline rank of a simulated step holds over time ([Note: what comes and goes]).

    Args:
        spans: Start and end of each of its actions, where no pipeline says them; None spreads them evenly.
    Raises:
        ConfigError: a rank that the pipeline has not, or another number of spans than actions.
    """
    ranks = len(simulated.memory)
    if not 0 <= rank < ranks:
        raise ConfigError(f"expected a pipeline rank from 0 to {ranks - 1}, got {rank}")
    plan, spans = _plan(simulated), spans or _spans(simulated, rank)
    order: list[list[int]] = plan.orders[rank].tolist()
    if len(order) != len(spans):
        raise ConfigError(f"expected the start and end of each of {len(order)} actions, got {len(spans)}")
    stages = [simulated.step.stages[stage] for stage in plan.stages_of(rank)]
    passes = len(order) / len(stages) * sum(count for stage in stages for _, count in stage.run)
    chunks = [_parts(stage, simulated, together=passes > _MANY) for stage in stages]
    drawn = _Drawing(chunks, simulated.step.step_s)
    before = 0
    for action, (work, chunk, micro_batch, joint) in enumerate(order):
        start_s, end_s = spans[action]
        if joint or before:  # of two that run as one, the first is drawn in the first half
            middle_s = (start_s + end_s) / 2
            start_s, end_s = (start_s, middle_s) if joint else (middle_s, end_s)
        before = joint
        drawn.run(Work(work), chunk, micro_batch, (start_s, end_s))
    fixed = _fixed(simulated, rank, stages, (spans[0][0], spans[-1][1]))
    return Occupancy(rank, (*fixed, *drawn.held), simulated.step.step_s)


def _plan(simulated: Simulated) -> Schedule:
    run = simulated.step.pipeline
    return schedule("1f1b", 1, 1, simulated.request.layout.micro_batches) if run is None else run.schedule


def _spans(simulated: Simulated, rank: int) -> list[tuple[float, float]]:
    """When each action of a rank runs."""
    step = simulated.step
    if step.pipeline is not None:
        run = step.pipeline
        return list(zip(run.start_s[rank].tolist(), run.end_s[rank].tolist(), strict=True))
    after = sum(step.shares_s.get(name, 0.0) for name in ("optimizer", "host", WAITING))
    each = (step.step_s - after) / simulated.request.layout.micro_batches
    stage = step.stages[0]
    forward = each * stage.forward.seconds / (stage.forward.seconds + stage.backward_s)
    found: list[tuple[float, float]] = []
    for number in range(simulated.request.layout.micro_batches):
        middle = number * each + forward
        found += [(number * each, middle), (middle, (number + 1) * each)]
    return found


def _fixed(
    simulated: Simulated, rank: int, stages: Sequence[SimulatedStage], computing: tuple[float, float]
) -> Iterator[Held]:
    """What does not depend on micro-batches."""
    roles, until = simulated.memory[rank], simulated.step.step_s
    placeholders = sum({shape: size for stage in stages for shape, size in stage.placeholders.items()}.values())
    in_units = bool(units_of(simulated.request, stages[0], simulated.segments))
    for role, size in roles.items():
        if role is Role.GRADIENT and in_units and simulated.request.layout.micro_batches == 1:
            continue
        if role is Role.WORKSPACE:
            yield Held(0.0, until, role, placeholders, "placeholders of gradients")
        if role is Role.WORKSPACE and not in_units:
            yield Held(*computing, role, size - placeholders, "buffers of gathered parameters")
        if role not in (Role.ACTIVATION, Role.WORKSPACE):
            yield Held(0.0, until, role, size, role.value.replace("_", " "))


@dataclass(frozen=True, slots=True)
class _Part:
    """One pass of a segment, or of a whole chunk: bytes, and its shares of the seconds of forward and backward.

    Attributes:
        forward_gathered, backward_gathered: Bytes of gathered parameters and what goes with them.
        gradient: Bytes of the gradients of this rank's part of its parameters that backward brings.
    """

    name: str
    saved: int
    forward_bytes: int
    backward_bytes: int
    forward_share: float
    backward_share: float
    forward_gathered: int = 0
    backward_gathered: int = 0
    gradient: int = 0


def _parts(stage: SimulatedStage, simulated: Simulated, *, together: bool) -> list[_Part]:
    if together:
        forward, backward = stage.transients
        part = _Part("all segments", stage.saved_bytes, forward, backward, 1.0, 1.0)
        return [_gathering_all(part, stage, simulated)]
    segments, names = simulated.segments, [segment.name for segment in simulated.table.segments]
    found: list[_Part] = []
    totals = [sum(count * _seconds(segments[s])[i] for s, count in stage.run) for i in (0, 1)]
    for index, count in stage.run:
        phases = segments[index]
        shares = [seconds / total for seconds, total in zip(_seconds(phases), totals, strict=True)]
        for number in range(count):
            name = names[index % len(names)] + (f" {number}" if count > 1 else "")
            found.append(_Part(name, phases.saved_bytes, *phases.transients, shares[0], shares[1]))
    return _gathering(found, stage, simulated)


def _gathering(parts: list[_Part], stage: SimulatedStage, simulated: Simulated) -> list[_Part]:
    """The same where parameters are gathered a unit at a time, with what of them is there in each pass."""
    request = simulated.request
    units = units_of(request, stage, simulated.segments)
    if not units:
        return parts
    passes = gathered_passes(units, request.layout, request.stack)
    own = [_own(unit, request) for unit in units]
    found: list[_Part] = []
    kept = 0
    for number, part in enumerate(parts):
        kept += part.saved
        forward, backward = passes[number], passes[-1 - number]
        most = [max(kept, peak.activations) for peak in (forward, backward)]
        totals = [on_device(peak, request.layout) for peak in (forward, backward)]
        there = simulated.memory[0][Role.GRADIENT] if not any(own) else 0
        found.append(
            replace(
                part,
                forward_bytes=most[0] - kept,
                backward_bytes=most[1] - kept,
                forward_gathered=max(0, totals[0] - most[0] - there),
                backward_gathered=max(0, totals[1] - most[1] - there - sum(own[number + 1 :])),
                gradient=own[number],
            )
        )
    return found


def _gathering_all(part: _Part, stage: SimulatedStage, simulated: Simulated) -> _Part:
    """A whole chunk, likewise."""
    request = simulated.request
    units = units_of(request, stage, simulated.segments)
    if not units:
        return part
    passes = gathered_passes(units, request.layout, request.stack)
    own = sum(_own(unit, request) for unit in units)
    there = 0 if own else simulated.memory[0][Role.GRADIENT]
    halves = passes[: len(units)], passes[len(units) :]
    most = [max(on_device(peak, request.layout) for peak in half) for half in halves]
    gathered = [max(0, size - part.saved - there) for size in most]
    return replace(
        part,
        forward_bytes=0,
        backward_bytes=0,
        forward_gathered=gathered[0],
        backward_gathered=gathered[1],
        gradient=own,
    )


def _own(unit: UnitBytes, request: StepRequest) -> int:
    """Gradients that come with a unit's backward and stay: where micro-batches add up they are there all the time."""
    layout = request.layout
    stays = layout.micro_batches == 1 and not layout.updates_on_host
    return own_gradients(unit, layout, request.stack) if stays else 0


def _seconds(phases: Phases) -> tuple[float, float]:
    """Of forward and of backward, before anything overlaps: to share out those of a chunk."""
    backward = (phases.again, phases.backward_input, phases.backward_weight)
    return _busy_s(phases.forward), sum(_busy_s(part) for part in backward)


def _busy_s(part: Part) -> float:
    return sum(part.busy_s.values()) + sum(part.comm_s.values())


class _Drawing:
    """Actions of one rank turned into what they hold, in order."""

    def __init__(self, chunks: Sequence[Sequence[_Part]], until_s: float) -> None:
        self._until = until_s
        self.held: list[Held] = []
        self._chunks = chunks
        self._since: dict[tuple[int, int], list[float]] = {}

    def run(self, work: Work, chunk: int, micro_batch: int, span: tuple[float, float]) -> None:
        """One action."""
        what = f"micro-batch {micro_batch}, chunk {chunk}"
        if work is Work.FORWARD:
            self._forward(chunk, micro_batch, span, what)
        elif work is Work.BACKWARD:
            self._backward(chunk, micro_batch, span, what)
        else:
            self._whole(work, chunk, micro_batch, span, what)

    def _forward(self, chunk: int, micro_batch: int, span: tuple[float, float], what: str) -> None:
        parts = self._chunks[chunk]
        edges = _edges(span, [part.forward_share for part in parts])
        self._since[chunk, micro_batch] = edges[:-1]
        for part, start_s, end_s in zip(parts, edges, edges[1:], strict=False):
            self._add(start_s, end_s, part.forward_bytes, f"forward of {part.name}, {what}")
            self._add(start_s, end_s, part.forward_gathered, f"gathered for {part.name}, {what}", Role.WORKSPACE)

    def _backward(self, chunk: int, micro_batch: int, span: tuple[float, float], what: str) -> None:
        parts = self._chunks[chunk]
        since = self._since.pop((chunk, micro_batch))
        edges = _edges(span, [part.backward_share for part in reversed(parts)])
        rows = zip(reversed(parts), reversed(since), edges, edges[1:], strict=False)
        for part, came_s, start_s, end_s in rows:
            self._add(came_s, end_s, part.saved, f"kept of {part.name}, {what}")
            self._add(start_s, end_s, part.backward_bytes, f"backward of {part.name}, {what}")
            self._add(start_s, end_s, part.backward_gathered, f"gathered for {part.name}, {what}", Role.WORKSPACE)
            self._add(end_s, self._until, part.gradient, f"gradient of {part.name}", Role.GRADIENT)

    def _whole(self, work: Work, chunk: int, micro_batch: int, span: tuple[float, float], what: str) -> None:
        """One of the two gradients: the other may come much later, until when all is kept."""
        parts, kept, most = self._chunks[chunk], 0, 0
        for part in parts:
            kept += part.saved
            most = max(most, kept + part.backward_bytes)
        self._add(*span, most - kept, f"{work.name.lower().replace('_', ' ')}, {what}")
        if work is Work.BACKWARD_WEIGHT:
            for part, came_s in zip(parts, self._since.pop((chunk, micro_batch)), strict=True):
                self._add(came_s, span[1], part.saved, f"kept of {part.name}, {what}")

    def _add(self, start_s: float, end_s: float, size_bytes: int, name: str, role: Role = Role.ACTIVATION) -> None:
        if size_bytes:
            self.held.append(Held(start_s, end_s, role, size_bytes, name))


def _edges(span: tuple[float, float], shares: Sequence[float]) -> list[float]:
    """Where parts of a span begin, and its end."""
    inner = span[0] + (span[1] - span[0]) * np.cumsum([0.0, *shares[:-1]])
    return [*inner.tolist(), span[1]]
