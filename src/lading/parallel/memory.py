"""Memory of a rank's segment: what stays from forward to backward, and the most that is there while it runs.

Parameters, their gradients, optimizer states and communication buffers are counted elsewhere: they are a step's.

[Note: losses] A stack's kernels decide which tensors of a cross-entropy exist. Written operation by operation it is a
cast of the logits to fp32, a log-softmax, and the same backward: several tensors of tokens x vocabulary. Megatron's own
works on one of them in place (``vocab_parallel_cross_entropy``); Transformer Engine's and Liger's write the gradient
over the logits; a compiler keeps the logits as the product made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, OpKind, Role
from lading.ir.work import Form, Kernel, Product, RankSegment, Stage
from lading.parallel.recompute import POINTWISE, Flow, Recomputed, flow_of

#: How cross-entropy is run: as written, in place on fp32 logits, in place on the logits, or fused but not in place.
AS_WRITTEN, IN_FP32, IN_LOGITS, FUSED = "as written", "in fp32", "in logits", "fused"


@dataclass(frozen=True)
class Loss:
    """Changes that a way of running cross-entropy makes, in storages.

    Attributes:
        never: Storages that do not exist.
        written_over: Storage -> the one in whose place it is written.
        kept_instead: Storage -> the one that is kept from forward to backward in its stead.
    """

    never: frozenset[int] = frozenset()
    written_over: dict[int, int] = field(default_factory=lambda: {})
    kept_instead: dict[int, int] = field(default_factory=lambda: {})


def loss_of(flow: Flow, way: str) -> Loss:
    """The cross-entropy of a segment, run in one of the ways above; empty if it has none."""
    scores = _first_kernel_named(flow, "_log_softmax.", Stage.FORWARD)
    if scores is None or way == AS_WRITTEN:
        return Loss()
    source = flow.storages(scores.inputs)[0]
    wide = _cast_of(flow, source)
    logits = source if wide is None else wide
    result = flow.storages(scores.outputs)[0]
    inner, last = _backward(flow)
    if way == IN_FP32:
        written_over = dict.fromkeys((result, *inner), source)
        if last is not None and not _is_cast(flow, last):
            written_over[last] = source
        return Loss(frozenset(), written_over, {result: source})
    never = {result, *inner}
    if wide is not None:
        never.add(source)
    written_over = {last: logits} if way == IN_LOGITS and last is not None else {}
    return Loss(frozenset(never), written_over, {result: logits})


def _first_kernel_named(flow: Flow, name: str, stage: Stage) -> Kernel | None:
    named = (
        k for k in flow.segment.kernels if name in k.name and (k.stage is Stage.FORWARD) == (stage is Stage.FORWARD)
    )
    return next(named, None)


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
        if (kernel := _first_kernel_named(flow, name, Stage.BACKWARD_INPUT)) is not None:
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


#: What a compiler makes again in backward from what is kept, as it costs no product and no random draw.
_CHEAP = POINTWISE | {OpKind.NORM, OpKind.COPY, OpKind.SOFTMAX}


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes of one micro-batch in one segment.

    Attributes:
        saved: Kept from forward to backward; what enters the segment is in it if backward needs it.
        forward_peak: Most at once while forward runs, with what enters and what is kept.
        backward_peak: Most at once while backward (and recompute) runs, with all that was kept and the gradient that
            enters; a weight's gradient counts while it is made.
    """

    saved: int
    forward_peak: int
    backward_peak: int


def saved_bytes(
    segment: RankSegment,
    recompute: Recomputed | None = None,
    fusion: str = "eager",
    *,
    fused_loss: bool = False,
    operand_share: float = 1.0,
) -> int:
    """Bytes kept from forward to backward of one micro-batch.

    Args:
        recompute: What is kept and run again; None for all that backward reads.
        fusion: "eager"; "fused": chains of pointwise operations are one kernel that makes their inner results again,
            and cross-entropy works in place; "compiled": all that can be made again without a product is.
        fused_loss: Cross-entropy works on the logits as the product made them, not on them in fp32.
        operand_share: Bytes that operands of products are kept in, for each that they have while forward runs; see
            ``_operands``.
    """
    sizes = kept_sizes(segment, recompute, fusion, fused_loss=fused_loss, operand_share=operand_share)
    return sum(sizes.values())


