"""Seconds of every operation of a StepGraph on one device.

    on a GPU whose kernels were fitted    overhead + what a rank's kernel takes there (``lading.cost.kernels``)
    optimizer    as the rest if there is a rate "step", else overhead + elements / optimizer_elements_per_s
    of matrices  products of the rule, 9 n^3 of a decomposition at a share of the peak, and elementwise passes
    the rest     overhead + what its rates say (``lading.cost.curves``)
    cold         between the price with operands in cache and from memory, by when they were last touched
                 (``lading.cost.reuse``), where the machine file has ``cold_rates``

If a rate is not known, the memory bandwidth is assumed in its place, and ``missing_rates`` says where. Contention with
moves is not counted here but in the simulator.

[Note: bytes] An operation moves the bytes of its tensors, except those that it does not touch (``op_bytes``), in rows
that may be scattered (``walk``).

[Note: copies of what may not count] An update on the host by a guess (``lading.ir.guess``) changes copies.
A byte of a copy is read, and its place is fetched and written. With AdamW's update of 48 million elements in float32,
28 bytes each, copies of 12 took 1.08 of its time on one core of an EPYC and 1.29 on two: 2.5 and 3.0 times their bytes.
Copying as many elements at a time as fit a cache took as long, or longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from lading.cost.collective import collective_s
from lading.cost.curves import LOW, low_of, measured, rate_of
from lading.cost.kernels import kernel_s, memory_s
from lading.cost.matrix_updates import eigen_s, eigen_share
from lading.cost.product import product_s
from lading.cost.reuse import cold_bytes, touched_bytes
from lading.cost.topology import group_of_ranks
from lading.errors import ConfigError
from lading.ir import fusing
from lading.ir.graph import Arg, Op, OpKind, Phase, Ref, StepGraph, Tensor
from lading.ir.guess import speculated
from lading.ir.machine import COLD_PRODUCT, PACKED_COLUMNS, UPDATE_NUMBERS, WHOLE, Device, Machine
from lading.ir.opkinds import base_name, kind_of
from lading.ir.reduction import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, SCATTER_SUM, TRANSFERS, joined_ranks, ranks_of
from lading.ir.sharding import GATHER_INTO, UNSHARD
from lading.ir.stack import Stack
from lading.ir.update_ops import matrices_of, rule_of, work_of
from lading.ir.work import Attention, Kernel, Product, Stage
from lading.optim.rule import AT_ONCE, MatrixRule, ParameterRule, UpdateWork

#: Classes that take each element once, wherever it lies.
_POINTWISE = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL})
#: Operations that give a tensor memory and touch none of it.
ALLOCATIONS = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided"))
#: Passes over memory of a copy that an update on a guess makes ([Note: copies of what may not count]).
_COPY_PASSES = 3.0
_FILLS = ("new_", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


class Walk(NamedTuple):
    """Order in which an operation goes through its tensors' memory.

    Attributes:
        runs: Number of pieces of contiguous rows; 1 for a dense tensor.
        strided: Whether the rows are scattered.
    """

    runs: int
    strided: bool


def op_bytes(graph: StepGraph, op: Op) -> int:
    """Bytes that an operation moves between memory and the processor.

    These are the captured bytes, except that a lookup reads only the rows it returns, an in-place update of some rows
    touches only those, a copy or fill does not read what it overwrites, and ``zeros_like`` does not read its argument.
    """

    def touched(tensor: int) -> int:
        return graph.tensors[tensor].touched_bytes

    written = sum(map(touched, op.outputs))
    base = base_name(op.name)
    if base in ALLOCATIONS:
        return 0
    if base.startswith(_FILLS):
        return written
    if op.kind is OpKind.GATHER and op.outputs:
        largest = max(touched(t) for t in op.outputs)
        return written + sum(min(touched(t), largest) for t in op.inputs)
    if op.kind is OpKind.SCATTER and op.mutates:
        return 3 * max((touched(t) for t in op.inputs if t not in op.mutates), default=0)
    if op.kind is OpKind.COPY and op.mutates:
        return sum(touched(t) for t in op.inputs if t not in op.mutates) + sum(map(touched, op.mutates))
    return op.bytes_read + op.bytes_written


def walk(graph: StepGraph, op: Op) -> Walk:
    """Find how many contiguous pieces an operation goes through, and whether it goes against the order of memory.

    Pointwise operations and copies are walked in the order of their result's memory, merging dims that are contiguous
    in every operand, as ATen's iterator does. A reduction over dims before the last, and any other operation that has
    an operand whose last dim is not contiguous, counts as strided.
    """
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outputs, *op.mutates)]
    if op.kind is OpKind.REDUCTION:
        return Walk(1, _keeps_last_dim(graph, op))
    result = next((graph.tensors[t] for t in (*op.outputs, *op.mutates)), None)
    pointwise = op.kind in _POINTWISE or (op.kind is OpKind.COPY and len(op.inputs) == 1)
    if result is None or not pointwise or any(len(t.shape) > len(result.shape) for t in tensors):
        return Walk(1, any(bool(t.shape) and t.shape[-1] > 1 and t.stride[-1] > 1 for t in tensors))
    return _iterate(result, [_broadcast(t, result.shape) for t in tensors])


def _broadcast(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor that is broadcast to ``shape``."""
    missing = len(shape) - len(tensor.shape)
    strides = (s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride, strict=True))
    return (*(0,) * missing, *strides)


