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
                              and with what is unwritten as k(t) begins where t is its first position
    bytes in a tier         sum_i s_i max_g x[g, o] <= its budget                                    _add_capacity
    the host's operations   x = 1, read or written in the gap beside them                            _add_forced
    the host's processors   T of the windows from which on, or up to which, operations have to run
                              >= their seconds + what the bytes moved meanwhile take of them         add_host

A storage on its way takes its whole place, so at ``t`` it takes at least the share that was read before the window, and
at least what will not have been written when the window ends: every plan satisfies the constraints, and the optimum is
a lower bound on the step time of any plan, as modelled (of an update that recomputation delays, as if it were not).
Memory rows are generated where they are needed.

[Note: classes] Gaps of one size that begin and end together share their columns, which stand for the mean over a class
of what a plan does: its seconds and bytes moved are those of the mean. Where all of the class's n gaps lie over t, so
are the bytes that it takes there; where c of them do, it takes at least s (n mean - (n - c)), as the others would take
s at most. "Together" is at the same operations, in a large step in the same few.

[Note: windows] Inside a window, but not as it begins, what is written at its end counts as written. So windows end at
the moment that would need most memory if all were kept, the end of the forward mostly: what the forward makes and does
not write until then is there, or made again. And what is read in a window takes a place from the next one on only, so
they also end before and after the moment at which an operation leaves least room: what the next operations read can
then not have come before it. Where memory has a price in the solution, windows there and before are cut in two, and the
program is solved again (``WindowedBound``): few windows then say what many equal ones do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from lading.ir.machine import Tier, wire_of, wires
from lading.ir.plan import Option
from lading.planner.linear import facets
from lading.planner.relaxation import Candidate, RelaxedResidency, ResidencyProblem, spans

_ROUNDS = 16
_ROWS_PER_ROUND = 32
#: Candidates times places at which gaps are told apart: in a small step at each operation.
_PLACES = 2_000_000
#: Positions of most price around which windows are cut in two, and a price that is none, in seconds a MB.
_PRICED, _NO_PRICE = 3, 1e-9
#: Windows of the first flows of a bound, most flows with windows cut in two after them, and the gain that is too little
#: for another one.
_FIRST_WINDOWS, _CUTS, _LEAST_GAIN = (2, 8), 4, 1e-3


@dataclass(frozen=True)
class GapColumns:
    """Columns of one gap in one tier: its share, writes from window ``first`` on and reads from ``first_read`` on."""

    share: int
    first: int
    first_read: int
    reads: range
    writes: range


@dataclass(frozen=True)
class FlowClass:
    """Gaps that are decided alike.

    Attributes:
        members: Their numbers among the candidates, in the order of their storages.
        leader: Candidate that stands for all.
        again_s, own_again_s: Seconds of recomputing all of them, and those that it takes at least, as a bound counts.
    """

    members: tuple[int, ...]
    leader: Candidate
    again_s: float
    own_again_s: float

    @property
    def size_bytes(self) -> int:
        """Bytes of all members."""
        return len(self.members) * self.leader.size_bytes


#: Stretch of positions with the bytes that a class takes there if it is kept, and columns and factors of what is less.
Stretch = tuple[int, int, int, list[int], list[float]]


@dataclass(frozen=True)
class FlowPieces:
    """Stretches of positions at which classes take memory, one entry each, and what their bytes depend on.

    Attributes:
        first, last: First and last position.
        size: Bytes that are taken if the gaps are kept.
        row, column, factor: Terms added to 1 for the share that is there: piece, column of the program, factor.
        starts: [piece + 1]: where each piece's terms begin.
    """

    first: np.ndarray
    last: np.ndarray
    size: np.ndarray
    row: np.ndarray
    column: np.ndarray
    factor: np.ndarray
    starts: np.ndarray


