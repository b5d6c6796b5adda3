"""Exchanges: seconds and bytes that depend on who keeps which state, for every pipeline shape and cut of a mesh.

The prices are the simulator's own (``lading.sim.prices.MachinePrices``), asked with arrays: parameters of all pipeline
shapes of one number of stages at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lading.ir.graph import Role
from lading.ir.layout import Layout
from lading.ir.request import Request
from lading.memory.ranks import state_bytes
from lading.planner.pipes import WATCHED, PipeTable
from lading.planner.space import Block, Cut, Space
from lading.planner.stages import Floats, Ints
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices

_KINDS = ("dp", "dp/ep")
Run = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Of each (pipeline shape, cut) of a mesh, in a row.

    Attributes:
        start: Where each shape's begin; ``cuts`` has the cut of each.
        gather_s, optimizer_s: What the slowest watched rank waits for.
        reduce_s: Of the first stage; ``reduce_all_s``: of all stages of a watched rank, the slowest.
        bytes: (number, watched rank): states, gathered parameters and placeholders.
        segment_gather_s, segment_reduce_s: (number, segment): of each alone, where there is no pipeline.
    """

    start: Ints
    cuts: tuple[Cut, ...]
    zero: Ints
    gather_s: Floats
    optimizer_s: Floats
    reduce_s: Floats
    reduce_all_s: Floats
    bytes: Floats
    segment_gather_s: Floats
    segment_reduce_s: Floats

    def rows(self, table: PipeTable, good: Any) -> tuple[Ints, Ints]:
        """(pipe, number here) of each combination of the pipes that ``good`` marks with their cuts."""
        pipes = np.flatnonzero(good)
        geometry = table.geometry[pipes]
        counts = np.append(self.start[1:], len(self.cuts))[geometry] - self.start[geometry]
        begins = np.cumsum(counts) - counts
        number = np.arange(int(counts.sum())) - np.repeat(begins, counts) + np.repeat(self.start[geometry], counts)
        return np.repeat(pipes, counts), number


def exchanges(
    space: Space, block: Block, watched: Sequence[Sequence[Run]], table: PipeTable, segments: Sequence[Phases]
) -> Exchanges:
    """Price all (pipeline shape, cut) of a block's mesh.

    Args:
        watched: Of ``watched_rows``: of each shape three ranks and the first stage.
        segments: Priced for any block of the mesh.
    """
    request, devices = space.ask.request, space.ask.devices // (block.mesh.tp * block.mesh.cp)
    plain = segments[len(segments) // 2 :]
    alone = np.array([[float(s.elements.get(kind, 0)) for kind in _KINDS] for s in plain])
    found: list[tuple[Cut, list[Any]]] = []
    start: list[int] = []
    for (pp, vpp, _), runs in zip(table.geometries, watched, strict=True):
        start.append(len(found))
        if devices % pp or devices // pp * block.mesh.cp * block.mesh.tp % block.mesh.expert_ways:
            continue
        held = [_sums(run, alone) for run in runs]
        for cut in space.cuts(devices // pp * block.mesh.cp, pp * vpp):
            found.append((cut, _priced(request, _layout(space, block, pp, cut), space, (runs, held, plain, alone))))
    columns = list(zip(*(row for _, row in found), strict=True)) if found else [()] * 7
    arrays = [np.array(column, np.float64) for column in columns]
    cuts = tuple(cut for cut, _ in found)
    return Exchanges(np.array(start), cuts, np.array([cut.zero for cut in cuts], np.int64), *arrays)


def _sums(run: Run, alone: Floats) -> Floats:
    """Parameters of a run by kind, and its segments counted."""
    plain = [(segment % len(alone), count) for segment, count in run]
    return np.append(sum(count * alone[s] for s, count in plain), sum(count for _, count in plain))


def _layout(space: Space, block: Block, pp: int, cut: Cut) -> Layout:
    mesh = block.mesh
    dp = space.ask.devices // (mesh.tp * mesh.cp * pp)
    return Layout(dp=dp, pp=pp, tp=mesh.tp, cp=mesh.cp, ep=mesh.ep, etp=mesh.etp, zero=cut.zero, shard=cut.shard,
                  precision=space.ask.request.layout.precision)  # fmt: skip


def _priced(request: Request, layout: Layout, space: Space, of: tuple[Any, Any, Any, Any]) -> list[Any]:
    """One row of ``Exchanges``."""
    runs, held, plain, alone = of
    stack, prices = request.stack, MachinePrices(space.ask.machine, layout, request.stack)
    ranks, first = np.array(held[:WATCHED]), held[WATCHED]
    gathers = _each(prices.gather_s, ranks)
    waits = gathers / np.maximum(1.0, ranks[:, -1]) if stack.overlap_param_gather else gathers
    size = [_bytes(run, total, layout, request, plain) for run, total in zip(runs, ranks, strict=False)]
    single = layout.pp == 1
    return [
        float(np.max(waits)),
        max(prices.optimizer_s(_named(row)) for row in ranks),
        float(_each(prices.reduce_s, first[None])[0]),
        float(np.max(_each(prices.reduce_s, ranks))),
        size,
        _each(prices.gather_s, alone) if single else np.zeros(len(alone)),
        _each(prices.reduce_s, alone) if single else np.zeros(len(alone)),
    ]


def _named(row: Floats) -> dict[str, int]:
    return {kind: int(number) for kind, number in zip(_KINDS, row, strict=False) if number}


def _each(seconds: Any, elements: Floats) -> Floats:
    """Seconds of an exchange of (number, kind) elements; nothing where there are none of a kind."""
    whole = elements.astype(np.int64)
    total = np.zeros(len(elements))
    for place, kind in enumerate(_KINDS):
        some = whole[:, place] > 0
        if np.any(some):
            total[some] += seconds({kind: whole[some, place]})
    return total


def _bytes(run: Run, total: Floats, layout: Layout, request: Request, plain: Sequence[Phases]) -> float:
    """States of a rank, and placeholders of gradients.

    Where parameters are cut, gradients come with backward, and gathered ones go with their unit: neither is counted, as
    they need not be there when activations are most.
    """
    roles = state_bytes(_named(total), layout, request.stack)
    there = sorted({segment % len(plain) for segment, _ in run})
    shapes = {shape: size for segment in there for shape, size in plain[segment].placeholders.items()}
    own = roles[Role.PARAMETER] + roles[Role.OPTIMIZER_STATE] + (roles[Role.GRADIENT] if layout.zero < 3 else 0)
    return float(own + sum(shapes.values()))
