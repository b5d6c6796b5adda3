"""Ranks: the numbers of a cut segment for sizes and a layout.

[Note: attention with context parallel] Tokens are dealt out so that with a causal mask each rank has as many pairs of
query and key as any other (a piece from the front and one from the back, as Megatron's context parallel and torch's
``context_parallel`` do).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, OpKind, Role
from lading.ir.layout import Layout
from lading.ir.table import Segment
from lading.ir.work import Attention, Collective, Kernel, LocalTensor, Product, RankSegment
from lading.parallel.choose import CONTEXT, Axes
from lading.parallel.cut import cut
from lading.parallel.shapes import SHARED_HEADS, check, evaluate
from lading.parallel.specs import CutKernel, CutSegment, Spec

#: Names of what a ring keeps, before the storage of the result.
MERGED = "merged "


@dataclass(frozen=True, slots=True)
class Context:
    """Settings of how ranks work on one sequence.

    Attributes:
        ranks: How many.
        comm: How keys and values meet, as ``Layout.cp_comm``.
        fp32_rings: Gradients of keys and values go round the ring in fp32, also where keys met by all-gather, as
            torch's ``context_parallel`` sends them (torch 2.13, _context_parallel/_attention.py).
    """

    ranks: int
    comm: str
    fp32_rings: bool = False


def attention_kernels(k: CutKernel, kernel: Kernel, tensors: list[LocalTensor], context: Context) -> list[Kernel]:
    """Split one attention into the kernels and collectives of a rank.

    Args:
        k: The attention, with query, key and value in its spec.
        kernel: The attention as one kernel, with its bytes.
        tensors: Tensors of the rank's segment.
        context: Ranks that work on one sequence.
    """
    assert k.spec is not None
    local = _local_attention(k, tensors)
    if k.spec.axis != CONTEXT:  # keys of a text beside are whole on every rank
        return [dataclasses.replace(kernel, detail=local)]
    if context.comm == "ring" or (context.comm == "all_gather" and context.fp32_rings and not local.window):
        width = DTYPE_BYTES[tensors[k.spec.tensors[1]].dtype]
        back = _bytes(k, tensors) // width * (4 if context.fp32_rings else width)
        kernels = _ring(kernel, local, (_bytes(k, tensors), back), context)
        if not context.fp32_rings:
            return kernels
        return _with_workspace(kernels, k, tensors, context) if local.backward else _with_merged(kernels, tensors)
    if context.comm == "all_gather":
        return _all_gather(kernel, local, _bytes(k, tensors), context.ranks)
    return _all_to_all(k, kernel, local, tensors, context.ranks)


def _local_attention(k: CutKernel, tensors: list[LocalTensor]) -> Attention:
    assert k.spec is not None
    q, key, value = (tensors[t].shape for t in k.spec.tensors)
    settings = dict(k.settings)
    window = settings.get("window", 0)
    return Attention(
        batch=q[0],
        heads=q[1],
        kv_heads=key[1],
        query_tokens=q[2],
        key_tokens=key[2],
        qk_dim=q[3],
        v_dim=value[3],
        causal=bool(settings.get("is_causal")),
        backward="backward" in k.name,
        window=window if isinstance(window, int) else 0,
    )


def _bytes(k: CutKernel, tensors: list[LocalTensor]) -> int:
    """Bytes of a rank's own keys and values."""
    assert k.spec is not None
    return sum(tensors[t].size_bytes for t in k.spec.tensors[1:])


def _share(kernel: Kernel, detail: Attention) -> Kernel:
    return dataclasses.replace(kernel, detail=detail)


def _collective(kernel: Kernel, op: str, size_bytes: int, tensors: tuple[int, ...]) -> Kernel:
    """Make a collective over "cp" that stands among the kernels: those behind it may use what it brings."""
    detail = Collective(op, "cp", size_bytes)
    return Kernel(op, None, kernel.stage, kernel.module, kernel.dtype, size_bytes, size_bytes, tensors, (), detail)


def _kv(kernel: Kernel) -> tuple[int, ...]:
    first = 2 if "backward" in kernel.name else 1
    return kernel.inputs[first : first + 2]


