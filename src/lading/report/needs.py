"""Bytes that a planned step needs in each tier, by what they are for: the table of ``lading fit``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lading.errors import PlanInfeasible
from lading.ir.action import DEVICE, ActionKind
from lading.ir.graph import Phase, Role, StepGraph
from lading.ir.program import COMPUTE_STREAM, HOST_STREAM, Program, slot_bytes
from lading.ir.timeline import Timeline
from lading.memory.tier_layout import home_tiers, passing_on_host
from lading.units import format_bytes, format_seconds

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer state"
ACTIVATIONS, LOGITS, WORKSPACE = "activations", "logits and loss", "workspace"
ROWS = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, LOGITS, WORKSPACE)
STEP, SAVE, RESUME = "step", "save", "resume"

_OF_ROLE = {
    Role.PARAMETER: PARAMETERS,
    Role.BUFFER: PARAMETERS,
    Role.CONSTANT: PARAMETERS,
    Role.GRADIENT: GRADIENTS,
    Role.OPTIMIZER_STATE: STATES,
}

Bytes = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that a run needs in each tier.

    Attributes:
        rows: For each of ROWS, bytes in each tier when that tier is fullest; they add up to ``step``.
        step: Bytes that a step takes.
        save: Bytes taken while a checkpoint is written, as a whole and not on top of ``step``.
        resume: Bytes taken while a run starts or goes on from a checkpoint, likewise.
    """

    rows: dict[str, Bytes]
    step: Bytes
    save: Bytes = field(default_factory=lambda: {})
    resume: Bytes = field(default_factory=lambda: {})

    @property
    def total(self) -> Bytes:
        """Largest bytes that any of the three takes, by tier."""
        return {tier: max(part.get(tier, 0) for part in (self.step, self.save, self.resume)) for tier in self.step}

    def lines(self, allowed: Bytes) -> list[str]:
        """Lines of the table, one a row, with a column for each tier of ``allowed``."""
        table = {**self.rows, STEP: self.step, SAVE: self.save, RESUME: self.resume}
        table |= {"total": self.total, "allowed": allowed}
        lines = [f"{'':<18}" + "".join(f"{tier:>14}" for tier in allowed)]
        for name, row in table.items():
            cells = (format_bytes(row.get(tier, 0)) for tier in allowed)
            lines.append(f"{name:<18}" + "".join(f"{cell:>14}" for cell in cells))
        return lines


def step_needs(program: Program, predicted: Timeline, tiers: Sequence[str]) -> Needs:
    """Count the bytes that a step takes in each tier, by what they are for.

    Args:
        predicted: Timeline of ``program``; tells when the device is fullest.
        tiers: The lower tiers of the machine, of which the program may leave some empty.
    """
    row_of = rows_of(program.graph)
    columns = {DEVICE: _at_peak(program, predicted, row_of)}
    for tier in tiers:
        columns[tier] = _in_slots(program, tier, row_of)
    step_bytes = {DEVICE: program.step_bytes, **{tier: program.tier_bytes(tier) for tier in tiers}}
    for tier, column in columns.items():  # the process, scratch inside kernels, and gaps between tensors
        column[WORKSPACE] = step_bytes[tier] - sum(column.values())
    return Needs(rows={row: {tier: columns[tier][row] for tier in columns} for row in ROWS}, step=step_bytes)


def rows_of(graph: StepGraph) -> list[str]:
    """Name the row of the table that each storage belongs to."""
    rows = [_OF_ROLE.get(storage.role, ACTIVATIONS) for storage in graph.storages]
    for op in graph.ops:
        if op.phase is Phase.LOSS:
            about = (*graph.reads(op), *graph.writes(op))
        elif op.phase is Phase.BACKWARD and not op.module:
            about = graph.writes(op)
        else:
            continue
        for storage in about:
            if rows[storage] == ACTIVATIONS and graph.storages[storage].role is not Role.INPUT:
                rows[storage] = LOGITS
    return rows


def _at_peak(program: Program, predicted: Timeline, row_of: Sequence[str]) -> Counter[str]:
    """Bytes of each row on the device at the moment of its peak."""
    samples = (sample for sample in predicted.memory if sample.tier == DEVICE)
    moment = max(samples, key=lambda sample: sample.total_bytes).time_s
    starts = {event.action: event.start_s for event in predicted.events}
    ends = {event.action: event.end_s for event in predicted.events}
    counts: Counter[int] = Counter(storage for storage, home in home_tiers(program).items() if home == DEVICE)
    for action in program.actions:
        if starts[action.id] <= moment:
            counts.update(storage for storage, _ in action.places)
        freed = action.kind is ActionKind.FREE and action.source == DEVICE
        if freed and action.storage is not None and ends[action.id] <= moment:
            counts[action.storage] -= 1
    return _sum(program.graph, row_of, counts)


