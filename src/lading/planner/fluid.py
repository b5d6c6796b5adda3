"""The step as a flow: when each byte is moved, window by window: a bound for a step that moves.

The step is cut into ``K`` windows of operations, on a circle: what window ``K - 1`` does not finish goes on in window
0 of the next step. ``x[g, o]`` is the share of option ``o`` of gap ``g``, which lies between a use in window ``A_g``
and one in ``B_g`` (``B_g >= K`` where it passes the boundary); ``r[g, o, k]`` and ``w[g, o, k]`` are the shares of its
bytes that are read and written in window ``k``. Minimise ``sum_k T_k`` (seconds) subject to

    all is read             sum_{A <= k <= B} r[g, o, k] = x[g, o]                                    _add_gap
    what was not, is        sum_{A <= k <= B} w[g, o, k] >= x[g, o] - sum_{g' before g} x[g', o],     _add_gap
    written                 g' the earlier gaps of the same version
    compute in window k     T_k >= sum_ops c                                                         add_times
    transfers in window k   T_k >= time its bytes read and written take, alone and side by side      add_times
    the whole               sum_k T_k >= sum_ops c + sum_g c_g x[g, recompute], and the same with     add_times
                            latencies for each direction of each tier
    memory at t             base_t + sum_{g over t} s_g (1 - sum_o x[g, o]
                              + sum_o (sum_{k < k(t)} r[g, o, k] + unwritten at the end of k(t))) <= budget  _add_memory
    bytes in a tier         sum_i s_i max_g x[g, o] <= its budget                                    _add_capacity

A storage on its way takes its whole place, so at ``t`` it takes at least the share that was read before the window, and
at least what will not have been written when the window ends: every plan satisfies the constraints, and the optimum is
a lower bound on the step time of any plan, as modelled (of an update that recomputation delays, as if it were not).
Memory rows are generated where they are needed.

[Note: windows] Inside a window, what is written at its end counts as written all the time. So windows end at the
moment that would need most memory if all were kept, the end of the forward mostly: what the forward makes and does not
write until then is there, or made again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lading.ir.machine import Tier, wires
from lading.ir.plan import Option
from lading.planner.linear import facets
from lading.planner.relaxation import Candidate, RelaxedResidency, ResidencyProblem, spans

_HERE = (Option.KEEP, Option.RECOMPUTE)
_ROUNDS = 16
_ROWS_PER_ROUND = 32


@dataclass(frozen=True)
class GapColumns:
    """Columns of one gap in one tier: its share, writes from window ``first`` on and reads from ``first_read`` on."""

    share: int
    first: int
    first_read: int
    reads: range
    writes: range


@dataclass(frozen=True)
class FlowPieces:
    """Stretches of positions at which gaps take memory, one entry each, and what their bytes depend on.

    Attributes:
        candidate, first, last: Candidate, and its first and last position.
        size: Bytes that are taken if the gap is kept.
        row, column, factor: Terms added to 1 for the share that is there: piece, column of the program, factor.
        starts: [piece + 1]: where each piece's terms begin.
    """

    candidate: np.ndarray
    first: np.ndarray
    last: np.ndarray
    size: np.ndarray
    row: np.ndarray
    column: np.ndarray
    factor: np.ndarray
    starts: np.ndarray


def flow(problem: ResidencyProblem, budget_bytes: int, windows: int) -> RelaxedResidency | None:
    """Solve the flow of a step: a lower bound that knows when bytes move.

    Args:
        budget_bytes: Bytes of the arena.
        windows: K, >= 1.

    Returns:
        Shares of each option and seconds; None if not even the flow fits.
    """
    return FlowProgram(problem, budget_bytes, windows).solve()


class FlowProgram:
    """Linear program of a flow in HiGHS, whose columns and rows are collected first and handed over at once.

    Attributes:
        most_reads, most_writes: Windows in which a gap may be read, the last ones, and written, the first ones; 0 is
            all, as a bound needs.
    """

    most_reads = most_writes = 0

    def __init__(self, problem: ResidencyProblem, budget_bytes: int, windows: int) -> None:
        self.problem, self.windows, self.room = problem, windows, budget_bytes - problem.base
        self.window = cut_windows(problem, windows)
        self.costs: list[float] = [1.0] * windows
        self.upper: list[float] = [np.inf] * windows
        self.rows: list[tuple[float, float, list[int], list[float]]] = []
        self.flows: list[dict[Option, GapColumns]] = []
        self.again: list[int | None] = []
        self.positions: set[int] = set()  # of the memory rows
        self.model: Any = None
        self._add_gaps()
        self.add_times()
        self._add_capacity()
        self.pieces = self.cut()

    def _column(self) -> int:
        self.costs.append(0.0)
        self.upper.append(1.0)
        return len(self.costs) - 1

    def _columns(self, count: int) -> range:
        """Add columns one after another."""
        numbers = [self._column() for _ in range(count)]
        return range(numbers[0], numbers[-1] + 1)

    def add_row(self, low: float, high: float, columns: Sequence[int], values: Sequence[float]) -> None:
        self.rows.append((low, high, list(columns), list(values)))

    def _add_gaps(self) -> None:
        earlier: dict[tuple[tuple[int, int], Option], list[int]] = {}
        self.flows = [{} for _ in self.problem.candidates]
        self.again = [None] * len(self.problem.candidates)
        by_version = sorted(enumerate(self.problem.candidates), key=lambda row: (not row[1].gap.wraps, row[0]))
        for index, candidate in by_version:
            if Option.RECOMPUTE in candidate.options:
                self.again[index] = self._column()
            for tier in self.problem.tiers:
                if Option(tier.name) in candidate.options:
                    self.flows[index][Option(tier.name)] = self._add_gap(candidate, tier, earlier)
            shares = [f.share for f in self.flows[index].values()] + [c for c in (self.again[index],) if c is not None]
            self.add_row(-np.inf, 1.0, shares, [1.0] * len(shares))

    def _add_gap(
        self, candidate: Candidate, tier: Tier, earlier: dict[tuple[tuple[int, int], Option], list[int]]
    ) -> GapColumns:
        gap = candidate.gap
        first, last = int(self.window[gap.start]), int(self.window[gap.end]) + (self.windows if gap.wraps else 0)
        count = last - first + 1
        share = self._column()
        reads = self._columns(min(count, self.most_reads or count))
        first_read = last + 1 - len(reads)
        self.add_row(0.0, 0.0, [*reads, share], [*[1.0] * len(reads), -1.0])
        if candidate.version is None:
            return GapColumns(share, first, first_read, reads, range(0))
        writes = self._columns(min(count, self.most_writes or count))
        before = earlier.setdefault((candidate.version, Option(tier.name)), [])
        self.add_row(0.0, np.inf, [*writes, *before, share], [*[1.0] * (len(writes) + len(before)), -1.0])
        before.append(share)
        return GapColumns(share, first, first_read, reads, writes)

    def add_times(self) -> None:
        compute = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
        for window in range(self.windows):
            self.add_row(float(compute[window]), np.inf, [window], [1.0])
        times = list(range(self.windows))
        again = [(c, g) for c, g in zip(self.again, self.problem.candidates, strict=True) if c is not None]
        seconds = [g.own_recompute_s for _, g in again]
        ones = [1.0] * self.windows
        self.add_row(float(compute.sum()), np.inf, [*times, *(c for c, _ in again)], [*ones, *(-s for s in seconds)])
        self.add_transfers()

    def add_transfers(self) -> None:
        """Add rows of the seconds that transfers take, on each tier and on wires that tiers share."""
        for tier in self.problem.tiers:
            self._add_tier(tier)
        for tiers in wires(self.problem.tiers):
            self._add_limit([(tier, 1.0 / tier.read_bytes_per_s, 0.0) for tier in tiers])
            self._add_limit([(tier, 0.0, 1.0 / tier.write_bytes_per_s) for tier in tiers])

    def _flows_to(self, tier: Tier) -> list[tuple[Candidate, GapColumns]]:
        option = Option(tier.name)
        return [(c, f[option]) for c, f in zip(self.problem.candidates, self.flows, strict=True) if option in f]

    def _add_limit(self, parts: Sequence[tuple[Tier, float, float]]) -> None:
        """Add rows: each window takes the seconds of its bytes.

        ``parts``: (tier, seconds per byte read, per byte written).
        """
        terms: list[tuple[list[int], list[float]]] = [([window], [1.0]) for window in range(self.windows)]
        for tier, a, b in parts:
            for candidate, gap_columns in self._flows_to(tier):
                flows = (gap_columns.reads, gap_columns.first_read, a), (gap_columns.writes, gap_columns.first, b)
                for columns, first, per_byte in flows:
                    for step, column in enumerate(columns if per_byte else ()):
                        row = terms[(first + step) % self.windows]
                        row[0].append(column)
                        row[1].append(-candidate.size_bytes * per_byte)
        for columns, values in terms:
            self.add_row(0.0, np.inf, columns, values)

    def _add_tier(self, tier: Tier) -> None:
        flows = self._flows_to(tier)
        read, write = 1.0 / tier.read_bytes_per_s, 1.0 / tier.write_bytes_per_s
        for a, b in ((read, 0.0), (0.0, write), *facets(tier)):
            self._add_limit([(tier, a, b)])
        whole = np.zeros(self.problem.num_ops, dtype=np.int64)
        for name, per_byte, way in (("reads", read, (read, 0.0)), ("writes", write, (0.0, write))):
            columns, values = list(range(self.windows)), [1.0] * self.windows
            for candidate, gap_columns in flows:
                moves: range = getattr(gap_columns, name)
                columns.extend(moves)
                values.extend([-tier.latency_s - candidate.size_bytes * per_byte] * len(moves))
            fixed_s = float(self.problem.fixed_seconds(tier, way, whole, 1)[0])
            self.add_row(fixed_s, np.inf, columns, values)

    def _add_capacity(self) -> None:
        """Add rows that keep the storages ever in a tier within its budget; none where all of them fit together."""
        for name, capacity in self.problem.capacity_bytes.items():
            users: dict[int, list[int]] = {}
            size: dict[int, int] = {}
            for candidate, flows in zip(self.problem.candidates, self.flows, strict=True):
                for option, gap_columns in flows.items():
                    if option == name:
                        users.setdefault(candidate.gap.storage, []).append(gap_columns.share)
                        size[candidate.gap.storage] = candidate.size_bytes
            if sum(size.values()) <= capacity:
                continue
            there = {storage: self._column() for storage in users}
            for storage, columns in users.items():
                for column in columns:
                    self.add_row(0.0, np.inf, [there[storage], column], [1.0, -1.0])
            self.add_row(-np.inf, capacity / 1e6, list(there.values()), [size[s] / 1e6 for s in there])

    def solve(self) -> RelaxedResidency | None:
        """Solve, with more memory rows until none is broken; None where there is no solution."""
        values = self.optimum()
        return None if values is None else self.relaxed(values)

    def optimum(self) -> np.ndarray | None:
        """Solve, from the solution before where there is one; values of all columns, or None."""
        if self.room.min(initial=0) < 0:
            return None
        import highspy

        if self.model is None:
            self.model = self._new_model()
            self._add_memory(self._worst(np.zeros(len(self.costs))))
        values: np.ndarray | None = None
        for _ in range(_ROUNDS):
            _hand_over(self.model, self.rows)
            self.rows.clear()
            self.model.run()
            if self.model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return None
            values = np.array(self.model.getSolution().col_value)
            worst = self._worst(values)
            if not worst:
                break
            self._add_memory(worst)
        return values

    def _new_model(self) -> Any:
        import highspy

        model: Any = highspy.Highs()
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 1)
        none, count = np.empty(0, np.int32), len(self.costs)
        model.addCols(count, np.array(self.costs), np.zeros(count), np.array(self.upper), 0, none, none, np.empty(0))
        return model

    def relaxed(self, values: np.ndarray) -> RelaxedResidency:
        shares = tuple(self._shares(index, values) for index in range(len(self.flows)))
        return RelaxedResidency(shares, float(values[: self.windows].sum()))

    def _shares(self, index: int, values: np.ndarray) -> dict[Option, float]:
        shares = {option: float(values[f.share]) for option, f in self.flows[index].items()}
        if (again := self.again[index]) is not None:
            shares[Option.RECOMPUTE] = float(values[again])
        return {Option.KEEP: 1.0 - sum(shares.values()), **shares}

    def cut(self) -> FlowPieces:
        """Cut the positions inside all gaps by window."""
        owners: list[tuple[int, int, int]] = []
        terms: list[tuple[int, int, float]] = []
        for index, candidate in enumerate(self.problem.candidates):
            for first, last, columns, factors in self.parts_of(index, candidate):
                terms += [(len(owners), column, factor) for column, factor in zip(columns, factors, strict=True)]
                owners.append((index, first, last))
        who, first, last = np.array(owners, dtype=np.int64).reshape(-1, 3).T
        sizes = np.array([c.size_bytes for c in self.problem.candidates], dtype=np.float64)
        row, column, factor = zip(*terms, strict=True) if terms else ((), (), ())
        rows = np.array(row, dtype=np.int64)
        starts = np.searchsorted(rows, np.arange(len(owners) + 1))
        return FlowPieces(
            who, first, last, sizes[who], rows, np.array(column, dtype=np.int64), np.array(factor), starts
        )

    def parts_of(self, index: int, candidate: Candidate) -> Iterator[tuple[int, int, list[int], list[float]]]:
        """Yield ranges of positions inside a gap with the columns and factors of its share there, less 1."""
        for first, last, window in self.windows_of(candidate):
            columns, factors = self.terms_at(index, window)
            if (again := self.again[index]) is not None:
                columns, factors = [again, *columns], [-1.0, *factors]
            yield first, last, columns, factors

    def windows_of(self, candidate: Candidate) -> list[tuple[int, int, int]]:
        """Cut the positions inside a gap by window, as (first, last, window); windows count on over the boundary."""
        pieces: list[tuple[int, int, int]] = []
        for first, last in spans(candidate.gap, self.problem.num_ops):
            turn = (
                self.windows if candidate.gap.wraps and first <= candidate.gap.end and last < candidate.gap.end else 0
            )
            cuts = [first, *(np.flatnonzero(np.diff(self.window[first : last + 1])) + first + 1).tolist(), last + 1]
            pieces += [(a, b - 1, int(self.window[a]) + turn) for a, b in itertools.pairwise(cuts)]
        return pieces

    def terms_at(self, index: int, window: int) -> tuple[list[int], list[float]]:
        """Columns and factors by which its moves make a candidate's share smaller in a window of its gap."""
        columns: list[int] = []
        factors: list[float] = []
        for gap_columns in self.flows[index].values():
            read = gap_columns.reads[: max(0, window - gap_columns.first_read)]
            left = gap_columns.writes[max(0, window - gap_columns.first + 1) :]
            columns += [gap_columns.share, *read, *left]
            factors += [-1.0, *[1.0] * (len(read) + len(left))]
        return columns, factors

    def _worst(self, values: np.ndarray) -> list[int]:
        """List positions whose memory constraint is broken the most, spread over the step."""
        pieces = self.pieces
        part = np.bincount(pieces.row, weights=values[pieces.column] * pieces.factor, minlength=len(pieces.size))
        size = pieces.size * (1.0 + part)
        change = np.bincount(pieces.first, weights=size, minlength=self.problem.num_ops + 1)
        change -= np.bincount(pieces.last + 1, weights=size, minlength=self.problem.num_ops + 1)
        excess = np.cumsum(change)[:-1] - self.room
        excess[excess < 1e-6 * np.maximum(self.room, 1)] = 0
        positions: list[int] = []
        for chunk in np.array_split(np.arange(len(excess)), _ROWS_PER_ROUND):
            if len(chunk) and excess[chunk].max() > 0:
                position = int(chunk[excess[chunk].argmax()])
                if position not in self.positions:
                    positions.append(position)
        return positions

    def _add_memory(self, positions: Sequence[int]) -> None:
        pieces = self.pieces
        for t in positions:
            here = np.flatnonzero((pieces.first <= t) & (t <= pieces.last))
            counts = pieces.starts[here + 1] - pieces.starts[here]
            ends = np.cumsum(counts)
            at = (
                np.arange(int(counts.sum())) - np.repeat(ends - counts, counts) + np.repeat(pieces.starts[here], counts)
            )
            values = np.repeat(pieces.size[here], counts) * pieces.factor[at] / 1e6
            self.positions.add(t)
            covered = float(pieces.size[here].sum())
            room = (float(self.room[t]) - covered) / 1e6
            self.add_row(-np.inf, room, pieces.column[at].tolist(), values.tolist())


