"""A bound on every plan of a large step: weak duality instead of the whole linear program.

Any prices >= 0 of memory at each position, of the time rows (adding up to at most 1) and of a tier's capacity bound the
relaxation of ``planner.relaxation`` from below: with them each gap takes its cheapest option by itself,

    bound = p_compute sum c - sum_t p_t room_t - sum_tier p_tier capacity + sum_g min_o price(g, o),

where the price of a write, and of a place in a tier, is split over the gaps it serves (``_split``; any split will do).
Good prices are the dual values of the folded program. A folded memory row stands for the layers around it, so its price
is also tried spread over more positions, and the best bound counts.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from lading.ir.plan import Option
from lading.planner.linear import CandidateArrays, Relaxation
from lading.planner.relaxation import Folding, ResidencyProblem

#: Shares of the step over which a memory row's price is spread.
_SPREADS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.04)


def dual_bound_s(problem: ResidencyProblem, folding: Folding, budget_bytes: int) -> float:
    """No plan within the budget takes less, as modelled; 0 where there is none.

    Args:
        problem: Built with ``every``.
        folding: Of its candidates; only the prices come from it.
    """
    folded = Relaxation(dataclasses.replace(problem, folding=folding))
    if folded.solve(budget_bytes) is None:
        return 0.0
    table = CandidateArrays.of(dataclasses.replace(problem, folding=None), True)
    duals = folded.duals()
    room = (budget_bytes - problem.base) / 1e6
    return max(_value(problem, table, folded, duals, _spread(folded, duals, share), room) for share in _SPREADS)


def _spread(folded: Relaxation, duals: np.ndarray, share: float) -> np.ndarray:
    """Price of a MB at each position."""
    prices = np.zeros(folded.problem.num_ops)
    half = int(share * len(prices))
    for row, position in enumerate(folded.positions, folded.first_memory_row):
        here = slice(max(0, position - half), position + half + 1)
        prices[here] += max(0.0, -float(duals[row])) / len(prices[here])
    return prices


def _value(
    problem: ResidencyProblem,
    table: CandidateArrays,
    folded: Relaxation,
    duals: np.ndarray,
    memory: np.ndarray,
    room: np.ndarray,
) -> float:
    prices = {row: max(0.0, float(duals[row])) for _, _, row in folded.time_rows}
    scale = 1.0 / max(1.0, sum(prices.values()))
    memory = memory * scale
    until = np.concatenate([[0.0], np.cumsum(memory)])
    who, first, last = table.held[Option.KEEP]
    paid = (until[last + 1] - until[first]) * table.size[who] / 1e6
    least = np.bincount(who, weights=paid, minlength=len(table.size))
    compute = sum(price * scale for row, price in prices.items() if row == folded.time_rows[0][2])
    if Option.RECOMPUTE in table.has:
        again = np.where(table.has[Option.RECOMPUTE], compute * table.again_s, np.inf)
        least = np.minimum(least, again)
    total = compute * problem.op_seconds.sum() - memory @ room
    best = least
    for option in table.has.keys() - {Option.RECOMPUTE}:
        limits = [(limit, prices[row] * scale) for found, limit, row in folded.time_rows if found == option]
        read = sum(price * (limit[0] + table.size * limit[1]) for limit, price in limits)
        write = sum(price * (limit[2] + table.size * limit[3]) for limit, price in limits)
        saved = np.where(table.has[option], np.maximum(least - read, 0.0), 0.0)
        price = read + _split(np.where(table.version >= 0, write, 0.0), table.version, saved)
        if option in folded.capacity_rows:
            held = scale * max(0.0, -float(duals[folded.capacity_rows[option]]))
            total -= held * problem.capacity_bytes[option] / 1e6
            price = price + _split(held * table.size / 1e6, table.storage, np.maximum(least - price, 0.0))
        best = np.minimum(best, np.where(table.has[option], price, np.inf))
    return float(total + best.sum())


def _split(price: np.ndarray, owner: np.ndarray, saved: np.ndarray) -> np.ndarray:
    """Each gap's part of a price that its owner pays once, in proportion to what the gap saves."""
    sums = np.bincount(owner + 1, weights=saved)[owner + 1]
    return np.where(sums > 0, price * saved / np.where(sums > 0, sums, 1.0), 0.0)
