"""Calls of kernels: an operation of the graph, bound once to the tensors it will always work on.

Eager PyTorch allocates each result. Here results have an address before the step, so an operation is bound to its
``out=`` form where that form is a kernel of its own (many are the functional kernel and a copy), to a short sequence of
in-place operations where that is what the functional kernel does inside, and otherwise to the functional kernel and a
copy; only the last needs scratch memory. Every form gives the bits of the functional one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any, cast

import torch

from lading.errors import ProgramError
from lading.ir.graph import Arg, Literal, Op, OpKind, Ref, StepGraph
from lading.ir.reduction import CAUSAL_ROWS, OWN_RUNS, OWN_WORDS
from lading.ir.sharding import OWN_SHARD
from lading.ir.statistics import DECAY, FIRST_SHARE
from lading.ir.update_ops import PREFIX, matrix_rule_of
from lading.optim.rule import ParameterRule
from lading.runtime.scratch import by_signature, bytes_of, extent, inner_bytes, out_bytes, wide_bytes
from lading.runtime.update_kernels import Rate, matrix_kernel, parameter_kernel
from lading.units import KiB

#: Results of one part: small enough to stay in a cache, large enough to hide a call.
PIECE_BYTES = 512 * KiB

Call = Callable[[], object]
#: Where the results of an operation go; None for one that is dropped.
Outs = Sequence[torch.Tensor | None]
#: A call on a part of an operation, with the places of its results by position.
_Piece = tuple[Call, list[tuple[int, torch.Tensor]]]
#: What makes the pieces of an operation each time it runs, and the scratch bytes of the largest. Kept, their views
#: would take up to 84 KB an operation, 2.4 MB of a step of GPT-2; to make one costs some microseconds.
Pieces = tuple[Callable[[], Iterator[_Piece]], int]
View = Callable[[int], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """Bound operation: ``run`` takes nothing; ``scratch_bytes`` is what it allocates beside its tensors."""

    run: Call
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """An operation with its arguments decoded, and the views its results go to (None: not wanted, or an alias)."""

    op: Op
    overload: Any
    args: list[Any]
    kwargs: dict[str, Any]
    outs: list[torch.Tensor | None]

    @property
    def out(self) -> torch.Tensor:
        """View that the only result goes to."""
        assert self.outs[0] is not None
        return self.outs[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Value of an argument by its schema name."""
        for index, argument in enumerate(self.overload._schema.arguments):
            if argument.name == name:
                return self.args[index] if index < len(self.args) else self.kwargs.get(name, argument.default_value)
        return default


