"""Number formats of activations under PyTorch's autocast, where parameters are whole and kept in fp32.

[Note: activations under autocast] Products and attention run in 16 bits whatever they are given; ``layer_norm``,
``softmax`` and ``pow`` run in fp32 and give fp32; all else gives the widest of its operands (PyTorch aten/src/ATen/
autocast_mode.h: ``lower_precision_fp``, ``fp32``; docs: amp, "CUDA Op-Specific Behavior"). An embedding gives its
weight's format, so the residual stream is in fp32, and so are norms of it: passes over both move twice the bytes. Each
product copies its own operand to 16 bits, as copies of weights alone are kept (``cached_cast``). Backward goes the same
way back (``ToCopyBackward``): the gradient of what was copied to 16 bits is made fp32, that of a product's result 16
bits. Where a compiler fuses, copies cost nothing of their own, and what is in fp32 still is.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from lading.ir.graph import OpKind, Role
from lading.ir.work import AUTOCAST, Attention, Kernel, LocalTensor, Product, RankSegment, Stage

#: Kinds that give the widest of what they are given.
_PROMOTING = frozenset({
    OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.COPY, OpKind.NORM, OpKind.SOFTMAX, OpKind.REDUCTION,
    OpKind.RANDOM,
})  # fmt: skip
_HALF = ("bfloat16", "float16")
_WIDE = "float32"
#: In the place of a module: the copy that backward makes of a gradient.
_BACK = "(gradient)"
#: Operations that autocast runs in fp32.
_IN_FP32 = ("layer_norm", "._softmax.")


def with_autocast(segment: RankSegment) -> RankSegment:
    """Segment with its activations in the number formats of autocast, and the copies between them as kernels.

    Args:
        segment: A segment all of whose activations are in 16 bits, on a rank that shares no block with others.
    """
    return _Autocast(segment).result()


class _Autocast:
    """Walk over a segment's kernels in order, with the storages that are in fp32 so far."""

    def __init__(self, segment: RankSegment) -> None:
        self.segment = segment
        self.tensors = list(segment.tensors)
        self.kernels: list[Kernel] = []
        self.wide = {self._of(t) for t in segment.enters if self.tensors[t].dtype in _HALF}
        self.made = {self._of(t) for k in segment.kernels for t in k.outputs}
        self.before = {
            self._of(t) for k in segment.kernels if k.stage is Stage.FORWARD for t in (*k.inputs, *k.outputs)
        }
        self.copies: dict[tuple[int, str], int] = {}
        self.owed: set[int] = set()
        self.repaid: dict[int, int] = {}
        self.dropped: dict[str, bool] = {}

    def result(self) -> RankSegment:
        for kernel in self.segment.kernels:
            self._kernel(kernel)
        tensors = tuple(_widened(t) if t.storage in self.wide else t for t in self.tensors)
        return replace(self.segment, kernels=tuple(self.kernels), tensors=tensors, saved=self._saved())

    def _kernel(self, kernel: Kernel) -> None:
        if kernel.stage is not Stage.FORWARD:
            self._incoming(kernel)
        if isinstance(kernel.detail, Product | Attention):
            self._narrow(kernel)
        elif kernel.kind in (OpKind.GATHER, OpKind.SCATTER) and "embedding" in kernel.name:
            self._embedding(kernel)
        elif kernel.kind in _PROMOTING and kernel.name.startswith("aten."):
            self._promoting(kernel)
        else:
            self.kernels.append(kernel)

    def _of(self, tensor: int) -> int:
        return self.tensors[tensor].storage

    def _incoming(self, kernel: Kernel) -> None:
        """Gradients that come from the segment behind are of the format of what left."""
        if not any(self._of(t) in self.wide for t in self.segment.leaves):
            return
        for t in kernel.inputs:
            incoming = self.tensors[t]
            if (
                incoming.role is Role.ACTIVATION
                and incoming.dtype in _HALF
                and incoming.storage not in self.made | self.before
            ):
                self.wide.add(incoming.storage)

    def _narrow(self, kernel: Kernel) -> None:
        """Add a product or attention, its operands in 16 bits."""
        inputs = tuple(self._copy(t, kernel) if self._of(t) in self.wide else t for t in kernel.inputs)
        self.kernels.append(replace(kernel, inputs=inputs))
        if kernel.stage is not Stage.BACKWARD_INPUT:
            return
        copied = [prod(self.tensors[c].shape) for (_, module), c in self.copies.items() if module == kernel.module]
        for t in kernel.outputs:
            if prod(self.tensors[t].shape) in copied:
                self.owed.add(self._of(t))

    def _copy(self, tensor: int, kernel: Kernel) -> int:
        """A tensor in fp32, copied to 16 bits: once for each product of forward, once in backward."""
        storage, forward = self._of(tensor), kernel.stage is Stage.FORWARD
        copy = next(
            (c for (s, m), c in self.copies.items() if s == storage and (not forward or m == kernel.module)), -1
        )
        if copy < 0:
            copy = self._cast(tensor, kernel, wide=False)
            self.copies[storage, kernel.module if forward else _BACK] = copy
        return copy

    def _cast(self, tensor: int, kernel: Kernel, *, wide: bool) -> int:
        """Add a copy of a tensor in the other number format, and return the tensor that it makes."""
        like, half = self.tensors[tensor], self.tensors[tensor].size_bytes
        storage = max(t.storage for t in self.tensors) + 1
        self.tensors.append(replace(like, storage=storage, role=Role.ACTIVATION, name=""))
        read_and_written = (half, 2 * half) if wide else (2 * half, half)
        stage = Stage.FORWARD if kernel.stage is Stage.FORWARD else Stage.BACKWARD_INPUT
        result = len(self.tensors) - 1
        self.kernels.append(
            Kernel(AUTOCAST, OpKind.COPY, stage, kernel.module, like.dtype, *read_and_written, (tensor,), (result,))
        )
        if wide:
            self.wide.add(storage)
        return result

    def _embedding(self, kernel: Kernel) -> None:
        """Rows of a weight in fp32, or their gradients added to one."""
        self.wide |= {self._of(t) for t in kernel.outputs if self.tensors[t].role is Role.ACTIVATION}
        read, written = 2 * kernel.bytes_read, 2 * kernel.bytes_written
        self.kernels.append(replace(kernel, bytes_read=read, bytes_written=written))

    def _promoting(self, kernel: Kernel) -> None:
        """Add an operation that gives the widest of its operands, or fp32."""
        forward = kernel.stage is Stage.FORWARD
        if kernel.kind is OpKind.RANDOM and forward:
            self.dropped[kernel.module] = any(self._of(t) in self.wide for t in kernel.inputs)
        narrow = "native_dropout_backward" in kernel.name and not self.dropped.get(kernel.module, True)
        in_fp32 = any(name in kernel.name for name in _IN_FP32) and forward
        inputs = tuple(self._operand(t, kernel, in_fp32=in_fp32, narrow=narrow) for t in kernel.inputs)
        wide = not narrow and (in_fp32 or self._promotes(kernel, inputs))
        if wide and kernel.kind is OpKind.NORM and not forward:  # the gradient of its result, which was in fp32
            inputs = tuple(self._gradient(t, kernel) for t in inputs)
        widened = {t for t in kernel.outputs if wide and self._is_activation(t)}
        self.wide |= {self._of(t) for t in widened}
        more = sum(self._half(t) for t in dict.fromkeys(inputs) if self._of(t) in self.wide)
        written = kernel.bytes_written + sum(self._half(t) for t in widened)
        dtype = _WIDE if widened else kernel.dtype
        self.kernels.append(
            replace(kernel, inputs=inputs, dtype=dtype, bytes_read=kernel.bytes_read + more, bytes_written=written)
        )
        if "_softmax_backward_data" in kernel.name and widened:  # scores came in 16 bits
            for t in widened:
                narrowed = self._cast(t, kernel, wide=False)
                self.copies[self._of(t), _BACK] = narrowed

    def _operand(self, tensor: int, kernel: Kernel, *, in_fp32: bool, narrow: bool) -> int:
        storage = self._of(tensor)
        if narrow and storage in self.wide:
            return self._copy(tensor, kernel)
        if (storage, _BACK) in self.copies and self._reads_copy(kernel):
            return self.copies[storage, _BACK]
        if storage in self.owed or (in_fp32 and storage not in self.wide and self._is_activation(tensor)):
            if storage not in self.repaid:
                self.repaid[storage] = self._cast(tensor, kernel, wide=True)
            return self.repaid[storage]
        return tensor

    @staticmethod
    def _reads_copy(kernel: Kernel) -> bool:
        """Whether an operation of backward belongs to a product: its bias, or the mask and the scale of scores."""
        return kernel.kind is OpKind.REDUCTION or any(name in kernel.name for name in ("masked_fill", ".mul."))

    def _gradient(self, tensor: int, kernel: Kernel) -> int:
        is_narrow = self._is_activation(tensor) and self._of(tensor) not in self.wide | self.before
        return self._cast(tensor, kernel, wide=True) if is_narrow else tensor

    def _promotes(self, kernel: Kernel, inputs: tuple[int, ...]) -> bool:
        """Whether an operand is in fp32: an activation, or a parameter of an operation by elements."""
        if kernel.kind is OpKind.NORM and kernel.stage is not Stage.FORWARD:
            return any(self._of(t) in self.wide for t in inputs if self._of(t) in self.before)
        weights = kernel.kind is OpKind.ELEMENTWISE
        return any(self._of(t) in self.wide or (weights and self.tensors[t].role is Role.PARAMETER) for t in inputs)

    def _is_activation(self, tensor: int) -> bool:
        return self.tensors[tensor].role is Role.ACTIVATION and self.tensors[tensor].dtype in _HALF

    def _half(self, tensor: int) -> int:
        return self.tensors[tensor].size_bytes if self.tensors[tensor].dtype in _HALF else 0

    def _saved(self) -> tuple[int, ...]:
        """Local tensors that backward reads of what forward made: copies in the place of what was copied."""
        backward_kernels = [k for k in self.kernels if k.stage is not Stage.FORWARD]
        read = {self._of(t) for k in backward_kernels for t in k.inputs}
        half_copies = {
            self._of(t): t for k in self.kernels if k.name == AUTOCAST and k.stage is Stage.FORWARD for t in k.outputs
        }
        copied = {storage for storage, _ in self.copies}
        kept_tensors = [t for t in self.segment.saved if self._of(t) in read or self._of(t) not in copied]
        return (*kept_tensors, *(t for storage, t in half_copies.items() if storage in read))


def _widened(tensor: LocalTensor) -> LocalTensor:
    if tensor.dtype not in _HALF:
        return tensor
    return replace(tensor, dtype=_WIDE, size_bytes=2 * tensor.size_bytes)