def segment_memory(
    segment: RankSegment,
    recompute: Recomputed | None = None,
    fusion: str = "eager",
    *,
    fused_loss: bool = False,
    makes_weight_gradients: bool = True,
    operand_share: float = 1.0,
) -> SegmentMemory:
    """Bytes kept and peaks of a segment; arguments as ``saved_bytes``.

    Args:
        makes_weight_gradients: False where products add gradients of weights to the main ones without a tensor between.
    """
    sizes = _sizes(segment)
    kept_storages = _kept_storages(segment, recompute, (fusion, fused_loss))
    recomputed = recompute.kernels if recompute else ()
    without = frozenset[int]() if makes_weight_gradients else _weight_gradients(flow_of(segment.form))
    forward, backward = _walks(segment.form, kept_storages, recomputed, (fusion, fused_loss), without)
    as_kept = sizes | _operands(segment, kept_storages, recomputed, sizes, operand_share)
    return SegmentMemory(
        saved=sum(as_kept[s] for s in kept_storages),
        forward_peak=forward.peak_bytes(sizes),
        backward_peak=backward.peak_bytes(as_kept),
    )


def kept_sizes(
    segment: RankSegment,
    recompute: Recomputed | None = None,
    fusion: str = "eager",
    *,
    fused_loss: bool = False,
    operand_share: float = 1.0,
) -> dict[int, int]:
    """Bytes of each storage kept from forward to backward; arguments as ``saved_bytes``."""
    sizes, kept_storages = _sizes(segment), _kept_storages(segment, recompute, (fusion, fused_loss))
    as_kept = sizes | _operands(segment, kept_storages, recompute.kernels if recompute else (), sizes, operand_share)
    return {storage: as_kept[storage] for storage in sorted(kept_storages)}


def _operands(
    segment: RankSegment, kept_storages: Iterable[int], again: Sequence[int], sizes: Mapping[int, int], share: float
) -> dict[int, int]:
    """Bytes of what is kept in the format of products' operands instead of that in which forward made it.

    That is what only 16-bit products read in backward, to make gradients of weights, and results of products that only
    an activation function reads which runs again. What attention or a norm reads is kept as it is (arXiv 2412.19437,
    3.3.3).
    """
    if share == 1.0:
        return {}
    flow, kernels = flow_of(segment.form), segment.kernels
    operand_bytes: dict[int, int] = {}
    for storage in kept_storages:
        places = [p for p in flow.users.get(storage, ()) if kernels[p].stage is not Stage.FORWARD or p in again]
        readers = [kernels[place] for place in places]
        makers = [kernels[place] for place in flow.makers_forward(storage)]
        in_products = all(r.kind is OpKind.MATMUL and r.dtype in ("bfloat16", "float16") for r in readers)
        in_activation = all(r.kind in POINTWISE for r in readers) and all(m.kind is OpKind.MATMUL for m in makers)
        if readers and makers and (in_products or (in_activation and not set(again).isdisjoint(places))):
            operand_bytes[storage] = round(sizes[storage] * share)
    return operand_bytes


def _kept_storages(segment: RankSegment, recompute: Recomputed | None, fused: tuple[str, bool]) -> frozenset[int]:
    """Storages kept from forward to backward, those of one product as one; ``fused``: fusion and fused loss."""
    flow, (fusion, fused_loss) = flow_of(segment.form), fused
    marked = flow.storages(recompute.saved if recompute else segment.saved)
    if fusion != "compiled":
        return _kept_as_marked(segment.form, tuple(marked), fusion, fused_loss)
    loss = loss_of(flow, _way(fusion, fused_loss))
    kept_storages = {loss.kept_instead.get(storage, storage) for storage in marked}
    # Of what a checkpoint marks a compiler keeps only what is read.
    recomputed = [flow.segment.kernels[place] for place in recompute.kernels] if recompute else []
    read = {
        *flow.saved_storages,
        *flow.storages(t for kernel in recomputed for t in kernel.inputs),
        *loss.kept_instead.values(),
    }
    return _mapped(
        _cheapest(flow, kept_storages & read, _bytes_by_storage(segment)), _products_of_several_results(flow)
    )


@lru_cache(maxsize=4096)
def _kept_as_marked(form: Form, marked: tuple[int, ...], fusion: str, fused_loss: bool) -> frozenset[int]:
    if fusion not in ("eager", "fused"):
        raise ConfigError(f"fusion: expected eager, fused or compiled, got {fusion!r}")
    flow = flow_of(form)
    loss = loss_of(flow, _way(fusion, fused_loss))
    kept_storages = {loss.kept_instead.get(storage, storage) for storage in marked}
    return _mapped(kept_storages - _inner(flow, fusion), _products_of_several_results(flow))