def _iterate(result: Tensor, strides: list[tuple[int, ...]]) -> Walk:
    dims = sorted((d for d, n in enumerate(result.shape) if n > 1), key=lambda d: result.stride[d])
    if not dims:
        return Walk(1, False)
    first = dims[0]
    steps = [s[first] for s in strides]
    if any(step > 1 for step in steps) or (all(step == 0 for step in steps[:-1]) and len(steps) > 1):
        return Walk(1, True)
    outer_dims = _merge(result.shape, _merge(result.shape, dims, strides), strides)
    return Walk(prod(result.shape[d] for d in outer_dims), False)


def _merge(shape: tuple[int, ...], dims: list[int], strides: list[tuple[int, ...]]) -> list[int]:
    """Dims that remain after merging into the innermost dim those that are contiguous with it in every operand."""
    for position, inner in enumerate(dims):
        outer = dims[position + 1] if position + 1 < len(dims) else None
        if outer is None or any(s[outer] != s[inner] * shape[inner] for s in strides):
            return dims[position + 1 :]
    return []


def _keeps_last_dim(graph: StepGraph, op: Op) -> bool:
    """Whether a reduction is over dims before the last, as a bias gradient is."""
    rank = len(graph.tensors[op.inputs[0]].shape) if op.inputs else 0
    dims = op.args[1] if len(op.args) > 1 else None
    dims = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    return (
        isinstance(dims, tuple)
        and bool(dims)
        and all(isinstance(d, int) and d % max(rank, 1) != rank - 1 for d in dims)
    )


#: Collectives of shards as ``lading.runtime.job`` does them, and those of a library that send as many bytes.
_GATHERS, _SCATTERS = ("gather_shards", "all_gather"), ("sum_shards", "all_to_all", "reduce_scatter")
#: What Python takes for a step of a torch optimizer on one parameter, and for each of its operations. Measured: 38 to
#: 110 us for 3 to 19 operations, torch 2.13 (benchmarks/optimizers/torch_updates.py).
_UPDATE_S, _CALL_S = 25e-6, 4.5e-6
#: PyTorch that runs a step's operations one by one, by its kernel of attention.
_EAGER = {
    kernel: Stack(name="torch-eager", title="PyTorch, eager", fusion="eager", attention=kernel)
    for kernel in ("flash1", "flash2", "cudnn")
}
#: Of what BLAS packs for a product (``packed_columns``): its rows as columns, and the depth up to which it packs less.
_PACKED_ROWS, _SHALLOW = 200, 256


