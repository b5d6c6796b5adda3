"""Segments of a captured step: operations before the blocks, of each block, and after them; forward and backward each.

Sizes are numbers here; ``lading.tracing.tabulate`` finds how they depend on those of the batch and the model.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby

from lading.errors import CaptureError
from lading.ir.fold import block_items
from lading.ir.graph import Op, OpKind, Parameter, Phase, Role, StepGraph, rename_op
from lading.ir.sizes import Size
from lading.ir.table import ModelTable, Segment, SegmentTensor
from lading.tracing.settings import settings_of

_PRODUCTS = (OpKind.MATMUL, OpKind.CONVOLUTION)
_CROSSING = (Role.ACTIVATION, Role.GRADIENT)
#: Norms whose second and third results are statistics: fp32 on a GPU, whatever the CPU keeps them in.
_STATISTICS = frozenset({"aten.native_layer_norm.default", "aten.native_group_norm.default"})


def table_at_sizes(
    graph: StepGraph, views: list[tuple[int, Op]], tied: Sequence[tuple[str, str]], name: str
) -> ModelTable:
    """Make the table of one capture, in which every size is a number.

    Args:
        views: Views as ``Tracer`` gives them: (number of operations before it, the view as an operation).
        tied: Pairs of names of parameters that are one.
    Raises:
        CaptureError: the blocks do not run one after another.
    """
    return _SegmentCutter(graph, views).table(tied, name)


class _SegmentCutter:
    """Cuts one graph into segments.

    Attributes:
        ops: Operations and views in order.
        places: Number of the segment of each operation.
        items: Block that each segment is an occurrence of; "" for what is between blocks.
    """

    def __init__(self, graph: StepGraph, views: list[tuple[int, Op]]) -> None:
        self.graph = graph
        self.ops, self.is_view = _merged(graph, views)
        items = _blocks(self.ops)
        self.items, self.places = _placed(self.ops, items)
        self.producers: dict[int, list[int]] = {}
        for index, op in enumerate(self.ops):
            for t in op.outputs:
                self.producers.setdefault(t, []).append(index)
        self.fp32 = {op.outputs[i] for op in self.ops if op.name in _STATISTICS for i in (1, 2) if i < len(op.outputs)}
        self.parameters = {graph.storage_of(p.tensor): p for p in graph.parameters}
        self.named = {p.tensor: p.names[0] for p in graph.parameters}
        self.named.update({t: name for name, t in (*graph.buffers, *graph.inputs[0])})
        self.chosen: list[list[int]] = [[] for _ in self.items]
        for index, place in enumerate(self.places):
            self.chosen[place].append(index)
        self.used = [{graph.storage_of(t) for i in chosen for t in self.ops[i].inputs} for chosen in self.chosen]
        self.forward = [op.phase is not Phase.BACKWARD for op in self.ops]

    def table(self, tied: Sequence[tuple[str, str]], name: str) -> ModelTable:
        """Make the table: the segments, equal ones in a row as one with its count."""
        count = len(self.items)
        leaves = self._crossing(forward=True)
        back = self._crossing(forward=False)
        back = [self._as_leaves(grads, acts) for grads, acts in zip(back, leaves, strict=True)]
        segments: list[Segment] = []
        counts: list[int] = []
        homes: dict[str, tuple[int, str]] = {}
        for at in range(count):
            borders = (
                leaves[at - 1] if at else [],
                leaves[at] if at < count - 1 else [],
                back[at] if at < count - 1 else [],
                back[at - 1] if at else [],
            )
            segment = self._segment(at, borders)
            if 0 < at < count - 1 and segments[-1] != segment:
                carried = self._carried(leaves[at - 1], leaves[at])
                longer = self._segment(at, (borders[0], carried, *borders[2:]))
                if segments[-1] == longer:
                    segment, leaves[at] = longer, carried
            if segments and segments[-1] == segment:
                counts[-1] += 1
            else:
                segments.append(segment)
                counts.append(1)
            for parameter in self._parameters(at):
                homes[parameter.names[0]] = (len(segments) - 1, _local(parameter.names[0], self.items[at]))
        pairs = tuple((homes[a], homes[b]) for a, b in tied if a in homes and b in homes)
        return ModelTable(name, _uniquely_named(segments), tuple(counts), {}, pairs)

    def _crossing(self, *, forward: bool) -> list[list[int]]:
        """Tensors made on one side of each border and taken on the other, longest-lived first, by border."""
        reach: dict[tuple[int, int], int] = {}  # (segment, tensor): the farthest segment that takes it
        for index, op in enumerate(self.ops):
            if self.forward[index] is not forward:
                continue
            for t in op.inputs:
                made = self._made(t, index)
                if made is None or self.forward[made] is not forward or self._role(t) not in _CROSSING:
                    continue
                distance = abs(self.places[index] - self.places[made])
                if distance:
                    key = (self.places[made], t)
                    reach[key] = max(reach.get(key, 0), distance)
        borders: list[dict[int, int]] = [{} for _ in range(len(self.items) - 1)]
        for (place, t), distance in reach.items():
            crossed = range(place, place + distance) if forward else range(place - distance, place)
            for border in crossed:
                borders[border][t] = max(borders[border].get(t, 0), distance)
        return [sorted(reaches, key=lambda t: (-reaches[t], self.producers[t][0])) for reaches in borders]

    def _made(self, tensor: int, until: int) -> int | None:
        """Operation that made a tensor for one that takes it, or None; a view may be made again in every block."""
        places = self.producers.get(tensor, [])
        at = bisect_left(places, until)
        return places[at - 1] if at else None

    def _as_leaves(self, grads: list[int], leaves: list[int]) -> list[int]:
        """Order gradients as the activations that they belong to; the shapes are equal."""
        rest, ordered = list(grads), list[int]()
        for leaf in leaves:
            shape = self.graph.tensors[leaf].shape
            grad = next((g for g in rest if self.graph.tensors[g].shape == shape), None)
            if grad is not None:
                rest.remove(grad)
                ordered.append(grad)
        return [*ordered, *rest]

    def _carried(self, before: list[int], after: list[int]) -> list[int]:
        """Tensors that leave a block if it hands on what the last block has no use for, as the blocks before it do."""
        new = iter(t for t in after if t not in before)
        return [t if t in after or self._passes(t, before) else next(new, t) for t in before]

    def _passes(self, tensor: int, leaves: list[int]) -> bool:
        """Whether one of a block's leaves was there before the block: it has no gradient that would tell."""
        at = self.producers.get(tensor)
        return at is not None and self.places[at[0]] == 0 and tensor in leaves

    def _role(self, tensor: int) -> Role:
        return self.graph.storages[self.graph.storage_of(tensor)].role

    def _segment(self, at: int, borders: tuple[list[int], list[int], list[int], list[int]]) -> Segment:
        enters, leaves, enters_back, leaves_back = borders
        chosen = self.chosen[at]
        ids = _SegmentNumbers(self, self.items[at])
        ids.add(enters)
        parameters = self._parameters(at)
        for i in chosen:
            ids.add((*self.ops[i].inputs, *self.ops[i].outputs, *self.ops[i].mutates))
        ids.add([*leaves, *enters_back, *leaves_back])
        gradients = [(p.tensor, p.gradient) for p in parameters]
        ids.add(t for pair in gradients for t in pair if t is not None)
        ids.complete()
        ops = tuple(self._op(i, ids) for i in chosen)
        return Segment(
            name=self._name(at),
            tensors=ids.tensors(),
            ops=ops,
            enters=ids.of(enters),
            leaves=ids.of(leaves),
            enters_back=ids.of(enters_back),
            leaves_back=ids.of(leaves_back),
            gradients=tuple((ids.of([p])[0], None if g is None else ids.of([g])[0]) for p, g in gradients),
            saved=ids.of(self._saved(chosen)),
        )

    def _name(self, at: int) -> str:
        if self.items[at]:
            return self.items[at].rpartition(".")[0]
        return "before" if at == 0 else "after" if at == len(self.items) - 1 else "between"

    def _parameters(self, at: int) -> list[Parameter]:
        """Parameters that the operations of segment ``at`` use; those that none uses are the first segment's."""
        used = self.used[at]
        unused = set[int]() if at else self.parameters.keys() - set[int]().union(*self.used)
        return [self.parameters[storage] for storage in sorted(used | unused) if storage in self.parameters]

    def _saved(self, chosen: list[int]) -> list[int]:
        """Ids of the tensors of the forward that the backward takes."""
        made: set[int] = set()
        saved: dict[int, None] = {}
        for i in chosen:
            if self.forward[i]:
                continue
            for t in self.ops[i].inputs:
                first = self.producers.get(t)
                if t not in made and (first is None or self.forward[first[0]]):
                    saved[t] = None
            made.update(self.ops[i].outputs)
        return list(saved)

    def _op(self, index: int, ids: _SegmentNumbers) -> Op:
        op = self.ops[index]
        return dataclasses.replace(
            rename_op(op, ids.numbers),
            name=op.name.replace("lading.", "aten.", 1),
            kind=OpKind.VIEW if self.is_view[index] else op.kind,
            module=_local(op.module, ids.item),
            settings=settings_of(op, self.graph.tensors),
            flops=0,
            bytes_read=0,
            bytes_written=0,
        )