def bind(
    op: Op,
    view: View,
    *,
    kind: str = "cpu",
    optimizer: ParameterRule | None = None,
    rate: Rate | None = None,
    parameter: int = -1,
    rank: int = 0,
) -> BoundKernel:
    """Bind an operation to the tensors it will always work on.

    Args:
        view: Gives the tensor of a graph tensor's id; None for an output that has no place and is dropped.
        kind: Kind of the device that runs it. Only on a CPU are large results made part by part.
        optimizer: Settings of an update; None takes those that were planned. Rules for matrices have theirs in the
            operation.
        rate: Numbers of updates that change from step to step.
        parameter: Storage of the parameter of an update, by which ``rate.rules`` has its own.
        rank: Number of the rank whose shard is taken of what is whole.

    Raises:
        ProgramError: this torch has no such operation, or an input has no place.
        ConfigError: an update was planned for another ``optimizer``.
    """
    if op.kind is OpKind.COLLECTIVE:  # run by who knows the other ranks; alone it takes nothing
        return BoundKernel(lambda: None)
    if op.name in _OF_RANK:
        return BoundKernel(_OF_RANK[op.name](op, view, rank))
    if op.name.startswith(PREFIX):
        rates, (args, kwargs) = rate or Rate(), _arguments(op, view)
        if matrix_rule_of(op) is None:
            update = parameter_kernel(op, args, kwargs, kind, optimizer=optimizer, rate=rates, parameter=parameter)
        else:
            out = view(op.outputs[0]) if op.outputs else None
            update = matrix_kernel(op, args, kwargs, out, kind, rates)
        return BoundKernel(rates.noting(update[0], args[1], kwargs.get("coefficient"), parameter), update[1])
    call = decode(op, view)
    label, inputs = op.name.split(".")[1], [t for t in map(view, op.inputs) if t is not None]
    if op.mutates and not op.outputs:
        if kind == "cpu" and op.name == "aten.add_.Tensor" and (parts := _add_narrow(call)) is not None:
            return BoundKernel(*parts)
        return BoundKernel(_in_place(call), out_bytes(label, inputs))
    placed = all(out is not None for out in call.outs) and not op.mutates
    direct = _DIRECT.get(op.name) if kind == "cpu" or op.name not in _CPU_DIRECT else None
    if placed and len(call.outs) == 1 and direct is not None and (run := direct(call)):
        return BoundKernel(run, bytes_of([t for t in inputs if not t.is_contiguous()]) if op.name in _FLATTENING else 0)
    if placed and (name := out_overload(op.name, kind)) is not None:
        dropped = bytes_of(call.outs) if len(call.outs) > 1 else 0  # where it is recomputed for one of its results
        wide = wide_bytes(label, inputs, call.outs) if kind == "cpu" else 0
        return BoundKernel(_into(call, name), out_bytes(label, inputs) + dropped + wide)
    if kind == "cpu" and not op.mutates:
        parts = in_pieces(label, call.overload._op, call.args, call.kwargs, call.outs)
        if parts is not None:
            return BoundKernel(*parts)
    return BoundKernel(_functional(call), bytes_of(call.outs) + inner_bytes(label, inputs, call.outs))


def _own_shard(op: Op, view: View, rank: int) -> Call:
    """Make the call that copies this rank's shard out of a whole."""
    unit, shard = view(op.inputs[0]), view(op.outputs[0])
    assert unit is not None, "it outlives the step"
    assert shard is not None, "its update reads it"
    count = shard.numel()
    return partial(shard.copy_, unit[rank * count : (rank + 1) * count])


