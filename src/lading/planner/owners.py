"""Owners: which rank computes which whole matrix of an optimizer that needs whole matrices.

[Note: the problem]
Matrices i = 1..n take c_i seconds each and keep m_i bytes with their owner; there are R equal ranks. Choose an owner
o(i), or for a matrix whose products can be shared a gang of k ranks that work on it at the same time for c_i(k)
seconds each, to minimise the makespan

    max over r of  sum of c_i(k_i) over the i that r works on  (plus what r waits for the rest of a gang)     `Loads`
    subject to     sum of m_i over the i that r owns <= the cap, for each r                                   `Loads`

No assignment of whole matrices takes less than

    max( sum c_i / R,  max c_i,  c_{kR+1} + ... + c_{kR-k+1} for k >= 1 )     with c sorted down              `bound_s`

since among the kR+1 largest some rank has k+1, which are no shorter than the k+1 shortest of them. Where matrices can
be shared, T is too short if R T is less than the sum over i of the least k c_i(k) with c_i(k) <= T (`_shared_bound_s`).

Found by largest-first and by fitting into bins of a bisected size (`fill_largest_first`, `_multifit`), each improved by
moves and swaps away from the fullest rank (`_exchange`). Graham, doi:10.1137/0117039, and Coffman, Garey and Johnson,
doi:10.1137/0207001, bound the first two. Where that is not at the bound and matrices are of few kinds, what a rank may
own is listed: it gives the shortest assignment and proves it, and gangs (``lading.cost.patterns``).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lading.catalog.load import load_machine
from lading.cost.matrix_updates import direction_s, precision_of, shared_s
from lading.cost.patterns import GANGS, MOST_KINDS, Kind, Packing, shortest, shortest_shared
from lading.errors import ConfigError, LadingError
from lading.ir.machine import Machine
from lading.ir.routes import Moves
from lading.optim.rule import MatrixRule
from lading.units import format_bytes, format_seconds

#: Better than this share of the makespan is better.
_EPSILON = 1e-12
#: What is this near to a bound is not searched on, and what sharing saves has to be as much.
_NEAR = 1e-3


class OwnersInfeasible(LadingError):
    """Raised where whole states do not fit the ranks."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Matrix to be owned.

    Attributes:
        seconds: Seconds of its direction on one rank.
        elements: Number of elements, for policies that count them.
        layer: Layer of the model, from 0.
        state_bytes: Bytes that lie whole with its owner.
        turn: Number of the update, of those between two dues (roots, bases), at which it is due.
        shared_s: Seconds on each of 2, 4, 8, 16 ranks that share it; empty where it cannot be shared.
    """

    name: str
    seconds: float
    elements: int
    layer: int = 0
    state_bytes: int = 0
    turn: int = 0
    shared_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Owners:
    """Assignment of matrices to ranks.

    Attributes:
        ranks: Owner of each matrix, as given, or the gang whose first owns it.
        loads_s: Seconds of work of each rank, waiting for gangs included.
        bound_s: Seconds that no assignment is below.
        state_bytes: Bytes of whole states on each rank.
    """

    policy: str
    ranks: tuple[tuple[int, ...], ...]
    loads_s: tuple[float, ...]
    bound_s: float
    state_bytes: tuple[int, ...] = ()

    @property
    def makespan_s(self) -> float:
        """Seconds of the fullest rank."""
        return max(self.loads_s)

    @property
    def load_ratio(self) -> float:
        """Seconds of the fullest rank over the mean."""
        return self.makespan_s * len(self.loads_s) / sum(self.loads_s)

    @property
    def gap(self) -> float:
        """Share of the bound by which the fullest rank is above it."""
        return max(0.0, self.makespan_s / self.bound_s - 1)


@dataclass
class Loads:
    """Assignment in the making: seconds and bytes of whole state of each rank."""

    ranks: int
    cap_bytes: int | None
    seconds: np.ndarray = field(init=False)
    state_bytes: np.ndarray = field(init=False)
    owner: dict[int, tuple[int, ...]] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        self.seconds, self.state_bytes = np.zeros(self.ranks), np.zeros(self.ranks, dtype=np.int64)

    def room(self, rank: int, matrix: Matrix) -> bool:
        """Whether a matrix's state fits on a rank."""
        return self.cap_bytes is None or self.state_bytes[rank] + matrix.state_bytes <= self.cap_bytes

    def assign_matrix(self, number: int, matrix: Matrix, gang: tuple[int, ...], seconds: float) -> None:
        """Give a matrix to a gang, which begins when all of it are free."""
        self.owner[number] = gang
        if len(gang) == 1:
            self.seconds[gang[0]] += seconds
        else:
            self.seconds[list(gang)] = self.seconds[list(gang)].max() + seconds
        self.state_bytes[gang[0]] += matrix.state_bytes


