"""Model tables by capture: a model is captured at several sizes, and each length found as a polynomial in them.

``module_table`` does so for any module, in the sizes of the batch; ``table_over`` for a family of models whose own
sizes vary too.

[Note: lengths] A single product of sizes is tried first, then a sum of two, then every sum of products without powers,
then the sum of two or three lengths that were found (a matrix whose columns are parts of several).

[Note: segments] A captured step is split into operations before the blocks, of each block, and after them, forward and
backward each (``captured_table``).
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import cached_property, partial
from itertools import combinations, combinations_with_replacement, groupby
from math import isclose, lcm
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from lading.errors import CaptureError
from lading.ir.fold import block_items
from lading.ir.graph import UNKNOWN, Arg, Literal, Op, OpKind, Parameter, Phase, Role, StepGraph, rename_op
from lading.ir.sizes import Monomial, Power, Size
from lading.ir.table import ModelTable, Segment, SegmentTensor
from lading.tracing.batches import input_leaves, map_batch
from lading.tracing.fused import WholeKernels
from lading.tracing.settings import number_args, number_settings, settings_of, with_number_args, with_numbers
from lading.tracing.side_effects import branches_of_eager, left_as_it_was
from lading.tracing.trace import call_on, fake_batch, fake_copies, fake_mode_of, forward_backward, module_paths
from lading.tracing.tracer import Tracer

#: Factors of a product at most.
_DEGREE = 4
#: Factors of each product in a sum of two.
_SUM_DEGREE = 3
#: Divisors of a coefficient: half a head is turned by rotary positions, state-space layers work in chunks of tokens.
_DIVISORS = (1, 2, 128)


class Identifier:
    """Finds the polynomials that lengths are, from observations at several sizes.

    Args:
        values: Value of each symbol, one mapping for each observation; the symbols should vary independently.
        largest: Largest coefficient; None means any (where the model's own sizes are numbers).
    """

    def __init__(self, values: Sequence[Mapping[str, int]], largest: int | None) -> None:
        self.values = list(values)
        self.largest = largest
        self.names = sorted(self.values[0])
        self._found: dict[tuple[int, ...], Size | None] = {}

    def size(self, observed: Sequence[int]) -> Size | None:
        """Find the polynomial with these values, one for each observation; None if there is none of a simple form."""
        key = tuple(observed)
        if key not in self._found:
            self._found[key] = self._search(np.array(observed, dtype=np.int64))
        return self._found[key]

    def learn(self, lengths: Iterable[Sequence[int]]) -> None:
        """Find the polynomials of these lengths, those that are sums of others too."""
        unsolved = {tuple(observed) for observed in lengths}
        unsolved = {key for key in unsolved if self.size(key) is None}
        parts = sorted((key for key, size in self._found.items() if size is not None and min(key) > 0), key=sum)
        for key in unsolved:
            self._found[key] = self._sum_of_found(key, parts, 3)

    def _sum_of_found(self, key: tuple[int, ...], parts: Sequence[tuple[int, ...]], most: int) -> Size | None:
        """Find ``key`` as the sum of at most ``most`` lengths that are known; None without one."""
        if most == 1 or min(key) <= 0:
            return self._found.get(key)
        for part in parts:
            remainder = tuple(total - piece for total, piece in zip(key, part, strict=True))
            left, right = self._found[part], self._sum_of_found(remainder, parts, most - 1)
            if left is not None and right is not None:
                return left + right
        return None

    def _search(self, observed: NDArray[np.int64]) -> Size | None:
        if (observed == observed[0]).all():
            return Size.of(int(observed[0]))
        size = self._product(observed)
        if size is None:
            size = self._sum(observed)
        return size if size is not None else self._multilinear(observed)

    @cached_property
    def _monomials(self) -> tuple[list[Monomial], NDArray[np.int64]]:
        """Products of symbols, lowest degree first, and their values, (products, observations)."""
        names: list[Monomial] = []
        for degree in range(_DEGREE + 1):
            for chosen in combinations_with_replacement(self.names, degree):
                names.append(tuple((n, chosen.count(n)) for n in dict.fromkeys(chosen)))
        rows = [[_value(m, at) for at in self.values] for m in names]
        return names, np.array(rows, dtype=np.int64)

    def _product(self, observed: NDArray[np.int64]) -> Size | None:
        names, rows = self._monomials
        for divisor in _DIVISORS:
            first = observed[0] * divisor // rows[:, 0]
            good = (first[:, None] * rows == observed * divisor).all(axis=1) & (first > 0)
            for index in np.flatnonzero(good):
                if self._allowed(int(first[index])):
                    return _size([(names[index], Fraction(int(first[index]), divisor))])
        return None

    def _allowed(self, coefficient: int) -> bool:
        return self.largest is None or abs(coefficient) <= self.largest

    def _sum(self, observed: NDArray[np.int64]) -> Size | None:
        """Find ``p*x + q*y`` of two products, trying those of low degree first; None without one."""
        names, _ = self._monomials
        for degree in range(1, _SUM_DEGREE + 1):
            count = sum(sum(power for _, power in m) <= degree for m in names)
            left, right = np.triu_indices(count, 1)
            for at in combinations(range(len(self.values)), 2):
                solution = self._solved(observed, at, left, right)
                if solution is not None:
                    return solution
        return None

    def _solved(
        self, observed: NDArray[np.int64], at: tuple[int, int], left: NDArray[np.intp], right: NDArray[np.intp]
    ) -> Size | None:
        """Find the sum of two products whose coefficients the observations ``at`` give, if the others agree."""
        names, rows = self._monomials
        (first, second), wide = at, rows.astype(float)
        a, b, c, d = wide[left, first], wide[right, first], wide[left, second], wide[right, second]
        ahead, behind = float(observed[first]), float(observed[second])
        determinant = a * d - b * c
        safe = np.where(determinant == 0, 1.0, determinant)
        p, q = np.rint((ahead * d - b * behind) / safe), np.rint((a * behind - ahead * c) / safe)
        fit = (determinant != 0) & (p != 0) & (q != 0)
        if self.largest is not None:
            fit &= (abs(p) <= self.largest) & (abs(q) <= self.largest)
        chosen = np.flatnonzero(fit)
        agrees = p[chosen, None] * wide[left[chosen]] + q[chosen, None] * wide[right[chosen]] == observed
        for index in chosen[agrees.all(axis=1)]:
            pair = names[left[index]], names[right[index]]
            return _size([(m, Fraction(int(c))) for m, c in zip(pair, (p[index], q[index]), strict=True)])
        return None

    def _multilinear(self, observed: NDArray[np.int64]) -> Size | None:
        """Find a sum of products without powers, where there are enough observations to tell."""
        names, rows = self._monomials
        chosen = [i for i, m in enumerate(names) if all(power == 1 for _, power in m)]
        if len(chosen) > len(self.values):
            return None
        solution = np.linalg.lstsq(rows[chosen].T.astype(float), observed.astype(float), rcond=None)[0]
        coefficients = np.rint(solution).astype(np.int64)
        if not (coefficients @ rows[chosen] == observed).all() or not all(map(self._allowed, map(int, coefficients))):
            return None
        return _size([(names[i], Fraction(int(c))) for i, c in zip(chosen, coefficients, strict=True)])


def _value(monomial: Monomial, values: Mapping[str, int]) -> int:
    product = 1
    for name, power in monomial:
        product *= values[name] ** power
    return product


def _size(terms: Sequence[tuple[Monomial, Fraction]]) -> Size:
    divisor = lcm(*(c.denominator for _, c in terms))
    total = Size(())
    for monomial, coefficient in terms:
        total = total + Size(((monomial, int(coefficient * divisor)),))
    return total.over(divisor)


Loss = Callable[[torch.nn.Module, Any], Any]
#: A model and a batch of certain sizes.
Make = Callable[[Mapping[str, int]], tuple[torch.nn.Module, Any]]


def traced(
    model: torch.nn.Module, batch: Any, loss: Loss, *, whole: bool = True
) -> tuple[StepGraph, list[tuple[int, Op]], list[tuple[str, str]]]:
    """Capture a step with its views, with norms and dropouts whole and tied parameters apart.

    Args:
        whole: False leaves norms and dropouts as the processor runs them.
    Returns:
        The graph, its views as ``Tracer`` gives them, and the pairs of parameters that are tied.
    """
    mode = fake_mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
    views: list[tuple[int, Op]] = []
    tracer = Tracer(views=views)
    with mode:
        fakes = fake_copies(model, tied=False)
        inputs, faked = fake_batch(batch)
    tracer.declare(fakes, inputs, dict(input_leaves(batch)))
    with (
        left_as_it_was(model, lambda _: True),
        branches_of_eager(),
        mode,
        tracer,
        module_paths(model, tracer),
        WholeKernels() if whole else nullcontext(),
    ):
        losses = call_on(model, fakes, faked, partial(forward_backward, loss, tracer, 1, fakes))
    return tracer.graph(fakes, inputs, losses), views, _tied_pairs(model)


def _tied_pairs(model: torch.nn.Module) -> list[tuple[str, str]]:
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            pairs.append((first[id(parameter)], name))
        first.setdefault(id(parameter), name)
    return pairs


def captured_table(model: torch.nn.Module, batch: Any, loss: Loss, name: str = "", *, whole: bool = True) -> ModelTable:
    """Make the table of a model at the sizes it has: no symbols.

    Raises:
        CaptureError: it cannot be captured, or its blocks do not run one after another.
    """
    return table_at_sizes(*traced(model, batch, loss, whole=whole), name)


def module_table(
    model: torch.nn.Module, batch: Any, loss: Loss, name: str = "", *, tokens: int = 0, whole: bool = True
) -> ModelTable:
    """Make the table of any module in the symbols ``b`` (sequences) and ``s`` (tokens).

    Args:
        batch: A tree of tensors, or ``batch(b, s)`` that makes one. Of a tree the first dims vary with ``b``.
        loss: As ``lading.capture`` takes it.
        tokens: Tokens of a sequence: other dims of a tree that are as long vary with ``s``, those longer by one with
            ``s + 1``; 0 for the second dim of the first tensor, if that is of numbered tokens or of vectors.
        whole: Norms and dropouts are one operation each, as on a GPU; False for what a processor runs.
    Raises:
        CaptureError: other sizes give other operations; says which.
    """
    if callable(batch):
        make_batch, lengths = batch, (16, 48, 32)
    else:
        tokens = tokens or _tokens(batch)
        make_batch = partial(_resized, batch, tokens)
        part = max(tokens // 4, 1)
        lengths = (part, 3 * part, 2 * part)
    pairs = ((3, 0), (5, 0), (3, 1), (5, 1), (7, 2))
    sizes = [{"b": b, "s": lengths[at]} for b, at in pairs]

    def table_at(at: Mapping[str, int]) -> ModelTable:
        return captured_table(model, make_batch(at["b"], at["s"]), loss, name, whole=whole)

    first = table_at(sizes[0])

    def remaining_tables() -> list[ModelTable]:
        return [table_at(at) for at in sizes[1:]]

    with _shortened(model, first.counts) as counts:
        try:
            remaining = remaining_tables()
        except CaptureError:
            if counts == first.counts:
                raise
            remaining = []
    if not remaining or any(table.counts != counts for table in remaining):  # the model needs all of its blocks
        remaining, counts = remaining_tables(), first.counts
    joined_table = _joined([dataclasses.replace(first, counts=counts), *remaining], sizes, None)
    return dataclasses.replace(joined_table, counts=first.counts)


@contextmanager
def _shortened(model: torch.nn.Module, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Leave at most two of equal blocks in a row in the model while open; gives how often each then stands.

    All stay where it is not plain which list of modules the blocks are.
    """
    blocks = counts[1:-1]
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == sum(blocks)]
    if len(lists) != 1 or max(blocks, default=0) <= 2:
        yield counts
        return
    starts = [sum(blocks[:run]) for run in range(len(blocks))]
    modules = list(lists[0])
    some = [modules[start + i] for start, count in zip(starts, blocks, strict=True) for i in range(min(count, 2))]
    _refill(lists[0], some)
    try:
        yield (counts[0], *(min(count, 2) for count in blocks), counts[-1])
    finally:
        _refill(lists[0], modules)