def op_costs(graph: StepGraph, device: Device) -> list[float]:
    """Seconds of each operation in program order, with its operands in cache or memory as the step left them.

    Raises:
        ConfigError: a product's dtype has no peak on this device.
    """
    seconds_by_key: dict[object, float] = {}
    costs: list[float] = []
    missed = cold_bytes(graph, device.cache_bytes) if device.cold_rates else [0] * len(graph.ops)
    for op, cold in zip(graph.ops, missed, strict=True):
        if op.kind is OpKind.COLLECTIVE:  # no work of the device's
            costs.append(0.0)
            continue
        key = (_signature(graph, op), cold)
        if key not in seconds_by_key:
            seconds_by_key[key] = op_seconds(graph, op, device) + (_fetch_s(graph, op, device, cold) if cold else 0.0)
        costs.append(seconds_by_key[key])
    return costs


def _fetch_s(graph: StepGraph, op: Op, device: Device, cold: int) -> float:
    """Seconds that an operation takes longer because some of the bytes that it touches are not in cache.

    Ignores: attention and updates of matrices, which use each byte many times.
    """
    if op.kind is OpKind.ATTENTION or work_of(graph, op) is not None:
        return 0.0
    if op.kind in (OpKind.MATMUL, OpKind.CONVOLUTION):
        rate = device.cold_rates.get(COLD_PRODUCT)
        return cold / rate.at(cold) if rate else 0.0
    rates = {**device.rates, **device.cold_rates}
    uncached = dataclasses.replace(device, rates=rates, cache_bytes=0, cold_rates={})
    share = cold / sum(touched_bytes(graph, op).values())
    return share * max(0.0, op_seconds(graph, op, uncached) - op_seconds(graph, op, device))


def fused_costs(graph: StepGraph, device: Device) -> list[float]:
    """Seconds of each operation where runs of light ones are compiled into one call each (``lading.ir.fusing``).

    A run is launched once. Each of its operations takes a share of its own time: that of its bytes which the run still
    reads or writes.

    Raises:
        ConfigError: a product's dtype has no peak on this device.
    Ignores: where a Program cuts runs, and loops bound by arithmetic.
    """
    costs = op_costs(graph, device)
    last = fusing.last_reads(graph)
    for run in fusing.runs(graph):
        for index, share in zip(run, fusing.remaining(graph, run, last), strict=True):
            launch = device.op_overhead_s if index == run.start else 0.0
            costs[index] = launch + max(0.0, costs[index] - device.op_overhead_s) * share
    return costs


def device_costs(graph: StepGraph, machine: Machine, *, fused: bool = False) -> list[float]:
    """Seconds of each operation on the machine's device, and of each collective between ranks of the step.

    Where ranks are processes of one host, the machine is what one of them has (``Machine.shared_by``).

    Raises:
        ConfigError: as ``op_costs``, or nothing is known of collectives among so many ranks.
    """
    costs = (fused_costs if fused else op_costs)(graph, machine.device)
    ranks = ranks_of(graph)
    if ranks == 1:
        return costs
    for index in graph.collectives:
        op = graph.ops[index]
        name, count = _collective_of(op, machine)
        if not machine.links and f"{name}.{count}" not in machine.collectives:
            raise ConfigError(
                f"{machine.name}: expected the speed of collectives among {count} ranks, the machine says nothing of "
                f"it ({name}); measure it with: lading probe --ranks {ranks}"
            )
        costs[index] = collective_s(name, op.bytes_written, group_of_ranks(count, machine), machine)
    return costs


def crowding(machine: Machine) -> dict[bool, tuple[float, ...]]:
    """Factors on seconds of kernels while 1, 2, ... of the host's processes compute; 1 while all of them do.

    Returns:
        {whether a kernel is a product: factors}; {} if the machine is not the share of one of several processes.
    """
    shared = machine.processes
    if shared is None or shared.computing == 1 or machine.device.kind != "cpu":
        return {}
    factors: dict[bool, tuple[float, ...]] = {}
    for product, cause in ((True, "products"), (False, "memory-bound")):
        slower = [shared.slower(cause, number) for number in range(1, shared.computing + 1)]
        factors[product] = tuple(slowdown / slower[-1] for slowdown in slower)
    return factors


def send_s(size_bytes: int, machine: Machine) -> float:
    """Seconds of sending so many bytes from one rank to another."""
    return collective_s("send", size_bytes, group_of_ranks(2, machine), machine)


