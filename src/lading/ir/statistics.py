"""Statistics: buffers that a forward changes become those of one process that saw the micro-batches of all ranks.

A norm's running mean is ``m * x`` of each micro-batch added to ``1 - m`` times what it was, and so is any buffer that a
step changes by what is added to it or by what it is multiplied with. Over all micro-batches it is then a sum, in which
each rank has a part: the first begins with the buffer, the others with zero; what a rank has is multiplied as often as
micro-batches of later ranks multiply it; the sum over ranks is the buffer. Ranks normalize by their own micro-batches,
as one process does that accumulates them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import cast

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Arg, Op, OpKind, Ref, Role, StepGraph, Storage, Tensor, rename_op
from lading.ir.layout import Layout
from lading.ir.reduction import ALL_REDUCE_SUM, reduction

#: Copies a buffer on the first rank of those along ``over``; makes zeros on the others.
FIRST_SHARE = "c10d.first_share.default"
#: Multiplies in place by ``factor``, as often as there are ranks behind this one.
DECAY = "c10d.decay_.default"
#: Is given the running statistics, and in training reads those of the batch.
_BACKWARD = "aten.native_batch_norm_backward.default"
_NORMS = ("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")


def share_statistics(step: StepGraph, layout: Layout) -> StepGraph:
    """Change the buffers of a whole step by the micro-batches of all ranks that have batches of their own.

    Raises:
        ConfigError: a buffer that changes is read, too, or changes in a way that is no sum.
    """
    buffers = {step.storage_of(tensor): name for name, tensor in step.buffers}
    writers: dict[int, list[int]] = {}
    for index, op in enumerate(step.ops):
        for storage in {step.storage_of(t) for t in op.mutates} & buffers.keys():
            writers.setdefault(storage, []).append(index)
    if not writers:
        return step
    factors: dict[int, float] = {}
    for storage, indices in writers.items():
        name = buffers[storage]
        touching = (op for op in step.ops if storage in step.reads(op) and storage not in step.writes(op))
        readers = (op for op in touching if op.name != _BACKWARD)
        if (reader := next(readers, None)) is not None:
            raise ConfigError(
                f"layout: expected no operation that reads the buffer {name!r}, which changes in every micro-batch, on "
                f"several ranks, found {reader.name} in {reader.module or 'the loss'}; train on one rank, or a pipeline"
            )
        factors[storage] = prod(_factor(step.ops[index], storage, step, name) for index in indices)
    return _Sharer(step, layout, writers).shared(factors)


def _factor(op: Op, storage: int, step: StepGraph, name: str) -> float:
    """Number by which an operation multiplies a buffer before it adds to it."""
    first = isinstance(op.args[0], Ref) and step.storage_of(op.args[0].tensor) == storage
    if op.name in _NORMS:
        return 1.0 - cast("float", op.args[6])
    if op.name == "aten.add_.Tensor" and first:
        return 1.0
    if op.name in ("aten.mul_.Tensor", "aten.mul_.Scalar") and first and isinstance(op.args[1], int | float):
        return float(op.args[1])
    if op.name == "aten.lerp_.Scalar" and first and isinstance(op.args[2], int | float):
        return 1.0 - float(op.args[2])
    raise ConfigError(
        f"layout: expected a buffer that changes by a sum (a running mean, a count) on several ranks, found that "
        f"{op.name} in {op.module or 'the loss'} changes {name!r}; train on one rank, or in a pipeline"
    )


class _Sharer:
    """Builder of the step in which buffers are sums over ranks.

    Args:
        writers: Operations that change each buffer, by its storage.
    """

    def __init__(self, step: StepGraph, layout: Layout, writers: Mapping[int, list[int]]) -> None:
        self.step, self.writers, self.across = step, writers, layout.across("replicate", "shard")
        self.storages, self.tensors = list(step.storages), list(step.tensors)
        self.local: dict[int, int] = {}
        self.last = max(index for indices in writers.values() for index in indices)

    def shared(self, factors: Mapping[int, float]) -> StepGraph:
        """Give the step with each rank's parts of all buffers, and their sums."""
        before: dict[int, list[Op]] = {}
        kinds: dict[str, list[int]] = {}
        after: list[Op] = []
        for _, tensor in self.step.buffers:
            storage = self.step.storage_of(tensor)
            if storage in self.local or storage not in self.writers:
                continue
            view, index = self.step.tensors[tensor], self.writers[storage][0]
            self.local[storage] = self._storage(f"{self.step.storages[storage].name}.local", storage)
            part = self._tensor(dataclasses.replace(view, storage=self.local[storage]))
            before.setdefault(index, []).append(self._op(FIRST_SHARE, index, (tensor,), (part,), ()))
            if factors[storage] != 1.0:
                decay = self._op(DECAY, self.last, (part,), (), (part,))
                after.append(dataclasses.replace(decay, kwargs=(*self.across, ("factor", factors[storage]))))
            kinds.setdefault(view.dtype, []).append(tensor)
        for dtype, tensors in kinds.items():
            after += self._summed(dtype, tensors)
        names = {
            number: self._tensor(dataclasses.replace(tensor, storage=self.local[tensor.storage]))
            for number, tensor in enumerate(self.step.tensors)
            if tensor.storage in self.local
        }
        ops: list[Op] = []
        for index, op in enumerate(self.step.ops):
            ops += before.get(index, [])
            touched = {*op.inputs, *op.mutates, *op.outputs, *(t for t in op.results if t is not None)}
            rank_names = {t: names.get(t, t) for t in touched}
            ops.append(op if names.keys().isdisjoint(op.mutates) else rename_op(op, rank_names))
            ops += after if index == self.last else []
        storages, tensors = tuple(self.storages), tuple(self.tensors)
        graph = dataclasses.replace(self.step, storages=storages, tensors=tensors, ops=tuple(ops), blocks=())
        graph.validate()
        return graph

    def _summed(self, dtype: str, buffers: list[int]) -> list[Op]:
        """Sum this rank's parts of buffers of one dtype over ranks, side by side, and copy the sums back."""
        views = [self.step.tensors[tensor] for tensor in buffers]
        counts = [prod(view.shape) for view in views]
        flats = [
            self._tensor(Tensor(self.local[view.storage], dtype, (count,), (1,), view.offset))
            for view, count in zip(views, counts, strict=True)
        ]
        self.storages.append(Storage(f"statistics {dtype}", sum(counts) * DTYPE_BYTES[dtype], Role.WORKSPACE))
        joined = self._tensor(Tensor(len(self.storages) - 1, dtype, (sum(counts),), (1,)))
        side_by_side = self._op("aten.cat.default", self.last, tuple(flats), (joined,), ())
        ops = [dataclasses.replace(side_by_side, args=(tuple(map(Ref, flats)),), kwargs=())]
        phase, size = self.step.ops[self.last].phase, self.tensors[joined].size_bytes
        ops.append(reduction(ALL_REDUCE_SUM, self.across, (joined, size), phase=phase, module="running statistics"))
        start = 0
        for buffer, view, count in zip(buffers, views, counts, strict=True):
            sums = self._tensor(dataclasses.replace(view, storage=self.tensors[joined].storage, offset=start))
            back = self._op("aten.copy_.default", self.last, (buffer, sums), (), (buffer,))
            ops.append(dataclasses.replace(back, kwargs=()))
            start += count
        return ops

    def _op(
        self, name: str, beside: int, inputs: tuple[int, ...], outputs: tuple[int, ...], mutates: tuple[int, ...]
    ) -> Op:
        size, args = self.tensors[inputs[0]].size_bytes, cast("tuple[Arg, ...]", tuple(map(Ref, inputs)))
        return Op(
            name=name, phase=self.step.ops[beside].phase, args=args, kwargs=self.across, inputs=inputs,
            outputs=outputs, results=outputs or (None,), mutates=mutates, module=self.step.ops[beside].module,
            kind=OpKind.COPY, bytes_read=size, bytes_written=size,
        )  # fmt: skip

    def _storage(self, name: str, like: int) -> int:
        self.storages.append(Storage(name, self.step.storages[like].size_bytes, Role.WORKSPACE))
        return len(self.storages) - 1

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1
