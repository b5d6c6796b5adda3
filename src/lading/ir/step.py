"""Expansion: from one micro-batch's graph to a whole training step.

Micro-batches are unrolled, gradients accumulated in place, clipped by their global norm, and every parameter updated
as soon as its gradient is final and nothing still reads the old value. The operations added are those that eager
PyTorch runs (``AccumulateGrad``, ``clip_grad_norm_``, fused AdamW), so the numbers are the same to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lading.errors import ConfigError
from lading.ir.graph import (
    DTYPE_BYTES,
    PERSISTENT,
    Arg,
    Block,
    Op,
    OpKind,
    Parameter,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tensor,
    rename_op,
)

#: The operation that updates one parameter: (param, grad, exp_avg, exp_avg_sq, step), all but grad mutated.
ADAMW = "lading.adamw"


def expand(graph: StepGraph, *, clip_norm: float = 0.0) -> StepGraph:
    """The whole step of ``graph.accumulation`` micro-batches with AdamW.

    Args:
        graph: One micro-batch, as captured.
        clip_norm: Limit of the global gradient norm as in ``torch.nn.utils.clip_grad_norm_``; 0 switches it off.

    Raises:
        ConfigError: negative clip_norm, or no parameter has a gradient.
    """
    if clip_norm < 0:
        raise ConfigError(f"expected clip_norm >= 0 (0 = off), got {clip_norm}")
    trained = [p for p in graph.parameters if p.gradient is not None]
    if not trained:
        raise ConfigError("no parameter has a gradient: nothing would be trained; check requires_grad")
    builder = _Builder(graph)
    for micro in range(graph.accumulation):
        builder.add_micro_batch(micro)
    coefficient = builder.add_clipping(trained, clip_norm) if clip_norm else None
    builder.add_updates(trained, coefficient)
    return builder.finish()


class _Builder:
    """Grows the expanded graph; ``ops`` holds the operations in their final order."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.storages = list(graph.storages)
        self.tensors = list(graph.tensors)
        self.ops: list[Op] = []
        self.starts: list[int] = []
        self.inputs: list[tuple[tuple[str, int], ...]] = []
        self.losses: list[int] = []
        self.states: list[tuple[str, int]] = []

    def add_micro_batch(self, micro: int) -> None:
        """Append the operations of one micro-batch; a later one has fresh activations and adds to the gradients."""
        names = self._tensor_map(micro)
        self.starts.append(len(self.ops))
        self.ops.extend(rename_op(op, names) for op in self.graph.ops)
        self.inputs.append(tuple((name, names[t]) for name, t in self.graph.inputs[0]))
        self.losses.append(names[self.graph.losses[0]])
        if micro:
            for parameter in self.graph.parameters:
                if parameter.gradient is not None:
                    self._accumulate(parameter, names[parameter.gradient])

    def _tensor_map(self, micro: int) -> dict[int, int]:
        """Old tensor id -> id in this micro-batch; persistent storages are shared, the others copied."""
        if micro == 0:
            return {t: t for t in range(len(self.graph.tensors))}
        moved: dict[int, int] = {}
        names: dict[int, int] = {}
        for old, tensor in enumerate(self.graph.tensors):
            storage = self.graph.storages[tensor.storage]
            if storage.role in PERSISTENT:
                names[old] = old
                continue
            if tensor.storage not in moved:
                moved[tensor.storage] = self._storage(f"{storage.name}#{micro}", storage.size_bytes, storage.role)
            names[old] = self._tensor(dataclasses.replace(tensor, storage=moved[tensor.storage]))
        return names

    def _storage(self, name: str, size_bytes: int, role: Role) -> int:
        self.storages.append(Storage(name, size_bytes, role))
        return len(self.storages) - 1

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _scalar(self, name: str, role: Role) -> int:
        return self._tensor(Tensor(self._storage(name, DTYPE_BYTES["float32"], role), "float32", (), ()))

    def _accumulate(self, parameter: Parameter, fresh: int) -> None:
        """``grad += fresh`` right after ``fresh`` gets its last write."""
        assert parameter.gradient is not None
        after = self._last_write(fresh, self.starts[-1])
        args: tuple[Arg, ...] = (Ref(parameter.gradient), Ref(fresh))
        op = self._op("aten.add_.Tensor", args, parameter, (parameter.gradient, fresh), mutates=(parameter.gradient,))
        self.ops.insert(after + 1, dataclasses.replace(op, phase=Phase.BACKWARD))

    def _last_write(self, tensor: int, start: int) -> int:
        storage = self.tensors[tensor].storage
        writes = (
            i
            for i in range(start, len(self.ops))
            if any(self.tensors[t].storage == storage for t in (*self.ops[i].outputs, *self.ops[i].mutates))
        )
        return max(writes)

    def add_clipping(self, trained: Sequence[Parameter], clip_norm: float) -> int:
        """Add the operations of clip_grad_norm_ up to the coefficient; returns its tensor.

        Each gradient's norm is taken as soon as the gradient is final, while it is still at hand.
        """
        norms: list[int] = []
        final = {self.tensors[t].storage: i for i, op in enumerate(self.ops) for t in (*op.outputs, *op.mutates)}
        after: dict[int, list[Op]] = {}
        for parameter in trained:
            assert parameter.gradient is not None
            norm = self._scalar(f"{parameter.names[0]}.grad_norm", Role.WORKSPACE)
            args: tuple[Arg, ...] = (Ref(parameter.gradient), 2.0)
            op = self._making("aten.linalg_vector_norm.default", args, parameter, (parameter.gradient,), norm)
            after.setdefault(final[self.tensors[parameter.gradient].storage], []).append(op)
            norms.append(norm)
        self.ops = [new for index, op in enumerate(self.ops) for new in (op, *after.get(index, ()))]
        clip = Parameter(("clip.grad_norm",), -1, None)
        stacked = self._tensor(
            Tensor(self._storage("clip.norms", 4 * len(norms), Role.WORKSPACE), "float32", (len(norms),), (1,))
        )
        args = (tuple(Ref(n) for n in norms),)
        self.ops.append(self._making("aten.stack.default", args, clip, tuple(norms), stacked))
        last = stacked
        chain: tuple[tuple[str, tuple[Arg, ...]], ...] = (
            ("aten.linalg_vector_norm.default", (2.0,)),
            ("aten.add.Tensor", (1e-6,)),
            ("aten.reciprocal.default", ()),
            ("aten.mul.Tensor", (clip_norm,)),
            ("aten.clamp.default", (None, 1.0)),
        )
        for name, rest in chain:
            out = self._scalar(f"clip.{name.split('.')[1]}", Role.WORKSPACE)
            self.ops.append(self._making(name, (Ref(last), *rest), clip, (last,), out))
            last = out
        return last

    def add_updates(self, trained: Sequence[Parameter], coefficient: int | None) -> None:
        """Insert one update per parameter after its last reader and its final gradient."""
        last: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for t in (*op.inputs, *op.outputs, *op.mutates):
                last[self.tensors[t].storage] = index
        after: dict[int, list[Op]] = {}
        end = len(self.ops) - 1
        for parameter in trained:
            assert parameter.gradient is not None
            ready = max(last[self.tensors[t].storage] for t in (parameter.tensor, parameter.gradient))
            ops = after.setdefault(end if coefficient is not None else ready, [])
            if coefficient is not None:
                args: tuple[Arg, ...] = (Ref(parameter.gradient), Ref(coefficient))
                inputs = (parameter.gradient, coefficient)
                ops.append(self._op("aten.mul_.Tensor", args, parameter, inputs, mutates=inputs[:1]))
            ops.append(self._update(parameter))
        self.ops = [new for index, op in enumerate(self.ops) for new in (op, *after.get(index, ()))]

    def _update(self, parameter: Parameter) -> Op:
        assert parameter.gradient is not None
        value = self.tensors[parameter.tensor]
        size = self.storages[value.storage].size_bytes
        states: list[int] = []
        for suffix in ("exp_avg", "exp_avg_sq"):
            name = f"{parameter.names[0]}.{suffix}"
            storage = self._storage(name, size, Role.OPTIMIZER_STATE)
            states.append(self._tensor(dataclasses.replace(value, storage=storage)))
            self.states.append((name, states[-1]))
        states.append(self._scalar(f"{parameter.names[0]}.step", Role.OPTIMIZER_STATE))
        self.states.append((f"{parameter.names[0]}.step", states[-1]))
        tensors = (parameter.tensor, parameter.gradient, *states)
        args = tuple(Ref(t) for t in tensors)
        op = self._op(ADAMW, args, parameter, tensors, mutates=(parameter.tensor, *states))
        return dataclasses.replace(op, kind=OpKind.STEP)

    def _making(
        self, name: str, args: tuple[Arg, ...], parameter: Parameter, inputs: tuple[int, ...], output: int
    ) -> Op:
        """An operation of the clipping that makes a tensor."""
        op = self._op(name, args, parameter, inputs, mutates=())
        written = self.tensors[output].touched_bytes
        kind = OpKind.REDUCTION if "norm" in name else OpKind.ELEMENTWISE
        return dataclasses.replace(op, outputs=(output,), results=(output,), bytes_written=written, kind=kind)

    def _op(
        self,
        name: str,
        args: tuple[Arg, ...],
        parameter: Parameter,
        inputs: tuple[int, ...],
        *,
        mutates: tuple[int, ...],
    ) -> Op:
        """An optimizer-phase operation of a parameter's module."""
        return Op(
            name=name,
            phase=Phase.OPTIMIZER,
            args=args,
            kwargs=(),
            inputs=inputs,
            outputs=(),
            results=(None,) if mutates else (),
            mutates=mutates,
            module=parameter.names[0].rpartition(".")[0],
            kind=OpKind.ELEMENTWISE,
            bytes_read=sum(self.tensors[t].touched_bytes for t in inputs),
            bytes_written=sum(self.tensors[t].touched_bytes for t in mutates),
        )

    def finish(self) -> StepGraph:
        """The expanded graph, checked. Only forward blocks stay runs of consecutive operations."""
        blocks = tuple(
            Block(b.module, b.phase, b.num_ops, tuple(s + start for start in self.starts for s in b.starts))
            for b in self.graph.blocks
            if b.phase is Phase.FORWARD
        )
        graph = dataclasses.replace(
            self.graph,
            storages=tuple(self.storages),
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            inputs=tuple(self.inputs),
            losses=tuple(self.losses),
            blocks=blocks,
            states=tuple(self.states),
        )
        graph.validate()
        return graph
