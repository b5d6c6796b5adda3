"""Lineage: which dims of a segment's tensors run along each other, by rules per class of operation.

The rules hold for backward as for forward: a gradient gets the dims of what it is the gradient of because the
operations that make it say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from lading.errors import ConfigError
from lading.ir.graph import Op, OpKind, Phase
from lading.ir.opkinds import base_name
from lading.ir.sizes import Size
from lading.ir.table import Segment
from lading.parallel.atoms import ONE, Atoms, Dim, Lineage, setting
from lading.parallel.contractions import PRODUCTS, attention, product

SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"})
NORMS = frozenset(
    ["native_layer_norm", "_fused_rms_norm", "native_layer_norm_backward", "_fused_rms_norm_backward", "rms_norm"]
)
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "alias",
        "detach",
    ]
)


def lineage(segment: Segment) -> Lineage:
    """Follow the dims through all operations of a segment.

    Raises:
        ConfigError: an operation lacks a setting that says how its dims go on.
    """
    atoms = Atoms()
    dims = [tuple(atoms.new(size) for size in tensor.dims) for tensor in segment.tensors]
    traced = Lineage(segment, atoms, dims)
    _join_slices(traced)
    for op in segment.ops:
        _relate(traced, op)
    pairs = [(t, g) for t, g in segment.gradients if g is not None]
    for groups in ((segment.leaves, segment.enters_back), (segment.enters, segment.leaves_back)):
        if len(groups[0]) == len(groups[1]):
            pairs.extend(zip(*groups, strict=True))
    for tensor, gradient in pairs:
        if segment.tensors[tensor].dims == segment.tensors[gradient].dims:
            _align_dims(traced, tensor, gradient)
    return traced


def _relate(lineage: Lineage, op: Op) -> None:
    base = base_name(op.name)
    if op.kind is OpKind.ATTENTION:
        return attention(lineage, op)
    rule = _RULES.get(base)
    if rule is None and base in PRODUCTS:
        rule = product
    if rule is None and (base in SOFTMAXES or base.removesuffix("_backward_data") in SOFTMAXES):
        rule = _softmax
    if rule is None and base in NORMS:
        rule = _norm
    if rule is None and setting(op, "groups") is not None:
        rule = _regroup
    if rule is None and setting(op, "reduces") is not None:
        rule = _reduce
    (rule or _pointwise)(lineage, op)


def _align_dims(lineage: Lineage, left: int, right: int) -> None:
    for a, b in zip(lineage.dims[left], lineage.dims[right], strict=True):
        lineage.atoms.align(a, b)


def _opaque(lineage: Lineage, op: Op) -> None:
    """Keep every dim whole but those of tokens, for an operation of which nothing is known."""
    for tensor in (*op.inputs, *op.outputs):
        for dim in lineage.dims[tensor]:
            lineage.atoms.keep_whole(dim)
    if op.inputs:
        lineage.unknown.append(op)


def _pointwise(lineage: Lineage, op: Op) -> None:
    """Inputs broadcast to the shape of the outputs; a loss is one number."""
    shapes = {lineage.segment.tensors[t].dims for t in op.outputs if lineage.segment.tensors[t].dims}
    tensors = (*op.outputs, *op.mutates, *op.inputs)
    shape = max((lineage.segment.tensors[t].dims for t in tensors), key=len, default=())
    if any(len(s) != len(shape) for s in shapes) or not all(_broadcasts(lineage, t, shape) for t in tensors):
        return _opaque(lineage, op)
    frame: list[Dim] = [()] * len(shape)
    for tensor in tensors:
        dims = lineage.dims[tensor]
        for place, dim in enumerate(dims, len(shape) - len(dims)):
            if dim and frame[place]:
                lineage.atoms.align(frame[place], dim)
            frame[place] = frame[place] or dim


def _broadcasts(lineage: Lineage, tensor: int, shape: tuple[Size, ...]) -> bool:
    dims = lineage.segment.tensors[tensor].dims
    return all(mine in (ONE, dim) or dim == ONE for mine, dim in zip(reversed(dims), reversed(shape), strict=False))


def _flat(lineage: Lineage, tensor: int, places: tuple[int, ...]) -> Dim:
    return tuple(atom for place in places for atom in lineage.dims[tensor][place])


def _regroup(lineage: Lineage, op: Op) -> None:
    groups = cast("tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]", _required_setting(op, "groups"))
    expands = cast("tuple[int, ...]", setting(op, "expands") or ())
    for before, after in groups:
        if not set(after) & set(expands):
            lineage.atoms.align(_flat(lineage, op.inputs[0], before), _flat(lineage, op.outputs[0], after))


def _permute(lineage: Lineage, op: Op) -> None:
    for place, source in enumerate(cast("tuple[int, ...]", _required_setting(op, "dims"))):
        lineage.atoms.align(lineage.dims[op.outputs[0]][place], lineage.dims[op.inputs[0]][source])


def _required_setting(op: Op, key: str) -> object:
    value = setting(op, key)
    if value is None:
        raise ConfigError(f"expected setting {key!r} of {op.name} in {op.module!r}, got {dict(op.settings)}")
    return value


def _others_along(lineage: Lineage, left: int, right: int, dim: int, *, dropped: bool = False) -> None:
    """Align all dims of two tensors but ``dim``; with ``dropped`` the right one does not have ``dim``."""
    mine = [d for place, d in enumerate(lineage.dims[left]) if place != dim]
    others = [d for place, d in enumerate(lineage.dims[right]) if dropped or place != dim]
    for a, b in zip(mine, others, strict=True):
        lineage.atoms.align(a, b)


def _join_slices(lineage: Lineage) -> None:
    """Slices that stand one after another and leave nothing out are a split."""
    slices: dict[tuple[int, int], dict[Size, int]] = {}
    for op in lineage.segment.ops:
        if base_name(op.name) == "slice" and isinstance(start := setting(op, "start"), Size):
            key = (op.inputs[0], cast(int, _required_setting(op, "dim")))
            slices.setdefault(key, {}).setdefault(start, op.outputs[0])
    tensors = lineage.segment.tensors
    for (source, dim), parts in slices.items():
        at, joined = Size.of(0), list[int]()
        while at in parts and parts[at] not in joined:
            joined.append(parts[at])
            at = at + tensors[parts[at]].dims[dim]
        if len(joined) > 1 and at == tensors[source].dims[dim]:
            _one_after_another(lineage, source, tuple(joined), dim)
            lengths = [(start, tensors[t].dims[dim]) for start, t in parts.items() if t in joined]
            lineage.cuts.update((at, start, length) for start, length in lengths)


def _is_joined(lineage: Lineage, op: Op, dim: int) -> bool:
    sizes = [lineage.segment.tensors[t].dims[dim] for t in (op.inputs[0], op.outputs[0])]
    if base_name(op.name).endswith("_backward"):
        sizes.reverse()
    start = setting(op, "start")
    return isinstance(start, Size) and (sizes[0], start, sizes[1]) in lineage.cuts


def _cut(lineage: Lineage, op: Op) -> None:
    """Slice, select and their backwards: a dim of another length is another dim, and its source stays whole."""
    dim, (source,), (result,) = cast(int, _required_setting(op, "dim")), op.inputs[:1], op.outputs[:1]
    ranks = len(lineage.dims[source]), len(lineage.dims[result])
    if ranks[0] != ranks[1]:
        long, short = (source, result) if ranks[0] > ranks[1] else (result, source)
        _others_along(lineage, long, short, dim, dropped=True)
        return lineage.atoms.keep_whole(lineage.dims[long][dim])
    _others_along(lineage, source, result, dim)
    if lineage.segment.tensors[source].dims[dim] == lineage.segment.tensors[result].dims[dim]:
        return lineage.atoms.align(lineage.dims[source][dim], lineage.dims[result][dim])
    if not _is_joined(lineage, op, dim):
        for tensor in (source, result):
            lineage.atoms.keep_whole(lineage.dims[tensor][dim])


def _split(lineage: Lineage, op: Op) -> None:
    dim = cast(int, _required_setting(op, "dim"))
    source, dropped = op.inputs[0], len(lineage.dims[op.outputs[0]]) < len(lineage.dims[op.inputs[0]])
    for part in op.outputs:
        _others_along(lineage, source, part, dim, dropped=dropped)
    if dropped:
        return lineage.atoms.keep_whole(lineage.dims[source][dim])
    _one_after_another(lineage, source, op.outputs, dim)


def _cat(lineage: Lineage, op: Op) -> None:
    dim = cast(int, _required_setting(op, "dim"))
    rank = len(lineage.segment.tensors[op.outputs[0]].dims)
    parts = tuple(t for t in op.inputs if len(lineage.segment.tensors[t].dims) == rank)  # torch lets empty ones join
    for part in parts:
        _others_along(lineage, op.outputs[0], part, dim)
    _one_after_another(lineage, op.outputs[0], parts, dim)


def _stack(lineage: Lineage, op: Op) -> None:
    dim = cast(int, _required_setting(op, "dim"))
    for part in op.inputs:
        _others_along(lineage, op.outputs[0], part, dim, dropped=True)
    lineage.atoms.keep_whole(lineage.dims[op.outputs[0]][dim])


def _one_after_another(lineage: Lineage, whole: int, parts: tuple[int, ...], dim: int) -> None:
    sizes = {lineage.segment.tensors[part].dims[dim] for part in parts}
    dims = tuple(lineage.dims[part][dim] for part in parts)
    if len(parts) == 1:
        lineage.atoms.align(lineage.dims[whole][dim], dims[0])
    elif len(sizes) == 1:
        for tensor_dims in dims[1:]:
            lineage.atoms.align(dims[0], tensor_dims)
        count = lineage.atoms.new(Size.of(len(parts)))
        lineage.atoms.keep_whole(count)
        lineage.atoms.align(lineage.dims[whole][dim], (*count, *dims[0]))
    else:
        lineage.atoms.split_unevenly(lineage.dims[whole][dim], dims)


def _reduce(lineage: Lineage, op: Op) -> None:
    """Sums along dims; in forward a dim that is reduced stays whole (normalisation by hand, pooling)."""
    reduces = cast("tuple[int, ...]", _required_setting(op, "reduces"))
    source = lineage.dims[op.inputs[0]]
    kept_dims = [dim for place, dim in enumerate(source) if place not in reduces]
    for result in op.outputs:
        dims = lineage.dims[result]
        if len(dims) == len(source):
            dims = tuple(dim for place, dim in enumerate(dims) if place not in reduces)
        for a, b in zip(kept_dims, dims, strict=True):
            lineage.atoms.align(a, b)
    if op.phase is Phase.FORWARD:
        for place in reduces:
            lineage.atoms.keep_whole(source[place])


def _softmax(lineage: Lineage, op: Op) -> None:
    _pointwise(lineage, op)
    if base_name(op.name).startswith("_log_softmax"):
        return  # over the vocabulary: ranks exchange maxima and sums
    lineage.atoms.keep_whole(lineage.dims[op.outputs[0]][cast(int, _required_setting(op, "dim"))])


def _norm(lineage: Lineage, op: Op) -> None:
    """Results like the input; statistics have its outer dims, weights its normalised ones."""
    over = cast("tuple[int, ...]", _required_setting(op, "normalizes"))
    frame = lineage.dims[op.inputs[0]]
    for tensor in (*op.inputs[1:], *op.outputs):
        dims = lineage.dims[tensor]
        if len(dims) == len(frame):
            pairs = list(zip(frame, dims, strict=True))
        else:
            pairs = list(zip([frame[place] for place in over], dims, strict=True))
        for a, b in pairs:
            if a and b:
                lineage.atoms.align(a, b)
    lineage.normed.update(leaf for place in over for leaf in frame[place])


def _embedding(lineage: Lineage, op: Op) -> None:
    weight, index = (lineage.dims[t] for t in op.inputs[:2])
    out = lineage.dims[op.outputs[0]]
    for a, b in zip((*index, weight[1]), out, strict=True):
        lineage.atoms.align(a, b)


def _embedding_backward(lineage: Lineage, op: Op) -> None:
    grad, index = (lineage.dims[t] for t in op.inputs[:2])
    out_dims = lineage.dims[op.outputs[0]]
    for a, b in zip(grad, (*index, out_dims[1]), strict=True):
        lineage.atoms.align(a, b)


def _nll(lineage: Lineage, op: Op) -> None:
    """Scores (T, V) and targets (T)."""
    frames = [lineage.dims[t] for t in (*op.inputs, *op.outputs) if len(lineage.dims[t]) == 2]
    targets = [lineage.dims[t] for t in (*op.inputs, *op.outputs) if len(lineage.dims[t]) == 1]
    for frame in frames[1:]:
        for a, b in zip(frames[0], frame, strict=True):
            lineage.atoms.align(a, b)
    for target in targets:
        if target[0] and lineage.atoms.size(target[0][0]) == lineage.atoms.size(frames[0][0][0]):
            lineage.atoms.align(frames[0][0], target[0])


def _sort(lineage: Lineage, op: Op) -> None:
    """Along one dim the order changes, or some are chosen; the other dims run on."""
    dim, source = cast(int, setting(op, "dim") or 0), op.inputs[0]
    for result in op.outputs:
        if len(lineage.dims[result]) == len(lineage.dims[source]):
            _others_along(lineage, source, result, dim)
            lineage.atoms.keep_whole(lineage.dims[result][dim])
    lineage.atoms.keep_whole(lineage.dims[source][dim])
    for result in op.outputs[1:]:
        _align_dims(lineage, op.outputs[0], result)


def _convolution(lineage: Lineage, op: Op) -> None:
    """Align a convolution (B, C, T) by (C, 1, K): channels and sequences run on, tokens meet their neighbours."""
    backward = "backward" in op.name
    weight = op.inputs[2 if backward else 1]
    if lineage.segment.tensors[weight].dims[1] != ONE:
        return _opaque(lineage, op)
    frame = lineage.dims[op.inputs[0]]
    for tensor in (*op.inputs[1:], *op.outputs):
        dims, per_channel = (
            lineage.dims[tensor],
            tensor == weight or lineage.segment.tensors[tensor].dims[1:2] == (ONE,),
        )
        if len(dims) == 1 or per_channel:
            lineage.atoms.align(dims[0], frame[1])
        else:
            lineage.atoms.align(dims[0], frame[0])
            lineage.atoms.align(dims[1], frame[1])
            if lineage.segment.tensors[tensor].dims[2:] == lineage.segment.tensors[op.inputs[0]].dims[2:]:
                for a, b in zip(dims[2:], frame[2:], strict=True):
                    lineage.atoms.align(a, b)
    return None


def _repeat(lineage: Lineage, op: Op) -> None:
    """Trace an operation that repeats its input: dims of one length run on, the others are new."""
    sizes, out_sizes = (lineage.segment.tensors[t].dims for t in (op.inputs[0], op.outputs[0]))
    for place in range(1, min(len(sizes), len(out_sizes)) + 1):
        if sizes[-place] == out_sizes[-place]:
            lineage.atoms.align(lineage.dims[op.inputs[0]][-place], lineage.dims[op.outputs[0]][-place])


def _new(lineage: Lineage, op: Op) -> None:
    """Align nothing: of the input the result has the dtype only."""


def _cumulate(lineage: Lineage, op: Op) -> None:
    _pointwise(lineage, op)
    lineage.atoms.keep_whole(lineage.dims[op.outputs[0]][cast(int, _required_setting(op, "dim"))])


def _look_up(lineage: Lineage, op: Op) -> None:
    """Rows by number: the dims of the numbers stand in the place of those they look up."""
    source, *numbers = op.inputs
    places = cast("tuple[int, ...]", setting(op, "indexes") or (setting(op, "dim") or 0,))
    _rows(lineage, source, op.outputs[0], tuple(numbers[: len(places)]), places)


def _write_rows(lineage: Lineage, op: Op) -> None:
    """Rows written or added by number; the result is like the first input."""
    target, *numbers = op.inputs
    _align_dims(lineage, target, op.outputs[0])
    places = cast("tuple[int, ...]", setting(op, "indexes") or (setting(op, "dim") or 0,))
    _rows(lineage, target, numbers[-1], tuple(numbers[: len(places)]), places)


def _rows(lineage: Lineage, table: int, rows: int, numbers: tuple[int, ...], places: tuple[int, ...]) -> None:
    """``rows`` are those of ``table`` that ``numbers`` say, along ``places``."""
    table_dims, dims, first = lineage.dims[table], lineage.dims[rows], places[0]
    for place in places:
        lineage.atoms.keep_whole(table_dims[place])
    frame = max((lineage.dims[t] for t in numbers), key=len)
    trailing = table_dims[first + len(places) :]
    expected = (*table_dims[:first], *frame, *trailing)
    if places != tuple(range(first, first + len(places))) or len(expected) != len(dims):
        for dim in (*table_dims, *dims):
            lineage.atoms.keep_whole(dim)
        return
    for a, b in zip(expected, dims, strict=True):
        if a and b:
            lineage.atoms.align(a, b)


def _along(lineage: Lineage, op: Op) -> None:
    """Gather and scatter along one dim: the others run on where they are as long."""
    dim, source, result = cast(int, _required_setting(op, "dim")), op.inputs[0], op.outputs[0]
    numbers = op.inputs[1] if len(op.inputs) > 1 else source
    if base_name(op.name) == "gather":
        _align_dims(lineage, numbers, result)
    else:
        _align_dims(lineage, source, result)
        for values in op.inputs[2:]:
            _align_dims(lineage, numbers, values)
    sizes = lineage.segment.tensors[source].dims, lineage.segment.tensors[numbers].dims
    for place, (a, b) in enumerate(zip(lineage.dims[source], lineage.dims[numbers], strict=True)):
        if place != dim and sizes[0][place] == sizes[1][place]:
            lineage.atoms.align(a, b)
    lineage.atoms.keep_whole(lineage.dims[source][dim])


_RULES: dict[str, Callable[[Lineage, Op], None]] = {
    **dict.fromkeys(_VIEWS, _regroup),
    **dict.fromkeys(("expand",), _regroup),
    **dict.fromkeys(("t", "transpose", "permute", "numpy_T", "mT", "movedim", "swapaxes"), _permute),
    **dict.fromkeys(("slice", "select", "narrow", "slice_backward", "select_backward"), _cut),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "tensor_split"), _split),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), _repeat),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "histc", "bincount"), _new),
    **dict.fromkeys(("index", "index_select", "_unsafe_index"), _look_up),
    **dict.fromkeys(("index_add", "index_put", "index_copy", "_unsafe_index_put"), _write_rows),
    **dict.fromkeys(("gather", "scatter", "scatter_add"), _along),
    **dict.fromkeys(("cumsum", "cumprod"), _cumulate),
    **dict.fromkeys(("convolution", "convolution_backward"), _convolution),
    "cat": _cat,
    "stack": _stack,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), _nll),
    **dict.fromkeys(("topk", "sort", "argsort"), _sort),
}
