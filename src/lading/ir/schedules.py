"""Schedules of pipelines as data: what each rank computes, in the very order torch.distributed.pipelining executes.

A pipeline has ``ranks * chunks`` stages, numbered in the order of forward. Ranks hold them in loops (stage ``s`` on
rank ``s % ranks``), or for the V-shaped kinds back and forth (rank 0 has the first and the last). Written from the
published rules: GPipe (Huang 2019), 1F1B and interleaved (Narayanan 2021, arXiv 2104.04473), zero bubble ZB-H1 and
ZB-V (Qi 2023 and 2024, arXiv 2401.10241 and 2405.15362), DualPipe-V (DeepSeek-V3, arXiv 2412.19437); tests compare each
with torch's own lists.

Rules differ in one point. "torch" cuts the micro-batches of an interleaved pipeline into equal rounds and wants as many
micro-batches as stages for 1F1B; "megatron" (Megatron-LM core 2024-26) makes groups of ``ranks`` micro-batches, the
last one as it comes, and takes any number for 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.layout import Layout

KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe-v")
RULES = ("torch", "megatron")
V_SHAPED = ("zbv", "dualpipe-v")

#: Rows of (work, chunk, micro-batch, joint); joint is 1 where an action runs as one with the action after it.
Order = npt.NDArray[np.int32]


_LETTERS = "FBIW"
_F, _B, _I, _W = (int(work) for work in Work)


@dataclass(frozen=True, eq=False)
class Schedule:
    """The actions of every rank of a pipeline.

    Attributes:
        chunks: Model chunks of a rank.
        orders: Actions of each rank, in order; arrays are read-only.
    """

    kind: str
    ranks: int
    chunks: int
    micro_batches: int
    orders: tuple[Order, ...]

    @property
    def stages(self) -> int:
        """Model chunks of all ranks."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Number of a rank's chunk in the order of forward."""
        if self.kind in V_SHAPED and chunk % 2:
            return (chunk + 1) * self.ranks - 1 - rank
        return chunk * self.ranks + rank

    def rank_of(self, stage: int) -> int:
        """Rank that holds a stage."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.kind in V_SHAPED and chunk % 2 else place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, by chunk."""
        return self._stages_by_rank[rank]

    @cached_property
    def _stages_by_rank(self) -> list[tuple[int, ...]]:
        return [tuple(self.stage(rank, chunk) for chunk in range(self.chunks)) for rank in range(self.ranks)]

    def texts(self, rank: int) -> list[str]:
        """Actions as torch prints them: ``["0F0", "4F0", "(0F3;4B0)OVERLAP_F_B", ...]``."""
        texts: list[str] = []
        first_half = ""
        for work, chunk, micro_batch, joint in self.orders[rank].tolist():
            text = f"{self.stage(rank, chunk)}{_LETTERS[work]}{micro_batch}"
            if joint:
                first_half = text
            else:
                texts.append(f"({first_half};{text})OVERLAP_F_B" if first_half else text)
                first_half = ""
        return texts


def schedule_of(layout: Layout, *, rules: str = "torch") -> Schedule:
    """Schedule of a layout's pipeline; 1F1B of several chunks is the interleaved one.

    Raises:
        ConfigError: as ``schedule``.
    """
    kind = "interleaved" if layout.schedule == "1f1b" and layout.vpp > 1 else layout.schedule
    return schedule(kind, layout.pp, layout.vpp, layout.micro_batches, rules=rules)


@lru_cache(maxsize=64)
def schedule(
    kind: str, ranks: int, chunks: int, micro_batches: int, *, rules: str = "torch", group: int = 0
) -> Schedule:
    """The actions of each rank.

    Args:
        kind: One of ``KINDS``.
        ranks: Pipeline ranks.
        chunks: Model chunks of a rank; 2 for the V-shaped kinds.
        rules: Whose: one of ``RULES``.
        group: Micro-batches in a row of one chunk, for "megatron"; 0 means ``ranks``.
    Raises:
        ConfigError: a pipeline that cannot be, with the rule.
    """
    _check(kind, (ranks, chunks, micro_batches), rules, group)
    rounds = _rounds(kind, ranks, chunks, micro_batches, rules, group)
    orders: list[Order] = []
    for rank in range(ranks):
        order = _MAKERS[kind](ranks, rank, micro_batches, rounds)
        order.setflags(write=False)
        orders.append(order)
    return Schedule(kind, ranks, chunks, micro_batches, tuple(orders))