def assign(matrices: Sequence[Matrix], ranks: int, *, cap_bytes: int | None = None, share: bool = True) -> Owners:
    """Assign owners by the best of all ways here ([Note: the problem]).

    Args:
        ranks: Number of ranks.
        cap_bytes: Most whole state on one rank.
        share: Whether several ranks may work on one matrix that says what that takes.
    Raises:
        ConfigError: no ranks, or no matrices.
        OwnersInfeasible: whole states do not fit; says what the cap would have to be.
    """
    if ranks < 1 or not matrices:
        raise ConfigError(f"owners: expected matrices and at least one rank, got {len(matrices)} and {ranks}")
    _check_cap(matrices, ranks, cap_bytes)
    bound = bound_s(matrices, ranks)
    best = _heuristic(matrices, ranks, cap_bytes, bound)
    members = _members(matrices, share)
    kinds = [Kind(*key, len(numbers)) for key, numbers in members.items()] if len(members) <= MOST_KINDS else []
    best_s = 3 * bound if best is None else float(best.seconds.max())
    if kinds and best_s > bound * (1 + _NEAR):
        bound, packing = shortest(kinds, ranks, cap_bytes, bound, best_s)
        if packing is not None:
            best = _packed(matrices, list(members.values()), packing, Loads(ranks, cap_bytes))
            best_s = float(best.seconds.max())
    if share and any(m.shared_s for m in matrices):
        bound = _shared_bound_s(matrices, ranks)
        packing = shortest_shared(kinds, ranks, cap_bytes, bound, best_s * (1 - _NEAR)) if kinds else None
        if packing is not None:
            best = _packed(matrices, list(members.values()), packing, Loads(ranks, cap_bytes))
    if best is None:
        raise OwnersInfeasible(
            f"owners: {sum(m.state_bytes for m in matrices)} bytes of whole state in {len(matrices)} matrices were not "
            f"fitted into {cap_bytes} bytes on each of {ranks} ranks; expected a larger cap, or smaller matrices"
        )
    return owners_of("balanced", matrices, best, bound)


def _members(matrices: Sequence[Matrix], share: bool) -> dict[tuple[float, int, tuple[float, ...]], list[int]]:
    """Group equal matrices, longest first: their numbers by (seconds, bytes of state, seconds shared)."""
    numbers_by_cost: dict[tuple[float, int, tuple[float, ...]], list[int]] = {}
    for number, matrix in enumerate(matrices):
        key = matrix.seconds, matrix.state_bytes, matrix.shared_s if share else ()
        numbers_by_cost.setdefault(key, []).append(number)
    return dict(sorted(numbers_by_cost.items(), reverse=True))


def _heuristic(matrices: Sequence[Matrix], ranks: int, cap_bytes: int | None, bound: float) -> Loads | None:
    """Fill ranks in both ways and exchange; returns the better result, None where neither fits."""
    tried: list[Loads] = []
    for build in (fill_largest_first, _multifit):
        loads = build(matrices, ranks, cap_bytes)
        if loads is not None:
            tried.append(_exchange(matrices, loads))
            if tried[-1].seconds.max() <= bound * (1 + _NEAR):
                break
    return min(tried, key=lambda loads: float(loads.seconds.max()), default=None)


