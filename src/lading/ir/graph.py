"""StepGraph: one training step as pure data.

A tensor is a *view* (dtype, shape, stride, offset) of a *storage*; memory is counted per storage, so views
cost nothing and hide no alias. View operations therefore do not appear among the operations: whoever needs a
view derives it again from wherever its storage lies.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import cast

from lading.errors import ConfigError, check_type
from lading.ir.frozen import Frozen
from lading.ir.sizes import Power, Size
from lading.units import format_count, format_flops

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


class Role(StrEnum):
    """Role of a storage in the training step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    WORKSPACE = "workspace"


#: Roles whose storages hold a value from one step to the next.
PERSISTENT = frozenset({Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.OPTIMIZER_STATE})


class Phase(StrEnum):
    """Phase of the step in which an operation runs."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class OpKind(StrEnum):
    """The cost class of an operation; a VIEW moves nothing, and stands in tables only; a COLLECTIVE is of ranks."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    TRANSCENDENTAL = "transcendental"
    REDUCTION = "reduction"
    SOFTMAX = "softmax"
    NORM = "norm"
    GATHER = "gather"
    SCATTER = "scatter"
    COPY = "copy"
    SORT = "sort"
    RANDOM = "random"
    STEP = "step"
    COLLECTIVE = "collective"
    VIEW = "view"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a tensor of the graph."""

    tensor: int


#: Kind of a Literal that stands for a number whose dependence on sizes was not found: it was one of ``value``.
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Literal:
    """An argument that has no JSON form: a dtype, device, layout or memory format, by name."""

    kind: str
    value: str


Arg = None | bool | int | float | str | Size | Power | Ref | Literal | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory. ``data`` holds the bytes of a CONSTANT."""

    name: str
    size_bytes: int
    role: Role
    data: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A view of a storage: ``stride`` and ``offset`` in elements."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie one after another in memory, the last dim fastest."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a piece of memory without holes or overlap, in whatever order of dims."""
        expected = 1
        for stride, length in sorted((s, n) for s, n in zip(self.stride, self.shape, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= length
        return True

    def spans(self, size_bytes: int) -> bool:
        """Whether a dense tensor is all of its storage of ``size_bytes``."""
        return self.offset == 0 and self.size_bytes == size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, each counted once per index (an expanded dim counts fully)."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def extent_bytes(self) -> int:
        """Bytes from its first element to behind its last one in memory; 0 without elements."""
        if not prod(self.shape):
            return 0
        reach = sum((length - 1) * stride for length, stride in zip(self.shape, self.stride, strict=True))
        return (reach + 1) * DTYPE_BYTES[self.dtype]

    @property
    def touched_bytes(self) -> int:
        """Bytes of distinct elements: an expanded dim (stride 0) counts once."""
        sizes = (n if s or n == 0 else 1 for n, s in zip(self.shape, self.stride, strict=True))
        return prod(sizes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, of a step or of a table, of one device or of one rank.

    ``outputs`` are tensors on storages this operation creates; ``mutates`` are the tensors it writes in place.
    ``None`` in ``results`` stands for an output that is not a tensor or is a view of an input.
    ``flops`` counts a multiply-add as two; it and the bytes are 0 where sizes are symbols.
    ``settings`` say how dims go from inputs to outputs (see ``lading.ir.table``); () in a step.
    ``on_host`` says whether the host's processors run it: a plan chooses it (``lading.ir.host_ops``), and it is
    false in every step as captured.
    ``draw`` says of one that draws random numbers, in a step of several ranks, its number among those of a micro-batch,
    and the micro-batch: which numbers of one process are its own (``lading.runtime.draws``).
    """

    name: str
    phase: Phase
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: tuple[int | None, ...]
    mutates: tuple[int, ...]
    module: str
    kind: OpKind
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    random: bool = False
    settings: tuple[tuple[str, object], ...] = field(default=(), repr=False)
    on_host: bool = field(default=False, repr=False)
    draw: tuple[int, int] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Shards of a tensor over ranks, each of which has equal runs of one dim; or tensors alike, each on one rank.

    Attributes:
        shape: Lengths of the whole tensor.
        dim: The dim that is cut.
        lengths: Elements of that dim, part after part; of each part every rank has a run.
        over: Axes of the layout along which the ranks lie, as ``Layout.across`` joins them.
        ranks: Number of them.
        names: Parameter that each rank has in this one's place, whole; () where all have runs of one.
    """

    shape: tuple[int, ...]
    dim: int
    lengths: tuple[int, ...]
    over: str
    ranks: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter under all its names (tied weights have several); ``gradient`` is None if it gets none.

    ``placement`` is None where every rank has all of it. ``gradient_terms`` is the number of ranks that share a
    sequence of whose gradients the whole one is the sum; 1 where each of them has all of it.
    """

    names: tuple[str, ...]
    tensor: int
    gradient: int | None
    placement: TensorPlacement | None = field(default=None, repr=False)
    gradient_terms: int = field(default=1, repr=False)

    @property
    def is_on_one_rank(self) -> bool:
        """Whether one rank alone has it, and no other has a gradient of it: a parameter of an expert."""
        return self.placement is not None and bool(self.placement.names)


