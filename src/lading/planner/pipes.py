"""Pipes: lower bounds of the seconds and bytes of every pipeline of a search, for all of them at once.

[Note: bound of a pipeline]
With f and b the seconds of a micro-batch on a stage, m micro-batches, and v stages on each of p ranks, a step takes at
least ``head + m * busy + tail`` on every rank: what the first micro-batch takes to reach its first stage, its own work
and the sends that it waits for, and what the last one takes from there back to the first stage; and at least what one
micro-batch takes there and back. Schedules that split the backward may leave weight gradients for the end, which are no
part of the tail (``_late``).

[Note: activations alive]
When a rank first has as many micro-batches under way as it ever waits for, its schedule's warm-up says how many of each
chunk are alive. That is a moment of the step, so its bytes are a lower bound of the peak; of 1F1B and GPipe they are
the peak. The action after it is a backward of the last chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lading.ir.schedules import V_SHAPED
from lading.ir.stack import Stack
from lading.planner.space import Pipe
from lading.planner.stages import Floats, Ints, StageCosts, StageRows

Bools = npt.NDArray[np.bool_]
#: Ranks whose memory and exchanges are bounded: the first two and the last.
WATCHED = 3


@dataclass(frozen=True, eq=False)
class PipeTable:
    """Pipelines by number, with their stages and ranks in a row.

    Attributes:
        geometry: [pipe]: number of its (pp, vpp, turns around) in ``geometries``.
        pp, vpp: [pipe]: ranks, and chunks of each rank.
        row: [stage]: row of ``StageRows``.
        pipe: [stage]: pipe that has it.
        first: [pipe]: where its stages begin.
        rank: [stage]: rank, numbered through all pipes.
        rank_pipe, place: [rank]: its pipe, and its place there.
        rank_first: [rank]: its first stage.
        held_rank, held_chunk, held_stage: [stage on a watched rank]: number of (pipe, watched rank), its chunk there,
            its place among all stages.
        held_first: [pipe, watched rank]: where its stages begin in these.
        last_stage: [(pipe, watched rank)]: the last stage of each.
    """

    pipes: tuple[Pipe, ...]
    geometry: Ints
    geometries: tuple[tuple[int, int, bool], ...]
    pp: Ints
    vpp: Ints
    row: Ints
    pipe: Ints
    first: Ints
    rank: Ints
    rank_pipe: Ints
    place: Ints
    rank_first: Ints
    held_rank: Ints
    held_chunk: Ints
    held_stage: Ints
    held_first: Ints
    last_stage: Ints

    @cached_property
    def flat(self) -> Bools:
        """Whether each pipeline has a single stage, an array of [pipe]."""
        return self.pp * self.vpp == 1

    @cached_property
    def split(self) -> Bools:
        """Whether its schedule splits the backward; an array of [pipe]."""
        return self._of("zero-bubble", *V_SHAPED)

    @cached_property
    def turns(self) -> Bools:
        """Whether its chunks turn around at the last rank; an array of [pipe]."""
        return self._of(*V_SHAPED)

    @cached_property
    def loops(self) -> Bools:
        """Whether its schedule is interleaved; an array of [pipe]."""
        return self._of("interleaved") | (self._of("1f1b") & (self.vpp > 1))

    @cached_property
    def plain(self) -> Bools:
        """Whether its schedule is 1F1B of one chunk; an array of [pipe]."""
        return self._of("1f1b") & (self.vpp == 1)

    @cached_property
    def gpipe(self) -> Bools:
        """Whether each pipeline runs all forwards before the first backward, an array of [pipe]."""
        return self._of("gpipe")

    @cached_property
    def bubble(self) -> Bools:
        """Whether its schedule is a zero-bubble one that does not turn around; an array of [pipe]."""
        return self._of("zero-bubble")

    @cached_property
    def dual(self) -> Bools:
        """Whether its schedule is DualPipe-V; an array of [pipe]."""
        return self._of("dualpipe-v")

    def _of(self, *kinds: str) -> Bools:
        return np.array([pipe.schedule in kinds for pipe in self.pipes], np.bool_)


def pipe_table(pipes: Sequence[Pipe], rows: StageRows) -> PipeTable:
    """Lay out the stages and ranks of pipelines; their rows of stages are added to ``rows``."""
    shapes = [(pipe.pp, pipe.vpp, pipe.schedule in V_SHAPED) for pipe in pipes]
    geometries = tuple(dict.fromkeys(shapes))
    number = {shape: place for place, shape in enumerate(geometries)}
    ranks_of = {shape: _ranks(*shape) for shape in geometries}
    counts = np.array([pipe.stages for pipe in pipes], np.int64)
    ranks = np.array([pipe.pp for pipe in pipes], np.int64)
    starts, first = np.cumsum(ranks) - ranks, np.cumsum(counts) - counts
    seen = {shape: _watched(*shape).reshape(-1) for shape in geometries}
    wide = np.repeat(np.array([pipe.vpp for pipe in pipes]), WATCHED)
    held_first = np.cumsum(wide) - wide
    held_stage = np.concatenate([seen[shape] for shape in shapes]) + np.repeat(
        first, WATCHED * np.array([pipe.vpp for pipe in pipes])
    )
    place = np.concatenate([np.arange(pipe.pp) for pipe in pipes])
    return PipeTable(
        pipes=tuple(pipes),
        geometry=np.array([number[shape] for shape in shapes], np.int64),
        geometries=geometries,
        pp=ranks,
        vpp=np.array([pipe.vpp for pipe in pipes], np.int64),
        row=np.concatenate([rows.of(pipe.stages, pipe.layers) for pipe in pipes]),
        pipe=np.repeat(np.arange(len(pipes)), counts),
        first=first,
        rank=np.concatenate([ranks_of[shape] for shape in shapes]) + np.repeat(starts, counts),
        rank_pipe=np.repeat(np.arange(len(pipes)), ranks),
        place=place,
        rank_first=np.repeat(first, ranks) + place,
        held_rank=np.repeat(np.arange(len(wide)), wide),
        held_chunk=np.arange(len(held_stage)) - np.repeat(held_first, wide),
        held_stage=held_stage,
        held_first=held_first.reshape(-1, WATCHED),
        last_stage=held_stage[held_first + wide - 1],
    )


def _ranks(pp: int, vpp: int, turns: bool) -> Ints:
    """Rank that has it; an array of [stage]."""
    stage = np.arange(pp * vpp)
    place = stage % pp
    return np.where((stage // pp) % 2 == 1, pp - 1 - place, place) if turns else place


def _watched(pp: int, vpp: int, turns: bool) -> Ints:
    """Stage; an array of [watched rank, chunk]."""
    ranks = np.array([0, min(1, pp - 1), pp - 1])[:, None]
    chunk = np.arange(vpp)[None, :]
    place = np.where(chunk % 2 == 1, pp - 1 - ranks, ranks) if turns else np.broadcast_to(ranks, (WATCHED, vpp))
    return chunk * pp + place


def watched_rows(table: PipeTable, rows: StageRows) -> list[list[tuple[tuple[int, int], ...]]]:
    """List for each geometry (segment, count) of what its watched ranks hold, then of what its first stage holds."""
    known = list(rows.rows)
    rows_of: list[list[tuple[tuple[int, int], ...]]] = []
    for geometry, (pp, vpp, turns) in enumerate(table.geometries):
        pipe = int(np.argmax(table.geometry == geometry))
        begin = int(table.first[pipe])
        numbers: list[int] = table.row[begin : begin + pp * vpp].tolist()
        runs = [known[row] for row in numbers]
        stages_of: list[list[int]] = _watched(pp, vpp, turns).tolist()
        of_ranks = [tuple(part for stage in stages for part in runs[stage]) for stages in stages_of]
        rows_of.append([*of_ranks, runs[0]])
    return rows_of


def makespans(
    table: PipeTable, costs: StageCosts, send_s: float, micro_batches: Floats, stack: Stack
) -> tuple[Floats, Floats]:
    """Lower bounds of pipelines in seconds ([Note: bound of a pipeline]).

    Args:
        send_s: Seconds of handing one micro-batch to the next stage.
        micro_batches: [pipe]: micro-batches of a step.

    Returns:
        [pipe]: least seconds of the pipeline; [pipe, watched rank]: least seconds until it has computed all it has.
    """
    split = table.split
    forward, both = costs.forward[table.row], costs.backward[table.row]
    back = np.where(split[table.pipe], (costs.recompute + costs.inputs)[table.row], both)
    end = np.append(table.first[1:], len(table.row)) - 1
    reach, leave = _sum_over_earlier_stages(forward, table), _sum_over_earlier_stages(back, table)
    turns = table.turns
    hops = np.where(turns, 2 * (table.pp - 1), table.pp * table.vpp - 1)
    path = (reach + forward + leave + back)[end] + 2 * hops * send_s
    place = table.place.astype(float)
    busy = np.bincount(table.rank, weights=forward + both, minlength=len(place))
    after = np.where(split[table.rank_pipe], _late(table, costs), 0.0)
    tail = np.maximum(0.0, leave[table.rank_first] + place * send_s - after)
    head = reach[table.rank_first] + place * send_s
    times = micro_batches[table.rank_pipe]
    waits = (table.vpp == 1) & (not stack.hidden.get("pp", 0.0))
    ahead = (place < (table.pp - 1)[table.rank_pipe]) * times + (place > 0) * (times - 1)
    sends = np.where(waits[table.rank_pipe], ahead * send_s, 0.0)
    starts = np.cumsum(table.pp) - table.pp
    computed = head + times * busy + sends
    watched = starts[:, None] + np.stack([0 * table.pp, np.minimum(1, table.pp - 1), table.pp - 1], axis=1)
    return np.maximum(path, np.maximum.reduceat(computed + tail, starts)), computed[watched]


def _late(table: PipeTable, costs: StageCosts) -> Floats:
    """Seconds of weight gradients that it still has to make after its last gradient of activations; an array of [rank].

    By the schedules' lists: ``place + 1`` of looped ones, twice as many but one where stages turn around; less what the
    first rank has left at its end, one.
    """
    weights = costs.weights[table.row]
    max_weight_s = np.maximum.reduceat(weights, table.first)[table.rank_pipe]
    first = weights[table.first][table.rank_pipe]
    left = np.where(table.turns[table.rank_pipe], 2 * table.place + 1, table.place + 1)
    unknown: Floats = np.where(table.dual, 2.0 * table.pp, 0.0)[table.rank_pipe]
    return (left + unknown) * max_weight_s - first


def _sum_over_earlier_stages(seconds: Floats, table: PipeTable) -> Floats:
    """Sum of a number over the stages of its pipe before it; an array of [stage]."""
    total = np.cumsum(seconds) - seconds
    return total - total[table.first][table.pipe]


def activations(table: PipeTable, costs: StageCosts, alive: tuple[Floats, Ints]) -> Floats:
    """Least bytes of activations alive at once ([Note: activations alive]); an array of [pipe, watched rank].

    Args:
        alive: Result of ``alive_of``.
    """
    count, running = alive
    shape = (len(table.pipes), WATCHED)
    sizes = count * costs.saved[table.row[table.held_stage]]
    kept_bytes = np.asarray(np.bincount(table.held_rank, weights=sizes), np.float64)
    ahead = costs.forward_extra[table.row[running]]
    backward_extra = costs.backward_extra[table.row[table.last_stage]]
    spike: Floats = np.maximum(ahead, backward_extra)
    return kept_bytes.reshape(shape) + spike.reshape(shape)


def alive_of(table: PipeTable, micro_batches: Floats, stack: Stack) -> tuple[Floats, Ints]:
    """Count the micro-batches alive on watched ranks when a rank first has most of them ([Note: activations alive]).

    Args:
        micro_batches: [pipe]: of a step.

    Returns:
        [stage on a watched rank]: micro-batches alive; [(pipe, watched rank)]: the stage that runs.
    """
    pp, vpp, count = table.pp[:, None].astype(float), table.vpp[:, None].astype(float), micro_batches[:, None]
    place = np.stack([np.zeros(len(table.pp)), np.minimum(1, table.pp - 1), table.pp - 1.0], axis=1)
    group = _groups(table, micro_batches, stack)[:, None]
    bubble, turns = table.bubble[:, None], table.turns[:, None]
    warm = np.where(table.loops[:, None], (vpp - 1) * group + 2 * (pp - 1 - place), pp - 1 - place)
    warm = np.where(bubble, (vpp - 1) * group + pp - 1 - place, warm)
    first = np.where(table.gpipe[:, None], count, np.minimum(warm + 1, vpp * count))
    first = np.where(bubble & (vpp == 1), np.minimum(warm + 1 + place, count), first)
    cycle = group * vpp
    full: Floats = np.floor(first / cycle) * group
    running = np.where(turns, 1, np.floor((first - 1 - np.floor((first - 1) / cycle) * cycle) / group))
    running = np.clip(running, 0, vpp - 1).astype(np.int64)
    pipe, chunk = table.held_rank // WATCHED, table.held_chunk
    wide, rest = group[pipe, 0], (first - full * vpp).reshape(-1)[table.held_rank]
    alive = full.reshape(-1)[table.held_rank] + np.clip(rest - chunk * wide, 0, wide)
    turned = np.where(chunk == 0, 2 * pp[pipe, 0] - 1 - place.reshape(-1)[table.held_rank],
                      place.reshape(-1)[table.held_rank] + 1)  # fmt: skip
    alive = np.where(table.turns[pipe], np.minimum(turned, micro_batches[pipe]), alive)
    return alive, table.held_stage[table.held_first + running].reshape(-1)


def _groups(table: PipeTable, micro_batches: Floats, stack: Stack) -> Floats:
    """Micro-batches in a row of one chunk; an array of [pipe]."""
    if stack.megatron_order:
        return np.minimum(table.pp.astype(float), micro_batches)
    return micro_batches / np.maximum(1.0, np.floor(micro_batches / table.pp))


def valid(table: PipeTable, replicas: Floats, micro_batches: Floats, stack: Stack) -> Bools:
    """Whether each pipe can be, by the rules of ``lading.ir.schedules``; an array of [pipe].

    Args:
        replicas, micro_batches: [pipe]: not whole where it cannot be.
    """
    pp, count = table.pp, micro_batches
    good = (replicas >= 1) & (replicas == np.floor(replicas)) & (count >= 1) & (count == np.floor(count))
    one = table.gpipe & (table.vpp > 1)
    turns = table.turns & (table.vpp != 2)
    rounds = np.maximum(1.0, np.floor(count / pp))
    rest = np.mod(count, pp) if stack.megatron_order else np.mod(count, rounds)
    torch = np.mod(count, rounds)
    good &= ~one & ~turns & ~(table.loops & (rest != 0)) & ~(table.bubble & (torch != 0))
    good &= ~(table.dual & (count < 2 * pp))
    if not stack.megatron_order:
        good &= ~(table.plain & (count < pp) & ~table.flat)
    return good
