"""Reference interpreter: runs operations of a graph on plain tensors, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lading.errors import CaptureError
from lading.ir.graph import Arg, Literal, Op, Ref, Role, Storage, Tensor


class Interpreter:
    """Runs operations on storages with real bytes.

    Args:
        only: Ids of the storages that will be used; None for all.

    Attributes:
        bytes: Storages that have a value, as uint8, by id.
    """

    def __init__(
        self, storages: Sequence[Storage], tensors: Sequence[Tensor], only: Iterable[int] | None = None
    ) -> None:
        self.storages, self.tensors = storages, tensors
        self.bytes: dict[int, torch.Tensor] = {}
        for index in range(len(storages)) if only is None else only:
            storage = storages[index]
            if storage.role is Role.CONSTANT:
                data = bytearray(storage.data or b"")
                made = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
                self.bytes[index] = made

    def run(self, op: Op) -> None:
        """Run one operation; its results are copied into the storages the graph gives them."""
        out = _resolve(op.name)(*map(self._decode, op.args), **{k: self._decode(v) for k, v in op.kwargs})
        flat = list(out) if isinstance(out, (tuple, list)) else [out]
        for value, tensor in zip(flat, op.results, strict=True):
            if tensor is not None:
                self.put(tensor, value)

    def tensor(self, index: int) -> torch.Tensor:
        """View a storage as a graph tensor; its elements mean nothing where it has no value yet."""
        t = self.tensors[index]
        if t.storage not in self.bytes:
            self.bytes[t.storage] = torch.empty(self.storages[t.storage].size_bytes, dtype=torch.uint8)
        return self.bytes[t.storage].view(getattr(torch, t.dtype)).as_strided(t.shape, t.stride, t.offset)

    def put(self, index: int, value: torch.Tensor) -> None:
        """Copy a value into a graph tensor.

        Raises:
            CaptureError: the value has another dtype or shape.
        """
        t = self.tensors[index]
        if value.dtype is not getattr(torch, t.dtype) or tuple(value.shape) != t.shape:
            raise CaptureError(f"expected {t.dtype} {t.shape}, the kernel gave {value.dtype} {tuple(value.shape)}")
        self.tensor(index).copy_(value.detach())

    def _decode(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.tensor(arg.tensor)
        if isinstance(arg, Literal):
            return decode_literal(arg)
        return [self._decode(item) for item in arg] if isinstance(arg, tuple) else arg


def decode_literal(arg: Literal) -> Any:
    """Torch object that a Literal names, such as a dtype."""
    if arg.kind == "device":
        return torch.device(arg.value)
    if arg.kind in ("float", "complex"):
        return {"float": float, "complex": complex}[arg.kind](arg.value)
    return getattr(torch, arg.value)


def _resolve(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
