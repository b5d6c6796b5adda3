"""Siblings: products on one input as one wider product, as stacks do that keep such weights in one matrix.

Megatron and Transformer Engine have one matrix for queries, keys and values, and one for the gate and the up
projection; a model written with several linears computes the same. Forward: products that share an input become one
with more columns. Gradients of weights: one with more rows. Gradient of the input: one with a longer sum, so that
adding the parts falls away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lading.ir.graph import OpKind, Role
from lading.ir.work import Kernel, LocalTensor, Product, RankSegment, Stage


def merge_siblings(segment: RankSegment, modules: Sequence[str] = ()) -> RankSegment:
    """The segment with sibling products merged; what is saved and the tensors stay.

    Args:
        modules: Where products are merged; () for everywhere.
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
    """Key that siblings have in common: the input that is no parameter, and the dims that it gives."""
    product = kernel.detail
    assert isinstance(product, Product)
    if stage is Stage.FORWARD:
        found = [tensors[t] for t in kernel.inputs if tensors[t].role is not Role.PARAMETER]
        return (found[0].storage, product.m, product.k) if len(found) == 1 else None
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
    gone: set[int] = set()
    for members in families.values():
        if len(members) < 2:
            continue
        place = members[0] if stage is Stage.FORWARD else members[-1]
        parts = [kernels[i] for i in members]
        wide = sum(_product(k).n if stage is Stage.FORWARD else _product(k).m for k in parts)
        side = {"n": wide} if stage is Stage.FORWARD else {"m": wide}
        kernels[place] = _merged(parts, dataclasses.replace(_product(parts[0]), **side), tensors)
        gone.update(i for i in members if i != place)
    return [kernel for index, kernel in enumerate(kernels) if index not in gone]


def _summed(kernels: list[Kernel], tensors: Sequence[LocalTensor], modules: Sequence[str]) -> list[Kernel]:
    """Products whose results are added to each other and to nothing else first."""
    makers = {
        tensors[k.outputs[0]].storage: index
        for index, k in enumerate(kernels)
        if _is_plain(k, Stage.BACKWARD_INPUT, modules) and len(k.outputs) == 1
    }
    gone: set[int] = set()
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
        whole = _merged(
            [kernels[first], kernels[last]], dataclasses.replace(left, k=left.k + right.k), tensors, kernel.outputs
        )
        kernels[last] = whole
        gone |= {first, index}
        makers[tensors[kernel.outputs[0]].storage] = last
    return [kernel for index, kernel in enumerate(kernels) if index not in gone]


def _product(kernel: Kernel) -> Product:
    assert isinstance(kernel.detail, Product)
    return kernel.detail


def _merged(
    parts: Sequence[Kernel], product: Product, tensors: Sequence[LocalTensor], outputs: tuple[int, ...] = ()
) -> Kernel:
    """One kernel for all of them."""
    inputs = tuple(dict.fromkeys(t for part in parts for t in part.inputs))
    outputs = outputs or tuple(t for part in parts for t in part.outputs)
    seen = {tensors[t].storage: tensors[t].size_bytes for t in inputs}
    return dataclasses.replace(
        parts[0],
        detail=product,
        inputs=inputs,
        outputs=outputs,
        bytes_read=sum(seen.values()),
        bytes_written=sum(tensors[t].size_bytes for t in outputs),
    )