def _ring(kernel: Kernel, whole: Attention, sizes: tuple[int, int], context: Context) -> list[Kernel]:
    """Own keys first; then the next rank's, cp - 1 times: with a causal mask half of the pairs of each.

    Args:
        sizes: Bytes of a rank's keys and values, and of their gradients.
    """
    if whole.window:
        raise ConfigError("layout: attention with a window needs cp_comm=all_gather, got ring")
    keys = whole.key_tokens // 2 if whole.causal else whole.key_tokens
    uncausal = dataclasses.replace(whole, causal=False, key_tokens=keys)
    kernels: list[Kernel] = []
    if context.comm == "all_gather":
        kernels.append(_collective(kernel, "all_gather", sizes[0] * context.ranks, _kv(kernel)))
    for step in range(context.ranks):
        if context.comm == "ring" and step < context.ranks - 1:
            kernels.append(_collective(kernel, "send", sizes[0], _kv(kernel)))
        kernels.append(_share(kernel, whole if step == 0 else uncausal))
        if whole.backward:  # gradients of keys and values travel with them, and once more to come home
            kernels.append(_collective(kernel, "send", sizes[1], kernel.outputs[1:3]))
    return kernels


def _with_merged(kernels: list[Kernel], tensors: list[LocalTensor]) -> list[Kernel]:
    """Add the sum that torch's ring keeps heads first, beside what the next product reads of it, tokens first."""
    output = tensors[kernels[-1].outputs[0]]
    tensors.append(dataclasses.replace(output, storage=_next(tensors), name=f"{MERGED}{output.storage}"))
    return [*kernels[:-1], dataclasses.replace(kernels[-1], outputs=(*kernels[-1].outputs, len(tensors) - 1))]


def _next(tensors: list[LocalTensor]) -> int:
    return max(tensor.storage for tensor in tensors) + 1


def _with_workspace(kernels: list[Kernel], k: CutKernel, tensors: list[LocalTensor], context: Context) -> list[Kernel]:
    """Buffers of torch's ring backward, beside the gradients that it returns.

    Of queries: their gradient in fp32, and half of that of the step before. Of keys and values: what is sent and what
    came, the gradients of the step before, and gradients in fp32 as they are added up, joined, sent and received.
    Counted on a CPU with torch 2.13's ``_templated_ring_attention_backward``.
    """
    assert k.spec is not None
    query, kv = tensors[k.spec.tensors[0]].size_bytes, _bytes(k, tensors)
    came = 1 if context.comm == "ring" else context.ranks
    size = query * 5 // 2 + kv * (7 + came)
    names = [f"{MERGED}{tensors[t].storage}" for t in kernels[-2].inputs]
    merged = tuple(place for place, tensor in enumerate(tensors) if tensor.name in names)
    tensors.append(LocalTensor(_next(tensors), "uint8", (size,), size, Role.WORKSPACE))
    place = len(tensors) - 1
    return [
        dataclasses.replace(k, inputs=(*k.inputs, *merged), outputs=(*k.outputs, place))
        if isinstance(k.detail, Attention)
        else k
        for k in kernels
    ]


def _all_gather(kernel: Kernel, whole: Attention, kv_bytes: int, cp: int) -> list[Kernel]:
    """Keys and values of all tokens; with a causal mask as many pairs as with half of them and no mask."""
    tokens = whole.key_tokens * cp
    keys = tokens // 2 if whole.causal and not whole.window else tokens
    if whole.window:
        keys = min(tokens, whole.window)
    detail = dataclasses.replace(whole, causal=False, key_tokens=keys, window=0)
    kernels = [_collective(kernel, "all_gather", kv_bytes * cp, _kv(kernel)), _share(kernel, detail)]
    if whole.backward:
        kernels.append(_collective(kernel, "reduce_scatter", kv_bytes * cp, kernel.outputs[1:3]))
    return kernels


