"""Reference interpreter: runs operations of a graph on plain tensors, one after another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lading.errors import CaptureError
from lading.ir.graph import Arg, Literal, Op, Ref, Role, Storage, Tensor

#: Most bytes that may be computed for one answer.
_LIMIT_BYTES = 1 << 28


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
                tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
                self.bytes[index] = tensor

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


@dataclass(frozen=True)
class Answer:
    """Operations that tensors of a graph follow from, where these read constants and the batch alone.

    Attributes:
        ops: In the order of the graph.
        needed: Ids of the storages that take part.
        leaves: Tensors of the batch among them.
        wanted: The tensors.
    """

    storages: Sequence[Storage]
    tensors: Sequence[Tensor]
    ops: tuple[Op, ...]
    needed: frozenset[int]
    leaves: tuple[int, ...]
    wanted: tuple[int, ...]

    def values(self, inputs: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Compute the tensors from those of a batch."""
        interpreter = Interpreter(self.storages, self.tensors, self.needed)
        with torch.no_grad():
            for leaf in self.leaves:
                interpreter.put(leaf, inputs[leaf])
            for op in self.ops:
                interpreter.run(op)
            return [interpreter.tensor(t).clone() for t in self.wanted]


def answer_of(
    storages: Sequence[Storage],
    tensors: Sequence[Tensor],
    ops: Sequence[Op],
    wanted: Sequence[int],
    inputs: Collection[int],
) -> Answer | None:
    """Find the operations that tensors follow from; None where they are random, large, or not of the inputs alone.

    Args:
        wanted: The tensors.
        inputs: Tensors that may be read, beside constants.
    """
    needed_storages = {tensors[t].storage for t in wanted}
    chosen: list[Op] = []
    for op in reversed(ops):
        written = {tensors[t].storage for t in (*op.outputs, *op.mutates)}
        if written & needed_storages:
            if op.random:
                return None
            chosen.append(op)
            needed_storages |= {tensors[t].storage for t in op.inputs} | written
    written_by_chosen = {tensors[t].storage for op in chosen for t in op.outputs}
    leaves = {tensors[t].storage: t for t in inputs}
    if any(storages[s].role is not Role.CONSTANT and s not in leaves for s in needed_storages - written_by_chosen):
        return None
    if sum(storages[s].size_bytes for s in needed_storages) > _LIMIT_BYTES:
        return None
    read = tuple(leaves[storage] for storage in needed_storages & leaves.keys())
    return Answer(storages, tensors, tuple(reversed(chosen)), frozenset(needed_storages), read, tuple(wanted))


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
