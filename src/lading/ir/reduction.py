"""Reduction: the gradients of a step become their mean over replicas, a bucket at a time, before they are used.

A bucket is a few gradients that become final one after another: copied side by side, they are reduced by one collective
on a stream of its own, and what uses them then reads them where they lie in the bucket. A gradient that fills a bucket
alone is reduced in place. What uses the gradients of a bucket stands behind the next bucket's reduction, so that
computing goes on while a bucket is reduced; what uses the last bucket has to wait for it.

[Note: numbers] Each replica's gradients are summed over its own micro-batches first. The sum over replicas is divided
by their number, so for two replicas, and two micro-batches in one process, the same numbers are added in the same
order; with more replicas the collective's order counts, which is the library's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from lading.errors import ConfigError
from lading.ir.graph import (
    DTYPE_BYTES,
    Arg,
    Literal,
    Op,
    OpKind,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tensor,
    rename_op,
    row_major,
)
from lading.ir.layout import Layout
from lading.ir.opkinds import base_name

#: Sums a tensor in place over the ranks along the axes that an operation's ``over`` names, and divides it by their
#: number, or by ``mean_of``.
ALL_REDUCE = "c10d.allreduce_.mean"
#: Sums a tensor over such ranks in place.
ALL_REDUCE_SUM = "c10d.allreduce_.sum"
#: Sends a storage to the rank ``peer`` of those along ``over``, and makes one of what such a rank sends.
SEND, RECEIVE = "c10d.send.default", "c10d.recv_.default"
TRANSFERS = frozenset((SEND, RECEIVE))
#: Sums a tensor over such ranks, divides it by their number, or by ``mean_of``, and keeps this rank's part; the rest is
#: lost.
REDUCE_SCATTER = "c10d.reduce_scatter.mean"
#: Sums a tensor over such ranks, gathers what they have one after another, and sums a tensor of which each keeps its
#: part: each makes a tensor, so that it can be dropped and made again.
SUM, ALL_GATHER, SCATTER_SUM = "c10d.allreduce.sum", "c10d.allgather.runs", "c10d.reduce_scatter.sum"
#: Sends a part of a tensor to each of such ranks, and makes one of what they send, one after another.
ALL_TO_ALL = "c10d.alltoall.runs"
#: Copies a rank's own runs of columns out of (rows, columns), whose parts are an argument.
OWN_RUNS = "c10d.own_runs.default"
#: Makes a rank's own rows of a causal mask: minus infinity behind the diagonal.
CAUSAL_ROWS = "c10d.causal_rows.default"
#: Finds the rows of a rank's own words, of so many, and which words are its own.
OWN_WORDS = "c10d.own_words.default"
#: Operations that draw as many random numbers whatever the values of their operands.
_COUNTED = frozenset({
    "native_dropout", "dropout", "bernoulli", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like",
    "randperm", "normal", "normal_functional", "uniform", "exponential", "random", "geometric", "log_normal", "cauchy",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Gradient:
    """Gradient of a parameter, the operation of the step that writes it last, and ``Parameter.gradient_terms``."""

    tensor: int
    final: int
    module: str
    terms: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Elements ``start`` to ``stop`` of a storage, which lie from ``offset`` on in the tensor ``bucket``."""

    start: int
    stop: int
    bucket: int
    offset: int


def reduce_gradients(step: StepGraph, layout: Layout) -> StepGraph:
    """Reduce all gradients of an expanded step over the replicas of a layout, in buckets of at least its bytes.

    What ranks that share a sequence have of a gradient is summed over them in the same collective.
    """
    return _Reducer(step, layout).reduced()


def ranks_of(graph: StepGraph) -> int:
    """Number of ranks of the job whose step this is; 1 where it has no collective."""
    first = min(graph.collectives, default=-1)
    return 1 if first < 0 else cast("int", dict(graph.ops[first].kwargs)["of"])


def joined_ranks(op: Op) -> int:
    """Number of ranks that a collective joins."""
    return cast("int", dict(op.kwargs)["ranks"])