def _in_slots(program: Program, tier: str, row_of: Sequence[str]) -> Counter[str]:
    """Bytes of each row in a lower tier; what is there only to be worked on shares its places (gradients, mostly)."""
    graph, slots = program.graph, dict(program.slots.get(tier, ()))
    passing = slots.keys() & passing_on_host(program) if tier == program.host_tier else set[int]()
    rows = _sum(graph, row_of, Counter(slots.keys() - passing))
    if passing:
        ends = [slots[storage] + slot_bytes(graph.storages[storage].size_bytes) for storage in passing]
        largest = max(passing, key=lambda storage: (graph.storages[storage].size_bytes, storage))
        rows[row_of[largest]] += max(ends) - min(slots[storage] for storage in passing)
    return rows


def _sum(graph: StepGraph, row_of: Sequence[str], counts: Counter[int]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for storage, count in counts.items():
        if count > 0:
            rows[row_of[storage]] += slot_bytes(graph.storages[storage].size_bytes)
    return rows


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a predicted step by what they are spent on.

    Attributes:
        compute_s: Seconds of operations of the device, ``recompute_s`` of them for the second time.
        host_s: Seconds of operations on the host's processors, which run beside it.
        transfer_s: For each stream of transfers, how long it is busy.
        exposed_s: Seconds in which nothing computes.
    """

    step_s: float
    compute_s: float
    recompute_s: float
    transfer_s: dict[str, float]
    exposed_s: float
    host_s: float = 0.0


def step_time(program: Program, predicted: Timeline) -> StepTime:
    """Add up where a predicted step's time goes."""
    seconds = {event.action: event.end_s - event.start_s for event in predicted.events}
    busy: dict[str, float] = {}
    recompute_s = 0.0
    for action in program.actions:
        busy[action.stream] = busy.get(action.stream, 0.0) + seconds[action.id]
        if action.kind is ActionKind.RECOMPUTE:
            recompute_s += seconds[action.id]
    compute, host = busy.pop(COMPUTE_STREAM, 0.0), busy.pop(HOST_STREAM, 0.0)
    step = predicted.duration_s
    return StepTime(
        step_s=step,
        compute_s=compute,
        recompute_s=recompute_s,
        transfer_s=busy,
        exposed_s=max(0.0, step - compute),
        host_s=host,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change that would make the run fit, as planned.

    Attributes:
        token_s: Predicted step time for one token.
    """

    text: str
    step_s: float
    token_s: float


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Bytes and seconds that a run needs on a machine; prints as a table.

    Attributes:
        title: The run in words.
        machine: Name of the machine.
        needs: Bytes of each row in each tier; ``time`` of a step by what it is spent on.
        allowed: Bytes that the device and each tier of the machine have, nearest first.
        assumptions: Assumptions that no measurement stands behind, one sentence each.
        error: Why it does not fit; the table is then that of the nearest plan. None if it fits.
        changes: Changes that would make it fit, the cheapest first.
        host_saves_s: Seconds by which operations on the host make the step shorter.
    """

    title: str
    machine: str
    needs: Needs
    allowed: Bytes
    time: StepTime
    assumptions: tuple[str, ...] = ()
    error: PlanInfeasible | None = None
    changes: tuple[Change, ...] = ()
    host_saves_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.time.step_s

    def __str__(self) -> str:
        transfers_text = ", ".join(
            f"{stream} {format_seconds(busy)}" for stream, busy in self.time.transfer_s.items() if busy
        )
        recompute_text = f" ({format_seconds(self.time.recompute_s)} of it again)" if self.time.recompute_s else ""
        lines = [self.title, *self.needs.lines(self.allowed)]
        lines.append(
            f"predicted step {format_seconds(self.time.step_s)}: compute {format_seconds(self.time.compute_s)}"
            f"{recompute_text}, transfers {transfers_text or 'none'}, exposed {format_seconds(self.time.exposed_s)}"
        )
        if self.time.host_s:
            lines.append(
                f"updates on the host's processors: {format_seconds(self.time.host_s)} beside the device, "
                f"saves {format_seconds(self.host_saves_s)} a step"
            )
        lines += [f"assumption: {text.replace('assumption: ', '', 1)}" for text in self.assumptions]
        if self.error is None:
            return "\n".join([*lines, f"FITS {self.machine}, predicted step {format_seconds(self.step_s)}"])
        lines.append(f"DOES NOT FIT {self.machine}: the table is of the nearest plan that was found")
        if not self.changes:
            lines.append("no change that was tried would make it fit")
        for rank, change in enumerate(self.changes):
            name = "cheapest change that fits" if rank == 0 else "or"
            lines.append(f"{name}: {change.text} (planned: step {format_seconds(change.step_s)})")
        return "\n".join(lines)