def _packed(matrices: Sequence[Matrix], members: Sequence[Sequence[int]], packing: Packing, loads: Loads) -> Loads:
    """Put matrices on ranks by patterns.

    Ranks that share the same lie side by side, gangs first, in one order on all.
    """
    waiting = [list(reversed(numbers)) for numbers in members]
    first = 0
    for shared, rows in itertools.groupby(
        sorted(packing, key=lambda row: row[0].shared, reverse=True), lambda row: row[0].shared
    ):
        alone = [pattern.unshared for pattern, count in rows for _ in range(count)]
        for kind, place in shared:
            for start in range(first, first + len(alone), GANGS[place]):
                if waiting[kind]:
                    number = waiting[kind].pop()
                    gang = tuple(range(start, start + GANGS[place]))
                    loads.assign_matrix(number, matrices[number], gang, matrices[number].shared_s[place])
        for rank, counts in enumerate(alone, first):
            for kind, count in enumerate(counts):
                for number in waiting[kind][max(0, len(waiting[kind]) - count) :]:
                    loads.assign_matrix(number, matrices[number], (rank,), matrices[number].seconds)
                del waiting[kind][max(0, len(waiting[kind]) - count) :]
        first += len(alone)
    return loads


def _check_cap(matrices: Sequence[Matrix], ranks: int, cap_bytes: int | None) -> None:
    largest, mean = max(m.state_bytes for m in matrices), sum(m.state_bytes for m in matrices) / ranks
    if cap_bytes is not None and cap_bytes < max(largest, mean):
        raise OwnersInfeasible(
            f"owners: expected room for {int(max(largest, mean))} bytes of whole state on a rank, got {cap_bytes}"
        )


def owners_of(policy: str, matrices: Sequence[Matrix], loads: Loads, bound: float) -> Owners:
    owner = tuple(loads.owner[number] for number in range(len(matrices)))
    return Owners(policy, owner, tuple(loads.seconds.tolist()), bound, tuple(loads.state_bytes.tolist()))


def bound_s(matrices: Sequence[Matrix], ranks: int) -> float:
    """Lower bound in seconds over all assignments of whole matrices ([Note: the problem])."""
    alone = sorted((m.seconds for m in matrices), reverse=True)
    bound = max(sum(alone) / ranks, alone[0])
    total = np.concatenate([[0.0], np.cumsum(alone)])
    for k in range(1, (len(alone) - 1) // ranks + 1):
        last = k * ranks + 1
        bound = max(bound, float(total[last] - total[last - k - 1]))
    return bound


def _shared_bound_s(matrices: Sequence[Matrix], ranks: int) -> float:
    """Lower bound in seconds over all assignments with gangs: all work, each matrix in the gang of least work."""
    ways = Counter(tuple(zip((1, *GANGS), (m.seconds, *m.shared_s), strict=False)) for m in matrices)

    def work_s(level: float) -> float:
        return sum(count * min((k * s for k, s in way if s <= level), default=np.inf) for way, count in ways.items())

    levels = sorted({s for way in ways for _, s in way})
    needed = [(level, work_s(level) / ranks) for level in levels]
    # Work falls from level to level; between two, time as long as the work at the shorter one is enough.
    return min(max(level, work) for level, work in needed)


def fill_largest_first(matrices: Sequence[Matrix], ranks: int, cap_bytes: int | None) -> Loads | None:
    """Give each matrix, largest first, to the rank with least work that has room; None where one fits nowhere."""
    loads = Loads(ranks, cap_bytes)
    heap = [(0.0, rank) for rank in range(ranks)]
    for number in sorted(range(len(matrices)), key=lambda i: (-matrices[i].seconds, i)):
        full: list[tuple[float, int]] = []
        while heap and not loads.room(heap[0][1], matrices[number]):
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        _, rank = heap[0]
        loads.assign_matrix(number, matrices[number], (rank,), matrices[number].seconds)
        heapq.heapreplace(heap, (float(loads.seconds[rank]), rank))
        for entry in full:
            heapq.heappush(heap, entry)
    return loads


def _multifit(matrices: Sequence[Matrix], ranks: int, cap_bytes: int | None) -> Loads | None:
    """Pack matrices best fit, largest first, into bins as small as bisection finds."""
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].seconds, i))
    low = bound_s(matrices, ranks)
    high, best = 2 * low, None
    for _ in range(12):
        size = (low + high) / 2 if best is not None else high
        loads = _fits(matrices, order, Loads(ranks, cap_bytes), size)
        if loads is not None:
            high, best = float(loads.seconds.max()), loads
            if high <= low * (1 + 1e-3):
                break
        elif best is None:
            return None
        else:
            low = size
    return best


