"""Adapters: a rank's segment when its weights are frozen and low-rank products beside them are trained (LoRA, Q-LoRA).

    y = x W + scale * dropout(x) A B          W frozen, A (in, rank) and B (rank, out) trained

Frozen weights have no gradients, so the products that make them are not run, and what only they read is not kept. Every
product of a block with one weight gets an adapter of its own (experts do not): forward two small products, in backward
four. Dropout, the scale and the sum are kernels of their own, as PEFT and Megatron-Bridge run them. PEFT below 0.6
keeps A and B in fp32, and casts what enters to fp32 and, under autocast, back; so do those from 0.12 on where a model
is in 16 bits (``autocast_adapter_dtype``). Without autocast the small products, the scale and the sum are fp32 too.

With weights of 4 bits each product makes its 16-bit weight anew. AutoGPTQ does it in five kernels of PyTorch and
autograd keeps the result until backward; bitsandbytes does it in one, once more in backward.

Source: PEFT v0.5.0 tuners/lora.py (forward of Linear and QuantLinear, update_layer), v0.6.2 tuners/lora/layer.py;
AutoGPTQ v0.4.2 nn_modules/qlinear/qlinear_cuda_old.py (forward); bitsandbytes autograd/_functions.py (MatMul4Bit).
Ignores: adapters of experts; collectives of tensor parallelism but for one sum of each rank-wide result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, OpKind, Role
from lading.ir.layout import Layout
from lading.ir.request import StepRequest
from lading.ir.work import Attention, Collective, Kernel, LocalTensor, Product, RankSegment, Stage

#: AutoGPTQ's kernels, by bytes read and written for each element of the weight: shift of the packed numbers (4 bits
#: in, 32 out), cast to 8 bits, mask, subtraction of the zero points, product with the scales (8 bits in, 16 out).
_GPTQ = (("shift", 0.5, 4.0), ("cast", 4.0, 1.0), ("mask", 1.0, 1.0), ("zeros", 1.0, 1.0), ("scales", 1.0, 2.0))
#: Bytes whose moving takes as long as a thread's work on one element in these kernels of small integers, of strides
#: that repeat and of mixed dtypes, which read and write element by element: each of the five takes at least this.
#: Fitted: benchmarks/calibrate/adapters.py, on the Q-LoRA rows of QwenLM/Qwen's README against its LoRA rows.
ELEMENT_BYTES = 6.5
#: Its kernels over the zero points alone, one for 128 elements.
_GPTQ_SMALL = ("zeros_shift", "zeros_cast", "zeros_one", "zeros_mask")
#: bitsandbytes: 4 bits and a scale of 8 bits for 64 elements are read, 16 bits written.
_NF4 = (("nf4", 0.516, 2.0),)
#: Bytes of an element that is kept: 4 bits, with a 16-bit scale and a 4-bit zero point for 128 elements (GPTQ), or a
#: scale of 8 bits for 64 (NF4).
_KEPT = {"gptq": 0.5 + 2.5 / 128, "nf4": 0.516}
QUANTIZERS = tuple(_KEPT)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters that are trained instead of the weights.

    Attributes:
        rank: Inner dim of A and B.
        wide: Whether A and B are fp32.
        autocast: Whether products with fp32 A and B run in 16 bits, as under autocast.
        width: Bytes of an element of the weights that have not fewer bits.
        dropout: Whether what enters an adapter is dropped out.
        quantizer: Quantizer of the frozen weights of blocks: "gptq", "nf4", or "" for 16 bits.
        modules: Last names of modules whose products have adapters; () for all.
        outer: Whether embedding and head are trained in full, in copies of their own.
    """

    rank: int
    wide: bool = False
    autocast: bool = True
    width: int = 2
    dropout: bool = False
    quantizer: str = ""
    modules: tuple[str, ...] = ()
    outer: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapters: rank must be >= 1, got {self.rank}; set lora_rank")
        if self.quantizer and self.quantizer not in QUANTIZERS:
            raise ConfigError(f"adapters: quantizer must be one of {', '.join(QUANTIZERS)}, got {self.quantizer!r}")


