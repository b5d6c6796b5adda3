"""POET's integer program (Patil et al., ICML 2022, arXiv 2207.07697) on a captured step: page or compute again.

The program is POET's, built on Checkmate's time steps: step ``t`` computes layer ``t`` for the first time, after which
any earlier layer may be computed again and any value paged in or out. With R[t, i] layer ``i`` is computed in ``t``,
S[t, v] value ``v`` is in memory when ``t`` begins, D[t, v] it is on the lower tier, I[t, v] and O[t, v] it is paged in
and out during ``t``, and W[t, v] it is made in ``t`` and stays to its end, all in {0, 1}:

    minimise    sum R[t, i] seconds(i) + price * sum (I[t, v] read seconds(v) + O[t, v] write seconds(v))
    subject to  R[t, i] <= S[t, v] + W[t, v]                  for every value v that layer i reads
                W[t, v] <= R[t, layer of v]
                S[t + 1, v] <= S[t, v] + W[t, v] + I[t, v]
                D[t + 1, v] <= D[t, v] + O[t, v],  I[t, v] <= D[t, v],  O[t, v] <= S[t, v] + W[t, v]
                base(t) + sum_v size(v) (S[t, v] + W[t, v] + I[t, v]) <= room

POET adds energies of computing and of paging under a deadline; seconds one after another stand for these, and
``price`` is what a second of paging costs beside one of computing. Where Checkmate frees inside of a time step, what
is made again stays here until the step's end. A layer is a run of operations of one block in one phase, as at the
grain of operations no solver ends; a value is all that one layer hands to the same other layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from lading.ir.fold import block_items
from lading.ir.graph import Phase, Role
from lading.ir.plan import Option
from lading.ir.program import PAGE_BYTES, slot_bytes
from lading.memory.lifetime import Gap, can_recompute, is_movable
from lading.planner.residency import StepProblem

Choices = dict[tuple[int, int], Option]
#: The solver ends where it is proven to be this near the optimum.
_RELATIVE_GAP = 0.01


@dataclass(frozen=True)
class Value:
    """What one layer hands to others.

    Attributes:
        layer: Layer that makes it.
        readers: Layers that read it, ascending.
        until: Last layer during which it may be wanted: to be read, or to make again what is.
        storages: Storages that it consists of.
        size_bytes: Their bytes.
        again, moves: Whether all of it can be computed again, and can be paged.
    """

    layer: int
    readers: tuple[int, ...]
    until: int
    storages: tuple[int, ...]
    size_bytes: int
    again: bool
    moves: bool


@dataclass(frozen=True)
class Layers:
    """Step cut into layers.

    Attributes:
        layer_of: [operation]: its layer.
        seconds: [layer]: seconds of computing it once.
        base: [layer]: bytes that are there meanwhile whatever is chosen.
    """

    layer_of: list[int]
    seconds: list[float]
    base: list[int]
    values: list[Value]


def layers_of(step: StepProblem, away: Choices) -> Layers:
    """Cut a step into layers.

    Args:
        away: Gaps over which persistent storages are on a lower tier; the others count all the time.
    """
    graph = step.graph
    layer_of, forward = _cut(step)
    count = layer_of[-1] + 1
    seconds = np.bincount(layer_of, weights=step.costs.op_seconds, minlength=count).tolist()
    values = list(_values(step, layer_of, forward))
    inside = {storage for value in values for storage in value.storages}
    held = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for storage, uses in enumerate(step.lives.uses):
        if not uses or storage in inside:
            continue
        spans = [(uses[0], uses[-1])]
        if storage in graph.persistent:
            here = (storage, uses[-1]) not in away
            spans = [(0, len(graph.ops) - 1)] if here else [(use, use) for use in uses]
        for first, last in spans:
            held[first] += slot_bytes(graph.storages[storage].size_bytes)
            held[last + 1] -= slot_bytes(graph.storages[storage].size_bytes)
    base = [0] * count
    for op, size in enumerate(np.cumsum(held)[:-1].tolist()):
        base[layer_of[op]] = max(base[layer_of[op]], size)
    return Layers(layer_of, seconds, base, values)


def _cut(step: StepProblem) -> tuple[list[int], list[bool]]:
    """Layer of each operation, and which layers are forward; updates belong to the layer before them."""
    layer_of: list[int] = []
    forward: list[bool] = []
    last: tuple[str, Phase] | None = None
    for op, item in zip(step.graph.ops, block_items(step.graph.ops), strict=True):
        key = (item, op.phase)
        if last is None or (op.phase is not Phase.OPTIMIZER and key != last):
            forward.append(op.phase is Phase.FORWARD)
            last = key
        layer_of.append(len(forward) - 1)
    return layer_of, forward


def _values(step: StepProblem, layer_of: Sequence[int], forward: Sequence[bool]) -> Iterator[Value]:
    graph, lives = step.graph, step.lives
    members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for storage, uses in enumerate(lives.uses):
        fixed = storage in graph.persistent or graph.storages[storage].role in (Role.INPUT, Role.CONSTANT)
        if fixed or not uses or layer_of[uses[0]] == layer_of[uses[-1]]:
            continue
        made = layer_of[uses[0]]
        readers = tuple(sorted({layer_of[use] for use in uses} - {made}))
        members.setdefault((made, readers), []).append(storage)
    until = [0] * len(forward)  # by layer, the last one that what it makes again may be wanted in
    for (made, readers), storages in sorted(members.items(), reverse=True):
        crossing = [gap for storage in storages for gap in _crossing(step, layer_of, storage)]
        again = forward[made] and all(can_recompute(graph, lives, gap) for gap in crossing)
        last = max(readers[-1], *(until[reader] for reader in readers))
        until[made] = max(until[made], last if again else 0)
        moves = any(is_movable(graph, storage, PAGE_BYTES) for storage in storages)
        size = sum(slot_bytes(graph.storages[storage].size_bytes) for storage in storages)
        yield Value(made, readers, last, tuple(storages), size, again=again, moves=moves)


def _crossing(step: StepProblem, layer_of: Sequence[int], storage: int) -> Iterator[Gap]:
    """Yield the gaps of a storage that lead from one layer to another."""
    for start, end in pairwise(step.lives.uses[storage]):
        if layer_of[start] != layer_of[end]:
            yield Gap(storage, start, end, False)


@dataclass
class _Program:
    """Integer program under construction: columns in {0, 1} with their costs, and rows ``sum terms <= high``."""

    costs: list[float] = field(default_factory=lambda: [])
    rows: list[tuple[list[tuple[int, float]], float]] = field(default_factory=lambda: [])

    def column(self, cost: float = 0.0) -> int:
        """Add a column."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def at_most(self, left: Sequence[int | None], right: Sequence[int | None], high: float = 0.0) -> None:
        """Add ``sum left <= sum right + high``; columns that are None are zero."""
        terms = [(column, 1.0) for column in left if column is not None]
        terms += [(column, -1.0) for column in right if column is not None]
        if terms:
            self.rows.append((terms, high))

    def solve(self, limit_s: float) -> np.ndarray | None:
        """Value of each column; None where no solution was found in ``limit_s`` seconds."""
        import scipy.optimize
        from scipy.sparse import csr_array

        optimize: Any = scipy.optimize  # its stubs take numbers only where arrays are meant
        row = [number for number, (terms, _) in enumerate(self.rows) for _ in terms]
        column = [column for terms, _ in self.rows for column, _ in terms]
        value = [value for terms, _ in self.rows for _, value in terms]
        matrix = csr_array((value, (row, column)), shape=(len(self.rows), len(self.costs)))
        made = optimize.milp(
            np.array(self.costs),
            integrality=np.ones(len(self.costs)),
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(matrix, -np.inf, np.array([high for _, high in self.rows])),
            options={"time_limit": limit_s, "mip_rel_gap": _RELATIVE_GAP},
        )
        return None if made.x is None else np.rint(made.x)