def _refill(modules: torch.nn.ModuleList, items: Sequence[torch.nn.Module]) -> None:
    del modules[:]
    modules.extend(items)


def _tokens(batch: Any) -> int:
    """Number of tokens of a batch's first tensor; 0 for images and the like."""
    leaves = [leaf for _, leaf in input_leaves(batch)]
    if not leaves or not leaves[0].dim():
        raise CaptureError("expected a batch whose first tensor has a dim for its sequences, got none")
    is_text = leaves[0].dim() == (3 if leaves[0].is_floating_point() else 2)
    return int(leaves[0].shape[1]) if is_text else 0


def _resized(batch: Any, tokens: int, b: int, s: int) -> Any:
    """Copy of a batch with ``b`` sequences of ``s`` tokens."""
    sizes = {tokens: s, tokens + 1: s + 1} if tokens else {}
    first = next(leaf for _, leaf in input_leaves(batch)).shape[0]

    def visit(_: str, leaf: torch.Tensor) -> torch.Tensor:
        rows = [b if n == first else n for n in leaf.shape[:1]]
        shape = [*rows, *(sizes.get(n, n) for n in leaf.shape[1:])]
        return torch.zeros(shape, dtype=leaf.dtype, device="meta" if leaf.is_meta else leaf.device)

    return map_batch(batch, visit)


