"""Fusion by software stacks: kernels of a segment as they are launched, with the bytes they still move.

Products, attention, collectives, gathers and sorts are kernels as captured. Between them, operations that only move
bytes form groups, each of which is one kernel. A tensor that only its group reads is never written, and a tensor that
several operations of a group read is read once.

    eager      every operation is a kernel
    fused      groups of operations of one module that feed each other (a norm, a SwiGLU, a rotary embedding, a masked
               softmax, a loss), of dropout and the addition behind it, and of casts and what they feed, as Megatron and
               Apex have them
    compiled   groups of all operations that feed each other or read the same tensor, as Inductor makes them; sums over
               tokens are separate kernels

Unfused attention is products and a softmax with dropout over the whole square of scores, masked or not.

[Note: siblings] Products on one input become one wider product, as in stacks that keep such weights in one matrix.
Megatron and Transformer Engine have one matrix for queries, keys and values, and one for the gate and the up
projection; a model written with several linears computes the same. Forward: products that share an input become one
with more columns. Gradients of weights: one with more rows. Gradient of the input: one with a longer sum, so that
adding the parts falls away.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from lading.cost.libraries import by_libraries, cast_once, looked_for
from lading.errors import ConfigError
from lading.ir.graph import PERSISTENT, OpKind, Role
from lading.ir.stack import FUSIONS, Stack
from lading.ir.work import AUTOCAST, Attention, Form, Kernel, LocalTensor, Product, RankSegment, Stage

#: Kinds that may be parts of a group, the one that a group is named after first.
_FUSIBLE = (
    OpKind.NORM, OpKind.SOFTMAX, OpKind.REDUCTION, OpKind.RANDOM, OpKind.TRANSCENDENTAL, OpKind.ELEMENTWISE,
    OpKind.COPY,
)  # fmt: skip
#: Kinds whose results are computed again from what they were made of.
_AGAIN = (OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.COPY)
#: Bytes of Megatron's cross-entropy over those of log_softmax and nll_loss: 60 and 36 for a logit, both passes.
#: Source: megatron_cross_entropy (unfused, 15.8 and 5.4 ms for 8192 x 131072 on H100), Liger-Kernel benchmark data
#: @ead96b6.
_LOSS_PASSES = 1.67
#: Bytes read and written of each element by the operations of an RMSNorm in Python: to fp32, square, mean, scale, back
#: to 16 bits, weight; and of their backward. Liger-Kernel benchmark data @ead96b6 has 9 times a fused one's forward.
_NORM_FORWARD = ((2, 4), (4, 4), (4, 0), (4, 4), (4, 2), (2, 2))
_NORM_BACKWARD = (
    (2, 2), (4, 2), (2, 0), (2, 4), (4, 4), (8, 4), (4, 0), (4, 4), (8, 4), (8, 4), (4, 2),
)  # fmt: skip
#: The same where it is given fp32, which nothing makes of it or back.
_NORM_WIDE_FORWARD = ((4, 4), (4, 0), (4, 4), (4, 4))
_NORM_WIDE_BACKWARD = ((4, 4), (8, 4), (4, 0), (4, 4), (8, 4), (4, 0), (4, 4), (8, 4), (8, 4))
#: Bytes read and written of each element by 0.5 x (1 + tanh(c (x + 0.044715 x^3))) in operations of PyTorch, and by
#: what autograd makes of it: all in 16 bits, or under autocast, which has ``pow`` in fp32 and so all that it feeds.
_GELU_FORWARD = ((2, 2), (2, 2), (4, 2), (2, 2), (2, 2), (2, 2), (2, 2), (4, 2))
_GELU_BACKWARD = (
    (4, 2), (4, 2), (2, 2), (4, 2), (2, 2), (2, 2), (2, 2), (2, 2), (4, 2), (4, 2), (4, 2),
)  # fmt: skip
#: The same of x 0.5 (1 + erf(x / sqrt 2)), which autocast leaves in 16 bits: erf's backward is pow, neg, exp and
#: products.
_GELU_ERF_FORWARD = ((2, 2), (2, 2), (2, 2), (2, 2), (4, 2))
_GELU_ERF_BACKWARD = ((4, 2), (4, 2), (2, 2), (2, 2), (2, 2), (2, 2), (4, 2), (2, 2), (2, 2), (4, 2))
_GELU_WIDE_FORWARD = ((2, 4), (4, 4), (4, 4), (6, 4), (4, 4), (4, 4), (4, 4), (2, 2), (6, 4), (4, 2))
_GELU_WIDE_BACKWARD = (
    (2, 4), (8, 4), (4, 2), (6, 4), (2, 2), (8, 4), (4, 4), (4, 2), (4, 4), (4, 4), (4, 4), (8, 4), (4, 2),
    (4, 2), (4, 2),
)  # fmt: skip
#: Passes over scores, forward and backward, each with bytes read and written of a score: by Megatron's kernels, and by
#: operations of PyTorch as transformers has them (``eager_attention_forward``: scale, mask, softmax in float32, back to
#: 16 bits). Softmax in another number format than that of bfloat16 scores is preceded by a copy.
_Pass = tuple[str, OpKind, int, int]
_NARROW: tuple[tuple[_Pass, ...], tuple[_Pass, ...]] = (
    (("softmax", OpKind.SOFTMAX, 2, 2), ("dropout", OpKind.RANDOM, 2, 3)),
    (("dropout_backward", OpKind.ELEMENTWISE, 3, 2), ("softmax_backward", OpKind.SOFTMAX, 4, 2)),
)
_WIDE: tuple[tuple[_Pass, ...], tuple[_Pass, ...]] = (
    (
        ("scale", OpKind.ELEMENTWISE, 2, 2),
        ("mask", OpKind.ELEMENTWISE, 2, 2),
        ("widen", OpKind.COPY, 2, 4),
        ("softmax", OpKind.SOFTMAX, 4, 4),
        ("narrow", OpKind.COPY, 4, 2),
    ),
    (
        ("widen_backward", OpKind.COPY, 2, 4),
        ("softmax_backward", OpKind.SOFTMAX, 8, 4),
        ("narrow_backward", OpKind.COPY, 4, 2),
        ("scale_backward", OpKind.ELEMENTWISE, 2, 2),
    ),
)
#: Name of what draws the random numbers of dropout apart (``Stack.random_flop``).
DRAW = "draw"
#: Tensors smaller than this are no reason to fuse what reads them (scalars, weights of norms).
_SMALL_BYTES = 1 << 16


def launched(segment: RankSegment, stack: Stack) -> tuple[Kernel, ...]:
    """List the kernels that a stack launches for a segment, in order: ``fuse`` with the stack's settings."""
    kernels = fuse(segment, stack.fusion, stack.attention, fused_loss=stack.fused_loss, unfused_parts=stack.unfused)
    if stack.fusion == "fused":
        kernels = by_libraries(kernels, segment, stack)
    if not stack.fused_casts:
        kernels = cast_once(kernels, segment)
    if stack.low_scaling == "tensorwise":
        kernels = looked_for(kernels, segment, compiled=stack.fusion == "compiled")
    if stack.fusion == "eager" and {"gelu", "gelu-erf"} & set(stack.unfused):
        wide = any(kernel.name == AUTOCAST for kernel in kernels)
        erf = "gelu-erf" in stack.unfused
        kernels = tuple(part for kernel in kernels for part in eager_gelu(kernel, wide=wide, erf=erf))
    if stack.random_flop:
        kernels = (*draws(segment), *kernels)
    if not stack.eager_norms:
        return kernels
    return tuple(part for kernel in kernels for part in eager_norm(kernel))