def _collective_of(op: Op, machine: Machine) -> tuple[str, int]:
    """Name under which the speed of a collective is looked up, and number of its ranks.

    It is the first of the operation's candidates that was measured on the machine, else the last candidate.
    """
    if op.name in TRANSFERS:
        return "send", 2
    count = joined_ranks(op)
    gathers, scatters = dict.fromkeys((UNSHARD, GATHER_INTO, ALL_GATHER), _GATHERS), (REDUCE_SCATTER, SCATTER_SUM)
    exchanges = {ALL_TO_ALL: ("all_to_all", "all_gather")}  # which receive as much
    names = {**gathers, **dict.fromkeys(scatters, _SCATTERS), **exchanges}.get(op.name, ("all_reduce",))
    return next((name for name in names if f"{name}.{count}" in machine.collectives), names[-1]), count


def slower_beside(graph: StepGraph, machine: Machine) -> dict[int, float]:
    """Share by which a rank's computing and a collective of the step take longer beside each other, by operation.

    Where ranks are processes of one host, the collectives of all groups are work of the same processors, which all
    threads that are ready take in turns.
    """
    shared, slower = machine.processes, dict[int, float]()
    if shared is None:
        return slower
    computing = shared.computing * max(1, machine.device.num_threads if machine.device.kind == "cpu" else 1)
    for index in graph.collectives:
        name, count = _collective_of(graph.ops[index], machine)
        busy = shared.busy.get(f"{name}.{count}", float(count)) * ranks_of(graph) / count
        slower[index] = max(0.0, (computing + busy) / max(computing, shared.cores) - 1.0)
    return slower


def placed_costs(graph: StepGraph, machine: Machine, *, fused: bool = False) -> list[float]:
    """Seconds of each operation where it runs: on the device (``fused_costs`` there), or on the host if hosted.

    Raises:
        ConfigError: as ``op_costs``, or operations are to run on a host of which nothing is known.
    """
    costs = device_costs(graph, machine, fused=fused)
    if graph.hosted:
        for index, seconds in hosted_costs(graph, graph.hosted, machine).items():
            costs[index] = seconds
    return costs


def hosted_costs(graph: StepGraph, ops: Iterable[int], machine: Machine) -> dict[int, float]:
    """Seconds of operations on the host's processors, by operation.

    The first to change a value on a guess copies it before ([Note: copies of what may not count]).

    Raises:
        ConfigError: as ``host_processors``.
    """
    host, guessed = host_processors(machine), set(speculated(graph))
    costs, seconds_by_key = dict[int, float](), dict[object, float]()
    for index in ops:
        op = graph.ops[index]
        tensors = map(graph.tensors.__getitem__, (*op.inputs, *op.mutates))
        key = (op.name, op.kind, tuple((t.shape, t.dtype) for t in tensors))
        if key not in seconds_by_key:
            seconds_by_key[key] = op_seconds(graph, op, host)
        copied = guessed.intersection(graph.op_writes[index])
        guessed -= copied
        copied_bytes = sum(graph.storages[s].size_bytes for s in copied)
        costs[index] = seconds_by_key[key] + _COPY_PASSES * copied_bytes / host.memory_bandwidth_bytes_per_s
    return costs


def host_processors(machine: Machine) -> Device:
    """Device that stands for the host's processors, for pricing: their bandwidth and minimum time of an operation.

    Raises:
        ConfigError: the machine says nothing of them, or has no memory of the host to work in.
    """
    host, tier = machine.host_device, machine.tier(machine.host_tier)
    if host is None or tier is None:
        raise ConfigError(
            f"expected a [host_device] and a tier with host_computes to run operations on the host, {machine.name} "
            "lacks one; add it to the machine file, or plan again"
        )
    return Device(
        name=host.name,
        kind="cpu",
        memory_bytes=tier.capacity_bytes,
        memory_bandwidth_bytes_per_s=host.memory_bandwidth_bytes_per_s,
        op_overhead_s=machine.device.op_overhead_s,
        peak_flops_per_s={},
        optimizer_elements_per_s=host.optimizer_elements_per_s,
        num_threads=host.num_threads,
    )