@dataclass(frozen=True)
class _LiveStorages:
    """Storages there while kernels run in order: at first, and those that each step adds and then takes away."""

    start: tuple[int, ...]
    steps: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def peak_bytes(self, sizes: Mapping[int, int]) -> int:
        """Largest sum of bytes alive at once, under bytes by storage."""
        return max(self.alive(sizes))

    def alive(self, sizes: Mapping[int, int]) -> list[int]:
        """Bytes at first, then while each kernel runs."""
        alive_bytes = sum([sizes[s] for s in self.start])
        bytes_by_step = [alive_bytes]
        for added, freed in self.steps:
            for storage in added:
                alive_bytes += sizes[storage]
            bytes_by_step.append(alive_bytes)
            for storage in freed:
                alive_bytes -= sizes[storage]
        return bytes_by_step


@lru_cache(maxsize=4096)
def _walks(
    form: Form, kept_storages: frozenset[int], again: tuple[int, ...], fused: tuple[str, bool], without: frozenset[int]
) -> tuple[_LiveStorages, _LiveStorages]:
    """Walks of forward, and of backward with what runs again; ``without``: storages that are not counted."""
    flow, (fusion, fused_loss) = flow_of(form), fused
    loss, together = loss_of(flow, _way(fusion, fused_loss)), _products_of_several_results(flow)
    never = _inner(flow, fusion) | loss.never | without
    enters, leaves = set(flow.storages(form.segment.enters)), set(flow.storages(form.segment.leaves))
    backward = [p for p, kernel in enumerate(form.segment.kernels) if kernel.stage is not Stage.FORWARD]
    replaced = Loss(frozenset(never), {**together, **loss.written_over}, loss.kept_instead)
    return (
        _walk(flow, flow.forward, enters, kept_storages | leaves, replaced),
        _walk(
            flow,
            [*again, *backward],
            kept_storages | _coming(flow, backward),
            set(),
            replaced,
            in_nodes=fusion == "eager",
        ),
    )


@dataclass(frozen=True)
class AliveBytes:
    """Bytes of one micro-batch in one segment, kernel by kernel, without gradients of parameters.

    Attributes:
        saved: Bytes kept from forward to backward.
        forward, backward: Place of each kernel in order, and bytes alive while it runs; what is recomputed first.
        gradients: Place of the kernel that makes a parameter's gradient, by the parameter's local tensor.
    """

    saved: int
    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    gradients: dict[int, int]


def alive_bytes(
    segment: RankSegment,
    recompute: Recomputed | None = None,
    fusion: str = "eager",
    *,
    fused_loss: bool = False,
    operand_share: float = 1.0,
) -> AliveBytes:
    """Bytes alive while each kernel runs; arguments as ``saved_bytes``."""
    sizes, flow = _sizes(segment), flow_of(segment.form)
    kept_storages = _kept_storages(segment, recompute, (fusion, fused_loss))
    gradients = _gradients(segment, flow)
    without = frozenset(storage for _, storage in gradients.values())
    recomputed = recompute.kernels if recompute else ()
    forth, back = _walks(segment.form, kept_storages, recomputed, (fusion, fused_loss), without)
    places = [*recomputed, *(p for p, kernel in enumerate(segment.kernels) if kernel.stage is not Stage.FORWARD)]
    as_kept = sizes | _operands(segment, kept_storages, recomputed, sizes, operand_share)
    return AliveBytes(
        saved=sum(as_kept[s] for s in kept_storages),
        forward=tuple(zip(flow.forward, forth.alive(sizes)[1:], strict=True)),
        backward=tuple(zip(places, back.alive(as_kept)[1:], strict=True)),
        gradients={tensor: place for tensor, (place, _) in gradients.items()},
    )