def fuse(
    segment: RankSegment,
    level: str,
    attention: str = "flash2",
    *,
    fused_loss: bool = False,
    unfused_parts: Sequence[str] = (),
) -> tuple[Kernel, ...]:
    """List the kernels of a segment at a level of fusion, in order; kernels of different stages are not fused.

    Args:
        level: "eager", "fused" or "compiled".
        attention: Kernel of attention; "unfused" attention is taken apart into products and softmax.
        fused_loss: Whether "fused" has one kernel for cross-entropy forward and one backward.
        unfused_parts: Parts of a block whose operations stay apart in "fused" (``Stack.unfused``).
    Raises:
        ConfigError: no such level.
    """
    if level not in FUSIONS:
        raise ConfigError(f"fusion must be one of {', '.join(FUSIONS)}, got {level!r}")
    kernels = segment.kernels
    if level != "eager":
        kernels = tuple(_fused(segment, level, fused_loss, unfused_parts))
    if level == "fused" and not fused_loss:
        kernels = tuple(_megatron_loss(kernel) for kernel in kernels)
    if level == "compiled":
        kernels = _compiled_loss(kernels)
    if attention != "unfused":
        return kernels
    return tuple(
        part
        for kernel in kernels
        for part in (unfused(kernel, wide=level == "eager") if _is_attention(kernel) else (kernel,))
    )