class _SegmentNumbers:
    """Numbers of tensors and storages within a segment, in order of appearance."""

    def __init__(self, cutter: _SegmentCutter, item: str) -> None:
        self.cutter, self.item = cutter, item
        self.numbers: dict[int, int] = {}  # of each tensor of the graph
        self._storages: dict[int, int] = {}

    def add(self, tensors: Iterable[int]) -> None:
        for t in tensors:
            self.numbers.setdefault(t, len(self.numbers))
            self._storages.setdefault(self.cutter.graph.storage_of(t), len(self._storages))

    def of(self, tensors: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.numbers[t] for t in tensors)

    def complete(self) -> None:
        """Make sure that each storage has a tensor that is all of it."""
        graph = self.cutter.graph
        largest: dict[int, int] = {}
        for t in self.numbers:
            storage = graph.storage_of(t)
            largest[storage] = max(largest.get(storage, 0), graph.tensors[t].touched_bytes)
        for storage, size in largest.items():
            if size < graph.storages[storage].size_bytes:
                of_storage = [t for t, tensor in enumerate(graph.tensors) if tensor.storage == storage]
                self.add([max(of_storage, key=lambda t: graph.tensors[t].touched_bytes)])

    def tensors(self) -> tuple[SegmentTensor[Size], ...]:
        graph = self.cutter.graph
        named = self.cutter.named
        made: list[SegmentTensor[Size]] = []
        for t in self.numbers:
            tensor, role = graph.tensors[t], self.cutter._role(t)
            made.append(
                SegmentTensor(
                    storage=self._storages[tensor.storage],
                    dtype="float32" if t in self.cutter.fp32 else tensor.dtype,
                    dims=tuple(map(Size.of, tensor.shape)),
                    role=role,
                    name=_local(named.get(t, ""), self.item),
                    repeats=tuple(
                        d for d, (n, s) in enumerate(zip(tensor.shape, tensor.stride, strict=True)) if n > 1 and s == 0
                    ),
                )
            )
        return tuple(made)


