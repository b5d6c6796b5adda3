"""A linear program, row by row, solved by HiGHS; times are scaled to the order of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lading.errors import SimulationError


@dataclass(frozen=True)
class Solution:
    """What came of a program.

    Attributes:
        bound: No solution has a lower objective.
    """

    values: np.ndarray
    bound: float


#: Of a search: how near to its bound a solution ends it, and HiGHS's share of work for finding solutions, which is left
#: to the local search.
_NEAR, _HEURISTICS = 0.01, 0.01


class LinearProgram:
    """Columns in [0, upper], rows between a low and a high, least cost."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._low: list[float] = []
        self._high: list[float] = []
        self._starts: list[int] = []
        self._index: list[int] = []
        self._value: list[float] = []

    def columns(self, count: int, *, cost: float = 0.0, upper: float = np.inf, whole: bool = False) -> np.ndarray:
        """So many new columns; returns their numbers. ``whole``: integers, where they are asked for."""
        first = len(self._costs)
        self._costs += [cost] * count
        self._upper += [upper] * count
        self._whole += [whole] * count
        return np.arange(first, first + count)

    def row(self, terms: Sequence[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf) -> None:
        """A new row: (column, factor) terms; those of one column add up."""
        sums: dict[int, float] = {}
        for column, factor in terms:
            sums[int(column)] = sums.get(int(column), 0.0) + factor
        self._starts.append(len(self._index))
        self._index += sums.keys()
        self._value += sums.values()
        self._low.append(low)
        self._high.append(high)

    def solve(self, *, nodes: int = 0) -> Solution:
        """The optimum; with ``nodes``, of the program with its whole columns, after at most so many nodes of a search.

        Raises:
            SimulationError: HiGHS finds no solution.
        """
        import highspy

        model = highspy.Highs()
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 1)
        none_i, none_f = np.empty(0, np.int32), np.empty(0)
        count = len(self._costs)
        upper = np.minimum(np.array(self._upper), highspy.kHighsInf)
        model.addCols(count, np.array(self._costs), np.zeros(count), upper, 0, none_i, none_i, none_f)
        model.addRows(
            len(self._low), np.array(self._low), np.array(self._high), len(self._index),
            np.array(self._starts, np.int32), np.array(self._index, np.int32), np.array(self._value),
        )  # fmt: skip
        if nodes:
            whole = np.flatnonzero(self._whole).astype(np.int32)
            model.changeColsIntegrality(len(whole), whole, np.full(len(whole), highspy.HighsVarType.kInteger))
            model.setOptionValue("mip_max_nodes", nodes)
            model.setOptionValue("mip_rel_gap", _NEAR)
            model.setOptionValue("mip_heuristic_effort", _HEURISTICS)
        model.run()
        status, info = model.getModelStatus(), model.getInfo()
        values = np.array(model.getSolution().col_value)
        if nodes and len(values) == count and np.isfinite(info.mip_dual_bound):
            return Solution(values, info.mip_dual_bound)
        if status != highspy.HighsModelStatus.kOptimal:
            raise SimulationError(
                f"HiGHS finds no solution of the placement's program: {model.modelStatusToString(status)}"
            )
        return Solution(values, info.objective_function_value)
