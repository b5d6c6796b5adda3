"""The planner's linear program.

Positions ``t`` are operations. Gap ``g`` of storage ``i`` (``s_i`` bytes) has options keep, recompute and the tiers;
``x[g, o]`` in [0, 1] is the share of option ``o``. ``w[i, v]`` is the share of version ``v`` of a storage that is
written to a lower tier. The step is cut into windows of equal compute time; a transfer belongs to the window of the
use it serves. Minimise ``sum_k T_k`` (seconds) plus a small price on all work moved, subject to

    one option per gap      sum_o x[g, o] = 1                                                        _add_gaps
    memory at t             base_t + sum_{g over t} s_i x[g, keep]
                                   + sum_{g held at t} s_i x[g, recompute] <= budget                _add_memory
    bytes in a tier         sum_i s_i max_g x[g, tier] <= its budget                                 _add_capacity
    one write per version   w[i, v] >= x[g, tier]   for every gap g in version v                     _add_writes
    compute in window k     T_k >= sum_ops c + sum_g r_g x[g, recompute]                             _add_time
    tiers in window k       T_k >= time its reads and writes take, alone and side by side            _add_tier

``base_t`` is what operation ``t`` touches plus what is never a candidate. A recomputed storage comes back when the
backward pass enters its block, not only at its use, so it is "held" from there on; the bound leaves this out, counts
only a storage's own producer in ``r_g`` and has one window, and with that every plan satisfies the constraints: its
optimum is a lower bound on the step time of any plan, as modelled. Memory rows are generated where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lading.ir.fold import block_items
from lading.ir.graph import Phase, StepGraph
from lading.ir.machine import Machine, Tier
from lading.ir.plan import Option
from lading.ir.program import slot_bytes
from lading.memory.lifetime import Gap, Lifetimes, can_recompute, gaps, is_movable
from lading.planner.lower import Costs

#: Price of moved or recomputed work that hides, against a second of step time.
_TIE = 1e-3
_ROUNDS = 12
_ROWS_PER_ROUND = 24


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gap with a choice. ``recompute_s`` is 0 where recomputing is impossible (see ``options``)."""

    gap: Gap
    size_bytes: int
    options: tuple[Option, ...]
    own_recompute_s: float
    recompute_s: float
    held_from: int
    version: tuple[int, int] | None


@dataclass(frozen=True)
class Problem:
    """Everything about a step that the relaxation needs, independent of the budget."""

    num_ops: int
    candidates: tuple[Candidate, ...]
    base: np.ndarray
    op_seconds: np.ndarray
    tiers: tuple[Tier, ...]
    capacity_bytes: dict[str, int] = field(default_factory=lambda: {})


@dataclass(frozen=True)
class Relaxed:
    """Share of each option for each candidate, and the optimum."""

    shares: tuple[dict[Option, float], ...]
    step_s: float


def build(
    graph: StepGraph, lives: Lifetimes, machine: Machine, costs: Costs, min_bytes: int, *, every: bool = False
) -> Problem:
    """Collect the candidate gaps and the bytes that are there whatever is chosen.

    Args:
        min_bytes: Smaller storages are no candidates and always kept.
        every: Offer all that can be lowered, also what is seldom wise, and do not count small storages between uses:
            what a bound on every plan needs.
    """
    candidates: list[Candidate] = []
    items = block_items(graph.ops)
    enters = _block_entries(graph, items)
    chosen: set[tuple[int, int]] = set()
    tier_options = tuple(Option(t.name) for t in machine.tiers)
    for gap in gaps(graph, lives):
        size = slot_bytes(graph.storages[gap.storage].size_bytes)
        inner = gap.wraps or gap.end - gap.start > 1
        if size < min_bytes and inner and every:
            chosen.add((gap.storage, gap.start))
        if size < min_bytes or not inner:
            continue
        recompute = can_recompute(graph, lives, gap) and (every or _stays_inside(graph, lives, items, gap.storage))
        movable = is_movable(graph, gap.storage, min_bytes)
        options = (Option.KEEP, *((Option.RECOMPUTE,) if recompute else ()), *(tier_options if movable else ()))
        if len(options) == 1:
            continue
        made = lives.producer[gap.storage]
        own = costs.op_seconds[made] if recompute and made is not None else 0.0
        whole = _recompute_seconds(graph, lives, costs, gap) if recompute and not every else own
        held = _held_from(graph, lives, enters, gap)
        version = _version(graph, lives, gap)
        candidates.append(Candidate(gap, size, options, own, whole, held, version))
        chosen.add((gap.storage, gap.start))
    base = _base(graph, lives, chosen)
    return Problem(len(graph.ops), tuple(candidates), base, np.asarray(costs.op_seconds), machine.tiers)


