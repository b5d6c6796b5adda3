"""The linear program of ``planner.relaxation`` in HiGHS, for one budget after another, and a bound by its prices.

[Note: bound by prices]
On a large step a lower bound on all plans comes from weak duality instead of the whole linear program
(``dual_bound_s``). Any prices >= 0 of memory at each position, of the time rows (adding up to at most 1) and of a
tier's capacity bound the relaxation of ``planner.relaxation`` from below: with them each gap takes its cheapest option
by itself,

    bound = p_compute sum c + p_network sum n - sum_t p_t room_t - sum_tier p_tier capacity + sum_g min_o price(g, o),

where the price of a write, and of a place in a tier, is split over the gaps it serves (``_split``; any split will do).
Good prices are the dual values of the folded program. A folded memory row stands for the layers around it, so its price
is also tried spread over more positions, and the best bound counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lading.ir.machine import Tier, wire_of, wires
from lading.ir.plan import Option
from lading.planner.relaxation import Folding, RelaxedResidency, ResidencyProblem, spans

#: Price of moved or recomputed work that hides, against a second of step time.
_TIE = 1e-3
_ROUNDS = 12
_ROWS_PER_ROUND = 24
_SETTLED = 6


def solve(
    problem: ResidencyProblem, budget_bytes: int, *, windows: int = 0, extra: np.ndarray | None = None
) -> RelaxedResidency | None:
    """Solve the relaxation of one step once.

    Args:
        budget_bytes: Bytes of the arena.
        windows: Windows of equal compute time, >= 1; 0 solves for a lower bound (``Relaxation``).
        extra: [position]: bytes to reserve besides ``problem.base``.

    Returns:
        The optimum; None if even the relaxation does not fit.
    """
    return Relaxation(problem, windows).solve(budget_bytes, extra)


class Relaxation:
    """Linear program of a step in HiGHS, solved for several budgets; a later solve starts from the one before.

    Columns are T by window, then the shares of each class's options but keep (which is what they leave), then writes,
    then what a tier holds. Gaps are classed by ``planner.relaxation.fold``: those of one class have the same shares.
    """

    def __init__(self, problem: ResidencyProblem, windows: int = 0) -> None:
        """Build all rows of the linear program but those of memory.

        Args:
            windows: Windows of the step, >= 1; 0 leaves out what is only estimated, so that the optimum bounds every
                plan as long as every gap is a class of its own.
        """
        import highspy

        self.problem, self.bound, self.windows = problem, windows == 0, max(windows, 1)
        ended = np.cumsum(problem.op_seconds)
        self.window = np.minimum((ended / ended[-1] * self.windows * (1 - 1e-9)).astype(int), self.windows - 1)
        self.table = CandidateArrays.of(problem, self.bound)
        self.inf = highspy.kHighsInf
        self.optimal = highspy.HighsModelStatus.kOptimal
        self.model = highspy.Highs()
        self.model.setOptionValue("output_flag", False)
        self.model.setOptionValue("threads", 1)
        self.count = 0
        self._add_columns(np.ones(self.windows), self.inf)
        self.column: dict[Option, np.ndarray] = {}
        self.positions: list[int] = []  # of the memory rows
        self.covered: list[float] = []  # bytes at each if every gap is kept
        self.time_rows: list[tuple[Option | None, _Limit, int]] = []  # tier, what it counts, first of its rows
        self.device_rows = set[int]()  # those without what moves past the device: of wires, of the host
        self.network_row = -1  # first of the network's time rows; -1 without any
        self.host_row = -1  # that of the host's operations; -1 without any
        self.capacity_rows: dict[Option, int] = {}
        self._add_gaps()
        self._add_writes()
        self._add_time()
        self._add_capacity()
        self.first_memory_row = self.model.getNumRow()

    def _offered(self) -> list[Tier]:
        """Tiers that any candidate may go to."""
        return [tier for tier in self.problem.tiers if Option(tier.name) in self.table.has]

    def _add_columns(self, costs: np.ndarray, upper: float = 1.0) -> np.ndarray:
        """Add columns in [0, upper] with these costs; returns their numbers."""
        none_i, none_f = np.empty(0, np.int32), np.empty(0)
        size = len(costs)
        self.model.addCols(size, costs, np.zeros(size), np.full(size, upper), 0, none_i, none_i, none_f)
        self.count += size
        return np.arange(self.count - size, self.count)

    def _add_rows(self, low: np.ndarray, high: np.ndarray, terms: Sequence[_Terms]) -> None:
        """Add rows between ``low`` and ``high``.

        ``terms`` are (row, column, value) triples of arrays, equal places add up.
        """
        size = len(low)
        row, column, value = (np.concatenate([t[k] for t in terms]) for k in range(3))
        place, inverse = np.unique(row.astype(np.int64) * self.count + column, return_inverse=True)
        value = np.bincount(inverse, weights=value, minlength=len(place)).astype(np.float64)
        starts = np.searchsorted(place, np.arange(size, dtype=np.int64) * self.count).astype(np.int32)
        index = (place % self.count).astype(np.int32)
        self.model.addRows(size, low, high, len(place), starts, index, value)

    def _add_gaps(self) -> None:
        table, rates = self.table, {Option(t.name): t.read_bytes_per_s for t in self.problem.tiers}
        terms: list[_Terms] = []
        for option, has in table.has.items():
            of_class = np.bincount(table.class_of, weights=has, minlength=table.num_classes) > 0
            work = table.again_s + table.network_s if option == Option.RECOMPUTE else table.size / rates[option]
            price = np.zeros(table.num_classes) if self.bound else _TIE * table.summed(work * has)
            numbers = np.full(table.num_classes, -1)
            numbers[of_class] = self._add_columns(price[of_class])
            self.column[option] = numbers
            rows = np.flatnonzero(of_class)
            terms.append((rows, numbers[of_class], np.ones(len(rows))))
        if terms:
            count = table.num_classes
            self._add_rows(np.full(count, -self.inf), np.ones(count), terms)

    def _add_writes(self) -> None:
        """Add a column per version and tier.

        ``written[tier]`` holds (version, its column, its window, its bytes) as arrays.
        """
        table = self.table
        self.written: dict[Option, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for tier in self._offered():
            option = Option(tier.name)
            users = np.flatnonzero(table.has[option] & (table.version >= 0))
            kinds, kind_of = _kinds(table.version[users], table.class_of[users])
            first = np.unique(table.version[users], return_index=True)[1]
            size, window = table.size[users][first], self.window[table.start[users][first]]
            price = np.bincount(kind_of, weights=size / tier.write_bytes_per_s, minlength=len(kinds))
            columns = self._add_columns(np.zeros(len(kinds)) if self.bound else _TIE * price)
            self.written[option] = (columns[kind_of] if len(users) else kind_of, window, size)
            pairs = [(kind, member) for kind, members in enumerate(kinds) for member in members]
            if pairs:
                kind, member = np.array(pairs).T
                rows = np.arange(len(pairs))
                terms = (
                    (rows, columns[kind], np.ones(len(rows))),
                    (rows, self.column[option][member], -np.ones(len(rows))),
                )
                self._add_rows(np.zeros(len(rows)), np.full(len(rows), self.inf), terms)

    def _add_capacity(self) -> None:
        """Add rows that keep the storages ever in a tier within its budget; none where all of them fit together."""
        table = self.table
        for name, capacity in self.problem.capacity_bytes.items():
            if name not in table.has:
                continue
            users = np.flatnonzero(table.has[Option(name)] & ~_is_placed(self.problem, table.storage))
            first = np.unique(table.storage[users], return_index=True)[1]
            size = table.size[users][first]
            if size.sum() <= capacity:
                continue
            kinds, kind_of = _kinds(table.storage[users], table.class_of[users])
            placed = self._add_columns(np.zeros(len(kinds)))
            kind, member = np.array([(kind, member) for kind, members in enumerate(kinds) for member in members]).T
            rows = np.arange(len(kind))
            terms = (
                (rows, placed[kind], np.ones(len(rows))),
                (rows, self.column[Option(name)][member], -np.ones(len(rows))),
            )
            self._add_rows(np.zeros(len(rows)), np.full(len(rows), self.inf), terms)
            self.capacity_rows[Option(name)] = self.model.getNumRow()
            total = (np.zeros(len(kind_of), dtype=int), placed[kind_of], size / 1e6)
            self._add_rows(np.array([-self.inf]), np.array([capacity / 1e6]), (total,))

    def _add_time(self) -> None:
        table = self.table
        windows_s = np.arange(self.windows), np.arange(self.windows), np.ones(self.windows)
        again = self._in_window(Option.RECOMPUTE, -table.again_s) if Option.RECOMPUTE in table.has else ()
        self.time_rows.append((None, (0.0, 0.0, 0.0, 0.0), self.model.getNumRow()))
        compute = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
        self._add_rows(compute, np.full(self.windows, self.inf), (windows_s, *again))
        if self.problem.network_seconds.any():
            again = self._in_window(Option.RECOMPUTE, -table.network_s) if Option.RECOMPUTE in table.has else ()
            self.network_row = self.model.getNumRow()
            self.time_rows.append((None, (0.0, 0.0, 0.0, 0.0), self.network_row))
            network = np.bincount(self.window, weights=self.problem.network_seconds, minlength=self.windows)
            self._add_rows(network, np.full(self.windows, self.inf), (windows_s, *again))
        for tier in self._offered():
            self._add_tier(tier)
        for tiers in wires(self._offered()):
            self._add_wire(tiers)
        if self.bound and self.problem.host_work.ops:
            self._add_host()

    def _add_host(self) -> None:
        """Add the row of the host's operations, which take longer beside what moves (``planner.fluid``: _add_host)."""
        work = self.problem.host_work
        terms: list[_Terms] = [(np.zeros(1, dtype=int), np.zeros(1, dtype=int), np.ones(1))]
        self.host_row, least_s = self.model.getNumRow(), sum(work.seconds)
        for tier in self.problem.tiers:
            limit = (0.0, work.per_byte[tier.name], 0.0, work.per_byte[tier.name])
            self.time_rows.append((Option(tier.name), limit, self.host_row))
            terms += self._tier_terms(Option(tier.name), limit) if tier in self._offered() else ()
            least_s += float(self._fixed_s(tier, limit, on_wire=True)[0])
        self.device_rows.add(self.host_row)
        self._add_rows(np.array([least_s]), np.array([self.inf]), terms)

    def _add_wire(self, tiers: Sequence[Tier]) -> None:
        windows_s = np.arange(self.windows), np.arange(self.windows), np.ones(self.windows)
        wire = wire_of(tiers)
        reads, writes = (0.0, 1.0 / wire.read_bytes_per_s, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0 / wire.write_bytes_per_s)
        for limit in (reads, writes, *((0.0, a, 0.0, b) for a, b in facets(wire))):
            terms: list[_Terms] = [windows_s]
            fixed_s = np.zeros(self.windows)
            for tier in tiers:
                self.time_rows.append((Option(tier.name), limit, self.model.getNumRow()))
                terms += self._tier_terms(Option(tier.name), limit)
                fixed_s += self._fixed_s(tier, limit, on_wire=True)
            self.device_rows.add(self.model.getNumRow())
            self._add_rows(fixed_s, np.full(self.windows, self.inf), terms)

    def _add_tier(self, tier: Tier) -> None:
        reads = (tier.latency_s, 1.0 / tier.read_bytes_per_s, 0.0, 0.0)
        writes = (0.0, 0.0, tier.latency_s, 1.0 / tier.write_bytes_per_s)
        windows_s = np.arange(self.windows), np.arange(self.windows), np.ones(self.windows)
        for limit in (reads, writes, *((0.0, a, 0.0, b) for a, b in facets(tier))):
            self.time_rows.append((Option(tier.name), limit, self.model.getNumRow()))
            terms = self._tier_terms(Option(tier.name), limit)
            self._add_rows(self._fixed_s(tier, limit), np.full(self.windows, self.inf), (windows_s, *terms))

    def _fixed_s(self, tier: Tier, limit: _Limit, *, on_wire: bool = False) -> np.ndarray:
        """Seconds that a limit counts whatever is chosen; an array of [window]."""
        return self.problem.fixed_seconds(tier, (limit[1], limit[3]), self.window, self.windows, on_wire=on_wire)

    def _tier_terms(self, option: Option, limit: _Limit) -> tuple[_Terms, ...]:
        """Terms that take a tier's transfer seconds off a window.

        ``limit``: seconds per read, byte read, write, byte written.
        """
        column, window, size = self.written[option]
        writes = (window, column, -limit[2] - size * limit[3])
        return (*self._in_window(option, -limit[0] - self.table.size * limit[1]), writes)

    def _in_window(self, option: Option, value: np.ndarray) -> tuple[_Terms, ...]:
        """Terms that count ``value`` ([gap], seconds), for gaps with an option, in the window of the use it serves."""
        table = self.table
        users = np.flatnonzero(table.has[option])
        return ((self.window[table.end[users]], self.column[option][table.class_of[users]], value[users]),)

    def solve(self, budget_bytes: int, extra: np.ndarray | None = None) -> RelaxedResidency | None:
        """Solve for a budget.

        Args:
            budget_bytes: Bytes of the arena.
            extra: [position]: bytes to reserve besides ``base``.

        Returns:
            Shares of each option for each candidate, and seconds; None if even the relaxation does not fit.
        """
        self.room = budget_bytes - self.problem.base - (0 if extra is None else extra)
        if self.room.min(initial=0) < 0:
            return None
        if self.positions:
            self._change_memory()
        else:
            self._add_memory(self._worst({option: np.zeros(self.table.num_classes) for option in self.column}))
        values = self._feasible()
        return None if values is None else self._relaxed(values)

    def _feasible(self) -> np.ndarray | None:
        """Solve again with more memory rows until none is broken; None if there is no solution."""
        for _ in range(_ROUNDS):
            values = self._optimum()
            if values is None:
                return None
            worst = self._worst(self._shares(values))
            if not worst:
                return values
            self._add_memory(worst)
        return self._optimum()

    def settled(self, relaxed: RelaxedResidency) -> RelaxedResidency:
        """Solve again with the shares of the largest storages made whole, step by step; the others are free each time.

        Call it right after ``solve``. A share that is rounded moves up to a storage more than it should; what is small
        then makes up for what is large. Ends where nothing is split, or where rounding leaves no solution.
        """
        if not self.column:  # nothing in this step has a choice
            return relaxed
        values = np.asarray(self.model.getSolution().col_value)
        fixed: list[np.ndarray] = []
        for _ in range(_SETTLED):
            columns, shares = self._split(values, fixed)
            if not len(columns):
                break
            self._bound(columns, shares, shares)
            fixed.append(columns)
            solution = self._feasible()
            if solution is None:
                break
            values, relaxed = solution, self._relaxed(solution)
        for columns in fixed:
            self._bound(columns, np.zeros(len(columns)), np.ones(len(columns)))
        return relaxed

    def _split(self, values: np.ndarray, fixed: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Find the largest half, by bytes, of the classes whose shares are split.

        Returns:
            Their columns, and a whole share for each.
        """
        table, shares = self.table, self._shares(values)
        seats = np.bincount(table.class_of, minlength=table.num_classes)
        options = list(shares)
        parts = np.stack([1.0 - sum(shares.values()), *shares.values()]) * seats
        whole = np.floor(parts + 1e-6)
        rest = parts - whole
        for _ in range(len(options) + 1):  # the seats left go to the largest remainders
            left = np.flatnonzero(seats - whole.sum(axis=0) > 0.5)
            if not len(left):
                break
            largest = rest[:, left].argmax(axis=0)
            whole[largest, left] += 1.0
            rest[largest, left] = -1.0
        size = np.zeros(table.num_classes)
        np.maximum.at(size, table.class_of, table.size)
        columns = np.stack([self.column[option] for option in options])
        done = np.isin(columns, np.concatenate(fixed)).any(axis=0) if fixed else np.zeros(table.num_classes, dtype=bool)
        split = np.flatnonzero((np.abs(parts - np.rint(parts)).max(axis=0) > 1e-6) & ~done)
        order = split[np.argsort(-size[split], kind="stable")]
        half = order[: max(1, (len(order) + 1) // 2)]
        at = columns[:, half]
        return at[at >= 0], (whole[1:, half] / seats[half])[at >= 0]

    def _bound(self, columns: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        self.model.changeColsBounds(len(columns), columns.astype(np.int32), low, high)

    def duals(self) -> np.ndarray:
        """Dual value of each row in the last solution, in seconds for each unit of its limit."""
        return np.asarray(self.model.getSolution().row_dual)

    def _relaxed(self, values: np.ndarray) -> RelaxedResidency:
        by_class = self._shares(values)
        keep = 1.0 - sum(by_class.values(), np.zeros(self.table.num_classes))
        rows = {Option.KEEP: keep.tolist(), **{option: share.tolist() for option, share in by_class.items()}}
        shares = tuple(
            {option: rows[option][index] for option in candidate.options}
            for candidate, index in zip(self.problem.candidates, self.table.class_of.tolist(), strict=True)
        )
        return RelaxedResidency(shares, float(values[: self.windows].sum()))

    def _shares(self, values: np.ndarray) -> dict[Option, np.ndarray]:
        """Share in [0, 1] of each option but keep, by class; 0 where a class lacks the option."""
        return {option: np.where(at >= 0, values[at], 0.0) for option, at in self.column.items()}

    def _optimum(self) -> np.ndarray | None:
        """Run HiGHS; values of all columns, or None if there is no solution."""
        self.model.run()
        if self.model.getModelStatus() != self.optimal:
            return None
        return np.asarray(self.model.getSolution().col_value)

    def usage(self, shares: dict[Option, np.ndarray]) -> np.ndarray:
        """Bytes that candidates take there; an array of [position].

        Args:
            shares: Share of each option but keep, by class.
        """
        table = self.table
        keep = 1.0 - sum(shares.values(), np.zeros(table.num_classes))
        change = np.zeros(self.problem.num_ops + 1)
        for option, (who, first, last) in table.resident_ranges.items():
            taken_bytes = (keep if option == Option.KEEP else shares[option])[table.class_of[who]] * table.size[who]
            change += np.bincount(first, weights=taken_bytes, minlength=len(change))
            change -= np.bincount(last + 1, weights=taken_bytes, minlength=len(change))
        return np.cumsum(change)[:-1]

    def _worst(self, shares: dict[Option, np.ndarray]) -> list[int]:
        """List positions whose memory constraint is broken the most, spread over the step."""
        excess = self.usage(shares) - self.room
        excess[excess < 1e-6 * np.maximum(self.room, 1)] = 0
        worst: list[int] = []
        for chunk in np.array_split(np.arange(len(excess)), _ROWS_PER_ROUND):
            if len(chunk) and excess[chunk].max() > 0:
                position = int(chunk[excess[chunk].argmax()])
                if position not in self.positions:
                    worst.append(position)
        return worst

    def _add_memory(self, positions: Sequence[int]) -> None:
        table, terms = self.table, list[_Terms]()
        for row, t in enumerate(positions):
            keep_bytes = table.bytes_held(Option.KEEP, t)
            self.covered.append(keep_bytes.sum())
            for option, column in self.column.items():
                change = table.summed(table.bytes_held(option, t) - np.where(table.has[option], keep_bytes, 0.0))
                used = np.flatnonzero(change)
                terms.append((np.full(len(used), row), column[used], change[used] / 1e6))
        self.positions.extend(positions)
        if terms:
            high = self._memory_room()[-len(positions) :]
            self._add_rows(np.full(len(high), -self.inf), high, terms)

    def _memory_room(self) -> np.ndarray:
        """Right-hand sides of the memory rows, in MB: the room less what keeping everything would take."""
        return (self.room[self.positions] - np.array(self.covered)) / 1e6

    def _change_memory(self) -> None:
        for row, high in enumerate(self._memory_room().tolist(), self.first_memory_row):
            self.model.changeRowBounds(row, -self.inf, high)


#: Seconds of a tier per read, byte read, write and byte written.
_Limit = tuple[float, float, float, float]
#: Row, column and value of each term of some rows.
_Terms = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class CandidateArrays:
    """Candidate gaps as arrays, one entry each.

    Attributes:
        class_of: Number of the class that decides the gap.
        storage, start, end: Storage, and the operations at which the gap starts and ends.
        size: Bytes of the storage.
        again_s: Seconds of recomputing it.
        network_s: Seconds of the network for unsharding it again.
        version: Number of the value that crosses the gap; -1 where a lower tier always has it.
        has: Which candidates offer an option, keep left out.
        resident_ranges: (candidate, first, last position) of each range at which an option takes the storage's bytes.
    """

    num_classes: int
    class_of: np.ndarray
    storage: np.ndarray
    size: np.ndarray
    start: np.ndarray
    end: np.ndarray
    again_s: np.ndarray
    network_s: np.ndarray
    version: np.ndarray
    has: dict[Option, np.ndarray]
    resident_ranges: dict[Option, _Terms]

    @staticmethod
    def of(problem: ResidencyProblem, bound: bool) -> CandidateArrays:
        """Collect the candidates of a problem; ``bound``: as a lower bound counts them, which leaves estimates out."""
        rows = problem.candidates
        versions = {key: number for number, key in enumerate(dict.fromkeys(c.version for c in rows if c.version))}
        options = (Option.RECOMPUTE, *(Option(tier.name) for tier in problem.tiers))
        has = {option: np.array([option in c.options for c in rows], dtype=bool) for option in options}
        has = {option: offered for option, offered in has.items() if offered.any()}
        class_of = np.arange(len(rows)) if problem.folding is None else problem.folding.class_of
        ranges = {Option.KEEP: _ranges([spans(c.gap, problem.num_ops) for c in rows])}
        if not bound:
            ranges |= {o: _ranges([c.resident_ranges.get(o, ()) if o in c.options else () for c in rows]) for o in has}
        return CandidateArrays(
            num_classes=int(class_of.max(initial=-1)) + 1,
            class_of=class_of,
            storage=_ints(c.gap.storage for c in rows),
            size=np.array([float(c.size_bytes) for c in rows]),
            start=_ints(c.gap.start for c in rows),
            end=_ints(c.gap.end for c in rows),
            again_s=np.array([c.own_recompute_s if bound else c.recompute_s for c in rows]),
            network_s=np.array([c.network_s for c in rows]),
            version=_ints(-1 if c.version is None else versions[c.version] for c in rows),
            has=has,
            resident_ranges=ranges,
        )

    def summed(self, value: np.ndarray) -> np.ndarray:
        """A value of the candidates, summed over each class; an array of [class]."""
        return np.bincount(self.class_of, weights=value, minlength=self.num_classes)

    def bytes_held(self, option: Option, position: int) -> np.ndarray:
        """Bytes that it takes at a position with an option; an array of [candidate]."""
        taken_bytes = np.zeros(len(self.size))
        if option in self.resident_ranges:
            who, first, last = self.resident_ranges[option]
            resident = who[(first <= position) & (position <= last)]
            taken_bytes[resident] = self.size[resident]
        return taken_bytes


def _ranges(rows: Sequence[Sequence[tuple[int, int]]]) -> _Terms:
    """Flatten ranges by row into three arrays: the row of each range, its first and its last position."""
    flat = np.array([(who, a, b) for who, ranges in enumerate(rows) for a, b in ranges], dtype=np.int64).reshape(-1, 3)
    return flat[:, 0], flat[:, 1], flat[:, 2]


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _kinds(owners: np.ndarray, classes: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Group owners (versions or storages) whose gaps lie in the same classes.

    Returns:
        Classes of each group; [owner]: its group.
    """
    members: dict[int, list[int]] = {}
    for owner, class_number in zip(owners.tolist(), classes.tolist(), strict=True):
        members.setdefault(owner, []).append(class_number)
    number: dict[tuple[int, ...], int] = {}
    kind_of = [number.setdefault(tuple(sorted(set(members[owner]))), len(number)) for owner in sorted(members)]
    return list(number), np.array(kind_of, dtype=np.int64)


def facets(tier: Tier) -> tuple[tuple[float, float], ...]:
    """Limits of a tier that reads and writes at once, as (seconds per byte read, seconds per byte written).

    The pairs of rates a tier can reach are the convex hull of: nothing, reading alone, writing alone, both side by
    side.
    """
    read, write = tier.read_bytes_per_s, tier.write_bytes_per_s
    both_read, both_write = min(tier.mixed_read_bytes_per_s, read), min(tier.mixed_write_bytes_per_s, write)
    if both_read / read + both_write / write <= 1.0:
        return ((1.0 / read, 1.0 / write),)
    first = (1.0 / read, (1.0 - both_read / read) / both_write)
    second = ((1.0 - both_write / write) / both_read, 1.0 / write)
    return (first, second)


#: Shares of the step over which a memory row's price is spread.
_SPREADS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)