def adapters_of(request: StepRequest) -> Adapters | None:
    """Adapters that a request trains; None where it trains all weights.

    Raises:
        ConfigError: "qlora" under a stack that has no kernels for 4-bit weights.
    """
    if request.task not in ("lora", "qlora"):
        return None
    stack = request.stack
    if request.task == "qlora" and not stack.quantizer:
        raise ConfigError(
            f"request {request.name}: expected a stack with a quantizer for qlora, as hf-transformers, got {stack.name}"
        )
    return Adapters(
        rank=request.lora_rank,
        wide=stack.adapter_dtype == "float32" and request.layout.precision != "fp32",
        autocast=stack.adapter_autocast,
        width=4 if request.layout.precision == "fp32" else 2,
        dropout=stack.adapter_dropout,
        quantizer=stack.quantizer if request.task == "qlora" else "",
        modules=stack.adapter_modules,
        outer=request.trains_embeddings,
    )


def adapted(segment: RankSegment, adapters: Adapters, layout: Layout) -> RankSegment:
    """A segment under adapters: what is before and after the blocks is frozen or trained as a whole.

    >>> adapted(block, Adapters(rank=64), layout).trained_elements
    {'dp': 17956864}
    """
    all_bytes = adapters.width * sum(segment.parameter_elements.values())
    if not (segment.enters and segment.leaves):
        if adapters.outer:
            trained = dict(segment.parameter_elements)
            return replace(segment, trained_elements=trained, frozen_bytes=all_bytes, trained_bytes=all_bytes)
        return replace(_frozen(segment), trained_elements={}, frozen_bytes=all_bytes)
    return _Adapting(_frozen(segment), adapters, layout).build()


def packed(segment: RankSegment, tokens: int) -> RankSegment:
    """A segment whose sequences are packed with documents of so many tokens, each of which attends to itself only.

    Ignores: that long documents weigh more, as pairs go with the square of the length.
    """
    return replace(segment, kernels=tuple(_of_documents(kernel, tokens) for kernel in segment.kernels))


def _of_documents(kernel: Kernel, tokens: int) -> Kernel:
    work = kernel.detail
    if not isinstance(work, Attention) or work.query_tokens != work.key_tokens or work.query_tokens <= tokens:
        return kernel
    documents = max(1, round(work.batch * work.query_tokens / tokens))
    return replace(kernel, detail=replace(work, batch=documents, query_tokens=tokens, key_tokens=tokens))


def _frozen(segment: RankSegment) -> RankSegment:
    """Freeze a segment: no gradients of weights, and nothing kept that only these read."""
    kernels = tuple(kernel for kernel in segment.kernels if kernel.stage is not Stage.BACKWARD_WEIGHT)
    read = {segment.tensors[t].storage for k in kernels if k.stage is not Stage.FORWARD for t in k.inputs}
    saved = tuple(t for t in segment.saved if segment.tensors[t].storage in read)
    return replace(segment, kernels=kernels, saved=saved, summed_parameters=())


def _is_linear(kernel: Kernel) -> bool:
    return isinstance(kernel.detail, Product) and kernel.detail.groups == 1


