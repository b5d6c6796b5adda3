"""Regions: runs of operations that may be compiled into one call, found in a Program without running anything.

[Note: what may be one region] A region is a run of operations of the compute stream with nothing decided in between: no
action in it but the first waits, so nothing it reads arrives meanwhile, and whoever waits for one of its actions may as
well wait for its end. What it makes and frees again is seen by nobody and needs no place. What it makes and leaves is
written when it may still be reading, so no such address may be one that it reads from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from lading.ir.action import Action, ActionKind
from lading.ir.fusing import FEWEST_OPS, LEAST_BYTES, fusible
from lading.ir.graph import Arg, Op, Ref, StepGraph, Tensor
from lading.ir.program import COMPUTE_STREAM, Program

#: Operations that gain even alone: their kernels have no form that writes into given memory.
_ALONE = frozenset({"native_layer_norm", "native_layer_norm_backward"})


@dataclass(frozen=True, slots=True)
class Site:
    """Tensor of the graph at the arena offset of its storage."""

    tensor: int
    offset: int


@dataclass(frozen=True)
class FusibleRegion:
    """A run of actions that becomes one call.

    Attributes:
        actions, freed: Ids of the operations, and of the FREEs among and behind them, in order.
        inputs, outputs: Tensors read from and written to the arena; everything else vanishes.
        signature: Equal for two regions that one compiled function serves.
        elements: Actions that it was made from.
    """

    actions: tuple[int, ...]
    freed: tuple[int, ...]
    inputs: tuple[Site, ...]
    outputs: tuple[Site, ...]
    signature: tuple[object, ...]
    elements: tuple[_Element, ...] = field(repr=False, compare=False)


@dataclass(slots=True)
class _Element:
    """One action of a run: an operation with the stays it reads and makes, or the FREE of a stay.

    A stay is one placement of a storage in the arena: (storage, number of its placement).
    """

    action: Action
    op: Op | None = None
    reads: dict[int, tuple[int, int]] = field(default_factory=lambda: {})
    makes: dict[int, tuple[int, int]] = field(default_factory=lambda: {})
    frees: tuple[int, int] | None = None


class RegionFinder:
    """Walks a Program once and knows where each storage lies at every action. See [Note: what may be one region]."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.deferred = frozenset(self.graph.deferred)
        self.stay: dict[int, tuple[int, int]] = {}
        self.offset: dict[tuple[int, int], int] = {}
        for storage, offset in program.resident:
            self._place(storage, offset)

    def _place(self, storage: int, offset: int) -> None:
        stay = (storage, self.stay[storage][1] + 1 if storage in self.stay else 0)
        self.stay[storage], self.offset[stay] = stay, offset

    def longest(self) -> list[FusibleRegion]:
        """Find the longest regions of the Program, in order."""
        return [region for run in self._runs() for region in self._cut(run)]

    def halves(self, region: FusibleRegion) -> list[FusibleRegion]:
        """Cut a region so that no part has more than half of its operations; of a single operation, nothing."""
        if len(region.actions) == 1:
            return []
        middle = region.actions[len(region.actions) // 2]
        first = [e for e in region.elements if e.action.id < middle]
        return [*self._cut(first), *self._cut(region.elements[len(first) :])]

    def _runs(self) -> list[list[_Element]]:
        """Longest runs of fusible operations, with the FREEs among and behind them."""
        runs: list[list[_Element]] = [[]]
        for action in self.program.actions:
            for storage, offset in action.places:
                self._place(storage, offset)
            if action.stream != COMPUTE_STREAM:
                continue
            element = self._element(action)
            if element is None or (action.waits and runs[-1]):
                runs.append([])
            if element is not None and (element.op is not None or runs[-1]):
                runs[-1].append(element)
        return [run for run in runs if run]

    def _element(self, action: Action) -> _Element | None:
        if action.kind is ActionKind.FREE and action.storage is not None:
            return _Element(action, frees=self.stay[action.storage])
        if action.kind not in (ActionKind.COMPUTE, ActionKind.RECOMPUTE) or action.op is None:
            return None
        if action.op in self.deferred:
            return None  # left out of the first step
        op = self.graph.ops[action.op]
        if not fusible(self.graph, op):
            return None
        reads = {t: self.stay[self.graph.storage_of(t)] for t in op.inputs}
        placed = dict(action.places)
        makes = {t: self.stay[s] for t in op.outputs if (s := self.graph.storage_of(t)) in placed}
        return _Element(action, op, reads, makes)

    def _cut(self, run: Sequence[_Element]) -> list[FusibleRegion]:
        """Cut a run into regions: from its start, always the longest that may be one."""
        regions: list[FusibleRegion] = []
        start = 0
        while start < len(run):
            end = self._longest(run, start)
            if end > start:
                regions.append(self._region(run[start:end]))
            start = max(end, start + 1)
        return regions

    def _longest(self, run: Sequence[_Element], start: int) -> int:
        """Index of the end of the longest region from ``start``; ``start`` if there is none."""
        best = start
        tensor_of_stay: dict[tuple[int, int], int] = {}  # stay -> the tensor that its operation made
        read: set[tuple[int, int]] = set()
        freed: set[tuple[int, int]] = set()
        for index in range(start, len(run)):
            element = run[index]
            if element.frees is not None:
                freed.add(element.frees)
            elif not self._may_join(element, tensor_of_stay, read):
                break
            else:
                read.update(stay for stay in element.reads.values() if stay not in tensor_of_stay)
                tensor_of_stay.update((stay, t) for t, stay in element.makes.items())
            if self._spans_are_disjoint(read, tensor_of_stay.keys() - freed) and self._worth(run[start : index + 1]):
                best = index + 1
        return best

    def _may_join(self, element: _Element, made: dict[tuple[int, int], int], read: set[tuple[int, int]]) -> bool:
        """Whether all that an element reads of the region's can be derived, and it makes nothing anew that was read."""
        tensors, storages = self.graph.tensors, {storage for storage, _ in (*read, *made)}
        return all(
            stay not in made or derivation(tensors[made[stay]], tensors[t]) is not None
            for t, stay in element.reads.items()
        ) and not any(storage in storages for storage, _ in element.makes.values())

    def _spans_are_disjoint(self, read: set[tuple[int, int]], written: set[tuple[int, int]]) -> bool:
        """Whether the addresses that are written and those that are read do not overlap."""
        spans = sorted((*self._span(stay), stay in written) for stay in read | written)
        high, high_kept = -1, -1  # ends of all spans so far, and of those written
        for low, end, is_kept in spans:
            if low < (high if is_kept else high_kept):
                return False
            high, high_kept = max(high, end), max(high_kept, end) if is_kept else high_kept
        return True

    def _span(self, stay: tuple[int, int]) -> tuple[int, int]:
        return self.offset[stay], self.offset[stay] + self.graph.storages[stay[0]].size_bytes

    def _worth(self, elements: Sequence[_Element]) -> bool:
        ops = [e.op for e in elements if e.op is not None]
        if not ops or (len(ops) < FEWEST_OPS and ops[0].name.split(".")[1] not in _ALONE):
            return False
        tensors = {t for op in ops for t in (*op.inputs, *op.outputs)}
        return sum(self.graph.tensors[t].touched_bytes for t in tensors) >= LEAST_BYTES

    def _region(self, elements: Sequence[_Element]) -> FusibleRegion:
        ops = [e for e in elements if e.op is not None]
        freed = {e.frees for e in elements if e.frees is not None}
        tensor_of_stay: dict[tuple[int, int], int] = {}
        inputs: dict[int, Site] = {}
        for element in ops:
            for tensor, stay in element.reads.items():
                if stay not in tensor_of_stay:
                    inputs.setdefault(tensor, Site(tensor, self.offset[stay]))
            tensor_of_stay.update((stay, t) for t, stay in element.makes.items())
        outputs = tuple(Site(t, self.offset[stay]) for stay, t in tensor_of_stay.items() if stay not in freed)
        return FusibleRegion(
            actions=tuple(e.action.id for e in ops),
            freed=tuple(e.action.id for e in elements if e.frees is not None),
            inputs=tuple(inputs.values()),
            outputs=outputs,
            signature=_signature(self.graph, [e.op for e in ops if e.op is not None], tuple(inputs), outputs),
            elements=tuple(elements),
        )


def _signature(
    graph: StepGraph, ops: Sequence[Op], inputs: Sequence[int], outputs: Sequence[Site]
) -> tuple[object, ...]:
    """Everything a compiled function depends on: operations, shapes, strides, numbers; not which tensors they are."""
    number = {t: i for i, t in enumerate(inputs)}
    for op in ops:
        for t in (*op.inputs, *op.outputs):
            number.setdefault(t, len(number))
    storages: dict[int, int] = {}
    shapes: list[tuple[object, ...]] = []
    for t in number:
        x = graph.tensors[t]
        storage = storages.setdefault(x.storage, len(storages))
        # an input is a tensor of its own, wherever in its storage it begins
        shapes.append((storage, x.dtype, x.shape, x.stride, 0 if t in inputs else x.offset))

    def renamed(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return ("tensor", number[arg.tensor])
        return tuple(map(renamed, arg)) if isinstance(arg, tuple) else (type(arg).__name__, arg)

    body = tuple(
        (
            op.name,
            tuple(map(renamed, op.args)),
            tuple((k, renamed(a)) for k, a in op.kwargs),
            tuple(number[t] if t is not None else None for t in op.results),
        )
        for op in ops
    )
    return (len(inputs), tuple(shapes), body, tuple(number[p.tensor] for p in outputs))


@dataclass(frozen=True, slots=True)
class Derivation:
    """Operations on values alone that make one view of a storage from another that covers it.

    Permute by ``order``, reshape to ``dims``, cut each dim to ``cuts``, take ``column`` of the last one (None: there is
    no such dim), permute by ``turn``, then reshape to ``ones`` and expand to ``shape``.
    """

    order: tuple[int, ...]
    dims: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]
    column: int | None
    turn: tuple[int, ...]
    ones: tuple[int, ...]
    shape: tuple[int, ...]


def derivation(base: Tensor, wanted: Tensor) -> Derivation | None:
    """Find how to make ``wanted`` from ``base``, which covers the same storage densely; None if there is no way."""
    if base.dtype != wanted.dtype:
        return None
    count = prod(base.shape)
    real = [i for i, (n, s) in enumerate(zip(wanted.shape, wanted.stride, strict=True)) if n != 1 and s != 0]
    falling = sorted(real, key=lambda i: -wanted.stride[i])
    steps = [count, *(wanted.stride[i] for i in falling)]
    if count == 0 or any(a % b or a == b for a, b in pairwise(steps)):
        return None
    dims = [a // b for a, b in pairwise(steps)]
    cuts: list[tuple[int, int]] = []
    remaining_offset = wanted.offset
    for i, length in zip(falling, dims, strict=True):
        start, remaining_offset = divmod(remaining_offset, wanted.stride[i])
        if start + wanted.shape[i] > length:
            return None
        cuts.append((start, start + wanted.shape[i]))
    column = remaining_offset if steps[-1] > 1 else None
    shape = [1 if i not in real else n for i, n in enumerate(wanted.shape)]
    return Derivation(
        order=tuple(sorted(range(len(base.shape)), key=lambda i: (-base.stride[i], i))),
        dims=(*dims, steps[-1]) if column is not None else tuple(dims),
        cuts=tuple(cuts),
        column=column,
        turn=tuple(falling.index(i) for i in real),
        ones=tuple(shape),
        shape=wanted.shape,
    )
