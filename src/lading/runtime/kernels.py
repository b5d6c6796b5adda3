"""Kernels: an operation of the graph, bound once to the tensors it will always work on.

Eager PyTorch allocates each result. Here results have an address before the step, so an operation is bound to its
``out=`` form where that form is a kernel of its own (many are the functional kernel and a copy), to a short sequence
of in-place operations where that is what the functional kernel does inside, and otherwise to the functional kernel
and a copy; only the last needs scratch memory. Every form gives the bits of the functional one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, cast

import torch

from lading.errors import ProgramError
from lading.ir.graph import Arg, Literal, Op, Ref, StepGraph
from lading.ir.updates import PREFIX, matrix_rule_of
from lading.optim.rule import ParameterRule
from lading.runtime.pieces import in_pieces
from lading.runtime.scratch import by_signature, bytes_of, extent, inner_bytes, out_bytes, wide_bytes
from lading.runtime.updates import matrix_kernel, parameter_kernel

Call = Callable[[], object]
View = Callable[[int], torch.Tensor | None]


@dataclass
class Rate:
    """The learning rate of the current step, shared by all updates; that of rules for matrices apart."""

    value: float = 0.0
    matrices: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A bound operation: ``run`` takes nothing; ``scratch_bytes`` is what it allocates beside its tensors."""

    run: Call
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Call:
    """Decoded arguments of one operation and the views its results go to (None: not wanted, or an alias)."""

    op: Op
    overload: Any
    args: list[Any]
    kwargs: dict[str, Any]
    outs: list[torch.Tensor | None]

    @property
    def out(self) -> torch.Tensor:
        """The only result."""
        assert self.outs[0] is not None
        return self.outs[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Argument by its schema name."""
        for index, argument in enumerate(self.overload._schema.arguments):
            if argument.name == name:
                return self.args[index] if index < len(self.args) else self.kwargs.get(name, argument.default_value)
        return default


def bind(
    op: Op, view: View, *, kind: str = "cpu", optimizer: ParameterRule | None = None, rate: Rate | None = None
) -> Kernel:
    """Bind an operation to tensors.

    Args:
        view: Tensor of the graph by id; None for an output that has no place and is dropped.
        kind: Of the device that runs it. Only on a CPU are large results made in pieces.
        optimizer: Settings of an update; None takes those that were planned. Rules for matrices have theirs in the
            operation.
        rate: Learning rates of updates.

    Raises:
        ProgramError: this torch has no such operation, or an input has no place.
        ConfigError: an update was planned for another ``optimizer``.
    """
    if op.name.startswith(PREFIX):
        rates = rate or Rate()
        if matrix_rule_of(op) is None:
            return Kernel(*parameter_kernel(op, *_arguments(op, view), kind, optimizer, lambda: rates.value))
        out = view(op.outputs[0]) if op.outputs else None
        return Kernel(*matrix_kernel(op, *_arguments(op, view), out, kind, lambda: rates.matrices))
    call = decode(op, view)
    label, inputs = op.name.split(".")[1], [t for t in map(view, op.inputs) if t is not None]
    if op.mutates and not op.outputs:
        if kind == "cpu" and op.name == "aten.add_.Tensor" and (parts := _add_narrow(call)) is not None:
            return Kernel(*parts)
        return Kernel(_in_place(call), out_bytes(label, inputs))
    placed = all(out is not None for out in call.outs) and not op.mutates
    direct = _DIRECT.get(op.name) if kind == "cpu" or op.name not in _CPU_DIRECT else None
    if placed and len(call.outs) == 1 and direct is not None and (run := direct(call)):
        return Kernel(run, bytes_of([t for t in inputs if not t.is_contiguous()]) if op.name in _FLATTENING else 0)
    if placed and (name := out_overload(op.name, kind)) is not None:
        dropped = bytes_of(call.outs) if len(call.outs) > 1 else 0  # where it is recomputed for one of its results
        wide = wide_bytes(label, inputs, call.outs) if kind == "cpu" else 0
        return Kernel(_into(call, name), out_bytes(label, inputs) + dropped + wide)
    if kind == "cpu" and not op.mutates:
        parts = in_pieces(label, call.overload._op, call.args, call.kwargs, call.outs)
        if parts is not None:
            return Kernel(*parts)
    return Kernel(_functional(call), bytes_of(call.outs) + inner_bytes(label, inputs, call.outs))


def workspace_of(graph: StepGraph, kind: str = "cpu") -> list[int]:
    """Scratch bytes of each operation, in program order: what its binding allocates beside the arena.

    For a device that is not here (``kind``), what kernels allocate inside is taken to be what a CPU's do.
    """

    def view(tensor: int) -> torch.Tensor:
        t = graph.tensors[tensor]
        base = torch.empty(t.offset + extent(t), dtype=getattr(torch, t.dtype), device="meta")
        return base.as_strided(t.shape, t.stride, t.offset)

    return by_signature(graph, lambda op: bind(op, view, kind=kind).scratch_bytes)


def _overload(name: str) -> Any:
    """``torch.ops`` entry of 'namespace.operation.overload'."""
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
    """The overload of ``name`` that writes results into given tensors by a kernel of its own, or None.

    Generated ``out=`` overloads (a functional call and a copy) do not count. A device that this torch has no kernels
    for is taken to have those of the CPU: kernels with results in place are declared for both.
    """
    key = "CUDA" if kind == "cuda" and torch.cuda.is_available() else "CPU"
    if name in _SAME_KERNEL:
        return _SAME_KERNEL[name]
    if name in _WIDE_OUT:
        return None
    functional = _overload(name)
    wanted = [(a.name, str(a.type)) for a in functional._schema.arguments]
    packet = functional.overloadpacket
    for label in packet.overloads():
        schema = getattr(packet, label)._schema
        given = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
        outs = sum(a.is_out for a in schema.arguments)
        if outs != len(functional._schema.returns) or given != wanted:
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
    """The operation, its arguments with tensors in place of their ids, and where its results go."""
    args, kwargs = _arguments(op, view)
    return _Call(
        op=op,
        overload=_overload(op.name),
        args=args,
        kwargs=kwargs,
        outs=[None if r is None else view(r) for r in op.results],
    )


def _arguments(op: Op, view: View) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments, tensors where they lie."""

    def value(arg: Arg) -> Any:
        match arg:
            case Ref(tensor):
                if (found := view(tensor)) is None:
                    raise ProgramError(
                        f"{op.name} in {op.module or '(loss)'} reads tensor {tensor}, which has no place"
                    )
                return found
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
    """The out= overload, by the cheapest way to reach it."""
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
    """Call into temporaries and copy those that have a place."""
    function = partial(call.overload._op, *call.args, **call.kwargs)
    if (
        len(call.outs) == 1
        and call.outs[0] is not None
        and not isinstance(call.overload._schema.returns[0].type, torch.ListType)
    ):
        copy = call.outs[0].copy_
        return lambda: copy(function())
    places = tuple((i, out.copy_) for i, out in enumerate(call.outs) if out is not None)

    def run() -> None:
        results = list(_flat(function()))
        for index, copy in places:
            copy(results[index])

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
    """Rows are added in the order of the indices, as the functional kernel does; saves a table of scratch."""
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
    """``x.clone()`` and the in-place form of the same operation."""
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
    """Uninitialised memory: whatever is there."""
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
    """``wide += narrow`` in pieces, for the kernel widens all that it adds; None where the plain call does as well."""
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