def _all_to_all(k: CutKernel, kernel: Kernel, whole: Attention, tensors: list[LocalTensor], cp: int) -> list[Kernel]:
    """Exchange tokens for heads: queries, keys and values go to ranks with all tokens of some heads, and back."""
    if whole.heads % cp or (whole.kv_heads % cp and cp % whole.kv_heads):
        can = max(d for d in range(1, cp + 1) if whole.heads % d == 0)
        raise ConfigError(
            f"layout: cp_comm=all_to_all spreads heads over cp ranks: expected {whole.heads} heads of a tp rank "
            f"to be a multiple of cp, got cp {cp}; the nearest that can be is {can}, or use cp_comm=ring"
        )
    assert k.spec is not None
    detail = dataclasses.replace(
        whole,
        heads=whole.heads // cp,
        kv_heads=max(1, whole.kv_heads // cp),
        query_tokens=whole.query_tokens * cp,
        key_tokens=whole.key_tokens * cp,
    )
    q_bytes = tensors[k.spec.tensors[0]].size_bytes
    o_bytes = q_bytes * whole.v_dim // whole.qk_dim
    going = [q_bytes, *(tensors[t].size_bytes for t in k.spec.tensors[1:])]
    before, after = ([o_bytes], going) if whole.backward else (going, [o_bytes])
    return [
        *(_collective(kernel, "all_to_all", size, kernel.inputs[:1]) for size in before),
        _share(kernel, detail),
        *(_collective(kernel, "all_to_all", size, kernel.outputs[:1]) for size in after),
    ]


#: Names of groups over which a parameter is whole: see ``RankSegment.parameter_elements``.
DENSE, EXPERTS = "dp", "dp/ep"


def rank_segment(
    segment: Segment, sizes: Mapping[str, int], layout: Layout, *, regather: bool = True, fp32_rings: bool = False
) -> RankSegment:
    """Make what one rank of a layout runs of a segment.

    Args:
        segment: Segment of a ModelTable.
        sizes: Value of each symbol; ``b`` is the layout's micro-batch unless it is given.
        layout: Degrees of tensor, context and expert parallel; pipeline, data parallel and recompute do not matter.
        regather: With sequence parallel, backward gathers tokens again (Megatron) instead of keeping what forward
            gathered (torch's ``parallelize_module``).
        fp32_rings: See ``lading.parallel.ranks.Context``.

    Raises:
        ConfigError: the layout cannot be: names the rule, what was found and the nearest that can be.
    """
    cut_segment = cut(segment, axes_of(layout, regather=regather), wide=layout.precision == "fp32")
    degrees = _Degrees(
        layout.tp, layout.cp, layout.ep, layout.expert_tp, Context(layout.cp, layout.cp_comm, fp32_rings)
    )
    return _ranked(cut_segment, tuple({"b": layout.micro_batch, **sizes}.items()), degrees)


def check_segment(segment: Segment, sizes: Mapping[str, int], layout: Layout, *, regather: bool = True) -> None:
    """Whether the lengths of a segment divide; arguments and errors as ``rank_segment``."""
    rank_cut = cut(segment, axes_of(layout, regather=regather))
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.expert_tp}
    check(rank_cut.lengths, {"b": layout.micro_batch, **sizes}, degrees, rank_cut.name)


@dataclass(frozen=True, slots=True)
class _Degrees:
    """Degrees of a layout that decide numbers, beside the micro-batch."""

    tp: int
    cp: int
    ep: int
    etp: int
    context: Context


@lru_cache(maxsize=256)
def _ranked(cut_segment: CutSegment, sizes: tuple[tuple[str, int], ...], ways: _Degrees) -> RankSegment:
    """Layouts that differ in replicas, pipeline, recompute or precision have the same segments."""
    values, degrees = dict(sizes), {"tp": ways.tp, "cp": ways.cp, "ep": ways.ep, "etp": ways.etp}
    check(cut_segment.lengths, values, degrees, cut_segment.name)
    tensors, kernels = _numbers(cut_segment, evaluate(cut_segment.lengths, values, degrees), ways)
    elements, summed = _elements(cut_segment, tensors, degrees, values)
    return RankSegment(
        name=cut_segment.name,
        kernels=tuple(kernels),
        tensors=tuple(tensors),
        enters=cut_segment.enters,
        leaves=cut_segment.leaves,
        saved=(*cut_segment.saved, *(place for place, t in enumerate(tensors) if t.name.startswith(MERGED))),
        parameter_elements=elements,
        summed_parameters=summed,
        parameters=tuple((p.tensor, EXPERTS if p.is_expert else DENSE) for p in cut_segment.parameters),
    )