def dual_bound_s(problem: ResidencyProblem, folding: Folding, budget_bytes: int) -> float:
    """Lower bound, in seconds, over all plans within a budget ([Note: bound by prices]).

    Args:
        problem: Built with ``every``.
        folding: Classes of its candidates; only the prices come from them.
        budget_bytes: Bytes of the arena.

    Returns:
        Seconds; 0.0 where there is no bound.
    """
    folded = Relaxation(dataclasses.replace(problem, folding=folding))
    if folded.solve(budget_bytes) is None:
        return 0.0
    table = CandidateArrays.of(dataclasses.replace(problem, folding=None), True)
    duals = folded.duals()
    room = (budget_bytes - problem.base) / 1e6
    return max(_value(problem, table, folded, duals, _spread(folded, duals, share), room) for share in _SPREADS)


def _spread(folded: Relaxation, duals: np.ndarray, share: float) -> np.ndarray:
    """Price of a MB of memory, each row's price spread over ``share`` of the step around it; an array of [position]."""
    prices = np.zeros(folded.problem.num_ops)
    half = int(share * len(prices))
    for row, position in enumerate(folded.positions, folded.first_memory_row):
        window = slice(max(0, position - half), position + half + 1)
        prices[window] += max(0.0, -float(duals[row])) / len(prices[window])
    return prices