def _gradients(segment: RankSegment, flow: Flow) -> dict[int, tuple[int, int]]:
    """Find each parameter's gradient: the kernel that makes it, and its storage, as large and read by nobody.

    One of the parameter's own module is taken first; products that were merged have the module of one of them.
    """
    kernels, tensors = segment.kernels, segment.tensors
    ends = {
        tensors[t].storage: (place, prod(tensors[t].shape))
        for place, kernel in enumerate(kernels)
        for t in kernel.outputs
        if kernel.stage is not Stage.FORWARD and tensors[t].storage not in flow.users
    }
    gradients: dict[int, tuple[int, int]] = {}
    for same_module in (True, False):
        for tensor, _ in segment.parameters:
            module, elements = tensors[tensor].name.rpartition(".")[0], prod(tensors[tensor].shape)
            fits = (
                s for s, (p, n) in ends.items() if n == elements and (kernels[p].module == module or not same_module)
            )
            if tensor not in gradients and (storage := next(fits, None)) is not None:
                gradients[tensor] = (ends.pop(storage)[0], storage)
    return gradients


def _weight_gradients(flow: Flow) -> frozenset[int]:
    products = (k for k in flow.segment.kernels if k.stage is Stage.BACKWARD_WEIGHT and isinstance(k.detail, Product))
    return frozenset(storage for kernel in products for storage in flow.storages(kernel.outputs))


def weight_shapes(segment: RankSegment) -> dict[tuple[int, ...], int]:
    """Distinct shapes of the weights of products, one expert's for experts, with their bytes.

    Transformer Engine adds gradients to the main ones inside the product and hands autograd a placeholder: one tensor
    for each distinct shape and dtype, kept for good (``get_dummy_wgrad`` in transformer_engine/pytorch/module/base.py).
    """
    shapes: dict[tuple[int, ...], int] = {}
    for kernel in segment.kernels:
        if kernel.stage is Stage.BACKWARD_WEIGHT and isinstance(kernel.detail, Product):
            shape = (kernel.detail.m, kernel.detail.n)
            shapes[shape] = prod(shape) * DTYPE_BYTES[kernel.dtype]
    return shapes


def _way(fusion: str, fused_loss: bool) -> str:
    if fusion == "eager":
        return FUSED if fused_loss else AS_WRITTEN
    return FUSED if fusion == "compiled" else IN_LOGITS if fused_loss else IN_FP32


def _coming(flow: Flow, backward: list[int]) -> set[int]:
    """Gradients of what leaves: read in backward, neither made by a kernel nor kept from forward."""
    read = {s for p in backward for s in flow.storages(flow.segment.kernels[p].inputs)}
    available = {*flow.makers, *flow.saved_storages, *flow.storages(flow.segment.enters)}
    inputs = {t.storage for t in flow.segment.tensors if t.role is Role.INPUT}
    return {s for s in read & flow.activations if s not in available and s not in inputs}


def _bytes_by_storage(segment: RankSegment) -> dict[int, int]:
    """Map each storage of a segment to its bytes: those of its largest tensor."""
    sizes: dict[int, int] = {}
    for tensor in segment.tensors:
        size, storage = tensor.size_bytes, tensor.storage
        if size > sizes.get(storage, -1):
            sizes[storage] = size
    return sizes


def _sizes(segment: RankSegment) -> dict[int, int]:
    """Bytes of storages; the first of those that one product makes has all of them."""
    sizes, merged = _bytes_by_storage(segment), dict[int, int]()
    for storage, first in _products_of_several_results(flow_of(segment.form)).items():
        merged[first] = merged.get(first, sizes[first]) + sizes[storage]
    return sizes | merged


def _inner(flow: Flow, fusion: str) -> set[int]:
    """Storages inside chains of pointwise operations, which exist in registers only."""
    if fusion == "eager":
        return set()
    kernels, inner = flow.segment.kernels, set[int]()
    borders = set(flow.storages((*flow.segment.enters, *flow.segment.leaves)))
    for storage, makers in flow.makers.items():
        stage = kernels[makers[0]].stage
        users = [
            u for u in flow.users.get(storage, ()) if (kernels[u].stage is Stage.FORWARD) == (stage is Stage.FORWARD)
        ]
        chain = [kernels[p].kind in POINTWISE for p in (*makers, *users)]
        if users and all(chain) and storage not in borders:
            inner.add(storage)
    return inner


