"""Seconds of every operation of a StepGraph on one device.

    product      overhead + flops / (peak * efficiency(flops of one matrix) * prod of d/(d + skinny_dim) over m, n, k)
    attention    overhead + flops / rate(flops)
    optimizer    overhead + elements / optimizer_elements_per_s
    the rest     overhead + bytes / rate(bytes)

A rate is looked up by the operation's own name ("gelu_backward", "bmm"), with ".strided" appended when it reads or
writes against the order of memory, then by its cost class ("transcendental"), and at last is the memory bandwidth.
Only the last is a guess, and ``missing_rates`` says where it was made. Rates hold for one operation at a time with
whatever of its operands is in cache as in the probe; contention with moves is the simulator's affair.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from lading.errors import ConfigError
from lading.ir.graph import Arg, Op, OpKind, Ref, StepGraph, Tensor
from lading.ir.machine import Curve, Device
from lading.ir.opkinds import kind_of

#: Suffix of a rate that holds when the innermost dim of an operand is not its contiguous one.
STRIDED = ".strided"


def op_costs(graph: StepGraph, device: Device) -> list[float]:
    """Seconds of each operation, in program order; equal operations are worked out once.

    Raises:
        ConfigError: a product's dtype has no peak on this device.
    """
    known: dict[object, float] = {}
    costs: list[float] = []
    for op in graph.ops:
        key = _signature(graph, op)
        if key not in known:
            known[key] = op_seconds(graph, op, device)
        costs.append(known[key])
    return costs


def op_seconds(graph: StepGraph, op: Op, device: Device) -> float:
    """Seconds of one operation alone on the device, launch included.

    Raises:
        ConfigError: a product's dtype has no peak on this device.
    Ignores: contention with moves, clock and power limits.
    """
    if op.kind in (OpKind.MATMUL, OpKind.CONVOLUTION):
        return device.op_overhead_s + _product_seconds(graph, op, device)
    if op.kind is OpKind.STEP:
        return device.op_overhead_s + _step_elements(graph, op) / device.optimizer_elements_per_s
    if op.kind is OpKind.ATTENTION and (flops := attention_flops(graph, op)) > 0:
        rate = _rate(graph, op, device)
        return device.op_overhead_s + (flops / rate.at(flops) if rate else _unmeasured_attention(graph, op, device))
    size = op_bytes(graph, op)
    rate = _rate(graph, op, device)
    bandwidth = rate.at(size) if rate and size else device.memory_bandwidth_bytes_per_s
    return device.op_overhead_s + size / bandwidth


def missing_rates(graph: StepGraph, device: Device) -> tuple[str, ...]:
    """What the costs of this graph assume for want of a measurement, one sentence each, in order of first use."""
    said: dict[str, None] = {}
    for op in graph.ops:
        if kind_of(op.name) is None and op.kind is not OpKind.STEP:
            said[f"{op.name} is not a known operation: timed as {op.kind.value} on {device.name}"] = None
        if op.kind in (OpKind.MATMUL, OpKind.CONVOLUTION):
            if device.product_efficiency is None and _own_rate(op, device) is None:
                said[f"no product_efficiency for {device.name}: products run at peak"] = None
        elif op.kind is OpKind.ATTENTION:
            if _rate(graph, op, device) is None:
                said[f"no rate of attention on {device.name}: timed as a product of its FLOP"] = None
        elif op.kind is not OpKind.STEP and _rate(graph, op, device) is None:
            said[f"no rate of {op.kind.value} on {device.name}: timed by its bytes at memory bandwidth"] = None
    return tuple(said)


def op_bytes(graph: StepGraph, op: Op) -> int:
    """Bytes an operation moves between memory and the core.

    The captured bytes, except that a lookup reads only the rows it returns, an update in place of some rows touches
    only those, and a copy, fill or zero does not read what it overwrites.
    """
    tensors = graph.tensors
    written = sum(tensors[t].touched_bytes for t in op.outputs)
    if op.kind is OpKind.GATHER and op.outputs:
        largest = max(tensors[t].touched_bytes for t in op.outputs)
        return written + sum(min(tensors[t].touched_bytes, largest) for t in op.inputs)
    if op.kind is OpKind.SCATTER and op.mutates:
        sources = [tensors[t].touched_bytes for t in op.inputs if t not in op.mutates]
        return 3 * max(sources, default=0)
    if op.kind is OpKind.COPY and op.mutates:
        read = sum(tensors[t].touched_bytes for t in op.inputs if t not in op.mutates)
        return read + sum(tensors[t].touched_bytes for t in op.mutates)
    return op.bytes_read + op.bytes_written


def attention_flops(graph: StepGraph, op: Op) -> int:
    """FLOP of an attention: as captured, or from the shapes of q, k and v; 0 if these cannot be told.

    The full square of scores counts, causal or not, and 2.5 times as much in backward (five products, one of them a
    second computing of the scores), so rates of causal kernels are given in the same count.
    """
    if op.flops:
        return op.flops
    backward = "backward" in op.name
    shapes = [graph.tensors[a.tensor].shape for a in op.args if isinstance(a, Ref)][1 if backward else 0 :][:3]
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
        return 0
    (batch, heads, length, dim), (_, _, keys, _), (_, _, _, value_dim) = shapes
    forward = 2 * batch * heads * length * keys * (dim + value_dim)
    return forward * 5 // 2 if backward else forward


class _Product(NamedTuple):
    """``batch`` products of m x k by k x n."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