def _is_attention(kernel: Kernel) -> bool:
    return isinstance(kernel.detail, Attention)


def _megatron_loss(kernel: Kernel) -> Kernel:
    """Cross-entropy in Megatron's own passes over fp32 logits, which move more bytes than PyTorch's."""
    if not is_loss(kernel):
        return kernel
    read, written = (round(size * _LOSS_PASSES) for size in (kernel.bytes_read, kernel.bytes_written))
    return replace(kernel, bytes_read=read, bytes_written=written)


def _compiled_loss(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Kernels whose log-softmax is made again in backward from the logits, and never written.

    Source: torch/_functorch/partitioners.py, min_cut_rematerialization_partition, keeps the least bytes from which
    pointwise operations can be made again: logits and two sums a row.
    """
    replaced: list[Kernel] = []
    logits = 0
    for kernel in kernels:
        if not is_loss(kernel) or "log_softmax" not in kernel.name:
            replaced.append(kernel)
        elif kernel.stage is Stage.FORWARD:
            logits = kernel.bytes_read
            replaced.append(replace(kernel, bytes_written=0))
        else:
            replaced.append(replace(kernel, bytes_read=logits or kernel.bytes_read))
    return tuple(replaced)


def _fused(segment: RankSegment, level: str, fused_loss: bool, unfused_parts: Sequence[str]) -> list[Kernel]:
    """Replace fused kernels by one kernel for each group, in an order in which each kernel's inputs are made before it.

    Sizes decide only which kernels add up tokens and which tensors are small; all else is done once for a form.
    """
    form, tensors = segment.form, segment.tensors
    never_fused: frozenset[int] = frozenset()
    if level == "compiled":
        never_fused = frozenset(i for i, kernel in enumerate(segment.kernels) if _sums_tokens(segment, kernel))
    elif unfused_parts:
        never_fused = frozenset(_of_parts(segment.kernels, unfused_parts))
    read = _read_twice(form, level, never_fused)
    large = tuple([sum([tensors[t].size_bytes for t in views]) >= _SMALL_BYTES for views in read])
    storages, groups = _groups(form, level, fused_loss, never_fused, large)
    storage_bytes: dict[int, int] = {}
    for place in storages:
        view = tensors[place]
        storage_bytes[view.storage] = max(storage_bytes.get(view.storage, 0), view.size_bytes)
    return [group.kernel(segment, storage_bytes) for group in groups]


def _of_parts(kernels: Sequence[Kernel], parts: Sequence[str]) -> Iterator[int]:
    """Places of the kernels of rotary embeddings ("rope"), and of gates with SiLU and what they are multiplied with."""
    gates = {kernel.module for kernel in kernels if "silu" in kernel.name}
    for place, kernel in enumerate(kernels):
        rotary = kernel.module.rpartition(".")[2] == "rope"
        if (rotary and "rope" in parts) or (kernel.module in gates and "swiglu" in parts):
            yield place


#: Two kernels of which one feeds the other, or both read these tensors (one storage).
_Pair = tuple[int, int, tuple[int, ...]]


@lru_cache(maxsize=4096)
def _read_twice(form: Form, level: str, never_fused: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """Tensors, one for each storage, that two kernels read and that may join these into one if they are large."""
    return tuple(views for _, _, views in _pairs(form, level, True, never_fused) if views)


def _pairs(form: Form, level: str, fused_loss: bool, never_fused: frozenset[int]) -> Iterator[_Pair]:
    """Yield pairs of kernels that may be joined into one, in order."""
    kernels, made_by = form.segment.kernels, _makers(form.segment)
    runs = _runs(kernels)
    last_reader: dict[int, int] = {}
    for index, kernel in enumerate(kernels):
        if kernel.kind not in _FUSIBLE or index in never_fused:
            continue
        for maker in sorted(made_by[index], reverse=True):
            if maker in never_fused or kernels[maker].kind not in _FUSIBLE:
                continue
            if level == "compiled" or _one_kernel(kernels[maker], kernel, fused_loss):
                yield maker, index, ()
        for storage, views in _views(form.segment, kernel.inputs).items():
            reader = last_reader.get(storage)
            last_reader[storage] = index
            if reader is None or runs[reader] != runs[index]:
                continue
            if level == "compiled" or kernels[reader].module == kernel.module:
                yield reader, index, views


@lru_cache(maxsize=4096)
def _groups(
    form: Form, level: str, fused_loss: bool, never_fused: frozenset[int], large: tuple[bool, ...]
) -> tuple[tuple[int, ...], tuple[_Group, ...]]:
    """Tensors of what is moved, and the groups, earliest first.

    Args:
        large: Whether each thing that ``_read_twice`` names is large.
    """
    flow, sizes = _Flow(form.segment), iter(large)
    for first, second, views in _pairs(form, level, fused_loss, never_fused):
        if not views or next(sizes):
            flow.join(first, second)
    groups = list(flow.order())
    moved = _Moved(form.segment, groups)
    formed = tuple(moved.group(group) for group in groups)
    touched = {
        form.segment.tensors[t].storage for group in formed for views in (*group.read, *group.written) for t in views
    }
    return tuple(i for i, t in enumerate(form.segment.tensors) if t.storage in touched), formed


def _makers(segment: RankSegment) -> list[set[int]]:
    """Kernels that made the inputs of each kernel."""
    makers: list[set[int]] = []
    made_by: dict[int, int] = {}
    for index, kernel in enumerate(segment.kernels):
        read = {segment.tensors[t].storage for t in kernel.inputs}
        makers.append({made_by[storage] for storage in read if storage in made_by})
        made_by.update((segment.tensors[t].storage, index) for t in kernel.outputs)
    return makers


class _Flow:
    """Graph of the dependences between kernels while groups of them are joined."""

    def __init__(self, segment: RankSegment) -> None:
        self.kernels = segment.kernels
        self.makers = _makers(segment)
        count = len(self.kernels)
        self._group = [1 << index for index in range(count)]
        self._before = [0] * count
        self._behind = [0] * count
        for index in range(count):
            for maker in self.makers[index]:
                self._before[index] |= self._before[maker] | 1 << maker
        for index in reversed(range(count)):
            for maker in self.makers[index]:
                self._behind[maker] |= self._behind[index] | 1 << index

    def join(self, first: int, second: int) -> None:
        """Make one group of those of two kernels, unless something else stands between them or the stages differ."""
        if self.kernels[first].stage is not self.kernels[second].stage:
            return
        joined_group = self._group[first] | self._group[second]
        before = (self._before[first] | self._before[second]) & ~joined_group
        later = (self._behind[first] | self._behind[second]) & ~joined_group
        if before & later:
            return
        for index in _bits(joined_group):
            self._group[index], self._before[index], self._behind[index] = joined_group, before, later
        for index in _bits(before):
            self._behind[index] |= later | joined_group
        for index in _bits(later):
            self._before[index] |= before | joined_group

    def order(self) -> Iterator[list[int]]:
        """Yield the groups of kernels in an order in which each comes after all that it reads from."""
        waiting = [index for index, group in enumerate(self._group) if group & -group == 1 << index]
        done_mask = 0
        while waiting:
            index = next(i for i in waiting if not self._before[i] & ~done_mask)
            waiting.remove(index)
            done_mask |= self._group[index]
            yield list(_bits(self._group[index]))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _runs(kernels: Sequence[Kernel]) -> list[int]:
    """Number of the run of each kernel: runs of a stage end at its products, attention and collectives."""
    current: dict[Stage, int] = defaultdict(int)
    runs: list[int] = []
    for kernel in kernels:
        if kernel.kind not in _FUSIBLE:
            current[kernel.stage] += 1
        runs.append(current[kernel.stage])
    return runs


def _one_kernel(one: Kernel, two: Kernel, fused_loss: bool) -> bool:
    """Whether libraries have one kernel for an operation and another that it feeds."""
    if not fused_loss and (is_loss(one) or is_loss(two)):
        return False
    if one.module == two.module:
        return True
    return one.kind is OpKind.COPY or (one.kind is OpKind.RANDOM and two.kind is OpKind.ELEMENTWISE)


def is_loss(kernel: Kernel) -> bool:
    """Cross-entropy's operations, not the softmax of scores."""
    return "log_softmax" in kernel.name or "nll_loss" in kernel.name


def _sums_tokens(segment: RankSegment, kernel: Kernel) -> bool:
    """Whether a reduction adds up all but the last dim, as gradients of biases and of norms' weights are."""
    if kernel.kind is not OpKind.REDUCTION or not kernel.outputs:
        return False
    largest = max((segment.tensors[t] for t in kernel.inputs), key=lambda t: t.size_bytes, default=None)
    if largest is None or len(largest.shape) < 2:
        return False
    outputs = prod(segment.tensors[kernel.outputs[0]].shape)
    return outputs == largest.shape[-1] and prod(largest.shape) > outputs > 1


def _views(segment: RankSegment, tensors: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Distinct tensors by storage: bytes touched of a storage are theirs added up."""
    by_storage: dict[int, tuple[int, ...]] = {}
    for tensor in dict.fromkeys(tensors):
        storage = segment.tensors[tensor].storage
        by_storage[storage] = (*by_storage.get(storage, ()), tensor)
    return by_storage


@dataclass(frozen=True, slots=True)
class _Group:
    """Group of kernels that become one, without sizes; a kernel alone stays as it is.

    Attributes:
        members: Kernels of the group.
        inputs, outputs: Tensors that it reads from outside, and that it writes for kernels outside.
        read, written: Storages of these.
    """

    members: tuple[int, ...]
    name: str = ""
    kind: OpKind | None = None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    read: tuple[tuple[int, ...], ...] = ()
    written: tuple[tuple[int, ...], ...] = ()

    def kernel(self, segment: RankSegment, whole: Mapping[int, int]) -> Kernel:
        """Make the one kernel of a group: it reads the tensors from outside and writes those that are needed outside.

        Args:
            whole: Bytes of storages.
        """
        kernels = segment.kernels
        if len(self.members) == 1:
            return kernels[self.members[0]]
        largest = kernels[self.members[0]]
        for index in self.members:
            kernel = kernels[index]
            if kernel.bytes_read + kernel.bytes_written > largest.bytes_read + largest.bytes_written:
                largest = kernel
        read, written = (_bytes(segment, views, whole) for views in (self.read, self.written))
        return Kernel(
            self.name, self.kind, largest.stage, largest.module, largest.dtype, read, written, self.inputs, self.outputs
        )


def _bytes(segment: RankSegment, storages: Iterable[tuple[int, ...]], whole: Mapping[int, int]) -> int:
    tensors, total = segment.tensors, 0
    for views in storages:
        size = 0
        for view in views:
            size += tensors[view].size_bytes
        total += min(size, whole[tensors[views[0]].storage])
    return total


class _Moved:
    """Bytes that groups of kernels read from and write to memory.

    A tensor that forward makes within a group, and that only fused operations of backward read, is not saved if these
    read its inputs anyway: a SwiGLU's kernels keep gate and value, and compute the rest again.
    """

    def __init__(self, segment: RankSegment, groups: Sequence[Sequence[int]]) -> None:
        self._segment = segment
        self._leaves = {segment.tensors[t].storage for t in segment.leaves}
        self._readers: dict[int, set[int]] = defaultdict(set)
        for index, kernel in enumerate(segment.kernels):
            for tensor in kernel.inputs:
                self._readers[segment.tensors[tensor].storage].add(index)
        group_of = {index: group for group in groups for index in group}
        self._again = {storage for group in groups if len(group) > 1 for storage in self._made_again(group, group_of)}

    def group(self, group: Sequence[int]) -> _Group:
        """Make a group with what it reads and writes."""
        if len(group) == 1:
            return _Group(tuple(group))
        tensors = self._segment.tensors
        members = [self._segment.kernels[index] for index in group]
        inputs = [t for t in self._inputs(group) if tensors[t].storage not in self._again]
        outputs = [t for k in members for t in k.outputs if self._is_read_outside(tensors[t], set(group))]
        kind = min((k.kind for k in members if k.kind is not None), key=_FUSIBLE.index)
        return _Group(
            tuple(group),
            f"fused.{'.'.join(dict.fromkeys(_base(k.name) for k in members))}",
            _norm_like(members, kind),
            tuple(inputs),
            tuple(dict.fromkeys(outputs)),
            tuple(_views(self._segment, inputs).values()),
            tuple(_views(self._segment, outputs).values()),
        )

    def _inputs(self, group: Sequence[int]) -> list[int]:
        """Tensors a group reads that it does not make itself."""
        kernels, tensors = self._segment.kernels, self._segment.tensors
        inside = {tensors[t].storage for index in group for t in kernels[index].outputs}
        read = (t for index in group for t in kernels[index].inputs)
        return list(dict.fromkeys(t for t in read if tensors[t].storage not in inside))

    def _is_read_outside(self, tensor: LocalTensor, group: set[int]) -> bool:
        """Whether somebody outside reads a tensor of a group; what nobody reads at all leaves the segment."""
        if tensor.storage in self._again:
            return False
        reading = self._readers.get(tensor.storage, set())
        outlives = tensor.role in PERSISTENT or tensor.role is Role.GRADIENT
        return bool(reading - group) or not reading or tensor.storage in self._leaves or outlives

    def _made_again(self, group: Sequence[int], group_of: Mapping[int, Sequence[int]]) -> Iterator[int]:
        """Storages that a group of forward need not write."""
        kernels, tensors = self._segment.kernels, self._segment.tensors
        if kernels[group[0]].stage is not Stage.FORWARD:
            return
        needs = {tensors[t].storage for t in self._inputs(group)}
        for index in group:
            for storage in {tensors[t].storage for t in kernels[index].outputs}:
                outside = self._readers.get(storage, set()) - set(group)
                fused = all(kernels[i].stage is not Stage.FORWARD and kernels[i].kind in _FUSIBLE for i in outside)
                if not outside or not fused or storage in self._leaves or kernels[index].kind not in _AGAIN:
                    continue
                if all(needs <= {tensors[t].storage for t in self._inputs(group_of[i])} for i in outside):
                    yield storage


def _norm_like(members: Sequence[Kernel], kind: OpKind) -> OpKind:
    """Kind of a group: NORM if its operations are a mean along rows and a reciprocal root, or their backward."""
    names = {_base(kernel.name) for kernel in members}
    forward = kind is OpKind.REDUCTION and "rsqrt" in names
    backward = kind is OpKind.REDUCTION and members[0].stage is not Stage.FORWARD and "pow" in names
    return OpKind.NORM if forward or backward else kind


def _base(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def eager_norm(kernel: Kernel) -> tuple[Kernel, ...]:
    """Split an RMSNorm into the operations of its Python form in fp32, or of their backward; keep any other kernel."""
    if "rms_norm" not in kernel.name:
        return (kernel,)
    backward, wide = kernel.stage is not Stage.FORWARD, kernel.dtype == "float32"
    elements = (kernel.bytes_read + kernel.bytes_written) / ((6 if backward else 4) * (2 if wide else 1))
    forward = _NORM_WIDE_FORWARD if wide else _NORM_FORWARD
    return _split_into_passes(
        kernel, "eager_norm", elements, (_NORM_WIDE_BACKWARD if wide else _NORM_BACKWARD) if backward else forward
    )


def draws(segment: RankSegment) -> tuple[Kernel, ...]:
    """List kernels that draw the random numbers of a segment, one for each dropout, with the bytes of its mask."""
    numbers = (
        (kernel, kernel.bytes_written - kernel.bytes_read)
        for kernel in segment.kernels
        if kernel.kind is OpKind.RANDOM and kernel.stage is Stage.FORWARD
    )
    return tuple(
        replace(kernel, name=DRAW, bytes_read=0, bytes_written=drawn, inputs=(), outputs=(), detail=None)
        for kernel, drawn in numbers
        if drawn > 0
    )


def eager_gelu(kernel: Kernel, *, wide: bool, erf: bool = False) -> tuple[Kernel, ...]:
    """Split a GELU into the operations of its Python form, or of their backward; keep any other kernel.

    Args:
        wide: Whether most run in fp32 on 16-bit inputs and outputs, as under autocast (``lading.parallel.autocast``).
        erf: Whether it is written by erf, of which autocast runs nothing in fp32, else by tanh.
    """
    if not kernel.name.startswith("aten.gelu"):
        return (kernel,)
    backward = kernel.stage is not Stage.FORWARD
    elements = (kernel.bytes_read + kernel.bytes_written) / (6 if backward else 4)
    by_tanh = (_GELU_WIDE_FORWARD, _GELU_WIDE_BACKWARD) if wide else (_GELU_FORWARD, _GELU_BACKWARD)
    forward_passes, backward_passes = (_GELU_ERF_FORWARD, _GELU_ERF_BACKWARD) if erf else by_tanh
    return _split_into_passes(kernel, "eager_gelu", elements, backward_passes if backward else forward_passes)


def _split_into_passes(
    kernel: Kernel, name: str, elements: float, passes: Sequence[tuple[int, int]]
) -> tuple[Kernel, ...]:
    """Split a kernel into operations that read and write given bytes of each of its elements."""

    def of(index: int, moved: tuple[int, int]) -> Kernel:
        read, written = (round(elements * size) for size in moved)
        kind = OpKind.REDUCTION if written == 0 else OpKind.ELEMENTWISE
        return replace(kernel, name=f"{name}.{index}", kind=kind, bytes_read=read, bytes_written=written)

    return tuple(of(i, moved) for i, moved in enumerate(passes))


def unfused(kernel: Kernel, *, wide: bool = False) -> tuple[Kernel, ...]:
    """List the kernels of attention that is not fused: products of every head, and passes over the square of scores.

    Forward the scores are scaled, masked and normalized in one pass and dropped out in a second, whose mask takes a
    byte; backward goes the same way back.

    Args:
        wide: Whether each pass is an operation of its own, without dropout, and softmax runs in fp32 (``_WIDE``).
    """
    attention = kernel.detail
    assert isinstance(attention, Attention)
    groups = attention.batch * attention.heads
    queries, keys = attention.query_tokens, attention.key_tokens
    scores = groups * queries * keys

    def product(m: int, n: int, k: int) -> Kernel:
        moved = 2 * groups
        detail = Product(m, n, k, groups)
        return replace(kernel, name="unfused.bmm", kind=OpKind.MATMUL, detail=detail,
                       bytes_read=moved * k * (m + n), bytes_written=moved * m * n)  # fmt: skip

    def over_scores(name: str, kind: OpKind, read: int, written: int) -> Kernel:
        return replace(
            kernel, name=name, kind=kind, detail=None, bytes_read=scores * read, bytes_written=scores * written
        )

    passes = (_WIDE if wide else _NARROW)[attention.backward]
    middle = tuple(over_scores(f"unfused.{name}", kind, *moved) for name, kind, *moved in passes)
    if not attention.backward:
        return product(queries, keys, attention.qk_dim), *middle, product(queries, attention.v_dim, keys)
    return (
        product(keys, attention.v_dim, queries),
        product(queries, keys, attention.v_dim),
        *middle,
        product(queries, attention.qk_dim, keys),
        product(keys, attention.qk_dim, queries),
    )


def merge_siblings(segment: RankSegment, modules: Sequence[str] = ()) -> RankSegment:
    """Merge sibling products of a segment ([Note: siblings]); its tensors and what is saved stay.

    Args:
        modules: Modules in which products are merged; () for all.
    """
    kernels = list(segment.kernels)
    kernels = _share_input(kernels, segment.tensors, Stage.FORWARD, modules)
    kernels = _share_input(kernels, segment.tensors, Stage.BACKWARD_WEIGHT, modules)
    kernels = _summed(kernels, segment.tensors, modules)
    return dataclasses.replace(segment, kernels=tuple(kernels))


def _is_plain(kernel: Kernel, stage: Stage, modules: Sequence[str]) -> bool:
    if modules and not set(modules) & set(kernel.module.split(".")):
        return False
    return kernel.stage is stage and isinstance(kernel.detail, Product) and kernel.detail.groups == 1


def _shared(kernel: Kernel, tensors: Sequence[LocalTensor], stage: Stage) -> object:
    """Key that siblings have in common: their input that is no parameter, and the dims that come from it."""
    product = kernel.detail
    assert isinstance(product, Product)
    if stage is Stage.FORWARD:
        activations = [tensors[t] for t in kernel.inputs if tensors[t].role is not Role.PARAMETER]
        return (activations[0].storage, product.m, product.k) if len(activations) == 1 else None
    if len(kernel.inputs) != 2:
        return None
    return tensors[kernel.inputs[1]].storage, product.n, product.k


def _share_input(
    kernels: list[Kernel], tensors: Sequence[LocalTensor], stage: Stage, modules: Sequence[str]
) -> list[Kernel]:
    families: dict[object, list[int]] = {}
    for index, kernel in enumerate(kernels):
        if _is_plain(kernel, stage, modules) and (key := _shared(kernel, tensors, stage)) is not None:
            families.setdefault(key, []).append(index)
    merged_away: set[int] = set()
    for members in families.values():
        if len(members) < 2:
            continue
        place = members[0] if stage is Stage.FORWARD else members[-1]
        parts = [kernels[i] for i in members]
        wide = sum(_product(k).n if stage is Stage.FORWARD else _product(k).m for k in parts)
        side = {"n": wide} if stage is Stage.FORWARD else {"m": wide}
        kernels[place] = _merged(parts, dataclasses.replace(_product(parts[0]), **side), tensors)
        merged_away.update(i for i in members if i != place)
    return [kernel for index, kernel in enumerate(kernels) if index not in merged_away]


def _summed(kernels: list[Kernel], tensors: Sequence[LocalTensor], modules: Sequence[str]) -> list[Kernel]:
    """Products whose results are added to each other and to nothing else first."""
    makers = {
        tensors[k.outputs[0]].storage: index
        for index, k in enumerate(kernels)
        if _is_plain(k, Stage.BACKWARD_INPUT, modules) and len(k.outputs) == 1
    }
    merged_away: set[int] = set()
    for index, kernel in enumerate(kernels):
        if (
            kernel.kind is not OpKind.ELEMENTWISE
            or ".add" not in kernel.name
            or kernel.stage is not Stage.BACKWARD_INPUT
        ):
            continue
        sources = [makers.get(tensors[t].storage) for t in kernel.inputs]
        if len(sources) != 2 or None in sources or sources[0] == sources[1]:
            continue
        first, last = sorted(source for source in sources if source is not None)
        left, right = _product(kernels[first]), _product(kernels[last])
        if (left.m, left.n) != (right.m, right.n):
            continue
        merged = _merged(
            [kernels[first], kernels[last]], dataclasses.replace(left, k=left.k + right.k), tensors, kernel.outputs
        )
        kernels[last] = merged
        merged_away |= {first, index}
        makers[tensors[kernel.outputs[0]].storage] = last
    return [kernel for index, kernel in enumerate(kernels) if index not in merged_away]


def _product(kernel: Kernel) -> Product:
    assert isinstance(kernel.detail, Product)
    return kernel.detail


def _merged(
    parts: Sequence[Kernel], product: Product, tensors: Sequence[LocalTensor], outputs: tuple[int, ...] = ()
) -> Kernel:
    """Merge products into one kernel."""
    inputs = tuple(dict.fromkeys(t for part in parts for t in part.inputs))
    outputs = outputs or tuple(t for part in parts for t in part.outputs)
    input_bytes = {tensors[t].storage: tensors[t].size_bytes for t in inputs}
    return dataclasses.replace(
        parts[0],
        detail=product,
        inputs=inputs,
        outputs=outputs,
        bytes_read=sum(input_bytes.values()),
        bytes_written=sum(tensors[t].size_bytes for t in outputs),
    )