def table_over(
    sizes: Sequence[Mapping[str, int]], make: Make, loss: Loss, name: str, largest: int | None = None
) -> ModelTable:
    """Make one table from captures at several sizes.

    Args:
        sizes: Values of the symbols; the last are not fitted but checked.
        make: Makes the model and a batch of such sizes.
        largest: Largest coefficient; None means any.
    Raises:
        CaptureError: the captures differ by more than lengths, or a length is no polynomial; says where.
    """
    return _joined([captured_table(*make(at), loss, name) for at in sizes], sizes, largest)


def _joined(tables: Sequence[ModelTable], sizes: Sequence[Mapping[str, int]], largest: int | None) -> ModelTable:
    """Join the tables of several sizes to one whose lengths are polynomials in them."""
    for table, at in zip(tables[1:], sizes[1:], strict=True):
        _check_alike(tables[0], table, f"at {_describe_sizes(sizes[0])} and at {_describe_sizes(at)}")
    identifier = Identifier(sizes[:-1], largest)
    identifier.learn(_lengths([table.segments for table in tables[:-1]]))
    segments = tuple(
        _unified([table.segments[i] for table in tables], identifier, sizes[-1]) for i in range(len(tables[0].segments))
    )
    return dataclasses.replace(tables[0], segments=segments)


