"""The one-file reference: run a StepGraph in program order with plain tensors, freeing nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lading.errors import CaptureError
from lading.ir.graph import Arg, Literal, Ref, Role, StepGraph


class Replay:
    """A StepGraph with real values.

    Args:
        graph: One micro-batch as captured (no optimizer operations).
        named: Parameters and buffers by name; buffers are changed as the graph says.
        batch: Input leaves by the graph's input names.
    """

    def __init__(self, graph: StepGraph, named: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.bytes: dict[int, torch.Tensor] = {}
        for parameter in graph.parameters:
            self._put(parameter.tensor, named[parameter.names[0]])
        for name, tensor in graph.buffers:
            self._put(tensor, named[name])
        for name, tensor in graph.inputs[0]:
            self._put(tensor, batch[name])
        for index, storage in enumerate(graph.storages):
            if storage.role is Role.CONSTANT:
                self.bytes[index] = torch.tensor(list(storage.data or b""), dtype=torch.uint8)

    def run(self) -> torch.Tensor:
        """Run every operation; returns the loss."""
        with torch.no_grad():
            for op in self.graph.ops:
                out = _resolve(op.name)(*map(self._decode, op.args), **{k: self._decode(v) for k, v in op.kwargs})
                flat = list(out) if isinstance(out, (tuple, list)) else [out]
                for value, tensor in zip(flat, op.results, strict=True):
                    if tensor is not None:
                        self._put(tensor, value)
        return self.tensor(self.graph.losses[0])

    def tensor(self, index: int) -> torch.Tensor:
        """The view of its storage that a graph tensor is."""
        t = self.graph.tensors[index]
        flat = self.bytes[t.storage].view(getattr(torch, t.dtype))
        return flat.as_strided(t.shape, t.stride, t.offset)

    def _put(self, index: int, value: torch.Tensor) -> None:
        t = self.graph.tensors[index]
        if value.dtype is not getattr(torch, t.dtype) or tuple(value.shape) != t.shape:
            raise CaptureError(f"expected {t.dtype} {t.shape}, the kernel gave {value.dtype} {tuple(value.shape)}")
        if t.storage not in self.bytes:
            self.bytes[t.storage] = torch.empty(self.graph.storages[t.storage].size_bytes, dtype=torch.uint8)
        self.tensor(index).copy_(value.detach())

    def _decode(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.tensor(arg.tensor)
        if isinstance(arg, Literal):
            return decode_literal(arg)
        return [self._decode(item) for item in arg] if isinstance(arg, tuple) else arg


def decode_literal(arg: Literal) -> Any:
    """The torch object a Literal names."""
    if arg.kind == "device":
        return torch.device(arg.value)
    if arg.kind in ("float", "complex"):
        return {"float": float, "complex": complex}[arg.kind](arg.value)
    return getattr(torch, arg.value)


def _resolve(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
