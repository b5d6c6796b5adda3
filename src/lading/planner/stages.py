"""Stages: seconds and bytes of every stage that any pipeline of a search has, as arrays.

A stage is a row of (segment, how often). What a segment costs is a row of numbers, so all stages of all pipelines are
one product of matrices, of which ``lading.sim.parts.span`` is then taken at once ([Note: one stretch of kernels]).
Equal to ``lading.sim.step.stage_of``; tests compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lading.cost.contention import MOST_LOST
from lading.ir.layout import Layout
from lading.ir.request import StepRequest
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.parallel.chunks import chunks
from lading.sim.parts import MEMORY, Part
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.simulate import uneven_layers
from lading.sim.variants import recomputed_parts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_AXES = ("tp", "cp", "ep", "etp", "tp/cp", "dp", "pp")
_PHASES = ("forward", "again", "backward_input", "backward_weight")


@dataclass
class StageRows:
    """Distinct stages of a search, collected first and priced for each block after.

    Attributes:
        plain: Number of segments of the model; added to the number of one that is not recomputed.
    """

    request: StepRequest
    table: ModelTable
    rows: dict[tuple[tuple[int, int], ...], int] = field(default_factory=lambda: {})
    _rows_of: dict[tuple[int, int], Ints] = field(default_factory=lambda: {})
    _arrays: tuple[Ints, Floats, Floats] | None = None

    @property
    def plain(self) -> int:
        """Number added to a segment's number where nothing of it is recomputed."""
        return len(self.table.segments)

    def of(self, stages: int, layers: int) -> Ints:
        """Row of each stage of a model cut into so many stages, ``layers`` of each of which are recomputed.

        Returns:
            Array of [stage].
        """
        if (stages, layers) not in self._rows_of:
            layout = Layout(pp=stages)
            total = sum(self.table.counts[1:-1])
            ranks = chunks(self.table, layout, uneven_layers(replace(self.request, layout=layout), total))
            runs = [recomputed_parts(rank_chunks[0], self.plain, layers) for rank_chunks in ranks]
            self._rows_of[stages, layers] = np.array([self._row(tuple(run)) for run in runs])
        return self._rows_of[stages, layers]

    def _row(self, run: tuple[tuple[int, int], ...]) -> int:
        return self.rows.setdefault(run, len(self.rows))

    def arrays(self) -> tuple[Ints, Floats, Floats]:
        """Lay the rows, one for each make-up of a stage, out as arrays.

        Returns:
            [row, place]: segments, and how often each stands there, 0 where a row is shorter; [row, segment]: counts.
        """
        if self._arrays is not None and len(self._arrays[0]) == len(self.rows):
            return self._arrays
        width = max(map(len, self.rows))
        segments, counts = np.zeros((len(self.rows), width), np.int64), np.zeros((len(self.rows), width))
        for run, row in self.rows.items():
            for place, (segment, count) in enumerate(run):
                segments[row, place], counts[row, place] = segment, count
        weights = np.zeros((len(self.rows), 2 * self.plain))
        np.add.at(weights, (np.arange(len(segments))[:, None], segments), counts)
        self._arrays = (segments, counts, weights)
        return self._arrays


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Costs of every row of stages, for one block and recompute mode; each an array over rows.

    Attributes:
        forward, recompute, inputs, weights: Seconds of a micro-batch: forward, what is recomputed, gradients of
            activations, gradients of weights.
        saved: Bytes of activations that a micro-batch keeps.
        forward_extra, backward_extra: Most bytes beyond ``saved`` while a micro-batch runs forward, and backward.
        blocks: Number of segments in a row.
    """

    forward: Floats
    recompute: Floats
    inputs: Floats
    weights: Floats
    saved: Floats
    forward_extra: Floats
    backward_extra: Floats
    blocks: Floats

    @property
    def backward(self) -> Floats:
        """Seconds of a backward, with what is recomputed."""
        return self.recompute + self.inputs + self.weights


def stage_costs(
    rows: tuple[Ints, Floats, Floats], segments: Sequence[Phases], prices: MachinePrices, stack: Stack
) -> StageCosts:
    """Compute seconds and bytes of all rows of stages.

    Args:
        rows: Result of ``StageRows.arrays``.
        segments: Priced segments: as the mode recomputes them, then plain.
    """
    places, counts, weights = rows
    seconds = [spans(weights @ features, prices, stack) for features in features_of(segments, prices, stack)]
    saved = np.array([float(s.saved_bytes) for s in segments])
    kept_bytes: Floats = np.cumsum(counts * saved[places], axis=1)
    spikes: list[Floats] = []
    for way in (0, 1):
        top = np.array([float(s.transients[way]) for s in segments])
        peak = np.max(np.where(counts > 0, kept_bytes + top[places], 0.0), axis=1)
        spikes.append(peak - kept_bytes[:, -1])
    return StageCosts(
        *seconds, saved=kept_bytes[:, -1], forward_extra=spikes[0], backward_extra=spikes[1], blocks=counts.sum(axis=1)
    )


def features_of(segments: Sequence[Phases], prices: MachinePrices, stack: Stack) -> list[Floats]:
    """Collect ``_features`` of each phase of segments.

    Returns:
        By phase (forward, what runs again, gradients of activations, of weights): [segment, number of the feature].
    """
    return [np.array([_features(getattr(s, phase), prices, stack) for s in segments]) for phase in _PHASES]


def _features(part: Part, prices: MachinePrices, stack: Stack) -> list[float]:
    """List the seconds of a phase: of the device, of them bound by memory, of the host, and of collectives by axis."""
    busy = {cause: seconds * prices.in_situ(cause) for cause, seconds in part.busy_s.items()}
    if missing := set(part.comm_s) - set(_AXES):
        raise AssertionError(f"an axis that stages do not know: {sorted(missing)}")
    comm = [part.comm_s.get(axis, 0.0) for axis in _AXES]
    return [sum(busy.values()), busy.get(MEMORY, 0.0), part.host_s(stack), *comm]


def spans(features: Floats, prices: MachinePrices, stack: Stack) -> Floats:
    """Seconds of stretches of kernels ([Note: one stretch of kernels]); an array of [stretch].

    Args:
        features: [stretch, number]: ``_features`` of its segments, summed up.
    """
    device, memory, host = features[:, 0], features[:, 1], features[:, 2]
    seconds: Any = device.copy()
    bound = np.divide(memory, device, out=np.zeros_like(device), where=device > 0)
    for place, axis in enumerate(_AXES):
        alone, share = features[:, 3 + place], stack.hidden.get(axis, 0.0)
        hidden = np.zeros_like(alone) if stack.launch_blocking else np.minimum(alone * share, device)
        if share and np.any(hidden):
            products, rest, collective = prices.rates_beside(axis)
            compute = np.minimum(1.0, 1 / ((1 - bound) / products + bound / rest))
            hidden = hidden * (1 - np.minimum(MOST_LOST, (1 - compute) / collective))
        seconds = seconds + alone - hidden
    return seconds + host if stack.launch_blocking else np.maximum(seconds, host)