def _fits(matrices: Sequence[Matrix], order: Sequence[int], loads: Loads, size: float) -> Loads | None:
    levels = [(0.0, rank) for rank in range(loads.ranks)]
    chosen: list[int] = []
    for number in order:
        matrix = matrices[number]
        place = bisect.bisect_right(levels, (size - matrix.seconds + size * 1e-9, loads.ranks)) - 1
        while place >= 0 and not loads.room(levels[place][1], matrix):
            place -= 1
        if place < 0:
            return None
        done, rank = levels.pop(place)
        chosen.append(rank)
        loads.state_bytes[rank] += matrix.state_bytes
        bisect.insort(levels, (done + matrix.seconds, rank))
    loads.owner = {number: (rank,) for number, rank in zip(order, chosen, strict=True)}
    for done, rank in levels:
        loads.seconds[rank] = done
    return loads


def _exchange(matrices: Sequence[Matrix], loads: Loads) -> Loads:
    """Move or swap matrices away from the fullest rank, as long as the fuller of both ranks gets emptier.

    A gang stays as it is, so ranks of gangs keep theirs; only matrices of one rank move.
    """
    single = [number for number in sorted(loads.owner) if len(loads.owner[number]) == 1]
    if not single:
        return loads
    costs = np.array([matrices[number].seconds for number in single])
    sizes = np.array([matrices[number].state_bytes for number in single], dtype=np.int64)
    where = np.array([loads.owner[number][0] for number in single])
    cap = np.iinfo(np.int64).max if loads.cap_bytes is None else loads.cap_bytes
    for _ in range(20 * len(single)):
        fullest = int(loads.seconds.argmax())
        best = _best_exchange(fullest, costs, sizes, where, loads, cap)
        if best is None:
            break
        leaving, received, to = best
        _apply(leaving, received, to, fullest, costs, sizes, where, loads)
    for number, rank in zip(single, where.tolist(), strict=True):
        loads.owner[number] = (rank,)
    return loads


def _best_exchange(
    fullest: int, costs: np.ndarray, sizes: np.ndarray, where: np.ndarray, loads: Loads, cap: int
) -> tuple[int, int | None, int] | None:
    """Find the best move or swap away from the fullest rank.

    Returns:
        Matrix to give, matrix to take for it if any, and the rank to give it to; None where none helps.
    """
    fullest_has = np.flatnonzero(where == fullest)
    others = np.flatnonzero(where != fullest)
    top = float(loads.seconds[fullest])
    best, level = None, top * (1 - _EPSILON)
    seen: set[tuple[float, int]] = set()
    for leaving in fullest_has.tolist():
        kind = (float(costs[leaving]), int(sizes[leaving]))
        if kind in seen:
            continue
        seen.add(kind)
        moved = np.maximum(top - costs[leaving], loads.seconds + costs[leaving])
        moved[(loads.state_bytes + sizes[leaving] > cap)] = np.inf
        moved[fullest] = np.inf
        to = int(moved.argmin())
        if moved[to] < level:
            best, level = (leaving, None, to), float(moved[to])
        shift, grown = costs[leaving] - costs[others], sizes[leaving] - sizes[others]
        targets = where[others]
        swapped = np.maximum(top - shift, loads.seconds[targets] + shift)
        fits = (loads.state_bytes[targets] + grown <= cap) & (loads.state_bytes[fullest] - grown <= cap)
        swapped[~fits] = np.inf
        if len(swapped):
            place = int(swapped.argmin())
            if swapped[place] < level:
                best, level = (leaving, int(others[place]), int(targets[place])), float(swapped[place])
    return best


def _apply(
    given: int, received: int | None, to: int, fullest: int, costs: np.ndarray, sizes: np.ndarray, where: np.ndarray,
    loads: Loads,
) -> None:  # fmt: skip
    seconds, size = costs[given], sizes[given]
    if received is not None:
        seconds, size = seconds - costs[received], size - sizes[received]
        where[received] = fullest
    where[given] = to
    loads.seconds[[fullest, to]] += (-seconds, seconds)
    loads.state_bytes[[fullest, to]] += (-size, size)