def _own_runs(op: Op, view: View, rank: int) -> Call:
    """Make the call that copies this rank's run of each part of columns out of a whole."""
    full, runs = view(op.inputs[0]), view(op.outputs[0])
    assert full is not None, "its operation is about to run"
    assert runs is not None, "it is made for what uses it"
    parts = cast("tuple[int, ...]", op.args[1])
    ranks = cast("int", dict(op.kwargs)["ranks"])
    rank_runs = [part.chunk(ranks, 1)[rank] for part in full.split(parts, 1)]
    places = runs.split([part // ranks for part in parts], 1)

    def copy() -> None:
        for place, run in zip(places, rank_runs, strict=True):
            place.copy_(run)

    return copy


def _causal_rows(op: Op, view: View, rank: int) -> Call:
    """Make the call that fills this rank's rows of a causal mask."""
    mask = view(op.outputs[0])
    assert mask is not None, "attention adds it"

    def fill() -> None:
        torch.triu(mask.fill_(-torch.inf), diagonal=rank * len(mask) + 1, out=mask)

    return fill


def _own_words(op: Op, view: View, rank: int) -> Call:
    """Make the call that finds the rows of this rank's words; other words get the first row, and zero in ``here``."""
    words, rows, rows_here = view(op.inputs[0]), view(op.outputs[0]), view(op.outputs[1])
    assert words is not None, "its operation is about to run"
    assert rows is not None, "an embedding uses it"
    assert rows_here is not None, "what comes of the embedding uses it"
    count = cast("int", op.args[1])

    def find() -> None:
        torch.sub(words, rank * count, out=rows)
        rows_here.copy_(((rows >= 0) & (rows < count)).unsqueeze(-1))
        rows.clamp_(0, count - 1)

    return find


def _statistics(op: Op, view: View, rank: int) -> Call:
    """Make the call that begins this rank's part of a buffer, or weighs it before it is summed over ranks."""
    facts, source, part = dict(op.kwargs), view(op.inputs[0]), view((*op.outputs, *op.mutates)[0])
    assert source is not None, "a buffer outlives the step"
    assert part is not None, "the sum reads it"
    if op.name == FIRST_SHARE:
        return part.zero_ if rank else partial(part.copy_, source)
    factor, ranks = cast("float", facts["factor"]), cast("int", facts["ranks"])
    return partial(part.mul_, factor ** (ranks - 1 - rank))


_OF_RANK = {
    OWN_SHARD: _own_shard, OWN_RUNS: _own_runs, OWN_WORDS: _own_words, CAUSAL_ROWS: _causal_rows,
    FIRST_SHARE: _statistics, DECAY: _statistics,
}  # fmt: skip


def workspace_of(graph: StepGraph, kind: str = "cpu") -> list[int]:
    """Scratch bytes of each operation, in program order: what its binding allocates beside the arena.

    For a device that is not here (``kind``), kernels are taken to allocate inside what a CPU's do.
    """

    def view(tensor: int) -> torch.Tensor:
        t = graph.tensors[tensor]
        base = torch.empty(t.offset + extent(t), dtype=getattr(torch, t.dtype), device="meta")
        return base.as_strided(t.shape, t.stride, t.offset)

    return by_signature(graph, lambda op: bind(op, view, kind=kind).scratch_bytes)


def _overload(name: str) -> Any:
    """Entry of ``torch.ops`` by its name 'namespace.operation.overload'."""
    try:
        namespace, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (ValueError, AttributeError) as error:
        raise ProgramError(
            f"expected an operation of torch {torch.__version__}, found {name!r}; import the library that "
            "registers it, or capture again with this torch"
        ) from error


@cache
def out_overload(name: str, kind: str = "cpu") -> str | None:
    """Name of the overload of ``name`` that writes results into given tensors by a kernel of its own; None without one.

    Generated ``out=`` overloads (a functional call and a copy) do not count. A device that this torch has no kernels
    for is taken to have those of the CPU: kernels with results in place are declared for both.
    """
    key = "CUDA" if kind == "cuda" and torch.cuda.is_available() else "CPU"
    if name in _SAME_KERNEL:
        return _SAME_KERNEL[name]
    if name in _WIDE_OUT:
        return None
    functional = _overload(name)
    functional_inputs = [(a.name, str(a.type)) for a in functional._schema.arguments]
    packet = functional.overloadpacket
    for label in packet.overloads():
        schema = getattr(packet, label)._schema
        inputs = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
        outs = sum(a.is_out for a in schema.arguments)
        if outs != len(functional._schema.returns) or inputs != functional_inputs:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{schema.name}.{label}", key):
            return f"{schema.name.replace('::', '.')}.{label}"
    return None


#: Losses whose out= kernel first makes its result as large as the input, even where it reduces to a number.
_WIDE_OUT = frozenset(
    f"aten.{loss}.default"
    for loss in ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss")
)
#: Functional forms whose own kernel calls exactly this out= kernel, with the number as a 0-dim tensor.
_SAME_KERNEL = {f"aten.{op}.Scalar": f"aten.{op}.out" for op in ("add", "sub", "mul", "div")}

#: Operations whose Python binding in ``torch`` takes the same arguments as the operation; it is 0.5 us faster.
_BINDINGS = frozenset(
    {
        "_log_softmax",
        "_softmax",
        "abs",
        "add",
        "addmm",
        "bmm",
        "cat",
        "clamp",
        "cos",
        "div",
        "eq",
        "exp",
        "ge",
        "gt",
        "index_select",
        "le",
        "log",
        "lt",
        "mean",
        "mm",
        "mul",
        "ne",
        "neg",
        "pow",
        "reciprocal",
        "rsqrt",
        "sigmoid",
        "sin",
        "sqrt",
        "sub",
        "sum",
        "tanh",
        "where",
    }
)
_METHODS = frozenset({"add_", "copy_", "div_", "fill_", "mul_", "sub_", "zero_"})


def decode(op: Op, view: View) -> _Call:
    """Resolve an operation: its overload, arguments with tensors in place of ids, and views its results go to."""
    args, kwargs = _arguments(op, view)
    return _Call(
        op=op,
        overload=_overload(op.name),
        args=args,
        kwargs=kwargs,
        outs=[None if r is None else view(r) for r in op.results],
    )


def _arguments(op: Op, view: View) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments of an operation, with the tensors where they lie."""

    def value(arg: Arg) -> Any:
        match arg:
            case Ref(tensor):
                if (located := view(tensor)) is None:
                    raise ProgramError(
                        f"{op.name} in {op.module or '(loss)'} reads tensor {tensor}, which has no place"
                    )
                return located
            case Literal(kind, text):
                return _literal(kind, text)
            case tuple():
                return [value(item) for item in arg]
            case _:
                return arg

    return [value(a) for a in op.args], {k: value(a) for k, a in op.kwargs}


def _literal(kind: str, text: str) -> Any:
    match kind:
        case "dtype" | "layout" | "memory_format":
            return getattr(torch, text)
        case "device":
            return torch.device(text)
        case "complex":
            return complex(text)
        case "float":
            return float(text)
        case _:
            raise ProgramError(
                f"expected a dtype, device, layout, memory_format, complex or float literal, found {kind!r}"
            )


def _into(call: _Call, name: str) -> Call:
    """Call the out= overload, by the cheapest way to reach it."""
    overload = _overload(name)
    args, kwargs = call.args, call.kwargs
    if call.op.name in _SAME_KERNEL and len(args) > 2:
        args, kwargs = args[:2], {**kwargs, "alpha": args[2]}
    namespace, label, _ = name.split(".")
    if namespace == "aten" and label in _BINDINGS:
        return partial(getattr(torch, label), *args, **kwargs, out=call.out)
    names = [a.name for a in overload._schema.arguments if a.is_out]
    return partial(overload._op, *args, **kwargs, **dict(zip(names, call.outs, strict=True)))


def _in_place(call: _Call) -> Call:
    namespace, label, _ = call.op.name.split(".")
    if namespace == "aten" and label in _METHODS:
        return partial(getattr(call.args[0], label), *call.args[1:], **call.kwargs)
    return partial(call.overload._op, *call.args, **call.kwargs)


def _functional(call: _Call) -> Call:
    """Call the functional kernel into temporaries, and copy those results that have a place."""
    function = partial(call.overload._op, *call.args, **call.kwargs)
    if (
        len(call.outs) == 1
        and call.outs[0] is not None
        and not isinstance(call.overload._schema.returns[0].type, torch.ListType)
    ):
        copy = _copying(call.op, call.outs[0])
        return lambda: copy(function())
    places = tuple((i, _copying(call.op, out)) for i, out in enumerate(call.outs) if out is not None)

    def run() -> None:
        results = list(_flat(function()))
        for index, copy in places:
            if results[index] is not None:  # attention that was asked for no weights; their fake is a tensor
                copy(results[index])

    return run


def _copying(op: Op, out: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Make a function that copies a result of ``op`` to its place, and refuses one that would be rounded there."""
    copy, dtype = out.copy_, out.dtype

    def run(result: torch.Tensor) -> object:
        if result.dtype is not dtype and torch.promote_types(result.dtype, dtype) is not dtype:
            raise ProgramError(
                f"{op.name} in {op.module or '(loss)'}: expected a result in {dtype}, as it was captured, the kernel "
                f"gives {result.dtype}; convert its inputs to one dtype"
            )
        return copy(result)

    return run


def _flat(value: object) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in cast("list[object]", value):
            yield from _flat(item)
    else:
        yield value


def _sequence(*calls: Call) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


# Direct forms: in-place operations equal to what the functional kernel does inside (ATen/native, torch 2.11-2.13).


def _copy(call: _Call) -> Call:
    return partial(call.out.copy_, call.args[0])


def _fill(value: float) -> Callable[[_Call], Call]:
    return lambda call: partial(call.out.fill_, value) if value else call.out.zero_


def _fill_with(name: str) -> Callable[[_Call], Call | None]:
    def direct(call: _Call) -> Call | None:
        value = call.get(name)
        return partial(call.out.fill_, value) if isinstance(value, (bool, int, float)) else None

    return direct


def _relu(call: _Call) -> Call:
    return partial(torch.clamp_min, call.args[0], 0, out=call.out)


def _embedding(call: _Call) -> Call | None:
    weight, indices, out = call.args[0], call.args[1], call.out
    if not out.is_contiguous():
        return None
    rows = out.view(-1, weight.shape[1])
    if indices.is_contiguous():
        return partial(torch.index_select, weight, 0, indices.view(-1), out=rows)
    return lambda: torch.index_select(weight, 0, indices.reshape(-1), out=rows)


def _embedding_backward(call: _Call) -> Call | None:
    """Add the rows of an embedding's gradient in place, in the order of the indices, as the functional kernel does.

    Saves scratch as large as the table.
    """
    grad, indices, out = call.get("grad_output"), call.get("indices"), call.out
    if call.get("scale_grad_by_freq") or out.dtype not in (torch.float32, torch.float64):
        return None
    if not out.is_contiguous():
        return None
    calls = [out.zero_, partial(_add_rows, out, indices, grad)]
    if (padding := call.get("padding_idx")) >= 0:
        calls.append(out[padding].zero_)
    return _sequence(*calls)


def _add_rows(out: torch.Tensor, indices: torch.Tensor, grad: torch.Tensor) -> None:
    out.index_add_(0, indices.reshape(-1), grad.reshape(-1, out.shape[1]))


def _clone_then(call: _Call) -> Call | None:
    """Clone the first argument into the result, then run the in-place form of the same operation there."""
    packet, overload = call.op.name.split(".")[1:]
    if call.args[0].shape != call.out.shape:
        return None
    change = _overload(f"aten.{packet}_.{overload}")
    return _sequence(_copy(call), partial(change._op, call.out, *call.args[1:], **call.kwargs))


def _scatter_into_zeros(slicer: str) -> Callable[[_Call], Call]:
    def direct(call: _Call) -> Call:
        part = _overload(slicer)(call.out, *call.args[2:])
        return _sequence(call.out.zero_, partial(part.copy_, call.args[0]))

    return direct


def _leave(call: _Call) -> Call:
    """Do nothing: uninitialised memory holds whatever is there."""
    return lambda: None


_DIRECT: dict[str, Callable[[_Call], Call | None]] = {
    "aten.clone.default": _copy,
    "aten._to_copy.default": _copy,
    "aten.copy.default": lambda call: partial(call.out.copy_, call.args[1]),
    "aten.zeros.default": _fill(0),
    "aten.zeros_like.default": _fill(0),
    "aten.new_zeros.default": _fill(0),
    "aten.ones.default": _fill(1),
    "aten.ones_like.default": _fill(1),
    "aten.new_ones.default": _fill(1),
    "aten.full.default": _fill_with("fill_value"),
    "aten.full_like.default": _fill_with("fill_value"),
    "aten.new_full.default": _fill_with("fill_value"),
    "aten.scalar_tensor.default": _fill_with("s"),
    "aten.fill.Scalar": _fill_with("value"),
    "aten.relu.default": _relu,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.masked_fill.Scalar": _clone_then,
    "aten.masked_fill.Tensor": _clone_then,
    "aten.index_put.default": _clone_then,
    "aten.slice_backward.default": _scatter_into_zeros("aten.slice.Tensor"),
    "aten.select_backward.default": _scatter_into_zeros("aten.select.int"),
    "aten.empty.memory_format": _leave,
    "aten.empty_like.default": _leave,
    "aten.empty_strided.default": _leave,
    "aten.new_empty.default": _leave,
    "aten.new_empty_strided.default": _leave,
}


#: Direct forms that a GPU's functional kernel does not work like: it sorts the rows it adds.
_CPU_DIRECT = frozenset({"aten.embedding_dense_backward.default"})
#: Direct forms that make their indices one dense row of numbers first.
_FLATTENING = frozenset({"aten.embedding.default", "aten.embedding_dense_backward.default"})


#: Elements of a gradient that are widened at once: few enough for a cache.
_WIDENED = 1 << 18


def _add_narrow(call: _Call) -> tuple[Call, int] | None:
    """Bind ``wide += narrow`` of unlike dtypes part by part, as the kernel first widens all that it adds.

    Returns:
        The call, and its scratch bytes; None where the plain call does as well.
    """
    wide, narrow = call.args[:2]
    if not isinstance(narrow, torch.Tensor) or wide.dtype is narrow.dtype or wide.shape != narrow.shape:
        return None
    if not (wide.is_contiguous() and narrow.is_contiguous()) or call.args[2:] or call.kwargs:
        return None
    step = _WIDENED
    pairs = [
        (wide.view(-1)[at : at + step].add_, narrow.view(-1)[at : at + step]) for at in range(0, prod(wide.shape), step)
    ]

    def run() -> None:
        for add, part in pairs:
            add(part)

    return run, min(prod(wide.shape), step) * wide.element_size()


def in_pieces(
    operation: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], outs: Outs
) -> tuple[Call, int] | None:
    """Bind a kernel that only returns new tensors to run on one part of its results after another.

    Layer norms treat rows, attention treats batch rows and heads one by one. So calling the kernel on a part gives the
    bits of the whole, needs scratch for that part only, and the copy into the result's place finds the part in the
    cache.

    Args:
        operation: Name without namespace and overload.
        function: The functional kernel.
        outs: Where the results go; None for one that is dropped.

    Returns:
        The call, and its scratch bytes; None where the results are small or do not come apart.
    """
    if bytes_of(outs) <= 2 * PIECE_BYTES:
        return None
    match operation:
        case "native_layer_norm":
            pieces = _layer_norm(function, args, outs)
        case "native_layer_norm_backward":
            pieces = _layer_norm_backward(function, args, outs)
        case "_scaled_dot_product_flash_attention_for_cpu":
            pieces = _attention(operation, function, args, kwargs, outs, num_tensors=3)
        case "_scaled_dot_product_flash_attention_for_cpu_backward":
            pieces = _attention(operation, function, args, kwargs, outs, num_tensors=6)
        case _:
            return None
    return None if pieces is None else (_runner(pieces[0]), pieces[1])


def _runner(pieces: Callable[[], Iterator[_Piece]]) -> Call:
    """Make one call that runs each piece and copies its results to their places, by position."""

    def run() -> None:
        for call, places in pieces():
            results: Any = call()
            for index, place in places:
                place.copy_(results[index])
            del results  # before the next call allocates its own

    return run


def _places(outs: Outs) -> list[tuple[int, torch.Tensor]]:
    return [(i, out) for i, out in enumerate(outs) if out is not None]


def _rows(tensors: Sequence[torch.Tensor | None], width: int) -> list[torch.Tensor | None] | None:
    """View each tensor as [rows, width], without a copy; None if one does not lie so."""
    if any(t is not None and not t.is_contiguous() for t in tensors):
        return None
    return [None if t is None else t.view(-1, width) for t in tensors]


def _cuts(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _layer_norm(function: Callable[..., Any], args: Sequence[Any], outs: Outs) -> Pieces | None:
    x, shape, weight, bias, eps = args
    width = prod(shape)
    wide, narrow = _rows([x, outs[0]], width), _rows(outs[1:], 1)
    if wide is None or narrow is None:
        return None
    step = max(1, PIECE_BYTES // (width * x.element_size()))
    rows, places, scales = wide[0], (wide[1], *narrow), [_flat_or_none(t) for t in (weight, bias)]
    assert rows is not None

    def pieces() -> Iterator[_Piece]:
        for cut in _cuts(len(rows), step):
            part = [None if t is None else t[cut] for t in places]
            yield partial(function, rows[cut], [width], *scales, eps), _places(part)

    return pieces, step * (width * x.element_size() + 16)


def _layer_norm_backward(function: Callable[..., Any], args: Sequence[Any], outs: Outs) -> Pieces | None:
    """Part a layer norm's backward: the input's gradient by rows; those of weight and bias, sums over rows, whole."""
    grad, x, shape, mean, rstd, weight, bias, mask = args
    width = prod(shape)
    wide, narrow = _rows([grad, x, outs[0]], width), _rows([mean, rstd], 1)
    if wide is None or narrow is None or outs[0] is None:
        return None
    step = max(1, PIECE_BYTES // (width * x.element_size()))
    scales = [_flat_or_none(t) for t in (weight, bias)]
    later_mask = [False, mask[1] and outs[1] is not None, mask[2] and outs[2] is not None]

    def pieces() -> Iterator[_Piece]:
        for cut in _cuts(x.numel() // width, step):
            g, y, place, m, r = (t[cut] for t in (*wide, *narrow) if t is not None)
            yield partial(function, g, y, [width], m, r, *scales, [True, False, False]), [(0, place)]
        if any(later_mask):
            yield partial(function, *args[:7], later_mask), _places((None, *outs[1:]))

    inner = inner_bytes("native_layer_norm_backward", [grad, x], outs)
    return pieces, max(step * width * x.element_size(), bytes_of(outs[1:]) + inner)


def _flat_or_none(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.reshape(-1)


def _attention(
    operation: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outs: Outs,
    *,
    num_tensors: int,
) -> Pieces | None:
    """Part an attention, forward or backward: some heads of one batch row at a time, or some whole batch rows.

    Args:
        num_tensors: Arguments from the first on that have the dims (batch, heads, ...) and are cut along both.
    """
    tensors, settings = args[:num_tensors], args[num_tensors:]
    batch, heads = tensors[0].shape[:2]
    if any(t.shape[:2] != (batch, heads) for t in tensors):
        return None
    rows, num_heads = _tile(batch, heads, bytes_of(outs) // (batch * heads), torch.get_num_threads())
    cuts = list(product(_cuts(batch, rows), _cuts(heads, num_heads)))

    def at(row: slice, head: slice) -> tuple[list[torch.Tensor], dict[str, Any], list[torch.Tensor | None]]:
        """View what one piece takes, and where its results go."""
        parts = [_part(t, row, head) for t in tensors]
        named = {k: _part(v, row, head) if k == "attn_mask" and v is not None else v for k, v in kwargs.items()}
        return parts, named, [None if out is None else _part(out, row, head) for out in outs]

    def pieces() -> Iterator[_Piece]:
        for cut in cuts:
            parts, named, places = at(*cut)
            yield partial(function, *parts, *settings, **named), _places(places)

    parts, named, places = at(*cuts[0])  # the largest
    masks = [v for v in named.values() if isinstance(v, torch.Tensor)]
    return pieces, bytes_of(places) + inner_bytes(operation, [*parts, *masks], places)


def _tile(batch: int, heads: int, head_bytes: int, threads: int) -> tuple[int, int]:
    """Choose (batch rows, heads) of one part: of parts that keep the threads busy, the smallest from PIECE_BYTES on.

    The kernel gives whole heads to threads, so a part of five heads keeps two threads as long as one of six.
    """
    min_elements = min(max(-(-PIECE_BYTES // head_bytes), 2 * threads), batch * heads)
    tiles = [(1, num_heads) for num_heads in range(1, heads)] + [(rows, heads) for rows in range(1, batch + 1)]
    large = [(rows, num_heads) for rows, num_heads in tiles if rows * num_heads >= min_elements]
    allowed = [(rows, num_heads) for rows, num_heads in large if rows * num_heads <= 4 * min_elements] or large[:1]

    def turns(tile: tuple[int, int]) -> int:
        cuts = product(_cuts(batch, tile[0]), _cuts(heads, tile[1]))
        return sum(-(-((a.stop - a.start) * (b.stop - b.start)) // threads) for a, b in cuts)

    return min(allowed, key=lambda tile: (turns(tile), tile[0] * tile[1]))


def _part(t: torch.Tensor, row: slice, head: slice) -> torch.Tensor:
    """Cut a tensor to ranges of its batch and head dims; a mask of size 1 there, equal for all, is not cut."""
    if t.dim() < 3:
        return t
    t = t if t.shape[0] == 1 else t[row]
    return t if t.shape[1] == 1 else t[:, head]