def cut_windows(problem: ResidencyProblem, count: int) -> np.ndarray:
    """Window of each position: of equal compute time before the fullest moment, and after it ([Note: windows])."""
    change = np.zeros(problem.num_ops + 1)
    for candidate in problem.candidates:
        for first, last in spans(candidate.gap, problem.num_ops):
            change[first] += candidate.size_bytes
            change[last + 1] -= candidate.size_bytes
    fullest = int((np.cumsum(change)[:-1] + problem.base).argmax())
    ended = np.cumsum(problem.op_seconds)
    until_s, all_s = float(ended[fullest]), float(ended[-1])
    if count == 1 or not 0.0 < until_s < all_s:
        return _equal(ended, all_s, count)
    before = min(count - 1, max(1, round(count * until_s / all_s)))
    after = before + _equal(ended - until_s, all_s - until_s, count - before)
    return np.where(np.arange(problem.num_ops) <= fullest, _equal(ended, until_s, before), after)


def _equal(ended: np.ndarray, whole_s: float, count: int) -> np.ndarray:
    """Window of each position by the second at which it ends, of ``count`` windows of equal length."""
    return np.clip((ended / whole_s * count * (1 - 1e-9)).astype(int), 0, count - 1)


def _hand_over(model: Any, rows: Sequence[tuple[float, float, list[int], list[float]]]) -> None:
    lengths = [len(columns) for _, _, columns, _ in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32) if rows else np.empty(0, np.int32)
    model.addRows(
        len(rows),
        np.array([low for low, *_ in rows], dtype=np.float64),
        np.array([high for _, high, *_ in rows], dtype=np.float64),
        sum(lengths),
        starts,
        np.array([c for _, _, columns, _ in rows for c in columns], dtype=np.int32),
        np.array([v for *_, values in rows for v in values], dtype=np.float64),
    )
