"""Rules of sharding: along which dims each operation of PyTorch may run on shards of its tensors.

``rule_of`` labels the dims of what an operation reads and makes. An operation without a rule runs on whole tensors
(``ir/tensor_shards.py``), so that what is missing here costs time, and changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from lading.ir.graph import Op, Tensor
from lading.ir.opkinds import base_name

#: Operations that treat elements alone.
_POINTWISE = frozenset(
    [
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "copy",
        "cos",
        "div",
        "elu",
        "elu_backward",
        "eq",
        "erf",
        "exp",
        "floor",
        "ge",
        "gelu",
        "gelu_backward",
        "gt",
        "hardswish",
        "hardtanh",
        "hardtanh_backward",
        "le",
        "leaky_relu",
        "leaky_relu_backward",
        "log",
        "log1p",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "ne",
        "neg",
        "ones_like",
        "pow",
        "reciprocal",
        "relu",
        "rsqrt",
        "rsub",
        "sigmoid",
        "sigmoid_backward",
        "sign",
        "silu",
        "silu_backward",
        "sin",
        "softplus",
        "softplus_backward",
        "sqrt",
        "square",
        "sub",
        "tanh",
        "tanh_backward",
        "threshold_backward",
        "_to_copy",
        "where",
        "zeros_like",
    ]
)
_ATTENTION = frozenset([
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """Labels of the dims of an operation's tensors: equal labels run along each other, None is no dim to cut.

    Attributes:
        summed: Labels that the results are sums over.
    """

    inputs: Mapping[int, tuple[str | None, ...]]
    outputs: tuple[tuple[str | None, ...], ...]
    summed: frozenset[str] = frozenset()


def rule_of(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    """Say along which dims an operation may run on shards of its tensors; None where that is not known."""
    name = base_name(op.name)
    if len({*op.inputs}) != len(op.inputs) or not op.outputs or None in op.results:
        return None
    if name in _POINTWISE:
        return _pointwise(op, tensors)
    make = _RULES.get(name)
    return None if make is None else make(op, tensors)


def _pointwise(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    shape = tensors[op.outputs[0]].shape
    if len(op.outputs) != 1 or not op.inputs:
        return None
    inputs: dict[int, tuple[str | None, ...]] = {}
    for tensor in op.inputs:
        lengths = tensors[tensor].shape
        before = len(shape) - len(lengths)
        if before < 0 or any(n not in (1, shape[before + d]) for d, n in enumerate(lengths)):
            return None
        inputs[tensor] = tuple(str(before + d) if n == shape[before + d] else None for d, n in enumerate(lengths))
    return ShardingRule(inputs, (tuple(map(str, range(len(shape)))),))


def _product(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    *bias, left, right = op.inputs
    batch = ("b",) if len(tensors[left].shape) == 3 else ()
    out = (*batch, "m", "n")
    labels: dict[int, tuple[str | None, ...]] = {left: (*batch, "m", "k"), right: (*batch, "k", "n")}
    if bias:
        shape = tensors[bias[0]].shape
        labels[bias[0]] = out[len(out) - len(shape) :]
        if any(n == 1 for n in shape):
            return None
    return ShardingRule(labels, (out,), frozenset("k"))


def _leading(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    """A norm over the last dims, or its backward: results without leading dims are sums over them."""
    shape = tensors[op.outputs[0]].shape
    lead = len(shape) - len(cast("tuple[int, ...]", next(arg for arg in op.args if isinstance(arg, tuple))))

    def labels(tensor: int) -> tuple[str | None, ...]:
        dims = tensors[tensor].shape
        leads = len(dims) >= lead and dims[:lead] == shape[:lead] and len(dims) == len(shape)
        return tuple(str(d) if leads and d < lead else None for d in range(len(dims)))

    summed = frozenset(map(str, range(lead))) if base_name(op.name).endswith("_backward") else frozenset[str]()
    return ShardingRule({t: labels(t) for t in op.inputs}, tuple(map(labels, op.outputs)), summed)


def _along_one(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    """A softmax or a slice along one dim: all others go on."""
    shape = tensors[op.outputs[0]].shape
    numbers = [arg for arg in op.args if isinstance(arg, int) and not isinstance(arg, bool)]
    dim = numbers[0] % len(shape)
    labels = tuple(None if d == dim else str(d) for d in range(len(shape)))
    empty = (None,)  # which is joined with others where a cache has nothing yet
    return ShardingRule({t: labels if len(tensors[t].shape) == len(shape) else empty for t in op.inputs}, (labels,))


def _sum(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    shape = tensors[op.inputs[0]].shape
    over = op.args[1] if len(op.args) > 1 else ()
    dims = {cast("int", d) % len(shape) for d in (over if isinstance(over, tuple) else (over,))}
    dims = dims or {*range(len(shape))}
    adds = base_name(op.name) == "sum"
    inputs = tuple(str(d) if adds or d not in dims else None for d in range(len(shape)))
    keeps = len(tensors[op.outputs[0]].shape) == len(shape)
    out = tuple(None if d in dims else str(d) for d in range(len(shape)) if keeps or d not in dims)
    return ShardingRule({op.inputs[0]: inputs}, (out,), frozenset(map(str, dims)) if adds else frozenset())


def _attention(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    backward = base_name(op.name).endswith("_backward")
    query, keys = (1, (2, 3)) if backward else (0, (1, 2))
    rows = tensors[op.inputs[query]].shape[-2]

    def labels(tensor: int, *, asks: bool) -> tuple[str | None, ...]:
        shape, on_cpu = tensors[tensor].shape, "_for_cpu" in op.name
        queries = "queries" if asks and on_cpu and shape[2] == rows > 1 else None
        return ("b" if shape[0] > 1 else None, "h" if shape[1] > 1 else None, queries, *(None for _ in shape[3:]))

    op_tensors = [*op.inputs, *op.outputs]
    if any(len(tensors[t].shape) < 3 for t in op_tensors):
        return None
    return ShardingRule(
        {t: labels(t, asks=n not in keys) for n, t in enumerate(op.inputs)},
        tuple(labels(t, asks=not (backward and n)) for n, t in enumerate(op.outputs)),
        frozenset(["queries"] if backward else []),
    )


def _loss_of_rows(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    """Sum of losses, or their mean, of rows without weights of classes, or its backward."""
    backward = base_name(op.name).endswith("_backward")
    weights, reduction = op.args[3 if backward else 2 :][:2]
    table, target = op.inputs[1:3] if backward else op.inputs
    if weights is not None or reduction == 0 or len(tensors[table].shape) != 2:
        return None
    labels: dict[int, tuple[str | None, ...]] = {table: ("rows", None), target: ("rows",)}
    if backward:
        return ShardingRule({**dict.fromkeys(op.inputs, ()), **labels}, (("rows", None),))
    return ShardingRule(labels, ((), ()), frozenset(["rows"]))


def _embedding(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    out = tuple(map(str, range(len(tensors[op.outputs[0]].shape) - 1)))
    weight, index = op.inputs
    return ShardingRule({weight: ("words", "columns"), index: out}, ((*out, "columns"),), frozenset(["words"]))


def _embedding_backward(op: Op, tensors: Mapping[int, Tensor]) -> ShardingRule | None:
    rows = tuple(map(str, range(len(tensors[op.inputs[1]].shape))))
    gradient, index = op.inputs
    words = "words" if op.args[3] == -1 else None  # of a padding word there is no gradient
    return ShardingRule({gradient: (*rows, "columns"), index: rows}, ((words, "columns"),), frozenset(rows))


_RULES = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **dict.fromkeys(
        ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"), _leading
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"), _along_one),
    **dict.fromkeys(("slice_backward", "cat"), _along_one),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _loss_of_rows),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), _sum),
    **dict.fromkeys(_ATTENTION, _attention),
    "allreduce": _pointwise,  # over other ranks
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
}
