"""Losses: which tensors of a cross-entropy exist, by the kernels that a stack has for it.

Written operation by operation it is a cast of the logits to fp32, a log-softmax, and the same backward: several tensors
of tokens x vocabulary. Megatron's own works on one of them in place (``vocab_parallel_cross_entropy``); Transformer
Engine's and Liger's write the gradient over the logits; a compiler keeps the logits as the product made them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lading.ir.work import Kernel, Stage
from lading.parallel.recompute import Flow

#: How cross-entropy is run: as written, in place on fp32 logits, in place on the logits, or fused but not in place.
AS_WRITTEN, IN_FP32, IN_LOGITS, FUSED = "as written", "in fp32", "in logits", "fused"


@dataclass(frozen=True)
class Loss:
    """Changes that a way of running cross-entropy makes, in storages.

    Attributes:
        never: Storages that do not exist.
        same: Storage -> the one in whose place it is written.
        kept: Storage -> the one that is kept from forward to backward in its stead.
    """

    never: frozenset[int] = frozenset()
    same: dict[int, int] = field(default_factory=lambda: {})
    kept: dict[int, int] = field(default_factory=lambda: {})


def loss_of(flow: Flow, way: str) -> Loss:
    """The cross-entropy of a segment, run in one of the ways above; empty if it has none."""
    scores = _first(flow, "_log_softmax.", Stage.FORWARD)
    if scores is None or way == AS_WRITTEN:
        return Loss()
    source = flow.storages(scores.inputs)[0]
    wide = _cast_of(flow, source)
    logits = source if wide is None else wide
    result = flow.storages(scores.outputs)[0]
    inner, last = _backward(flow)
    if way == IN_FP32:
        same = dict.fromkeys((result, *inner), source)
        if last is not None and not _is_cast(flow, last):
            same[last] = source
        return Loss(frozenset(), same, {result: source})
    never = {result, *inner}
    if wide is not None:
        never.add(source)
    same = {last: logits} if way == IN_LOGITS and last is not None else {}
    return Loss(frozenset(never), same, {result: logits})


def _first(flow: Flow, name: str, stage: Stage) -> Kernel | None:
    found = (
        k for k in flow.segment.kernels if name in k.name and (k.stage is Stage.FORWARD) == (stage is Stage.FORWARD)
    )
    return next(found, None)


def _cast_of(flow: Flow, storage: int) -> int | None:
    """Storage that a storage was cast from, if it was and nothing else reads the cast; else None."""
    for place in flow.makers_forward(storage):
        kernel = flow.segment.kernels[place]
        if "_to_copy" in kernel.name:
            return flow.storages(kernel.inputs)[0]
    return None


def _backward(flow: Flow) -> tuple[list[int], int | None]:
    """Inner gradients, and that of the logits as the product takes it."""
    inner: list[int] = []
    for name in ("nll_loss_backward", "_log_softmax_backward"):
        if (kernel := _first(flow, name, Stage.BACKWARD_INPUT)) is not None:
            inner.extend(flow.storages(kernel.outputs))
    if not inner:
        return [], None
    for place in flow.users.get(inner[-1], ()):
        kernel = flow.segment.kernels[place]
        if "_to_copy" in kernel.name:
            return inner, flow.storages(kernel.outputs)[0]
    return inner[:-1], inner[-1]


def _is_cast(flow: Flow, storage: int) -> bool:
    return any("_to_copy" in flow.segment.kernels[place].name for place in flow.makers.get(storage, ()))
