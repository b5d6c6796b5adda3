"""Stages: a captured micro-batch is cut into the stages of a pipeline, and each rank gets the operations of its own.

[Note: where stages begin]
Forward is cut where fewer bytes are alive than before and behind, which is between the blocks of most models, so that
the stage with the most work, that of sending included, has as little as can be; never where a value is changed in place
before and behind. An operation of backward belongs to the
stage of its module's forward; where that is several or none, to the lowest stage whose gradients it reads. Work that
needs no parameter, such as masks and tables of positions, is done again by each rank that reads it.

[Note: what travels]
A storage that one rank writes and another reads is sent once to each reader, behind its last write, and received before
its first read; it then stays there as any other storage would. So a tied weight has the bits of one process: the
gradient of its second use travels to the stage of the first, is added there, and the updated weight is sent back.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.graph import DTYPE_BYTES, Op, OpKind, Phase, Ref, Role, StepGraph, Tensor, rename_op
from lading.ir.layout import Layout
from lading.ir.reduction import RECEIVE, SEND
from lading.ir.schedules import Schedule
from lading.ir.sharding import units_of

#: Roles of storages that every rank has of itself.
_EVERYWHERE = frozenset({Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.CONSTANT})


#: Places at which stages may begin, at most: the search takes the square of them.
_MOST_PLACES = 1000


class Row(NamedTuple):
    """Pass of a stage that an operation belongs to; of backward, the half."""

    stage: int
    work: Work


@dataclass(frozen=True)
class RankStep:
    """A rank's operations of a captured micro-batch.

    Attributes:
        rows: Pass of each operation.
        rank: Number of the rank along the pipeline.
        across: Ranks of the pipeline, from ``Layout.across``.
        sent, received: What travels behind the updates: first name of a parameter, the other rank, and a number of its
            own. Who updates a parameter sends it to those that read it too.
    """

    graph: StepGraph
    rows: tuple[Row, ...]
    rank: int
    across: tuple[tuple[str, int | str], ...]
    sent: tuple[tuple[str, int, int], ...] = ()
    received: tuple[tuple[str, int, int], ...] = ()

    def gather_keys(self) -> dict[str, tuple[int, str]]:
        """Say by a parameter's first name what parameters that are gathered together have in common.

        They are trained by one stage, as another's are ready at another time; and those that travel go alone, so that
        the ranks between which they do have the same shards of them.
        """
        graph, alone = self.graph, {name for name, _, _ in (*self.sent, *self.received)}
        reads, writes = (
            [*zip(self.rows, storages_of, strict=True)] for storages_of in (graph.op_reads, graph.op_writes)
        )
        stages = {storage: row.stage for row, touched in (*reads[::-1], *writes) for storage in touched}
        apart: dict[str, tuple[int, str]] = {}
        for parameter in graph.parameters:
            name, ready = parameter.names[0], parameter.tensor if parameter.gradient is None else parameter.gradient
            apart[name] = stages.get(graph.storage_of(ready), -1), name if name in alone else ""
        return apart

    def with_shards(self, graph: StepGraph, origins: Sequence[Sequence[int]]) -> RankStep:
        """Make the step of sharded parameters; each operation stands behind those of this one that ``origins`` says."""
        rows = tuple(max((self.rows[index] for index in behind), key=_arrival_key) for behind in origins)
        return dataclasses.replace(self, graph=graph, rows=rows)

    def order(self, schedule: Schedule) -> list[tuple[tuple[int, ...], int]]:
        """Runs of operations of each action of the rank's schedule, with its micro-batch."""
        runs: dict[Row, list[int]] = {}
        for index, row in enumerate(self.rows):
            runs.setdefault(row, []).append(index)
        order: list[tuple[tuple[int, ...], int]] = []
        for work, chunk, micro, _ in schedule.orders[self.rank].tolist():
            halves = (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT) if work == Work.BACKWARD else (Work(work),)
            stage = schedule.stage(self.rank, chunk)
            order.append((tuple(sorted(i for half in halves for i in runs.get(Row(stage, half), ()))), micro))
        return order


