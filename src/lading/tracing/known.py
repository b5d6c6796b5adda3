"""Values that capture knows although nothing is computed: those that follow from constants, or from the batch at hand.

Models ask for numbers while they run: the largest of some positions, whether a mask masks anything. Where neither a
parameter, a buffer nor a random number takes part, the answer is found by running the operations it depends on. From
constants alone it is the same in every step; from the batch it is not, so whoever asks records a check.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lading.ir.graph import Op, Role, Storage, Tensor
from lading.tracing.interpret import Interpreter

#: Most bytes that may be computed for one answer.
_LIMIT_BYTES = 1 << 28
#: Operations that find infinities and what is not a number, and those that put such answers together.
_ANOMALIES = frozenset({"aten.isinf.default", "aten.isnan.default"})
_JOINING = frozenset({
    "aten.any.default", "aten.any.dim", "aten.bitwise_or.Tensor", "aten.logical_or.default",
}) | _ANOMALIES  # fmt: skip
#: Draws from [0, 1).
_UNIT_DRAWS = frozenset({"aten.rand.default", "aten.rand_like.default"})


class Trace:
    """What has been recorded so far: the tracer's own lists, read only."""

    def __init__(self, storages: list[Storage], tensors: list[Tensor], ops: list[Op]) -> None:
        self.storages, self.tensors, self.ops = storages, tensors, ops
        self.inputs: dict[int, torch.Tensor] = {}

    def values(self, wanted: Sequence[int], *, batch: bool = False) -> list[torch.Tensor] | None:
        """Real values of graph tensors; None if they are not known. To be called with no mode active.

        Args:
            batch: Values that follow from the batch at hand will do.
        """
        needed = {self.tensors[t].storage for t in wanted}
        chosen: list[Op] = []
        for op in reversed(self.ops):
            written = {self.tensors[t].storage for t in (*op.outputs, *op.mutates)}
            if written & needed:
                if op.random:
                    return None
                chosen.append(op)
                needed |= {self.tensors[t].storage for t in op.inputs} | written
        made = {self.tensors[t].storage for op in chosen for t in op.outputs}
        given = {self.tensors[t].storage: t for t in self.inputs} if batch else {}
        if any(self.storages[s].role is not Role.CONSTANT and s not in given for s in needed - made):
            return None
        if sum(self.storages[s].size_bytes for s in needed) > _LIMIT_BYTES:
            return None
        interpreter = Interpreter(self.storages, self.tensors, needed)
        with torch.no_grad():
            for storage in needed & given.keys():
                interpreter.put(given[storage], self.inputs[given[storage]])
            for op in reversed(chosen):
                interpreter.run(op)
            return [interpreter.tensor(t).clone() for t in wanted]

    def is_never(self, tensor: int) -> bool:
        """Whether a tensor asks if a number drawn from [0, 1) lies below zero: a layer that is never dropped."""
        asked = self._writer(tensor)
        limit = None if asked is None or len(asked.args) < 2 else asked.args[1]
        return self.is_draw(tensor) and isinstance(limit, (int, float)) and limit <= 0

    def is_anomaly(self, tensor: int) -> bool:
        """Whether a tensor asks if any number is infinite or not a number, which models do to mend it."""
        asked = self._writer(tensor)
        if asked is None or asked.name not in _JOINING or not asked.inputs:
            return False
        return asked.name in _ANOMALIES or all(map(self.is_anomaly, asked.inputs))

    def is_draw(self, tensor: int) -> bool:
        """Whether a tensor asks if a number drawn from [0, 1) lies below a limit."""
        asked = self._writer(tensor)
        if asked is None or asked.name != "aten.lt.Scalar":
            return False
        drawn = self._writer(asked.inputs[0])
        return drawn is not None and drawn.name in _UNIT_DRAWS

    def _writer(self, tensor: int) -> Op | None:
        storage = self.tensors[tensor].storage
        for op in reversed(self.ops):
            if any(self.tensors[t].storage == storage for t in (*op.outputs, *op.mutates)):
                return op
        return None
