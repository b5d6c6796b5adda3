"""Experts of a step: what is not needed where a router gives an expert no token, found by data flow alone.

A router chooses experts for each token: it scatters their weights into zeros along the last dim, so that the column of
an expert that no token chose is zero. Whatever is multiplied by that column is zero too, and so is what follows from it
by products and sums: the expert's part of the output, and the gradients of its weights. What only such operations read
is not needed at all. No name, module or model is known here: any model that weighs outputs by such columns has experts.

A *choice* is a pair (router, expert). An operation is left out where none of its choices got a token; one of several
micro-batches has a choice for each. Where something that runs still reads an output, that output is set to zero.

[Note: zeros for experts] Zero times a finite number is zero, so the numbers are those of the whole step as far as these
are finite; an expert with an infinite or undefined result spoils plain PyTorch's sum even if no token chose it, and is
not looked at here. A zero that plain PyTorch computes may have a minus sign, and a zero written here has none: sums,
moments and weights that are not themselves zero have the same bits. float16 overflows early and is left alone.

[Note: replayed updates] The update of an expert without tokens sees a gradient of zeros. It is left out as well, and
made up for when the expert is next chosen, or its values are asked for: the same kernel with zeros, once for every step
missed, with that step's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import cast

from lading.ir.graph import Op, OpKind, Phase, Ref, StepGraph, Tensor, refs
from lading.ir.update_ops import PREFIX

#: (number of a router, expert).
Expert = tuple[int, int]
#: Operations whose results are zero where one of two factors is.
_PRODUCTS = frozenset(("mul", "mm", "bmm"))
#: Operations whose results are zero where their first argument is.
_LINEAR = frozenset((
    "neg", "clone", "_to_copy", "sum", "mean", "relu", "abs", "silu_backward", "gelu_backward", "threshold_backward",
    "sigmoid_backward", "tanh_backward", "_softmax_backward_data", "native_layer_norm_backward",
    "_fused_rms_norm_backward", "native_dropout_backward", "linalg_vector_norm",
))  # fmt: skip
#: Operations whose results are zero where all their tensors are.
_SUMS = frozenset(("add", "sub", "stack", "cat"))
#: Operations that put tensors into a larger one, and zeros beside them.
_PUTS = frozenset(("stack", "cat", "slice_backward", "select_backward"))
#: Operations on every element by itself, by which a column of zeros stays one.
_BY_ELEMENT = frozenset(("mul", "div", "neg", "clone", "_to_copy"))
#: What makes the zeros that a router scatters into.
_ZEROS = frozenset(("zeros_like", "new_zeros", "zeros"))
_DTYPES = frozenset(("float32", "bfloat16", "float64"))


@dataclass(frozen=True, slots=True)
class Router:
    """Operation that scatters the weights of chosen experts.

    Attributes:
        op: Its number.
        chosen: Tensor of the chosen experts' numbers.
        experts: Number of experts.
        module: Module that it is in.
        micro_batch: Micro-batch that it is of.
        layer: Number among the routers of one micro-batch.
    """

    op: int
    chosen: int
    experts: int
    module: str
    micro_batch: int
    layer: int


@dataclass(frozen=True)
class Routed:
    """Operations of a step that experts without tokens make needless.

    Attributes:
        routers: Routers in order.
        needs: Choices of each such operation; it is left out where none of them got a token.
        zeros: Tensors to be set to zero where an operation is left out, by operation.
        updates: Operations among those of ``needs`` that are replayed. See [Note: replayed updates].
        columns: Storages that others than the expert only put into columns of which they leave those without tokens
            alone, row by row.
        columns_of: Choice whose column of a router's weights a tensor is.
    """

    routers: tuple[Router, ...]
    needs: Mapping[int, frozenset[Expert]]
    zeros: Mapping[int, tuple[int, ...]]
    updates: frozenset[int]
    columns: frozenset[int] = frozenset()
    columns_of: Mapping[int, Expert] = field(default_factory=dict[int, Expert])


def base_name(op: Op) -> str:
    """Name of an operation without its namespace and overload."""
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name


def find_routers(graph: StepGraph) -> tuple[Router, ...]:
    """Find the operations that scatter weights into zeros along the last dim, once for each micro-batch."""
    made = {graph.storage_of(t): op for op in graph.ops for t in op.outputs}
    rows: list[tuple[int, int, int, str]] = []
    for index, op in enumerate(graph.ops):
        if op.phase is not Phase.FORWARD or not op.name.startswith("aten.scatter.") or op.mutates:
            continue
        base, dim, chosen = op.args[0], op.args[1], op.args[2]
        if not (isinstance(base, Ref) and isinstance(chosen, Ref) and len(op.outputs) == 1):
            continue
        out, source = graph.tensors[op.outputs[0]], made.get(graph.storage_of(base.tensor))
        columns = next(reversed(out.shape), 0)
        is_last = bool(columns) and dim in (-1, len(out.shape) - 1)
        if is_last and source is not None and base_name(source) in _ZEROS and _is_table(graph, out, columns):
            rows.append((index, chosen.tensor, columns, op.module))
    each = max(1, len(rows) // max(1, graph.accumulation))
    return tuple(Router(*row, number // each, number % each) for number, row in enumerate(rows))


def find_experts(graph: StepGraph, always: Set[int] = frozenset()) -> Routed:
    """Find what experts without tokens make needless.

    Args:
        graph: The whole step, whatever its order.
        always: Updates that run in every step, as they cannot be replayed.
    """
    search = _ExpertSearch(graph, find_routers(graph), always)
    search.find_zeros()
    search.find_needless()
    updates = frozenset(op for op in search.needs if graph.ops[op].name.startswith(PREFIX))
    return Routed(search.routers, search.needs, search.fills, updates, frozenset(search.columns), search.columns_of)


def owned_values(graph: StepGraph, routed: Routed) -> dict[int, frozenset[Expert]]:
    """Experts of each storage that only they use, as pairs (layer, expert); a step without tokens for them needs none.

    Left out is what an operation uses that always runs, and what operations of different experts use.
    """
    owners: dict[int, frozenset[Expert]] = {}
    for op, (reads, writes) in enumerate(zip(graph.op_reads, graph.op_writes, strict=True)):
        mine = frozenset((routed.routers[router].layer, expert) for router, expert in routed.needs.get(op, ()))
        for storage in {*reads, *writes}:
            owners[storage] = mine if owners.get(storage, mine) == mine else frozenset()
    return {storage: experts for storage, experts in owners.items() if experts}


def _is_table(graph: StepGraph, tensor: Tensor, columns: int) -> bool:
    """Whether a tensor is all of its storage, in order, with so many columns as its last dim."""
    return (
        bool(tensor.shape)
        and tensor.shape[-1] == columns
        and tensor.offset == 0
        and tensor.is_row_major
        and tensor.spans(graph.storages[tensor.storage].size_bytes)
    )


def _column(tensor: Tensor, columns: int) -> int | None:
    """Column in which all elements of a view of a table lie; None where there is no such one."""
    strides = (stride for stride, length in zip(tensor.stride, tensor.shape, strict=True) if length != 1)
    return tensor.offset % columns if all(stride % columns == 0 for stride in strides) else None


@dataclass
class _ExpertSearch:
    """Walk over a step, forward for what is zero and backward for what is not needed.

    Attributes:
        zero: Choices without which all of a storage is zero, as of the operation that the walk has come to.
        tables: Router whose columns of experts without tokens are zero in a storage.
        results: Choices without which the result of an operation is zero, or, in place, without which it does nothing.
        idle: Router whose columns of experts without tokens nobody reads in a storage, and whether they may hold
            anything, or are multiplied by zero and have to be finite.
    """

    graph: StepGraph
    routers: tuple[Router, ...]
    always: Set[int]
    zero: dict[int, frozenset[Expert]] = field(default_factory=dict[int, frozenset[Expert]])
    tables: dict[int, int] = field(default_factory=dict[int, int])
    results: dict[int, frozenset[Expert]] = field(default_factory=dict[int, frozenset[Expert]])
    idle: dict[int, tuple[int, bool]] = field(default_factory=dict[int, tuple[int, bool]])
    needs: dict[int, frozenset[Expert]] = field(default_factory=dict[int, frozenset[Expert]])
    fills: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    columns: set[int] = field(default_factory=set[int])
    columns_of: dict[int, Expert] = field(default_factory=dict[int, Expert])

    def __post_init__(self) -> None:
        late = frozenset(self.graph.deferred)
        self.order = [i for i in range(len(self.graph.ops)) if i not in late] + sorted(late)
        self.place = {op: place for place, op in enumerate(self.order)}
        self.readers: dict[int, list[int]] = {}
        self.by_op = {router.op: number for number, router in enumerate(self.routers)}
        self.results_of_step = {self.graph.storage_of(t) for t in self.graph.results}
        self.changed = {self.graph.storage_of(t) for op in self.graph.ops for t in op.mutates}
        for index in self.order:
            for storage in self.graph.op_reads[index]:
                self.readers.setdefault(storage, []).append(index)

    # zeros, forward

    def find_zeros(self) -> None:
        """Find which storages are zero without which choices, after each operation in the order of the step."""
        for index in self.order:
            op = self.graph.ops[index]
            made = [self.graph.storage_of(t) for t in op.outputs]
            self._find_columns(op)
            if index in self.by_op:
                self.tables[made[0]] = self.by_op[index]
                continue
            zero_without = self._zero_result(op)
            table = self._table_result(op)
            if zero_without is not None:
                self.results[index] = zero_without
            if op.mutates:
                self._mutated(op, zero_without)
            for storage in made:
                self.zero.pop(storage, None)
                self.tables.pop(storage, None)
                if zero_without is not None:
                    self.zero[storage] = zero_without
                elif table is not None:
                    self.tables[storage] = table

    def _find_columns(self, op: Op) -> None:
        """Take note of which arguments are columns of a router's weights that nothing changes in place."""
        for tensor in op.inputs:
            storage = self.graph.storage_of(tensor)
            if storage in self.tables and storage not in self.changed:
                for choice in self._zero(tensor) or ():
                    self.columns_of[tensor] = choice

    def _mutated(self, op: Op, zero_without: frozenset[Expert] | None) -> None:
        """Account for an operation in place: what it writes is zero no more, unless it keeps or adds zeros."""
        for storage in {self.graph.storage_of(t) for t in op.mutates}:
            before = self.zero.pop(storage, None)
            self.tables.pop(storage, None)
            if before is None or zero_without is None or op.name.startswith(PREFIX):
                continue
            if (both := self._joined((before, zero_without))) is not None:
                self.zero[storage] = both

    def _zero_result(self, op: Op) -> frozenset[Expert] | None:
        """Choices without which an operation gives zeros, or adds or scales zeros in place; of an update, its gradient.

        None where there are none.
        """
        narrow = any(self.graph.tensors[t].dtype == "float16" for t in (*op.outputs, *op.mutates))
        if narrow or op.random or op.on_host or op.kind is OpKind.COLLECTIVE:
            return None
        if op.name.startswith(PREFIX):
            return self._zero(op.inputs[1]) if op.mutates and len(op.inputs) > 1 else None
        name, tensors = base_name(op), [t for arg in op.args for t in refs(arg)]
        if not tensors:
            return None
        if name in ("mul_", "add_"):
            return self._zero(tensors[0] if name == "mul_" else tensors[-1]) if len(tensors) == 2 else None
        if op.mutates:
            return None
        if name in _PRODUCTS:
            return next((z for z in map(self._zero, tensors) if z is not None), None)
        if name in _LINEAR or op.name in ("aten.div.Scalar", "aten.div.Tensor"):
            return self._zero(tensors[0])
        is_sum = name in _SUMS and not (name in ("add", "sub") and len(tensors) < 2)  # else a number is added
        return self._joined([self._zero(t) for t in tensors]) if is_sum else None

    def _zero(self, tensor: int) -> frozenset[Expert] | None:
        """Choices without which a tensor is zero; None where there are none."""
        view = self.graph.tensors[tensor]
        if view.storage in self.zero:
            return self.zero[view.storage]
        router = self.tables.get(view.storage)
        if router is None or view.dtype not in _DTYPES:
            return None
        column = _column(view, self.routers[router].experts)
        return None if column is None else frozenset(((router, column),))

    def _joined(self, parts: Sequence[frozenset[Expert] | None]) -> frozenset[Expert] | None:
        """Union of choices of one expert, of any micro-batches; None where they are of several experts."""
        if not parts or any(part is None for part in parts):
            return None
        union = frozenset(choice for part in parts for choice in cast("frozenset[Expert]", part))
        experts = {(self.routers[router].layer, expert) for router, expert in union}
        return union if len(experts) == 1 else None

    def _table_result(self, op: Op) -> int | None:
        """Router whose columns an operation on every element keeps; None where it keeps none."""
        name, tensors = base_name(op), [t for arg in op.args for t in refs(arg)]
        if name not in _BY_ELEMENT or op.mutates or len(op.outputs) != 1 or not tensors:
            return None
        candidates = tensors if name == "mul" else tensors[:1]
        routers = ((tensor, self.tables.get(self.graph.storage_of(tensor))) for tensor in candidates)
        return next((r for tensor, r in routers if r is not None and self._are_tables(r, tensor, *op.outputs)), None)

    def _are_tables(self, router: int, *tensors: int) -> bool:
        columns = self.routers[router].experts
        return all(_is_table(self.graph, self.graph.tensors[t], columns) for t in tensors)

    # needless operations, backward

    def find_needless(self) -> None:
        """Find the choices without which each operation is left out, and what is then to be zero, from the end on."""
        for index in reversed(self.order):
            op = self.graph.ops[index]
            if index in self.by_op or op.random or op.on_host or op.kind is OpKind.COLLECTIVE:
                continue
            for tensor in op.outputs:
                self._find_idle(self.graph.storage_of(tensor))
            needs = self.results.get(index)
            if needs is None:
                needs = self._unread(op)
            elif base_name(op) == "mul_" and not self._ends_with(index, needs):
                continue  # zero times a number that may be NaN, which an update is to see
            if needs is None or index in self.always or not self._is_known(index, needs):
                continue
            fills = tuple(t for t in op.outputs if self._is_read_without(self.graph.storage_of(t), needs))
            self.needs[index] = needs
            self.columns |= {s for s in map(self.graph.storage_of, op.outputs) if self._is_column(s, needs)}
            if fills:
                self.fills[index] = fills

    def _is_known(self, index: int, needs: Iterable[Expert]) -> bool:
        """Whether the routers have chosen when an operation is to run."""
        return index in self.graph.deferred or all(self.routers[router].op < index for router, _ in needs)

    def _unread(self, op: Op) -> frozenset[Expert] | None:
        """Choices without which nobody reads what an operation makes; None where somebody always may."""
        if op.mutates or not op.outputs:
            return None
        parts: list[frozenset[Expert] | None] = []
        for storage in {self.graph.storage_of(t) for t in op.outputs}:
            if storage in self.results_of_step or storage in self.graph.persistent - self.graph.carried:
                return None
            parts += [self._reads(reader, storage) for reader in self.readers.get(storage, ())]
        return self._joined(parts)

    def _ends_with(self, index: int, needs: frozenset[Expert]) -> bool:
        """Whether all who read what an operation changed in place are left out with it."""
        place = self.place[index]
        changed = {self.graph.storage_of(t) for t in self.graph.ops[index].mutates}
        later = [r for storage in changed for r in self.readers[storage] if self.place[r] > place]
        return all(reader in self.needs and self.needs[reader] <= needs for reader in later)

    def _reads(self, reader: int, storage: int) -> frozenset[Expert] | None:
        """Choices without which an operation does not look at a storage."""
        if reader in self.needs:
            return self.needs[reader]
        column = self._idle_column(reader, storage)
        return None if column is None else frozenset((column[0],))

    def _is_read_without(self, storage: int, needs: frozenset[Expert]) -> bool:
        """Whether a storage is read by an operation that runs though none of these choices got a token."""
        if storage in self.results_of_step:
            return True
        for reader in self.readers.get(storage, ()):
            if reader in self.needs and self.needs[reader] <= needs:
                continue
            column = self._idle_column(reader, storage)
            if column is None or column[0] not in needs or not column[1]:
                return True
        return False

    def _is_column(self, storage: int, needs: frozenset[Expert]) -> bool:
        """Whether all who read a storage are left out with its choices, or put it into a column of these."""
        readers = [r for r in self.readers.get(storage, ()) if not (r in self.needs and self.needs[r] <= needs)]
        columns = [self._idle_column(reader, storage) for reader in readers]
        put = all(column is not None and column[0] in needs for column in columns)
        return bool(readers) and put and storage not in self.results_of_step

    def _idle_column(self, reader: int, storage: int) -> tuple[Expert, bool] | None:
        """Choice in whose idle column an operation puts all of a storage, and whether it may then hold anything."""
        op = self.graph.ops[reader]
        if base_name(op) not in _PUTS or op.mutates:
            return None
        out = self.graph.tensors[op.outputs[0]]
        idle = self.idle.get(out.storage)
        if idle is None:
            return None
        columns = self.routers[idle[0]].experts
        places = {_column(view, columns) for tensor, view in self._puts(op, out) if tensor == storage}
        column = places.pop() if len(places) == 1 else None
        return None if column is None else ((idle[0], column), idle[1])

    def _puts(self, op: Op, out: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the storage of each tensor that an operation copies, with the view of its result that it fills."""
        name, args = base_name(op), op.args
        if name in ("stack", "cat"):
            dim = cast("int", args[1] if len(args) > 1 else 0) % len(out.shape)
            starts, parts = 0, [self.graph.tensors[t] for t in refs(next(iter(args)))]
        else:
            dim = cast("int", args[2]) % len(out.shape)
            starts, parts = cast("int", args[3]), [self.graph.tensors[op.inputs[0]]]
            if starts < 0 or (name == "slice_backward" and args[5] != 1):
                return
        keeps = name in ("cat", "slice_backward")
        strides = tuple(s for d, s in enumerate(out.stride) if keeps or d != dim)
        for part in parts:
            yield part.storage, Tensor(out.storage, out.dtype, part.shape, strides, starts * out.stride[dim])
            starts += part.shape[dim] if keeps else 1

    def _find_idle(self, storage: int) -> None:
        """Find whether all who read a storage leave the columns of experts without tokens alone."""
        parts = [self._idle_read(reader, storage) for reader in self.readers.get(storage, ())]
        known = [part for part in parts if part is not None]
        is_one = bool(known) and len(known) == len(parts) and len({router for router, _ in known}) == 1
        if is_one and storage not in self.results_of_step:
            self.idle[storage] = next(router for router, _ in known), all(exact for _, exact in known)

    def _idle_read(self, reader: int, storage: int) -> tuple[int, bool] | None:
        """Router whose idle columns an operation leaves alone in a storage, and whether they may hold anything."""
        op = self.graph.ops[reader]
        tensors = [t for arg in op.args for t in refs(arg)]
        mine = [t for t in tensors if self.graph.storage_of(t) == storage]
        if op.mutates or len(mine) != 1:
            return None
        name = base_name(op)
        if name == "gather" and op.args[1] in (-1, len(self.graph.tensors[mine[0]].shape) - 1):
            chosen = self.graph.storage_of(tensors[1])
            for number, router in enumerate(self.routers):
                if self.graph.storage_of(router.chosen) == chosen and self._are_tables(number, mine[0]):
                    return number, True
        if len(op.outputs) == 1 and name in (*_BY_ELEMENT, "add"):
            idle = self.idle.get(self.graph.storage_of(op.outputs[0]))
            if idle is not None and self._are_tables(idle[0], mine[0], op.outputs[0]):
                return idle
        if name == "mul":
            other = [self.tables.get(self.graph.storage_of(t)) for t in tensors if t != mine[0]]
            if other and other[0] is not None and self._are_tables(other[0], *tensors):
                return other[0], False
        return None
