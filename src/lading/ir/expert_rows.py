"""Rows of experts: which experts can be computed for the tokens that chose them alone, found by data flow.

An expert is captured over all tokens. Its operations (those that only its tokens need, ``lading.ir.experts``) can run
on fewer rows where each treats a token by itself, or sums over tokens what is zero for those that did not choose the
expert. A storage has *rows* where its elements are so many per token, one token after another; a view of it has *row
dims*. What is computed is written into zeros: rows of tokens that did not choose the expert are zero as captured, or
nobody looks at them.

[Note: proof of rows] No dim is a token by its name or length. A router's column has one row per token. An operation
on elements aligns the row dims of its arguments, a product those of its left argument with those of its result, or,
turned, sums over them. An argument from elsewhere of the right size is taken to have rows; where that was wrong it
meets a column that it does not align with, and is refused. What meets none never leaves the expert: all that does is
zero by a column, row by row, or is put into one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from lading.ir.experts import Expert, Routed, base_name
from lading.ir.graph import DTYPE_BYTES, Op, StepGraph, Tensor, refs
from lading.ir.update_ops import PREFIX, rule_of
from lading.optim.rule import ParameterRule

#: Operations on elements, by whether the result is zero where the first tensor is (None: where any is).
_ELEMENTS: Mapping[str, bool | None] = {
    "mul": None, "div": True, "neg": True, "clone": True, "_to_copy": True, "relu": True, "abs": True, "silu": True,
    "gelu": True, "tanh": True, "sigmoid": False, "silu_backward": True, "gelu_backward": True,
    "threshold_backward": True, "sigmoid_backward": True, "tanh_backward": True, "add": False, "sub": False,
}  # fmt: skip
_SUMS = frozenset(("add", "sub"))
#: Operations in place whose tensor nobody else has.
_IN_PLACE = frozenset(("mul_", "add_"))


class _NoRows(Exception):
    """An expert cannot be computed for fewer rows; says why."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Operations of an expert that can run on the rows of the tokens that chose it.

    Attributes:
        ops: The operations, in the order of the step; updates are among them.
        count: Tokens that a router chooses for.
        widths: Elements per token of each storage that has rows, the expert's own and those from elsewhere.
        inputs: Storages from elsewhere that each operation is the first to read, or that change between: activations
            and gradients of tokens, and single numbers.
        results: Storages that each operation makes and others read.
        weights: Storages that outlast the step, which it reads or changes.
    """

    ops: tuple[int, ...]
    count: int
    widths: Mapping[int, int]
    inputs: Mapping[int, tuple[int, ...]]
    results: Mapping[int, tuple[int, ...]]
    weights: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Value:
    """Facts known of a storage: elements per token, 0 without rows; and whether rows of other tokens are zero."""

    width: int
    is_zero: bool = False


def row_dims(tensor: Tensor, width: int, count: int) -> tuple[int, ...] | None:
    """Dims of a view that go over all tokens, of a storage with so many elements per token; None without.

    The outermost in memory comes first: two views have their tokens in one order where these are the same.
    """
    dims = [
        d for d, (n, stride) in enumerate(zip(tensor.shape, tensor.stride, strict=True)) if n > 1 and stride >= width
    ]
    dims.sort(key=lambda d: -tensor.stride[d])
    expected = width
    for dim in reversed(dims):
        if tensor.stride[dim] != expected:
            return None
        expected *= tensor.shape[dim]
    inner = [(n - 1) * s for d, (n, s) in enumerate(zip(tensor.shape, tensor.stride, strict=True)) if d not in dims]
    fits = expected == width * count and tensor.offset + sum(inner) < width
    return tuple(dims) if fits and dims else None


def find_expert_rows(graph: StepGraph, routed: Routed) -> dict[Expert, ExpertRows | str]:
    """Find for each expert its operations on rows, or why it has none."""
    ops: dict[Expert, list[int]] = {}
    shared: dict[Expert, int] = {}
    for op, needs in sorted(routed.needs.items()):
        for expert in needs:
            ops.setdefault(expert, []).append(op)
            if len(needs) > 1:
                shared.setdefault(expert, op)
    readers: dict[int, list[int]] = {}
    for op, storages in enumerate(graph.op_reads):
        for storage in storages:
            readers.setdefault(storage, []).append(op)
    rows: dict[Expert, ExpertRows | str] = {}
    for expert, expert_ops in sorted(ops.items()):
        if expert in shared:
            rows[expert] = f"{_named(graph, shared[expert])} is needed by several micro-batches, expected one"
            continue
        try:
            rows[expert] = _RowSearch(graph, routed, expert, expert_ops, readers).search()
        except _NoRows as error:
            rows[expert] = str(error)
    return rows


def _named(graph: StepGraph, op: int) -> str:
    return f"{graph.ops[op].name} in {graph.ops[op].module or 'the loss'}"


@dataclass
class _RowSearch:
    """Walk over one expert's operations in the order of the step. See [Note: proof of rows]."""

    graph: StepGraph
    routed: Routed
    expert: Expert
    ops: list[int]
    readers: Mapping[int, Sequence[int]]
    values: dict[int, _Value] = field(default_factory=dict[int, _Value])
    widths: dict[int, int] = field(default_factory=dict[int, int])
    inputs: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    results: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    weights: set[int] = field(default_factory=set[int])

    def search(self) -> ExpertRows:
        """Follow the rows.

        Raises:
            _NoRows: an operation is not understood, or what leaves the expert is not zero for other tokens.
        """
        table = self.graph.tensors[self.graph.ops[self.routed.routers[self.expert[0]].op].outputs[0]]
        self.count = prod(table.shape[:-1])
        self.step_results = {self.graph.storage_of(t) for t in self.graph.results}
        late = frozenset(self.graph.deferred)
        self._read = set[int]()
        self._changed = {self.graph.storage_of(t) for op in self.graph.ops for t in op.mutates}
        for index in self.ops:
            op = self.graph.ops[index]
            if index in late:
                raise _NoRows(f"{_named(self.graph, index)} waits for the next step, expected none that does")
            self._external = list[int]()
            if op.name.startswith(PREFIX):
                self._update(index, op)
            elif op.mutates:
                self._in_place(index, op)
            else:
                self._computed(index, op)
            if new := [s for s in dict.fromkeys(self._external) if s not in self._read or s in self._changed]:
                self.inputs[index] = tuple(new)
            self._read.update(self._external)
        for index in self.ops:
            self._leaving(index, self.graph.ops[index])
        if not any(self.graph.ops[index].name.startswith(PREFIX) for index in self.ops):
            raise _NoRows("it has no update, expected a trained expert")
        weights = frozenset(self.weights)
        return ExpertRows(tuple(self.ops), self.count, self.widths, self.inputs, self.results, weights)

    def _refuse(self, index: int, why: str) -> _NoRows:
        return _NoRows(f"{_named(self.graph, index)} {why}")

    def _update(self, index: int, op: Op) -> None:
        """Check an update: it treats elements alone, and its gradient is the expert's own, whole."""
        rule = rule_of(op)
        if not isinstance(rule, ParameterRule) or rule.whole:
            raise self._refuse(index, "moves a whole parameter, expected a rule that treats elements alone")
        gradient = self.graph.storage_of(op.inputs[1])
        if gradient not in self.values or self.values[gradient].width:
            raise self._refuse(index, "moves a parameter by a gradient that others make, expected the expert's own")
        for tensor in dict.fromkeys(op.inputs):
            storage = self.graph.storage_of(tensor)
            if storage in self.graph.persistent:
                self.weights.add(storage)
            elif storage not in self.values:
                self._number(index, tensor)

    def _in_place(self, index: int, op: Op) -> None:
        """Check an operation that scales or adds to a tensor of the expert's own."""
        if base_name(op) not in _IN_PLACE or any(self.graph.storage_of(t) not in self.values for t in op.mutates):
            raise self._refuse(index, "changes in place what is not the expert's own, or in a way that is not known")
        target = self.values[self.graph.storage_of(op.mutates[0])]
        for tensor in op.inputs:
            storage = self.graph.storage_of(tensor)
            if storage not in self.values:
                self._number(index, tensor)
            elif self.values[storage].width != target.width:
                raise self._refuse(index, "mixes rows of tokens with what has none")
        if base_name(op) == "add_" and not all(
            self.values.get(self.graph.storage_of(t), target).is_zero for t in op.inputs
        ):
            self.values[self.graph.storage_of(op.mutates[0])] = _Value(target.width)

    def _number(self, index: int, tensor: int) -> None:
        """Take note of a single number from elsewhere."""
        if prod(self.graph.tensors[tensor].shape) != 1:
            raise self._refuse(index, "reads a tensor of others that has no row for each token")
        self._external.append(self.graph.storage_of(tensor))

    def _computed(self, index: int, op: Op) -> None:
        name, tensors = base_name(op), [t for arg in op.args for t in refs(arg)]
        if len(op.outputs) != 1 or not tensors:
            raise self._refuse(index, "has several results, expected one")
        if name in _ELEMENTS:
            made = self._by_element(index, op, name, tensors)
        elif name in ("mm", "addmm"):
            made = self._product(index, tensors)
        elif op.name == "aten.sum.dim_IntList":
            made = self._summed(index, op, tensors[0])
        elif name == "linalg_vector_norm" and not self._dims(index, tensors[0]):
            made = _Value(0)
        else:
            raise self._refuse(index, "is not known to treat each token by itself")
        self._make(index, op.outputs[0], made)

    def _make(self, index: int, tensor: int, made: _Value) -> None:
        view = self.graph.tensors[tensor]
        if not view.is_dense or not view.spans(self.graph.storages[view.storage].size_bytes):
            raise self._refuse(index, "makes a part of a storage, expected the whole")
        self.values[view.storage] = made
        if made.width:
            self.widths[view.storage] = made.width

    def _dims(self, index: int, tensor: int) -> tuple[int, ...]:
        """Row dims of an argument; () without rows. One from elsewhere has them if it may."""
        view = self.graph.tensors[tensor]
        value = self.values.get(view.storage)
        if value is not None:
            dims = row_dims(view, value.width, self.count) if value.width else ()
            if dims is None:
                raise self._refuse(index, "reads rows of tokens in another order")
            return dims
        if view.storage in self.graph.persistent:
            self.weights.add(view.storage)
            return ()
        if prod(view.shape) == 1:
            self._external.append(view.storage)
            return ()
        width, rest = divmod(self.graph.storages[view.storage].size_bytes, self.count * DTYPE_BYTES[view.dtype])
        dims = row_dims(view, width, self.count) if width and not rest else None
        if dims is None:
            raise self._refuse(index, "reads a tensor of others that has no row for each token")
        self.widths[view.storage] = width
        self._external.append(view.storage)
        return dims

    def _is_zero(self, tensor: int) -> bool:
        """Whether a tensor is zero for tokens that did not choose the expert: its own, or a column of the router's."""
        value = self.values.get(self.graph.storage_of(tensor))
        return value.is_zero if value is not None else self.routed.columns_of.get(tensor) == self.expert

    def _by_element(self, index: int, op: Op, name: str, tensors: list[int]) -> _Value:
        out = self.graph.tensors[op.outputs[0]]
        rank = len(out.shape)
        places = {t: tuple(d + rank - len(self.graph.tensors[t].shape) for d in self._dims(index, t)) for t in tensors}
        with_rows = {dims for dims in places.values() if dims}
        if len(with_rows) > 1:
            raise self._refuse(index, "mixes rows of tokens that do not lie alike")
        if not with_rows:
            return _Value(0)
        dims = with_rows.pop()
        for tensor, tensor_dims in places.items():
            shape = self.graph.tensors[tensor].shape
            if not tensor_dims and any(d - rank + len(shape) >= 0 and shape[d - rank] != 1 for d in dims):
                raise self._refuse(index, "mixes rows of tokens with what has none")
        width = prod(out.shape) // self.count
        if row_dims(out, width, self.count) != dims:
            raise self._refuse(index, "makes rows of tokens in another order")
        if name in _SUMS:
            return _Value(width, len(tensors) > 1 and all(map(self._is_zero, tensors)))
        rule = _ELEMENTS[name]
        return _Value(width, any(map(self._is_zero, tensors)) if rule is None else rule and self._is_zero(tensors[0]))

    def _product(self, index: int, tensors: list[int]) -> _Value:
        """Product of rows with a weight, or of two tensors over their rows."""
        *bias, left, right = tensors
        if any(self._dims(index, t) for t in bias):
            raise self._refuse(index, "adds rows of tokens to a product")
        a, b = self._dims(index, left), self._dims(index, right)
        if (a, b) == ((0,), ()):
            return _Value(self.graph.tensors[right].shape[1], not bias and self._is_zero(left))
        if (a, b) == ((1,), (0,)) and not bias:
            if self._is_zero(left) or self._is_zero(right):
                return _Value(0)
            raise self._refuse(index, "sums over tokens that did not choose the expert")
        if not a and not b:
            return _Value(0)
        raise self._refuse(index, "mixes tokens")

    def _summed(self, index: int, op: Op, tensor: int) -> _Value:
        view, dims = self.graph.tensors[tensor], self._dims(index, tensor)
        over = op.args[1] if isinstance(op.args[1], tuple) else ()
        summed = {d % len(view.shape) for d in over if isinstance(d, int)}
        if not dims:
            return _Value(0)
        if not summed or len(summed) != len(over):
            raise self._refuse(index, "sums over dims that are not known")
        if summed.isdisjoint(dims):
            out = self.graph.tensors[op.outputs[0]]
            width = prod(out.shape) // self.count
            if len(out.shape) < len(view.shape):
                dims = tuple(d - sum(s < d for s in summed) for d in dims)
            if row_dims(out, width, self.count) != dims:
                raise self._refuse(index, "makes rows of tokens in another order")
            return _Value(width, self._is_zero(tensor))
        if summed >= set(dims) and self._is_zero(tensor):
            return _Value(0)
        raise self._refuse(index, "sums over tokens that did not choose the expert")

    def _leaving(self, index: int, op: Op) -> None:
        """Check what an operation makes for others."""
        inside, left = frozenset(self.ops), list[int]()
        for tensor in op.outputs:
            storage = self.graph.storage_of(tensor)
            readers = [reader for reader in self.readers.get(storage, ()) if reader not in inside]
            if not readers and storage not in self.step_results:
                continue
            value = self.values[storage]
            if any(self.graph.ops[reader].name.startswith(PREFIX) for reader in readers):
                raise _NoRows("an update runs in every step, as values do not surely lie still when the router chooses")
            if not value.width and prod(self.graph.tensors[tensor].shape) != 1:
                raise self._refuse(index, "makes a gradient or a sum for others, expected a single number or rows")
            if value.width and not value.is_zero and storage not in self.routed.columns:
                raise self._refuse(index, "makes what is not zero for tokens that did not choose the expert")
            left.append(storage)
        if left:
            self.results[index] = tuple(left)
