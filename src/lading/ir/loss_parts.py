"""Loss in parts: a cross-entropy over a large vocabulary that takes its logits' memory once instead of three times.

``log_softmax`` makes as many bytes as the logits are, its backward two times as many again: the gradient that
``nll_loss`` begins with, which is zero but for one number a row, and the result. Rows do not depend on each other. So
both run on a few rows at a time, each into a small storage of its own that is then copied over the rows it was made
of: the logits become their log-probabilities, and those become the gradient of the logits, in one place. Kernels are
the same and see whole rows, so the numbers are the same to the bit; what it costs is two copies of the logits.
Of logits in 16 bits whose loss is computed in float32, only these are whole (``lading.ir.cast_losses``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from math import prod

from lading.errors import ConfigError
from lading.ir.cast_losses import with_cast_losses
from lading.ir.cross_entropy import CrossEntropy, cross_entropies, given_storages, whole_rows
from lading.ir.defer import moved_blocks
from lading.ir.graph import (
    DTYPE_BYTES,
    PERSISTENT,
    Op,
    OpKind,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tensor,
    map_refs,
    row_major,
)

#: Most parts of a loss.
MOST_PARTS = 1024


def _sums_in_place(graph: StepGraph, uses: Mapping[int, Sequence[int]], given: Set[int]) -> dict[int, int]:
    """Find sums of two gradients of a parameter of which the first can take the sum: its tensor, by operation."""
    sum_targets: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        if op.name != "aten.add.Tensor" or op.phase is not Phase.BACKWARD or op.kwargs or len(op.args) != 2:
            continue
        into, out = op.args[0], graph.storage_of(op.outputs[0])
        if not (isinstance(into, Ref) and isinstance(op.args[1], Ref)) or graph.storages[out].role is not Role.GRADIENT:
            continue
        storage = graph.storage_of(into.tensor)
        maker = uses[storage][0]
        alone = uses[storage] == [maker, index] and graph.storages[storage].role not in PERSISTENT
        fresh = storage in {graph.storage_of(t) for t in graph.ops[maker].outputs} and maker not in sum_targets
        last = uses[out][0] == index and not given & {storage, out}
        if alone and fresh and last and whole_rows(graph, into.tensor, op.args[1].tensor, op.outputs[0]):
            sum_targets[index] = into.tensor
    return sum_targets


def with_loss_parts(graph: StepGraph, parts: int) -> tuple[StepGraph, tuple[int, ...]]:
    """Compute the cross-entropies of a step in so many parts.

    Storages and tensors keep their numbers. Also returns the index in ``graph`` of the operation that each operation of
    the result does a part of.

    Args:
        parts: Number of parts; 0 or 1 leaves the step as it is.

    Raises:
        ConfigError: the step has no cross-entropy that can be computed so.
    """
    if parts < 2:
        return graph, tuple(range(len(graph.ops)))
    if not cross_entropies(graph):
        raise ConfigError(
            f"the plan computes the loss in {parts} parts: expected a cross-entropy whose logits nothing else reads, "
            "found none; plan again"
        )
    narrow, first = with_cast_losses(graph, parts)
    parted, second = _LossParts(narrow, cross_entropies(narrow), parts).result()
    return parted, tuple(first[index] for index in second)


class _LossParts:
    """Rewriter of a step; ``came_from`` has the operation of the old step for each of the new one."""

    def __init__(self, graph: StepGraph, losses: tuple[CrossEntropy, ...], parts: int) -> None:
        self.graph, self.losses, self.parts = graph, losses, parts
        self.storages, self.ops, self.came_from = list(graph.storages), list[Op](), list[int]()
        self.sums = _sums_in_place(graph, graph.storage_uses, given_storages(graph))
        place = {old: loss.logits for loss in losses for old in (loss.scores, loss.gradient)}
        for index, tensor in self.sums.items():
            place[graph.storage_of(tensor)] = graph.storage_of(graph.ops[index].outputs[0])
        self.tensors = [dataclasses.replace(t, storage=place.get(t.storage, t.storage)) for t in graph.tensors]
        for storage in {*place, *(loss.chosen for loss in losses)}:
            self.storages[storage] = dataclasses.replace(self.storages[storage], size_bytes=0)

    def result(self) -> tuple[StepGraph, tuple[int, ...]]:
        """Rewritten step, and where its operations came from."""
        forward = {loss.forward for loss in self.losses}
        first = {loss.backward: loss.loss_backward for loss in self.losses}
        dropped = set(first.values())
        place: dict[int, int] = {}
        for index, op in enumerate(self.graph.ops):
            place[index] = len(self.ops)
            if index in forward:
                for low, high in self._cuts(op.inputs[0]):
                    part = self._part(index, (op.inputs[0],), low, high)
                    self._copy_over(index, op.inputs[0], part, low, high)
            elif index in first:
                for low, high in self._cuts(op.inputs[0]):
                    seed = self.graph.ops[first[index]]
                    start = self._part(first[index], (seed.inputs[1], seed.inputs[2]), low, high)
                    part = self._part(index, (op.inputs[1],), low, high, {op.inputs[0]: start})
                    self._copy_over(index, op.outputs[0], part, low, high)
            elif index in self.sums:
                into = self.sums[index]
                in_place = {"name": "aten.add_.Tensor", "outputs": (), "results": (None,), "mutates": (into,)}
                self._add(dataclasses.replace(op, **in_place), index)
            elif index not in dropped:
                self._add(op, index)
        graph = dataclasses.replace(
            self.graph, storages=tuple(self.storages), tensors=tuple(self.tensors), ops=tuple(self.ops),
            blocks=moved_blocks(self.graph, place),
        )  # fmt: skip
        return graph, tuple(self.came_from)

    def _add(self, op: Op, index: int) -> None:
        self.ops.append(op)
        self.came_from.append(index)

    def _cuts(self, tensor: int) -> list[tuple[int, int]]:
        """First row and the row behind the last of each part."""
        rows = self.tensors[tensor].shape[0]
        step = -(-rows // self.parts)
        return [(min(i * step, rows), min((i + 1) * step, rows)) for i in range(self.parts)]

    def _rows(self, tensor: int, low: int, high: int) -> int:
        """Add a view of some rows of a tensor."""
        of = self.tensors[tensor]
        offset = of.offset + low * of.stride[0]
        self.tensors.append(dataclasses.replace(of, shape=(high - low, *of.shape[1:]), offset=offset))
        return len(self.tensors) - 1

    def _part(self, index: int, cut: tuple[int, ...], low: int, high: int, other: dict[int, int] | None = None) -> int:
        """Add an operation on some rows of its operands, into a storage of its own; returns what it makes.

        Args:
            cut: Inputs of which it reads these rows.
            other: Inputs that others take the place of.
        """
        op = self.graph.ops[index]
        out = self.graph.tensors[op.outputs[0]]
        width, rows = out.shape[1], -(-out.shape[0] // self.parts)
        name = f"{self.graph.storages[out.storage].name}[{low}]"
        self.storages.append(Storage(name, rows * width * DTYPE_BYTES[out.dtype], Role.ACTIVATION))
        self.tensors.append(Tensor(len(self.storages) - 1, out.dtype, (high - low, width), row_major((1, width))))
        result = len(self.tensors) - 1
        mapped = {t: t for t in op.inputs} | {t: self._rows(t, low, high) for t in cut} | (other or {})
        self._add(self._sized(dataclasses.replace(
            op, args=tuple(map_refs(a, mapped) for a in op.args), inputs=tuple(mapped[t] for t in op.inputs),
            outputs=(result,), results=(result,), flops=op.flops * (high - low) // max(1, out.shape[0]),
        )), index)  # fmt: skip
        return result

    def _copy_over(self, index: int, tensor: int, made: int, low: int, high: int) -> None:
        """Add the copy of what was made over the rows that it was made of."""
        op, rows = self.graph.ops[index], self._rows(tensor, low, high)
        self._add(self._sized(dataclasses.replace(
            op, name="aten.copy_.default", kind=OpKind.COPY, args=(Ref(rows), Ref(made)), kwargs=(), inputs=(made,),
            outputs=(), results=(None,), mutates=(rows,), flops=0,
        )), index)  # fmt: skip

    def _sized(self, op: Op) -> Op:
        read = sum(self.tensors[t].touched_bytes for t in dict.fromkeys(op.inputs))
        written = sum(prod(self.tensors[t].shape) * DTYPE_BYTES[self.tensors[t].dtype] for t in
                      (*op.outputs, *op.mutates))  # fmt: skip
        return dataclasses.replace(op, bytes_read=read, bytes_written=written)