def axes_of(layout: Layout, *, regather: bool = True) -> Axes:
    """Axes of a layout, which decide how segments are cut.

    Raises:
        ConfigError: the axes cannot be together.
    """
    if layout.cp_comm not in ("ring", "all_gather", "all_to_all"):
        raise ConfigError(f"layout: cp_comm must be ring, all_gather or all_to_all, got {layout.cp_comm!r}")
    if layout.sp and layout.tp == 1:
        raise ConfigError("layout: sequence parallel (sp) cuts tokens over tp ranks, got tp1; leave sp away")
    if layout.expert_tp not in (1, layout.tp):
        raise ConfigError(f"layout: etp must be 1 or as tp {layout.tp}, got {layout.expert_tp}")
    return Axes(
        tp=layout.tp > 1,
        cp=layout.cp > 1,
        ep=layout.ep > 1,
        etp=layout.expert_tp > 1,
        sp=layout.sp,
        cp_comm=layout.cp_comm,
        regather=regather,
    )


def _numbers(cut_segment: CutSegment, lengths: list[int], ways: _Degrees) -> tuple[list[LocalTensor], list[Kernel]]:
    tensors: list[LocalTensor] = []
    touched: list[int] = []
    shapes: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
    for t in cut_segment.tensors:
        local_shape = shapes.get(t.dims)
        if local_shape is None:
            shape = tuple([lengths[place] for place in t.dims])
            local_shape = shapes[t.dims] = shape, prod(shape)
        shape, elements = local_shape
        if t.repeats:
            elements = prod(length for dim, length in enumerate(shape) if dim not in t.repeats)
        size = elements * DTYPE_BYTES[t.dtype]
        touched.append(size)
        tensors.append(LocalTensor(t.storage, t.dtype, shape, size, t.role, t.name))
    kernels: list[Kernel] = []
    for k in cut_segment.kernels:
        kernel = _kernel(k, tensors, touched)
        if k.spec is not None and k.spec.form == "attention":
            kernels.extend(attention_kernels(k, kernel, tensors, ways.context))
        else:
            kernels.append(kernel)
    return tensors, kernels


def _kernel(k: CutKernel, tensors: list[LocalTensor], touched: list[int]) -> Kernel:
    written = sum([touched[t] for t in k.outputs]) + sum([touched[t] for t in k.mutates if t not in k.outputs])
    read = sum([touched[t] for t in k.inputs])
    if k.kind is OpKind.GATHER and k.inputs:
        read -= max(0, touched[k.inputs[0]] - written)  # of a table only the rows that are looked up
    detail = None if k.spec is None else _detail(k.spec, tensors, touched)
    return Kernel(k.name, k.kind, k.stage, k.module, k.dtype, read, written, k.inputs, (*k.outputs, *k.mutates), detail)


def _detail(spec: Spec, tensors: list[LocalTensor], touched: list[int]) -> Product | Collective | None:
    if spec.form == "collective":
        return Collective(spec.op, spec.axis, touched[spec.tensors[0]])
    if spec.form == "attention":
        return None
    a, *_, c = (tensors[t].shape for t in spec.tensors)
    if spec.form == "linear":
        return Product(prod(a[:-1]), c[-1], a[-1])
    if spec.form == "grouped":
        return _grouped(a, tensors[spec.tensors[1]].shape, c)
    return Product(c[-2], c[-1], a[-1], c[0] if len(c) == 3 else 1)


def _grouped(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]) -> Product:
    """Rows spread evenly over the experts of a rank, rounded up."""
    if len(b) == 3:
        return Product(-(-a[0] // b[0]), c[-1], a[-1], b[0])
    return Product(c[-2], c[-1], -(-a[-1] // c[0]), c[0])


def _elements(
    cut_segment: CutSegment, tensors: list[LocalTensor], degrees: Mapping[str, int], values: Mapping[str, int]
) -> tuple[dict[str, int], tuple[int, ...]]:
    elements: dict[str, int] = {}
    summed: list[int] = []
    for parameter in cut_segment.parameters:
        count = prod(tensors[parameter.tensor].shape)
        group = EXPERTS if parameter.is_expert else DENSE
        elements[group] = elements.get(group, 0) + count
        places = cut_segment.tensors[parameter.tensor].dims
        factors = [factor for place in places for factor in cut_segment.lengths[place].factors]
        shared = any(f.rule == SHARED_HEADS and f.atom.at(values) < degrees[f.axis] for f in factors)
        if (parameter.summed or shared) and not parameter.is_expert:
            summed.append(count)
    return elements, tuple(summed)
