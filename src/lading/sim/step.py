"""One training step of a cluster: what a Request asks for, in seconds and bytes by cause.

Segments are summed up ([Note: one stretch of kernels]); the lists of ranks that run them are in
``lading.sim.rank_step``. ``Step`` keeps all of it, so that a report can say why.

[Note: sums]
With sequence parallel each tp rank has a part of the gradients of norms, and of what else is whole but works on cut
tokens. Megatron sums all of them at the end of a step, in one all-reduce (core/distributed/finalize_model_grads.py,
_allreduce_layernorm_grads); FSDP2 each by itself before a unit's gradients are reduced (torch 2.13,
_fully_shard/_fsdp_param.py, _get_grad_inner_tensor; tests compare). Computing waits for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from lading.ir.graph import Role
from lading.ir.program import Program
from lading.ir.schedules import Schedule
from lading.ir.stack import Stack
from lading.ir.work import RankSegment
from lading.sim.parts import Part, Prices, Span, span, total
from lading.sim.phases import Phases
from lading.sim.rank_engine import RankTimes

if TYPE_CHECKING:
    from lading.sim.rank_step import ListedStep

Floats = npt.NDArray[np.float64]

#: Cause of what a step takes longer because activations go to the host and come back.
COPIES = "copies to the host and back"
#: Cause of what data-parallel ranks exchange and computing does not hide.
DATA_PARALLEL = "data-parallel communication"
#: Segments and how often each stands.
Run = Sequence[tuple[int, int]]


class Exchange(Protocol):
    """Seconds of what data-parallel ranks exchange, and of the optimizer, on one machine under one stack and layout."""

    def reduce_s(self, elements: Mapping[str, int]) -> float:
        """Seconds of reducing gradients, whose numbers of elements are by the group that has replicas of them."""
        ...

    def optimizer_s(self, elements: Mapping[str, int]) -> float:
        """Seconds of updating what a rank keeps of these parameters, clipping included."""
        ...


@dataclass(frozen=True)
class SimulatedStage:
    """A chunk of the model on one pipeline rank, for one micro-batch.

    Attributes:
        run: (segment, number of repeats) in a row.
        forward, backward_input, backward_weight: Spans of each; recomputation is in ``backward_input``.
        elements: Number of parameters, by the axes over which they are replicated.
        trained: Number of trained parameters among them, likewise.
        trained_bytes, frozen_bytes: With adapters, bytes of the trained parameters, and of the frozen weights.
        transients: Largest bytes alive beside the saved ones, in forward and in backward.
        parameters: Number of parameter tensors.
        summed: Parameters whose gradients are summed over tp ranks: {elements: number of such parameters}.
        moved_bytes: Bytes of one micro-batch kept on a lower tier.
        copies_s: Seconds by which copying them there makes forward longer, and copying them back makes backward longer.
        tied: Trained elements of a weight that the model's first segment has, too: one weight if that is in this chunk,
            else a copy.
    """

    run: Run
    forward: Span
    recompute: Span
    backward_input: Span
    backward_weight: Span
    elements: dict[str, int]
    trained: dict[str, int]
    trained_bytes: int
    frozen_bytes: int
    largest_unit: dict[str, int]
    saved_bytes: int
    transients: tuple[int, int]
    placeholders: dict[tuple[int, ...], int]
    flops: float
    parameters: int
    moved_bytes: int = 0
    copies_s: tuple[float, float] = (0.0, 0.0)
    summed: dict[int, int] = field(default_factory=lambda: {})
    tied: int = 0

    @property
    def backward_s(self) -> float:
        """Seconds of both gradients, and of what is recomputed for them."""
        return self.recompute.seconds + self.backward_input.seconds + self.backward_weight.seconds


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        step_s: Seconds of the step.
        shares_s: Seconds of the slowest rank, by cause; they add up to ``step_s``.
        stages: Chunks of the model in the order of forward.
        schedule: Schedule of the pipeline; None for a layout without one.
        busiest: Class of ranks that computes longest.
        flops: FLOP of products and attention of one rank of each stage, without recomputation.
        listed: The lists that were run; None if ranks are processes of one host.
        times: Times of every action if ranks are processes of one host; else None.
    """

    step_s: float
    shares_s: dict[str, float]
    stages: tuple[SimulatedStage, ...]
    schedule: Schedule | None
    busiest: int
    flops: float
    listed: ListedStep | None = None
    times: RankTimes | None = None

    @property
    def program(self) -> Program:
        """Program of the step: a list of actions for each class of ranks."""
        if self.times is not None:
            return self.times.program
        assert self.listed is not None
        return self.listed.program