def reduction(
    name: str,
    across: tuple[tuple[str, int | str], ...],
    tensor: tuple[int, int],
    output: int | None = None,
    *,
    phase: Phase,
    module: str,
) -> Op:
    """Make the collective that reduces a tensor over ranks.

    Args:
        across: Which ranks, from ``Layout.across``.
        tensor: Its number, and its bytes.
        output: Number of the tensor that keeps this rank's part of it; None where all of it is kept.
    """
    number, size = tensor
    outputs = () if output is None else (output,)
    return Op(
        name=name, phase=phase, args=(Ref(number),), kwargs=across, inputs=(number,), outputs=outputs,
        results=outputs or (None,), mutates=(number,), module=module, kind=OpKind.COLLECTIVE,
        bytes_read=size, bytes_written=size,
    )  # fmt: skip


def with_draws(captured: StepGraph, kind: str) -> StepGraph:
    """Number the operations of a captured micro-batch that draw random numbers, so that each rank draws its own part.

    Args:
        kind: Kind of the device.

    Raises:
        ConfigError: how many numbers one draws depends on values, or is not known of such a device.
    """
    ops = list(captured.ops)
    for number, index in enumerate(i for i, op in enumerate(ops) if op.random):
        op = ops[index]
        if kind != "cpu" or base_name(op.name) not in _COUNTED:
            why = f"a {kind} device" if kind != "cpu" else f"{op.name}, which draws as many as its values ask for,"
            raise ConfigError(
                f"layout: expected random numbers on several ranks of which it is known how many each operation draws "
                f"on a CPU, found {why} in {op.module or 'the loss'}; draw without it, or train on one rank"
            )
        ops[index] = dataclasses.replace(op, draw=(number, 0))
    return dataclasses.replace(captured, ops=tuple(ops))