def _describe_sizes(at: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in at.items())


def _check_alike(left: ModelTable, right: ModelTable, where: str) -> None:
    """Raise unless two tables differ in lengths only."""
    if left.counts != right.counts or left.tied != right.tied:
        raise CaptureError(f"{left.name or 'the model'} has blocks {left.counts} and {right.counts} {where}")
    for a, b in zip(left.segments, right.segments, strict=True):
        for op_a, op_b in zip(a.ops, b.ops, strict=False):
            if _no_numbers(op_a) != _no_numbers(op_b):
                texts = [f" with {op.settings}" if op_a.name == op_b.name else "" for op in (op_a, op_b)]
                raise CaptureError(
                    f"{op_a.name} in {a.name}.{op_a.module}{texts[0]} is {op_b.name} in {op_b.module}{texts[1]} "
                    f"{where}; a table needs the same operations at every size"
                )
        without_sizes = [dataclasses.replace(s, ops=(), tensors=tuple(_no_dims(t) for t in s.tensors)) for s in (a, b)]
        if len(a.ops) != len(b.ops) or without_sizes[0] != without_sizes[1]:
            raise CaptureError(
                f"segment {a.name!r} has {len(a.ops)} operations on {len(a.tensors)} tensors and {len(b.ops)} on "
                f"{len(b.tensors)} {where}; a table needs the same at every size"
            )


