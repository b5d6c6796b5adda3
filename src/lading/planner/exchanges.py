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
from lading.planner.space import Block, Cut, Pipe, Space
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
    plain = segments[len(segments) // 2 :]
    alone = np.array([[float(s.elements.get(kind, 0)) for kind in _KINDS] for s in plain])
    shapes: list[Shapes] = []
    devices = space.ask.devices // (block.mesh.tp * block.mesh.cp)
    for pp in dict.fromkeys(pp for pp, _, _ in table.geometries):
        chosen = [place for place, shape in enumerate(table.geometries) if shape[0] == pp]
        can = devices % pp == 0 and devices // pp * block.mesh.cp * block.mesh.tp % block.mesh.expert_ways == 0
        single = pp == 1 and table.geometries[chosen[0]][1] == 1
        cuts = space.cuts(devices // pp * block.mesh.cp, 1 if single else 2) if can else []
        shapes.append(_shapes(pp, [watched[place] for place in chosen], cuts, plain, alone))
    found = [_priced(space, block, shape, alone) for shape in shapes]
    counts = [len(shape.cuts) for shape in shapes for _ in shape.held]
    cuts = tuple(cut for shape in shapes for _ in shape.held for cut in shape.cuts)
    arrays = [np.concatenate(column) for column in zip(*found, strict=True)]
    return Exchanges(np.cumsum(counts) - counts, cuts, np.array([cut.zero for cut in cuts], np.int64), *arrays)


@dataclass(frozen=True, eq=False)
class Shapes:
    """Pipeline shapes of so many ranks.

    Attributes:
        held: (shape, watched rank or first stage, dense and expert parameters and segments counted).
        largest: (shape, watched rank): parameters of the largest segment; ``placeholders``: bytes.
    """

    pp: int
    cuts: list[Cut]
    held: Floats
    largest: Floats
    placeholders: Floats


def _shapes(pp: int, runs: Sequence[Sequence[Run]], cuts: list[Cut], plain: Sequence[Phases], alone: Floats) -> Shapes:
    weights = np.concatenate([alone, np.ones((len(alone), 1))], axis=1)
    held, largest, placeholders = [], [], []
    for shape in runs:
        counts = np.zeros((len(shape), len(plain)))
        for place, run in enumerate(shape):
            for segment, count in run:
                counts[place, segment % len(plain)] += count
        held.append(counts @ weights)
        there = counts[:WATCHED] > 0
        largest.append(np.max(np.where(there, alone.sum(axis=1), 0.0), axis=1))
        placeholders.append([_placeholders(row, plain) for row in there.tolist()])
    return Shapes(pp, cuts, np.array(held), np.array(largest), np.array(placeholders, np.float64))


def _placeholders(there: Sequence[bool], plain: Sequence[Phases]) -> int:
    """Bytes of gradients that are tensors in name only."""
    shapes = {k: size for s, present in zip(plain, there, strict=True) if present for k, size in s.placeholders.items()}
    return sum(shapes.values())


def _layout(space: Space, block: Block, pp: int, cut: Cut) -> Layout:
    mesh = block.mesh
    dp = space.ask.devices // (mesh.tp * mesh.cp * pp)
    precision = space.layout(block, "none", Pipe(pp, 1, "1f1b", -1), Cut(0, 0), global_batch=0).precision
    return Layout(
        dp=dp, pp=pp, tp=mesh.tp, cp=mesh.cp, ep=mesh.ep, etp=mesh.etp, zero=cut.zero, shard=cut.shard,
        precision=precision,
    )  # fmt: skip


def _priced(space: Space, block: Block, shape: Shapes, alone: Floats) -> list[Floats]:
    """Columns of ``Exchanges``: cuts of the first shape, then of the second."""
    stack, number = space.ask.request.stack, len(shape.held)
    every, inverse = np.unique(shape.held.reshape(-1, 3)[:, :2], axis=0, return_inverse=True)
    place = inverse.reshape(number, WATCHED + 1)
    columns: list[list[Floats]] = [[] for _ in range(5)]
    single: list[tuple[Floats, Floats]] = []
    known: dict[tuple[bool, int], tuple[Floats, Floats, Floats, Floats, Floats]] = {}
    for cut in shape.cuts:
        layout = _layout(space, block, shape.pp, cut)
        prices = MachinePrices(space.ask.machine, layout, stack)
        key = (cut.zero > 0, cut.shard)
        if key not in known:
            own = (
                (_each(prices.gather_s, alone), _each(prices.reduce_s, alone)) if shape.pp == 1 else (alone[:, 0],) * 2
            )
            known[key] = (_each(prices.gather_s, every), _optimizer(prices, every), _each(prices.reduce_s, every), *own)
        gather, optimizer, reduce, *segment = known[key]
        waits = gather[place[:, :WATCHED]]
        if stack.overlap_param_gather:
            waits = waits / np.maximum(1.0, shape.held[:, :WATCHED, 2])
        columns[0].append(np.max(waits, axis=1))
        columns[1].append(np.max(optimizer[place[:, :WATCHED]], axis=1))
        columns[2].append(reduce[place[:, WATCHED]])
        columns[3].append(np.max(reduce[place[:, :WATCHED]], axis=1))
        columns[4].append(_bytes(shape, layout, space.ask.request))
        single.append((segment[0], segment[1]))
    if not shape.cuts:
        empty = np.zeros((0, len(alone)))
        return [*(np.zeros(0) for _ in range(4)), np.zeros((0, WATCHED)), empty, empty]
    found = [np.stack(column, axis=1).reshape(number * len(shape.cuts), *column[0].shape[1:]) for column in columns]
    return [*found, *(np.tile(np.stack(rows), (number, 1)) for rows in zip(*single, strict=True))]


def _each(seconds: Any, elements: Floats) -> Floats:
    """Seconds of an exchange of (number, kind) elements; nothing where there are none of a kind."""
    whole = elements.astype(np.int64)
    total = np.zeros(len(elements))
    for place, kind in enumerate(_KINDS):
        some = whole[:, place] > 0
        if np.any(some):
            total[some] += seconds({kind: whole[some, place]})
    return total


def _optimizer(prices: MachinePrices, elements: Floats) -> Floats:
    """Seconds of the optimizer over (number, kind) elements."""
    seconds: Any = prices.optimizer_s
    if prices.machine.device.gpu is None:  # whose rates are a curve
        return np.array([seconds(dict(zip(_KINDS, row, strict=True))) for row in elements.tolist()])
    return seconds({kind: elements[:, place] for place, kind in enumerate(_KINDS)})


def _bytes(shape: Shapes, layout: Layout, request: Request) -> Floats:
    """(shape, watched rank): states of a rank, what is gathered at once, and placeholders of gradients."""
    roles = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
    many = 1 << 40
    each = [state_bytes({kind: many}, layout, request.stack) for kind in _KINDS]
    own = np.array([sum(found[role] for role in roles) / many for found in each])
    width = gathered_bytes({"dp": many}, layout, request.stack) / many
    return shape.held[:, :WATCHED, :2] @ own + 2 * width * shape.largest + shape.placeholders