class _Columns:
    """Columns of a step's program by time step; what cannot be is left out."""

    def __init__(self, layers: Layers, read_s: Sequence[float], write_s: Sequence[float]) -> None:
        self.layers, self.program = layers, _Program()
        self.again: dict[tuple[int, int], int] = {}  # R, by (time step, layer) with the layer before it
        self.made: dict[tuple[int, int], int] = {}  # W
        self.there: dict[tuple[int, int], int] = {}  # S
        self.below: dict[tuple[int, int], int] = {}  # D
        self.coming: dict[tuple[int, int], int] = {}  # I
        self.going: dict[tuple[int, int], int] = {}  # O
        count = len(layers.seconds)
        wanted = [False] * count  # layers that make anything that is worth making again
        for value in layers.values:
            wanted[value.layer] |= value.again
        for t in range(count):
            for layer in range(t):
                if wanted[layer]:
                    self.again[t, layer] = self.program.column(layers.seconds[layer])
        for number, value in enumerate(layers.values):
            for t in range(value.layer, value.until + 1):
                self._of_value(number, value, t, read_s[number], write_s[number])

    def _of_value(self, number: int, value: Value, t: int, read_s: float, write_s: float) -> None:
        add = self.program.column
        if t == value.layer or (value.again and (t, value.layer) in self.again):
            self.made[t, number] = add()
        if t > value.layer:
            self.there[t, number] = add()
        if value.moves and t < value.until:
            self.going[t, number] = add(write_s)
            if t > value.layer:
                self.below[t, number] = add()
                self.coming[t, number] = add(read_s)