def narrow_cuts(graph: StepGraph, stages: int, work: Sequence[float], sending: float) -> tuple[int, ...]:
    """Operations of forward at which the stages but the first begin ([Note: where stages begin]).

    Args:
        graph: A captured micro-batch.
        work: Work of each operation, in seconds or another unit.
        sending: Work of sending a byte, which counts for the stage that does it.
    Raises:
        ConfigError: there are fewer places to cut than stages.
    """
    free = _free(graph)
    order = [i for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD and i not in free]
    alive, changing = _alive_bytes(graph, order), _changing(graph, order)
    inner = [at for at in range(1, len(order)) if not changing[at]]
    places = [at for at in inner if alive[at] <= min(alive[at - 1] or alive[at], alive[at + 1] or alive[at])]
    places = sorted(sorted(places, key=lambda at: alive[at])[:_MOST_PLACES])
    if len(places) < stages - 1:
        raise ConfigError(
            f"layout: expected a model that can be cut into {stages} stages, found {len(places) + 1} parts; use fewer"
        )
    before = np.concatenate([[0.0], np.cumsum([work[i] for i in order])])
    sent_s = np.array([0.0, *(sending * alive[at] for at in places), 0.0])
    return tuple(order[at] for at in _even(before, places, sent_s, stages))


def _alive_bytes(graph: StepGraph, order: Sequence[int]) -> list[int]:
    """Bytes written before, and read from, each position of forward on."""
    at = {index: place for place, index in enumerate(order)}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, place in at.items():
        for storage in graph.op_writes[index]:
            first.setdefault(storage, place)
        for storage in graph.op_reads[index]:
            last[storage] = place
    change = [0] * (len(order) + 1)
    for storage, place in first.items():
        if graph.storages[storage].role not in _EVERYWHERE and last.get(storage, -1) > place:
            change[place + 1] += graph.storages[storage].size_bytes
            change[last[storage] + 1] -= graph.storages[storage].size_bytes
    return np.cumsum(change).tolist()


