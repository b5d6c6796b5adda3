"""Flow of a plan: what moves in which window, and how long each window takes.

``planner.fluid`` bounds all plans, so what is on its way in a window takes no place there. A plan needs that place, and
has to know when compute will wait: transfers that are scheduled as if it never did begin too late, and those scheduled
by a step that waited begin as late as in that step. So the flow is solved once more, as a plan has to take it:

    memory at t             what is read in the window of t or before takes its place from the window's begin on, and
                            what is written in it until its end                                      terms_at
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

import numpy as np

from lading.ir.plan import Option
from lading.planner.fluid import FlowProgram
from lading.planner.relaxation import Candidate, RelaxedResidency, ResidencyProblem

#: Price of moved or recomputed work that hides, against a second of step time.
_TIE = 1e-3
#: How often the largest half of the split storages is fixed.
_SETTLED = 6
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

    def __init__(self, problem: ResidencyProblem, budget_bytes: int, windows: int) -> None:
        """Collect all columns and rows but those of memory; the arguments are those of ``planner.fluid.flow``."""
        super().__init__(problem, budget_bytes, windows)
        rates = {Option(tier.name): (tier.read_bytes_per_s, tier.write_bytes_per_s) for tier in problem.tiers}
        for again, candidate, flows in zip(self.again, problem.candidates, self.flows, strict=True):
            if again is not None:
                self.costs[again] += _TIE * candidate.recompute_s
            for option, columns in flows.items():
                read, write = rates[option]
                self.costs[columns.share] += _TIE * candidate.size_bytes / read
                for column in columns.writes:
                    self.costs[column] += _TIE * candidate.size_bytes / write

    def solved(self) -> PacedResidency | None:
        """Solve and settle; None where the flow does not fit."""
        values = self.optimum()
        if values is None:
            return None
        values = self._settle(values)
        computing_s = np.bincount(self.window, weights=self.problem.op_seconds, minlength=self.windows)
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

    def terms_at(self, index: int, window: int) -> tuple[list[int], list[float]]:
        """Columns and factors by which its moves make a candidate's share smaller all through a window of its gap."""
        columns: list[int] = []
        factors: list[float] = []
        for gap_columns in self.flows[index].values():
            read = gap_columns.reads[: max(0, window - gap_columns.first_read + 1)]
            left = gap_columns.writes[max(0, window - gap_columns.first) :]
            columns += [gap_columns.share, *read, *left]
            factors += [-1.0, *[1.0] * (len(read) + len(left))]
        return columns, factors

    def parts_of(self, index: int, candidate: Candidate) -> Iterator[tuple[int, int, list[int], list[float]]]:
        """Yield ranges of positions inside a gap, cut where what is recomputed is back, with columns and factors."""
        again, held = self.again[index], candidate.held.get(Option.RECOMPUTE, ())
        for first, last, window in self.windows_of(candidate):
            columns, factors = self.terms_at(index, window)
            for begin, end, back in _cut(first, last, held):
                if again is None or back:
                    yield begin, end, columns, factors
                else:
                    yield begin, end, [again, *columns], [-1.0, *factors]

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


def _cut(first: int, last: int, held: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, bool]]:
    """Cut positions first..last by one range that is held, as (first, last, whether it is held)."""
    begin, end = held[0] if held else (last + 1, last)
    for low, high, back in ((first, min(last, begin - 1), False), (max(first, begin), min(last, end), True),
                            (max(first, end + 1), last, False)):  # fmt: skip
        if low <= high:
            yield low, high, back