def stage_of(run: Run, phases: Sequence[Phases], prices: Prices, stack: Stack) -> SimulatedStage:
    """Sum up a chunk of the model."""

    def summed(pick: str) -> Span:
        parts: list[tuple[Part, float]] = [(getattr(phases[segment], pick), count) for segment, count in run]
        return span(total(parts), prices, stack)

    tied = max((phases[segment].tied for segment, _ in run if phases[segment].trained), default=0)
    if any(segment == 0 for segment, _ in run):
        phases = [segment.without_tied for segment in phases]
    elements: dict[str, int] = {}
    trained: dict[str, int] = {}
    sums: dict[int, int] = {}
    for segment, count in run:
        _add(elements, phases[segment].elements, count)
        _add(trained, phases[segment].trained, count)
        for size in phases[segment].segment.summed_parameters:
            sums[size] = sums.get(size, 0) + count
    return SimulatedStage(
        run,
        summed("forward"),
        summed("again"),
        summed("backward_input"),
        summed("backward_weight"),
        elements,
        trained,
        trained_bytes=sum(count * phases[segment].trained_bytes for segment, count in run),
        frozen_bytes=sum(count * phases[segment].frozen_bytes for segment, count in run),
        largest_unit=max((phases[segment].elements for segment, _ in run), key=lambda unit: sum(unit.values())),
        saved_bytes=sum(count * phases[segment].saved_bytes for segment, count in run),
        transients=(_transient_bytes(run, phases, 0), _transient_bytes(run, phases, 1)),
        placeholders={shape: size for segment, _ in run for shape, size in phases[segment].placeholders.items()},
        flops=sum(count * phases[segment].model_flops for segment, count in run),
        parameters=sum(count * _parameters(phases[segment].segment) for segment, count in run),
        moved_bytes=sum(count * phases[segment].moved_bytes for segment, count in run),
        summed=sums,
        tied=tied,
    )


def _parameters(segment: RankSegment) -> int:
    """Number of parameter tensors; each expert's weight is one."""
    stacked = {segment.tensors[t].storage for kernel in segment.kernels if kernel.is_experts for t in kernel.inputs}
    owned = {t.name: t for t in segment.tensors if t.role is Role.PARAMETER and t.name}
    return sum(t.shape[0] if t.storage in stacked else 1 for t in owned.values())


def host_s(stages: Sequence[SimulatedStage], stack: Stack, optimizer_s: float) -> float:
    """Seconds of a rank's host in a step outside of micro-batches.

    Args:
        optimizer_s: Seconds of the optimizer's kernels, which hide its Python unless the host waits for each kernel.
    """
    parameters = stack.parameter_s * sum(stage.parameters for stage in stages)
    hidden = 0.0 if stack.launch_blocking else optimizer_s
    return stack.step_s + max(0.0, parameters - hidden)


def _transient_bytes(run: Run, phases: Sequence[Phases], way: int) -> int:
    """Largest bytes alive in a chunk beyond those that it saves; later segments save nothing while one runs.

    Args:
        way: 0 for forward, 1 for backward.
    """
    saved_bytes = peak = 0
    for segment, count in run:
        saved_bytes += count * phases[segment].saved_bytes
        peak = max(peak, saved_bytes + phases[segment].transients[way])
    return peak - saved_bytes


def buckets_s(again: Sequence[SimulatedStage], elements: int, exchange: Exchange) -> tuple[list[float], list[float]]:
    """Seconds of backward that fill each bucket of gradients, and seconds of its reduction.

    Args:
        again: Units in the order of backward; each makes its gradients evenly while it runs.
        elements: Gradients in a full bucket.
    """
    axes = sorted({axis for unit in again for axis in unit.trained})
    rows = [[0.0] * len(axes), *([float(unit.trained.get(axis, 0)) for axis in axes] for unit in again)]
    made: Floats = np.cumsum(np.array(rows), axis=0)
    ends: Floats = np.cumsum(np.array([0.0, *(unit.backward_s for unit in again)]))
    whole: Floats = made.sum(axis=1)
    edges: Floats = np.append(np.arange(0.0, whole[-1], max(1, elements)), whole[-1])
    full: Floats = np.interp(edges, whole, ends)
    full[-1] = ends[-1]
    parts = [np.diff(np.interp(edges, whole, made[:, place])) for place in range(len(axes))]
    keys = [tuple(round(number) for number in row) for row in zip(*(part.tolist() for part in parts), strict=True)]
    known = {key: exchange.reduce_s(dict(zip(axes, key, strict=True))) for key in dict.fromkeys(keys)}
    return np.diff(full).tolist(), [known[key] for key in keys]


def shares_of(stage: SimulatedStage, times: float, extra: Mapping[str, float]) -> dict[str, float]:
    """Seconds by cause of a stage that runs ``times`` times, added to those of ``extra``."""
    shares: dict[str, float] = {}
    for part in (stage.forward, stage.backward_input, stage.backward_weight):
        for name, seconds in part.shares_s.items():
            shares[name] = shares.get(name, 0.0) + seconds * times
    shares["recomputing"] = stage.recompute.seconds * times
    for name, seconds in extra.items():
        shares[name] = shares.get(name, 0.0) + seconds
    return shares


def flops_of(stages: Sequence[SimulatedStage]) -> float:
    return sum(s.flops for s in stages)


def elements_of(stages: Sequence[SimulatedStage]) -> dict[str, int]:
    """Number of parameters of some stages, by the axes over which they are replicated."""
    elements: dict[str, int] = {}
    for stage in stages:
        _add(elements, stage.elements, 1)
    return elements


def trained_of(stages: Sequence[SimulatedStage]) -> dict[str, int]:
    """Trained elements of stages, by the axes over which they are replicated."""
    trained: dict[str, int] = {}
    for stage in stages:
        _add(trained, stage.trained, 1)
    return trained


def _add(total: dict[str, int], elements: Mapping[str, int], count: int) -> None:
    for axes, number in elements.items():
        total[axes] = total.get(axes, 0) + count * number
