"""Specs: a segment cut over the axes of a layout, without numbers; ``ranks`` fills them in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from lading.ir.graph import Op, OpKind
from lading.ir.table import Segment, SegmentTensor
from lading.ir.work import Stage
from lading.parallel.shapes import Length, Lengths


@dataclass(frozen=True, slots=True)
class Spec:
    """Facts that an operation's cost needs beside bytes.

    Attributes:
        form: "product", "linear", "grouped", "attention" or "collective".
        tensors: Local tensors: both factors and the result; query, key and value; or the one whose bytes are sent.
        op: Name of a collective.
        axis: Axis of a collective, or "cp" for attention whose tokens are cut.
    """

    form: str
    tensors: tuple[int, ...]
    op: str = ""
    axis: str = ""


@dataclass(frozen=True, slots=True)
class CutKernel:
    """Kernel of a cut segment, as ``lading.ir.work.Kernel``; ``mutates`` are local tensors written in place.

    Attributes:
        op: The segment's operation; None for a collective.
        statistic: Kind of a collective of one number a token: "max" or "sum" of scores, "target" for the target's
            score, or "norm" for sums of squares.
    """

    name: str
    kind: OpKind | None
    stage: Stage
    module: str
    dtype: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...] = ()
    spec: Spec | None = None
    settings: tuple[tuple[str, object], ...] = ()
    op: Op | None = None
    statistic: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor of the segment that a local tensor is a copy of.

    Attributes:
        tensor: Tensor of the segment; -1 for statistics that ranks exchange.
        copy: Collectives it came through; "" for none.
        scattered: Whether its tokens are cut over tp ranks.
    """

    tensor: int
    copy: str
    scattered: bool


@dataclass(frozen=True, eq=False)
class Cuts:
    """Result of cutting a segment: how the dims of any of its tensors are cut, and what every rank has.

    Attributes:
        segment: Segment as it was cut, widened where it runs in fp32.
        axis: Axis of each atom that is cut.
        origins: Origin of each local tensor.
        free: Storages that every rank can make whole by itself.
        copies: Copy of each storage that is there at the end, and whether its tokens are cut over tp ranks.
    """

    segment: Segment
    lengths: Lengths
    axis: Mapping[int, str]
    origins: tuple[Origin, ...]
    free: frozenset[int]
    copies: Mapping[int, tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter of a rank.

    Attributes:
        tensor: Local tensor.
        is_expert: One of many experts.
        summed: Each tp rank has a part of its gradient's sum.
        trained: It gets a gradient.
    """

    tensor: int
    is_expert: bool
    summed: bool
    trained: bool


@dataclass(frozen=True, eq=False)
class CutSegment:
    """Segment of one rank in lengths.

    Attributes:
        lengths: Lengths that dims of ``tensors`` name by their place.
        saved: Tensors kept from forward to backward.
    """

    name: str
    lengths: tuple[Length, ...]
    tensors: tuple[SegmentTensor[int], ...]
    kernels: tuple[CutKernel, ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    saved: tuple[int, ...]
    parameters: tuple[CutParameter, ...]
    leaves_back: tuple[int, ...]
    cuts: Cuts


def staged(kernels: list[CutKernel], tensors: list[SegmentTensor[int]]) -> tuple[CutKernel, ...]:
    """A collective that gradients of activations wait for belongs to them, whoever asked first."""
    awaited = {tensors[t].storage for k in kernels if k.stage is Stage.BACKWARD_INPUT for t in k.inputs}
    return tuple(
        dataclasses.replace(k, stage=Stage.BACKWARD_INPUT)
        if k.stage is Stage.BACKWARD_WEIGHT and k.kind is None and tensors[k.outputs[0]].storage in awaited
        else k
        for k in kernels
    )