def _check(kind: str, sizes: tuple[int, int, int], rules: str, group: int) -> None:
    ranks, chunks, micro_batches = sizes
    if kind not in KINDS or rules not in RULES:
        raise ConfigError(
            f"schedule: expected one of {', '.join(KINDS)} by the rules of {' or '.join(RULES)}, "
            f"got {kind!r} by {rules!r}"
        )
    if min(sizes) < 1 or group < 0:
        raise ConfigError(f"schedule {kind}: ranks, chunks and micro-batches must be >= 1, got {sizes}, group {group}")
    if kind in ("gpipe", "1f1b") and chunks != 1:
        raise ConfigError(f"schedule {kind}: a rank has one chunk, got vpp {chunks}; take the interleaved schedule")
    if kind in V_SHAPED and chunks != 2:
        raise ConfigError(f"schedule {kind}: a rank has two chunks, got vpp {chunks}; set vpp to 2")
    if kind == "dualpipe-v" and micro_batches < 2 * ranks:
        raise ConfigError(
            f"schedule {kind}: needs as many micro-batches as stages ({2 * ranks}), got {micro_batches}; "
            "raise the global batch or lower dp or the micro-batch"
        )
    if kind == "1f1b" and rules == "torch" and micro_batches < ranks:
        raise ConfigError(
            f"schedule {kind}: torch wants as many micro-batches as stages ({ranks}), got {micro_batches}; raise the "
            "global batch, or take the rules of megatron"
        )
    if group and not (rules == "megatron" and kind == "interleaved"):
        raise ConfigError(f"schedule {kind}: groups of micro-batches are a setting of megatron's interleaved schedule")