def spread_turns(matrices: Sequence[Matrix], owners: Owners) -> Owners:
    """Exchange equal matrices so that each owner has about as much due at each turn; loads stay as they are."""
    kinds: dict[tuple[float, int], list[int]] = {}
    for number, matrix in enumerate(matrices):
        if len(owners.ranks[number]) == 1:
            kinds.setdefault((matrix.seconds, matrix.state_bytes), []).append(number)
    ranks = list(owners.ranks)
    due: dict[tuple[int, int], float] = {}
    for _, numbers in sorted(kinds.items(), reverse=True):
        slots = Counter(owners.ranks[number] for number in numbers)
        in_turn = sorted(numbers, key=lambda i: (matrices[i].turn, matrices[i].name))
        for turn, members in itertools.groupby(in_turn, lambda i: matrices[i].turn):
            # Only what the rank at the top gets changes its place, so that a heap has the least at every moment.
            heap = [(due.get((slot[0], turn), 0.0), slot) for slot, count in slots.items() if count]
            heapq.heapify(heap)
            for number in members:
                done, slot = heap[0]
                ranks[number] = slot
                slots[slot] -= 1
                due[slot[0], turn] = done + matrices[number].seconds
                if slots[slot]:
                    heapq.heapreplace(heap, (due[slot[0], turn], slot))
                else:
                    heapq.heappop(heap)
    return replace(owners, ranks=tuple(ranks))


#: Of an element beside products, in operations: reads and writes of AdamW count for more than its few operations.
_ADAMW_FLOPS = 100.0


@dataclass(frozen=True)
class DirectionCosts:
    """Costs of matrices for choosing owners, in seconds on a machine or in operations without one.

    Operations count all matrices at one rate; a machine knows decompositions, small matrices and launches.
    """

    machine: Machine | None

    @staticmethod
    def of(name: str) -> DirectionCosts:
        """Load the costs of a machine of the catalog or a probe's file; "" for operations.

        Raises:
            ConfigError: no such machine.
        """
        return DirectionCosts(load_machine(name) if name else None)

    def matrix(self, rule: MatrixRule, rows: int, columns: int) -> float:
        """Cost of a direction, the mean over updates, in seconds or operations.

        Raises:
            ConfigError: the machine has no rate for its products.
        """
        work = rule.work(rows, columns)
        if self.machine is None:
            return work.flops
        device = self.machine.device
        return direction_s(work, rows * columns, device, precision_of(rule), device.op_overhead_s)

    def shared(self, rule: MatrixRule, rows: int, columns: int, shares: Sequence[float]) -> tuple[float, ...]:
        """Cost of a direction on each of 2, 4, 8, 16 ranks that share it; on a machine with what they send each other.

        Args:
            shares: Share of its work that each rank has, as far as it can be shared.
        Raises:
            ConfigError: the machine has no links.
        """
        if self.machine is None or not shares or rule.shared_work(1, 1, 1) is None:
            return tuple(self.matrix(rule, rows, columns) * share for share in shares)
        return shared_s(rule, rows, columns, self.machine, self.machine.device.op_overhead_s)[: len(shares)]

    def elements(self, number: int) -> float:
        """Cost of an AdamW update of ``number`` elements, in seconds or operations."""
        return _ADAMW_FLOPS * number if self.machine is None else number / self.machine.device.optimizer_elements_per_s

    def report(self, owners: Owners, moves: Moves | None = None) -> str:
        """Describe owners: loads, whole states and what travels, each beside its lower bound."""
        amounts = [owners.makespan_s, owners.bound_s]
        if self.machine is None:
            fullest, bound = (f"{amount:.3g} operations" for amount in amounts)
            why = "; name a machine for seconds"
        else:
            (fullest, bound), why = (format_seconds(amount) for amount in amounts), f" on {self.machine.name}"
        gangs = sum(len(gang) > 1 for gang in owners.ranks)
        shared = f", {gangs} of them with several" if gangs else ""
        lines = [
            f"{len(owners.ranks)} matrices with owners among {len(owners.loads_s)} ranks{shared}: "
            f"fullest {fullest}{why}",
            f"load ratio {owners.load_ratio:.3f}, bound {bound}, {owners.gap:.1%} above it",
        ]
        if max(owners.state_bytes, default=0):
            even = -(-sum(owners.state_bytes) // len(owners.state_bytes))
            whole = format_bytes(max(owners.state_bytes))
            lines.append(f"whole states: {whole} on the fullest rank, {format_bytes(even)} at least")
        if moves is not None:
            lines.append(
                f"travelling: {moves.busiest:,} elements to the busiest rank in a step, {moves.balanced:,} at least"
            )
        return "\n".join(lines)
