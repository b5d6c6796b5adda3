"""Graph writer: the storages, tensors and operations of a graph while a pass rewrites it for the ranks of a layout."""

from __future__ import annotations

import dataclasses
from math import prod

from lading.ir.graph import DTYPE_BYTES, Arg, Op, OpKind, Ref, Role, StepGraph, Storage, Tensor, row_major

#: Roles of storages of the capture whose versions on a rank are ordinary temporaries.
_LASTING = frozenset({Role.PARAMETER, Role.GRADIENT, Role.INPUT, Role.BUFFER, Role.CONSTANT})


class GraphWriter:
    """Lists of a graph that grow: those of a captured micro-batch, with what a pass adds, and new operations.

    Args:
        captured: Graph whose storages and tensors keep their numbers.
        across: Ranks that the operations of Lading's own go over, from ``Layout.across``.
    """

    def __init__(self, captured: StepGraph, across: tuple[tuple[str, int | str], ...] = ()) -> None:
        self.storages: list[Storage] = [*captured.storages]
        self.tensors: list[Tensor] = [*captured.tensors]
        self.ops: list[Op] = []
        self.across = across

    def storage(self, name: str, dtype: str, elements: int, role: Role = Role.ACTIVATION) -> int:
        """Add a storage of so many elements."""
        self.storages.append(Storage(name, elements * DTYPE_BYTES[dtype], role))
        return len(self.storages) - 1

    def version(self, storage: int, what: str, dtype: str, elements: int) -> int:
        """Add a storage for another version of one, named by ``what`` it is: a temporary, whatever that one is."""
        of = self.storages[storage]
        role = Role.ACTIVATION if of.role in _LASTING else of.role
        return self.storage(f"{of.name} {what}", dtype, elements, role)

    def tensor(self, tensor: Tensor) -> int:
        """Add a tensor."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def view(self, storage: int, dtype: str, shape: tuple[int, ...]) -> int:
        """Add a tensor that views a storage from its start, row by row."""
        return self.tensor(Tensor(storage, dtype, shape, row_major(shape)))

    def fresh(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Add a tensor with a storage of its own, row by row."""
        return self.view(self.storage(name, dtype, prod(shape)), dtype, shape)

    def row(self, storage: int, dtype: str) -> int:
        """Add a tensor that views all of a storage as one dim."""
        return self.view(storage, dtype, (self.storages[storage].size_bytes // DTYPE_BYTES[dtype],))

    def add(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        like: Op,
        kind: OpKind,
        args: tuple[Arg, ...] = (),
        kwargs: tuple[tuple[str, Arg], ...] = (),
        flops: int = 0,
    ) -> None:
        """Add an operation that makes ``outputs``, in the phase and the module of the one that it stands beside.

        Args:
            args: Its arguments; () for its inputs.
            kwargs: Its named arguments; of an operation of Lading's own, the ranks that it goes over come first.
        """
        across = () if name.startswith("aten.") else self.across
        self.ops.append(Op(
            name=name, phase=like.phase, args=args or tuple(map(Ref, inputs)), kwargs=(*across, *kwargs),
            inputs=inputs, outputs=outputs, results=outputs, mutates=(), module=like.module, kind=kind, flops=flops,
            bytes_read=sum(self.tensors[t].touched_bytes for t in inputs),
            bytes_written=sum(self.tensors[t].touched_bytes for t in outputs),
        ))  # fmt: skip

    def cat(self, pieces: tuple[int, ...], dim: int, out: int, like: Op) -> None:
        """Add the copy of tensors one after another along a dim."""
        self.add("aten.cat.default", pieces, (out,), like, OpKind.COPY, (tuple(map(Ref, pieces)), dim))

    def written(self, graph: StepGraph) -> StepGraph:
        """Copy of a graph with the storages, tensors and operations as they are now."""
        lists = {"storages": tuple(self.storages), "tensors": tuple(self.tensors), "ops": tuple(self.ops)}
        return dataclasses.replace(graph, **lists)