@dataclass(frozen=True, slots=True)
class State:
    """An optimizer state by name; ``parts`` are tensors whose elements, one part after another, are all of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RepeatedBlock:
    """A run of operations that repeats: instance ``i`` starts at ``starts[i]`` and is ``num_ops`` long."""

    module: str
    phase: Phase
    num_ops: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class StepGraph:
    """Forward, loss and backward (and, once expanded, the optimizer) of one step, in program order.

    ``losses`` holds what each micro-batch gives the caller, one micro-batch after another: for each of ``loss_names`` a
    tensor, of which the first is what is trained, and those with dims are outputs. ``gradient_norm`` is the norm of all
    gradients, where they are clipped by it. ``inputs`` holds the batch leaves by path, one tuple per micro-batch.
    ``accumulation`` is the number of micro-batches of a step; what is trained is already divided by it. ``frozen`` is
    what the step was captured with, for whoever runs it. ``runs`` lists storages that are pieces of one parameter
    (``lading.ir.weight_pieces``): a tensor may begin in one and reach into those behind it, which then lie one after
    another in memory. What else a plan chooses is no field of it: the passes that apply a choice give the operations
    another order (``lading.ir.defer``) or another place (``lading.ir.host_ops``), which the properties below read off.
    """

    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[tuple[str, int], ...]
    inputs: tuple[tuple[tuple[str, int], ...], ...]
    losses: tuple[int, ...]
    loss_names: tuple[str, ...] = ("loss",)
    blocks: tuple[RepeatedBlock, ...] = ()
    states: tuple[State, ...] = ()
    accumulation: int = 1
    gradient_norm: int | None = None
    frozen: Frozen | None = field(default=None, compare=False, repr=False)
    runs: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        sizes = [prod(self.tensors[parameter.tensor].shape) for parameter in self.parameters]
        trained = f"{len(sizes)} parameters ({format_count(sum(sizes))} elements)"
        micro = f"{self.accumulation} micro-batches, " if self.accumulation > 1 else ""
        return f"StepGraph({micro}{len(self.ops)} operations, {trained}, {format_flops(self.flops)})"

    @property
    def trains(self) -> bool:
        """Whether the step has a backward; an evaluation has none, and changes no value."""
        return any(op.phase in (Phase.BACKWARD, Phase.OPTIMIZER) for op in self.ops)

    def training_only(self) -> Op | None:
        """First operation of forward or loss that an evaluation leaves out; None where both are the same.

        Such are random numbers (dropout), and changes of buffers (running statistics).
        """
        buffers = {self.storage_of(tensor) for _, tensor in self.buffers}
        for op in self.ops:
            writes = not buffers.isdisjoint(self.storage_of(t) for t in op.mutates)
            if op.phase in (Phase.FORWARD, Phase.LOSS) and (op.random or writes):
                return op
        return None

    @property
    def flops(self) -> int:
        """Number of FLOP of one step; a multiply-add counts as two."""
        return sum(op.flops for op in self.ops)

    def storage_of(self, tensor: int) -> int:
        """Index of the storage a tensor views."""
        return self.tensors[tensor].storage

    @cached_property
    def _following_pieces(self) -> dict[int, tuple[int, ...]]:
        """Each storage that is a piece of a parameter, with those behind it."""
        return {storage: run[index:] for run in self.runs for index, storage in enumerate(run)}

    def run_of(self, storage: int) -> tuple[int, ...]:
        """List all pieces of the parameter whose first piece a storage is; the storage alone where it is none."""
        return self._following_pieces.get(storage, (storage,))

    @cached_property
    def _first_piece(self) -> dict[int, int]:
        return {storage: run[0] for run in self.runs for storage in run}

    def first_piece(self, storage: int) -> int:
        """First piece of the parameter that a storage is a piece of; the storage itself where it is none."""
        return self._first_piece.get(storage, storage)

    def storages_of(self, tensor: int) -> tuple[int, ...]:
        """List the storages a tensor views: one, or pieces of a parameter that follow each other."""
        view = self.tensors[tensor]
        following = self._following_pieces.get(view.storage)
        if following is None:
            return (view.storage,)
        end, count = view.offset * DTYPE_BYTES[view.dtype] + view.extent_bytes, 1
        reached = self.storages[following[0]].size_bytes
        while reached < end:
            reached += self.storages[following[count]].size_bytes
            count += 1
        return following[:count]

    @cached_property
    def joined(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Pieces of parameters that an operation reads as one tensor, which so lie one after another, by operation."""
        joined_by_op: dict[int, tuple[tuple[int, ...], ...]] = {}
        for index, op in enumerate(self.ops if self.runs else ()):
            views = (self.storages_of(tensor) for tensor in (*op.inputs, *op.outputs, *op.mutates))
            if several := tuple(dict.fromkeys(pieces for pieces in views if len(pieces) > 1)):
                joined_by_op[index] = several
        return joined_by_op

    @property
    def results(self) -> tuple[int, ...]:
        """Tensors that the step gives the caller: ``losses``, then ``gradient_norm``."""
        return self.losses if self.gradient_norm is None else (*self.losses, self.gradient_norm)

    @cached_property
    def result_writes(self) -> dict[int, int]:
        """Last operation that writes each storage of ``results``, after which it goes to the caller."""
        returned = {self.storage_of(tensor) for tensor in self.results}
        return {s: index for index, writes in enumerate(self.op_writes) for s in writes if s in returned}

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs: of ``losses`` those with dims."""
        return tuple(name for name, t in zip(self.loss_names, self.losses, strict=False) if self.tensors[t].shape)

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs of one step, of all micro-batches."""
        outputs = (self.tensors[tensor] for tensor in self.losses)
        return sum(prod(t.shape) * DTYPE_BYTES[t.dtype] for t in outputs if t.shape)

    @cached_property
    def persistent(self) -> frozenset[int]:
        """Storages that hold a value from one step to the next."""
        return frozenset(i for i, s in enumerate(self.storages) if s.role in PERSISTENT) | self.carried

    @property
    def saved_bytes(self) -> int:
        """Bytes of a checkpoint: parameters, buffers and optimizer states."""
        return sum(storage.size_bytes for storage in self.storages if storage.role in PERSISTENT - {Role.CONSTANT})

    @cached_property
    def carried(self) -> frozenset[int]:
        """Temporary storages whose value comes from the step before: the first that touches one reads it."""
        available = {i for i, s in enumerate(self.storages) if s.role in PERSISTENT or s.role is Role.INPUT}
        carried: set[int] = set()
        for reads, writes in zip(self.op_reads, self.op_writes, strict=True):
            carried.update(s for s in reads if s not in available)
            available.update(reads, writes)
        return frozenset(carried)

    @cached_property
    def deferred(self) -> tuple[int, ...]:
        """Operations that end the step before: those that read a carried storage which this step has not made anew."""
        old, late = set(self.carried), list[int]()
        for index, op in enumerate(self.ops):
            if not old:
                break
            if not old.isdisjoint(self.op_reads[index]):
                late.append(index)
            old.difference_update(self.storage_of(t) for t in op.outputs)
        return tuple(late)

    @cached_property
    def hosted(self) -> tuple[int, ...]:
        """Operations that run on the host's processors, on operands in the host's memory."""
        return tuple(i for i, op in enumerate(self.ops) if op.on_host)

    @cached_property
    def on_host(self) -> frozenset[int]:
        """Operations that the host's processors run."""
        return frozenset(self.hosted)

    @cached_property
    def collectives(self) -> frozenset[int]:
        """Operations that all ranks take part in, beside the device's computing."""
        return frozenset(i for i, op in enumerate(self.ops) if op.kind is OpKind.COLLECTIVE)

    @cached_property
    def off_compute_ops(self) -> frozenset[int]:
        """Operations that take no time of the device's own computing: hosted ones, and collectives."""
        return self.on_host | self.collectives

    @cached_property
    def host_storages(self) -> frozenset[int]:
        """Storages that an operation on the host reads or writes."""
        return frozenset(s for i in self.hosted for s in (*self.op_reads[i], *self.op_writes[i]))

    def bytes_of_role(self, role: str) -> int:
        """Sum of the storages of one role, bytes."""
        return sum(s.size_bytes for s in self.storages if s.role == role)

    def reads(self, op: Op) -> tuple[int, ...]:
        """Distinct storages an operation reads (those it mutates included), in order."""
        return self._viewed((*op.inputs, *op.mutates))

    def writes(self, op: Op) -> tuple[int, ...]:
        """Distinct storages an operation creates or mutates, in order."""
        return self._viewed((*op.outputs, *op.mutates))

    def _viewed(self, tensors: tuple[int, ...]) -> tuple[int, ...]:
        if not self.runs:
            return tuple(dict.fromkeys([self.tensors[t].storage for t in tensors]))
        return tuple(dict.fromkeys(storage for t in tensors for storage in self.storages_of(t)))

    @cached_property
    def op_reads(self) -> tuple[tuple[int, ...], ...]:
        """Storages that each operation reads, as ``reads`` gives them."""
        return tuple(self.reads(op) for op in self.ops)

    @cached_property
    def op_writes(self) -> tuple[tuple[int, ...], ...]:
        """Storages that each operation creates or mutates, as ``writes`` gives them."""
        return tuple(self.writes(op) for op in self.ops)

    @cached_property
    def storage_uses(self) -> dict[int, list[int]]:
        """Operations that read or write each storage, in order."""
        uses: dict[int, list[int]] = {}
        for index, (reads, writes) in enumerate(zip(self.op_reads, self.op_writes, strict=True)):
            for storage in {*reads, *writes}:
                uses.setdefault(storage, []).append(index)
        return uses

    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure (not of weights): equal for two captures of the same model and batch shape."""
        digest = hashlib.sha256()
        parts = (self.storages, self.tensors, self.ops, self.parameters, self.buffers, self.inputs, self.losses)
        last = (self.accumulation,), self.loss_names[1:], self.hosted
        for part in (*parts, *last):
            for item in part:
                digest.update(repr(item).encode())
                if isinstance(item, Storage) and item.data is not None:
                    digest.update(item.data)
        return digest.hexdigest()[:16]

    def validate(self) -> None:
        """Check that every index is in range and every storage is written before it is read, as in a captured step.

        Raises:
            ConfigError: naming the operation.
        """
        available = {i for i, s in enumerate(self.storages) if s.role in PERSISTENT or s.role is Role.INPUT}
        for index, op in enumerate(self.ops):
            missing = [self.storages[s].name for s in self.reads(op) if s not in available]
            if missing:
                raise ConfigError(f"op {index} {op.name} in {op.module or '(loss)'} reads {missing} before they exist")
            available.update(self.writes(op))


def check_captures(graph: object, **lists: object) -> None:
    """Refuse arguments that are no captures.

    Args:
        graph: To be one.
        lists: To be several each, by the names of the arguments.
    Raises:
        ConfigError: names the first.
    """
    check_type("graph", graph, StepGraph, "what lading.capture returns")
    for name, captures in lists.items():
        several = cast("Sequence[object]", captures) if isinstance(captures, Sequence) else ()
        if several is not captures or not all(isinstance(capture, StepGraph) for capture in several):
            raise ConfigError(f"{name}: expected a list of what lading.capture returns, got {captures!r:.80}")


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor whose last dim is the fastest."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def refs(arg: Arg) -> Iterator[int]:
    """Yield the tensor ids inside an argument tree, in order."""
    if isinstance(arg, Ref):
        yield arg.tensor
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def map_refs(arg: Arg, tensor_map: dict[int, int]) -> Arg:
    """Rename the tensor ids in a tree of arguments."""
    if isinstance(arg, Ref):
        return Ref(tensor_map[arg.tensor])
    if isinstance(arg, tuple):
        return tuple(map_refs(item, tensor_map) for item in arg)
    return arg


def rename_op(op: Op, tensor_map: dict[int, int]) -> Op:
    """Copy an operation onto other tensors."""
    return dataclasses.replace(
        op,
        args=tuple(map_refs(a, tensor_map) for a in op.args),
        kwargs=tuple((k, map_refs(a, tensor_map)) for k, a in op.kwargs),
        inputs=tuple(tensor_map[t] for t in op.inputs),
        outputs=tuple(tensor_map[t] for t in op.outputs),
        results=tuple(None if t is None else tensor_map[t] for t in op.results),
        mutates=tuple(tensor_map[t] for t in op.mutates),
    )