def _rows(columns: _Columns, room_bytes: int) -> None:
    """Add all rows of a program."""
    layers, program = columns.layers, columns.program
    reads: dict[int, list[int]] = {}
    for number, value in enumerate(layers.values):
        for reader in value.readers:
            reads.setdefault(reader, []).append(number)
        for t in range(value.layer, value.until + 1):
            key, following = (t, number), (t + 1, number)
            there, made = columns.there.get(key), columns.made.get(key)
            if made is not None and t > value.layer:
                program.at_most([made], [columns.again[t, value.layer]])
            program.at_most([columns.there.get(following)], [there, made, columns.coming.get(key)])
            program.at_most([columns.below.get(following)], [columns.below.get(key), columns.going.get(key)])
            program.at_most([columns.coming.get(key)], [columns.below.get(key)])
            program.at_most([columns.going.get(key)], [there, made])
    for t in range(len(layers.seconds)):
        for number in reads.get(t, ()):
            here = [columns.there.get((t, number)), columns.made.get((t, number))]
            program.at_most([], here, -1.0)
        for layer in range(t):
            for number in reads.get(layer, ()) if (t, layer) in columns.again else ():
                here = [columns.there.get((t, number)), columns.made.get((t, number))]
                program.at_most([columns.again[t, layer]], here)
        tables = (columns.there, columns.made, columns.coming)
        terms = [
            (table[t, number], value.size_bytes / 1e6)
            for table in tables
            for number, value in enumerate(layers.values)
            if (t, number) in table
        ]
        program.rows.append((terms, (room_bytes - layers.base[t]) / 1e6))


def choices(step: StepProblem, away: Choices, room_bytes: int, limit_s: float, price: float = 1.0) -> Choices | None:
    """Find what POET's program pages and computes again; None where it finds nothing in ``limit_s`` seconds.

    Args:
        away: Gaps of persistent storages, which are on a lower tier meanwhile.
        room_bytes: Bytes for tensors.
        price: What a second of paging costs beside one of computing.
    """
    layers = layers_of(step, away)
    if max(layers.base) > room_bytes or not step.machine.tiers:
        return None
    tier = step.machine.tiers[0]
    read_s = [price * (tier.latency_s + value.size_bytes / tier.mixed_read_bytes_per_s) for value in layers.values]
    write_s = [price * (tier.latency_s + value.size_bytes / tier.mixed_write_bytes_per_s) for value in layers.values]
    columns = _Columns(layers, read_s, write_s)
    _rows(columns, room_bytes)
    solution = columns.program.solve(limit_s)
    return None if solution is None else dict(_decided(step, columns, solution, Option(tier.name)))


def _decided(
    step: StepProblem, columns: _Columns, solution: np.ndarray, tier: Option
) -> Iterator[tuple[tuple[int, int], Option]]:
    """Yield the gaps over which a solution has a value not in memory, and how it comes back."""
    layer_of = columns.layers.layer_of
    for number, value in enumerate(columns.layers.values):
        for storage in value.storages:
            for gap in _crossing(step, layer_of, storage):
                first, last = layer_of[gap.start], layer_of[gap.end]
                stays = all(solution[columns.there[t, number]] for t in range(first + 1, last + 1))
                paged = any(
                    solution[columns.coming[t, number]] for t in range(first + 1, last) if (t, number) in columns.coming
                )
                if stays:
                    continue
                if paged and is_movable(step.graph, storage, PAGE_BYTES):
                    yield (storage, gap.start), tier
                elif can_recompute(step.graph, step.lives, gap):
                    yield (storage, gap.start), Option.RECOMPUTE
