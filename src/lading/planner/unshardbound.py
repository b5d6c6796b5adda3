"""A bound on steps whose parameters are gathered: no buckets, stays or distances that fit are faster.

[Note: bound of unsharding]
Beside the network computing loses a share l = s / (1 + s) of each second. A stretch of a step that computes C, has the
network busy for N and waits for it for w takes C + l N + (1 - l) w, and N at least. The step is cut into stretches:

    first forward   all buckets are gathered, in order. Up to where b begins G(1..b) is gathered, and of it at most
                    (1 + s) C(before b) is hidden: w >= G(1..b) - (1 + s) C(before b) for each b             (``_room``)
    m - 1 turns     a backward and the next forward. The network takes one at a time in the order asked, so a forward
                    that gathers anything waits for all reductions before it, and the end of a backward for all but the
                    first bucket's, as one buffer is reduced at a time                                    (``_problem``)
    last backward   behind the gradient of b, G and R of b and all before it are left: w as in the first forward, in
                    reverse                                                                                (``_tail_s``)

Turns and the last backward count as C + l N or as N, whichever bounds more. What is added is then a sum over buckets,
each as cheap as a collective of its size: for each longest wait w of the first forward the cheapest partition of the
atoms, without buckets that are waited for longer, is found by dynamic programming over their ends (``_cheapest``).
Bytes that stay from a forward to its backward have a price p >= 0: a bucket costs the least of gathering it again and
p times its bytes, less p K in all, with K what can stay (``_kept_bytes``); each p is a bound by weak duality
(``_priced``). So have those that stay from a backward to the next forward, where nothing else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from lading.sim.modules import Modules

Floats = npt.NDArray[np.float64]
#: What counts in full in a turn.
_TURNS = ("computing", "backward", "network")
#: Waits that are tried, and prices of bytes as shares of what gathering all again costs by byte.
_WAITS, _PRICES = 24, (0.0, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.25, 1.5, 2.0)


def lower_bound(modules: Modules, budget: int) -> float:
    """Lower bound in seconds over all choices of buckets and what stays ([Note: bound of unsharding])."""
    count = modules.request.layout.micro_batches
    shape = _shape(modules)
    kept_bytes = _kept_bytes(modules, budget)
    room, tail = _room(shape.gather, shape.hidden_before_s, shape.lost), _tail_s(shape)
    bound_s = 0.0
    for turns, end in product(_TURNS if count > 1 else _TURNS[:1], (True, False)):
        problem = _problem(shape, count, turns, end, kept_bytes[1] >= shape.bytes[0, -1])
        if problem is not None:
            fixed = problem.fixed_s + (shape.backward_s + tail if end else 0.0)
            bound_s = max(bound_s, fixed + _priced(problem, room, shape.bytes, kept_bytes))
    return bound_s + modules.rest_s + (count * modules.computing_s + modules.rest_s) * modules.waits


@dataclass(frozen=True, eq=False)
class _Room:
    """Partitions in which no bucket is waited for longer than a wait, for each of several waits.

    Attributes:
        waited_s: [wait]: seconds that waiting adds at least.
        barred: For each end of a bucket [wait, first atom]: 0, or inf where it would be waited for longer.
    """

    waited_s: Floats
    barred: tuple[Floats, ...]


def _room(cost: Floats, hidden: Floats, lost: float) -> _Room:
    """Find the partitions allowed by waits from the least there can be, for one atom, to that for all in one bucket.

    Args:
        cost: [first atom, end]: seconds of the network.
        hidden: [first atom]: seconds of the network, for it and all before it, that computing hides.
    """
    low, high = (max(1e-9, float(cost[0, end] - hidden[0])) for end in (1, -1))
    waits = np.geomspace(low, max(high, low) * (1 + 1e-9), max(4, min(_WAITS, _WAITS * 250 // len(hidden))))
    min_waits_s = np.full((len(waits), len(cost)), np.inf)
    min_waits_s[:, 0] = 0.0
    barred: list[Floats] = [np.zeros((len(waits), 0))]
    for end in range(1, len(cost)):
        until = min_waits_s[:, :end] + cost[:end, end]
        barred.append(np.where(until > waits[:, None] * (1 + 1e-9) + hidden[:end], np.inf, 0.0))
        min_waits_s[:, end] = (until + barred[-1]).min(axis=1)
    return _Room((1 - lost) * np.concatenate([waits[:1], waits[:-1]]), tuple(barred))


@dataclass(frozen=True, eq=False)
class _Problem:
    """Seconds that buckets add to a step, as matrices [first atom, the one behind the last].

    Attributes:
        fixed_s: Seconds whatever the buckets are.
        always: Seconds however long a bucket stays.
        forward, backward: Seconds in later forwards and in backwards, where it is gathered again.
        first: Seconds of the first bucket in place of ``forward``: if it is there and so not waited for, and if it is
            gathered.
    """

    fixed_s: float
    always: Floats
    forward: Floats
    backward: Floats
    first: tuple[Floats, Floats] | None = None


def _problem(shape: _Shape, count: int, turns: str, end: bool, all_stay: bool) -> _Problem | None:
    """Count turns and the last backward in one way; None if it does not hold.

    Args:
        all_stay: All stay until the next forward, which then waits for no reduction: it may go on in the next backward.
    """
    if all_stay and turns == "network" and end:
        return None
    turn, last = shape.seconds(hides=turns == "computing"), shape.seconds(hides=end)
    gather = shape.seconds(hides=turns != "network").gather
    computing = {"computing": shape.turn_s, "backward": shape.forward_s, "network": 0.0 if all_stay else shape.last_s}
    fixed = shape.forward_s + (count - 1) * computing[turns]
    always = shape.lost * shape.gather + shape.copy + (count - 1) * turn.reduce + (0.0 if end else last.reduce)
    forward, backward = (count - 1) * gather, (count - 1) * turn.again + last.again
    if turns != "backward":
        return _Problem(fixed, always, forward, backward)
    first_wait_s = (1 - count) * (1 - shape.lost) * shape.reduce[0]
    return _Problem(fixed, always, forward, backward, (first_wait_s, (count - 1) * shape.gather[0]))


@dataclass(frozen=True, eq=False)
class _Passes:
    """Seconds that buckets add to a pass, as matrices [first atom, the one behind the last]."""

    gather: Floats
    again: Floats
    reduce: Floats


@dataclass(frozen=True, eq=False)
class _Shape:
    """Seconds by bucket, as matrices [first atom, the one behind the last]; and of the passes.

    Attributes:
        gather, reduce: Seconds on the network.
        again: How often a bucket is gathered in backward where it was released.
        copy, reduce_copy: Seconds of copies out of the gathered buffer, and of gradients into the one that is reduced.
        bytes: Gathered bytes.
        hidden_before_s: [first atom]: most seconds of the network that are hidden before it is needed in forward.
        hidden_after_s: [first atom]: most seconds that are hidden behind the last product of its gradient.
        forward_s, backward_s, turn_s: Seconds of computing of a forward, of a backward, and of both.
        last_s: Seconds of computing of a forward from where its last atom is needed.
        lost: Seconds of computing lost for each second that the network is busy beside it; 1 if nothing runs beside it.
    """

    gather: Floats
    reduce: Floats
    again: Floats
    copy: Floats
    reduce_copy: Floats
    bytes: Floats
    hidden_before_s: Floats
    hidden_after_s: Floats
    forward_s: float
    backward_s: float
    last_s: float
    lost: float

    @property
    def turn_s(self) -> float:
        """Seconds of a backward and the forward behind it."""
        return self.forward_s + self.backward_s

    def seconds(self, *, hides: bool) -> _Passes:
        """Seconds that buckets add to computing that hides the network, or to the network alone."""
        share, copies = (self.lost, 1.0) if hides else (1.0, 0.0)
        gather = share * self.gather + copies * self.copy
        return _Passes(gather, self.again * gather, share * self.reduce + copies * self.reduce_copy)


def _shape(modules: Modules) -> _Shape:
    prices, stack = modules.prices, modules.request.stack
    atoms = [modules.atom(n) for n in range(len(modules.atoms))]
    axes = sorted({name for atom in atoms for name in atom.elements})
    sums = {name: np.cumsum([0, *(atom.elements.get(name, 0) for atom in atoms)]) for name in axes}
    elements = {"dp": sum(sums.values(), np.zeros(len(atoms) + 1, np.int64))}
    copy = _by_bucket(elements, lambda number: prices.copies_s(number, stack.gather_copy_bytes))
    reduce_copy = _by_bucket(elements, lambda number: prices.copies_s(number, stack.reduce_copy_bytes))
    read = np.cumsum([0, *(atom.read_again for atom in atoms)])
    runs = np.cumsum([0, *(modules.blocks[modules.order[place][0]].is_recomputed for place, _ in modules.atoms)])
    again = np.where(runs[None, :] > runs[:, None], stack.gathers - 1, 1) * (read[None, :] > read[:, None])
    needed, left = _moments(modules)
    forward = sum(piece.seconds for block, _ in modules.order for piece in modules.blocks[block].forward)
    factor = 1 + modules.slowdown
    each = np.arange(len(atoms))  # as many copies at most are before an atom's own, each with a kernel's fixed time
    copied = copy[0, :-1] + each * prices.copies_s({"dp": 1}, stack.gather_copy_bytes)
    reduced = reduce_copy[0, :-1] + each * prices.copies_s({"dp": 1}, stack.reduce_copy_bytes)
    return _Shape(
        gather=_by_bucket(sums, prices.gather_s),
        reduce=_by_bucket(sums, prices.reduce_s),
        again=again,
        copy=copy,
        reduce_copy=reduce_copy,
        bytes=np.subtract.outer(-elements["dp"], -elements["dp"]) * float(modules.gathered({"dp": 1})),
        hidden_before_s=factor * (needed + copied),
        hidden_after_s=factor * (left + reduced + max(1, stack.gathers - 1) * copied),
        forward_s=forward,
        backward_s=modules.computing_s - forward,
        last_s=forward - float(needed[-1]),
        lost=modules.slowdown / factor if stack.overlap_param_gather else 1.0,
    )


def _by_bucket(sums: Mapping[str, npt.NDArray[np.int64]], price: Callable[[dict[str, int]], float]) -> Floats:
    """[first atom, end]: price of every bucket, by the sums of elements before each atom; 0 where there is none."""
    length = len(next(iter(sums.values())))
    bucket_prices = np.zeros((length, length))
    for axes, before in sums.items():
        counts = np.maximum(0, before[None, :] - before[:, None])
        distinct, inverse = np.unique(counts, return_inverse=True)
        seconds = np.array([price({axes: number}) if number else 0.0 for number in distinct.tolist()])
        bucket_prices += seconds[inverse].reshape(counts.shape)
    return bucket_prices


def _moments(modules: Modules) -> tuple[Floats, Floats]:
    """Computing that covers gathers and reductions, in seconds.

    A bucket begins no later than its first atom is needed, and ends no sooner than that atom's gradient is there.

    Returns:
        [atom]: of a forward, before it and those before it are needed; of a backward, behind the first of their
        gradients.
    """
    needed: list[float] = []
    left: list[float] = []
    before = later_s = 0.0
    for number, _ in modules.order:
        block = modules.blocks[number]
        for n, atom in enumerate(block.atoms):
            first, _ = block.lasts(atom.module, backward=False)
            made = next(place for place, piece in enumerate(block.backward) if n in piece.gradients)
            needed.append(before + sum(piece.seconds for piece in block.forward[:first]))
            left.append(later_s + sum(piece.seconds for piece in block.backward[made + 1 :]))
        before += sum(piece.seconds for piece in block.forward)
        later_s += sum(piece.seconds for piece in block.backward)
    return np.maximum.accumulate(needed), np.maximum.accumulate(left)


def _kept_bytes(modules: Modules, budget: int) -> tuple[int, int]:
    """Bound the bytes of gathered parameters that can stay.

    In the forward or backward of a block all is there that stays of it and of those before it, with what these keep.
    From the second micro-batch on the buffer reduced last, with the first atom's gradient, stays until a backward ends.

    Returns:
        Most bytes from forward to backward, and from backward to the next forward.
    """
    blocks = [modules.blocks[number] for number, _ in modules.order]
    count, left = sum(modules.atom(0).elements.values()), budget - modules.state_bytes - modules.summed_bytes
    reduced = count * modules.reduced_bytes if modules.request.layout.micro_batches > 1 else 0
    saved = sum(block.saved_bytes for block in blocks)
    after, min_room = 0, left
    for block in reversed(blocks):
        saved -= block.saved_bytes
        max_bytes = max(piece.alive_bytes for piece in block.forward) + reduced
        is_last = not after
        for piece in block.backward:
            made = sum(block.atoms[n].count for n in piece.gradients) * modules.gradient_bytes
            max_bytes = max(max_bytes, piece.alive_bytes + made + (reduced if is_last else 0))
            is_last = is_last and not piece.gradients
        min_room = min(min_room, left - saved - max_bytes + after)
        after += sum(modules.gathered(atom.elements) for atom in block.atoms)
    between = left - reduced - max(count * modules.gradient_bytes, blocks[0].forward[0].alive_bytes)
    return max(0, min_room), max(0, between)


def _tail_s(shape: _Shape) -> float:
    """Least seconds that reductions add to the last backward: computing that is lost, copies, and waits at its end."""
    return _cheapest(
        shape.lost * shape.reduce + shape.reduce_copy, _room(shape.reduce, shape.hidden_after_s, shape.lost)
    )


def _cheapest(added: Floats, room: _Room, first: Floats | None = None) -> float:
    """Least seconds that a partition adds, with waiting.

    ``first`` has what its first bucket adds, where that differs.
    """
    added = added if first is None else np.vstack([first, added[1:]])
    best_s = np.full((len(room.waited_s), added.shape[1]), np.inf)
    best_s[:, 0] = 0.0
    for end in range(1, added.shape[1]):
        best_s[:, end] = (best_s[:, :end] + added[:end, end] + room.barred[end]).min(axis=1)
    return float(np.min(room.waited_s + best_s[:, -1]))


def _priced(problem: _Problem, room: _Room, size: Floats, kept_bytes: tuple[int, int]) -> float:
    """Least seconds that buckets add, by the best prices of bytes that stay until backward and until forward.

    It is concave in both: the best of one is found for the other's, and again.
    """
    usual = [float(each[0, -1] / size[0, -1]) for each in (problem.backward, problem.forward)]
    open_ = [bool(price) and room < size[0, -1] for price, room in zip(usual, kept_bytes, strict=True)]
    bound_by_numbers: dict[tuple[int, ...], float] = {}

    def at(*numbers: int) -> float:
        if numbers not in bound_by_numbers:
            until = [_PRICES[number] * price for number, price in zip(numbers, usual, strict=True)]
            forward = np.minimum(problem.forward, until[1] * size)
            backward = np.minimum(problem.backward, until[0] * size)
            first = None
            if problem.first is not None:
                first_wait_s, gathered = problem.first
                first = (problem.always + backward)[0] + np.minimum(first_wait_s + until[1] * size[0], gathered)
            paid = until[0] * kept_bytes[0] + until[1] * kept_bytes[1]
            bound_by_numbers[numbers] = _cheapest(problem.always + forward + backward, room, first) - paid
        return bound_by_numbers[numbers]

    best = [_PRICES.index(1.0) if each else 0 for each in open_]
    for axis in (0, 1, 0) if all(open_) else [n for n in (0, 1) if open_[n]]:
        low, high = 0, len(_PRICES) - 1
        while low < high:
            middle = (low + high) // 2
            ends = [[*best[:axis], n, *best[axis + 1 :]] for n in (middle, middle + 1)]
            low, high = (middle + 1, high) if at(*ends[0]) < at(*ends[1]) else (low, middle)
        best[axis] = low
    return max(at(*best), *bound_by_numbers.values())