def _value(
    problem: ResidencyProblem,
    table: CandidateArrays,
    folded: Relaxation,
    duals: np.ndarray,
    memory: np.ndarray,
    room: np.ndarray,
) -> float:
    """Value of the bound in seconds at given prices ([Note: bound by prices]).

    Args:
        memory: [position]: price of a MB.
        room: [position]: MB left to candidates.
    """
    prices = {row: max(0.0, float(duals[row])) for _, _, row in folded.time_rows}
    scale = 1.0 / max(1.0, sum(prices.values()))
    memory = memory * scale
    until = np.concatenate([[0.0], np.cumsum(memory)])
    who, first, last = table.resident_ranges[Option.KEEP]
    paid = (until[last + 1] - until[first]) * table.size[who] / 1e6
    min_price = np.bincount(who, weights=paid, minlength=len(table.size))
    compute, network = (scale * prices.get(row, 0.0) for row in (folded.time_rows[0][2], folded.network_row))
    if Option.RECOMPUTE in table.has:
        again_s = compute * table.again_s + network * table.network_s
        again = np.where(table.has[Option.RECOMPUTE], again_s, np.inf)
        min_price = np.minimum(min_price, again)
    total = compute * problem.op_seconds.sum() + network * problem.network_seconds.sum() - memory @ room
    total += scale * prices.get(folded.host_row, 0.0) * sum(problem.host_work.seconds)
    fixed = np.zeros(problem.num_ops, dtype=np.int64)  # all in one window
    for tier in problem.tiers:
        for of_tier, limit, row in folded.time_rows:
            if of_tier == Option(tier.name):
                per_byte, on_wire = (limit[1], limit[3]), row in folded.device_rows
                total += scale * prices[row] * problem.fixed_seconds(tier, per_byte, fixed, 1, on_wire=on_wire)[0]
    best = min_price
    for option in table.has.keys() - {Option.RECOMPUTE}:
        limits = [(limit, prices[row] * scale) for tier, limit, row in folded.time_rows if tier == option]
        read = sum(price * (limit[0] + table.size * limit[1]) for limit, price in limits)
        write = sum(price * (limit[2] + table.size * limit[3]) for limit, price in limits)
        saved = np.where(table.has[option], np.maximum(min_price - read, 0.0), 0.0)
        price = read + _split(np.where(table.version >= 0, write, 0.0), table.version, saved)
        if option in folded.capacity_rows:
            place_price = scale * max(0.0, -float(duals[folded.capacity_rows[option]]))
            total -= place_price * problem.capacity_bytes[option] / 1e6
            taken = np.where(_is_placed(problem, table.storage), 0.0, table.size / 1e6)
            price = price + _split(place_price * taken, table.storage, np.maximum(min_price - price, 0.0))
        best = np.minimum(best, np.where(table.has[option], price, np.inf))
    return float(total + best.sum())


def _is_placed(problem: ResidencyProblem, storage: np.ndarray) -> np.ndarray:
    """Whether the storage of each candidate has its place in a tier anyway; an array of [candidate]."""
    return np.isin(storage, [*problem.placed])


def _split(price: np.ndarray, owner: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """Split a price that an owner pays once over its gaps, in proportion to the seconds that each gap saves."""
    sums = np.bincount(owner + 1, weights=saved)[owner + 1]
    return np.where(sums > 0, price * saved / np.where(sums > 0, sums, 1.0), 0.0)