def _base(graph: StepGraph, lives: Lifetimes, chosen: set[tuple[int, int]]) -> np.ndarray:
    """Bytes at each position that no choice can change."""
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)

    def add(size: int, first: int, last: int) -> None:
        change[first] += size
        change[last + 1] -= size

    for storage, positions in enumerate(lives.uses):
        size = slot_bytes(graph.storages[storage].size_bytes)
        for use in positions:
            add(size, use, use)
        if not positions and storage in graph.persistent:
            add(size, 0, len(graph.ops) - 1)
    for gap in gaps(graph, lives):
        if (gap.storage, gap.start) not in chosen:
            size = slot_bytes(graph.storages[gap.storage].size_bytes)
            for first, last in spans(gap, len(graph.ops)):
                add(size, first, last)
    return np.cumsum(change)[:-1]


def spans(gap: Gap, num_ops: int) -> tuple[tuple[int, int], ...]:
    """Positions strictly inside the gap, as inclusive ranges."""
    ranges = ((gap.start + 1, num_ops - 1), (0, gap.end - 1)) if gap.wraps else ((gap.start + 1, gap.end - 1),)
    return tuple((first, last) for first, last in ranges if first <= last)


def _stays_inside(graph: StepGraph, lives: Lifetimes, items: Sequence[str], storage: int) -> bool:
    """Whether forward makes a storage and uses it only in the block that makes it.

    What leads from block to block, or backward, is not recomputed: it would need all that came before.
    """
    uses = [u for u in lives.uses[storage] if graph.ops[u].phase in (Phase.FORWARD, Phase.LOSS)]
    return bool(uses) and uses[0] == lives.producer[storage] and len({items[u] for u in uses}) == 1


def _block_entries(graph: StepGraph, items: Sequence[str]) -> list[int]:
    """For each forward op, the first backward position of its block (-1 outside blocks), per micro-batch."""
    entry = [-1] * len(graph.ops)
    first_backward: dict[str, int] = {}
    for position in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[position]
        if op.phase is Phase.BACKWARD and items[position]:
            first_backward[items[position]] = position
        elif op.phase in (Phase.FORWARD, Phase.LOSS):
            entry[position] = first_backward.get(items[position], -1)
    return entry


def _held_from(graph: StepGraph, lives: Lifetimes, enters: Sequence[int], gap: Gap) -> int:
    """Where a recomputed storage comes back: when backward enters its block, or at its use."""
    producer = lives.producer[gap.storage]
    entry = enters[producer] if producer is not None else -1
    return entry if gap.start < entry < gap.end else gap.end


def _recompute_seconds(graph: StepGraph, lives: Lifetimes, costs: Costs, gap: Gap) -> float:
    """Time of the producer with every ancestor that nothing else brings back."""
    producer = lives.producer[gap.storage]
    assert producer is not None
    total, stack, seen = 0.0, [producer], {producer}
    while stack:
        op = stack.pop()
        total += costs.op_seconds[op]
        for source in graph.reads(graph.ops[op]):
            made = lives.producer[source]
            if made is not None and made not in seen and lives.uses[source][-1] < gap.end:
                seen.add(made)
                stack.append(made)
    return total


def _version(graph: StepGraph, lives: Lifetimes, gap: Gap) -> tuple[int, int] | None:
    """Which version of the storage crosses the gap; None if a lower tier always has it (nothing writes it)."""
    writes = [u for u in lives.uses[gap.storage] if gap.storage in graph.writes(graph.ops[u])]
    count = sum(u <= gap.start for u in writes)
    if gap.storage in graph.persistent:
        return (gap.storage, count % len(writes)) if writes else None
    return gap.storage, count


def solve(problem: Problem, budget_bytes: int, *, windows: int = 0, extra: np.ndarray | None = None) -> Relaxed | None:
    """Solve the relaxation.

    Args:
        budget_bytes: Bytes of the arena.
        windows: Windows of the step, >= 1; 0 leaves out what is only estimated, so that the optimum bounds every plan.
        extra: Bytes to reserve at each position besides ``base``.

    Returns:
        None if even the relaxation does not fit.
    """
    return _Relaxation(problem, budget_bytes, windows, extra).solve()


