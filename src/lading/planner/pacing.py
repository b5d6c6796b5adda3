"""Flow of a plan: what moves in which window, and how long each window takes.

``planner.fluid`` bounds all plans, so what is on its way in a window takes no place there. A plan needs that place, and
has to know when compute will wait: transfers that are scheduled as if it never did begin too late, and those scheduled
by a step that waited begin as late as in that step. So the flow is solved once more, as a plan has to take it:

    memory at t             what is read in a window comes, and what is written in it leaves, evenly over the window,
                            counted by parts of it; a storage that is larger than what a part moves takes its place
                            from the window's begin on, or until its end                             _terms
    recomputation           takes the seconds of all that runs again, in the window of the use, and holds its place
                            from where the backward enters the block (``planner.relaxation``)        parts_of, add_times
    compute in window k     T_k >= sum_ops c + what its transfers take from computing                _add_slowdowns
    transfers               only in the last windows before a use, and the first after one            most_reads
    weights                 are back where what is recomputed reads them                             _add_needs
    large storages          are moved whole or not at all: the largest half of the split ones is      _settle
                            rounded and fixed, and the rest solved again

Plans are made of it (``paced``) at shares of the tiers' rates that leave room for queues, with so many windows; what a
lowering misses is reserved, and the flow solved again.

With ``T_k`` the seconds of window k in the solution and ``c_k`` those of what it computes, ``T_k / c_k`` is the pace of
its operations: the lowering plans transfers for a step that runs so (``planner.lower``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from lading.ir.opkinds import PRODUCT_KINDS
from lading.ir.plan import Option
from lading.planner.fluid import FlowProgram, Stretch, counted, cut_windows
from lading.planner.relaxation import Candidate, Folding, RelaxedResidency, ResidencyProblem, seated
from lading.planner.residency import (
    MOST_RETIMED,
    SMALL_OPS,
    Found,
    StepProblem,
    missing_bytes,
    residency_problem,
    rounded,
    slower,
)
from lading.planner.schedule import base_profile

#: Price of moved or recomputed work that hides, against a second of step time.
_TIE = 1e-3
#: How often the largest half of the split storages is fixed.
_SETTLED = 6
#: Windows before a use in which what it needs may be read.
_MOST_READS = 8
_TINY = 1e-12
#: Part of a window: first and last position, and shares of the window that have passed when these begin and end.
_Part = tuple[int, int, float, float]
#: So near to a number of whole storages a class is not split.
_SPLIT = 1e-3


@dataclass(frozen=True)
class PacedResidency:
    """Shares of each option, and how many times longer than its operations each position takes.

    Attributes:
        folding: Which candidates were decided alike.
    """

    relaxed: RelaxedResidency
    pace: tuple[float, ...]
    folding: Folding


class PacedFlow(FlowProgram):
    """Flow as a plan has to take it, solved for one reserve of memory after another.

    Storages of one size whose gaps begin and end in the same windows share columns: it says how many of them move.
    """

    most_writes = 6

    def __init__(
        self,
        problem: ResidencyProblem,
        budget_bytes: int,
        windows: int,
        parts: int = 4,
        products: np.ndarray | None = None,
    ) -> None:
        """Collect all columns and rows but those of memory; the other arguments are those of ``FlowProgram``.

        Args:
            parts: Parts of a window that memory is counted in; with one, all takes its place all through a window.
            products: [position]: whether the operation is a product; None is none of them.
        """
        self.products = np.zeros(problem.num_ops, dtype=bool) if products is None else products
        self.ended = _ended(problem, windows)
        self.part = np.minimum((self.ended * parts).astype(int), parts - 1)
        near = max((tier.read_bytes_per_s for tier in problem.tiers), default=0.0)
        part_s = float(problem.op_seconds.sum()) / windows / parts
        self.most_fluid = near * part_s if parts > 1 else 0.0
        self.begun_s = np.concatenate([[0.0], np.cumsum(problem.op_seconds)])
        self.wanted = _first_need_by_gap(problem)
        self.whole_room = budget_bytes - problem.base
        self.settled: list[int] = []  # columns that are fixed
        self._parts_of: dict[tuple[int, bool], list[_Part]] = {}
        super().__init__(problem, budget_bytes, windows)
        self._add_chains()
        self._add_needs()
        rates = {Option(tier.name): (tier.read_bytes_per_s, tier.write_bytes_per_s) for tier in problem.tiers}
        for again, each, flows in zip(self.again, self.classes, self.flows, strict=True):
            if again is not None:
                self.costs[again] += _TIE * each.again_s
            for option, columns in flows.items():
                read, write = rates[option]
                if Option.KEEP in each.leader.options and self._is_short(each.leader, rates[option]):
                    self.upper[columns.share] = 0.0
                self.costs[columns.share] += _TIE * each.size_bytes / read
                for column in columns.writes:
                    self.costs[column] += _TIE * each.size_bytes / write

    def cut_windows(self, count: int) -> np.ndarray:
        """Window of each position."""
        return cut_windows(self.problem, count)

    def forced(self) -> tuple[Candidate, ...]:
        """List what the host's operations make and need; what they work on leaves within the first windows."""
        return tuple(each if each.version is None else self._leaving(each) for each in self.problem.beside_host)

    def _leaving(self, candidate: Candidate) -> Candidate:
        """Candidate whose gap ends with the last window in which it is written."""
        gap = candidate.gap
        last = min(int(self.window[gap.start]) + self.most_writes, self.windows) - 1
        end = int(np.searchsorted(self.window, last, side="right")) - 1
        return dataclasses.replace(candidate, gap=dataclasses.replace(gap, end=end, wraps=False))

    def forced_windows(self, candidate: Candidate) -> tuple[int, int]:
        """First and last window in which what moves whatever is chosen may do so, as near to its use as others."""
        gap = candidate.gap
        first, last = int(self.window[gap.start]), int(self.window[gap.end]) + self.windows * gap.wraps
        return (max(first, last - _MOST_READS + 1), last) if candidate.version is None else (first, last)

    def likeness(self, candidate: Candidate) -> tuple[object, ...]:
        """Collect what a class has in common: windows, not positions."""
        gap, version = candidate.gap, candidate.version and candidate.version[1]
        window_spans = [
            int(self.window[at]) for span in candidate.resident_ranges.get(Option.RECOMPUTE, ()) for at in span
        ]
        short = [
            self._is_short(candidate, (tier.read_bytes_per_s, tier.write_bytes_per_s)) for tier in self.problem.tiers
        ]
        windows = int(self.window[gap.start]), int(self.window[gap.end]), self._wanted_in(candidate)
        return *windows, gap.wraps, candidate.size_bytes, candidate.options, version, *window_spans, *short

    def most_reads(self, candidate: Candidate) -> int:
        """Windows in which a gap may be read: the last ones before its use, or before a recomputation needs it."""
        return _MOST_READS + int(self.window[candidate.gap.end]) - self._wanted_in(candidate)

    def _wanted_in(self, candidate: Candidate) -> int:
        """Window in which a storage may be read first inside a gap, or that of the gap's end."""
        gap = candidate.gap
        return int(self.window[self.wanted.get((gap.storage, gap.start), gap.end)])

    def _add_needs(self) -> None:
        """Add rows by which what is recomputed finds the weights that it reads, brought back for it if they move."""
        class_of = {index: number for number, each in enumerate(self.classes) for index in each.members}
        rows: dict[tuple[int, int], int] = {}
        for index, other, back in _weights_read_again(self.problem):
            rows.setdefault((class_of[index], class_of[other]), int(self.window[back]))
        for (one, other), window in rows.items():
            again = self.again[one]
            if again is None:
                continue
            columns, values = [again], [1.0]
            for moves in self.flows[other].values():
                back = moves.reads[: max(0, window - moves.first_read + 1)]
                columns += [moves.share, *back]
                values += [1.0, *[-1.0] * len(back)]
            self.add_row(-np.inf, 1.0, columns, values)

    def _add_chains(self) -> None:
        """Add rows by which what is recomputed starts from what is there, neither to be made again itself nor moved.

        Else all blocks would be made again at once, for the first of them. Of a class that leads from block to block
        nothing is recomputed, as it does not say which of them are.
        """
        class_of = {index: number for number, each in enumerate(self.classes) for index in each.members}
        of_storage: dict[int, list[int]] = {}
        for index, candidate in enumerate(self.problem.candidates):
            if Option.RECOMPUTE in candidate.options:
                of_storage.setdefault(candidate.gap.storage, []).append(index)
        pairs: dict[tuple[int, int], None] = {}
        for index, candidate in enumerate(self.problem.candidates):
            again = _recompute_position(candidate)
            for source in (s for storage in candidate.sources for s in of_storage.get(storage, ())):
                other = self.problem.candidates[source]
                if other.gap.start < again < _recompute_position(other):
                    pairs[class_of[index], class_of[source]] = None
        for one, other in pairs:
            column, source = self.again[one], self.again[other]
            away = [moves.share for moves in self.flows[other].values()]
            if one == other and column is not None:
                self.upper[column] = 0.0
            elif column is not None and source is not None:
                self.add_row(-np.inf, 1.0, [column, source, *away], [1.0] * (2 + len(away)))

    def _is_short(self, candidate: Candidate, rates: tuple[float, float]) -> bool:
        """Whether a gap is over before what leaves in it could be back.

        A move over it frees nothing, but would count as the write that later gaps of the same value need.

        Args:
            rates: Bytes a second read, and written.
        """
        gap = candidate.gap
        windows = int(self.window[gap.end]) - int(self.window[gap.start]) + self.windows * gap.wraps
        if windows > 1:
            return False
        moving_s = candidate.size_bytes / rates[0] + (candidate.size_bytes / rates[1] if candidate.version else 0.0)
        passing_s = float(self.begun_s[gap.end] - self.begun_s[gap.start + 1]) + float(self.begun_s[-1]) * gap.wraps
        return windows == 0 or passing_s < moving_s

    @cached_property
    def initial_values(self) -> np.ndarray | None:
        """Values of all columns before anything is settled; None where the flow does not fit."""
        return self.optimum()

    @property
    def seconds(self) -> float:
        """Seconds of the step before anything is settled; infinite where the flow does not fit."""
        return float("inf") if self.initial_values is None else float(self.initial_values[: self.windows].sum())

    def solved(self, extra: np.ndarray | None = None) -> PacedResidency | None:
        """Solve and settle; None where the flow does not fit.

        Args:
            extra: [position]: bytes to reserve, from the solution before on; None solves what ``first`` is of.
        """
        first = self.initial_values if extra is None else self.reserving(extra)
        if first is None:
            return None
        values = self._settle(first)
        computing_s = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
        for again, each in zip(self.again, self.classes, strict=True):
            if again is not None:
                computing_s[int(self.window[each.leader.gap.end])] += values[again] * each.again_s
        seconds = np.maximum(values[: self.windows], computing_s)
        pace = np.where(computing_s > 0, seconds / np.where(computing_s > 0, computing_s, 1.0), 1.0)
        return PacedResidency(self.relaxed(values), tuple(pace[self.window].tolist()), self._folding())

    def reserving(self, extra: np.ndarray) -> np.ndarray | None:
        """Solve with nothing settled and bytes reserved; values of all columns, or None."""
        self.room = self.whole_room - extra
        for column in self.settled:
            self.model.changeColBounds(column, 0.0, self.upper[column])
        self.settled.clear()
        for position, (row, covered) in self.memory.items():
            self.model.changeRowBounds(row, -np.inf, (float(self.room[position]) - covered) / 1e6)
        return self.optimum()

    def _folding(self) -> Folding:
        class_of = np.zeros(len(self.problem.candidates), dtype=np.int64)
        order = np.zeros(len(self.problem.candidates), dtype=np.int64)
        for number, each in enumerate(self.classes):
            if Option.KEEP not in each.leader.options:
                continue
            class_of[list(each.members)], order[list(each.members)] = number, np.arange(len(each.members))
        return seated(class_of, order)

    def add_times(self) -> None:
        """Add rows of seconds, with what runs again in the window of the use that it serves."""
        compute = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
        terms: list[tuple[list[int], list[float]]] = [([window], [1.0]) for window in range(self.windows)]
        for again, each in zip(self.again, self.classes, strict=True):
            if again is not None:
                columns, values = terms[int(self.window[each.leader.gap.end])]
                columns.append(again)
                values.append(-each.again_s)
        self._add_slowdowns(terms)
        for (columns, values), seconds in zip(terms, compute.tolist(), strict=True):
            self.add_row(seconds, np.inf, columns, values)
        self.add_transfers()
        self.add_host()

    def _add_slowdowns(self, terms: Sequence[tuple[list[int], list[float]]]) -> None:
        """Add what transfers take from computing beside them, by the bytes and the latency of each move.

        Args:
            terms: Columns and values of the row of each window's seconds.
        """
        seconds = self.problem.op_seconds
        of_all, of_products = (
            np.bincount(self.window, weights=each, minlength=self.windows)
            for each in (seconds, seconds * self.products)
        )
        share = of_products / np.maximum(of_all, _TINY)  # of products in each window
        for tier in self.problem.tiers:
            rates = {True: tier.read_bytes_per_s, False: tier.write_bytes_per_s}
            ways = {
                read: (tier.slowdown(read=read, product=False), tier.slowdown(read=read, product=True))
                for read in rates
            }
            preparing_s = tier.latency_s * tier.latency_slowdown
            if not (preparing_s or any(map(any, ways.values()))):
                continue
            for each, moves in self.flows_to(tier):
                for read, first, columns in ((True, moves.first_read, moves.reads), (False, moves.first, moves.writes)):
                    for step, column in enumerate(columns):
                        window = (first + step) % self.windows
                        other, product = ways[read]
                        slower = (other + share[window] * (product - other)) * each.size_bytes / rates[read]
                        if of_all[window]:
                            terms[window][0].append(column)
                            terms[window][1].append(-slower - preparing_s * len(each.members))

    def stretches(self, number: int) -> Iterator[Stretch]:
        """Yield ranges of positions inside gaps, cut where one begins, ends, or has what is recomputed back."""
        each, again, gap = self.classes[number], self.again[number], self.classes[number].leader.gap
        first, last = int(self.window[gap.start]), int(self.window[gap.end]) + self.windows * gap.wraps
        recompute_windows = {
            int(self.window[at]) for span in each.leader.resident_ranges.get(Option.RECOMPUTE, ()) for at in span
        }
        candidates = [self.candidates[index] for index in each.members]
        whole = each.leader.size_bytes > self.most_fluid
        for window in range(first, last + 1):
            same_windows = window not in (first, last, *recompute_windows)  # all members are there all the time
            parts = self._parts(window, whole=whole)
            for (begin, end, *_), (columns, factors) in zip(parts, self._terms(number, window, parts), strict=True):
                shown = candidates[:1] if same_windows else candidates
                for low, high, count, num_recomputed in counted(shown, begin, end, window >= self.windows):
                    size = each.size_bytes if same_windows else count * each.leader.size_bytes
                    if again is None or not num_recomputed:
                        yield low, high, size, columns, factors
                    else:
                        yield low, high, size, [again, *columns], [-num_recomputed / count, *factors]

    def _parts(self, window: int, *, whole: bool) -> list[_Part]:
        """List the parts of a window, or all of it as one."""
        key = window % self.windows, whole
        if key not in self._parts_of:
            positions = self.positions_of(window)
            first, last = positions or (0, -1)
            inner = [] if whole else (np.flatnonzero(np.diff(self.part[first : last + 1])) + first + 1).tolist()
            edges = [first, *inner, last + 1] if positions else []
            self._parts_of[key] = [
                (low, end - 1, float(self.ended[low - 1]) if self._is_inside(low) else 0.0, float(self.ended[end - 1]))
                for low, end in pairwise(edges)
            ]
        return self._parts_of[key]

    def _terms(self, number: int, window: int, parts: Sequence[_Part]) -> Iterator[tuple[list[int], list[float]]]:
        """Yield columns and factors by which its moves make a class's share smaller, for each part of a window."""
        whole = self.classes[number].leader.size_bytes > self.most_fluid
        columns: list[int] = []
        moving: list[tuple[int, int, float, int, float]] = []
        for moves in self.flows[number].values():
            read, left = window - moves.first_read, max(0, window - moves.first)
            columns += [moves.share, *moves.reads[: max(0, read + 1)], *moves.writes[left:]]
            coming, leaving = 0 <= read < len(moves.reads), len(moves.writes) - left
            since, until = 1.0, 1.0
            if not whole and leaving > 0:
                since = self._begun(number) if window == moves.first else 0.0
            if not whole and read == len(moves.reads) - 1:
                until = self._elapsed_share(number)
            moving.append((max(0, read), int(coming), until, leaving, since))
        for _, _, begun, ended in parts:
            factors: list[float] = []
            for come, coming, until, leaving, since in moving:
                factors += [-1.0, *[1.0] * come]
                if coming:
                    factors.append(1.0 if whole else min(1.0, ended / max(until, _TINY)))
                if leaving > 0:
                    elapsed = 0.0 if whole else max(0.0, begun - since) / max(1.0 - since, _TINY)
                    factors += [1.0 - elapsed, *[1.0] * (leaving - 1)]
            yield columns, factors

    def _begun(self, number: int) -> float:
        """Share of their first window that has passed when the gaps of a class begin, in the mean."""
        members = self.classes[number].members
        return float(np.mean([self.ended[self.candidates[index].gap.start] for index in members]))

    def _elapsed_share(self, number: int) -> float:
        """Share of their last window that has passed when the gaps of a class end, in the mean."""
        ends = [self.candidates[index].gap.end for index in self.classes[number].members]
        return float(np.mean([self.ended[end - 1] if self._is_inside(end) else 1.0 for end in ends]))

    def _is_inside(self, position: int) -> bool:
        """Whether a position is not the first of its window."""
        return position > 0 and self.window[position] == self.window[position - 1]

    def _settle(self, values: np.ndarray) -> np.ndarray:
        """Make the choices of the largest split classes whole, as long as a solution is left."""
        fixed: set[int] = set()
        for _ in range(_SETTLED):
            split = [
                (-each.leader.size_bytes, number)
                for number, each in enumerate(self.classes)
                if number not in fixed and self._is_split(number, values)
            ]
            if not split:
                break
            chosen = [number for _, number in sorted(split)[: (len(split) + 1) // 2]]
            for number in chosen:
                self._fix(number, values)
            fixed.update(chosen)
            settled = self.optimum()
            if settled is None:
                break
            values = settled
        return values

    def _is_split(self, number: int, values: np.ndarray) -> bool:
        """Whether a class's shares are not of whole storages."""
        count = len(self.classes[number].members)
        return any(abs(count * share - round(count * share)) > _SPLIT for share in self.shares(number, values).values())

    def _fix(self, number: int, values: np.ndarray) -> None:
        """Give each option of a class whole storages: those left over go to the largest remainders."""
        count, shares = len(self.classes[number].members), self.shares(number, values)
        whole = {option: int(count * share + _SPLIT) for option, share in shares.items()}
        left = sorted(shares, key=lambda option: whole[option] - count * shares[option])
        for option in left[: count - sum(whole.values())]:
            whole[option] += 1
        columns = {option: flow.share for option, flow in self.flows[number].items()}
        if (again := self.again[number]) is not None:
            columns[Option.RECOMPUTE] = again
        for option, column in columns.items():
            self.model.changeColBounds(column, whole[option] / count, whole[option] / count)
            self.settled.append(column)


def _weights_read_again(problem: ResidencyProblem) -> Iterator[tuple[int, int, int]]:
    """Yield gaps that may be recomputed, gaps of weights that this needs back inside them, and where it does."""
    of_storage: dict[int, list[int]] = {}
    for index, candidate in enumerate(problem.candidates):
        of_storage.setdefault(candidate.gap.storage, []).append(index)
    for index, candidate in enumerate(problem.candidates):
        back = _recompute_position(candidate)
        for other in (each for storage in candidate.needs for each in of_storage.get(storage, ())):
            gap = problem.candidates[other].gap
            if not gap.wraps and gap.start < back < gap.end:
                yield index, other, back


def _first_need_by_gap(problem: ResidencyProblem) -> dict[tuple[int, int], int]:
    """First position inside each gap of a weight at which a recomputation may need it, by storage and gap's start."""
    wanted: dict[tuple[int, int], int] = {}
    for _, other, back in _weights_read_again(problem):
        gap = problem.candidates[other].gap
        wanted[gap.storage, gap.start] = min(back, wanted.get((gap.storage, gap.start), back))
    return wanted


def _recompute_position(candidate: Candidate) -> int:
    """Position at which a storage is made again where it is recomputed."""
    ranges = candidate.resident_ranges.get(Option.RECOMPUTE, ())
    return ranges[0][0] if ranges else candidate.gap.end


def _ended(problem: ResidencyProblem, windows: int) -> np.ndarray:
    """Share of its window's seconds that has passed when each position ends; an array of [position]."""
    window = cut_windows(problem, windows)
    ended = np.cumsum(problem.op_seconds)
    last = np.flatnonzero(np.diff(window, append=windows))
    ends = ended[last]
    begins = np.concatenate([[0.0], ends[:-1]])
    number = np.searchsorted(last, np.arange(problem.num_ops))
    return (ended - begins[number]) / np.maximum((ends - begins)[number], _TINY)


@dataclass(frozen=True)
class Pace:
    """Settings of a paced flow.

    Attributes:
        host_share, lower_tier_share: Shares of the rates of the host's memory, and of what lies behind it.
        windows, parts: Windows of the step, and parts of each in which memory is counted.
        reserve: Share of the arena that it leaves.
        across: Whether recomputation may lead from block to block.
    """

    host_share: float
    lower_tier_share: float
    windows: int
    parts: int
    reserve: float
    across: bool = True


_PACES = (
    Pace(0.95, 0.7, 16, 4, 0.05),
    Pace(0.95, 0.7, 16, 4, 0.05, across=False),
    Pace(0.9, 0.5, 32, 1, 0.05),
)
#: Finer windows for where those have no solution, as what moves in one of their windows needs more than there is.
_FINE = (Pace(0.95, 0.7, 64, 1, 0.0), Pace(0.95, 0.7, 128, 1, 0.0))
#: Operations of a step for which finer windows are tried. A Llama of 70 billion parameters (9,166, RTX 4090) took 40 s
#: of a processor in them, beside other work.
_FINE_OPS = 6000
#: The same of a machine without memory of a host as a tier, such as a CPU with a disk: what its one tier takes from
#: computing is in the flow, and windows are finer, as weights and states take their turns in a few milliseconds.
_PACES_ALONE = (
    Pace(1.0, 1.0, 32, 4, 0.03),
    Pace(1.0, 1.0, 64, 2, 0.02),
    Pace(0.9, 0.9, 32, 4, 0.03),
)
_FINE_ALONE = (Pace(1.0, 1.0, 64, 1, 0.0), Pace(1.0, 1.0, 128, 1, 0.0))
#: How often a flow is solved again with what its lowering missed reserved, and operations lowered for one step, but for
#: the first plan.
_REPAIRS, _LOWERED = 4, 24_000
#: Iterations of the simplex method for the flows of one step, once there is a plan.
_ITERATIONS, _NO_LIMIT = 40_000, float("inf")
#: How many times slower than its flow says the step of the fastest plan is taken to be in turn, and the most operations
#: of a step for which that is tried.
_OTHER_PACES, _REPACED_OPS = (1.2, 0.8), 2000
#: Share by which a flow may take longer than the least before it, to be planned.
_PACED_REACH = 0.03
#: Share of the bound from which on a plan is worth paced flows.
_FAR = 0.03


def with_paced(found: Found, bound_s: float, most: int = len(_PACES)) -> Found:
    """Try paced flows where a plan is far from its bound; returns the fastest plan.

    Args:
        bound_s: Seconds that no plan is below: near it there is little to gain.
        most: Most flows that are tried.
    """
    if not is_paced(found.step) or found.step_s <= (1 + _FAR) * bound_s:
        return found
    made = best_paced(found.step, below_s=found.step_s, most=most)
    return found if made is None or made.step_s >= found.step_s else made


def is_paced(step: StepProblem) -> bool:
    """Whether paced flows are of use for a step: it moves, is large, and decides where its values are between steps."""
    return len(step.graph.ops) > SMALL_OPS and step.lives.homes is None and bool(step.machine.tiers)


def best_paced(
    step: StepProblem,
    first: tuple[Pace, PacedFlow] | None = None,
    below_s: float = float("inf"),
    most: int = len(_PACES),
    near_s: float = float("inf"),
) -> Found | None:
    """Make the fastest plan of paced flows, also with transfers scheduled for a faster or slower step.

    Args:
        first: First flow of the step where it is known.
        below_s: Seconds that a plan has to be below to be of use.
        most: Most flows that are tried.
        near_s: Seconds that the first flow's plan has to be below for more to be tried: what follows gains little.
    """
    best: Found | None = None
    for made in paced(step, first, below_s, most):
        best = made if best is None or made.step_s < best.step_s else best
        if best.step_s > near_s:
            return best
    if best is None or len(step.graph.ops) > _REPACED_OPS:
        return best
    step, again = best.step, [best]
    for times in _OTHER_PACES:
        pace = tuple(max(1.0, times * each) for each in best.pace)
        program = step.lower(best.choices, pace=pace).program
        if program is not None:
            again.append(step.retimed(Found(best.choices, program, step, pace=pace), 2 * MOST_RETIMED))
    return min(again, key=lambda made: made.step_s)


def paced(
    step: StepProblem,
    first: tuple[Pace, PacedFlow] | None = None,
    below_s: float = float("inf"),
    most: int = len(_PACES),
) -> Iterator[Found]:
    """Yield the plans of paced flows, each scheduled again by its simulated times.

    A flow that takes longer than another by more than plans of flows differ is not planned. Once there is a plan, the
    work on linear programs is limited.

    Args:
        first: First flow of the step where it is known.
        below_s: Seconds that a plan has to be below to be of use.
        most: Most flows that are tried.
    """
    left, most_s = max(2, _LOWERED // len(step.graph.ops)), below_s
    iterations, planned = 0, False
    first = first or first_flow(step)
    paces, fine = _paces_of(step)
    others = [pace for pace in (*(fine if first[0] in fine else ()), *paces[1:]) if pace != first[0]]
    for number, pace in enumerate((first[0], *others)[:most]):
        if left <= 0 or (planned and iterations >= _ITERATIONS):
            return
        if planned and pace in fine:  # within 1% of the other one, and several times the work
            continue
        flow = _flow(step, pace) if number else first[1]
        flow_s = flow.seconds
        if flow_s == float("inf") or flow_s > most_s:
            continue
        most_s = min(most_s, (1 + _PACED_REACH) * flow_s)
        found, tried = _plan(step, flow, _ITERATIONS - iterations if planned else _NO_LIMIT)
        iterations += flow.iterations
        left -= tried
        if found is not None:
            planned = True
            best = found.step.retimed(found, 2 * MOST_RETIMED)
            left -= best.retimed + 1
            yield best


def first_flow(step: StepProblem) -> tuple[Pace, PacedFlow]:
    """Build the first flow that is planned from, with finer windows where it does not fit with coarse ones."""
    paces, fine = _paces_of(step)
    pace, flow = paces[0], _flow(step, paces[0])
    for finer in fine:
        if flow.seconds < float("inf"):
            break
        pace, flow = finer, _flow(step, finer)
    return pace, flow


def _paces_of(step: StepProblem) -> tuple[tuple[Pace, ...], tuple[Pace, ...]]:
    """Settings of the flows of a step, and of those with finer windows."""
    paces, fine = (_PACES, _FINE) if step.machine.host_tier else (_PACES_ALONE, _FINE_ALONE)
    return paces, fine if len(step.graph.ops) <= _FINE_OPS else ()


def _flow(step: StepProblem, pace: Pace) -> PacedFlow:
    """Build the flow of a step."""
    tiers = tuple(
        slower(tier, pace.host_share if tier.host_computes else pace.lower_tier_share) for tier in step.machine.tiers
    )
    slow = dataclasses.replace(step, machine=dataclasses.replace(step.machine, tiers=tiers))
    problem = residency_problem(slow, across=pace.across)
    problem = dataclasses.replace(problem, folding=None)
    products = np.array([op.kind in PRODUCT_KINDS for op in step.graph.ops], dtype=bool)
    return PacedFlow(problem, int(step.arena_bytes * (1 - pace.reserve)), pace.windows, pace.parts, products)


def _plan(step: StepProblem, flow: PacedFlow, iterations: float) -> tuple[Found | None, int]:
    """Settle a flow and lower it, with what was missing reserved next time.

    Args:
        flow: Flow with nothing reserved.
        iterations: Iterations of the simplex method after which it is not solved again.

    Returns:
        The plan, None where there is none, and how often it lowered.
    """
    step = dataclasses.replace(step, both_ways=True)  # a flow keeps directions of a tier busy side by side
    min_reserve = extra = np.zeros(len(step.graph.ops), dtype=np.int64)
    tried, fitting = 0, list[Found]()
    for attempt in range(_REPAIRS):
        if attempt and flow.iterations >= iterations:
            break
        solved = flow.solved(extra if attempt else None)
        if solved is None:  # more was missing than there is
            extra = (min_reserve + extra) // 2
            continue
        choices = rounded(dataclasses.replace(flow.problem, folding=solved.folding), solved.relaxed)
        made, tried = step.lower(choices, pace=solved.pace), tried + 1
        if made.program is not None:
            fitting.append(Found(choices, made.program, step, pace=solved.pace))
            break
        if base_profile(step.graph, made.emission).max() <= step.arena_bytes:
            sparing = dataclasses.replace(step, sparing=True)
            spared, tried = sparing.lower(choices, pace=solved.pace), tried + 1
            if spared.program is not None:
                fitting.append(Found(choices, spared.program, sparing, pace=solved.pace))
            else:  # what is missing without room for transfers: to reserve more makes all that is planned slower
                made = spared
        min_reserve, extra = extra, extra + missing_bytes(step, made)
    return min(fitting, key=lambda found: found.step_s, default=None), tried