def _product_seconds(graph: StepGraph, op: Op, device: Device) -> float:
    product = _product(graph, op)
    flops = op.flops or product.flops
    each = max(1.0, flops / product.batch)
    if own := _own_rate(op, device):
        return flops / own.at(each)
    dtype = _dtype(graph, op)
    if dtype not in device.peak_flops_per_s:
        known = ", ".join(sorted(device.peak_flops_per_s))
        raise ConfigError(
            f"{op.name} in {op.module or '(loss)'} is a {dtype} product and {device.name} has a peak only for {known}; "
            f"add device.peak_flops_per_s.{dtype} to the machine file or change the model's dtype"
        )
    share = device.product_efficiency.at(each) if device.product_efficiency else 1.0
    for dim in (product.m, product.k, product.n):
        share *= dim / (dim + device.skinny_dim) if dim else 1.0
    return flops / (device.peak_flops_per_s[dtype] * share)


def _product(graph: StepGraph, op: Op) -> _Product:
    """Shape of a product from its last two matrix arguments; a square of the same FLOP when it has none."""
    shapes = [shape for shape in (graph.tensors[t].shape for t in _operands(op)) if len(shape) >= 2]
    if op.kind is OpKind.CONVOLUTION or len(shapes) < 2:
        side = max(1, round((op.flops / 2) ** (1 / 3)))
        return _Product(1, side, side, side)
    left, right = shapes[-2:]
    if _base(op).startswith("_grouped_mm"):
        groups = (right if len(right) == 3 else left)[0] if 3 in (len(left), len(right)) else 1
        return _Product(groups, max(1, left[-2] // (groups if len(left) == 2 else 1)), left[-1], right[-1])
    return _Product(max(1, prod(left[:-2])), left[-2], left[-1], right[-1])


def _operands(op: Op) -> list[int]:
    """Tensor arguments that are multiplied: the offsets of a grouped product and the bias come elsewhere."""
    found = [a.tensor for a in op.args if isinstance(a, Ref)]
    return found[:2] if _base(op) in ("_grouped_mm", "_scaled_mm", "linear") else found


def _dtype(graph: StepGraph, op: Op) -> str:
    operands = _operands(op) or list(op.inputs)
    return graph.tensors[operands[-1]].dtype


def _step_elements(graph: StepGraph, op: Op) -> int:
    """Elements of the parameter an optimizer step updates: its largest mutated tensor."""
    return max((prod(graph.tensors[t].shape) for t in op.mutates), default=0)


def _unmeasured_attention(graph: StepGraph, op: Op, device: Device) -> float:
    flops = attention_flops(graph, op)
    dtype = graph.tensors[op.inputs[0]].dtype
    peak = device.peak_flops_per_s.get(dtype)
    if peak is None:
        return op_bytes(graph, op) / device.memory_bandwidth_bytes_per_s
    share = device.product_efficiency.at(flops) if device.product_efficiency else 1.0
    return flops / (peak * share)


def _base(op: Op) -> str:
    """``"gelu_backward"`` of ``"aten.gelu_backward.default"``, in-place or not."""
    parts = op.name.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).rstrip("_")


def _own_rate(op: Op, device: Device) -> Curve | None:
    return device.rates.get(_base(op))


def _rate(graph: StepGraph, op: Op, device: Device) -> Curve | None:
    """The most specific measured rate of an operation, None if there is none."""
    names = [_base(op), op.kind.value]
    if _strided(graph, op):
        names = [_base(op) + STRIDED, _base(op), op.kind.value + STRIDED, op.kind.value]
    return next((device.rates[name] for name in names if name in device.rates), None)


def _strided(graph: StepGraph, op: Op) -> bool:
    return any(_is_strided(graph.tensors[t]) for t in (*op.inputs, *op.outputs, *op.mutates))


def _is_strided(tensor: Tensor) -> bool:
    """Whether walking the last dim jumps over memory."""
    return bool(tensor.shape) and tensor.shape[-1] > 1 and tensor.stride[-1] > 1


def _signature(graph: StepGraph, op: Op) -> object:
    """Equal for operations of equal cost."""
    tensors = graph.tensors

    def geometry(ids: tuple[int, ...]) -> tuple[object, ...]:
        return tuple((tensors[t].dtype, tensors[t].shape, tensors[t].stride) for t in ids)

    args = tuple(_geometry_of(tensors, a) for a in op.args)
    return (op.name, op.kind, op.flops, op.bytes_read, op.bytes_written, args, geometry(op.inputs),
            geometry(op.outputs), geometry(op.mutates))  # fmt: skip


def _geometry_of(tensors: tuple[Tensor, ...], arg: Arg) -> object:
    """Which positions hold tensors, and of what shape."""
    return (tensors[arg.tensor].dtype, tensors[arg.tensor].shape) if isinstance(arg, Ref) else None