class _Relaxation:
    """One linear program in HiGHS; columns are T by window, then shares by candidate, then writes."""

    def __init__(self, problem: Problem, budget_bytes: int, windows: int, extra: np.ndarray | None) -> None:
        import highspy

        self.problem, self.bound, self.windows = problem, windows == 0, max(windows, 1)
        ended = np.cumsum(problem.op_seconds)
        self.window = np.minimum((ended / ended[-1] * self.windows * (1 - 1e-9)).astype(int), self.windows - 1)
        self.room = budget_bytes - problem.base - (0 if extra is None else extra)
        self.inf = highspy.kHighsInf
        self.model = highspy.Highs()
        self.model.setOptionValue("output_flag", False)
        self.model.setOptionValue("threads", 1)
        self.optimal = highspy.HighsModelStatus.kOptimal
        for _ in range(self.windows):
            self.model.addCol(1.0, 0.0, self.inf, 0, np.empty(0, np.int32), np.empty(0))
        self.columns: list[dict[Option, int]] = []
        self.count = self.windows
        self.writes: dict[tuple[tuple[int, int], Option], tuple[int, Candidate]] = {}
        self.rows: set[int] = set()
        self._add_gaps()
        self._add_writes()
        self._add_time()
        self._add_capacity()

    def _column(self, cost: float) -> int:
        self.model.addCol(cost, 0.0, 1.0, 0, np.empty(0, np.int32), np.empty(0))
        self.count += 1
        return self.count - 1

    def _row(self, low: float, high: float, terms: dict[int, float]) -> None:
        columns = np.fromiter(terms.keys(), np.int32, len(terms))
        self.model.addRow(low, high, len(terms), columns, np.fromiter(terms.values(), np.float64, len(terms)))

    def _seconds(self, candidate: Candidate) -> float:
        return candidate.own_recompute_s if self.bound else candidate.recompute_s

    def _add_gaps(self) -> None:
        rates = {Option(t.name): t.read_bytes_per_s for t in self.problem.tiers}
        for candidate in self.problem.candidates:
            columns: dict[Option, int] = {}
            for option in candidate.options:
                work = 0.0
                if option is Option.RECOMPUTE:
                    work = self._seconds(candidate)
                elif option is not Option.KEEP:
                    work = candidate.size_bytes / rates[option]
                columns[option] = self._column(0.0 if self.bound else _TIE * work)
            self.columns.append(columns)
            self._row(1.0, 1.0, dict.fromkeys(columns.values(), 1.0))

    def _add_writes(self) -> None:
        rates = {Option(t.name): t.write_bytes_per_s for t in self.problem.tiers}
        for candidate, columns in zip(self.problem.candidates, self.columns, strict=True):
            for option, column in columns.items():
                if option in (Option.KEEP, Option.RECOMPUTE) or candidate.version is None:
                    continue
                key = (candidate.version, option)
                if key not in self.writes:
                    price = 0.0 if self.bound else _TIE * candidate.size_bytes / rates[option]
                    self.writes[key] = (self._column(price), candidate)
                self._row(0.0, self.inf, {self.writes[key][0]: 1.0, column: -1.0})

    def _add_capacity(self) -> None:
        """Storages that are ever in a tier must fit there together; a row only where they might not."""
        for name, capacity in self.problem.capacity_bytes.items():
            users: dict[int, list[int]] = {}
            size: dict[int, int] = {}
            for candidate, columns in zip(self.problem.candidates, self.columns, strict=True):
                if name != "device" and name in columns:
                    users.setdefault(candidate.gap.storage, []).append(columns[Option(name)])
                    size[candidate.gap.storage] = candidate.size_bytes
            if sum(size.values()) <= capacity:
                continue
            there = {storage: self._column(0.0) for storage in users}
            for storage, columns in users.items():
                for column in columns:
                    self._row(0.0, self.inf, {there[storage]: 1.0, column: -1.0})
            self._row(-self.inf, capacity / 1e6, {there[s]: size[s] / 1e6 for s in there})

    def _add_time(self) -> None:
        for window in range(self.windows):
            work = {window: 1.0}
            for candidate, columns in zip(self.problem.candidates, self.columns, strict=True):
                if Option.RECOMPUTE in columns and self.window[candidate.gap.end] == window:
                    work[columns[Option.RECOMPUTE]] = -self._seconds(candidate)
            self._row(float(self.problem.op_seconds[self.window == window].sum()), self.inf, work)
            for tier in self.problem.tiers:
                self._add_tier(tier, window)

    def _add_tier(self, tier: Tier, window: int) -> None:
        reads = (tier.latency_s, 1.0 / tier.read_bytes_per_s, 0.0, 0.0)
        writes = (0.0, 0.0, tier.latency_s, 1.0 / tier.write_bytes_per_s)
        for limit in (reads, writes, *((0.0, a, 0.0, b) for a, b in _facets(tier))):
            self._row(0.0, self.inf, self._tier_terms(Option(tier.name), window, limit))

    def _tier_terms(self, option: Option, window: int, limit: tuple[float, float, float, float]) -> dict[int, float]:
        """T_k minus the time of a tier's transfers; ``limit`` is seconds per read, byte read, write, byte written."""
        terms = {window: 1.0}
        for candidate, columns in zip(self.problem.candidates, self.columns, strict=True):
            if option in columns and self.window[candidate.gap.end] == window:
                terms[columns[option]] = -limit[0] - candidate.size_bytes * limit[1]
        for (_, written), (column, candidate) in self.writes.items():
            if written is option and self.window[candidate.gap.start] == window:
                terms[column] = -limit[2] - candidate.size_bytes * limit[3]
        return terms

    def solve(self) -> Relaxed | None:
        if self.room.min(initial=0) < 0:
            return None
        self._add_memory(self._worst(np.full(len(self.columns), 1.0), np.zeros(len(self.columns))))
        for _ in range(_ROUNDS):
            values = self._optimum()
            if values is None:
                return None
            keep = np.array([values[c[Option.KEEP]] for c in self.columns])
            again = np.array([values[c[Option.RECOMPUTE]] if Option.RECOMPUTE in c else 0.0 for c in self.columns])
            worst = self._worst(keep, again)
            if not worst:
                break
            self._add_memory(worst)
        else:
            values = self._optimum()
        if values is None:
            return None
        shares = tuple({option: values[column] for option, column in c.items()} for c in self.columns)
        return Relaxed(shares, sum(values[: self.windows]))

    def _optimum(self) -> list[float] | None:
        """Values of all columns, or None if there is no solution."""
        self.model.run()
        if self.model.getModelStatus() != self.optimal:
            return None
        return [float(value) for value in self.model.getSolution().col_value]

    def usage(self, keep: np.ndarray, again: np.ndarray) -> np.ndarray:
        """Bytes that candidates take at each position."""
        change = np.zeros(self.problem.num_ops + 1)
        for candidate, kept, repeated in zip(self.problem.candidates, keep, again, strict=True):
            for first, last in spans(candidate.gap, self.problem.num_ops):
                change[first] += kept * candidate.size_bytes
                change[last + 1] -= kept * candidate.size_bytes
            if repeated and not self.bound and candidate.held_from < candidate.gap.end:
                change[candidate.held_from] += repeated * candidate.size_bytes
                change[candidate.gap.end] -= repeated * candidate.size_bytes
        return np.cumsum(change)[:-1]

    def _worst(self, keep: np.ndarray, again: np.ndarray) -> list[int]:
        """Positions whose constraint is broken the most, spread over the step."""
        excess = self.usage(keep, again) - self.room
        excess[excess < 1e-6 * np.maximum(self.room, 1)] = 0
        found: list[int] = []
        for chunk in np.array_split(np.arange(len(excess)), _ROWS_PER_ROUND):
            if len(chunk) and excess[chunk].max() > 0:
                position = int(chunk[excess[chunk].argmax()])
                if position not in self.rows:
                    found.append(position)
        return found

    def _add_memory(self, positions: Sequence[int]) -> None:
        for t in positions:
            self.rows.add(t)
            terms: dict[int, float] = {}
            for candidate, columns in zip(self.problem.candidates, self.columns, strict=True):
                gap = candidate.gap
                inside = (t > gap.start or t < gap.end) if gap.wraps else gap.start < t < gap.end
                if not inside:
                    continue
                terms[columns[Option.KEEP]] = candidate.size_bytes / 1e6
                if Option.RECOMPUTE in columns and not self.bound and t >= candidate.held_from:
                    terms[columns[Option.RECOMPUTE]] = candidate.size_bytes / 1e6
            self._row(-self.inf, float(self.room[t]) / 1e6, terms)


def _facets(tier: Tier) -> tuple[tuple[float, float], ...]:
    """(seconds per byte read, per byte written) of each limit on the tier's rates.

    What a tier can do is the convex hull of: nothing, reading alone, writing alone, and both side by side.
    """
    read, write = tier.read_bytes_per_s, tier.write_bytes_per_s
    both_read, both_write = min(tier.mixed_read_bytes_per_s, read), min(tier.mixed_write_bytes_per_s, write)
    if both_read / read + both_write / write <= 1.0:
        return ((1.0 / read, 1.0 / write),)
    first = (1.0 / read, (1.0 - both_read / read) / both_write)
    second = ((1.0 - both_write / write) / both_read, 1.0 / write)
    return (first, second)
