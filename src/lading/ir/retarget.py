"""Retarget: the operations that PyTorch runs on a device, in place of those it ran on the CPU during capture.

Capture is on CPU tensors, so a graph holds the CPU's choices. For "cuda" this pass replaces

    attention       by flash attention (bfloat16, float16, no mask) or the memory-efficient kernel, with the statistics
                    that these keep; their random state is a constant, as a captured attention never drops anything.
                    The second has no shared heads: keys and values are repeated, their gradients summed
    dropout         (empty_like, bernoulli_, div, mul) by native_dropout, with a mask of one byte an element
    norms           statistics of layer and batch norms in float32 where the CPU keeps them in 16 bits; rms_norm by one
                    kernel forward and one backward (``lading.ir.rms_norms``)
    gradient norms  linalg_vector_norm by _foreach_norm, which clip_grad_norm_ takes on a GPU
    devices         arguments that say "cpu"

and refuses what has no kernel there. All else has kernels of the same name for both, among them ``convolution`` and
``native_batch_norm`` (eager may take cuDNN's batch norm instead: other roundings, the same mathematics).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

from lading.errors import ConfigError
from lading.ir.graph import (
    DTYPE_BYTES,
    PERSISTENT,
    Arg,
    Literal,
    Op,
    OpKind,
    Phase,
    Ref,
    RepeatedBlock,
    Role,
    StepGraph,
    Storage,
    Tensor,
    rename_op,
    row_major,
)
from lading.ir.rms_norms import RmsNorm, rms_norms

_FLASH = "aten._scaled_dot_product_flash_attention"
_EFFICIENT = "aten._scaled_dot_product_efficient_attention"
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_CPU_ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
#: Elements at which each row of a mask must begin.
_ALIGNED = 8
_HALF = frozenset({"bfloat16", "float16"})
#: Norms whose statistics (results 1 and 2) a GPU keeps in float32.
_NORMS = frozenset({"aten.native_layer_norm.default", "aten.native_batch_norm.default"})
#: Beginnings of the names of operations with a kernel for the CPU only (native_functions.yaml, torch 2.11 and 2.13).
_CPU_ONLY = ("mkldnn_", "_mkldnn_", "onednn", "quantized", "_dyn_quant", "slow_conv3d", "_spdiags", "histogram")


def retarget(graph: StepGraph, kind: str, *, flash: bool = True) -> StepGraph:
    """Rewrite a step as a device of ``kind`` runs it.

    Args:
        graph: As captured on the CPU, expanded or not.
        kind: As ``lading.ir.machine.Device.kind``.
        flash: Whether the device has flash attention: NVIDIA's from Ampere on, as they have bfloat16.

    Raises:
        ConfigError: an operation has no kernel there; names it, its module and what to change.
    """
    return graph if kind == "cpu" or ":" in kind else _Cuda(graph, flash).graph()


class _Cuda:
    """Rewrites operations in program order; new storages and tensors come behind the old ones."""

    def __init__(self, graph: StepGraph, flash: bool) -> None:
        self.old, self.flash = graph, flash
        self.storages, self.tensors = list(graph.storages), list(graph.tensors)
        self.renamed: dict[int, int] = {}  # old tensor -> the one that takes its place
        self.random_state: int | None = None  # a storage of zeros
        self.before: list[Op] = []  # operations that the one being rewritten needs around it
        self.after: list[Op] = []
        self.padded: dict[int, int] = {}  # mask -> the same with longer rows
        self.repeated: dict[int, int] = {}  # keys or values -> the same for every query head
        self.rules: dict[str, Callable[[Op], Op]] = {
            _CPU_ATTENTION: self._attention,
            _CPU_ATTENTION_BACKWARD: self._attention_backward,
            "aten.linalg_vector_norm.default": self._gradient_norm,
            **dict.fromkeys(_NORMS, self._norm),
        }
        self.dropouts = _dropouts(graph)
        self.fused: dict[
            int, Callable[[Op], Op] | None
        ] = {}  # operations of norms: what takes their place, if anything
        for norm in rms_norms(graph):
            self._fuse(norm)

    def graph(self) -> StepGraph:
        """Build the rewritten graph; a storage that nothing uses any more has no bytes."""
        ops: list[Op] = []
        starts: list[int] = []
        for index, op in enumerate(self.old.ops):
            starts.append(len(ops))
            new = self._rewritten(index, op)
            ops += [self._retargeted_op(op) for op in (*self.before, *([] if new is None else [new]), *self.after)]
            self.before, self.after = [], []
        starts.append(len(ops))
        used = {self.tensors[t].storage for op in ops for t in (*op.inputs, *op.outputs, *op.mutates)}
        storages = [
            s if i in used or s.role in PERSISTENT or s.role is Role.INPUT else dataclasses.replace(s, size_bytes=0)
            for i, s in enumerate(self.storages)
        ]
        blocks = (_moved(block, starts) for block in self.old.blocks)
        graph = dataclasses.replace(
            self.old,
            storages=tuple(storages),
            tensors=tuple(self.tensors),
            ops=tuple(ops),
            blocks=tuple(block for block in blocks if block is not None),
        )
        graph.validate()
        return graph

    def _rewritten(self, index: int, op: Op) -> Op | None:
        if (dropout := self.dropouts.get(index)) is not None:
            return None if index in dropout.makes else self._renamed(self._dropped(op, dropout))
        if index in self.fused:
            fused = self.fused[index]
            return None if fused is None else self._renamed(fused(op))
        name = op.name.split(".")[1] if op.name.count(".") else op.name
        if rule := self.rules.get(op.name):
            op = rule(op)
        elif name.startswith(_CPU_ONLY) or name.endswith(("_for_cpu", "_for_cpu_backward")):
            raise ConfigError(
                f"{op.name} in {op.module or 'the model itself or the loss'} has a kernel for the CPU only; "
                "use the module that PyTorch runs on a GPU, or plan for a CPU"
            )
        return self._renamed(op)

    def _renamed(self, op: Op) -> Op:
        tensors = (*op.inputs, *op.outputs, *op.mutates)
        return rename_op(op, {t: self.renamed.get(t, t) for t in tensors})

    def _retargeted_op(self, op: Op) -> Op:
        """Name the GPU where an operation's arguments name the CPU, and count its bytes again."""
        return dataclasses.replace(
            op,
            args=tuple(map(_on_gpu, op.args)),
            kwargs=tuple((key, _on_gpu(value)) for key, value in op.kwargs),
            bytes_read=sum(self.tensors[t].touched_bytes for t in op.inputs),
            bytes_written=sum(self.tensors[t].touched_bytes for t in dict.fromkeys((*op.outputs, *op.mutates))),
        )

    def new_tensor(self, like: int, dtype: str, shape: tuple[int, ...]) -> int:
        """Make a dense tensor in a storage of its own, called as the storage of ``like`` is."""
        old = self.storages[self.tensors[like].storage]
        role = Role.ACTIVATION if old.role in PERSISTENT or old.role is Role.INPUT else old.role
        self.storages.append(Storage(old.name, prod(shape) * DTYPE_BYTES[dtype], role))
        self.tensors.append(Tensor(len(self.storages) - 1, dtype, shape, row_major(shape)))
        return len(self.tensors) - 1

    def _zeros(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Make a view of the constant that stands for random state nobody draws from."""
        if self.random_state is None:
            self.random_state = len(self.storages)
            self.storages.append(Storage("attention.random_state", 16, Role.CONSTANT, bytes(16)))
        return self._view(Tensor(self.random_state, dtype, shape, row_major(shape)))

    def _attention(self, op: Op) -> Op:
        q, k, v = (self._shape_of(arg) for arg in op.args[:3])
        dropout, causal = (*op.args[3:], *(0.0, False)[len(op.args) - 3 :])
        named = dict(op.kwargs)
        lse = op.results[1]
        scale_kwargs = (("scale", named["scale"]),) if named.get("scale") is not None else ()
        assert lse is not None
        if self._takes_flash(op, (q, k, v), named.get("attn_mask")):
            self.renamed[lse] = self.new_tensor(lse, "float32", q[:3])
            args: tuple[Arg, ...] = (*op.args[:3], dropout, causal, False)
            return self._replaced(op, f"{_FLASH}.default", args, scale_kwargs, (op.results[0], lse, *(None,) * 7))
        self.renamed[lse] = self.new_tensor(lse, "float32", (*q[:2], -(-q[2] // 32) * 32))
        bias = self._bias(op, named.get("attn_mask"), (*q[:3], k[2]))
        args = (op.args[0], *(self._for_every_head(op, arg, q[1]) for arg in op.args[1:3]), bias, True, dropout, causal)
        return self._replaced(op, f"{_EFFICIENT}.default", args, scale_kwargs, (op.results[0], lse, None, None))

    def _attention_backward(self, op: Op) -> Op:
        grad, q, k, v, out, lse, dropout, causal = op.args
        shapes = (self._shape_of(q), self._shape_of(k), self._shape_of(v))
        named = dict(op.kwargs)
        scale_kwargs = (("scale", named["scale"]),) if named.get("scale") is not None else ()
        if self._takes_flash(op, shapes, named.get("attn_mask")):
            state = (Ref(self._zeros("uint64", (2,))), Ref(self._zeros("uint64", ())))
            lengths = (shapes[0][2], shapes[1][2])
            args: tuple[Arg, ...] = (grad, q, k, v, out, lse, None, None, *lengths, dropout, causal, *state)
            return self._replaced(op, f"{_FLASH}_backward.default", args, scale_kwargs, op.results)
        state = (Ref(self._zeros("int64", ())), Ref(self._zeros("int64", ())))
        bias = self._bias(op, named.get("attn_mask"), (*shapes[0][:3], shapes[1][2]))
        mask = (True, True, True, False)
        wide = (self._for_every_head(op, arg, shapes[0][1]) for arg in (k, v))
        args = (grad, q, *wide, bias, out, lse, *state, dropout, mask, causal)
        results = (op.results[0], *(self._summed(op, result, shapes[0][1]) for result in op.results[1:]))
        op = dataclasses.replace(op, outputs=tuple(r for r in results if r is not None))
        return self._replaced(op, f"{_EFFICIENT}_backward.default", args, scale_kwargs, (*results, None))

    def _for_every_head(self, op: Op, arg: Arg, heads: int) -> Arg:
        """Repeat keys or values for as many heads as there are queries, each in a row, unless they are as many."""
        old = self._tensor_of(arg)
        assert isinstance(arg, Ref)
        if old.shape[1] == heads:
            return arg
        if arg.tensor not in self.repeated:
            spread = (*old.shape[:2], heads // old.shape[1], *old.shape[2:])
            source = self._view(dataclasses.replace(old, shape=spread, stride=(*old.stride[:2], 0, *old.stride[2:])))
            clone = self.new_tensor(arg.tensor, old.dtype, spread)
            clone_args = (("memory_format", Literal("memory_format", "contiguous_format")),)
            self.before.append(
                dataclasses.replace(
                    op, name="aten.clone.default", args=(Ref(source),), kwargs=clone_args, inputs=(source,),
                    outputs=(clone,), results=(clone,), kind=OpKind.COPY, flops=0,
                )
            )  # fmt: skip
            shape = (old.shape[0], heads, *old.shape[2:])
            wide = dataclasses.replace(self.tensors[clone], shape=shape, stride=row_major(shape))
            self.repeated[arg.tensor] = self._view(wide)
        return Ref(self.repeated[arg.tensor])

    def _summed(self, op: Op, result: int | None, heads: int) -> int | None:
        """Make room for the gradient of every head, to be summed over those that share keys or values."""
        if result is None or (old := self.tensors[result]).shape[1] == heads:
            return result
        wide = self.new_tensor(result, old.dtype, (old.shape[0], heads, *old.shape[2:]))
        spread = (*old.shape[:2], heads // old.shape[1], *old.shape[2:])
        source = self._view(dataclasses.replace(self.tensors[wide], shape=spread, stride=row_major(spread)))
        self.after.append(
            dataclasses.replace(
                op, name="aten.sum.dim_IntList", args=(Ref(source), (2,)), kwargs=(), inputs=(source,),
                outputs=(result,), results=(result,), kind=OpKind.REDUCTION, flops=0,
            )
        )  # fmt: skip
        return wide

    def _view(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _takes_flash(self, op: Op, shapes: tuple[tuple[int, ...], ...], mask: Arg) -> bool:
        """Whether eager takes its flash kernel for these; see ATen/native/transformers/cuda/sdp_utils.cpp.

        Raises:
            ConfigError: neither of the two.
        """
        q, k, v = shapes
        dtype = self._tensor_of(op.args[1 if "backward" in op.name else 0]).dtype
        square = q[2] == k[2] or True not in op.args  # is_causal is the only flag
        plain = self.flash and dtype in _HALF and mask is None and square
        if plain and q[3] == k[3] == v[3] and q[3] % 8 == 0 and q[3] <= 256:
            return True
        why = ""
        if dtype not in (*_HALF, "float32"):
            why = f"{dtype} has none: use float32 or bfloat16"
        elif k[1] != v[1] or q[1] % k[1]:
            why = f"{q[1]} query heads cannot share {k[1]} key and {v[1]} value heads"
        elif any(width % (8 if dtype in _HALF else 4) for width in (q[3], v[3])):
            why = f"heads of width {q[3]} have none: make them a multiple of 8"
        if why:
            raise ConfigError(f"attention in {op.module or 'the model itself'} has no fused kernel on a GPU: {why}")
        return False

    def _bias(self, op: Op, mask: Arg, shape: tuple[int, ...]) -> Arg:
        """Expand a mask to every batch row and head, with longer rows where the kernel cannot read it as it is."""
        if mask is None:
            return None
        assert isinstance(mask, Ref)
        expanded = _expanded(self._tensor_of(mask), shape)
        if expanded.stride[-1] != 1 or any(s % _ALIGNED for s in expanded.stride[:-1]):
            expanded = _expanded(self._tensor_of(self._padded(op, mask)), shape)
        return Ref(self._view(expanded))

    def _padded(self, op: Op, mask: Ref) -> Ref:
        """Pad a mask's rows to a multiple of eight, as scaled_dot_product_attention does."""
        if mask.tensor not in self.padded:
            tensor = self._tensor_of(mask)
            width = -(-tensor.shape[-1] // _ALIGNED) * _ALIGNED
            padded_mask = self.new_tensor(mask.tensor, tensor.dtype, (*tensor.shape[:-1], width))
            args: tuple[Arg, ...] = (mask, (0, width - tensor.shape[-1]))
            self.before.append(
                dataclasses.replace(
                    op, name="aten.constant_pad_nd.default", args=args, kwargs=(), inputs=(mask.tensor,),
                    outputs=(padded_mask,), results=(padded_mask,), kind=OpKind.COPY, flops=0,
                )
            )  # fmt: skip
            self.padded[mask.tensor] = padded_mask
        return Ref(self.padded[mask.tensor])

    def _gradient_norm(self, op: Op) -> Op:
        """Rewrite the norm of one gradient among those that are clipped."""
        of_gradient = op.phase is Phase.OPTIMIZER and self._storage_of(op.args[0]).name != "clip.norms"
        if not of_gradient or op.args[1:] != (2.0,) or op.kwargs:
            return op
        return dataclasses.replace(op, name="aten._foreach_norm.Scalar", args=((op.args[0],), 2.0))

    def _norm(self, op: Op) -> Op:
        for statistic in op.results[1:3]:
            if statistic is not None and self.tensors[statistic].dtype in _HALF:
                shape = self.tensors[statistic].shape
                self.renamed[statistic] = self.new_tensor(statistic, "float32", shape)
        return op

    def _fuse(self, norm: RmsNorm) -> None:
        """Note what takes the place of a norm's operations: the last one forward, and backward the first on its way."""
        self.fused.update(dict.fromkeys((*norm.forward, *norm.backward)))
        self.fused[norm.forward[-1]] = partial(self._rms_norm, norm)
        if norm.grad is not None:
            reads = (i for i in norm.backward if norm.grad in self.old.ops[i].inputs)
            of_x = norm.of_x
            if norm.total is not None and of_x is not None:
                of_x = self.new_tensor(of_x, self.tensors[of_x].dtype, self.tensors[of_x].shape)
                self.fused[norm.total] = partial(self._added, norm, of_x)
            self.fused[next(reads)] = partial(self._rms_norm_backward, norm, of_x)

    def _added(self, norm: RmsNorm, of_x: int, op: Op) -> Op:
        """Rewrite the last addition to x's gradient: to what others have made of it comes what the kernel makes."""
        assert norm.other_gradient is not None
        return self._replaced(op, op.name, (Ref(norm.other_gradient), Ref(of_x)), (), op.results)

    def _rms_norm(self, norm: RmsNorm, op: Op) -> Op:
        weight = None if norm.weight is None else Ref(norm.weight)
        op = dataclasses.replace(op, outputs=(norm.out, norm.rstd), kind=OpKind.NORM)
        args = (Ref(norm.x), norm.dims, weight, norm.epsilon)
        return self._replaced(op, "aten._fused_rms_norm.default", args, (), op.outputs)

    def _rms_norm_backward(self, norm: RmsNorm, of_x: int | None, op: Op) -> Op:
        assert norm.grad is not None
        of_weight = norm.of_weight
        if of_weight is not None and self.tensors[of_weight].shape != norm.dims:  # a sum that keeps the dims it is over
            of_weight = self._view(
                dataclasses.replace(self.tensors[of_weight], shape=norm.dims, stride=row_major(norm.dims))
            )
        results = (of_x, of_weight)
        op = dataclasses.replace(op, outputs=tuple(r for r in results if r is not None), kind=OpKind.NORM)
        weight = None if norm.weight is None else Ref(norm.weight)
        output_mask = tuple(r is not None for r in results)
        args = (Ref(norm.grad), Ref(norm.x), norm.dims, Ref(norm.rstd), weight, output_mask)
        return self._replaced(op, "aten._fused_rms_norm_backward.default", args, (), results)

    def _dropped(self, op: Op, dropout: _Dropout) -> Op:
        """Rewrite a multiplication by a dropout's noise."""
        (dropped_input,) = (arg for arg in op.args if arg != Ref(dropout.noise))
        if dropout.mask is None:
            dropout.mask = self.new_tensor(dropout.noise, "bool", self._shape_of(dropped_input))
            args: tuple[Arg, ...] = (dropped_input, round(1.0 - dropout.keep, 12), True)
            op = dataclasses.replace(op, outputs=(*op.outputs, dropout.mask), random=True, kind=OpKind.RANDOM)
            return self._replaced(op, "aten.native_dropout.default", args, (), (op.results[0], dropout.mask))
        args = (dropped_input, Ref(dropout.mask), 1.0 / dropout.keep)
        return self._replaced(op, "aten.native_dropout_backward.default", args, (), op.results)

    def _replaced(
        self,
        op: Op,
        name: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        results: tuple[int | None, ...],
    ) -> Op:
        inputs = tuple(dict.fromkeys(arg.tensor for arg in args if isinstance(arg, Ref)))
        return dataclasses.replace(op, name=name, args=args, kwargs=kwargs, inputs=inputs, results=results)

    def _tensor_of(self, arg: Arg) -> Tensor:
        assert isinstance(arg, Ref), arg
        return self.tensors[arg.tensor]

    def _shape_of(self, arg: Arg) -> tuple[int, ...]:
        return self._tensor_of(arg).shape

    def _storage_of(self, arg: Arg) -> Storage:
        return self.storages[self._tensor_of(arg).storage]


@dataclass
class _Dropout:
    """Operations that drop elements: some make the noise, one multiplies by it in forward, others in backward.

    Attributes:
        noise: Tensor of zeros and ``1 / keep``.
        mask: Tensor that takes its place, once the forward operation is rewritten.
    """

    keep: float
    noise: int
    makes: tuple[int, ...]
    mask: int | None = None


def _dropouts(graph: StepGraph) -> dict[int, _Dropout]:
    """Find every dropout of the form that eager runs on a CPU, under each of its operations."""
    readers: dict[int, list[int]] = {}
    writers: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for storage in dict.fromkeys(graph.storage_of(t) for t in op.inputs):
            readers.setdefault(storage, []).append(index)
        for storage in graph.writes(op):
            writers.setdefault(storage, []).append(index)
    dropouts: dict[int, _Dropout] = {}
    for index, op in enumerate(graph.ops):
        if op.name == "aten.bernoulli_.float" and (dropout := _dropout(graph, readers, writers, index)) is not None:
            muls = readers[graph.storage_of(dropout.noise)]
            dropouts.update(dict.fromkeys((*dropout.makes, *muls), dropout))
    return dropouts


def _dropout(
    graph: StepGraph, readers: dict[int, list[int]], writers: dict[int, list[int]], drawn: int
) -> _Dropout | None:
    """Find the dropout whose random numbers one operation draws; None if it is anything else."""
    (place,) = graph.ops[drawn].mutates
    keep = (*graph.ops[drawn].args[1:], 0.5)[0]  # the default is not written down
    storage = graph.storage_of(place)
    maker, divided = writers[storage][0], readers[storage][-1]
    division = graph.ops[divided]
    is_dropout = graph.ops[maker].name == "aten.empty_like.default" and division.name == "aten.div.Scalar"
    if not is_dropout or writers[storage] != [maker, drawn] or readers[storage] != [drawn, divided]:
        return None
    if not isinstance(keep, float) or division.args != (Ref(place), keep):
        return None
    noise = division.outputs[0]
    muls = [graph.ops[i] for i in readers.get(graph.storage_of(noise), ())]
    shape = graph.tensors[noise].shape
    same_draws = all(
        op.name == "aten.mul.Tensor" and not op.mutates and len(op.inputs) == 2 and op.args.count(Ref(noise)) == 1
        and all(graph.tensors[t].shape == shape for t in (*op.inputs, *op.outputs))
        for op in muls
    )  # fmt: skip
    forward = [op.phase is not Phase.BACKWARD for op in muls]
    if not muls or not same_draws or forward != [True, *(False for _ in muls[1:])]:
        return None
    return _Dropout(keep, noise, (maker, drawn, divided))


def _expanded(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View a mask as every batch row and head sees it; columns added to its rows are left out."""
    missing = len(shape) - len(mask.shape)
    lengths, strides = (*(1,) * missing, *mask.shape), (*(0,) * missing, *mask.stride)
    stride = tuple(s if n > 1 else 0 for n, s in zip(lengths, strides, strict=True))
    return dataclasses.replace(mask, shape=shape, stride=stride)


def _on_gpu(arg: Arg) -> Arg:
    if isinstance(arg, Literal):
        return Literal("device", "cuda") if arg.kind == "device" and arg.value.startswith("cpu") else arg
    return tuple(map(_on_gpu, arg)) if isinstance(arg, tuple) else arg


def _moved(block: RepeatedBlock, starts: list[int]) -> RepeatedBlock | None:
    """Move a block to its new place; None if its instances are not alike any more."""
    spans = [(starts[s], starts[s + block.num_ops] - starts[s]) for s in block.starts]
    lengths = {length for _, length in spans}
    if len(lengths) != 1 or not min(lengths):
        return None
    return dataclasses.replace(block, num_ops=min(lengths), starts=tuple(start for start, _ in spans))