def _merged(graph: StepGraph, views: list[tuple[int, Op]]) -> tuple[list[Op], list[bool]]:
    """Merge operations and views in order; views that nobody takes, or that change nothing, are left out.

    Returns:
        The operations, and of each whether it is a view.
    """
    rows: list[tuple[Op, bool]] = []
    rest = iter([*views, (len(graph.ops) + 1, None)])
    position, view = next(rest)
    for index, op in enumerate(graph.ops):
        while view is not None and position <= index:
            rows.append((view, True))
            position, view = next(rest)
        rows.append((op, False))
    needed = {p.gradient for p in graph.parameters} | set(graph.losses)
    merged: list[tuple[Op, bool]] = []
    for op, is_view in reversed(rows):
        outputs = tuple(t for t in op.outputs if t not in op.inputs)
        if is_view and not needed & set(outputs):
            continue
        needed.update(op.inputs)
        merged.append((op, is_view))
    merged.reverse()
    return [op for op, _ in merged], [is_view for _, is_view in merged]


def _blocks(ops: Sequence[Op]) -> list[str]:
    """Path of the block of each operation: an item of a module list that has attention or at least two products."""
    items = block_items(ops)
    products: dict[str, int] = {}
    for op, item in zip(ops, items, strict=True):
        if op.phase is Phase.FORWARD:
            weight = 2 if op.kind is OpKind.ATTENTION else 1 if op.kind in _PRODUCTS else 0
            products[item] = products.get(item, 0) + weight
    return [item if products.get(item, 0) >= 2 else "" for item in items]


def _placed(ops: Sequence[Op], items: list[str]) -> tuple[list[str], list[int]]:
    """Blocks of the segments in the order of forward, and the number of the segment of each operation."""
    kinds = [(op.phase is Phase.BACKWARD, item) for op, item in zip(ops, items, strict=True)]
    runs = [(back, item, len(list(group))) for (back, item), group in groupby(kinds)]
    order = [item for back, item, _ in runs if not back]
    places: list[int] = []
    at, forward = len(order) - 1, 0
    for index, (back, item, length) in enumerate(runs):
        if not back:
            places.extend([forward] * length)
            forward += 1
            continue
        following = [name for _, name, _ in runs[index + 1 :] if name]
        at = _backward_place(order, at, item, following[0] if following else "")
        places.extend([at] * length)
    return order, places


def _backward_place(order: list[str], at: int, item: str, following: str) -> int:
    """Segment of a run of backward: ``at`` is that of the run before it, ``following`` the next block's item."""
    if item:
        places = [p for p in range(at, -1, -1) if order[p] == item]
        if not places:
            raise CaptureError(
                f"expected blocks that run one after another, but the backward of {item!r} runs after that of "
                f"{order[at] or 'what is outside the blocks'!r}, which stands before it in forward"
            )
        return places[0]
    until = max((p for p in range(at) if order[p] == following), default=-1) if following else -1
    return next((p for p in range(at, until, -1) if not order[p]), at)


def _local(name: str, item: str) -> str:
    """Name of a module or parameter within its block."""
    if item and (name == item or name.startswith(item + ".")):
        return name[len(item) + 1 :]
    return name


def _uniquely_named(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    seen: dict[str, int] = {}
    made: list[Segment] = []
    for segment in segments:
        number = seen[segment.name] = seen.get(segment.name, 0) + 1
        made.append(dataclasses.replace(segment, name=f"{segment.name}.{number}") if number > 1 else segment)
    return tuple(made)