@dataclass
class _Adapting:
    """Builds the kernels of a block with adapters."""

    segment: RankSegment
    adapters: Adapters
    layout: Layout
    kernels: list[Kernel] = field(default_factory=lambda: [])
    tensors: list[LocalTensor] = field(default_factory=lambda: [])
    saved: list[int] = field(default_factory=lambda: [])
    trained: int = 0
    quantized: int = 0

    def build(self) -> RankSegment:
        """Build the segment with adapters."""
        segment = self.segment
        self.tensors, self.saved = list(segment.tensors), list(segment.saved)
        backward_after: dict[int, list[tuple[Kernel, tuple[int, ...]]]] = {}
        dequantized: dict[int, int] = {}  # storage of a 4-bit weight: the 16-bit tensor made of it
        for place, kernel in enumerate(segment.kernels):
            weights = self._weights(kernel)
            if kernel.stage is Stage.FORWARD and weights and _is_linear(kernel):
                base = self._dequantized(kernel, weights, dequantized)
                kept_tensors = self._forward(base, weights)
                last = self._last_backward(weights)
                if kept_tensors and last is not None:
                    backward_after.setdefault(last, []).append((base, kept_tensors))
                continue
            self._backward(kernel, weights, dequantized)
            for base, kept_tensors in backward_after.get(place, ()):
                self._adapter_backward(base, kept_tensors, kernel)
        return replace(
            segment,
            kernels=tuple(self.kernels),
            tensors=tuple(self.tensors),
            saved=tuple(dict.fromkeys(self.saved)),
            trained_elements={"dp": self.trained},
            trained_bytes=self.trained * (4 if self.adapters.wide else self.adapters.width),
            frozen_bytes=self._frozen_bytes(),
        )

    def _frozen_bytes(self) -> int:
        num_elements = sum(self.segment.parameter_elements.values())
        return round(
            self.adapters.width * (num_elements - self.quantized)
            + _KEPT.get(self.adapters.quantizer, 0.0) * self.quantized
        )

    def _weights(self, kernel: Kernel) -> list[int]:
        return [t for t in kernel.inputs if self.segment.tensors[t].role is Role.PARAMETER]

    def _last_backward(self, weights: Sequence[int]) -> int | None:
        """Place of the last product that makes a gradient of what enters."""
        weight_storages = {self.segment.tensors[t].storage for t in weights}
        places = [
            place
            for place, kernel in enumerate(self.segment.kernels)
            if kernel.stage is Stage.BACKWARD_INPUT
            and _is_linear(kernel)
            and weight_storages & {self.segment.tensors[t].storage for t in self._weights(kernel)}
        ]
        return places[-1] if places else None

    def _tensor(self, dtype: str, *shape: int) -> int:
        size = DTYPE_BYTES[dtype]
        for length in shape:
            size *= length
        storage = max((t.storage for t in self.tensors), default=-1) + 1
        self.tensors.append(LocalTensor(storage, dtype, shape, size, Role.ACTIVATION))
        return len(self.tensors) - 1

    def _add(self, like: Kernel, name: str, kind: OpKind, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        """A kernel that moves bytes."""
        inputs, outputs = tuple(inputs), tuple(outputs)
        read, written = (sum(self.tensors[t].size_bytes for t in side) for side in (inputs, outputs))
        self._add_kernel(like, name, kind, read, written, inputs=inputs, outputs=outputs)

    def _add_kernel(self, like: Kernel, name: str, kind: OpKind | None, read: int, written: int, **more: Any) -> None:
        """Add a kernel of an adapter, in the stage and dtype of the kernel it stands beside."""
        module = f"{like.module}.adapter.{name}"
        settings: dict[str, Any] = {"stage": like.stage, "inputs": (), "outputs": (), **more}
        self.kernels.append(
            Kernel(f"adapter.{name}", kind, module=module, dtype=like.dtype, bytes_read=read, bytes_written=written,
                   **settings)
        )  # fmt: skip

    def _small(self, like: Kernel, work: Product, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        """A product with A or B, or that makes a gradient of one: these are made where they are met."""
        dtype = self._dtype(like)
        width = 4 if dtype == "float32" else self.adapters.width
        read, written = width * (work.m * work.k + work.k * work.n), width * work.m * work.n
        self._add_kernel(like, "mm", OpKind.MATMUL, read, written, inputs=inputs, outputs=outputs, detail=work)
        self.kernels[-1] = replace(self.kernels[-1], dtype=dtype)

    def _dtype(self, like: Kernel) -> str:
        """Number format of products with A and B, and of their results."""
        return "float32" if self.adapters.wide and not self.adapters.autocast else like.dtype

    def _over_weights(self, like: Kernel, work: Product, names: Sequence[str]) -> None:
        """Kernels over A and B alone; they have no tensors, as their memory is that of states."""
        for name in names:
            size = self.adapters.rank * (work.k if name.endswith("a") else work.n)
            self._add_kernel(like, name, OpKind.COPY, 4 * size, 2 * size)

    def _dequantized(self, kernel: Kernel, weights: Sequence[int], made: dict[int, int]) -> Kernel:
        """The product with its weight made of 4 bits before it; the kernels that do so are put there."""
        work = kernel.detail
        assert isinstance(work, Product)
        if not self.adapters.quantizer:
            return kernel
        self.quantized += work.k * work.n
        dequantized_weight = self._tensor(kernel.dtype, work.k, work.n)
        self._dequantize(kernel, work.k * work.n, dequantized_weight)
        for weight in weights:
            made[self.segment.tensors[weight].storage] = dequantized_weight
        if self.adapters.quantizer == "gptq":
            self.saved.append(dequantized_weight)
        return replace(kernel, inputs=(*(t for t in kernel.inputs if t not in weights), dequantized_weight))

    def _dequantize(self, like: Kernel, elements: int, whole: int) -> None:
        steps = _GPTQ if self.adapters.quantizer == "gptq" else _NF4
        for name in _GPTQ_SMALL if steps is _GPTQ else ():
            self._add_kernel(like, f"dequantize.{name}", OpKind.ELEMENTWISE, elements // 128, elements // 128)
        for name, read, written in steps:
            cached_bytes = max(0.0, ELEMENT_BYTES - read - written) if steps is _GPTQ else 0.0
            outputs = (whole,) if name == steps[-1][0] else ()
            size = round((read + cached_bytes) * elements), round(written * elements)
            self._add_kernel(like, f"dequantize.{name}", OpKind.ELEMENTWISE, *size, outputs=outputs)

    def _backward(self, kernel: Kernel, weights: Sequence[int], made: dict[int, int]) -> None:
        """A kernel of the frozen block: with the 16-bit weight that was kept, or makes anew, in place of the packed."""
        storages = [self.segment.tensors[t].storage for t in weights]
        weights_read = [made[s] for s in storages if s in made]
        if not weights_read or not _is_linear(kernel):
            self.kernels.append(kernel)
            return
        if self.adapters.quantizer == "nf4":
            work = kernel.detail
            assert isinstance(work, Product)
            dequantized_again = self._tensor(kernel.dtype, work.k, work.n)
            self._dequantize(kernel, work.k * work.n, dequantized_again)
            weights_read = [dequantized_again]
        inputs = (*(t for t in kernel.inputs if t not in weights), *dict.fromkeys(weights_read))
        self.kernels.append(replace(kernel, inputs=inputs))

    def _forward(self, base: Kernel, weights: Sequence[int]) -> tuple[int, ...]:
        """A frozen product and its adapter; gives what backward reads: A's input, mask, and A's result."""
        work = base.detail
        assert isinstance(work, Product)
        rank, tokens, wide = self.adapters.rank, work.m, self.adapters.wide
        x = next(t for t in base.inputs if t not in weights and self.tensors[t].role is not Role.PARAMETER)
        self.kernels.append(base)
        if self.adapters.modules and base.module.rpartition(".")[2] not in self.adapters.modules:
            return ()
        self.trained += rank * (work.k + work.n)
        if self.adapters.quantizer == "gptq":  # PEFT clones the result before it adds to it in place
            self._add_kernel(base, "clone", OpKind.COPY, *[self.adapters.width * tokens * work.n] * 2)
        entering, mask = x, -1
        if wide:
            entering = self._moved(base, "widen", OpKind.COPY, entering, ("float32", tokens, work.k))
        if self.adapters.dropout:
            mask = self._tensor("bool", tokens, work.k)
            dropped = self._tensor("float32" if wide else base.dtype, tokens, work.k)
            self._add(base, "dropout", OpKind.ELEMENTWISE, (entering,), (dropped, mask))
            entering = dropped
        if wide and self.adapters.autocast:
            entering = self._moved(base, "narrow", OpKind.COPY, entering, (base.dtype, tokens, work.k))
            self._over_weights(base, work, ("cast_a", "cast_b"))
        dtype = self._dtype(base)
        low, high = self._tensor(dtype, tokens, rank), self._tensor(dtype, tokens, work.n)
        self._small(base, Product(tokens, rank, work.k), (entering,), (low,))
        self._summed(base, low)
        self._small(base, Product(tokens, work.n, rank), (low,), (high,))
        scaled = self._moved(base, "scale", OpKind.ELEMENTWISE, high, (dtype, tokens, work.n))
        if dtype == base.dtype:
            self._add(base, "sum", OpKind.ELEMENTWISE, (scaled, *base.outputs), base.outputs)
        else:
            summed = self._tensor(dtype, tokens, work.n)
            self._add(base, "sum", OpKind.ELEMENTWISE, (scaled, *base.outputs), (summed,))
            self._add(base, "narrow", OpKind.COPY, (summed,), base.outputs)
        kept_tensors = tuple(t for t in (entering, mask, low) if t >= 0)
        self.saved += kept_tensors
        return kept_tensors

    def _adapter_backward(self, base: Kernel, kept_tensors: tuple[int, ...], frozen: Kernel) -> None:
        """Gradients of A, B and of what enters, behind the frozen product's own."""
        work = base.detail
        assert isinstance(work, Product)
        rank, tokens, dtype, wide = self.adapters.rank, work.m, self._dtype(base), self.adapters.wide
        entering, low = kept_tensors[0], kept_tensors[-1]
        coming = [t for t in frozen.inputs if self.tensors[t].role is not Role.PARAMETER]
        scaled = self._tensor(dtype, tokens, work.n)
        self._sized(frozen, "scale_back", coming, (scaled,), 2 * tokens * work.n)
        if dtype != base.dtype:
            self._sized(frozen, "widen", (), (), 3 * tokens * work.n)
        down, up = self._tensor(dtype, tokens, rank), self._tensor(dtype, tokens, work.k)
        self._small(frozen, Product(tokens, rank, work.n), (scaled,), (down,))
        self._small(frozen, Product(work.n, rank, tokens), (scaled, low), ())
        self._summed(frozen, down)
        self._small(frozen, Product(tokens, work.k, rank), (down,), (up,))
        self._small(frozen, Product(rank, work.k, tokens), (down, entering), ())
        casts = ("cast_a", "cast_b") if wide and self.adapters.autocast else ()
        self._over_weights(frozen, work, (*casts, "accumulate_a", "accumulate_b"))
        going = up
        if wide and self.adapters.autocast:
            going = self._moved(frozen, "widen", OpKind.COPY, going, ("float32", tokens, work.k))
        if self.adapters.dropout:
            through = self._tensor("float32" if wide else dtype, tokens, work.k)
            self._add(frozen, "dropout_back", OpKind.ELEMENTWISE, (going, kept_tensors[1]), (through,))
            going = through
        if wide:
            going = self._moved(frozen, "narrow", OpKind.COPY, going, (base.dtype, tokens, work.k))
        self._add(frozen, "sum_back", OpKind.ELEMENTWISE, (going, *frozen.outputs), frozen.outputs)

    def _moved(self, like: Kernel, name: str, kind: OpKind, source: int, made: tuple[str, int, int]) -> int:
        """A kernel that makes one tensor of another."""
        tensor = self._tensor(*made)
        self._add(like, name, kind, (source,), (tensor,))
        return tensor

    def _sized(self, like: Kernel, name: str, inputs: Sequence[int], outputs: tuple[int, ...], size: int) -> None:
        """A kernel that reads as many bytes as it writes, of tensors of which it may need a part only."""
        self._add(like, name, OpKind.ELEMENTWISE, inputs, outputs)
        self.kernels[-1] = replace(self.kernels[-1], bytes_read=size, bytes_written=size)

    def _summed(self, like: Kernel, low: int) -> None:
        """Ranks that share a product sum their parts of the rank-wide result."""
        if self.layout.tp == 1:
            return
        size = self.tensors[low].size_bytes
        detail = Collective("all_reduce", "tp", size)
        self._add_kernel(like, "all_reduce", None, size, size, inputs=(low,), outputs=(low,), detail=detail)
