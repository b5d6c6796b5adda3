"""Gradients in pieces: a large gradient that is never whole in memory.

The gradient of an embedding or of a head is as large as its weight: with a large vocabulary the two are most of what a
step needs at once. Rows of such a gradient do not depend on each other. So what makes it (a product, the backward of a
look-up, their sum) runs for some rows at a time, each piece a storage of its own that moves by itself, and each update
of a part of the weight stands right behind the piece that it reads, where nothing but the gradient stood in between.
Products contract the same elements in the same order for fewer rows, so the numbers are those of whole ones, to the
bit wherever the library's kernel adds up a row in an order that does not depend on the number of rows (on CPUs with
MKL: tests/runtime/test_gradient_pieces.py; another processor may use other kernels for other sizes).

What reads the gradient whole, as the norm that clipping measures does, gets a copy that is put together from the
pieces, one after another.

[Note: late products] A tied weight's gradient is a product of the head's, made first, and a sum with that of the
look-up, made last: in between all of it waits for the sum, in memory or on a disk. Where the product's operands take
less than half as much, which is so for fewer tokens than half the width, they may wait instead, and each piece of the
product is made right before its sum. GPT-2 with 128 tokens keeps 25 MiB through its backward instead of moving 147 to
the disk and back, and multiplies where it would else wait for the disk. Where 25 MiB are much, a plan does without.
Where a head runs in parts of the tokens, each part adds its product to the gradient, all of which would have to be
there once for each part. What the parts' products read is no larger than the logits: they wait until the last part is
done, and each piece is then added up at once, in the same order.

[Note: rows of others] A piece of a look-up's gradient gets all tokens. Those of other pieces add up in a row behind
its own that nothing reads: their row, counted from the piece's first one, is below zero, which without its sign is
larger than any table, or at least the piece's length; both are cut off at the length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from lading.ir.defer import moved_blocks
from lading.ir.graph import (
    DTYPE_BYTES,
    PERSISTENT,
    Literal,
    Op,
    OpKind,
    Parameter,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tensor,
    rename_op,
    row_major,
)
from lading.ir.head_parts import ADDED_PRODUCT

_PRODUCTS, _LOOK_UP = frozenset({"aten.mm.default", ADDED_PRODUCT}), "aten.embedding_dense_backward.default"
#: Operations that treat each element alone, by what they read at the same place, or numbers.
_EACH_ELEMENT = frozenset(
    {"aten.add.Tensor", "aten.add_.Tensor", "aten.mul.Tensor", "aten.mul_.Tensor", "aten._to_copy.default",
     "aten.clone.default"}
)  # fmt: skip
#: Number that leaves out the sign of an index, by its dtype.
_WITHOUT_SIGN = {"int64": (1 << 63) - 1, "int32": (1 << 31) - 1}
#: Operations between two on one gradient that may run before both, at most; any number where the first of the two are
#: late products, whose operands take at most this share of the gradient; or this one where products of several parts
#: make it, which would else move all of it for each part.
_MOST_BETWEEN, _LATE_SHARE, _PARTS_SHARE = 2, 0.5, 1.25


@dataclass(frozen=True, slots=True)
class PiecedGradient:
    """Gradient that can be made in pieces.

    Attributes:
        name: Name of its parameter.
        storages: Storages of the gradient and of those that it is summed up of: matrices of one shape.
        starts: First row of each piece, and the number of rows.
        columns: Elements of a row.
    """

    name: str
    storages: frozenset[int]
    starts: tuple[int, ...]
    columns: int

    def piece_of(self, tensor: Tensor) -> int | None:
        """Number of the piece that has all elements of a view; None where several have."""
        first, end = tensor.offset, tensor.offset + prod(tensor.shape)
        if not tensor.is_row_major:
            return None
        rows = enumerate(pairwise(self.starts))
        return next((k for k, (a, b) in rows if a * self.columns <= first and end <= b * self.columns), None)


def pieced_gradients(graph: StepGraph, piece_bytes: int) -> tuple[PiecedGradient, ...]:
    """Find the gradients of a step that can be made in pieces of at least ``piece_bytes``, the last one aside."""
    uses = _Uses(graph)
    used_storages: set[int] = set()
    pieced: list[PiecedGradient] = []
    for parameter in graph.parameters:
        gradient = uses.pieced(parameter, piece_bytes) if parameter.gradient is not None else None
        if gradient is not None and used_storages.isdisjoint(gradient.storages):
            pieced.append(gradient)
            used_storages |= gradient.storages
    return () if _of_each_other(graph, used_storages) else tuple(pieced)


def _of_each_other(graph: StepGraph, storages: Set[int]) -> bool:
    """Whether a product or a look-up that makes one of these gradients reads one of them, as gradients of gradients."""
    for op in graph.ops:
        if op.name in _PRODUCTS or op.name == _LOOK_UP:
            written = {graph.storage_of(t) for t in (*op.outputs, *op.mutates)}
            if written & storages and ({graph.storage_of(t) for t in op.inputs} - written) & storages:
                return True
    return False


def with_gradient_pieces(
    graph: StepGraph, piece_bytes: int, *, late_products: bool = False
) -> tuple[StepGraph, tuple[int, ...]]:
    """Make the large gradients of a step in pieces.

    Storages and tensors keep their numbers. Also returns the index in ``graph`` of the operation that each operation of
    the result does a part of.

    Args:
        piece_bytes: Least bytes of a piece, but for what is left for the last one; 0 leaves the step as it is, and so
            does a size of which no gradient has two pieces.
        late_products: Whether products wait by their operands where these are small. See [Note: late products].
    """
    gradients = pieced_gradients(graph, piece_bytes) if piece_bytes else ()
    if not gradients:
        return graph, tuple(range(len(graph.ops)))
    return _Rewriter(graph, gradients, late_products=late_products).result()


class _Uses:
    """Operations that read or write each storage of a graph."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.given = graph.persistent | {graph.storage_of(tensor) for tensor in graph.results}
        self.ops = graph.storage_uses

    def pieced(self, parameter: Parameter, piece_bytes: int) -> PiecedGradient | None:
        """Cut the gradient of a parameter; None where it cannot be cut in two."""
        assert parameter.gradient is not None, "whoever asks has looked"
        tensor = self.graph.tensors[parameter.gradient]
        if tensor.size_bytes < 2 * piece_bytes or not self._is_whole(tensor):
            return None
        storages = self._summed(tensor)
        starts = self._starts(tensor, piece_bytes)
        if storages is None or len(starts) <= 2:
            return None
        return PiecedGradient(parameter.names[0], storages, starts, tensor.shape[1])

    def _is_whole(self, tensor: Tensor) -> bool:
        """Whether a tensor is a matrix, row by row, and all of its storage."""
        size = self.graph.storages[tensor.storage].size_bytes
        return len(tensor.shape) == 2 and tensor.is_row_major and tensor.spans(size)

    def _summed(self, gradient: Tensor) -> frozenset[int] | None:
        """Storages of a gradient and of what it is summed up of; None where something else makes one of them."""
        storages, open_ = set[int](), [gradient.storage]
        while open_:
            storage = open_.pop()
            if storage in storages:
                continue
            if storage in self.given or self.graph.storages[storage].role in PERSISTENT:
                return None
            storages.add(storage)
            for index in self.ops[storage]:
                if storage in self.graph.op_writes[index]:
                    parts = self._parts(self.graph.ops[index], gradient.shape)
                    if parts is None:
                        return None
                    open_.extend(parts)
        return frozenset(storages)

    def _parts(self, op: Op, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Storages that an operation which makes rows alone reads in the same rows; None for any other operation."""
        tensors = self.graph.tensors
        written = (*op.outputs, *op.mutates)
        if len(written) != 1 or tensors[written[0]].shape != shape or not self._is_whole(tensors[written[0]]):
            return None
        if op.name in _PRODUCTS:
            return () if op.args[-2:] == tuple(map(Ref, op.inputs[-2:])) and not op.kwargs else None
        if op.name == _LOOK_UP:
            index_dtype = tensors[op.inputs[1]].dtype
            return () if op.args[4] is False and index_dtype in _WITHOUT_SIGN and not op.kwargs else None
        if op.name not in _EACH_ELEMENT:
            return None
        operands = [t for t in op.inputs if prod(tensors[t].shape) > 1]
        same_rows = all(tensors[t].shape == shape and self._is_whole(tensors[t]) for t in operands)
        return tuple(tensors[t].storage for t in operands) if same_rows else None

    def _starts(self, gradient: Tensor, piece_bytes: int) -> tuple[int, ...]:
        """First rows of pieces, each where a row and the gradient of an update's part begin, and the number of rows."""
        rows, columns = gradient.shape
        parts = {
            tensor.offset
            for index in self.ops[gradient.storage]
            for tensor in (self.graph.tensors[t] for t in self.graph.ops[index].inputs)
            if tensor.storage == gradient.storage and prod(tensor.shape) < rows * columns
        }
        min_rows = -(-piece_bytes // (columns * DTYPE_BYTES[gradient.dtype]))
        starts = [0]
        for offset in sorted(parts):
            if offset % columns == 0 and offset // columns - starts[-1] >= min_rows:
                starts.append(offset // columns)
        return (*starts, rows)


@dataclass(frozen=True, slots=True)
class _Made:
    """Operation of the new step: the one that it is a part of, its gradient and the piece of that, if it is of one."""

    op: Op
    origin: int
    gradient: int = -1
    piece: int = -1


class _Rewriter:
    """Rewriter of a step; ``made`` has its new operations, still in the order of the old ones."""

    def __init__(self, graph: StepGraph, gradients: Sequence[PiecedGradient], *, late_products: bool) -> None:
        self.graph, self.gradients, self.late_products = graph, gradients, late_products
        self.storages, self.tensors = list(graph.storages), list(graph.tensors)
        self.owner = {storage: n for n, gradient in enumerate(gradients) for storage in gradient.storages}
        self.pieces = {storage: self._pieces(storage) for storage in self.owner}
        starts = ((block, start) for block in graph.blocks for start in block.starts)
        self.repeated = frozenset(op for block, start in starts for op in range(start, start + block.num_ops))
        self.runs: list[list[_Made]] = []

    def result(self) -> tuple[StepGraph, tuple[int, ...]]:
        """Rewritten step, and where its operations came from."""
        for index in range(len(self.graph.ops)):
            self._add(index)
        piecewise = [new for run in self._piecewise_order() for new in run]
        place: dict[int, int] = {}
        for at, new in enumerate(piecewise):
            place.setdefault(new.origin, at)
        graph = dataclasses.replace(
            self.graph, storages=tuple(self.storages), tensors=tuple(self.tensors), ops=tuple(m.op for m in piecewise),
            blocks=moved_blocks(self.graph, place),
        )  # fmt: skip
        return graph, tuple(m.origin for m in piecewise)

    def _pieces(self, storage: int) -> list[int]:
        """Make the storages of the pieces of a gradient, whose own is empty from here on."""
        gradient, old = self.gradients[self.owner[storage]], self.graph.storages[storage]
        self.storages[storage] = dataclasses.replace(old, size_bytes=0)
        row_bytes = old.size_bytes // gradient.starts[-1]
        looked_up = any(op.name == _LOOK_UP for op in self._writers(storage))
        pieces: list[int] = []
        for first, end in pairwise(gradient.starts):
            size = (end - first + looked_up) * row_bytes  # [Note: rows of others]
            self.storages.append(Storage(f"{old.name}[{first}:{end}]", size, old.role))
            pieces.append(len(self.storages) - 1)
        return pieces

    def _writers(self, storage: int) -> list[Op]:
        return [op for op in self.graph.ops if any(self.graph.storage_of(t) == storage for t in op.outputs)]

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _in_piece(self, tensor: int, piece: int) -> int:
        """Add the view of a piece that a view of the gradient, of all its rows or of some in the piece, becomes."""
        view = self.tensors[tensor]
        gradient = self.gradients[self.owner[view.storage]]
        first, end = gradient.starts[piece : piece + 2]
        storage = self.pieces[view.storage][piece]
        if gradient.piece_of(view) is None:
            shape = (end - first, gradient.columns)
            return self._tensor(Tensor(storage, view.dtype, shape, row_major(shape)))
        return self._tensor(dataclasses.replace(view, storage=storage, offset=view.offset - first * gradient.columns))

    def _add(self, index: int) -> None:
        """Add what becomes of an operation of the old step."""
        op = self.graph.ops[index]
        of = [t for t in (*op.inputs, *op.outputs, *op.mutates) if self.graph.storage_of(t) in self.owner]
        if not of:
            self.runs.append([_Made(op, index)])
            return
        numbers = {self.owner[self.graph.storage_of(t)] for t in of}
        number = min(numbers)
        gradient = self.gradients[number]
        if {self.graph.storage_of(t) for t in (*op.outputs, *op.mutates)} & self.owner.keys():
            ends = enumerate(pairwise(gradient.starts))
            self.runs.append([new for k, rows in ends for new in self._piece(index, number, k, *rows)])
        elif len(numbers) > 1 or any(gradient.piece_of(self.graph.tensors[t]) is None for t in of):
            self.runs.append(self._joined(index, of))
        else:
            self._one_piece(index, of, number)

    def _one_piece(self, index: int, of: Sequence[int], number: int) -> None:
        """Add an operation that reads one piece alone: the update of a part."""
        op, gradient = self.graph.ops[index], self.gradients[number]
        piece = gradient.piece_of(self.graph.tensors[of[0]])
        assert piece is not None, "its caller has looked"
        names = {t: self._in_piece(t, piece) if t in of else t for t in (*op.inputs, *op.outputs, *op.mutates)}
        self.runs.append([_Made(rename_op(op, names), index, number, piece)])

    def _piece(self, index: int, number: int, piece: int, first: int, end: int) -> list[_Made]:
        """Make some rows of a gradient."""
        op, rows = self.graph.ops[index], self.gradients[number].starts[-1]
        mine = [t for t in (*op.inputs, *op.outputs, *op.mutates) if self.graph.storage_of(t) in self.owner]
        names = {t: t for t in (*op.inputs, *op.outputs, *op.mutates)} | {t: self._in_piece(t, piece) for t in mine}
        before: list[Op] = []
        if op.name in _PRODUCTS:
            left = self.tensors[op.inputs[-2]]
            cut = dataclasses.replace(
                left, shape=(end - first, *left.shape[1:]), offset=left.offset + first * left.stride[0]
            )
            names[op.inputs[-2]] = self._tensor(cut)
        part = rename_op(op, names)
        if op.name == _LOOK_UP:
            before, part = self._own_rows(part, first, end)
        part = dataclasses.replace(part, flops=op.flops * (end - first) // rows)
        return [_Made(self._sized(new), index, number, piece) for new in (*before, part)]

    def _own_rows(self, op: Op, first: int, end: int) -> tuple[list[Op], Op]:
        """Count rows from the piece's first one; others become the row behind it ([Note: rows of others])."""
        rows, index = end - first, self.tensors[op.inputs[1]]
        before: list[Op] = []
        steps = (
            ("aten.sub.Tensor", (first,)), ("aten.bitwise_and.Scalar", (_WITHOUT_SIGN[index.dtype],)),
            ("aten.clamp.default", (None, rows)),
        )  # fmt: skip
        indices = op.inputs[1]
        for name, args in steps:
            storage = Storage(f"rows of {op.module or 'a table'}[{first}:{end}]", index.size_bytes, Role.ACTIVATION)
            self.storages.append(storage)
            row_index = self._tensor(Tensor(len(self.storages) - 1, index.dtype, index.shape, row_major(index.shape)))
            before.append(
                dataclasses.replace(
                    op,
                    name=name,
                    args=(Ref(indices), *args),
                    inputs=(indices,),
                    outputs=(row_index,),
                    results=(row_index,),
                    flops=0,
                    kind=OpKind.ELEMENTWISE,
                )
            )
            indices = row_index
        padding = op.args[3]
        assert isinstance(padding, int), "an embedding's padding is the number of a row"
        padding_row = padding - first if 0 <= first <= padding < end else -1
        out = self.tensors[op.outputs[0]]
        table = self._tensor(dataclasses.replace(out, shape=(rows + 1, *out.shape[1:])))
        args = (op.args[0], Ref(indices), rows + 1, padding_row, *op.args[4:])
        return before, dataclasses.replace(
            op, args=args, inputs=(op.inputs[0], indices), outputs=(table,), results=(table,)
        )

    def _joined(self, index: int, of: Sequence[int]) -> list[_Made]:
        """Put pieces together for an operation that reads more than one of them."""
        op = self.graph.ops[index]
        new_ops: list[_Made] = []
        names = {t: t for t in (*op.inputs, *op.outputs, *op.mutates)}
        for storage in dict.fromkeys(self.graph.storage_of(t) for t in of):
            old = self.graph.storages[storage]
            self.storages.append(dataclasses.replace(old, name=f"{old.name}[joined {index}]"))
            joined = len(self.storages) - 1
            mine = [t for t in of if self.graph.storage_of(t) == storage]
            names |= {t: self._tensor(dataclasses.replace(self.tensors[t], storage=joined)) for t in mine}
            new_ops += self._copies(index, storage, joined, self.gradients[self.owner[storage]])
        return [*new_ops, _Made(rename_op(op, names), index)]

    def _copies(self, index: int, storage: int, joined: int, gradient: PiecedGradient) -> list[_Made]:
        """Copy pieces into their rows of one storage."""
        op, dtype = self.graph.ops[index], self._dtype(storage)
        shape = (gradient.starts[-1], gradient.columns)
        matrix = self._tensor(Tensor(joined, dtype, shape, row_major(shape)))
        place = dataclasses.replace(
            op, name="aten.empty.memory_format", args=(shape,), kwargs=(("dtype", Literal("dtype", dtype)),), inputs=(),
            outputs=(matrix,), results=(matrix,), mutates=(), kind=OpKind.COPY, flops=0, bytes_read=0, bytes_written=0,
        )  # fmt: skip
        new_ops = [_Made(place, index)]
        for piece, (first, end) in enumerate(pairwise(gradient.starts)):
            rows = (end - first, gradient.columns)
            source = self._tensor(Tensor(self.pieces[storage][piece], dtype, rows, row_major(rows)))
            into = self._tensor(Tensor(joined, dtype, rows, row_major(rows), first * gradient.columns))
            copy = dataclasses.replace(
                place, name="aten.copy_.default", args=(Ref(into), Ref(source)), kwargs=(), inputs=(source,),
                outputs=(), results=(None,), mutates=(into,),
            )  # fmt: skip
            new_ops.append(_Made(self._sized(copy), index))
        return new_ops

    def _dtype(self, storage: int) -> str:
        return next(t.dtype for t in self.graph.tensors if t.storage == storage)

    def _sized(self, op: Op) -> Op:
        read = sum(self.tensors[t].touched_bytes for t in dict.fromkeys(op.inputs))
        written = sum(self.tensors[t].size_bytes for t in (*op.outputs, *op.mutates))
        return dataclasses.replace(op, bytes_read=read, bytes_written=written)

    def _piecewise_order(self) -> list[list[_Made]]:
        """Order operations on one gradient that follow each other piece by piece."""
        ordered: list[list[_Made]] = []
        for run in self.runs:
            before = self._joins(ordered, run)
            if before is None:
                ordered.append(run)
                continue
            merged = [*ordered.pop(before), *run]
            ordered.append(sorted(merged, key=lambda new: new.piece))
        return ordered

    def _joins(self, ordered: Sequence[Sequence[_Made]], run: Sequence[_Made]) -> int | None:
        """Place of an earlier run on the same gradient that may as well stand where this one does; None for none.

        What stands between the two then runs before both. See [Note: late products].
        """
        if run[0].gradient < 0:
            return None
        for back in range(1, len(ordered) + 1):
            earlier = ordered[-back]
            if earlier[0].gradient == run[0].gradient:
                is_near = back <= _MOST_BETWEEN + 1 or self._is_late(earlier, run)
                passes = is_near and self._may_pass(earlier, ordered[len(ordered) - back + 1 :])
                return len(ordered) - back if passes else None
        return None

    def _is_late(self, run: Sequence[_Made], later: Sequence[_Made]) -> bool:
        """Whether operands of a run may wait for a later one instead of the gradient that it makes."""
        if not self.late_products or any(new.op.name not in _PRODUCTS or new.origin in self.repeated for new in run):
            return False
        written = {storage for new in run for storage in self._storages((*new.op.outputs, *new.op.mutates))}
        operands = {storage for new in run for storage in self._storages(new.op.inputs)} - written
        kept_bytes = sum(self.storages[s].size_bytes for s in operands if self.storages[s].role not in PERSISTENT)
        in_parts = any(new.op.name == ADDED_PRODUCT for new in (*run, *later))
        share = _PARTS_SHARE if in_parts else _LATE_SHARE
        return kept_bytes <= share * sum(self.storages[storage].size_bytes for storage in written)

    def _may_pass(self, run: Sequence[_Made], between: Sequence[Sequence[_Made]]) -> bool:
        """Whether a run may stand behind those that follow it."""
        reads, writes = set[int](), set[int]()
        for new in run:
            reads.update(self._storages(new.op.inputs), self._storages(new.op.mutates))
            writes.update(self._storages((*new.op.outputs, *new.op.mutates)))
        for new in (new for run_between in between for new in run_between):
            wrote = self._storages((*new.op.outputs, *new.op.mutates))
            if wrote & (reads | writes) or self._storages(new.op.inputs) & writes:
                return False
        return True

    def _storages(self, tensors: Sequence[int]) -> set[int]:
        return {self.tensors[t].storage for t in tensors}
