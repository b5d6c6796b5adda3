"""Emit: the lists of all ranks, from the order of a schedule and what units of a model are gathered and reduced.

[Note: order of FSDP2]
Where parameters are sharded (zero 3) the parameters of a unit (a block, what is before, what is after) are a group, and
experts spread over ranks of their own a second one within. As PyTorch's FSDP2 issues them (torch 2.13,
distributed/fsdp/_fully_shard: _fsdp_state.py, _fsdp_param_group.py): a group is gathered when its forward begins and
resharded when it ends. When its backward begins it is gathered if it is not there, and the group whose forward ended
before its own is asked for; when its backward ends it is resharded and its gradients are reduced. The last unit's
groups stay from forward to backward.

[Note: what waits for what]
The host runs ahead, so a gather begins as soon as the network is free and the region before has begun, since gathered
parameters are copied out of a buffer that the next gather takes (FSDPParamGroup.wait_for_unshard: the copy-out event);
that of a forward's first group begins when all before it has ended (FSDPState._root_pre_forward waits for the current
stream). All-gathers and reduce-scatters share one communicator, which takes them in the order asked. Gradients are
copied into one buffer before they are reduced, so computing goes on behind a group's backward only when the reduction
before has ended (FSDPParamGroup.post_backward waits for ``reduce_scatter_state``).

[Note: sharded in a pipeline]
zero 2 and zero 3 are one program there, PyTorch's: FSDP2 inside torch.distributed.pipelining (torch 2.13). A stage's
parameters are gathered before its first forward and stay until its last backward is done (stage.py,
backward_maybe_with_nosync: set_reshard_after_backward(False)). Gradients add up whole and are reduced once, in the
order of forward, behind the stage's last backward; the rank computes on when that is done (stage.py,
perform_reduce_grad).
GPipe and 1F1B gather a unit at a time inside the first forward, once its input is there. Other schedules run from lists
of actions (schedules.py, _add_unshard_reshard): a stage is gathered whole, and up to three are there at once.

[Note: whole parameters]
Where parameters are whole, gradients are reduced a unit (or a bucket) at a time in the last micro-batch, or in each
where gradients are sharded (zero 2: DeepSpeed's runtime/zero/stage_1_and_2.py), and what an optimizer updated in shards
is gathered in the first forward. Where gradients are sharded the next micro-batch waits for all reductions (DeepSpeed's
independent_gradient_partition_epilogue synchronizes the device). Software that does not overlap them does the former
behind the last backward and the latter before the first forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lading.ir.action import ActionKind, Work
from lading.ir.plan import UnitResidency
from lading.ir.program import (
    ALL_UNITS,
    COMPUTE,
    NETWORK,
    RECEIVE,
    SEND_NEXT,
    SEND_PREVIOUS,
    ActionList,
    Border,
    ParameterGroup,
    Program,
    Region,
)
from lading.ir.schedules import Order, Schedule
from lading.program.writer import ListWriter, Numbers

#: What happens in a pass of a unit, in order: a group begins (its number), kernels run (from, to), a group ends.
BEGIN, RUN, END = range(3)
Pass = tuple[tuple[int, int, int], ...]
#: Stages that torch's lists of actions have gathered at once, and schedules that run without such a list.
GATHERED_AT_ONCE, DIRECT = 3, ("gpipe", "1f1b")
#: Fewer rows than these between two with something special are written one by one.
_FEW_ROWS = 8
#: Group of an all-reduce of all ranks (the norm of gradients), and of those that have a copy of a tied weight.
WORLD, COPIES = "world", "copies"


class UnitShape(NamedTuple):
    """Facts of a unit that a list needs to know.

    Attributes:
        axes: Axes over which each of its groups is replicated, in the order of forward.
        passes: Passes over its groups, by ``Work``.
        ends: Whether it is the model's last.
        sums: Whether its gradients are summed over tp before they are reduced.
        gathers: Number of times that backward gathers it: twice where recomputing releases it again.
    """

    axes: tuple[str, ...]
    passes: tuple[Pass, Pass, Pass, Pass]
    ends: bool = False
    sums: bool = False
    gathers: int = 1


@dataclass(frozen=True)
class ListShape:
    """Facts that lists follow from, without a size.

    Attributes:
        plan: Order of micro-batches on each rank; where there is no pipeline at most three micro-batches.
        stages: Units of each stage, in order of forward: (unit, how often).
        shards: What is sharded over data-parallel ranks: "" (nothing), "optimizer", "gradients", "parameters".
        num_repeats: Micro-batches that the second one stands for besides itself.
        pipelined: Stages are pipelined, on one rank or several.
        single_rank_axes: Axes on which there is one rank only: parameters and gradients are copied there, which takes
            no network.
        blocks_ahead: Where blocks have several groups, all of the next block's are asked for when a block begins.
        keep: How long gathered parameters stay, where there is no pipeline.
        overlap_gather, overlap_reduce, overlap_send: Whether these run beside computing.
        buckets: Buckets of gradients of each stage, 0 for a unit each.
        weights_forward: Gradients of weights are made in the order of forward, as torch's pipelines do.
        whole_first: The first stage makes both gradients where those of weights are due, likewise.
        sums: Gradients are summed over tp behind the last backward.
        tied: The first and the last stage have a copy each of one weight.
        by_unit: Forward and backward are a region for each unit, also where nothing happens between units.
    """

    plan: Schedule
    stages: tuple[tuple[tuple[UnitShape, int], ...], ...]
    shards: str = ""
    num_repeats: int = 0
    pipelined: bool = False
    single_rank_axes: frozenset[str] = frozenset()
    blocks_ahead: bool = False
    keep: UnitResidency = UnitResidency.RELEASE
    overlap_gather: bool = True
    overlap_reduce: bool = True
    overlap_send: bool = True
    buckets: tuple[int, ...] = ()
    weights_forward: bool = True
    whole_first: bool = True
    sums: bool = False
    tied: bool = False
    by_unit: bool = False


@lru_cache(maxsize=256)
def emit(shape: ListShape) -> Program:
    """The lists of all ranks of a step."""
    numbers = Numbers({}, {}, {})
    ranks = tuple(_Rank(shape, rank, numbers).write() for rank in range(shape.plan.ranks))
    repeat = (1, shape.num_repeats) if shape.num_repeats else (0, 0)
    unit_starts = tuple(_run_start_of_units(runs) for runs in shape.stages)
    uses = tuple(frozenset(numbers.uses.get(number, ())) for number in range(len(numbers.regions)))
    return Program(
        ranks=ranks,
        regions=tuple(numbers.regions),
        storages=tuple(numbers.storages),
        uses=uses,
        alike=unit_starts,
        repeat=repeat,
        schedule=shape.plan.kind,
    )


def _run_start_of_units(runs: Sequence[tuple[UnitShape, int]]) -> tuple[int, ...]:
    """For each unit of a stage the first one of its run, which is one segment of the model."""
    starts = [0, *accumulate(count for _, count in runs)]
    return tuple(start for start, (_, count) in zip(starts, runs, strict=False) for _ in range(count))


class _Rank(ListWriter):
    """One rank's list of a schedule."""

    def __init__(self, shape: ListShape, rank: int, numbers: Numbers) -> None:
        super().__init__(numbers)
        self.shape, self.plan, self.rank = shape, shape.plan, rank
        self.stages = {stage: _units(shape.stages[stage]) for stage in self.plan.stages_of(rank)}
        self.left = dict.fromkeys(self.stages, self.plan.micro_batches)
        self.sharded = shape.shards == "parameters"
        axes = {axes for units in self.stages.values() for unit in units for axes in unit.axes}
        self.exchanges = bool(axes - shape.single_rank_axes)
        self.blocks_ahead = shape.blocks_ahead and any(len(u.axes) > 1 for us in self.stages.values() for u in us)
        self.direct = self.plan.kind in DIRECT and self.plan.chunks == 1
        self.asked: dict[ParameterGroup, int] = {}
        self.present: set[ParameterGroup] = set()
        #: Groups of a rank without a pipeline in the order in which their forward ends.
        self.ended = [
            ParameterGroup(stage, number, axes)
            for stage, units in self.stages.items()
            for number, unit in enumerate(units)
            for axes in reversed(unit.axes)
        ]
        self.place = {group: at for at, group in enumerate(self.ended)}

    def write(self) -> ActionList:
        """Write the whole step."""
        rows: list[list[int]] = self.plan.orders[self.rank].tolist()
        changes = gathering(self.plan, self.rank) if self.sharded and self.shape.pipelined and not self.direct else None
        if self.shape.shards in ("optimizer", "gradients") and self.exchanges and not self.shape.overlap_gather:
            for stage in self.stages:
                self._communicate_whole_stage(ActionKind.UNSHARD, stage)
        joint: list[tuple[int, int, int]] = []
        special = [*np.flatnonzero(self._special(changes)).tolist(), len(rows)]
        at, written = 0, 0
        for place, (work, chunk, micro_batch, pairs) in enumerate(rows):
            if place < written:
                continue
            at += place > special[at]
            if special[at] - place >= _FEW_ROWS and not self.pending and not self._asked_for(place, special[at]):
                written = special[at]
                self._plain_rows(self.plan.orders[self.rank][place:written])
                continue
            if changes is not None:
                self._change(*changes[place])
            joint.append((work, self.plan.stage(self.rank, chunk), micro_batch))
            if pairs:
                continue
            for row in joint:
                self._receive(*row)
            first = len(self.actions)
            for row in joint:
                self._row(*row)
            span = (self._first_compute(first), self.last)
            for row in joint:
                self.actions.rows.append(span)
                self.actions.sends.append(self._send(*row))
                self._finished(row[1], row[0])
                if row[0] != Work.FORWARD and self.shape.shards == "gradients" and not self.shape.overlap_reduce:
                    self._reduce_together(row[1])
            joint.clear()
        self._end_step()
        return self.actions

    def _special(self, changes: Sequence[tuple[Sequence[int], Sequence[int]]] | None) -> npt.NDArray[np.bool_]:
        """[row]: whether an action of the schedule may be more than to receive, compute a whole stage and send."""
        shape, order = self.shape, self.plan.orders[self.rank]
        if (self.sharded and not shape.pipelined) or shape.by_unit or shape.shards == "gradients":
            return np.ones(len(order), bool)
        work, chunk, micro_batch, pairs = order.T
        special = (pairs != 0) | (np.roll(pairs, 1) != 0) | ((work == Work.FORWARD) & (micro_batch == 0))
        if shape.whole_first:
            special |= (work != Work.FORWARD) & (chunk == self._chunk_of_first())
        for mine in range(self.plan.chunks):  # the last backward
            special[
                np.flatnonzero((chunk == mine) & ((work == Work.BACKWARD) | (work == Work.BACKWARD_WEIGHT)))[-1:]
            ] = True
        for place, (freed, comes) in enumerate(changes or ()):
            special[place] |= bool(freed or comes)
            for stage in comes:  # the first pass waits for it
                special[place + int(np.argmax(chunk[place:] == self.plan.stages_of(self.rank).index(stage)))] = True
        return special

    def _asked_for(self, place: int, until: int) -> bool:
        """Whether one of these rows is of a stage that has been asked for, and not waited for yet."""
        asked_stages = {group.stage for group in self.asked}
        chunks = np.unique(self.plan.orders[self.rank][place:until, 1]).tolist() if asked_stages else ()
        return any(self.plan.stage(self.rank, chunk) in asked_stages for chunk in chunks)

    def _chunk_of_first(self) -> int:
        stages = self.plan.stages_of(self.rank)
        return stages.index(0) if 0 in stages else -1

    def _plain_rows(self, rows: Order) -> None:
        """Write rows that receive, compute a whole stage and send, all at once; as ``write`` does one by one."""
        work, _, micro_batch, _ = rows.T
        region, arriving, source, handed, target, stream = self._row_facts(rows)
        receives, sends = arriving >= 0, handed >= 0
        actions_per_row = 1 + receives + sends
        begin = np.cumsum(actions_per_row) - actions_per_row
        compute, base = begin + receives, len(self.actions)
        received, sent_rows = begin[receives], compute[sends] + 1
        columns = np.full((5, int(actions_per_row.sum())), -1)  # stream, region, storage, micro-batch, peer
        columns[3] = np.repeat(micro_batch, actions_per_row)
        columns[0, compute], columns[1, compute] = COMPUTE, region
        columns[0, received], columns[2, received], columns[4, received] = RECEIVE, arriving[receives], source[receives]
        columns[0, sent_rows], columns[2, sent_rows], columns[4, sent_rows] = (
            stream[sends],
            handed[sends],
            target[sends],
        )
        kinds = [ActionKind.COMPUTE] * columns.shape[1]
        groups = [""] * columns.shape[1]
        waits: list[tuple[int, ...]] = [()] * columns.shape[1]
        for before, after in zip(received.tolist(), compute[receives].tolist(), strict=True):
            kinds[before], groups[before], waits[after] = ActionKind.RECV, "pp", (base + before,)
        for after in sent_rows.tolist():
            kinds[after], groups[after] = ActionKind.SEND, "pp"
            waits[after] = (base + after - 1,) if self.shape.overlap_send else ()
        self.actions.kind += kinds
        self.actions.stream += columns[0].tolist()
        self.actions.op += columns[1].tolist()
        self.actions.storage += columns[2].tolist()
        self.actions.micro_batch += columns[3].tolist()
        self.actions.peer += columns[4].tolist()
        self.actions.group += groups
        self.actions.waits += waits
        spans = (base + compute).tolist()
        self.actions.rows += zip(spans, spans, strict=True)
        self.actions.sends += np.where(sends, base + compute + 1, -1).tolist()
        on_compute = (base + np.flatnonzero(columns[0] == COMPUTE)[-3:]).tolist()
        self.last = on_compute[-1]
        self.before = on_compute[on_compute.index(spans[-1]) - 1]
        backward_chunks = rows[(work == Work.BACKWARD) | (work == Work.BACKWARD_WEIGHT), 1]
        for chunk, count in enumerate(np.bincount(backward_chunks, minlength=self.plan.chunks).tolist()):
            self.left[self.plan.stage(self.rank, chunk)] -= count

    def _row_facts(self, rows: Order) -> npt.NDArray[np.int64]:
        """[6, row]: region; storage that is received and its peer; storage that is sent, its peer and its stream."""
        work, chunk = rows[:, 0], rows[:, 1]
        _, firsts, inverse = np.unique(work * self.plan.chunks + chunk, return_index=True, return_inverse=True)
        facts = np.empty((len(firsts), 6), np.int64)
        for number in np.argsort(firsts).tolist():
            row = firsts[number]
            row_work, stage = Work(int(work[row])), self.plan.stage(self.rank, int(chunk[row]))
            forward = row_work is Work.FORWARD
            source, target = self._neighbour(row_work, stage, -1), self._neighbour(row_work, stage, 1)
            arriving = -1 if source < 0 else self.numbers.storage(Border(stage, forward))
            region = self.region_number(Region(stage, ALL_UNITS, row_work), self._groups(stage) if self.sharded else ())
            handed = -1 if target < 0 else self.numbers.storage(Border(target, forward))
            peers = [-1 if neighbour < 0 else self.plan.rank_of(neighbour) for neighbour in (source, target)]
            facts[number] = (region, arriving, peers[0], handed, peers[1], self._send_stream(row_work))
        return facts[inverse].T

    def _first_compute(self, start: int) -> int:
        """First region from ``start`` on; the place behind the last one where there is none."""
        kinds = self.actions.kind
        return next((at for at in range(start, len(kinds)) if kinds[at] is ActionKind.COMPUTE), self.last + 1)

    def _row(self, work: int, stage: int, micro_batch: int) -> None:
        """One action of the schedule, as regions."""
        if self.shape.whole_first and stage == 0:
            if work == Work.BACKWARD_INPUT:
                return
            work = Work.BACKWARD if work == Work.BACKWARD_WEIGHT else work
        self.left[stage] -= work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
        exchanges = self._exchanges(stage, work, micro_batch)
        if exchanges or (self.shape.by_unit and work in (Work.FORWARD, Work.BACKWARD)):
            self._units(stage, Work(work), micro_batch, exchanges)
        elif self._reduces(stage, work) and self._num_buckets(stage):
            self._buckets(stage, Work(work), micro_batch)
        else:
            self._compute(
                Region(stage, ALL_UNITS, Work(work)), micro_batch, self._groups(stage) if self.sharded else ()
            )

    def _num_buckets(self, stage: int) -> int:
        return self.shape.buckets[stage] if self.shape.buckets else 0

    def _exchanges(self, stage: int, work: int, micro_batch: int) -> bool:
        """Whether something is gathered or reduced between the units of a stage in this pass."""
        shape = self.shape
        if self.sharded:
            return not shape.pipelined or (self.direct and micro_batch == 0 and work == Work.FORWARD)
        if work == Work.FORWARD:
            return self.exchanges and bool(shape.shards) and shape.overlap_gather and micro_batch == 0
        return self._reduces(stage, work) and not self._num_buckets(stage)

    def _reduces(self, stage: int, work: int) -> bool:
        """Whether whole parameters' gradients are reduced as this backward makes them."""
        if self.sharded or not (self.exchanges and self.shape.overlap_reduce):
            return False
        if work not in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
            return False
        return self.shape.shards == "gradients" or not self.left[stage]

    def _units(self, stage: int, work: Work, micro_batch: int, exchanges: bool) -> None:
        """A pass through the units of a stage, with what their groups do if anything is gathered or reduced."""
        units = self.stages[stage]
        forward = work is Work.FORWARD
        onward = forward or (work is Work.BACKWARD_WEIGHT and self.shape.weights_forward)
        order = range(len(units)) if onward else range(len(units) - 1, -1, -1)
        for index, number in enumerate(order):
            unit = units[number]
            if not self.sharded:
                self._whole_unit(
                    Region(stage, number, work), unit if exchanges else unit._replace(axes=()), micro_batch
                )
                continue
            begun: list[ParameterGroup] = []
            for kind, first, stop in unit.passes[work]:
                if kind == RUN:
                    self._compute(Region(stage, number, work, first, stop), micro_batch, begun)
                    continue
                group = ParameterGroup(stage, number, unit.axes[first])
                if kind == BEGIN:
                    begun.append(group)
                    self._begin(group, unit, micro_batch, forward, root=forward and index == 0)
                else:
                    begun = [begun_group for begun_group in begun if begun_group != group]
                    self._end(group, unit, micro_batch, forward)
        if self.sharded and not forward and not self.shape.pipelined:
            self._reshard_unused(micro_batch)

    def _reshard_unused(self, micro_batch: int) -> None:
        """Reshard what was gathered ahead for a backward that never came, as of units that are frozen.

        FSDP2 does when backward ends (FSDPState._root_post_backward_final_callback).
        """
        if not (self.shape.keep.until_forward and micro_batch < self.plan.micro_batches - 1):
            for group in [group for group in self.ended if group in self.present]:
                self._reshard(group, micro_batch)

    def _whole_unit(self, region: Region, unit: UnitShape, micro_batch: int) -> None:
        groups = [
            ParameterGroup(region.stage, region.unit, axes)
            for axes in unit.axes
            if axes not in self.shape.single_rank_axes
        ]
        if region.work is Work.FORWARD:
            for group in groups:
                self.pending.append(self.add_group(ActionKind.UNSHARD, NETWORK, group, micro_batch, ()))
        self._compute(region, micro_batch)
        if region.work is not Work.FORWARD:
            for group in reversed(groups):
                last = self.add_group(ActionKind.REDUCE_GRAD, NETWORK, group, micro_batch, (self.last,))
                if region.unit == 0 and self.shape.shards == "gradients":
                    self.pending.append(last)

    def _buckets(self, stage: int, work: Work, micro_batch: int) -> None:
        number = self._num_buckets(stage)
        for bucket in range(number):
            self._compute(Region(stage, ALL_UNITS, work, bucket, number), micro_batch)
            group = ParameterGroup(stage, ALL_UNITS, "dp", bucket)
            self.add_group(ActionKind.REDUCE_GRAD, NETWORK, group, micro_batch, (self.last,))

    def _begin(self, group: ParameterGroup, unit: UnitShape, micro_batch: int, forward: bool, *, root: bool) -> None:
        """A group's forward or backward begins ([Note: order of FSDP2])."""
        if group not in self.present:
            after = (*self.pending, self.last) if root else (self.before,) if forward else (self.last,)
            self._unshard(group, micro_batch, after, 1 if forward else unit.gathers)
        if group in self.asked:
            self.pending.append(self.asked.pop(group))
        if self.shape.pipelined:
            return
        if self.blocks_ahead:
            if group.axes == unit.axes[0]:
                for step in (0, 1 if forward else -1):
                    self._ask_block(group, micro_batch, step, forward)
            return
        if forward:
            return
        if (place := self.place[group]) and (ahead := self.ended[place - 1]) not in self.present:
            unit = self.stages[ahead.stage][ahead.unit]
            self._unshard(ahead, micro_batch, (self.last,), unit.gathers)

    def _ask_block(self, group: ParameterGroup, micro_batch: int, step: int, forward: bool) -> None:
        """Ask for all groups of the unit so many steps on."""
        units, number = self.stages[group.stage], group.unit + step
        if not 0 <= number < len(units):
            return
        for axes in units[number].axes:
            ahead = ParameterGroup(group.stage, number, axes)
            if ahead not in self.present:
                self._unshard(ahead, micro_batch, (self.last,), 1 if forward else units[number].gathers)

    def _unshard(self, group: ParameterGroup, micro_batch: int, after: Sequence[int], times: int) -> None:
        self.present.add(group)
        if group.axes in self.shape.single_rank_axes:
            self.add_group(ActionKind.UNSHARD, COMPUTE, group, micro_batch, ())
            return
        waits = tuple(action for action in after if action >= 0)
        stream = NETWORK if self.shape.overlap_gather else COMPUTE
        for time in range(times):
            if time:
                self.add_group(ActionKind.RESHARD, stream, group, micro_batch, ())
            if not self.shape.overlap_gather:
                self.add_blocking(ActionKind.UNSHARD, group, micro_batch, group.axes)
            else:
                self.asked[group] = self.add_group(ActionKind.UNSHARD, NETWORK, group, micro_batch, waits)

    def _end(self, group: ParameterGroup, unit: UnitShape, micro_batch: int, forward: bool) -> None:
        """A group's forward or backward ends."""
        keep = UnitResidency.BACKWARD if unit.ends and self.shape.keep is UnitResidency.RELEASE else self.shape.keep
        if self.shape.pipelined:
            return
        more = micro_batch < self.plan.micro_batches - 1
        if not (keep.until_backward if forward else keep.until_forward and more):
            self._reshard(group, micro_batch)
        if not forward:
            self._reduce(group, unit, micro_batch)

    def _reshard(self, group: ParameterGroup, micro_batch: int) -> None:
        self.present.discard(group)
        self.add_group(ActionKind.RESHARD, COMPUTE, group, micro_batch, ())

    def _reduce(self, group: ParameterGroup, unit: UnitShape, micro_batch: int) -> None:
        """Reduce a sharded group's gradients; sums over tp of what each rank has a part of go first."""
        if unit.sums and group.axes == "dp":
            self.add_blocking(ActionKind.ALL_REDUCE, group, micro_batch, "tp")
        if group.axes in self.shape.single_rank_axes:
            self.add_group(ActionKind.REDUCE_GRAD, COMPUTE, group, micro_batch, ())
            return
        if self.shape.pipelined or not self.shape.overlap_gather:
            self.add_blocking(ActionKind.REDUCE_GRAD, group, micro_batch, group.axes)
            return
        self.reduce_beside(group, micro_batch)

    def _finished(self, stage: int, work: int) -> None:
        """Reduce a stage's gradients behind its last backward ([Note: sharded in a pipeline])."""
        if not (self.sharded and self.shape.pipelined) or self.left[stage] or work == Work.FORWARD:
            return
        last = self.plan.micro_batches - 1
        for number, unit in enumerate(self.stages[stage]):
            for axes in unit.axes:
                group = ParameterGroup(stage, number, axes)
                if group in self.present:
                    self._reshard(group, last)
                self._reduce(group, unit, last)

    def _change(self, gone: Sequence[int], comes: Sequence[int]) -> None:
        """Whole stages are released and gathered before an action, as torch's lists of actions do."""
        for stage in gone:
            for group in self._groups(stage):
                if group in self.present:
                    self._reshard(group, -1)
        for stage in comes:
            for group in self._groups(stage):
                self._unshard(group, -1, (self.last,), 1)

    def _groups(self, stage: int) -> list[ParameterGroup]:
        units = enumerate(self.stages[stage])
        return [ParameterGroup(stage, number, axes) for number, unit in units for axes in unit.axes]

    def _reduce_together(self, stage: int) -> None:
        if self.exchanges:
            self._communicate_whole_stage(ActionKind.REDUCE_GRAD, stage)

    def _communicate_whole_stage(self, kind: ActionKind, stage: int) -> None:
        """Gather or reduce all of a stage while nothing is computed."""
        self.add_blocking(kind, ParameterGroup(stage, ALL_UNITS, "dp"), -1, "dp")

    def _end_step(self) -> None:
        """Emit what follows the last backward: reductions that nothing overlaps, sums, the optimizer."""
        shape = self.shape
        if shape.shards in ("", "optimizer") and not shape.overlap_reduce:
            for stage in self.stages:
                self._reduce_together(stage)
        if shape.sums:
            self._meet("tp")
        self.await_network()
        if shape.tied and self.rank in (self.plan.rank_of(0), self.plan.rank_of(self.plan.stages - 1)):
            self._meet(COPIES)
        if self.plan.ranks > 1:
            self._meet(WORLD)
        self.last = self.actions.add(ActionKind.STEP, COMPUTE, self.take_pending())

    def _meet(self, group: str) -> None:
        self.last = self.actions.add(ActionKind.ALL_REDUCE, COMPUTE, self.take_pending(), group=group)

    def _compute(self, region: Region, micro_batch: int, begun: Sequence[ParameterGroup] = ()) -> None:
        if self.sharded and self.shape.pipelined and not self.direct:
            for group in [group for group in self.asked if group.stage == region.stage]:
                self.pending.append(self.asked.pop(group))
        self.add_region(region, micro_batch, begun)

    def _receive(self, work: int, stage: int, micro_batch: int) -> None:
        """Ask for what a stage takes from its neighbour, if that is on another rank."""
        if (neighbour := self._neighbour(work, stage, -1)) >= 0:
            number = self.numbers.storage(Border(stage, work == Work.FORWARD))
            peer = self.plan.rank_of(neighbour)
            self.pending.append(
                self.actions.add(
                    ActionKind.RECV, RECEIVE, storage=number, micro_batch=micro_batch, peer=peer, group="pp"
                )
            )

    def _send(self, work: int, stage: int, micro_batch: int) -> int:
        """Hand what a stage made to its neighbour, if that is on another rank; gives the SEND, or -1."""
        if (neighbour := self._neighbour(work, stage, 1)) < 0:
            return -1
        number = self.numbers.storage(Border(neighbour, work == Work.FORWARD))
        stream, peer = self._send_stream(work), self.plan.rank_of(neighbour)
        waits = (self.last,) if stream != COMPUTE else ()
        send = self.actions.add(
            ActionKind.SEND, stream, waits, storage=number, micro_batch=micro_batch, peer=peer, group="pp"
        )
        if stream == COMPUTE:
            self.last = send
        return send

    def _send_stream(self, work: int) -> int:
        if not self.shape.overlap_send:
            return COMPUTE
        return SEND_NEXT if work == Work.FORWARD else SEND_PREVIOUS

    def _neighbour(self, work: int, stage: int, onward: int) -> int:
        """Stage on another rank that a pass hands on to (``onward`` 1) or takes from (-1); -1 for none."""
        neighbour = stage + (onward if work == Work.FORWARD else -onward)
        if work == Work.BACKWARD_WEIGHT or not 0 <= neighbour < self.plan.stages:
            return -1
        return -1 if self.plan.rank_of(neighbour) == self.rank else neighbour


def _units(runs: Sequence[tuple[UnitShape, int]]) -> list[UnitShape]:
    return [unit for unit, count in runs for _ in range(count)]


@lru_cache(maxsize=2048)
def gathering(plan: Schedule, rank: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Stages that are released, and then gathered, before each action of a rank ([Note: sharded in a pipeline])."""
    mine = plan.stages_of(rank)
    chunks: list[int] = plan.orders[rank][:, 1].tolist()
    order = [mine[chunk] for chunk in chunks]
    coming: list[tuple[int, ...]] = []
    for stage in reversed(order):
        behind = coming[-1] if coming else ()
        coming.append((stage, *[stage_behind for stage_behind in behind if stage_behind != stage])[:GATHERED_AT_ONCE])
    changes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    gathered: tuple[int, ...] = ()
    for needed_stages in reversed(coming):
        released = tuple(stage for stage in gathered if stage not in needed_stages)
        changes.append((released, tuple(stage for stage in needed_stages if stage not in gathered)))
        gathered = needed_stages
    return tuple(changes)
