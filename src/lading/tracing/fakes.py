"""Shapes and storages of an operation's results: torch's fake-tensor rules, remembered.

A model of 80 blocks runs each operation 80 times on tensors of the same geometry. The rule is run once; after that a
result is made directly, which costs a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from lading.ir.graph import OpKind
from lading.ir.opkinds import kind_of

_SMALL = 1 << 16
#: Kinds whose kernels accept any values; of the first, a result's memory order does not depend on sizes.
_ANY_SIZE = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.NORM, OpKind.SOFTMAX})
_SAME_SIZE = frozenset({OpKind.REDUCTION, OpKind.MATMUL, OpKind.CONVOLUTION, OpKind.COPY})
_CPU = torch.device("cpu")
_UNCACHED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view)


@dataclass(frozen=True, slots=True)
class _Result:
    """Geometry of one result; ``alias`` is the number of the tensor argument whose storage it shares, -1 for none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    alias: int


class FakeRunner:
    """Runs operations on fake CPU tensors inside a dispatch mode; remembers what each gave."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Result | tuple[_Result | None, ...]] = {}
        self._cacheable: dict[Any, bool] = {}

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Run ``func(*args, **kwargs)``; ``tensors`` are the tensors among its arguments, in order."""
        key = self._key(func, args, kwargs)
        recorded = None if key is None else self._known.get(key)
        if recorded is not None and tensors:
            mode = tensors[0].fake_mode  # pyright: ignore[reportAttributeAccessIssue]
            with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
                if isinstance(recorded, tuple):
                    outputs = tuple(None if r is None else _make(mode, r, tensors) for r in recorded)
                    return list(outputs) if func._schema.returns[0].type.kind() == "ListType" else outputs
                return _make(mode, recorded, tensors)
        out = _of_real_dtypes(func, args, kwargs, tensors, _run_rule(func, args, kwargs))
        if key is not None:
            out = _corrected(func, args, kwargs, tensors, out)
        if key is not None and (described := _describe(out, tensors)) is not None:
            self._known[key] = described
        return out

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Key of what decides the result's geometry; None where that is more than the arguments' geometry."""
        good = self._cacheable.get(func)
        if good is None:
            good = func.namespace == "aten" and not func._schema.is_mutable and not set(_UNCACHED) & set(func.tags)
            self._cacheable[func] = good
        if not good:
            return None
        parts: list[Any] = [func]
        for arg in args:
            if not _append(parts, arg):
                return None
        for name, arg in kwargs.items():
            parts.append(name)
            if not _append(parts, arg):
                return None
        return tuple(parts)


def flat_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Find the tensors among the arguments or results of an operation: plain, or in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat_tensors(item)


def _append(parts: list[Any], arg: Any) -> bool:
    """Add one argument to a key; False if it cannot be part of one."""
    kind = type(arg)
    if kind is FakeTensor:
        if arg.constant is not None or arg.is_complex() or arg.layout is not torch.strided or arg.fake_device != _CPU:
            return False
        parts.append((arg.dtype, arg.shape, arg.stride(), arg.storage_offset()))
        return True
    if kind in (list, tuple):
        parts.append((kind, len(arg)))
        return all(_append(parts, item) for item in arg)
    if arg is None or kind in (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format):
        parts.append((kind, arg))  # 1, 1.0 and True are equal, but not the same argument
        return True
    return False


def _of_real_dtypes(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> Any:
    """Give results the dtypes that the kernel really gives, where inputs are of several."""
    if len({t.dtype for t in tensors if t.is_floating_point()}) < 2:
        return out
    outs, storages = list(flat_tensors(out)), {t.untyped_storage()._cdata for t in tensors}
    if any(type(t) is not FakeTensor or t.untyped_storage()._cdata in storages for t in outs):
        return out
    with unset_fake_temporarily():
        dtypes = real_dtypes(func, args, kwargs, outs)
    if dtypes is None or all(t.dtype is dtype for t, dtype in zip(outs, dtypes, strict=True)):
        return out
    retyped = {
        id(t): torch.empty_strided(t.shape, t.stride(), dtype=dtype) for t, dtype in zip(outs, dtypes, strict=True)
    }
    return type(out)(retyped.get(id(t), t) for t in out) if isinstance(out, (tuple, list)) else retyped[id(out)]


def _corrected(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> Any:
    """Give a result the strides that the kernel really gives."""
    outs = list(flat_tensors(out))
    storages = {t.untyped_storage()._cdata for t in tensors}
    if any(type(t) is not FakeTensor or t.layout is not torch.strided or t.is_complex() for t in outs):
        return out
    if any(t.untyped_storage()._cdata in storages for t in outs):
        return _corrected_view(func, args, kwargs, tensors, out)
    with unset_fake_temporarily():
        strides = real_strides(func, args, kwargs, outs)
    if strides is None or all(tuple(t.stride()) == s for t, s in zip(outs, strides, strict=True)):
        return out
    restrided = {id(t): torch.empty_strided(t.shape, s, dtype=t.dtype) for t, s in zip(outs, strides, strict=True)}
    return type(out)(restrided.get(id(t), t) for t in out) if isinstance(out, (tuple, list)) else restrided[id(out)]


def _corrected_view(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> Any:
    """Give a view the strides that the kernel really gives."""
    if type(out) is not FakeTensor or len(tensors) != 1 or any(out is t for t in tensors):
        return out
    with unset_fake_temporarily():
        stride = real_view(func, args, kwargs, out)
    return out if stride is None else out.as_strided(out.shape, stride, out.storage_offset())


def _describe(out: Any, tensors: list[torch.Tensor]) -> _Result | tuple[_Result | None, ...] | None:
    """Geometry from which ``_make`` can make the like of ``out``; None where it could not."""
    if isinstance(out, (tuple, list)):
        parts = [None if item is None else _describe(item, tensors) for item in out]
        new = [item.untyped_storage()._cdata for item, p in zip(out, parts, strict=True) if p and p.alias < 0]  # pyright: ignore[reportAttributeAccessIssue]
        all_described = all(item is None or isinstance(p, _Result) for item, p in zip(out, parts, strict=True))
        return tuple(parts) if all_described and len(new) == len(set(new)) else None  # pyright: ignore[reportReturnType]
    if type(out) is not FakeTensor or any(out is t for t in tensors) or out.is_complex() or out.constant is not None:
        return None
    if out.layout is not torch.strided or out.fake_device != _CPU:
        return None
    storage = out.untyped_storage()
    alias = next((i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == storage._cdata), -1)
    result = _Result(out.dtype, tuple(out.shape), tuple(out.stride()), int(out.storage_offset()), alias)
    last = sum((n - 1) * s for n, s in zip(result.shape, result.stride, strict=True))
    size = 0 if 0 in result.shape else (last + 1) * out.element_size()
    return result if alias >= 0 or (result.offset == 0 and storage.nbytes() == size) else None


def _make(mode: FakeTensorMode, result: _Result, tensors: list[torch.Tensor]) -> FakeTensor:
    """Make a fake tensor of a known geometry."""
    if result.alias < 0:
        meta = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
    else:
        meta = torch.empty(0, dtype=result.dtype, device="meta")
        meta.set_(tensors[result.alias].untyped_storage(), result.offset, result.shape, result.stride)  # pyright: ignore[reportArgumentType]
    return FakeTensor(mode, meta, _CPU)


def _run_rule(func: Any, args: Any, kwargs: Any) -> Any:
    """Run torch's own fake rule; for grouped_mm, whose rule knows bf16 only, make the result here."""
    if func is not getattr(torch.ops.aten._grouped_mm, "default", None) or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    rows, columns = a.shape[-2], b.shape[-1]
    if a.dim() == 3 and b.dim() == 3:
        shape: tuple[int, ...] = (a.shape[0], rows, columns)
    else:
        shape = (offsets.shape[0], rows, columns) if a.dim() == b.dim() else (rows, columns)
    unit = 16 // a.element_size()  # the kernel pads rows to 16 bytes
    padded = -(-columns // unit) * unit
    strides = (rows * padded, padded, 1)[-len(shape) :]
    return a.new_empty_strided(shape, strides)


def real_strides(func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[tuple[int, ...]] | None:
    """Strides of the results ``outs`` as the CPU kernel gives them; None where that cannot be found or is not needed.

    A few of torch's fake rules guess the memory order of a result wrongly when inputs are transposed: a sum over it
    would then run in another order than eager's. So where an input is not contiguous, the kernel is run once on small
    stand-ins of the same memory order, and its result's order is taken.

    To be called with no mode active; only the geometry of tensors is read.

    Raises:
        RuntimeError: the kernel refuses the stand-ins. No other strides are guessed: over the 219 families of
            ``benchmarks/capture`` that is one model whose own step fails in the same way.
    """
    kind = kind_of(str(func))
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    if kind not in _ANY_SIZE | _SAME_SIZE or "grouped" in func._schema.name or all(map(_is_plain, inputs)):
        return None
    small = sum(t.numel() for t in (*inputs, *outs)) <= _SMALL
    if not small and (kind not in _ANY_SIZE or "group_norm" in func._schema.name):
        return None
    result = func(*(_stand_in(a, small) for a in args), **{k: _stand_in(a, small) for k, a in kwargs.items()})
    flat = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]
    if len(flat) != len(outs):
        return None
    return [_as_ordered(t, tuple(out.shape), tuple(out.stride())) for t, out in zip(flat, outs, strict=True)]


def real_dtypes(func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> list[torch.dtype] | None:
    """Dtypes of the results ``outs`` as the CPU kernel gives them on small stand-ins; None where that is not found.

    Torch's fake rules say that statistics of a norm of bfloat16 with a float32 weight, as autocast makes, are bfloat16:
    the kernel gives float32. Where the kernel refuses the stand-ins the rule is believed: the executor compares.

    To be called with no mode active.
    """
    random = torch.Tag.nondeterministic_seeded in func.tags
    if random or func.namespace != "aten" or (func._schema.is_mutable and kind_of(str(func)) is not OpKind.NORM):
        return None
    if "group_norm" in func._schema.name:
        small, named = _one_of_each_channel(args, backward="backward" in func._schema.name), kwargs
    else:
        small, named = [_stand_in(a, False) for a in args], {k: _stand_in(a, False) for k, a in kwargs.items()}
    try:
        flat = list(flat_tensors(func(*small, **named)))
    except (RuntimeError, IndexError, ValueError):
        return None
    return [t.dtype for t in flat] if len(flat) == len(outs) else None


def _one_of_each_channel(args: Sequence[Any], *, backward: bool) -> list[Any]:
    """Arguments of a group norm of one sample with one place, as stand-ins for others of as many channels."""
    first = next(i for i, arg in enumerate(args) if type(arg) is int)  # samples, channels, places, groups
    channels, groups = args[first + 1], args[first + 3]

    def shape(number: int, arg: torch.Tensor) -> tuple[int, ...]:
        if backward and number in (2, 3):  # mean and reciprocal deviation
            return (1, groups)
        return (channels,) if arg.dim() == 1 else (1, channels, 1)

    stand_ins = [
        torch.zeros(shape(number, arg), dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg
        for number, arg in enumerate(args[:first])
    ]
    return [*stand_ins, 1, channels, 1, groups, *args[first + 4 :]]


def real_view(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the view ``out`` as torch's own view gives them without memory; None if the fake rule's are right.

    The fake rule of a view keeps other strides for dims of size 1. To be called with no mode active.
    """
    if 1 not in out.shape:
        return None
    view = func(*map(_no_memory, args), **{k: _no_memory(a) for k, a in kwargs.items()})
    stride = tuple(view.stride())
    return None if stride == tuple(out.stride()) else stride


def _no_memory(arg: Any) -> Any:
    """Copy of an argument in which tensors lie on the meta device."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(tuple(arg.shape), tuple(arg.stride()), dtype=arg.dtype, device="meta")


def _is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor lies row by row; dims of size 1 count, by which convolutions tell channels-last memory."""
    return t.dim() < 2 or (
        t.is_contiguous() and tuple(t.stride()) == _dense(tuple(t.shape), tuple(range(t.dim(), 0, -1)))
    )


def _size(n: int, small: bool) -> int:
    """Length of a stand-in's dim for a dim of ``n``: equal lengths stay equal, 1 stays 1."""
    return n if small or n <= 16 else 16 + n % 13


def _stand_in(arg: Any, small: bool) -> Any:
    if isinstance(arg, torch.Tensor):
        return _tensor(arg, small)
    if type(arg) in (list, tuple) and all(type(n) is int for n in arg):
        return [_size(n, small) for n in arg]  # of the operations here only layer norm has sizes
    if isinstance(arg, (list, tuple)):
        return [_stand_in(item, small) for item in arg]
    return arg


def _tensor(t: torch.Tensor, small: bool) -> torch.Tensor:
    """Stand-in of ``t``: zeros in its memory order, dims in the same order, stride 0 and gaps kept."""
    shape = tuple(_size(n, small) for n in t.shape)
    stride = tuple(t.stride()) if small else _dense(shape, tuple(t.stride()))
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    if span > 16 * _SMALL:
        stride, span = _dense(shape, stride), prod(shape)
    return torch.zeros(span, dtype=t.dtype).as_strided(shape, stride)


def _dense(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps for a shape, in the order of the strides ``like``; 0 stays 0."""
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], shape[d] != 1, -d)):
        if like[dim]:
            stride[dim] = step
            step *= shape[dim]
    return tuple(stride)


def _as_ordered(made: torch.Tensor, shape: tuple[int, ...], stated: tuple[int, ...]) -> tuple[int, ...]:
    """Strides for ``shape`` in the memory order of a stand-in's result; those the rule stated if they agree."""
    if tuple(made.shape) == shape:
        return tuple(made.stride())
    has_step_everywhere = all(s for n, s in zip(made.shape, made.stride(), strict=True) if n > 1)
    return _dense(shape, tuple(made.stride())) if has_step_everywhere else stated
