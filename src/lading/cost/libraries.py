"""Kernels of Megatron's libraries in the place of captured operations, for stacks whose fusion is "fused".

- Rows go to their experts' order and back in one kernel each way: nothing is cleared, no sum is scattered.
- A state-space scan is a few kernels in Triton, which are bound by multiprocessors, not by memory.
- An expert's activation and casts may be inside the grouped products before and behind it (``Stack.fused_experts``).
- Biases of experts and clamps of their gates are eager operations, some of them in fp32 ([Note: biased experts]).

[Note: biased experts]
Megatron-Core's TEGroupedMLP (megatron/core/transformer/moe/experts.py @d98e8a64) adds an expert's bias behind the
second product in ``_apply_bias``: a product of bias and probability, a sum and a concatenation in fp32, and a cast. The
gate is clamped by ``weighted_bias_quick_geglu_impl`` (fusions/fused_bias_geglu.py): two clamps and a concatenation
before its one fused kernel. Bytes of each element are below, operation by operation, autograd's included. PyTorch's
operations on halves of rows, or on a row and a column, load no vectors: a class of their own. Such models scale rotary
positions (YaRN), and Transformer Engine's fused kernel does not: eager too (models/common/embeddings/rope_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lading.ir.graph import OpKind
from lading.ir.stack import Stack
from lading.ir.work import Collective, Kernel, Product, RankSegment, Stage

#: Of the second product's rows: bias times probability, sum, concatenation, cast; and back.
_BIAS = ((0, 4), (6, 4), (4, 4), (4, 2))
_BIAS_BACK = ((2, 4), (4, 2), (4, 4), (4, 0), (4, 4), (4, 0))
#: Of the first product's rows: both clamps, concatenation; and back.
_CLAMP = ((2, 2), (2, 2))
_CLAMP_BACK = ((4, 2), (2, 2))
#: Of queries and keys: both products, the turned halves (one negated, joined), their sum, the joined rest; and back.
_TURN = ((2, 2), (1, 1), (2, 2), (2, 2), (4, 2), (2, 2))
_TURN_BACK = ((2, 2), (2, 2), (1, 1), (2, 2), (4, 2))
#: Overload of a grouped product whose experts have biases and clamped gates.
BIASED = "biased"
#: Ends the name of a product whose operand was cast by the kernel before it, or for another product.
QUANTIZED = ".quantized"
#: Ends the name of a product whose operand's largest element the kernel before found.
LOOKED = ".looked"
#: Begins the name of a part of a state-space scan.
SCAN = "scan."
#: Begins the name of an eager operation on parts of rows.
STRIDED = "strided."
_SCANNED_MODULE, _TURNED_MODULE = "mamba", "rope"
_CLEARS = ("zeros_like", "new_zeros")
_SCATTERS = ("index_add", "index_put")
#: Kernels of Transformer Engine that find the largest element of what they write (its pull requests 2004 and 2013),
#: by stage; those that a compiler makes all do.
_LOOKING = {Stage.FORWARD: (OpKind.NORM, OpKind.TRANSCENDENTAL), Stage.BACKWARD_INPUT: (OpKind.TRANSCENDENTAL,)}
_POINTWISE = (OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.REDUCTION, OpKind.COPY)


def by_libraries(kernels: Sequence[Kernel], segment: RankSegment, stack: Stack) -> tuple[Kernel, ...]:
    """List the kernels of a fused segment as libraries launch them; biases' backward kernels follow forward ones."""
    if any(kernel.is_experts for kernel in kernels):
        if stack.fused_permute:
            kernels = _permuted(kernels, segment)
        if any(kernel.name.endswith(f".{BIASED}") for kernel in kernels):
            kernels = list(_turned(kernels))
        kernels = _within_products(kernels, segment) if stack.fused_experts else list(_with_biases(kernels))
    return tuple(_scanned(kernel) for kernel in kernels)


def _operation(kernel: Kernel) -> str:
    parts = kernel.name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _scanned(kernel: Kernel) -> Kernel:
    if kernel.module.rpartition(".")[2] != _SCANNED_MODULE or kernel.kind is None:
        return kernel
    return replace(kernel, name=f"{SCAN}{kernel.name}", kind=OpKind.ELEMENTWISE)


def _storages(tensors: Iterable[int], segment: RankSegment) -> set[int]:
    return {segment.tensors[t].storage for t in tensors}


def _permuted(kernels: Sequence[Kernel], segment: RankSegment) -> list[Kernel]:
    """Replace clearing and scattering of rows to their tokens by one kernel that gathers and sums them."""
    cleared = {
        storage: index
        for index, kernel in enumerate(kernels)
        if _operation(kernel) in _CLEARS
        for storage in _storages(kernel.outputs, segment)
    }
    dropped: set[int] = set()
    rewritten = list(kernels)
    for index, kernel in enumerate(kernels):
        cleared_inputs = {s for s in _storages(kernel.inputs, segment) if s in cleared}
        if _operation(kernel) not in _SCATTERS or not cleared_inputs:
            continue
        rows = sum(
            segment.tensors[t].size_bytes for t in kernel.inputs if segment.tensors[t].storage not in cleared_inputs
        )
        sums = max(segment.tensors[t].size_bytes for t in kernel.inputs if segment.tensors[t].storage in cleared_inputs)
        rewritten[index] = replace(kernel, kind=OpKind.GATHER, bytes_read=rows, bytes_written=sums)
        dropped |= {cleared[storage] for storage in cleared_inputs}
    return [kernel for index, kernel in enumerate(rewritten) if index not in dropped]


