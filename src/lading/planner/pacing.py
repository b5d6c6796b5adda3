"""Flow of a plan: what moves in which window, and how long each window takes.

``planner.fluid`` bounds all plans, so what is on its way in a window takes no place there. A plan needs that place, and
has to know when compute will wait: transfers that are scheduled as if it never did begin too late, and those scheduled
by a step that waited begin as late as in that step. So the flow is solved once more, as a plan has to take it:

    memory at t             what is read in a window comes, and what is written in it leaves, evenly over the window,
                            counted by parts of it; a storage that is larger than what a part moves takes its place
                            from the window's begin on, or until its end                             _terms
    recomputation           takes the seconds of all that runs again, in the window of the use, and holds its place
                            from where the backward enters the block (``planner.relaxation``)        parts_of, add_times
    transfers               only in the last windows before a use, and the first after one            most_reads
    large storages          are moved whole or not at all: the largest half of the split ones is      _settle
                            rounded and fixed, and the rest solved again

With ``T_k`` the seconds of window k in the solution and ``c_k`` those of what it computes, ``T_k / c_k`` is the pace of
its operations: the lowering plans transfers for a step that runs so (``planner.lower``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lading.ir.plan import Option
from lading.planner.fluid import FlowProgram, GapColumns, cut_windows
from lading.planner.relaxation import Candidate, RelaxedResidency, ResidencyProblem

#: Price of moved or recomputed work that hides, against a second of step time.
_TIE = 1e-3
#: How often the largest half of the split storages is fixed.
_SETTLED = 6
_TINY = 1e-12
#: A share this near to 1 is whole.
_WHOLE = 0.999


@dataclass(frozen=True)
class PacedResidency:
    """Shares of each option, and how many times longer than its operations each position takes."""

    relaxed: RelaxedResidency
    pace: tuple[float, ...]


class PacedFlow(FlowProgram):
    """Flow as a plan has to take it, solved for one reserve of memory after another."""

    most_reads, most_writes = 8, 6

    def __init__(self, problem: ResidencyProblem, budget_bytes: int, windows: int, parts: int = 4) -> None:
        """Collect all columns and rows but those of memory; the other arguments are those of ``planner.fluid.flow``.

        Args:
            parts: Parts of a window that memory is counted in; with one, all takes its place all through a window.
        """
        self.parts, self.ended = parts, _ended(problem, windows)
        near = max((tier.read_bytes_per_s for tier in problem.tiers), default=0.0)
        part_s = float(problem.op_seconds.sum()) / windows / parts
        self.most_fluid = near * part_s if parts > 1 else 0.0
        super().__init__(problem, budget_bytes, windows)
        rates = {Option(tier.name): (tier.read_bytes_per_s, tier.write_bytes_per_s) for tier in problem.tiers}
        for again, candidate, flows in zip(self.again, problem.candidates, self.flows, strict=True):
            if again is not None:
                self.costs[again] += _TIE * candidate.recompute_s
            for option, columns in flows.items():
                read, write = rates[option]
                if self._is_short(candidate, columns, (read, write)):
                    self.upper[columns.share] = 0.0
                self.costs[columns.share] += _TIE * candidate.size_bytes / read
                for column in columns.writes:
                    self.costs[column] += _TIE * candidate.size_bytes / write

    def _is_short(self, candidate: Candidate, moves: GapColumns, rates: tuple[float, float]) -> bool:
        """Whether a gap is over before what leaves in it could be back.

        A move over it frees nothing, but would count as the write that later gaps of the same value need.

        Args:
            rates: Bytes a second read, and written.
        """
        gap, seconds = candidate.gap, self.problem.op_seconds
        if gap.wraps or moves.first_read + len(moves.reads) - 1 > moves.first + 1:
            return False
        moving_s = candidate.size_bytes / rates[0] + (candidate.size_bytes / rates[1] if moves.writes else 0.0)
        return moves.first == moves.first_read or float(seconds[gap.start + 1 : gap.end].sum()) < moving_s

    def solved(self) -> PacedResidency | None:
        """Solve and settle; None where the flow does not fit."""
        values = self.optimum()
        if values is None:
            return None
        values = self._settle(values)
        computing_s = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
        for again, candidate in zip(self.again, self.problem.candidates, strict=True):
            if again is not None:
                computing_s[int(self.window[candidate.gap.end])] += values[again] * candidate.recompute_s
        seconds = np.maximum(values[: self.windows], computing_s)
        pace = np.where(computing_s > 0, seconds / np.where(computing_s > 0, computing_s, 1.0), 1.0)
        return PacedResidency(self.relaxed(values), tuple(pace[self.window].tolist()))

    def add_times(self) -> None:
        """Add rows of seconds, with what runs again in the window of the use that it serves."""
        compute = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
        terms: list[tuple[list[int], list[float]]] = [([window], [1.0]) for window in range(self.windows)]
        for again, candidate in zip(self.again, self.problem.candidates, strict=True):
            if again is not None:
                columns, values = terms[int(self.window[candidate.gap.end])]
                columns.append(again)
                values.append(-candidate.recompute_s)
        for (columns, values), seconds in zip(terms, compute.tolist(), strict=True):
            self.add_row(seconds, np.inf, columns, values)
        self.add_transfers()

    def parts_of(self, index: int, candidate: Candidate) -> Iterator[tuple[int, int, list[int], list[float]]]:
        """Yield ranges of positions inside a gap, cut where what is recomputed is back, with columns and factors."""
        again, held = self.again[index], candidate.held.get(Option.RECOMPUTE, ())
        for low, high, window in self.windows_of(candidate):
            for first, last in self._parts(low, high):
                columns, factors = self._terms(index, candidate, window, (first, last))
                for begin, end, back in _cut(first, last, held):
                    if again is None or back:
                        yield begin, end, columns, factors
                    else:
                        yield begin, end, [again, *columns], [-1.0, *factors]

    def _parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """Cut positions of one window where a part of it ends."""
        part = np.minimum((self.ended[first : last + 1] * self.parts).astype(int), self.parts - 1)
        cuts = [first, *(np.flatnonzero(np.diff(part)) + first + 1).tolist(), last + 1]
        return [(begin, end - 1) for begin, end in pairwise(cuts)]

    def _terms(
        self, index: int, candidate: Candidate, window: int, inside: tuple[int, int]
    ) -> tuple[list[int], list[float]]:
        """Columns and factors by which its moves make a candidate's share smaller at positions of one window.

        Args:
            inside: The first and the last of the positions.
        """
        columns: list[int] = []
        factors: list[float] = []
        gap, whole = candidate.gap, candidate.size_bytes > self.most_fluid
        begun = float(self.ended[inside[0] - 1]) if inside[0] and self._is_inside(inside[0]) else 0.0
        for moves in self.flows[index].values():
            read, left = window - moves.first_read, max(0, window - moves.first)
            since = float(self.ended[gap.start]) if window == moves.first else 0.0
            gone = 0.0 if whole else max(0.0, begun - since) / max(1.0 - since, _TINY)
            until = float(self.ended[gap.end - 1]) if read == len(moves.reads) - 1 and self._is_inside(gap.end) else 1.0
            come = 1.0 if whole else min(1.0, float(self.ended[inside[1]]) / max(until, _TINY))
            columns += [moves.share, *moves.reads[: max(0, read + 1)], *moves.writes[left:]]
            factors += [-1.0, *[1.0] * max(0, read), *[come] * (0 <= read < len(moves.reads))]
            factors += [1.0 - gone] * (left < len(moves.writes)) + [1.0] * (len(moves.writes) - left - 1)
        return columns, factors

    def _is_inside(self, position: int) -> bool:
        """Whether a position is not the first of its window."""
        return position > 0 and self.window[position] == self.window[position - 1]

    def _settle(self, values: np.ndarray) -> np.ndarray:
        """Make the choices of the largest split storages whole, as long as a solution is left."""
        fixed: set[int] = set()
        for _ in range(_SETTLED):
            split = [
                (-candidate.size_bytes, index)
                for index, (candidate, shares) in enumerate(
                    zip(self.problem.candidates, self.relaxed(values).shares, strict=True)
                )
                if index not in fixed and max(shares.values()) < _WHOLE
            ]
            if not split:
                break
            chosen = [index for _, index in sorted(split)[: (len(split) + 1) // 2]]
            self._fix(chosen, values)
            fixed.update(chosen)
            settled = self.optimum()
            if settled is None:
                break
            values = settled
        return values

    def _fix(self, indices: list[int], values: np.ndarray) -> None:
        """Give each candidate all of its largest share."""
        shares = self.relaxed(values).shares
        for index in indices:
            largest = max(shares[index], key=lambda option, index=index: shares[index][option])
            columns = {option: flow.share for option, flow in self.flows[index].items()}
            if (again := self.again[index]) is not None:
                columns[Option.RECOMPUTE] = again
            for option, column in columns.items():
                whole = float(option == largest)
                self.model.changeColBounds(column, whole, whole)


def _ended(problem: ResidencyProblem, windows: int) -> np.ndarray:
    """Share of its window's seconds that has passed when each position ends; an array of [position]."""
    window = cut_windows(problem, windows)
    ended = np.cumsum(problem.op_seconds)
    last = np.flatnonzero(np.diff(window, append=windows))
    ends = ended[last]
    begins = np.concatenate([[0.0], ends[:-1]])
    number = np.searchsorted(last, np.arange(problem.num_ops))
    return (ended - begins[number]) / np.maximum((ends - begins)[number], _TINY)


def _cut(first: int, last: int, held: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, bool]]:
    """Cut positions first..last by one range that is held, as (first, last, whether it is held)."""
    begin, end = held[0] if held else (last + 1, last)
    for low, high, back in ((first, min(last, begin - 1), False), (max(first, begin), min(last, end), True),
                            (max(first, end + 1), last, False)):  # fmt: skip
        if low <= high:
            yield low, high, back