def _rounds(kind: str, ranks: int, chunks: int, micro_batches: int, rules: str, group: int) -> _Rounds:
    """Group the micro-batches of a looped schedule into rounds."""
    if rules == "megatron" and kind == "interleaved":
        group = group or ranks
        remainder = micro_batches % group
        if group < ranks or 0 < remainder < ranks:
            raise ConfigError(
                f"schedule {kind}: megatron wants groups of at least pp ({ranks}) micro-batches, and the rest of "
                f"{micro_batches} by {group} to be 0 or at least pp, got {remainder}; change the global batch"
            )
        return _Rounds(chunks, group)
    if kind in ("interleaved", "zero-bubble"):
        number = max(1, micro_batches // ranks)
        if micro_batches % number:
            raise ConfigError(
                f"schedule {kind}: torch wants micro-batches that are a multiple of the rounds "
                f"({micro_batches} // {ranks} = {number}), got {micro_batches}; change the global batch"
            )
        return _Rounds(chunks, micro_batches // number)
    return _Rounds(chunks, micro_batches)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Chunks of a rank, and micro-batches in a row of each."""

    chunks: int
    group: int

    def passes(self, micro_batches: int) -> tuple[Order, Order]:
        """List the forwards of a rank, and its backwards, each in their order."""
        step = np.arange(micro_batches * self.chunks)
        first = step // (self.group * self.chunks) * self.group
        width = np.minimum(self.group, micro_batches - first)
        within = step - first * self.chunks
        chunk, micro_batch = within // width, first + within % width
        return _order(_F, chunk, micro_batch), _order(_B, self.chunks - 1 - chunk, micro_batch)


def _order(work: int, chunk: npt.NDArray[np.int64], micro_batch: npt.NDArray[np.int64]) -> Order:
    rows = np.zeros((len(chunk), 4), np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = work, chunk, micro_batch
    return rows


def _gpipe(ranks: int, rank: int, micro_batches: int, rounds: _Rounds) -> Order:
    return np.concatenate(rounds.passes(micro_batches))


def _1f1b(ranks: int, rank: int, micro_batches: int, rounds: _Rounds) -> Order:
    """Forwards until the first backward can come, then one of each, then the backwards that are left."""
    return _alternate(*rounds.passes(micro_batches), min(ranks - 1 - rank, micro_batches))


def _interleaved(ranks: int, rank: int, micro_batches: int, rounds: _Rounds) -> Order:
    """Order of interleaved 1F1B: all chunks but the last run a group ahead, and a hop costs two micro-batches."""
    warm = (rounds.chunks - 1) * rounds.group + 2 * (ranks - 1 - rank)
    return _alternate(*rounds.passes(micro_batches), min(warm, rounds.chunks * micro_batches))


def _alternate(forwards: Order, backwards: Order, warm: int) -> Order:
    count = len(forwards)
    order = np.empty((2 * count, 4), np.int32)
    order[:warm] = forwards[:warm]
    order[warm : 2 * count - warm : 2] = forwards[warm:]
    order[warm + 1 : 2 * count - warm : 2] = backwards[: count - warm]
    order[2 * count - warm :] = backwards[count - warm :]
    return order


def _zero_bubble(ranks: int, rank: int, micro_batches: int, rounds: _Rounds) -> Order:
    """ZB-H1: 1F1B with a hop of one micro-batch; a rank starts weight gradients ``rank`` backwards late."""
    forwards, inputs = rounds.passes(micro_batches)
    inputs[:, 0] = _I
    weights = inputs.copy()
    weights[:, 0] = _W
    count = len(forwards)
    warm = min((rounds.chunks - 1) * rounds.group + ranks - 1 - rank, count)
    parts: list[Order] = [forwards[:warm]]
    position = 0
    for step in range(warm, warm + count):
        parts.append(forwards[step : step + 1])
        parts.append(inputs[step - warm : step - warm + 1])
        if step - warm >= rank:
            parts.append(weights[position : position + 1])
            position += 1
    return np.concatenate([*parts, weights[position:]])


class _RankOrder:
    """A rank's list being written: the next micro-batch of each kind of work by chunk, and weights still to do."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self.next = [[0, 0] for _ in Work]
        self._pending: list[tuple[int, int]] = []

    def add(self, work: int, chunk: int, *, joint: bool = False) -> None:
        """Append the next micro-batch of a kind of work on a chunk; a full backward counts as both of its halves."""
        micro_batch = self.next[_I if work == _B else work][chunk]
        self.rows.append((work, chunk, micro_batch, int(joint)))
        for counted in (_I, _W) if work == _B else (work,):
            self.next[counted][chunk] += 1
        if work == _I:
            self._pending.append((chunk, micro_batch))

    def pair(self, forward: int, backward: int) -> None:
        """A forward of one chunk and a backward of another, as one."""
        self.add(_F, forward, joint=True)
        self.add(_B, backward)

    def oldest_weight(self) -> None:
        """The weight gradient that waits longest, if any does."""
        if self._pending:
            chunk, micro_batch = self._pending.pop(0)
            self.rows.append((_W, chunk, micro_batch, 0))

    def run(self, times: int, *works: tuple[int, int]) -> None:
        """Add the same works, each on its chunk, so many times over."""
        for _ in range(times):
            for work, chunk in works:
                self.add(work, chunk)

    def order(self, micro_batches: int) -> Order:
        """List the works as an array, without micro-batches that there are not."""
        rows = np.array(self.rows, np.int32).reshape(-1, 4)
        return np.ascontiguousarray(rows[rows[:, 2] < micro_batches])


def _zbv(ranks: int, rank: int, micro_batches: int, rounds: _Rounds) -> Order:
    """ZB-V: fill both arms of the V, then forward and both gradients of each in turn, weights last of all."""
    filled = max(2 * ranks - 1, micro_batches)
    build = _RankOrder()
    build.run(2 * (ranks - rank) - 1, (_F, 0))
    build.run(rank, (_F, 1), (_F, 0))
    build.run(ranks - rank, (_F, 1), (_I, 1), (_W, 1))
    while build.next[_F][1] < build.next[_F][0] or build.next[_F][0] < filled:
        if build.next[_F][0] < filled:
            build.add(_F, 0)
        build.run(1, (_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1))
    build.run(rank, (_I, 0), (_I, 1))
    build.run(ranks - rank, (_I, 0), (_W, 0))
    for chunk in (1, 0):
        build.run(build.next[_I][chunk] - build.next[_W][chunk], (_W, chunk))
    return build.order(micro_batches)


def _dualpipe_v(ranks: int, rank: int, micro_batches: int, rounds: _Rounds) -> Order:
    """DualPipe-V: in the middle a forward of one arm runs as one with a backward of the other."""
    build = _RankOrder()
    after = ranks - 1 - rank
    build.run(2 * after, (_F, 0))
    build.run(rank + 1, (_F, 0), (_F, 1))
    for _ in range(after):
        build.add(_I, 1)
        build.oldest_weight()
        build.add(_F, 1)
    for step in range(micro_batches - 2 * ranks + rank + 1):
        if step == 0 and rank == ranks - 1:
            build.run(1, (_F, 0), (_B, 1))
        else:
            build.pair(0, 1)
        build.pair(1, 0)
    for _ in range(after):
        build.add(_B, 1)
        build.pair(1, 0)
    # The second half of the last backwards leaves its weights for the end; where the half falls within a pair of
    # backwards, odd ranks begin with its first and even ranks with its second.
    for step in range(2 * (rank + 1)):
        build.add(_I if step >= 2 * ((rank + 1) // 2) + (rank + 1) % 2 else _B, 1 - step % 2)
    for _ in range(after):
        build.oldest_weight()
        build.add(_I, 0)
    for _ in range(rank + 1):
        build.oldest_weight()
    return build.order(micro_batches)


_MAKERS: dict[str, Callable[[int, int, int, _Rounds], Order]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipe-v": _dualpipe_v,
}