def _lengths(tables: Sequence[Sequence[Segment]]) -> Iterator[list[int]]:
    """Yield every dim of every tensor, as its lengths in all tables."""
    for segments in zip(*tables, strict=True):
        for tensors in zip(*(segment.tensors for segment in segments), strict=True):
            for dims in zip(*(tensor.dims for tensor in tensors), strict=True):
                yield [int(length.at({})) for length in dims]


def _no_numbers(op: Op) -> Op:
    settings = with_numbers(op.settings, [Size(())] * len(number_settings(op.settings)))
    return dataclasses.replace(with_number_args(op, [None] * len(number_args(op))), settings=settings)


def _no_dims(tensor: Any) -> Any:
    return dataclasses.replace(tensor, dims=(Size(()),) * len(tensor.dims))


def _unified(segments: Sequence[Segment], identifier: Identifier, check: Mapping[str, int]) -> Segment:
    """Join a segment at several sizes to one whose lengths are polynomials; ``check`` are the sizes not fitted."""

    def find(lengths: Sequence[Size], what: str) -> Size:
        numbers = [int(length.at({})) for length in lengths]
        size = identifier.size(numbers[:-1])
        if size is None or size.at(check) != numbers[-1]:
            tried = f", found {size}, which gives {size.at(check)} for the last" if size is not None else ""
            raise CaptureError(
                f"{what} in segment {segments[0].name!r} is {numbers} long at the sizes captured: no simple "
                f"polynomial in {', '.join(identifier.names)}{tried}"
            )
        return size

    tensors = tuple(
        dataclasses.replace(
            alike_tensors[0],
            dims=tuple(
                find([t.dims[d] for t in alike_tensors], f"dim {d} of tensor {i}")
                for d in range(len(alike_tensors[0].dims))
            ),
        )
        for i, alike_tensors in enumerate(zip(*(s.tensors for s in segments), strict=True))
    )
    ops: list[Op] = []
    for alike_ops in zip(*(s.ops for s in segments), strict=True):
        numbers = [number_settings(op.settings) for op in alike_ops]
        solved = [find(list(column), f"a setting of {alike_ops[0].name}") for column in zip(*numbers, strict=True)]
        arguments = zip(*map(number_args, alike_ops), strict=True)
        op = with_number_args(alike_ops[0], [_argument(column, identifier, check) for column in arguments])
        ops.append(dataclasses.replace(op, settings=with_numbers(op.settings, solved)))
    return dataclasses.replace(segments[0], tensors=tensors, ops=tuple(ops))