class _Reducer:
    """Builder of the step with its reductions.

    Attributes:
        spans: Places of the elements of gradients in their buckets, by storage.
        after: Copies and collectives that come behind an operation, by its number.
    """

    def __init__(self, step: StepGraph, layout: Layout) -> None:
        self.step, self.layout, self.bucket_bytes = step, layout, layout.bucket_bytes
        self.storages, self.tensors = list(step.storages), list(step.tensors)
        self.spans: dict[int, list[_Span]] = {}
        self.after: dict[int, list[Op]] = {}
        self.renamed: dict[int, int] = {}

    def reduced(self) -> StepGraph:
        for number, bucket in enumerate(self._buckets()):
            self._reduce(number, bucket)
        rows: list[tuple[Op, int | None]] = []
        for index, op in enumerate(self.step.ops):
            rows += [(self._on_buckets(op), index), *((new, None) for new in self.after.get(index, ()))]
        parameters = tuple(
            p if p.gradient is None else dataclasses.replace(p, gradient=self._in_bucket(p.gradient))
            for p in self.step.parameters
        )
        graph = dataclasses.replace(
            self.step,
            storages=tuple(self.storages),
            tensors=tuple(self.tensors),
            ops=tuple(op for op, _ in in_step_with_network(rows, self.tensors, ALL_REDUCE)),
            parameters=parameters,
        )
        graph.validate()
        return graph

    def _gradients(self) -> list[_Gradient]:
        """List the gradients in the order in which they become final."""
        final = {
            self.step.storage_of(t): index
            for index, op in enumerate(self.step.ops)
            if op.phase is not Phase.OPTIMIZER
            for t in (*op.outputs, *op.mutates)
        }
        shared = [p for p in self.step.parameters if not p.is_on_one_rank]
        named = {p.gradient: p for p in shared if p.gradient is not None}
        gradients = [
            _Gradient(tensor, final[self.step.storage_of(tensor)], p.names[0].rpartition(".")[0], p.gradient_terms)
            for tensor, p in named.items()
            if self.layout.dp * p.gradient_terms > 1
        ]
        return sorted(gradients, key=lambda gradient: (gradient.final, gradient.tensor))

    def _buckets(self) -> Iterator[list[_Gradient]]:
        """Yield gradients of one dtype that are reduced together, in the order in which the last becomes final.

        A bucket's are all sums over ranks that share a sequence, or none is.
        """
        filling: dict[tuple[str, int], list[_Gradient]] = {}
        for gradient in self._gradients():
            key = self.tensors[gradient.tensor].dtype, gradient.terms
            bucket = filling.setdefault(key, [])
            bucket.append(gradient)
            if sum(self.tensors[g.tensor].touched_bytes for g in bucket) >= self.bucket_bytes:
                yield filling.pop(key)
        yield from sorted(filling.values(), key=lambda bucket: bucket[-1].final)

    def _reduce(self, number: int, bucket: Sequence[_Gradient]) -> None:
        """Write the copies of a bucket and its collective behind the last gradient's last write."""
        ops = self.after.setdefault(bucket[-1].final, [])
        flat = [self._flat(gradient, ops) for gradient in bucket]
        module = bucket[0].module if len({g.module for g in bucket}) == 1 else f"{bucket[0].module} and others"
        reduced = flat[0] if len(flat) == 1 else self._gathered(number, bucket, flat, ops, module)
        size = self.tensors[reduced].touched_bytes
        across = self._across(bucket[0].terms)
        ops.append(reduction(ALL_REDUCE, across, (reduced, size), phase=Phase.BACKWARD, module=module))

    def _across(self, terms: int) -> tuple[tuple[str, int | str], ...]:
        """Ranks over which gradients are summed, and of how many replicas that is the mean."""
        if terms == 1:
            return self.layout.across("replicate", "shard")
        return (*self.layout.across("replicate", "shard", "cp"), ("mean_of", self.layout.dp))

    def _flat(self, gradient: _Gradient, ops: list[Op]) -> int:
        """Make the view of a gradient in which its elements lie one after another; of a copy where they do not."""
        tensor = self.tensors[gradient.tensor]
        count = prod(tensor.shape)
        if tensor.is_dense:
            return self._tensor(dataclasses.replace(tensor, shape=(count,), stride=(1,)))
        name = self.step.storages[tensor.storage].name
        storage = self._storage(f"{name}.dense", count * DTYPE_BYTES[tensor.dtype], Role.GRADIENT)
        copy = self._tensor(Tensor(storage, tensor.dtype, tensor.shape, row_major(tensor.shape)))
        layout = (("memory_format", Literal("memory_format", "contiguous_format")),)
        ops.append(
            self._copying(
                "aten.clone.default", (Ref(gradient.tensor),), layout, (gradient.tensor,), copy, gradient.module
            )
        )
        self.renamed[gradient.tensor] = copy
        return self._tensor(Tensor(storage, tensor.dtype, (count,), (1,)))

    def _gathered(
        self, number: int, bucket: Sequence[_Gradient], flat: Sequence[int], ops: list[Op], module: str
    ) -> int:
        """Copy flat gradients side by side into a bucket of their own, and note where each lies."""
        dtype = self.tensors[flat[0]].dtype
        count = sum(prod(self.tensors[t].shape) for t in flat)
        storage = self._storage(f"bucket {number} of gradients", count * DTYPE_BYTES[dtype], Role.GRADIENT)
        joined = self._tensor(Tensor(storage, dtype, (count,), (1,)))
        ops.append(self._copying("aten.cat.default", (tuple(map(Ref, flat)),), (), tuple(flat), joined, module))
        offset = 0
        for gradient, piece in zip(bucket, flat, strict=True):
            start, length = self.tensors[piece].offset, prod(self.tensors[piece].shape)
            if gradient.tensor in self.renamed:
                copy = self.renamed[gradient.tensor]
                self.renamed[gradient.tensor] = self._tensor(
                    dataclasses.replace(self.tensors[copy], storage=storage, offset=offset)
                )
            else:
                spans = self.spans.setdefault(self.tensors[piece].storage, [])
                spans.append(_Span(start, start + length, storage, offset))
            offset += length
        return joined

    def _copying(
        self,
        name: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        inputs: tuple[int, ...],
        output: int,
        module: str,
    ) -> Op:
        size = self.tensors[output].touched_bytes
        return Op(
            name=name, phase=Phase.BACKWARD, args=args, kwargs=kwargs, inputs=inputs, outputs=(output,),
            results=(output,), mutates=(), module=module, kind=OpKind.COPY, bytes_read=size, bytes_written=size,
        )  # fmt: skip

    def _on_buckets(self, op: Op) -> Op:
        """Let an operation of the optimizer's phase work on gradients where they lie in buckets."""
        if op.phase is not Phase.OPTIMIZER:
            return op
        renamed = {t: self._in_bucket(t) for t in (*op.inputs, *op.mutates)}
        if all(old == new for old, new in renamed.items()):
            return op
        return rename_op(op, {**{t: t for t in op.outputs}, **{t: t for t in op.results if t is not None}, **renamed})

    def _in_bucket(self, tensor: int) -> int:
        """Tensor of the reduced gradient that stands for one of the rank's own; itself where it is no gradient."""
        if tensor not in self.renamed:
            view = self.step.tensors[tensor] if tensor < len(self.step.tensors) else self.tensors[tensor]
            for span in self.spans.get(view.storage, ()):
                if span.start <= view.offset < span.stop or (view.offset == span.start == span.stop):
                    offset = span.offset + view.offset - span.start
                    self.renamed[tensor] = self._tensor(dataclasses.replace(view, storage=span.bucket, offset=offset))
                    break
            else:
                return tensor
        return self.renamed[tensor]

    def _storage(self, name: str, size_bytes: int, role: Role) -> int:
        self.storages.append(Storage(name, size_bytes, role))
        return len(self.storages) - 1

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def in_step_with_network(
    rows: Sequence[tuple[Op, int | None]], tensors: Sequence[Tensor], name: str
) -> list[tuple[Op, int | None]]:
    """Put what uses reduced gradients behind the next reduction, so that computing goes on while they are reduced.

    Args:
        rows: Operations in order, each with a number of the caller's.
        name: Operation that reduces them.
    """
    ordered: list[tuple[Op, int | None]] = []
    reductions = [op for op, _ in rows if op.name == name]
    reduction_of = {tensors[t].storage: n for n, op in enumerate(reductions) for t in (*op.outputs, *op.mutates)}
    waiting, issued = _Waiting(tensors), -1

    def is_early(op: Op) -> bool:
        """Whether an operation uses what the newest reduction writes, or one of the optimizer what a later one will."""
        storages = (tensors[t].storage for t in (*op.inputs, *op.mutates))
        newest = max((reduction_of.get(s, -1) for s in storages), default=-1)
        return newest >= 0 and (newest == issued or (newest > issued and op.phase is Phase.OPTIMIZER))

    for op, number in rows:
        if op.name == name:
            ordered.append((op, number))
            issued += 1
            still_waiting = _Waiting(tensors)
            for row in waiting.rows:
                if is_early(row[0]) or still_waiting.precedes(row[0]):
                    still_waiting.add(*row)
                else:
                    ordered.append(row)
            waiting = still_waiting
        elif is_early(op) or waiting.precedes(op):
            waiting.add(op, number)
        else:
            ordered.append((op, number))
    return [*ordered, *waiting.rows]


class _Waiting:
    """Operations that wait, in order, with the storages that they read and write."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.rows: list[tuple[Op, int | None]] = []
        self._tensors, self._reads, self._writes = tensors, set[int](), set[int]()

    def add(self, op: Op, number: int | None) -> None:
        """Let an operation wait behind the others."""
        reads, writes = self._touched(op)
        self.rows.append((op, number))
        self._reads |= reads
        self._writes |= writes

    def precedes(self, op: Op) -> bool:
        """Whether an operation must come after one that waits: they share a storage that one of the two writes.

        What backward makes for one of the optimizer's that waits comes before it.
        """
        reads, writes = self._touched(op)
        makes = op.phase is not Phase.OPTIMIZER
        return not (self._writes.isdisjoint(reads | writes) and (makes or self._reads.isdisjoint(writes)))

    def _touched(self, op: Op) -> tuple[set[int], set[int]]:
        reads = {self._tensors[t].storage for t in (*op.inputs, *op.mutates)}
        return reads, {self._tensors[t].storage for t in (*op.outputs, *op.mutates)}