def _cheapest(flow: Flow, kept_storages: set[int], sizes: Mapping[int, int]) -> set[int]:
    """Leave out, in the order of forward, what follows cheaply from what is kept, or from what is smaller.

    A compiler finds the smallest cut; this finds the same for chains, and for what costs little to make again.
    """
    borders = set(flow.storages(flow.segment.enters))
    cheapest = set(kept_storages)
    sources: dict[int, frozenset[int]] = {}  # of what is cheap to make: the storages it takes
    for place in flow.forward:
        kernel = flow.segment.kernels[place]
        if kernel.kind not in _CHEAP:
            continue
        inputs = [s for s in flow.storages(kernel.inputs) if s in flow.activations and s not in borders]
        needs = frozenset(n for s in inputs for n in ((s,) if s in cheapest else sources.get(s, (s,))))
        for storage in flow.storages(kernel.outputs):
            sources[storage] = needs
            new = needs - cheapest
            if storage in kept_storages and not _is_statistic(flow, place, storage) and _gains(sizes, storage, new):
                cheapest = (cheapest - {storage}) | new
    return cheapest


def _nodes(flow: Flow, places: Sequence[int]) -> list[tuple[int, int]]:
    """First and last step of the kernels of each node of autograd that has several: they read one gradient in a row.

    Autograd releases what a node has saved when the node is done: the other factor of a product waits for both.
    """
    node_spans: list[tuple[int, int]] = []
    begin, common = 0, set[int]()
    for step, place in enumerate(places):
        kernel = flow.segment.kernels[place]
        read: set[int] = set()
        if kernel.stage is not Stage.FORWARD:
            read = {s for s in flow.storages(kernel.inputs) if s in flow.activations and not flow.makers_forward(s)}
        if common & read:
            common &= read
            continue
        if step > begin + 1:
            node_spans.append((begin, step - 1))
        begin, common = step, read
    return [*node_spans, (begin, len(places) - 1)] if len(places) - 1 > begin else node_spans


def _gains(sizes: Mapping[int, int], storage: int, instead: frozenset[int]) -> bool:
    return sum(sizes[s] for s in instead) < sizes[storage]


def _is_statistic(flow: Flow, place: int, storage: int) -> bool:
    """Mean and deviation of a norm stay: they are small, and the rest follows from them without a reduction."""
    kernel = flow.segment.kernels[place]
    return kernel.kind is OpKind.NORM and storage != flow.storages(kernel.outputs)[0]


def _products_of_several_results(flow: Flow) -> dict[int, int]:
    """Results of one product (queries, keys, values) stay while a part does: storage -> the first of them."""
    together: dict[int, int] = {}
    for place in flow.forward:
        kernel = flow.segment.kernels[place]
        if isinstance(kernel.detail, Product) and len(results := flow.storages(kernel.outputs)) > 1:
            together.update(dict.fromkeys(results[1:], results[0]))
    return together


def _mapped(storages: Iterable[int], same: Mapping[int, int]) -> frozenset[int]:
    return frozenset(same.get(storage, storage) for storage in storages)


def _walk(
    flow: Flow, places: list[int], start: Iterable[int], stay: Iterable[int], loss: Loss, *, in_nodes: bool = False
) -> _LiveStorages:
    """Kernels in order; a storage goes after its last use unless it stays.

    Args:
        loss: What does not exist, and what is written in another's place.
        in_nodes: What a node of autograd reads goes when all its kernels have run (see ``_nodes``).
    """
    fixed = {t.storage for t in flow.segment.tensors} - flow.activations | loss.never
    steps: list[tuple[set[int], set[int]]] = []
    last: dict[int, int] = {}
    for step, place in enumerate(places):
        kernel = flow.segment.kernels[place]
        written = {loss.written_over.get(s, s) for s in flow.storages(kernel.outputs)} - fixed
        used = written | ({loss.written_over.get(s, s) for s in flow.storages(kernel.inputs)} - fixed)
        steps.append((written, used))
        last.update(dict.fromkeys(used, step))
    for begin, end in _nodes(flow, places) if in_nodes else ():
        for step in range(begin, end):
            waits = {s for s in steps[step][1] - steps[step][0] if last[s] == step}
            last.update(dict.fromkeys(waits, end))
            steps[end] = (steps[end][0], steps[end][1] | waits)
    first = live = {s for s in start if s not in fixed}
    stays, changes = set(stay), list[tuple[tuple[int, ...], tuple[int, ...]]]()
    for step, (written, used) in enumerate(steps):
        added = written - live
        live = live | written
        freed = {s for s in used & live if last[s] == step and s not in stays}
        live -= freed
        changes.append((tuple(added), tuple(freed)))
    return _LiveStorages(tuple(first), tuple(changes))