class FlowProgram:
    """Linear program of a flow in HiGHS, whose columns and rows are collected first and handed over at once.

    Its value is a lower bound of a step that knows when bytes move.

    Args:
        budget_bytes: Bytes of the arena.
        windows: K, >= 1.
        cuts: Positions at which windows begin besides.

    Attributes:
        most_writes: Windows in which a gap may be written, the first ones; 0 is all, as a bound needs.
    """

    most_writes = 0

    def __init__(self, problem: ResidencyProblem, budget_bytes: int, windows: int, cuts: Sequence[int] = ()) -> None:
        self.problem, self.room, self.cuts = problem, budget_bytes - problem.base, cuts
        self.window = self.cut_windows(windows)
        self.windows = windows = int(self.window[-1]) + 1
        self.candidates = (*problem.candidates, *self.forced())
        self.host_op = {op: number for number, op in enumerate(problem.host_work.ops)}
        self.is_unsolved = False  # the solver has ended without an answer
        self.begins: list[int] = np.searchsorted(self.window, np.arange(windows + 1)).tolist()  # ends with num_ops
        self.classes = self._classes()
        self.costs: list[float] = [1.0] * windows
        self.upper: list[float] = [np.inf] * windows
        self.rows: list[tuple[float, float, list[int], list[float]]] = []
        self.flows: list[dict[Option, GapColumns]] = []  # by class
        self.again: list[int | None] = []
        self.memory: dict[int, tuple[int, float]] = {}  # by position: its memory row, and its bytes if all is kept
        self.num_rows = 0  # that the model has
        self.iterations = 0  # of the simplex method so far
        self.model: Any = None
        self._add_gaps()
        self.add_times()
        self._add_capacity()
        self.pieces = self.cut()

    def cut_windows(self, count: int) -> np.ndarray:
        """Window of each position, ``count`` of them and those that tight moments are ([Note: windows])."""
        window = cut_windows(self.problem, count)
        return cut_around(self.problem, window, self.cuts) if count > 1 else window

    def finer_cuts(self) -> tuple[int, ...]:
        """Positions at which windows should begin besides: around those of most price, and inside windows there."""
        prices = np.abs(np.array(self.model.getSolution().row_dual))
        priced = {at: float(prices[row]) for at, (row, _) in self.memory.items() if prices[row] > _NO_PRICE}
        ended, cuts = np.cumsum(self.problem.op_seconds), {*self.cuts}
        for at in sorted(priced, key=lambda at: (-priced[at], at))[:_PRICED]:
            cuts |= {at, at + 1}
            for window in (int(self.window[at]) - 1, int(self.window[at])):
                if window < 0:
                    continue
                first, end = self.begins[window : window + 2]
                middle_s = float(ended[first] - self.problem.op_seconds[first] + ended[end - 1]) / 2
                cuts.add(min(max(int(np.searchsorted(ended, middle_s)), first + 1), end - 1))
        return tuple(sorted(cuts))

    def forced(self) -> tuple[Candidate, ...]:
        """List gaps in which something moves whatever is chosen."""
        return self.problem.beside_host

    def likeness(self, candidate: Candidate) -> tuple[object, ...]:
        """Collect what the gaps of a class have in common ([Note: classes])."""
        gap, version = candidate.gap, candidate.version and candidate.version[1]
        near = max(1, self.problem.num_ops * len(self.problem.candidates) // _PLACES)
        windows = int(self.window[gap.start]), int(self.window[gap.end])
        places = gap.start // near, gap.end // near, gap.wraps
        return *windows, *places, candidate.size_bytes, candidate.options, version

    def _classes(self) -> list[FlowClass]:
        """Class the gaps of storages all of whose gaps are alike; what moves whatever is chosen comes last."""
        rows = self.problem.candidates
        of_storage: dict[int, list[int]] = {}
        for index, candidate in enumerate(rows):
            of_storage.setdefault(candidate.gap.storage, []).append(index)
        storages_by_likeness: dict[tuple[object, ...], list[list[int]]] = {}
        for indices in of_storage.values():
            storages_by_likeness.setdefault(tuple(self.likeness(rows[index]) for index in indices), []).append(indices)
        together: list[tuple[int, ...]] = [
            members for storages in storages_by_likeness.values() for members in zip(*storages, strict=True)
        ]
        alike: dict[tuple[object, ...], list[int]] = {}
        for index in range(len(rows), len(self.candidates)):
            alike.setdefault(self.likeness(self.candidates[index]), []).append(index)
        together += map(tuple, alike.values())
        rows = self.candidates
        return [
            FlowClass(
                members, rows[members[0]], sum(rows[i].recompute_s for i in members),
                len(members) * min(rows[i].own_recompute_s for i in members),
            )
            for members in together
        ]  # fmt: skip

    def _column(self) -> int:
        self.costs.append(0.0)
        self.upper.append(1.0)
        return len(self.costs) - 1

    def most_reads(self, candidate: Candidate) -> int:
        """Windows in which a gap may be read, the last ones; 0 is all, as a bound needs."""
        return 0

    def _columns(self, count: int) -> range:
        """Add columns one after another."""
        numbers = [self._column() for _ in range(count)]
        return range(numbers[0], numbers[-1] + 1)

    def add_row(self, low: float, high: float, columns: Sequence[int], values: Sequence[float]) -> None:
        self.rows.append((low, high, list(columns), list(values)))

    def _add_gaps(self) -> None:
        earlier: dict[tuple[tuple[int, int], Option], list[int]] = {}
        self.flows = [{} for _ in self.classes]
        self.again = [None] * len(self.classes)
        by_version = sorted(enumerate(self.classes), key=lambda row: (not row[1].leader.gap.wraps, row[1].members[0]))
        for index, candidate in ((index, each.leader) for index, each in by_version):
            if Option.KEEP not in candidate.options:
                self._add_forced(index, candidate)
                continue
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
        reads = self._columns(min(count, self.most_reads(candidate) or count))
        first_read = last + 1 - len(reads)
        self.add_row(0.0, 0.0, [*reads, share], [*[1.0] * len(reads), -1.0])
        if candidate.version is None:
            return GapColumns(share, first, first_read, reads, range(0))
        writes = self._columns(min(count, self.most_writes or count))
        before = earlier.setdefault((candidate.version, Option(tier.name)), [])
        self.add_row(0.0, np.inf, [*writes, *before, share], [*[1.0] * (len(writes) + len(before)), -1.0])
        before.append(share)
        return GapColumns(share, first, first_read, reads, writes)

    def forced_windows(self, candidate: Candidate) -> tuple[int, int]:
        """First and last window in which what moves whatever is chosen may do so.

        The host's operation has a position in the step, and a stream of its own: it may run later than what stands
        beside it, and earlier, as soon as what it works on has been made, and until what it made is read.
        """
        gap, work = candidate.gap, self.problem.host_work
        first, last = gap.start, gap.end
        if candidate.version is None:
            first = work.since[self.host_op[gap.start]]
        else:
            last = work.until[self.host_op[gap.end]]
        return int(self.window[first]), int(self.window[last]) + self.windows * gap.wraps

    def _add_forced(self, index: int, candidate: Candidate) -> None:
        """Add what is read, or written, whatever is chosen."""
        first, last = self.forced_windows(candidate)
        reads_only = candidate.version is None
        share, moves = self._column(), self._columns(last - first + 1)
        for columns in ([share], moves):
            self.add_row(1.0, 1.0, columns, [1.0] * len(columns))
        reads, writes = (moves, range(0)) if reads_only else (range(0), moves)
        first_read = first if reads_only else last + 1
        self.flows[index][candidate.options[0]] = GapColumns(share, first, first_read, reads, writes)

    def add_times(self) -> None:
        compute = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
        for window in range(self.windows):
            self.add_row(float(compute[window]), np.inf, [window], [1.0])
        times = list(range(self.windows))
        again = [(c, g) for c, g in zip(self.again, self.classes, strict=True) if c is not None]
        seconds = [g.own_again_s for _, g in again]
        ones = [1.0] * self.windows
        self.add_row(float(compute.sum()), np.inf, [*times, *(c for c, _ in again)], [*ones, *(-s for s in seconds)])
        self.add_transfers()
        self.add_host()

    def add_host(self) -> None:
        """Add rows of the host's operations, which take longer beside what moves.

        In windows of T seconds that have w seconds of work they are busy for b <= T. Of the bytes moved, those that
        move while they are not take no more of the memory than T - b seconds have, so T >= w + bytes * per_byte
        (``lading.planner.relaxation.HostWork``).
        """
        work = self.problem.host_work
        if not work.ops:
            return
        slowed = [self._column() for _ in range(self.windows)]  # seconds that the moves of each window take of them
        for column in slowed:
            self.upper[column] = np.inf
        per_byte = [(tier, work.per_byte[tier.name]) for tier in self.problem.tiers]
        self._add_limit([(tier, cost, cost) for tier, cost in per_byte], slowed)
        since, until, seconds = self.window[list(work.since)], self.window[list(work.until)], np.array(work.seconds)
        last = self.windows - 1
        spans = [(k, last, since >= k) for k in {0, *since.tolist()}] + [(0, k, until <= k) for k in {*until.tolist()}]
        for first, end, inside in sorted(spans, key=lambda span: span[:2]):
            within = list(range(first, end + 1))
            columns = [*within, *(slowed[k] for k in within)]
            self.add_row(float(seconds[inside].sum()), np.inf, columns, [1.0] * len(within) + [-1.0] * len(within))

    def add_transfers(self) -> None:
        """Add rows of the seconds that transfers take, on each tier and on wires that tiers share."""
        for tier in self.problem.tiers:
            self._add_tier(tier)
        for tiers in wires(self.problem.tiers):
            wire = wire_of(tiers)
            for read_s, write_s in (
                (1.0 / wire.read_bytes_per_s, 0.0),
                (0.0, 1.0 / wire.write_bytes_per_s),
                *facets(wire),
            ):
                self._add_limit([(tier, read_s, write_s) for tier in tiers])

    def flows_to(self, tier: Tier) -> list[tuple[FlowClass, GapColumns]]:
        """List the classes that may move to a tier, with the columns of that."""
        option = Option(tier.name)
        return [(c, f[option]) for c, f in zip(self.classes, self.flows, strict=True) if option in f]

    def _add_limit(self, parts: Sequence[tuple[Tier, float, float]], counted_in: Sequence[int] = ()) -> None:
        """Add rows: each window takes the seconds of its bytes.

        Args:
            parts: (tier, seconds per byte read, per byte written).
            counted_in: [window]: column that is no less than these seconds; by default the window's own.
        """
        terms = [([column], [1.0]) for column in counted_in or range(self.windows)]
        for tier, a, b in parts:
            for each, gap_columns in self.flows_to(tier):
                flows = (gap_columns.reads, gap_columns.first_read, a), (gap_columns.writes, gap_columns.first, b)
                for columns, first, per_byte in flows:
                    for step, column in enumerate(columns if per_byte else ()):
                        row = terms[(first + step) % self.windows]
                        row[0].append(column)
                        row[1].append(-each.size_bytes * per_byte)
        for columns, values in terms:
            self.add_row(0.0, np.inf, columns, values)

    def _add_tier(self, tier: Tier) -> None:
        flows = self.flows_to(tier)
        read, write = 1.0 / tier.read_bytes_per_s, 1.0 / tier.write_bytes_per_s
        for a, b in ((read, 0.0), (0.0, write), *facets(tier)):
            self._add_limit([(tier, a, b)])
        whole = np.zeros(self.problem.num_ops, dtype=np.int64)
        for name, per_byte, way in (("reads", read, (read, 0.0)), ("writes", write, (0.0, write))):
            columns, values = list(range(self.windows)), [1.0] * self.windows
            for each, gap_columns in flows:
                if Option.KEEP not in each.leader.options:
                    continue  # in ``fixed_s``, with small storages
                moves: range = getattr(gap_columns, name)
                columns.extend(moves)
                values.extend([-tier.latency_s * len(each.members) - each.size_bytes * per_byte] * len(moves))
            fixed_s = float(self.problem.fixed_seconds(tier, way, whole, 1)[0])
            self.add_row(fixed_s, np.inf, columns, values)
        for a, b in facets(tier) if self.problem.passes_device(tier) else ():
            columns, values = list(range(self.windows)), [1.0] * self.windows
            for each, gap_columns in flows:
                if Option.KEEP in each.leader.options:  # others are in ``fixed_s``
                    moved = (gap_columns.reads, a), (gap_columns.writes, b)
                    columns += [column for way, _ in moved for column in way]
                    values += [-each.size_bytes * per_byte for way, per_byte in moved for _ in way]
            fixed_s = float(self.problem.fixed_seconds(tier, (a, b), whole, 1)[0])
            self.add_row(fixed_s, np.inf, columns, values)

    def _add_capacity(self) -> None:
        """Add rows that keep the storages ever in a tier within its budget; none where all of them fit together."""
        for name, capacity in self.problem.capacity_bytes.items():
            users: dict[int, list[int]] = {}
            size: dict[int, int] = {}
            for each, flows in zip(self.classes, self.flows, strict=True):
                storage = each.leader.gap.storage  # stands for those of all members
                if Option(name) in flows and Option.KEEP in each.leader.options and storage not in self.problem.placed:
                    users.setdefault(storage, []).append(flows[Option(name)].share)
                    size[storage] = each.size_bytes
            if sum(size.values()) <= capacity:
                continue
            placed = {storage: self._column() for storage in users}
            for storage, columns in users.items():
                for column in columns:
                    self.add_row(0.0, np.inf, [placed[storage], column], [1.0, -1.0])
            self.add_row(-np.inf, capacity / 1e6, list(placed.values()), [size[s] / 1e6 for s in placed])

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
            self.num_rows += len(self.rows)
            self.rows.clear()
            self.model.run()
            self.iterations += self.model.getInfo().simplex_iteration_count
            if (status := self.model.getModelStatus()) != highspy.HighsModelStatus.kOptimal:
                self.is_unsolved = status != highspy.HighsModelStatus.kInfeasible
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
        shares: list[dict[Option, float]] = [{} for _ in self.problem.candidates]
        for number, each in enumerate(self.classes):
            of_class = self.shares(number, values)
            for index in each.members if Option.KEEP in each.leader.options else ():
                shares[index] = of_class
        return RelaxedResidency(tuple(shares), float(values[: self.windows].sum()))

    def shares(self, number: int, values: np.ndarray) -> dict[Option, float]:
        """Share of each option of a class."""
        shares = {option: float(values[f.share]) for option, f in self.flows[number].items()}
        if (again := self.again[number]) is not None:
            shares[Option.RECOMPUTE] = float(values[again])
        return {Option.KEEP: 1.0 - sum(shares.values()), **shares}

    def cut(self) -> FlowPieces:
        """Cut the positions inside all gaps by window."""
        stretches = [each for number in range(len(self.classes)) for each in self.stretches(number)]
        first, last, size = np.array([each[:3] for each in stretches], dtype=np.int64).reshape(-1, 3).T
        counts = np.fromiter((len(each[3]) for each in stretches), dtype=np.int64, count=len(stretches))
        starts = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(np.arange(len(stretches)), counts)
        column = np.fromiter(chain.from_iterable(each[3] for each in stretches), dtype=np.int64, count=int(starts[-1]))
        factor = np.fromiter(chain.from_iterable(each[4] for each in stretches), dtype=np.float64, count=len(column))
        return FlowPieces(first, last, size.astype(np.float64), rows, column, factor, starts)

    def stretches(self, number: int) -> Iterator[Stretch]:
        """Yield ranges of positions inside the gaps of a class, with its bytes and columns and factors of less."""
        each, again, gap = self.classes[number], self.again[number], self.classes[number].leader.gap
        ends = int(self.window[gap.start]), int(self.window[gap.end]) + self.windows * gap.wraps
        candidates = [self.candidates[index] for index in each.members]
        for window in range(ends[0], ends[1] + 1):
            for (begin, end), (moved, less) in self._parts_of_window(number, window):
                columns, factors = (moved, less) if again is None else ([again, *moved], [-1.0, *less])
                if window not in ends:
                    yield begin, end, each.size_bytes, columns, factors
                    continue
                for first, last, count, _ in counted(candidates, begin, end, window >= self.windows):
                    scaled = [factor * len(candidates) / count for factor in factors]
                    yield first, last, count * each.leader.size_bytes, columns, scaled

    def _parts_of_window(
        self, number: int, window: int
    ) -> Iterator[tuple[tuple[int, int], tuple[list[int], list[float]]]]:
        """Yield the first position of a window and the others, with the terms of a class there."""
        positions = self.positions_of(window)
        if positions is None:
            return
        (first, last), inside = positions, self.terms_at(number, window)
        begun = self.terms_at(number, window, begins=True)
        if begun == inside:
            yield positions, inside
            return
        yield (first, first), begun
        if first < last:
            yield (first + 1, last), inside

    def positions_of(self, window: int) -> tuple[int, int] | None:
        """First and last position of a window, which counts on over the boundary; None where it has none."""
        first, end = self.begins[window % self.windows : window % self.windows + 2]
        return (first, end - 1) if first < end else None

    def terms_at(self, number: int, window: int, *, begins: bool = False) -> tuple[list[int], list[float]]:
        """Columns and factors by which its moves make a class's share smaller in a window of its gaps.

        Args:
            begins: As the window begins, when nothing has been written in it.
        """
        columns: list[int] = []
        factors: list[float] = []
        for gap_columns in self.flows[number].values():
            read = gap_columns.reads[: max(0, window - gap_columns.first_read)]
            left = gap_columns.writes[max(0, window - gap_columns.first + (not begins)) :]
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
                if position not in self.memory:
                    positions.append(position)
        return positions

    def _add_memory(self, positions: Sequence[int]) -> None:
        pieces = self.pieces
        for t in positions:
            alive_pieces = np.flatnonzero((pieces.first <= t) & (t <= pieces.last))
            counts = pieces.starts[alive_pieces + 1] - pieces.starts[alive_pieces]
            ends = np.cumsum(counts)
            at = (
                np.arange(int(counts.sum()))
                - np.repeat(ends - counts, counts)
                + np.repeat(pieces.starts[alive_pieces], counts)
            )
            values = np.repeat(pieces.size[alive_pieces], counts) * pieces.factor[at] / 1e6
            columns, place = np.unique(pieces.column[at], return_inverse=True)  # before and after the boundary
            covered = float(pieces.size[alive_pieces].sum())
            self.memory[t] = self.num_rows + len(self.rows), covered
            room = (float(self.room[t]) - covered) / 1e6
            self.add_row(-np.inf, room, columns.tolist(), np.bincount(place, weights=values).tolist())


class WindowedBound:
    """Bound of a step by one flow after another, each with more windows than the one before.

    Attributes:
        seconds: Bound so far, 0.0 where none is known; None where no plan fits.
        next_windows: Windows of the next flow; 0 where it would say no more.
    """

    def __init__(self, problem: ResidencyProblem, budget_bytes: int) -> None:
        self._problem, self._budget_bytes = problem, budget_bytes
        self._flows, self._windows, self._cuts = 0, 0, ()
        self.seconds: float | None = 0.0
        self.next_windows = _FIRST_WINDOWS[0]

    def sharpen(self) -> None:
        """Solve the next flow."""
        self._windows = _FIRST_WINDOWS[min(self._flows, len(_FIRST_WINDOWS) - 1)]
        program = FlowProgram(self._problem, self._budget_bytes, self._windows, self._cuts)
        flowing, before_s = program.solve(), self.seconds
        self._flows, self.next_windows = self._flows + 1, 0
        if flowing is None:
            self.seconds = self.seconds if program.is_unsolved else None
            return
        assert before_s is not None, "a step that fits with fewer windows has no more to say"
        self.seconds = max(before_s, flowing.step_s)
        if self._flows < len(_FIRST_WINDOWS):
            self.next_windows = _FIRST_WINDOWS[self._flows]
            return
        self._cuts, last = program.finer_cuts(), self._cuts
        gained = self._flows == len(_FIRST_WINDOWS) or self.seconds > (1 + _LEAST_GAIN) * before_s
        if self._cuts != last and gained and self._flows < len(_FIRST_WINDOWS) + _CUTS:
            self.next_windows = program.windows + len({*self._cuts} - {*last})


def counted(candidates: Sequence[Candidate], first: int, last: int, over: bool) -> Iterator[tuple[int, int, int, int]]:
    """Cut positions first..last where gaps begin, end or have what is recomputed back.

    Args:
        over: Whether the positions are those behind the step's boundary.

    Yields:
        First and last position, gaps that lie over them, and those of them that would be gone if recomputed.
    """
    change: dict[int, list[int]] = {first: [0, 0], last + 1: [0, 0]}

    def add(low: int, high: int, count: int, recomputable: int) -> None:
        low, high = max(low, first), min(high, last)
        if low <= high:
            for at, sign in ((low, 1), (high + 1, -1)):
                row = change.setdefault(at, [0, 0])
                row[0] += sign * count
                row[1] += sign * recomputable

    for candidate in candidates:
        gap = candidate.gap
        low, high = (0 if over else gap.start + 1), (last if gap.wraps and not over else gap.end - 1)
        add(low, high, 1, 1)
        for begin, end in candidate.resident_ranges.get(Option.RECOMPUTE, ()):
            add(max(begin, low), min(end, high), 0, -1)
    count = recomputable = 0
    for at, following in pairwise(sorted(change)):
        count, recomputable = count + change[at][0], recomputable + change[at][1]
        if count:
            yield at, following - 1, count, recomputable


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


def cut_around(problem: ResidencyProblem, window: np.ndarray, cuts: Sequence[int] = ()) -> np.ndarray:
    """Cut windows also before and after the moment that leaves least room, and at some more ([Note: windows])."""
    tightest = int(problem.base.argmax())
    begun = {*(np.flatnonzero(np.diff(window)) + 1).tolist(), tightest, tightest + 1, *cuts}
    begins = np.zeros(problem.num_ops, dtype=np.int64)
    begins[[at for at in sorted(begun) if 0 < at < problem.num_ops]] = 1
    return np.cumsum(begins)


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