def _changing(graph: StepGraph, order: Sequence[int]) -> list[int]:
    """Values written before each position of forward and again from it on, as the gates of an LSTM: no place to cut."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, index in enumerate(order):
        for storage in graph.op_writes[index]:
            last[storage] = place
            first.setdefault(storage, place)
    change = [0] * (len(order) + 1)
    for storage, place in first.items():
        change[place + 1] += 1
        change[last[storage] + 1] -= 1
    return np.cumsum(change).tolist()


def _even(
    before: npt.NDArray[np.float64], places: Sequence[int], sent: npt.NDArray[np.float64], stages: int
) -> list[int]:
    """Places at which to cut so that the most work of a stage is least: dynamic programming over places."""
    ends = np.array([0, *places, len(before) - 1])
    work = before[ends]
    most = work + sent
    most[0] = np.inf  # a stage has at least one operation
    came: list[npt.NDArray[np.int64]] = []
    for _ in range(stages - 1):
        longest = np.maximum(most[None, :], (work + sent)[:, None] - work[None, :])
        longest[np.triu_indices(len(ends))] = np.inf
        came.append(longest.argmin(axis=1))
        most = longest.min(axis=1)
    cuts, end = list[int](), len(ends) - 1
    for back in reversed(came):
        end = int(back[end])
        cuts.append(int(ends[end]))
    return cuts[::-1]


def _free(graph: StepGraph) -> frozenset[int]:
    """Operations of forward and loss that need no parameter and nothing random: any rank can do them."""
    written = [s for op in graph.ops for s in {graph.storage_of(t) for t in op.mutates}]
    changed = frozenset(written)
    available = {i for i, s in enumerate(graph.storages) if s.role in _EVERYWHERE and s.role is not Role.PARAMETER}
    free: set[int] = set()
    for index, op in enumerate(graph.ops):
        outputs = {graph.storage_of(t) for t in op.outputs}
        if op.phase is Phase.BACKWARD or op.random or op.mutates or not outputs or not changed.isdisjoint(outputs):
            continue
        if available.issuperset(graph.op_reads[index]):
            free.add(index)
            available |= outputs
    return frozenset(free)


def stage_of_ops(graph: StepGraph, cuts: Sequence[int]) -> tuple[int, ...]:
    """Stage of each operation; -1 for one that every rank may do ([Note: where stages begin])."""
    free, last = _free(graph), len(cuts)
    stages = [-1] * len(graph.ops)
    homes: dict[str, set[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.phase is not Phase.BACKWARD and index not in free:
            stages[index] = bisect_right(cuts, index) if op.phase is Phase.FORWARD else last
            homes.setdefault(op.module, set()).add(stages[index])
    stage_of_storage: dict[int, int] = {}
    waiting: list[int] = []
    for index, op in enumerate(graph.ops):
        if op.phase is not Phase.BACKWARD:
            continue
        home, above = (
            homes.get(op.module, set[int]()),
            [stage_of_storage[s] for s in graph.op_reads[index] if s in stage_of_storage],
        )
        if not above and len(home) != 1:
            waiting.append(index)
            continue
        stages[index] = min([*above, *(home if len(home) == 1 else ())])
        stage_of_storage.update(dict.fromkeys(graph.op_writes[index], stages[index]))
    for index in reversed(waiting):
        writes = set(graph.op_writes[index])
        readers = (stages[i] for i in range(index + 1, len(graph.ops)) if not writes.isdisjoint(graph.op_reads[i]))
        stages[index] = next(readers, last)
    return tuple(stages)


def rank_steps(
    graph: StepGraph, stages: Sequence[int], layout: Layout, rank_of: Callable[[int], int]
) -> tuple[RankStep, ...]:
    """Cut a captured micro-batch into the steps of all ranks of a pipeline ([Note: what travels]).

    Args:
        stages: Stage of each operation, from ``stage_of_ops``.
        rank_of: Rank along the pipeline of a stage.
    Raises:
        ConfigError: two ranks write one storage, or one changes a buffer that another reads.
    """
    cutter = _StageCutter(graph, stages, layout.across("pp"), rank_of)
    return tuple(cutter.rank(rank) for rank in range(layout.pp))


def with_copies(step: StepGraph, part: RankStep) -> StepGraph:
    """Send each weight that another stage reads too, once it has its new value, and receive those of others.

    Args:
        step: The whole step of a rank, with updates.
        part: What it was made of.
    """
    tensors, ops = list(step.tensors), list(step.ops)
    places, units = {p.names[0]: p.tensor for p in step.parameters}, units_of(step)
    for name, peer, tag in (*part.sent, *part.received):
        tensor = step.tensors[places[name]]
        unit = units.get(tensor.storage)
        if unit is not None and not unit.lasts:
            flat = unit.shard  # of which the other rank has the same one
        else:
            flattened = dataclasses.replace(tensor, shape=(prod(tensor.shape),), stride=(1,))
            tensors.append(flattened if unit else _flat_tensor(step, tensor.storage, {tensor.storage: tensor.storage}))
            flat = len(tensors) - 1
        size, facts = tensors[flat].size_bytes, (("peer", peer), ("tag", tag), *part.across)
        beside = dataclasses.replace(step.ops[0], phase=Phase.OPTIMIZER, module=name.rpartition(".")[0])
        op = _transfer(SEND if (name, peer, tag) in part.sent else RECEIVE, facts, size, beside)
        written = () if op.name == SEND else (flat,)
        ops.append(dataclasses.replace(op, args=(Ref(flat),), inputs=(flat,), results=(None,), mutates=written))
    return dataclasses.replace(step, tensors=tuple(tensors), ops=tuple(ops))


class _StageCutter:
    """Cuts one graph; attributes are of all ranks.

    Attributes:
        rank_of_op: Rank of each operation, -1 for one that every rank may do.
        maker: Rank that writes a storage that is not everywhere.
        readers: Ranks that read it, besides.
        rows: Pass of each operation.
        travelling: Number of each storage that travels.
    """

    def __init__(
        self,
        graph: StepGraph,
        stages: Sequence[int],
        across: tuple[tuple[str, int | str], ...],
        rank_of: Callable[[int], int],
    ) -> None:
        self.graph, self.stages, self.across = graph, stages, across
        self.rank_of_op = [-1 if stage < 0 else rank_of(stage) for stage in stages]
        self.maker = self._makers()
        self.readers: dict[int, list[int]] = {}
        for index, rank in enumerate(self.rank_of_op):
            for storage in graph.op_reads[index] if rank >= 0 else ():
                if self.maker.get(storage, rank) != rank and rank not in self.readers.setdefault(storage, []):
                    self.readers[storage].append(rank)
        for name, tensor in graph.buffers:
            if others := self.readers.get(graph.storage_of(tensor)):
                raise ConfigError(
                    f"layout: expected the stage that changes the buffer {name!r} to be the only one that reads it, "
                    f"found that rank {others[0]} does, too; use fewer stages, or train without pp"
                )
        self.travelling = {storage: number for number, storage in enumerate(sorted(self.readers))}
        self.rows = self._rows()
        self.owner = self._owners()

    def _makers(self) -> dict[int, int]:
        graph, maker = self.graph, dict[int, int]()
        for index, rank in enumerate(self.rank_of_op):
            for storage in graph.op_writes[index] if rank >= 0 else ():
                if maker.setdefault(storage, rank) != rank:
                    raise ConfigError(
                        f"layout: expected each value to be written by one stage, found {graph.storages[storage].name} "
                        f"written by {graph.ops[index].name} of rank {rank} and by rank {maker[storage]}; use fewer "
                        "stages"
                    )
        return maker

    def _rows(self) -> list[Row]:
        """Pass of each operation: of backward, the half that other stages wait for, or the other."""
        graph, needed_storages = self.graph, set[int]()
        maker = {s: self.stages[i] for i in range(len(graph.ops)) for s in graph.op_writes[i]}
        for index, stage in enumerate(self.stages):
            needed_storages.update(
                s for s in graph.op_reads[index] if stage >= 0 and maker.get(s, stage) not in (stage, -1)
            )
        rows: list[Row] = []
        for index in reversed(range(len(graph.ops))):
            stage, phase = self.stages[index], graph.ops[index].phase
            if phase is not Phase.BACKWARD:
                rows.append(Row(stage, Work.FORWARD))
            elif needed_storages.isdisjoint(graph.op_writes[index]):
                rows.append(Row(stage, Work.BACKWARD_WEIGHT))
            else:
                rows.append(Row(stage, Work.BACKWARD_INPUT))
                needed_storages.update(graph.op_reads[index])
        return rows[::-1]

    def _owners(self) -> dict[int, int]:
        """Rank that updates each trained parameter, by its tensor: the one that has its gradient."""
        graph = self.graph
        return {p.tensor: self.maker[graph.storage_of(p.gradient)] for p in graph.parameters if p.gradient is not None}

    def rank(self, rank: int) -> RankStep:
        """Make the step of one rank."""
        graph = self.graph
        rank_ops = [index for index, of in enumerate(self.rank_of_op) if of == rank]
        entries = [((index, 1), self.rows[index], graph.ops[index]) for index in rank_ops]
        entries += self._repeated(rank_ops)
        entries += [self._receive(storage, rank_ops) for storage, ranks in self.readers.items() if rank in ranks]
        entries += [
            self._send(storage, peer, rank_ops)
            for storage, ranks in self.readers.items()
            if self.maker[storage] == rank
            for peer in ranks
        ]
        entries.sort(key=lambda entry: entry[0])
        return RankStep(
            _pruned(graph, [op for _, _, op in entries], rank, self),
            tuple(row for _, row, _ in entries),
            rank,
            self.across,
            sent=tuple((name, to, tag) for name, owner, to, tag in self._copies() if owner == rank),
            received=tuple((name, owner, tag) for name, owner, to, tag in self._copies() if to == rank),
        )

    def _copies(self) -> list[tuple[str, int, int, int]]:
        """Parameters that a rank updates and another reads too: name, both ranks, and a number of its own."""
        readers, first = self._parameter_readers(), len(self.travelling)
        return [
            (p.names[0], self.owner[p.tensor], to, first + number)
            for number, p in enumerate(self.graph.parameters)
            if p.tensor in self.owner
            for to in readers[self.graph.storage_of(p.tensor)]
            if to != self.owner[p.tensor]
        ]

    def _parameter_readers(self) -> dict[int, list[int]]:
        """Ranks that read each parameter, by storage."""
        readers: dict[int, list[int]] = {self.graph.storage_of(p.tensor): [] for p in self.graph.parameters}
        for index, rank in enumerate(self.rank_of_op):
            for storage in self.graph.op_reads[index] if rank >= 0 else ():
                if storage in readers and rank not in readers[storage]:
                    readers[storage].append(rank)
        return readers

    def _repeated(self, rank_ops: Sequence[int]) -> list[tuple[tuple[int, int], Row, Op]]:
        """Work without parameters that a rank does of itself, in the first pass that reads it."""
        graph = self.graph
        row_of_reader: dict[int, Row] = {}
        for index in reversed(rank_ops):
            row_of_reader.update(dict.fromkeys(graph.op_reads[index], self.rows[index]))
        repeated: list[tuple[tuple[int, int], Row, Op]] = []
        for index in reversed(range(len(graph.ops))):
            needed_writes = [storage for storage in graph.op_writes[index] if storage in row_of_reader]
            if self.stages[index] < 0 and needed_writes:
                row = min((row_of_reader[storage] for storage in needed_writes), key=_arrival_key)
                repeated.append(((index, 1), row, graph.ops[index]))
                for storage in graph.op_reads[index]:
                    row_of_reader[storage] = min(row, row_of_reader.get(storage, row), key=_arrival_key)
        return repeated

    def _receive(self, storage: int, rank_ops: Sequence[int]) -> tuple[tuple[int, int], Row, Op]:
        readers = [index for index in rank_ops if storage in self.graph.op_reads[index]]
        first, row = readers[0], min((self.rows[index] for index in readers), key=_arrival_key)
        flat = self._flat(storage)
        receive = self._transfer(RECEIVE, storage, self.maker[storage], self.graph.ops[first])
        return (first, 0), row, dataclasses.replace(receive, outputs=(flat,), results=(flat,))

    def _send(self, storage: int, peer: int, rank_ops: Sequence[int]) -> tuple[tuple[int, int], Row, Op]:
        last = next(index for index in reversed(rank_ops) if storage in self.graph.op_writes[index])
        flat = self._flat(storage)
        send = self._transfer(SEND, storage, peer, self.graph.ops[last])
        return (last, 2), self.rows[last], dataclasses.replace(send, args=(Ref(flat),), inputs=(flat,), results=(None,))

    def _transfer(self, name: str, storage: int, peer: int, beside: Op) -> Op:
        facts = (("peer", peer), ("tag", self.travelling[storage]), *self.across)
        return _transfer(name, facts, self.graph.storages[storage].size_bytes, beside)

    def _flat(self, storage: int) -> int:
        """Negative number of the flat view of a storage, which ``_pruned`` makes."""
        return -1 - storage


def _arrival_key(row: Row) -> tuple[bool, int, bool]:
    """Sort key of passes of one rank and micro-batch by when they come."""
    forward = row.work is Work.FORWARD
    return not forward, row.stage if forward else -row.stage, row.work is Work.BACKWARD_WEIGHT


def _transfer(name: str, facts: tuple[tuple[str, int | str], ...], size_bytes: int, beside: Op) -> Op:
    """Make a send or a receive, without its tensor."""
    return Op(
        name=name, phase=beside.phase, args=(), kwargs=facts, inputs=(), outputs=(), results=(), mutates=(),
        module=beside.module, kind=OpKind.COLLECTIVE, bytes_read=size_bytes, bytes_written=size_bytes,
    )  # fmt: skip


def _pruned(graph: StepGraph, ops: Sequence[Op], rank: int, cutter: _StageCutter) -> StepGraph:
    """Graph of some operations, with the tensors and storages that they touch, and the values of this rank."""
    touched = {t for op in ops for t in (*op.inputs, *op.outputs, *op.mutates) if t >= 0}
    touched |= {t for op in ops for t in op.results if t is not None and t >= 0}
    storages_used = {graph.storage_of(t) for t in touched}
    everywhere = rank == 0
    parameters = [
        p
        for p in graph.parameters
        if graph.storage_of(p.tensor) in storages_used
        or cutter.owner.get(p.tensor, -1) == rank
        or (everywhere and p.tensor not in cutter.owner and not _is_read(graph, p.tensor))
    ]
    buffers = [
        (name, t)
        for name, t in graph.buffers
        if graph.storage_of(t) in storages_used or (everywhere and not _is_read(graph, t))
    ]
    gradients = {p.tensor: p.gradient for p in parameters if cutter.owner.get(p.tensor, -1) == rank}
    losses = [t for t in graph.losses if cutter.maker.get(graph.storage_of(t)) == rank]
    touched |= {p.tensor for p in parameters} | {g for g in gradients.values() if g is not None}
    touched |= {t for _, t in buffers} | {t for inputs in graph.inputs for _, t in inputs} | set(losses)
    old_tensors = sorted(touched)
    flats = sorted({t for op in ops for t in (*op.inputs, *op.outputs) if t < 0}, reverse=True)
    old_storages = sorted({graph.storage_of(t) for t in old_tensors} | {-1 - t for t in flats})
    storage_map = {old: new for new, old in enumerate(old_storages)}
    tensors = [dataclasses.replace(graph.tensors[t], storage=storage_map[graph.storage_of(t)]) for t in old_tensors] + [
        _flat_tensor(graph, -1 - t, storage_map) for t in flats
    ]
    names = {old: new for new, old in enumerate([*old_tensors, *flats])}
    return dataclasses.replace(
        graph,
        storages=tuple(graph.storages[s] for s in old_storages),
        tensors=tuple(tensors),
        ops=tuple(rename_op(op, names) for op in ops),
        parameters=tuple(
            dataclasses.replace(p, tensor=names[p.tensor], gradient=_renamed(gradients.get(p.tensor), names))
            for p in parameters
        ),
        buffers=tuple((name, names[t]) for name, t in buffers),
        inputs=tuple(tuple((name, names[t]) for name, t in inputs) for inputs in graph.inputs),
        losses=tuple(names[t] for t in losses),
        blocks=(),
    )


def _is_read(graph: StepGraph, tensor: int) -> bool:
    storage = graph.storage_of(tensor)
    return any(storage in reads for reads in graph.op_reads)


def _renamed(tensor: int | None, names: dict[int, int]) -> int | None:
    return None if tensor is None else names[tensor]


def _flat_tensor(graph: StepGraph, storage: int, storage_map: dict[int, int]) -> Tensor:
    """View of all of a storage as a row of elements."""
    dtypes: Iterable[str] = (t.dtype for t in graph.tensors if t.storage == storage)
    dtype = next(iter(dtypes))
    count = graph.storages[storage].size_bytes // DTYPE_BYTES[dtype]
    return Tensor(storage_map[storage], dtype, (count,), (1,))