def op_seconds(graph: StepGraph, op: Op, device: Device) -> float:
    """Seconds of one operation alone on the device, launch included.

    Raises:
        ConfigError: a product's dtype has no peak on this device.
    Ignores: contention with moves, clock and power limits.
    """
    if op.kind is OpKind.STEP and (matrices := work_of(graph, op)) is not None:
        return _matrices_seconds(graph, op, device, matrices)
    kernel = kernel_of(graph, op)
    if op.kind is OpKind.STEP and device.gpu is None and rate_of(kernel, device) is None:
        launch_s = device.op_overhead_s + _launches_s(graph, op, device)
        return launch_s + _step_elements(graph, op) / device.optimizer_elements_per_s
    if not kernel.bytes_read + kernel.bytes_written:
        return device.op_overhead_s  # gives a tensor memory, and touches none of it
    return (
        device.op_overhead_s + kernel_s(kernel, device, _EAGER[_attention_kernel(op)]) + _launches_s(graph, op, device)
    )


def kernel_of(graph: StepGraph, op: Op) -> Kernel:
    """Convert an operation of a step to the kernel of a rank that is alone, with its walk through memory."""
    size, path = op_bytes(graph, op), walk(graph, op)
    written = sum(graph.tensors[t].touched_bytes for t in dict.fromkeys((*op.outputs, *op.mutates)))
    if op.kind is OpKind.SCATTER and op.mutates:
        written = size // 3  # of a table only the rows that are added to
    detail: Product | Attention | None = None
    stage = Stage.FORWARD if op.phase is Phase.FORWARD else Stage.BACKWARD_INPUT
    if op.kind in (OpKind.MATMUL, OpKind.CONVOLUTION):
        detail = _product(graph, op)
        left = graph.tensors[operands[-2]] if len(operands := _operands(op)) > 1 else None
        if stage is not Stage.FORWARD and left is not None and left.shape and left.stride[-1] > 1:
            stage = Stage.BACKWARD_WEIGHT  # its left operand is turned: a gradient or an activation by its tokens
    elif op.kind is OpKind.ATTENTION:
        detail = _attention(graph, op)
    dtype = _dtype(graph, op) if detail else _low_dtype(graph, op) or _dtype(graph, op)
    written = min(size, written)
    name = "aten.clone.default" if _copies_in_order(graph, op) else op.name
    return Kernel(
        name, op.kind, stage, op.module, dtype, size - written, written, op.inputs, op.outputs, detail,
        strided=path.strided, runs=path.runs, form=_form(graph, op, detail),
    )  # fmt: skip


def _form(graph: StepGraph, op: Op, detail: Product | Attention | None) -> str:
    """Name of the form of an operation whose price is not that of the plain operation; "" for the plain one.

    A GELU through a tanh took three times as long as through erf (an AMD EPYC). Attention without a mask takes less for
    each of its FLOP, as kernels compute part of what a causal mask leaves out. A product has its layout, "N" for an
    operand in the order of memory and "T" for a turned one: where a processor has no 16-bit products, "NN" took ten
    times as long as "NT" in bfloat16.
    """
    if isinstance(detail, Attention):
        return "" if detail.causal else WHOLE
    if isinstance(detail, Product):
        operands = [graph.tensors[t] for t in _operands(op)[-2:]]
        return "".join("T" if t.stride and t.stride[-1] > 1 else "N" for t in operands)
    approximation = dict(op.kwargs).get("approximate", "none")
    return approximation if isinstance(approximation, str) and approximation != "none" else ""


def _copies_in_order(graph: StepGraph, op: Op) -> bool:
    """Whether an operation joins tensors whose memory is copied whole, one after another, as a clone copies one."""
    dim = op.args[1] if len(op.args) > 1 else 0
    if base_name(op.name) != "cat" or not op.outputs or not isinstance(dim, int):
        return False
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outputs)]
    joined = graph.tensors[op.outputs[0]].shape
    return prod(joined[: dim % len(joined)]) == 1 and all(map(_is_contiguous, tensors))


