"""Ranks: the numbers of a cut segment for sizes and a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, OpKind
from lading.ir.layout import Layout
from lading.ir.table import Segment
from lading.ir.work import Collective, Kernel, LocalTensor, Product, RankSegment
from lading.parallel.attention import MERGED, Context, attention_kernels
from lading.parallel.choose import Axes
from lading.parallel.cut import cut
from lading.parallel.shapes import SHARED_HEADS, check, evaluate
from lading.parallel.specs import CutKernel, CutSegment, Spec

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
        fp32_rings: See ``lading.parallel.attention.Context``.

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
    found = cut(segment, axes_of(layout, regather=regather))
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.expert_tp}
    check(found.lengths, {"b": layout.micro_batch, **sizes}, degrees, found.name)


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
        found = shapes.get(t.dims)
        if found is None:
            shape = tuple([lengths[place] for place in t.dims])
            found = shapes[t.dims] = shape, prod(shape)
        shape, elements = found
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