def _argument(numbers: Sequence[int | float], identifier: Identifier, check: Mapping[str, int]) -> Arg:
    """Join an argument's numbers at the sizes captured; UNKNOWN where they are no simple polynomial in them."""
    if len(set(numbers)) == 1:
        return numbers[0]
    if all(float(number).is_integer() for number in numbers):
        size = identifier.size([int(number) for number in numbers[:-1]])
        if size is not None and size.at(check) == numbers[-1]:
            return size
    for exponent in (-0.5, -1.0, 0.5):
        bases = [round(number ** (1 / exponent)) if number > 0 else 0 for number in numbers]
        if all(base > 1 and isclose(base**exponent, n) for base, n in zip(bases, numbers, strict=True)):
            size = identifier.size(bases[:-1])
            if size is not None and size.at(check) == bases[-1]:
                return Power(size, exponent)
    return Literal(UNKNOWN, ", ".join(map(str, numbers)))


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
                producer = self._producer_before(t, index)
                if producer is None or self.forward[producer] is not forward or self._role(t) not in _CROSSING:
                    continue
                distance = abs(self.places[index] - self.places[producer])
                if distance:
                    key = (self.places[producer], t)
                    reach[key] = max(reach.get(key, 0), distance)
        borders: list[dict[int, int]] = [{} for _ in range(len(self.items) - 1)]
        for (place, t), distance in reach.items():
            crossed = range(place, place + distance) if forward else range(place - distance, place)
            for border in crossed:
                borders[border][t] = max(borders[border].get(t, 0), distance)
        return [sorted(reaches, key=lambda t: (-reaches[t], self.producers[t][0])) for reaches in borders]

    def _producer_before(self, tensor: int, until: int) -> int | None:
        """Operation that made a tensor for one that takes it, or None; a view may be made again in every block."""
        places = self.producers.get(tensor, [])
        at = bisect_left(places, until)
        return places[at - 1] if at else None

    def _as_leaves(self, grads: list[int], leaves: list[int]) -> list[int]:
        """Order gradients as the activations that they belong to; the shapes are equal."""
        unordered, ordered = list(grads), list[int]()
        for leaf in leaves:
            shape = self.graph.tensors[leaf].shape
            grad = next((g for g in unordered if self.graph.tensors[g].shape == shape), None)
            if grad is not None:
                unordered.remove(grad)
                ordered.append(grad)
        return [*ordered, *unordered]

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
        made_in_backward: set[int] = set()
        saved: dict[int, None] = {}
        for i in chosen:
            if self.forward[i]:
                continue
            for t in self.ops[i].inputs:
                first = self.producers.get(t)
                if t not in made_in_backward and (first is None or self.forward[first[0]]):
                    saved[t] = None
            made_in_backward.update(self.ops[i].outputs)
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
        entries: list[SegmentTensor[Size]] = []
        for t in self.numbers:
            tensor, role = graph.tensors[t], self.cutter._role(t)
            entries.append(
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
        return tuple(entries)


def _merged(graph: StepGraph, views: list[tuple[int, Op]]) -> tuple[list[Op], list[bool]]:
    """Merge operations and views in order; views that nobody takes, or that change nothing, are left out.

    Returns:
        The operations, and of each whether it is a view.
    """
    rows: list[tuple[Op, bool]] = []
    remaining_views = iter([*views, (len(graph.ops) + 1, None)])
    position, view = next(remaining_views)
    for index, op in enumerate(graph.ops):
        while view is not None and position <= index:
            rows.append((view, True))
            position, view = next(remaining_views)
        rows.append((op, False))
    needed_tensors = {p.gradient for p in graph.parameters} | set(graph.losses)
    merged: list[tuple[Op, bool]] = []
    for op, is_view in reversed(rows):
        outputs = tuple(t for t in op.outputs if t not in op.inputs)
        if is_view and not needed_tensors & set(outputs):
            continue
        needed_tensors.update(op.inputs)
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
    counts: dict[str, int] = {}
    renamed: list[Segment] = []
    for segment in segments:
        number = counts[segment.name] = counts.get(segment.name, 0) + 1
        renamed.append(dataclasses.replace(segment, name=f"{segment.name}.{number}") if number > 1 else segment)
    return tuple(renamed)