def _is_contiguous(tensor: Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _attention(graph: StepGraph, op: Op) -> Attention | None:
    """Shape of an attention; None if its operands do not tell it, so that it is priced by its bytes."""
    backward = "backward" in op.name
    shapes = [graph.tensors[a.tensor].shape for a in op.args if isinstance(a, Ref)][1 if backward else 0 :][:3]
    if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
        return None
    (batch, heads, queries, dim), (_, kv_heads, keys, _), (_, _, _, v_dim) = shapes
    return Attention(batch, heads, kv_heads, queries, keys, dim, v_dim, _is_causal(op), backward)


def _attention_kernel(op: Op) -> str:
    """Kernel that runs an attention on a GPU, as a software stack names it."""
    return "cudnn" if "cudnn" in op.name else "flash1" if "efficient" in op.name else "flash2"


def packed_columns(graph: StepGraph) -> int:
    """Columns of products for which BLAS keeps memory: it takes more whenever a product is wider than all before it.

    Each also packs some rows, about as much as 200 columns. Beyond ``PACKED_COLUMNS`` a product is packed in parts, and
    one that is not deep is packed less deep. Products of 16-bit numbers are not packed there.
    """
    total, widest = 0, 0
    for product in _packed(graph):
        columns = min(product.n, PACKED_COLUMNS) + _PACKED_ROWS
        if product.k <= _SHALLOW:
            columns = columns * 2 // 3
        if columns > widest:
            widest, total = columns, total + columns
    return total


def _packed(graph: StepGraph) -> Iterator[Product]:
    """Products of float32 numbers, in program order."""
    for op in graph.ops:
        if op.kind is OpKind.MATMUL and not _low_dtype(graph, op):
            yield _product(graph, op)
        elif (matrices := work_of(graph, op)) is not None and matrices[0].product_dtype not in LOW:
            yield from (Product(m, n, k) for _, m, n, k in matrices[2].products)


def compiled_products(graph: StepGraph) -> int:
    """Distinct products of 16-bit numbers, for each of which oneDNN compiles code and keeps it."""
    products: set[object] = set()
    for op in graph.ops:
        if op.kind is OpKind.MATMUL and _low_dtype(graph, op):
            operands = [graph.tensors[t] for t in _operands(op)]
            products.add((op.name, tuple((t.dtype, t.shape, t.stride) for t in operands)))
        elif (matrices := work_of(graph, op)) is not None and matrices[0].product_dtype in LOW:
            _, rows, columns = matrices_of(graph, op)
            short, long = sorted((rows, columns))
            products.update((op.name, short, long, kind) for kind in ("gram", "square", "step"))
            if rows > columns:  # the first step reads the matrix against the order of memory
                products.update((op.name, short, long, kind) for kind in ("tall gram", "tall step"))
    return len(products)


def decomposes(graph: StepGraph) -> bool:
    """Whether an update decomposes matrices."""
    return any(matrices is not None and matrices[2].eigen for matrices in (work_of(graph, op) for op in graph.ops))


def missing_rates(graph: StepGraph, device: Device) -> tuple[str, ...]:
    """Say what the costs of this graph assume without a measurement, one sentence each, in order of first use.

    Collectives are left out: they cost what the machine says of them, and a machine that says nothing is refused.
    """
    sentences: dict[str, None] = {}
    for index, op in enumerate(graph.ops):
        if base_name(op.name) in ALLOCATIONS or index in graph.collectives:
            continue
        is_known = kind_of(op.name) is not None or op.name.startswith("c10d.")  # Lading's own, among ranks
        if not is_known and op.kind is not OpKind.STEP:
            sentences[f"{op.name} is not a known operation: timed as {op.kind.value} on {device.name}"] = None
        for sentence in _assumed(graph, op, device):
            sentences[sentence] = None
    return tuple(sentences)


def _assumed(graph: StepGraph, op: Op, device: Device) -> Iterator[str]:
    """Yield what the cost of one operation assumes."""
    if (matrices := work_of(graph, op)) is not None:
        yield from _assumed_of_matrices(matrices, device)
        return
    if device.gpu is not None:
        yield from _assumed_on_gpu(graph, op, device)
        return
    kernel = kernel_of(graph, op)
    low, kind, name = low_of(kernel), op.kind.value, base_name(op.name)
    if op.kind in (OpKind.MATMUL, OpKind.CONVOLUTION):
        known_rate = measured(name, kind, low, device)
        if known_rate is None and op.kind is OpKind.CONVOLUTION:
            yield f"no rate of {name} on {device.name}: timed as a square product of its FLOP"
        if known_rate is None and device.product_efficiency is None:
            yield f"no product_efficiency for {device.name}: products run at peak"
        if low and device.kind == "cpu" and (known_rate is None or not known_rate[1]):
            yield f"no {low} rate of products on {device.name}: timed as float32's times the ratio of the peaks"
        return
    rate = rate_of(kernel, device)
    if rate is None and op.kind is not OpKind.STEP:
        way = "as a product of its FLOP" if op.kind is OpKind.ATTENTION else "by its bytes at memory bandwidth"
        yield f"no rate of {kind} on {device.name}: timed {way}"
    elif low and device.kind == "cpu" and rate_of(kernel, device, low) is None:
        yield f"no {low} rate of {kind} on {device.name}: timed as float32's"


def _assumed_on_gpu(graph: StepGraph, op: Op, device: Device) -> Iterator[str]:
    """Yield what the cost of one operation assumes on a GPU whose kernels were fitted."""
    if op.kind is OpKind.CONVOLUTION:
        yield f"no rate of {base_name(op.name)} on {device.name}: timed as a square product of its FLOP"
    elif op.kind is OpKind.ATTENTION and _attention(graph, op) is None:
        yield f"the shape of {base_name(op.name)} is not known: timed by its bytes on {device.name}"
    elif op.kind is OpKind.ATTENTION and _dtype(graph, op) not in LOW:
        yield f"no attention in {_dtype(graph, op)} was measured on {device.name}: timed at that peak"
    elif op.kind is OpKind.ATTENTION and _attention_kernel(op) == "flash1":
        yield f"memory-efficient attention on {device.name}: timed as the first FlashAttention"


def _assumed_of_matrices(matrices: tuple[MatrixRule, int, UpdateWork], device: Device) -> Iterator[str]:
    """Yield what the cost of an update of matrices assumes."""
    rule, _, work = matrices
    dtype = rule.product_dtype
    low = dtype if dtype in LOW else ""
    rate = measured("mm", OpKind.MATMUL.value, low, device)
    if device.gpu is None and rate is None and device.product_efficiency is None:
        yield f"no product_efficiency for {device.name}: products run at peak"
    if low and device.kind == "cpu" and (rate is None or not rate[1]):
        yield f"no {low} rate of products on {device.name}: timed as float32's times the ratio of the peaks"
    if work.eigen:
        share = min(eigen_share(n, device) for _, n in work.eigen)
        yield f"decompositions of symmetric matrices run at {share:.0%} of {device.name}'s float32 peak"
        yield "updates at which decompositions are due are counted with the mean over updates"


def _low_dtype(graph: StepGraph, op: Op) -> str:
    """The 16-bit float among an operation's tensors, "" if there is none."""
    dtypes = (graph.tensors[t].dtype for t in (*op.inputs, *op.outputs, *op.mutates))
    return next((dtype for dtype in dtypes if dtype in LOW), "")


def _matrices_seconds(graph: StepGraph, op: Op, device: Device, matrices: tuple[MatrixRule, int, UpdateWork]) -> float:
    """Seconds of an update of matrices: the mean over updates where something is due now and then."""
    rule, count, work = matrices
    dtype = rule.product_dtype
    seconds = launches = 0.0
    for times, m, n, k in work.products:
        seconds += times * product_s(Product(m, n, k), dtype, device)
        launches += times
    seconds += eigen_s(work, device)
    _, rows, columns = matrices_of(graph, op)
    size = rows * columns * rule.elementwise_bytes
    rate = device.rates.get("elementwise")
    if device.gpu is not None or rate is None:
        seconds += memory_s(size, "elementwise", device)
    else:
        seconds += size / rate.at(rows * columns * 12)
    return count * (seconds + (launches + work.passes) * device.op_overhead_s)


def _product(graph: StepGraph, op: Op) -> Product:
    """Shape of a product from its last two matrix arguments; a square of the same FLOP when it has none."""
    shapes = [shape for shape in (graph.tensors[t].shape for t in _operands(op)) if len(shape) >= 2]
    if op.kind is OpKind.CONVOLUTION or len(shapes) < 2:
        side = max(1, round((op.flops / 2) ** (1 / 3)))
        return Product(side, side, side)
    left, right = shapes[-2:]
    if base_name(op.name).startswith("_grouped_mm"):
        groups = (right if len(right) == 3 else left)[0] if 3 in (len(left), len(right)) else 1
        return Product(max(1, left[-2] // (groups if len(left) == 2 else 1)), right[-1], left[-1], groups)
    return Product(left[-2], right[-1], left[-1], max(1, prod(left[:-2])))


def _operands(op: Op) -> list[int]:
    """Tensor arguments that are multiplied: the offsets of a grouped product and the bias come elsewhere."""
    operands = [a.tensor for a in op.args if isinstance(a, Ref)]
    return operands[:2] if base_name(op.name) in ("_grouped_mm", "_scaled_mm", "linear") else operands


def _dtype(graph: StepGraph, op: Op) -> str:
    """Dtype of what a product multiplies, or of the first tensor of another operation."""
    tensors = (
        (_operands(op) or list(op.inputs))[-1:]
        if op.kind in (OpKind.MATMUL, OpKind.CONVOLUTION)
        else [*op.inputs, *op.outputs]
    )
    return graph.tensors[tensors[0]].dtype if tensors else ""


def _step_elements(graph: StepGraph, op: Op) -> float:
    """Elements of AdamW's update that read and write as much as this one, of its largest mutated tensor."""
    largest = max((prod(graph.tensors[t].shape) for t in op.mutates), default=0)
    rule, shape = rule_of(op), graph.tensors[op.inputs[0]].shape
    if not isinstance(rule, ParameterRule) or not prod(shape):
        return largest
    numbers = 3 + rule.passes + 2 * rule.state_numbers(shape) / prod(shape)
    return largest * (numbers / UPDATE_NUMBERS)


def _launches_s(graph: StepGraph, op: Op, device: Device) -> float:
    """Seconds that an update by code of its own spends between its operations; 0 for other operations."""
    rule = rule_of(op) if op.kind is OpKind.STEP else None
    if not isinstance(rule, ParameterRule) or not rule.calls:
        return 0.0
    runs = -(-prod(graph.tensors[op.inputs[0]].shape) // AT_ONCE.get(device.kind, AT_ONCE["cuda"]))
    return runs * (_UPDATE_S + _CALL_S * rule.calls)


def _is_causal(op: Op) -> bool:
    """Whether an attention is causal: ATen's take ``dropout_p`` (a float) and, as the next flag, ``is_causal``."""
    if (named := dict(op.kwargs).get("is_causal")) is not None:
        return bool(named)
    after = False
    for arg in op.args:
        if after and isinstance(arg, bool):
            return arg
        after = after or isinstance(arg, float)
    return False


def _signature(graph: StepGraph, op: Op) -> object:
    """Equal for operations of equal cost."""
    tensors = graph.tensors

    def geometry(ids: tuple[int, ...]) -> tuple[object, ...]:
        return tuple((tensors[t].dtype, tensors[t].shape, tensors[t].stride) for t in ids)

    args = tuple(_geometry_of(tensors, a) for a in op.args)
    return (op.name, op.kind, op.flops, op.bytes_read, op.bytes_written, args, geometry(op.inputs),
            geometry(op.outputs), geometry(op.mutates))  # fmt: skip


def _geometry_of(tensors: tuple[Tensor, ...], arg: Arg) -> object:
    """Dtype and shape of an argument that is a tensor; None for any other."""
    return (tensors[arg.tensor].dtype, tensors[arg.tensor].shape) if isinstance(arg, Ref) else None