def _within_products(kernels: Sequence[Kernel], segment: RankSegment) -> list[Kernel]:
    """Leave out pointwise kernels between two grouped products; the second product gets its operand already cast."""
    grouped = [kernel for kernel in kernels if kernel.is_experts]
    outputs, read = (
        {s for k in grouped for s in _storages(getattr(k, side), segment)} for side in ("outputs", "inputs")
    )
    between = [
        kernel
        for kernel in kernels
        if kernel.kind in _POINTWISE
        and _storages(kernel.inputs, segment) & outputs
        and _storages(kernel.outputs, segment) & read
    ]
    cast = {s for kernel in between for s in _storages(kernel.outputs, segment)}
    rewritten: list[Kernel] = []
    for kernel in kernels:
        if any(kernel is kernel_between for kernel_between in between):
            continue
        quantized = kernel.is_experts and _storages(kernel.inputs, segment) & cast
        rewritten.append(replace(kernel, name=kernel.name + QUANTIZED) if quantized else kernel)
    return rewritten


def cast_once(kernels: Sequence[Kernel], segment: RankSegment) -> tuple[Kernel, ...]:
    """Mark products whose operand was cast before, for another product of the stage that reads the same activation.

    A compiler finds equal casts; where tensors are cut, torchao's PrepareFloat8ModuleInput casts before a module.
    """
    weights = _storages((tensor for tensor, _ in segment.parameters), segment)
    cast: dict[Stage, set[int]] = {stage: set() for stage in Stage}
    rewritten: list[Kernel] = []
    for kernel in kernels:
        read = _storages(kernel.inputs, segment) - weights if isinstance(kernel.detail, Product) else set[int]()
        was_cast = read & cast[kernel.stage]
        cast[kernel.stage] |= read
        rewritten.append(replace(kernel, name=kernel.name + QUANTIZED) if was_cast else kernel)
    return tuple(rewritten)


def looked_for(kernels: Sequence[Kernel], segment: RankSegment, *, compiled: bool) -> tuple[Kernel, ...]:
    """Mark products whose operand was made by a kernel that finds its largest element; collectives may lie between."""
    weights = _storages((tensor for tensor, _ in segment.parameters), segment)
    makers: dict[int, Kernel] = {}
    rewritten: list[Kernel] = []
    for kernel in kernels:
        read = _storages(kernel.inputs, segment) - weights
        before = [makers[storage] for storage in read if storage in makers]
        if isinstance(kernel.detail, Product) and not kernel.name.endswith(QUANTIZED):
            looking = (*_POINTWISE, OpKind.NORM) if compiled else _LOOKING.get(kernel.stage, ())
            if any(maker.kind in looking and maker.stage is kernel.stage for maker in before):
                kernel = replace(kernel, name=kernel.name + LOOKED)  # noqa: PLW2901
        maker = before[0] if isinstance(kernel.detail, Collective) and before else kernel
        makers.update(dict.fromkeys(_storages(kernel.outputs, segment), maker))
        rewritten.append(kernel)
    return tuple(rewritten)


def _turned(kernels: Sequence[Kernel]) -> Iterable[Kernel]:
    """Replace rotary positions by their operations, one kernel each."""
    for kernel in kernels:
        if kernel.module.rpartition(".")[2] != _TURNED_MODULE or kernel.kind not in _POINTWISE:
            yield kernel
            continue
        passes = _TURN if kernel.stage is Stage.FORWARD else _TURN_BACK
        yield from _passes(kernel, kernel.bytes_written // 2, passes, kernel.stage)


def _with_biases(kernels: Sequence[Kernel]) -> Iterable[Kernel]:
    """Add the operations on biases and clamps behind grouped products of forward ([Note: biased experts])."""
    place = 0
    for kernel in kernels:
        yield kernel
        if not kernel.is_experts or not kernel.name.endswith(f".{BIASED}") or kernel.stage is not Stage.FORWARD:
            continue
        forward, backward = ((_CLAMP, _CLAMP_BACK), (_BIAS, _BIAS_BACK))[place % 2]
        place += 1
        assert isinstance(kernel.detail, Product)
        elements = kernel.detail.groups * kernel.detail.m * kernel.detail.n
        yield from _passes(kernel, elements, forward, Stage.FORWARD)
        yield from _passes(kernel, elements, backward, Stage.BACKWARD_INPUT)


def _passes(kernel: Kernel, elements: int, passes: Sequence[tuple[int, int]], stage: Stage) -> Iterable[Kernel]:
    """Make operations that read and write given bytes for each of ``elements`` elements."""
    for index, (read, written) in enumerate(passes):
        yield replace(
            kernel,
            name=f"{STRIDED}{index}",
            kind=OpKind.ELEMENTWISE if written else OpKind.REDUCTION,
            stage=stage,
            detail=None,
            bytes_read=elements * read,
            bytes_written=elements * written,
        )
